//! How fast a backlog leaves, beside the two limits of the same run.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::report::{Report, grouped};
use super::{AGGREGATES, BenchWorld, Ground, PAYLOAD, limit, median};
use crate::testbed::application::{self, Watcher};
use crate::testbed::flood::flood;
use crate::testbed::node::Node;
use crate::testbed::proof::Proof;
use crate::testbed::stream::{Client, Stored};
use crate::testbed::{Trouble, wait};

/// Messages in flight of the raw publisher: the knee of JetStream's throughput.
const IN_FLIGHT: usize = 1_024;

/// A backlog that has not left by then is not measured any more.
const BOUND: Duration = Duration::from_secs(600);

/// One drain of a backlog by a daemon.
struct Drained {
    /// Events a second, from the start of the process to the last settlement.
    rate: f64,
    /// Microseconds of CPU of the daemon for each event.
    cpu: f64,
    messages: Vec<Stored>,
}

pub(super) fn drain(ground: &Ground<'_>, report: &Report) -> Result<Value, Trouble> {
    let events = ground.options.events;
    report.heading(&format!(
        "drain: {} pending events of {PAYLOAD} bytes, {AGGREGATES} aggregates, synchronous=full, file storage, R1",
        grouped(events as f64)
    ));
    let (mut drained, mut cpu, mut raw, mut sqlite) = (vec![], vec![], vec![], vec![]);
    for round in 1..=ground.options.rounds.max(1) {
        let one = drain_once(ground, &format!("drain-{round}"), events, AGGREGATES)?;
        let flooded = raw_once(ground, &format!("raw-{round}"), &one.messages)?;
        let alone = sqlite_once(ground, &format!("sqlite-{round}"), events)?;
        let note = format!("raw {} · lease + settle alone {}", grouped(flooded), grouped(alone));
        report.figure(&format!("round {round}"), &format!("{} ev/s", grouped(one.rate)), &note);
        drained.push(one.rate);
        cpu.push(one.cpu);
        raw.push(flooded);
        sqlite.push(alone);
    }
    let ratios: Vec<f64> = drained.iter().zip(&raw).map(|(d, r)| d / r).collect();
    let (rate, raw_rate, sqlite_rate, ratio) = (median(&drained), median(&raw), median(&sqlite), median(&ratios));
    report.figure(
        "outboxd, median",
        &format!("{} ev/s", grouped(rate)),
        "from the start of the process to the last settlement",
    );
    report.figure(
        "raw async-nats, median",
        &format!("{} ev/s", grouped(raw_rate)),
        "the same messages, 1,024 in flight, nothing recorded",
    );
    report.figure(
        "lease + settle alone, median",
        &format!("{} ev/s", grouped(sqlite_rate)),
        "the same rows, nothing published",
    );
    report.figure("outboxd / raw", &format!("{:.0} %", ratio * 100.0), "median of the rounds");
    report.figure("CPU of the daemon", &format!("{:.1} us", median(&cpu)), "an event");
    Ok(json!({
        "events": events, "payload_bytes": PAYLOAD, "aggregates": AGGREGATES, "in_flight_raw": IN_FLIGHT,
        "rounds": { "outboxd": drained, "raw": raw, "lease_settle": sqlite },
        "events_per_second": rate, "raw_per_second": raw_rate, "lease_settle_per_second": sqlite_rate,
        "ratio_to_raw": ratio, "cpu_us_per_event": median(&cpu),
    }))
}

pub(super) fn one_aggregate(ground: &Ground<'_>, report: &Report) -> Result<Value, Trouble> {
    let events = (ground.options.events * 2 / 5).max(1);
    report.heading(&format!("one aggregate: {} pending events that must stay in order", grouped(events as f64)));
    let mut rates = vec![];
    for round in 1..=ground.options.rounds.max(1) {
        let one = drain_once(ground, &format!("one-{round}"), events, 1)?;
        report.figure(&format!("round {round}"), &format!("{} ev/s", grouped(one.rate)), "");
        rates.push(one.rate);
    }
    report.figure(
        "outboxd, median",
        &format!("{} ev/s", grouped(median(&rates))),
        "in order, proven against the stream",
    );
    Ok(json!({ "events": events, "rounds": rates, "events_per_second": median(&rates) }))
}

