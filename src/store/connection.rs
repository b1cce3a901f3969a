//! Opening the database file: never creating it by accident, never on a file that would lose data.
//!
//! Invariants: only [`Access::Create`] makes a file · every connection has the busy handler of this file, mmap off and
//! `synchronous=FULL` until somebody says otherwise · a connection that writes is in WAL mode · foreign keys that the
//! application declared are enforced. May import: rusqlite, rustix (the kind of the file system), `std::fs::metadata`
//! (a stat is safe; opening the file by anything but SQLite is not).

use std::cell::Cell;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rusqlite::{Connection, OpenFlags};

use super::error::{Fault, Result, Step, StoreError};

/// What a connection may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reads only; the file must exist.
    Read,
    /// Reads and writes; the file must exist.
    Write,
    /// Like [`Access::Write`], and makes the file where there is none.
    Create,
}

/// `PRAGMA synchronous` of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Synchronous {
    /// A commit is on disk when it returns.
    #[default]
    Full,
    /// A commit survives a crash of the process, not a power cut.
    Normal,
}

/// Settings of one connection.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// How long a statement waits for another process's lock.
    pub busy_timeout: Duration,
    /// Pages of WAL after which a commit of this connection checkpoints; `None`: never (a replicator does it).
    pub autocheckpoint: Option<u32>,
}

impl Default for Settings {
    fn default() -> Self {
        Self { busy_timeout: Duration::from_secs(5), autocheckpoint: Some(1_000) }
    }
}

/// A new connection, and what had to be done to the file to use it, in words for the log.
#[derive(Debug)]
pub struct Opened {
    pub conn: Connection,
    pub notes: Vec<String>,
}

/// Which file stands at a path: device and inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    pub dev: u64,
    pub ino: u64,
}

impl Identity {
    /// By `stat`, which does not touch SQLite's locks. `None` where nothing is there.
    pub fn of(path: &Path) -> Option<Self> {
        std::fs::metadata(path).ok().map(|m| Self { dev: m.dev(), ino: m.ino() })
    }
}

/// The path of a sidecar: `suffix` is `-wal` or `-shm`.
pub fn sidecar(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// Opens the database at `path`.
///
/// # Errors
/// [`StoreError::NoFile`], [`StoreError::NotADatabase`], [`StoreError::Unsuitable`] (network file system, hard link,
/// rollback journal that cannot be converted now), [`StoreError::ReadOnly`], [`StoreError::Denied`], ...
pub fn open(path: &Path, access: Access, settings: &Settings) -> Result<Opened> {
    let existed = Identity::of(path);
    let conn = open_as_it_is(path, access, settings)?;
    let mut notes = Vec::new();
    if access != Access::Read && to_wal(&conn, path)? && existed.is_some() {
        notes.push(format!(
            "{} was in rollback-journal mode and is now in WAL mode; programs that use it need no change",
            path.display()
        ));
    }
    Ok(Opened { conn, notes })
}

/// Like [`open`], in the journal mode that the file has.
pub(super) fn open_as_it_is(path: &Path, access: Access, settings: &Settings) -> Result<Connection> {
    let existed = Identity::of(path);
    if existed.is_none() && access != Access::Create {
        return Err(StoreError::NoFile { path: path.into() });
    }
    if existed.is_some() {
        suitable(path)?;
    }
    if !path.parent().is_none_or(|p| p.as_os_str().is_empty() || p.is_dir()) {
        return Err(StoreError::Unsuitable {
            path: path.into(),
            why: "its directory does not exist; make it first".into(),
        });
    }
    let connect = |access| {
        let conn = Connection::open_with_flags(uri(path, access), flags(access)).step("open the database")?;
        configure(&conn, access, settings).map(|()| conn)
    };
    let conn = match connect(access) {
        // a program died in the middle of a transaction; a connection that may write takes it back, as any other would
        Err(StoreError::ReadOnly(fault)) if access == Access::Read && needs_recovery(&fault) => {
            connect(Access::Write).and_then(|_| connect(access))
        }
        other => other,
    }
    .map_err(|e| e.of_file(path))?;
    suitable(path)?;
    if existed.is_some() && existed != Identity::of(path) {
        return Err(StoreError::Replaced { path: path.into() });
    }
    Ok(conn)
}

/// `SQLITE_READONLY_RECOVERY` or `SQLITE_READONLY_ROLLBACK`.
fn needs_recovery(fault: &Fault) -> bool {
    use rusqlite::ffi::{SQLITE_READONLY_RECOVERY, SQLITE_READONLY_ROLLBACK};
    matches!(&*fault.cause, rusqlite::Error::SqliteFailure(e, _)
        if [SQLITE_READONLY_RECOVERY, SQLITE_READONLY_ROLLBACK].contains(&e.extended_code))
}

/// The `file:` URI of a path, which alone keeps SQLite from creating a missing file wherever it is opened.
pub(crate) fn uri(path: &Path, access: Access) -> String {
    let mut uri = String::from(if path.is_absolute() { "file://" } else { "file:" });
    for byte in path.as_os_str().as_bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'/' | b'-' | b'_' | b'.' | b'~' => uri.push(char::from(*byte)),
            _ => uri.push_str(&format!("%{byte:02X}")),
        }
    }
    uri.push_str(match access {
        Access::Read => "?mode=ro",
        Access::Write => "?mode=rw",
        Access::Create => "?mode=rwc",
    });
    uri
}

