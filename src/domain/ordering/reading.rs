//! The reading side of [`Lanes`]: which rows are taken, which wait, which are read again.

use super::{Admission, Asked, Block, Lane, Lanes, Row, Stale};
use crate::domain::event::{AggregateKey, Millis, PendingEvent, Seq};
use crate::limits;

/// Pause before a row is asked for again whose lane is being settled, in milliseconds.
const AGAIN: Millis = 5;

impl Lanes {
    /// A read begins. Its snapshot has every verdict that was committed before, so lanes that were kept only because an
    /// older read might not know of their failed head can go now.
    pub fn read_begins(&mut self) {
        for key in std::mem::take(&mut self.held) {
            let over = |lane: &Lane| lane.block == Block::Held && lane.stale == Stale::No && lane.nothing_under_way();
            if self.lanes.get(&key).is_some_and(over) {
                self.lanes.remove(&key);
            }
        }
    }

    /// Everything up to `cursor` has been offered.
    pub fn read_up_to(&mut self, cursor: Seq) {
        self.cursor = self.cursor.max(cursor);
    }

    /// A pending row was read ahead. `held`: an earlier event of its aggregate has failed and holds it. Rows must be
    /// offered in the order of their numbers.
    pub fn admit(&mut self, event: &PendingEvent, held: bool, now: Millis) -> Admission {
        if event.is_scheduled(now) {
            return self.schedule(event.seq, event.due_at.unwrap_or(now));
        }
        let key = self.lane_key(event);
        if held && self.ordered && self.hold {
            return Admission::Held;
        }
        let Some(lane) = self.lanes.get_mut(&key) else {
            self.lanes.insert(key.clone(), Lane::new());
            return self.take(&key, event, now);
        };
        if event.seq <= lane.tail {
            return Admission::Known;
        }
        if lane.block == Block::Held {
            return Admission::Held;
        }
        if lane.block != Block::Free || !lane.waiting.is_empty() || lane.overflow || lane.stale != Stale::No {
            lane.remember(event.seq);
            return Admission::Wait;
        }
        self.take(&key, event, now)
    }

    /// Takes the next row of a free lane, unless it is in backoff.
    fn take(&mut self, key: &AggregateKey, event: &PendingEvent, now: Millis) -> Admission {
        if let Some(due) = self.scheduled.remove(&event.seq) {
            self.scheduled_due.remove(&(due, event.seq));
        }
        let Some(lane) = self.lanes.get_mut(key) else { return Admission::Held };
        lane.tail = lane.tail.max(event.seq);
        if let Some(due) = event.due_at.filter(|due| *due > now) {
            // tried before and not due: it holds its successors
            lane.remember(event.seq);
            self.block(key, due, false, now, "waits for its retry".into());
            self.arm(key);
            return Admission::Wait;
        }
        lane.leasing += 1;
        Admission::Take
    }

    pub(super) fn schedule(&mut self, seq: Seq, due: Millis) -> Admission {
        if self.scheduled.len() >= limits::SCHEDULED && !self.scheduled.contains_key(&seq) {
            self.scheduled_overflow = true;
            return Admission::Scheduled;
        }
        if let Some(before) = self.scheduled.insert(seq, due) {
            self.scheduled_due.remove(&(before, seq));
        }
        self.scheduled_due.insert((due, seq));
        Admission::Scheduled
    }

    /// Rows that can be read by number now, in order, at most `limit`. Each must come back by [`Lanes::answer`].
    pub fn ask(&mut self, limit: usize, now: Millis) -> Vec<Asked> {
        let mut asked = Vec::new();
        while asked.len() < limit {
            let Some(&(due, seq)) = self.scheduled_due.first() else { break };
            if due > now {
                break;
            }
            self.scheduled_due.pop_first();
            self.scheduled.remove(&seq);
            asked.push(Asked { seq, lane: None });
        }
        if self.scheduled_overflow && self.scheduled.len() < limits::SCHEDULED / 2 {
            self.scheduled_overflow = false;
            self.rewind();
        }
        while asked.len() < limit {
            let Some(key) = self.loadable.pop_first() else { break };
            let Some(lane) = self.lanes.get_mut(&key) else { continue };
            let seqs: Vec<Seq> = lane.waiting.iter().copied().take(limit - asked.len()).collect();
            lane.asked = seqs.len();
            asked.extend(seqs.into_iter().map(|seq| Asked { seq, lane: Some(key.clone()) }));
        }
        asked
    }

    /// The answer to [`Lanes::ask`], one call a question in the same order: the row with its `held`, or `None` where it
    /// is no longer pending.
    pub fn answer(&mut self, asked: &Asked, found: Option<(&PendingEvent, bool)>, now: Millis) -> Admission {
        let Some(key) = &asked.lane else {
            // a scheduled row that is due takes its place behind what is there
            return match found {
                Some((event, held)) => self.admit_due(event, held, now),
                None => Admission::Known,
            };
        };
        let Some(lane) = self.lanes.get_mut(key) else { return Admission::Known };
        lane.asked = lane.asked.saturating_sub(1);
        let first = lane.waiting.first() == Some(&asked.seq);
        let admission = match found {
            None => {
                lane.waiting.remove(&asked.seq);
                Admission::Known
            }
            Some((event, _)) if event.is_scheduled(now) => {
                lane.waiting.remove(&asked.seq);
                self.schedule(event.seq, event.due_at.unwrap_or(now))
            }
            Some((_, true)) if self.ordered && self.hold => {
                lane.waiting.remove(&asked.seq);
                Admission::Held
            }
            Some((event, _)) if first && lane.block == Block::Free && lane.stale == Stale::No => {
                lane.waiting.remove(&asked.seq);
                self.take(key, event, now)
            }
            Some(_) => Admission::Wait,
        };
        self.tidy(key);
        admission
    }

