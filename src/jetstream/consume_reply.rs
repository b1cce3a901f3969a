//! The reply subject of a delivered message: where it stands in the stream, and which delivery of the consumer it is.
//!
//! May import: std.

/// What the reply subject of a pulled message says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) stream_seq: u64,
    /// Counts every delivery of the consumer, redeliveries included: a gap means that one went elsewhere.
    pub(super) delivery: u64,
}

/// Reads `$JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<time>.<pending>`, or the longer form
/// `$JS.ACK.<domain>.<account>.<stream>.<consumer>. ...[.<token>]` (ADR-15 of nats-architecture-and-design).
pub(super) fn parse(reply: &str) -> Option<Place> {
    let rest = reply.strip_prefix("$JS.ACK.")?;
    let tokens = rest.split('.').count();
    let skip = match tokens {
        7 => 2,
        n if n >= 9 => 4,
        _ => return None,
    };
    let mut numbers = rest.split('.').skip(skip + 1).map(str::parse::<u64>);
    let stream_seq = numbers.next()?.ok()?;
    let delivery = numbers.next()?.ok()?;
    Some(Place { stream_seq, delivery })
}

/// Whether every delivery of the consumer came to us: only then does our own order say what is settled.
#[derive(Clone, Debug)]
pub(super) struct Continuity {
    next: u64,
    high: u64,
    /// Set by a gap: up to here the acks of the consumer vouch.
    limit: Option<u64>,
}

impl Continuity {
    /// A consumer whose next delivery has this number; everything up to `floor` is settled.
    pub(super) fn new(next: u64, floor: u64) -> Self {
        Self { next, high: floor, limit: None }
    }

    /// A consumer that others pull from as well.
    pub(super) fn shared(floor: u64) -> Self {
        Self { next: 0, high: floor, limit: Some(floor) }
    }

    pub(super) fn saw(&mut self, place: Place) {
        if place.delivery != self.next && self.limit.is_none() {
            self.limit = Some(self.high);
        }
        self.next = place.delivery.saturating_add(1);
        self.high = self.high.max(place.stream_seq);
    }

    /// What the consumer says of itself: how far it is acked, whether anything is unacked, and its last delivery.
    pub(super) fn heard(&mut self, acked: u64, unacked: u64, last_delivery: u64) {
        let Some(limit) = self.limit else { return };
        self.limit = Some(limit.max(acked));
        if unacked == 0 {
            (self.limit, self.next, self.high) = (None, last_delivery.saturating_add(1), self.high.max(acked));
        }
    }

    /// Up to where nothing went elsewhere; `None`: everywhere.
    pub(super) fn limit(&self) -> Option<u64> {
        self.limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn saw(c: &mut Continuity, delivery: u64, stream_seq: u64) -> Option<u64> {
        c.saw(Place { stream_seq, delivery });
        c.limit()
    }

    #[test]
    fn a_delivery_that_went_elsewhere_limits_what_is_settled_until_all_is_acked() {
        let mut c = Continuity::new(1, 10);
        assert_eq!(saw(&mut c, 1, 11), None);
        assert_eq!(saw(&mut c, 2, 14), None);
        assert_eq!(saw(&mut c, 3, 11), None, "a redelivery to us is no gap");
        assert_eq!(saw(&mut c, 6, 20), Some(14), "deliveries 4 and 5 went elsewhere");
        assert_eq!(saw(&mut c, 7, 21), Some(14));
        c.heard(17, 2, 7);
        assert_eq!(c.limit(), Some(17));
        c.heard(21, 0, 9);
        assert_eq!(c.limit(), None);
        assert_eq!(saw(&mut c, 10, 30), None);
    }

    #[test]
    fn a_shared_consumer_is_trusted_as_far_as_it_is_acked() {
        let mut c = Continuity::shared(5);
        assert_eq!(saw(&mut c, 77, 9), Some(5));
        c.heard(7, 3, 78);
        assert_eq!(c.limit(), Some(7));
    }

    #[test]
    fn both_forms_are_read_and_others_are_not() {
        let place = Some(Place { stream_seq: 17, delivery: 21 });
        assert_eq!(parse("$JS.ACK.EVENTS.hub.2.17.21.1700000000000.5"), place);
        assert_eq!(parse("$JS.ACK._.ACCHASH.EVENTS.hub.2.17.21.1700000000000.5"), place);
        assert_eq!(parse("$JS.ACK.dom.ACCHASH.EVENTS.hub.2.17.21.1700000000000.5.token"), place);
        for other in ["", "_INBOX.x", "$JS.ACK.EVENTS.hub", "$JS.ACK.EVENTS.hub.2.x.21.1.5", "$JS.ACK.a.b.c.d.e.f.g.h"]
        {
            assert_eq!(parse(other), None, "{other}");
        }
    }
}
