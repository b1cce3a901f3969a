//! Which acks can be true: a foreign responder on the subject may answer anything.
//!
//! What the stream can hold is known: its last sequence at the latest look, plus what we have sent since, plus what
//! others have been seen to store in the same time; and the acks of one connection name growing sequences. An ack that
//! does not fit is believed only after the message was read back at its sequence. On a stream of our own the bound is
//! exact, so that this costs nothing.
//!
//! May import: std, tokio's clock.

use tokio::time::Instant;

/// Room above the seen rate of other publishers, as a factor: bursts cost one more look, never a wrong belief.
const BURST: f64 = 4.0;

/// What is known of the stream's sequences.
#[derive(Debug)]
pub(super) struct Belief {
    /// Domain of the stream; empty where there is none, or where it is not known.
    domain: String,
    created: String,
    /// Last sequence at the first look: what this session stores stands above it.
    floor: u64,
    /// Last sequence at the latest look, and when that was.
    base: u64,
    base_at: Instant,
    /// Highest sequence that an ack was believed for.
    top: u64,
    /// Messages of ours that an ack was believed for, ever and at the latest look.
    stored: u64,
    stored_at_base: u64,
    /// Messages of ours whose fate was reported when the latest look began.
    settled_at_base: u64,
    /// Messages a millisecond that others stored between the last two looks.
    others: f64,
}

impl Belief {
    pub(super) fn new(domain: String, now: Instant) -> Self {
        Self {
            domain,
            created: String::new(),
            floor: 0,
            base: 0,
            base_at: now,
            top: 0,
            stored: 0,
            stored_at_base: 0,
            settled_at_base: 0,
            others: 0.0,
        }
    }

    /// Takes what `STREAM.INFO` said. `settled` is the number of our messages whose fate was reported before that look
    /// began: whatever of them is stored is counted in `last_seq`.
    pub(super) fn learn(&mut self, created: &str, last_seq: u64, settled: u64, now: Instant) {
        if self.created != created {
            // the first look, or another stream of that name, whose sequences begin again
            self.floor = if self.created.is_empty() { last_seq } else { 0 };
            self.created = created.to_owned();
            (self.others, self.top) = (0.0, 0);
        } else {
            let ours = self.stored - self.stored_at_base;
            let theirs = last_seq.saturating_sub(self.base).saturating_sub(ours);
            let millis = now.duration_since(self.base_at).as_secs_f64() * 1_000.0;
            self.others = theirs as f64 / millis.max(1.0);
        }
        (self.base, self.base_at) = (last_seq, now);
        (self.stored_at_base, self.settled_at_base) = (self.stored, settled);
    }

    /// An ack for `count` messages of ours was believed, the last of them at `seq`.
    pub(super) fn stored(&mut self, count: usize, seq: u64) {
        self.stored += count as u64;
        self.top = self.top.max(seq);
    }

    /// Whether the stream answered from a domain that is not the configured one.
    pub(super) fn is_elsewhere(&self, domain: &str) -> bool {
        !domain.is_empty() && !self.domain.is_empty() && domain != self.domain
    }

    /// Whether a message can have been stored at `seq`; `sent` is the number of messages that we ever sent.
    pub(super) fn accepts(&self, seq: u64, sent: u64, now: Instant) -> bool {
        let ours = sent.saturating_sub(self.settled_at_base);
        let theirs = self.others * BURST * now.duration_since(self.base_at).as_secs_f64() * 1_000.0;
        seq > self.floor && seq > self.top && seq <= self.base.saturating_add(ours).saturating_add(theirs as u64)
    }

    /// Whether the stream, which ends at `last_seq` by now, can have given `seq` to a new message of this session.
    pub(super) fn confirms(&self, seq: u64, last_seq: u64) -> bool {
        seq > self.floor && seq <= last_seq
    }

    /// The last sequence that is known to exist.
    pub(super) fn known(&self) -> u64 {
        self.base
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn belief(last_seq: u64) -> (Belief, Instant) {
        let now = Instant::now();
        let mut belief = Belief::new(String::new(), now);
        belief.learn("2026", last_seq, 0, now);
        (belief, now)
    }

    #[test]
    fn alone_on_a_stream_the_bound_is_exact() {
        let (belief, now) = belief(100);
        assert!(!belief.accepts(100, 5, now), "it stood there before we came");
        assert!(belief.accepts(101, 5, now));
        assert!(belief.accepts(105, 5, now));
        assert!(!belief.accepts(106, 5, now + 1_000 * MS), "time alone stores nothing");
        assert!(!belief.accepts(0, 5, now));
        assert!(!belief.accepts(u64::MAX, 5, now));
    }

    #[test]
    fn what_was_settled_before_a_look_is_not_counted_twice() {
        let (mut belief, now) = belief(100);
        belief.stored(5, 105);
        belief.learn("2026", 105, 5, now + MS);
        assert!(belief.accepts(107, 7, now));
        assert!(!belief.accepts(108, 7, now));
    }

    #[test]
    fn other_publishers_widen_the_bound_by_their_own_rate() {
        let (mut belief, now) = belief(0);
        belief.learn("2026", 1_000, 0, now + 100 * MS);
        let later = now + 200 * MS;
        assert!(belief.accepts(1_000 + 4 * 1_000, 0, later));
        assert!(!belief.accepts(1_002 + 4 * 1_000, 0, later));
        belief.learn("2026", 1_000, 0, later);
        assert!(!belief.accepts(1_001, 0, later + 100 * MS), "they stopped");
    }

    #[test]
    fn acks_of_one_connection_grow() {
        let (mut belief, now) = belief(100);
        belief.stored(1, 103);
        assert!(!belief.accepts(103, 9, now), "that one was given to another message");
        assert!(!belief.accepts(102, 9, now));
        assert!(belief.accepts(104, 9, now));
    }

    #[test]
    fn another_stream_of_that_name_begins_again() {
        let (mut belief, now) = belief(100);
        belief.stored(1, 101);
        assert!(!belief.accepts(1, 1, now));
        belief.learn("2027", 1, 0, now + MS);
        assert!(belief.confirms(1, 1));
        assert!(belief.accepts(2, 1, now + MS));
    }

    #[test]
    fn a_domain_is_foreign_only_where_both_are_known() {
        let hub = Belief::new("hub".into(), Instant::now());
        assert!(hub.is_elsewhere("leaf"));
        assert!(!hub.is_elsewhere("hub") && !hub.is_elsewhere(""));
        assert!(!Belief::new(String::new(), Instant::now()).is_elsewhere("leaf"));
    }
}
