//! What the tests of the broker share: a real nats-server, the broker on it, one outlet whose reports are counted.
// each test file is a crate of its own and uses a part of this
#![allow(dead_code, unreachable_pub)]

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use tokio::sync::mpsc;

use outboxd::config::Config;
use outboxd::domain::event::Millis;
use outboxd::domain::settle::{Class, Duplicate, Outcome};
use outboxd::domain::subject::Template;
use outboxd::jetstream::{JetStream, Settings};
use outboxd::ports::{
    Broker, Clock, Link, Message, Outlet, Report, Shipment, Sought, Topology, Unreadable, Whereabouts,
};
use outboxd::testbed::server::NatsServer;
use outboxd::testbed::stream::Client;
use outboxd::testbed::wait;
use outboxd::testbed::workdir::Workdir;

/// Longest wait for anything that should come at once, on a machine that has much else to do.
pub const SOON: Duration = Duration::from_secs(60);

struct WallClock;

impl Clock for WallClock {
    fn now(&self) -> Millis {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970");
        i64::try_from(since.as_millis()).expect("before 2262")
    }
}

/// The defaults of the product against this address; `ack_wait` is long, so that a slow machine is no time-out.
pub fn settings(url: &str) -> Settings {
    let config = Config::default();
    let template = Template::parse(&config.relay.subject).expect("a template");
    let mut nats = config.nats;
    nats.urls = vec![url.to_owned()];
    Settings {
        nats,
        stream: config.stream,
        ack_wait: Duration::from_secs(20),
        lease: config.relay.lease,
        subject: config.relay.subject,
        covers: Arc::new(move |subjects| template.covered_by(subjects)),
    }
}

/// A broker with one outlet.
pub struct Rig {
    pub broker: JetStream,
    outlet: Box<dyn Outlet>,
    reports: mpsc::UnboundedReceiver<Vec<Report>>,
    outcomes: BTreeMap<u64, Outcome>,
    runtime: tokio::runtime::Runtime,
}

impl Rig {
    pub fn start(settings: Settings) -> Self {
        let broker = JetStream::start(settings, Arc::new(WallClock)).expect("a thread");
        let (sink, reports) = mpsc::unbounded_channel();
        let outlet = broker.outlet(sink);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        Self { broker, outlet, reports, outcomes: BTreeMap::new(), runtime }
    }

    /// A rig whose link is up.
    pub fn up(settings: Settings) -> Self {
        let rig = Self::start(settings);
        rig.await_up();
        rig
    }

    pub fn link(&self) -> Link {
        self.broker.link().borrow().clone()
    }

    pub fn await_link(&self, what: &str, wanted: impl Fn(&Link) -> bool) -> Link {
        wait::until(what, SOON, || {
            let link = self.link();
            if wanted(&link) { Ok(link) } else { Err(format!("{link:?}")) }
        })
        .unwrap_or_else(|late| panic!("{late}"))
    }

    pub fn await_up(&self) -> Arc<Topology> {
        self.await_link("link up", |link| link.topology().is_some()).topology().expect("up").clone()
    }

    /// Waits until publishing cannot work for a reason that contains these words.
    pub fn await_unusable(&self, words: &str) {
        self.await_link(&format!("link unusable: {words}"), |link| match link {
            Link::Unusable { reason, .. } => reason.contains(words),
            Link::Down { .. } | Link::Up { .. } => false,
        });
    }

    /// Waits until there is no connection for a reason that contains these words.
    pub fn await_down(&self, words: &str) {
        self.await_link(&format!("link down: {words}"), |link| match link {
            Link::Down { reason, .. } => reason.contains(words),
            Link::Unusable { .. } | Link::Up { .. } => false,
        });
    }

    pub fn ship(&mut self, ticket: u64, message: Message) {
        self.ship_run(ticket, vec![message]);
    }

    pub fn ship_run(&mut self, ticket: u64, messages: Vec<Message>) {
        self.outlet.ship(vec![Shipment { ticket, messages }]);
    }

    pub fn ship_all(&mut self, shipments: Vec<Shipment>) {
        self.outlet.ship(shipments);
    }

