//! Outages on a real nats-server: each ticket is reported exactly once, the link says what is wrong, and goes on by
//! itself when it is mended.

mod jetstream;

use std::time::{Duration, Instant};

use async_nats::jetstream::stream::DiscardPolicy;
use futures_util::StreamExt;
use jetstream::{Rig, SOON, Site, message, refusal, settings, sought, stored};
use outboxd::domain::settle::{Class, Duplicate, Outcome};
use outboxd::ports::{Link, Shipment, Whereabouts};
use outboxd::testbed::server::unused_port;
use outboxd::testbed::wait;

fn generation(rig: &Rig) -> u64 {
    match rig.link() {
        Link::Up { generation, .. } => generation,
        other => panic!("not up: {other:?}"),
    }
}

fn burst(from: u64, count: u64) -> Vec<Shipment> {
    (from..from + count)
        .map(|n| Shipment { ticket: n, messages: vec![message(&format!("a{}", n % 100), &n.to_string(), "{}")] })
        .collect()
}

#[test]
fn with_nats_down_nothing_is_sent_and_the_link_comes_up_by_itself() {
    let mut site = Site::new();
    site.server.stop().expect("stopped");
    let mut rig = Rig::start(site.settings());
    rig.await_down("cannot connect to nats://127.0.0.1:");
    assert_eq!(rig.send(1, message("a", "1", "{}")), Outcome::NotSent);
    assert!(rig.look_up(vec![sought(1, &message("a", "1", "{}"), 0)]).is_err());
    site.server.resume().expect("started");
    rig.await_up();
    assert_eq!(rig.send(2, message("a", "1", "{}")), stored(1));
}

#[test]
fn a_host_that_resolves_to_nothing_is_tried_again() {
    let site = Site::new();
    let rig = Rig::start(settings("nats://no-such-host.invalid:4222"));
    rig.await_down("does not resolve");
    drop(rig);
    let mut two = site.settings();
    two.nats.urls.insert(0, format!("nats://127.0.0.1:{}", unused_port().expect("a port")));
    Rig::up(two);
}

#[test]
fn a_server_killed_in_mid_flight_leaves_no_ticket_unreported() {
    let mut site = Site::new();
    let mut rig = Rig::up(site.settings());
    let mut next = 0;
    for round in 1..=5u64 {
        let before = generation(&rig);
        rig.ship_all(burst(next, 2_000));
        // some acks have come, most have not
        rig.await_reports(next as usize + 1);
        site.server.kill().expect("killed");
        next += 2_000;
        rig.await_reports(next as usize);
        rig.await_link("link down", |link| matches!(link, Link::Down { .. }));
        site.server.resume().expect("started");
        rig.await_up();
        assert!(generation(&rig) > before, "round {round}");
    }
    let outcomes = rig.outcomes().clone();
    assert_eq!(outcomes.len(), 10_000);
    let in_stream: std::collections::BTreeSet<String> = site
        .client()
        .messages("EVENTS")
        .expect("readable")
        .iter()
        .map(|m| m.header("Nats-Msg-Id").to_owned())
        .collect();
    let (mut acked, mut unknown) = (0, Vec::new());
    for (ticket, outcome) in &outcomes {
        match outcome {
            Outcome::Stored { .. } => {
                acked += 1;
                assert!(in_stream.contains(&format!("s:{ticket}")), "{ticket} was acked and is not there");
            }
            Outcome::NotSent => assert!(!in_stream.contains(&format!("s:{ticket}")), "{ticket} was sent"),
            Outcome::Unknown { .. } => unknown.push(*ticket),
            other => panic!("{ticket}: {other:?}"),
        }
    }
    assert!(acked > 0 && !unknown.is_empty(), "{acked} acked, {} unknown: nothing was tested", unknown.len());
    let questions =
        unknown.iter().map(|n| sought(*n, &message(&format!("a{}", n % 100), &n.to_string(), "{}"), 0)).collect();
    let answers = rig.look_up(questions).expect("readable");
    for (ticket, answer) in unknown.iter().zip(answers) {
        let there = in_stream.contains(&format!("s:{ticket}"));
        assert_eq!(matches!(answer, Whereabouts::Stored { .. }), there, "{ticket}: {answer:?}");
    }
}

