//! What an inbound message is: identity, type, aggregate and version, and which handler it is for.
//!
//! Rules: identity is `ce-source` + `ce-id`; where those headers are missing it is the `event_id` of the envelope with
//! an empty source. `Nats-Msg-Id` is never an identity. Type, aggregate and version come from the headers, else from
//! the envelope; where both exist and differ the message is dead (`identity mismatch`). Any bytes may arrive here:
//! nothing panics, nothing recurses, and the work is linear in the size of the message.
//!
//! May import: std, bytes, thiserror, serde, serde_json.

use std::borrow::Cow;

use bytes::Bytes;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::wire::percent_decode;

/// Longest id, source, type, aggregate type or aggregate id that is taken, in bytes.
pub const MAX_NAME: usize = 1_024;

/// Deepest nesting of a JSON body that a handler is given.
pub const MAX_DEPTH: usize = 128;

/// The headers of a message in the order in which they arrived, in one block of text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Headers {
    text: String,
    /// Ends of name and value of each field within `text`.
    ends: Vec<(u32, u32)>,
}

impl Headers {
    /// Adds a field. What would not fit the 4 GiB of the offsets is left out; no broker lets that pass.
    pub fn push(&mut self, name: &str, value: &str) {
        let name_end = self.text.len() + name.len();
        let (Ok(n), Ok(v)) = (u32::try_from(name_end), u32::try_from(name_end + value.len())) else { return };
        self.text.push_str(name);
        self.text.push_str(value);
        self.ends.push((n, v));
    }

    /// Name and value of each field.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        let mut start = 0usize;
        self.ends.iter().map(move |&(name_end, value_end)| {
            let (n, v) = (name_end as usize, value_end as usize);
            let field = (&self.text[start..n], &self.text[n..v]);
            start = v;
            field
        })
    }

    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }
}

impl<N: AsRef<str>, V: AsRef<str>> FromIterator<(N, V)> for Headers {
    fn from_iter<T: IntoIterator<Item = (N, V)>>(fields: T) -> Self {
        let mut headers = Self::default();
        fields.into_iter().for_each(|(name, value)| headers.push(name.as_ref(), value.as_ref()));
        headers
    }
}

/// A message as the stream holds it.
#[derive(Clone, Debug, Default)]
pub struct Inbound {
    /// Sequence in the stream.
    pub stream_seq: u64,
    pub subject: String,
    pub headers: Headers,
    pub payload: Bytes,
    /// The header block is not what the NATS protocol allows; the reason. `headers` is then what could be read of it.
    pub unreadable: Option<String>,
}

/// An inbound event that can be told apart from every other.
#[derive(Clone, Debug, PartialEq)]
pub struct Event<'a> {
    /// Empty where the producer names none.
    pub source: Cow<'a, str>,
    pub event_id: Cow<'a, str>,
    pub event_type: Cow<'a, str>,
    pub aggregate_type: Option<Cow<'a, str>>,
    pub aggregate_id: Option<Cow<'a, str>>,
    /// Greater than zero.
    pub aggregate_version: Option<i64>,
    pub body: Body<'a>,
}

/// What the body is to a handler.
#[derive(Clone, Debug, PartialEq)]
pub enum Body<'a> {
    /// JSON text: the whole (`event`), and its `data` member where it is an envelope, else the whole once more.
    Json { event: &'a str, data: Option<&'a str> },
    /// No JSON that a handler could use, and why.
    Opaque(String),
}

/// Why a message can never be applied. `Display` is the reason of the dead row; [`Cause::label`] is for metrics.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Cause {
    #[error("unreadable headers: {0}")]
    Unreadable(String),
    #[error("no identity: no ce-id header, and {0}")]
    NoIdentity(String),
    #[error("no type: no ce-type header, and {0}")]
    NoType(String),
    #[error("identity mismatch: {field} is {header:?} in the headers and {body:?} in the body")]
    Mismatch { field: &'static str, header: String, body: String },
    #[error("illegal {field}: {why}")]
    Illegal { field: &'static str, why: String },
    #[error("no handler for type {0:?}")]
    Unmatched(String),
    #[error("gave up after {failures} failures: {last}")]
    Failed { failures: u32, last: String },
}

impl Cause {
    /// A short name of low cardinality.
    pub fn label(&self) -> &'static str {
        match self {
            Cause::Unreadable(_) => "unreadable",
            Cause::NoIdentity(_) => "no_identity",
            Cause::NoType(_) => "no_type",
            Cause::Mismatch { .. } => "identity_mismatch",
            Cause::Illegal { .. } => "illegal",
            Cause::Unmatched(_) => "unmatched",
            Cause::Failed { .. } => "handler_failed",
        }
    }
}

