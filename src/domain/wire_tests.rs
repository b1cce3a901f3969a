//! Claims about messages on the wire.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::domain::event::AggregateKey;
use crate::domain::inbox::{Inbound, identify};

fn event() -> PendingEvent {
    PendingEvent {
        seq: 17,
        key: AggregateKey::new("asset", "asset-042"),
        event_id: "evt-1".into(),
        aggregate_version: 8,
        event_type: "asset.updated".into(),
        schema_version: 2,
        payload: Bytes::from_static(b" {\"b\":1, \"a\":1.50,\"b\":\"\xc3\xbc\"}\n"),
        headers_json: None,
        created_at: "2026-10-07 01:20:00.125".into(),
        created: None,
        due_at: None,
        attempt_count: 0,
        failing_since: None,
        crashes: 0,
        suspect: None,
    }
}

fn template() -> Template {
    Template::parse("events.{aggregate_type}.{aggregate_id}.{event}").unwrap()
}

fn envelope(event: &PendingEvent) -> Result<WireMessage, Illegal> {
    message(event, "edge-7", &template(), Format::Envelope)
}

fn header<'a>(message: &'a WireMessage, name: &str) -> Option<&'a str> {
    message.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
}

#[test]
fn an_envelope_has_exactly_the_headers_of_the_contract() {
    let message = envelope(&event()).unwrap();
    assert_eq!(message.subject, "events.asset.asset-042.updated");
    assert_eq!(message.msg_id, "edge-7:evt-1");
    assert_eq!(message.payload, event().payload);
    let headers: Vec<(&str, &str)> = message.headers.iter().map(|(n, v)| (&**n, v.as_str())).collect();
    let wanted = [
        ("ce-specversion", "1.0"),
        ("ce-id", "evt-1"),
        ("ce-source", "edge-7"),
        ("ce-type", "asset.updated"),
        ("ce-subject", "asset-042"),
        ("ce-time", "2026-10-07T01:20:00.125Z"),
        ("Content-Type", "application/json"),
        ("Outboxd-Aggregate-Type", "asset"),
        ("Outboxd-Aggregate-Id", "asset-042"),
        ("Outboxd-Aggregate-Version", "8"),
        ("Outboxd-Schema-Version", "2"),
        ("Outboxd-Seq", "17"),
    ];
    assert_eq!(headers, wanted);
}

#[test]
fn values_are_percent_encoded_as_the_binding_says() {
    // the example of the CloudEvents HTTP protocol binding, 3.1.3.2
    assert_eq!(percent_encode("Euro € 😀"), "Euro%20%E2%82%AC%20%F0%9F%98%80");
    assert_eq!(percent_encode("a\"b%c\r\n~!"), "a%22b%25c%0D%0A~!");
    let mut event = event();
    event.key = AggregateKey::new("asset", "部 1");
    let message = envelope(&event).unwrap();
    assert_eq!(header(&message, "ce-subject"), Some("%E9%83%A8%201"));
    assert_eq!(header(&message, "Outboxd-Aggregate-Id"), Some("%E9%83%A8%201"));
}

#[test]
fn decoding_is_lenient_but_not_about_utf8() {
    let cases = [("a%20b", "a b"), ("%e2%82%ac", "€"), ("100%", "100%"), ("%4", "%4"), ("%zz%41", "%zzA"), ("", "")];
    for (encoded, wanted) in cases {
        assert_eq!(percent_decode(encoded).as_deref(), Some(wanted), "{encoded}");
    }
    assert_eq!(percent_decode("%FF"), None);
}

