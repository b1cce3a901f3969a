//! Tests of `inbox.rs`: what a message is, for every kind of input.

use proptest::prelude::*;

use super::*;

const ENVELOPE: &str = r#"{"event_id":"e1","event_type":"asset.updated","schema_version":1,"aggregate_type":"asset","aggregate_id":"a 1","aggregate_version":3,"occurred_at":"2026-10-07T01:20:00Z","data":{"name":"Pumpe Ü"}}"#;

fn message(headers: &[(&str, &str)], body: &[u8]) -> Inbound {
    Inbound {
        stream_seq: 1,
        subject: "events.x".into(),
        headers: headers.iter().copied().collect(),
        payload: Bytes::copy_from_slice(body),
        unreadable: None,
    }
}

fn dead(headers: &[(&str, &str)], body: &[u8]) -> Cause {
    identify(&message(headers, body)).expect_err("it must be dead")
}

#[test]
fn an_envelope_in_the_body_is_all_that_a_foreign_producer_needs() {
    let m = message(&[("Nats-Msg-Id", "never an identity")], ENVELOPE.as_bytes());
    let e = identify(&m).unwrap();
    assert_eq!((&*e.source, &*e.event_id, &*e.event_type), ("", "e1", "asset.updated"));
    assert_eq!((e.aggregate_type.as_deref(), e.aggregate_id.as_deref()), (Some("asset"), Some("a 1")));
    assert_eq!(e.aggregate_version, Some(3));
    assert_eq!(e.body, Body::Json { event: ENVELOPE, data: Some(r#"{"name":"Pumpe Ü"}"#) });
}

#[test]
fn headers_alone_identify_other_json_and_bytes() {
    let headers = [
        ("ce-id", "id%20with%25"),
        ("ce-source", "plant%C3%BC"),
        ("ce-type", "t"),
        ("Outboxd-Aggregate-Type", "asset"),
        ("Outboxd-Aggregate-Id", "a%201"),
        ("Outboxd-Aggregate-Version", "9"),
    ];
    for body in [&b"\xff\x00not text"[..], b"[1,2]", b"{\"name\":\"x\"}", b"", b"{{{{"] {
        let m = message(&headers, body);
        let e = identify(&m).unwrap();
        assert_eq!((&*e.source, &*e.event_id, &*e.event_type), ("plantü", "id with%", "t"));
        assert_eq!((e.aggregate_id.as_deref(), e.aggregate_version), (Some("a 1"), Some(9)));
    }
    let m = message(&headers, b" {\"name\":\"x\"} ");
    let whole = "{\"name\":\"x\"}";
    assert_eq!(identify(&m).unwrap().body, Body::Json { event: whole, data: Some(whole) });
    assert!(matches!(identify(&message(&headers, b"{{{{")).unwrap().body, Body::Opaque(_)));
}

#[test]
fn what_has_no_identity_or_type_is_dead_and_says_why() {
    for body in [&b""[..], b"not json", b"[1,2]", b"null", b"{\"event_id\":\"\"}", b"{\"event_id\":7}", b"\xff\xfe"] {
        let cause = dead(&[("Nats-Msg-Id", "bad-1")], body);
        assert_eq!(cause.label(), "no_identity", "{body:?}: {cause}");
    }
    assert!(dead(&[], b"").to_string().contains("it is empty"));
    assert!(dead(&[], b"\xff").to_string().contains("not UTF-8 at byte 0"));
    assert_eq!(dead(&[], br#"{"event_id":"x"}"#).label(), "no_type");
    assert_eq!(dead(&[("ce-id", "x")], b"").label(), "no_type");
    assert_eq!(dead(&[("ce-id", ""), ("ce-type", "t")], b"{}").label(), "no_identity");
}

#[test]
fn headers_and_body_that_differ_are_an_identity_mismatch() {
    for (name, value) in [
        ("ce-id", "e2"),
        ("ce-type", "asset.created"),
        ("Outboxd-Aggregate-Type", "order"),
        ("Outboxd-Aggregate-Id", "a 2"),
        ("Outboxd-Aggregate-Version", "4"),
    ] {
        let cause = dead(&[(name, value)], ENVELOPE.as_bytes());
        assert!(cause.to_string().starts_with("identity mismatch: "), "{name}: {cause}");
    }
}

#[test]
fn a_producer_that_does_not_percent_encode_is_understood_where_the_body_confirms_it() {
    let body = r#"{"event_id":"100%25","event_type":"t"}"#;
    let m = message(&[("ce-id", "100%25")], body.as_bytes());
    assert_eq!(identify(&m).unwrap().event_id, "100%25");
    let m = message(&[("ce-id", "50%"), ("ce-type", "\"t\"")], b"");
    let e = identify(&m).unwrap();
    assert_eq!((&*e.event_id, &*e.event_type), ("50%", "t"));
}

#[test]
fn a_structured_cloud_event_is_read_to_its_envelope() {
    let body =
        format!(r#"{{"specversion":"1.0","id":"e1","source":"plant","type":"asset.updated","data":{ENVELOPE}}}"#);
    let m = message(&[("Content-Type", "application/cloudevents+json; charset=utf-8")], body.as_bytes());
    let e = identify(&m).unwrap();
    assert_eq!((&*e.source, &*e.event_id, e.aggregate_version), ("plant", "e1", Some(3)));
    assert_eq!(e.body, Body::Json { event: ENVELOPE, data: Some(r#"{"name":"Pumpe Ü"}"#) });
    let body = body.replace(r#""id":"e1""#, r#""id":"e9""#);
    assert_eq!(dead(&[("content-type", "application/cloudevents+json")], body.as_bytes()).label(), "identity_mismatch");
}

#[test]
fn a_header_that_stands_there_twice_must_say_the_same() {
    let m = message(&[("ce-id", "a"), ("CE-ID", "a"), ("ce-type", "t")], b"");
    assert_eq!(identify(&m).unwrap().event_id, "a");
    assert_eq!(dead(&[("ce-id", "a"), ("ce-id", "b"), ("ce-type", "t")], b"").label(), "illegal");
}

#[test]
fn names_are_bounded_and_have_no_control_characters() {
    let long = "x".repeat(MAX_NAME + 1);
    assert_eq!(dead(&[("ce-id", &long), ("ce-type", "t")], b"").label(), "illegal");
    assert_eq!(dead(&[("ce-id", "a%00b"), ("ce-type", "t")], b"").label(), "illegal");
    assert_eq!(dead(&[("ce-id", "%FF"), ("ce-type", "t")], b"").label(), "illegal");
    assert_eq!(dead(&[("Outboxd-Aggregate-Version", "0")], ENVELOPE.as_bytes()).label(), "illegal");
    assert_eq!(dead(&[("Outboxd-Aggregate-Version", "1.5")], ENVELOPE.as_bytes()).label(), "illegal");
}

#[test]
fn a_body_that_is_nested_too_deep_is_opaque_and_does_not_recurse() {
    let deep = format!(r#"{{"event_id":"e","event_type":"t","data":{}{}}}"#, "[".repeat(200_000), "]".repeat(200_000));
    assert!(dead(&[], deep.as_bytes()).to_string().contains("nested deeper than 128"));
    let quoted = r#"{"event_id":"e","event_type":"t","data":{"x":"[[[[\"[[["}}"#;
    assert!(identify(&message(&[], quoted.as_bytes())).is_ok(), "brackets in a text do not count");
}

#[test]
fn a_member_that_stands_there_twice_is_no_envelope() {
    assert_eq!(dead(&[], br#"{"event_id":"a","event_id":"b","event_type":"t"}"#).label(), "no_identity");
}

#[test]
fn unreadable_headers_are_dead_whatever_the_body_says() {
    let mut m = message(&[], ENVELOPE.as_bytes());
    m.unreadable = Some("header isn't valid utf-8".into());
    assert_eq!(identify(&m).unwrap_err().label(), "unreadable");
}

#[test]
fn the_processed_key_has_the_source_and_the_later_durables_in_front() {
    assert_eq!(processed_key(None, "plant", "e1"), "plant:e1");
    assert_eq!(processed_key(None, "", "e1"), "e1");
    assert_eq!(processed_key(Some("audit"), "plant", "e1"), "audit/plant:e1");
    assert_eq!(processed_key(Some("audit"), "", "e1"), "audit/e1");
}

#[test]
fn the_exact_handler_wins_then_the_longest_prefix_then_the_star() {
    let routes = Routes::new(["*", "asset.*", "asset.updated", "asset.up*", "asset.updated"]);
    assert_eq!(routes.find("asset.updated"), Some(2));
    assert_eq!(routes.find("asset.upgraded"), Some(3));
    assert_eq!(routes.find("asset.created"), Some(1));
    assert_eq!(routes.find("order"), Some(0));
    assert_eq!(Routes::new(["asset.*"]).find("order"), None);
    assert_eq!(Routes::new(["asset.*"]).find("asset"), None);
}

proptest! {
    #[test]
    fn any_bytes_give_an_event_or_a_cause(
        fields in proptest::collection::vec(("(ce-id|ce-type|ce-source|content-type|Outboxd-Aggregate-Version|x)", ".{0,20}"), 0..6),
        body in proptest::collection::vec(any::<u8>(), 0..200),
        unreadable in proptest::option::of(".{0,5}"),
    ) {
        let m = Inbound { headers: fields.into_iter().collect(), payload: body.into(), unreadable, ..Inbound::default() };
        if let Err(cause) = identify(&m) {
            prop_assert!(!cause.to_string().is_empty());
        }
    }

    #[test]
    fn headers_come_out_as_they_went_in(fields in proptest::collection::vec((".{0,8}", ".{0,8}"), 0..8)) {
        let headers: Headers = fields.iter().cloned().collect();
        let back: Vec<(String, String)> = headers.iter().map(|(n, v)| (n.to_owned(), v.to_owned())).collect();
        prop_assert_eq!(back, fields);
    }

    #[test]
    fn what_the_relay_encodes_is_what_the_inbox_reads(id in "[^\\p{Cc}]{1,40}", source in "[^\\p{Cc}]{0,20}") {
        let (ce_id, ce_source) = (super::super::wire::percent_encode(&id), super::super::wire::percent_encode(&source));
        let m = message(&[("ce-id", &ce_id), ("ce-source", &ce_source), ("ce-type", "t")], b"{}");
        let e = identify(&m).unwrap();
        prop_assert_eq!((&*e.event_id, &*e.source), (id.as_str(), source.as_str()));
    }
}