/// The headers that say what a message is. Values as they arrived.
#[derive(Default)]
struct Named<'a> {
    id: Option<&'a str>,
    source: Option<&'a str>,
    kind: Option<&'a str>,
    aggregate_type: Option<&'a str>,
    aggregate_id: Option<&'a str>,
    aggregate_version: Option<&'a str>,
    structured: bool,
}

impl<'a> Named<'a> {
    fn read(headers: &'a Headers) -> Result<Self, Cause> {
        let mut named = Self::default();
        for (name, value) in headers.iter() {
            let (field, slot) = match name.len() {
                5 if name.eq_ignore_ascii_case("ce-id") => ("ce-id", &mut named.id),
                7 if name.eq_ignore_ascii_case("ce-type") => ("ce-type", &mut named.kind),
                9 if name.eq_ignore_ascii_case("ce-source") => ("ce-source", &mut named.source),
                12 if name.eq_ignore_ascii_case("content-type") => {
                    let kind = value.as_bytes();
                    named.structured |= kind.len() >= 23 && kind[..23].eq_ignore_ascii_case(b"application/cloudevents");
                    continue;
                }
                20 if name.eq_ignore_ascii_case("outboxd-aggregate-id") => {
                    ("Outboxd-Aggregate-Id", &mut named.aggregate_id)
                }
                22 if name.eq_ignore_ascii_case("outboxd-aggregate-type") => {
                    ("Outboxd-Aggregate-Type", &mut named.aggregate_type)
                }
                25 if name.eq_ignore_ascii_case("outboxd-aggregate-version") => {
                    ("Outboxd-Aggregate-Version", &mut named.aggregate_version)
                }
                _ => continue,
            };
            match slot {
                Some(first) if *first != value => {
                    return Err(Cause::Illegal { field, why: "the header stands there twice with two values".into() });
                }
                _ => *slot = Some(value).filter(|v| !v.is_empty()),
            }
        }
        Ok(named)
    }
}

/// The members of an envelope; each as it stands, so that a wrong type in one does not hide the others.
#[derive(Default, Deserialize)]
struct Envelope<'a> {
    #[serde(borrow, default)]
    event_id: Option<&'a RawValue>,
    #[serde(borrow, default)]
    event_type: Option<&'a RawValue>,
    #[serde(borrow, default)]
    aggregate_type: Option<&'a RawValue>,
    #[serde(borrow, default)]
    aggregate_id: Option<&'a RawValue>,
    #[serde(borrow, default)]
    aggregate_version: Option<&'a RawValue>,
    #[serde(borrow, default)]
    data: Option<&'a RawValue>,
}

/// The members of a structured CloudEvent.
#[derive(Default, Deserialize)]
struct Structured<'a> {
    #[serde(borrow, default)]
    id: Option<&'a RawValue>,
    #[serde(borrow, default)]
    source: Option<&'a RawValue>,
    #[serde(borrow, rename = "type", default)]
    kind: Option<&'a RawValue>,
    #[serde(borrow, default)]
    data: Option<&'a RawValue>,
}

/// What the body says. `why` is filled where it says nothing.
#[derive(Default)]
struct Said<'a> {
    source: Option<Cow<'a, str>>,
    id: Option<Cow<'a, str>>,
    kind: Option<Cow<'a, str>>,
    aggregate_type: Option<Cow<'a, str>>,
    aggregate_id: Option<Cow<'a, str>>,
    aggregate_version: Option<i64>,
}

/// Reads what a message says about itself. Pure and total: every input gives an event or the cause of its death.
pub fn identify(message: &Inbound) -> Result<Event<'_>, Cause> {
    if let Some(why) = &message.unreadable {
        return Err(Cause::Unreadable(why.clone()));
    }
    let named = Named::read(&message.headers)?;
    let (said, body) = read_body(&message.payload, named.structured)?;
    let why = |member: &str| match &body {
        Body::Opaque(why) => format!("the body is no envelope ({why})"),
        Body::Json { .. } => format!("the body has no {member} that is a text"),
    };
    let event_id = one("event_id", named.id, said.id)?
        .filter(|id| !id.is_empty())
        .ok_or_else(|| Cause::NoIdentity(why("event_id")))?;
    let source = one("source", named.source, said.source)?.unwrap_or_default();
    let event_type = one("event_type", named.kind, said.kind)?
        .filter(|kind| !kind.is_empty())
        .ok_or_else(|| Cause::NoType(why("event_type")))?;
    let aggregate_type = one("aggregate_type", named.aggregate_type, said.aggregate_type)?;
    let aggregate_id = one("aggregate_id", named.aggregate_id, said.aggregate_id)?;
    let aggregate_version = version(named.aggregate_version, said.aggregate_version)?;
    for (field, value) in [
        ("event_id", Some(&event_id)),
        ("source", Some(&source)),
        ("event_type", Some(&event_type)),
        ("aggregate_type", aggregate_type.as_ref()),
        ("aggregate_id", aggregate_id.as_ref()),
    ] {
        legal(field, value.map_or("", |v| v))?;
    }
    Ok(Event { source, event_id, event_type, aggregate_type, aggregate_id, aggregate_version, body })
}

