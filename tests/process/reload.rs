//! SIGHUP: a configuration comes into force whole, or not at all.

use outboxd::testbed::application::Generator;
use outboxd::testbed::node::Node;
use rustix::process::Signal;

use super::support::{World, await_published, eventually, s};

const FIRST: &str = "events.{aggregate_type}.{aggregate_id}.{event}";
const SECOND: &str = "events.v2.{aggregate_id}.{event}";

fn generation(node: &Node) -> i64 {
    node.status().expect("status")["config"]["generation"].as_i64().expect("a number")
}

fn await_reload(node: &Node, wanted: &str) {
    eventually(&format!("the reload {wanted}"), s(15), || match node.status() {
        Ok(status) if status["config"]["last_reload"] == wanted => Ok(()),
        Ok(status) => Err(status["config"].to_string()),
        Err(e) => Err(e.to_string()),
    });
}

/// The subject of the newest message, after one more event has gone out.
fn subject_now(world: &World, node: &Node, prefix: &str, wanted: usize) -> String {
    world.application(node).commit(&Generator::new(prefix, 1).take(1)).expect("committed");
    await_published(node, wanted, s(20));
    world.client().messages("EVENTS").expect("read").pop().expect("a message").subject
}

#[test]
fn a_broken_file_is_rejected_and_the_old_configuration_stays_in_force() {
    let world = World::new();
    let mut node = world.node("plant-a");
    node.set("relay.subject", FIRST);
    node.start().expect("up");
    let good = node.config_text();
    let changed = good.replace(FIRST, SECOND);
    let broken = [
        ("a syntax error at the end", format!("{changed}\n[retention\n")),
        ("an unknown key", format!("{changed}\n[retention]\npublishd = \"7d\"\n")),
        ("an impossible value", format!("{changed}\n[retention]\npublished = -1\n")),
    ];
    for (n, (what, text)) in (1..).zip(&broken) {
        // a rejected one before it must not be taken for this one's
        node.write_config_text(&good).expect("written");
        node.signal(Signal::HUP).expect("sent");
        await_reload(&node, "ok");
        node.write_config_text(text).expect("written");
        node.signal(Signal::HUP).expect("sent");
        await_reload(&node, "rejected");
        assert_eq!(generation(&node), 1, "{what}");
        let subject = subject_now(&world, &node, &format!("broken{n}"), n);
        assert_eq!(subject, format!("events.asset.broken{n}-00000.created"), "{what}");
        let refused = node.cli(&["reload", "--wait"]).expect("it ran");
        assert_eq!(refused.code, Some(78), "{what}: {refused:?}");
    }
    std::fs::remove_file(node.config()).expect("removed");
    node.signal(Signal::HUP).expect("sent");
    // without the file no command knows where to ask
    let told = || if node.log().contains("no such file") { Ok(()) } else { Err("not in the log") };
    eventually("the absent file told", s(15), told);
    node.write_config_text(&good).expect("written");
    await_reload(&node, "rejected");
    assert!(node.daemon().expect("started").ended().is_none(), "it still runs");
}

#[test]
fn an_accepted_reload_changes_behaviour_without_a_restart() {
    let world = World::new();
    let mut node = world.node("plant-a");
    node.set("relay.subject", FIRST);
    node.start().expect("up");
    assert_eq!(subject_now(&world, &node, "a", 1), "events.asset.a-00000.created");
    node.set("relay.subject", SECOND);
    node.write_config().expect("written");
    let accepted = node.cli(&["reload", "--wait"]).expect("it ran");
    assert_eq!(accepted.code, Some(0), "{accepted:?}");
    assert!(accepted.out.contains("relay.subject"), "it says what has changed: {accepted:?}");
    assert_eq!(generation(&node), 2);
    assert_eq!(subject_now(&world, &node, "b", 2), "events.v2.b-00000.created");
    // the same content again changes nothing
    let same = node.cli(&["reload", "--wait"]).expect("it ran");
    assert_eq!((same.code, generation(&node)), (Some(0), 2), "{same:?}");
}

#[test]
fn one_key_that_needs_a_restart_refuses_the_whole_reload() {
    let world = World::new();
    let mut node = world.node("plant-a");
    // named, so that the command finds the daemon whatever the database is called
    node.set("relay.subject", FIRST).set("admin.socket", "outboxd.sock");
    node.start().expect("up");
    node.set("relay.subject", SECOND).set("database.path", "other.db");
    node.write_config().expect("written");
    let refused = node.cli(&["reload", "--wait"]).expect("it ran");
    assert_eq!(refused.code, Some(78), "{refused:?}");
    let said = refused.out + &refused.err;
    assert!(said.contains("database.path"), "the key is named: {said}");
    assert_eq!(generation(&node), 1);
    assert_eq!(subject_now(&world, &node, "a", 1), "events.asset.a-00000.created", "nothing of it is in force");
}
