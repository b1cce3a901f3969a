//! Messages read one by one from the stream, without the client's parser of headers.
//!
//! A publisher can store any bytes as a header block, and the client drops its connection over one that it cannot
//! parse. `STREAM.MSG.GET` answers the block inside of JSON, where nothing can hurt: it is read here, tolerantly, and
//! what is no NATS header block is said so and becomes a dead letter.
//!
//! May import: domain, std, serde.

use serde::Deserialize;

use crate::domain::inbox::{Headers, Inbound};

/// The answer of `STREAM.MSG.GET`.
#[derive(Debug, Deserialize)]
pub(super) struct Got {
    message: Stored,
}

#[derive(Debug, Deserialize)]
struct Stored {
    subject: String,
    seq: u64,
    #[serde(default)]
    hdrs: String,
    #[serde(default)]
    data: String,
}

impl Got {
    pub(super) fn seq(&self) -> u64 {
        self.message.seq
    }

    /// The message; `None` where the answer is not base64.
    pub(super) fn inbound(self) -> Option<Inbound> {
        let Stored { subject, seq, hdrs, data } = self.message;
        let (headers, unreadable) = read_headers(&base64(&hdrs)?);
        Some(Inbound { stream_seq: seq, subject, headers, payload: base64(&data)?.into(), unreadable })
    }
}

/// Reads a header block as the client does. The second value is the first thing in it that the client cannot take.
fn read_headers(block: &[u8]) -> (Headers, Option<String>) {
    if block.is_empty() {
        return (Headers::default(), None);
    }
    let text = String::from_utf8_lossy(block);
    let mut fault = std::str::from_utf8(block).is_err().then(|| "it is not UTF-8".to_owned());
    let mut found = |what: String| {
        fault.get_or_insert(what);
    };
    let mut lines = text.lines();
    match lines.next().and_then(|line| line.strip_prefix("NATS/1.0")).map(str::trim) {
        Some("") => {}
        Some(status) => {
            let code = status.split(' ').next().and_then(|code| code.parse::<u16>().ok());
            if !code.is_some_and(|code| (100..1_000).contains(&code)) {
                found(format!("its first line carries a status that is none ({:?})", clip(status)));
            }
        }
        None => found("its first line is not NATS/1.0".to_owned()),
    }
    let mut fields: Vec<(&str, String)> = Vec::new();
    for line in lines.filter(|line| !line.is_empty()) {
        match (line.starts_with(char::is_whitespace), fields.last_mut(), line.split_once(':')) {
            // a folded value goes on in a line that begins with a blank
            (true, Some((_, value)), _) => value.push_str(line),
            (_, _, Some((name, value))) if name.chars().all(|c| c.is_ascii_graphic()) => {
                fields.push((name, value.trim_start().to_owned()));
            }
            (_, _, Some((name, _))) => found(format!("{:?} is no header name", clip(name))),
            (_, _, None) => found(format!("the line {:?} has no colon", clip(line))),
        }
    }
    (fields.iter().map(|(name, value)| (*name, value.trim_end())).collect(), fault)
}

fn clip(text: &str) -> String {
    text.chars().take(60).collect()
}

/// Decodes base64 of the standard alphabet (RFC 4648, section 4) with padding.
fn base64(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| match byte {
        b'A'..=b'Z' => Some(byte - b'A'),
        b'a'..=b'z' => Some(byte - b'a' + 26),
        b'0'..=b'9' => Some(byte - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let mut out = Vec::with_capacity(text.len() / 4 * 3);
    let (mut bits, mut held) = (0u32, 0u32);
    for byte in text.trim_end_matches('=').bytes() {
        bits = (bits << 6 | u32::from(digit(byte)?)) & 0x00ff_ffff;
        held += 6;
        if held >= 8 {
            held -= 8;
            out.push((bits >> held & 0xff) as u8);
        }
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_read_to_its_bytes() {
        for (text, bytes) in
            [("", &b""[..]), ("Zg==", b"f"), ("Zm8=", b"fo"), ("Zm9v", b"foo"), ("/+8A", b"\xff\xef\0")]
        {
            assert_eq!(base64(text).as_deref(), Some(bytes), "{text}");
        }
        assert_eq!(base64("Zm9*"), None);
    }

    fn read(block: &[u8]) -> (Vec<(String, String)>, Option<String>) {
        let (headers, fault) = read_headers(block);
        (headers.iter().map(|(n, v)| (n.to_owned(), v.to_owned())).collect(), fault)
    }

    #[test]
    fn a_good_block_is_read_and_bad_ones_say_what_is_wrong() {
        let (headers, fault) = read(b"NATS/1.0\r\nce-id: a b \r\nx:y\r\n\r\n");
        assert_eq!(headers, [("ce-id".into(), "a b".into()), ("x".into(), "y".into())]);
        assert_eq!(fault, None);
        for (block, expected) in [
            (&b"NATS/1.0\r\nno colon here\r\n\r\n"[..], "has no colon"),
            (b"NATS/1.0\r\nx: \xff\r\n\r\n", "not UTF-8"),
            (b"NATS/1.0\r\nn\xc3\xa4me: x\r\n\r\n", "is no header name"),
            (b"HTTP/1.1\r\n\r\n", "first line is not NATS/1.0"),
            (b"NATS/1.0 nine\r\n\r\n", "carries a status"),
        ] {
            let fault = read(block).1.unwrap_or_default();
            assert!(fault.contains(expected), "{block:?}: {fault}");
        }
        assert_eq!(read(b"").1, None);
        assert_eq!(read(b"NATS/1.0 503 No\r\nx: a\r\n b\r\n"), (vec![("x".into(), "a b".into())], None));
    }
}
