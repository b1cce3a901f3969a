//! The relay: owns the outbox of one database and supervises its publishers.
//!
//! It is active while it holds the owner's lock and the current epoch, else it stands by. Invariants: publishers exist
//! only while it is active; a publisher that crashed is started again after a growing delay, its leases rescued first;
//! more than [`limits::RESTARTS`] crashes within [`limits::RESTART_WINDOW`] go one level up.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef, RpcReplyPort, SupervisionEvent};

use tokio::sync::mpsc;

use super::publisher::{Publisher, PublisherArgs, PublisherMsg, Pulse};
use super::writer::{Kind, Writer};
use crate::domain::event::Millis;
use crate::domain::rules::RelayRules;
use crate::limits;
use crate::ports::{Broker, Clock, Dice};
use crate::store::error::{StoreError, chain};
use crate::store::lease::{self, Epoch, Fenced};
use crate::store::outbox;
use crate::store::owner::{self, OwnerLock};
use crate::store::pool::Store;
use crate::telemetry::board::Board;
use crate::telemetry::metrics::Metrics;
use crate::telemetry::progress::Loops;

/// Messages of the relay.
#[derive(Debug)]
pub enum RelayMsg {
    /// Somebody committed: new rows, or (`touched`) changes behind the read position.
    Wake { touched: bool },
    /// Look whether the relay is ours, or still is.
    Tick,
    /// The relay is ours under this epoch.
    Owned(Epoch),
    /// It could not be taken over now.
    NotOwned(StoreError),
    /// A write was refused because another owner has taken over.
    LeaseLost(Epoch),
    /// The database cannot be trusted any more: the daemon must end.
    Fatal(StoreError),
    /// Start the publisher of this number again.
    Respawn(usize),
    /// New rules.
    Adopt(Arc<RelayRules>),
    /// Nothing is sent until further notice.
    Pause(bool),
    /// Give everything back; answers when nothing is under way.
    Quiesce(RpcReplyPort<()>),
}

/// What a relay is made of.
#[derive(Clone)]
pub struct RelayArgs {
    pub store: Store,
    pub writer: Writer,
    pub broker: Arc<dyn Broker>,
    pub clock: Arc<dyn Clock>,
    pub dice: Arc<dyn Dice>,
    pub rules: Arc<RelayRules>,
    pub publishers: usize,
    pub paused: bool,
    pub board: Board,
    pub metrics: Metrics,
    pub loops: Loops,
    /// Where errors go after which the daemon must end.
    pub fatal: mpsc::UnboundedSender<StoreError>,
}

/// The actor; see the module.
pub struct Relay;

enum Role {
    /// The lock is free or not asked for yet, or another owner relays.
    Standby {
        since: Millis,
    },
    /// The lock is ours; the epoch is being written.
    Taking,
    Active {
        epoch: Epoch,
        publishers: Vec<Option<ActorRef<PublisherMsg>>>,
    },
}

/// State of the relay.
pub struct RelayState {
    args: RelayArgs,
    role: Role,
    lock: Option<OwnerLock>,
    pulse: Arc<Pulse>,
    crashes: VecDeque<Instant>,
    quiescing: bool,
    told_standby: bool,
    /// Lost to another owner just now: that one takes the lock first.
    not_before: Option<Instant>,
    /// The owner is being looked at.
    watching: Arc<AtomicBool>,
}

/// How often a stand-by looks at the lock.
const LOCK_POLL: Duration = Duration::from_millis(100);
/// Bound for the progress of a publisher with something in flight, beyond `ack_wait`: an ack or its time-out comes.
const PROGRESS_BOUND: Duration = Duration::from_secs(20);

impl Actor for Relay {
    type Msg = RelayMsg;
    type State = RelayState;
    type Arguments = RelayArgs;

    async fn pre_start(&self, myself: ActorRef<RelayMsg>, args: RelayArgs) -> Result<RelayState, ActorProcessingErr> {
        let since = args.clock.now();
        args.board.write(|facts| facts.relay_role = "standby".into());
        myself.cast(RelayMsg::Tick)?;
        Ok(RelayState {
            args,
            role: Role::Standby { since },
            lock: None,
            pulse: Arc::default(),
            crashes: VecDeque::new(),
            quiescing: false,
            told_standby: false,
            not_before: None,
            watching: Arc::default(),
        })
    }

