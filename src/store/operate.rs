//! What an operator changes: retry, discard, replay, pause. Each change and its audit row commit together.
//!
//! Invariants: a row that is leased now is not taken away · a discarded payload stands in the audit row · a row that
//! cannot be changed is named with its reason and does not keep the others. May import: the rest of the store, rusqlite.

use rusqlite::{Connection, OptionalExtension, Transaction, params};
use serde::Serialize;

use super::error::{Result, Step, StoreError};
use super::{audit, lease, schema, time};
use crate::domain::event::{Millis, Seq};

/// Key in `outboxd_meta` of the instant until which the relay pauses; no row: it does not.
pub const PAUSED_UNTIL: &str = "paused_until_ms";

/// What became of a change of several rows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Changed {
    /// Event ids that were changed.
    pub done: Vec<String>,
    /// Event ids that were left, and why.
    pub left: Vec<(String, String)>,
}

impl Changed {
    fn leave(&mut self, id: &str, why: impl Into<String>) {
        self.left.push((id.to_owned(), why.into()));
    }
}

/// Failed -> pending: due at once, with a clean count.
pub fn retry(tx: &Transaction<'_>, actor: &str, ids: &[String]) -> Result<Changed> {
    const SQL: &str = "UPDATE outbox_events SET status = 'pending', attempt_count = 0, available_at = created_at,
        failing_since = NULL, last_error = NULL, holds = 1 WHERE event_id = ?1";
    let changed = would_retry(tx, ids)?;
    set_pending(tx, actor, &changed, SQL, "events retry")?;
    Ok(changed)
}

/// What [`retry`] would do.
pub fn would_retry(conn: &Connection, ids: &[String]) -> Result<Changed> {
    only(conn, ids, "failed")
}

/// Splits events into those of one status and the rest.
fn only(conn: &Connection, ids: &[String], wanted: &str) -> Result<Changed> {
    let mut changed = Changed::default();
    for id in ids {
        match status_of(conn, id)? {
            // named twice is one event
            Some(_) if changed.done.contains(id) => {}
            Some(status) if status == wanted => changed.done.push(id.clone()),
            Some(status) => changed.leave(id, format!("it is {status}, not {wanted}")),
            None => changed.leave(id, "there is no such event"),
        }
    }
    Ok(changed)
}

fn set_pending(tx: &Transaction<'_>, actor: &str, changed: &Changed, sql: &str, verb: &'static str) -> Result<()> {
    let mut statement = tx.prepare_cached(sql).step("set events to pending")?;
    for id in &changed.done {
        statement.execute([id]).step("set events to pending")?;
    }
    record(tx, actor, verb, changed)
}

/// Removes failed or pending events for good; each payload is kept in an audit row of its own.
///
/// # Errors
/// [`StoreError::Refused`] without a reason.
pub fn discard(tx: &Transaction<'_>, actor: &str, ids: &[String], reason: &str, now: Millis) -> Result<Changed> {
    const STEP: &str = "discard events";
    if reason.trim().is_empty() {
        return Err(StoreError::Refused("a discard needs a reason".into()));
    }
    let changed = would_discard(tx, ids, now)?;
    for id in &changed.done {
        let (seq, detail) = whole(tx, id, reason).step(STEP)?;
        tx.execute("DELETE FROM outbox_events WHERE seq = ?1", [seq]).step(STEP)?;
        tx.execute("DELETE FROM outboxd_suspects WHERE seq = ?1", [seq]).step(STEP)?;
        audit::write(tx, actor, "events discard", id, &detail)?;
    }
    Ok(changed)
}

/// What [`discard`] would do.
pub fn would_discard(conn: &Connection, ids: &[String], now: Millis) -> Result<Changed> {
    const SQL: &str = "SELECT seq, status FROM outbox_events WHERE event_id = ?1";
    let leased = live_leases(conn, now)?;
    let mut changed = Changed::default();
    for id in ids {
        let found: Option<(Seq, String)> = conn
            .prepare_cached(SQL)
            .and_then(|mut s| s.query_row([id], |r| Ok((r.get(0)?, r.get(1)?))).optional())
            .step("read an event")?;
        match found {
            // named twice is one event
            Some(_) if changed.done.contains(id) => {}
            None => changed.leave(id, "there is no such event"),
            Some((_, status)) if status == "published" => changed.leave(id, "it is published; retention removes it"),
            Some((seq, _)) if leased.iter().any(|held| held.binary_search(&seq).is_ok()) => {
                changed.leave(id, "it is being published just now; try again");
            }
            Some(_) => changed.done.push(id.clone()),
        }
    }
    Ok(changed)
}

/// Seq and everything worth keeping of a row, as JSON.
fn whole(tx: &Transaction<'_>, id: &str, reason: &str) -> rusqlite::Result<(Seq, String)> {
    const SQL: &str = "SELECT seq, json_object('reason', ?2, 'seq', seq, 'status', status, 'aggregate_type',
            aggregate_type, 'aggregate_id', aggregate_id, 'aggregate_version', aggregate_version, 'event_type', event_type,
            'schema_version', schema_version, 'headers_json', headers_json, 'created_at', created_at, 'attempt_count',
            attempt_count, 'last_error', last_error, 'payload_json', CAST(payload_json AS TEXT))
        FROM outbox_events WHERE event_id = ?1";
    tx.prepare_cached(SQL)?.query_row((id, reason), |r| Ok((r.get(0)?, r.get(1)?)))
}

