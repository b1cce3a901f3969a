//! An event that can never go out fails with its reason and holds its own aggregate only.

use outboxd::testbed::application::NewEvent;

use super::support::{World, await_published, count, eventually, s};

fn event(rule: &str, asset: &str, version: i64, bytes: usize) -> NewEvent {
    NewEvent::asset(&format!("{rule}-{asset}-{version}"), &format!("{rule}-{asset}"), version, &"n".repeat(bytes))
}

#[test]
fn skip_lets_the_successors_of_a_failed_event_pass() {
    let world = World::with("max_payload: 64KB");
    let mut node = world.node("plant-a");
    node.set("relay.on_failed", "skip");
    let events = [event("skip", "y", 1, 3), event("skip", "y", 2, 90_000), event("skip", "y", 3, 3)];
    world.application(&node).commit(&events).expect("committed");
    node.start().expect("up");
    await_published(&node, 2, s(20));
    assert_eq!((count(&node, "pending"), count(&node, "failed")), (0, 1));
    assert_eq!(node.status().expect("status")["outbox"]["held_aggregates"], 0);
}

#[test]
fn headers_that_cannot_be_sent_fail_their_own_row_and_drop_no_connection() {
    let world = World::new();
    let mut node = world.node("plant-a");
    let mut application = world.application(&node);
    let names = ["Nats-Msg-Id", "Nats-Rollup", "ce-id", "Outboxd-Seq", "a:b", "ä", "a b", ""];
    for (n, name) in (1..).zip(names) {
        const INSERT: &str = "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, aggregate_version,
            event_type, schema_version, payload_json, headers_json) VALUES (?1, 'asset', ?1, 1, 'asset.created', 1, '{}', ?2)";
        let headers = serde_json::json!({ name: "x" }).to_string();
        // an insert that is refused is as good: the application learns of it at once
        let _ = application.connection().execute(INSERT, (format!("bad-{n}"), headers));
    }
    application.commit(&[event("good", "x", 1, 3)]).expect("committed");
    node.start().expect("up");
    await_published(&node, 1, s(20));
    eventually("nothing pending", s(20), || {
        if count(&node, "pending") == 0 { Ok(()) } else { Err(count(&node, "pending")) }
    });
    let messages = world.client().messages("EVENTS").expect("read");
    assert_eq!(messages.len(), 1, "{messages:?}");
    assert_eq!(node.status().expect("status")["nats"]["connected"], true);
}
