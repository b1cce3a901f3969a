//! Publishing on a real nats-server: acks, duplicates, runs, refusals of one message.

mod jetstream;

use std::time::{Duration, Instant};

use jetstream::{Rig, Site, message, refusal, sought, stored};
use outboxd::domain::settle::{Class, Duplicate, Outcome};
use outboxd::ports::{Link, Shipment, Whereabouts};

#[test]
fn a_missing_stream_is_made_as_the_configuration_says() {
    let site = Site::new();
    let mut settings = site.settings();
    settings.stream.max_age = Duration::from_secs(3_600);
    settings.stream.max_bytes = 1 << 30;
    let rig = Rig::up(settings);
    let topology = rig.await_up();
    assert_eq!((&*topology.stream, topology.last_seq, topology.replicas), ("EVENTS", 0, 1));
    assert!(topology.atomic && topology.max_batch == 1_000, "{topology:?}");
    assert_eq!(topology.duplicate_window, Duration::from_secs(120));
    assert_eq!(topology.max_message, 1_048_576);
    assert_eq!(topology.server_version, "2.15.1");
    assert!(topology.created.ends_with('Z'), "{}", topology.created);
    assert_eq!(rig.broker.findings(), []);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let config = runtime.block_on(async {
        let client = async_nats::connect(site.server.url()).await.expect("connected");
        let context = async_nats::jetstream::new(client);
        let info = context.get_stream("EVENTS").await.expect("the stream").cached_info().clone();
        info.config
    });
    use async_nats::jetstream::stream::{DiscardPolicy, RetentionPolicy, StorageType};
    assert_eq!(config.subjects, ["events.>"]);
    assert_eq!(config.storage, StorageType::File);
    assert_eq!(config.retention, RetentionPolicy::Limits);
    assert_eq!(config.discard, DiscardPolicy::New);
    assert!(config.allow_direct && config.allow_atomic_publish && !config.no_ack);
    assert_eq!((config.max_age, config.max_bytes), (Duration::from_secs(3_600), 1 << 30));
}

#[test]
fn what_is_shipped_is_stored_with_its_id_headers_and_bytes() {
    let site = Site::new();
    let mut rig = Rig::up(site.settings());
    assert_eq!(rig.send(7, message("a", "1", "{\"n\": 1}")), stored(1));
    let all = site.client().messages("EVENTS").expect("readable");
    assert_eq!(all.len(), 1);
    assert_eq!(all[0].subject, "events.asset.a.updated");
    assert_eq!(&all[0].payload[..], b"{\"n\": 1}");
    assert_eq!((all[0].header("Nats-Msg-Id"), all[0].header("ce-id")), ("s:1", "1"));
    assert_eq!(all[0].header("Nats-Expected-Stream"), "EVENTS");
}

#[test]
fn ten_thousand_in_flight_windows_are_each_reported_once_in_order() {
    let site = Site::new();
    let mut rig = Rig::up(site.settings());
    for window in 0..10 {
        let shipments = (0..1_000u64).map(|n| {
            let ticket = window * 1_000 + n;
            Shipment { ticket, messages: vec![message(&format!("a{}", n % 50), &ticket.to_string(), "{}")] }
        });
        rig.ship_all(shipments.collect());
        rig.await_reports((window as usize + 1) * 1_000);
    }
    for (ticket, outcome) in rig.outcomes().clone() {
        assert_eq!(outcome, stored(ticket + 1), "an outlet's shipments enter the stream in its order");
    }
    assert_eq!(site.client().count("EVENTS").expect("readable"), 10_000);
}

#[test]
fn a_repeated_id_is_the_same_event_or_a_collision_or_gone() {
    let site = Site::new();
    let mut rig = Rig::up(site.settings());
    assert_eq!(rig.send(1, message("a", "1", "{}")), stored(1));
    let same = rig.send(2, message("a", "1", "{}"));
    assert_eq!(same, Outcome::Stored { stream_seq: 1, duplicate: Duplicate::Same });
    let Outcome::Collision { stream_seq: 1, detail } = rig.send(3, message("a", "1", "{\"other\":1}")) else {
        panic!("{:?}", rig.outcomes());
    };
    assert_eq!(detail, "its payload has 2 bytes, ours 11");
    let Outcome::Collision { stream_seq: 1, detail } = rig.send(4, message("b", "1", "{}")) else {
        panic!("{:?}", rig.outcomes());
    };
    assert_eq!(detail, "it stands on subject events.asset.a.updated instead of events.asset.b.updated");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let client = async_nats::connect(site.server.url()).await.expect("connected");
        let stream = async_nats::jetstream::new(client).get_stream("EVENTS").await.expect("the stream");
        stream.delete_message(1).await.expect("deleted");
    });
    let gone = rig.send(5, message("a", "1", "{}"));
    assert_eq!(gone, Outcome::Stored { stream_seq: 1, duplicate: Duplicate::Gone });
}

