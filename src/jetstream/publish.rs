//! What is on its way: shipments that wait for the client, publishes that wait for their ack, reports that go home.
//!
//! Invariants: every ticket is reported exactly once: a [`Consignment`] or [`Dispatch`] that is dropped, for whatever
//! reason, reports what it still holds. Ids of flights are never used twice on a connection, and the ack inbox belongs
//! to one connection: a late ack finds nothing. At most [`RUNS`] atomic batches are taken at a time; what comes above is
//! to be sent one by one, which is faster than waiting: the server stages each batch in files of its own.
//!
//! May import: domain, limits, ports, async_nats.

use std::borrow::Cow;
use std::collections::{HashMap, VecDeque};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use async_nats::header::HeaderMap;
use async_nats::message::OutboundMessage;
use async_nats::{Client, HeaderName, HeaderValue, Subject};
use bytes::Bytes;
use futures_util::Sink;
use tokio::time::Instant;

use super::outcome;
use crate::domain::settle::{Class, Outcome};
use crate::ports::{Message, Report, ReportSink, Shipment};

/// Atomic batches in flight. The server takes 50 a stream, and other daemons may share it.
const RUNS: usize = 24;

/// Messages handed to the client at a time, before its own task gets the thread to write them.
const SLICE: usize = 64;

/// Where the reports of one outlet go.
pub(super) struct Desk(pub(super) ReportSink);

impl Desk {
    fn report(&self, reports: Vec<Report>) {
        // a publisher that is gone needs no reports: its leases are rescued
        let _ = self.0.send(reports);
    }
}

/// Shipments of one outlet; what is not taken out is reported as not sent.
pub(super) struct Consignment {
    desk: Arc<Desk>,
    shipments: std::vec::IntoIter<Shipment>,
}

impl Consignment {
    pub(super) fn new(desk: Arc<Desk>, shipments: Vec<Shipment>) -> Self {
        Self { desk, shipments: shipments.into_iter() }
    }
}

impl Drop for Consignment {
    fn drop(&mut self) {
        let left: Vec<Report> =
            self.shipments.by_ref().map(|s| Report { ticket: s.ticket, outcome: Outcome::NotSent }).collect();
        if !left.is_empty() {
            self.desk.report(left);
        }
    }
}

/// What a duplicate is compared with.
#[derive(Clone, Debug)]
pub(super) struct Kept {
    pub(super) subject: Subject,
    pub(super) msg_id: String,
    pub(super) payload: Bytes,
}

/// A shipment that the client has not taken whole yet.
struct Parcel {
    desk: Arc<Desk>,
    ticket: u64,
    messages: std::vec::IntoIter<Message>,
    run: Option<Run>,
    expires: Instant,
}

struct Run {
    batch_id: String,
    length: usize,
    next: usize,
}

/// A publish that waits for its ack.
pub(super) struct Flight {
    desk: Arc<Desk>,
    ticket: u64,
    /// The last message of a run.
    pub(super) kept: Kept,
    /// Messages: 1, or the length of the run.
    pub(super) count: usize,
    /// What was seen that is no answer yet: told if none comes.
    pub(super) note: Option<String>,
}

/// Everything on its way over one connection.
pub(super) struct Dispatch {
    /// `_INBOX.xyz.`: a flight's id follows.
    inbox: String,
    stream: HeaderValue,
    ack_wait: Duration,
    next_id: u64,
    /// Messages ever sent, and of these the ones that were reported.
    sent: u64,
    settled: u64,
    singles: VecDeque<Parcel>,
    runs: VecDeque<Parcel>,
    flights: HashMap<u64, Flight>,
    runs_flying: usize,
    /// In the order of sending, which is the order of expiry; entries of answered flights are skipped.
    deadlines: VecDeque<(Instant, u64)>,
    home: Vec<(Arc<Desk>, Vec<Report>)>,
}

/// How far [`Dispatch::pump`] came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pumped {
    /// Nothing more can go now.
    Idle,
    /// A slice went; there is more.
    More,
    /// The client's queue is full; the task is woken when there is room.
    Full,
}

enum Handed {
    Done,
    Full,
    Refused(Outcome),
}

