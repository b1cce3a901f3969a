//! `inbox_events`: events kept for the application, and dead letters; what the command line does with them.
//!
//! States: `stored` (kept, for the application to take), `done` (taken, or a dead letter that was applied by a retry),
//! `dead` (with its reason). May import: domain, the rest of the store, rusqlite, serde_json.

use rusqlite::{Connection, OptionalExtension, Transaction};
use serde::Serialize;

use super::error::{Result, Step, StoreError};
use super::inbox::{Inbox, sql_seq};
use super::inbox_handlers::{Effect, Place, Trouble};
use super::time;
use crate::domain::event::Millis;
use crate::domain::inbox::{Event, Headers, Inbound, identify, processed_key};
use crate::domain::settle;

/// A row to be kept.
pub(super) struct Letter<'a> {
    pub durable: &'a str,
    pub stream: &'a str,
    pub message: &'a Inbound,
    /// `None` where the message has no identity.
    pub event: Option<&'a Event<'a>>,
    pub state: &'static str,
    pub reason: Option<&'a str>,
    pub stamp: &'a str,
}

/// Keeps a message.
pub(super) fn insert(tx: &Transaction<'_>, letter: &Letter<'_>) -> Result<()> {
    const SQL: &str = "INSERT INTO inbox_events (source, event_id, event_type, aggregate_type, aggregate_id,
            aggregate_version, subject, headers_json, payload, stream, stream_seq, state, reason, received_at, durable)
        VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15)";
    const STEP: &str = "keep an inbound message";
    let Letter { durable, stream, message, event, state, reason, stamp } = letter;
    let text = |pick: fn(&Event<'_>) -> Option<String>| event.and_then(pick);
    tx.prepare_cached(SQL)
        .and_then(|mut s| {
            s.execute(rusqlite::params![
                event.map(|e| e.source.as_ref()),
                event.map(|e| e.event_id.as_ref()),
                event.map(|e| e.event_type.as_ref()),
                text(|e| e.aggregate_type.as_deref().map(str::to_owned)),
                text(|e| e.aggregate_id.as_deref().map(str::to_owned)),
                event.and_then(|e| e.aggregate_version),
                message.subject,
                headers_json(&message.headers),
                &message.payload[..],
                stream,
                sql_seq(message.stream_seq),
                state,
                reason,
                stamp,
                durable,
            ])
        })
        .step(STEP)?;
    Ok(())
}

/// The headers as a JSON object of texts; a name that stands there several times gives a list. `None`: no headers.
fn headers_json(headers: &Headers) -> Option<String> {
    use serde_json::Value;
    if headers.is_empty() {
        return None;
    }
    let mut object = serde_json::Map::new();
    for (name, value) in headers.iter() {
        let value = Value::String(value.to_owned());
        match object.get_mut(name) {
            None => drop(object.insert(name.to_owned(), value)),
            Some(Value::Array(values)) => values.push(value),
            Some(first) => *first = Value::Array(vec![first.take(), value]),
        }
    }
    Some(Value::Object(object).to_string())
}

fn headers_of(json: Option<&str>) -> Headers {
    use serde_json::Value;
    let mut headers = Headers::default();
    if let Some(Ok(Value::Object(object))) = json.map(serde_json::from_str::<Value>) {
        for (name, value) in &object {
            match value {
                Value::String(text) => headers.push(name, text),
                Value::Array(values) => {
                    values.iter().filter_map(Value::as_str).for_each(|text| headers.push(name, text));
                }
                Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => {}
            }
        }
    }
    headers
}

/// One row of a list, with the names of the columns.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Row {
    pub id: i64,
    pub source: Option<String>,
    pub event_id: Option<String>,
    pub event_type: Option<String>,
    pub aggregate_type: Option<String>,
    pub aggregate_id: Option<String>,
    pub aggregate_version: Option<i64>,
    pub subject: String,
    pub stream: Option<String>,
    pub stream_seq: Option<i64>,
    pub state: String,
    pub reason: Option<String>,
    pub received_at: String,
    pub done_at: Option<String>,
    pub durable: String,
}

