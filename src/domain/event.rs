//! An event as the outbox holds it, and the key that orders it.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;

/// Milliseconds since the Unix epoch, UTC. The only form in which the domain knows wall-clock time.
pub type Millis = i64;

/// Primary key of `outbox_events`: commit order.
pub type Seq = i64;

/// The aggregate an event belongs to: the unit of order.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AggregateKey {
    /// `aggregate_type`, for instance `asset`.
    pub kind: Arc<str>,
    /// `aggregate_id`, for instance `asset-042`.
    pub id: Arc<str>,
}

impl AggregateKey {
    /// A key from its two columns.
    pub fn new(kind: &str, id: &str) -> Self {
        Self { kind: kind.into(), id: id.into() }
    }

    /// The publisher (0-based, below `publishers`) that owns this aggregate.
    ///
    /// FNV-1a over `kind`, a zero byte and `id`: stable across processes and versions, so that two daemons and a
    /// restart agree on the owner.
    pub fn owner(&self, publishers: usize) -> usize {
        owner(&self.kind, &self.id, publishers)
    }
}

/// See [`AggregateKey::owner`]; for callers that hold the two columns only.
pub fn owner(kind: &str, id: &str, publishers: usize) -> usize {
    const OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x0000_0100_0000_01b3;
    let mut hash = OFFSET;
    for byte in kind.bytes().chain(std::iter::once(0)).chain(id.bytes()) {
        hash = (hash ^ u64::from(byte)).wrapping_mul(PRIME);
    }
    // the low bits of FNV-1a are weak for short keys that differ in the last byte: fold the high half in
    (((hash >> 32) ^ hash) % publishers.max(1) as u64) as usize
}

impl fmt::Debug for AggregateKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.kind, self.id)
    }
}

impl fmt::Display for AggregateKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.kind, self.id)
    }
}

/// A pending row of `outbox_events`, read whole for publishing.
#[derive(Clone, Debug)]
pub struct PendingEvent {
    pub seq: Seq,
    pub key: AggregateKey,
    pub event_id: String,
    pub aggregate_version: i64,
    pub event_type: String,
    pub schema_version: i64,
    /// The bytes of `payload_json`, as they stand.
    pub payload: Bytes,
    /// `headers_json`, a JSON object of string values.
    pub headers_json: Option<String>,
    /// `created_at` as stored.
    pub created_at: String,
    /// The same as an instant, where it is one.
    pub created: Option<Millis>,
    /// The instant before which it must not be sent; `None` means now.
    pub due_at: Option<Millis>,
    /// Publishes so far whose outcome was the row's own.
    pub attempt_count: u32,
    /// First counted failure of the current series, `None` before it.
    pub failing_since: Option<Millis>,
    /// How often it was in flight when a daemon ended without settling it; 0 for nearly all.
    pub crashes: u32,
    /// Where it may stand in the stream already, `None` for nearly all: it must be looked for before it is sent.
    pub suspect: Option<Suspect>,
}

/// What is known of an event whose fate nobody has seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Suspect {
    /// It stands above this sequence of the stream, if it does.
    pub floor: u64,
    /// Creation time of the stream that `floor` belongs to.
    pub stream_created: String,
}

impl PendingEvent {
    /// An event that the application scheduled for later and that was never tried: it holds nobody.
    pub fn is_scheduled(&self, now: Millis) -> bool {
        self.attempt_count == 0 && self.due_at.is_some_and(|due| due > now)
    }

    /// Bytes that this event costs in memory and on the wire, roughly: what batch ceilings count.
    pub fn weight(&self) -> usize {
        self.payload.len() + self.headers_json.as_ref().map_or(0, String::len) + 512
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owner_is_stable_and_within_range() {
        // fixed values: a change would move aggregates between publishers of two versions that run side by side
        assert_eq!(owner("asset", "asset-042", 1), 0);
        for n in 1..9 {
            for i in 0..100 {
                assert!(owner("asset", &format!("asset-{i}"), n) < n);
            }
        }
    }

    #[test]
    fn owners_are_spread_evenly() {
        let mut counts = [0usize; 4];
        for i in 0..4000 {
            counts[owner("asset", &format!("asset-{i:05}"), 4)] += 1;
        }
        assert!(counts.iter().all(|c| (800..1200).contains(c)), "{counts:?}");
    }
}
