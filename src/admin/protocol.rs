//! What the command line and a running daemon say to each other over the unix socket: one JSON value a line.
//!
//! The daemon speaks first (a [`Greeting`]), so that a request is only ever sent to somebody who listens: where no
//! greeting comes nothing was asked, and nothing will be done later. A request also carries the instant after which it
//! must not be begun any more. Bounded in size and in time on both sides.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::domain::event::Millis;

/// Version of this protocol; both sides refuse another one.
pub const VERSION: u32 = 1;

/// Longest line in bytes: room for tens of thousands of ids.
pub const LINE_MAX: usize = 4 * 1024 * 1024;

/// How long the client waits for the greeting of a daemon that took the connection.
pub const GREETING_WAIT: Duration = Duration::from_secs(3);

/// The first line of the daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Greeting {
    pub outboxd: u32,
    pub version: String,
    pub pid: u32,
    /// Why this peer is not served; the daemon closes after it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<Fault>,
}

/// One request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Envelope {
    pub v: u32,
    /// Wall clock of this machine; a change that was not begun by then is refused.
    pub expires_at: Millis,
    /// The login behind `sudo`; believed only from root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sudo_user: Option<String>,
    pub request: Request,
}

/// What can be asked of a running daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "verb", rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    Status,
    Reload,
    Pause {
        /// Milliseconds; `None`: until `resume`.
        for_ms: Option<u64>,
    },
    Resume,
    EventsRetry {
        ids: Vec<String>,
        dry_run: bool,
    },
    EventsDiscard {
        ids: Vec<String>,
        reason: String,
        dry_run: bool,
    },
    InboxRetry {
        ids: Vec<i64>,
    },
    InboxDiscard {
        ids: Vec<i64>,
        reason: String,
    },
}

impl Request {
    /// How long the client waits for the answer. A write waits for foreign locks; a reload connects to NATS.
    pub fn patience(&self) -> Duration {
        match self {
            Request::Status => Duration::from_secs(10),
            Request::Reload => Duration::from_secs(60),
            Request::Pause { .. }
            | Request::Resume
            | Request::EventsRetry { .. }
            | Request::EventsDiscard { .. }
            | Request::InboxRetry { .. }
            | Request::InboxDiscard { .. } => Duration::from_secs(30),
        }
    }
}

/// The answer to a request: an exit code with a result, or with what went wrong.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reply {
    pub v: u32,
    /// Exit code of the command.
    pub exit: u8,
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub result: Value,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<Fault>,
}

/// What went wrong, for a person.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    pub exit: u8,
    pub what: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fix: Option<String>,
}

impl Fault {
    pub fn new(exit: u8, what: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { exit, what: what.into(), fix: Some(fix.into()) }
    }
}

impl Reply {
    /// It was done.
    pub fn done(result: Value) -> Self {
        Self { v: VERSION, exit: 0, result, error: None }
    }

    /// It was done in part, or another exit code goes with the result.
    pub fn with_exit(exit: u8, result: Value) -> Self {
        Self { v: VERSION, exit, result, error: None }
    }

    /// It was not done.
    pub fn failed(fault: Fault) -> Self {
        Self { v: VERSION, exit: fault.exit, result: Value::Null, error: Some(fault) }
    }
}

/// A value as its line.
pub fn line(value: &impl Serialize) -> String {
    let mut text = serde_json::to_string(value).expect("our shapes have string keys and no failing serializer");
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_request_is_one_line_and_comes_back_equal() {
        let envelope = Envelope {
            v: VERSION,
            expires_at: 7,
            sudo_user: None,
            request: Request::EventsDiscard { ids: vec!["a\nb".into()], reason: "why".into(), dry_run: true },
        };
        let line = line(&envelope);
        assert_eq!(line.matches('\n').count(), 1);
        assert_eq!(serde_json::from_str::<Envelope>(&line).unwrap(), envelope);
        assert!(line.contains(r#""verb":"events_discard""#), "{line}");
    }

    #[test]
    fn an_unknown_verb_or_argument_is_refused() {
        for bad in [json!({"verb": "drop"}), json!({"verb": "pause", "until": 3}), json!({"verb": "events_retry"})] {
            assert!(serde_json::from_value::<Request>(bad.clone()).is_err(), "{bad}");
        }
    }
}
