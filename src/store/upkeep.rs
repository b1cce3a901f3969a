//! The file as a whole: checking it, copying it, taking our tables out of it again.
//!
//! May import: the rest of the store, rusqlite, `std::fs` for the finished copy only.

use std::path::{Path, PathBuf};

use rusqlite::{Connection, TransactionBehavior};
use serde::Serialize;

use super::connection::{self, Access, Settings};
use super::error::{Result, Step, StoreError};
use super::sql_text::quote;
use super::{audit, ddl, dependents, schema};

/// How a check went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    Ok,
    Warn,
    Fail,
}

/// One check of the file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    pub check: &'static str,
    pub level: Level,
    /// What was found, and what to do where something is wrong.
    pub detail: String,
}

/// Checks the file: SQLite's own integrity check (it reads all of it), our schema, foreign keys, impossible rows.
///
/// # Errors
/// Those of [`schema::require`], and of reading at all.
pub fn check(path: &Path) -> Result<Vec<Finding>> {
    const STEP: &str = "check the database";
    let conn = connection::open(path, Access::Read, &Settings::default())?.conn;
    schema::require(&conn, path)?;
    let mut findings = vec![integrity(&conn)?, mode(&conn)?];
    let different = schema::differences(&conn)?;
    findings.push(Finding {
        check: "schema",
        level: if different.is_empty() { Level::Ok } else { Level::Fail },
        detail: if different.is_empty() { format!("version {}", ddl::VERSION) } else { different.join("; ") },
    });
    let number = |sql: &str| conn.query_row(sql, [], |r| r.get::<_, i64>(0)).step(STEP);
    let rows: [(&'static str, Level, &str, &str); 5] = [
        (
            "foreign keys",
            Level::Warn,
            "SELECT count(*) FROM pragma_foreign_key_check",
            "rows break a foreign key of the application",
        ),
        (
            "failed events",
            Level::Fail,
            "SELECT count(*) FROM outbox_events INDEXED BY outboxd_failed WHERE status = 'failed' AND coalesce(last_error, '') = ''",
            "failed events have no reason",
        ),
        (
            "pending events",
            Level::Fail,
            "SELECT count(*) FROM outbox_events INDEXED BY idx_outbox_delivery WHERE status = 'pending'
                AND (typeof(aggregate_version) <> 'integer' OR typeof(schema_version) <> 'integer' OR event_id = ''
                    OR aggregate_type = '' OR aggregate_id = '' OR event_type = '')",
            "pending events can never be published: they came past the guards; correct or discard them",
        ),
        (
            "published events",
            Level::Warn,
            "SELECT count(*) FROM outbox_events WHERE status = 'published' AND stream_seq IS NULL",
            "published events are unproven: others published them, so nothing tells where they are stored",
        ),
        (
            "seq",
            Level::Fail,
            "SELECT coalesce((SELECT max(seq) FROM outbox_events), 0)
                > coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'outbox_events'), 0)",
            "the counter of seq is behind the rows, so numbers would be used again",
        ),
    ];
    for (check, level, sql, what) in rows {
        let count = number(sql)?;
        findings.push(if count == 0 {
            Finding { check, level: Level::Ok, detail: String::new() }
        } else {
            Finding { check, level, detail: format!("{count} {what}") }
        });
    }
    Ok(findings)
}

fn integrity(conn: &Connection) -> Result<Finding> {
    let lines: Vec<String> = conn
        .prepare("PRAGMA integrity_check(20)")
        .and_then(|mut s| s.query_map([], |r| r.get(0))?.collect())
        .step("check the database")?;
    let fine = lines == ["ok"];
    Ok(Finding {
        check: "file",
        level: if fine { Level::Ok } else { Level::Fail },
        detail: if fine { String::new() } else { format!("{}; restore a backup", lines.join("; ")) },
    })
}

fn mode(conn: &Connection) -> Result<Finding> {
    let mode: String = conn.query_row("PRAGMA journal_mode", [], |r| r.get(0)).step("read the journal mode")?;
    let fine = mode.eq_ignore_ascii_case("wal");
    Ok(Finding {
        check: "journal mode",
        level: if fine { Level::Ok } else { Level::Warn },
        detail: if fine { mode } else { format!("{mode}; the daemon converts it to WAL when it starts") },
    })
}

/// A copy that was made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Copied {
    pub file: PathBuf,
    pub bytes: u64,
    pub events: u64,
}

