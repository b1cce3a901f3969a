//! Subjects: the template that makes one out of an event, the escaping of its tokens, filters with wildcards.
//!
//! A subject is tokens joined by dots; a template has literal tokens and placeholders. Every placeholder but `{event}`
//! and `{event_type}` is one token; those two keep their dots as token separators. Whatever is not legal in a token is
//! written `%XX` (one upper-case pair of hex digits a UTF-8 byte), and the empty text is written `%-`: the encoding
//! is an injection, and [`decode_token`] takes it back. Legal as they stand: printable ASCII except dot, `*`, `>`, `%`.
//!
//! Invariants: a rendered subject is legal, holds no wildcard, begins with a literal token (so neither `$` nor `_INBOX`
//! subjects occur), and has at most [`limits::SUBJECT`] bytes. May import: std, thiserror, limits.

use std::collections::{BTreeSet, HashSet};
use std::fmt;

use super::event::PendingEvent;
use crate::limits;

/// What the placeholders of a template are filled with.
#[derive(Clone, Copy, Debug)]
pub struct Fields<'a> {
    pub aggregate_type: &'a str,
    pub aggregate_id: &'a str,
    pub event_type: &'a str,
    pub event_id: &'a str,
    pub schema_version: i64,
    pub source: &'a str,
}

impl<'a> Fields<'a> {
    /// The fields of a pending row; `source` is the identity of this database.
    pub fn of(event: &'a PendingEvent, source: &'a str) -> Self {
        Self {
            aggregate_type: &event.key.kind,
            aggregate_id: &event.key.id,
            event_type: &event.event_type,
            event_id: &event.event_id,
            schema_version: event.schema_version,
            source,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Placeholder {
    AggregateType,
    AggregateId,
    Event,
    EventType,
    EventId,
    SchemaVersion,
    Source,
}

impl Placeholder {
    const ALL: [(&'static str, Placeholder); 7] = [
        ("aggregate_type", Placeholder::AggregateType),
        ("aggregate_id", Placeholder::AggregateId),
        ("event", Placeholder::Event),
        ("event_type", Placeholder::EventType),
        ("event_id", Placeholder::EventId),
        ("schema_version", Placeholder::SchemaVersion),
        ("source", Placeholder::Source),
    ];

    /// It may render more than one token.
    fn keeps_dots(self) -> bool {
        matches!(self, Placeholder::Event | Placeholder::EventType)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Literal(String),
    Field(Placeholder),
}

/// A token of a template, as far as coverage by a stream's subjects is concerned.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Shape {
    Literal(String),
    /// One token that can be anything.
    One,
    /// One token or more that can be anything.
    Many,
}

/// A subject template that has been checked. Made by [`Template::parse`] only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template {
    text: String,
    parts: Vec<Part>,
    shapes: Vec<Shape>,
}

/// Why [`Template::parse`] refused; for an operator.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    #[error("the subject template is empty")]
    Empty,
    #[error("token {0} of the subject template is empty: dots stand between tokens only")]
    EmptyToken(usize),
    #[error("'{{' without its '}}' in the subject template")]
    Unclosed,
    #[error("unknown placeholder {{{name}}} (known: {known})", known = placeholder_names())]
    UnknownPlaceholder { name: String },
    #[error("{0:?} is not legal in a subject template: printable ASCII except blank, '*', '>', '%', '}}'")]
    Character(char),
    #[error("the first token must be literal text, so that streams can be bound to it")]
    FirstToken,
    #[error(
        "the first token must not begin with '$' or be _INBOX: these subjects belong to the server and its clients"
    )]
    Reserved,
    #[error("the literal text alone is longer than {} bytes", limits::SUBJECT)]
    TooLong,
}

/// Names of all placeholders, with braces, for messages.
pub fn placeholder_names() -> String {
    let names: Vec<String> = Placeholder::ALL.iter().map(|(name, _)| format!("{{{name}}}")).collect();
    names.join(" ")
}

/// The rendered subject has more bytes than [`limits::SUBJECT`]: the row's own fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the subject has {bytes} bytes, {} is the limit: shorten aggregate id or event type", limits::SUBJECT)]
pub struct SubjectTooLong {
    pub bytes: usize,
}

