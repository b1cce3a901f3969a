//! What becomes of rows whose outcome is known: verdicts, parking, doubt.

use super::{PublisherState, STALL_AFTER, settlement};
use crate::domain::event::{AggregateKey, Millis};
use crate::domain::ordering::{Flight, Row};
use crate::domain::settle::{self, Attempt, Class, Decision, Duplicate, Outcome, Verdict};
use crate::limits;
use crate::ports::{Report, Unreadable, Whereabouts};
use crate::telemetry::metrics::FailReason;

impl PublisherState {
    pub(super) fn on_reports(&mut self, reports: Vec<Report>) {
        let now = self.now();
        for report in reports {
            let Some(flight) = self.lanes.land(report.ticket) else { continue };
            let took = std::time::Duration::from_millis((now - flight.sent_at).max(0).unsigned_abs());
            self.args.metrics.attempted(&report.outcome, flight.rows.len() as u64, took);
            match &report.outcome {
                Outcome::Stored { stream_seq, .. } => self.on_stored(flight, *stream_seq, &report.outcome, now),
                outcome => self.on_trouble(flight, outcome, now),
            }
        }
    }

    fn on_stored(&mut self, flight: Flight, last: u64, outcome: &Outcome, now: Millis) {
        self.acked(now);
        self.last_stream_seq = self.last_stream_seq.max(last);
        let first = last.saturating_sub(flight.rows.len() as u64 - 1);
        for (row, stream_seq) in flight.rows.iter().zip(first..) {
            let note = match settle::decide(outcome, attempt(row, 0), &self.args.rules.retry, now, 0.0) {
                Decision::Settle(Verdict::Published { note, .. }) => note,
                _ => None,
            };
            self.publish(row, stream_seq, note, now);
        }
        self.lanes.published(&flight.lane, flight.rows.len());
        self.note_settling(&flight.lane, flight.rows.len());
    }

    fn publish(&mut self, row: &Row, stream_seq: u64, note: Option<String>, now: Millis) {
        if let Some(created) = row.event.created {
            self.args.metrics.delivered(created, now);
        }
        self.next.settlements.push(settlement(row, Verdict::Published { stream_seq, note }));
        self.done_with(row.token);
    }

    /// An ack arrived: the broker works.
    fn acked(&mut self, now: Millis) {
        self.args.pulse.beat(now);
        self.misses = 0;
        if self.stalled.take().is_some() {
            tracing::info!(publisher = self.args.index, "publishes are acked again");
            self.lanes.unpark(false);
        }
    }

    fn on_trouble(&mut self, flight: Flight, outcome: &Outcome, now: Millis) {
        let is_row_fault = matches!(outcome, Outcome::Refused { class: Class::Row | Class::Counted, .. });
        if flight.rows.len() > 1 && (is_row_fault || matches!(outcome, Outcome::Collision { .. })) {
            // which one of the run it was shows when they go out one by one
            return self.unbundle(flight);
        }
        let Some(head) = flight.rows.first() else { return };
        let facts = attempt(head, self.lanes.parked_before(&flight.lane));
        match settle::decide(outcome, facts, &self.args.rules.retry, now, self.args.dice.draw()) {
            Decision::Settle(verdict) => self.settle_head(flight, verdict, outcome, now),
            Decision::Park { delay, reason } => {
                self.miss(now);
                let due = now.saturating_add(delay.as_millis().try_into().unwrap_or(Millis::MAX / 4));
                let numbers: Vec<_> = flight.rows.iter().map(|row| row.event.seq).collect();
                let back = self.lanes.park(&flight.lane, &numbers, due, now, &reason);
                self.give_back(flight.rows.into_iter().chain(back));
            }
            Decision::AwaitLink { unknown, reason } => self.doubt(flight, unknown, &reason, now),
            Decision::Unbundle => self.unbundle(flight),
        }
    }

    fn unbundle(&mut self, flight: Flight) {
        if let Some(last) = flight.rows.last() {
            self.lanes.single(&flight.lane, last.event.seq);
        }
        self.lanes.put_back(&flight.lane, flight.rows);
    }

    /// The outcome is not known, or the link is at fault: the rows stay leased and are sent again, after a look where
    /// the doubt has lasted.
    fn doubt(&mut self, flight: Flight, unknown: bool, reason: &str, now: Millis) {
        let Flight { lane, mut rows, sent_at, .. } = flight;
        if unknown {
            for row in &mut rows {
                row.unknown_since.get_or_insert(sent_at);
            }
        }
        self.lanes.put_back(&lane, rows);
        if self.link.borrow().topology().is_none() {
            return;
        }
        // the link says that it is up: only the stream itself can tell what is wrong
        self.args.broker.suspect();
        self.miss(now);
        if unknown && self.args.pulse.last() > sent_at {
            // others were acked meanwhile: it is this subject
            let attempt = self.lanes.parked_before(&lane).saturating_add(1);
            let delay = self.args.rules.retry.backoff.delay(attempt, self.args.dice.draw());
            let due = now.saturating_add(delay.as_millis().try_into().unwrap_or(Millis::MAX / 4));
            self.lanes.park_in_place(&lane, due, now, reason);
        } else if self.stalled.is_none() {
            self.stall(now, reason);
        }
    }