#[test]
fn stored_but_the_ack_timed_out_is_unknown_and_then_found() {
    let mut site = Site::new();
    let mut settings = site.settings();
    settings.ack_wait = Duration::from_secs(1);
    let mut rig = Rig::up(settings);
    assert_eq!(rig.send(0, message("a", "0", "{}")), stored(1));
    site.server.freeze().expect("frozen");
    let started = Instant::now();
    let messages: Vec<_> = (1..=20).map(|n| message("a", &n.to_string(), "{}")).collect();
    for (ticket, message) in (1..).zip(&messages) {
        rig.ship(ticket, message.clone());
    }
    for ticket in 1..=20 {
        let outcome = rig.outcome(ticket);
        assert!(matches!(&outcome, Outcome::Unknown { detail } if detail.contains("no ack within 1s")), "{outcome:?}");
    }
    assert!(started.elapsed() < Duration::from_secs(8), "not by the pings: {:?}", started.elapsed());
    assert_eq!(rig.broker.expired(), 20);
    rig.await_unusable("");
    assert_eq!(rig.send(99, message("a", "99", "{}")), Outcome::NotSent, "an unusable link takes nothing");
    site.server.thaw().expect("thawed");
    rig.await_up();
    let questions: Vec<_> = (1..).zip(&messages).map(|(ticket, m)| sought(ticket, m, 1)).collect();
    wait::until("all twenty found", SOON, || {
        let answers = rig.look_up(questions.clone()).map_err(|e| e.to_string())?;
        let wanted: Vec<_> = (2..=21).map(|stream_seq| Whereabouts::Stored { stream_seq }).collect();
        if answers == wanted { Ok(()) } else { Err(format!("{answers:?}")) }
    })
    .unwrap_or_else(|late| panic!("{late}"));
}

#[test]
fn a_server_frozen_for_long_is_given_up_and_nothing_old_is_sent_afterwards() {
    let mut site = Site::new();
    let mut settings = site.settings();
    settings.nats.ping_interval = Duration::from_millis(500);
    settings.ack_wait = Duration::from_millis(500);
    let mut rig = Rig::up(settings);
    site.server.freeze().expect("frozen");
    // more than the kernel's buffers and the client's queue take
    let payload = "x".repeat(100_000);
    let big = |n: u64| Shipment { ticket: n, messages: vec![message("a", &n.to_string(), &payload)] };
    rig.ship_all((0..1_000).map(big).collect());
    rig.await_reports(1_000);
    rig.await_link("link down", |link| matches!(link, Link::Down { .. }));
    let reported = rig.outcomes().clone();
    assert!(reported.values().any(|o| matches!(o, Outcome::Unknown { .. })), "some were on their way");
    assert!(!reported.values().any(|o| matches!(o, Outcome::Stored { .. })), "no ack came");
    site.server.thaw().expect("thawed");
    rig.await_up();
    let client = site.client();
    let still = wait::until_still("the stream at rest", Duration::from_millis(500), SOON, || {
        client.count("EVENTS").expect("readable")
    });
    assert!(still.expect("at rest") < 1_000, "what was only queued must never be sent");
    assert_eq!(rig.outcomes().len(), 1_000);
}

#[test]
fn jetstream_off_is_an_outage_with_its_reason() {
    let mut site = Site::new();
    let mut rig = Rig::up(site.settings());
    assert_eq!(rig.send(1, message("a", "1", "{}")), stored(1));
    site.server.stop().expect("stopped");
    site.server.set_jetstream(false);
    site.server.resume().expect("started");
    rig.await_unusable("no JetStream");
    assert!(rig.link().is_connected());
    assert_eq!(rig.send(2, message("a", "2", "{}")), Outcome::NotSent);
    site.server.stop().expect("stopped");
    site.server.set_jetstream(true);
    site.server.resume().expect("started");
    rig.await_up();
    assert_eq!(rig.send(3, message("a", "2", "{}")), stored(2));
}

#[test]
fn a_stream_deleted_in_between_is_an_outage_and_not_made_again_where_it_may_only_be_checked() {
    use outboxd::config::Manage;
    let site = Site::new();
    for manage in [Manage::Check, Manage::Off] {
        site.make_stream(|_| ());
        let mut settings = site.settings();
        settings.stream.manage = manage;
        let mut rig = Rig::up(settings);
        let created = rig.await_up().created.clone();
        assert_eq!(rig.send(1, message("a", "1", "{}")), stored(1));
        site.client().delete_stream("EVENTS").expect("deleted");
        let outcome = rig.send(2, message("a", "2", "{}"));
        let (class, code, _) = refusal(&outcome);
        assert_eq!((class, code), (Class::Outage, 503), "{outcome:?}");
        rig.await_unusable("stream EVENTS does not exist");
        site.make_stream(|_| ());
        rig.await_up();
        assert_ne!(rig.await_up().created, created, "it is seen to be another stream");
        assert_eq!(rig.send(3, message("a", "2", "{}")), stored(1), "its sequences begin again");
        drop(rig);
        site.client().delete_stream("EVENTS").expect("deleted");
    }
}

