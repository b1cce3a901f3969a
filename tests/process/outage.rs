//! The broker is away, frozen, mute or without its stream: events wait, none pays for it.

use std::time::{Duration, Instant};

use outboxd::testbed::application::{self, Generator};
use outboxd::testbed::node::Node;
use outboxd::testbed::producer::{Pace, Producer};
use rustix::process::Signal;

use super::support::proxy::Proxy;
use super::support::{World, assert_proven, await_published, count, eventually, s};

fn await_connected(node: &Node, wanted: bool) {
    eventually(&format!("nats.connected {wanted}"), s(30), || match node.status() {
        Ok(status) if status["nats"]["connected"] == wanted => Ok(()),
        Ok(status) => Err(status["nats"].to_string()),
        Err(e) => Err(e.to_string()),
    });
}

/// No event has paid for an outage: nothing failed, and each was counted once, by its success.
fn assert_nobody_paid(node: &Node) {
    assert_eq!(count(node, "failed"), 0);
    const PAID: &str = "SELECT count(*) FROM outbox_events WHERE status = 'published' AND attempt_count <> 1
                        OR status = 'pending' AND attempt_count <> 0";
    assert_eq!(application::number(&node.database(), PAID).expect("readable"), 0, "an outage was counted");
}

fn impatient(world: &World) -> Node {
    let mut node = world.node("plant-a");
    node.set("relay.max_attempts", 1).set("relay.min_failing_for", "100ms").set("nats.ping_interval", "1s");
    node
}

#[test]
fn a_daemon_that_starts_before_the_broker_waits_and_then_works() {
    let mut world = World::new();
    let mut node = impatient(&world);
    world.application(&node).commit(&Generator::new("asset", 20).take(300)).expect("committed");
    world.nats.stop().expect("stopped");
    node.start().expect("it is up without a broker");
    await_connected(&node, false);
    assert_eq!(count(&node, "pending"), 300);
    world.nats.resume().expect("the broker comes");
    await_published(&node, 300, s(30));
    assert_nobody_paid(&node);
    assert_proven(&world);
}

#[test]
fn a_broker_that_restarts_under_load_costs_no_event_anything() {
    let mut world = World::new();
    let mut node = impatient(&world);
    node.start().expect("up");
    let pace = Pace { per_transaction: 2, every: Duration::from_millis(5), also: |_, _| Ok(()) };
    let producer = Producer::start(world.application(&node), Generator::new("asset", 30), pace, usize::MAX);
    for round in 0..6 {
        let seen = producer.committed();
        eventually("more events", s(30), || match producer.committed() {
            n if n >= seen + 150 => Ok(()),
            n => Err(format!("{n} committed")),
        });
        if round % 2 == 0 { world.nats.kill() } else { world.nats.stop() }.expect("the broker goes");
        let seen = producer.committed();
        eventually("events without a broker", s(30), || match producer.committed() {
            n if n >= seen + 100 => Ok(()),
            n => Err(format!("{n} committed")),
        });
        world.nats.resume().expect("the broker comes back");
    }
    let committed = producer.stop().expect("the application was never refused");
    await_published(&node, committed, s(60));
    assert_nobody_paid(&node);
    assert_proven(&world);
}

#[test]
fn an_ack_that_comes_too_late_is_no_second_copy() {
    let mut world = World::new();
    let mut node = impatient(&world);
    node.start().expect("up");
    let mut application = world.application(&node);
    application.commit(&Generator::new("warm", 2).take(2)).expect("committed");
    await_published(&node, 2, s(20));
    world.nats.freeze().expect("frozen");
    application.commit(&Generator::new("asset", 20).take(20)).expect("committed");
    // longer than ack_wait: the fate of what was sent is unknown then
    await_connected(&node, false);
    world.nats.thaw().expect("thawed");
    await_published(&node, 22, s(30));
    assert_nobody_paid(&node);
    assert_proven(&world);
}

