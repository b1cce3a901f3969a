//! The consuming node beside a broker that comes and goes, and beside its own crashes.

use outboxd::testbed::application::{self, Generator};
use outboxd::testbed::node::Node;

use super::support::{World, eventually, s};

/// A stranger's message: an envelope in the body, no headers of ours.
fn publish(world: &World, events: &mut Generator, count: usize) {
    let client = world.client();
    for event in events.take(count) {
        let subject = format!("events.asset.{}.created", event.aggregate_id);
        client.publish(&subject, &[], event.payload.as_bytes()).expect("published");
    }
}

fn consumer(world: &World) -> Node {
    let mut node = world.bare_node("plant-b");
    let effect = "INSERT INTO effects (event_id) VALUES (:event_id)";
    node.set("relay.enabled", false).set("inbox.ack_wait", "2s").set("nats.ping_interval", "1s");
    node.handle("asset.*", "sql", effect);
    node.write_config().expect("config.toml");
    node.init(&[]).expect("db init");
    let database = application::open(&node.database()).expect("open");
    database.execute_batch("CREATE TABLE effects (n INTEGER PRIMARY KEY, event_id TEXT)").expect("a table");
    node
}

fn await_effects(node: &Node, wanted: i64, what: &str) {
    eventually(what, s(20), || match application::number(&node.database(), "SELECT count(*) FROM effects") {
        Ok(n) if n == wanted => Ok(()),
        Ok(n) => Err(format!("{n} of {wanted} effects")),
        Err(e) => Err(e.to_string()),
    });
}

#[test]
fn a_consumer_is_never_deaf_after_the_broker_was_away() {
    let mut world = World::new();
    let mut node = consumer(&world);
    world.client().create_stream("EVENTS", &["events.>"], |_| ()).expect("a stream");
    node.start().expect("up");
    let mut events = Generator::new("asset", 3);
    for round in 0..8 {
        publish(&world, &mut events, 5);
        await_effects(&node, (round + 1) * 5, &format!("round {round}"));
        if round % 2 == 0 { world.nats.kill() } else { world.nats.stop() }.expect("the broker goes");
        world.nats.resume().expect("the broker comes back");
    }
    let distinct = "SELECT count(DISTINCT event_id) FROM effects";
    assert_eq!(application::number(&node.database(), distinct).expect("readable"), 40, "each once");
}

/// I6: the dedupe record and the effect commit together, so no kill can come between them.
#[test]
fn a_consumer_that_is_killed_again_and_again_applies_each_event_once() {
    let world = World::new();
    let mut node = consumer(&world);
    world.client().create_stream("EVENTS", &["events.>"], |_| ()).expect("a stream");
    let mut events = Generator::new("asset", 20);
    for round in 0..8 {
        publish(&world, &mut events, 150);
        node.spawn().expect("started");
        let wanted = round * 150 + 40;
        eventually("some effects", s(20), || {
            match application::number(&node.database(), "SELECT count(*) FROM effects") {
                Ok(n) if n >= wanted => Ok(()),
                Ok(n) => Err(format!("{n} effects")),
                Err(e) => Err(e.to_string()),
            }
        });
        node.kill().expect("killed");
    }
    node.start().expect("up");
    await_effects(&node, 8 * 150, "every effect, none twice");
    let distinct = "SELECT count(DISTINCT event_id) FROM effects";
    assert_eq!(application::number(&node.database(), distinct).expect("readable"), 8 * 150, "each once");
}