    async fn handle(
        &self,
        myself: ActorRef<RelayMsg>,
        message: RelayMsg,
        state: &mut RelayState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            RelayMsg::Wake { touched } => state.wake(touched),
            RelayMsg::Tick => state.tick(&myself),
            RelayMsg::Owned(epoch) => state.activate(&myself, epoch).await?,
            RelayMsg::NotOwned(error) => state.not_owned(&error),
            RelayMsg::LeaseLost(epoch) => state.lose(epoch),
            RelayMsg::Fatal(error) => state.fatal(&error),
            RelayMsg::Respawn(index) => state.respawn(&myself, index).await?,
            RelayMsg::Adopt(rules) => state.adopt(rules),
            RelayMsg::Pause(paused) => state.pause(paused),
            RelayMsg::Quiesce(reply) => state.quiesce(reply),
        }
        Ok(())
    }

    async fn handle_supervisor_evt(
        &self,
        myself: ActorRef<RelayMsg>,
        event: SupervisionEvent,
        state: &mut RelayState,
    ) -> Result<(), ActorProcessingErr> {
        match event {
            SupervisionEvent::ActorFailed(who, error) => state.crashed(&myself, &who, &error.to_string()),
            SupervisionEvent::ActorTerminated(who, _, reason) => {
                state.crashed(&myself, &who, reason.as_deref().unwrap_or("ended"))
            }
            SupervisionEvent::ActorStarted(_) | SupervisionEvent::ProcessGroupChanged(_) => Ok(()),
        }
    }
}

impl RelayState {
    fn publishers(&self) -> impl Iterator<Item = &ActorRef<PublisherMsg>> {
        let all = match &self.role {
            Role::Active { publishers, .. } => publishers.as_slice(),
            Role::Standby { .. } | Role::Taking => &[],
        };
        all.iter().flatten()
    }

    fn lease_millis(&self) -> Millis {
        self.args.rules.lease.as_millis().try_into().unwrap_or(Millis::MAX / 4)
    }

    fn wake(&mut self, touched: bool) {
        let publishers: Vec<_> = self.publishers().cloned().collect();
        for publisher in &publishers {
            let _ = publisher.cast(PublisherMsg::Wake);
        }
        if touched && !publishers.is_empty() {
            let (store, writer) = (self.args.store.clone(), self.args.writer.clone());
            tokio::spawn(hand_out_touched(store, writer, publishers));
        }
    }

    /// Looks after the ownership, as often as the role needs it.
    fn tick(&mut self, myself: &ActorRef<RelayMsg>) {
        if self.quiescing {
            return;
        }
        let mut again = LOCK_POLL;
        match &self.role {
            Role::Taking => {}
            Role::Active { .. } if self.lock.is_none() => {
                // taken over from a frozen owner: the lock is ours as soon as that one has let go of it
                self.lock = OwnerLock::try_take(self.args.store.path()).ok().flatten();
                tokio::spawn(show_if_watched(self.args.clone()));
            }
            Role::Active { .. } => {
                again = Duration::from_millis((self.lease_millis() / 3).clamp(100, 10_000).unsigned_abs());
                tokio::spawn(show_if_watched(self.args.clone()));
            }
            Role::Standby { since } => {
                let since = *since;
                self.try_take(myself, since);
            }
        }
        myself.send_after(again, || RelayMsg::Tick);
    }

    fn try_take(&mut self, myself: &ActorRef<RelayMsg>, since: Millis) {
        if self.not_before.is_some_and(|at| Instant::now() < at) {
            return;
        }
        if self.lock.is_none() {
            match OwnerLock::try_take(self.args.store.path()) {
                Ok(Some(lock)) => self.lock = Some(lock),
                Ok(None) => {
                    if !self.told_standby {
                        self.told_standby = true;
                        tracing::info!("another daemon relays this database; standing by");
                    }
                    // one at a time: each may wait for a lock that another program holds
                    if !self.watching.swap(true, Ordering::AcqRel) {
                        let (args, relay, watching) = (self.args.clone(), myself.clone(), self.watching.clone());
                        tokio::spawn(async move {
                            watch_owner(args, since, relay).await;
                            watching.store(false, Ordering::Release);
                        });
                    }
                    return;
                }
                Err(error) => {
                    if self.args.board.write(|f| std::mem::replace(&mut f.last_error, chain(&error)) != chain(&error)) {
                        tracing::error!(error = %chain(&error), "cannot take the owner's lock");
                    }
                    return;
                }
            }
        }
        self.role = Role::Taking;
        tokio::spawn(take_over(self.args.clone(), myself.clone()));
    }

