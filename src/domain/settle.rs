//! From the outcome of a publish to the verdict on the row.
//!
//! The rule (what an error costs): an outage costs no event anything; a subject that is refused while others are
//! acked parks its aggregate, not counted; a fault of the row's own fails it at once; anything else counts, and fails
//! the row when `max_attempts` AND `min_failing_for` are both exceeded.

use std::time::Duration;

use super::backoff::Backoff;
use super::event::Millis;

/// What a refusal or a missing answer says about its cause. `jetstream/outcome.rs` maps every error to one of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Class {
    /// The broker as a whole: no connection, JetStream off, stream missing, full or sealed, storage, account limits.
    Outage,
    /// Perhaps this subject only: no responders, permission denied.
    Subject,
    /// The row's own: too large, illegal header or subject.
    Row,
    /// Nobody's in particular: counted.
    Counted,
}

/// What a duplicate PubAck turned out to be after the message at its sequence was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Duplicate {
    /// Stored now, by this publish.
    No,
    /// It stood there already, and it is this event.
    Same,
    /// It was acked as a duplicate, but the message is gone from the stream meanwhile.
    Gone,
}

/// The fate of one shipment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Stored. For a run `stream_seq` is that of its last message; the others precede it without a gap.
    Stored { stream_seq: u64, duplicate: Duplicate },
    /// The broker holds another message under this id.
    Collision { stream_seq: u64, detail: String },
    /// Not one byte of it was queued: it can be sent again at any time.
    NotSent,
    /// It may be stored or not: no answer within `ack_wait`, or the connection was lost.
    Unknown { detail: String },
    /// A run was refused whole because one of its ids is known to the stream; nothing of it was stored by this try.
    KnownIdInRun,
    /// Refused; nothing was stored.
    Refused { class: Class, code: u32, detail: String },
}

/// The verdict on one row, to be written by a settle that is fenced with the lease token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Stored at this sequence. `note` is kept in `last_error` (a duplicate whose message is gone).
    Published { stream_seq: u64, note: Option<String> },
    /// The row's own fault, to be tried again not before `available_at`. Counted.
    RetryAt { available_at: Millis, reason: String },
    /// Withdrawn with its reason: a dead letter. Counted.
    Failed { reason: String },
    /// Given back as it was. Not counted.
    Release,
}

/// What a relay does with a row next, and with its aggregate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Write this verdict.
    Settle(Verdict),
    /// Not counted, nothing written: the aggregate waits for `delay`, then its head is sent again.
    Park { delay: Duration, reason: String },
    /// Not counted: the link is at fault. Send again when it is up, after a look where the outcome is unknown.
    AwaitLink { unknown: bool, reason: String },
    /// The run is sent again message by message.
    Unbundle,
}

/// When a row that fails by itself is withdrawn, and how long it waits in between.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RetryRules {
    pub backoff: Backoff,
    /// At least 1.
    pub max_attempts: u32,
    pub min_failing_for: Duration,
}

/// What is known of a row when its outcome arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// `attempt_count` of the row before this publish.
    pub attempts_before: u32,
    /// First counted failure of the current series.
    pub failing_since: Option<Millis>,
    /// How many times in a row its aggregate was parked.
    pub parked_before: u32,
}

/// Longest `last_error`, in characters.
pub const MAX_REASON: usize = 500;

/// Cuts a reason at [`MAX_REASON`] characters and takes control characters out.
pub fn reason(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(MAX_REASON).collect()
}

/// Decides what an outcome means for its row. `draw` is uniform in `[0, 1)`.
pub fn decide(outcome: &Outcome, attempt: Attempt, rules: &RetryRules, now: Millis, draw: f64) -> Decision {
    match outcome {
        Outcome::Stored { stream_seq, duplicate } => {
            let note = match duplicate {
                Duplicate::No | Duplicate::Same => None,
                Duplicate::Gone => Some(format!(
                    "note: acked as a duplicate of sequence {stream_seq}, which is no longer in the stream"
                )),
            };
            Decision::Settle(Verdict::Published { stream_seq: *stream_seq, note })
        }
        Outcome::Collision { stream_seq, detail } => Decision::Settle(Verdict::Failed {
            reason: reason(&format!("id collision with the message at stream sequence {stream_seq}: {detail}")),
        }),
        Outcome::NotSent => Decision::AwaitLink { unknown: false, reason: "not connected".into() },
        Outcome::Unknown { detail } => Decision::AwaitLink { unknown: true, reason: reason(detail) },
        Outcome::KnownIdInRun => Decision::Unbundle,
        Outcome::Refused { class, code, detail } => {
            let text = if *code == 0 { detail.clone() } else { format!("{detail} (JetStream {code})") };
            match class {
                Class::Outage => Decision::AwaitLink { unknown: false, reason: reason(&text) },
                Class::Subject => Decision::Park {
                    delay: rules.backoff.delay(attempt.parked_before.saturating_add(1), draw),
                    reason: reason(&text),
                },
                Class::Row => Decision::Settle(Verdict::Failed { reason: reason(&text) }),
                Class::Counted => Decision::Settle(counted(&text, attempt, rules, now, draw)),
            }
        }
    }
}

