//! Start, stop, exit codes.

use std::process::Stdio;
use std::time::Instant;

use outboxd::testbed::application::{self, Generator};
use outboxd::testbed::process::Process;
use rustix::process::Signal;

use super::support::{World, assert_proven, await_published, count, eventually, s};

/// Leases that a daemon has left behind.
fn leases(node: &outboxd::testbed::node::Node) -> i64 {
    application::number(&node.database(), "SELECT count(*) FROM outboxd_leases").expect("readable")
}

#[test]
fn sigterm_in_a_drain_ends_with_zero_and_gives_every_lease_back() {
    let world = World::new();
    let mut node = world.node("plant-a");
    world.application(&node).commit(&Generator::new("asset", 50).take(3_000)).expect("committed");
    for signal in [Signal::TERM, Signal::INT] {
        node.start().expect("up");
        node.signal(signal).expect("sent");
        let end = node.daemon().expect("started").wait(s(20)).expect("it ends within its grace");
        assert_eq!(end.code(), Some(0), "{}", node.log());
        assert_eq!(leases(&node), 0, "leases are given back");
        assert_eq!(count(&node, "pending") + count(&node, "published"), 3_000);
        // what is published is in the stream, exactly
        assert_eq!(world.client().count("EVENTS").expect("counted"), count(&node, "published") as u64);
    }
    node.start().expect("up");
    await_published(&node, 3_000, s(30));
    assert_proven(&world);
}

#[test]
fn a_second_signal_stops_at_once_while_a_drain_hangs() {
    let mut world = World::new();
    let mut node = world.node("plant-a");
    node.set("relay.lease", "60s").set("relay.ack_wait", "25s").run_with(&["--grace", "30s"]);
    node.start().expect("up");
    let mut application = world.application(&node);
    application.commit(&Generator::new("asset", 5).take(10)).expect("committed");
    await_published(&node, 10, s(20));
    world.nats.freeze().expect("frozen");
    application.commit(&Generator::new("late", 5).take(10)).expect("committed");
    eventually("a lease in flight", s(10), || if leases(&node) > 0 { Ok(()) } else { Err("no lease") });

    node.signal(Signal::TERM).expect("sent");
    eventually("draining", s(10), || match node.state() {
        Ok(state) if state == "draining" => Ok(()),
        Ok(state) => Err(state),
        Err(e) => Err(e.to_string()),
    });
    let begun = Instant::now();
    node.signal(Signal::TERM).expect("sent again");
    let end = node.daemon().expect("started").wait(s(10)).expect("it ends at once");
    assert_eq!(end.code(), Some(1), "a stop that had to be forced is told: {}", node.log());
    assert!(begun.elapsed() < s(5), "{:?}", begun.elapsed());

    world.nats.thaw().expect("thawed");
    node.set("relay.lease", "3s").set("relay.ack_wait", "1s");
    node.start().expect("up again");
    await_published(&node, 20, s(30));
    assert_proven(&world);
}

#[test]
fn a_bad_configuration_ends_with_78_and_names_every_problem() {
    let world = World::new();
    let node = world.node("plant-a");
    let good = node.config_text();
    node.write_config_text(&format!("{good}\n[retention]\npublishd = \"7d\"\nprocessed = -1\n")).expect("written");
    for command in [&["run"][..], &["config", "check"]] {
        let refused = node.cli(command).expect("it ran");
        assert_eq!(refused.code, Some(78), "{command:?}: {refused:?}");
        let said = refused.out + &refused.err;
        for word in ["config.toml", "publishd", "published", "processed"] {
            assert!(said.contains(word), "{command:?} does not name {word:?}: {said}");
        }
    }
}

#[test]
fn an_absent_configuration_file_ends_with_78() {
    let world = World::new();
    let node = world.node("plant-a");
    std::fs::remove_file(node.config()).expect("removed");
    let refused = node.cli(&["run"]).expect("it ran");
    assert_eq!(refused.code, Some(78), "{refused:?}");
    assert!(refused.err.contains("config.toml"), "{refused:?}");
}

#[test]
fn an_absent_database_ends_with_69_and_is_not_made() {
    let world = World::new();
    let node = world.bare_node("plant-a");
    let refused = node.cli(&["run"]).expect("it ran");
    assert_eq!(refused.code, Some(69), "{refused:?}");
    assert!(refused.err.contains("db init") && refused.err.contains("app.db"), "{refused:?}");
    assert!(!node.database().exists(), "only `db init` creates a file");
}

