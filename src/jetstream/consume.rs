//! The pulling side of the inbox: a durable pull consumer, kept alive for ever.
//!
//! It has a thread, a runtime and a NATS connection of its own, a new one for each session: hostile messages can end a
//! session, never touch the relay, and with the runtime goes every command that the client had not written. A session
//! that ends is followed by the next, which starts where the database is (`consume_plan.rs`). What the client cannot
//! parse is read around it (`consume_raw.rs`).
//!
//! States are told on the board: `inbox_connected`, and `inbox_reason` where it does not flow.
//!
//! May import: domain, limits, ports, config shapes of `nats` and `inbox`, telemetry, async_nats, tokio.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::consume_session::{self, End, History};
use crate::config::{Config, Inbox, Nats};
use crate::limits;
use crate::ports::{Inlet, Source, Tap};
use crate::telemetry::board::Board;

/// Longest wait after refused credentials or settings.
const REFUSED_CAP: Duration = Duration::from_secs(30);

/// First wait after a session that did not get as far as pulling.
const FIRST_WAIT: Duration = Duration::from_millis(100);

/// A session that lived so long was a good one.
const GOOD_SESSION: Duration = Duration::from_secs(5);

/// What a tap is made from. Of `inbox` only what concerns the pulling counts.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    pub nats: Nats,
    pub inbox: Inbox,
}

impl Settings {
    /// Without what is the consumer actor's alone, so that its change begins no new session.
    fn of_pulling(self) -> Self {
        let Inbox { enabled, stream, domain, durable, filter_subjects, deliver, batch, ack_wait, .. } = self.inbox;
        let rest = Config::default().inbox;
        let inbox = Inbox { enabled, stream, domain, durable, filter_subjects, deliver, batch, ack_wait, ..rest };
        Self { nats: self.nats, inbox }
    }
}

/// JetStream as a source of inbound messages.
pub struct JetStreamSource {
    settings: watch::Sender<Arc<Settings>>,
    board: Board,
}

impl JetStreamSource {
    pub fn new(settings: Settings, board: Board) -> Self {
        Self { settings: watch::Sender::new(Arc::new(settings.of_pulling())), board }
    }

    /// Open taps begin a new session with these settings, at the position of the database. Equal settings change
    /// nothing.
    pub fn adopt(&self, settings: Settings) {
        let settings = settings.of_pulling();
        self.settings.send_if_modified(|now| {
            let changed = **now != settings;
            if changed {
                *now = Arc::new(settings);
            }
            changed
        });
    }
}

impl Source for JetStreamSource {
    fn open(&self, inlet: Arc<dyn Inlet>) -> Box<dyn Tap> {
        let stop = CancellationToken::new();
        let kill = CancellationToken::new();
        let (done, closed) = watch::channel(false);
        self.board.write(|facts| facts.inbox_reason = "not connected yet".into());
        let context = Context {
            inlet,
            settings: Mutex::new(self.settings.subscribe()),
            board: self.board.clone(),
            stop: stop.clone(),
            kill: kill.clone(),
        };
        let work = move || {
            run(&context);
            context.board.write(|facts| facts.inbox_connected = false);
            done.send_replace(true);
        };
        if let Err(error) = std::thread::Builder::new().name("outboxd-inbox".into()).spawn(work) {
            self.board.write(|facts| facts.inbox_reason = format!("no thread for the inbox: {error}"));
        }
        Box::new(Pull { stop, kill, closed })
    }
}

struct Pull {
    stop: CancellationToken,
    kill: CancellationToken,
    closed: watch::Receiver<bool>,
}

impl Tap for Pull {
    fn stop_pulling(&self) {
        self.stop.cancel();
    }

    fn closed(&self) -> BoxFuture<'static, ()> {
        let mut closed = self.closed.clone();
        Box::pin(async move {
            // an error says that the thread is gone, which is the same
            let _ = closed.wait_for(|done| *done).await;
        })
    }
}

impl Drop for Pull {
    fn drop(&mut self) {
        self.stop.cancel();
        self.kill.cancel();
    }
}

/// What every session of one tap has.
pub(super) struct Context {
    pub(super) inlet: Arc<dyn Inlet>,
    settings: Mutex<watch::Receiver<Arc<Settings>>>,
    board: Board,
    /// Pull nothing more, finish what is on its way.
    pub(super) stop: CancellationToken,
    /// End now.
    pub(super) kill: CancellationToken,
}

