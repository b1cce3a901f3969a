//! The composition root: pools, broker, actors, signals, the service manager, the exit code. Owns clock and chance.
//!
//! A start: configuration (by the caller) -> database -> broker (never waited for) -> actors -> admin -> READY. The
//! end: an orderly stop ([`shutdown`]), a stop that was forced, or a part that cannot go on. May import everything.

mod reload;
mod services;
mod shutdown;
mod start;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::actors::consumer::ConsumerMsg;
use crate::actors::janitor::JanitorMsg;
use crate::actors::relay::RelayMsg;
use crate::actors::root::{Slot, Tree};
use crate::actors::writer::Writer;
use crate::admin::{Control, http};
use crate::config::{LoadOptions, Loaded};
use crate::domain::event::Millis;
use crate::jetstream::JetStream;
use crate::jetstream::consume::JetStreamSource;
use crate::ports::{Clock, Dice};
use crate::signals::{Signal, Signals};
use crate::store::error::{StoreError, chain};
use crate::store::pool::Store;
use crate::store::watch::Watcher;
use crate::telemetry::board::{Board, State};
use crate::telemetry::logging::Logging;
use crate::telemetry::notify::Notifier;

/// How the daemon is started.
#[derive(Clone, Debug)]
pub struct RunOptions {
    /// Longest orderly stop.
    pub grace: Duration,
    /// How the configuration was found: a reload looks again in the same way.
    pub load: LoadOptions,
}

/// Exit codes of the daemon (contract 4).
mod exit {
    pub(super) const OK: u8 = 0;
    pub(super) const FORCED: u8 = 1;
    pub(super) const UNAVAILABLE: u8 = 69;
    pub(super) const INTERNAL: u8 = 70;
    pub(super) const CONFIGURATION: u8 = 78;
}

/// The wall clock of this machine.
#[derive(Debug)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Millis {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        Millis::try_from(since.as_millis()).unwrap_or(Millis::MAX)
    }
}

/// The random source of this process.
#[derive(Debug)]
pub struct SystemDice;

impl Dice for SystemDice {
    fn draw(&self) -> f64 {
        rand::random()
    }
}

/// Runs the daemon until it is told to stop; the exit code of the process.
///
/// The log must be set up by the caller, who hands it in so that a reload can change its level.
pub fn run(loaded: Loaded, options: RunOptions, logging: Option<Logging>) -> u8 {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).thread_name("outboxd").enable_all().build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => {
            tracing::error!(%error, "cannot start the runtime");
            return exit::INTERNAL;
        }
    };
    let code = runtime.block_on(async {
        match Daemon::start(loaded, options, logging).await {
            Ok(daemon) => daemon.live().await,
            Err(failure) => failure.code,
        }
    });
    // a worker that still waits for a foreign lock must not hold the exit up
    runtime.shutdown_timeout(Duration::from_millis(200));
    code
}

/// A start that failed; the log has said why.
struct Failure {
    code: u8,
}

/// A running daemon.
struct Daemon {
    loaded: Loaded,
    options: RunOptions,
    logging: Option<Logging>,
    generation: u64,
    source: String,
    board: Board,
    clock: Arc<dyn Clock>,
    store: Store,
    writer: Writer,
    broker: Arc<JetStream>,
    tree: Tree,
    relay: Slot<RelayMsg>,
    janitor: Slot<JanitorMsg>,
    consumer: Slot<ConsumerMsg>,
    inlet: Arc<JetStreamSource>,
    signals: Signals,
    control: mpsc::Receiver<Control>,
    fatal: mpsc::UnboundedReceiver<StoreError>,
    http_rules: watch::Sender<http::Rules>,
    stop_admin: CancellationToken,
    notifier: Notifier,
    _watcher: Watcher,
}

impl Daemon {
    /// The main loop.
    async fn live(mut self) -> u8 {
        loop {
            tokio::select! {
                biased;
                signal = self.signals.next() => match signal {
                    Signal::Reload => { self.reload().await; }
                    Signal::Stop => return self.stop().await,
                    Signal::StopNow => return exit::FORCED,
                },
                Some(error) = self.fatal.recv() => return self.give_up(&error).await,
                Some(control) = self.control.recv() => self.control(control).await,
                () = self.tree.given_up() => {
                    tracing::error!("a part of the daemon crashed too often; the service manager starts it again");
                    return exit::INTERNAL;
                }
            }
        }
    }

    async fn control(&mut self, control: Control) {
        match control {
            Control::Reload { reply } => {
                let reloaded = self.reload().await;
                // the asker may have hung up: the result is in status and log all the same
                let _ = reply.send(reloaded);
            }
            Control::PauseChanged => self.pause_changed().await,
            Control::OutboxChanged => self.relay.cast(RelayMsg::Wake { touched: true }),
            Control::InboxChanged => {}
        }
    }

    /// The pause of an operator stands in the database, where it survives a restart.
    async fn pause_changed(&mut self) {
        match services::paused_until(&self.store, self.clock.now()).await {
            Ok(until) => {
                let paused = until.is_some();
                tracing::info!(paused, "publishing was {}", if paused { "paused" } else { "resumed" });
                self.board.write(|f| f.state = if paused { State::Paused } else { State::Running });
                self.relay.cast(RelayMsg::Pause(paused));
                self.wake_at_end_of_pause(until);
            }
            Err(error) => tracing::error!(error = %chain(&error), "cannot read whether publishing is paused"),
        }
    }

    /// The database cannot be trusted any more: nothing is settled or released in it, the process ends.
    async fn give_up(self, error: &StoreError) -> u8 {
        self.board.write(|facts| {
            facts.state = State::Halted;
            facts.last_error = chain(error);
        });
        tracing::error!(error = %chain(error), "the database cannot be used any more; stopping");
        self.notifier.stopping("the database cannot be used any more");
        match error {
            StoreError::Replaced { .. } | StoreError::NoFile { .. } => exit::UNAVAILABLE,
            _ => exit::INTERNAL,
        }
    }
}
