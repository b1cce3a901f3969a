//! What becomes of an inbound message: verdicts, spaced retries, order within an aggregate, and how far a durable is
//! settled.
//!
//! Rules: a fault of the message's own handler counts, and after `max_deliver` of them the message is dead; a database
//! that is busy, a table that is not there yet, a version that is waited for and a predecessor that is not settled
//! count nothing. A message that waits holds the later versions of its aggregate, so that effects keep their order.
//! The settled sequence of a durable never passes a message that is not settled.
//!
//! May import: std, thiserror, domain.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use super::backoff::{Backoff, Jitter};
use super::event::Millis;
use super::inbox::Cause;

/// The verdict on one inbound message.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// Its effect and its dedupe record are written.
    Applied,
    /// Kept in `inbox_events` for the application to take; dedupe record written.
    Stored,
    /// It was applied before, or settled otherwise.
    Duplicate,
    /// A version at or below the one that is applied: recorded, no effect.
    Stale,
    /// Not for us: an own echo, or no handler under `unmatched = "skip"`. Nothing is written.
    Skipped,
    /// Kept as a dead letter with its cause.
    Dead(Cause),
    /// Not settled: it comes again, not before `after`. `counted` where it was the handler's own failure.
    Later { after: Duration, counted: bool, reason: String },
}

impl Verdict {
    /// Whether the message is done with.
    pub fn is_settled(&self) -> bool {
        !matches!(self, Verdict::Later { .. })
    }

    /// What the broker is told after the commit.
    pub fn fate(&self) -> Fate {
        match self {
            Verdict::Applied | Verdict::Stored | Verdict::Duplicate | Verdict::Stale | Verdict::Skipped => Fate::Ack,
            Verdict::Dead(cause) => Fate::Terminate { reason: super::settle::reason(&cause.to_string()) },
            Verdict::Later { after, .. } => Fate::Later { after: *after },
        }
    }
}

/// What the broker is told about a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    Ack,
    Later { after: Duration },
    Terminate { reason: String },
}

/// Events that carry our own source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnEvents {
    Skip,
    Apply,
}

/// Events that no handler is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unmatched {
    Skip,
    Store,
    Dead,
}

/// What a handler does with an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// The example domain: the asset takes name, material and version of the event.
    Assets,
    /// Kept in `inbox_events` for the application.
    Store,
    /// Statements of the operator.
    Sql(String),
}

/// How one durable treats what arrives.
#[derive(Clone, Debug, PartialEq)]
pub struct InboxRules {
    pub durable: String,
    /// Every durable but the first keeps its dedupe records under its own name.
    pub is_first: bool,
    /// Our own identity, as `ce-source` carries it.
    pub own_source: String,
    pub own_events: OwnEvents,
    pub unmatched: Unmatched,
    pub gap: GapRule,
    pub patience: PatienceRules,
    /// Pattern and action, in the order of the configuration.
    pub handlers: Vec<(String, Action)>,
}

/// Where a durable stands, as the database has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Position {
    pub stream: String,
    /// Creation time of the stream as the server gives it: another one means another stream.
    pub stream_created: String,
    /// Everything that the durable is for, at or below this sequence of the stream, is settled.
    pub settled_seq: u64,
}

/// When a failing message comes again and when it is given up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PatienceRules {
    /// Failures of the message's own handler before it is dead; at least 1.
    pub max_deliver: u32,
    pub backoff: Backoff,
}

impl PatienceRules {
    /// With the delays of this house: half a second, doubled up to half a minute.
    pub fn new(max_deliver: u32) -> Self {
        let backoff = Backoff::new(Duration::from_millis(500), 2.0, Duration::from_secs(30), Jitter::None)
            .expect("half a second is above zero and below half a minute, and two is at least one");
        Self { max_deliver: max_deliver.max(1), backoff }
    }

    /// The verdict after one more failure; `before` is their number so far.
    pub fn after_failure(&self, before: u32, last: &str) -> (u32, Verdict) {
        let failures = before.saturating_add(1);
        let reason = super::settle::reason(last);
        let verdict = if failures >= self.max_deliver {
            Verdict::Dead(Cause::Failed { failures, last: reason })
        } else {
            Verdict::Later { after: self.backoff.delay(failures, 1.0), counted: true, reason }
        };
        (failures, verdict)
    }
}

