//! The requests to the JetStream API that a durable needs.
//!
//! Answers are read by shapes of our own: what a later server adds does not break them.
//!
//! May import: config shapes of `inbox`, async_nats, serde, serde_json.

use std::time::Duration;

use async_nats::client::RequestErrorKind;
use async_nats::{Client, Request};
use bytes::Bytes;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::json;

use super::consume_plan::{ConsumerFacts, Release, StreamFacts, consumer_config};
use super::consume_raw::Got;
use crate::config::Inbox;

/// Longest wait for an answer of the API.
const ANSWER: Duration = Duration::from_secs(2);

/// `JSStreamNotFoundErr`.
const NO_STREAM: u32 = 10_059;
/// `JSConsumerNotFoundErr`.
const NO_CONSUMER: u32 = 10_014;
/// `JSNoMessageFoundErr`.
const NO_MESSAGE: u32 = 10_037;

/// Why a request gave nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Fault {
    #[error("JetStream does not answer ({what}, waited {ANSWER:?})")]
    Silent { what: &'static str },
    #[error("nobody answers the JetStream API ({what}): JetStream is off, or not there for this account or domain")]
    Absent { what: &'static str },
    #[error("JetStream refuses {what}: {description} ({code})")]
    Refused { what: &'static str, code: u32, description: String },
    #[error("the answer to {what} is not JetStream's: {detail}")]
    Garbled { what: &'static str, detail: String },
    #[error("the connection is gone ({what}: {detail})")]
    Lost { what: &'static str, detail: String },
}

impl Fault {
    fn is(&self, wanted: u32) -> bool {
        matches!(self, Fault::Refused { code, .. } if *code == wanted)
    }
}

/// The API of one durable.
#[derive(Clone)]
pub(super) struct Api {
    client: Client,
    prefix: String,
    stream: String,
    durable: String,
}

#[derive(Deserialize)]
struct Refusal {
    error: RefusalError,
}

#[derive(Deserialize)]
struct RefusalError {
    #[serde(default)]
    code: u32,
    #[serde(default)]
    err_code: u32,
    #[serde(default)]
    description: String,
}

#[derive(Deserialize)]
struct Deleted {
    #[serde(default)]
    success: bool,
}

impl Api {
    pub(super) fn new(client: Client, inbox: &Inbox) -> Self {
        let prefix = match inbox.domain.as_str() {
            "" => "$JS.API".to_owned(),
            domain => format!("$JS.{domain}.API"),
        };
        Self { client, prefix, stream: inbox.stream.clone(), durable: inbox.durable.clone() }
    }

    /// Where pulls go.
    pub(super) fn next_subject(&self) -> String {
        format!("{}.CONSUMER.MSG.NEXT.{}.{}", self.prefix, self.stream, self.durable)
    }

    async fn ask<T: DeserializeOwned>(&self, what: &'static str, subject: String, body: Bytes) -> Result<T, Fault> {
        let request = Request::new().payload(body).timeout(Some(ANSWER));
        let answer = self.client.send_request(subject, request).await.map_err(|error| match error.kind() {
            RequestErrorKind::TimedOut => Fault::Silent { what },
            RequestErrorKind::NoResponders => Fault::Absent { what },
            RequestErrorKind::InvalidSubject | RequestErrorKind::MaxPayloadExceeded | RequestErrorKind::Other => {
                Fault::Lost { what, detail: error.to_string() }
            }
        })?;
        if let Ok(Refusal { error }) = serde_json::from_slice::<Refusal>(&answer.payload) {
            let code = if error.err_code == 0 { error.code } else { error.err_code };
            return Err(Fault::Refused { what, code, description: error.description });
        }
        serde_json::from_slice(&answer.payload).map_err(|error| Fault::Garbled { what, detail: error.to_string() })
    }

    /// `None` where there is no such stream.
    pub(super) async fn stream(&self) -> Result<Option<StreamFacts>, Fault> {
        let subject = format!("{}.STREAM.INFO.{}", self.prefix, self.stream);
        absent_by(NO_STREAM, self.ask("STREAM.INFO", subject, Bytes::new()).await)
    }

    /// `None` where there is no such consumer.
    pub(super) async fn consumer(&self) -> Result<Option<ConsumerFacts>, Fault> {
        let subject = format!("{}.CONSUMER.INFO.{}.{}", self.prefix, self.stream, self.durable);
        absent_by(NO_CONSUMER, self.ask("CONSUMER.INFO", subject, Bytes::new()).await)
    }

    /// Makes the consumer, from the sequence after `floor`.
    pub(super) async fn create(&self, inbox: &Inbox, stream: &StreamFacts, floor: u64) -> Result<ConsumerFacts, Fault> {
        self.put("CONSUMER.CREATE", "create", consumer_config(inbox, stream, floor)).await
    }

    /// Changes settings of the consumer. Its start is what it was made with: the server refuses another one.
    pub(super) async fn update(
        &self,
        inbox: &Inbox,
        stream: &StreamFacts,
        have: &ConsumerFacts,
    ) -> Result<ConsumerFacts, Fault> {
        let mut config = consumer_config(inbox, stream, 0);
        config["deliver_policy"] = json!(have.config.deliver_policy);
        if let Some(fields) = config.as_object_mut() {
            match have.config.opt_start_seq {
                Some(seq) => drop(fields.insert("opt_start_seq".into(), json!(seq))),
                None => drop(fields.remove("opt_start_seq")),
            }
        }
        self.put("an update of the consumer", "update", config).await
    }

    async fn put(&self, what: &'static str, action: &str, config: serde_json::Value) -> Result<ConsumerFacts, Fault> {
        let subject = format!("{}.CONSUMER.CREATE.{}.{}", self.prefix, self.stream, self.durable);
        let body = json!({ "stream_name": self.stream, "config": config, "action": action }).to_string();
        self.ask(what, subject, body.into()).await
    }

    /// Gives unacked messages back to the consumer. The server looks at the stream sequence and passes over those that
    /// are not unacked (nats-server, `processNak`); the answer to the last one says that all were taken.
    pub(super) async fn release(&self, release: &Release) -> Result<(), Fault> {
        const WHAT: &str = "giving messages back";
        let lost = |detail: String| Fault::Lost { what: WHAT, detail };
        let (stream, durable, delivery) = (&self.stream, &self.durable, release.delivery);
        let reply = |seq: u64| format!("$JS.ACK.{stream}.{durable}.1.{seq}.{delivery}.0.0");
        for seq in release.sequences.clone() {
            let nak = Bytes::from_static(b"-NAK");
            if seq < *release.sequences.end() {
                self.client.publish(reply(seq), nak).await.map_err(|e| lost(e.to_string()))?;
            } else {
                let request = Request::new().payload(nak).timeout(Some(ANSWER));
                self.client.send_request(reply(seq), request).await.map_err(|e| lost(e.to_string()))?;
            }
        }
        Ok(())
    }

    /// Deletes the consumer; one that is not there is fine.
    pub(super) async fn delete(&self) -> Result<(), Fault> {
        let subject = format!("{}.CONSUMER.DELETE.{}.{}", self.prefix, self.stream, self.durable);
        match self.ask::<Deleted>("CONSUMER.DELETE", subject, Bytes::new()).await {
            Ok(Deleted { success: true }) => Ok(()),
            Ok(Deleted { success: false }) => {
                Err(Fault::Garbled { what: "CONSUMER.DELETE", detail: "no success, no error".into() })
            }
            Err(fault) if fault.is(NO_CONSUMER) => Ok(()),
            Err(fault) => Err(fault),
        }
    }

    /// The first message at or above `seq` whose subject matches `filter`, as the stream's leader holds it.
    pub(super) async fn message(&self, seq: u64, filter: &str) -> Result<Option<Got>, Fault> {
        let subject = format!("{}.STREAM.MSG.GET.{}", self.prefix, self.stream);
        let body = json!({ "seq": seq, "next_by_subj": filter }).to_string();
        absent_by(NO_MESSAGE, self.ask("STREAM.MSG.GET", subject, body.into()).await)
    }
}

fn absent_by<T>(code: u32, answer: Result<T, Fault>) -> Result<Option<T>, Fault> {
    match answer {
        Ok(value) => Ok(Some(value)),
        Err(fault) if fault.is(code) => Ok(None),
        Err(fault) => Err(fault),
    }
}
