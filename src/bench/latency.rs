//! From a commit of another process to the stream, and what a daemon costs that has nothing to do.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::report::Report;
use super::{Ground, PAYLOAD};
use crate::testbed::application::{self, Generator};
use crate::testbed::producer::{Pace, Producer};
use crate::testbed::proof::Proof;
use crate::testbed::stream::Client;
use crate::testbed::{Trouble, wait};

/// Transactions a second, one event each.
const RATE: u64 = 200;

/// Until a daemon that has worked has nothing left to do, housekeeping included.
const SETTLE_DOWN: Duration = Duration::from_secs(3);

pub(super) fn latency(ground: &Ground<'_>, report: &Report) -> Result<Value, Trouble> {
    let seconds = ground.options.duration.as_secs().max(1);
    report.heading(&format!(
        "latency: one event a transaction, {RATE} transactions a second for {seconds} s, another process"
    ));
    let mut world = ground.world("latency")?;
    world.node.start()?;
    let pace = Pace { per_transaction: 1, every: Duration::from_secs(1) / RATE as u32, also: |_, _| Ok(()) };
    let generator = Generator::new("asset", 50).sized(PAYLOAD);
    let count = (seconds * RATE) as usize;
    Producer::start(world.application()?, generator, pace, count).finish()?;
    wait::until("everything published", Duration::from_secs(60), || {
        match application::count(&world.node.database(), "published") {
            Ok(n) if n == count as i64 => Ok(()),
            Ok(n) => Err(format!("{n} of {count}")),
            Err(e) => Err(e.to_string()),
        }
    })?;
    let proof = Proof::of(&world.ledger, &Client::connect(&world.nats.url())?.messages("EVENTS")?);
    if !proof.holds() {
        return Err(Trouble::failed(format!("fast and wrong: {proof}")));
    }
    let ms = |share| proof.latency(share).as_secs_f64() * 1_000.0;
    for (name, share) in [("p50", 0.50), ("p95", 0.95), ("p99", 0.99), ("max", 1.0)] {
        let note = if share == 0.5 { "from the return of COMMIT to the stream's own time stamp" } else { "" };
        report.figure(name, &format!("{:.2} ms", ms(share)), note);
    }
    Ok(json!({
        "events": count, "per_second": RATE,
        "p50_ms": ms(0.50), "p95_ms": ms(0.95), "p99_ms": ms(0.99), "max_ms": ms(1.0),
    }))
}

pub(super) fn idle(ground: &Ground<'_>, report: &Report) -> Result<Value, Trouble> {
    let length = ground.options.duration;
    report.heading(&format!("idle: a connected daemon with nothing to do, {} s", length.as_secs()));
    let mut world = ground.world("idle")?;
    world.node.start()?;
    world.fill(100, 10)?;
    wait::until("100 events published", Duration::from_secs(30), || {
        match application::count(&world.node.database(), "published") {
            Ok(100) => Ok(()),
            Ok(n) => Err(format!("{n} of 100")),
            Err(e) => Err(e.to_string()),
        }
    })?;
    rest(SETTLE_DOWN)?;
    let (before, begun) = (world.node.cpu_seconds()?, Instant::now());
    rest(length)?;
    let share = (world.node.cpu_seconds()? - before) / begun.elapsed().as_secs_f64() * 100.0;
    let resident = world.node.resident_bytes()? as f64 / f64::from(1 << 20);
    report.figure("CPU", &format!("{share:.2} %"), "of a core");
    report.figure("resident", &format!("{resident:.1} MiB"), "");
    Ok(json!({ "seconds": length.as_secs(), "cpu_percent": share, "resident_mib": resident }))
}

/// Lets time pass, which is what is measured here; ends early when interrupted.
fn rest(length: Duration) -> Result<(), Trouble> {
    let until = Instant::now() + length;
    while Instant::now() < until {
        wait::interrupted()?;
        std::thread::sleep(Duration::from_millis(200).min(until.saturating_duration_since(Instant::now())));
    }
    Ok(())
}
