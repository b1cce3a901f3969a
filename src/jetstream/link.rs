//! The link: a thread that keeps one session alive after the other, and the state that everybody watches.
//!
//! Each connection has a runtime of its own, which is dropped with it: with the client's task goes every command that
//! it had not written, so that nothing is sent after its outcome was reported as unknown. While the configuration
//! changes, two links exist: the new one takes over when it is connected, the old one finishes what it has in flight.
//!
//! May import: domain, limits, ports, telemetry, tokio.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;

use super::Settings;
use super::connect::{self, DialError, Secrets};
use super::session::{Command, End, Inlets, Session};
use super::topology::{Finding, Seen};
use crate::limits;
use crate::ports::{Clock, Link, Topology};

/// Longest wait after refused credentials.
const REFUSED_CAP: Duration = Duration::from_secs(30);

/// Told once how the first look of a link went that wants to take over.
pub(super) type FirstLook = oneshot::Sender<Result<(), String>>;

type First = Arc<Mutex<Option<FirstLook>>>;

/// What all links and outlets of one broker share.
pub(super) struct Shared {
    pub(super) link: watch::Sender<Link>,
    clock: Arc<dyn Clock>,
    generation: AtomicU64,
    next_owner: AtomicU64,
    slot: Mutex<Slot>,
}

/// Who speaks for the broker now.
struct Slot {
    owner: u64,
    session: Option<mpsc::UnboundedSender<Command>>,
    findings: Vec<Finding>,
    last_logged: String,
    expired: u64,
}

impl Shared {
    pub(super) fn new(clock: Arc<dyn Clock>) -> Arc<Self> {
        let since = clock.now();
        let (link, _) = watch::channel(Link::Down { since, reason: "not connected yet".into() });
        let slot = Slot { owner: 0, session: None, findings: Vec::new(), last_logged: String::new(), expired: 0 };
        Arc::new(Self {
            link,
            clock,
            generation: AtomicU64::new(0),
            next_owner: AtomicU64::new(1),
            slot: Mutex::new(slot),
        })
    }

    fn slot(&self) -> MutexGuard<'_, Slot> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The way into the session that is connected now.
    pub(super) fn session(&self) -> Option<mpsc::UnboundedSender<Command>> {
        self.slot().session.clone()
    }

    pub(super) fn findings(&self) -> Vec<Finding> {
        self.slot().findings.clone()
    }

    /// Publishes that got no answer in time, since the start.
    pub(super) fn expired(&self) -> u64 {
        self.slot().expired
    }

    fn set(&self, slot: &mut Slot, link: Link) {
        announce(slot, &link);
        self.link.send_if_modified(|now| {
            let changed = *now != link;
            *now = link;
            changed
        });
    }
}

/// One log line a change, none for a repetition.
fn announce(slot: &mut Slot, link: &Link) {
    let line = match link {
        Link::Down { reason, .. } => format!("nats is not connected: {reason}"),
        Link::Unusable { reason, .. } => format!("nats is connected, but publishing cannot work: {reason}"),
        Link::Up { topology, .. } => {
            format!("publishing to stream {} of nats-server {}", topology.stream, topology.server_version)
        }
    };
    if slot.last_logged == line {
        return;
    }
    match link {
        Link::Down { .. } | Link::Unusable { .. } => tracing::warn!(target: "outboxd::nats", "{line}"),
        Link::Up { .. } => tracing::info!(target: "outboxd::nats", "{line}"),
    }
    slot.last_logged = line;
}

/// A session's voice: heard only while its link speaks for the broker.
#[derive(Clone)]
pub(super) struct Owner {
    shared: Arc<Shared>,
    id: u64,
    generation: u64,
    session: mpsc::UnboundedSender<Command>,
    /// Until the first look of a link that wants to take over.
    first: First,
}

impl Owner {
    fn tell_first(&self, result: Result<(), String>) -> bool {
        let waiting = self.first.lock().unwrap_or_else(PoisonError::into_inner).take();
        match waiting {
            // a caller that no longer waits has taken it for failed
            Some(first) => first.send(result).is_ok(),
            None => true,
        }
    }