#[test]
fn a_run_is_stored_whole_with_consecutive_sequences() {
    let site = Site::new();
    let mut rig = Rig::up(site.settings());
    assert_eq!(rig.send(1, message("a", "1", "{}")), stored(1));
    let run = |from: u64, to: u64| (from..=to).map(|n| message("a", &n.to_string(), &n.to_string())).collect();
    rig.ship_run(2, run(2, 501));
    assert_eq!(rig.outcome(2), stored(501));
    rig.ship_run(3, run(502, 1_501));
    assert_eq!(rig.outcome(3), stored(1_501), "the longest run that a server takes");
    let all = site.client().messages("EVENTS").expect("readable");
    let ids: Vec<String> = all.iter().map(|m| m.header("Nats-Msg-Id").to_owned()).collect();
    let wanted: Vec<String> = (1..=1_501).map(|n| format!("s:{n}")).collect();
    assert_eq!(ids, wanted);
    assert_eq!(all[7].header("ce-id"), "8");
}

#[test]
fn a_run_with_a_known_id_stores_nothing_and_says_so() {
    let site = Site::new();
    let mut rig = Rig::up(site.settings());
    assert_eq!(rig.send(1, message("a", "2", "{}")), stored(1));
    rig.ship_run(2, (1..=3).map(|n| message("a", &n.to_string(), "{}")).collect());
    assert_eq!(rig.outcome(2), Outcome::KnownIdInRun);
    assert_eq!(site.client().count("EVENTS").expect("readable"), 1);
    assert!(matches!(rig.link(), Link::Up { .. }));
}

#[test]
fn of_a_hundred_runs_at_once_the_surplus_is_sent_one_by_one() {
    let site = Site::new();
    let mut rig = Rig::up(site.settings());
    let shipments = (0..100u64).map(|ticket| {
        let id = |n| format!("{ticket}-{n}");
        Shipment { ticket, messages: (0..10).map(|n| message(&format!("a{ticket}"), &id(n), "{}")).collect() }
    });
    rig.ship_all(shipments.collect());
    let mut whole = 0;
    for (ticket, outcome) in rig.await_reports(100) {
        match outcome {
            Outcome::Stored { .. } => whole += 1,
            Outcome::KnownIdInRun => {}
            other => panic!("run {ticket}: {other:?}"),
        }
    }
    // the server takes fifty a stream, and other daemons may share it
    assert!((1..50).contains(&whole), "{whole} went as a batch");
    assert_eq!(site.client().count("EVENTS").expect("readable"), whole * 10);
}

#[test]
fn a_message_above_the_limit_of_stream_or_server_is_its_own_fault() {
    let site = Site::with("max_payload: 64KB");
    site.make_stream(|config| config.max_message_size = 1_024);
    let mut rig = Rig::up(site.settings());
    assert_eq!(rig.await_up().max_message, 1_024);
    let outcome = rig.send(1, message("a", "1", &"x".repeat(2_000)));
    assert_eq!(refusal(&outcome).0, Class::Row, "{outcome:?}");
    assert_eq!(refusal(&outcome).1, 10_054);
    let outcome = rig.send(2, message("a", "2", &"x".repeat(70_000)));
    let (class, _, detail) = refusal(&outcome);
    assert_eq!(class, Class::Row);
    assert!(detail.contains("65536"), "{detail}");
    rig.ship_run(3, vec![message("a", "3", "{}"), message("a", "4", &"x".repeat(2_000)), message("a", "5", "{}")]);
    assert_eq!(rig.outcome(3), Outcome::KnownIdInRun, "only the message at fault may pay");
    rig.ship_run(4, vec![message("a", "3", "{}"), message("a", "4", &"x".repeat(70_000)), message("a", "5", "{}")]);
    assert_eq!(rig.outcome(4), Outcome::KnownIdInRun);
    assert_eq!(rig.send(5, message("a", "6", "{}")), stored(1), "and the link is as it was");
}

