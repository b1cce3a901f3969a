//! The board: live facts of a running daemon, written by whoever knows them, read by status, metrics and health.
//!
//! Levels only, guarded by one mutex that is held for a copy; counters are in `metrics.rs`.

use std::sync::{Arc, Mutex, PoisonError};

use super::progress::Loops;
use crate::domain::event::Millis;

/// State of the daemon as `status` names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum State {
    #[default]
    Starting,
    Running,
    Draining,
    Paused,
    Halted,
}

impl State {
    pub fn as_str(self) -> &'static str {
        match self {
            State::Starting => "starting",
            State::Running => "running",
            State::Draining => "draining",
            State::Paused => "paused",
            State::Halted => "halted",
        }
    }
}

/// An aggregate that waits for its subject.
#[derive(Clone, Debug, PartialEq)]
pub struct Parked {
    pub aggregate: String,
    pub since: Millis,
    pub reason: String,
}

/// The facts. Cheap to clone: it is copied for every status.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Facts {
    pub state: State,
    pub started_at: Millis,
    pub nats_connected: bool,
    /// Why it is not connected or not usable; empty where all is well.
    pub nats_reason: String,
    pub nats_since: Millis,
    pub nats_reconnects: u64,
    pub nats_server: String,
    /// "active", "standby" or "off".
    pub relay_role: String,
    /// "pipelined" or "pipelined + atomic runs".
    pub relay_path: String,
    pub leased: u64,
    /// By publisher, at most a hundred entries each.
    pub parked: Vec<Vec<Parked>>,
    pub parked_aggregates: Vec<u64>,
    pub inbox_connected: bool,
    pub inbox_reason: String,
    /// Messages that wait for a retry, a version or a table.
    pub inbox_waiting: u64,
    /// Why the last of them waits, or why the database cannot be written; empty where all is well.
    pub inbox_trouble: String,
    pub config_generation: u64,
    pub config_digest: String,
    /// "ok", "rejected" or "none".
    pub config_last_reload: String,
    pub config_last_reload_message: String,
    pub config_last_reload_at: Millis,
    /// When the running configuration came into force: the start, or the last accepted reload.
    pub config_applied_at: Millis,
    pub http_listen: String,
    pub http_problem: String,
    /// Path of the command line's socket; empty where it is not served.
    pub admin_listen: String,
    pub admin_problem: String,
    /// The write lock has been held by another process since this instant; 0 where it is not.
    pub locked_since: Millis,
    pub last_error: String,
    /// What the daemon does or waits for, in words: the STATUS= of systemd.
    pub doing: String,
}

/// Shared by everything in the daemon.
#[derive(Clone, Debug, Default)]
pub struct Board {
    facts: Arc<Mutex<Facts>>,
    loops: Loops,
}

impl Board {
    /// A copy of the facts as they are now.
    pub fn read(&self) -> Facts {
        self.facts.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Changes some facts; `change` must be short and must not block.
    pub fn write<T>(&self, change: impl FnOnce(&mut Facts) -> T) -> T {
        change(&mut self.facts.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The signs of life of the daemon's loops: each registers here, beats or rests.
    pub fn loops(&self) -> &Loops {
        &self.loops
    }
}
