//! Order within an aggregate, against a model: whatever happens between reading and settling, the stream never shows a
//! later event of an aggregate before an earlier one that is still to come, and nothing is forgotten.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use bytes::Bytes;
use outboxd::domain::event::{AggregateKey, Millis, PendingEvent, Seq};
use outboxd::domain::ordering::{Admission, Asked, Lanes, Row, RunRule};
use proptest::prelude::*;

/// The database and the stream, as simple as can be.
struct World {
    lanes: Lanes,
    now: Millis,
    /// Pending rows: aggregate, attempts, due.
    pending: BTreeMap<Seq, (u8, u32, Option<Millis>)>,
    failed: BTreeSet<(u8, Seq)>,
    /// What was stored, in order, by aggregate.
    stream: HashMap<u8, Vec<Seq>>,
    leased: BTreeSet<Seq>,
    snapshot: Option<Snapshot>,
    next_seq: Seq,
    hold: bool,
    max_run: usize,
    /// Rows that passed a failed head under `skip`, or were scheduled: out of order by the rule.
    excused: BTreeSet<Seq>,
}

/// What a read found, on its way back.
struct Snapshot {
    again: Vec<(AggregateKey, bool, Vec<Seq>)>,
    numbered: Vec<(Asked, Option<(PendingEvent, bool)>)>,
    ahead: Vec<(PendingEvent, bool)>,
}

#[derive(Clone, Debug)]
enum Step {
    Insert(u8),
    Schedule(u8, u16),
    Read(usize),
    Deliver,
    Ship(usize),
    Outcome(usize, Fate),
    Pass(u16),
    /// An operator puts the failed events of an aggregate back.
    Requeue(u8),
    Discard(u8),
    Forget,
}

#[derive(Clone, Copy, Debug)]
enum Fate {
    Stored,
    Retry(u16),
    Fail,
    Park(u16),
    Doubt,
    Unbundle,
}

fn key(aggregate: u8) -> AggregateKey {
    AggregateKey::new("a", &aggregate.to_string())
}

impl World {
    fn new(hold: bool, max_run: usize) -> Self {
        Self {
            lanes: Lanes::new(true, hold),
            now: 1_000_000,
            pending: BTreeMap::new(),
            failed: BTreeSet::new(),
            stream: HashMap::new(),
            leased: BTreeSet::new(),
            snapshot: None,
            next_seq: 1,
            hold,
            max_run,
            excused: BTreeSet::new(),
        }
    }

    fn event(&self, seq: Seq) -> Option<(PendingEvent, bool)> {
        let (aggregate, attempt_count, due_at) = *self.pending.get(&seq)?;
        let held = self.hold && self.failed.iter().any(|(a, s)| *a == aggregate && *s < seq);
        let event = PendingEvent {
            seq,
            key: key(aggregate),
            event_id: seq.to_string(),
            aggregate_version: seq,
            event_type: "t".into(),
            schema_version: 1,
            payload: Bytes::from_static(b"{}"),
            headers_json: None,
            created_at: String::new(),
            created: None,
            due_at,
            attempt_count,
            failing_since: None,
            crashes: 0,
            suspect: None,
        };
        Some((event, held))
    }

    /// Leases a row, if it is still pending.
    fn take(&mut self, event: PendingEvent) {
        if !self.pending.contains_key(&event.seq) {
            return self.lanes.not_leased(&event);
        }
        assert!(self.leased.insert(event.seq), "row {} leased twice", event.seq);
        if let Some(back) = self.lanes.leased(Row { event, token: 1, unknown_since: None, look: false }) {
            self.leased.remove(&back.event.seq);
        }
    }

    /// Takes a snapshot as a read does; what it found is delivered later.
    fn read(&mut self, rows: usize) {
        if self.snapshot.is_some() {
            return;
        }
        self.lanes.read_begins();
        let stale = self.lanes.take_stale(rows);
        let again = stale.into_iter().map(|aggregate| {
            let number: u8 = aggregate.id.parse().unwrap();
            let seqs: Vec<Seq> = self.pending.iter().filter(|(_, row)| row.0 == number).map(|(s, _)| *s).collect();
            let holder = self.failed.iter().filter(|(a, _)| *a == number).map(|(_, s)| *s).min();
            let held = holder.is_some_and(|h| seqs.first().is_none_or(|first| *first > h));
            (aggregate, held, seqs)
        });
        let again = again.collect();
        let asked = self.lanes.ask(rows, self.now);
        let numbered = asked
            .into_iter()
            .map(|asked| {
                let found = self.event(asked.seq);
                (asked, found)
            })
            .collect();
        let ahead = self.pending.range(self.lanes.cursor() + 1..).map(|(s, _)| *s).take(rows);
        let ahead = ahead.filter_map(|seq| self.event(seq)).collect();
        self.snapshot = Some(Snapshot { again, numbered, ahead });
    }

