//! Filling the window, and handing verdicts to the writer.

use std::sync::Arc;

use super::{PublisherMsg, PublisherState, STORE_PAUSE, settlement, window};
use crate::actors::writer::Kind;
use crate::domain::event::Millis;
use crate::domain::ordering::{RunRule, Ticket};
use crate::domain::settle::{Verdict, reason};
use crate::domain::wire::{self, Illegal};
use crate::limits;
use crate::ports::{Message, Shipment, Sought, Topology};
use crate::store::error::Result;
use crate::store::lease::{self, Fenced, SettleRequest};
use crate::telemetry::metrics::FailReason;

/// Runs of one publisher that may be in flight at once: a stream takes 50 batches at a time.
const RUNS: usize = 16;
/// With so many lanes their heads alone keep the broker busy (docs/adr/0005): no runs. They are for few aggregates with
/// many events each, and leave three `Nats-Batch-*` headers on each message.
const NARROW: usize = 24;
/// A run shorter than this goes out message by message: an atomic batch of 50 took 18 ms and one of 200 took 19, where a
/// message alone takes 0.11 (docs/adr/0005).
const SHORTEST_RUN: usize = 128;

impl PublisherState {
    /// Ships flights while there is room in the window.
    pub(super) fn fill_window(&mut self, now: Millis, topology: &Arc<Topology>) {
        if self.stalled.is_some() {
            // one probe; its ack ends the stall
            self.stalled = Some(now + Millis::try_from(limits::PROBE.as_millis()).unwrap_or(1_000));
            self.lanes.unpark(true);
        }
        let most = if self.stalled.is_some() { 1 } else { window(self.args.publishers) };
        let look_after = Millis::try_from(topology.duplicate_window.as_millis() / 2).unwrap_or(Millis::MAX);
        let rules = self.args.rules.clone();
        let (mut shipments, mut sought, mut looking) = (Vec::new(), Vec::new(), Vec::new());
        let narrow = self.lanes.breadth() < NARROW;
        let mut runs = 0;
        loop {
            let room = most.saturating_sub(self.lanes.in_flight());
            let run = narrow && topology.atomic && runs < RUNS && room >= SHORTEST_RUN && self.stalled.is_none();
            let rule = RunRule {
                max_messages: if run { topology.max_batch } else { 1 },
                max_bytes: rules.batch_bytes,
                look_after,
            };
            let Some((ticket, flight)) = self.lanes.next_flight(now, room, rule) else { break };
            if flight.looking {
                looking.push((ticket, flight.rows.len()));
                self.seek(ticket, &mut sought);
                continue;
            }
            if flight.rows.len() < SHORTEST_RUN {
                self.lanes.shorten(ticket, 1);
            }
            if let Some(shipment) = self.shipment(ticket, topology) {
                runs += usize::from(shipment.messages.len() > 1);
                shipments.push(shipment);
            }
        }
        if !shipments.is_empty() {
            self.outlet.ship(shipments);
        }
        if !sought.is_empty() {
            let (broker, to) = (self.args.broker.clone(), self.myself.clone());
            tokio::spawn(async move {
                let found = broker.look_up(sought).await;
                let _ = to.cast(PublisherMsg::Looked(looking, found));
            });
        }
    }

    /// The messages of a flight. Rows that can never be sent are failed here; the rest of such a flight goes back.
    fn shipment(&mut self, ticket: Ticket, topology: &Topology) -> Option<Shipment> {
        let flight = self.lanes.flight(ticket)?;
        let mut messages = Vec::with_capacity(flight.rows.len());
        let mut fault = None;
        for row in &flight.rows {
            let rules = &self.args.rules;
            match wire::message(&row.event, &rules.source, &rules.template, rules.format)
                .map_err(|illegal| illegal_reason(&illegal))
                .and_then(|message| within(message, topology))
            {
                Ok(message) => messages.push(message),
                Err(why) => {
                    fault = Some(why);
                    break;
                }
            }
        }
        match fault {
            Some(why) if messages.is_empty() => {
                self.lanes.shorten(ticket, 1);
                self.fail_head(ticket, why);
                None
            }
            Some(_) => {
                self.lanes.shorten(ticket, messages.len());
                Some(Shipment { ticket, messages })
            }
            None => Some(Shipment { ticket, messages }),
        }
    }

