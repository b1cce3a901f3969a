//! Order within an aggregate: which event may be sent next, which waits and for what.
//!
//! One [`Lanes`] belongs to one publisher and holds its part of the aggregates in memory. It is a cache of the database
//! that can be lost at any time: a new one that reads from the first pending row decides the same.
//!
//! A lane is one aggregate with something unsettled. Invariant I5: a lane has at most one flight, always made of its
//! earliest unsettled events, and an event that waits for its retry or its subject holds all its successors. Events
//! that the application scheduled and that were never tried stand outside of the lanes until they are due.
//!
//! A row passes: `admit` (read) -> `leased` -> `next_flight` -> `land` -> one of `published`, `retry`, `failed`, `park`,
//! `put_back` -> `settled`. Whatever a lane does next is decided in one place, `tidy`.

mod reading;
mod sending;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use super::event::{AggregateKey, Millis, PendingEvent, Seq};
use crate::limits;

/// Number of a flight, unique within a publisher.
pub type Ticket = u64;
/// Number of a lease (`outboxd_leases.token`).
pub type Token = i64;

/// A leased row in memory.
#[derive(Clone, Debug)]
pub struct Row {
    pub event: PendingEvent,
    pub token: Token,
    /// First time that it was handed to the broker and nobody has known its outcome since.
    pub unknown_since: Option<Millis>,
    /// It must be looked for in the stream before it is sent.
    pub look: bool,
}

/// Rows of one aggregate on their way to the broker, or being looked for in the stream.
#[derive(Debug)]
pub struct Flight {
    pub lane: AggregateKey,
    pub rows: Vec<Row>,
    pub sent_at: Millis,
    /// The rows are looked for, not sent.
    pub looking: bool,
    /// Nothing else is in flight beside it.
    pub alone: bool,
}

/// What happens to a row that was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Lease it, then call [`Lanes::leased`] or [`Lanes::not_leased`].
    Take,
    /// Its aggregate is busy with an earlier one: only its number is kept.
    Wait,
    /// Not due: only its number is kept.
    Scheduled,
    /// Behind a failed event: forgotten until the aggregate is touched.
    Held,
    /// In memory already.
    Known,
}

/// A row that memory knows by number only and that should be read now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    pub seq: Seq,
    /// `None` for a scheduled row.
    pub lane: Option<AggregateKey>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Block {
    Free,
    /// Nothing is sent before `due`: a retry of the head, or (`parked`) its subject is refused.
    Until {
        due: Millis,
        parked: bool,
        since: Millis,
        reason: String,
    },
    /// The head has failed and holds its successors.
    Held,
}

/// Whether a lane's rows in the database are other than memory knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stale {
    No,
    /// To be read again when nothing of it is under way.
    Yes,
    /// Being read again; a further change makes it [`Stale::Yes`] again, and that answer void.
    Reading,
}

#[derive(Debug)]
struct Lane {
    /// Leased rows, in order.
    ready: VecDeque<Row>,
    flight: bool,
    /// Rows between [`Admission::Take`] and [`Lanes::leased`].
    leasing: usize,
    /// Rows whose verdict is not committed yet.
    unsettled: usize,
    /// Known by number only; later than everything in memory, except while a head waits for its retry.
    waiting: BTreeSet<Seq>,
    /// Numbers of `waiting` that are being read.
    asked: usize,
    /// `waiting` has no room for all: read the aggregate again when it is empty.
    overflow: bool,
    /// It changed behind our back: read it again when nothing of it is under way.
    stale: Stale,
    /// Highest number seen.
    tail: Seq,
    block: Block,
    parked_before: u32,
    /// One at a time up to this number: a run of it was refused whole.
    single_until: Seq,
    queued: bool,
}

impl Lane {
    fn new() -> Self {
        Self {
            ready: VecDeque::new(),
            flight: false,
            leasing: 0,
            unsettled: 0,
            waiting: BTreeSet::new(),
            asked: 0,
            overflow: false,
            stale: Stale::No,
            tail: 0,
            block: Block::Free,
            parked_before: 0,
            single_until: 0,
            queued: false,
        }
    }

    fn nothing_under_way(&self) -> bool {
        !self.flight && self.leasing == 0 && self.unsettled == 0 && self.ready.is_empty() && self.asked == 0
    }

