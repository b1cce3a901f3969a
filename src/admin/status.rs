//! What `status` and `/v1/status` show: one shape, put together from the board and from the database.
//!
//! While the daemon is down the same shape is filled from the file alone. Field names are part of the contract; more
//! may be added. May import: telemetry, domain, serde.

use serde::{Deserialize, Serialize};

use crate::domain::event::Millis;
use crate::telemetry::board::{Facts, State};

/// What only the database and its files know.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tally {
    pub source: String,
    pub path: String,
    pub pending: u64,
    pub failed: u64,
    /// May be a minute old.
    pub published: u64,
    /// Of the oldest event that is due; 0 where there is none.
    pub oldest_pending_age_seconds: f64,
    pub held_aggregates: u64,
    /// Rows under leases that have not run out, whoever holds them.
    pub leased: u64,
    pub inbox_processed: u64,
    pub inbox_duplicates: u64,
    pub inbox_dead: u64,
    /// Paused by an operator: until this instant, or until `resume` where it is `Millis::MAX`.
    pub paused_until: Option<Millis>,
    pub bytes: u64,
    pub wal_bytes: u64,
    pub disk_free_bytes: Option<u64>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// "stopped", "starting", "running", "draining", "paused" or "halted".
    pub state: String,
    /// What it does or waits for, in words.
    pub doing: String,
    pub last_error: String,
    pub version: String,
    pub pid: Option<u32>,
    /// RFC 3339; `None` while stopped.
    pub started_at: Option<String>,
    pub uptime_seconds: f64,
    pub source: String,
    /// RFC 3339, "until resume", or `None` where it is not paused.
    pub paused_until: Option<String>,
    pub nats: Nats,
    pub outbox: Outbox,
    pub relay: Relay,
    pub inbox: Inbox,
    /// Over the last half minute.
    pub rates: Rates,
    pub config: Config,
    pub http: Listener,
    pub admin: Listener,
    pub database: Database,
    /// Loops that made no progress within their bound.
    pub stuck: Vec<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Nats {
    pub connected: bool,
    /// Why publishing cannot work now; empty where it can.
    pub reason: String,
    pub since: Option<String>,
    pub server: String,
    pub reconnects: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Outbox {
    pub pending: u64,
    pub failed: u64,
    pub published: u64,
    pub oldest_pending_age_seconds: f64,
    pub held_aggregates: u64,
    pub parked_aggregates: u64,
    /// Some of them.
    pub parked: Vec<Parked>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Parked {
    pub aggregate: String,
    pub since: Option<String>,
    pub reason: String,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Relay {
    /// "active", "standby" or "off".
    pub role: String,
    pub leased: u64,
    pub path: String,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Inbox {
    pub connected: bool,
    pub reason: String,
    /// Since the database began; the same for the next.
    pub processed: u64,
    pub duplicates: u64,
    /// Dead letters that lie there now.
    pub dead: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Rates {
    pub published_per_second: f64,
    pub applied_per_second: f64,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Config {
    /// From 1; 0 while no daemon runs.
    pub generation: u64,
    pub digest: String,
    /// "ok", "rejected" or "none".
    pub last_reload: String,
    pub last_reload_message: String,
    pub last_reload_at: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Listener {
    /// The address or path that is served; empty where it is off.
    pub listen: String,
    /// Why it is not served; empty where it is.
    pub problem: String,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Database {
    pub path: String,
    pub bytes: u64,
    pub wal_bytes: u64,
    pub disk_free_bytes: Option<u64>,
    /// For how long another process has held the write lock; 0 where none does.
    pub locked_seconds: f64,
}

impl Status {
    /// Of a running daemon.
    pub fn running(facts: &Facts, tally: &Tally, stuck: Vec<String>, now: Millis) -> Self {
        let age = |since: Millis| if since > 0 { (now - since).max(0) as f64 / 1000.0 } else { 0.0 };
        let parked = facts.parked.iter().flatten().take(100).map(|p| Parked {
            aggregate: p.aggregate.clone(),
            since: instant(p.since),
            reason: p.reason.clone(),
        });
        let mut status = Self {
            state: facts.state.as_str().into(),
            doing: crate::telemetry::notify::status_line(facts),
            last_error: facts.last_error.clone(),
            pid: Some(std::process::id()),
            started_at: instant(facts.started_at),
            uptime_seconds: age(facts.started_at),
            nats: Nats {
                connected: facts.nats_connected,
                reason: facts.nats_reason.clone(),
                since: instant(facts.nats_since),
                server: facts.nats_server.clone(),
                reconnects: facts.nats_reconnects,
            },
            config: Config {
                generation: facts.config_generation,
                digest: facts.config_digest.clone(),
                last_reload: word_or(&facts.config_last_reload, "none"),
                last_reload_message: facts.config_last_reload_message.clone(),
                last_reload_at: instant(facts.config_last_reload_at),
            },
            http: Listener { listen: facts.http_listen.clone(), problem: facts.http_problem.clone() },
            admin: Listener { listen: facts.admin_listen.clone(), problem: facts.admin_problem.clone() },
            stuck,
            ..Self::from_file(tally)
        };
        status.outbox.parked = parked.collect();
        status.outbox.parked_aggregates = facts.parked_aggregates.iter().sum();
        status.relay =
            Relay { role: word_or(&facts.relay_role, "off"), leased: facts.leased, path: facts.relay_path.clone() };
        status.inbox.connected = facts.inbox_connected;
        status.inbox.reason = facts.inbox_reason.clone();
        status.database.locked_seconds = age(facts.locked_since);
        status
    }

    /// Of a database that no daemon serves.
    pub fn stopped(tally: &Tally, http_listen: &str) -> Self {
        Self {
            state: "stopped".into(),
            doing: "no daemon runs; figures are from the database".into(),
            http: Listener { listen: http_listen.into(), problem: String::new() },
            ..Self::from_file(tally)
        }
    }

    fn from_file(tally: &Tally) -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION").into(),
            source: tally.source.clone(),
            paused_until: match tally.paused_until {
                None => None,
                Some(Millis::MAX) => Some("until resume".into()),
                Some(until) => instant(until),
            },
            outbox: Outbox {
                pending: tally.pending,
                failed: tally.failed,
                published: tally.published,
                oldest_pending_age_seconds: tally.oldest_pending_age_seconds,
                held_aggregates: tally.held_aggregates,
                ..Outbox::default()
            },
            relay: Relay { role: "off".into(), leased: tally.leased, path: String::new() },
            inbox: Inbox {
                processed: tally.inbox_processed,
                duplicates: tally.inbox_duplicates,
                dead: tally.inbox_dead,
                ..Inbox::default()
            },
            config: Config { last_reload: "none".into(), ..Config::default() },
            database: Database {
                path: tally.path.clone(),
                bytes: tally.bytes,
                wal_bytes: tally.wal_bytes,
                disk_free_bytes: tally.disk_free_bytes,
                locked_seconds: 0.0,
            },
            ..Self::default()
        }
    }

    /// Whether events are being taken to the broker, or would be as soon as it is there.
    pub fn is_serving(&self) -> bool {
        [State::Running, State::Paused].iter().any(|s| s.as_str() == self.state)
    }
}

fn word_or(word: &str, other: &str) -> String {
    if word.is_empty() { other.into() } else { word.into() }
}

fn instant(at: Millis) -> Option<String> {
    if at <= 0 {
        return None;
    }
    jiff::Timestamp::from_millisecond(at).ok().map(|t| format!("{t:.3}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::board;
    use serde_json::Value;

    /// Every field that programs outside rely on.
    const CONTRACT: [&str; 18] = [
        "state",
        "nats.connected",
        "outbox.pending",
        "outbox.failed",
        "outbox.published",
        "outbox.oldest_pending_age_seconds",
        "outbox.held_aggregates",
        "outbox.parked_aggregates",
        "relay.role",
        "relay.leased",
        "inbox.processed",
        "inbox.duplicates",
        "inbox.dead",
        "config.generation",
        "config.last_reload",
        "http.listen",
        "database.wal_bytes",
        "database.path",
    ];

    fn at<'a>(value: &'a Value, path: &str) -> &'a Value {
        path.split('.').fold(value, |v, key| v.get(key).unwrap_or_else(|| panic!("status lacks {path}")))
    }

    #[test]
    fn every_field_of_the_contract_is_there_in_every_state() {
        let tally = Tally { pending: 3, inbox_dead: 1, ..Tally::default() };
        let stopped = serde_json::to_value(Status::stopped(&tally, "127.0.0.1:8787")).unwrap();
        let running = serde_json::to_value(Status::running(&Facts::default(), &tally, vec![], 0)).unwrap();
        for value in [&stopped, &running] {
            for path in CONTRACT {
                at(value, path);
            }
            assert_eq!(at(value, "outbox.pending"), 3);
            assert_eq!(at(value, "config.last_reload"), "none");
        }
        assert_eq!(at(&stopped, "state"), "stopped");
        assert_eq!(at(&stopped, "http.listen"), "127.0.0.1:8787");
        assert_eq!(at(&running, "state"), "starting");
    }

    #[test]
    fn parked_aggregates_are_summed_over_publishers_and_named() {
        let parked = |n: i64| board::Parked { aggregate: format!("asset/{n}"), since: n, reason: "503".into() };
        let facts = Facts {
            state: State::Running,
            parked: vec![vec![parked(1_000)], vec![], vec![parked(2_000)]],
            parked_aggregates: vec![150, 0, 1],
            ..Facts::default()
        };
        let status = Status::running(&facts, &Tally::default(), vec![], 5_000);
        assert_eq!(status.outbox.parked_aggregates, 151);
        assert_eq!(status.outbox.parked.len(), 2);
        assert_eq!(status.outbox.parked[0].since.as_deref(), Some("1970-01-01T00:00:01.000Z"));
        assert!(status.is_serving());
    }

    #[test]
    fn ages_are_seconds_and_never_negative() {
        let facts = Facts { started_at: 10_000, locked_since: 14_500, ..Facts::default() };
        let status = Status::running(&facts, &Tally::default(), vec![], 15_000);
        assert_eq!((status.uptime_seconds, status.database.locked_seconds), (5.0, 0.5));
        let early = Status::running(&facts, &Tally::default(), vec![], 1);
        assert_eq!(early.uptime_seconds, 0.0);
    }

    #[test]
    fn a_pause_without_an_end_says_so() {
        let until = |at| Status::stopped(&Tally { paused_until: at, ..Tally::default() }, "").paused_until;
        assert_eq!(until(None), None);
        assert_eq!(until(Some(Millis::MAX)).as_deref(), Some("until resume"));
        assert_eq!(until(Some(86_400_000)).as_deref(), Some("1970-01-02T00:00:00.000Z"));
    }
}
