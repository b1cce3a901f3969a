//! The pools: exactly one connection that writes, some that read. The only file that knows deadpool.
//!
//! Invariants: the file is never created here · a connection comes out of a pool without an open transaction · an
//! anchor connection lives as long as the store, so that the write-ahead log is never removed in between and its
//! identity can be compared. May import: deadpool-sqlite, tokio (a blocking task), the rest of the store.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use deadpool_sqlite::{Config, Hook, HookError, InteractError, Manager, Pool, PoolError, Runtime};
use rusqlite::Connection;

use super::connection::{self, Access, Identity, Settings};
use super::error::{Result, StoreError};
use super::migrate;

/// How a store is opened.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    pub path: PathBuf,
    /// How long a statement waits for a lock of another process.
    pub busy_timeout: Duration,
    /// Connections that read; at least 1.
    pub readers: usize,
    /// Pages of WAL after which a commit of ours checkpoints; `None`: never (a replicator does it).
    pub autocheckpoint: Option<u32>,
}

impl StoreOptions {
    /// The defaults for a file.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        let Settings { busy_timeout, autocheckpoint } = Settings::default();
        Self { path: path.into(), busy_timeout, readers: 2, autocheckpoint }
    }

    fn settings(&self) -> Settings {
        Settings { busy_timeout: self.busy_timeout, autocheckpoint: self.autocheckpoint }
    }
}

/// The database of one outbox: cheap to clone, shared by everybody in the daemon.
#[derive(Clone, Debug)]
pub struct Store(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    path: PathBuf,
    settings: Settings,
    writer: Pool,
    readers: Pool,
    file: Identity,
    wal: Mutex<Option<Identity>>,
    notes: Vec<String>,
    /// Keeps the write-ahead log alive; never used for a statement after the store is open.
    _anchor: Mutex<Connection>,
}

impl Store {
    /// Opens the file, which must have our tables; an older schema of ours is brought up to date.
    ///
    /// # Errors
    /// [`StoreError::NoFile`], [`StoreError::NoTables`], [`StoreError::Classic`], [`StoreError::Newer`], and what
    /// [`connection::open`] answers.
    pub async fn open(options: &StoreOptions) -> Result<Self> {
        let options = options.clone();
        tokio::task::spawn_blocking(move || Self::open_blocking(&options))
            .await
            .map_err(|e| StoreError::Crashed(format!("while opening the database: {e}")))?
    }

    fn open_blocking(options: &StoreOptions) -> Result<Self> {
        let settings = options.settings();
        // the same file whatever becomes of the working directory or of a symbolic link on the way
        let path =
            std::fs::canonicalize(&options.path).map_err(|_| StoreError::NoFile { path: options.path.clone() })?;
        let mut opened = connection::open(&path, Access::Write, &settings)?;
        opened.notes.extend(migrate::bring_up(&mut opened.conn, &path)?);
        let file = Identity::of(&path).ok_or_else(|| StoreError::NoFile { path: path.clone() })?;
        Ok(Self(Arc::new(Inner {
            writer: pool(&path, Access::Write, settings, 1)?,
            readers: pool(&path, Access::Read, settings, options.readers.max(1))?,
            path,
            settings,
            file,
            wal: Mutex::new(None),
            notes: opened.notes,
            _anchor: Mutex::new(opened.conn),
        })))
    }

    /// The canonical path of the file.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// What had to be done to the file to use it, in words for the log.
    pub fn notes(&self) -> &[String] {
        &self.0.notes
    }

    /// Runs `job` on a connection that reads, on a worker thread.
    pub async fn read<T, F>(&self, job: F) -> Result<T>
    where
        T: Send + 'static,
        F: FnOnce(&Connection) -> Result<T> + Send + 'static,
    {
        run(&self.0.readers, self.0.settings.busy_timeout, move |conn| job(conn)).await
    }

    /// Runs `job` on the one connection that writes, on a worker thread. For the writer actor only: everybody else
    /// hands it a job. A dropped future does not stop the job.
    pub async fn with_writer<T, F>(&self, job: F) -> Result<T>
    where
        T: Send + 'static,
        F: FnOnce(&mut Connection) -> Result<T> + Send + 'static,
    {
        run(&self.0.writer, self.0.settings.busy_timeout, job).await
    }

    /// Compares what stands at the path, and at the path of its write-ahead log, with what was opened. Two stats,
    /// about 2 us: before write transactions and now and then.
    ///
    /// # Errors
    /// [`StoreError::Replaced`]: every write from now on would go to a file that nobody else sees.
    pub fn assert_in_place(&self) -> Result<()> {
        let inner = &*self.0;
        let replaced = || StoreError::Replaced { path: inner.path.clone() };
        if Identity::of(&inner.path) != Some(inner.file) {
            return Err(replaced());
        }
        let now = Identity::of(&connection::sidecar(&inner.path, "-wal"));
        let mut known = inner.wal.lock().unwrap_or_else(PoisonError::into_inner);
        match (*known, now) {
            (None, found) => *known = found,
            (Some(before), found) if found != Some(before) => return Err(replaced()),
            (Some(_), _) => {}
        }
        Ok(())
    }

    /// Bytes of the write-ahead log, by stat; 0 where there is none.
    pub fn wal_bytes(&self) -> u64 {
        std::fs::metadata(connection::sidecar(&self.0.path, "-wal")).map_or(0, |m| m.len())
    }
}

