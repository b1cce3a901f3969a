//! The inbox: dedupe record, effect and position of inbound messages, many of them in one transaction.
//!
//! Invariants: a dedupe record and its effect commit together, or neither · a message whose handler fails leaves
//! nothing behind and does not undo its neighbours · failures are counted here and nowhere else · the position never
//! passes a message that is not settled, and a batch of another stream than the recorded one changes nothing.
//!
//! May import: domain, the rest of the store, rusqlite.

use std::sync::Arc;

use rusqlite::types::ToSql;
use rusqlite::{OptionalExtension, Transaction};

use super::error::{Result, Step, StoreError};
use super::inbox_handlers::{Effect, Handler, Trouble};
use super::{inbox_letters, inbox_position, time};
use crate::domain::apply::{InboxRules, Lane, OwnEvents, Progress, Unmatched, Verdict};
use crate::domain::event::Millis;
use crate::domain::inbox::{Cause, Event, Inbound, Routes, identify, processed_key};
use crate::domain::settle;

/// One durable's rules with their handlers, checked against the schema. Shared with the jobs of the writer.
pub struct Inbox {
    pub rules: InboxRules,
    routes: Routes,
    handlers: Vec<Arc<dyn Handler>>,
}

impl std::fmt::Debug for Inbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inbox").field("rules", &self.rules).finish_non_exhaustive()
    }
}

impl Inbox {
    /// With the handlers that the rules name. `Sql` statements are taken as they are: check them with
    /// [`super::inbox_sql::check`] first.
    pub fn new(rules: InboxRules) -> Self {
        let handlers = rules.handlers.iter().map(|(_, action)| super::inbox_handlers::of(action)).collect();
        let routes = Routes::new(rules.handlers.iter().map(|(pattern, _)| pattern.as_str()));
        Self { rules, routes, handlers }
    }

    /// With handlers of the caller's own: pattern (exact, a prefix with `*`, or `*`) and handler. They come after the
    /// ones of the rules where two patterns are equal.
    pub fn with_handlers(rules: InboxRules, own: Vec<(String, Arc<dyn Handler>)>) -> Self {
        let mut inbox = Self::new(rules);
        let patterns = inbox.rules.handlers.iter().map(|(pattern, _)| pattern.as_str());
        inbox.routes = Routes::new(patterns.chain(own.iter().map(|(pattern, _)| pattern.as_str())));
        inbox.handlers.extend(own.into_iter().map(|(_, handler)| handler));
        inbox
    }

    /// The handler of an event type.
    pub fn handler(&self, event_type: &str) -> Option<&Arc<dyn Handler>> {
        self.routes.find(event_type).and_then(|index| self.handlers.get(index))
    }

    fn key(&self, event: &Event<'_>) -> String {
        let durable = (!self.rules.is_first).then_some(self.rules.durable.as_str());
        processed_key(durable, &event.source, &event.event_id)
    }
}

/// Messages of one session with the stream, in the order in which they arrived.
#[derive(Clone, Debug)]
pub struct Batch {
    pub stream: Arc<str>,
    /// Creation time of the stream.
    pub stream_created: Arc<str>,
    pub messages: Arc<Vec<Inbound>>,
    /// Up to where the session can vouch that nothing went elsewhere; `None`: everywhere.
    pub limit: Option<u64>,
}

/// What a batch came to; true once the transaction is committed.
#[derive(Debug)]
pub struct Applied {
    /// One for each message, in order.
    pub verdicts: Vec<Verdict>,
    pub progress: Progress,
}

