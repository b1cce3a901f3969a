//! kill -9 under load: nothing lost, nothing twice, order kept, effects once.

use std::time::Duration;

use outboxd::testbed::application::{self, Generator};
use outboxd::testbed::node::Node;
use outboxd::testbed::producer::{Pace, Producer};
use outboxd::testbed::wait;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::support::{World, assert_proven, await_published, eventually, s};

/// Every effect of the consuming node is a row: one that happens twice shows.
const EFFECT: &str =
    "INSERT INTO effects (event_id, aggregate, version) VALUES (:event_id, :aggregate_id, :aggregate_version)";

/// Events that an application commits in each round.
const EACH_ROUND: usize = 300;

fn consumer(world: &World) -> Node {
    let mut node = world.bare_node("plant-b");
    node.set("relay.enabled", false).set("inbox.ack_wait", "2s").handle("asset.*", "sql", EFFECT);
    node.write_config().expect("config.toml");
    node.init(&[]).expect("db init");
    let database = application::open(&node.database()).expect("open");
    database
        .execute_batch("CREATE TABLE effects (n INTEGER PRIMARY KEY, event_id TEXT, aggregate TEXT, version INTEGER)")
        .expect("a table of the application's own");
    node
}

fn effects(node: &Node) -> i64 {
    application::number(&node.database(), "SELECT count(*) FROM effects").expect("readable")
}

#[test]
fn twenty_kills_under_load_lose_nothing_and_double_nothing() {
    let seed = rand::random::<u64>();
    println!("seed {seed}");
    let mut dice = StdRng::seed_from_u64(seed);
    let world = World::new();
    let (mut a, mut b) = (world.node("plant-a"), consumer(&world));
    let client = world.client();
    a.start().expect("up");
    b.start().expect("up");
    let pace = Pace { per_transaction: 5, every: Duration::from_millis(3), also: |_, _| Ok(()) };
    let mut committed = 0;

    let (mut caught, mut redelivered) = (0, 0);
    for round in 0..20 {
        // somewhere in the flow, and each time somewhere else; the load goes on meanwhile
        let before = client.count("EVENTS").unwrap_or(0);
        let events = Generator::new(&format!("round{round}"), 60);
        let producer = Producer::start(world.application(&a), events, pace, EACH_ROUND);
        let ahead = dice.random_range(1..EACH_ROUND as u64 * 3 / 4);
        eventually("the flow", s(30), || match client.count("EVENTS") {
            Ok(n) if n >= before + ahead => Ok(()),
            Ok(n) => Err(format!("{n} stored, waiting for {}", before + ahead)),
            Err(e) => Err(e.to_string()),
        });
        a.kill().expect("killed");
        if round % 3 == 0 {
            redelivered += b.status().map_or(0, |s| s["inbox"]["duplicates"].as_i64().unwrap_or(0));
            b.kill().expect("killed");
            b.spawn().expect("started again");
        }
        let calm = Duration::from_millis(100);
        let stored =
            wait::until_still("the stream", calm, s(10), || client.count("EVENTS").unwrap_or(0)).expect("calm");
        caught += stored.saturating_sub(application::count(&a.database(), "published").expect("readable") as u64);
        a.spawn().expect("started again");
        committed += producer.finish().expect("the application was never refused");
    }
    println!("{committed} committed, {caught} stored but not settled at a kill, {redelivered} delivered again");
    assert!(caught > 0, "no kill fell between an ack and its settlement: the run tested nothing (seed {seed})");

    await_published(&a, committed, s(60));
    eventually("every effect", s(60), || if effects(&b) >= committed as i64 { Ok(()) } else { Err(effects(&b)) });
    // a fresh event still passes
    world.application(&a).commit(&Generator::new("fresh", 1).take(1)).expect("committed");
    await_published(&a, committed + 1, s(20));
    eventually("the fresh effect", s(20), || if effects(&b) > committed as i64 { Ok(()) } else { Err(effects(&b)) });

    assert_proven(&world);
    let distinct =
        application::number(&b.database(), "SELECT count(DISTINCT event_id) FROM effects").expect("readable");
    assert_eq!((effects(&b), distinct), (committed as i64 + 1, committed as i64 + 1), "each effect once");
    const DISORDER: &str = "SELECT count(*) FROM effects x JOIN effects y ON x.aggregate = y.aggregate
                            WHERE x.n < y.n AND x.version > y.version";
    assert_eq!(application::number(&b.database(), DISORDER).expect("readable"), 0, "effects in order");
    for node in [&a, &b] {
        assert_eq!(application::text(&node.database(), "PRAGMA integrity_check").expect("readable"), "ok");
    }
}
