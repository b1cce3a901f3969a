//! What the command line, the page and the metrics show of the outbox: counts, lists, one event whole. Reads only.
//!
//! Invariants: what status asks for is bounded in cost by the backlog, never by the history; only [`published`] walks
//! the whole table. May import: domain, the rest of the store, rusqlite, rustix (free space of the disk).

use std::path::Path;

use rusqlite::types::{ToSql, ValueRef};
use rusqlite::{Connection, OptionalExtension, Row};
use serde::Serialize;

use super::error::{Result, Step};
use super::{connection, lease, operate, schema, time};
use crate::domain::event::{Millis, Seq};

/// What only the database knows, as it is now.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Counts {
    pub source: String,
    pub pending: u64,
    pub failed: u64,
    /// Of the oldest event that is due, from max(created_at, available_at); 0 where there is none.
    pub oldest_pending_age_seconds: f64,
    /// Aggregates with a pending event behind a failed one that holds them.
    pub held_aggregates: u64,
    /// Rows under leases that have not run out.
    pub leased: u64,
    /// Since the database began, over all durables.
    pub inbox_processed: u64,
    pub inbox_duplicates: u64,
    /// Dead letters that lie there now.
    pub inbox_dead: u64,
    pub inbox_stored: u64,
    /// [`Millis::MAX`]: until somebody resumes it.
    pub paused_until: Option<Millis>,
}

/// Counts for status. Walks the partial indexes of pending and failed rows, not the table.
pub fn counts(conn: &Connection, now: Millis) -> Result<Counts> {
    const STEP: &str = "count the events";
    let tx = conn.unchecked_transaction().step(STEP)?;
    let number = |sql: &str| -> Result<u64> {
        tx.prepare_cached(sql)
            .and_then(|mut s| s.query_row([], |r| r.get::<_, i64>(0)))
            .map(i64::unsigned_abs)
            .step(STEP)
    };
    Ok(Counts {
        source: schema::meta_get(&tx, "source")?.unwrap_or_default(),
        pending: number("SELECT count(*) FROM outbox_events INDEXED BY idx_outbox_delivery WHERE status = 'pending'")?,
        failed: number("SELECT count(*) FROM outbox_events INDEXED BY outboxd_failed WHERE status = 'failed'")?,
        oldest_pending_age_seconds: oldest_due(&tx, now)
            .step(STEP)?
            .map_or(0.0, |since| (now - since).max(0) as f64 / 1_000.0),
        held_aggregates: number(HELD)?,
        leased: leased(&tx, now).step(STEP)?,
        inbox_processed: number("SELECT coalesce(sum(processed), 0) FROM outboxd_inbox_position")?,
        inbox_duplicates: number("SELECT coalesce(sum(duplicates), 0) FROM outboxd_inbox_position")?,
        inbox_dead: number("SELECT count(*) FROM inbox_events WHERE state = 'dead'")?,
        inbox_stored: number("SELECT count(*) FROM inbox_events WHERE state = 'stored'")?,
        paused_until: operate::paused_until(&tx, now)?,
    })
}

/// The newest rows of an aggregate are looked at first, where the held ones are; at most 10,000 failed rows.
const HELD: &str = "SELECT count(*) FROM (
    SELECT aggregate_type AS t, aggregate_id AS i, min(seq) AS head FROM (
        SELECT aggregate_type, aggregate_id, seq FROM outbox_events INDEXED BY outboxd_failed
        WHERE status = 'failed' AND holds = 1 LIMIT 10000)
    GROUP BY 1, 2)
    WHERE EXISTS (SELECT 1 FROM (SELECT status, seq FROM outbox_events
        WHERE aggregate_type = t AND aggregate_id = i ORDER BY aggregate_version DESC) WHERE status = 'pending' AND seq > head)";

/// Published rows that are in the table now. Walks an index of the whole table: about a second for ten million rows, so
/// ask once a minute.
pub fn published(conn: &Connection) -> Result<u64> {
    const STEP: &str = "count the published events";
    let tx = conn.unchecked_transaction().step(STEP)?;
    let number = |sql: &str| tx.query_row(sql, [], |r| r.get::<_, i64>(0)).map(i64::unsigned_abs).step(STEP);
    let all = number("SELECT count(*) FROM outbox_events")?;
    let pending = number("SELECT count(*) FROM outbox_events INDEXED BY idx_outbox_delivery WHERE status = 'pending'")?;
    let failed = number("SELECT count(*) FROM outbox_events INDEXED BY outboxd_failed WHERE status = 'failed'")?;
    Ok(all.saturating_sub(pending + failed))
}