/// A row whole.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Whole {
    #[serde(flatten)]
    pub row: Row,
    pub headers_json: Option<String>,
    /// As text; bytes that are no UTF-8 are replaced.
    pub payload: String,
    pub payload_bytes: usize,
}

const COLUMNS: &str = "id, source, event_id, event_type, aggregate_type, aggregate_id, aggregate_version, subject,
    stream, stream_seq, state, reason, received_at, done_at, durable";

fn row(row: &rusqlite::Row<'_>) -> rusqlite::Result<Row> {
    Ok(Row {
        id: row.get(0)?,
        source: row.get(1)?,
        event_id: row.get(2)?,
        event_type: row.get(3)?,
        aggregate_type: row.get(4)?,
        aggregate_id: row.get(5)?,
        aggregate_version: row.get(6)?,
        subject: row.get(7)?,
        stream: row.get(8)?,
        stream_seq: row.get(9)?,
        state: row.get(10)?,
        reason: row.get(11)?,
        received_at: row.get(12)?,
        done_at: row.get(13)?,
        durable: row.get(14)?,
    })
}

/// Rows in one state (`dead`, `stored` or `done`), oldest first, at most `limit`.
pub fn list(conn: &Connection, state: &str, limit: usize) -> Result<Vec<Row>> {
    let sql = format!("SELECT {COLUMNS} FROM inbox_events WHERE state = ?1 ORDER BY id LIMIT ?2");
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    conn.prepare_cached(&sql)
        .and_then(|mut s| s.query_map((state, limit), row)?.collect())
        .step("list inbound messages")
}

/// One row whole.
///
/// # Errors
/// [`StoreError::NotFound`].
pub fn show(conn: &Connection, id: i64) -> Result<Whole> {
    let sql = format!("SELECT {COLUMNS}, headers_json, payload FROM inbox_events WHERE id = ?1");
    let read = |r: &rusqlite::Row<'_>| {
        let payload: Vec<u8> = bytes(r, 16)?;
        Ok(Whole {
            row: row(r)?,
            headers_json: r.get(15)?,
            payload: String::from_utf8_lossy(&payload).into_owned(),
            payload_bytes: payload.len(),
        })
    };
    let found = conn.prepare_cached(&sql).and_then(|mut s| s.query_row([id], read).optional());
    found.step("show an inbound message")?.ok_or_else(|| missing(id))
}

fn bytes(row: &rusqlite::Row<'_>, index: usize) -> rusqlite::Result<Vec<u8>> {
    Ok(row.get_ref(index)?.as_bytes_or_null()?.unwrap_or_default().to_vec())
}

fn missing(id: i64) -> StoreError {
    StoreError::NotFound(format!("there is no inbound message with id {id}; `outboxd inbox list` shows them"))
}

/// What became of one dead letter that was tried again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Retried {
    pub id: i64,
    /// `done` or `dead`.
    pub state: &'static str,
    /// What happened, in words.
    pub detail: String,
}

/// Tries one dead letter again in this transaction: dedupe record, effect and state together. It stays dead, with its
/// new reason, where it fails again.
///
/// # Errors
/// [`StoreError::NotFound`], [`StoreError::Refused`] for a row that is not dead, and those of the database as a whole.
pub fn retry(tx: &Transaction<'_>, inbox: &Inbox, id: i64, now: Millis) -> Result<Retried> {
    const SQL: &str =
        "SELECT state, subject, headers_json, payload, stream, stream_seq FROM inbox_events WHERE id = ?1";
    let read = |r: &rusqlite::Row<'_>| {
        let headers: Option<String> = r.get(2)?;
        let message = Inbound {
            stream_seq: r.get::<_, Option<i64>>(5)?.unwrap_or(0).unsigned_abs(),
            subject: r.get(1)?,
            headers: headers_of(headers.as_deref()),
            payload: bytes(r, 3)?.into(),
            unreadable: None,
        };
        Ok((r.get::<_, String>(0)?, r.get::<_, Option<String>>(4)?.unwrap_or_default(), message))
    };
    let found = tx.prepare_cached(SQL).and_then(|mut s| s.query_row([id], read).optional());
    let (state, stream, message) = found.step("read a dead letter")?.ok_or_else(|| missing(id))?;
    if state != "dead" {
        return Err(StoreError::Refused(format!(
            "inbound message {id} is {state}, only a dead one can be tried again"
        )));
    }
    let stamp = time::text(now);
    match again(tx, inbox, &stream, &message, &stamp)? {
        Ok(detail) => {
            const DONE: &str = "UPDATE inbox_events SET state = 'done', done_at = ?2 WHERE id = ?1";
            tx.execute(DONE, (id, &stamp)).step("settle a dead letter")?;
            Ok(Retried { id, state: "done", detail })
        }
        Err(reason) => {
            let reason = settle::reason(&reason);
            const DEAD: &str = "UPDATE inbox_events SET reason = ?2 WHERE id = ?1";
            tx.execute(DEAD, (id, &reason)).step("settle a dead letter")?;
            Ok(Retried { id, state: "dead", detail: reason })
        }
    }
}