impl Template {
    /// Checks a template such as `events.{aggregate_type}.{aggregate_id}.{event}`.
    pub fn parse(text: &str) -> Result<Self, TemplateError> {
        if text.is_empty() {
            return Err(TemplateError::Empty);
        }
        let mut parts = Vec::new();
        let mut shapes = Vec::new();
        for (index, token) in split_tokens(text).enumerate() {
            if token.is_empty() {
                return Err(TemplateError::EmptyToken(index + 1));
            }
            if index > 0 {
                push_literal(&mut parts, ".");
            }
            let shape = parse_token(token, &mut parts)?;
            if index == 0 {
                match &shape {
                    Shape::Literal(l) if l.starts_with('$') || l == "_INBOX" => return Err(TemplateError::Reserved),
                    Shape::Literal(_) => {}
                    Shape::One | Shape::Many => return Err(TemplateError::FirstToken),
                }
            }
            shapes.push(shape);
        }
        let literal: usize = parts.iter().map(|p| if let Part::Literal(l) = p { l.len() } else { 0 }).sum();
        if literal > limits::SUBJECT {
            return Err(TemplateError::TooLong);
        }
        Ok(Self { text: text.to_owned(), parts, shapes })
    }

    /// The subject of one event. One allocation where nothing needs escaping.
    pub fn render(&self, fields: &Fields<'_>) -> Result<String, SubjectTooLong> {
        let mut out = String::with_capacity(
            self.text.len() + fields.aggregate_type.len() + fields.aggregate_id.len() + fields.event_type.len(),
        );
        for part in &self.parts {
            match part {
                Part::Literal(text) => out.push_str(text),
                Part::Field(Placeholder::AggregateType) => encode_token(fields.aggregate_type, &mut out),
                Part::Field(Placeholder::AggregateId) => encode_token(fields.aggregate_id, &mut out),
                Part::Field(Placeholder::Event) => {
                    encode_tokens(short_type(fields.event_type, fields.aggregate_type), &mut out)
                }
                Part::Field(Placeholder::EventType) => encode_tokens(fields.event_type, &mut out),
                Part::Field(Placeholder::EventId) => encode_token(fields.event_id, &mut out),
                Part::Field(Placeholder::SchemaVersion) => {
                    use fmt::Write;
                    write!(out, "{}", fields.schema_version).expect("writing to a String does not fail");
                }
                Part::Field(Placeholder::Source) => encode_token(fields.source, &mut out),
            }
        }
        if out.len() > limits::SUBJECT {
            return Err(SubjectTooLong { bytes: out.len() });
        }
        Ok(out)
    }

    /// Whether every subject that this template can render is covered by the subjects of a stream, taken together.
    ///
    /// A placeholder stands for a token that no literal of the list equals: that is the worst case, because a literal
    /// token is matched by whatever matches such a token, and perhaps by more.
    pub fn covered_by<S: AsRef<str>>(&self, subjects: &[S]) -> bool {
        let filters: Vec<Vec<&str>> = subjects.iter().map(|s| s.as_ref().split('.').collect()).collect();
        let start: States = (0..filters.len()).map(|i| (i, 0)).collect();
        covers(&self.shapes, start, &filters, &mut HashSet::new())
    }

    /// The template as it was written.
    pub fn as_str(&self) -> &str {
        &self.text
    }
}

impl fmt::Display for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// The event type without its leading `{aggregate_type}.`.
pub fn short_type<'a>(event_type: &'a str, aggregate_type: &str) -> &'a str {
    event_type.strip_prefix(aggregate_type).and_then(|rest| rest.strip_prefix('.')).unwrap_or(event_type)
}