    async fn activate(&mut self, myself: &ActorRef<RelayMsg>, epoch: Epoch) -> Result<(), ActorProcessingErr> {
        if self.quiescing {
            return Ok(());
        }
        // taken over twice in a row: the epoch before is void
        self.publishers().for_each(|publisher| publisher.stop(Some(DISMISSED.into())));
        self.told_standby = false;
        self.args.board.write(|facts| facts.relay_role = "active".into());
        tracing::info!(epoch, publishers = self.args.publishers, "this daemon relays");
        let mut publishers = Vec::new();
        for index in 0..self.args.publishers {
            publishers.push(Some(self.spawn(myself, epoch, index).await?));
        }
        self.role = Role::Active { epoch, publishers };
        Ok(())
    }

    async fn spawn(
        &self,
        myself: &ActorRef<RelayMsg>,
        epoch: Epoch,
        index: usize,
    ) -> Result<ActorRef<PublisherMsg>, ActorProcessingErr> {
        let args = PublisherArgs {
            index,
            publishers: self.args.publishers,
            epoch,
            store: self.args.store.clone(),
            writer: self.args.writer.clone(),
            broker: self.args.broker.clone(),
            clock: self.args.clock.clone(),
            dice: self.args.dice.clone(),
            rules: self.args.rules.clone(),
            paused: self.args.paused,
            pulse: self.pulse.clone(),
            board: self.args.board.clone(),
            metrics: self.args.metrics.clone(),
            heart: self
                .args
                .loops
                .register(&format!("publisher-{index}"), PROGRESS_BOUND + self.args.rules.ack_wait * 2),
            relay: myself.clone(),
        };
        let (actor, _) = Publisher::spawn_linked(None, Publisher, args, myself.get_cell()).await?;
        Ok(actor)
    }

    /// Tells the daemon, which ends.
    fn fatal(&self, error: &StoreError) {
        let _ = self.args.fatal.send(error.clone());
    }

    fn not_owned(&mut self, error: &StoreError) {
        if error.is_fatal() {
            return self.fatal(error);
        }
        tracing::error!(error = %chain(error), "cannot take the relay over; trying again");
        self.role = Role::Standby { since: self.args.clock.now() };
    }

    /// Another owner has taken over: the publishers end, and this daemon stands by.
    fn lose(&mut self, lost: Epoch) {
        let Role::Active { epoch, publishers } = &self.role else { return };
        if *epoch != lost {
            return;
        }
        for publisher in publishers.iter().flatten() {
            publisher.stop(Some(DISMISSED.into()));
        }
        self.lock = None;
        self.not_before = Some(Instant::now() + LOCK_POLL * 10);
        self.role = Role::Standby { since: self.args.clock.now() };
        self.args.board.write(|facts| facts.relay_role = "standby".into());
        tracing::warn!(epoch = lost, "another daemon has taken the relay over; standing by");
    }

    fn crashed(&mut self, myself: &ActorRef<RelayMsg>, who: &ActorCell, why: &str) -> Result<(), ActorProcessingErr> {
        let Role::Active { publishers, .. } = &mut self.role else { return Ok(()) };
        let id = who.get_id();
        let Some(index) = publishers.iter().position(|p| p.as_ref().is_some_and(|p| p.get_id() == id)) else {
            return Ok(());
        };
        publishers[index] = None;
        if self.quiescing {
            return Ok(());
        }
        let now = Instant::now();
        self.crashes.push_back(now);
        while self.crashes.front().is_some_and(|at| now - *at > limits::RESTART_WINDOW) {
            self.crashes.pop_front();
        }
        self.args.metrics.actor_restarted("publisher");
        tracing::error!(publisher = index, error = why, crashes = self.crashes.len(), "a publisher crashed");
        if self.crashes.len() > limits::RESTARTS {
            return Err(format!("{} crashes of publishers in a minute, the last: {why}", self.crashes.len()).into());
        }
        let delay = Duration::from_millis(50 << self.crashes.len().min(6));
        myself.send_after(delay, move || RelayMsg::Respawn(index));
        Ok(())
    }

    async fn respawn(&mut self, myself: &ActorRef<RelayMsg>, index: usize) -> Result<(), ActorProcessingErr> {
        let Role::Active { epoch, .. } = &self.role else { return Ok(()) };
        let epoch = *epoch;
        if self.quiescing {
            return Ok(());
        }
        let rescued = self.args.writer.write(Kind::Rescue, move |tx| lease::rescue_publisher(tx, epoch, index)).await;
        match rescued {
            Ok(Fenced::Applied(rows)) => {
                self.args.metrics.leases_expired(1);
                tracing::info!(publisher = index, rows, "rescued the leases of a crashed publisher");
                let actor = self.spawn(myself, epoch, index).await?;
                if let Role::Active { publishers, .. } = &mut self.role {
                    publishers[index] = Some(actor);
                }
            }
            Ok(Fenced::Lost) => self.lose(epoch),
            Err(error) if error.is_fatal() => self.fatal(&error),
            Err(error) => {
                tracing::error!(error = %chain(&error), "cannot rescue leases; trying again");
                myself.send_after(Duration::from_secs(1), move || RelayMsg::Respawn(index));
            }
        }
        Ok(())
    }

