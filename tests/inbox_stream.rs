//! The inbox against a real nats-server: each event has its effect once, whatever happens to messages, server, consumer
//! and database.

mod inbox;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use inbox::*;
use outboxd::domain::apply::Position;
use outboxd::jetstream::consume::Settings;
use outboxd::ports::{Answer, Delivery, Inlet, Receipt, Source, Tap};
use tokio::sync::{Semaphore, mpsc};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_that_was_published_twice_has_one_effect_and_nothing_is_pending_at_rest() {
    let (feed, file) = (Feed::start().await, File::new());
    let events = Event::many(10, 1, 20);
    feed.publish(&events).await;
    let hub = Hub::start(&file.path, &counting(&feed.server.url())).await;
    eventually("effects", 200, || file.effects()).await;
    feed.publish(&events).await;
    feed.publish(&Event::many(10, 21, 1)).await;
    eventually("effects", 210, || file.effects()).await;
    feed.await_rest().await;
    assert_eq!(file.twice_and_disordered(), (0, 0));
    assert_eq!(file.int("SELECT duplicates FROM outboxd_inbox_position"), 200);
    assert_eq!(file.int("SELECT settled_seq FROM outboxd_inbox_position"), 410);
    hub.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_bodies_become_dead_rows_and_good_neighbours_flow() {
    let (feed, file) = (Feed::start().await, File::new());
    let deep = vec![b'{'; 60 * 1_024];
    let bad: [&[u8]; 8] =
        [b"", b"not json", b"[1,2]", &deep, b"{\"event_id\":\"\"}", b"\xff\xfe\x00", b"{\"n\":1}", b"{\"n\":2}"];
    for (index, body) in bad.iter().enumerate() {
        feed.publish(&[Event::new("a", 1 + index as i64)]).await;
        feed.publish_raw("events.bad", body).await;
    }
    let hub = Hub::start(&file.path, &counting(&feed.server.url())).await;
    eventually("effects and dead rows", (8, 8), || (file.effects(), file.dead())).await;
    feed.await_rest().await;
    let reasons = file.texts("SELECT reason FROM inbox_events ORDER BY stream_seq");
    assert!(reasons.iter().all(|reason| reason.starts_with("no identity: ")), "{reasons:?}");
    assert_eq!(file.int("SELECT count(DISTINCT stream_seq) FROM inbox_events"), 8, "id-less ones are no duplicates");
    assert_eq!(file.int("SELECT duplicates FROM outboxd_inbox_position"), 0);
    hub.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn headers_that_kill_the_client_become_dead_rows_and_delay_nobody_for_long() {
    let (feed, file) = (Feed::start().await, File::new());
    let blocks: [&[u8]; 4] = [
        b"NATS/1.0\r\nno colon in this line\r\n\r\n",
        b"NATS/1.0\r\nce-id: \xff\xfe\r\n\r\n",
        b"NATS/1.0\r\nn\xc3\xa4me: x\r\n\r\n",
        b"HTTP/1.1\r\nx: y\r\n\r\n",
    ];
    for (index, block) in blocks.iter().enumerate() {
        feed.publish(&[Event::new("a", 1 + index as i64)]).await;
        feed.publish_block("events.hostile", block, b"{}");
    }
    feed.publish(&Event::many(5, 1, 20)).await;
    let began = Instant::now();
    let hub = Hub::start(&file.path, &counting(&feed.server.url())).await;
    eventually("effects and dead rows", (104, 4), || (file.effects(), file.dead())).await;
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    let reasons = file.texts("SELECT reason FROM inbox_events ORDER BY stream_seq");
    assert!(reasons.iter().all(|reason| reason.starts_with("unreadable headers: ")), "{reasons:?}");

    // and while it is running
    feed.publish_block("events.hostile", blocks[1], b"{}");
    feed.publish(&Event::many(5, 21, 2)).await;
    eventually("effects and dead rows", (114, 5), || (file.effects(), file.dead())).await;
    feed.await_rest().await;
    assert_eq!(file.twice_and_disordered(), (0, 0));
    hub.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_headers_and_a_status_that_a_publisher_wrote_do_no_harm() {
    let (feed, file) = (Feed::start().await, File::new());
    let hub = Hub::start(&file.path, &counting(&feed.server.url())).await;
    let event = Event::new("a", 1);
    let mut block = b"NATS/1.0\r\n".to_vec();
    (0..5_000).for_each(|n| block.extend(format!("x-{n}: y\r\n").bytes()));
    block.extend_from_slice(b"\r\n");
    feed.publish_block("events.a", &block, event.body().as_bytes());
    let status = b"NATS/1.0 409 Consumer Deleted\r\nNats-Pending-Messages: 0\r\n\r\n";
    feed.publish_block("events.a", status, Event::new("a", 2).body().as_bytes());
    feed.publish(&[Event::new("a", 3)]).await;
    eventually("effects", 3, || file.effects()).await;
    assert!(hub.is_connected());
    feed.await_rest().await;
    hub.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_busy_database_uses_up_no_delivery() {
    let (feed, file) = (Feed::start().await, File::new());
    let hub = Hub::start(&file.path, &counting(&feed.server.url())).await;
    eventually("pulling", true, || hub.is_connected()).await;
    let holder = file.conn();
    holder.execute_batch("BEGIN IMMEDIATE").unwrap();
    feed.publish(&Event::many(20, 1, 1)).await;
    // longer than ack_wait (2 s) times max_deliver (3)
    tokio::time::sleep(Duration::from_secs(7)).await;
    assert_eq!(feed.consumer().await.map(|info| (info.num_ack_pending, info.num_redelivered)), Some((20, 0)));
    holder.execute_batch("COMMIT").unwrap();
    eventually("effects", 20, || file.effects()).await;
    feed.await_rest().await;
    assert_eq!((file.dead(), file.int("SELECT count(*) FROM outboxd_inbox_failures")), (0, 0));
    assert_eq!(file.int("SELECT duplicates FROM outboxd_inbox_position"), 0);
    hub.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failing_handler_is_tried_again_holds_its_aggregate_and_ends_in_a_dead_row() {
    let (feed, file) = (Feed::start().await, File::new());
    let mut config = counting(&feed.server.url());
    let statements = "INSERT INTO effects (event_id, aggregate_id, version)
        VALUES (:event_id, :aggregate_id, CASE WHEN json_extract(:data, '$.n') < 0 THEN json('{') ELSE :aggregate_version END)";
    config.inbox.handler = vec![handler("asset.*", statements)];
    let mut broken = Event::new("a", 1);
    broken.data = r#"{"n":-1}"#.into();
    feed.publish(&[broken, Event::new("a", 2), Event::new("b", 1)]).await;
    let hub = Hub::start(&file.path, &config).await;
    eventually("the other aggregate", 1, || file.effects()).await;
    eventually("effects and dead rows", (2, 1), || (file.effects(), file.dead())).await;
    feed.await_rest().await;
    let reasons = file.texts("SELECT reason FROM inbox_events");
    assert!(
        reasons[0].starts_with("gave up after 3 failures: ") && reasons[0].contains("malformed JSON"),
        "{reasons:?}"
    );
    assert_eq!(file.texts("SELECT event_id FROM effects ORDER BY n"), ["e-b-1", "e-a-2"]);
    hub.stop().await;
}

/// Sits between the stream and the consumer: of the first deliveries the answer is thrown away after the commit, as a
/// process does that is killed between commit and ack.
struct Forgetful {
    inner: Arc<dyn Source>,
    deliveries: Arc<AtomicUsize>,
}

struct ForgetfulInlet {
    inner: Arc<dyn Inlet>,
    left: Arc<AtomicUsize>,
    kept: Mutex<Vec<mpsc::UnboundedReceiver<Answer>>>,
}

impl Source for Forgetful {
    fn open(&self, inlet: Arc<dyn Inlet>) -> Box<dyn Tap> {
        let (left, kept) = (self.deliveries.clone(), Mutex::default());
        self.inner.open(Arc::new(ForgetfulInlet { inner: inlet, left, kept }))
    }
}

impl Inlet for ForgetfulInlet {
    fn position(&self) -> BoxFuture<'static, Result<Option<Position>, String>> {
        self.inner.position()
    }

    fn establish(&self, position: Position) -> BoxFuture<'static, Result<(), String>> {
        self.inner.establish(position)
    }

    fn deliver(&self, delivery: Delivery) {
        if self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1)).is_err() {
            return self.inner.deliver(delivery);
        }
        let (answers, answered) = mpsc::unbounded_channel();
        let permit = Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap();
        let Delivery { stream, stream_created, session, floor, messages, limit, receipt: original } = delivery;
        let receipt = Receipt::new(0, permit, answers);
        self.inner.deliver(Delivery { stream, stream_created, session, floor, messages, limit, receipt });
        self.kept.lock().unwrap().push(answered);
        // the session hears that the batch is lost, though it is committed
        drop(original);
    }
}

/// I6: dedupe record, effect and position are one commit, so a lost ack costs no second effect.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_committed_and_not_acked_is_applied_once_and_then_acked() {
    let (feed, file) = (Feed::start().await, File::new());
    feed.publish(&Event::many(10, 1, 30)).await;
    let mut config = counting(&feed.server.url());
    config.inbox.batch = 50;
    config.inbox.ack_wait = Duration::from_secs(30);
    let deliveries = Arc::new(AtomicUsize::new(4));
    let left = deliveries.clone();
    let hub = Hub::start_with(&file.path, &config, move |inner| Arc::new(Forgetful { inner, deliveries })).await;
    eventually_within("effects", Duration::from_secs(15), 300, || file.effects()).await;
    feed.await_rest().await;
    assert_eq!(left.load(Ordering::SeqCst), 0);
    assert_eq!(file.twice_and_disordered(), (0, 0));
    hub.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_crash_it_goes_on_at_once_and_in_order() {
    let (feed, file) = (Feed::start().await, File::new());
    feed.publish(&Event::many(20, 1, 50)).await;
    let mut config = counting(&feed.server.url());
    // a redelivery by the server would come far too late
    config.inbox.ack_wait = Duration::from_secs(300);
    config.inbox.batch = 16;
    for round in 1..=3 {
        let hub = Hub::start(&file.path, &config).await;
        let wanted = round * 200;
        let end = Instant::now() + PATIENCE;
        while file.effects() < wanted {
            assert!(Instant::now() < end, "round {round}: {} effects, {}", file.effects(), hub.reason());
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        hub.crash().await;
    }
    let hub = Hub::start(&file.path, &config).await;
    eventually("effects", 1_000, || file.effects()).await;
    feed.await_rest().await;
    assert_eq!(file.twice_and_disordered(), (0, 0));
    hub.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_consumer_that_is_deleted_is_made_again_where_the_database_is() {
    let (feed, file) = (Feed::start().await, File::new());
    feed.publish(&Event::many(5, 1, 10)).await;
    let hub = Hub::start(&file.path, &counting(&feed.server.url())).await;
    eventually("effects", 50, || file.effects()).await;
    feed.await_rest().await;
    for round in 1..=3 {
        feed.js().await.get_stream("EVENTS").await.unwrap().delete_consumer("hub").await.unwrap();
        feed.publish(&Event::many(5, 10 + round, 1)).await;
        eventually("effects", 50 + 5 * round, || file.effects()).await;
    }
    feed.await_rest().await;
    assert_eq!(file.twice_and_disordered(), (0, 0));
    assert_eq!(file.int("SELECT duplicates FROM outboxd_inbox_position"), 0, "it does not begin from the start");
    hub.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_is_not_deaf_after_the_server_was_restarted() {
    let (mut feed, file) = (Feed::start().await, File::new());
    let hub = Hub::start(&file.path, &counting(&feed.server.url())).await;
    eventually("pulling", true, || hub.is_connected()).await;
    for round in 1..=6 {
        if round % 2 == 0 { feed.server.kill() } else { feed.server.stop() }.unwrap();
        eventually("the loss is told", false, || hub.is_connected()).await;
        assert!(!hub.reason().is_empty());
        feed.server.resume().unwrap();
        feed.publish(&Event::many(5, round, 1)).await;
        eventually_within("effects", Duration::from_secs(10), 5 * round, || file.effects()).await;
        eventually("its word", (true, String::new()), || (hub.is_connected(), hub.reason())).await;
    }
    assert_eq!(file.twice_and_disordered(), (0, 0));
    hub.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_freezes_between_commit_and_ack_costs_no_second_effect() {
    let (mut feed, file) = (Feed::start().await, File::new());
    let mut config = counting(&feed.server.url());
    config.inbox.batch = 10;
    feed.publish(&Event::many(20, 1, 20)).await;
    let hub = Hub::start(&file.path, &config).await;
    let end = Instant::now() + PATIENCE;
    while file.effects() < 50 {
        assert!(Instant::now() < end, "{} effects, {}", file.effects(), hub.reason());
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    feed.server.freeze().unwrap();
    // longer than ack_wait
    tokio::time::sleep(Duration::from_secs(4)).await;
    feed.server.thaw().unwrap();
    eventually("effects", 400, || file.effects()).await;
    feed.await_rest().await;
    assert_eq!(file.twice_and_disordered(), (0, 0));
    hub.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_starts_while_nothing_is_there_and_says_what_it_waits_for() {
    let (mut feed, file) = (Feed::start().await, File::new());
    feed.delete_stream().await;
    feed.server.stop().unwrap();
    let hub = Hub::start(&file.path, &counting(&feed.server.url())).await;
    eventually("the reason", true, || hub.reason().contains("cannot connect to nats://")).await;
    feed.server.resume().unwrap();
    eventually("the reason", "stream EVENTS does not exist".to_owned(), || hub.reason()).await;
    feed.make_stream().await;
    feed.publish(&Event::many(5, 1, 1)).await;
    eventually("effects", 5, || file.effects()).await;
    hub.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_is_made_anew_is_read_from_its_beginning() {
    let (feed, file) = (Feed::start().await, File::new());
    feed.publish(&Event::many(5, 1, 4)).await;
    let mut config = counting(&feed.server.url());
    config.inbox.deliver = outboxd::config::Deliver::New;
    let hub = Hub::start(&file.path, &config).await;
    eventually("pulling", true, || hub.is_connected()).await;
    feed.publish(&Event::many(5, 5, 1)).await;
    eventually("effects of the new ones", 5, || file.effects()).await;
    feed.delete_stream().await;
    eventually("the loss is told", false, || hub.is_connected()).await;
    feed.make_stream().await;
    feed.publish(&Event::many(5, 5, 2)).await;
    eventually("effects", 10, || file.effects()).await;
    assert_eq!(file.int("SELECT settled_seq FROM outboxd_inbox_position"), 10);
    assert_eq!(file.twice_and_disordered(), (0, 0));
    hub.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changed_settings_take_effect_or_are_refused_and_the_position_stays() {
    let (feed, file) = (Feed::start().await, File::new());
    feed.publish(&Event::many(5, 1, 4)).await;
    let mut config = counting(&feed.server.url());
    let hub = Hub::start(&file.path, &config).await;
    eventually("effects", 20, || file.effects()).await;
    let adopt = |config: &outboxd::config::Config| {
        hub.source.adopt(Settings { nats: config.nats.clone(), inbox: config.inbox.clone() });
    };
    config.inbox.ack_wait = Duration::from_secs(7);
    adopt(&config);
    let end = Instant::now() + PATIENCE;
    while feed.consumer().await.map(|info| info.config.ack_wait) != Some(Duration::from_secs(7)) {
        assert!(Instant::now() < end, "{}", hub.reason());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let kept = config.clone();
    config.inbox.filter_subjects = vec!["events.asset.>".into()];
    adopt(&config);
    eventually("refused", false, || hub.is_connected()).await;
    let refused = "inbox.filter_subjects is [\"events.>\"] and cannot become [\"events.asset.>\"]";
    eventually("the reason", true, || hub.reason().contains(refused)).await;
    adopt(&kept);
    feed.publish(&Event::many(5, 5, 1)).await;
    eventually("effects", 25, || file.effects()).await;
    assert_eq!(file.int("SELECT duplicates FROM outboxd_inbox_position"), 0);
    hub.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_daemons_on_one_durable_and_one_file_have_each_effect_once() {
    let (feed, file) = (Feed::start().await, File::new());
    let mut config = counting(&feed.server.url());
    config.inbox.batch = 10;
    let (one, two) = (Hub::start(&file.path, &config).await, Hub::start(&file.path, &config).await);
    for round in 0..5 {
        // an aggregate a message, because two daemons give no order
        let events: Vec<Event> = (0..200).map(|n| Event::new(&format!("a{round}-{n}"), 1)).collect();
        feed.publish(&events).await;
        feed.publish(&events).await;
    }
    eventually("effects", 1_000, || file.effects()).await;
    feed.await_rest().await;
    assert_eq!(file.twice_and_disordered(), (0, 0));
    assert_eq!(file.int("SELECT count(*) FROM processed_events"), 1_000);
    one.stop().await;
    two.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_that_live_by_interest_or_are_queues_lose_nothing_in_a_crash() {
    use async_nats::jetstream::stream::RetentionPolicy;
    for retention in [RetentionPolicy::Interest, RetentionPolicy::WorkQueue] {
        let (feed, file) = (Feed::start().await, File::new());
        feed.delete_stream().await;
        feed.make_stream_with(retention).await;
        let mut config = counting(&feed.server.url());
        config.inbox.batch = 10;
        config.inbox.ack_wait = Duration::from_secs(300);
        let hub = Hub::start(&file.path, &config).await;
        eventually("pulling", true, || hub.is_connected()).await;
        let holder = file.conn();
        holder.execute_batch("BEGIN IMMEDIATE").unwrap();
        feed.publish(&Event::many(20, 1, 5)).await;
        let end = Instant::now() + PATIENCE;
        while feed.consumer().await.is_none_or(|info| info.num_ack_pending == 0) {
            assert!(Instant::now() < end, "nothing was delivered: {}", hub.reason());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        holder.execute_batch("COMMIT").unwrap();
        hub.crash().await;
        let hub = Hub::start(&file.path, &config).await;
        eventually(&format!("effects on {retention:?}"), 100, || file.effects()).await;
        feed.await_rest().await;
        assert_eq!(file.twice_and_disordered(), (0, 0));
        hub.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_that_rolls_everything_back_is_found_among_its_neighbours() {
    let (feed, file) = (Feed::start().await, File::new());
    file.conn().execute_batch("CREATE TABLE narrow (n INTEGER CHECK (n < 1000))").unwrap();
    let mut config = counting(&feed.server.url());
    config.inbox.max_deliver = 1;
    let statements = format!("{COUNT}; INSERT OR ROLLBACK INTO narrow VALUES (json_extract(:data, '$.n'))");
    config.inbox.handler = vec![handler("*", &statements)];
    let mut events = Event::many(50, 1, 1);
    events[17].data = r#"{"n":5000}"#.into();
    feed.publish(&events).await;
    let hub = Hub::start(&file.path, &config).await;
    eventually("effects and dead rows", (49, 1), || (file.effects(), file.dead())).await;
    assert_eq!(file.texts("SELECT event_id FROM inbox_events"), ["e-a17-1"]);
    feed.await_rest().await;
    hub.stop().await;
}
