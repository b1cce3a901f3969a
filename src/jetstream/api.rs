//! Requests to the JetStream API over one connection, with answers read by shapes of our own: a field or value that a
//! later server adds does not break them.
//!
//! May import: async_nats, serde.

use std::collections::HashMap;
use std::time::Duration;

use async_nats::client::RequestErrorKind;
use async_nats::header::{NATS_MESSAGE_ID, NATS_SEQUENCE, NATS_SUBJECT};
use async_nats::jetstream::message::StreamMessage;
use async_nats::jetstream::stream::RawMessage;
use async_nats::{Client, HeaderName, Request};
use bytes::Bytes;
use futures_util::StreamExt;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::json;

use super::outcome::{ApiError, NO_MESSAGE_FOUND};

/// Longest wait for an answer of the API: above it JetStream counts as silent.
pub(super) const ANSWER: Duration = Duration::from_secs(2);

/// Messages of one batch of direct gets.
const BATCH: usize = 512;

/// Why a request to the API gave nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum ApiFault {
    #[error("JetStream does not answer (waited {0:?})")]
    Silent(Duration),
    /// Status 503: no JetStream on the server, for the account, or behind the domain.
    #[error("nobody answers the JetStream API")]
    Absent,
    #[error("{0}")]
    Refused(ApiError),
    #[error("an answer that is not JetStream's: {0}")]
    Garbled(String),
    #[error("the connection is gone: {0}")]
    Lost(String),
}

impl ApiFault {
    /// The precise code of a refusal, 0 for the rest.
    pub(super) fn code(&self) -> u32 {
        match self {
            ApiFault::Refused(error) => error.err_code,
            ApiFault::Silent(_) | ApiFault::Absent | ApiFault::Garbled(_) | ApiFault::Lost(_) => 0,
        }
    }
}

/// The API of one domain, seen from one stream.
#[derive(Clone, Debug)]
pub(super) struct Api {
    client: Client,
    prefix: String,
    stream: String,
}

#[derive(Deserialize)]
struct Fault {
    error: ApiError,
}

impl Api {
    /// `domain` empty: the domain of the server that we are connected to.
    pub(super) fn new(client: Client, domain: &str, stream: &str) -> Self {
        let prefix = if domain.is_empty() { "$JS.API".to_owned() } else { format!("$JS.{domain}.API") };
        Self { client, prefix, stream: stream.to_owned() }
    }

    /// Asks `{prefix}.{verb}.{stream}` and reads the answer as `T`.
    pub(super) async fn ask<T: DeserializeOwned>(&self, verb: &str, body: Bytes) -> Result<T, ApiFault> {
        let subject = format!("{}.{verb}.{}", self.prefix, self.stream);
        let request = Request::new().payload(body).timeout(Some(ANSWER));
        let answer = self.client.send_request(subject, request).await.map_err(|error| match error.kind() {
            RequestErrorKind::TimedOut => ApiFault::Silent(ANSWER),
            RequestErrorKind::NoResponders => ApiFault::Absent,
            RequestErrorKind::InvalidSubject | RequestErrorKind::MaxPayloadExceeded | RequestErrorKind::Other => {
                ApiFault::Lost(error.to_string())
            }
        })?;
        decode(&answer.payload)
    }

    /// `STREAM.INFO`, answered by the stream's leader.
    pub(super) async fn info(&self) -> Result<StreamInfo, ApiFault> {
        self.ask("STREAM.INFO", Bytes::new()).await
    }

    /// One message as the stream's leader holds it, `None` where there is none (any more). `request` is the body of
    /// `STREAM.MSG.GET`.
    pub(super) async fn message(&self, request: String) -> Result<Option<Read>, ApiFault> {
        match self.ask::<GotMessage>("STREAM.MSG.GET", request.into()).await {
            Ok(got) => Read::of_leader(got.message).map(Some),
            Err(fault) if fault.code() == NO_MESSAGE_FOUND => Ok(None),
            // the answer of servers before 2.10 to a sequence that is deleted
            Err(ApiFault::Refused(error)) if error.code == 404 && error.err_code == 0 => Ok(None),
            Err(fault) => Err(fault),
        }
    }