    pub(super) fn up(&self, seen: Seen) {
        let mut slot = self.shared.slot();
        if slot.owner != self.id {
            if !self.is_candidate() || !self.tell_first(Ok(())) {
                return;
            }
            slot.owner = self.id;
        }
        if seen.made {
            tracing::info!(target: "outboxd::nats", stream = %seen.topology.stream, "created the stream");
        }
        for finding in &seen.findings {
            if !slot.findings.contains(finding) {
                tracing::warn!(target: "outboxd::nats", stream = %seen.topology.stream, "{finding}");
            }
        }
        slot.session = Some(self.session.clone());
        slot.findings = seen.findings;
        if self.is_as_told(&seen.topology) {
            return;
        }
        let link = Link::Up { generation: self.generation, topology: Arc::new(seen.topology) };
        self.shared.set(&mut slot, link);
    }

    /// A last sequence that has grown is no change of state: nobody needs to wake up for it.
    fn is_as_told(&self, seen: &Topology) -> bool {
        match &*self.shared.link.borrow() {
            Link::Up { generation, topology } if *generation == self.generation => {
                Topology { last_seq: topology.last_seq, ..seen.clone() } == **topology
            }
            Link::Up { .. } | Link::Down { .. } | Link::Unusable { .. } => false,
        }
    }

    pub(super) fn findings(&self, findings: Vec<Finding>) {
        let mut slot = self.shared.slot();
        if slot.owner == self.id {
            slot.findings = findings;
        }
    }

    pub(super) fn unusable(&self, reason: String) {
        let mut slot = self.shared.slot();
        if slot.owner == self.id {
            slot.session = Some(self.session.clone());
            let since = self.since(|link| matches!(link, Link::Unusable { .. }));
            self.shared.set(&mut slot, Link::Unusable { since, reason });
        } else {
            drop(slot);
            self.tell_first(Err(reason));
        }
    }

    /// Still connected, but nothing more is taken.
    pub(super) fn down(&self, reason: String) {
        let mut slot = self.shared.slot();
        if slot.owner == self.id {
            slot.session = None;
            let since = self.since(|link| matches!(link, Link::Down { .. }));
            self.shared.set(&mut slot, Link::Down { since, reason });
        } else {
            drop(slot);
            self.tell_first(Err(reason));
        }
    }

    pub(super) fn ended(&self, reason: String) {
        self.down(reason);
    }

    pub(super) fn note_expired(&self, count: usize) {
        self.shared.slot().expired += count as u64;
    }

    fn is_candidate(&self) -> bool {
        self.first.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Since when: kept while the kind of state stays the same.
    fn since(&self, same: impl Fn(&Link) -> bool) -> i64 {
        match &*self.shared.link.borrow() {
            link @ (Link::Down { since, .. } | Link::Unusable { since, .. }) if same(link) => *since,
            Link::Down { .. } | Link::Unusable { .. } | Link::Up { .. } => self.shared.clock.now(),
        }
    }
}

/// A running link thread.
pub(super) struct LinkThread {
    stop: CancellationToken,
    retire: CancellationToken,
}

impl LinkThread {
    /// Starts a link that speaks for the broker at once.
    pub(super) fn start(shared: &Arc<Shared>, settings: Arc<Settings>) -> std::io::Result<Self> {
        let id = shared.next_owner.fetch_add(1, Ordering::Relaxed);
        shared.slot().owner = id;
        Self::spawn(shared, settings, id, None)
    }

    /// Starts a link that takes over with its first good look at the stream, or tells why it cannot and ends.
    pub(super) fn candidate(shared: &Arc<Shared>, settings: Arc<Settings>, first: FirstLook) -> std::io::Result<Self> {
        let id = shared.next_owner.fetch_add(1, Ordering::Relaxed);
        Self::spawn(shared, settings, id, Some(first))
    }

    fn spawn(
        shared: &Arc<Shared>,
        settings: Arc<Settings>,
        id: u64,
        first: Option<FirstLook>,
    ) -> std::io::Result<Self> {
        let thread = Self { stop: CancellationToken::new(), retire: CancellationToken::new() };
        let life = Life {
            shared: shared.clone(),
            settings,
            id,
            first: Arc::new(Mutex::new(first)),
            stop: thread.stop.clone(),
            retire: thread.retire.clone(),
        };
        std::thread::Builder::new().name("outboxd-nats".into()).spawn(move || life.live())?;
        Ok(thread)
    }

    /// Takes nothing more, finishes what is in flight, ends.
    pub(super) fn retire(&self) {
        self.retire.cancel();
    }