/// The rows under each lease that has not run out, ascending.
fn live_leases(conn: &Connection, now: Millis) -> Result<Vec<Vec<Seq>>> {
    const SQL: &str = "SELECT seqs FROM outboxd_leases WHERE expires_at > ?1";
    let mut statement = conn.prepare_cached(SQL).step("read the leases")?;
    let rows = statement.query_map([now], |r| r.get::<_, String>(0)).step("read the leases")?;
    rows.map(|text| text.map(|t| lease::parse_ranges(&t)).step("read the leases")).collect()
}

/// Published events of a time, oldest first, for a replay: at most `limit` behind `after`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Replayable {
    pub seq: Seq,
    pub event_id: String,
    pub aggregate_type: String,
    pub aggregate_id: String,
    pub event_type: String,
    pub published_at: Option<String>,
}

/// Published events that were created between two instants. Reads only; call again with the last `seq`.
pub fn replayable(
    conn: &Connection,
    from: Millis,
    to: Option<Millis>,
    after: Seq,
    limit: usize,
) -> Result<Vec<Replayable>> {
    const SQL: &str = "SELECT seq, event_id, aggregate_type, aggregate_id, event_type, published_at, created_at
        FROM outbox_events WHERE seq > ?1 AND status = 'published' ORDER BY seq";
    const STEP: &str = "read what can be replayed";
    let mut statement = conn.prepare_cached(SQL).step(STEP)?;
    let mut rows = statement.query([after]).step(STEP)?;
    let mut found = Vec::new();
    while let Some(row) = rows.next().step(STEP)? {
        let created = time::parse(&row.get::<_, String>(6).step(STEP)?);
        if !created.is_some_and(|at| at >= from && to.is_none_or(|to| at <= to)) {
            continue;
        }
        let read = || -> rusqlite::Result<Replayable> {
            Ok(Replayable {
                seq: row.get(0)?,
                event_id: row.get(1)?,
                aggregate_type: row.get(2)?,
                aggregate_id: row.get(3)?,
                event_type: row.get(4)?,
                published_at: row.get(5)?,
            })
        };
        found.push(read().step(STEP)?);
        if found.len() >= limit {
            break;
        }
    }
    Ok(found)
}

/// Published -> pending again, in place of their order. The broker takes the same id only once within its window.
pub fn replay(tx: &Transaction<'_>, actor: &str, ids: &[String]) -> Result<Changed> {
    const SQL: &str = "UPDATE outbox_events SET status = 'pending', attempt_count = 0, available_at = created_at,
        published_at = NULL, stream = NULL, stream_seq = NULL, failing_since = NULL, last_error = NULL
        WHERE event_id = ?1";
    let changed = only(tx, ids, "published")?;
    set_pending(tx, actor, &changed, SQL, "events replay")?;
    Ok(changed)
}

fn status_of(conn: &Connection, id: &str) -> Result<Option<String>> {
    const SQL: &str = "SELECT status FROM outbox_events WHERE event_id = ?1";
    conn.prepare_cached(SQL).and_then(|mut s| s.query_row([id], |r| r.get(0)).optional()).step("read an event")
}

/// One audit row for a change of several events; none where nothing was changed.
fn record(tx: &Transaction<'_>, actor: &str, verb: &str, changed: &Changed) -> Result<()> {
    const NAMED: usize = 100;
    if changed.done.is_empty() {
        return Ok(());
    }
    let mut target = changed.done.iter().take(NAMED).cloned().collect::<Vec<_>>().join(" ");
    if changed.done.len() > NAMED {
        target.push_str(&format!(" and {} more", changed.done.len() - NAMED));
    }
    audit::write(tx, actor, verb, &target, &format!("{} events", changed.done.len())).map(drop)
}

/// Stops publishing until `until`, or until [`resume`]. Survives a restart.
pub fn pause(tx: &Transaction<'_>, actor: &str, until: Option<Millis>) -> Result<()> {
    const SQL: &str = "INSERT INTO outboxd_meta (key, value) VALUES (?1, ?2)
        ON CONFLICT (key) DO UPDATE SET value = excluded.value";
    tx.execute(SQL, params![PAUSED_UNTIL, until.unwrap_or(Millis::MAX)]).step("pause")?;
    let detail = until.map_or("until resume".into(), |at| format!("until {}", time::text(at)));
    audit::write(tx, actor, "pause", "relay", &detail).map(drop)
}

/// Goes on publishing; false where it was not paused.
pub fn resume(tx: &Transaction<'_>, actor: &str) -> Result<bool> {
    let removed = tx.execute("DELETE FROM outboxd_meta WHERE key = ?1", [PAUSED_UNTIL]).step("resume")? > 0;
    if removed {
        audit::write(tx, actor, "resume", "relay", "")?;
    }
    Ok(removed)
}

/// Until when the relay pauses: `None` where it does not, [`Millis::MAX`] until somebody resumes it.
pub fn paused_until(conn: &Connection, now: Millis) -> Result<Option<Millis>> {
    let until = schema::meta_get(conn, PAUSED_UNTIL)?.and_then(|text| text.parse::<Millis>().ok());
    Ok(until.filter(|until| *until > now))
}