/// What to do about a version that is missing in between.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GapRule {
    Apply,
    /// Wait for it, at most so long; then apply.
    Wait(Duration),
}

/// How an event stands to the version of its aggregate that is applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VersionStep {
    Apply,
    Stale,
    Wait { after: Duration },
}

/// Longest pause between two looks at a message that waits for something outside of it.
pub const LOOK_AGAIN: Duration = Duration::from_secs(2);

/// Compares versions. `applied` is `None` where nothing of the aggregate was applied yet: then no gap can be told.
/// `waited` is how long this message has waited for its predecessor already.
pub fn version_step(applied: Option<i64>, incoming: i64, rule: GapRule, waited: Duration) -> VersionStep {
    match (applied, rule) {
        (Some(applied), _) if incoming <= applied => VersionStep::Stale,
        (Some(applied), GapRule::Wait(limit)) if incoming > applied.saturating_add(1) && waited < limit => {
            VersionStep::Wait { after: (limit - waited).min(LOOK_AGAIN).max(Backoff::FLOOR) }
        }
        (Some(_) | None, GapRule::Apply | GapRule::Wait(_)) => VersionStep::Apply,
    }
}

/// The aggregate of an inbound event, of the producer that names it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Lane {
    pub source: String,
    pub aggregate_type: String,
    pub aggregate_id: String,
}

#[derive(Clone, Debug, PartialEq)]
struct Waiting {
    lane: Option<Lane>,
    version: Option<i64>,
    since: Millis,
}

/// How far one durable is settled, and what waits behind. Lost with its actor and rebuilt by redelivery.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Progress {
    /// Everything at or below it is settled.
    floor: u64,
    /// Highest sequence that was decided.
    high: u64,
    waiting: BTreeMap<u64, Waiting>,
    lanes: HashMap<Lane, BTreeMap<u64, Option<i64>>>,
}

impl Progress {
    /// At the start of a session that delivers everything above `floor`.
    pub fn starting_at(floor: u64) -> Self {
        Self { floor, high: floor, ..Self::default() }
    }

    /// Everything at or below this sequence is settled.
    pub fn floor(&self) -> u64 {
        self.floor
    }

    /// Messages that wait.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Whether an event has to wait for an earlier one of its aggregate that is not settled.
    pub fn is_held(&self, seq: u64, lane: &Lane, version: Option<i64>) -> bool {
        self.lanes.get(lane).is_some_and(|waiting| {
            waiting.range(..seq).any(|(_, earlier)| match (earlier, version) {
                (Some(earlier), Some(version)) => *earlier < version,
                (None, _) | (_, None) => true,
            })
        })
    }

    /// How long this message has been waiting.
    pub fn waited(&self, seq: u64, now: Millis) -> Duration {
        let since = self.waiting.get(&seq).map_or(now, |w| w.since);
        Duration::from_millis(u64::try_from(now.saturating_sub(since)).unwrap_or(0))
    }

    /// Notes that a message is settled.
    pub fn settle(&mut self, seq: u64) {
        self.high = self.high.max(seq);
        if let Some(Waiting { lane: Some(lane), .. }) = self.waiting.remove(&seq)
            && let Some(waiting) = self.lanes.get_mut(&lane)
        {
            waiting.remove(&seq);
            if waiting.is_empty() {
                self.lanes.remove(&lane);
            }
        }
    }

    /// Notes that a message waits.
    pub fn wait(&mut self, seq: u64, lane: Option<&Lane>, version: Option<i64>, now: Millis) {
        self.high = self.high.max(seq);
        self.waiting.entry(seq).or_insert_with(|| {
            if let Some(lane) = lane {
                self.lanes.entry(lane.clone()).or_default().insert(seq, version);
            }
            Waiting { lane: lane.cloned(), version, since: now }
        });
    }

