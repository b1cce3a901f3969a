//! The sending side of [`Lanes`]: flights, and what becomes of their rows.

use super::{AggregateKey, Block, CRASHES_BEFORE_ALONE, Flight, Lane, Lanes, Millis, Row, RunRule, Seq, Ticket};

impl Lanes {
    /// Lanes whose wait is over are free again.
    pub fn expire(&mut self, now: Millis) {
        while self.due.first().is_some_and(|(due, _)| *due <= now) {
            let Some((_, key)) = self.due.pop_first() else { break };
            self.unblock(&key);
            self.tidy(&key);
        }
    }

    /// Puts the next flight together, of at most `room` messages. Its lane sends nothing else until it has landed.
    ///
    /// A row that nobody has known the fate of for `rule.look_after` is looked for instead of sent.
    pub fn next_flight(&mut self, now: Millis, room: usize, rule: RunRule) -> Option<(Ticket, &Flight)> {
        if room == 0 || self.alone {
            return None;
        }
        let key = self.next_queued()?;
        let lane = self.lanes.get_mut(&key)?;
        let head = lane.ready.front()?;
        let (looking, alone) = (rule.must_look(head, now), head.event.crashes >= CRASHES_BEFORE_ALONE);
        if alone && self.in_flight > 0 {
            lane.queued = true;
            self.queue.push_front(key);
            return None;
        }
        let most = if alone || head.event.seq <= lane.single_until { 1 } else { rule.max_messages.min(room) };
        let (mut rows, mut bytes) = (Vec::new(), 0);
        while let Some(row) = lane.ready.front() {
            let weight = row.event.weight();
            let fits = rows.is_empty()
                || (rule.must_look(row, now) == looking
                    && rows.len() < most
                    && (looking || bytes + weight <= rule.max_bytes));
            if !fits || (!rows.is_empty() && row.event.crashes >= CRASHES_BEFORE_ALONE) {
                break;
            }
            bytes += weight;
            rows.extend(lane.ready.pop_front());
        }
        lane.flight = true;
        self.ready_rows -= rows.len();
        self.in_flight += rows.len();
        self.alone = alone;
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        let flight = Flight { lane: key, rows, sent_at: now, looking, alone };
        Some((ticket, self.flights.entry(ticket).or_insert(flight)))
    }

    /// Lanes that have something to send or on its way: how many messages can be in flight without runs.
    pub fn breadth(&self) -> usize {
        self.queue.len() + self.flights.len()
    }

    /// The next lane that may send; those that were blocked since they were queued leave the queue.
    fn next_queued(&mut self) -> Option<AggregateKey> {
        loop {
            let key = self.queue.pop_front()?;
            let Some(lane) = self.lanes.get_mut(&key) else { continue };
            lane.queued = false;
            if lane.block == Block::Free && !lane.flight && !lane.ready.is_empty() {
                return Some(key);
            }
        }
    }

    /// Shortens a flight to its first `keep` rows (at least one); the others go back to their lane.
    pub fn shorten(&mut self, ticket: Ticket, keep: usize) {
        let Some(flight) = self.flights.get_mut(&ticket) else { return };
        let back = flight.rows.split_off(keep.max(1).min(flight.rows.len()));
        self.in_flight -= back.len();
        self.ready_rows += back.len();
        if let Some(lane) = self.lanes.get_mut(&flight.lane) {
            for row in back.into_iter().rev() {
                lane.ready.push_front(row);
            }
        }
    }

    /// A flight of this number is under way.
    pub fn flight(&self, ticket: Ticket) -> Option<&Flight> {
        self.flights.get(&ticket)
    }

    /// Takes a flight whose outcome is known. Every row of it must then be given to one of the functions below,
    /// the earliest first.
    pub fn land(&mut self, ticket: Ticket) -> Option<Flight> {
        let flight = self.flights.remove(&ticket)?;
        self.in_flight -= flight.rows.len();
        self.bytes -= flight.rows.iter().map(|row| row.event.weight()).sum::<usize>();
        if flight.alone {
            self.alone = false;
        }
        if let Some(lane) = self.lanes.get_mut(&flight.lane) {
            lane.flight = false;
        }
        Some(flight)
    }

    /// `rows` rows of the lane are stored; their settlement is under way.
    pub fn published(&mut self, key: &AggregateKey, rows: usize) {
        if let Some(lane) = self.lanes.get_mut(key) {
            lane.unsettled += rows;
            lane.parked_before = 0;
        }
        self.tidy(key);
    }