    /// The next messages of a subject from a sequence on, in order, as some replica holds them (`DIRECT.GET` with
    /// `batch`, since 2.11): perhaps not the newest, never with a gap. Empty where there are none.
    pub(super) async fn batch(&self, filter: &str, from: u64) -> Result<Vec<Read>, ApiFault> {
        let lost = |error: &dyn std::fmt::Display| ApiFault::Lost(error.to_string());
        let inbox = self.client.new_inbox();
        let mut answers = self.client.subscribe(inbox.clone()).await.map_err(|e| lost(&e))?;
        let body = json!({ "seq": from, "next_by_subj": filter, "batch": BATCH }).to_string();
        let subject = format!("{}.DIRECT.GET.{}", self.prefix, self.stream);
        self.client.publish_with_reply(subject, inbox, body.into()).await.map_err(|e| lost(&e))?;
        let mut reads = Vec::new();
        loop {
            let answer = tokio::time::timeout(ANSWER, answers.next()).await.map_err(|_| ApiFault::Silent(ANSWER))?;
            let answer = answer.ok_or_else(|| ApiFault::Lost("no more answers".into()))?;
            match answer.status.map(|status| status.as_u16()) {
                None => reads.push(Read::of_replica(answer)?),
                // end of batch · nothing found
                Some(204 | 404) => return Ok(reads),
                Some(503) => return Err(ApiFault::Absent),
                Some(code) => return Err(ApiFault::Garbled(format!("status {code} to a batch of reads"))),
            }
        }
    }
}

/// A message that was read back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Read {
    pub(super) seq: u64,
    pub(super) subject: String,
    pub(super) msg_id: Option<String>,
    pub(super) payload: Bytes,
}

impl Read {
    fn of_leader(raw: RawMessage) -> Result<Self, ApiFault> {
        let message = StreamMessage::try_from(raw).map_err(|error| ApiFault::Garbled(error.to_string()))?;
        let msg_id = message.headers.get(NATS_MESSAGE_ID).map(|id| id.as_str().to_owned());
        let subject = message.subject.as_str().to_owned();
        Ok(Self { seq: message.sequence, subject, msg_id, payload: message.payload })
    }

    fn of_replica(message: async_nats::Message) -> Result<Self, ApiFault> {
        let header = |name: HeaderName| message.headers.as_ref()?.get(name).map(|value| value.as_str().to_owned());
        let seq = header(NATS_SEQUENCE).and_then(|seq| seq.parse().ok());
        match (seq, header(NATS_SUBJECT)) {
            (Some(seq), Some(subject)) => {
                let msg_id = header(NATS_MESSAGE_ID);
                Ok(Self { seq, subject, msg_id, payload: message.payload })
            }
            _ => Err(ApiFault::Garbled("a batch of reads without sequence and subject".into())),
        }
    }
}

fn decode<T: DeserializeOwned>(payload: &[u8]) -> Result<T, ApiFault> {
    let problem = match serde_json::from_slice(payload) {
        Ok(value) => return Ok(value),
        Err(problem) => problem,
    };
    match serde_json::from_slice::<Fault>(payload) {
        Ok(fault) => Err(ApiFault::Refused(fault.error)),
        Err(_) => Err(ApiFault::Garbled(problem.to_string())),
    }
}

#[derive(Deserialize)]
struct GotMessage {
    message: RawMessage,
}

/// The part of `STREAM.INFO` that we judge by.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(super) struct StreamInfo {
    pub(super) config: StreamConfig,
    /// RFC 3339, as the server writes it.
    pub(super) created: String,
    pub(super) state: StreamState,
}

/// Numbers are as on the wire: nanoseconds for durations, -1 or 0 for "no limit".
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct StreamConfig {
    pub(super) name: String,
    pub(super) subjects: Vec<String>,
    pub(super) retention: String,
    pub(super) storage: String,
    pub(super) discard: String,
    pub(super) discard_new_per_subject: bool,
    pub(super) max_msgs: i64,
    pub(super) max_bytes: i64,
    pub(super) max_age: i64,
    pub(super) max_msgs_per_subject: i64,
    pub(super) max_msg_size: i64,
    pub(super) num_replicas: usize,
    pub(super) duplicate_window: i64,
    pub(super) no_ack: bool,
    pub(super) sealed: bool,
    pub(super) allow_direct: bool,
    pub(super) allow_atomic: bool,
    pub(super) allow_msg_counter: bool,
    pub(super) mirror: Option<serde_json::Value>,
    pub(super) subject_transform: Option<serde_json::Value>,
    pub(super) metadata: HashMap<String, String>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct StreamState {
    pub(super) messages: u64,
    pub(super) bytes: u64,
    pub(super) last_seq: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_a_value_a_refusal_or_garbage() {
        let ok =
            br#"{"type":"x","config":{"name":"E","later":1},"created":"2026-01-01T00:00:00Z","state":{"last_seq":7}}"#;
        let info: StreamInfo = decode(ok).unwrap();
        assert_eq!((info.config.name.as_str(), info.state.last_seq), ("E", 7));
        let refused = br#"{"type":"x","error":{"code":404,"err_code":10059,"description":"stream not found"}}"#;
        assert_eq!(decode::<StreamInfo>(refused).unwrap_err().code(), 10_059);
        for bytes in [&b"hello"[..], b"{}", b"", b"[]", b"null"] {
            assert!(matches!(decode::<StreamInfo>(bytes), Err(ApiFault::Garbled(_))), "{bytes:?}");
        }
    }
}
