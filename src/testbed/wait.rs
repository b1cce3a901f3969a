//! Waiting on levels: never a sleep that hopes, always a condition with a bound that tells what it last saw.

use std::fmt::Display;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::Trouble;

/// Pause between two looks: short against a person, long against a core.
const PAUSE: Duration = Duration::from_millis(10);

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Every wait of this process ends now, with [`Trouble::Interrupted`]: what was started is then ended in order.
pub fn interrupt() {
    INTERRUPTED.store(true, Ordering::Relaxed);
}

/// An error once somebody has called [`interrupt`]; for loops that do not wait.
pub fn interrupted() -> Result<(), Trouble> {
    if INTERRUPTED.load(Ordering::Relaxed) { Err(Trouble::Interrupted) } else { Ok(()) }
}

/// Looks until `look` answers `Ok`, at most for `bound`. `look` answers `Err` with what it saw instead.
pub fn until<T, E: Display>(
    what: impl Into<String>,
    bound: Duration,
    mut look: impl FnMut() -> Result<T, E>,
) -> Result<T, Trouble> {
    let deadline = Instant::now() + bound;
    loop {
        interrupted()?;
        match look() {
            Ok(value) => return Ok(value),
            Err(last) if Instant::now() >= deadline => {
                return Err(Trouble::Late { what: what.into(), bound, last: last.to_string() });
            }
            Err(_) => std::thread::sleep(PAUSE),
        }
    }
}

/// Looks until `look` answers the same value for `calm`: nothing moves any more. Answers that value.
pub fn until_still<T: PartialEq + Display>(
    what: impl Into<String>,
    calm: Duration,
    bound: Duration,
    mut look: impl FnMut() -> T,
) -> Result<T, Trouble> {
    let deadline = Instant::now() + bound;
    let mut last = look();
    let mut since = Instant::now();
    loop {
        interrupted()?;
        if since.elapsed() >= calm {
            return Ok(last);
        }
        if Instant::now() >= deadline {
            return Err(Trouble::Late { what: what.into(), bound, last: last.to_string() });
        }
        std::thread::sleep(PAUSE);
        let now = look();
        if now != last {
            (last, since) = (now, Instant::now());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_level_that_never_comes_is_told_with_what_was_seen() {
        let mut looks = 0;
        let late = until("nine", Duration::from_millis(50), || {
            looks += 1;
            Err::<(), _>(format!("look {looks}"))
        });
        let text = late.expect_err("it never comes").to_string();
        assert!(text.starts_with("nine: not within 0.05 s, last seen: look "), "{text}");
    }

    #[test]
    fn a_level_is_answered_with_its_value() {
        let mut looks = 0;
        let found = until("third look", Duration::from_secs(5), || {
            looks += 1;
            if looks == 3 { Ok(looks) } else { Err(looks) }
        });
        assert_eq!(found.expect("the third look is the one"), 3);
    }

    #[test]
    fn stillness_begins_with_the_last_change() {
        let mut looks = 0;
        let calm = Duration::from_millis(40);
        let still = until_still("still", calm, Duration::from_secs(5), || {
            looks += 1;
            looks.min(5)
        });
        assert_eq!(still.expect("it rests at five"), 5);
        assert!(looks > 5, "{looks}");
    }
}
