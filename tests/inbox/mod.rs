//! A hub on a real file: store, writer, consumer and source as the daemon puts them together, and a stream to feed it.

#![allow(dead_code, unreachable_pub)]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_nats::HeaderMap;
use async_nats::jetstream::{self, stream};
use ractor::{Actor, ActorRef};
use rusqlite::Connection;
use tokio::task::JoinHandle;

use outboxd::actors::consumer::{Consumer, ConsumerArgs, ConsumerMsg};
use outboxd::actors::writer::{Durability, Writer, WriterActor, WriterArgs, WriterMsg};
use outboxd::config::{self, Config};
use outboxd::jetstream::consume::{JetStreamSource, Settings};
use outboxd::ports::{Clock, Source};
use outboxd::store::connection::Synchronous;
use outboxd::store::inbox::Inbox;
use outboxd::store::pool::{Store, StoreOptions};
use outboxd::store::schema;
use outboxd::telemetry::board::Board;
use outboxd::telemetry::metrics::Metrics;
use outboxd::testbed::server::NatsServer;

pub const PATIENCE: Duration = Duration::from_secs(30);

/// Waits for a level and says what it was last.
pub async fn eventually<T: PartialEq + std::fmt::Debug>(what: &str, wanted: T, mut look: impl FnMut() -> T) {
    eventually_within(what, PATIENCE, wanted, &mut look).await;
}

pub async fn eventually_within<T: PartialEq + std::fmt::Debug>(
    what: &str,
    bound: Duration,
    wanted: T,
    mut look: impl FnMut() -> T,
) {
    let end = std::time::Instant::now() + bound;
    loop {
        let seen = look();
        if seen == wanted {
            return;
        }
        assert!(std::time::Instant::now() < end, "{what}: wanted {wanted:?}, last seen {seen:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

struct WallClock;

impl Clock for WallClock {
    fn now(&self) -> i64 {
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| i64::try_from(d.as_millis()).unwrap_or(0))
    }
}

/// The configuration of a hub: one durable, statements that count each event.
pub fn counting(url: &str) -> Config {
    let mut config = Config::default();
    config.nats.urls = vec![url.to_owned()];
    config.inbox.enabled = true;
    config.inbox.durable = "hub".into();
    config.inbox.ack_wait = Duration::from_secs(2);
    config.inbox.max_deliver = 3;
    config.inbox.handler = vec![handler("*", COUNT)];
    config
}

/// Fails for ever where a second effect of one event would be hidden by a constraint: it just counts.
pub const COUNT: &str =
    "INSERT INTO effects (event_id, aggregate_id, version) VALUES (:event_id, :aggregate_id, :aggregate_version)";

pub fn handler(event_type: &str, sql: &str) -> config::Handler {
    config::Handler { event_type: event_type.into(), apply: config::Apply::Sql, sql: sql.into() }
}

/// The database of a hub.
pub struct File {
    pub folder: tempfile::TempDir,
    pub path: PathBuf,
}

impl File {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hub.db");
        schema::init(&path, "hub", false).unwrap();
        let conn = Connection::open(&path).unwrap();
        conn.execute_batch(
            "CREATE TABLE effects (n INTEGER PRIMARY KEY, event_id TEXT, aggregate_id TEXT, version INTEGER)",
        )
        .unwrap();
        Self { folder, path }
    }

    pub fn conn(&self) -> Connection {
        let conn = Connection::open(&self.path).unwrap();
        conn.busy_timeout(Duration::from_secs(20)).unwrap();
        conn
    }

    pub fn int(&self, sql: &str) -> i64 {
        self.conn().query_row(sql, [], |row| row.get(0)).unwrap()
    }

    pub fn texts(&self, sql: &str) -> Vec<String> {
        let conn = self.conn();
        let mut statement = conn.prepare(sql).unwrap();
        let rows = statement.query_map([], |row| row.get(0)).unwrap();
        rows.map(|row| row.unwrap()).collect()
    }

    pub fn effects(&self) -> i64 {
        self.int("SELECT count(*) FROM effects")
    }

    /// Events with more than one effect, and events whose effect came after that of a later version.
    pub fn twice_and_disordered(&self) -> (i64, i64) {
        let twice = "SELECT count(*) FROM (SELECT 1 FROM effects GROUP BY event_id HAVING count(*) > 1)";
        let order = "SELECT count(*) FROM effects a WHERE EXISTS (SELECT 1 FROM effects b
            WHERE b.aggregate_id = a.aggregate_id AND b.n < a.n AND b.version > a.version)";
        (self.int(twice), self.int(order))
    }

    pub fn dead(&self) -> i64 {
        self.int("SELECT count(*) FROM inbox_events WHERE state = 'dead'")
    }
}