fn counted(text: &str, attempt: Attempt, rules: &RetryRules, now: Millis, draw: f64) -> Verdict {
    let attempts = attempt.attempts_before.saturating_add(1);
    let failing_for = attempt.failing_since.map_or(0, |since| now.saturating_sub(since).max(0));
    let long_enough = u128::try_from(failing_for).unwrap_or(0) >= rules.min_failing_for.as_millis();
    if attempts >= rules.max_attempts && long_enough {
        return Verdict::Failed { reason: reason(&format!("{text}; gave up after {attempts} attempts")) };
    }
    let delay = rules.backoff.delay(attempts, draw).as_millis();
    Verdict::RetryAt {
        available_at: now.saturating_add(i64::try_from(delay).unwrap_or(i64::MAX / 4)),
        reason: reason(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::backoff::Jitter;

    const NOW: Millis = 1_800_000_000_000;

    fn rules() -> RetryRules {
        let s = Duration::from_secs;
        RetryRules {
            backoff: Backoff::new(s(1), 2.0, s(60), Jitter::None).unwrap(),
            max_attempts: 3,
            min_failing_for: s(300),
        }
    }

    fn attempt(before: u32, since: Option<Millis>) -> Attempt {
        Attempt { attempts_before: before, failing_since: since, parked_before: 0 }
    }

    fn refused(class: Class) -> Outcome {
        Outcome::Refused { class, code: 10_000, detail: "why".into() }
    }

    #[test]
    fn stored_is_published() {
        let got = decide(
            &Outcome::Stored { stream_seq: 7, duplicate: Duplicate::Same },
            attempt(0, None),
            &rules(),
            NOW,
            0.5,
        );
        assert_eq!(got, Decision::Settle(Verdict::Published { stream_seq: 7, note: None }));
    }

    #[test]
    fn a_duplicate_that_is_gone_is_published_with_a_note() {
        let got = decide(
            &Outcome::Stored { stream_seq: 7, duplicate: Duplicate::Gone },
            attempt(0, None),
            &rules(),
            NOW,
            0.5,
        );
        let Decision::Settle(Verdict::Published { note: Some(note), .. }) = got else { panic!("{got:?}") };
        assert!(note.contains("sequence 7"), "{note}");
    }

    #[test]
    fn an_outage_costs_the_row_nothing() {
        for outcome in [refused(Class::Outage), Outcome::NotSent, Outcome::Unknown { detail: "no ack".into() }] {
            let got = decide(&outcome, attempt(99, Some(0)), &rules(), NOW, 0.5);
            assert!(matches!(got, Decision::AwaitLink { .. }), "{outcome:?} gave {got:?}");
        }
    }

    #[test]
    fn a_refused_subject_parks_its_aggregate_and_is_not_counted() {
        let got = decide(&refused(Class::Subject), attempt(99, Some(0)), &rules(), NOW, 0.5);
        assert!(matches!(got, Decision::Park { delay, .. } if delay == Duration::from_secs(1)), "{got:?}");
    }

    #[test]
    fn the_rows_own_fault_fails_at_once() {
        let got = decide(&refused(Class::Row), attempt(0, None), &rules(), NOW, 0.5);
        assert_eq!(got, Decision::Settle(Verdict::Failed { reason: "why (JetStream 10000)".into() }));
    }

    #[test]
    fn it_fails_only_when_attempts_and_time_are_both_exceeded() {
        let (old, young) = (Some(NOW - 300_000), Some(NOW - 299_999));
        let failed = |before, since| {
            matches!(
                decide(&refused(Class::Counted), attempt(before, since), &rules(), NOW, 0.5),
                Decision::Settle(Verdict::Failed { .. })
            )
        };
        assert!(!failed(1, old), "two attempts of three");
        assert!(!failed(2, young), "three attempts, but not for long enough");
        assert!(!failed(2, None), "the first failure");
        assert!(failed(2, old));
        assert!(failed(u32::MAX, old), "the count does not wrap");
    }

    #[test]
    fn a_counted_failure_waits_by_its_attempt() {
        let got = decide(&refused(Class::Counted), attempt(3, Some(NOW)), &rules(), NOW, 0.5);
        assert_eq!(
            got,
            Decision::Settle(Verdict::RetryAt { available_at: NOW + 8_000, reason: "why (JetStream 10000)".into() })
        );
    }

    #[test]
    fn a_reason_is_cut_and_has_no_control_characters() {
        let text = reason(&format!("a\nb{}", "ü".repeat(600)));
        assert_eq!(text.chars().count(), MAX_REASON);
        assert!(text.starts_with("a b"));
    }
}