    fn adopt(&mut self, rules: Arc<RelayRules>) {
        self.args.rules = rules;
        for publisher in self.publishers() {
            let _ = publisher.cast(PublisherMsg::Adopt(self.args.rules.clone()));
        }
    }

    fn pause(&mut self, paused: bool) {
        self.args.paused = paused;
        for publisher in self.publishers() {
            let _ = publisher.cast(PublisherMsg::Pause(paused));
        }
    }

    fn quiesce(&mut self, reply: RpcReplyPort<()>) {
        self.quiescing = true;
        let publishers: Vec<_> = self.publishers().cloned().collect();
        tokio::spawn(async move {
            let waits = publishers.iter().map(|p| p.call(PublisherMsg::Quiesce, None));
            futures_util::future::join_all(waits).await;
            let _ = reply.send(());
        });
    }
}

/// Reason of a publisher that ends because its relay stands by.
const DISMISSED: &str = "dismissed";

async fn take_over(args: RelayArgs, relay: ActorRef<RelayMsg>) {
    let now = args.clock.now();
    let taken = args
        .writer
        .write(Kind::TakeOver, move |tx| {
            owner::show_owner(tx, now)?;
            // everything is read from the start
            outbox::forget_touched(tx, i64::MAX)?;
            lease::take_over(tx, true)
        })
        .await;
    let _ = relay.cast(match taken {
        Ok(epoch) => RelayMsg::Owned(epoch),
        Err(error) => RelayMsg::NotOwned(error),
    });
}

/// The owner shows that it lives, but only where somebody stands by.
async fn show_if_watched(args: RelayArgs) {
    let now = args.clock.now();
    let patience = Millis::try_from(args.rules.lease.as_millis()).unwrap_or(Millis::MAX / 4);
    let Ok(signs) = args.store.read(owner::read_signs).await else { return };
    if signs.standby_seen.is_some_and(|seen| now - seen <= patience * 2) {
        let _ = args.writer.write(Kind::TakeOver, move |tx| owner::show_owner(tx, now)).await;
    }
}

/// A stand-by announces itself, and takes over from an owner that holds the lock but shows no life.
async fn watch_owner(args: RelayArgs, since: Millis, relay: ActorRef<RelayMsg>) {
    let now = args.clock.now();
    let patience = Millis::try_from(args.rules.lease.as_millis()).unwrap_or(Millis::MAX / 4);
    let Ok(signs) = args.store.read(owner::read_signs).await else { return };
    if signs.standby_seen.is_none_or(|seen| now - seen > patience / 4) {
        let _ = args.writer.write(Kind::TakeOver, move |tx| owner::show_standby(tx, now)).await;
    }
    let frozen = signs.owner_seen.is_none_or(|seen| now - seen > patience) && now - since > patience;
    if frozen {
        tracing::warn!(
            silent_ms = signs.owner_seen.map(|seen| now - seen),
            "the owner of the relay holds its lock but shows no life; taking over"
        );
        take_over(args, relay).await;
    }
}

async fn hand_out_touched(store: Store, writer: Writer, publishers: Vec<ActorRef<PublisherMsg>>) {
    const MOST: usize = 4_096;
    let mut failures = 0;
    loop {
        let touched = match store.read(|conn| outbox::read_touched(conn, MOST)).await {
            Ok(touched) => touched,
            // they stay where they are; the next change, and a start, read them too
            Err(_) if failures == 40 => return,
            Err(_) => {
                failures += 1;
                tokio::time::sleep(Duration::from_millis(250)).await;
                continue;
            }
        };
        let Some(last) = touched.last().map(|t| t.id) else { return };
        let full = touched.len() == MOST;
        let mut keys: Vec<_> = touched.into_iter().map(|t| t.key).collect();
        keys.sort_unstable();
        keys.dedup();
        for publisher in &publishers {
            let _ = publisher.cast(PublisherMsg::Touched(keys.clone()));
        }
        if writer.write(Kind::Rescue, move |tx| outbox::forget_touched(tx, last)).await.is_err() || !full {
            return;
        }
    }
}
