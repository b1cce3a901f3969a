//! The shapes of the configuration: one struct a table, one field a key, the defaults of the code.
//!
//! Paths are absolute here: relative ones were resolved against the configuration file. Durations and sizes are typed.

use std::path::PathBuf;
use std::time::Duration;

pub use crate::domain::backoff::Jitter;
pub use crate::domain::wire::Format;

/// The whole configuration, valid: every relation between keys has been checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Identity in `ce-source` and `Nats-Msg-Id`; empty: the id made at `db init`, kept in the database.
    pub source: String,
    pub database: Database,
    pub nats: Nats,
    pub stream: Stream,
    pub relay: Relay,
    pub inbox: Inbox,
    pub retention: Retention,
    pub http: Http,
    pub admin: Admin,
    pub log: Log,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Database {
    pub path: PathBuf,
    pub synchronous: Synchronous,
    pub busy_timeout: Duration,
    pub readers: usize,
    pub checkpoint: Checkpoint,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Synchronous {
    Full,
    Normal,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checkpoint {
    Passive,
    Truncate,
    Off,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Nats {
    pub urls: Vec<String>,
    pub user: String,
    pub password_file: Option<PathBuf>,
    pub token_file: Option<PathBuf>,
    pub nkey_seed_file: Option<PathBuf>,
    pub credentials_file: Option<PathBuf>,
    pub ping_interval: Duration,
    pub tls: Tls,
}

#[derive(Clone, Debug, PartialEq, Default)]
pub struct Tls {
    pub ca_file: Option<PathBuf>,
    pub cert_file: Option<PathBuf>,
    pub key_file: Option<PathBuf>,
    /// TLS handshake before the server's INFO.
    pub first: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Stream {
    pub name: String,
    pub subjects: Vec<String>,
    pub domain: String,
    pub manage: Manage,
    pub replicas: usize,
    /// Zero: no limit.
    pub max_age: Duration,
    /// Bytes; zero: no limit.
    pub max_bytes: u64,
    pub duplicate_window: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manage {
    Create,
    Check,
    Off,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Relay {
    pub enabled: bool,
    pub publishers: usize,
    pub batch: usize,
    /// Bytes.
    pub batch_bytes: u64,
    pub lease: Duration,
    pub ack_wait: Duration,
    /// A template that `domain::subject::Template` has accepted.
    pub subject: String,
    pub format: Format,
    pub ordering: Ordering,
    pub on_failed: OnFailed,
    pub max_attempts: u32,
    pub min_failing_for: Duration,
    pub barrier: bool,
    pub backoff: Backoff,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ordering {
    Aggregate,
    None,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnFailed {
    Hold,
    Skip,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Backoff {
    pub initial: Duration,
    pub factor: f64,
    pub cap: Duration,
    pub jitter: Jitter,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Inbox {
    pub enabled: bool,
    pub stream: String,
    pub domain: String,
    pub durable: String,
    pub filter_subjects: Vec<String>,
    pub deliver: Deliver,
    pub batch: usize,
    pub ack_wait: Duration,
    pub max_deliver: u32,
    pub own_events: OwnEvents,
    pub unmatched: Unmatched,
    pub on_gap: OnGap,
    pub gap_wait: Duration,
    /// `[[inbox.handler]]`, in file order.
    pub handler: Vec<Handler>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deliver {
    All,
    New,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnEvents {
    Skip,
    Apply,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unmatched {
    Skip,
    Store,
    Dead,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnGap {
    Apply,
    Wait,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Handler {
    /// Exact, a prefix with `*`, or `*`.
    pub event_type: String,
    pub apply: Apply,
    /// Statements for [`Apply::Sql`], empty for the others.
    pub sql: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Apply {
    Assets,
    Store,
    Sql,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Retention {
    /// Zero: keep for ever. The same for the other three.
    pub published: Duration,
    pub processed: Duration,
    pub inbox: Duration,
    pub audit: Duration,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Http {
    /// Empty: off.
    pub listen: String,
    pub token_file: Option<PathBuf>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Admin {
    /// `None`: beside the database, or a short path under the run-time folder.
    pub socket: Option<PathBuf>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Log {
    /// A level, or a tracing directive list such as `info,outboxd=debug`.
    pub level: String,
    pub format: LogFormat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    Text,
    Json,
    Journald,
    Auto,
}

impl Default for Config {
    fn default() -> Self {
        let s = Duration::from_secs;
        const DAY: u64 = 24 * 60 * 60;
        Self {
            source: String::new(),
            database: Database {
                path: "outboxd.db".into(),
                synchronous: Synchronous::Full,
                busy_timeout: s(5),
                readers: 2,
                checkpoint: Checkpoint::Passive,
            },
            nats: Nats {
                urls: vec!["nats://127.0.0.1:4222".into()],
                user: String::new(),
                password_file: None,
                token_file: None,
                nkey_seed_file: None,
                credentials_file: None,
                ping_interval: s(5),
                tls: Tls::default(),
            },
            stream: Stream {
                name: "EVENTS".into(),
                subjects: vec!["events.>".into()],
                domain: String::new(),
                manage: Manage::Create,
                replicas: 1,
                max_age: s(0),
                max_bytes: 0,
                duplicate_window: s(120),
            },
            relay: Relay {
                enabled: true,
                publishers: 2,
                batch: 512,
                batch_bytes: 4 << 20,
                lease: s(30),
                ack_wait: s(5),
                subject: "events.{aggregate_type}.{aggregate_id}.{event}".into(),
                format: Format::Envelope,
                ordering: Ordering::Aggregate,
                on_failed: OnFailed::Hold,
                max_attempts: 10,
                min_failing_for: s(300),
                barrier: true,
                backoff: Backoff { initial: Duration::from_millis(200), factor: 2.0, cap: s(60), jitter: Jitter::Full },
            },
            inbox: Inbox {
                enabled: false,
                stream: "EVENTS".into(),
                domain: String::new(),
                durable: "outboxd".into(),
                filter_subjects: vec!["events.>".into()],
                deliver: Deliver::All,
                batch: 256,
                ack_wait: s(30),
                max_deliver: 10,
                own_events: OwnEvents::Skip,
                unmatched: Unmatched::Skip,
                on_gap: OnGap::Apply,
                gap_wait: s(60),
                handler: Vec::new(),
            },
            retention: Retention {
                published: s(7 * DAY),
                processed: s(30 * DAY),
                inbox: s(30 * DAY),
                audit: s(365 * DAY),
            },
            http: Http { listen: "127.0.0.1:8787".into(), token_file: None },
            admin: Admin { socket: None },
            log: Log { level: "info".into(), format: LogFormat::Auto },
        }
    }
}