    /// A refusal or a time-out; many of them without an ack mean that it is the broker.
    fn miss(&mut self, now: Millis) {
        self.misses = self.misses.saturating_add(1);
        if self.misses >= STALL_AFTER && self.stalled.is_none() && self.args.pulse.last() + probe() < now {
            self.args.broker.suspect();
            self.stall(now, "many publishes in a row are refused or not answered");
        }
    }

    fn stall(&mut self, now: Millis, reason: &str) {
        tracing::warn!(publisher = self.args.index, reason, "nothing is acked; probing once a second");
        self.stalled = Some(now + probe());
    }

    /// The verdict on a single row that was not stored.
    fn settle_head(&mut self, flight: Flight, verdict: Verdict, outcome: &Outcome, now: Millis) {
        let Flight { lane, rows, .. } = flight;
        let Some(row) = rows.into_iter().next() else { return };
        if row.unknown_since.is_some() {
            // an earlier try may be stored: whoever sends it again looks first
            let unknown = self.unknown(&row);
            self.next.unknown.push(unknown);
        }
        self.next.settlements.push(settlement(&row, verdict.clone()));
        self.done_with(row.token);
        let back = match &verdict {
            Verdict::RetryAt { available_at, .. } => {
                self.args.metrics.retried();
                self.lanes.retry(&lane, row.event.seq, *available_at, now)
            }
            Verdict::Failed { reason } => {
                tracing::warn!(seq = row.event.seq, event_id = %row.event.event_id, reason, "event failed");
                self.args.metrics.failed(match outcome {
                    Outcome::Collision { .. } => FailReason::collision,
                    Outcome::Refused { class: Class::Row, .. } => FailReason::row,
                    _ => FailReason::exhausted,
                });
                self.lanes.failed(&lane, row.event.seq, now)
            }
            Verdict::Published { .. } | Verdict::Release => Vec::new(),
        };
        self.note_settling(&lane, 1);
        self.give_back(back);
    }

    /// Remembers whose settlement is on its way, to tell the lane when it is committed.
    pub(super) fn note_settling(&mut self, lane: &AggregateKey, rows: usize) {
        self.next_lanes.push((lane.clone(), rows));
    }

    pub(super) fn on_looked(&mut self, asked: Vec<(u64, usize)>, found: Result<Vec<Whereabouts>, Unreadable>) {
        let now = self.now();
        let mut found = match found {
            Ok(found) => found.into_iter(),
            Err(unreadable) => {
                tracing::debug!(error = %unreadable, "could not look for events of unknown fate");
                for (ticket, _) in asked {
                    if let Some(mut flight) = self.lanes.land(ticket) {
                        flight.rows.iter_mut().for_each(|row| row.look = true);
                        self.lanes.put_back(&flight.lane, flight.rows);
                    }
                }
                if self.link.borrow().topology().is_some() && self.stalled.is_none() {
                    self.stall(now, "the stream cannot be read");
                }
                return;
            }
        };
        if self.stalled.is_some() && self.args.pulse.last() >= now - probe() {
            self.stalled = None;
        }
        for (ticket, rows) in asked {
            let answers: Vec<Whereabouts> = found.by_ref().take(rows).collect();
            if let Some(flight) = self.lanes.land(ticket) {
                self.on_whereabouts(flight, answers, now);
            }
        }
    }

    fn on_whereabouts(&mut self, flight: Flight, answers: Vec<Whereabouts>, now: Millis) {
        let Flight { lane, rows, .. } = flight;
        let (mut missing, mut stored) = (Vec::new(), 0);
        let mut rows = rows.into_iter().zip(answers);
        for (mut row, answer) in rows.by_ref() {
            match answer {
                Whereabouts::Stored { stream_seq } => {
                    self.args.metrics.attempted(
                        &Outcome::Stored { stream_seq, duplicate: Duplicate::Same },
                        1,
                        std::time::Duration::ZERO,
                    );
                    self.publish(&row, stream_seq, None, now);
                    stored += 1;
                }
                Whereabouts::Missing => {
                    row.look = false;
                    row.unknown_since = None;
                    missing.push(row);
                }
                Whereabouts::Differs { stream_seq, detail } => {
                    let outcome = Outcome::Collision { stream_seq, detail };
                    if missing.is_empty() {
                        let rest: Vec<Row> = rows.map(|(row, _)| row).collect();
                        // before anything that could end the lane
                        if !rest.is_empty() {
                            self.lanes.put_back(&lane, rest);
                        }
                        if stored > 0 {
                            self.lanes.published(&lane, stored);
                            self.note_settling(&lane, stored);
                        }
                        let single = Flight { lane, rows: vec![row], sent_at: now, looking: false, alone: false };
                        return self.on_trouble(single, &outcome, now);
                    }
                    missing.push(row);
                }
            }
        }
        if stored > 0 {
            self.lanes.published(&lane, stored);
            self.note_settling(&lane, stored);
        }
        self.lanes.put_back(&lane, missing);
    }
}

fn attempt(row: &Row, parked_before: u32) -> Attempt {
    Attempt { attempts_before: row.event.attempt_count, failing_since: row.event.failing_since, parked_before }
}

fn probe() -> Millis {
    Millis::try_from(limits::PROBE.as_millis()).unwrap_or(1_000)
}
