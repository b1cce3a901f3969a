//! Signs of life of the daemon's loops: what `/livez` and the watchdog look at.
//!
//! A loop registers under a name with the longest time that one round may take, and then either beats (the next beat
//! is due within the bound) or rests (it waits for work that may never come). A loop that is gone without having
//! retired counts as stuck after the same bound, which is the time its supervisor has to start it again.

use std::fmt;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

const WORKING: u8 = 0;
const RESTING: u8 = 1;
const GONE: u8 = 2;

/// The register of all loops. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Loops(Arc<Register>);

#[derive(Debug)]
struct Register {
    origin: Instant,
    entries: Mutex<Vec<Arc<Entry>>>,
}

#[derive(Debug)]
struct Entry {
    name: String,
    bound: Duration,
    /// Milliseconds since the register's origin.
    last: AtomicU64,
    mode: AtomicU8,
}

/// A loop's own end: it beats, rests, retires. Dropped without [`Heart::retire`] it tells that the loop is gone.
#[derive(Debug)]
pub struct Heart {
    register: Arc<Register>,
    entry: Arc<Entry>,
}

/// A loop that made no progress within its bound.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stuck {
    pub name: String,
    pub silent: Duration,
    pub bound: Duration,
    /// Its task is gone and nobody started it again.
    pub gone: bool,
}

impl fmt::Display for Stuck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = if self.gone { "is gone" } else { "made no progress" };
        write!(f, "loop {} {what} for {} s (bound {} s)", self.name, self.silent.as_secs(), self.bound.as_secs())
    }
}

/// When a loop was last seen alive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sign {
    pub name: String,
    /// Zero for one that rests: waiting for work is progress.
    pub age: Duration,
}

impl Default for Loops {
    fn default() -> Self {
        Self(Arc::new(Register { origin: Instant::now(), entries: Mutex::default() }))
    }
}

impl Loops {
    /// Registers a loop, which counts as having beaten just now. One of the same name is replaced.
    pub fn register(&self, name: &str, bound: Duration) -> Heart {
        let entry = Arc::new(Entry {
            name: name.to_string(),
            bound,
            last: AtomicU64::new(self.0.now()),
            mode: AtomicU8::new(WORKING),
        });
        let mut entries = self.0.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.retain(|e| e.name != name);
        entries.push(entry.clone());
        Heart { register: self.0.clone(), entry }
    }

    /// The loops that broke their bound, as of now.
    pub fn stuck(&self) -> Vec<Stuck> {
        self.stuck_at(self.0.now())
    }

    fn stuck_at(&self, now: u64) -> Vec<Stuck> {
        let entries = self.0.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let mut stuck = Vec::new();
        for entry in entries.iter() {
            let mode = entry.mode.load(Ordering::Acquire);
            let silent = Duration::from_millis(now.saturating_sub(entry.last.load(Ordering::Acquire)));
            if mode != RESTING && silent > entry.bound {
                stuck.push(Stuck { name: entry.name.clone(), silent, bound: entry.bound, gone: mode == GONE });
            }
        }
        stuck
    }

    /// The last sign of every loop, by name.
    pub fn signs(&self) -> Vec<Sign> {
        let now = self.0.now();
        let entries = self.0.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let sign = |entry: &Arc<Entry>| {
            let resting = entry.mode.load(Ordering::Acquire) == RESTING;
            let age = if resting { 0 } else { now.saturating_sub(entry.last.load(Ordering::Acquire)) };
            Sign { name: entry.name.clone(), age: Duration::from_millis(age) }
        };
        let mut signs: Vec<Sign> = entries.iter().map(sign).collect();
        signs.sort_by(|a, b| a.name.cmp(&b.name));
        signs
    }
}

impl Register {
    fn now(&self) -> u64 {
        u64::try_from(self.origin.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

impl Heart {
    /// Work is being done; the next sign comes within the bound.
    pub fn beat(&self) {
        self.set(WORKING);
    }

    /// Nothing to do: waits for work that may never come, and beats as soon as there is some.
    pub fn rest(&self) {
        self.set(RESTING);
    }

    /// The loop ends because it was told to.
    pub fn retire(self) {
        let mut entries = self.register.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.retain(|e| !Arc::ptr_eq(e, &self.entry));
    }

    fn set(&self, mode: u8) {
        self.entry.last.store(self.register.now(), Ordering::Release);
        self.entry.mode.store(mode, Ordering::Release);
    }
}

impl Drop for Heart {
    fn drop(&mut self) {
        self.set(GONE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUND: Duration = Duration::from_secs(5);

    fn names(stuck: &[Stuck]) -> Vec<&str> {
        stuck.iter().map(|s| s.name.as_str()).collect()
    }

    #[test]
    fn a_loop_that_beats_within_its_bound_is_alive_and_one_that_does_not_is_stuck() {
        let loops = Loops::default();
        let _writer = loops.register("writer", BOUND);
        let now = loops.0.now();
        assert_eq!(loops.stuck_at(now + 5_000), []);
        let stuck = loops.stuck_at(now + 6_100);
        assert_eq!(names(&stuck), ["writer"]);
        assert_eq!(stuck[0].to_string(), "loop writer made no progress for 6 s (bound 5 s)");
    }

    #[test]
    fn a_loop_that_rests_may_rest_for_ever() {
        let loops = Loops::default();
        let heart = loops.register("publisher-0", BOUND);
        heart.rest();
        assert_eq!(loops.stuck_at(u64::MAX), []);
        assert_eq!(loops.signs()[0].age, Duration::ZERO);
        heart.beat();
        assert_eq!(names(&loops.stuck_at(u64::MAX)), ["publisher-0"]);
    }

    #[test]
    fn a_loop_that_died_turns_red_after_the_time_that_its_supervisor_has() {
        let loops = Loops::default();
        let heart = loops.register("consumer", BOUND);
        heart.rest();
        drop(heart);
        let now = loops.0.now();
        assert_eq!(loops.stuck_at(now), []);
        let stuck = loops.stuck_at(now + 6_000);
        assert!(stuck[0].gone && stuck[0].to_string().contains("is gone"), "{stuck:?}");
    }

    #[test]
    fn a_respawned_loop_takes_the_place_of_the_dead_one() {
        let loops = Loops::default();
        let first = loops.register("consumer", BOUND);
        let second = loops.register("consumer", BOUND);
        second.rest();
        drop(first);
        assert_eq!(loops.stuck_at(u64::MAX), []);
        assert_eq!(loops.signs().len(), 1);
    }

    #[test]
    fn a_retired_loop_is_forgotten() {
        let loops = Loops::default();
        loops.register("janitor", BOUND).retire();
        assert_eq!(loops.stuck_at(u64::MAX), []);
        assert_eq!(loops.signs(), []);
    }
}