    /// A scheduled row whose instant has come: its number may be below the lane's tail.
    fn admit_due(&mut self, event: &PendingEvent, held: bool, now: Millis) -> Admission {
        let key = self.lane_key(event);
        match self.lanes.get_mut(&key) {
            _ if held && self.ordered && self.hold => Admission::Held,
            // it stands before the event that has failed just now: again once that is settled
            Some(lane) if lane.block == Block::Held => self.schedule(event.seq, now + AGAIN),
            Some(lane) if lane.block != Block::Free || lane.stale != Stale::No || !lane.waiting.is_empty() => {
                lane.remember(event.seq);
                Admission::Wait
            }
            Some(_) => self.take(&key, event, now),
            None => self.admit(event, held, now),
        }
    }

    /// A question of [`Lanes::ask`] that could not be answered now: it is asked again.
    pub fn not_answered(&mut self, asked: &Asked, now: Millis) {
        match &asked.lane {
            None => {
                self.schedule(asked.seq, now);
            }
            Some(key) => {
                if let Some(lane) = self.lanes.get_mut(key) {
                    lane.asked = lane.asked.saturating_sub(1);
                }
                self.tidy(key);
            }
        }
    }

    /// The lease of an admitted row could not be written: the row is read again.
    pub fn lease_failed(&mut self, event: &PendingEvent) {
        let key = self.lane_key(event);
        if let Some(lane) = self.lanes.get_mut(&key) {
            lane.leasing = lane.leasing.saturating_sub(1);
            lane.remember(event.seq);
        }
        self.tidy(&key);
    }

    /// The lease of an admitted row was granted. A lane that was blocked meanwhile gives it back: then the row comes
    /// back from here, for the caller to release.
    pub fn leased(&mut self, row: Row) -> Option<Row> {
        let key = self.lane_key(&row.event);
        let Some(lane) = self.lanes.get_mut(&key) else { return Some(row) };
        lane.leasing = lane.leasing.saturating_sub(1);
        let mut seq_again = None;
        let back = match lane.block {
            Block::Until { .. } => {
                lane.remember(row.event.seq);
                Some(row)
            }
            Block::Held => {
                // it may stand before the event that has failed: asked again, and then told held or not
                seq_again = Some(row.event.seq);
                Some(row)
            }
            Block::Free => {
                self.ready_rows += 1;
                self.bytes += row.event.weight();
                let place = lane.ready.partition_point(|r| r.event.seq < row.event.seq);
                lane.ready.insert(place, row);
                None
            }
        };
        if let Some(seq) = seq_again {
            self.schedule(seq, 0);
        }
        self.tidy(&key);
        back
    }

    /// An admitted row was not leased: it is no longer pending.
    pub fn not_leased(&mut self, event: &PendingEvent) {
        let key = self.lane_key(event);
        if let Some(lane) = self.lanes.get_mut(&key) {
            lane.leasing = lane.leasing.saturating_sub(1);
        }
        self.tidy(&key);
    }

    /// Somebody changed a row of this aggregate that was read before.
    pub fn touch(&mut self, key: &AggregateKey) {
        if !self.ordered {
            // lanes are single rows here: what is in memory is checked again by the lease
            self.rewind();
            return;
        }
        self.lanes.entry(key.clone()).or_insert_with(Lane::new).stale = Stale::Yes;
        self.tidy(key);
    }

    /// Aggregates whose pending rows should be read again now. Each must come back by [`Lanes::reread`].
    pub fn take_stale(&mut self, limit: usize) -> Vec<AggregateKey> {
        let mut keys = Vec::new();
        while keys.len() < limit {
            match self.stale.pop_first() {
                Some(key) => {
                    if let Some(lane) = self.lanes.get_mut(&key) {
                        lane.stale = Stale::Reading;
                        keys.push(key);
                    }
                }
                None => break,
            }
        }
        keys
    }

    /// The pending rows of a stale aggregate by number, in order; `more`: there are others after them.
    pub fn reread(&mut self, key: &AggregateKey, held: bool, seqs: &[Seq], more: bool) {
        let Some(lane) = self.lanes.get_mut(key).filter(|lane| lane.stale == Stale::Reading) else { return };
        lane.stale = Stale::No;
        lane.overflow = more;
        lane.waiting = seqs.iter().copied().collect();
        lane.tail = lane.tail.max(seqs.last().copied().unwrap_or(0));
        if held && self.hold {
            lane.waiting.clear();
            lane.overflow = false;
        }
        self.unblock(key);
        self.free(key);
        self.tidy(key);
    }
}
