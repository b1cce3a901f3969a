//! A publisher: one share of the aggregates, from the outbox to the stream.
//!
//! Everything is an event: rows were read, a lease was granted, reports came in, a settlement is committed, a clock ran
//! out. After each, `pump` does what can be done now: read and lease ahead while the last batch is in flight, fill the
//! window, hand verdicts to the writer. No handler waits for anything, so a lost ack delays nobody.
//!
//! At most one read-and-lease and one settlement are under way at a time: the writer's queue is bounded by the number
//! of publishers. What a publisher holds in memory can be lost at any time: its leases are rescued and its rows looked
//! for in the stream before they are sent again.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use ractor::{Actor, ActorProcessingErr, ActorRef, RpcReplyPort};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

use super::relay::RelayMsg;
use super::writer::{Kind, Writer};
use crate::domain::event::{AggregateKey, Millis, PendingEvent, Seq};
use crate::domain::ordering::{Asked, Lanes, Row, Token};
use crate::domain::rules::RelayRules;
use crate::limits;
use crate::ports::{Broker, Clock, Dice, Link, Outlet, Report, Topology, Unreadable, Whereabouts};
use crate::store::error::Result;
use crate::store::lease::{Epoch, Fenced, Grant, SettleRequest, Settlement, Unknown};
use crate::store::outbox::{Again, Ahead, Numbered};
use crate::store::pool::Store;
use crate::telemetry::board::Board;
use crate::telemetry::metrics::Metrics;
use crate::telemetry::progress::Heart;

mod landing;
mod reading;
mod sending;

/// Messages of a publisher.
#[derive(Debug)]
pub enum PublisherMsg {
    /// There may be new rows, or the link has changed.
    Wake,
    /// A clock ran out.
    Tick,
    /// What the last read found.
    Read(Box<ReadAnswer>),
    /// The answer to the last lease.
    Leased(Vec<PendingEvent>, Result<Fenced<Grant>>),
    /// Fates of shipments.
    Reports(Vec<Report>),
    /// What a look into the stream found, by ticket.
    Looked(Vec<(u64, usize)>, std::result::Result<Vec<Whereabouts>, Unreadable>),
    /// The last settlement is committed, or not.
    Settled(Arc<SettleRequest>, Result<Fenced<usize>>),
    /// Leases were extended, or not.
    Renewed(Result<Fenced<()>>),
    /// Aggregates that changed behind the read position.
    Touched(Vec<AggregateKey>),
    /// New rules; what is in flight ends by the old ones.
    Adopt(Arc<RelayRules>),
    /// Nothing new is sent until further notice.
    Pause(bool),
    /// Give everything back and answer when nothing of it is under way.
    Quiesce(RpcReplyPort<()>),
    /// Leases are given back.
    Released,
}

/// Rows that a read found, with the questions that it answers.
#[derive(Debug)]
pub struct ReadAnswer {
    asked: Vec<Asked>,
    stale: Vec<AggregateKey>,
    /// [`Lanes::rewinds`] when it was asked.
    rewinds: u64,
    result: Result<ReadSet>,
}

/// What one read brings.
#[derive(Debug)]
struct ReadSet {
    again: Vec<Again>,
    rows: Vec<Numbered>,
    ahead: Option<Ahead>,
}

/// When any publisher of this daemon last got an ack, in wall-clock milliseconds.
#[derive(Debug, Default)]
pub struct Pulse(AtomicI64);

impl Pulse {
    fn beat(&self, now: Millis) {
        self.0.fetch_max(now, Ordering::Relaxed);
    }

    fn last(&self) -> Millis {
        self.0.load(Ordering::Relaxed)
    }
}

/// What a publisher is made of.
pub struct PublisherArgs {
    /// 0-based, below `publishers`.
    pub index: usize,
    pub publishers: usize,
    pub epoch: Epoch,
    pub store: Store,
    pub writer: Writer,
    pub broker: Arc<dyn Broker>,
    pub clock: Arc<dyn Clock>,
    pub dice: Arc<dyn Dice>,
    pub rules: Arc<RelayRules>,
    pub paused: bool,
    pub pulse: Arc<Pulse>,
    pub board: Board,
    pub metrics: Metrics,
    pub heart: Heart,
    pub relay: ActorRef<RelayMsg>,
}

/// The actor; see the module.
pub struct Publisher;

/// A lease with rows that are not settled yet.
#[derive(Debug)]
struct Lease {
    outstanding: usize,
    expires_at: Millis,
    floor: u64,
    stream_created: String,
}

