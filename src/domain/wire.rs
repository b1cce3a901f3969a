//! A message on the wire: subject, id, headers and body of one event.
//!
//! Headers follow the CloudEvents NATS binding (`ce-*`, percent-encoded) and its binary or structured content mode; the
//! rest of the envelope travels in `Outboxd-*`; an application adds its own by `headers_json`.
//!
//! Invariants: a [`WireMessage`] made here has a legal subject, legal and unique header names, no control character in
//! any value, and in the envelope format exactly the stored payload bytes. Whatever cannot be made so is [`Illegal`],
//! before the wire. May import: std, bytes, thiserror, serde and serde_json for reading JSON, limits.

use std::borrow::Cow;

use bytes::Bytes;
use serde_json::value::RawValue;

use super::event::PendingEvent;
use super::headers::{self, HeadersError};
use super::rfc3339::rfc3339;
use super::subject::{Fields, SubjectTooLong, Template, push_escape};

/// How the body is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// The bytes of `payload_json`, unchanged.
    Envelope,
    /// A structured CloudEvent whose `data` is `payload_json` as it stands.
    CloudEvents,
}

/// One message, ready for the wire: legal subject, legal headers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WireMessage {
    pub subject: String,
    /// `Nats-Msg-Id`: `{source}:{event_id}`. Not repeated in `headers`.
    pub msg_id: String,
    /// In the order in which they are written; names are unique.
    pub headers: Vec<(Cow<'static, str>, String)>,
    pub payload: Bytes,
}

/// Name of the header that carries [`WireMessage::msg_id`].
pub const MSG_ID: &str = "Nats-Msg-Id";

impl WireMessage {
    /// Bytes that the server counts against `max_payload` and `max_msg_size`: the header block, `Nats-Msg-Id`
    /// included, and the payload; the subject is not counted (nats-server, `processHeaderPub` and
    /// `processJetStreamMsg`). Headers that a sender adds later cost [`header_size`] each.
    pub fn wire_size(&self) -> usize {
        let own: usize = self.headers.iter().map(|(name, value)| header_size(name, value)).sum();
        "NATS/1.0\r\n".len() + header_size(MSG_ID, &self.msg_id) + own + "\r\n".len() + self.payload.len()
    }
}

/// Bytes of one header line.
pub fn header_size(name: &str, value: &str) -> usize {
    name.len() + ": ".len() + value.len() + "\r\n".len()
}