/// Splits at dots outside braces, so that a wrong placeholder such as `{a.b}` is named whole.
fn split_tokens(text: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0usize;
    text.split(move |c| {
        match c {
            '{' => depth += 1,
            '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        c == '.' && depth == 0
    })
}

/// Appends the parts of one token and says what it can render.
fn parse_token(token: &str, parts: &mut Vec<Part>) -> Result<Shape, TemplateError> {
    let (mut rest, mut fields, mut many) = (token, 0, false);
    while !rest.is_empty() {
        if let Some(after) = rest.strip_prefix('{') {
            let (name, tail) = after.split_once('}').ok_or(TemplateError::Unclosed)?;
            let found = Placeholder::ALL.iter().find(|(known, _)| *known == name);
            let (_, field) = found.ok_or_else(|| TemplateError::UnknownPlaceholder { name: name.to_owned() })?;
            parts.push(Part::Field(*field));
            fields += 1;
            many |= field.keeps_dots();
            rest = tail;
        } else {
            let end = rest.find('{').unwrap_or(rest.len());
            let (literal, tail) = rest.split_at(end);
            if let Some(bad) = literal.chars().find(|&c| c == '}' || !c.is_ascii() || !LEGAL[c as usize]) {
                return Err(TemplateError::Character(bad));
            }
            push_literal(parts, literal);
            rest = tail;
        }
    }
    Ok(match (fields, many) {
        (0, _) => Shape::Literal(token.to_owned()),
        (_, true) => Shape::Many,
        (_, false) => Shape::One,
    })
}

/// Joins literals that follow each other.
fn push_literal(parts: &mut Vec<Part>, text: &str) {
    match parts.last_mut() {
        Some(Part::Literal(last)) => last.push_str(text),
        _ => parts.push(Part::Literal(text.to_owned())),
    }
}

/// Where matching stands: (subject of the list, tokens of it that are used up).
type States = BTreeSet<(usize, usize)>;

/// The states after one more token; `None` is a token that no literal equals.
fn step(states: &States, token: Option<&str>, filters: &[Vec<&str>]) -> States {
    let mut next = States::new();
    for &(subject, at) in states {
        let filter = &filters[subject];
        match filter.get(at) {
            Some(&">") => next.insert((subject, filter.len())),
            Some(&"*") => next.insert((subject, at + 1)),
            Some(&literal) if token == Some(literal) => next.insert((subject, at + 1)),
            None if filter.last() == Some(&">") => next.insert((subject, at)),
            Some(_) | None => false,
        };
    }
    next
}

fn covers(shapes: &[Shape], states: States, filters: &[Vec<&str>], seen: &mut HashSet<(usize, States)>) -> bool {
    let Some((first, rest)) = shapes.split_first() else {
        return states.iter().any(|&(subject, at)| at == filters[subject].len());
    };
    if states.is_empty() {
        return false;
    }
    if !seen.insert((shapes.len(), states.clone())) {
        return true; // this case is being decided already, and every case must hold
    }
    match first {
        Shape::Literal(token) => covers(rest, step(&states, Some(token), filters), filters, seen),
        Shape::One => covers(rest, step(&states, None, filters), filters, seen),
        Shape::Many => {
            let mut states = states;
            loop {
                let next = step(&states, None, filters);
                if !covers(rest, next.clone(), filters, seen) {
                    return false;
                }
                if next == states {
                    return true;
                }
                states = next;
            }
        }
    }
}

/// Bytes that stand in a token as they are.
const LEGAL: [bool; 256] = {
    let mut table = [false; 256];
    let mut byte = 0x21;
    while byte < 0x7f {
        table[byte] = !matches!(byte as u8, b'.' | b'*' | b'>' | b'%');
        byte += 1;
    }
    table
};

/// How the empty text is written. Never a prefix of an escape, which goes on with a hex digit.
const EMPTY: &str = "%-";

/// Appends `text` as one legal token.
pub fn encode_token(text: &str, out: &mut String) {
    if text.is_empty() {
        return out.push_str(EMPTY);
    }
    let bytes = text.as_bytes();
    let mut rest = 0;
    while let Some(length) = bytes[rest..].iter().position(|&b| !LEGAL[usize::from(b)]) {
        let at = rest + length;
        // everything before `at` is ASCII, and the escape below covers single bytes: only whole runs are copied
        out.push_str(&text[rest..at]);
        let mut end = at;
        while end < bytes.len() && !LEGAL[usize::from(bytes[end])] {
            push_escape(bytes[end], out);
            end += 1;
        }
        rest = end;
    }
    out.push_str(&text[rest..]);
}

/// Appends `text` with its dots as token separators, each token escaped for itself.
fn encode_tokens(text: &str, out: &mut String) {
    for (index, token) in text.split('.').enumerate() {
        if index > 0 {
            out.push('.');
        }
        encode_token(token, out);
    }
}

/// Appends `%XX`.
pub(super) fn push_escape(byte: u8, out: &mut String) {
    const HEX: &[u8; 16] = b"0123456789ABCDEF";
    out.push('%');
    out.push(char::from(HEX[usize::from(byte >> 4)]));
    out.push(char::from(HEX[usize::from(byte & 15)]));
}

/// Takes [`encode_token`] back; `None` for a token that it never writes.
pub fn decode_token(token: &str) -> Option<String> {
    if token == EMPTY {
        return Some(String::new());
    }
    let mut bytes = Vec::with_capacity(token.len());
    let mut rest = token.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        if first == b'%' {
            let (pair, tail) = tail.split_at_checked(2)?;
            let (high, low) = (hex(pair[0])?, hex(pair[1])?);
            let byte = high << 4 | low;
            if LEGAL[usize::from(byte)] {
                return None;
            }
            bytes.push(byte);
            rest = tail;
        } else if LEGAL[usize::from(first)] {
            bytes.push(first);
            rest = tail;
        } else {
            return None;
        }
    }
    if bytes.is_empty() { None } else { String::from_utf8(bytes).ok() }
}