/// The one value of a field that the headers and the body may both name.
fn one<'a>(
    field: &'static str,
    header: Option<&'a str>,
    body: Option<Cow<'a, str>>,
) -> Result<Option<Cow<'a, str>>, Cause> {
    let Some(raw) = header else { return Ok(body) };
    // a producer that does not percent-encode is understood where the body confirms what it means
    if let Some(said) = &body
        && said == raw
    {
        return Ok(body);
    }
    let value = decoded(field, raw)?;
    match body {
        Some(said) if !said.is_empty() && said != value => {
            Err(Cause::Mismatch { field, header: clip(&value), body: clip(&said) })
        }
        _ => Ok(Some(value)),
    }
}

fn version(header: Option<&str>, body: Option<i64>) -> Result<Option<i64>, Cause> {
    const FIELD: &str = "aggregate_version";
    let Some(raw) = header else { return Ok(body) };
    let value = raw.parse::<i64>().ok().filter(|v| *v > 0);
    match (value, body) {
        (None, _) => Err(Cause::Illegal { field: FIELD, why: format!("{:?} is no positive integer", clip(raw)) }),
        (Some(v), Some(b)) if v != b => {
            Err(Cause::Mismatch { field: FIELD, header: v.to_string(), body: b.to_string() })
        }
        (v, _) => Ok(v),
    }
}

fn legal(field: &'static str, value: &str) -> Result<(), Cause> {
    if value.len() > MAX_NAME {
        return Err(Cause::Illegal { field, why: format!("{} bytes, {MAX_NAME} are allowed", value.len()) });
    }
    if value.chars().any(char::is_control) {
        return Err(Cause::Illegal { field, why: "it holds a control character".into() });
    }
    Ok(())
}

/// Decodes a header value of the CloudEvents binding (HTTP and NATS bindings 1.0, "header values"): double quotes
/// around it are taken off, `%XX` becomes its byte, and the whole must be UTF-8.
fn decoded<'a>(field: &'static str, raw: &'a str) -> Result<Cow<'a, str>, Cause> {
    let illegal = || Cause::Illegal { field, why: "its percent-encoding is no UTF-8".into() };
    match raw.strip_prefix('"').and_then(|r| r.strip_suffix('"')) {
        Some(text) if text.contains('\\') => {
            let text = unescaped(text);
            percent_decode(&text).map(|t| Cow::Owned(t.into_owned())).ok_or_else(illegal)
        }
        Some(text) => percent_decode(text).ok_or_else(illegal),
        None => percent_decode(raw).ok_or_else(illegal),
    }
}

fn unescaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        out.push(if c == '\\' { chars.next().unwrap_or('\\') } else { c });
    }
    out
}

fn read_body(payload: &[u8], structured: bool) -> Result<(Said<'_>, Body<'_>), Cause> {
    let text = match json_text(payload) {
        Ok(text) => text,
        Err(why) => return Ok((Said::default(), Body::Opaque(why))),
    };
    let mut said = Said::default();
    let mut event = text;
    if structured && text.starts_with('{') {
        match serde_json::from_str::<Structured<'_>>(text) {
            Ok(outer) => {
                said.id = string(outer.id);
                said.source = string(outer.source);
                said.kind = string(outer.kind);
                event = outer.data.map_or("null", RawValue::get);
            }
            Err(error) => return Ok((Said::default(), Body::Opaque(format!("not JSON: {error}")))),
        }
    }
    if !event.starts_with('{') {
        return Ok((said, Body::Json { event, data: Some(event) }));
    }
    let envelope = match serde_json::from_str::<Envelope<'_>>(event) {
        Ok(envelope) => envelope,
        Err(error) => return Ok((Said::default(), Body::Opaque(format!("not JSON: {error}")))),
    };
    let (id, kind) = (string(envelope.event_id), string(envelope.event_type));
    let data = if id.is_some() || kind.is_some() { envelope.data.map(RawValue::get) } else { Some(event) };
    said.id = inner("event_id", said.id, id)?;
    said.kind = inner("event_type", said.kind, kind)?;
    said.aggregate_type = string(envelope.aggregate_type);
    said.aggregate_id = string(envelope.aggregate_id);
    said.aggregate_version = envelope.aggregate_version.and_then(integer);
    Ok((said, Body::Json { event, data }))
}