/// State of a publisher.
pub struct PublisherState {
    args: PublisherArgs,
    myself: ActorRef<PublisherMsg>,
    link: watch::Receiver<Link>,
    outlet: Box<dyn Outlet>,
    lanes: Lanes,
    leases: HashMap<Token, Lease>,
    /// Verdicts for the next settlement.
    next: SettleRequest,
    /// Whose verdicts are in `next`, and how many.
    next_lanes: Vec<(AggregateKey, usize)>,
    /// Whose verdicts the writer has.
    settling_lanes: Vec<(AggregateKey, usize)>,
    settling: bool,
    /// The last settlement failed: nothing is sent before this instant, and the same settlement is tried again.
    settle_again: Option<(Millis, Arc<SettleRequest>)>,
    reading: bool,
    leasing: bool,
    /// Nothing is read before this instant: the last read or lease failed.
    read_after: Millis,
    /// There may be rows behind the cursor.
    more: bool,
    /// Refusals and time-outs since the last ack.
    misses: u32,
    /// Nothing at all is acked: one probe a second.
    stalled: Option<Millis>,
    renewing: bool,
    /// A lease ran out before it was renewed (the process was frozen): nothing is sent until it is ours again.
    expired: bool,
    /// The highest sequence of the stream that was seen.
    last_stream_seq: u64,
    /// The stream of the last link that was up, and when it was made.
    stream: String,
    stream_created: String,
    generation: u64,
    draining: Option<RpcReplyPort<()>>,
    releasing: bool,
    /// The lease was lost to another owner: nothing is done any more.
    lost: bool,
    timer: Option<(Millis, JoinHandle<()>)>,
    parked_shown: usize,
}

/// Refusals or time-outs in a row, without an ack, after which the broker as a whole is taken to be at fault.
const STALL_AFTER: u32 = 16;
/// Wait after a failed read, lease or settlement.
const STORE_PAUSE: Millis = 250;

impl Actor for Publisher {
    type Msg = PublisherMsg;
    type State = PublisherState;
    type Arguments = PublisherArgs;

    async fn pre_start(
        &self,
        myself: ActorRef<PublisherMsg>,
        args: PublisherArgs,
    ) -> std::result::Result<PublisherState, ActorProcessingErr> {
        let (sink, mut reports) = mpsc::unbounded_channel();
        let outlet = args.broker.outlet(sink);
        let link = args.broker.link();
        let to = myself.clone();
        tokio::spawn(async move {
            while let Some(group) = reports.recv().await {
                if to.cast(PublisherMsg::Reports(group)).is_err() {
                    return;
                }
            }
        });
        let (to, mut changes) = (myself.clone(), args.broker.link());
        tokio::spawn(async move {
            while changes.changed().await.is_ok() {
                if to.cast(PublisherMsg::Wake).is_err() {
                    return;
                }
            }
        });
        myself.cast(PublisherMsg::Wake)?;
        Ok(PublisherState::new(args, myself, link, outlet))
    }

    async fn handle(
        &self,
        _: ActorRef<PublisherMsg>,
        message: PublisherMsg,
        state: &mut PublisherState,
    ) -> std::result::Result<(), ActorProcessingErr> {
        state.args.heart.beat();
        if state.lost {
            if let PublisherMsg::Quiesce(reply) = message {
                let _ = reply.send(());
            }
            state.args.heart.rest();
            return Ok(());
        }
        match message {
            PublisherMsg::Wake => state.more = true,
            PublisherMsg::Tick => state.timer = None,
            PublisherMsg::Read(answer) => state.on_read(*answer),
            PublisherMsg::Leased(events, result) => state.on_leased(events, result),
            PublisherMsg::Reports(reports) => state.on_reports(reports),
            PublisherMsg::Looked(asked, found) => state.on_looked(asked, found),
            PublisherMsg::Settled(request, result) => state.on_settled(request, result),
            PublisherMsg::Renewed(result) => state.on_renewed(result),
            PublisherMsg::Touched(keys) => state.on_touched(&keys),
            PublisherMsg::Adopt(rules) => state.on_adopt(rules),
            PublisherMsg::Pause(paused) => state.on_pause(paused),
            PublisherMsg::Quiesce(reply) => state.draining = Some(reply),
            PublisherMsg::Released => state.on_released(),
        }
        state.pump();
        Ok(())
    }
}

impl PublisherState {
    fn new(
        args: PublisherArgs,
        myself: ActorRef<PublisherMsg>,
        link: watch::Receiver<Link>,
        outlet: Box<dyn Outlet>,
    ) -> Self {
        Self {
            lanes: Lanes::new(args.rules.ordered, args.rules.hold),
            args,
            myself,
            link,
            outlet,
            leases: HashMap::new(),
            next: SettleRequest::default(),
            next_lanes: Vec::new(),
            settling_lanes: Vec::new(),
            settling: false,
            settle_again: None,
            reading: false,
            leasing: false,
            read_after: 0,
            more: true,
            misses: 0,
            stalled: None,
            renewing: false,
            expired: false,
            last_stream_seq: 0,
            stream: String::new(),
            stream_created: String::new(),
            generation: 0,
            draining: None,
            releasing: false,
            lost: false,
            timer: None,
            parked_shown: 0,
        }
    }

