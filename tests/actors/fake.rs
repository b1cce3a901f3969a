//! A broker that does what a test tells it, over the real actors and a real SQLite file.

use std::collections::HashMap;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use outboxd::actors::janitor::{JanitorArgs, Keep};
use outboxd::actors::relay::{RelayArgs, RelayMsg};
use outboxd::actors::root::{RootArgs, Slot, Tree};
use outboxd::actors::writer::{Durability, Writer, WriterArgs};
use outboxd::domain::backoff::{Backoff, Jitter};
use outboxd::domain::event::Millis;
use outboxd::domain::rules::RelayRules;
use outboxd::domain::settle::{Duplicate, Outcome, RetryRules};
use outboxd::domain::subject::Template;
use outboxd::domain::wire::Format;
use outboxd::ports::{
    Broker, Clock, Dice, Link, Message, Outlet, Report, ReportSink, Shipment, Sought, Topology, Unreadable, Whereabouts,
};
use outboxd::store::connection::Synchronous;
use outboxd::store::error::StoreError;
use outboxd::store::pool::{Store, StoreOptions};
use outboxd::store::schema;
use outboxd::telemetry::board::Board;
use outboxd::telemetry::metrics::Metrics;
use tokio::sync::{mpsc, watch};

type Judge = Box<dyn FnMut(&Message) -> Option<Outcome> + Send>;

/// The stream and what happens to the next messages.
pub(crate) struct World {
    /// Message ids in the order in which they were stored.
    pub(crate) stream: Mutex<Vec<String>>,
    /// `None`: stored.
    judge: Mutex<Judge>,
    link: watch::Sender<Link>,
    pub(crate) looked_up: AtomicUsize,
    pub(crate) shipped: AtomicUsize,
}

impl World {
    pub(crate) fn new(link: Link) -> Arc<Self> {
        Arc::new(Self {
            stream: Mutex::default(),
            judge: Mutex::new(Box::new(|_| None)),
            link: watch::channel(link).0,
            looked_up: AtomicUsize::new(0),
            shipped: AtomicUsize::new(0),
        })
    }

    pub(crate) fn judge(&self, judge: impl FnMut(&Message) -> Option<Outcome> + Send + 'static) {
        *self.judge.lock().unwrap() = Box::new(judge);
    }

    pub(crate) fn set_link(&self, link: Link) {
        self.link.send_replace(link);
    }

    pub(crate) fn stored(&self) -> Vec<String> {
        self.stream.lock().unwrap().clone()
    }

    fn store(&self, message: &Message) -> Outcome {
        let mut stream = self.stream.lock().unwrap();
        if let Some(at) = stream.iter().position(|id| *id == message.msg_id) {
            return Outcome::Stored { stream_seq: at as u64 + 1, duplicate: Duplicate::Same };
        }
        stream.push(message.msg_id.clone());
        Outcome::Stored { stream_seq: stream.len() as u64, duplicate: Duplicate::No }
    }
}

pub(crate) fn up(generation: u64, atomic: bool) -> Link {
    let topology = Topology {
        stream: "EVENTS".into(),
        created: "then".into(),
        last_seq: 0,
        atomic,
        max_batch: if atomic { 500 } else { 1 },
        max_message: 1 << 20,
        duplicate_window: Duration::from_secs(120),
        server_version: "2.15.1".into(),
        replicas: 1,
    };
    Link::Up { generation, topology: Arc::new(topology) }
}

pub(crate) fn down() -> Link {
    Link::Down { since: 0, reason: "test".into() }
}

struct FakeBroker(Arc<World>);

impl Broker for FakeBroker {
    fn link(&self) -> watch::Receiver<Link> {
        self.0.link.subscribe()
    }

    fn outlet(&self, reports: ReportSink) -> Box<dyn Outlet> {
        Box::new(FakeOutlet { world: self.0.clone(), reports })
    }