/// A running hub.
pub struct Hub {
    pub board: Board,
    pub metrics: Metrics,
    pub consumer: ActorRef<ConsumerMsg>,
    pub source: Arc<JetStreamSource>,
    writer: ActorRef<WriterMsg>,
    tasks: Vec<JoinHandle<()>>,
}

impl Hub {
    pub async fn start(file: &Path, config: &Config) -> Self {
        Self::start_with(file, config, |source| source).await
    }

    /// With something between the stream and the consumer.
    pub async fn start_with(
        file: &Path,
        config: &Config,
        wrap: impl FnOnce(Arc<dyn Source>) -> Arc<dyn Source>,
    ) -> Self {
        let store = Store::open(&StoreOptions::new(file)).await.unwrap();
        let (board, metrics, clock) = (Board::default(), Metrics::new(), Arc::new(WallClock));
        let args = WriterArgs {
            store: store.clone(),
            board: board.clone(),
            clock: clock.clone(),
            durability: Durability { settle: Synchronous::Full, barrier: true },
        };
        let (writer, writer_task) = Actor::spawn(None, WriterActor, args).await.unwrap();
        let seat = Writer::default();
        seat.seat(writer.clone());
        let settings = Settings { nats: config.nats.clone(), inbox: config.inbox.clone() };
        let source = Arc::new(JetStreamSource::new(settings, board.clone()));
        let args = ConsumerArgs {
            store,
            writer: seat,
            source: wrap(source.clone()),
            inbox: Arc::new(Inbox::new(config.inbox.rules("hub"))),
            clock,
            board: board.clone(),
            metrics: metrics.clone(),
        };
        let (consumer, consumer_task) = Actor::spawn(None, Consumer, args).await.unwrap();
        Self { board, metrics, consumer, source, writer, tasks: vec![consumer_task, writer_task] }
    }

    /// As the daemon stops: what is on its way is applied and acked.
    pub async fn stop(self) {
        ractor::call_t!(self.consumer, ConsumerMsg::Quiesce, 20_000).unwrap();
        self.consumer.drain().unwrap();
        self.writer.drain().unwrap();
        self.ended().await;
    }

    /// As kill -9 stops it: whatever is on its way is dropped.
    pub async fn crash(self) {
        self.consumer.kill();
        self.writer.kill();
        self.ended().await;
    }

    async fn ended(self) {
        for task in self.tasks {
            tokio::time::timeout(PATIENCE, task).await.expect("an actor does not end").unwrap();
        }
    }

    pub fn reason(&self) -> String {
        self.board.read().inbox_reason
    }

    pub fn is_connected(&self) -> bool {
        self.board.read().inbox_connected
    }
}

/// A nats-server with the stream, and a client that publishes to it.
pub struct Feed {
    pub server: NatsServer,
    pub folder: tempfile::TempDir,
}

