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

/// An ack that cannot be believed before the stream's last sequence is known.
pub(super) struct Claim {
    id: u64,
    seq: u64,
    duplicate: Duplicate,
    /// Number of the last look that had begun: it may have seen the stream before this message was stored.
    look: u64,
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

impl Session {
    pub(super) fn on_ack(&mut self, message: &async_nats::Message) {
        let Some(id) = self.dispatch.id_of(&message.subject) else { return };
        let Some(count) = self.dispatch.flight(id).map(|flight| flight.count) else { return };
        if message.status == Some(async_nats::StatusCode::NO_RESPONDERS) {
            self.unheard.push((id, self.looks));
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
            self.compare(id, ack.seq, Duplicate::Same);
        } else if self.belief.accepts(ack.seq, self.dispatch.sent(), Instant::now()) {
            self.stored(id, ack.seq, Duplicate::No);
        } else {
            self.compare(id, ack.seq, Duplicate::No);
        }
    }

    /// Remembers what was seen instead of an ack; the flight goes on waiting.
    fn note(&mut self, id: u64, note: String) {
        if let Some(flight) = self.dispatch.flight(id) {
            flight.note = Some(note);
        }
    }

    fn stored(&mut self, id: u64, seq: u64, duplicate: Duplicate) {
        let Some(count) = self.dispatch.flight(id).map(|flight| flight.count) else { return };
        if duplicate == Duplicate::No {
            self.belief.stored(count, seq);
        }
        self.last_ack = Instant::now();
        self.refused_at = None;
        self.dispatch.land(id, Outcome::Stored { stream_seq: seq, duplicate });
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

    /// Reads back what stands at the sequence of an ack that is a duplicate's, or that does not fit.
    fn compare(&mut self, id: u64, seq: u64, as_: Duplicate) {
        let Some(flight) = self.dispatch.flight(id) else { return };
        let (kept, api, shape) = (flight.kept.clone(), self.api.clone(), self.shape);
        let (readers, inner) = (self.readers.clone(), self.inner.clone());
        tokio::spawn(async move {
            let _permit = readers.acquire().await;
            let result = readback::compare(&api, shape, seq, &kept).await;
            // the session may have ended
            let _ = inner.send(Inner::Compared { id, seq, as_, result });
        });
    }

    pub(super) fn on_compared(&mut self, id: u64, seq: u64, as_: Duplicate, result: Result<Compared, ApiFault>) {
        let is_new = as_ == Duplicate::No;
        match result {
            Ok(Compared::Same) => self.stored(id, seq, as_),
            Ok(Compared::Gone) if !is_new && seq <= self.belief.known() => self.stored(id, seq, Duplicate::Gone),
            Ok(Compared::Gone) => {
                // above everything we know: perhaps not this stream's ack
                let duplicate = if is_new { Duplicate::No } else { Duplicate::Gone };
                self.claims.push(Claim { id, seq, duplicate, look: self.looks });
            }
            Ok(Compared::Differs(detail)) if !is_new => {
                self.last_ack = Instant::now();
                self.dispatch.land(id, Outcome::Collision { stream_seq: seq, detail });
            }
            Ok(Compared::Differs(_) | Compared::Stranger) => {
                self.note(id, format!("an ack named sequence {seq}, which holds another message"));
            }
            Err(fault) => {
                self.want_look = true;
                self.note(id, format!("an ack named sequence {seq}, which cannot be read: {fault}"));
            }
        }
    }

    /// Decides the claims that are older than look number `look`, which saw the stream end at `last_seq`.
    pub(super) fn settle_claims(&mut self, look: u64, last_seq: u64) {
        let (ripe, young) = std::mem::take(&mut self.claims).into_iter().partition(|claim| claim.look < look);
        self.claims = young;
        let ripe: Vec<Claim> = ripe;
        for Claim { id, seq, duplicate, .. } in ripe {
            let possible = match duplicate {
                Duplicate::No => self.belief.confirms(seq, last_seq),
                Duplicate::Same | Duplicate::Gone => seq <= last_seq,
            };
            if possible {
                self.stored(id, seq, duplicate);
            } else {
                let note = format!("an ack named sequence {seq}, which the stream (last {last_seq}) cannot have given");
                self.note(id, note);
            }
        }
    }

    /// Decides the flights to which nobody listened, where look number `look` began after that.
    pub(super) fn settle_unheard(&mut self, look: u64, usable: bool) {
        let (ripe, young): (Vec<_>, Vec<_>) = std::mem::take(&mut self.unheard).into_iter().partition(|u| u.1 < look);
        self.want_look |= !young.is_empty();
        self.unheard = young;
        for (id, _) in ripe {
            self.dispatch.land(id, outcome::no_responders(usable));
        }
    }
}