    fn deliver(&mut self) {
        let Some(Snapshot { again, numbered, ahead }) = self.snapshot.take() else { return };
        for (aggregate, held, seqs) in again {
            self.lanes.reread(&aggregate, held, &seqs, false);
        }
        let mut taken = Vec::new();
        for (asked, found) in numbered {
            let admission = self.lanes.answer(&asked, found.as_ref().map(|(e, held)| (e, *held)), self.now);
            if admission == Admission::Take {
                taken.push(found.unwrap().0);
            }
        }
        for (event, held) in ahead {
            let seq = event.seq;
            if self.lanes.admit(&event, held, self.now) == Admission::Take {
                taken.push(event);
            }
            self.lanes.read_up_to(seq);
        }
        taken.sort_by_key(|event| event.seq);
        for event in taken {
            self.take(event);
        }
    }

    /// Ships everything that the window takes; the tickets that are under way.
    fn ship(&mut self, window: usize, tickets: &mut Vec<u64>) {
        self.lanes.expire(self.now);
        let rule = RunRule { max_messages: self.max_run, max_bytes: 1 << 20, look_after: Millis::MAX };
        loop {
            let room = window.saturating_sub(self.lanes.in_flight());
            let Some((ticket, flight)) = self.lanes.next_flight(self.now, room, rule) else { break };
            let numbers: Vec<Seq> =
                flight.rows.iter().map(|r| r.event.seq).filter(|seq| !self.excused.contains(seq)).collect();
            assert!(numbers.windows(2).all(|w| w[0] < w[1]), "a run out of order: {numbers:?}");
            tickets.push(ticket);
        }
    }

    fn outcome(&mut self, ticket: u64, fate: Fate) {
        let Some(flight) = self.lanes.land(ticket) else { return };
        let aggregate: u8 = flight.lane.id.parse().unwrap();
        let head = flight.rows[0].event.seq;
        let lane = flight.lane.clone();
        let single = flight.rows.len() == 1;
        match fate {
            Fate::Stored => {
                for row in &flight.rows {
                    self.store(aggregate, row.event.seq);
                }
                self.lanes.published(&lane, flight.rows.len());
                self.lanes.settled(&lane, flight.rows.len());
            }
            Fate::Retry(wait) if single => {
                let due = self.now + Millis::from(wait) + 1;
                let row = self.pending.get_mut(&head).unwrap();
                (row.1, row.2) = (row.1 + 1, Some(due));
                self.leased.remove(&head);
                let back = self.lanes.retry(&lane, head, due, self.now);
                self.release(back);
                self.lanes.settled(&lane, 1);
            }
            Fate::Fail if single => {
                self.pending.remove(&head);
                self.leased.remove(&head);
                self.failed.insert((aggregate, head));
                let back = self.lanes.failed(&lane, head, self.now);
                self.release(back);
                self.lanes.settled(&lane, 1);
            }
            Fate::Park(wait) => {
                let due = self.now + Millis::from(wait) + 1;
                let numbers: Vec<Seq> = flight.rows.iter().map(|r| r.event.seq).collect();
                let back = self.lanes.park(&lane, &numbers, due, self.now, "refused");
                self.release(flight.rows);
                self.release(back);
            }
            Fate::Doubt | Fate::Retry(_) | Fate::Fail => self.lanes.put_back(&lane, flight.rows),
            Fate::Unbundle => {
                self.lanes.single(&lane, flight.rows.last().unwrap().event.seq);
                self.lanes.put_back(&lane, flight.rows);
            }
        }
    }

    fn release(&mut self, rows: Vec<Row>) {
        for row in rows {
            assert!(self.leased.remove(&row.event.seq), "row {} released twice", row.event.seq);
        }
    }

    /// The broker stores an event: nothing earlier of its aggregate may still be to come.
    fn store(&mut self, aggregate: u8, seq: Seq) {
        let earlier = self.pending.iter().find(|(s, row)| {
            **s < seq && row.0 == aggregate && !self.excused.contains(s) && !self.excused.contains(&seq)
        });
        assert!(earlier.is_none(), "{seq} of aggregate {aggregate} passed {earlier:?}");
        if self.hold && !self.excused.contains(&seq) {
            let holder = self.failed.iter().find(|(a, s)| *a == aggregate && *s < seq);
            assert!(holder.is_none(), "{seq} of aggregate {aggregate} passed the failed {holder:?}");
        }
        self.leased.remove(&seq);
        assert!(self.pending.remove(&seq).is_some(), "{seq} stored twice");
        self.stream.entry(aggregate).or_default().push(seq);
    }