/// Applies the messages of `range`. `progress` is the state before; the answer holds the state after.
///
/// With `blame` no handler runs: each message of the range fails with this reason, counted.
///
/// # Errors
/// Of the database as a whole, for which no message can be blamed; [`StoreError::Conflict`] where the durable has moved
/// to another stream meanwhile; [`StoreError::Refused`] where a handler rolled the whole transaction back.
pub fn apply(
    tx: &Transaction<'_>,
    inbox: &Inbox,
    batch: &Batch,
    range: std::ops::Range<usize>,
    progress: Progress,
    blame: Option<&str>,
    now: Millis,
) -> Result<Applied> {
    let messages = &batch.messages[range];
    let durable = &inbox.rules.durable;
    let settled = inbox_position::settled(tx, durable, &batch.stream_created)?;
    let stamp = time::text(now);
    let mut job =
        Job { tx, inbox, batch, progress, now, stamp, settled, blame, past: Past::read(tx, durable, messages)? };
    let mut verdicts = Vec::with_capacity(messages.len());
    for message in messages {
        let verdict = job.one(message)?;
        if verdict.is_settled() {
            job.progress.settle(message.stream_seq);
        }
        verdicts.push(verdict);
    }
    let mut progress = job.progress;
    let floor = progress.advance(batch.limit);
    inbox_position::record(tx, durable, &batch.stream_created, floor, &verdicts)?;
    Ok(Applied { verdicts, progress })
}

/// What is on record about the messages of a batch: failures so far, and deaths above the settled sequence.
struct Past(Vec<(u64, Failures)>);

#[derive(Clone, Copy, Default)]
struct Failures {
    count: u32,
    retry_at: Millis,
    dead: bool,
}

impl Past {
    fn read(tx: &Transaction<'_>, durable: &str, messages: &[Inbound]) -> Result<Self> {
        const SQL: &str = "SELECT stream_seq, failures, retry_at FROM outboxd_inbox_failures
            WHERE durable = ?1 AND stream_seq BETWEEN ?2 AND ?3";
        let low = messages.iter().map(|m| m.stream_seq).min().unwrap_or(0);
        let high = messages.iter().map(|m| m.stream_seq).max().unwrap_or(0);
        let read = |row: &rusqlite::Row<'_>| {
            let failures: i64 = row.get(1)?;
            let count = u32::try_from(failures.max(0)).unwrap_or(u32::MAX);
            Ok((row.get::<_, i64>(0)?.unsigned_abs(), Failures { count, retry_at: row.get(2)?, dead: failures < 0 }))
        };
        let rows = tx
            .prepare_cached(SQL)
            .and_then(|mut s| s.query_map((durable, sql_seq(low), sql_seq(high)), read)?.collect());
        Ok(Self(rows.step("read the failures of inbound messages")?))
    }

    fn of(&self, seq: u64) -> Failures {
        match self.0.binary_search_by_key(&seq, |(seq, _)| *seq) {
            Ok(index) => self.0[index].1,
            Err(_) => Failures::default(),
        }
    }
}

/// A stream sequence as SQLite keeps it.
pub(super) fn sql_seq(seq: u64) -> i64 {
    i64::try_from(seq).unwrap_or(i64::MAX)
}

struct Job<'a> {
    tx: &'a Transaction<'a>,
    inbox: &'a Inbox,
    batch: &'a Batch,
    progress: Progress,
    now: Millis,
    stamp: String,
    settled: u64,
    blame: Option<&'a str>,
    past: Past,
}

/// The outcome of one try in the database.
enum Try {
    Done(Verdict),
    Failed(Trouble),
    Wait(std::time::Duration),
}

