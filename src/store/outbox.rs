//! Reading the outbox for the relay: rows ahead of a position, rows by number, rows of one aggregate.
//!
//! Reads only, on a reader connection: the lock is never held. Every walk follows the partial index of pending rows
//! (`idx_outbox_delivery`), so the cost does not grow with the history.

use bytes::Bytes;
use rusqlite::functions::FunctionFlags;
use rusqlite::types::ValueRef;
use rusqlite::{Connection, OptionalExtension, Row, params};

use super::error::{Result, Step};
use super::time;
use crate::domain::event::{self, AggregateKey, PendingEvent, Seq, Suspect};

/// The part of the aggregates that one publisher owns, and how much it takes at once.
#[derive(Clone, Copy, Debug)]
pub struct Share {
    /// 0-based.
    pub publisher: usize,
    pub publishers: usize,
    /// Most rows.
    pub rows: usize,
    /// Most bytes by [`PendingEvent::weight`]; one row is always taken.
    pub bytes: usize,
}

/// A pending row, and whether an earlier failed event of its aggregate holds it.
#[derive(Clone, Debug)]
pub struct Found {
    pub event: PendingEvent,
    pub held: bool,
}

/// The answer to the question for one row by its number.
#[derive(Clone, Debug)]
pub enum Numbered {
    Pending(Box<Found>),
    /// It is no longer pending.
    Gone,
    /// Not read: the bytes were used up. Ask again.
    Later,
}

/// Rows read ahead.
#[derive(Debug, Default)]
pub struct Ahead {
    pub rows: Vec<Found>,
    /// Every pending row of this share up to here is in `rows` or was read before.
    pub cursor: Seq,
    /// There may be more behind `cursor`.
    pub more: bool,
}

/// An aggregate read again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Again {
    pub key: AggregateKey,
    pub held: bool,
    pub seqs: Vec<Seq>,
    /// There are others after `seqs`.
    pub more: bool,
}

/// An entry of `outboxd_touched`: an aggregate that changed behind the read position.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Touched {
    pub id: i64,
    pub key: AggregateKey,
}

const COLUMNS: &str = "e.seq, e.aggregate_type, e.aggregate_id, e.event_id, e.aggregate_version, e.event_type,
    e.schema_version, e.payload_json, e.headers_json, e.available_at, e.created_at, e.attempt_count, e.failing_since,
    s.crashes, s.floor, s.stream_created,
    EXISTS (SELECT 1 FROM outbox_events f INDEXED BY outboxd_failed
            WHERE f.status = 'failed' AND f.holds = 1 AND f.aggregate_type = e.aggregate_type
              AND f.aggregate_id = e.aggregate_id AND f.seq < e.seq)";

/// Registers what the statements of this module call: the owner of an aggregate. For reader connections.
pub fn register(conn: &Connection) -> Result<()> {
    let flags = FunctionFlags::SQLITE_UTF8 | FunctionFlags::SQLITE_DETERMINISTIC | FunctionFlags::SQLITE_DIRECTONLY;
    conn.create_scalar_function("outboxd_owner", 3, flags, |ctx| {
        let text = |i| match ctx.get_raw(i) {
            ValueRef::Text(bytes) | ValueRef::Blob(bytes) => String::from_utf8_lossy(bytes),
            ValueRef::Null | ValueRef::Integer(_) | ValueRef::Real(_) => "".into(),
        };
        let publishers = usize::try_from(ctx.get::<i64>(2)?).unwrap_or(1);
        Ok(event::owner(&text(0), &text(1), publishers) as i64)
    })
    .step("register a function")
}

/// Pending rows after `after` that belong to the share, in commit order.
pub fn read_ahead(conn: &Connection, share: Share, after: Seq) -> Result<Ahead> {
    // a bound for one read, so that a publisher that owns few of many rows still yields
    let visit = (share.rows * share.publishers * 2).max(64);
    let bound: Option<Seq> = conn
        .prepare_cached(
            "SELECT seq FROM outbox_events INDEXED BY idx_outbox_delivery
             WHERE status = 'pending' AND seq > ?1 ORDER BY seq LIMIT 1 OFFSET ?2",
        )
        .and_then(|mut s| s.query_row(params![after, visit as i64], |row| row.get(0)).optional())
        .step("read the outbox ahead")?;
    let sql = format!(
        "SELECT {COLUMNS} FROM outbox_events e INDEXED BY idx_outbox_delivery
         LEFT JOIN outboxd_suspects s ON s.seq = e.seq
         WHERE e.status = 'pending' AND e.seq > ?1 AND e.seq <= ?2
           AND (?4 = 1 OR outboxd_owner(e.aggregate_type, e.aggregate_id, ?4) = ?3)
         ORDER BY e.seq"
    );
    let mut ahead = Ahead { rows: Vec::new(), cursor: after, more: bound.is_some() };
    let mut statement = conn.prepare_cached(&sql).step("read the outbox ahead")?;
    let upper = bound.unwrap_or(Seq::MAX);
    let mut rows = statement
        .query(params![after, upper, share.publisher as i64, share.publishers as i64])
        .step("read the outbox ahead")?;
    let mut bytes = 0;
    while let Some(row) = rows.next().step("read the outbox ahead")? {
        let found = found(row).step("read the outbox ahead")?;
        bytes += found.event.weight();
        ahead.cursor = found.event.seq;
        ahead.rows.push(found);
        if ahead.rows.len() >= share.rows || bytes >= share.bytes {
            ahead.more = true;
            return Ok(ahead);
        }
    }
    if let Some(bound) = bound {
        ahead.cursor = bound;
    }
    Ok(ahead)
}