#[test]
fn with_manage_create_a_deleted_stream_is_made_again() {
    let site = Site::new();
    let mut rig = Rig::up(site.settings());
    assert_eq!(rig.send(1, message("a", "1", "{}")), stored(1));
    site.client().delete_stream("EVENTS").expect("deleted");
    let outcome = rig.send(2, message("a", "2", "{}"));
    assert!(matches!(outcome, Outcome::Refused { .. }), "{outcome:?}");
    rig.await_up();
    wait::until("published again", SOON, || {
        static TICKET: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(3);
        let ticket = TICKET.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        match rig.send(ticket, message("a", "2", "{}")) {
            Outcome::Stored { .. } => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .unwrap_or_else(|late| panic!("{late}"));
}

#[test]
fn a_full_stream_is_an_outage_until_there_is_room() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    for by_bytes in [false, true] {
        let site = Site::new();
        site.make_stream(|config| {
            config.discard = DiscardPolicy::New;
            if by_bytes { config.max_bytes = 3_000 } else { config.max_messages = 2 }
        });
        let mut rig = Rig::up(site.settings());
        let payload = "x".repeat(1_000);
        assert_eq!(rig.send(1, message("a", "1", &payload)), stored(1));
        assert_eq!(rig.send(2, message("a", "2", &payload)), stored(2));
        let outcome = rig.send(3, message("a", "3", &payload));
        let (class, code, _) = refusal(&outcome);
        assert_eq!((class, code), (Class::Outage, 10_077), "{outcome:?}");
        rig.await_unusable("exceeded");
        assert_eq!(rig.send(4, message("a", "4", &payload)), Outcome::NotSent);
        runtime.block_on(async {
            let client = async_nats::connect(site.server.url()).await.expect("connected");
            let stream = async_nats::jetstream::new(client).get_stream("EVENTS").await.expect("the stream");
            stream.purge().await.expect("purged");
        });
        rig.await_up();
        assert_eq!(rig.send(5, message("a", "3", &payload)), stored(3), "by_bytes {by_bytes}");
    }
}

#[test]
fn a_stream_that_is_full_at_start_takes_nothing() {
    let site = Site::new();
    site.make_stream(|config| {
        config.discard = DiscardPolicy::New;
        config.max_messages = 1;
    });
    site.client().publish("events.x", &[], b"{}").expect("published");
    let rig = Rig::start(site.settings());
    rig.await_unusable("full: 1 of 1 messages");
}

#[test]
fn a_subject_that_is_full_parks_only_itself() {
    let site = Site::new();
    site.make_stream(|config| {
        config.discard = DiscardPolicy::New;
        config.discard_new_per_subject = true;
        config.max_messages_per_subject = 1;
        config.max_messages = 100;
    });
    let mut rig = Rig::up(site.settings());
    assert_eq!(rig.send(1, message("a", "1", "{}")), stored(1));
    let outcome = rig.send(2, message("a", "2", "{}"));
    assert_eq!((refusal(&outcome).0, refusal(&outcome).1), (Class::Subject, 10_077), "{outcome:?}");
    assert_eq!(rig.send(3, message("b", "3", "{}")), stored(2));
}

#[test]
fn a_stream_whose_acks_would_lie_is_never_published_to() {
    type Change = fn(&mut async_nats::jetstream::stream::Config);
    let cases: [(&str, &str, Change); 3] = [
        ("no_ack is true, should be false", "nats stream edit EVENTS --ack", |c| c.no_ack = true),
        ("sealed is true", "name another", |c| c.sealed = true),
        ("subjects is [\"orders.>\"], should be a set that covers events.", "--subjects", |c| {
            c.subjects = vec!["orders.>".into()];
        }),
    ];
    for (words, remedy, change) in cases {
        let site = Site::new();
        // a stream cannot be made sealed, only become so
        let mut sealed = false;
        site.make_stream(|config| {
            change(config);
            sealed = std::mem::take(&mut config.sealed);
        });
        if sealed {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async {
                let client = async_nats::connect(site.server.url()).await.expect("connected");
                let context = async_nats::jetstream::new(client);
                let mut config = context.get_stream("EVENTS").await.expect("the stream").cached_info().config.clone();
                config.sealed = true;
                context.update_stream(config).await.expect("sealed");
            });
        }
        let mut rig = Rig::start(site.settings());
        rig.await_unusable(words);
        rig.await_unusable(remedy);
        assert_eq!(rig.send(1, message("a", "1", "{}")), Outcome::NotSent, "{words}");
    }
}

#[test]
fn a_stream_sealed_in_between_stops_us() {
    let site = Site::new();
    let mut rig = Rig::up(site.settings());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let client = async_nats::connect(site.server.url()).await.expect("connected");
        let context = async_nats::jetstream::new(client);
        let mut config = context.get_stream("EVENTS").await.expect("the stream").cached_info().config.clone();
        config.sealed = true;
        context.update_stream(config).await.expect("sealed");
    });
    let outcome = rig.send(1, message("a", "1", "{}"));
    assert_eq!(refusal(&outcome).0, Class::Outage, "{outcome:?}");
    rig.await_unusable("sealed");
}