    fn remember(&mut self, seq: Seq) {
        self.tail = self.tail.max(seq);
        if self.overflow && self.waiting.last().is_none_or(|last| seq > *last) {
            return;
        }
        self.waiting.insert(seq);
        if self.waiting.len() > limits::LANE_MEMORY {
            self.waiting.pop_last();
            self.overflow = true;
        }
    }
}

/// How flights are put together.
#[derive(Clone, Copy, Debug)]
pub struct RunRule {
    /// Most messages of one run; 1: no runs.
    pub max_messages: usize,
    /// Most bytes of one run, by [`PendingEvent::weight`].
    pub max_bytes: usize,
    /// Milliseconds of doubt after which a row is looked for in the stream before it is sent again.
    pub look_after: Millis,
}

impl RunRule {
    fn must_look(&self, row: &Row, now: Millis) -> bool {
        row.look || row.unknown_since.is_some_and(|since| now.saturating_sub(since) >= self.look_after)
    }
}

/// The aggregates of one publisher. See the module.
#[derive(Debug)]
pub struct Lanes {
    ordered: bool,
    hold: bool,
    lanes: HashMap<AggregateKey, Lane>,
    /// Lanes with a row to send, in the order in which they got it.
    queue: VecDeque<AggregateKey>,
    /// Blocked lanes by the instant at which they are free.
    due: BTreeSet<(Millis, AggregateKey)>,
    /// Lanes whose waiting rows can be read now.
    loadable: BTreeSet<AggregateKey>,
    /// Lanes behind a failed head with nothing under way, which go when the next read begins.
    held: Vec<AggregateKey>,
    /// Aggregates to be read again.
    stale: BTreeSet<AggregateKey>,
    scheduled: BTreeMap<Seq, Millis>,
    scheduled_due: BTreeSet<(Millis, Seq)>,
    scheduled_overflow: bool,
    flights: HashMap<Ticket, Flight>,
    next_ticket: Ticket,
    cursor: Seq,
    rewinds: u64,
    ready_rows: usize,
    bytes: usize,
    in_flight: usize,
    parked: usize,
    alone: bool,
}

/// Times that an event may have been in flight when the daemon crashed before it is published alone.
pub const CRASHES_BEFORE_ALONE: u32 = 3;

impl Lanes {
    /// `ordered`: order per aggregate is kept; `hold`: a failed event holds its successors.
    pub fn new(ordered: bool, hold: bool) -> Self {
        Self {
            ordered,
            hold,
            lanes: HashMap::new(),
            queue: VecDeque::new(),
            due: BTreeSet::new(),
            loadable: BTreeSet::new(),
            held: Vec::new(),
            stale: BTreeSet::new(),
            scheduled: BTreeMap::new(),
            scheduled_due: BTreeSet::new(),
            scheduled_overflow: false,
            flights: HashMap::new(),
            next_ticket: 1,
            cursor: 0,
            rewinds: 0,
            ready_rows: 0,
            bytes: 0,
            in_flight: 0,
            parked: 0,
            alone: false,
        }
    }

    fn lane_key(&self, event: &PendingEvent) -> AggregateKey {
        if self.ordered { event.key.clone() } else { AggregateKey::new(&event.key.kind, &event.seq.to_string()) }
    }

    /// From now on a failed event holds its successors, or not. Everything is read again under the new rule.
    pub fn set_hold(&mut self, hold: bool) {
        if self.hold != hold {
            self.hold = hold;
            self.rewind();
        }
    }

    fn rewind(&mut self) {
        self.cursor = 0;
        self.rewinds += 1;
    }

    /// Times that everything had to be read again: a read that was asked for before says nothing about the position.
    pub fn rewinds(&self) -> u64 {
        self.rewinds
    }

    /// Everything pending at or below it has been read.
    pub fn cursor(&self) -> Seq {
        self.cursor
    }

    /// Rows leased and not in flight.
    pub fn ready_rows(&self) -> usize {
        self.ready_rows
    }

    /// Messages in flight or being looked for.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Weight of all rows in memory, in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Aggregates parked now.
    pub fn parked(&self) -> usize {
        self.parked
    }

