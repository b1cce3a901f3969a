//! A daemon with nothing to do costs next to nothing, and is awake at once when there is something.

use std::time::Instant;

use outboxd::testbed::application::Generator;

use super::support::{World, await_published, s};

#[test]
fn a_commit_of_another_process_wakes_the_relay() {
    let world = World::new();
    let mut node = world.node("plant-a");
    node.start().expect("up");
    let mut application = world.application(&node);
    let mut events = Generator::new("asset", 5);
    application.commit(&events.take(1)).expect("committed");
    await_published(&node, 1, s(20));
    let begun = Instant::now();
    for n in 2..=40 {
        application.commit(&events.take(1)).expect("committed");
        await_published(&node, n, s(20));
    }
    // the safety poll alone would need half a second for each, 20 s in all
    assert!(begun.elapsed() < s(6), "39 commits, one after the other, took {:?}", begun.elapsed());
}

#[test]
fn an_idle_daemon_costs_next_to_nothing() {
    let world = World::new();
    let mut node = world.node("plant-a");
    node.start().expect("up");
    world.application(&node).commit(&Generator::new("asset", 5).take(100)).expect("committed");
    await_published(&node, 100, s(20));
    // what is measured is time that passes with nothing to do
    std::thread::sleep(s(2));
    let (before, begun) = (node.cpu_seconds().expect("readable"), Instant::now());
    std::thread::sleep(s(5));
    let share = (node.cpu_seconds().expect("readable") - before) / begun.elapsed().as_secs_f64();
    let resident = node.resident_bytes().expect("readable") >> 20;
    println!("idle: {:.2} % of a core, {resident} MiB", share * 100.0);
    // a debug build; `outboxd bench` measures the released one
    assert!(share < 0.03, "{:.2} % of a core", share * 100.0);
    assert!(resident < 64, "{resident} MiB");
}
