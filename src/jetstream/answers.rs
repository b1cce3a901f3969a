//! What a session makes of the answers to its publishes.
//!
//! Invariants: an ack is believed only where its stream, its domain and its sequence can be true; whatever cannot be
//! believed is remembered as a note, and its flight goes on waiting for the right answer until `ack_wait`.
//!
//! May import: domain, async_nats.

use serde::Deserialize;
use tokio::time::Instant;

use super::api::ApiFault;
use super::outcome::{self, ApiError, Meaning};
use super::readback::{self, Compared};
use super::session::{Inner, Session};
use crate::domain::settle::{Class, Duplicate, Outcome};
use crate::ports::Topology;

/// Sequences that a stream can gain in a second at the very most, many times what a server can store: an ack above is
/// checked against the stream before it is believed.
const GAIN_PER_SECOND: u64 = 1_000_000;

/// Sequences that an ack may be ahead at once.
const LEAD: u64 = 10_000;

/// An ack that cannot be believed before the stream's last sequence is known.
pub(super) struct Claim {
    id: u64,
    seq: u64,
}

#[derive(Deserialize)]
struct Ack {
    #[serde(default)]
    stream: String,
    #[serde(default)]
    domain: String,
    #[serde(default)]
    seq: u64,
    #[serde(default)]
    duplicate: bool,
    #[serde(default)]
    count: Option<u64>,
    #[serde(default)]
    error: Option<ApiError>,
}

/// What is known of the stream's sequences.
pub(super) struct Belief {
    /// Domain of the stream; empty where there is none, or where it is not known.
    domain: String,
    created: String,
    /// Last sequence at the first look: what this session stores stands above it.
    floor: u64,
    /// Highest sequence known, and when it was learnt.
    high: u64,
    high_at: Instant,
}

impl Belief {
    pub(super) fn new(domain: String, now: Instant) -> Self {
        Self { domain, created: String::new(), floor: 0, high: 0, high_at: now }
    }

    /// Takes what `STREAM.INFO` said.
    pub(super) fn learn(&mut self, topology: &Topology, now: Instant) {
        if self.created != topology.created {
            // the first look, or another stream of that name, whose sequences begin again
            self.floor = if self.created.is_empty() { topology.last_seq } else { 0 };
            self.created = topology.created.clone();
            (self.high, self.high_at) = (topology.last_seq, now);
        }
        self.seen(topology.last_seq, now);
    }

    fn seen(&mut self, seq: u64, now: Instant) {
        if seq > self.high {
            (self.high, self.high_at) = (seq, now);
        }
    }

    fn is_elsewhere(&self, domain: &str) -> bool {
        !domain.is_empty() && !self.domain.is_empty() && domain != self.domain
    }

    /// Whether a message can have been stored at `seq` just now.
    fn accepts(&self, seq: u64, now: Instant) -> bool {
        let millis = u64::try_from(now.duration_since(self.high_at).as_millis()).unwrap_or(u64::MAX);
        let gain = millis.saturating_mul(GAIN_PER_SECOND / 1_000).saturating_add(LEAD);
        seq > self.floor && seq <= self.high.saturating_add(gain)
    }
}

impl Session {
    pub(super) fn on_ack(&mut self, message: &async_nats::Message) {
        let Some(id) = self.dispatch.id_of(&message.subject) else { return };
        let Some(count) = self.dispatch.flight(id).map(|flight| flight.count) else { return };
        if message.status == Some(async_nats::StatusCode::NO_RESPONDERS) {
            self.unheard.push(id);
            self.want_look = true;
            return;
        }
        let Ok(ack) = serde_json::from_slice::<Ack>(&message.payload) else {
            return self.note(id, "a plain responder on the subject answered, JetStream did not".into());
        };
        if let Some(error) = &ack.error {
            self.on_refusal(id, count > 1, error);
        } else if ack.stream != self.settings.stream.name || self.belief.is_elsewhere(&ack.domain) {
            self.note(id, format!("stream {:?} of domain {:?} acknowledged it, not ours", ack.stream, ack.domain));
        } else if ack.count.unwrap_or(1) != count as u64 {
            self.note(id, format!("the ack counts {:?} messages instead of {count}", ack.count));
        } else if ack.duplicate {
            self.compare(id, ack.seq);
        } else if self.belief.accepts(ack.seq, Instant::now()) {
            self.stored(id, ack.seq);
        } else {
            self.claims.push(Claim { id, seq: ack.seq });
            self.want_look = true;
        }
    }