fn flags(access: Access) -> OpenFlags {
    let mode = match access {
        Access::Read => OpenFlags::SQLITE_OPEN_READ_ONLY,
        Access::Write => OpenFlags::SQLITE_OPEN_READ_WRITE,
        Access::Create => OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE,
    };
    mode | OpenFlags::SQLITE_OPEN_URI | OpenFlags::SQLITE_OPEN_NO_MUTEX
}

/// Settings that every connection of ours has; also for connections that a pool has opened.
pub(crate) fn configure(conn: &Connection, access: Access, settings: &Settings) -> Result<()> {
    const STEP: &str = "set the connection up";
    set_patience(settings.busy_timeout);
    conn.busy_handler(Some(wait_for_lock)).step(STEP)?;
    conn.set_prepared_statement_cache_capacity(128);
    let pages = settings.autocheckpoint.unwrap_or(0);
    conn.execute_batch(&format!(
        "PRAGMA mmap_size = 0; PRAGMA temp_store = MEMORY; PRAGMA foreign_keys = ON; PRAGMA wal_autocheckpoint = {pages}; PRAGMA query_only = {};",
        if access == Access::Read { "ON" } else { "OFF" }
    ))
    .step(STEP)?;
    set_synchronous(conn, Synchronous::Full)?;
    super::outbox::register(conn)?;
    // the first read of the file: here a file that is no database is told apart
    conn.query_row("PRAGMA schema_version", [], |_| Ok(())).step("read the database")
}

/// Sets the durability of the commits that follow. Not inside a transaction: SQLite ignores it there.
pub fn set_synchronous(conn: &Connection, level: Synchronous) -> Result<()> {
    let sql = match level {
        Synchronous::Full => "PRAGMA synchronous = FULL",
        Synchronous::Normal => "PRAGMA synchronous = NORMAL",
    };
    conn.execute_batch(sql).step("set the durability of commits")
}

/// Makes sure that the file is in WAL mode; true where it had to be converted.
fn to_wal(conn: &Connection, path: &Path) -> Result<bool> {
    const STEP: &str = "read the journal mode";
    let mode: String = conn.query_row("PRAGMA journal_mode", [], |r| r.get(0)).step(STEP)?;
    if mode.eq_ignore_ascii_case("wal") {
        return Ok(false);
    }
    let unsuitable = |why: &str| StoreError::Unsuitable { path: path.into(), why: why.into() };
    match conn
        .query_row("PRAGMA journal_mode = WAL", [], |r| r.get::<_, String>(0))
        .step("convert the file to WAL mode")
    {
        Ok(now) if now.eq_ignore_ascii_case("wal") => Ok(true),
        Ok(_) => Err(unsuitable("its file system has no shared memory, which WAL mode needs; move it to a local disk")),
        Err(StoreError::Busy(_)) => Err(unsuitable(
            "it is in rollback-journal mode and in use, so it cannot be converted now; stop the programs that hold it \
             open for a moment, or run `PRAGMA journal_mode=WAL` in one of them",
        )),
        Err(other) => Err(other),
    }
}