impl Context {
    /// The settings as they are now, and a way to see them change.
    pub(super) fn settings(&self) -> (Arc<Settings>, watch::Receiver<Arc<Settings>>) {
        let mut receiver = self.settings.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let now = Arc::clone(&receiver.borrow_and_update());
        (now, receiver)
    }

    /// Tells that messages flow, or why they do not. One log line a change.
    pub(super) fn tell(&self, connected: bool, reason: &str) {
        let changed = self.board.write(|facts| {
            let changed = facts.inbox_connected != connected || facts.inbox_reason != reason;
            facts.inbox_connected = connected;
            facts.inbox_reason = reason.to_owned();
            changed
        });
        match (changed, connected) {
            (false, _) => {}
            (true, true) => tracing::info!("inbox: pulling"),
            (true, false) => tracing::warn!(reason, "inbox: not pulling, trying again for ever"),
        }
    }
}

fn run(context: &Context) {
    let mut history = History::default();
    let mut failures = 0u32;
    while !context.stop.is_cancelled() {
        let (settings, mut changes) = context.settings();
        let began = Instant::now();
        let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => runtime,
            Err(error) => {
                context.tell(false, &format!("no runtime for the inbox: {error}"));
                std::thread::sleep(limits::PROBE);
                continue;
            }
        };
        let end = runtime.block_on(async {
            tokio::select! {
                end = consume_session::run(context, &settings, &mut history) => end,
                () = context.kill.cancelled() => End::Stopped,
            }
        });
        let wait = match &end {
            End::Stopped => break,
            End::Changed => Duration::ZERO,
            End::Lost { .. } | End::Down { .. } => {
                let good = began.elapsed() > GOOD_SESSION || std::mem::take(&mut history.progressed);
                failures = if good { 0 } else { failures.saturating_add(1) };
                pause(&end, failures)
            }
        };
        if let End::Lost { reason } | End::Down { reason, .. } = &end {
            context.tell(false, reason);
        }
        runtime.block_on(async {
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                // new settings may be the cure
                _ = changes.changed() => {}
                () = context.stop.cancelled() => {}
            }
        });
        runtime.shutdown_background();
    }
}

/// The wait before the next session: none after a session that flowed, else doubling.
fn pause(end: &End, failures: u32) -> Duration {
    let cap = match end {
        End::Down { refused: true, .. } => REFUSED_CAP,
        End::Lost { .. } if failures <= 1 => return Duration::ZERO,
        End::Lost { .. } | End::Down { .. } | End::Stopped | End::Changed => limits::PROBE,
    };
    FIRST_WAIT.saturating_mul(1 << failures.saturating_sub(1).min(16)).min(cap)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_that_is_the_consumers_alone_begins_no_new_session() {
        let Config { nats, inbox, .. } = Config::default();
        let source = JetStreamSource::new(Settings { nats: nats.clone(), inbox: inbox.clone() }, Board::default());
        let mut seen = source.settings.subscribe();
        source.adopt(Settings { nats: nats.clone(), inbox: Inbox { max_deliver: 3, ..inbox.clone() } });
        assert!(!seen.has_changed().unwrap());
        source.adopt(Settings { nats, inbox: Inbox { batch: 3, ..inbox } });
        assert!(seen.has_changed().unwrap());
        assert_eq!(seen.borrow_and_update().inbox.batch, 3);
    }

    #[test]
    fn an_outage_is_probed_each_second_and_a_refusal_is_not_hammered() {
        let down = |refused| End::Down { refused, reason: String::new() };
        let waits: Vec<u64> = (1..8).map(|n| pause(&down(false), n).as_millis() as u64).collect();
        assert_eq!(waits, [100, 200, 400, 800, 1_000, 1_000, 1_000]);
        assert_eq!(pause(&down(true), 20), REFUSED_CAP);
        assert_eq!(pause(&down(true), u32::MAX), REFUSED_CAP);
    }

    #[test]
    fn a_lost_session_is_followed_at_once_but_not_in_a_hot_loop() {
        let lost = End::Lost { reason: String::new() };
        assert_eq!(pause(&lost, 0), Duration::ZERO);
        assert_eq!(pause(&lost, 1), Duration::ZERO);
        assert_eq!(pause(&lost, 2), Duration::from_millis(200));
        assert_eq!(pause(&lost, 9), limits::PROBE);
    }
}
