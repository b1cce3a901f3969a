//! Where a durable starts, decided from what the database and the server say. Pure.
//!
//! Rules: the database's settled sequence is the position; a consumer that does not stand exactly there is made anew at
//! the sequence after it, so that what was in flight comes again at once and in order; one that another daemon pulls
//! from is left alone. A stream that was made anew starts at its beginning whatever `deliver` says, because nobody knows
//! what it has got meanwhile. Settings that the server can change are changed, others are refused with field, old and
//! new value.
//!
//! May import: domain, config shapes of `inbox`, serde, serde_json.

use std::collections::HashMap;
use std::time::Duration;

use serde::Deserialize;
use serde_json::json;

use crate::config::{Deliver, Inbox};
use crate::domain::apply::Position;

/// Key in the consumer's metadata under which `inbox.deliver` of its first start is kept.
const DELIVER: &str = "outboxd.deliver";

/// The part of `STREAM.INFO` that matters here.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct StreamFacts {
    pub(super) config: StreamConfig,
    pub(super) created: String,
    pub(super) state: StreamState,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct StreamConfig {
    /// `limits`, `interest` or `workqueue`.
    pub(super) retention: String,
}

impl StreamFacts {
    fn is_queue(&self) -> bool {
        self.config.retention == "workqueue"
    }

    /// Deleting the only consumer of such a stream deletes the messages that it has not acked.
    fn lives_by_interest(&self) -> bool {
        self.config.retention == "interest"
    }
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct StreamState {
    pub(super) first_seq: u64,
    pub(super) last_seq: u64,
}

/// The part of `CONSUMER.INFO` that matters here.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct ConsumerFacts {
    pub(super) config: ConsumerConfig,
    pub(super) delivered: Sequences,
    pub(super) ack_floor: Sequences,
    pub(super) num_ack_pending: u64,
    pub(super) num_waiting: u64,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Sequences {
    pub(super) consumer_seq: u64,
    pub(super) stream_seq: u64,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct ConsumerConfig {
    pub(super) deliver_subject: String,
    pub(super) deliver_policy: String,
    pub(super) opt_start_seq: Option<u64>,
    pub(super) ack_policy: String,
    /// Nanoseconds.
    pub(super) ack_wait: u64,
    pub(super) max_deliver: i64,
    pub(super) backoff: Vec<u64>,
    pub(super) filter_subject: String,
    pub(super) filter_subjects: Vec<String>,
    pub(super) max_ack_pending: i64,
    pub(super) headers_only: bool,
    pub(super) metadata: HashMap<String, String>,
}

/// How the consumer is had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Start {
    /// There is none: make it, from the sequence after `floor`.
    Create { floor: u64 },
    /// It does not stand where the database does: delete it and make it again there.
    Recreate { floor: u64 },
    /// It stands where the database does; its next delivery has this number.
    Resume { floor: u64, next_delivery: u64 },
    /// Another daemon pulls from it, or it must not be deleted: join, and trust only what is acked. `release` where
    /// nobody else pulls: what is unacked was ours, and is given back to come first.
    Join { floor: u64, acked: u64, release: Option<Release> },
}

/// Unacked messages of a consumer from whom nobody pulls: they lie among these sequences of the stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Release {
    pub(super) sequences: std::ops::RangeInclusive<u64>,
    /// The consumer's last delivery.
    pub(super) delivery: u64,
}

/// Most sequences that are gone through to give messages back; beyond it their `ack_wait` runs out first.
const MOST_RELEASED: u64 = 200_000;

impl Release {
    /// What a consumer has unacked, unless it is too widely spread.
    pub(super) fn of(consumer: &ConsumerFacts) -> Option<Self> {
        let (acked, delivered) = (consumer.ack_floor.stream_seq, consumer.delivered.stream_seq);
        let near = consumer.num_ack_pending > 0 && delivered.saturating_sub(acked) <= MOST_RELEASED;
        near.then(|| Self { sequences: acked.saturating_add(1)..=delivered, delivery: consumer.delivered.consumer_seq })
    }
}

impl Start {
    pub(super) fn floor(&self) -> u64 {
        match self {
            Start::Create { floor }
            | Start::Recreate { floor }
            | Start::Resume { floor, .. }
            | Start::Join { floor, .. } => *floor,
        }
    }
}