    /// Rows are to be sent again, in this order, before everything else of their lane.
    pub fn put_back(&mut self, key: &AggregateKey, rows: Vec<Row>) {
        if let Some(lane) = self.lanes.get_mut(key) {
            for row in rows.into_iter().rev() {
                self.ready_rows += 1;
                self.bytes += row.event.weight();
                lane.ready.push_front(row);
            }
        }
        self.tidy(key);
    }

    /// Up to this number the lane sends one event at a time.
    pub fn single(&mut self, key: &AggregateKey, until: Seq) {
        if let Some(lane) = self.lanes.get_mut(key) {
            lane.single_until = until;
        }
    }

    /// The head failed by itself and is tried again at `due`; its settlement is under way. What comes back is to be
    /// released.
    pub fn retry(&mut self, key: &AggregateKey, head: Seq, due: Millis, now: Millis) -> Vec<Row> {
        let back = self.empty(key, &[head]);
        if let Some(lane) = self.lanes.get_mut(key) {
            lane.unsettled += 1;
        }
        self.block(key, due, false, now, "waits for its retry".into());
        // armed by `settled`: the row must be read again with its new count
        back
    }

    /// The head was withdrawn; its settlement is under way. What comes back is to be released.
    pub fn failed(&mut self, key: &AggregateKey, head: Seq, now: Millis) -> Vec<Row> {
        let hold = self.ordered && self.hold;
        let back = if hold { self.empty(key, &[]) } else { Vec::new() };
        let mut earlier = Vec::new();
        self.unblock(key);
        if let Some(lane) = self.lanes.get_mut(key) {
            lane.unsettled += 1;
            if hold {
                // scheduled rows whose instant came late stand before the head: it does not hold them
                earlier.extend(lane.waiting.range(..head));
                lane.waiting.clear();
                lane.overflow = false;
                lane.block = Block::Held;
            }
        }
        for seq in earlier {
            self.schedule(seq, now);
        }
        self.tidy(key);
        back
    }

    /// The subject of these rows is refused and they are not stored: the lane waits until `due`, not counted. What
    /// comes back is to be released.
    pub fn park(&mut self, key: &AggregateKey, rows: &[Seq], due: Millis, now: Millis, reason: &str) -> Vec<Row> {
        let back = self.empty(key, rows);
        self.park_in_place(key, due, now, reason);
        back
    }

    /// Like [`Lanes::park`] for a lane whose head may be stored: its rows stay leased and in memory.
    pub fn park_in_place(&mut self, key: &AggregateKey, due: Millis, now: Millis, reason: &str) {
        if let Some(lane) = self.lanes.get_mut(key) {
            lane.parked_before = lane.parked_before.saturating_add(1);
        }
        self.block(key, due, true, now, reason.to_owned());
        self.arm(key);
        self.tidy(key);
    }

    /// Parked lanes are free again: all of them, or (`one`) the one that has waited longest. How many.
    pub fn unpark(&mut self, one: bool) -> usize {
        let parked = |(_, lane): &(&AggregateKey, &Lane)| matches!(lane.block, Block::Until { parked: true, .. });
        let mut keys: Vec<AggregateKey> = if one {
            let oldest = self.due.iter().find(|(_, key)| self.lanes.get_key_value(key).is_some_and(|e| parked(&e)));
            oldest.map(|(_, key)| key.clone()).into_iter().collect()
        } else {
            self.lanes.iter().filter(parked).map(|(key, _)| key.clone()).collect()
        };
        keys.sort_unstable();
        for key in &keys {
            self.unblock(key);
            self.tidy(key);
        }
        keys.len()
    }

    /// The verdicts of `rows` rows of the lane are committed.
    pub fn settled(&mut self, key: &AggregateKey, rows: usize) {
        if let Some(lane) = self.lanes.get_mut(key) {
            lane.unsettled = lane.unsettled.saturating_sub(rows);
            if lane.unsettled == 0 {
                self.arm(key);
            }
        }
        self.tidy(key);
    }

    /// Gives back every leased row that is not in flight: a drain, or a pause. Rows whose outcome is unknown come
    /// first in the pair.
    pub fn release_all(&mut self) -> (Vec<Row>, Vec<Row>) {
        let (mut unknown, mut unsent) = (Vec::new(), Vec::new());
        let keys: Vec<AggregateKey> = self.lanes.keys().cloned().collect();
        for key in keys {
            for row in self.empty(&key, &[]) {
                if row.unknown_since.is_some() || row.look { unknown.push(row) } else { unsent.push(row) }
            }
            self.tidy(&key);
        }
        (unknown, unsent)
    }
}
