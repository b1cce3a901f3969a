//! Where each durable stands: stream, its creation time, and the sequence up to which everything is settled.
//!
//! Written in the transaction of the effects, so that a consumer that has to be made anew starts where the database is.
//! May import: domain, the rest of the store, rusqlite.

use rusqlite::{Connection, OptionalExtension, Transaction};

use super::error::{Result, Step, StoreError};
use super::inbox::sql_seq;
use crate::domain::apply::{Position, Verdict};

/// The recorded position of a durable; `None` for one that the database has not seen.
pub fn read(conn: &Connection, durable: &str) -> Result<Option<Position>> {
    const SQL: &str = "SELECT stream, stream_created, settled_seq FROM outboxd_inbox_position WHERE durable = ?1";
    conn.prepare_cached(SQL)
        .and_then(|mut s| {
            s.query_row([durable], |row| {
                Ok(Position {
                    stream: row.get(0)?,
                    stream_created: row.get(1)?,
                    settled_seq: row.get::<_, i64>(2)?.unsigned_abs(),
                })
            })
            .optional()
        })
        .step("read the position of the inbox")
}

/// Makes `position` the recorded one, for a new durable, or where the stream is another one or went back. The failures
/// of messages belong to the stream they stand in and go with it.
pub fn establish(tx: &Transaction<'_>, durable: &str, position: &Position) -> Result<()> {
    const SQL: &str = "INSERT INTO outboxd_inbox_position (durable, stream, stream_created, settled_seq)
        VALUES (?1, ?2, ?3, ?4) ON CONFLICT (durable) DO UPDATE
        SET stream = excluded.stream, stream_created = excluded.stream_created, settled_seq = excluded.settled_seq";
    const STEP: &str = "record the position of the inbox";
    if read(tx, durable)?.as_ref() == Some(position) {
        return Ok(());
    }
    tx.execute("DELETE FROM outboxd_inbox_failures WHERE durable = ?1", [durable]).step(STEP)?;
    let Position { stream, stream_created, settled_seq } = position;
    tx.execute(SQL, (durable, stream, stream_created, sql_seq(*settled_seq))).step(STEP)?;
    Ok(())
}

/// The settled sequence of a durable.
///
/// # Errors
/// [`StoreError::Conflict`] where the position is of another stream, or is not recorded.
pub(super) fn settled(tx: &Transaction<'_>, durable: &str, stream_created: &str) -> Result<u64> {
    match read(tx, durable)? {
        Some(position) if position.stream_created == stream_created => Ok(position.settled_seq),
        Some(_) => Err(StoreError::Conflict(format!("durable {durable} follows another stream meanwhile"))),
        None => Err(StoreError::Conflict(format!("the position of durable {durable} is not recorded"))),
    }
}

/// Moves the settled sequence on and counts what was done.
pub(super) fn record(
    tx: &Transaction<'_>,
    durable: &str,
    stream_created: &str,
    floor: u64,
    verdicts: &[Verdict],
) -> Result<()> {
    const SQL: &str = "UPDATE outboxd_inbox_position SET settled_seq = max(settled_seq, ?3),
        processed = processed + ?4, duplicates = duplicates + ?5 WHERE durable = ?1 AND stream_created = ?2";
    const TIDY: &str = "DELETE FROM outboxd_inbox_failures WHERE durable = ?1 AND stream_seq <= ?2";
    const STEP: &str = "move the position of the inbox";
    let (mut processed, mut duplicates) = (0i64, 0i64);
    for verdict in verdicts {
        match verdict {
            Verdict::Applied | Verdict::Stored | Verdict::Stale => processed += 1,
            Verdict::Duplicate => duplicates += 1,
            Verdict::Skipped | Verdict::Dead(_) | Verdict::Later { .. } => {}
        }
    }
    let params = (durable, stream_created, sql_seq(floor), processed, duplicates);
    tx.prepare_cached(SQL).and_then(|mut s| s.execute(params)).step(STEP)?;
    tx.prepare_cached(TIDY).and_then(|mut s| s.execute((durable, sql_seq(floor)))).step(STEP)?;
    Ok(())
}
