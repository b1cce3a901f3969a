//! What a change of an operator does to the database: the same function in the daemon, through its writer, and in a
//! command that works on the file while no daemon runs. One transaction, its audit row in it.
//!
//! May import: protocol, the store.

use rusqlite::Transaction;
use serde_json::{Value, json};

use super::protocol::{Fault, Reply, Request};
use crate::domain::event::Millis;
use crate::store::error::{Result, StoreError, chain};
use crate::store::inbox::Inbox;
use crate::store::{audit, inbox_letters, operate, time};

/// What the daemon has to be told after a change, because its watch on the file does not see its own commits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    None,
    Pause,
    Outbox,
    Inbox,
}

/// See [`Effect`].
pub fn effect(request: &Request) -> Effect {
    match request {
        Request::Status | Request::Reload => Effect::None,
        Request::Pause { .. } | Request::Resume => Effect::Pause,
        Request::EventsRetry { .. } | Request::EventsDiscard { .. } => Effect::Outbox,
        Request::InboxRetry { .. } | Request::InboxDiscard { .. } => Effect::Inbox,
    }
}

/// Does a change in `tx` and answers what was done, as JSON. `inbox` has the handlers that a retried message needs.
///
/// # Errors
/// [`StoreError::Refused`] and [`StoreError::NotFound`] with a text for the operator; nothing is written then.
pub fn perform(
    tx: &Transaction<'_>,
    request: &Request,
    inbox: Option<&Inbox>,
    actor: &str,
    now: Millis,
) -> Result<Value> {
    match request {
        Request::Status | Request::Reload => Err(StoreError::Refused("this is not a change of the database".into())),
        Request::Pause { for_ms } => {
            let until = for_ms.map(|ms| now.saturating_add(i64::try_from(ms).unwrap_or(i64::MAX)));
            operate::pause(tx, actor, until)?;
            let shown = until.map_or("until resume".into(), time::rfc3339);
            Ok(json!({"paused_until": shown}))
        }
        Request::Resume => Ok(json!({"was_paused": operate::resume(tx, actor)?})),
        Request::EventsRetry { ids, dry_run } => {
            let changed = if *dry_run { operate::would_retry(tx, ids)? } else { operate::retry(tx, actor, ids)? };
            Ok(rows(changed, "pending", *dry_run))
        }
        Request::EventsDiscard { ids, reason, dry_run } => {
            let changed = if *dry_run {
                operate::would_discard(tx, ids, now)?
            } else {
                operate::discard(tx, actor, ids, reason, now)?
            };
            Ok(rows(changed, "discarded", *dry_run))
        }
        Request::InboxRetry { ids } => {
            let inbox = inbox.ok_or_else(|| {
                StoreError::Refused("the inbox has no handlers in this configuration; add [[inbox.handler]]".into())
            })?;
            let mut done = Vec::new();
            for id in ids {
                let retried = inbox_letters::retry(tx, inbox, *id, now)?;
                let detail = format!("{}: {}", retried.state, retried.detail);
                audit::write(tx, actor, "inbox retry", &id.to_string(), &detail)?;
                done.push(json!({"id": id, "state": retried.state, "detail": retried.detail}));
            }
            Ok(Value::Array(done))
        }
        Request::InboxDiscard { ids, reason } => {
            let mut done = Vec::new();
            for id in ids {
                let whole = inbox_letters::discard(tx, *id)?;
                // what is discarded stays in the audit row, payload included
                let kept = json!({"reason": reason, "message": whole}).to_string();
                audit::write(tx, actor, "inbox discard", &id.to_string(), &kept)?;
                done.push(json!({"id": id, "state": "discarded", "detail": reason}));
            }
            Ok(Value::Array(done))
        }
    }
}

/// What became of each event, `state` being that of the changed ones.
fn rows(changed: operate::Changed, state: &str, dry_run: bool) -> Value {
    let detail = if dry_run { "would be, nothing was changed" } else { "" };
    let done = changed.done.into_iter().map(|id| json!({"id": id, "state": state, "detail": detail}));
    let left = changed.left.into_iter().map(|(id, why)| json!({"id": id, "state": "left", "detail": why}));
    Value::Array(done.chain(left).collect())
}

/// The reply that goes with what was done: partly, where some of a list could not be; failed, where none could.
pub fn reply(result: Value) -> Reply {
    let is_left = |row: &&Value| matches!(row["state"].as_str(), Some("left" | "dead"));
    let exit = match result.as_array() {
        Some(rows) => match rows.iter().filter(is_left).count() {
            0 => 0,
            left if left == rows.len() => 1,
            _ => 3,
        },
        None => 0,
    };
    Reply::with_exit(exit, result)
}

/// An error of the store as the command line tells it.
pub fn fault(error: &StoreError) -> Fault {
    let exit = match error {
        StoreError::Busy(_) | StoreError::Full(_) | StoreError::Io(_) | StoreError::Replaced { .. } => 69,
        StoreError::Crashed(_) => 70,
        _ => 1,
    };
    Fault { exit, what: chain(error), fix: None }
}

/// The answer to a request whose asker has given up: nothing is written.
pub fn expired() -> StoreError {
    StoreError::Refused("the request was too old when its turn came; nothing was written".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exit_tells_all_some_or_none() {
        let exit = |states: &[&str]| reply(states.iter().map(|s| json!({"state": s})).collect()).exit;
        assert_eq!(exit(&["pending", "pending"]), 0);
        assert_eq!(exit(&["pending", "left"]), 3);
        assert_eq!(exit(&["left", "dead"]), 1);
        assert_eq!(exit(&[]), 0);
        assert_eq!(reply(json!({"paused_until": "x"})).exit, 0);
    }
}