impl Feed {
    pub async fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let server = NatsServer::start(folder.path()).unwrap();
        let feed = Self { server, folder };
        feed.make_stream().await;
        feed
    }

    pub async fn client(&self) -> async_nats::Client {
        async_nats::ConnectOptions::new().retry_on_initial_connect().connect(self.server.url()).await.unwrap()
    }

    pub async fn js(&self) -> jetstream::Context {
        jetstream::new(self.client().await)
    }

    pub async fn make_stream(&self) {
        self.make_stream_with(stream::RetentionPolicy::Limits).await;
    }

    pub async fn make_stream_with(&self, retention: stream::RetentionPolicy) {
        let config = stream::Config {
            retention,
            name: "EVENTS".into(),
            subjects: vec!["events.>".into()],
            ..Default::default()
        };
        self.js().await.create_stream(config).await.unwrap();
    }

    pub async fn delete_stream(&self) {
        self.js().await.delete_stream("EVENTS").await.unwrap();
    }

    /// Publishes events with headers as a relay does, each awaited.
    pub async fn publish(&self, events: &[Event]) {
        let js = self.js().await;
        for event in events {
            js.publish_with_headers(event.subject(), event.headers(), event.body().into())
                .await
                .unwrap()
                .await
                .unwrap();
        }
    }

    /// Publishes a body alone.
    pub async fn publish_raw(&self, subject: &str, body: &[u8]) {
        let js = self.js().await;
        js.publish(subject.to_owned(), body.to_vec().into()).await.unwrap().await.unwrap();
    }

    /// Publishes with any bytes as header block, as a hostile client does.
    pub fn publish_block(&self, subject: &str, block: &[u8], body: &[u8]) {
        use std::io::{Read, Write};
        let mut socket = std::net::TcpStream::connect(("127.0.0.1", self.server.port())).unwrap();
        let mut answer = [0u8; 4_096];
        let greeting = socket.read(&mut answer).unwrap();
        assert!(greeting > 0);
        let mut text = b"CONNECT {\"verbose\":false,\"headers\":true,\"no_responders\":true}\r\n".to_vec();
        text.extend(format!("HPUB {subject} {} {}\r\n", block.len(), block.len() + body.len()).bytes());
        text.extend_from_slice(block);
        text.extend_from_slice(body);
        text.extend_from_slice(b"\r\nPING\r\n");
        socket.write_all(&text).unwrap();
        let mut seen = Vec::new();
        while !seen.windows(4).any(|w| w == b"PONG") {
            let read = socket.read(&mut answer).unwrap();
            assert!(read > 0, "the server hung up: {}", String::from_utf8_lossy(&seen));
            seen.extend_from_slice(&answer[..read]);
        }
        assert!(!String::from_utf8_lossy(&seen).contains("-ERR"), "{}", String::from_utf8_lossy(&seen));
    }

    pub async fn consumer(&self) -> Option<jetstream::consumer::Info> {
        let stream = self.js().await.get_stream("EVENTS").await.ok()?;
        stream.consumer_info("hub").await.ok()
    }

    /// Nothing is unacked and nothing is left: the rest after the work.
    pub async fn await_rest(&self) {
        let end = std::time::Instant::now() + PATIENCE;
        loop {
            let info = self.consumer().await;
            let rest = info.as_ref().map(|i| (i.num_ack_pending, i.num_pending));
            if rest == Some((0, 0)) {
                return;
            }
            assert!(std::time::Instant::now() < end, "unacked and pending at rest: {rest:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

/// An event of the plant.
#[derive(Clone, Debug)]
pub struct Event {
    pub id: String,
    pub aggregate: String,
    pub version: i64,
    pub data: String,
}

impl Event {
    pub fn new(aggregate: &str, version: i64) -> Self {
        Self {
            id: format!("e-{aggregate}-{version}"),
            aggregate: aggregate.into(),
            version,
            data: format!(r#"{{"name":"Pump {aggregate}","material":"S45C","n":{version}}}"#),
        }
    }

    /// `count` events of each of `aggregates`, interleaved, from version `first`.
    pub fn many(aggregates: usize, first: i64, count: i64) -> Vec<Self> {
        (first..first + count).flat_map(|v| (0..aggregates).map(move |a| Self::new(&format!("a{a}"), v))).collect()
    }

    pub fn subject(&self) -> String {
        format!("events.asset.{}.updated", self.aggregate)
    }

    pub fn body(&self) -> String {
        let Self { id, aggregate, version, data } = self;
        format!(
            r#"{{"event_id":"{id}","event_type":"asset.updated","schema_version":1,"aggregate_type":"asset","aggregate_id":"{aggregate}","aggregate_version":{version},"occurred_at":"2026-10-07T01:20:00Z","data":{data}}}"#
        )
    }

    pub fn headers(&self) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert("ce-id", self.id.as_str());
        headers.insert("ce-source", "plant");
        headers.insert("ce-type", "asset.updated");
        headers
    }
}
