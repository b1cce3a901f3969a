//! The database belongs to others too: a second daemon, an application with a long lock, a frozen owner.

use std::time::{Duration, Instant};

use outboxd::testbed::application::{self, Generator};
use outboxd::testbed::node::Node;
use outboxd::testbed::producer::{Pace, Producer};
use rustix::process::Signal;

use super::support::{World, assert_proven, await_published, count, eventually, executable, s};

/// A second daemon on the database of `first`, with a configuration, a socket and a log of its own.
fn second(world: &World, first: &Node) -> Node {
    let mut node = Node::new(&executable(), world.path(), "standby", &world.nats.url()).expect("a node");
    node.set("source", "plant-a").set("database.path", first.database().display().to_string());
    node.set("relay.lease", "3s").set("relay.ack_wait", "1s");
    node.set("admin.socket", node.folder().join("socket").display().to_string());
    node.write_config().expect("config.toml");
    node
}

fn await_role(node: &Node, wanted: &str, bound: Duration) {
    eventually(&format!("role {wanted}"), bound, || match node.status() {
        Ok(status) if status["relay"]["role"] == wanted => Ok(()),
        Ok(status) => Err(status["relay"].to_string()),
        Err(e) => Err(e.to_string()),
    });
}

#[test]
fn a_standby_takes_over_when_the_owner_is_killed() {
    let world = World::new();
    let mut first = world.node("plant-a");
    // a lease far beyond the test: only the owner's lock file can tell that it is dead
    first.set("relay.lease", "10m");
    let mut standby = second(&world, &first);
    standby.set("relay.lease", "10m");
    first.start().expect("up");
    await_role(&first, "active", s(10));
    standby.start().expect("up");
    await_role(&standby, "standby", s(10));

    let pace = Pace { per_transaction: 5, every: Duration::from_millis(5), also: |_, _| Ok(()) };
    let producer = Producer::start(world.application(&first), Generator::new("asset", 30), pace, usize::MAX);
    eventually("some published", s(20), || match count(&first, "published") {
        n if n > 200 => Ok(()),
        n => Err(n),
    });
    first.kill().expect("killed");
    let published = count(&first, "published");
    let begun = Instant::now();
    eventually("the standby publishes", s(10), || match count(&first, "published") {
        n if n > published + 50 => Ok(()),
        n => Err(n),
    });
    println!("taken over after {:?}", begun.elapsed());
    await_role(&standby, "active", s(10));

    // the first comes back and stands by now
    first.start().expect("up again");
    await_role(&first, "standby", s(10));
    let committed = producer.stop().expect("the producer was never refused");
    await_published(&first, committed, s(30));
    assert_proven(&world);
}

/// Freezes a daemon at an instant at which it does not hold the lock of the database: a program that is frozen inside of
/// a transaction keeps everybody out, whoever relays.
fn freeze_without_the_lock(node: &mut Node) {
    let other = application::open(&node.database()).expect("another program");
    other.busy_timeout(Duration::from_secs(1)).expect("set");
    eventually("frozen outside of a transaction", s(20), || {
        node.signal(Signal::STOP).expect("frozen");
        match other.execute_batch("BEGIN IMMEDIATE; ROLLBACK") {
            Ok(()) => Ok(()),
            Err(held) => {
                node.signal(Signal::CONT).expect("woken");
                Err(held)
            }
        }
    });
}

#[test]
fn a_frozen_owner_loses_its_lease_and_changes_nothing_when_it_wakes() {
    let world = World::new();
    let mut first = world.node("plant-a");
    first.set("relay.lease", "2s").set("relay.ack_wait", "500ms");
    let mut standby = second(&world, &first);
    standby.set("relay.lease", "2s").set("relay.ack_wait", "500ms");
    first.start().expect("up");
    await_role(&first, "active", s(10));
    standby.start().expect("up");
    let pace = Pace { per_transaction: 5, every: Duration::from_millis(5), also: |_, _| Ok(()) };
    let producer = Producer::start(world.application(&first), Generator::new("asset", 30), pace, usize::MAX);
    eventually("some published", s(20), || match count(&first, "published") {
        n if n > 200 => Ok(()),
        n => Err(n),
    });
    freeze_without_the_lock(&mut first);
    let published = count(&first, "published");
    eventually("the standby publishes", s(30), || match count(&first, "published") {
        n if n > published + 500 => Ok(()),
        n => Err(n),
    });
    first.signal(Signal::CONT).expect("woken");
    let seen = producer.committed();
    eventually("both awake under load", s(20), || match producer.committed() {
        n if n > seen + 500 => Ok(()),
        n => Err(n),
    });
    let committed = producer.stop().expect("the producer was never refused");
    await_published(&first, committed, s(30));
    assert_proven(&world);
    await_role(&first, "standby", s(10));
    await_role(&standby, "active", s(10));
}

#[test]
fn a_lock_held_for_seconds_by_another_program_costs_nothing() {
    let world = World::new();
    let mut node = world.node("plant-a");
    node.set("database.busy_timeout", "500ms");
    node.start().expect("up");
    let mut application = world.application(&node);
    application.commit(&Generator::new("warm", 5).take(5)).expect("committed");
    await_published(&node, 5, s(20));
    application.commit(&Generator::new("asset", 20).take(200)).expect("committed");
    let locker = application::open(&node.database()).expect("another program");
    locker.execute_batch("BEGIN IMMEDIATE").expect("the lock is held");
    let held = Instant::now();
    while held.elapsed() < s(4) {
        // reading verbs answer meanwhile
        let status = node.status().expect("status");
        assert_eq!(status["outbox"]["failed"], 0);
    }
    locker.execute_batch("ROLLBACK").expect("released");
    await_published(&node, 205, s(20));
    const COUNTED: &str = "SELECT count(*) FROM outbox_events WHERE attempt_count <> 1";
    assert_eq!(application::number(&node.database(), COUNTED).expect("readable"), 0);
    assert_proven(&world);
}

#[test]
fn an_application_commits_freely_while_the_relay_waits_for_the_broker() {
    let mut world = World::new();
    let mut node = world.node("plant-a");
    node.set("relay.ack_wait", "2s").set("relay.lease", "10s");
    node.start().expect("up");
    let mut application = world.application(&node);
    application.commit(&Generator::new("warm", 5).take(5)).expect("committed");
    await_published(&node, 5, s(20));
    world.nats.freeze().expect("frozen");
    application.commit(&Generator::new("leased", 50).take(50)).expect("committed");
    let mut slowest = Duration::ZERO;
    let mut events = Generator::new("asset", 20);
    for _ in 0..200 {
        let begun = Instant::now();
        application.commit(&events.take(1)).expect("committed");
        slowest = slowest.max(begun.elapsed());
    }
    assert!(slowest < s(1), "a commit took {slowest:?}: the lock is held while the relay waits for the network");
    world.nats.thaw().expect("thawed");
    await_published(&node, 255, s(30));
    assert_proven(&world);
}
