//! Bringing a file to this program's schema: older ones of ours step by step, a classic one by `takeover.rs`.
//!
//! Invariants: one transaction, all or nothing · a file that needs nothing is left alone, so that it can be run again ·
//! what is refused is refused before the first write. May import: the rest of the store, rusqlite.

use std::path::Path;
use std::time::Duration;

use rusqlite::{Connection, Transaction, TransactionBehavior};

use super::connection::{self, Access, Settings};
use super::error::{Result, Step, StoreError};
use super::schema::{self, Layout};
use super::takeover::{self, Plan};
use super::{audit, ddl};

/// What an operator chose.
#[derive(Clone, Debug, Default)]
pub struct MigrateOptions {
    /// Rows that failed before outboxd came hold their aggregate (`--failed hold`).
    pub failed_hold: bool,
    /// Adds the `outbox` view of Debezium's layout (`--compat debezium`).
    pub debezium: bool,
    /// Identity of a file that is taken over; empty: one is made.
    pub source: String,
    /// For the audit row.
    pub actor: String,
}

/// What a migration did, or would do.
#[derive(Clone, Debug)]
pub struct Migration {
    pub path: std::path::PathBuf,
    pub from: Layout,
    /// What was found in a classic file, `None` for a file of ours.
    pub plan: Option<Plan>,
    /// What was done, in words; empty where nothing was needed.
    pub done: Vec<String>,
    /// What a person should know; also what had to be done to the file.
    pub notes: Vec<String>,
    /// How long the write lock was held; `None` for a dry run.
    pub locked: Option<Duration>,
}

impl Migration {
    fn of(path: &Path, from: Layout) -> Self {
        Self { path: path.into(), from, plan: None, done: Vec::new(), notes: Vec::new(), locked: None }
    }
}

/// A step from one version of our schema to the next.
pub(super) struct Upgrade {
    /// The version that the step leads to; they are consecutive and end at [`ddl::VERSION`].
    pub(super) to: i64,
    pub(super) run: fn(&Transaction<'_>) -> Result<()>,
}

/// Version 1 is the first.
const UPGRADES: &[Upgrade] = &[];

/// Brings the file up to date.
///
/// # Errors
/// [`StoreError::NoFile`], [`StoreError::NoTables`], [`StoreError::Newer`], [`StoreError::Foreign`], or
/// [`StoreError::Refused`] with every reason; the file is as it was then.
pub fn migrate(path: &Path, options: &MigrateOptions) -> Result<Migration> {
    let settings = Settings { busy_timeout: Duration::from_secs(30), ..Settings::default() };
    // not yet in WAL mode: what is refused must leave the file as it is
    let mut conn = connection::open_as_it_is(path, Access::Write, &settings)?;
    // children with ON DELETE CASCADE would go with the old table, and RENAME would rewrite what names it; both are
    // ignored inside a transaction. With a small cache every random page of an index would be written many times
    conn.execute_batch("PRAGMA foreign_keys = OFF; PRAGMA legacy_alter_table = ON; PRAGMA cache_size = -262144")
        .step("prepare the migration")?;
    let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate).step("take the write lock")?;
    let began = std::time::Instant::now();
    let mut migration = Migration::of(path, schema::inspect(&tx)?);
    match migration.from {
        Layout::Classic => {
            let plan = takeover::inventory(&tx, path)?;
            refuse(&plan)?;
            migration.done.extend(takeover::run(&tx, &plan, options)?);
            migration.plan = Some(plan);
        }
        Layout::Ours { version } if version <= ddl::VERSION => {
            migration.done.extend(upgrade(&tx, version, UPGRADES, ddl::VERSION)?);
        }
        Layout::Ours { .. } | Layout::Empty | Layout::Foreign { .. } => schema::require(&tx, path)?,
    }
    if options.debezium && add_debezium(&tx)? {
        migration.done.push("the view outbox in Debezium's layout was added".into());
    }
    if !migration.done.is_empty() {
        audit::write(&tx, &options.actor, "db migrate", &path.display().to_string(), &migration.done.join("; "))?;
    }
    tx.commit().step("commit the migration")?;
    migration.locked = Some(began.elapsed());
    drop(conn);
    match connection::open(path, Access::Write, &settings) {
        Ok(opened) => migration.notes.extend(opened.notes),
        // it is done; the daemon converts the file when it starts, or says the same
        Err(error) => migration.notes.push(super::error::chain(&error)),
    }
    Ok(migration)
}

/// What [`migrate`] would do; reads only.
///
/// # Errors
/// The same as [`migrate`].
pub fn examine(path: &Path, options: &MigrateOptions) -> Result<Migration> {
    let conn = connection::open(path, Access::Read, &Settings::default())?.conn;
    let tx = conn.unchecked_transaction().step("read the file")?;
    let mut migration = Migration::of(path, schema::inspect(&tx)?);
    match migration.from {
        Layout::Classic => {
            let plan = takeover::inventory(&tx, path)?;
            refuse(&plan)?;
            migration.plan = Some(plan);
        }
        Layout::Ours { version } if version <= ddl::VERSION => {}
        Layout::Ours { .. } | Layout::Empty | Layout::Foreign { .. } => schema::require(&tx, path)?,
    }
    if options.debezium && has_debezium(&tx)? {
        migration.notes.push("the view outbox is there already".into());
    }
    Ok(migration)
}

