//! Who changed what, when: one row a change by an operator.

use rusqlite::Connection;

use super::error::{Result, Step};

/// One row of `outboxd_audit`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditRow {
    pub id: i64,
    /// UTC, `YYYY-MM-DD HH:MM:SS.mmm`.
    pub at: String,
    pub actor: String,
    pub verb: String,
    pub target: String,
    pub detail: Option<String>,
}

/// Writes a row in the caller's transaction, so that the change and its record commit together.
pub fn write(tx: &Connection, actor: &str, verb: &str, target: &str, detail: &str) -> Result<i64> {
    const SQL: &str = "INSERT INTO outboxd_audit (at, actor, verb, target, detail)
        VALUES (strftime('%Y-%m-%d %H:%M:%f', 'now'), ?1, ?2, ?3, ?4)";
    let actor = if actor.is_empty() { "unknown" } else { actor };
    tx.prepare_cached(SQL).and_then(|mut s| s.insert((actor, verb, target, detail))).step("write the audit row")
}

/// The newest rows, newest first.
pub fn list(conn: &Connection, limit: u32) -> Result<Vec<AuditRow>> {
    const SQL: &str = "SELECT id, at, actor, verb, target, detail FROM outboxd_audit ORDER BY id DESC LIMIT ?1";
    let read = || {
        conn.prepare_cached(SQL)?
            .query_map([limit], |r| {
                Ok(AuditRow {
                    id: r.get(0)?,
                    at: r.get(1)?,
                    actor: r.get(2)?,
                    verb: r.get(3)?,
                    target: r.get(4)?,
                    detail: r.get(5)?,
                })
            })?
            .collect::<rusqlite::Result<Vec<_>>>()
    };
    read().step("read the audit rows")
}
