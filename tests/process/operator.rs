//! What an operator does with an event that failed: discard it, or have it tried again.

use outboxd::testbed::application::{self, NewEvent};

use super::support::{World, await_published, count, eventually, s};

fn event(rule: &str, asset: &str, version: i64, bytes: usize) -> NewEvent {
    NewEvent::asset(&format!("{rule}-{asset}-{version}"), &format!("{rule}-{asset}"), version, &"n".repeat(bytes))
}

#[test]
fn a_poison_event_holds_its_own_aggregate_until_an_operator_decides() {
    let world = World::with("max_payload: 64KB");
    let mut node = world.node("plant-a");
    let mut events = Vec::new();
    for version in 1..=5 {
        for asset in ["x", "y", "z"] {
            events.push(event("hold", asset, version, if (asset, version) == ("y", 2) { 90_000 } else { 3 }));
        }
    }
    world.application(&node).commit(&events).expect("committed");
    node.start().expect("up");
    await_published(&node, 11, s(30));
    eventually("the poison failed", s(10), || if count(&node, "failed") == 1 { Ok(()) } else { Err("not yet") });
    assert_eq!(count(&node, "pending"), 3, "its three successors wait");
    const REASON: &str = "SELECT last_error FROM outbox_events WHERE status = 'failed'";
    let reason = application::text(&node.database(), REASON).expect("a reason");
    assert!(!reason.is_empty() && reason.len() <= 500, "{reason:?}");
    let status = node.status().expect("status");
    assert_eq!((&status["outbox"]["failed"], &status["outbox"]["held_aggregates"]), (&1.into(), &1.into()), "{status}");

    let shown = node.cli(&["events", "list", "--status", "failed", "--json"]).expect("it ran").ok().expect("a list");
    let shown: serde_json::Value = serde_json::from_str(&shown).expect("JSON");
    assert_eq!(shown[0]["event_id"], "hold-y-2");
    node.cli(&["events", "discard", "hold-y-2", "--reason", "too large"]).expect("it ran").ok().expect("discarded");
    world.ledger.withdraw("hold-y-2");
    await_published(&node, 14, s(20));
    assert_eq!((count(&node, "pending"), count(&node, "failed")), (0, 0));
    let proof = world.proof();
    assert!(proof.holds(), "{proof}");
    assert!(!world.nats.log().contains("Maximum Payload"), "it reached the server: {}", world.nats.log());
}

#[test]
fn a_failed_event_that_was_corrected_goes_out_on_retry_before_its_successors() {
    let world = World::with("max_payload: 64KB");
    let mut node = world.node("plant-a");
    let events = [event("r", "y", 1, 3), event("r", "y", 2, 90_000), event("r", "y", 3, 3)];
    world.application(&node).commit(&events).expect("committed");
    node.start().expect("up");
    eventually("the poison failed", s(20), || if count(&node, "failed") == 1 { Ok(()) } else { Err("not yet") });
    // the limit is raised by a restart of the server
    drop(world.client());
    let mut world = world;
    world.nats.stop().expect("stopped");
    world.nats.set_extra("max_payload: 1MB");
    world.nats.resume().expect("back");
    eventually("connected again", s(20), || match node.status() {
        Ok(status) if status["nats"]["connected"] == true => Ok(()),
        Ok(status) => Err(status["nats"].to_string()),
        Err(e) => Err(e.to_string()),
    });
    node.cli(&["events", "retry", "r-y-2"]).expect("it ran").ok().expect("retried");
    await_published(&node, 3, s(20));
    let proof = world.proof();
    assert!(proof.holds(), "{proof}");
    const ATTEMPTS: &str = "SELECT attempt_count FROM outbox_events WHERE event_id = 'r-y-2'";
    assert_eq!(application::number(&node.database(), ATTEMPTS).expect("readable"), 1, "a retry starts from 0");
}