#[test]
fn extra_headers_follow_unmodified() {
    let mut event = event();
    event.headers_json = Some(r#"{"traceparent":"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}"#.into());
    let message = envelope(&event).unwrap();
    let (name, value) = message.headers.last().unwrap();
    assert_eq!((&**name, value.as_str()), ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"));
}

#[test]
fn an_applications_content_type_replaces_ours() {
    let mut event = event();
    event.headers_json = Some(r#"{"content-type":"application/vnd.asset+json","x":"1"}"#.into());
    let message = envelope(&event).unwrap();
    assert_eq!(header(&message, "Content-Type"), Some("application/vnd.asset+json"));
    assert_eq!(header(&message, "content-type"), None);
    let message = super::message(&event, "s", &template(), Format::CloudEvents).unwrap();
    assert_eq!(header(&message, "Content-Type"), Some("application/cloudevents+json"));
    let body: Value = serde_json::from_slice(&message.payload).unwrap();
    assert_eq!(body["datacontenttype"], "application/vnd.asset+json");
}

#[test]
fn a_structured_event_carries_the_payload_bytes_as_they_stand() {
    let message = super::message(&event(), "edge \"7\"", &template(), Format::CloudEvents).unwrap();
    let text = std::str::from_utf8(&message.payload).unwrap();
    assert!(text.ends_with(",\"data\": {\"b\":1, \"a\":1.50,\"b\":\"ü\"}\n}"), "{text}");
    let mut body: Value = serde_json::from_str(text).unwrap();
    body.as_object_mut().unwrap().remove("data");
    let wanted = json!({
        "specversion": "1.0", "id": "evt-1", "source": "edge \"7\"", "type": "asset.updated", "subject": "asset-042",
        "time": "2026-10-07T01:20:00.125Z", "datacontenttype": "application/json",
        "aggregatetype": "asset", "aggregateversion": "8", "schemaversion": "2",
    });
    assert_eq!(body, wanted);
    assert_eq!(header(&message, "ce-id"), Some("evt-1"));
}

#[test]
fn a_payload_that_is_no_json_cannot_be_the_data_of_a_cloud_event() {
    for payload in [&b"{\"a\":"[..], b"", b"{} x", b"\xff", b"{\"a\":\"\xff\"}", b"NaN"] {
        let mut event = event();
        event.payload = Bytes::from_static(payload);
        let result = super::message(&event, "s", &template(), Format::CloudEvents);
        assert!(matches!(result, Err(Illegal::NotJson(_))), "{payload:?} gave {result:?}");
        assert_eq!(envelope(&event).unwrap().payload, payload, "an envelope takes any bytes");
    }
}

#[test]
fn an_unreadable_created_at_costs_the_time_only() {
    let mut event = event();
    event.created_at = "yesterday".into();
    assert_eq!(header(&envelope(&event).unwrap(), "ce-time"), None);
}

#[test]
fn what_no_header_can_carry_is_the_rows_own_fault() {
    for id in ["a\r\nb", "a\u{0}", "a ", "a\t", "a\u{85}"] {
        let mut event = event();
        event.event_id = id.into();
        assert!(matches!(envelope(&event), Err(Illegal::MsgId(_))), "{id:?}");
    }
    let mut bad = event();
    bad.headers_json = Some(r#"{"Nats-Rollup":"all"}"#.into());
    let reason = envelope(&bad).unwrap_err().to_string();
    assert!(reason.starts_with("headers_json: \"Nats-Rollup\" may not be set"), "{reason}");
    let mut long = event();
    long.key = AggregateKey::new("asset", &"x".repeat(1_100));
    assert!(matches!(envelope(&long), Err(Illegal::Subject(SubjectTooLong { bytes: 1_121 }))));
}

#[test]
fn wire_size_counts_what_the_server_counts() {
    let message = envelope(&event()).unwrap();
    let mut block = format!("NATS/1.0\r\nNats-Msg-Id: {}\r\n", message.msg_id);
    for (name, value) in &message.headers {
        block.push_str(&format!("{name}: {value}\r\n"));
    }
    block.push_str("\r\n");
    assert_eq!(message.wire_size(), block.len() + message.payload.len());
}

proptest! {
    #[test]
    fn a_header_value_comes_back_as_it_was(text in any::<String>()) {
        let encoded = percent_encode(&text);
        prop_assert!(encoded.bytes().all(|b| b.is_ascii_graphic()));
        let decoded = percent_decode(&encoded).map(Cow::into_owned);
        prop_assert_eq!(decoded, Some(text));
    }

    /// Whatever stands in the row: a message is refused with a reason, or nothing in it can break the protocol.
    #[test]
    fn no_row_can_break_the_protocol(
        id in any::<String>(), kind in any::<String>(), aggregate in any::<String>(),
        event_type in any::<String>(), headers in prop::option::of(any::<String>()), created in any::<String>(),
    ) {
        let row = PendingEvent {
            key: AggregateKey::new(&kind, &aggregate), event_id: id, event_type, headers_json: headers,
            created_at: created, ..event()
        };
        for format in [Format::Envelope, Format::CloudEvents] {
            if let Ok(message) = super::message(&row, "source", &template(), format) {
                let lines = message.headers.iter().map(|(n, v)| (&**n, v)).chain([(MSG_ID, &message.msg_id)]);
                for (name, value) in lines {
                    prop_assert!(name.bytes().all(|b| b.is_ascii_graphic() && b != b':'));
                    prop_assert!(!value.chars().any(char::is_control));
                }
            }
        }
    }

    /// What leaves here means the same at the other end, in both formats, whatever an application puts in its columns.
    #[test]
    fn the_inbox_understands_what_the_outbox_sends(
        id in "\\PC{1,12}", kind in "\\PC{1,12}", aggregate in "\\PC{1,12}", event_type in "\\PC{1,12}",
        source in "[ -~ü]{1,12}", version in 1i64..i64::MAX, envelope in any::<bool>(),
    ) {
        let body = json!({
            "event_id": id, "event_type": event_type, "aggregate_type": kind, "aggregate_id": aggregate,
            "aggregate_version": version, "schema_version": 2, "occurred_at": "2026-10-07T01:20:00Z", "data": {},
        });
        let payload = if envelope { body.to_string() } else { "[1, 2]".to_owned() };
        let row = PendingEvent {
            key: AggregateKey::new(&kind, &aggregate), event_id: id.clone(), event_type: event_type.clone(),
            aggregate_version: version, payload: payload.into(), ..event()
        };
        for format in [Format::Envelope, Format::CloudEvents] {
            let Ok(message) = super::message(&row, source.trim(), &template(), format) else { continue };
            let mut inbound = Inbound { payload: message.payload.clone(), ..Inbound::default() };
            for (name, value) in &message.headers {
                inbound.headers.push(name, value);
            }
            let got = identify(&inbound).unwrap_or_else(|cause| panic!("{cause:?} for {message:?}"));
            prop_assert_eq!((&*got.source, &*got.event_id, &*got.event_type), (source.trim(), &*id, &*event_type));
            prop_assert_eq!(got.aggregate_type.as_deref(), Some(&*kind));
            prop_assert_eq!(got.aggregate_id.as_deref(), Some(&*aggregate));
            prop_assert_eq!(got.aggregate_version, Some(version));
        }
    }
}