#[test]
fn what_the_wire_cannot_carry_is_refused_and_harms_nobody() {
    let site = Site::new();
    let mut rig = Rig::up(site.settings());
    let with_header = |id: &str, name: &str, value: &str| {
        let mut message = message("a", id, "{}");
        message.headers.push((name.to_owned().into(), value.to_owned()));
        message
    };
    let with_subject = |id: &str, subject: &str| {
        let mut message = message("a", id, "{}");
        message.subject = subject.to_owned();
        message
    };
    let bad = [
        with_header("1", "x", "a\r\nNats-Rollup: all"),
        with_header("2", "a:b", "c"),
        with_header("3", "ä", "c"),
        with_header("4", "", "c"),
        with_subject("5", "events.new item"),
        with_subject("6", "events.x\n"),
        with_subject("7", ""),
    ];
    for (ticket, message) in (0..).zip(bad) {
        let outcome = rig.send(ticket, message);
        assert_eq!(refusal(&outcome).0, Class::Row, "ticket {ticket}: {outcome:?}");
    }
    let outcome = rig.send(50, with_subject("8", "events..x"));
    assert_eq!((refusal(&outcome).0, refusal(&outcome).1), (Class::Subject, 503));
    assert_eq!(rig.send(99, message("a", "9", "{}")), stored(1));
}

#[test]
fn a_forbidden_subject_is_told_at_once_while_others_flow() {
    let users = "authorization { users: [ { user: app, password: pw, permissions: \
                 { publish: { deny: \"events.asset.secret.>\" } } }, { user: admin, password: pw } ] }\n\
                 no_auth_user: admin";
    let site = Site::with(users);
    let mut settings = site.settings();
    settings.nats.user = "app".into();
    settings.nats.password_file = Some(site.file("pw", "pw\n"));
    settings.ack_wait = Duration::from_secs(15);
    let mut rig = Rig::up(settings);
    let started = Instant::now();
    rig.ship(1, message("secret", "1", "{}"));
    rig.ship(2, message("open", "2", "{}"));
    assert_eq!(rig.outcome(2), stored(1));
    let outcome = rig.outcome(1);
    assert!(started.elapsed() < Duration::from_secs(10), "not by the time-out: {:?}", started.elapsed());
    let (class, _, detail) = refusal(&outcome);
    assert_eq!(class, Class::Subject);
    assert!(detail.contains("publish to events.asset.secret.updated"), "{detail}");
    assert!(matches!(rig.link(), Link::Up { .. }));
}

#[test]
fn a_look_up_tells_stored_different_and_missing_apart() {
    let site = Site::new();
    let mut rig = Rig::up(site.settings());
    let mut messages = Vec::new();
    for n in 0..300u64 {
        let message = message(&format!("a{}", n % 3), &n.to_string(), &format!("{{\"n\":{n}}}"));
        rig.ship(n, message.clone());
        messages.push(message);
    }
    rig.await_reports(300);
    let mut questions: Vec<_> = (0..).zip(&messages).map(|(ticket, m)| sought(ticket, m, 0)).collect();
    questions.push(sought(300, &message("a0", "never", "{}"), 0));
    questions.push(sought(301, &message("nobody", "never", "{}"), 0));
    questions.push(sought(302, &message("a0", "0", "{\"n\":1}"), 0));
    questions.push(sought(303, &messages[299], 299));
    questions.push(sought(304, &messages[0], 1));
    questions.push(sought(305, &message("a1", "never", "{}"), 1_000_000));
    let answers = rig.look_up(questions).expect("readable");
    assert_eq!(answers.len(), 306);
    for (n, answer) in (0u64..300).zip(&answers) {
        assert_eq!(*answer, Whereabouts::Stored { stream_seq: n + 1 });
    }
    assert_eq!(answers[300], Whereabouts::Missing);
    assert_eq!(answers[301], Whereabouts::Missing);
    assert!(matches!(&answers[302], Whereabouts::Differs { stream_seq: 1, detail } if detail.contains("payload")));
    assert_eq!(answers[303], Whereabouts::Stored { stream_seq: 300 }, "just above the floor");
    assert_eq!(answers[305], Whereabouts::Missing, "a floor of another stream");
}

#[test]
fn a_look_up_below_the_floor_finds_nothing() {
    let site = Site::new();
    let mut rig = Rig::up(site.settings());
    let first = message("a", "1", "{}");
    assert_eq!(rig.send(1, first.clone()), stored(1));
    assert_eq!(rig.send(2, message("a", "2", "{}")), stored(2));
    assert_eq!(rig.look_up(vec![sought(1, &first, 1)]), Ok(vec![Whereabouts::Missing]));
    assert_eq!(rig.look_up(vec![]), Ok(vec![]));
}