/// Since when the oldest due event has been due. Rows are inserted in about the order of their times, so the first one
/// that was due from the start ends the search; at the head there may be many that are not due.
fn oldest_due(conn: &Connection, now: Millis) -> rusqlite::Result<Option<Millis>> {
    const HEAD: &str = "SELECT available_at, created_at FROM outbox_events INDEXED BY idx_outbox_delivery
        WHERE status = 'pending' ORDER BY seq LIMIT 10000";
    const BEHIND: &str = "SELECT available_at, created_at FROM outbox_events INDEXED BY idx_outbox_delivery
        WHERE status = 'pending' AND available_at <= created_at ORDER BY seq LIMIT 1";
    let mut oldest: Option<Millis> = None;
    let mut statement = conn.prepare_cached(HEAD)?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        let (since, plain) = due_since(row)?;
        if since <= now {
            oldest = Some(oldest.map_or(since, |o| o.min(since)));
            if plain {
                return Ok(oldest);
            }
        }
    }
    if oldest.is_none() {
        let found = conn.prepare_cached(BEHIND)?.query_row([], due_since).optional()?;
        oldest = found.map(|(since, _)| since).filter(|since| *since <= now);
    }
    Ok(oldest)
}

/// max(created_at, available_at), and whether it was due from the start. A time that cannot be read is long past.
fn due_since(row: &Row<'_>) -> rusqlite::Result<(Millis, bool)> {
    let read = |i: usize| row.get_ref(i).map(|v| v.as_str().ok().and_then(time::parse));
    let (available, created) = (read(0)?.unwrap_or(0), read(1)?.unwrap_or(0));
    Ok((available.max(created), available <= created))
}

fn leased(conn: &Connection, now: Millis) -> rusqlite::Result<u64> {
    let mut statement = conn.prepare_cached("SELECT seqs FROM outboxd_leases WHERE expires_at > ?1")?;
    let rows = statement.query_map([now], |r| r.get::<_, String>(0))?;
    rows.map(|text| text.map(|t| lease::parse_ranges(&t).len() as u64)).sum()
}

/// Sizes of the file, by stat.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sizes {
    pub bytes: u64,
    pub wal_bytes: u64,
    pub disk_free_bytes: Option<u64>,
}

/// Sizes of the database, its write-ahead log, and the space left beside them.
pub fn sizes(path: &Path) -> Sizes {
    let of = |path: &Path| std::fs::metadata(path).map_or(0, |m| m.len());
    Sizes {
        bytes: of(path),
        wal_bytes: of(&connection::sidecar(path, "-wal")),
        disk_free_bytes: rustix::fs::statvfs(path).ok().map(|s| s.f_bavail.saturating_mul(s.f_frsize)),
    }
}

/// Which events are listed. Every field narrows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// `pending`, `published` or `failed`.
    pub status: Option<String>,
    /// Type and id.
    pub aggregate: Option<(String, String)>,
    pub event_type: Option<String>,
    /// Created before this instant.
    pub created_before: Option<Millis>,
}

/// A line of `events list`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct EventLine {
    pub seq: Seq,
    pub event_id: String,
    pub aggregate_type: String,
    pub aggregate_id: String,
    pub aggregate_version: i64,
    pub event_type: String,
    pub status: String,
    pub attempt_count: i64,
    pub created_at: String,
    pub available_at: String,
    pub published_at: Option<String>,
    pub stream: Option<String>,
    pub stream_seq: Option<i64>,
    pub last_error: Option<String>,
}

/// Events that pass the filter: of pending and failed ones the oldest, else the newest first.
pub fn list(conn: &Connection, filter: &Filter, limit: u32) -> Result<Vec<EventLine>> {
    const STEP: &str = "list the events";
    let mut conditions = vec!["1"];
    let mut values: Vec<&dyn ToSql> = Vec::new();
    if let Some(status) = &filter.status {
        conditions.push(match status.as_str() {
            // the literal lets SQLite use the partial index
            "pending" => "status = 'pending'",
            "failed" => "status = 'failed'",
            _ => "status = ?",
        });
        if !matches!(status.as_str(), "pending" | "failed") {
            values.push(status);
        }
    }
    if let Some((kind, id)) = &filter.aggregate {
        conditions.push("aggregate_type = ? AND aggregate_id = ?");
        values.extend([kind as &dyn ToSql, id as &dyn ToSql]);
    }
    if let Some(event_type) = &filter.event_type {
        conditions.push("event_type = ?");
        values.push(event_type);
    }
    let oldest_first = matches!(filter.status.as_deref(), Some("pending" | "failed"));
    let sql = format!(
        "SELECT {LINE} FROM outbox_events WHERE {} ORDER BY seq {}",
        conditions.join(" AND "),
        if oldest_first { "ASC" } else { "DESC" }
    );
    let mut statement = conn.prepare_cached(&sql).step(STEP)?;
    let mut rows = statement.query(values.as_slice()).step(STEP)?;
    let mut lines = Vec::new();
    while lines.len() < limit as usize {
        let Some(row) = rows.next().step(STEP)? else { break };
        let line = line(row).step(STEP)?;
        let old = filter.created_before.is_none_or(|before| time::parse(&line.created_at).is_none_or(|at| at < before));
        if old {
            lines.push(line);
        }
    }
    Ok(lines)
}

