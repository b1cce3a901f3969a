//! What the actors need from the world: a broker, a source of inbound messages, a clock, a die.
//!
//! The broker is reached only through [`Broker`]; `jetstream/` implements it for NATS and the tests with a fake.
//! Nothing in here knows NATS, SQLite or an actor.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use tokio::sync::{OwnedSemaphorePermit, mpsc, watch};

use crate::domain::apply::{Fate, Position};
use crate::domain::event::Millis;
use crate::domain::inbox::Inbound;
use crate::domain::settle::Outcome;

/// One message, ready for the wire.
pub use crate::domain::wire::WireMessage as Message;

/// What is handed to the broker at once: one message, or a run of one aggregate that is stored whole or not at all
/// (an atomic batch). Exactly one [`Report`] comes back for each ticket, whatever happens.
#[derive(Debug)]
pub struct Shipment {
    pub ticket: u64,
    /// Never empty; more than one only where [`Topology::atomic`] says so, at most [`Topology::max_batch`].
    pub messages: Vec<Message>,
}

/// The fate of a shipment.
#[derive(Debug)]
pub struct Report {
    pub ticket: u64,
    pub outcome: Outcome,
}

/// What the configured stream and its server offer, read from `STREAM.INFO` before the first publish and after every
/// reconnect.
#[derive(Clone, Debug, PartialEq)]
pub struct Topology {
    pub stream: Arc<str>,
    /// Creation time of the stream as the server gives it (RFC 3339): another one means another stream.
    pub created: String,
    /// Last sequence of the stream when it was read: whatever is published later has a greater one.
    pub last_seq: u64,
    /// The server and the stream take atomic batches.
    pub atomic: bool,
    /// Most messages of one atomic batch; 1 where `atomic` is false.
    pub max_batch: usize,
    /// Largest message in bytes, headers included (`max_payload` of the server, `max_msg_size` of the stream).
    pub max_message: usize,
    pub duplicate_window: Duration,
    pub server_version: String,
    pub replicas: usize,
}

/// State of the connection to the broker, as a level: watch it, don't count it.
#[derive(Clone, Debug, PartialEq)]
pub enum Link {
    /// Not connected yet, or no more; the reason is for people.
    Down { since: Millis, reason: String },
    /// Connected, but publishing cannot work now: JetStream off, stream missing, full or sealed. Probed every second.
    Unusable { since: Millis, reason: String },
    /// Publishing can work. `generation` grows with each new connection.
    Up { generation: u64, topology: Arc<Topology> },
}

impl Link {
    /// The topology while publishing can work.
    pub fn topology(&self) -> Option<&Arc<Topology>> {
        match self {
            Link::Up { topology, .. } => Some(topology),
            Link::Down { .. } | Link::Unusable { .. } => None,
        }
    }

    /// Whether there is a connection at all.
    pub fn is_connected(&self) -> bool {
        matches!(self, Link::Up { .. } | Link::Unusable { .. })
    }
}

/// A message whose fate is unknown, to be looked for in the stream.
#[derive(Clone, Debug)]
pub struct Sought {
    pub ticket: u64,
    pub subject: String,
    pub msg_id: String,
    pub payload: Bytes,
    /// It cannot stand at or below this sequence of the stream.
    pub floor: u64,
}

/// Where a sought message was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Whereabouts {
    Stored {
        stream_seq: u64,
    },
    /// The same id, but another payload or subject.
    Differs {
        stream_seq: u64,
        detail: String,
    },
    Missing,
}

/// The stream could not be read now; nothing is known. Ask again when the link is up.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot read the stream: {0}")]
pub struct Unreadable(pub String);

/// Where reports of one outlet arrive; grouped, in the order in which they became known.
pub type ReportSink = mpsc::UnboundedSender<Vec<Report>>;