#[test]
fn a_long_subject_is_walked_to_its_end_with_and_without_direct_gets() {
    for allow_direct in [true, false] {
        let site = Site::new();
        site.make_stream(|config| config.allow_direct = allow_direct);
        let mut rig = Rig::up(site.settings());
        let messages: Vec<_> = (0..1_500u64).map(|n| message("one", &n.to_string(), &n.to_string())).collect();
        for (ticket, message) in (0..).zip(&messages) {
            rig.ship(ticket, message.clone());
        }
        rig.await_reports(1_500);
        let questions = vec![
            sought(1, &messages[0], 0),
            sought(2, &messages[1_499], 0),
            sought(3, &messages[700], 0),
            sought(4, &message("one", "never", "{}"), 0),
            sought(5, &message("one", "1200", "other"), 0),
        ];
        let answers = rig.look_up(questions).expect("readable");
        let stored = |stream_seq| Whereabouts::Stored { stream_seq };
        assert_eq!(answers[..4], [stored(1), stored(1_500), stored(701), Whereabouts::Missing]);
        assert!(matches!(answers[4], Whereabouts::Differs { stream_seq: 1_201, .. }), "{:?}", answers[4]);
    }
}

#[test]
fn where_subjects_are_rewritten_ids_and_payloads_still_tell() {
    let site = Site::new();
    site.make_stream(|config| {
        config.subject_transform = Some(async_nats::jetstream::stream::SubjectTransform {
            source: "events.asset.*.updated".into(),
            destination: "kept.{{wildcard(1)}}".into(),
        });
    });
    let mut rig = Rig::up(site.settings());
    let first = message("a", "1", "{}");
    assert_eq!(rig.send(1, first.clone()), stored(1));
    assert_eq!(site.client().messages("EVENTS").expect("readable")[0].subject, "kept.a");
    assert_eq!(rig.send(2, first.clone()), Outcome::Stored { stream_seq: 1, duplicate: Duplicate::Same });
    let answers = rig.look_up(vec![sought(1, &first, 0), sought(2, &message("a", "2", "{}"), 0)]);
    assert_eq!(answers, Ok(vec![Whereabouts::Stored { stream_seq: 1 }, Whereabouts::Missing]));
    assert!(rig.broker.findings().iter().any(|f| f.field == "subject_transform"));
}

#[test]
fn a_stream_that_keeps_nothing_still_answers() {
    let site = Site::new();
    site.make_stream(|config| config.retention = async_nats::jetstream::stream::RetentionPolicy::Interest);
    let mut rig = Rig::up(site.settings());
    for ticket in 1..=5 {
        let outcome = rig.send(ticket, message("a", &ticket.to_string(), "{}"));
        assert!(matches!(outcome, Outcome::Stored { .. }), "{outcome:?}");
    }
    assert_eq!(site.client().count("EVENTS").expect("readable"), 0);
    assert!(rig.broker.findings().iter().any(|f| f.field == "retention"), "and it is a finding");
}

#[test]
fn batches_that_are_switched_off_in_between_cost_nobody_anything() {
    let site = Site::new();
    let mut rig = Rig::up(site.settings());
    assert!(rig.await_up().atomic);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let client = async_nats::connect(site.server.url()).await.expect("connected");
        let context = async_nats::jetstream::new(client);
        let mut config = context.get_stream("EVENTS").await.expect("the stream").cached_info().config.clone();
        config.allow_atomic_publish = false;
        context.update_stream(config).await.expect("changed");
    });
    rig.ship_run(1, (1..=3).map(|n| message("a", &n.to_string(), "{}")).collect());
    assert_eq!(rig.outcome(1), Outcome::KnownIdInRun);
    rig.await_link("no more batches", |link| link.topology().is_some_and(|t| !t.atomic && t.max_batch == 1));
    assert_eq!(rig.send(2, message("a", "1", "{}")), stored(1));
}

#[test]
fn a_burst_of_other_publishers_delays_no_ack_and_spoils_none() {
    let site = Site::new();
    let mut rig = Rig::up(site.settings());
    let client = site.client();
    for round in 0..20u64 {
        for n in 0..30 {
            client.publish("events.other", &[], format!("{round}-{n}").as_bytes()).expect("published");
        }
        let started = Instant::now();
        let outcome = rig.send(round, message("a", &round.to_string(), "{}"));
        assert_eq!(outcome, stored(round * 31 + 31));
        assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
    }
}