/// What to do before the first pull.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    /// To be recorded before anything else.
    pub(super) establish: Option<Position>,
    pub(super) start: Start,
    /// Settings of the existing consumer that have to be changed.
    pub(super) update: Vec<&'static str>,
    /// Something that a person should know.
    pub(super) note: Option<String>,
}

/// Messages that may be unacked before the server stops to deliver: room for messages that wait.
pub(super) fn max_ack_pending(batch: usize) -> i64 {
    i64::try_from(batch.saturating_mul(8).max(8_192)).unwrap_or(i64::MAX)
}

/// The configuration of the consumer, as the API takes it. A work queue begins with what is left of it, and the server
/// takes no other start there.
pub(super) fn consumer_config(inbox: &Inbox, stream: &StreamFacts, floor: u64) -> serde_json::Value {
    let mut config = json!({
        "durable_name": inbox.durable,
        "name": inbox.durable,
        "description": "the inbox of an outboxd; its position is kept in the database",
        "deliver_policy": "by_start_sequence",
        "opt_start_seq": floor.saturating_add(1),
        "ack_policy": "explicit",
        "ack_wait": nanos(inbox.ack_wait),
        "max_deliver": -1,
        "replay_policy": "instant",
        "max_ack_pending": max_ack_pending(inbox.batch),
        "metadata": { DELIVER: deliver(inbox.deliver) },
    });
    if stream.is_queue() {
        config["deliver_policy"] = json!("all");
        config.as_object_mut().map(|fields| fields.remove("opt_start_seq"));
    }
    match inbox.filter_subjects.as_slice() {
        [one] => config["filter_subject"] = json!(one),
        many => config["filter_subjects"] = json!(many),
    }
    config
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

fn deliver(deliver: Deliver) -> &'static str {
    match deliver {
        Deliver::All => "all",
        Deliver::New => "new",
    }
}

/// Decides. The error is a refusal for a person: nothing is changed.
pub(super) fn plan(
    inbox: &Inbox,
    stream: &StreamFacts,
    position: Option<&Position>,
    consumer: Option<&ConsumerFacts>,
) -> Result<Plan, String> {
    if stream.is_queue() && inbox.deliver == Deliver::New {
        return Err(format!(
            "stream {} is a work queue, where inbox.deliver = \"new\" would throw away what waits in it: take \"all\"",
            inbox.stream
        ));
    }
    let update = consumer.map_or(Ok(Vec::new()), |consumer| changes(inbox, &consumer.config))?;
    let known = position.filter(|p| p.stream == inbox.stream);
    let (floor, note) = match (known, consumer) {
        (Some(p), _) if p.stream_created != stream.created => (
            0,
            Some(format!(
                "stream {} was made anew ({}, before: {}): starting at its beginning",
                inbox.stream, stream.created, p.stream_created
            )),
        ),
        (Some(p), _) if p.settled_seq > stream.state.last_seq => (
            stream.state.last_seq,
            Some(format!(
                "stream {} went back to sequence {}, {} was settled already: going on behind its end",
                inbox.stream, stream.state.last_seq, p.settled_seq
            )),
        ),
        (Some(p), _) => (p.settled_seq, None),
        (None, Some(consumer)) => (
            consumer.ack_floor.stream_seq,
            Some(format!(
                "durable {} is new to this database, the server has it at sequence {}: going on there",
                inbox.durable, consumer.ack_floor.stream_seq
            )),
        ),
        (None, None) => match inbox.deliver {
            Deliver::All => (stream.state.first_seq.saturating_sub(1), None),
            Deliver::New => (stream.state.last_seq, None),
        },
    };
    let wanted = Position { stream: inbox.stream.clone(), stream_created: stream.created.clone(), settled_seq: floor };
    let establish = (position != Some(&wanted)).then_some(wanted);
    let start = match consumer {
        None => Start::Create { floor },
        Some(c) if c.num_ack_pending == 0 && c.delivered.stream_seq == floor => {
            Start::Resume { floor, next_delivery: c.delivered.consumer_seq + 1 }
        }
        Some(c) if c.num_waiting > 0 => Start::Join { floor, acked: c.ack_floor.stream_seq, release: None },
        Some(c) if stream.lives_by_interest() => {
            Start::Join { floor, acked: c.ack_floor.stream_seq, release: Release::of(c) }
        }
        Some(_) => Start::Recreate { floor },
    };
    Ok(Plan { establish, start, update, note })
}

