//! The verbs as clap knows them: names, arguments, the words of `--help`. What they do stands beside each verb's file.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Subcommand, ValueEnum, ValueHint};
use humantime::parse_duration;

#[derive(Debug, Subcommand)]
pub(super) enum Verb {
    /// Run the daemon: publish what is committed, apply what arrives
    Run {
        /// Longest orderly stop after SIGTERM or SIGINT
        #[arg(long, value_name = "DURATION", default_value = "20s", value_parser = parse_duration)]
        grace: Duration,
    },
    /// Show state, NATS, backlog, ages, failed and held events, sizes; exit 0 in every state
    Status {
        #[command(flatten)]
        json: Json,
        /// Again every two seconds, until it is interrupted
        #[arg(long)]
        watch: bool,
    },
    /// Make, take over and keep the database
    #[command(subcommand)]
    Db(DbVerb),
    /// Look at events of the outbox; retry or discard failed ones
    #[command(subcommand)]
    Events(EventsVerb),
    /// Look at inbound dead letters; retry or discard them
    #[command(subcommand)]
    Inbox(InboxVerb),
    /// The example domain: a row and its event in one transaction
    #[command(subcommand)]
    Asset(AssetVerb),
    /// Stop publishing until `resume`, or for a while; outlives a restart
    Pause {
        /// For how long, such as 30m; without it until `resume`
        #[arg(long = "for", value_name = "DURATION", value_parser = parse_duration)]
        period: Option<Duration>,
    },
    /// Publish again
    Resume,
    /// Read the configuration again, as SIGHUP does, and say what came of it; exit 78 where it is rejected
    Reload {
        /// Wait for the result. It always is; scripts may say so
        #[arg(long)]
        wait: bool,
        #[command(flatten)]
        json: Json,
    },
    /// Show who changed what, newest first
    Audit {
        /// Most rows
        #[arg(long, default_value_t = 100)]
        limit: u32,
        #[command(flatten)]
        json: Json,
    },
    /// Check, show and describe the configuration, without a daemon
    #[command(subcommand)]
    Config(ConfigVerb),
    /// Play the whole flow on this machine, with a nats-server of its own, and prove it
    Demo {
        /// Fewer events and shorter outages
        #[arg(long)]
        fast: bool,
        /// Leave the folder with databases, configurations and logs
        #[arg(long)]
        keep: bool,
    },
    /// Measure this machine: drain rate, latency, idle cost, each beside the raw limits
    Bench {
        /// What to measure; all without one
        measures: Vec<Measure>,
        /// Events of a backlog
        #[arg(long, default_value_t = 50_000)]
        events: usize,
        /// Times that what is compared is run in turn
        #[arg(long, default_value_t = 3)]
        rounds: usize,
        /// Length of the latency and idle measurements
        #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = parse_duration)]
        duration: Duration,
        #[command(flatten)]
        json: Json,
    },
    /// Say what an exit code or a JetStream code means, and what to do
    Explain {
        /// An exit code such as 78, a JetStream code such as 10077, or `all`
        code: String,
    },
    /// Print the completion script of a shell
    Completions { shell: clap_complete::Shell },
    /// Write the manual pages into a folder
    Man {
        #[arg(value_hint = ValueHint::DirPath)]
        dir: PathBuf,
    },
    /// Print versions of outboxd and of what it is built on
    Version,
}

/// Every list and every answer is also there for programs.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(super) struct Json {
    /// JSON: lists are arrays of objects with the column names
    #[arg(long)]
    pub(super) json: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum Measure {
    /// A backlog of many aggregates
    Drain,
    /// A backlog of a single aggregate
    OneAggregate,
    /// From commit to stream, one event a transaction
    Latency,
    /// CPU and memory with nothing to do
    Idle,
    /// Inbound messages applied
    Inbox,
}

