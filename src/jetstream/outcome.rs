//! From an error of NATS or JetStream to what it means for the event: the only place where error codes are read.
//!
//! Codes: nats-server, `server/errors.json`. A refusal by code means that nothing was stored by this try; the two
//! exceptions, where the outcome stays open, have a [`Meaning`] of their own.
//!
//! May import: domain, async_nats.

use std::borrow::Cow;

use async_nats::ConnectErrorKind;
use async_nats::client::PublishErrorKind;
use serde::Deserialize;

use crate::domain::settle::{Class, Outcome};

/// The error object of a JetStream answer.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct ApiError {
    /// In the manner of HTTP: 400, 404, 503.
    #[serde(default)]
    pub code: u32,
    /// The precise one: 10059 and its like.
    #[serde(default)]
    pub err_code: u32,
    #[serde(default)]
    pub description: String,
}

impl std::fmt::Display for ApiError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let words: Cow<'_, str> =
            if self.description.is_empty() { "refused without a reason".into() } else { (&*self.description).into() };
        if self.err_code == 0 { write!(f, "{words}") } else { write!(f, "{words} (JetStream {})", self.err_code) }
    }
}

/// No stream of that name.
pub const STREAM_NOT_FOUND: u32 = 10_059;
/// Nothing (more) to read.
pub const NO_MESSAGE_FOUND: u32 = 10_037;
/// Somebody made a stream of that name, but another one, in between.
pub const STREAM_NAME_EXISTS: u32 = 10_058;
/// A request with a field that the server does not know (strict since 2.12).
pub const INVALID_JSON: u32 = 10_025;
/// The store refused: full, or a storage fault.
pub const STORE_FAILED: u32 = 10_077;

/// What an error answer to a publish means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meaning {
    /// Refused, nothing stored.
    Refused(Class),
    /// Another try of the same id is still on its way through the stream's replicas: neither stored nor refused yet.
    InProcess,
    /// Another stream over the same subject (leaf node and hub) spoke first; ours may still answer.
    OtherStream,
    /// The run was refused whole for a reason that its messages need not share: they are sent one by one.
    Unbundle,
}

/// Reads the error of a publish; `run` tells whether it was an atomic batch.
pub fn of_publish(error: &ApiError, run: bool) -> Meaning {
    match error.err_code {
        // "expected stream does not match": we name our stream in Nats-Expected-Stream, so this is another stream
        10_060 => return Meaning::OtherStream,
        // duplicate message id is in process (replicated streams): the first try may still fail
        10_158 => return Meaning::InProcess,
        _ => {}
    }
    let class = class_of(error);
    if run && unbundles(error.err_code, class) { Meaning::Unbundle } else { Meaning::Refused(class) }
}

/// A run is all or nothing: what one of its messages caused must not be charged to the others, and what the batch
/// protocol itself refused says nothing about them.
fn unbundles(err_code: u32, class: Class) -> bool {
    match err_code {
        // 10174 atomic publish disabled meanwhile · 10175 sequence missing · 10176 incomplete: a gap, ten seconds
        // without a message, another leader, or one message of it refused · 10177 unsupported header (a server older
        // than 2.12.1 and Nats-Msg-Id) · 10179 bad id · 10199 too many messages · 10200 bad commit · 10201 one of the
        // ids is known, the server does not say which · 10210 too many batches in flight
        10_174..=10_177 | 10_179 | 10_199..=10_201 | 10_210 => true,
        // 10071, 10164 wrong last sequence: never a fault of the row
        10_071 | 10_164 => true,
        _ => match class {
            Class::Outage => false,
            Class::Subject | Class::Row | Class::Counted => true,
        },
    }
}