/// What has to be changed at the existing consumer, or why it cannot be used.
fn changes(inbox: &Inbox, have: &ConsumerConfig) -> Result<Vec<&'static str>, String> {
    let durable = &inbox.durable;
    let refuse = |field: &str, old: &str, new: &str| {
        Err(format!(
            "durable {durable} on stream {}: {field} is {old} and cannot become {new}; its position is kept: restore \
             the value, or take another inbox.durable",
            inbox.stream
        ))
    };
    if !have.deliver_subject.is_empty() {
        return refuse("deliver_subject", &format!("{:?} (a push consumer)", have.deliver_subject), "empty (pull)");
    }
    if have.ack_policy != "explicit" {
        return refuse("ack_policy", &have.ack_policy, "explicit");
    }
    let was = match have.metadata.get(DELIVER) {
        Some(was) => Some(was.as_str()),
        None => Some(have.deliver_policy.as_str()).filter(|policy| matches!(*policy, "all" | "new")),
    };
    let wanted = deliver(inbox.deliver);
    if let Some(was) = was.filter(|was| *was != wanted) {
        return refuse("inbox.deliver", &format!("{was:?}"), &format!("{wanted:?}"));
    }
    let mut old = have.filter_subjects.clone();
    if !have.filter_subject.is_empty() {
        old.push(have.filter_subject.clone());
    }
    let mut new = inbox.filter_subjects.clone();
    old.sort();
    new.sort();
    if old != new {
        return refuse("inbox.filter_subjects", &format!("{old:?}"), &format!("{new:?}"));
    }
    let mut update = Vec::new();
    if have.ack_wait != nanos(inbox.ack_wait) {
        update.push("ack_wait");
    }
    if have.max_ack_pending != max_ack_pending(inbox.batch) {
        update.push("max_ack_pending");
    }
    if have.max_deliver != -1 {
        update.push("max_deliver");
    }
    if !have.backoff.is_empty() {
        update.push("backoff");
    }
    if have.headers_only {
        update.push("headers_only");
    }
    Ok(update)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn inbox() -> Inbox {
        Config::default().inbox
    }

    fn stream(last_seq: u64) -> StreamFacts {
        let config = StreamConfig { retention: "limits".into() };
        StreamFacts { config, created: "t1".into(), state: StreamState { first_seq: 5, last_seq } }
    }

    fn at(settled_seq: u64) -> Position {
        Position { stream: "EVENTS".into(), stream_created: "t1".into(), settled_seq }
    }

    fn consumer(delivered: u64, acked: u64, pending: u64, waiting: u64) -> ConsumerFacts {
        let config = serde_json::from_value(consumer_config(&inbox(), &stream(0), 0)).unwrap();
        ConsumerFacts {
            config,
            delivered: Sequences { consumer_seq: delivered + 1, stream_seq: delivered },
            ack_floor: Sequences { consumer_seq: acked, stream_seq: acked },
            num_ack_pending: pending,
            num_waiting: waiting,
        }
    }

    #[test]
    fn a_new_durable_starts_where_deliver_says_and_records_it_first() {
        let all = plan(&inbox(), &stream(100), None, None).unwrap();
        assert_eq!((all.start, all.establish), (Start::Create { floor: 4 }, Some(at(4))));
        let new = Inbox { deliver: Deliver::New, ..inbox() };
        let new = plan(&new, &stream(100), None, None).unwrap();
        assert_eq!((new.start, new.establish), (Start::Create { floor: 100 }, Some(at(100))));
    }

    #[test]
    fn a_lost_consumer_is_made_again_where_the_database_is() {
        for deliver in [Deliver::All, Deliver::New] {
            let inbox = Inbox { deliver, ..inbox() };
            let p = plan(&inbox, &stream(100), Some(&at(42)), None).unwrap();
            assert_eq!((p.start, p.establish, p.note), (Start::Create { floor: 42 }, None, None));
        }
    }

    #[test]
    fn a_consumer_that_stands_elsewhere_is_made_again_and_one_at_rest_is_resumed() {
        let start = |c: ConsumerFacts| plan(&inbox(), &stream(100), Some(&at(42)), Some(&c)).unwrap().start;
        assert_eq!(start(consumer(42, 42, 0, 0)), Start::Resume { floor: 42, next_delivery: 44 });
        assert_eq!(start(consumer(40, 40, 0, 0)), Start::Recreate { floor: 42 }, "its acks were lost");
        assert_eq!(start(consumer(60, 42, 18, 0)), Start::Recreate { floor: 42 }, "in flight when we died");
        assert_eq!(start(consumer(60, 60, 0, 0)), Start::Recreate { floor: 42 }, "the database was restored");
        assert_eq!(
            start(consumer(60, 50, 10, 1)),
            Start::Join { floor: 42, acked: 50, release: None },
            "another daemon pulls"
        );
    }

    #[test]
    fn a_stream_that_was_made_anew_or_went_back_is_noticed() {
        let mut anew = stream(10);
        anew.created = "t2".into();
        for deliver in [Deliver::All, Deliver::New] {
            let inbox = Inbox { deliver, ..inbox() };
            let p = plan(&inbox, &anew, Some(&at(42)), None).unwrap();
            assert_eq!(p.start, Start::Create { floor: 0 });
            assert_eq!(p.establish.map(|e| (e.stream_created, e.settled_seq)), Some(("t2".into(), 0)));
            assert!(p.note.is_some_and(|n| n.contains("made anew")));
        }
        let back = plan(&inbox(), &stream(30), Some(&at(42)), None).unwrap();
        assert_eq!((back.start, back.establish), (Start::Create { floor: 30 }, Some(at(30))));
    }

    #[test]
    fn a_durable_that_only_the_server_knows_goes_on_there() {
        let p = plan(&inbox(), &stream(100), None, Some(&consumer(60, 60, 0, 0))).unwrap();
        assert_eq!((p.start, p.establish), (Start::Resume { floor: 60, next_delivery: 62 }, Some(at(60))));
        let moved = Position { stream: "OTHER".into(), ..at(7) };
        assert_eq!(plan(&inbox(), &stream(100), Some(&moved), None).unwrap().start, Start::Create { floor: 4 });
    }

    #[test]
    fn a_consumer_whose_end_would_delete_messages_is_joined_and_a_queue_begins_with_what_is_left() {
        let mut interest = stream(100);
        interest.config.retention = "interest".into();
        let p = plan(&inbox(), &interest, Some(&at(42)), Some(&consumer(60, 50, 10, 0))).unwrap();
        let release = Some(Release { sequences: 51..=60, delivery: 61 });
        assert_eq!(p.start, Start::Join { floor: 42, acked: 50, release });

        let mut queue = stream(100);
        queue.config.retention = "workqueue".into();
        let config = consumer_config(&inbox(), &queue, 42);
        assert_eq!((&config["deliver_policy"], config.get("opt_start_seq")), (&json!("all"), None));
        let new = Inbox { deliver: Deliver::New, ..inbox() };
        assert!(plan(&new, &queue, None, None).unwrap_err().contains("work queue"));
    }

    #[test]
    fn allowed_settings_are_changed_and_others_refused_with_old_and_new_value() {
        let c = consumer(42, 42, 0, 0);
        let slow = Inbox { ack_wait: Duration::from_secs(9), batch: 4_000, ..inbox() };
        let p = plan(&slow, &stream(100), Some(&at(42)), Some(&c)).unwrap();
        assert_eq!(p.update, ["ack_wait", "max_ack_pending"]);

        let new = Inbox { deliver: Deliver::New, ..inbox() };
        let refusal = plan(&new, &stream(100), Some(&at(42)), Some(&c)).unwrap_err();
        assert!(refusal.contains("inbox.deliver is \"all\" and cannot become \"new\""), "{refusal}");

        let other = Inbox { filter_subjects: vec!["events.a.>".into(), "events.b.>".into()], ..inbox() };
        let refusal = plan(&other, &stream(100), Some(&at(42)), Some(&c)).unwrap_err();
        assert!(
            refusal.contains("inbox.filter_subjects is [\"events.>\"] and cannot become [\"events.a.>\""),
            "{refusal}"
        );

        let mut push = consumer(42, 42, 0, 0);
        push.config.deliver_subject = "x".into();
        assert!(plan(&inbox(), &stream(100), None, Some(&push)).is_err());
        let mut limited = consumer(42, 42, 0, 0);
        limited.config.max_deliver = 5;
        assert_eq!(plan(&inbox(), &stream(100), Some(&at(42)), Some(&limited)).unwrap().update, ["max_deliver"]);
    }
}
