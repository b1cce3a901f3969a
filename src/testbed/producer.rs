//! An application under way: commits events in a thread of its own until it is told to stop.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rusqlite::Connection;

use super::Trouble;
use super::application::{Application, Generator, NewEvent};

/// Work beside each event, in the same transaction.
pub type Also = fn(&Connection, &NewEvent) -> rusqlite::Result<()>;

/// How a producer works.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Events in one transaction.
    pub per_transaction: usize,
    /// From the start of one transaction to the start of the next.
    pub every: Duration,
    /// Work beside each event.
    pub also: Also,
}

/// A running producer. Dropping it stops it.
#[derive(Debug)]
pub struct Producer {
    stop: Arc<AtomicBool>,
    committed: Arc<AtomicUsize>,
    thread: Option<JoinHandle<Result<(), Trouble>>>,
}

impl Producer {
    /// Starts to write; ends by itself after `limit` events.
    pub fn start(mut application: Application, mut events: Generator, pace: Pace, limit: usize) -> Self {
        let (stop, committed) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let (stopped, written) = (stop.clone(), committed.clone());
        let thread = std::thread::spawn(move || {
            let mut next = Instant::now();
            while !stopped.load(Ordering::Relaxed) && written.load(Ordering::Relaxed) < limit {
                let count = pace.per_transaction.min(limit - written.load(Ordering::Relaxed));
                application.commit_with(&events.take(count), pace.also)?;
                written.fetch_add(count, Ordering::Relaxed);
                next += pace.every;
                std::thread::sleep(next.saturating_duration_since(Instant::now()));
            }
            Ok(())
        });
        Self { stop, committed, thread: Some(thread) }
    }

    /// Events committed so far.
    pub fn committed(&self) -> usize {
        self.committed.load(Ordering::Relaxed)
    }

    /// Waits until it has written all of its limit.
    pub fn finish(mut self) -> Result<usize, Trouble> {
        self.join()
    }

    /// Stops it after its current transaction; answers the number of events it committed.
    pub fn stop(mut self) -> Result<usize, Trouble> {
        self.stop.store(true, Ordering::Relaxed);
        self.join()
    }

    fn join(&mut self) -> Result<usize, Trouble> {
        if let Some(thread) = self.thread.take() {
            thread.join().map_err(|_| Trouble::failed("a producer panicked"))??;
        }
        Ok(self.committed())
    }
}

impl Drop for Producer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.join();
    }
}