impl Job<'_> {
    fn one(&mut self, message: &Inbound) -> Result<Verdict> {
        let seq = message.stream_seq;
        let past = self.past.of(seq);
        if seq <= self.settled || past.dead {
            return Ok(Verdict::Duplicate);
        }
        let rules = &self.inbox.rules;
        let event = match identify(message) {
            Ok(event) => event,
            Err(cause) => return self.bury(message, None, cause),
        };
        if rules.own_events == OwnEvents::Skip && !rules.own_source.is_empty() && event.source == rules.own_source {
            return Ok(Verdict::Skipped);
        }
        let handler = match (self.inbox.handler(&event.event_type), rules.unmatched) {
            (Some(handler), _) => Arc::clone(handler),
            (None, Unmatched::Skip) => return Ok(Verdict::Skipped),
            (None, Unmatched::Store) => super::inbox_handlers::keep(),
            (None, Unmatched::Dead) => {
                return self.bury(message, Some(&event), Cause::Unmatched(event.event_type.to_string()));
            }
        };
        let lane = lane(&event);
        if past.retry_at > self.now {
            let left = u64::try_from(past.retry_at - self.now).unwrap_or(0);
            return Ok(self.later(&event, seq, std::time::Duration::from_millis(left), "it failed and is not due yet"));
        }
        if lane.as_ref().is_some_and(|lane| self.progress.is_held(seq, lane, event.aggregate_version)) {
            let after = crate::domain::apply::LOOK_AGAIN;
            return Ok(self.later(&event, seq, after, "an earlier event of its aggregate is not settled"));
        }
        let tried = match self.blame {
            Some(reason) => Try::Failed(Trouble::Own(reason.to_owned())),
            None => self.attempt(message, &event, &*handler)?,
        };
        match tried {
            Try::Done(verdict) => {
                if past.count > 0 {
                    self.forget_failures(seq)?;
                }
                Ok(verdict)
            }
            Try::Wait(after) => Ok(self.later(&event, seq, after, "a version in between is missing")),
            Try::Failed(Trouble::Blocked(reason)) => {
                Ok(self.later(&event, seq, crate::domain::apply::LOOK_AGAIN, &reason))
            }
            Try::Failed(Trouble::Own(reason)) => self.count(message, &event, past.count, &reason),
            Try::Failed(Trouble::Store(error)) => Err(error),
        }
    }

    /// Dedupe record and effect, both or neither.
    fn attempt(&self, message: &Inbound, event: &Event<'_>, handler: &dyn Handler) -> Result<Try> {
        let key = self.inbox.key(event);
        if handler.is_one_statement() {
            // a statement undoes itself, so the dedupe record is all that has to be taken back
            if !self.remember(&key, event)? {
                return Ok(Try::Done(Verdict::Duplicate));
            }
            let tried = self.run(message, event, handler)?;
            if !matches!(tried, Try::Done(_)) {
                self.execute("DELETE FROM processed_events WHERE event_id = ?1", &[&key], "take a dedupe record back")?;
            }
            return Ok(tried);
        }
        self.execute("SAVEPOINT outboxd_message", &[], "begin a message")?;
        if !self.remember(&key, event)? {
            self.execute("RELEASE outboxd_message", &[], "end a message")?;
            return Ok(Try::Done(Verdict::Duplicate));
        }
        let tried = self.run(message, event, handler)?;
        if !matches!(tried, Try::Done(_)) {
            self.execute("ROLLBACK TO outboxd_message", &[], "undo a message")?;
        }
        self.execute("RELEASE outboxd_message", &[], "end a message")?;
        Ok(tried)
    }

    fn run(&self, message: &Inbound, event: &Event<'_>, handler: &dyn Handler) -> Result<Try> {
        let waited = self.progress.waited(message.stream_seq, self.now);
        let place = super::inbox_handlers::Place {
            rules: &self.inbox.rules,
            stream: &self.batch.stream,
            message,
            waited,
            stamp: &self.stamp,
        };
        let outcome = handler.apply(self.tx, event, &place);
        if let Err(Trouble::Store(error)) = outcome {
            // a full disk rolls back by itself: that is no deed of the handler
            return Err(error);
        }
        if self.tx.is_autocommit() {
            // ON CONFLICT ROLLBACK or RAISE(ROLLBACK): what the neighbours wrote is gone too
            return Err(StoreError::Refused(format!(
                "the handler of type {:?} rolled the whole transaction back",
                event.event_type
            )));
        }
        Ok(match outcome {
            Ok(Effect::Applied) => Try::Done(Verdict::Applied),
            Ok(Effect::Stored) => Try::Done(Verdict::Stored),
            Ok(Effect::Stale) => Try::Done(Verdict::Stale),
            Ok(Effect::Wait(after)) => Try::Wait(after),
            Err(trouble) => Try::Failed(trouble),
        })
    }

    /// Writes the dedupe record; false where it is there already.
    ///
    /// A row with the bare id that a classic consumer wrote counts too. Ours with an empty source has a bare id as well
    /// and another event in it: it is told by its time, which has milliseconds.
    fn remember(&self, key: &str, event: &Event<'_>) -> Result<bool> {
        const CLASSIC: &str = "SELECT 1 FROM processed_events WHERE event_id = ?1
            AND NOT (length(processed_at) = 23 AND substr(processed_at, 11, 1) = ' ')";
        const INSERT: &str =
            "INSERT INTO processed_events (event_id, processed_at) VALUES (?1, ?2) ON CONFLICT (event_id) DO NOTHING";
        if self.execute(INSERT, &[&key, &self.stamp], "write a dedupe record")? == 0 {
            return Ok(false);
        }
        if !self.inbox.rules.is_first || event.source.is_empty() {
            return Ok(true);
        }
        let classic =
            self.tx.prepare_cached(CLASSIC).and_then(|mut s| s.query_row([&*event.event_id], |_| Ok(())).optional());
        match classic.step("look for a classic dedupe record")? {
            None => Ok(true),
            // the record stays: it says the same under our key
            Some(()) => Ok(false),
        }
    }

    fn count(&mut self, message: &Inbound, event: &Event<'_>, before: u32, reason: &str) -> Result<Verdict> {
        let (failures, verdict) = self.inbox.rules.patience.after_failure(before, reason);
        match verdict {
            Verdict::Later { after, counted, reason } => {
                let due = self.now.saturating_add(i64::try_from(after.as_millis()).unwrap_or(i64::MAX));
                self.note(message.stream_seq, i64::from(failures), &reason, due)?;
                self.wait(event, message.stream_seq);
                Ok(Verdict::Later { after, counted, reason })
            }
            Verdict::Dead(cause) => self.bury(message, Some(event), cause),
            settled => Ok(settled),
        }
    }

    /// Keeps a dead letter. The mark in the failures table makes a redelivery above the settled sequence a duplicate.
    fn bury(&self, message: &Inbound, event: Option<&Event<'_>>, cause: Cause) -> Result<Verdict> {
        let reason = settle::reason(&cause.to_string());
        inbox_letters::insert(
            self.tx,
            &inbox_letters::Letter {
                durable: &self.inbox.rules.durable,
                stream: &self.batch.stream,
                message,
                event,
                state: "dead",
                reason: Some(&reason),
                stamp: &self.stamp,
            },
        )?;
        self.note(message.stream_seq, -1, &reason, 0)?;
        Ok(Verdict::Dead(cause))
    }

    fn note(&self, seq: u64, failures: i64, reason: &str, due: Millis) -> Result<()> {
        const SQL: &str = "INSERT INTO outboxd_inbox_failures (durable, stream_seq, failures, last_error, retry_at)
            VALUES (?1, ?2, ?3, ?4, ?5) ON CONFLICT (durable, stream_seq) DO UPDATE
            SET failures = excluded.failures, last_error = excluded.last_error, retry_at = excluded.retry_at";
        let params: [&dyn ToSql; 5] = [&self.inbox.rules.durable, &sql_seq(seq), &failures, &reason, &due];
        self.execute(SQL, &params, "count a failure of an inbound message").map(drop)
    }

    fn forget_failures(&self, seq: u64) -> Result<()> {
        const SQL: &str = "DELETE FROM outboxd_inbox_failures WHERE durable = ?1 AND stream_seq = ?2";
        self.execute(SQL, &[&self.inbox.rules.durable, &sql_seq(seq)], "clear the failures of a message").map(drop)
    }

    fn later(&mut self, event: &Event<'_>, seq: u64, after: std::time::Duration, reason: &str) -> Verdict {
        self.wait(event, seq);
        Verdict::Later { after, counted: false, reason: settle::reason(reason) }
    }

    fn wait(&mut self, event: &Event<'_>, seq: u64) {
        self.progress.wait(seq, lane(event).as_ref(), event.aggregate_version, self.now);
    }

    fn execute(&self, sql: &str, params: &[&dyn ToSql], step: &'static str) -> Result<usize> {
        self.tx.prepare_cached(sql).and_then(|mut s| s.execute(params)).step(step)
    }
}

fn lane(event: &Event<'_>) -> Option<Lane> {
    match (&event.aggregate_type, &event.aggregate_id) {
        (Some(kind), Some(id)) if !id.is_empty() => Some(Lane {
            source: event.source.to_string(),
            aggregate_type: kind.to_string(),
            aggregate_id: id.to_string(),
        }),
        _ => None,
    }
}

#[cfg(test)]
#[path = "inbox_tests.rs"]
mod tests;