/// Copies the database as it is at one moment into a new file, beside running writers, and proves that the copy opens.
/// The copy takes its name only when it is whole and on disk.
///
/// # Errors
/// [`StoreError::Refused`] where the file exists already.
pub fn backup(path: &Path, file: &Path) -> Result<Copied> {
    const STEP: &str = "copy the database";
    let io = |e: std::io::Error| StoreError::Refused(format!("cannot write the copy {}: {e}", file.display()));
    if file.symlink_metadata().is_ok() {
        return Err(StoreError::Refused(format!("{} exists already; a backup never overwrites", file.display())));
    }
    let part = connection::sidecar(file, &format!(".part-{}", std::process::id()));
    let name = part
        .to_str()
        .ok_or_else(|| StoreError::Refused(format!("{} is not UTF-8, which SQLite needs here", file.display())))?;
    let conn = connection::open(path, Access::Read, &Settings::default())?.conn;
    // a reader that only queries may not write any file, not even a new one
    conn.execute_batch("PRAGMA query_only = OFF").step(STEP)?;
    let copied = conn.execute("VACUUM INTO ?1", [name]).step(STEP).and_then(|_| proved(&part));
    let events = match copied {
        Ok(events) => events,
        Err(error) => {
            let _ = std::fs::remove_file(&part);
            return Err(error);
        }
    };
    // a hard link refuses where somebody took the name meanwhile; a rename would overwrite
    std::fs::hard_link(&part, file).map_err(io)?;
    std::fs::remove_file(&part).map_err(io)?;
    let parent = file.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::File::open(parent).and_then(|dir| dir.sync_all()).map_err(io)?;
    Ok(Copied { file: file.into(), bytes: std::fs::metadata(file).map_or(0, |m| m.len()), events })
}

fn proved(part: &Path) -> Result<u64> {
    const STEP: &str = "read the copy";
    let copy = connection::open(part, Access::Read, &Settings::default())?.conn;
    let fine: String = copy.query_row("PRAGMA quick_check(1)", [], |r| r.get(0)).step(STEP)?;
    if fine != "ok" {
        return Err(StoreError::Refused(format!("the copy is damaged: {fine}")));
    }
    // a file without our tables can be copied too
    if schema::columns(&copy, ddl::OUTBOX.name).step(STEP)?.is_empty() {
        return Ok(0);
    }
    copy.query_row("SELECT count(*) FROM outbox_events", [], |r| r.get::<_, i64>(0)).map(i64::unsigned_abs).step(STEP)
}

/// What an uninstall removes and leaves.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Uninstall {
    /// Kind and name, in the order in which they go.
    pub removes: Vec<(String, String)>,
    /// What stays, and why.
    pub keeps: Vec<String>,
    /// Why it is not done as it is; `--force` overrules only unpublished events.
    pub blockers: Vec<String>,
    pub unpublished: u64,
    pub done: bool,
}

/// Lists what of ours is in the file; with `go` removes it in one transaction.
///
/// A classic outbox that was taken over stays with its rows as a plain table, with the classic index.
///
/// # Errors
/// [`StoreError::Refused`] with every reason.
pub fn uninstall(path: &Path, go: bool, force: bool) -> Result<Uninstall> {
    const STEP: &str = "remove what outboxd made";
    let mut conn = connection::open(path, Access::Write, &Settings::default())?.conn;
    let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate).step(STEP)?;
    schema::require(&tx, path)?;
    let mut plan = survey(&tx)?;
    if !go {
        return Ok(plan);
    }
    let unpublished = (plan.unpublished > 0 && !force).then(|| {
        format!("{} events are not published yet; drain or discard them first, or force it", plan.unpublished)
    });
    let reasons: Vec<String> = plan.blockers.iter().cloned().chain(unpublished).collect();
    if !reasons.is_empty() {
        return Err(StoreError::Refused(format!("nothing was removed: {}", reasons.join("; "))));
    }
    for (kind, name) in &plan.removes {
        tx.execute_batch(&format!("DROP {kind} {}", quote(name))).step(STEP)?;
    }
    if plan.keeps.iter().any(|k| k.starts_with(ddl::OUTBOX.name)) {
        tx.execute_batch("CREATE INDEX idx_outbox_delivery ON outbox_events (status, available_at, created_at)")
            .step(STEP)?;
    }
    tx.commit().step(STEP)?;
    plan.done = true;
    Ok(plan)
}

