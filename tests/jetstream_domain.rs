//! A leaf node and its hub: streams over the same subjects, of which only one is ours.

mod jetstream;

use std::time::Duration;

use jetstream::{Rig, SOON, Site, message, sought, stored};
use outboxd::domain::settle::{Duplicate, Outcome};
use outboxd::ports::Whereabouts;
use outboxd::testbed::server::unused_port;
use outboxd::testbed::wait;

/// JetStream of a domain, with a store of its own.
fn domain(name: &str, store: &std::path::Path) -> String {
    format!("jetstream {{ store_dir: \"{}\", domain: {name} }}\n", store.join(name).display())
}

/// A hub and a leaf that is connected to it, and the folder of their stores.
fn hub_and_leaf() -> (Site, Site, tempfile::TempDir) {
    let port = unused_port().expect("a port");
    let stores = tempfile::tempdir().expect("a folder");
    let hub = Site::with(&format!("{}leafnodes {{ listen: \"127.0.0.1:{port}\" }}", domain("hub", stores.path())));
    let leaf = Site::with(&format!(
        "{}leafnodes {{ remotes: [ {{ url: \"nats-leaf://127.0.0.1:{port}\" }} ] }}",
        domain("leaf", stores.path())
    ));
    wait::until("the leaf is connected", SOON, || {
        let log = leaf.server.log();
        if log.contains("Leafnode connection created") { Ok(()) } else { Err(log) }
    })
    .unwrap_or_else(|late| panic!("{late}"));
    (hub, leaf, stores)
}

#[test]
fn only_the_ack_of_the_configured_domain_counts() {
    let (hub, leaf, _stores) = hub_and_leaf();
    // the same name and the same subjects on both: their acks differ by the domain alone
    leaf.make_stream(|_| ());
    for n in 0..3 {
        leaf.client().publish("events.before", &[], format!("{n}").as_bytes()).expect("published");
    }
    let mut settings = leaf.settings();
    settings.stream.domain = "hub".into();
    let mut rig = Rig::up(settings);
    let first = rig.await_up().last_seq;
    for n in 1..=20 {
        assert_eq!(rig.send(n, message("a", &n.to_string(), "{}")), stored(first + n));
    }
    assert_eq!(hub.client().count("EVENTS").expect("readable"), 20);
    let again = rig.send(99, message("a", "7", "{}"));
    assert_eq!(again, Outcome::Stored { stream_seq: 7, duplicate: Duplicate::Same });
    let answers = rig.look_up(vec![sought(1, &message("a", "20", "{}"), 0), sought(2, &message("a", "x", "{}"), 0)]);
    assert_eq!(answers, Ok(vec![Whereabouts::Stored { stream_seq: 20 }, Whereabouts::Missing]));
}

#[test]
fn another_stream_that_refuses_first_does_not_speak_for_ours() {
    let (hub, leaf, _stores) = hub_and_leaf();
    leaf.client().create_stream("LOCAL", &["events.>"], |_| ()).expect("a stream");
    let mut settings = leaf.settings();
    settings.stream.domain = "hub".into();
    settings.ack_wait = Duration::from_secs(5);
    let mut rig = Rig::up(settings);
    for n in 1..=20 {
        assert_eq!(rig.send(n, message("a", &n.to_string(), "{}")), stored(n));
    }
    assert_eq!(hub.client().count("EVENTS").expect("readable"), 20);
    assert_eq!(leaf.client().count("LOCAL").expect("readable"), 0, "we name our stream: no other stores it");
}

#[test]
fn a_domain_that_is_not_there_is_named() {
    let (_hub, leaf, _stores) = hub_and_leaf();
    let mut settings = leaf.settings();
    settings.stream.domain = "nowhere".into();
    Rig::start(settings).await_unusable("no JetStream in domain nowhere");
}