    fn look_up(&self, sought: Vec<Sought>) -> BoxFuture<'static, Result<Vec<Whereabouts>, Unreadable>> {
        self.0.looked_up.fetch_add(sought.len(), Ordering::Relaxed);
        let stream = self.0.stored();
        let find = |s: &Sought| match stream.iter().position(|id| *id == s.msg_id) {
            Some(at) => Whereabouts::Stored { stream_seq: at as u64 + 1 },
            None => Whereabouts::Missing,
        };
        let found = sought.iter().map(find).collect();
        Box::pin(async move { Ok(found) })
    }

    fn suspect(&self) {}
}

struct FakeOutlet {
    world: Arc<World>,
    reports: ReportSink,
}

impl Outlet for FakeOutlet {
    fn ship(&mut self, shipments: Vec<Shipment>) {
        let mut reports = Vec::new();
        for shipment in shipments {
            self.world.shipped.fetch_add(shipment.messages.len(), Ordering::Relaxed);
            let judged = {
                let mut judge = self.world.judge.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                shipment.messages.iter().find_map(&mut *judge)
            };
            let outcome = judged.unwrap_or_else(|| {
                let stored = shipment.messages.iter().map(|message| self.world.store(message));
                stored.last().expect("a shipment is never empty")
            });
            reports.push(Report { ticket: shipment.ticket, outcome });
        }
        let _ = self.reports.send(reports);
    }
}

struct TestClock(AtomicI64);

impl Clock for TestClock {
    fn now(&self) -> Millis {
        let real = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_millis() as i64;
        real + self.0.load(Ordering::Relaxed)
    }
}

struct Half;

impl Dice for Half {
    fn draw(&self) -> f64 {
        0.5
    }
}

pub(crate) struct Rig {
    pub(crate) world: Arc<World>,
    pub(crate) store: Store,
    pub(crate) tree: Tree,
    pub(crate) relay: Slot<RelayMsg>,
    pub(crate) fatal: mpsc::UnboundedReceiver<StoreError>,
    pub(crate) board: Board,
    _dir: Option<tempfile::TempDir>,
}

/// What a test may set.
#[derive(Clone)]
pub(crate) struct Wish {
    pub(crate) publishers: usize,
    pub(crate) hold: bool,
    pub(crate) ordered: bool,
    pub(crate) max_attempts: u32,
    pub(crate) lease: Duration,
}

impl Default for Wish {
    fn default() -> Self {
        Self { publishers: 2, hold: true, ordered: true, max_attempts: 2, lease: Duration::from_secs(30) }
    }
}

