//! `headers_json`: the extra headers of an application, read strictly.
//!
//! May import: std, thiserror, serde and serde_json, limits.

use std::fmt;

use serde::Deserialize;
use serde::de::{MapAccess, Visitor};
use serde_json::Value;

use crate::limits;

/// Why `headers_json` cannot be sent; for an operator, after `headers_json: `.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeadersError {
    #[error("{bytes} bytes, {} is the limit", limits::HEADERS_JSON)]
    TooLong { bytes: usize },
    #[error("must be a JSON object of string values ({0})")]
    NotAnObject(String),
    #[error("the value of {0:?} is not a string")]
    NotAString(String),
    #[error("{0:?} is no legal header name (letters, digits and !#$%&'*+-.^_`|~)")]
    Name(String),
    #[error("{0:?} may not be set here: Nats-*, ce-* and Outboxd-* are written by outboxd")]
    Reserved(String),
    #[error("the value of {0:?} holds a control character")]
    Value(String),
    #[error("{0:?} is given twice (names are compared without regard to case)")]
    Twice(String),
}

/// Prefixes that belong to the server, to CloudEvents and to us, in any case of letters.
const RESERVED: [&str; 3] = ["nats-", "ce-", "outboxd-"];

/// The headers in the order of the object, names and values unmodified.
pub fn parse(json: &str) -> Result<Vec<(String, String)>, HeadersError> {
    if json.len() > limits::HEADERS_JSON {
        return Err(HeadersError::TooLong { bytes: json.len() });
    }
    let Members(members) = serde_json::from_str(json).map_err(|e| HeadersError::NotAnObject(e.to_string()))?;
    let mut headers: Vec<(String, String)> = Vec::with_capacity(members.len());
    for (name, value) in members {
        let Value::String(value) = value else { return Err(HeadersError::NotAString(name)) };
        if name.is_empty() || !name.bytes().all(is_token_byte) {
            return Err(HeadersError::Name(name));
        }
        if RESERVED.iter().any(|p| name.get(..p.len()).is_some_and(|head| head.eq_ignore_ascii_case(p))) {
            return Err(HeadersError::Reserved(name));
        }
        if value.chars().any(char::is_control) {
            return Err(HeadersError::Value(name));
        }
        if headers.iter().any(|(known, _)| known.eq_ignore_ascii_case(&name)) {
            return Err(HeadersError::Twice(name));
        }
        headers.push((name, value));
    }
    Ok(headers)
}

/// `tchar` of RFC 9110, 5.6.2.
fn is_token_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

/// The members of a JSON object in their order, repeated names included.
struct Members(Vec<(String, Value)>);

impl<'de> Deserialize<'de> for Members {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Collect;
        impl<'de> Visitor<'de> for Collect {
            type Value = Members;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Members, A::Error> {
                let mut members = Vec::new();
                while let Some(member) = map.next_entry()? {
                    members.push(member);
                }
                Ok(Members(members))
            }
        }
        deserializer.deserialize_map(Collect)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_keep_their_order_and_their_text() {
        let json = r#"{"tracestate":"a=1,b=2","traceparent":"00-4bf9-00f0-01","X-Größe":"no"}"#;
        assert_eq!(parse(json), Err(HeadersError::Name("X-Größe".into())));
        let json = r#"{"tracestate":"a=1,b=2","traceparent":"00-4bf9-00f0-01","x.tenant":"käse 7"}"#;
        let wanted = [("tracestate", "a=1,b=2"), ("traceparent", "00-4bf9-00f0-01"), ("x.tenant", "käse 7")];
        assert_eq!(parse(json).unwrap(), wanted.map(|(n, v)| (n.to_owned(), v.to_owned())));
        assert_eq!(parse(" {} ").unwrap(), []);
    }

    #[test]
    fn what_is_no_object_of_strings_is_refused() {
        for json in ["", "null", "[]", "\"a\"", "{", "{\"a\":\"1\"} x", "{\"a\":\"1\",}"] {
            assert!(matches!(parse(json), Err(HeadersError::NotAnObject(_))), "{json:?}");
        }
        for json in [r#"{"a":1}"#, r#"{"a":null}"#, r#"{"a":{"b":"c"}}"#, r#"{"a":["b"]}"#] {
            assert_eq!(parse(json), Err(HeadersError::NotAString("a".into())), "{json}");
        }
    }

    #[test]
    fn names_and_values_that_could_forge_a_header_are_refused() {
        for name in ["", "a b", "a:b", "a\\nb", "ä", "a\\u0000"] {
            let json = format!(r#"{{"{name}":"1"}}"#);
            assert!(matches!(parse(&json), Err(HeadersError::Name(_))), "{json}");
        }
        for name in ["Nats-Msg-Id", "nats-rollup", "NATS-Expected-Stream", "ce-id", "CE-Type", "outboxd-seq"] {
            let json = format!(r#"{{"{name}":"1"}}"#);
            assert_eq!(parse(&json), Err(HeadersError::Reserved(name.into())), "{json}");
        }
        for value in ["a\\r\\nNats-Rollup: all", "a\\u0000", "\\u007f", "\\u0085"] {
            let json = format!(r#"{{"x":"{value}"}}"#);
            assert_eq!(parse(&json), Err(HeadersError::Value("x".into())), "{json}");
        }
        for name in ["Natsy", "cell-id", "ce", "Outboxd"] {
            assert!(parse(&format!(r#"{{"{name}":"1"}}"#)).is_ok(), "{name}");
        }
    }

    #[test]
    fn a_name_given_twice_is_refused_in_any_case_of_letters() {
        assert_eq!(parse(r#"{"x":"1","x":"2"}"#), Err(HeadersError::Twice("x".into())));
        assert_eq!(parse(r#"{"x":"1","X":"2"}"#), Err(HeadersError::Twice("X".into())));
    }

    #[test]
    fn the_ceiling_holds_to_the_byte() {
        let json = |bytes: usize| format!(r#"{{"x":"{}"}}"#, "v".repeat(bytes - 8));
        assert!(parse(&json(limits::HEADERS_JSON)).is_ok());
        let above = json(limits::HEADERS_JSON + 1);
        assert_eq!(parse(&above), Err(HeadersError::TooLong { bytes: limits::HEADERS_JSON + 1 }));
    }
}