#[test]
fn a_connection_that_swallows_answers_is_noticed_and_nothing_is_stored_twice() {
    let world = World::new();
    let proxy = Proxy::to(world.nats.port());
    let mut node = impatient(&world);
    node.set("nats.urls", vec![proxy.url()]).set("stream.duplicate_window", "8s");
    node.start().expect("up");
    let mut application = world.application(&node);
    application.commit(&Generator::new("warm", 2).take(2)).expect("committed");
    await_published(&node, 2, s(20));
    proxy.swallow_answers();
    application.commit(&Generator::new("asset", 20).take(60)).expect("committed");
    // stored, and nobody learns of it
    let client = world.client();
    eventually("stored without an answer", s(20), || match client.count("EVENTS") {
        Ok(n) if n > 2 => Ok(()),
        Ok(n) => Err(format!("{n} stored")),
        Err(e) => Err(e.to_string()),
    });
    await_connected(&node, false);
    // longer than the duplicate window: from here on the server itself would store them again
    std::thread::sleep(s(9));
    proxy.pass();
    await_published(&node, 62, s(60));
    assert_nobody_paid(&node);
    assert_proven(&world);
}

#[test]
fn a_deleted_stream_and_a_broker_without_jetstream_are_outages() {
    let mut world = World::new();
    let mut node = impatient(&world);
    node.set("stream.manage", "check");
    let client = world.client();
    client.create_stream("EVENTS", &["events.>"], |_| ()).expect("an operator's stream");
    node.start().expect("up");
    let mut application = world.application(&node);
    application.commit(&Generator::new("first", 5).take(10)).expect("committed");
    await_published(&node, 10, s(20));

    client.delete_stream("EVENTS").expect("deleted");
    application.commit(&Generator::new("second", 5).take(50)).expect("committed");
    eventually("the missing stream in status", s(20), || match node.status() {
        Ok(status) if status["nats"].to_string().contains("EVENTS") => Ok(()),
        Ok(status) => Err(status["nats"].to_string()),
        Err(e) => Err(e.to_string()),
    });
    assert_eq!(count(&node, "pending"), 50);
    client.create_stream("EVENTS", &["events.>"], |_| ()).expect("made again");
    await_published(&node, 60, s(20));
    assert_nobody_paid(&node);

    world.nats.stop().expect("stopped");
    world.nats.set_jetstream(false);
    world.nats.resume().expect("back without JetStream");
    application.commit(&Generator::new("third", 5).take(50)).expect("committed");
    std::thread::sleep(s(3));
    assert_eq!((count(&node, "pending"), count(&node, "failed")), (50, 0), "nothing is published into a void");
    world.nats.stop().expect("stopped");
    world.nats.set_jetstream(true);
    world.nats.resume().expect("back with JetStream");
    await_published(&node, 110, s(30));
    assert_nobody_paid(&node);
    assert_eq!(world.client().count("EVENTS").expect("counted"), 100, "the first ten went with the first stream");
}

#[test]
fn a_stop_without_an_answering_broker_ends_with_zero_in_time() {
    let mut world = World::new();
    let mut node = impatient(&world);
    let mut application = world.application(&node);
    let mut committed = 0;
    for (n, how) in ["away", "frozen", "frozen while in flight"].into_iter().enumerate() {
        node.start().expect("up");
        await_connected(&node, true);
        match how {
            "away" => world.nats.stop().expect("stopped"),
            _ => world.nats.freeze().expect("frozen"),
        }
        if how != "frozen" {
            application.commit(&Generator::new(&format!("w{n}"), 5).take(100)).expect("committed");
            committed += 100;
        }
        let begun = Instant::now();
        node.signal(Signal::TERM).expect("sent");
        let end = node.daemon().expect("started").wait(s(25)).expect("it ends");
        assert_eq!(end.code(), Some(0), "{how}: {}", node.log());
        assert!(begun.elapsed() < s(10), "{how}: {:?}", begun.elapsed());
        assert_eq!(application::text(&node.database(), "PRAGMA integrity_check").expect("readable"), "ok");
        match how {
            "away" => world.nats.resume().expect("back"),
            _ => world.nats.thaw().expect("thawed"),
        }
    }
    node.start().expect("up");
    await_published(&node, committed, s(30));
    assert_nobody_paid(&node);
    assert_proven(&world);
}