impl Rig {
    pub(crate) async fn start(world: Arc<World>, wish: Wish) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.db");
        schema::init(&path, "test", false).unwrap();
        Self { _dir: Some(dir), ..Self::on(&path, world, wish).await }
    }

    pub(crate) async fn on(path: &std::path::Path, world: Arc<World>, wish: Wish) -> Self {
        let store = Store::open(&StoreOptions::new(path)).await.unwrap();
        let (board, metrics) = (Board::default(), Metrics::new());
        let clock: Arc<dyn Clock> = Arc::new(TestClock(AtomicI64::new(0)));
        let (writer, relay) = (Writer::default(), Slot::default());
        let (sink, fatal) = mpsc::unbounded_channel();
        let ms = Duration::from_millis;
        let rules = RelayRules {
            source: "test".into(),
            template: Template::parse("events.{aggregate_type}.{aggregate_id}.{event}").unwrap(),
            format: Format::Envelope,
            ordered: wish.ordered,
            hold: wish.hold,
            batch: 32,
            batch_bytes: 1 << 20,
            lease: wish.lease,
            ack_wait: ms(500),
            retry: RetryRules {
                backoff: Backoff::new(ms(5), 2.0, ms(20), Jitter::None).unwrap(),
                max_attempts: wish.max_attempts,
                min_failing_for: ms(1),
            },
        };
        let args = RootArgs {
            writer: WriterArgs {
                store: store.clone(),
                board: board.clone(),
                clock: clock.clone(),
                durability: Durability { settle: Synchronous::Full, barrier: true },
            },
            writer_seat: writer.clone(),
            relay: Some(RelayArgs {
                store: store.clone(),
                writer: writer.clone(),
                broker: Arc::new(FakeBroker(world.clone())),
                clock: clock.clone(),
                dice: Arc::new(Half),
                rules: Arc::new(rules),
                publishers: wish.publishers,
                paused: false,
                board: board.clone(),
                metrics: metrics.clone(),
                loops: board.loops().clone(),
                fatal: sink,
            }),
            relay_slot: relay.clone(),
            janitor: JanitorArgs {
                store: store.clone(),
                writer: writer.clone(),
                clock,
                metrics: metrics.clone(),
                keep: Keep {
                    published: Duration::ZERO,
                    processed: Duration::ZERO,
                    inbox: Duration::ZERO,
                    audit: Duration::ZERO,
                },
            },
            janitor_slot: Slot::default(),
            consumer: None,
            consumer_slot: Slot::default(),
            metrics,
        };
        let tree = Tree::start(args).await.unwrap();
        Self { world, store, tree, relay, fatal, board, _dir: None }
    }

    /// The application: commits events in one transaction, from a connection of its own, and the relay is woken.
    pub(crate) fn insert(&self, events: &[(&str, i64)]) {
        let conn = rusqlite::Connection::open(self.store.path()).unwrap();
        conn.busy_timeout(Duration::from_secs(5)).unwrap();
        conn.execute_batch("BEGIN IMMEDIATE").unwrap();
        for (aggregate, version) in events {
            conn.execute(
                "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, aggregate_version, event_type,
                     schema_version, payload_json) VALUES (?1, 'asset', ?2, ?3, 'asset.updated', 1, '{}')",
                rusqlite::params![format!("{aggregate}-{version}"), aggregate, version],
            )
            .unwrap();
        }
        conn.execute_batch("COMMIT").unwrap();
        self.relay.cast(RelayMsg::Wake { touched: false });
    }

    pub(crate) fn sql(&self, statement: &str) {
        let conn = rusqlite::Connection::open(self.store.path()).unwrap();
        conn.busy_timeout(Duration::from_secs(5)).unwrap();
        conn.execute_batch(statement).unwrap();
        self.relay.cast(RelayMsg::Wake { touched: true });
    }

    pub(crate) fn count(&self, where_clause: &str) -> usize {
        let conn = rusqlite::Connection::open(self.store.path()).unwrap();
        let sql = format!("SELECT count(*) FROM {where_clause}");
        conn.query_row(&sql, [], |r| r.get::<_, i64>(0)).unwrap() as usize
    }

    pub(crate) async fn eventually(&self, what: &str, mut holds: impl FnMut(&Self) -> bool) {
        let end = Instant::now() + Duration::from_secs(20);
        while !holds(self) {
            assert!(Instant::now() < end, "{what}: not within 20 s; stored {:?}, {}", self.world.stored(), self.rows());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    fn rows(&self) -> String {
        let conn = rusqlite::Connection::open(self.store.path()).unwrap();
        let mut statement = conn.prepare("SELECT event_id, status, attempt_count FROM outbox_events").unwrap();
        let rows = statement
            .query_map([], |r| {
                Ok(format!("{} {} {}", r.get::<_, String>(0)?, r.get::<_, String>(1)?, r.get::<_, i64>(2)?))
            })
            .unwrap();
        rows.map(Result::unwrap).collect::<Vec<_>>().join(", ")
    }
}

/// Versions of each aggregate in the order of the stream.
pub(crate) fn by_aggregate(stored: &[String]) -> HashMap<String, Vec<i64>> {
    let mut found: HashMap<String, Vec<i64>> = HashMap::new();
    for id in stored {
        let (aggregate, version) = id.trim_start_matches("test:").rsplit_once('-').unwrap();
        found.entry(aggregate.into()).or_default().push(version.parse().unwrap());
    }
    found
}