    /// Ends at once; what is in flight is reported as unknown.
    pub(super) fn stop(&self) {
        self.stop.cancel();
    }
}

impl Drop for LinkThread {
    fn drop(&mut self) {
        if !self.retire.is_cancelled() {
            self.stop();
        }
    }
}

/// What a link thread owns.
struct Life {
    shared: Arc<Shared>,
    settings: Arc<Settings>,
    id: u64,
    first: First,
    stop: CancellationToken,
    retire: CancellationToken,
}

impl Life {
    fn live(self) {
        let candidate = self.owner(mpsc::unbounded_channel().0, 0).is_candidate();
        let mut refusals = 0u32;
        while !self.stop.is_cancelled() && !self.retire.is_cancelled() {
            let started = Instant::now();
            let secrets = Secrets::read(&self.settings.nats);
            // whatever a session does, the link goes on
            let outcome = catch_unwind(AssertUnwindSafe(|| self.once(&secrets)));
            let wait = match outcome.unwrap_or_else(|_| Err(fault("a defect in the session, see the log"))) {
                Ok(End::Stopped) => break,
                Ok(End::Asked) => Duration::ZERO,
                Ok(End::Lost(_)) => {
                    refusals = 0;
                    limits::PROBE.saturating_sub(started.elapsed())
                }
                Err(error) => {
                    refusals = if error.refused { refusals.saturating_add(1) } else { 0 };
                    self.owner(mpsc::unbounded_channel().0, 0).ended(error.reason);
                    pause_after(refusals).saturating_sub(started.elapsed())
                }
            };
            if candidate && self.shared.slot().owner != self.id {
                break;
            }
            self.wait(wait, secrets.ok().as_ref());
        }
        self.owner(mpsc::unbounded_channel().0, 0).ended("stopped".into());
    }

    fn owner(&self, session: mpsc::UnboundedSender<Command>, generation: u64) -> Owner {
        let (shared, first) = (self.shared.clone(), self.first.clone());
        Owner { shared, id: self.id, generation, session, first }
    }

    /// One connection, from dialling to its end.
    fn once(&self, secrets: &Result<Secrets, DialError>) -> Result<End, DialError> {
        let secrets = secrets.as_ref().map_err(DialError::clone)?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(4)
            .build()
            .map_err(|error| fault(&format!("cannot start a runtime: {error}")))?;
        let end = runtime.block_on(async {
            tokio::select! {
                () = self.stop.cancelled() => Ok(End::Stopped),
                end = self.session(secrets) => end,
            }
        });
        // a name look-up that hangs in the system's resolver must not hold us
        runtime.shutdown_background();
        end
    }

    async fn session(&self, secrets: &Secrets) -> Result<End, DialError> {
        let (events_tx, events) = mpsc::unbounded_channel();
        let client = connect::dial_with(&self.settings.nats, secrets, "outboxd", events_tx).await?;
        let (commands_tx, commands) = mpsc::unbounded_channel();
        let generation = self.shared.generation.fetch_add(1, Ordering::Relaxed) + 1;
        let owner = self.owner(commands_tx, generation);
        let inlets = Inlets { commands, events, retire: self.retire.clone() };
        Ok(Session::run(client, owner, self.settings.clone(), inlets).await)
    }

    /// Sleeps, unless it is told to end or, after a refusal, a file of credentials has changed.
    fn wait(&self, wait: Duration, refused: Option<&Secrets>) {
        let until = Instant::now() + wait;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
        while Instant::now() < until && !self.stop.is_cancelled() && !self.retire.is_cancelled() {
            let nap = until.saturating_duration_since(Instant::now()).min(limits::PROBE);
            match &runtime {
                Ok(runtime) => runtime.block_on(async {
                    tokio::select! {
                        () = self.stop.cancelled() => {}
                        () = self.retire.cancelled() => {}
                        () = tokio::time::sleep(nap) => {}
                    }
                }),
                Err(_) => std::thread::sleep(nap.min(Duration::from_millis(100))),
            }
            let changed = refused.is_some_and(|old| Secrets::read(&self.settings.nats).is_ok_and(|new| new != *old));
            if changed {
                return;
            }
        }
    }
}

fn fault(what: &str) -> DialError {
    DialError { refused: false, reason: what.to_owned() }
}

/// The time from one attempt to connect to the next, after this many refusals in a row.
fn pause_after(refusals: u32) -> Duration {
    let doublings = refusals.saturating_sub(1).min(8);
    (limits::PROBE * 2u32.pow(doublings)).min(REFUSED_CAP)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_refusals_in_a_row_make_the_pause_longer() {
        let seconds: Vec<u64> = (0..9).map(|n| pause_after(n).as_secs()).collect();
        assert_eq!(seconds, [1, 1, 2, 4, 8, 16, 30, 30, 30]);
        assert_eq!(pause_after(u32::MAX), REFUSED_CAP);
    }
}