    /// Withdraws the only row of a flight that was never sent.
    fn fail_head(&mut self, ticket: Ticket, why: String) {
        let Some(flight) = self.lanes.land(ticket) else { return };
        let Some(row) = flight.rows.first() else { return };
        tracing::warn!(seq = row.event.seq, event_id = %row.event.event_id, reason = %why, "event failed");
        self.args.metrics.failed(FailReason::row);
        self.next.settlements.push(settlement(row, Verdict::Failed { reason: reason(&why) }));
        self.done_with(row.token);
        let now = self.now();
        let back = self.lanes.failed(&flight.lane, row.event.seq, now);
        self.note_settling(&flight.lane, 1);
        self.give_back(back);
        self.send_settlements(now);
    }

    fn seek(&self, ticket: Ticket, sought: &mut Vec<Sought>) {
        let Some(flight) = self.lanes.flight(ticket) else { return };
        let created = self.link.borrow().topology().map(|t| t.created.clone()).unwrap_or_default();
        for row in &flight.rows {
            let unknown = self.unknown(row);
            // a stream that was made anew counts from one again
            let floor = if unknown.stream_created == created { unknown.floor } else { 0 };
            let rules = &self.args.rules;
            let subject_and_id = wire::message(&row.event, &rules.source, &rules.template, rules.format);
            let (subject, msg_id, payload) = match subject_and_id {
                Ok(message) => (message.subject, message.msg_id, message.payload),
                // it cannot have been sent: found missing, then failed when it is shipped
                Err(_) => (String::new(), wire::msg_id(&rules.source, &row.event.event_id), row.event.payload.clone()),
            };
            sought.push(Sought { ticket, subject, msg_id, payload, floor });
        }
    }

    /// Hands the verdicts that have come together to the writer, unless it still has the last ones.
    pub(super) fn send_settlements(&mut self, now: Millis) {
        if self.settling {
            return;
        }
        let request = match &self.settle_again {
            Some((at, _)) if *at > now => return,
            Some((_, request)) => request.clone(),
            None => {
                if self.next.settlements.is_empty() && self.next.finished.is_empty() && self.next.unknown.is_empty() {
                    return;
                }
                let mut request = std::mem::take(&mut self.next);
                request.epoch = self.args.epoch;
                request.now = now;
                request.hold = self.args.rules.hold;
                request.stream = self.stream.clone();
                self.settling_lanes.append(&mut self.next_lanes);
                Arc::new(request)
            }
        };
        self.settling = true;
        let (writer, to) = (self.args.writer.clone(), self.myself.clone());
        tokio::spawn(async move {
            let job = request.clone();
            let result = writer.write(Kind::Settle, move |tx| lease::settle(tx, &job)).await;
            let _ = to.cast(PublisherMsg::Settled(request, result));
        });
    }

    pub(super) fn on_settled(&mut self, request: Arc<SettleRequest>, result: Result<Fenced<usize>>) {
        self.settling = false;
        match result {
            Ok(Fenced::Applied(_)) => {
                self.settle_again = None;
                let mut published = 0;
                for (lane, rows) in self.settling_lanes.drain(..) {
                    self.lanes.settled(&lane, rows);
                }
                for one in &request.settlements {
                    published += u64::from(matches!(one.verdict, Verdict::Published { .. }));
                }
                self.args.metrics.published(published);
            }
            Ok(Fenced::Lost) => self.lose(),
            Err(error) => {
                self.report_store("cannot store what was published; nothing more is sent until it can be", &error);
                self.settle_again = Some((self.now() + STORE_PAUSE, request));
            }
        }
    }
}

/// Checks the size before the wire: the server would drop the connection.
fn within(message: Message, topology: &Topology) -> std::result::Result<Message, String> {
    let size = message.wire_size();
    if size <= topology.max_message {
        return Ok(message);
    }
    Err(format!(
        "too large: {size} bytes with its headers, and the limit of the server or the stream is {} bytes",
        topology.max_message
    ))
}

fn illegal_reason(illegal: &Illegal) -> String {
    illegal.to_string()
}