fn hex(digit: u8) -> Option<u8> {
    match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'A'..=b'F' => Some(digit - b'A' + 10),
        _ => None,
    }
}

/// Why a subject or filter is not legal; for an operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubjectError {
    #[error("a subject must not be empty")]
    Empty,
    #[error("a subject must not have an empty token")]
    EmptyToken,
    #[error("a subject must not contain blanks or control characters")]
    Blank,
    #[error("'*' must be a token of its own")]
    Star,
    #[error("'>' must be the last token")]
    Greater,
    #[error("wildcards are not allowed here")]
    Wildcard,
    #[error("the subject is longer than {} bytes", limits::SUBJECT)]
    TooLong,
}

/// Checks a subject that may hold wildcards: a stream's subject or a consumer's filter.
///
/// Stricter than the server, which takes `a*` as a literal token: nobody means that.
pub fn check_filter(subject: &str) -> Result<(), SubjectError> {
    if subject.is_empty() {
        return Err(SubjectError::Empty);
    }
    if subject.len() > limits::SUBJECT {
        return Err(SubjectError::TooLong);
    }
    if subject.chars().any(|c| c.is_whitespace() || c.is_control()) {
        return Err(SubjectError::Blank);
    }
    let mut tokens = subject.split('.').peekable();
    while let Some(token) = tokens.next() {
        match token {
            "" => return Err(SubjectError::EmptyToken),
            ">" if tokens.peek().is_some() => return Err(SubjectError::Greater),
            ">" | "*" => {}
            _ if token.contains('*') => return Err(SubjectError::Star),
            _ if token.contains('>') => return Err(SubjectError::Greater),
            _ => {}
        }
    }
    Ok(())
}

/// Checks a subject without wildcards: one that can be published to.
pub fn check_subject(subject: &str) -> Result<(), SubjectError> {
    check_filter(subject)?;
    if subject.contains(['*', '>']) { Err(SubjectError::Wildcard) } else { Ok(()) }
}

/// Whether a filter takes a subject. Both must be legal; wildcards in `subject` are literal.
pub fn matches(filter: &str, subject: &str) -> bool {
    let (mut wanted, mut tokens) = (filter.split('.'), subject.split('.'));
    loop {
        match (wanted.next(), tokens.next()) {
            (Some(">"), Some(_)) | (None, None) => return true,
            (Some("*"), Some(_)) => {}
            (Some(a), Some(b)) if a == b => {}
            _ => return false,
        }
    }
}

/// Whether some subject is taken by both filters: a server refuses such pairs within one stream or consumer.
pub fn overlap(one: &str, other: &str) -> bool {
    let (mut left, mut right) = (one.split('.'), other.split('.'));
    loop {
        match (left.next(), right.next()) {
            (Some(">"), Some(_)) | (Some(_), Some(">")) | (None, None) => return true,
            (Some("*"), Some(_)) | (Some(_), Some("*")) => {}
            (Some(a), Some(b)) if a == b => {}
            _ => return false,
        }
    }
}

#[cfg(test)]
#[path = "subject_tests.rs"]
mod tests;