    /// Takes the reports that have arrived; a ticket that is reported twice fails the test.
    fn collect(&mut self) {
        while let Ok(group) = self.reports.try_recv() {
            assert!(!group.is_empty(), "an empty group of reports");
            for Report { ticket, outcome } in group {
                let before = self.outcomes.insert(ticket, outcome.clone());
                assert!(before.is_none(), "ticket {ticket} reported twice: {before:?}, then {outcome:?}");
            }
        }
    }

    /// The fate of a ticket.
    pub fn outcome(&mut self, ticket: u64) -> Outcome {
        wait::until(format!("a report on ticket {ticket}"), SOON, || {
            self.collect();
            self.outcomes.get(&ticket).cloned().ok_or_else(|| format!("{:?}", self.outcomes.keys()))
        })
        .unwrap_or_else(|late| panic!("{late}"))
    }

    /// All tickets reported so far.
    pub fn outcomes(&mut self) -> &BTreeMap<u64, Outcome> {
        self.collect();
        &self.outcomes
    }

    /// Waits until this many tickets are reported.
    pub fn await_reports(&mut self, wanted: usize) -> &BTreeMap<u64, Outcome> {
        wait::until(format!("{wanted} reports"), SOON, || {
            self.collect();
            if self.outcomes.len() >= wanted { Ok(()) } else { Err(self.outcomes.len()) }
        })
        .unwrap_or_else(|late| panic!("{late}"));
        &self.outcomes
    }

    /// Sends one message and answers its outcome.
    pub fn send(&mut self, ticket: u64, message: Message) -> Outcome {
        self.ship(ticket, message);
        self.outcome(ticket)
    }

    pub fn look_up(&self, sought: Vec<Sought>) -> Result<Vec<Whereabouts>, Unreadable> {
        self.runtime.block_on(self.broker.look_up(sought))
    }

    pub fn reconfigure(&self, settings: Settings) -> Result<(), String> {
        self.runtime.block_on(self.broker.reconfigure(settings)).map_err(|e| e.to_string())
    }
}

/// A folder and a server in it. Fields drop in this order.
pub struct Site {
    pub server: NatsServer,
    dir: Workdir,
}

impl Site {
    pub fn new() -> Self {
        Self::with("")
    }

    /// A server with more lines of configuration.
    pub fn with(extra: &str) -> Self {
        let dir = Workdir::new("jetstream").expect("a folder");
        let server = NatsServer::start_with(&dir.path().join("nats"), extra).expect("a nats-server");
        Self { server, dir }
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    pub fn settings(&self) -> Settings {
        settings(&self.server.url())
    }

    pub fn client(&self) -> Client {
        Client::connect(&self.server.url()).expect("a client")
    }

    /// The stream as an operator would make it, changed by `change`.
    pub fn make_stream(&self, change: impl FnOnce(&mut async_nats::jetstream::stream::Config)) {
        self.client().create_stream("EVENTS", &["events.>"], change).expect("a stream");
    }

    /// Writes a file beside the server and answers its path.
    pub fn file(&self, name: &str, contents: &str) -> std::path::PathBuf {
        let path = self.path().join(name);
        std::fs::write(&path, contents).expect("written");
        path
    }
}

/// A message of aggregate `aggregate` with id `s:{id}`.
pub fn message(aggregate: &str, id: &str, payload: &str) -> Message {
    Message {
        subject: format!("events.asset.{aggregate}.updated"),
        msg_id: format!("s:{id}"),
        headers: vec![("ce-id".into(), id.into()), ("Outboxd-Seq".into(), "1".into())],
        payload: Bytes::copy_from_slice(payload.as_bytes()),
    }
}

pub fn sought(ticket: u64, message: &Message, floor: u64) -> Sought {
    Sought {
        ticket,
        subject: message.subject.clone(),
        msg_id: message.msg_id.clone(),
        payload: message.payload.clone(),
        floor,
    }
}

pub fn stored(stream_seq: u64) -> Outcome {
    Outcome::Stored { stream_seq, duplicate: Duplicate::No }
}

/// The class, code and words of a refusal.
pub fn refusal(outcome: &Outcome) -> (Class, u32, &str) {
    match outcome {
        Outcome::Refused { class, code, detail } => (*class, *code, detail.as_str()),
        other => panic!("not refused: {other:?}"),
    }
}