/// Refuses a file whose locks or whose write-ahead log would not be shared by all who write it.
fn suitable(path: &Path) -> Result<()> {
    let unsuitable = |why: String| Err(StoreError::Unsuitable { path: path.into(), why });
    let Ok(meta) = std::fs::metadata(path) else {
        return Err(StoreError::NoFile { path: path.into() });
    };
    if !meta.is_file() {
        return unsuitable("it is not a regular file".into());
    }
    if meta.nlink() > 1 {
        return unsuitable(format!(
            "it has {} hard links, and a program that opens it under another name would use another write-ahead log; \
             keep one name (a symbolic link is fine)",
            meta.nlink()
        ));
    }
    if let Some(kind) = rustix::fs::statfs(path).ok().and_then(|s| network_file_system(s.f_type as u64 & 0xffff_ffff)) {
        return unsuitable(format!(
            "it is on a network file system ({kind}), where locks and shared memory do not hold; move it to a local disk"
        ));
    }
    Ok(())
}

/// By the magic numbers of statfs(2).
fn network_file_system(magic: u64) -> Option<&'static str> {
    Some(match magic {
        0x6969 => "NFS",
        0x517b | 0xfe53_4d42 | 0xff53_4d42 => "SMB",
        0x5346_414f | 0x6b41_4653 => "AFS",
        0x00c3_6400 => "Ceph",
        0x0bd0_0bd0 => "Lustre",
        0x7375_7245 => "Coda",
        0x564c => "NCP",
        0x0116_1970 => "GFS2",
        0x7461_636f => "OCFS2",
        _ => return None,
    })
}