fn class_of(error: &ApiError) -> Class {
    match error.err_code {
        // the message itself, whatever we do: larger than max_msg_size; headers above 64 KiB; a TTL that the stream
        // does not take (10165, 10166)
        10_054 | 10_097 | 10_165 | 10_166 => Class::Row,
        // "maximum messages per subject exceeded" hits this subject only; "maximum messages exceeded", "maximum bytes
        // exceeded" and faults of the disk hit all
        STORE_FAILED if error.description.contains("per subject") => Class::Subject,
        STORE_FAILED => Class::Outage,
        // no room: account or tier limits, storage, memory
        10_002 | 10_023 | 10_028 | 10_047 => Class::Outage,
        // no JetStream: temporarily unavailable, no peers, not the leader, not enabled, not for this account
        10_004..=10_009 | 10_035 | 10_039 | 10_076 => Class::Outage,
        // the stream: gone, sealed, offline, a mirror or counter stream that takes no plain message
        STREAM_NOT_FOUND | 10_109 | 10_118 | 10_194 | 10_169 => Class::Outage,
        // too much at once, or a concurrent change: the same message passes a little later; no row's fault
        10_071 | 10_164 | 10_167 | 10_174..=10_177 | 10_179 | 10_199..=10_201 | 10_210 => Class::Subject,
        // a code that this version does not know: its HTTP-like class decides
        _ => match error.code {
            429 => Class::Subject,
            503 | 500 => Class::Outage,
            _ => Class::Counted,
        },
    }
}

/// Status 503 instead of an answer: nobody listens on the subject. `usable` is what `STREAM.INFO` said afterwards:
/// with a healthy stream it is this subject (`a..b`, or one that the stream does not cover), else the stream.
pub fn no_responders(usable: bool) -> Outcome {
    let (class, detail) = if usable {
        (Class::Subject, "nobody answers on this subject: the stream does not cover it, or has no leader right now")
    } else {
        (Class::Outage, "nobody answers on this subject: the stream is not there")
    };
    Outcome::Refused { class, code: 503, detail: detail.into() }
}

/// A publish that this account may not do: the server says so in an error line of its own, never in a reply.
pub fn forbidden(subject: &str) -> Outcome {
    Outcome::Refused {
        class: Class::Subject,
        code: 0,
        detail: format!("the server forbids this user to publish to {subject}: allow it in the user's permissions"),
    }
}

/// The client itself refused to queue the message.
pub fn of_client(kind: PublishErrorKind, detail: &str) -> Outcome {
    match kind {
        // checked against the server's max_payload, headers included: the server would drop the connection
        PublishErrorKind::MaxPayloadExceeded => {
            Outcome::Refused { class: Class::Row, code: 0, detail: format!("too large for the server: {detail}") }
        }
        PublishErrorKind::InvalidSubject => Outcome::Refused { class: Class::Row, code: 0, detail: detail.into() },
        // the client's task is gone: nothing was queued
        PublishErrorKind::Send => Outcome::NotSent,
    }
}

/// Whether a failed connect means "these credentials are refused", which alone backs off beyond a second.
pub fn is_refusal(kind: ConnectErrorKind) -> bool {
    match kind {
        ConnectErrorKind::Authentication | ConnectErrorKind::AuthorizationViolation => true,
        ConnectErrorKind::ServerParse
        | ConnectErrorKind::Dns
        | ConnectErrorKind::TimedOut
        | ConnectErrorKind::Tls
        | ConnectErrorKind::Io
        | ConnectErrorKind::MaxReconnects => false,
    }
}

/// The subject of `Permissions Violation for Publish to "a.b"` (Go's `%q`), if it is that message.
pub fn forbidden_subject(error: &str) -> Option<String> {
    quoted_after(error, "Permissions Violation for Publish to ")
}

/// The subject that we may not subscribe to, or not name as a reply: then no ack can ever arrive.
pub fn forbidden_inbox(error: &str) -> Option<String> {
    quoted_after(error, "Permissions Violation for Subscription to ")
        .or_else(|| quoted_after(error, "Permissions Violation for Publish with Reply of "))
}