/// The broker as the relay sees it.
pub trait Broker: Send + Sync + 'static {
    /// The state of the link, as a level.
    fn link(&self) -> watch::Receiver<Link>;

    /// A way to send for one publisher, whose reports go to `reports`.
    fn outlet(&self, reports: ReportSink) -> Box<dyn Outlet>;

    /// Looks for messages in the stream. Answers one entry a question, in the same order.
    fn look_up(&self, sought: Vec<Sought>) -> BoxFuture<'static, Result<Vec<Whereabouts>, Unreadable>>;

    /// The publisher saw something (time-outs, refusals) that only the stream's own state can explain: look now.
    fn suspect(&self);
}

/// One publisher's way to send. Bounded by the caller: it never has more than its window in flight.
pub trait Outlet: Send + 'static {
    /// Queues shipments in this order and returns at once. Each ticket is reported exactly once, at the latest
    /// `ack_wait` after it was sent; with the link down at once as `NotSent`.
    fn ship(&mut self, shipments: Vec<Shipment>);
}

/// Wall clock in milliseconds. Monotonic time is tokio's, so that tests can pause it.
pub trait Clock: Send + Sync + 'static {
    fn now(&self) -> Millis;
}

/// A source of chance, uniform in `[0, 1)`.
pub trait Dice: Send + Sync + 'static {
    fn draw(&self) -> f64;
}

/// Messages of a durable on their way from the stream to the inbox.
#[derive(Debug)]
pub struct Delivery {
    pub stream: Arc<str>,
    /// Creation time of the stream, as in [`Topology::created`].
    pub stream_created: Arc<str>,
    /// Another number: the messages begin anew above `floor`, and what waited before comes again.
    pub session: u64,
    /// Everything at or below it was settled when the session began.
    pub floor: u64,
    pub messages: Vec<Inbound>,
    /// Up to where nothing went elsewhere; `None`: everywhere.
    pub limit: Option<u64>,
    pub receipt: Receipt,
}

/// Ticket of a delivery, and the fate of each of its messages; `None`: they are lost to the session.
pub type Answer = (u64, Option<Vec<Fate>>);

/// The answer to a [`Delivery`], owed exactly once: what to tell the broker about each message, in order. Dropped
/// without an answer it says that the messages are lost to this session, and they come again.
#[derive(Debug)]
pub struct Receipt {
    ticket: u64,
    answers: mpsc::UnboundedSender<Answer>,
    /// Bounds what is on its way; given back with the answer, or with the mailbox that held it.
    _permit: OwnedSemaphorePermit,
    answered: bool,
}

impl Receipt {
    pub fn new(ticket: u64, permit: OwnedSemaphorePermit, answers: mpsc::UnboundedSender<Answer>) -> Self {
        Self { ticket, answers, _permit: permit, answered: false }
    }

    /// Answers, after the commit.
    pub fn settle(mut self, fates: Vec<Fate>) {
        self.answered = true;
        // the session may be gone: then the messages come again and are duplicates
        let _ = self.answers.send((self.ticket, Some(fates)));
    }
}

impl Drop for Receipt {
    fn drop(&mut self) {
        if !self.answered {
            let _ = self.answers.send((self.ticket, None));
        }
    }
}

/// The inbox as the pulling side sees it.
pub trait Inlet: Send + Sync + 'static {
    /// The recorded position of the durable. The error is for people; ask again.
    fn position(&self) -> BoxFuture<'static, Result<Option<Position>, String>>;

    /// Records a position: of a new durable, or of a stream that was made anew or went back.
    fn establish(&self, position: Position) -> BoxFuture<'static, Result<(), String>>;

    /// Hands messages over and returns at once; the answer comes by the receipt.
    fn deliver(&self, delivery: Delivery);
}

/// Where inbound messages come from.
pub trait Source: Send + Sync + 'static {
    /// Starts to pull for `inlet` and never gives up. Ends at once when the tap is dropped.
    fn open(&self, inlet: Arc<dyn Inlet>) -> Box<dyn Tap>;
}

/// A source that flows.
pub trait Tap: Send + Sync + 'static {
    /// Pulls nothing more; what is on its way is still answered for.
    fn stop_pulling(&self);

    /// Resolves when everything on its way was answered and told to the broker, after [`Tap::stop_pulling`].
    fn closed(&self) -> BoxFuture<'static, ()>;
}
