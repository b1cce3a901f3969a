//! The actor tree with a fake broker, a real SQLite file and real crashes.

mod fake;

use std::sync::atomic::Ordering;
use std::time::Duration;

use fake::{Rig, Wish, World, by_aggregate, down, up};
use outboxd::domain::settle::{Class, Outcome};

fn refused(class: Class) -> Option<Outcome> {
    Some(Outcome::Refused { class, code: 10_077, detail: "test".into() })
}

fn many(aggregates: usize, versions: i64) -> Vec<(String, i64)> {
    (1..=versions).flat_map(|v| (0..aggregates).map(move |a| (format!("a{a}"), v))).collect()
}

fn insert_many(rig: &Rig, aggregates: usize, versions: i64) {
    let events = many(aggregates, versions);
    let events: Vec<(&str, i64)> = events.iter().map(|(a, v)| (a.as_str(), *v)).collect();
    rig.insert(&events);
}

fn assert_in_order(rig: &Rig, aggregates: usize, versions: i64) {
    let found = by_aggregate(&rig.world.stored());
    assert_eq!(found.len(), aggregates);
    for (aggregate, order) in found {
        assert_eq!(order, (1..=versions).collect::<Vec<_>>(), "{aggregate}");
    }
}

async fn all_published(rig: &Rig, rows: usize) {
    rig.eventually("all rows published", |rig| rig.count("outbox_events WHERE status = 'published'") == rows).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn everything_is_published_once_and_in_order() {
    for atomic in [false, true] {
        let rig = Rig::start(World::new(up(1, atomic)), Wish::default()).await;
        insert_many(&rig, 7, 40);
        all_published(&rig, 280).await;
        assert_in_order(&rig, 7, 40);
        assert_eq!(rig.count("outbox_events WHERE attempt_count <> 1 OR stream <> 'EVENTS' OR stream_seq IS NULL"), 0);
        rig.eventually("no lease is left", |rig| rig.count("outboxd_leases") == 0).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_event_holds_its_aggregate_until_it_is_retried() {
    let world = World::new(up(1, false));
    world.judge(|m| (m.msg_id == "test:a1-2").then(|| refused(Class::Row)).flatten());
    let rig = Rig::start(world, Wish::default()).await;
    insert_many(&rig, 3, 4);
    all_published(&rig, 9).await;
    assert_eq!(by_aggregate(&rig.world.stored())["a1"], [1]);
    assert_eq!(rig.count("outbox_events WHERE status = 'failed' AND last_error <> '' AND attempt_count = 1"), 1);
    // later events of the held aggregate wait too, others pass
    rig.insert(&[("a1", 5), ("a2", 5)]);
    all_published(&rig, 10).await;
    rig.world.judge(|_| None);
    rig.sql("UPDATE outbox_events SET status = 'pending', attempt_count = 0 WHERE status = 'failed'");
    all_published(&rig, 14).await;
    assert_eq!(by_aggregate(&rig.world.stored())["a1"], [1, 2, 3, 4, 5]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_discarded_event_sets_its_aggregate_free() {
    let world = World::new(up(1, true));
    world.judge(|m| (m.msg_id == "test:a1-2").then(|| refused(Class::Row)).flatten());
    let rig = Rig::start(world, Wish::default()).await;
    insert_many(&rig, 2, 6);
    all_published(&rig, 7).await;
    rig.sql("DELETE FROM outbox_events WHERE status = 'failed'");
    all_published(&rig, 11).await;
    assert_eq!(by_aggregate(&rig.world.stored())["a1"], [1, 3, 4, 5, 6]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn under_skip_a_failed_event_lets_the_others_pass() {
    let world = World::new(up(1, false));
    world.judge(|m| (m.msg_id == "test:a1-2").then(|| refused(Class::Row)).flatten());
    let rig = Rig::start(world, Wish { hold: false, ..Wish::default() }).await;
    insert_many(&rig, 2, 4);
    all_published(&rig, 7).await;
    assert_eq!(by_aggregate(&rig.world.stored())["a1"], [1, 3, 4]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_counted_failure_is_retried_and_holds_its_successors() {
    let world = World::new(up(1, false));
    let mut refusals = 0;
    world.judge(move |m| {
        if m.msg_id == "test:a0-2" && refusals < 3 {
            refusals += 1;
            return refused(Class::Counted);
        }
        None
    });
    let rig = Rig::start(world, Wish { max_attempts: 10, ..Wish::default() }).await;
    insert_many(&rig, 2, 5);
    all_published(&rig, 10).await;
    assert_in_order(&rig, 2, 5);
    assert_eq!(rig.count("outbox_events WHERE event_id = 'a0-2' AND attempt_count = 4 AND last_error IS NULL"), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn attempts_that_are_used_up_make_a_dead_letter_with_its_reason() {
    let world = World::new(up(1, false));
    world.judge(|m| (m.msg_id == "test:a0-1").then(|| refused(Class::Counted)).flatten());
    let rig = Rig::start(world, Wish { max_attempts: 3, ..Wish::default() }).await;
    insert_many(&rig, 2, 1);
    rig.eventually("it has failed", |rig| {
        rig.count("outbox_events WHERE status = 'failed' AND attempt_count = 3") == 1
    })
    .await;
    assert_eq!(rig.count("outbox_events WHERE last_error LIKE '%gave up after 3 attempts%'"), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_subject_parks_its_aggregate_and_costs_nothing() {
    let world = World::new(up(1, false));
    world.judge(|m| m.msg_id.starts_with("test:a0-").then(|| refused(Class::Subject)).flatten());
    let rig = Rig::start(world, Wish::default()).await;
    insert_many(&rig, 4, 10);
    all_published(&rig, 30).await;
    rig.eventually("it is named", |rig| {
        rig.board.read().parked.iter().flatten().any(|parked| parked.aggregate == "asset/a0")
    })
    .await;
    assert_eq!(rig.count("outbox_events WHERE status = 'pending' AND attempt_count = 0"), 10);
    rig.world.judge(|_| None);
    all_published(&rig, 40).await;
    assert_in_order(&rig, 4, 10);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_outage_costs_no_event_anything() {
    let rig = Rig::start(World::new(down()), Wish { max_attempts: 1, ..Wish::default() }).await;
    insert_many(&rig, 3, 5);
    rig.world.judge(|_| refused(Class::Outage));
    rig.world.set_link(up(1, false));
    rig.eventually("it was tried", |rig| rig.world.shipped.load(Ordering::Relaxed) > 0).await;
    rig.world.set_link(down());
    rig.world.judge(|_| None);
    assert_eq!(rig.count("outbox_events WHERE status = 'pending' AND attempt_count = 0"), 15);
    rig.world.set_link(up(2, false));
    all_published(&rig, 15).await;
    assert_in_order(&rig, 3, 5);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unknown_outcomes_are_sent_again_and_stored_once() {
    let world = World::new(up(1, true));
    let stored_but_unknown = world.clone();
    let mut doubts = 0;
    world.judge(move |m| {
        doubts += 1;
        if doubts % 5 == 0 {
            // stored, but the ack is lost
            let mut stream = stored_but_unknown.stream.lock().unwrap();
            if !stream.contains(&m.msg_id) {
                stream.push(m.msg_id.clone());
            }
            return Some(Outcome::Unknown { detail: "no ack".into() });
        }
        None
    });
    let rig = Rig::start(world, Wish::default()).await;
    // singles only: a run is stored whole, which this judge does not play
    for version in 1..=6 {
        rig.insert(&[("a0", version), ("a1", version), ("a2", version)]);
        all_published(&rig, 3 * version as usize).await;
    }
    assert_in_order(&rig, 3, 6);
    assert_eq!(rig.count("outbox_events WHERE attempt_count <> 1"), 0, "doubt is not counted");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crashed_publisher_is_started_again_and_its_leases_are_rescued() {
    let world = World::new(up(1, false));
    let mut crashes = 0;
    world.judge(move |m| {
        if m.msg_id == "test:a1-3" && crashes < 2 {
            crashes += 1;
            panic!("a bug");
        }
        None
    });
    let rig = Rig::start(world, Wish::default()).await;
    insert_many(&rig, 4, 6);
    all_published(&rig, 24).await;
    assert_in_order(&rig, 4, 6);
    assert!(rig.world.looked_up.load(Ordering::Relaxed) > 0, "what was leased is looked for first");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_publisher_that_always_crashes_ends_the_root() {
    let world = World::new(up(1, false));
    world.judge(|_| panic!("a bug"));
    let mut rig = Rig::start(world, Wish { publishers: 1, ..Wish::default() }).await;
    insert_many(&rig, 1, 1);
    tokio::time::timeout(Duration::from_secs(60), rig.tree.given_up()).await.expect("the root gives up");
    assert_eq!(rig.count("outbox_events WHERE status = 'pending' AND attempt_count = 0"), 1, "and nothing is lost");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_gives_leases_back_and_keeps_the_doubt() {
    let world = World::new(up(1, false));
    world.judge(|m| m.msg_id.ends_with("-1").then(|| Outcome::Unknown { detail: "no ack".into() }));
    let rig = Rig::start(world, Wish::default()).await;
    insert_many(&rig, 3, 4);
    rig.eventually("it was tried", |rig| rig.world.shipped.load(Ordering::Relaxed) > 0).await;
    tokio::time::timeout(Duration::from_secs(10), rig.tree.drain()).await.expect("the drain ends");
    assert_eq!(rig.count("outboxd_leases"), 0);
    assert!(rig.count("outboxd_suspects WHERE crashes = 0") > 0, "rows of unknown fate are looked for by the next");
    assert_eq!(rig.count("outbox_events WHERE attempt_count <> 0"), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_relay_stands_by_and_takes_over() {
    let world = World::new(up(1, false));
    let first = Rig::start(world.clone(), Wish::default()).await;
    insert_many(&first, 2, 3);
    all_published(&first, 6).await;
    let second = Rig::on(first.store.path(), world, Wish::default()).await;
    second.eventually("it stands by", |rig| rig.board.read().relay_role == "standby").await;
    first.tree.drain().await;
    first.tree.stop();
    drop(first.relay.get());
    second.eventually("it takes over", |rig| rig.board.read().relay_role == "active").await;
    second.insert(&[("a0", 4), ("a1", 4)]);
    all_published(&second, 8).await;
    assert_in_order(&second, 2, 4);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_order_nothing_waits() {
    let world = World::new(up(1, false));
    world.judge(|m| (m.msg_id == "test:a0-1").then(|| refused(Class::Row)).flatten());
    let rig = Rig::start(world, Wish { ordered: false, ..Wish::default() }).await;
    insert_many(&rig, 2, 5);
    all_published(&rig, 9).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_scheduled_event_waits_and_holds_nobody() {
    let rig = Rig::start(World::new(up(1, false)), Wish::default()).await;
    rig.sql(
        "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, aggregate_version, event_type,
             schema_version, payload_json, available_at)
         VALUES ('a0-1', 'asset', 'a0', 1, 'asset.updated', 1, '{}', '2999-01-01 00:00:00')",
    );
    rig.insert(&[("a0", 2)]);
    all_published(&rig, 1).await;
    rig.sql("UPDATE outbox_events SET available_at = created_at WHERE event_id = 'a0-1'");
    all_published(&rig, 2).await;
    assert_eq!(rig.world.stored(), ["test:a0-2", "test:a0-1"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_that_was_replaced_is_not_written_any_more() {
    let mut rig = Rig::start(World::new(up(1, false)), Wish::default()).await;
    insert_many(&rig, 1, 1);
    all_published(&rig, 1).await;
    // an application that has the file open goes on writing to what was renamed
    let conn = rusqlite::Connection::open(rig.store.path()).unwrap();
    conn.query_row("SELECT count(*) FROM outbox_events", [], |_| Ok(())).unwrap();
    std::fs::rename(rig.store.path(), rig.store.path().with_extension("away")).unwrap();
    std::fs::write(rig.store.path(), "another").unwrap();
    conn.execute(
        "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, aggregate_version, event_type,
             schema_version, payload_json) VALUES ('a0-2', 'asset', 'a0', 2, 'asset.updated', 1, '{}')",
        [],
    )
    .unwrap();
    rig.relay.cast(outboxd::actors::relay::RelayMsg::Wake { touched: false });
    let error = tokio::time::timeout(Duration::from_secs(20), rig.fatal.recv()).await.expect("it is told").unwrap();
    assert!(matches!(error, outboxd::store::error::StoreError::Replaced { .. }), "{error:?}");
}