fn quoted_after(text: &str, prefix: &str) -> Option<String> {
    let at = text.to_ascii_lowercase().find(&prefix.to_ascii_lowercase())?;
    let rest = text.get(at + prefix.len()..)?.strip_prefix('"')?;
    let mut subject = String::with_capacity(rest.len());
    let mut chars = rest.chars();
    while let Some(c) = chars.next() {
        match c {
            '"' => return Some(subject),
            '\\' => subject.push(chars.next()?),
            c => subject.push(c),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(code: u32, err_code: u32, description: &str) -> ApiError {
        ApiError { code, err_code, description: description.into() }
    }

    #[test]
    fn every_known_code_has_its_class() {
        use Class::{Counted, Outage, Row, Subject};
        let table: &[(u32, u32, &str, Class)] = &[
            (400, 10_054, "message size exceeds maximum allowed", Row),
            (400, 10_097, "header size exceeds maximum allowed of 64k", Row),
            (400, 10_166, "per-message TTL is disabled", Row),
            (503, 10_077, "maximum messages exceeded", Outage),
            (503, 10_077, "maximum bytes exceeded", Outage),
            (503, 10_077, "maximum messages per subject exceeded", Subject),
            (503, 10_077, "no space left on device", Outage),
            (503, 10_023, "insufficient resources", Outage),
            (500, 10_047, "insufficient storage resources available", Outage),
            (400, 10_002, "resource limits exceeded for account", Outage),
            (503, 10_076, "jetstream not enabled", Outage),
            (503, 10_039, "jetstream not enabled for account", Outage),
            (503, 10_008, "jetstream system temporarily unavailable", Outage),
            (404, 10_059, "stream not found", Outage),
            (400, 10_109, "invalid operation on sealed stream", Outage),
            (500, 10_118, "stream is offline", Outage),
            (429, 10_167, "too many requests", Subject),
            (400, 10_071, "wrong last sequence: 7", Subject),
            (400, 10_003, "bad request", Counted),
            (400, 19_999, "a code of a later server", Counted),
            (429, 19_999, "a code of a later server", Subject),
            (503, 19_999, "a code of a later server", Outage),
            (0, 0, "", Counted),
        ];
        for (code, err_code, description, class) in table {
            let got = of_publish(&error(*code, *err_code, description), false);
            assert_eq!(got, Meaning::Refused(*class), "{err_code} {description}");
        }
    }

    #[test]
    fn open_outcomes_are_no_refusals() {
        for run in [false, true] {
            assert_eq!(of_publish(&error(400, 10_060, "expected stream does not match"), run), Meaning::OtherStream);
            assert_eq!(of_publish(&error(409, 10_158, "duplicate message id is in process"), run), Meaning::InProcess);
        }
    }

    #[test]
    fn a_run_is_never_charged_for_one_of_its_messages() {
        for code in [10_054, 10_071, 10_164, 10_165, 10_167, 10_174, 10_176, 10_177, 10_199, 10_201, 10_210, 10_003] {
            assert_eq!(of_publish(&error(400, code, ""), true), Meaning::Unbundle, "{code}");
        }
        for code in [10_059, 10_076, 10_077, 10_109, 10_023] {
            assert_eq!(of_publish(&error(503, code, ""), true), Meaning::Refused(Class::Outage), "{code}");
        }
    }

    #[test]
    fn the_same_batch_codes_on_a_single_message_cost_it_nothing() {
        for code in [10_174, 10_176, 10_199, 10_201, 10_210] {
            assert_eq!(of_publish(&error(400, code, ""), false), Meaning::Refused(Class::Subject), "{code}");
        }
    }

    #[test]
    fn a_violation_names_its_subject() {
        let of = |text: &str| forbidden_subject(text);
        assert_eq!(of(r#"Permissions Violation for Publish to "events.a.b""#).as_deref(), Some("events.a.b"));
        assert_eq!(of(r#"nats: permissions violation for publish to "E.x""#).as_deref(), Some("E.x"));
        assert_eq!(of(r#"Permissions Violation for Publish to "a.\"q\\""#).as_deref(), Some(r#"a."q\"#));
        assert_eq!(of(r#"Permissions Violation for Publish to "cut"#), None);
        assert_eq!(of("Authorization Violation"), None);
        let inbox = forbidden_inbox(r#"Permissions Violation for Subscription to "_INBOX.x.*""#);
        assert_eq!(inbox.as_deref(), Some("_INBOX.x.*"));
        assert_eq!(of(r#"Permissions Violation for Subscription to "_INBOX.x.*""#), None);
    }

    #[test]
    fn only_refused_credentials_back_off() {
        assert!(is_refusal(ConnectErrorKind::AuthorizationViolation));
        assert!(!is_refusal(ConnectErrorKind::Io));
        assert!(!is_refusal(ConnectErrorKind::Tls));
    }

    #[test]
    fn an_api_error_reads_as_a_sentence() {
        assert_eq!(error(404, 10_059, "stream not found").to_string(), "stream not found (JetStream 10059)");
        assert_eq!(error(500, 0, "").to_string(), "refused without a reason");
    }
}