    fn now(&self) -> Millis {
        self.args.clock.now()
    }

    /// What the stream offers, while publishing can work.
    fn topology(&mut self) -> Option<Arc<Topology>> {
        let (generation, topology) = match &*self.link.borrow() {
            Link::Up { generation, topology } => (*generation, topology.clone()),
            Link::Down { .. } | Link::Unusable { .. } => return None,
        };
        if generation != self.generation {
            // a new connection: what was refused or unanswered before says nothing about this one
            self.generation = generation;
            self.misses = 0;
            self.stalled = None;
            self.lanes.unpark(false);
        }
        if topology.created != self.stream_created {
            // another stream counts from its own beginning
            self.stream_created = topology.created.clone();
            self.last_stream_seq = topology.last_seq;
        }
        self.stream = topology.stream.to_string();
        self.last_stream_seq = self.last_stream_seq.max(topology.last_seq);
        Some(topology)
    }

    /// Does what can be done now.
    fn pump(&mut self) {
        let now = self.now();
        self.lanes.expire(now);
        let topology = self.topology();
        self.send_settlements(now);
        if let Some(topology) = &topology {
            self.renew(now);
            if self.may_send(now) {
                self.fill_window(now, topology);
            }
            self.read(now, topology);
        }
        if self.draining.is_some() {
            self.drain();
        }
        self.arm(now, topology.is_some());
        self.show_parked();
    }

    fn may_send(&self, now: Millis) -> bool {
        !self.args.paused
            && self.draining.is_none()
            && self.settle_again.is_none()
            && !self.expired
            && self.stalled.is_none_or(|probe_at| probe_at <= now && self.lanes.in_flight() == 0)
    }

    /// Ends a drain once nothing is in flight, read, leased or settled.
    fn drain(&mut self) {
        let under_way = self.reading || self.leasing || self.settling || self.settle_again.is_some();
        // also with the link down: every ticket is reported, and only then its rows are known to be in doubt
        let in_flight = self.lanes.in_flight() > 0;
        if under_way || self.renewing || in_flight || self.releasing || !self.next.settlements.is_empty() {
            return;
        }
        self.releasing = true;
        let (unknown, _unsent) = self.lanes.release_all();
        let unknown: Vec<Unknown> = unknown.iter().map(|row| self.unknown(row)).collect();
        let tokens: Vec<Token> = self.leases.keys().copied().collect();
        let (writer, epoch, to) = (self.args.writer.clone(), self.args.epoch, self.myself.clone());
        tokio::spawn(async move {
            let released =
                writer.write(Kind::Release, move |tx| crate::store::lease::release(tx, epoch, &tokens, &unknown)).await;
            if let Err(error) = released {
                // the leases stay: whoever relays next takes them over
                tracing::warn!(error = %crate::store::error::chain(&error), "could not give the leases back");
            }
            let _ = to.cast(PublisherMsg::Released);
        });
    }

    fn on_released(&mut self) {
        self.leases.clear();
        if let Some(reply) = self.draining.take() {
            let _ = reply.send(());
        }
        self.lost = true;
    }

    fn on_touched(&mut self, keys: &[AggregateKey]) {
        for key in keys {
            if key.owner(self.args.publishers) == self.args.index {
                self.lanes.touch(key);
            }
        }
        self.more = true;
    }

    fn on_adopt(&mut self, rules: Arc<RelayRules>) {
        self.lanes.set_hold(rules.hold);
        self.args.rules = rules;
        self.more = true;
    }

    fn on_pause(&mut self, paused: bool) {
        self.args.paused = paused;
        if paused {
            // leases are not kept over a pause; what is in flight ends by itself
            let (unknown, unsent) = self.lanes.release_all();
            self.give_back(unknown.into_iter().chain(unsent));
        }
    }

    /// Another owner has the relay: everything in memory is void.
    fn lose(&mut self) {
        if !self.lost {
            self.lost = true;
            tracing::warn!(publisher = self.args.index, "lost the lease to another owner");
            let _ = self.args.relay.cast(RelayMsg::LeaseLost(self.args.epoch));
        }
    }