fn pool(path: &Path, access: Access, settings: Settings, size: usize) -> Result<Pool> {
    // deadpool's manager opens with CREATE; the mode in the URI overrules it
    let manager = Manager::from_config(&Config::new(connection::uri(path, access)), Runtime::Tokio1);
    Pool::builder(manager)
        .max_size(size)
        .runtime(Runtime::Tokio1)
        .post_create(Hook::async_fn(move |wrapper, _| {
            Box::pin(async move {
                wrapper
                    .interact(move |conn| connection::configure(conn, access, &settings))
                    .await
                    .map_err(|e| HookError::message(e.to_string()))?
                    .map_err(|e| HookError::message(super::error::chain(&e)))
            })
        }))
        .pre_recycle(Hook::async_fn(|wrapper, _| {
            Box::pin(async move {
                // a leaked transaction would come back holding the lock; a poisoned one is discarded by the manager
                wrapper
                    .interact(|conn| if conn.is_autocommit() { Ok(()) } else { conn.execute_batch("ROLLBACK") })
                    .await
                    .map_err(|e| HookError::message(e.to_string()))?
                    .map_err(HookError::Backend)
            })
        }))
        .build()
        .map_err(|e| StoreError::Crashed(format!("cannot make the connection pool: {e}")))
}

async fn run<T, F>(pool: &Pool, patience: Duration, job: F) -> Result<T>
where
    T: Send + 'static,
    F: FnOnce(&mut Connection) -> Result<T> + Send + 'static,
{
    let conn = pool.get().await.map_err(|error| match error {
        PoolError::Backend(cause) => StoreError::at("open a connection", cause),
        PoolError::PostCreateHook(HookError::Backend(cause)) => StoreError::at("set a connection up", cause),
        other => StoreError::Crashed(other.to_string()),
    })?;
    let answer = conn
        .interact(move |conn| {
            connection::set_patience(patience);
            job(conn)
        })
        .await;
    match answer {
        Ok(answer) => answer,
        Err(InteractError::Panic(payload)) => {
            let text = payload
                .downcast_ref::<&str>()
                .map(|s| (*s).to_owned())
                .or_else(|| payload.downcast_ref::<String>().cloned())
                .unwrap_or_else(|| "a panic without a text".into());
            Err(StoreError::Crashed(text))
        }
        Err(InteractError::Cancelled) => Err(StoreError::Crashed("the runtime is shutting down".into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::error::Step;
    use crate::store::schema;

    async fn fresh() -> (tempfile::TempDir, Store) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.db");
        schema::init(&path, "test", false).unwrap();
        let options = StoreOptions { busy_timeout: Duration::from_millis(100), ..StoreOptions::new(path) };
        let store = Store::open(&options).await.unwrap();
        (dir, store)
    }

    #[tokio::test]
    async fn a_file_without_our_tables_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.db");
        let missing = Store::open(&StoreOptions::new(&path)).await.unwrap_err();
        assert!(matches!(missing, StoreError::NoFile { .. }), "{missing:?}");
        Connection::open(&path).unwrap().execute_batch("CREATE TABLE t (a)").unwrap();
        let error = Store::open(&StoreOptions::new(&path)).await.unwrap_err();
        assert!(matches!(error, StoreError::NoTables { .. }), "{error:?}");
    }

    #[tokio::test]
    async fn a_leaked_transaction_does_not_keep_the_lock() {
        let (_dir, store) = fresh().await;
        store.with_writer(|conn| conn.execute_batch("BEGIN IMMEDIATE").step("begin")).await.unwrap();
        store.with_writer(|conn| conn.execute_batch("BEGIN IMMEDIATE; COMMIT").step("begin again")).await.unwrap();
    }

    #[tokio::test]
    async fn a_panic_costs_one_job_only() {
        let (_dir, store) = fresh().await;
        let error = store.with_writer(|_| -> Result<()> { panic!("job of {}", "doom") }).await.unwrap_err();
        assert!(matches!(&error, StoreError::Crashed(text) if text == "job of doom"), "{error:?}");
        store.with_writer(|conn| conn.execute_batch("BEGIN IMMEDIATE; COMMIT").step("begin")).await.unwrap();
    }

    #[tokio::test]
    async fn a_busy_lock_is_told_after_the_time_asked_for() {
        let (_dir, store) = fresh().await;
        let other = Connection::open(store.path()).unwrap();
        other.execute_batch("BEGIN IMMEDIATE").unwrap();
        let error = store.with_writer(|conn| conn.execute_batch("BEGIN IMMEDIATE").step("begin")).await.unwrap_err();
        assert!(matches!(error, StoreError::Busy(_)), "{error:?}");
        // readers are not held up
        store
            .read(|conn| conn.query_row("SELECT count(*) FROM outbox_events", [], |_| Ok(())).step("read"))
            .await
            .unwrap();
    }

    #[tokio::test]
    async fn a_replaced_file_and_a_removed_log_are_noticed() {
        let (dir, store) = fresh().await;
        store.with_writer(|conn| conn.execute_batch("BEGIN IMMEDIATE; COMMIT").step("begin")).await.unwrap();
        store.assert_in_place().unwrap();
        store
            .with_writer(|conn| conn.execute_batch("INSERT INTO outboxd_meta VALUES ('x', 1)").step("write"))
            .await
            .unwrap();
        store.assert_in_place().unwrap();
        std::fs::remove_file(connection::sidecar(store.path(), "-wal")).unwrap();
        assert!(matches!(store.assert_in_place(), Err(StoreError::Replaced { .. })));

        let (dir2, store) = fresh().await;
        store.assert_in_place().unwrap();
        std::fs::rename(store.path(), dir2.path().join("away.db")).unwrap();
        assert!(matches!(store.assert_in_place(), Err(StoreError::Replaced { .. })));
        std::fs::write(store.path(), "").unwrap();
        assert!(matches!(store.assert_in_place(), Err(StoreError::Replaced { .. })));
        drop(dir);
    }
}
