//! The janitor: retention, in steps that never hold the lock for long.
//!
//! A step is one chunk of one table through the writer; between two steps it waits at least as long as the step took,
//! and between two rounds [`ROUND`]. It is never in the way of a stop: a drain ends it after the step at hand.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ractor::{Actor, ActorProcessingErr, ActorRef};

use super::writer::{Kind, Writer};
use crate::domain::event::Millis;
use crate::ports::Clock;
use crate::store::error::{StoreError, chain};
use crate::store::pool::Store;
use crate::store::retention::{self, Class};
use crate::telemetry::metrics::Metrics;

/// How long rows are kept; zero: for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keep {
    pub published: Duration,
    pub processed: Duration,
    pub inbox: Duration,
    pub audit: Duration,
}

/// Messages of the janitor.
#[derive(Debug)]
pub enum JanitorMsg {
    /// The next step.
    Sweep,
    /// Other times from now on.
    Adopt(Keep),
}

/// What the janitor is made of.
#[derive(Clone)]
pub struct JanitorArgs {
    pub store: Store,
    pub writer: Writer,
    pub clock: Arc<dyn Clock>,
    pub metrics: Metrics,
    pub keep: Keep,
}

/// State of the janitor: where its walk is.
pub struct JanitorState {
    args: JanitorArgs,
    /// The table of the walk, by its place in [`CLASSES`].
    class: usize,
    cursor: i64,
    failed: bool,
}

/// The actor; see the module.
pub struct Janitor;

/// Pause between two rounds, and before the first.
const ROUND: Duration = Duration::from_secs(60);
const FIRST: Duration = Duration::from_secs(5);
/// Rows looked at in a step, and most rows that one step deletes: about 3 ms of lock (docs/adr/0004).
const LOOK: usize = 1_000;
const CHUNK: usize = 150;
const CLASSES: [Class; 4] = [Class::Published, Class::Processed, Class::Inbox, Class::Audit];

impl Actor for Janitor {
    type Msg = JanitorMsg;
    type State = JanitorState;
    type Arguments = JanitorArgs;

    async fn pre_start(
        &self,
        myself: ActorRef<JanitorMsg>,
        args: JanitorArgs,
    ) -> Result<JanitorState, ActorProcessingErr> {
        myself.send_after(FIRST, || JanitorMsg::Sweep);
        Ok(JanitorState { args, class: 0, cursor: 0, failed: false })
    }

    async fn handle(
        &self,
        myself: ActorRef<JanitorMsg>,
        message: JanitorMsg,
        state: &mut JanitorState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            JanitorMsg::Sweep => {
                let pause = state.step().await;
                myself.send_after(pause, || JanitorMsg::Sweep);
            }
            JanitorMsg::Adopt(keep) => state.args.keep = keep,
        }
        Ok(())
    }
}

impl JanitorState {
    /// One chunk; the time until the next.
    async fn step(&mut self) -> Duration {
        let Some(class) = CLASSES.get(self.class).copied() else {
            (self.class, self.cursor) = (0, 0);
            return ROUND;
        };
        let keep = match class {
            Class::Published => self.args.keep.published,
            Class::Processed => self.args.keep.processed,
            Class::Inbox => self.args.keep.inbox,
            Class::Audit => self.args.keep.audit,
        };
        if keep.is_zero() {
            self.next_class();
            return Duration::ZERO;
        }
        let kept = Millis::try_from(keep.as_millis()).unwrap_or(Millis::MAX / 2);
        let (before, after) = (self.args.clock.now() - kept, self.cursor);
        let started = Instant::now();
        match self.prune(class, before, after).await {
            Ok(more) => {
                self.failed = false;
                if !more {
                    self.next_class();
                }
                // gaps at least as long as the step, so that the application is not held up
                started.elapsed().max(Duration::from_millis(5))
            }
            Err(error) => {
                if !std::mem::replace(&mut self.failed, true) {
                    tracing::error!(table = class.table(), error = %chain(&error), "cannot remove old rows; trying again");
                }
                ROUND
            }
        }
    }

    async fn prune(&mut self, class: Class, before: Millis, after: i64) -> Result<bool, StoreError> {
        let found = self.args.store.read(move |conn| retention::expired(conn, class, before, after, LOOK)).await?;
        for chunk in found.ids.chunks(CHUNK) {
            let ids = chunk.to_vec();
            let started = Instant::now();
            let gone = self.args.writer.write(Kind::Prune, move |tx| retention::delete(tx, class, &ids)).await?;
            self.args.metrics.pruned(class.table(), gone as u64);
            tokio::time::sleep(started.elapsed().max(Duration::from_millis(5))).await;
        }
        self.cursor = found.cursor;
        Ok(found.more)
    }

    fn next_class(&mut self) {
        self.class += 1;
        self.cursor = 0;
    }
}