#[derive(Debug, Subcommand)]
pub(super) enum DbVerb {
    /// Make the file where there is none, and our tables in it where there are none
    Init {
        /// With the table `assets` of the example domain
        #[arg(long)]
        example: bool,
    },
    /// Take a classic outbox over, or bring an older one to this version, in one transaction
    Migrate {
        /// Change nothing; list what would be done, what depends on the table, odd rows, the lock time
        #[arg(long)]
        dry_run: bool,
        /// `hold`: old failed rows hold the later events of their aggregate; without it they hold nobody
        #[arg(long, value_name = "RULE")]
        failed: Option<FailedRule>,
        /// `debezium`: add a view `outbox` that applications of Debezium's layout insert into
        #[arg(long, value_name = "LAYOUT")]
        compat: Option<Compat>,
        #[command(flatten)]
        json: Json,
    },
    /// Print the DDL, for teams that keep their own migrations
    Schema,
    /// Check the file, its tables, guards and indexes; exit 1 where something is wrong
    Check {
        #[command(flatten)]
        json: Json,
    },
    /// Write a whole copy into a new file while everybody goes on
    Backup {
        #[arg(value_hint = ValueHint::FilePath)]
        file: PathBuf,
    },
    /// Remove now what the retention of the configuration allows
    Prune {
        #[command(flatten)]
        json: Json,
    },
    /// List what outboxd made in the file, and with --yes remove it
    Uninstall {
        /// Remove it
        #[arg(long)]
        yes: bool,
        /// Also with events that were not published yet
        #[arg(long, requires = "yes")]
        force: bool,
        #[command(flatten)]
        json: Json,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum FailedRule {
    Hold,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Compat {
    Debezium,
}

#[derive(Debug, Subcommand)]
pub(super) enum EventsVerb {
    /// List events: pending and failed ones oldest first, else newest first
    List {
        /// pending, published or failed
        #[arg(long)]
        status: Option<String>,
        /// TYPE/ID, such as asset/asset-042
        #[arg(long, value_name = "T/ID")]
        aggregate: Option<String>,
        /// Event type
        #[arg(long = "type", value_name = "T")]
        event_type: Option<String>,
        /// Created longer ago, such as 10m
        #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
        older_than: Option<Duration>,
        /// Most events
        #[arg(long, default_value_t = 100)]
        limit: u32,
        #[command(flatten)]
        json: Json,
    },
    /// Show everything about one event
    Show {
        id: String,
        #[command(flatten)]
        json: Json,
    },
    /// Show new events as they are committed, until it is interrupted
    Tail {
        /// One JSON object a line
        #[arg(long)]
        json: bool,
    },
    /// Failed events become pending again, with a clean count
    Retry {
        #[arg(required = true)]
        ids: Vec<String>,
        #[command(flatten)]
        change: Change,
    },
    /// Remove failed or pending events; each payload is kept in the audit
    Discard {
        #[arg(required = true)]
        ids: Vec<String>,
        /// Why, for the audit
        #[arg(long)]
        reason: String,
        #[command(flatten)]
        change: Change,
    },
}

/// Arguments of every bulk change.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(super) struct Change {
    /// Change nothing, say what would be done
    #[arg(long)]
    pub(super) dry_run: bool,
    #[command(flatten)]
    pub(super) json: Json,
}

#[derive(Debug, Subcommand)]
pub(super) enum InboxVerb {
    /// List inbound messages that are kept, oldest first
    List {
        /// dead, stored or done
        #[arg(long, default_value = "dead")]
        state: String,
        /// Most messages
        #[arg(long, default_value_t = super::inbox::LIMIT)]
        limit: usize,
        #[command(flatten)]
        json: Json,
    },
    /// Show everything about one message
    Show {
        id: i64,
        #[command(flatten)]
        json: Json,
    },
    /// Apply dead letters again, now
    Retry {
        #[arg(required = true)]
        ids: Vec<i64>,
        #[command(flatten)]
        json: Json,
    },
    /// Remove dead letters; each is kept in the audit
    Discard {
        #[arg(required = true)]
        ids: Vec<i64>,
        /// Why, for the audit
        #[arg(long, default_value = "discarded by an operator")]
        reason: String,
        #[command(flatten)]
        json: Json,
    },
}

#[derive(Debug, Subcommand)]
pub(super) enum AssetVerb {
    /// Show an asset
    Get {
        id: String,
        #[command(flatten)]
        json: Json,
    },
    /// Create an asset and its event asset.created
    Create {
        id: String,
        #[arg(long)]
        name: String,
        #[arg(long)]
        material: String,
        #[command(flatten)]
        json: Json,
    },
    /// Change an asset of the version that you have seen, and write its event asset.updated
    Update {
        id: String,
        /// The version that it must have; another one is a conflict, and nothing is written
        #[arg(long, value_name = "N")]
        expected_version: i64,
        #[arg(long)]
        name: String,
        #[arg(long)]
        material: String,
        #[command(flatten)]
        json: Json,
    },
}

#[derive(Debug, Subcommand)]
pub(super) enum ConfigVerb {
    /// Say everything that is wrong with the file, one problem a line; exit 0 or 78
    Check,
    /// Print the effective values with where each comes from; secrets are masked
    Show {
        #[command(flatten)]
        json: Json,
    },
    /// Print the JSON Schema of the file
    Schema,
    /// Print a file with every key, its default and its reason, to start from
    Default,
}