fn survey(conn: &Connection) -> Result<Uninstall> {
    let mut plan = Uninstall::default();
    let taken_over = schema::meta_get(conn, "origin")?.as_deref() == Some("migrate");
    let view = matches!(schema::stored_sql(conn, ddl::DEBEZIUM_VIEW.name)?, Some((kind, sql))
        if kind == "view" && super::sql_text::normal(&sql) == super::sql_text::normal(ddl::DEBEZIUM_VIEW.sql));
    let mut remove = |kind: &str, name: &str| plan.removes.push((kind.to_owned(), name.to_owned()));
    if view {
        remove("view", ddl::DEBEZIUM_VIEW.name);
    }
    let mut objects: Vec<&ddl::Object> = ddl::objects().collect();
    objects.reverse();
    for object in objects {
        let classic = [ddl::OUTBOX.name, ddl::PROCESSED.name].contains(&object.name);
        if schema::stored_sql(conn, object.name)?.is_some() && !(classic && taken_over) {
            remove(object.kind, object.name);
        }
    }
    match schema::meta_get(conn, "assets")? {
        Some(_) => remove("table", ddl::ASSETS.name),
        None if schema::stored_sql(conn, ddl::ASSETS.name)?.is_some() => {
            plan.keeps.push("assets: it was there before outboxd".into());
        }
        None => {}
    }
    if taken_over {
        plan.keeps.push(
            "outbox_events with its rows: it was there before outboxd, and classic programs go on with it".into(),
        );
        plan.keeps.push("processed_events with its rows, for the same reason".into());
    } else {
        let found = dependents::find(conn)?;
        let triggers = found.triggers.iter().map(|(name, _)| format!("the trigger {name} stands on outbox_events"));
        let outer = found
            .outer_triggers
            .iter()
            .map(|(name, table)| format!("the trigger {name} of {table} writes to the outbox"));
        let views = found
            .views
            .iter()
            .filter(|v| *v != ddl::DEBEZIUM_VIEW.name)
            .map(|v| format!("the view {v} reads the outbox"));
        let references = found.references.iter().map(|r| format!("the table {} refers to the outbox", r.table));
        plan.blockers =
            triggers.chain(outer).chain(views).chain(references).map(|b| format!("{b}; drop it first")).collect();
    }
    plan.unpublished = conn
        .query_row("SELECT count(*) FROM outbox_events WHERE status = 'pending'", [], |r| r.get::<_, i64>(0))
        .map(i64::unsigned_abs)
        .step("count the events")?;
    Ok(plan)
}

/// Removes what is older than its retention, in pieces with pauses at least as long, until nothing is left to remove.
/// For the command line; the daemon does the same through its writer. `pause` waits for the time it is given.
///
/// # Errors
/// [`StoreError::Busy`] where another process keeps the lock; what was removed so far stays removed.
pub fn prune(
    path: &Path,
    before: &[(super::retention::Class, crate::domain::event::Millis)],
    actor: &str,
    pause: impl Fn(std::time::Duration),
) -> Result<Vec<(&'static str, u64)>> {
    use super::retention;
    const PIECE: usize = 100;
    let mut conn = connection::open(path, Access::Write, &Settings::default())?.conn;
    schema::require(&conn, path)?;
    let mut removed = Vec::new();
    for (class, before) in before {
        let (mut cursor, mut gone) = (0, 0u64);
        loop {
            let found = retention::expired(&conn, *class, *before, cursor, PIECE)?;
            cursor = found.cursor;
            if !found.ids.is_empty() {
                let began = std::time::Instant::now();
                let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate).step("remove old rows")?;
                gone += retention::delete(&tx, *class, &found.ids)? as u64;
                tx.commit().step("remove old rows")?;
                pause(began.elapsed());
            }
            if !found.more {
                break;
            }
        }
        removed.push((class.table(), gone));
    }
    if removed.iter().any(|(_, gone)| *gone > 0) {
        let text: Vec<String> = removed.iter().map(|(table, gone)| format!("{gone} of {table}")).collect();
        let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate).step("write the audit row")?;
        audit::write(&tx, actor, "db prune", &path.display().to_string(), &text.join(", "))?;
        tx.commit().step("write the audit row")?;
    }
    Ok(removed)
}