fn refuse(plan: &Plan) -> Result<()> {
    if plan.refusals.is_empty() {
        return Ok(());
    }
    Err(StoreError::Refused(format!(
        "the file cannot be taken over as it is, nothing was changed: {}",
        plan.refusals.join("; ")
    )))
}

/// Runs the steps between `from` and `known`, and writes the version.
pub(super) fn upgrade(tx: &Transaction<'_>, from: i64, steps: &[Upgrade], known: i64) -> Result<Vec<String>> {
    let mut done = Vec::new();
    for step in steps.iter().filter(|s| s.to > from && s.to <= known) {
        (step.run)(tx)?;
        done.push(format!("schema version {} was brought to {}", step.to - 1, step.to));
    }
    if from < known {
        tx.execute("UPDATE outboxd_meta SET value = ?1 WHERE key = 'schema_version'", [known])
            .step("write the version")?;
    }
    Ok(done)
}

/// What the daemon does at start: our tables must be there, older ones are brought to this version.
/// Answers what was done, in words.
pub fn bring_up(conn: &mut Connection, path: &Path) -> Result<Vec<String>> {
    let Layout::Ours { version } = schema::inspect(conn)? else {
        return schema::require(conn, path).map(|()| Vec::new());
    };
    if version >= ddl::VERSION {
        return schema::require(conn, path).map(|()| Vec::new());
    }
    let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate).step("take the write lock")?;
    let done = upgrade(&tx, version, UPGRADES, ddl::VERSION)?;
    tx.commit().step("commit the migration")?;
    Ok(done)
}

/// True where our view is there; an error where something else has its name.
fn has_debezium(conn: &Connection) -> Result<bool> {
    let found = schema::stored_sql(conn, ddl::DEBEZIUM_VIEW.name)?;
    match found {
        None => Ok(false),
        Some((kind, sql))
            if kind == "view" && super::sql_text::normal(&sql) == super::sql_text::normal(ddl::DEBEZIUM_VIEW.sql) =>
        {
            Ok(true)
        }
        Some((kind, _)) => Err(StoreError::Refused(format!(
            "the file has a {kind} named outbox already, so the view of Debezium's layout cannot be added; rename it first"
        ))),
    }
}

fn add_debezium(tx: &Transaction<'_>) -> Result<bool> {
    if has_debezium(tx)? {
        return Ok(false);
    }
    for object in [ddl::DEBEZIUM_VIEW, ddl::DEBEZIUM_INSERT, ddl::DEBEZIUM_DELETE] {
        tx.execute_batch(object.sql).step("add the view outbox")?;
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn add_column(tx: &Transaction<'_>) -> Result<()> {
        tx.execute_batch("ALTER TABLE outboxd_audit ADD COLUMN extra").step("add a column")
    }

    fn fail(_: &Transaction<'_>) -> Result<()> {
        Err(StoreError::Refused("no".into()))
    }

    fn fresh() -> (tempfile::TempDir, Connection) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.db");
        schema::init(&path, "test", false).unwrap();
        let conn = connection::open(&path, Access::Write, &Settings::default()).unwrap().conn;
        (dir, conn)
    }

    #[test]
    fn upgrades_run_in_order_from_the_version_found() {
        let (_dir, mut conn) = fresh();
        let steps =
            [Upgrade { to: 1, run: fail }, Upgrade { to: 2, run: add_column }, Upgrade { to: 3, run: |_| Ok(()) }];
        let tx = conn.transaction().unwrap();
        assert_eq!(upgrade(&tx, 1, &steps, 3).unwrap().len(), 2);
        assert_eq!(schema::meta_get(&tx, "schema_version").unwrap().as_deref(), Some("3"));
        assert_eq!(upgrade(&tx, 3, &steps, 3).unwrap().len(), 0);
        assert!(tx.prepare("SELECT extra FROM outboxd_audit").is_ok());
    }

    #[test]
    fn a_failed_upgrade_leaves_the_version() {
        let (_dir, mut conn) = fresh();
        let tx = conn.transaction().unwrap();
        let steps = [Upgrade { to: 2, run: add_column }, Upgrade { to: 3, run: fail }];
        assert!(upgrade(&tx, 1, &steps, 3).is_err());
        drop(tx);
        assert_eq!(schema::meta_get(&conn, "schema_version").unwrap().as_deref(), Some("1"));
        assert!(conn.prepare("SELECT extra FROM outboxd_audit").is_err());
    }

    #[test]
    fn the_steps_lead_to_the_version_of_the_ddl() {
        let leads_to = UPGRADES.last().map_or(1, |u| u.to);
        assert_eq!(leads_to, ddl::VERSION);
    }
}