/// Applies a kept message; the inner error is why it stays dead.
fn again(
    tx: &Transaction<'_>,
    inbox: &Inbox,
    stream: &str,
    message: &Inbound,
    stamp: &str,
) -> Result<std::result::Result<String, String>> {
    const INSERT: &str =
        "INSERT INTO processed_events (event_id, processed_at) VALUES (?1, ?2) ON CONFLICT (event_id) DO NOTHING";
    const STEP: &str = "try a dead letter again";
    let event = match identify(message) {
        Ok(event) => event,
        Err(cause) => return Ok(Err(cause.to_string())),
    };
    let Some(handler) = inbox.handler(&event.event_type) else {
        return Ok(Err(format!("no handler for type {:?}", event.event_type)));
    };
    let durable = (!inbox.rules.is_first).then_some(inbox.rules.durable.as_str());
    let key = processed_key(durable, &event.source, &event.event_id);
    tx.execute_batch("SAVEPOINT outboxd_letter").step(STEP)?;
    if tx.execute(INSERT, (&key, stamp)).step(STEP)? == 0 {
        tx.execute_batch("RELEASE outboxd_letter").step(STEP)?;
        return Ok(Ok("it was applied meanwhile under another sequence".into()));
    }
    // an operator's order does not wait for a version in between
    let place = Place { rules: &inbox.rules, stream, message, waited: std::time::Duration::MAX, stamp };
    let outcome = handler.apply(tx, &event, &place);
    if let Err(Trouble::Store(error)) = outcome {
        return Err(error);
    }
    if tx.is_autocommit() {
        return Err(StoreError::Refused("the handler rolled the whole transaction back".into()));
    }
    let answer = match outcome {
        Ok(Effect::Applied) => Ok("applied".to_owned()),
        Ok(Effect::Stored) => Ok("stored".to_owned()),
        Ok(Effect::Stale) => Ok("its version is not above the applied one: nothing to do".to_owned()),
        Ok(Effect::Wait(_)) => Err("a version in between is missing".to_owned()),
        Err(Trouble::Own(reason) | Trouble::Blocked(reason)) => Err(reason),
        Err(Trouble::Store(error)) => return Err(error),
    };
    if answer.is_err() {
        tx.execute_batch("ROLLBACK TO outboxd_letter").step(STEP)?;
    }
    tx.execute_batch("RELEASE outboxd_letter").step(STEP)?;
    Ok(answer)
}

/// Removes a dead letter and answers what it was, for the audit row: the row with headers and payload as JSON.
///
/// # Errors
/// [`StoreError::NotFound`], and [`StoreError::Refused`] for a row that is not dead.
pub fn discard(tx: &Transaction<'_>, id: i64) -> Result<Whole> {
    let whole = show(tx, id)?;
    if whole.row.state != "dead" {
        let state = &whole.row.state;
        return Err(StoreError::Refused(format!("inbound message {id} is {state}, only a dead one can be discarded")));
    }
    tx.execute("DELETE FROM inbox_events WHERE id = ?1", [id]).step("discard a dead letter")?;
    Ok(whole)
}
