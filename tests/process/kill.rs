//! kill -9 of the daemon with leases out: they are void at once, whatever their length.

use outboxd::testbed::application::{self, Generator};

use super::support::{World, assert_proven, await_published, eventually, s};

#[test]
fn rows_of_a_killed_daemon_go_out_at_once_and_not_after_its_lease() {
    let mut world = World::new();
    let mut node = world.node("plant-a");
    node.set("relay.lease", "10m").set("relay.ack_wait", "5s");
    node.start().expect("up");
    let mut application = world.application(&node);
    application.commit(&Generator::new("warm", 5).take(5)).expect("committed");
    await_published(&node, 5, s(20));
    world.nats.freeze().expect("frozen");
    application.commit(&Generator::new("asset", 50).take(500)).expect("committed");
    const LEASES: &str = "SELECT count(*) FROM outboxd_leases";
    eventually("leases", s(10), || match application::number(&node.database(), LEASES) {
        Ok(n) if n > 0 => Ok(()),
        Ok(n) => Err(format!("{n} leases")),
        Err(e) => Err(e.to_string()),
    });
    node.kill().expect("killed");
    world.nats.thaw().expect("thawed");
    node.start().expect("up again");
    await_published(&node, 505, s(60));
    eventually("no lease left", s(10), || match application::number(&node.database(), LEASES) {
        Ok(0) => Ok(()),
        Ok(n) => Err(format!("{n} leases")),
        Err(e) => Err(e.to_string()),
    });
    assert_proven(&world);
}
