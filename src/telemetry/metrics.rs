//! Metrics in the OpenMetrics text form: counters and histograms that the actors feed, gauges set at each scrape.
//!
//! Names are part of the contract with dashboards and alerts: prefix `outboxd_`, base units, `_total`. Never an event
//! id, an aggregate or a subject as a label: every label value is one of a closed list in this program's text.

use std::fmt::Write as _;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;

use super::board::{Board, Facts, State};
use crate::domain::event::Millis;
use crate::domain::settle::{Class, Duplicate, Outcome};

/// Media type of what [`Metrics::render`] returns.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

type Float = Gauge<f64, AtomicU64>;

/// What one publish came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[expect(non_camel_case_types, reason = "the names are the label values")]
pub enum AttemptResult {
    stored,
    duplicate,
    collision,
    not_sent,
    unknown,
    known_id,
    refused_outage,
    refused_subject,
    refused_row,
    refused_counted,
}

impl AttemptResult {
    const ALL: [Self; 10] = [
        Self::stored,
        Self::duplicate,
        Self::collision,
        Self::not_sent,
        Self::unknown,
        Self::known_id,
        Self::refused_outage,
        Self::refused_subject,
        Self::refused_row,
        Self::refused_counted,
    ];
}

impl From<&Outcome> for AttemptResult {
    fn from(outcome: &Outcome) -> Self {
        match outcome {
            Outcome::Stored { duplicate: Duplicate::No, .. } => Self::stored,
            Outcome::Stored { duplicate: Duplicate::Same | Duplicate::Gone, .. } => Self::duplicate,
            Outcome::Collision { .. } => Self::collision,
            Outcome::NotSent => Self::not_sent,
            Outcome::Unknown { .. } => Self::unknown,
            Outcome::KnownIdInRun => Self::known_id,
            Outcome::Refused { class: Class::Outage, .. } => Self::refused_outage,
            Outcome::Refused { class: Class::Subject, .. } => Self::refused_subject,
            Outcome::Refused { class: Class::Row, .. } => Self::refused_row,
            Outcome::Refused { class: Class::Counted, .. } => Self::refused_counted,
        }
    }
}