    /// Remembers what was seen instead of an ack; the flight goes on waiting.
    fn note(&mut self, id: u64, note: String) {
        if let Some(flight) = self.dispatch.flight(id) {
            flight.note = Some(note);
        }
    }

    fn stored(&mut self, id: u64, seq: u64) {
        let now = Instant::now();
        self.belief.seen(seq, now);
        self.last_ack = now;
        self.refused_at = None;
        self.dispatch.land(id, Outcome::Stored { stream_seq: seq, duplicate: Duplicate::No });
    }

    fn on_refusal(&mut self, id: u64, run: bool, error: &ApiError) {
        match outcome::of_publish(error, run) {
            Meaning::OtherStream => {
                self.note(id, format!("another stream over the same subject answered: {error}"));
            }
            Meaning::InProcess => self.dispatch.land(id, Outcome::Unknown { detail: error.to_string() }),
            Meaning::Unbundle => {
                // perhaps the stream takes no batches any more
                self.want_look |= error.err_code != 10_201;
                self.dispatch.land(id, Outcome::KnownIdInRun);
            }
            Meaning::Refused(class) => {
                let code = error.err_code;
                let detail = if error.description.is_empty() { "refused".into() } else { error.description.clone() };
                self.dispatch.land(id, Outcome::Refused { class, code, detail });
                if class == Class::Outage {
                    self.on_outage(error);
                }
            }
        }
    }

    fn on_outage(&mut self, error: &ApiError) {
        if error.err_code == outcome::STORE_FAILED
            && let Some(size) = self.size
        {
            self.refused_at.get_or_insert((Instant::now(), size));
        }
        self.unusable(format!("stream {} refuses everything: {error}", self.settings.stream.name));
    }

    fn compare(&mut self, id: u64, seq: u64) {
        let Some(flight) = self.dispatch.flight(id) else { return };
        let (kept, api, shape) = (flight.kept.clone(), self.api.clone(), self.shape);
        let (readers, inner) = (self.readers.clone(), self.inner.clone());
        tokio::spawn(async move {
            let _permit = readers.acquire().await;
            let result = readback::compare(&api, shape, seq, &kept).await;
            // the session may have ended
            let _ = inner.send(Inner::Compared { id, seq, result });
        });
    }

    pub(super) fn on_compared(&mut self, id: u64, seq: u64, result: Result<Compared, ApiFault>) {
        self.last_ack = Instant::now();
        let duplicate = |duplicate| Outcome::Stored { stream_seq: seq, duplicate };
        let outcome = match result {
            Ok(Compared::Same) => duplicate(Duplicate::Same),
            Ok(Compared::Gone) if seq <= self.belief.high => duplicate(Duplicate::Gone),
            Ok(Compared::Differs(detail)) => Outcome::Collision { stream_seq: seq, detail },
            Ok(Compared::Gone) => {
                // above everything we know: perhaps not this stream's ack
                self.claims.push(Claim { id, seq });
                self.want_look = true;
                return;
            }
            Ok(Compared::Stranger) => Outcome::Unknown {
                detail: format!("acknowledged as a duplicate of sequence {seq}, which holds another message"),
            },
            Err(fault) => Outcome::Unknown {
                detail: format!("acknowledged as a duplicate of sequence {seq}, which cannot be read: {fault}"),
            },
        };
        self.dispatch.land(id, outcome);
    }

    pub(super) fn settle_claims(&mut self, last_seq: u64) {
        for Claim { id, seq } in std::mem::take(&mut self.claims) {
            if seq > self.belief.floor && seq <= last_seq {
                self.stored(id, seq);
            } else {
                let note = format!("an ack named sequence {seq}, which the stream (last {last_seq}) cannot have given");
                self.note(id, note);
            }
        }
    }
}