impl Dispatch {
    pub(super) fn new(inbox: String, stream: &str, ack_wait: Duration) -> Self {
        let stream = stream.parse().unwrap_or_default();
        Self {
            inbox,
            stream,
            ack_wait,
            next_id: 0,
            sent: 0,
            settled: 0,
            singles: VecDeque::new(),
            runs: VecDeque::new(),
            flights: HashMap::new(),
            runs_flying: 0,
            deadlines: VecDeque::new(),
            home: Vec::new(),
        }
    }

    /// Takes shipments over; they are sent by [`Dispatch::pump`].
    pub(super) fn accept(&mut self, mut consignment: Consignment, now: Instant) {
        let expires = now + self.ack_wait;
        for shipment in consignment.shipments.by_ref() {
            let is_run = shipment.messages.len() > 1;
            if is_run && self.runs_flying + self.runs.len() >= RUNS {
                push(
                    &mut self.home,
                    &consignment.desk,
                    Report { ticket: shipment.ticket, outcome: Outcome::KnownIdInRun },
                );
                continue;
            }
            let run = is_run.then(|| Run { batch_id: batch_id(), length: shipment.messages.len(), next: 1 });
            let queue = if run.is_some() { &mut self.runs } else { &mut self.singles };
            queue.push_back(Parcel {
                desk: consignment.desk.clone(),
                ticket: shipment.ticket,
                messages: shipment.messages.into_iter(),
                run,
                expires,
            });
        }
    }

    /// Hands up to a slice of messages to the client, single ones first come first served, runs within their ceiling.
    pub(super) fn pump(&mut self, client: &mut Client, cx: &mut Context<'_>, now: Instant) -> Pumped {
        for _ in 0..SLICE {
            let run_goes_on = self.runs.front().and_then(|p| p.run.as_ref()).is_some_and(|run| run.next > 1);
            let run_may_start = self.runs_flying < RUNS && !self.runs.is_empty();
            let from_runs =
                run_goes_on || (run_may_start && (self.singles.is_empty() || self.next_id.is_multiple_of(2)));
            let queue = if from_runs { &mut self.runs } else { &mut self.singles };
            let Some(mut parcel) = queue.pop_front() else { return Pumped::Idle };
            match self.send_next(&mut parcel, client, cx, now) {
                Handed::Done if parcel.messages.len() == 0 => {}
                Handed::Done => self.runs.push_front(parcel),
                Handed::Full => {
                    let queue = if from_runs { &mut self.runs } else { &mut self.singles };
                    queue.push_front(parcel);
                    return Pumped::Full;
                }
                Handed::Refused(outcome) => self.tell(&parcel.desk.clone(), parcel.ticket, outcome),
            }
        }
        Pumped::More
    }

    /// Sends the next message of a parcel; with the last one it becomes a flight.
    fn send_next(&mut self, parcel: &mut Parcel, client: &mut Client, cx: &mut Context<'_>, now: Instant) -> Handed {
        match Pin::new(&mut *client).poll_ready(cx) {
            Poll::Pending => return Handed::Full,
            Poll::Ready(Err(_)) => return Handed::Refused(Outcome::NotSent),
            Poll::Ready(Ok(())) => {}
        }
        let Some(message) = parcel.messages.next() else { return Handed::Done };
        let last = parcel.messages.len() == 0;
        let id = self.next_id;
        let kept =
            Kept { subject: message.subject.into(), msg_id: message.msg_id.clone(), payload: message.payload.clone() };
        let headers = match self.headers(message.msg_id, message.headers, parcel.run.as_ref(), last) {
            Ok(headers) => headers,
            Err(detail) => return Handed::Refused(self.row_fault(parcel, detail)),
        };
        if kept.subject.is_empty() || kept.subject.bytes().any(|b| b.is_ascii_whitespace() || b.is_ascii_control()) {
            let detail = format!("illegal subject {:?}", kept.subject.as_str());
            return Handed::Refused(self.row_fault(parcel, detail));
        }
        let outbound = OutboundMessage {
            subject: kept.subject.clone(),
            reply: last.then(|| format!("{}{id}", self.inbox).into()),
            payload: message.payload,
            headers: Some(headers),
        };
        if let Err(error) = Pin::new(client).start_send(outbound) {
            let outcome = outcome::of_client(error.kind(), &with_cause(&error));
            return Handed::Refused(if parcel.run.is_some() { unbundled(outcome) } else { outcome });
        }
        if let Some(run) = &mut parcel.run {
            run.next += 1;
        }
        if last {
            self.next_id += 1;
            let count = parcel.run.as_ref().map_or(1, |run| run.length);
            self.runs_flying += usize::from(count > 1);
            self.sent += count as u64;
            self.deadlines.push_back((now + self.ack_wait, id));
            let flight = Flight { desk: parcel.desk.clone(), ticket: parcel.ticket, kept, count, note: None };
            self.flights.insert(id, flight);
        }
        Handed::Done
    }