/// The rows of these numbers, each at the place of its number; reading stops once `bytes` are reached.
pub fn read_rows(conn: &Connection, seqs: &[Seq], bytes: usize) -> Result<Vec<Numbered>> {
    let sql = format!(
        "SELECT {COLUMNS} FROM outbox_events e LEFT JOIN outboxd_suspects s ON s.seq = e.seq
         WHERE e.seq = ?1 AND e.status = 'pending'"
    );
    let mut statement = conn.prepare_cached(&sql).step("read rows of the outbox")?;
    let (mut answers, mut taken) = (Vec::with_capacity(seqs.len()), 0);
    for seq in seqs {
        if taken >= bytes {
            answers.push(Numbered::Later);
            continue;
        }
        let row = statement.query_row([seq], found).optional().step("read rows of the outbox")?;
        taken += row.as_ref().map_or(0, |found| found.event.weight());
        answers.push(row.map_or(Numbered::Gone, |found| Numbered::Pending(Box::new(found))));
    }
    Ok(answers)
}

/// The numbers of an aggregate's pending rows, the first `limit` of them.
pub fn read_again(conn: &Connection, keys: &[AggregateKey], limit: usize) -> Result<Vec<Again>> {
    let step = "read an aggregate again";
    let mut pending = conn
        .prepare_cached(
            "SELECT seq FROM outbox_events WHERE aggregate_type = ?1 AND aggregate_id = ?2 AND status = 'pending'
             ORDER BY seq LIMIT ?3",
        )
        .step(step)?;
    let mut failed = conn
        .prepare_cached(
            "SELECT min(seq) FROM outbox_events INDEXED BY outboxd_failed
             WHERE status = 'failed' AND holds = 1 AND aggregate_type = ?1 AND aggregate_id = ?2",
        )
        .step(step)?;
    let mut answers = Vec::with_capacity(keys.len());
    for key in keys {
        let holder: Option<Seq> = failed.query_row(params![key.kind, key.id], |row| row.get(0)).step(step)?;
        let mut seqs: Vec<Seq> = pending
            .query_map(params![key.kind, key.id, limit as i64 + 1], |row| row.get(0))
            .and_then(Iterator::collect)
            .step(step)?;
        let more = seqs.len() > limit;
        seqs.truncate(limit);
        // rows before the failed one are free; those after it are held
        let held = holder.is_some_and(|holder| seqs.first().is_none_or(|first| *first > holder));
        answers.push(Again { key: key.clone(), held, seqs, more });
    }
    Ok(answers)
}

/// What has changed behind the read position since it was last forgotten, at most `limit`.
pub fn read_touched(conn: &Connection, limit: usize) -> Result<Vec<Touched>> {
    conn.prepare_cached("SELECT id, aggregate_type, aggregate_id FROM outboxd_touched ORDER BY id LIMIT ?1")
        .and_then(|mut s| {
            s.query_map([limit as i64], |row| {
                let key = AggregateKey::new(&text(row, 1)?, &text(row, 2)?);
                Ok(Touched { id: row.get(0)?, key })
            })?
            .collect()
        })
        .step("read what was touched")
}

/// Forgets what was touched up to `id`.
pub fn forget_touched(conn: &Connection, id: i64) -> Result<()> {
    conn.prepare_cached("DELETE FROM outboxd_touched WHERE id <= ?1")
        .and_then(|mut s| s.execute([id]))
        .step("forget what was touched")?;
    Ok(())
}

/// Text of a column, whatever an application stored there.
fn text(row: &Row<'_>, column: usize) -> rusqlite::Result<String> {
    Ok(match row.get_ref(column)? {
        ValueRef::Text(bytes) | ValueRef::Blob(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        ValueRef::Integer(n) => n.to_string(),
        ValueRef::Real(x) => x.to_string(),
        ValueRef::Null => String::new(),
    })
}

fn found(row: &Row<'_>) -> rusqlite::Result<Found> {
    let payload = match row.get_ref(7)? {
        ValueRef::Text(bytes) | ValueRef::Blob(bytes) => Bytes::copy_from_slice(bytes),
        ValueRef::Integer(n) => Bytes::from(n.to_string()),
        ValueRef::Real(x) => Bytes::from(x.to_string()),
        ValueRef::Null => Bytes::new(),
    };
    let (available_at, created_at) = (text(row, 9)?, text(row, 10)?);
    // available_at <= created_at means now, and no clock is asked; what cannot be read is due now
    let due_at = if available_at <= created_at { None } else { time::parse(&available_at) };
    let created = time::parse(&created_at);
    let due_at = due_at.filter(|due| created.is_none_or(|created| *due > created));
    let floor: Option<i64> = row.get(14)?;
    let suspect = floor.map(|floor| Suspect {
        floor: floor.try_into().unwrap_or(0),
        stream_created: text(row, 15).unwrap_or_default(),
    });
    let attempts: i64 = row.get::<_, Option<i64>>(11).ok().flatten().unwrap_or(0);
    let event = PendingEvent {
        seq: row.get(0)?,
        key: AggregateKey::new(&text(row, 1)?, &text(row, 2)?),
        event_id: text(row, 3)?,
        aggregate_version: row.get(4)?,
        event_type: text(row, 5)?,
        schema_version: row.get(6)?,
        payload,
        headers_json: match row.get_ref(8)? {
            ValueRef::Null => None,
            _ => Some(text(row, 8)?),
        },
        created_at,
        created,
        due_at,
        attempt_count: attempts.clamp(0, i64::from(u32::MAX)) as u32,
        failing_since: row.get(12)?,
        crashes: row.get::<_, Option<i64>>(13)?.unwrap_or(0).clamp(0, i64::from(u32::MAX)) as u32,
        suspect,
    };
    Ok(Found { event, held: row.get(16)? })
}
