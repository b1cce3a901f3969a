//! Exponential backoff with full jitter, without overflow.
//!
//! Rule: delay of attempt n (from 1) has the ceiling `min(cap, initial * factor^(n-1))`; full jitter draws uniformly
//! below it (AWS Architecture Blog, "Exponential Backoff And Jitter"), never under a floor of one millisecond, so that
//! a draw of zero cannot make a hot loop.

use std::time::Duration;

/// Whether delays are spread at random.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Jitter {
    /// Uniform between the floor and the ceiling.
    Full,
    /// Always the ceiling.
    None,
}

/// A backoff that cannot be built wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Backoff {
    initial: Duration,
    factor: f64,
    cap: Duration,
    jitter: Jitter,
}

/// Why [`Backoff::new`] refused.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum BackoffError {
    #[error("initial must be greater than zero")]
    ZeroInitial,
    #[error("initial must not exceed cap")]
    InitialAboveCap,
    #[error("factor must be a finite number of at least 1")]
    Factor,
}

impl Backoff {
    /// Shortest delay ever returned.
    pub const FLOOR: Duration = Duration::from_millis(1);

    /// Checks `0 < initial <= cap` and `factor >= 1`.
    pub fn new(initial: Duration, factor: f64, cap: Duration, jitter: Jitter) -> Result<Self, BackoffError> {
        if initial.is_zero() {
            return Err(BackoffError::ZeroInitial);
        }
        if initial > cap {
            return Err(BackoffError::InitialAboveCap);
        }
        if !factor.is_finite() || factor < 1.0 {
            return Err(BackoffError::Factor);
        }
        Ok(Self { initial, factor, cap, jitter })
    }

    /// The longest delay after attempt `attempt` (counted from 1; 0 is read as 1).
    ///
    /// Computed in floating point and capped before it becomes a `Duration`: no attempt number overflows.
    pub fn ceiling(&self, attempt: u32) -> Duration {
        let exponent = f64::from(attempt.saturating_sub(1));
        let seconds = self.initial.as_secs_f64() * self.factor.powf(exponent);
        if seconds >= self.cap.as_secs_f64() { self.cap } else { Duration::from_secs_f64(seconds).min(self.cap) }
    }

    /// The delay after attempt `attempt`; `draw` is uniform in `[0, 1)`.
    pub fn delay(&self, attempt: u32, draw: f64) -> Duration {
        let ceiling = self.ceiling(attempt);
        let floor = Self::FLOOR.min(ceiling);
        match self.jitter {
            Jitter::None => ceiling.max(floor),
            Jitter::Full => floor + (ceiling - floor).mul_f64(draw.clamp(0.0, 1.0)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn backoff() -> Backoff {
        Backoff::new(Duration::from_secs(1), 2.0, Duration::from_secs(300), Jitter::Full).unwrap()
    }

    #[test]
    fn ceiling_doubles_up_to_the_cap() {
        let b = backoff();
        let seconds: Vec<u64> = (1..=11).map(|n| b.ceiling(n).as_secs()).collect();
        assert_eq!(seconds, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]);
    }

    #[test]
    fn no_attempt_number_overflows() {
        let b = backoff();
        for attempt in [31, 32, 62, 64, 1024, u32::MAX - 1, u32::MAX] {
            assert_eq!(b.ceiling(attempt), Duration::from_secs(300), "attempt {attempt}");
            assert!(b.delay(attempt, 0.999_999) <= Duration::from_secs(300));
        }
        assert_eq!(b.ceiling(0), Duration::from_secs(1));
    }

    #[test]
    fn a_draw_of_zero_still_waits() {
        assert_eq!(backoff().delay(1, 0.0), Backoff::FLOOR);
    }

    #[test]
    fn impossible_values_are_refused() {
        let s = Duration::from_secs;
        assert_eq!(Backoff::new(s(0), 2.0, s(1), Jitter::Full), Err(BackoffError::ZeroInitial));
        assert_eq!(Backoff::new(s(2), 2.0, s(1), Jitter::Full), Err(BackoffError::InitialAboveCap));
        assert_eq!(Backoff::new(s(1), 0.5, s(1), Jitter::Full), Err(BackoffError::Factor));
        assert_eq!(Backoff::new(s(1), f64::NAN, s(1), Jitter::Full), Err(BackoffError::Factor));
    }
}