    fn report_store(&self, what: &'static str, error: &crate::store::error::StoreError) {
        if error.is_fatal() {
            let _ = self.args.relay.cast(RelayMsg::Fatal(error.clone()));
        } else {
            let text = crate::store::error::chain(error);
            let fresh = self.args.board.write(|facts| std::mem::replace(&mut facts.last_error, text.clone()) != text);
            if fresh {
                tracing::error!(publisher = self.args.index, error = %text, "{what}");
            }
        }
    }

    fn unknown(&self, row: &Row) -> Unknown {
        let (floor, stream_created) = match (&row.event.suspect, self.leases.get(&row.token)) {
            (Some(suspect), _) => (suspect.floor, suspect.stream_created.clone()),
            (None, Some(lease)) => (lease.floor, lease.stream_created.clone()),
            (None, None) => (0, String::new()),
        };
        Unknown { seq: row.event.seq, floor, stream_created }
    }

    /// Leased rows leave the memory; those of unknown fate are remembered in the database.
    fn give_back(&mut self, rows: impl IntoIterator<Item = Row>) {
        for row in rows {
            if row.unknown_since.is_some() {
                let unknown = self.unknown(&row);
                self.next.unknown.push(unknown);
            }
            self.done_with(row.token);
        }
    }

    fn done_with(&mut self, token: Token) {
        if let Some(lease) = self.leases.get_mut(&token) {
            lease.outstanding = lease.outstanding.saturating_sub(1);
            if lease.outstanding == 0 {
                self.leases.remove(&token);
                self.next.finished.push(token);
            }
        }
    }

    /// One timer for the next thing that is due.
    fn arm(&mut self, now: Millis, is_up: bool) {
        let renew = self.leases.values().map(|l| l.expires_at - self.lease_millis() / 2).min();
        // only what can be acted on when it is due: everything else is a message away
        let idle = !self.args.paused && self.draining.is_none() && !self.reading && !self.leasing;
        let candidates = [
            self.lanes.next_due().filter(|due| *due > now || (is_up && idle && !self.is_full())),
            self.settle_again.as_ref().map(|(at, _)| *at).filter(|_| !self.settling),
            self.stalled.filter(|_| is_up && idle && self.lanes.in_flight() == 0),
            renew.filter(|_| is_up && !self.renewing),
            (self.read_after > now).then_some(self.read_after),
        ];
        let Some(due) = candidates.into_iter().flatten().min() else {
            if self.lanes.in_flight() == 0 {
                self.args.heart.rest();
            }
            return;
        };
        // in doubt a look too many: a wall clock may jump
        let wait = (due - now).clamp(1, 10_000);
        let at = now + wait;
        if self.timer.as_ref().is_some_and(|(armed, _)| *armed <= at && *armed > now) {
            return;
        }
        if let Some((_, timer)) = self.timer.take() {
            timer.abort();
        }
        let to = self.myself.clone();
        let timer = tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(wait.unsigned_abs())).await;
            let _ = to.cast(PublisherMsg::Tick);
        });
        self.timer = Some((at, timer));
        if self.lanes.in_flight() == 0 {
            self.args.heart.rest();
        }
    }

    /// No more rows are to be read now.
    fn is_full(&self) -> bool {
        let rules = &self.args.rules;
        self.lanes.ready_rows() >= rules.batch || self.lanes.bytes() >= rules.batch_bytes
    }

    fn lease_millis(&self) -> Millis {
        self.args.rules.lease.as_millis().try_into().unwrap_or(Millis::MAX / 4)
    }

    fn show_parked(&mut self) {
        if self.lanes.parked() == self.parked_shown {
            return;
        }
        self.parked_shown = self.lanes.parked();
        let list = self.lanes.parked_list(100);
        let parked = list.into_iter().map(|(key, since, reason)| crate::telemetry::board::Parked {
            aggregate: key.to_string(),
            since,
            reason,
        });
        let (index, parked, count) = (self.args.index, parked.collect::<Vec<_>>(), self.parked_shown as u64);
        self.args.board.write(|facts| {
            if facts.parked.len() <= index {
                facts.parked.resize(index + 1, Vec::new());
                facts.parked_aggregates.resize(index + 1, 0);
            }
            facts.parked[index] = parked;
            facts.parked_aggregates[index] = count;
        });
    }
}

/// Numbers of rows in the order of the outbox.
fn seqs(events: &[PendingEvent]) -> Vec<Seq> {
    events.iter().map(|event| event.seq).collect()
}

/// Most messages that one publisher has in flight.
fn window(publishers: usize) -> usize {
    (limits::WINDOW / publishers.max(1)).max(1)
}

/// A verdict on a row, under its lease.
fn settlement(row: &Row, verdict: crate::domain::settle::Verdict) -> Settlement {
    Settlement { token: row.token, seq: row.event.seq, verdict, suspect: row.event.suspect.is_some() }
}
