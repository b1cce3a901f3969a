//! What an operator talks to while the daemon runs: the unix socket of the command line and HTTP.
//!
//! Everything here works on [`Services`], which the composition root fills. May import: config, domain, store and actors
//! by their public calls, telemetry, limits, ports.

pub mod client;
pub mod http;
pub mod operate;
pub mod page;
pub mod protocol;
pub mod rates;
pub mod server;
pub mod socket;
pub mod status;
pub mod tally;

use std::sync::Arc;

use futures_util::future::BoxFuture;
use rusqlite::Transaction;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::sync::{mpsc, oneshot};

use crate::ports::Clock;
use crate::store::error::StoreError;
use crate::store::inbox::Inbox;
use crate::telemetry::board::Board;
use crate::telemetry::metrics::Metrics;
use status::{Status, Tally};

/// A write transaction of an operator; what it answers goes into the reply.
pub type Job = Box<dyn FnOnce(&Transaction<'_>) -> Result<Value, StoreError> + Send>;

/// Runs a [`Job`] through the writer and answers after its commit.
pub type Write = Arc<dyn Fn(Job) -> BoxFuture<'static, Result<Value, StoreError>> + Send + Sync>;

/// Reads what only the database knows, on a reading connection.
pub type ReadTally = Arc<dyn Fn() -> BoxFuture<'static, Result<Tally, StoreError>> + Send + Sync>;

/// What the admin side asks of the daemon.
#[derive(Debug)]
pub enum Control {
    /// Read the configuration again and say what came of it.
    Reload { reply: oneshot::Sender<Reloaded> },
    /// `outboxd_meta` says something else about pausing now.
    PauseChanged,
    /// Rows of `outbox_events` were changed through our own connection, which the watch on the file does not see.
    OutboxChanged,
    /// Dead letters of the inbox were given back.
    InboxChanged,
}

/// What came of a reload.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reloaded {
    /// "ok", "unchanged" or "rejected".
    pub result: String,
    /// The generation that is in force now.
    pub generation: u64,
    pub digest: String,
    /// Why it was rejected, or what was done, in words.
    pub message: String,
    pub changed: Vec<Changed>,
}

/// One key that differs; secrets are masked.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Changed {
    pub key: String,
    pub old: String,
    pub new: String,
    /// "hot", "reconnect" or "restart".
    pub class: String,
}

/// What the admin side works with. Cheap to clone.
#[derive(Clone)]
pub struct Services {
    pub board: Board,
    pub metrics: Metrics,
    pub clock: Arc<dyn Clock>,
    pub tally: ReadTally,
    pub write: Write,
    pub control: mpsc::Sender<Control>,
    pub rates: rates::Rates,
    /// The inbox's handlers, which only a restart changes; `None` where it has none.
    pub inbox: Option<Arc<Inbox>>,
}

impl Services {
    /// The status of the running daemon, as it is now.
    pub async fn status(&self) -> Result<Status, StoreError> {
        let tally = (self.tally)().await?;
        let stuck = self.board.loops().stuck().iter().map(ToString::to_string).collect();
        let mut status = Status::running(&self.board.read(), &tally, stuck, self.clock.now());
        status.rates = self.rates.per_second(tokio::time::Instant::now(), self.metrics.totals());
        Ok(status)
    }
}