/// The event can never be published as it is: the row's own fault. The text is for the operator, in `last_error`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Illegal {
    #[error(transparent)]
    Subject(#[from] SubjectTooLong),
    #[error("the message id {0:?} holds a control character or ends with a blank, which no NATS header can carry")]
    MsgId(String),
    #[error("headers_json: {0}")]
    Headers(#[from] HeadersError),
    #[error("payload_json is no JSON text ({0}), so it cannot be the data of a CloudEvent")]
    NotJson(String),
}

/// Makes the message of one event. `source` is the identity of this database.
pub fn message(
    event: &PendingEvent,
    source: &str,
    template: &Template,
    format: Format,
) -> Result<WireMessage, Illegal> {
    let subject = template.render(&Fields::of(event, source))?;
    let msg_id = msg_id(source, &event.event_id);
    if msg_id.chars().any(char::is_control) || msg_id.trim() != msg_id {
        return Err(Illegal::MsgId(msg_id));
    }
    let mut extra = match &event.headers_json {
        Some(json) => headers::parse(json)?,
        None => Vec::new(),
    };
    let given_type = extra
        .iter()
        .position(|(name, _)| name.eq_ignore_ascii_case(CONTENT_TYPE))
        .map(|index| extra.remove(index).1)
        .unwrap_or_else(|| JSON.to_owned());
    let time = rfc3339(&event.created_at);
    let (content_type, payload) = match format {
        Format::Envelope => (given_type, event.payload.clone()),
        Format::CloudEvents => (STRUCTURED.to_owned(), structured(event, source, time.as_deref(), &given_type)?.into()),
    };

    let mut headers = Vec::with_capacity(12 + extra.len());
    let mut put = |name: &'static str, value: String| headers.push((Cow::Borrowed(name), value));
    put("ce-specversion", SPEC_VERSION.to_owned());
    put("ce-id", percent_encode(&event.event_id));
    put("ce-source", percent_encode(source));
    put("ce-type", percent_encode(&event.event_type));
    put("ce-subject", percent_encode(&event.key.id));
    if let Some(time) = time {
        put("ce-time", time);
    }
    put(CONTENT_TYPE, content_type);
    put("Outboxd-Aggregate-Type", percent_encode(&event.key.kind));
    put("Outboxd-Aggregate-Id", percent_encode(&event.key.id));
    put("Outboxd-Aggregate-Version", event.aggregate_version.to_string());
    put("Outboxd-Schema-Version", event.schema_version.to_string());
    put("Outboxd-Seq", event.seq.to_string());
    headers.extend(extra.into_iter().map(|(name, value)| (Cow::Owned(name), value)));
    Ok(WireMessage { subject, msg_id, headers, payload })
}

/// `{source}:{event_id}`: the value of `Nats-Msg-Id`.
pub fn msg_id(source: &str, event_id: &str) -> String {
    let mut id = String::with_capacity(source.len() + 1 + event_id.len());
    id.push_str(source);
    id.push(':');
    id.push_str(event_id);
    id
}

const SPEC_VERSION: &str = "1.0";
const CONTENT_TYPE: &str = "Content-Type";
const JSON: &str = "application/json";
const STRUCTURED: &str = "application/cloudevents+json";

/// The structured CloudEvent. Extension attributes have lower-case names without separators (CloudEvents 1.0, 3.1).
fn structured(event: &PendingEvent, source: &str, time: Option<&str>, data_type: &str) -> Result<Vec<u8>, Illegal> {
    // a check only: the bytes are spliced in as they stand
    serde_json::from_slice::<&RawValue>(&event.payload).map_err(|e| Illegal::NotJson(e.to_string()))?;
    let version = event.aggregate_version.to_string();
    let schema = event.schema_version.to_string();
    let attributes = [
        ("specversion", Some(SPEC_VERSION)),
        ("id", Some(event.event_id.as_str())),
        ("source", Some(source)),
        ("type", Some(event.event_type.as_str())),
        ("subject", Some(&*event.key.id)),
        ("time", time),
        ("datacontenttype", Some(data_type)),
        ("aggregatetype", Some(&*event.key.kind)),
        ("aggregateversion", Some(version.as_str())),
        ("schemaversion", Some(schema.as_str())),
    ];
    let mut body = Vec::with_capacity(event.payload.len() + 384);
    for (name, value) in attributes {
        let Some(value) = value else { continue };
        body.push(if body.is_empty() { b'{' } else { b',' });
        body.extend_from_slice(format!("\"{name}\":").as_bytes());
        serde_json::to_writer(&mut body, value).expect("a string is JSON, and writing to a Vec does not fail");
    }
    body.extend_from_slice(b",\"data\":");
    body.extend_from_slice(&event.payload);
    body.push(b'}');
    Ok(body)
}

/// Percent-encodes a header value as the CloudEvents protocol bindings say: everything outside U+0021 to U+007E,
/// the double quote and the percent sign, one `%XX` a UTF-8 byte.
pub fn percent_encode(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_ascii_graphic() && c != '"' && c != '%' {
            out.push(c);
        } else {
            for byte in c.encode_utf8(&mut [0; 4]).bytes() {
                push_escape(byte, &mut out);
            }
        }
    }
    out
}

/// Takes [`percent_encode`] back, leniently as the bindings ask of receivers: either case of hex digits, characters
/// that need no escape escaped, a `%` without two hex digits kept. `None` where the bytes are not UTF-8.
pub fn percent_decode(text: &str) -> Option<Cow<'_, str>> {
    if !text.contains('%') {
        return Some(Cow::Borrowed(text));
    }
    let digit = |byte: Option<&u8>| byte.and_then(|&b| char::from(b).to_digit(16)).and_then(|d| u8::try_from(d).ok());
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        match (bytes[at], digit(bytes.get(at + 1)), digit(bytes.get(at + 2))) {
            (b'%', Some(high), Some(low)) => {
                out.push(high << 4 | low);
                at += 3;
            }
            (byte, _, _) => {
                out.push(byte);
                at += 1;
            }
        }
    }
    String::from_utf8(out).ok().map(Cow::Owned)
}

#[cfg(test)]
#[path = "wire_tests.rs"]
mod tests;
