//! Judging a stream: one wrong setting, one finding.

use std::sync::Arc;

use super::*;
use crate::config::Config;

fn settings() -> Settings {
    let config = Config::default();
    Settings {
        nats: config.nats,
        stream: config.stream,
        ack_wait: config.relay.ack_wait,
        lease: config.relay.lease,
        subject: config.relay.subject,
        covers: Arc::new(|subjects| subjects.iter().any(|s| s == "events.>" || s == ">")),
    }
}

fn server() -> Server {
    Server { version: "2.15.1".into(), max_payload: 1_048_576 }
}

fn good() -> StreamInfo {
    let config = StreamConfig {
        name: "EVENTS".into(),
        subjects: vec!["events.>".into()],
        retention: "limits".into(),
        storage: "file".into(),
        discard: "new".into(),
        max_msgs: -1,
        max_bytes: 1 << 30,
        max_msgs_per_subject: -1,
        max_msg_size: -1,
        num_replicas: 1,
        duplicate_window: 120_000_000_000,
        allow_direct: true,
        allow_atomic: true,
        ..StreamConfig::default()
    };
    StreamInfo { config, created: "2026-12-01T00:00:00.5Z".into(), state: Default::default() }
}

fn found(change: impl FnOnce(&mut StreamInfo)) -> Vec<(Severity, &'static str)> {
    let mut info = good();
    change(&mut info);
    judge(&info, &settings(), &server(), false).findings.iter().map(|f| (f.severity, f.field)).collect()
}

#[test]
fn a_good_stream_has_no_finding() {
    let seen = judge(&good(), &settings(), &server(), false);
    assert_eq!(seen.findings, []);
    assert_eq!(seen.obstacle(), None);
    assert!(seen.topology.atomic);
    assert_eq!(seen.topology.max_batch, 1_000);
    assert_eq!(seen.topology.max_message, 1_048_576);
    assert_eq!(seen.topology.duplicate_window, Duration::from_secs(120));
    assert_eq!(seen.topology.created, "2026-12-01T00:00:00.5Z");
}

#[test]
fn what_makes_acks_worthless_is_fatal() {
    use Severity::Fatal;
    assert_eq!(found(|i| i.config.no_ack = true), [(Fatal, "no_ack")]);
    assert_eq!(found(|i| i.config.sealed = true), [(Fatal, "sealed")]);
    assert_eq!(found(|i| i.config.subjects = vec!["orders.>".into()]), [(Fatal, "subjects")]);
    assert_eq!(found(|i| i.config.mirror = Some(json!({"name": "E"}))), [(Fatal, "mirror")]);
    assert_eq!(found(|i| i.config.allow_msg_counter = true), [(Fatal, "allow_msg_counter")]);
}

#[test]
fn what_only_weakens_is_a_warning() {
    use Severity::Warning;
    assert_eq!(found(|i| i.config.retention = "interest".into()), [(Warning, "retention")]);
    assert_eq!(found(|i| i.config.storage = "memory".into()), [(Warning, "storage")]);
    assert_eq!(found(|i| i.config.discard = "old".into()), [(Warning, "discard")]);
    assert_eq!(found(|i| i.config.max_bytes = -1), [(Warning, "max_age")]);
    assert_eq!(found(|i| i.config.max_msgs_per_subject = 1), [(Warning, "max_msgs_per_subject")]);
    assert_eq!(found(|i| i.config.subject_transform = Some(json!({}))), [(Warning, "subject_transform")]);
    // lease 30 s + 2 x ack_wait 5 s: forty seconds are not more than that
    assert_eq!(found(|i| i.config.duplicate_window = 40_000_000_000), [(Warning, "duplicate_window")]);
    assert_eq!(found(|i| i.config.duplicate_window = 40_000_000_001), []);
}

#[test]
fn a_finding_says_field_value_wish_and_remedy() {
    let mut info = good();
    info.config.no_ack = true;
    let seen = judge(&info, &settings(), &server(), false);
    assert_eq!(
        seen.obstacle().unwrap_or_default(),
        "stream EVENTS: no_ack is true, should be false: nats stream edit EVENTS --ack: without acks nothing can ever \
         be proven"
    );
}

#[test]
fn a_full_stream_is_an_obstacle_only_where_it_discards_new() {
    let full = |discard: &str, messages, bytes, max_msgs, max_bytes| {
        let mut info = good();
        info.config.discard = discard.into();
        info.config.max_msgs = max_msgs;
        info.config.max_bytes = max_bytes;
        info.state.messages = messages;
        info.state.bytes = bytes;
        judge(&info, &settings(), &server(), false).full.is_some()
    };
    assert!(full("new", 2, 10, 2, -1));
    assert!(full("new", 1, 100, -1, 100));
    assert!(!full("new", 1, 99, 2, 100));
    assert!(!full("old", 2, 100, 2, 100));
    assert!(!full("new", 1_000_000, 1 << 40, -1, 0));
}

#[test]
fn batches_need_the_stream_and_its_leader() {
    let atomic = |allow, version: &str| {
        let mut info = good();
        info.config.allow_atomic = allow;
        info.config.metadata.insert("_nats.ver".into(), version.into());
        let topology = judge(&info, &settings(), &server(), false).topology;
        assert_eq!(topology.max_batch > 1, topology.atomic);
        assert_eq!(topology.server_version, version);
        topology.atomic
    };
    assert!(atomic(true, "2.12.1"));
    assert!(atomic(true, "2.15.0-beta.1"));
    assert!(!atomic(true, "2.12.0"), "refuses Nats-Msg-Id in a batch");
    assert!(!atomic(true, "2.9.10"));
    assert!(!atomic(true, "nonsense"));
    assert!(!atomic(false, "2.15.1"));
}

#[test]
fn the_smaller_of_both_size_limits_counts() {
    let max = |size| {
        let mut info = good();
        info.config.max_msg_size = size;
        judge(&info, &settings(), &server(), false).topology.max_message
    };
    assert_eq!(max(1_000), 1_000);
    assert_eq!(max(-1), 1_048_576);
    assert_eq!(max(0), 1_048_576);
    assert_eq!(max(2_000_000), 1_048_576);
}

#[test]
fn the_window_of_a_new_stream_fits_its_age() {
    let mut s = settings();
    s.stream.max_age = Duration::from_secs(60);
    let config: serde_json::Value = serde_json::from_slice(&blueprint(&s, true)).unwrap();
    assert_eq!(config["duplicate_window"], 60_000_000_000u64);
    assert_eq!(config["allow_atomic"], true);
    assert_eq!(config["max_bytes"], -1);
    let config: serde_json::Value = serde_json::from_slice(&blueprint(&s, false)).unwrap();
    assert_eq!(config.get("allow_atomic"), None);
}