    fn step(&mut self, step: &Step, tickets: &mut Vec<u64>) {
        match *step {
            Step::Insert(aggregate) => {
                self.pending.insert(self.next_seq, (aggregate, 0, None));
                self.next_seq += 1;
            }
            Step::Schedule(aggregate, wait) => {
                self.pending.insert(self.next_seq, (aggregate, 0, Some(self.now + Millis::from(wait) + 1)));
                self.excused.insert(self.next_seq);
                self.next_seq += 1;
            }
            Step::Read(rows) => self.read(rows),
            Step::Deliver => self.deliver(),
            Step::Ship(window) => self.ship(window, tickets),
            Step::Outcome(which, fate) => {
                if !tickets.is_empty() {
                    let ticket = tickets.swap_remove(which % tickets.len());
                    self.outcome(ticket, fate);
                }
            }
            Step::Pass(millis) => self.now += Millis::from(millis),
            Step::Requeue(aggregate) => {
                let mine: Vec<(u8, Seq)> = self.failed.iter().filter(|(a, _)| *a == aggregate).copied().collect();
                for one in mine {
                    self.failed.remove(&one);
                    self.pending.insert(one.1, (aggregate, 0, None));
                    if !self.hold {
                        // its successors have passed it already: an operator's order
                        self.excused.insert(one.1);
                    }
                }
                self.lanes.touch(&key(aggregate));
            }
            Step::Discard(aggregate) => {
                self.failed.retain(|(a, _)| *a != aggregate);
                self.lanes.touch(&key(aggregate));
            }
            Step::Forget => {
                // a crash: memory is lost, the leases are rescued
                self.lanes = Lanes::new(true, self.hold);
                self.leased.clear();
                self.snapshot = None;
                tickets.clear();
            }
        }
    }

    /// With a broker that stores everything, all that is not held ends in the stream.
    fn finish(&mut self, tickets: &mut Vec<u64>) {
        for _ in 0..10_000 {
            self.now += 100_000;
            self.read(64);
            self.deliver();
            self.ship(64, tickets);
            for ticket in std::mem::take(tickets) {
                self.outcome(ticket, Fate::Stored);
            }
            let free = self
                .pending
                .iter()
                .any(|(seq, row)| !self.hold || !self.failed.iter().any(|(a, s)| *a == row.0 && s < seq));
            if !free && self.lanes.is_quiet() {
                assert!(self.leased.is_empty(), "leases left over: {:?}", self.leased);
                return;
            }
        }
        panic!("rows are stuck: {:?}, failed {:?}, lanes {:#?}", self.pending, self.failed, self.lanes);
    }
}

fn fate() -> impl Strategy<Value = Fate> {
    prop_oneof![
        6 => Just(Fate::Stored),
        1 => (0..500u16).prop_map(Fate::Retry),
        1 => Just(Fate::Fail),
        1 => (0..500u16).prop_map(Fate::Park),
        1 => Just(Fate::Doubt),
        1 => Just(Fate::Unbundle),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..4u8).prop_map(Step::Insert),
        1 => (0..4u8, 0..500u16).prop_map(|(a, w)| Step::Schedule(a, w)),
        4 => (1..8usize).prop_map(Step::Read),
        4 => Just(Step::Deliver),
        4 => (1..8usize).prop_map(Step::Ship),
        6 => (0..8usize, fate()).prop_map(|(n, f)| Step::Outcome(n, f)),
        2 => (0..400u16).prop_map(Step::Pass),
        1 => (0..4u8).prop_map(Step::Requeue),
        1 => (0..4u8).prop_map(Step::Discard),
        1 => Just(Step::Forget),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, failure_persistence: None, ..ProptestConfig::default() })]

    /// I5: per aggregate nothing overtakes an unsettled head; I8: nothing is lost.
    #[test]
    fn nothing_overtakes_and_nothing_is_lost(
        hold in any::<bool>(),
        max_run in 1..6usize,
        steps in prop::collection::vec(step(), 1..120),
    ) {
        let mut world = World::new(hold, max_run);
        let mut tickets = Vec::new();
        for step in &steps {
            world.step(step, &mut tickets);
        }
        world.finish(&mut tickets);
    }
}