thread_local! {
    /// How long this thread waits for a foreign lock, and since when it does.
    static PATIENCE: Cell<Duration> = const { Cell::new(Duration::from_secs(5)) };
    static WAITING_SINCE: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// How long statements that run on this thread wait for a lock from now on. The handler of SQLite is a plain function,
/// so its limit lives with the thread: whoever runs a closure on a worker thread sets it there first.
pub(crate) fn set_patience(limit: Duration) {
    PATIENCE.set(limit);
}

/// SQLite's default handler backs off to 100 ms and starves beside a busy writer (1 turn in 4.8 s where this one had
/// 296); after a while the sleep grows a little, so that a lock held for minutes costs no CPU.
fn wait_for_lock(calls: i32) -> bool {
    if calls == 0 {
        WAITING_SINCE.set(Some(Instant::now()));
    }
    let waited = WAITING_SINCE.get().map_or(Duration::ZERO, |since| since.elapsed());
    if waited >= PATIENCE.get() {
        return false;
    }
    std::thread::sleep(Duration::from_micros(match calls {
        ..250 => 200,
        250..1_000 => 500,
        _ => 1_000,
    }));
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dir() -> tempfile::TempDir {
        tempfile::tempdir().unwrap()
    }

    fn try_open(path: &Path, access: Access) -> Result<Opened> {
        open(path, access, &Settings { busy_timeout: Duration::from_millis(50), ..Settings::default() })
    }

    #[test]
    fn a_missing_file_is_not_created() {
        let dir = dir();
        let path = dir.path().join("no.db");
        for access in [Access::Read, Access::Write] {
            assert!(matches!(try_open(&path, access), Err(StoreError::NoFile { .. })));
            assert!(!path.exists());
        }
    }

    #[test]
    fn a_missing_directory_is_told_and_not_made() {
        let dir = dir();
        let path = dir.path().join("no/such/a.db");
        let error = try_open(&path, Access::Create).unwrap_err();
        assert!(matches!(&error, StoreError::Unsuitable { why, .. } if why.contains("directory")), "{error:?}");
        assert!(matches!(try_open(&path, Access::Write), Err(StoreError::NoFile { .. })));
    }

    #[test]
    fn a_path_with_odd_characters_is_opened_as_it_stands() {
        let dir = dir();
        let path = dir.path().join("a b?mode=memory#100%é.db");
        try_open(&path, Access::Create).unwrap().conn.execute_batch("CREATE TABLE t (a)").unwrap();
        assert!(path.exists());
        let opened = try_open(&path, Access::Write).unwrap();
        opened.conn.execute("INSERT INTO t VALUES (1)", []).unwrap();
    }

    #[test]
    fn a_file_that_is_no_database_is_told() {
        let dir = dir();
        let path = dir.path().join("text.db");
        std::fs::write(
            &path,
            "a letter to the editor, long enough to have a header of a hundred bytes, and some more of it",
        )
        .unwrap();
        for access in [Access::Read, Access::Write] {
            let error = try_open(&path, access).unwrap_err();
            assert!(matches!(error, StoreError::NotADatabase { .. }), "{error:?}");
        }
    }

    #[test]
    fn a_rollback_journal_is_converted_and_said() {
        let dir = dir();
        let path = dir.path().join("old.db");
        Connection::open(&path).unwrap().execute_batch("CREATE TABLE t (a)").unwrap();
        let opened = try_open(&path, Access::Write).unwrap();
        assert_eq!(opened.notes.len(), 1, "{:?}", opened.notes);
        let mode: String = opened.conn.query_row("PRAGMA journal_mode", [], |r| r.get(0)).unwrap();
        assert_eq!(mode, "wal");
        drop(opened);
        assert!(try_open(&path, Access::Write).unwrap().notes.is_empty());
    }

    #[test]
    fn a_rollback_journal_in_use_is_refused_with_what_to_do() {
        let dir = dir();
        let path = dir.path().join("old.db");
        let other = Connection::open(&path).unwrap();
        other.execute_batch("CREATE TABLE t (a); BEGIN IMMEDIATE; INSERT INTO t VALUES (1)").unwrap();
        let error = try_open(&path, Access::Write).unwrap_err();
        assert!(matches!(&error, StoreError::Unsuitable { why, .. } if why.contains("rollback-journal")), "{error:?}");
    }

    #[test]
    fn hard_links_and_directories_are_refused() {
        let dir = dir();
        let path = dir.path().join("a.db");
        drop(try_open(&path, Access::Create).unwrap());
        std::fs::hard_link(&path, dir.path().join("b.db")).unwrap();
        let error = try_open(&path, Access::Write).unwrap_err();
        assert!(matches!(&error, StoreError::Unsuitable { why, .. } if why.contains("hard links")), "{error:?}");
        assert!(matches!(try_open(dir.path(), Access::Write), Err(StoreError::Unsuitable { .. })));
    }

    #[test]
    fn a_lock_is_waited_for_as_long_as_asked_and_no_longer() {
        let dir = dir();
        let path = dir.path().join("a.db");
        let one = try_open(&path, Access::Create).unwrap().conn;
        one.execute_batch("BEGIN IMMEDIATE").unwrap();
        let two = try_open(&path, Access::Write).unwrap().conn;
        let began = Instant::now();
        let error = two.execute_batch("BEGIN IMMEDIATE").step("begin").unwrap_err();
        assert!(matches!(error, StoreError::Busy(_)), "{error:?}");
        assert!((50..3_000).contains(&began.elapsed().as_millis()), "{:?}", began.elapsed());
    }

    #[test]
    fn a_reader_cannot_write() {
        let dir = dir();
        let path = dir.path().join("a.db");
        let _writer = try_open(&path, Access::Create).unwrap();
        let reader = try_open(&path, Access::Read).unwrap().conn;
        let error = reader.execute_batch("CREATE TABLE t (a)").step("write").unwrap_err();
        assert!(matches!(error, StoreError::ReadOnly(_)), "{error:?}");
    }
}