    /// Moves the floor as far as everything below is settled, and not beyond `limit`, and says where it is.
    ///
    /// `limit` is what the source of the messages can vouch for: above it some may have gone elsewhere.
    pub fn advance(&mut self, limit: Option<u64>) -> u64 {
        let own = self.waiting.keys().next().map_or(self.high, |first| first.saturating_sub(1));
        self.floor = self.floor.max(own.min(limit.unwrap_or(u64::MAX)));
        self.floor
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: fn(u64) -> Duration = Duration::from_secs;

    fn lane(id: &str) -> Lane {
        Lane { source: "plant".into(), aggregate_type: "asset".into(), aggregate_id: id.into() }
    }

    #[test]
    fn failures_are_spaced_and_end_in_death() {
        let rules = PatienceRules::new(4);
        let mut failures = 0;
        let mut delays = Vec::new();
        let last = loop {
            let (now, verdict) = rules.after_failure(failures, "no such column");
            failures = now;
            match verdict {
                Verdict::Later { after, counted: true, .. } => delays.push(after.as_millis()),
                other => break other,
            }
        };
        assert_eq!(delays, [500, 1_000, 2_000]);
        assert_eq!(last, Verdict::Dead(Cause::Failed { failures: 4, last: "no such column".into() }));
        assert!(matches!(last.fate(), Fate::Terminate { reason } if reason.contains("no such column")));
    }

    #[test]
    fn the_count_of_failures_does_not_wrap() {
        assert_eq!(PatienceRules::new(10).after_failure(u32::MAX, "x").0, u32::MAX);
        assert!(matches!(PatienceRules::new(0).after_failure(0, "x").1, Verdict::Dead(_)));
    }

    #[test]
    fn versions_at_or_below_the_applied_one_are_stale() {
        for rule in [GapRule::Apply, GapRule::Wait(S(60))] {
            assert_eq!(version_step(Some(5), 5, rule, S(0)), VersionStep::Stale);
            assert_eq!(version_step(Some(5), 4, rule, S(0)), VersionStep::Stale);
            assert_eq!(version_step(Some(5), 6, rule, S(0)), VersionStep::Apply);
            assert_eq!(version_step(None, 6, rule, S(0)), VersionStep::Apply);
        }
    }

    #[test]
    fn a_gap_is_waited_for_by_rule_and_not_for_ever() {
        assert_eq!(version_step(Some(5), 8, GapRule::Apply, S(0)), VersionStep::Apply);
        let wait = GapRule::Wait(S(60));
        assert_eq!(version_step(Some(5), 8, wait, S(0)), VersionStep::Wait { after: LOOK_AGAIN });
        assert_eq!(version_step(Some(5), 8, wait, S(59)), VersionStep::Wait { after: S(1) });
        assert_eq!(version_step(Some(5), 8, wait, S(60)), VersionStep::Apply);
        assert_eq!(version_step(Some(i64::MAX), 8, wait, S(0)), VersionStep::Stale);
    }

    #[test]
    fn the_floor_stops_below_what_waits_and_moves_on_when_it_is_settled() {
        let mut p = Progress::starting_at(10);
        p.settle(11);
        p.wait(13, Some(&lane("a")), Some(2), 0);
        p.settle(17);
        assert_eq!(p.advance(None), 12);
        p.settle(13);
        assert_eq!(p.advance(None), 17);
        assert_eq!(p.waiting(), 0);
    }

    #[test]
    fn the_floor_does_not_pass_what_went_elsewhere_and_never_falls() {
        let mut p = Progress::starting_at(10);
        p.settle(40);
        assert_eq!(p.advance(Some(20)), 20);
        assert_eq!(p.advance(Some(15)), 20);
        assert_eq!(p.advance(None), 40);
    }

    #[test]
    fn what_waits_holds_later_versions_of_its_aggregate_only() {
        let mut p = Progress::starting_at(0);
        p.wait(5, Some(&lane("a")), Some(7), 0);
        assert!(p.is_held(6, &lane("a"), Some(8)));
        assert!(p.is_held(6, &lane("a"), None), "without a version the sequence decides");
        assert!(!p.is_held(6, &lane("a"), Some(6)), "the missing predecessor may pass");
        assert!(!p.is_held(5, &lane("a"), Some(7)), "it does not hold itself");
        assert!(!p.is_held(6, &lane("b"), Some(8)), "another aggregate is free");
        p.settle(5);
        assert!(!p.is_held(6, &lane("a"), Some(8)));
    }

    #[test]
    fn the_wait_counts_from_its_first_look() {
        let mut p = Progress::starting_at(0);
        p.wait(5, None, None, 1_000);
        p.wait(5, None, None, 9_000);
        assert_eq!(p.waited(5, 11_000), S(10));
        assert_eq!(p.waited(6, 11_000), S(0));
    }
}