#[test]
fn a_file_without_our_tables_ends_with_69_and_a_classic_one_with_78() {
    let world = World::new();
    let node = world.bare_node("plant-a");
    let file = rusqlite::Connection::open(node.database()).expect("a file");
    file.execute_batch("PRAGMA journal_mode = WAL; CREATE TABLE orders (id INTEGER PRIMARY KEY)").expect("a table");
    drop(file);
    let refused = node.cli(&["run"]).expect("it ran");
    assert_eq!(refused.code, Some(69), "{refused:?}");
    assert!(refused.err.contains("db init"), "{refused:?}");

    const CLASSIC: &str =
        "CREATE TABLE outbox_events (event_id TEXT PRIMARY KEY NOT NULL, aggregate_type TEXT NOT NULL,
        aggregate_id TEXT NOT NULL, aggregate_version INTEGER NOT NULL, event_type TEXT NOT NULL,
        schema_version INTEGER NOT NULL, payload_json TEXT NOT NULL, status TEXT NOT NULL DEFAULT 'pending',
        attempt_count INTEGER NOT NULL DEFAULT 0, available_at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP,
        created_at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP, published_at TEXT, last_error TEXT,
        UNIQUE (aggregate_type, aggregate_id, aggregate_version))";
    application::open(&node.database()).expect("open").execute_batch(CLASSIC).expect("a classic table");
    let refused = node.cli(&["run"]).expect("it ran");
    assert_eq!(refused.code, Some(78), "{refused:?}");
    assert!(refused.err.contains("db migrate"), "{refused:?}");
}

#[test]
fn status_answers_while_the_daemon_is_down() {
    let world = World::new();
    let node = world.node("plant-a");
    world.application(&node).commit(&Generator::new("asset", 5).take(7)).expect("committed");
    let status = node.status().expect("status");
    assert_eq!(status["state"], "stopped");
    assert_eq!(status["outbox"]["pending"], 7);
    assert_eq!(status["nats"]["connected"], false);
}

#[test]
fn a_stop_at_any_moment_loses_and_doubles_nothing() {
    let mut world = World::new();
    let mut node = world.node("plant-a");
    let mut application = world.application(&node);
    let mut events = Generator::new("asset", 40);
    let mut committed = 0;
    for round in 0..12 {
        node.spawn().expect("started");
        node.await_up().expect("up");
        application.commit(&events.take(500)).expect("committed");
        committed += 500;
        // each time at another point of the drain
        let least = committed as i64 - 500 + round * 40;
        eventually("some of it published", s(20), || match count(&node, "published") {
            n if n >= least => Ok(()),
            n => Err(n),
        });
        if round % 4 == 3 {
            world.nats.freeze().expect("frozen");
        }
        let end = node.stop(s(25)).expect("it ends");
        assert_eq!(end.code(), Some(0), "round {round}: {}", node.log());
        assert_eq!(leases(&node), 0, "round {round}: leases are given back");
        if round % 4 == 3 {
            world.nats.thaw().expect("thawed");
        }
    }
    node.start().expect("up");
    await_published(&node, committed, s(30));
    assert_proven(&world);
}

#[test]
fn what_was_published_before_an_orderly_stop_is_never_sent_again() {
    let world = World::new();
    let mut node = world.node("plant-a");
    // a window so short that the server would store a second copy
    node.set("stream.duplicate_window", "100ms");
    node.start().expect("up");
    world.application(&node).commit(&Generator::new("asset", 10).take(100)).expect("committed");
    await_published(&node, 100, s(20));
    let client = world.client();
    let wire = client.listen("events.>").expect("listening");
    for _ in 0..5 {
        assert_eq!(node.stop(s(20)).expect("it ends").code(), Some(0));
        node.start().expect("up");
    }
    world.application(&node).commit(&Generator::new("last", 1).take(1)).expect("committed");
    await_published(&node, 101, s(20));
    eventually("the last one heard", s(10), || if wire.count() > 0 { Ok(()) } else { Err("nothing") });
    assert_eq!(wire.count(), 1, "{:?}", wire.heard());
    assert_proven(&world);
}

#[test]
fn a_log_that_nobody_reads_any_more_stops_nothing() {
    let world = World::new();
    let mut node = world.node("plant-a");
    node.set("log.level", "trace");
    node.write_config().expect("written");
    let mut command = node.command(&["run"]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut daemon = Process::spawn(&mut command, "outboxd run").expect("started");
    // the pipe's only reader goes at once
    daemon.close_output();
    world.application(&node).commit(&Generator::new("asset", 20).take(300)).expect("committed");
    await_published(&node, 300, s(20));
    assert!(daemon.ended().is_none(), "it runs on");
    assert_proven(&world);
}