pub(super) fn inbox(ground: &Ground<'_>, report: &Report) -> Result<Value, Trouble> {
    let events = ground.options.events;
    report.heading(&format!("inbox: a second node applies {} events to `assets`", grouped(events as f64)));
    let mut rates = vec![];
    for round in 1..=ground.options.rounds.max(1) {
        let mut world = ground.world(&format!("inbox-{round}"))?;
        world.fill(events, AGGREGATES)?;
        drain_world(&mut world)?;
        let mut second = Node::new(&ground.executable, &world.folder.0, "plant-b", &world.nats.url())?;
        second.set("relay.enabled", false).set("log.format", "text").handle("asset.*", "assets", "");
        second.write_config()?;
        second.init(&["--example"])?;
        let begun = Instant::now();
        second.spawn()?;
        let wanted = events as i64;
        wait::until("every event applied", BOUND, || match application::processed(&second.database()) {
            Ok(n) if n >= wanted => Ok(()),
            Ok(n) => Err(format!("{n} of {wanted}")),
            Err(e) => Err(e.to_string()),
        })?;
        let rate = events as f64 / begun.elapsed().as_secs_f64();
        report.figure(&format!("round {round}"), &format!("{} ev/s", grouped(rate)), "");
        rates.push(rate);
    }
    report.figure(
        "outboxd, median",
        &format!("{} ev/s", grouped(median(&rates))),
        "from the start of the process to the last commit",
    );
    Ok(json!({ "events": events, "rounds": rates, "events_per_second": median(&rates) }))
}

fn drain_once(ground: &Ground<'_>, name: &str, events: usize, aggregates: usize) -> Result<Drained, Trouble> {
    let mut world = ground.world(name)?;
    world.fill(events, aggregates)?;
    let (took, cpu) = drain_world(&mut world)?;
    let messages = Client::connect(&world.nats.url())?.messages("EVENTS")?;
    let proof = Proof::of(&world.ledger, &messages);
    if !proof.holds() {
        return Err(Trouble::failed(format!("the drain was fast and wrong: {proof}")));
    }
    Ok(Drained { rate: events as f64 / took.as_secs_f64(), cpu: cpu * 1e6 / events as f64, messages })
}

/// Starts the daemon on a backlog; answers the time until nothing is pending, and the CPU seconds that it took.
fn drain_world(world: &mut BenchWorld) -> Result<(Duration, f64), Trouble> {
    let watcher = Watcher::open(&world.node.database())?;
    let begun = Instant::now();
    world.node.spawn()?;
    wait::until("the backlog drained", BOUND, || match watcher.drained() {
        Ok(true) => Ok(()),
        Ok(false) => Err("events are pending".to_owned()),
        Err(e) => Err(e.to_string()),
    })?;
    let took = begun.elapsed();
    let cpu = world.node.cpu_seconds()?;
    let published = application::count(&world.node.database(), "published")?;
    if published != world.ledger.len() as i64 {
        return Err(Trouble::failed(format!("{published} of {} events were published", world.ledger.len())));
    }
    let end = world.node.stop(Duration::from_secs(30))?;
    match end.success() {
        true => Ok((took, cpu)),
        false => Err(Trouble::failed(format!("the daemon ended with {end}"))),
    }
}

fn raw_once(ground: &Ground<'_>, name: &str, messages: &[Stored]) -> Result<f64, Trouble> {
    let world = ground.world(name)?;
    let client = Client::connect(&world.nats.url())?;
    client.create_stream("EVENTS", &["events.>"], |_| ())?;
    let took = flood(&world.nats.url(), messages, IN_FLIGHT)?;
    let stored = client.count("EVENTS")?;
    if stored != messages.len() as u64 {
        return Err(Trouble::failed(format!("{stored} of {} raw messages were stored", messages.len())));
    }
    Ok(messages.len() as f64 / took.as_secs_f64())
}

fn sqlite_once(ground: &Ground<'_>, name: &str, events: usize) -> Result<f64, Trouble> {
    let world = ground.world(name)?;
    world.fill(events, AGGREGATES)?;
    let took = limit::lease_and_settle(&world.node.database(), events)?;
    Ok(events as f64 / took.as_secs_f64())
}
