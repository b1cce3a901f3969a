//! NATS JetStream: the only directory that imports `async_nats`. Implements [`crate::ports::Broker`].
//!
//! ```text
//!  outlets ──Command──▶ session (one connection, own runtime) ──▶ async_nats ──▶ nats-server
//!     ▲                    │ flights, acks, looks at the stream
//!     └── grouped reports ─┘ link state ──▶ watch
//!  link.rs    one session after the other, for ever       connect.rs   credentials, TLS
//!  session.rs what a connection does in a turn            answers.rs, belief.rs   acks, believed or not
//!  topology.rs the stream, made or judged
//!  publish.rs what is on its way                          outcome.rs   every error -> a class
//!  readback.rs look before you send                       api.rs       requests to the JetStream API
//!  consume*.rs the inbox's side: a durable on a connection and a thread of its own
//! ```
//!
//! May import: domain, limits, ports, config shapes of `nats` and `stream`, telemetry, async_nats, tokio.

mod answers;
mod api;
mod belief;
pub mod connect;
pub mod consume;
mod consume_api;
mod consume_plan;
mod consume_pull;
mod consume_raw;
mod consume_reply;
mod consume_session;
mod link;
pub mod outcome;
mod publish;
mod readback;
mod session;
pub mod topology;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::sync::{oneshot, watch};

use crate::config::{Nats, Stream};
use crate::ports::{Broker, Clock, Link, Outlet, ReportSink, Shipment, Sought, Unreadable, Whereabouts};

use link::{LinkThread, Shared};
use publish::{Consignment, Desk};
use session::Command;
pub use topology::{Finding, Severity};

/// Whether a set of stream subjects covers everything that we may publish.
pub type Covers = Arc<dyn Fn(&[String]) -> bool + Send + Sync>;

/// What a link is made from.
#[derive(Clone)]
pub struct Settings {
    pub nats: Nats,
    pub stream: Stream,
    /// From the send to the report `Unknown`.
    pub ack_wait: Duration,
    /// Only judged: the stream's duplicate window must exceed `lease + 2 x ack_wait`.
    pub lease: Duration,
    /// The subjects of our events as a template, for messages.
    pub subject: String,
    pub covers: Covers,
}

/// Longest wait for a new configuration to connect and to see its stream.
const TAKE_OVER: Duration = Duration::from_secs(10);

/// Why a new configuration of the broker was not taken; the old one stays in force.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the new broker configuration does not work, the old one stays: {0}")]
pub struct NotTaken(pub String);

/// The broker. Dropped, it ends at once; what is in flight is reported as unknown.
pub struct JetStream {
    shared: Arc<Shared>,
    thread: Mutex<LinkThread>,
}

impl JetStream {
    /// Starts to connect, and never gives up. Fails only where no thread can be started.
    pub fn start(settings: Settings, clock: Arc<dyn Clock>) -> std::io::Result<Self> {
        let shared = Shared::new(clock);
        let thread = LinkThread::start(&shared, Arc::new(settings))?;
        Ok(Self { shared, thread: Mutex::new(thread) })
    }

    /// Connects with other settings and sees the stream first, then swaps; the old connection finishes what it has in
    /// flight. On an error nothing has changed.
    pub async fn reconfigure(&self, settings: Settings) -> Result<(), NotTaken> {
        let (first, mut outcome) = oneshot::channel();
        let candidate = LinkThread::candidate(&self.shared, Arc::new(settings), first)
            .map_err(|error| NotTaken(format!("cannot start a thread: {error}")))?;
        let result = match tokio::time::timeout(TAKE_OVER, &mut outcome).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err("the connection ended before the stream was seen".into()),
            Err(_) => {
                // it may have taken over between the last look at the channel and now
                outcome.close();
                outcome.try_recv().unwrap_or_else(|_| Err(format!("no connection within {TAKE_OVER:?}")))
            }
        };
        result.map_err(NotTaken)?;
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *thread, candidate).retire();
        Ok(())
    }

    /// What is not as it should be with the stream, as of the last look.
    pub fn findings(&self) -> Vec<Finding> {
        self.shared.findings()
    }

    /// Publishes without an answer within `ack_wait`, since the start.
    pub fn expired(&self) -> u64 {
        self.shared.expired()
    }

    /// Ends the connection at once; for the end of the daemon, when nothing is in flight any more.
    pub fn close(&self) {
        self.thread.lock().unwrap_or_else(PoisonError::into_inner).stop();
    }
}

impl Broker for JetStream {
    fn link(&self) -> watch::Receiver<Link> {
        self.shared.link.subscribe()
    }

    fn outlet(&self, reports: ReportSink) -> Box<dyn Outlet> {
        Box::new(Gate { shared: self.shared.clone(), desk: Arc::new(Desk(reports)) })
    }

    fn look_up(&self, sought: Vec<Sought>) -> BoxFuture<'static, Result<Vec<Whereabouts>, Unreadable>> {
        let (reply, answer) = oneshot::channel();
        let not_connected = || Unreadable("not connected".into());
        let sent = match self.shared.session() {
            Some(session) => session.send(Command::LookUp(sought, reply)).map_err(|_| not_connected()),
            None => Err(not_connected()),
        };
        Box::pin(async move {
            sent?;
            answer.await.unwrap_or_else(|_| Err(Unreadable("the connection was lost".into())))
        })
    }

    fn suspect(&self) {
        if let Some(session) = self.shared.session() {
            // a session that has just ended looks again with the next connection
            let _ = session.send(Command::Suspect);
        }
    }
}

/// One publisher's way to the session that is connected now.
struct Gate {
    shared: Arc<Shared>,
    desk: Arc<Desk>,
}

impl Outlet for Gate {
    fn ship(&mut self, shipments: Vec<Shipment>) {
        if shipments.is_empty() {
            return;
        }
        // a consignment that nobody takes reports itself as not sent when it is dropped
        let consignment = Consignment::new(self.desk.clone(), shipments);
        if let Some(session) = self.shared.session() {
            let _ = session.send(Command::Ship(consignment));
        }
    }
}
