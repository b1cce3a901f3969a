//! What is old is removed, in small pieces: find on a reading connection, delete in a short transaction.
//!
//! Invariants: only a published row whose place in the stream is known goes · a row that another table refers to stays ·
//! nothing is looked for by an index on a date, because there is none: tables are walked in the order of their ids.
//! May import: the rest of the store, rusqlite.

use rusqlite::{Connection, ErrorCode, Transaction};

use super::error::{Result, Step, StoreError};
use super::time;
use crate::domain::event::Millis;

/// What has a retention of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Published rows of the outbox.
    Published,
    /// The dedupe record of the inbox.
    Processed,
    /// Inbound events that were taken.
    Inbox,
    Audit,
}

impl Class {
    pub const ALL: [Class; 4] = [Class::Published, Class::Processed, Class::Inbox, Class::Audit];

    /// The table, for messages.
    pub fn table(self) -> &'static str {
        match self {
            Class::Published => "outbox_events",
            Class::Processed => "processed_events",
            Class::Inbox => "inbox_events",
            Class::Audit => "outboxd_audit",
        }
    }

    /// Id, time, and whether the row may go at all; `?1` is the id to start behind, `?2` how many rows are looked at.
    fn walk(self) -> &'static str {
        match self {
            Class::Published => {
                "SELECT seq, published_at, status = 'published' AND stream_seq IS NOT NULL FROM outbox_events
                 WHERE seq > ?1 ORDER BY seq LIMIT ?2"
            }
            Class::Processed => {
                "SELECT rowid, processed_at, 1 FROM processed_events WHERE rowid > ?1 ORDER BY rowid LIMIT ?2"
            }
            Class::Inbox => {
                "SELECT id, coalesce(done_at, received_at), 1 FROM inbox_events
                 WHERE state = 'done' AND id > ?1 ORDER BY id LIMIT ?2"
            }
            Class::Audit => "SELECT id, at, 1 FROM outboxd_audit WHERE id > ?1 ORDER BY id LIMIT ?2",
        }
    }

    fn delete(self) -> &'static str {
        match self {
            Class::Published => {
                "DELETE FROM outbox_events WHERE seq = ?1 AND status = 'published' AND stream_seq IS NOT NULL"
            }
            Class::Processed => "DELETE FROM processed_events WHERE rowid = ?1",
            Class::Inbox => "DELETE FROM inbox_events WHERE id = ?1 AND state = 'done'",
            Class::Audit => "DELETE FROM outboxd_audit WHERE id = ?1",
        }
    }
}

/// A piece of a walk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Expired {
    /// Rows to delete, ascending.
    pub ids: Vec<i64>,
    /// Where the walk goes on.
    pub cursor: i64,
    /// There may be more behind the cursor.
    pub more: bool,
}

/// Looks at up to `limit` rows behind `after` for those older than `before`.
///
/// The walk ends at a piece that has young rows and no old one: rows are written in about the order of their times. A
/// time that cannot be read is never old.
pub fn expired(conn: &Connection, class: Class, before: Millis, after: i64, limit: usize) -> Result<Expired> {
    const STEP: &str = "look for old rows";
    let mut found = Expired { cursor: after, ..Expired::default() };
    let (mut seen, mut young) = (0, 0);
    let mut statement = match conn.prepare_cached(class.walk()) {
        Ok(statement) => statement,
        // a classic processed_events made WITHOUT ROWID has no order to walk in: it is kept
        Err(_) if class == Class::Processed => return Ok(found),
        Err(error) => return Err(StoreError::at(STEP, error)),
    };
    let mut rows = statement.query((after, limit as i64)).step(STEP)?;
    while let Some(row) = rows.next().step(STEP)? {
        seen += 1;
        found.cursor = row.get(0).step(STEP)?;
        let at = row.get_ref(1).step(STEP)?.as_str().ok().and_then(time::parse);
        match (row.get::<_, bool>(2).step(STEP)?, at) {
            (true, Some(at)) if at < before => found.ids.push(found.cursor),
            (true, Some(_)) => young += 1,
            (true, None) | (false, _) => {}
        }
    }
    found.more = seen == limit && !(found.ids.is_empty() && young > 0);
    Ok(found)
}

/// Deletes these rows where they may still go. Answers how many went.
pub fn delete(tx: &Transaction<'_>, class: Class, ids: &[i64]) -> Result<usize> {
    let mut statement = tx.prepare_cached(class.delete()).step("remove old rows")?;
    let mut gone = 0;
    for id in ids {
        match statement.execute([id]) {
            Ok(n) => gone += n,
            // another table refers to it, or a trigger of the application keeps it
            Err(rusqlite::Error::SqliteFailure(error, _)) if error.code == ErrorCode::ConstraintViolation => {}
            Err(error) => return Err(StoreError::at("remove old rows", error)),
        }
    }
    Ok(gone)
}