/// A CloudEvent and the envelope that is its data must agree as headers and body do.
fn inner<'a>(
    field: &'static str,
    outer: Option<Cow<'a, str>>,
    inner: Option<Cow<'a, str>>,
) -> Result<Option<Cow<'a, str>>, Cause> {
    match (outer, inner) {
        (Some(outer), Some(inner)) if outer != inner => {
            Err(Cause::Mismatch { field, header: clip(&outer), body: clip(&inner) })
        }
        (Some(value), _) | (None, Some(value)) => Ok(Some(value)),
        (None, None) => Ok(None),
    }
}

/// The body as JSON text without blanks around it, or why it is none.
fn json_text(payload: &[u8]) -> Result<&str, String> {
    let text = std::str::from_utf8(payload).map_err(|e| format!("not UTF-8 at byte {}", e.valid_up_to()))?;
    let text = text.trim_matches([' ', '\t', '\n', '\r']);
    if text.is_empty() {
        return Err("it is empty".into());
    }
    if depth(text.as_bytes()) > MAX_DEPTH {
        return Err(format!("nested deeper than {MAX_DEPTH} levels"));
    }
    if !text.starts_with('{') {
        // objects are checked by the parse that reads their members
        serde_json::from_str::<&RawValue>(text).map_err(|e| format!("not JSON: {e}"))?;
    }
    Ok(text)
}

/// Deepest nesting of brackets outside of strings; one pass, no recursion.
fn depth(text: &[u8]) -> usize {
    let (mut now, mut most, mut quoted, mut escaped) = (0usize, 0usize, false, false);
    for byte in text {
        match (quoted, byte) {
            (true, _) if escaped => escaped = false,
            (true, b'\\') => escaped = true,
            (true, b'"') => quoted = false,
            (true, _) => {}
            (false, b'"') => quoted = true,
            (false, b'{' | b'[') => {
                now += 1;
                most = most.max(now);
            }
            (false, b'}' | b']') => now = now.saturating_sub(1),
            (false, _) => {}
        }
    }
    most
}

fn string(raw: Option<&RawValue>) -> Option<Cow<'_, str>> {
    let raw = raw?.get();
    match serde_json::from_str::<&str>(raw) {
        Ok(text) => Some(Cow::Borrowed(text)),
        Err(_) => serde_json::from_str::<String>(raw).ok().map(Cow::Owned),
    }
}

fn integer(raw: &RawValue) -> Option<i64> {
    serde_json::from_str::<i64>(raw.get()).ok().filter(|v| *v > 0)
}

/// At most 80 characters of a foreign text, for a reason.
fn clip(text: &str) -> String {
    text.chars().take(80).collect()
}

/// The dedupe record of an event: `{source}:{event_id}`, the bare id where the source is empty, with `{durable}/` in
/// front for every durable but the first (`durable` is `None` for the first).
pub fn processed_key(durable: Option<&str>, source: &str, event_id: &str) -> String {
    let mut key = String::with_capacity(durable.map_or(0, |d| d.len() + 1) + source.len() + 1 + event_id.len());
    if let Some(durable) = durable {
        key.push_str(durable);
        key.push('/');
    }
    if !source.is_empty() {
        key.push_str(source);
        key.push(':');
    }
    key.push_str(event_id);
    key
}

/// Which handler an event type is for: the exact one, else the longest prefix, else `*`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Routes {
    exact: std::collections::HashMap<String, usize>,
    /// Longest first; `*` is the empty prefix.
    prefixes: Vec<(String, usize)>,
}

impl Routes {
    /// From the patterns in the order of the configuration; of two equal patterns the first one wins.
    pub fn new<'a>(patterns: impl IntoIterator<Item = &'a str>) -> Self {
        let mut routes = Self::default();
        for (index, pattern) in patterns.into_iter().enumerate() {
            match pattern.strip_suffix('*') {
                Some(prefix) => routes.prefixes.push((prefix.to_owned(), index)),
                None => {
                    routes.exact.entry(pattern.to_owned()).or_insert(index);
                }
            }
        }
        routes.prefixes.sort_by_key(|(prefix, index)| (std::cmp::Reverse(prefix.len()), *index));
        routes
    }

    /// The place of the handler in the configuration.
    pub fn find(&self, event_type: &str) -> Option<usize> {
        self.exact.get(event_type).copied().or_else(|| {
            self.prefixes.iter().find(|(prefix, _)| event_type.starts_with(prefix.as_str())).map(|(_, index)| *index)
        })
    }
}

#[cfg(test)]
#[path = "inbox_tests.rs"]
mod tests;