/// Events behind `after`, oldest first, at most `limit`.
pub fn newer(conn: &Connection, after: Seq, limit: u32) -> Result<Vec<EventLine>> {
    let sql = format!("SELECT {LINE} FROM outbox_events WHERE seq > ?1 ORDER BY seq LIMIT ?2");
    conn.prepare_cached(&sql).and_then(|mut s| s.query_map((after, limit), line)?.collect()).step("list the new events")
}

/// The columns that [`line`] reads, in its order.
const LINE: &str = "seq, event_id, aggregate_type, aggregate_id, aggregate_version, event_type, status, attempt_count,
    created_at, available_at, published_at, stream, stream_seq, last_error";

fn line(row: &Row<'_>) -> rusqlite::Result<EventLine> {
    let integer = |i: usize| row.get_ref(i).map(|v| v.as_i64().unwrap_or(0));
    Ok(EventLine {
        seq: row.get(0)?,
        event_id: lossy(row, 1)?,
        aggregate_type: lossy(row, 2)?,
        aggregate_id: lossy(row, 3)?,
        aggregate_version: integer(4)?,
        event_type: lossy(row, 5)?,
        status: row.get(6)?,
        attempt_count: integer(7)?,
        created_at: lossy(row, 8)?,
        available_at: lossy(row, 9)?,
        published_at: row.get(10)?,
        stream: row.get(11)?,
        stream_seq: row.get(12)?,
        last_error: row.get(13)?,
    })
}

/// Whatever an old row holds, as text.
fn lossy(row: &Row<'_>, i: usize) -> rusqlite::Result<String> {
    Ok(match row.get_ref(i)? {
        ValueRef::Text(bytes) | ValueRef::Blob(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        ValueRef::Integer(n) => n.to_string(),
        ValueRef::Real(x) => x.to_string(),
        ValueRef::Null => String::new(),
    })
}

/// One event whole, with what the relay knows of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct EventWhole {
    #[serde(flatten)]
    pub line: EventLine,
    pub schema_version: i64,
    pub headers_json: Option<String>,
    pub payload_json: String,
    /// The payload was bound as a BLOB.
    pub payload_is_blob: bool,
    /// Since when it fails, UTC.
    pub failing_since: Option<String>,
    /// A failed row that keeps its aggregate.
    pub holds: bool,
    /// Token of the lease that it is under now.
    pub lease: Option<i64>,
    /// When that lease runs out, UTC.
    pub lease_expires_at: Option<String>,
    /// Crashes during which it was in flight.
    pub crashes: i64,
}

/// An event by its id; `None` where there is none.
pub fn show(conn: &Connection, event_id: &str, now: Millis) -> Result<Option<EventWhole>> {
    const SQL: &str = "SELECT seq, event_id, aggregate_type, aggregate_id, aggregate_version, event_type, status,
            attempt_count, created_at, available_at, published_at, stream, stream_seq, last_error,
            schema_version, headers_json, payload_json, failing_since, holds,
            coalesce((SELECT crashes FROM outboxd_suspects s WHERE s.seq = e.seq), 0)
        FROM outbox_events e WHERE event_id = ?1";
    const STEP: &str = "read the event";
    let read = |row: &Row<'_>| {
        Ok(EventWhole {
            line: line(row)?,
            schema_version: row.get_ref(14)?.as_i64().unwrap_or(0),
            headers_json: row.get(15)?,
            payload_json: lossy(row, 16)?,
            payload_is_blob: matches!(row.get_ref(16)?, ValueRef::Blob(_)),
            failing_since: row.get::<_, Option<Millis>>(17)?.map(time::text),
            holds: row.get(18)?,
            lease: None,
            lease_expires_at: None,
            crashes: row.get(19)?,
        })
    };
    let found = conn.prepare_cached(SQL).and_then(|mut s| s.query_row([event_id], read).optional()).step(STEP)?;
    let Some(mut event) = found else { return Ok(None) };
    let mut statement =
        conn.prepare_cached("SELECT token, expires_at, seqs FROM outboxd_leases WHERE expires_at > ?1").step(STEP)?;
    let mut rows = statement.query([now]).step(STEP)?;
    while let Some(row) = rows.next().step(STEP)? {
        if lease::parse_ranges(&row.get::<_, String>(2).step(STEP)?).contains(&event.line.seq) {
            event.lease = Some(row.get(0).step(STEP)?);
            event.lease_expires_at = Some(time::text(row.get(1).step(STEP)?));
        }
    }
    Ok(Some(event))
}