    /// No more aggregates fit: reading ahead must wait.
    pub fn is_full(&self) -> bool {
        self.lanes.len() >= limits::LANES
    }

    /// Nothing is leased, in flight or on its way to the database.
    pub fn is_quiet(&self) -> bool {
        self.flights.is_empty() && self.lanes.values().all(Lane::nothing_under_way)
    }

    /// Times in a row that this aggregate was parked.
    pub fn parked_before(&self, key: &AggregateKey) -> u32 {
        self.lanes.get(key).map_or(0, |lane| lane.parked_before)
    }

    /// Parked aggregates with the instant and the reason, at most `limit`.
    pub fn parked_list(&self, limit: usize) -> Vec<(AggregateKey, Millis, String)> {
        let parked = self.lanes.iter().filter_map(|(key, lane)| match &lane.block {
            Block::Until { parked: true, since, reason, .. } => Some((key.clone(), *since, reason.clone())),
            Block::Until { .. } | Block::Free | Block::Held => None,
        });
        parked.take(limit).collect()
    }

    /// The next instant at which something that waits is due.
    pub fn next_due(&self) -> Option<Millis> {
        let lane = self.due.first().map(|(due, _)| *due);
        let scheduled = self.scheduled_due.first().map(|(due, _)| *due);
        lane.into_iter().chain(scheduled).min()
    }

    /// Takes all leased rows out of a lane; their numbers and `more` wait.
    fn empty(&mut self, key: &AggregateKey, more: &[Seq]) -> Vec<Row> {
        let Some(lane) = self.lanes.get_mut(key) else { return Vec::new() };
        let rows: Vec<Row> = lane.ready.drain(..).collect();
        self.ready_rows -= rows.len();
        self.bytes -= rows.iter().map(|row| row.event.weight()).sum::<usize>();
        for seq in more.iter().copied().chain(rows.iter().map(|row| row.event.seq)) {
            lane.remember(seq);
        }
        rows
    }

    fn block(&mut self, key: &AggregateKey, due: Millis, parked: bool, since: Millis, reason: String) {
        self.unblock(key);
        if let Some(lane) = self.lanes.get_mut(key) {
            self.parked += usize::from(parked);
            lane.block = Block::Until { due, parked, since, reason };
        }
    }

    fn arm(&mut self, key: &AggregateKey) {
        if let Some(Block::Until { due, .. }) = self.lanes.get(key).map(|lane| &lane.block) {
            self.due.insert((*due, key.clone()));
        }
    }

    fn unblock(&mut self, key: &AggregateKey) {
        if let Some(lane) = self.lanes.get_mut(key) {
            if let Block::Until { due, parked, .. } = &lane.block {
                self.due.remove(&(*due, key.clone()));
                self.parked -= usize::from(*parked);
            }
            if lane.block != Block::Held {
                lane.block = Block::Free;
            }
        }
    }

    /// A lane behind a failed event is free: the event was put back or discarded.
    fn free(&mut self, key: &AggregateKey) {
        if let Some(lane) = self.lanes.get_mut(key) {
            lane.block = Block::Free;
        }
    }

    /// Decides what a lane does next, after whatever happened to it.
    fn tidy(&mut self, key: &AggregateKey) {
        let Some(lane) = self.lanes.get_mut(key) else { return };
        let free = lane.block == Block::Free;
        if free && !lane.flight && !lane.queued && !lane.ready.is_empty() {
            lane.queued = true;
            self.queue.push_back(key.clone());
        }
        let idle = lane.nothing_under_way();
        if lane.stale != Stale::No {
            self.loadable.remove(key);
            if idle && lane.stale == Stale::Yes {
                self.unblock(key);
                self.stale.insert(key.clone());
            }
            return;
        }
        if lane.block == Block::Held {
            if idle {
                self.held.push(key.clone());
            }
            return;
        }
        if free && lane.asked == 0 && !lane.waiting.is_empty() {
            self.loadable.insert(key.clone());
        } else if free && idle && lane.overflow {
            lane.stale = Stale::Yes;
            self.stale.insert(key.clone());
        } else if free && idle && lane.waiting.is_empty() {
            self.lanes.remove(key);
        }
    }
}