    fn row_fault(&self, parcel: &Parcel, detail: String) -> Outcome {
        let outcome = Outcome::Refused { class: Class::Row, code: 0, detail };
        if parcel.run.is_some() { unbundled(outcome) } else { outcome }
    }

    fn headers(
        &self,
        msg_id: String,
        headers: Vec<(Cow<'static, str>, String)>,
        run: Option<&Run>,
        last: bool,
    ) -> Result<HeaderMap, String> {
        use async_nats::header::{NATS_EXPECTED_STREAM, NATS_MESSAGE_ID};
        let mut list = Vec::with_capacity(headers.len() + 5);
        list.push((NATS_MESSAGE_ID, value(msg_id)?));
        list.push((NATS_EXPECTED_STREAM, self.stream.clone()));
        for (name, text) in headers {
            list.push((header_name(name)?, value(text)?));
        }
        if let Some(run) = run {
            list.push((BATCH_ID, value(run.batch_id.clone())?));
            list.push((BATCH_SEQUENCE, HeaderValue::from(run.next)));
            if last {
                list.push((BATCH_COMMIT, value("1".to_owned())?));
            }
        }
        Ok(list.into_iter().collect())
    }

    /// The id of the flight that a reply belongs to.
    pub(super) fn id_of(&self, reply: &str) -> Option<u64> {
        reply.strip_prefix(self.inbox.as_str())?.parse().ok()
    }

    pub(super) fn flight(&mut self, id: u64) -> Option<&mut Flight> {
        self.flights.get_mut(&id)
    }

    /// Ends a flight with its outcome; nothing happens where it has ended before.
    pub(super) fn land(&mut self, id: u64, outcome: Outcome) {
        if let Some(flight) = self.flights.remove(&id) {
            self.runs_flying -= usize::from(flight.count > 1);
            self.settled += flight.count as u64;
            self.tell(&flight.desk, flight.ticket, outcome);
        }
    }

    /// Ends every flight to this subject; returns how many.
    pub(super) fn land_subject(&mut self, subject: &str, outcome: &Outcome) -> usize {
        let ids: Vec<u64> =
            self.flights.iter().filter(|(_, f)| f.kept.subject.as_str() == subject).map(|(id, _)| *id).collect();
        for id in &ids {
            let run = self.flights.get(id).is_some_and(|f| f.count > 1);
            self.land(*id, if run { unbundled(outcome.clone()) } else { outcome.clone() });
        }
        ids.len()
    }

    /// Reports what got no answer in time; returns how many flights that were.
    pub(super) fn expire(&mut self, now: Instant) -> usize {
        let mut expired = 0;
        while let Some((at, id)) = self.deadlines.front().copied() {
            let open = self.flights.contains_key(&id);
            if open && at > now {
                break;
            }
            self.deadlines.pop_front();
            if open {
                expired += 1;
                let outcome = Outcome::Unknown { detail: self.silence(id) };
                self.land(id, outcome);
            }
        }
        for queue in [&mut self.singles, &mut self.runs] {
            // the client never took the last message of these: a run without its commit is not stored
            while queue.front().is_some_and(|parcel| parcel.expires <= now) {
                if let Some(parcel) = queue.pop_front() {
                    push(&mut self.home, &parcel.desk, Report { ticket: parcel.ticket, outcome: Outcome::NotSent });
                }
            }
        }
        expired
    }

    fn silence(&self, id: u64) -> String {
        let wait = humantime::format_duration(self.ack_wait);
        match self.flights.get(&id).and_then(|f| f.note.as_deref()) {
            Some(note) => format!("no ack within {wait}: {note}"),
            None => format!("no ack within {wait}"),
        }
    }

    /// When [`Dispatch::expire`] has something to do.
    pub(super) fn next_expiry(&mut self) -> Option<Instant> {
        while self.deadlines.front().is_some_and(|(_, id)| !self.flights.contains_key(id)) {
            self.deadlines.pop_front();
        }
        let queues = [&self.singles, &self.runs].into_iter().filter_map(|q| q.front()).map(|p| p.expires);
        queues.chain(self.deadlines.front().map(|(at, _)| *at)).min()
    }

    /// Nothing that waits for the client is sent any more.
    pub(super) fn give_back_unsent(&mut self) {
        for parcel in self.singles.drain(..).chain(self.runs.drain(..)) {
            push(&mut self.home, &parcel.desk, Report { ticket: parcel.ticket, outcome: Outcome::NotSent });
        }
    }

    /// The connection is gone: what was sent may be stored or not.
    pub(super) fn abandon(&mut self, why: &str) {
        self.give_back_unsent();
        for (_, flight) in std::mem::take(&mut self.flights) {
            let outcome = Outcome::Unknown { detail: format!("the connection was lost before the ack: {why}") };
            push(&mut self.home, &flight.desk, Report { ticket: flight.ticket, outcome });
        }
        self.runs_flying = 0;
        self.deadlines.clear();
        self.flush();
    }

    /// Messages ever sent over this connection.
    pub(super) fn sent(&self) -> u64 {
        self.sent
    }

    /// Messages whose fate was reported.
    pub(super) fn settled(&self) -> u64 {
        self.settled
    }

    pub(super) fn is_empty(&self) -> bool {
        self.flights.is_empty() && self.singles.is_empty() && self.runs.is_empty()
    }

    fn tell(&mut self, desk: &Arc<Desk>, ticket: u64, outcome: Outcome) {
        push(&mut self.home, desk, Report { ticket, outcome });
    }

    /// Sends the reports of this turn home, one group an outlet.
    pub(super) fn flush(&mut self) {
        for (desk, reports) in self.home.drain(..) {
            desk.report(reports);
        }
    }
}

impl Drop for Dispatch {
    fn drop(&mut self) {
        self.abandon("it was closed");
    }
}

const BATCH_ID: HeaderName = HeaderName::from_static("Nats-Batch-Id");
const BATCH_SEQUENCE: HeaderName = HeaderName::from_static("Nats-Batch-Sequence");
const BATCH_COMMIT: HeaderName = HeaderName::from_static("Nats-Batch-Commit");

fn push(home: &mut Vec<(Arc<Desk>, Vec<Report>)>, desk: &Arc<Desk>, report: Report) {
    match home.iter_mut().find(|(d, _)| Arc::ptr_eq(d, desk)) {
        Some((_, reports)) => reports.push(report),
        None => home.push((desk.clone(), vec![report])),
    }
}

/// A run of which one message was at fault: nothing is stored without its commit, so each is sent by itself and only
/// the faulty one pays.
fn unbundled(outcome: Outcome) -> Outcome {
    if outcome == Outcome::NotSent { outcome } else { Outcome::KnownIdInRun }
}

fn header_name(name: Cow<'static, str>) -> Result<HeaderName, String> {
    // stricter than the client, which takes an empty name
    if name.is_empty() || !name.bytes().all(|b| b.is_ascii_graphic() && b != b':') {
        return Err(format!("illegal header name {name:?}"));
    }
    match name {
        // the names that every message has cost no copy
        Cow::Borrowed(name) => Ok(HeaderName::from_static(name)),
        Cow::Owned(name) => HeaderName::try_from(name).map_err(|error| format!("illegal header name: {error}")),
    }
}

fn value(text: String) -> Result<HeaderValue, String> {
    // the client's own conversion would panic
    if text.bytes().any(|b| b == b'\r' || b == b'\n') {
        return Err("illegal header value: it contains a line break".into());
    }
    Ok(HeaderValue::from(text))
}

fn with_cause(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    }
}

/// A name that no other batch has: at most 64 characters are allowed.
fn batch_id() -> String {
    uuid::Uuid::now_v7().simple().to_string()
}