/// Why an event was withdrawn, as a class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[expect(non_camel_case_types, reason = "the names are the label values")]
pub enum FailReason {
    /// The row's own fault: too large, illegal header or subject.
    row,
    /// The stream holds another message under its id.
    collision,
    /// Attempts and time were both exceeded.
    exhausted,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByResult {
    result: AttemptResult,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByFailReason {
    reason: FailReason,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByReason {
    reason: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByTable {
    table: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByActor {
    actor: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByState {
    state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByLoop {
    r#loop: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ConfigLabels {
    digest: String,
    generation: u64,
}

/// What only the database and the file system know, read for one scrape. `None` where it could not be read: shown as
/// NaN, never as an old value.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Gauges {
    pub oldest_pending_age: Option<f64>,
    pub pending: Option<u64>,
    pub failed: Option<u64>,
    pub published: Option<u64>,
    pub held_aggregates: Option<u64>,
    pub db_bytes: Option<u64>,
    pub db_wal_bytes: Option<u64>,
    pub disk_free_bytes: Option<u64>,
}

/// Counts since the start of the daemon.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    pub published: u64,
    pub applied: u64,
}

/// The handle that actors call. Cheap to clone; no call blocks for longer than a histogram's bucket search.
#[derive(Clone, Debug)]
pub struct Metrics(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    published: Counter,
    attempts: [Counter; AttemptResult::ALL.len()],
    publish_duration: Histogram,
    delivery_latency: Histogram,
    failed: Family<ByFailReason, Counter>,
    lease_expiries: Counter,
    retries: Counter,
    inbox_applied: Counter,
    inbox_duplicates: Counter,
    inbox_dead: Family<ByReason, Counter>,
    pruned: Family<ByTable, Counter>,
    actor_restarts: Family<ByActor, Counter>,
    log_lines_dropped: Counter,
    reconnects: Counter,
    scraped: Scraped,
    /// Held for one scrape, so that two of them do not mix their gauges.
    registry: Mutex<Registry>,
}

/// Gauges that are set at each scrape.
#[derive(Debug, Default)]
struct Scraped {
    oldest_pending_age: Float,
    events: Family<ByState, Float>,
    held_aggregates: Float,
    parked_aggregates: Float,
    leased: Float,
    db_bytes: Float,
    db_wal_bytes: Float,
    disk_free_bytes: Float,
    nats_connected: Gauge,
    inbox_connected: Gauge,
    relay_active: Gauge,
    paused: Gauge,
    reload_successful: Gauge,
    reload_success_at: Float,
    config_info: Family<ConfigLabels, Gauge>,
    loop_progress: Family<ByLoop, Float>,
    write_lock_foreign: Float,
    start_time: Float,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    pub fn new() -> Self {
        let mut registry = Registry::with_prefix("outboxd");
        let results: Family<ByResult, Counter> = Family::default();
        let inner = Inner {
            published: Counter::default(),
            attempts: AttemptResult::ALL.map(|result| results.get_or_create_owned(&ByResult { result })),
            publish_duration: Histogram::new(PUBLISH_BUCKETS),
            delivery_latency: Histogram::new(DELIVERY_BUCKETS),
            failed: Family::default(),
            lease_expiries: Counter::default(),
            retries: Counter::default(),
            inbox_applied: Counter::default(),
            inbox_duplicates: Counter::default(),
            inbox_dead: Family::default(),
            pruned: Family::default(),
            actor_restarts: Family::default(),
            log_lines_dropped: Counter::default(),
            reconnects: Counter::default(),
            scraped: Scraped::default(),
            registry: Mutex::default(),
        };
        registry.register("publish_attempts", "Publishes by what they came to", results);
        inner.register(&mut registry);
        inner.scraped.register(&mut registry);
        register_build(&mut registry);
        // a reason that never occurred is a zero, not a gap: alerts on an increase need the first sample
        for reason in [FailReason::row, FailReason::collision, FailReason::exhausted] {
            drop(inner.failed.get_or_create(&ByFailReason { reason }));
        }
        *inner.registry.lock().unwrap_or_else(PoisonError::into_inner) = registry;
        Self(Arc::new(inner))
    }

    /// Events whose publish is settled as published.
    pub fn published(&self, events: u64) {
        self.0.published.inc_by(events);
    }

    /// `events` that went out together came to `outcome`, `took` after they were sent.
    pub fn attempted(&self, outcome: &Outcome, events: u64, took: Duration) {
        let result = AttemptResult::from(outcome);
        self.0.attempts[result as usize].inc_by(events);
        match result {
            // these have no duration: nothing was sent, or nothing was answered
            AttemptResult::not_sent | AttemptResult::unknown => {}
            _ => self.0.publish_duration.observe(took.as_secs_f64()),
        }
    }

    /// One event was acknowledged at `acked`, which the application had committed at `created`.
    pub fn delivered(&self, created: Millis, acked: Millis) {
        self.0.delivery_latency.observe(acked.saturating_sub(created).max(0) as f64 / 1000.0);
    }

    /// One event was withdrawn.
    pub fn failed(&self, reason: FailReason) {
        self.0.failed.get_or_create(&ByFailReason { reason }).inc();
    }

    /// One counted failure that will be tried again.
    pub fn retried(&self) {
        self.0.retries.inc();
    }

    /// Leases that ran out before they were settled.
    pub fn leases_expired(&self, leases: u64) {
        self.0.lease_expiries.inc_by(leases);
    }

    /// Inbound messages whose effect was committed.
    pub fn inbox_applied(&self, messages: u64) {
        self.0.inbox_applied.inc_by(messages);
    }

    /// Inbound messages that had been processed before.
    pub fn inbox_duplicates(&self, messages: u64) {
        self.0.inbox_duplicates.inc_by(messages);
    }

    /// One inbound message became a dead letter; `reason` is a class, not a text with values in it.
    pub fn inbox_dead(&self, reason: &'static str) {
        self.0.inbox_dead.get_or_create(&ByReason { reason }).inc();
    }

    /// Rows that retention removed from `table`.
    pub fn pruned(&self, table: &'static str, rows: u64) {
        self.0.pruned.get_or_create(&ByTable { table }).inc_by(rows);
    }

    /// An actor crashed and was started again; `actor` is its kind, without a number.
    pub fn actor_restarted(&self, actor: &'static str) {
        self.0.actor_restarts.get_or_create(&ByActor { actor }).inc();
    }

    /// The counters that rates are made of.
    pub fn totals(&self) -> Totals {
        Totals { published: self.0.published.get(), applied: self.0.inbox_applied.get() }
    }

    /// The exposition: counters as they are, gauges from the board and from what was read for this scrape.
    pub fn render(&self, board: &Board, gauges: &Gauges, now: Millis) -> String {
        let registry = self.0.registry.lock().unwrap_or_else(PoisonError::into_inner);
        let facts = board.read();
        raise(&self.0.reconnects, facts.nats_reconnects);
        raise(&self.0.log_lines_dropped, super::logging::dropped_lines());
        self.0.scraped.set_facts(&facts);
        self.0.scraped.set_gauges(gauges);
        self.0.scraped.set_loops(board, now);
        let mut text = String::with_capacity(16 * 1024);
        if encode(&mut text, &registry).is_err() {
            // writing into a String does not fail; an encoder's bug must not take the endpoint down
            let _ = writeln!(text, "# EOF");
        }
        text
    }
}

/// Brings a counter up to a total that is kept elsewhere.
fn raise(counter: &Counter, total: u64) {
    counter.inc_by(total.saturating_sub(counter.get()));
}

/// From half a millisecond (one fsync and a round trip on a fast machine) to the default lease.
const PUBLISH_BUCKETS: [f64; 16] =
    [0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0];

/// From one millisecond, the resolution of `created_at`, to a day without the broker.
const DELIVERY_BUCKETS: [f64; 18] = [
    0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 10.0, 60.0, 300.0, 3_600.0, 21_600.0,
    86_400.0,
];

impl Inner {
    fn register(&self, r: &mut Registry) {
        r.register("published", "Events settled as published", self.published.clone());
        r.register(
            "publish_duration_seconds",
            "Time from sending a message, or a run of one aggregate, to its answer",
            self.publish_duration.clone(),
        );
        r.register(
            "delivery_latency_seconds",
            "Time from the commit of an event (created_at) to its acknowledgement by JetStream",
            self.delivery_latency.clone(),
        );
        r.register("failed", "Events withdrawn as dead letters", self.failed.clone());
        r.register("retries", "Counted failures that will be tried again", self.retries.clone());
        r.register("lease_expiries", "Leases that ran out before they were settled", self.lease_expiries.clone());
        r.register("inbox_applied", "Inbound messages whose effect was committed", self.inbox_applied.clone());
        r.register("inbox_duplicates", "Inbound messages processed before", self.inbox_duplicates.clone());
        r.register("inbox_dead", "Inbound messages that became dead letters", self.inbox_dead.clone());
        r.register("pruned_rows", "Rows removed by retention", self.pruned.clone());
        r.register("actor_restarts", "Crashed actors that were started again", self.actor_restarts.clone());
        r.register("log_lines_dropped", "Log lines that nobody took", self.log_lines_dropped.clone());
        r.register("nats_reconnects", "Connections to NATS after the first one", self.reconnects.clone());
    }
}

impl Scraped {
    fn register(&self, r: &mut Registry) {
        r.register(
            "oldest_pending_age_seconds",
            "Age of the oldest event that is due and not published, 0 where there is none",
            self.oldest_pending_age.clone(),
        );
        r.register("events", "Rows of outbox_events by state; published may be a minute old", self.events.clone());
        r.register("held_aggregates", "Aggregates behind a failed event", self.held_aggregates.clone());
        r.register("parked_aggregates", "Aggregates waiting for their subject", self.parked_aggregates.clone());
        r.register("leased_events", "Events leased by this daemon now", self.leased.clone());
        r.register("db_bytes", "Size of the database file", self.db_bytes.clone());
        r.register("db_wal_bytes", "Size of the write-ahead log", self.db_wal_bytes.clone());
        r.register("disk_free_bytes", "Free space where the database lies", self.disk_free_bytes.clone());
        r.register("nats_connected", "1 while the relay is connected to NATS", self.nats_connected.clone());
        r.register("inbox_connected", "1 while the inbox is connected to NATS", self.inbox_connected.clone());
        r.register(
            "relay_active",
            "1 where this daemon relays, 0 where it stands by or is off",
            self.relay_active.clone(),
        );
        r.register("paused", "1 while publishing is paused by an operator", self.paused.clone());
        r.register(
            "config_last_reload_successful",
            "0 after a rejected reload, until one is accepted",
            self.reload_successful.clone(),
        );
        r.register(
            "config_last_reload_success_timestamp_seconds",
            "When the running configuration came into force",
            self.reload_success_at.clone(),
        );
        r.register("config_info", "The running configuration", self.config_info.clone());
        r.register(
            "loop_last_progress_timestamp_seconds",
            "When each loop of the daemon was last seen alive",
            self.loop_progress.clone(),
        );
        r.register(
            "database_locked_since_timestamp_seconds",
            "Since when another process has held the write lock, 0 where none does",
            self.write_lock_foreign.clone(),
        );
        r.register("start_timestamp_seconds", "When this daemon started", self.start_time.clone());
    }

    fn set_facts(&self, facts: &Facts) {
        self.parked_aggregates.set(facts.parked_aggregates.iter().sum::<u64>() as f64);
        self.leased.set(facts.leased as f64);
        self.nats_connected.set(i64::from(facts.nats_connected));
        self.inbox_connected.set(i64::from(facts.inbox_connected));
        self.relay_active.set(i64::from(facts.relay_role == "active"));
        self.paused.set(i64::from(facts.state == State::Paused));
        self.reload_successful.set(i64::from(facts.config_last_reload != "rejected"));
        self.reload_success_at.set(seconds(facts.config_applied_at.max(facts.started_at)));
        self.write_lock_foreign.set(seconds(facts.locked_since));
        self.start_time.set(seconds(facts.started_at));
        self.config_info.clear();
        let labels = ConfigLabels { digest: facts.config_digest.clone(), generation: facts.config_generation };
        self.config_info.get_or_create(&labels).set(1);
    }

    fn set_gauges(&self, gauges: &Gauges) {
        let float = |value: Option<u64>| value.map_or(f64::NAN, |v| v as f64);
        self.oldest_pending_age.set(gauges.oldest_pending_age.unwrap_or(f64::NAN));
        for (state, value) in [("pending", gauges.pending), ("failed", gauges.failed), ("published", gauges.published)]
        {
            self.events.get_or_create(&ByState { state }).set(float(value));
        }
        self.held_aggregates.set(float(gauges.held_aggregates));
        self.db_bytes.set(float(gauges.db_bytes));
        self.db_wal_bytes.set(float(gauges.db_wal_bytes));
        self.disk_free_bytes.set(float(gauges.disk_free_bytes));
    }

    fn set_loops(&self, board: &Board, now: Millis) {
        self.loop_progress.clear();
        for sign in board.loops().signs() {
            let at = seconds(now) - sign.age.as_secs_f64();
            self.loop_progress.get_or_create(&ByLoop { r#loop: sign.name }).set(at);
        }
    }
}

fn register_build(registry: &mut Registry) {
    let labels = vec![("version", env!("CARGO_PKG_VERSION"))];
    registry.register("build", "What is running", Info::new(labels));
}

fn seconds(millis: Millis) -> f64 {
    millis as f64 / 1000.0
}

#[cfg(test)]
#[path = "metrics_tests.rs"]
mod tests;