#[test]
fn a_plain_responder_is_no_jetstream() {
    let site = Site::new();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("one");
    let url = site.server.url();
    let answer = |payload: &'static str| {
        let (ready, is_ready) = std::sync::mpsc::channel();
        let url = url.clone();
        let task = runtime.spawn(async move {
            let client = async_nats::connect(url).await.expect("connected");
            let mut requests = client.subscribe("events.>").await.expect("subscribed");
            client.flush().await.expect("flushed");
            ready.send(()).expect("awaited");
            while let Some(request) = requests.next().await {
                if let Some(reply) = request.reply {
                    client.publish(reply, payload.into()).await.expect("answered");
                }
            }
        });
        is_ready.recv_timeout(SOON).expect("a responder");
        task
    };
    // beside a stream: whatever the stranger says, and whoever is first, our own stream's ack counts
    let mut settings = site.settings();
    settings.stream.manage = outboxd::config::Manage::Check;
    settings.ack_wait = Duration::from_secs(3);
    for lie in [
        "thanks",
        r#"{"stream":"OTHER","seq":1}"#,
        r#"{"stream":"EVENTS","seq":999999999}"#,
        r#"{"stream":"EVENTS","seq":2}"#,
        r#"{"stream":"EVENTS","seq":1,"duplicate":true}"#,
        r#"{"stream":"EVENTS","seq":7000,"duplicate":true}"#,
        r#"{"error":{"code":400,"err_code":10060,"description":"expected stream does not match"},"stream":"X","seq":0}"#,
    ] {
        site.make_stream(|_| ());
        let stranger = answer(lie);
        let mut rig = Rig::up(settings.clone());
        for ticket in 1..=20 {
            assert_eq!(rig.send(ticket, message("a", &ticket.to_string(), "{}")), stored(ticket), "{lie}");
        }
        // without the stream its answers prove nothing
        site.client().delete_stream("EVENTS").expect("deleted");
        let outcome = rig.send(50, message("a", "50", "{}"));
        assert!(matches!(outcome, Outcome::Unknown { .. }), "{lie}: {outcome:?}");
        rig.await_unusable("stream EVENTS does not exist");
        stranger.abort();
    }
}

#[test]
fn a_duplicate_after_a_restart_is_still_the_same_event() {
    let mut site = Site::new();
    let mut rig = Rig::up(site.settings());
    assert_eq!(rig.send(1, message("a", "1", "{}")), stored(1));
    let before = generation(&rig);
    site.server.kill().expect("killed");
    site.server.resume().expect("started");
    rig.await_link("a new connection", |link| matches!(link, Link::Up { generation, .. } if *generation > before));
    assert_eq!(rig.send(2, message("a", "1", "{}")), Outcome::Stored { stream_seq: 1, duplicate: Duplicate::Same });
}

#[test]
fn a_lame_duck_answers_what_it_has_and_takes_nothing_more() {
    let mut site = Site::with("lame_duck_duration: \"30s\"\nlame_duck_grace_period: \"1s\"");
    let mut rig = Rig::up(site.settings());
    assert_eq!(rig.send(1, message("a", "1", "{}")), stored(1));
    let pid = site.server.id().expect("running");
    let pid = rustix::process::Pid::from_raw(i32::try_from(pid).expect("a pid")).expect("a pid");
    rustix::process::kill_process(pid, rustix::process::Signal::USR2).expect("signalled");
    rig.await_link("link down", |link| matches!(link, Link::Down { .. }));
    assert_eq!(rig.send(2, message("a", "2", "{}")), Outcome::NotSent);
    site.server.kill().expect("killed");
    site.server.resume().expect("started");
    rig.await_up();
    assert_eq!(rig.send(3, message("a", "2", "{}")), stored(2));
}

#[test]
fn a_broker_that_is_dropped_reports_what_it_had() {
    let mut site = Site::new();
    let mut rig = Rig::up(site.settings());
    site.server.freeze().expect("frozen");
    rig.ship_all(burst(0, 100));
    rig.broker.close();
    for (ticket, outcome) in rig.await_reports(100) {
        assert!(matches!(outcome, Outcome::Unknown { .. } | Outcome::NotSent), "{ticket}: {outcome:?}");
    }
    assert_eq!(rig.send(200, message("a", "200", "{}")), Outcome::NotSent);
    rig.await_down("stopped");
}
