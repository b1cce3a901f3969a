//! The command line: one file a verb; tables and JSON are rendered in one place.
//!
//! A verb is a function from plain values to an [`Exit`] or a [`CliError`]; only this file knows clap. May import: admin,
//! config, daemon, store and actors by their public calls, telemetry; jetstream only in doctor, verify and bench.

pub mod asset;
pub mod config;
pub mod context;
pub mod control;
pub mod db;
pub mod error;
pub mod events;
pub mod explain;
pub mod inbox;
pub mod render;
pub mod run;
mod shell;
pub mod status;
mod verbs;

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::error::ErrorKind;
use clap::{Parser, ValueHint};

use context::Context;
pub use error::{CliError, Exit};
use verbs::{AssetVerb, ConfigVerb, DbVerb, EventsVerb, InboxVerb, Measure, Verb};

use crate::admin::protocol::Request;
use crate::store::migrate::MigrateOptions;
use crate::{bench, demo};

const EXAMPLES: &str = "\
Examples:
  outboxd demo                                   see the whole flow, with proof
  outboxd config default > config.toml           a file to start from
  outboxd db init                                make the database, or our tables in yours
  outboxd run                                    the daemon
  outboxd status                                 what it does, and what waits
  outboxd events list --status failed            dead letters, with the reason
  outboxd events retry evt-01K6W3P8Y7
  outboxd explain 10077                          what a code means, and what to do

Exit codes: 0 ok, 1 failure, 2 usage, 3 partly, 69 unavailable, 70 internal, 78 configuration
(`outboxd explain CODE` tells more).";

/// The transactional outbox for SQLite, delivered by NATS JetStream.
#[derive(Debug, Parser)]
#[command(name = "outboxd", version, after_help = EXAMPLES, propagate_version = false, max_term_width = 100)]
pub struct Cli {
    /// Configuration file; else OUTBOXD_CONFIG, /etc/outboxd/config.toml, ./config.toml, the first that exists
    #[arg(long, global = true, value_name = "FILE", value_hint = ValueHint::FilePath)]
    config: Option<PathBuf>,

    #[command(subcommand)]
    verb: Verb,
}

/// The whole program: parses the arguments, does the verb, says what went wrong.
pub fn main(args: impl IntoIterator<Item = OsString>) -> Exit {
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(error) => {
            // a reader that went away is nobody to complain to
            let _ = error.print();
            return match error.kind() {
                ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => Exit::Ok,
                _ => Exit::Usage,
            };
        }
    };
    match dispatch(cli) {
        Ok(exit) => exit,
        Err(error) => {
            if !error.what.is_empty() {
                render::complain(&format!("outboxd: {error}"));
            }
            error.exit
        }
    }
}

fn dispatch(cli: Cli) -> Result<Exit, CliError> {
    // a file that was just broken must not keep anybody from looking at the daemon that runs on without it
    let find = |path| Context::find(path);
    match cli.verb {
        Verb::Run { grace } => run::run(cli.config, grace),
        Verb::Status { json, watch } => status::status(&find(cli.config)?, json.json, watch),
        Verb::Db(verb) => db_verb(cli.config, verb),
        Verb::Events(verb) => events_verb(&find(cli.config)?, verb),
        Verb::Inbox(verb) => inbox_verb(&find(cli.config)?, verb),
        Verb::Asset(verb) => asset_verb(&Context::load(cli.config)?, verb),
        Verb::Pause { period } => control::pause(&find(cli.config)?, period),
        Verb::Resume => control::resume(&find(cli.config)?),
        Verb::Reload { wait: _, json } => control::reload(&find(cli.config)?, json.json),
        Verb::Audit { limit, json } => events::audit(find(cli.config)?.database(), limit, json.json),
        Verb::Config(verb) => match verb {
            ConfigVerb::Check => config::check(cli.config),
            ConfigVerb::Show { json } => config::show(cli.config, json.json),
            ConfigVerb::Schema => config::schema(),
            ConfigVerb::Default => config::default(),
        },
        Verb::Demo { fast, keep } => Ok(Exit::from_code(demo::run(demo::DemoOptions { fast, keep }))),
        Verb::Bench { measures, events, rounds, duration, json } => {
            let measures = measures.into_iter().map(measure).collect();
            let options = bench::BenchOptions { measures, events, rounds, duration, json: json.json };
            Ok(Exit::from_code(bench::run(options)))
        }
        Verb::Explain { code } => explain::explain(&code),
        Verb::Completions { shell } => shell::completions(shell),
        Verb::Man { dir } => shell::man(&dir),
        Verb::Version => shell::version(),
    }
}

fn measure(measure: Measure) -> bench::Measure {
    match measure {
        Measure::Drain => bench::Measure::Drain,
        Measure::OneAggregate => bench::Measure::OneAggregate,
        Measure::Latency => bench::Measure::Latency,
        Measure::Idle => bench::Measure::Idle,
        Measure::Inbox => bench::Measure::Inbox,
    }
}

fn db_verb(config: Option<PathBuf>, verb: DbVerb) -> Result<Exit, CliError> {
    if matches!(verb, DbVerb::Schema) {
        return db::schema();
    }
    let context = Context::load(config)?;
    let path = context.database();
    match verb {
        DbVerb::Init { example } => db::init(path, &context.config().source, example),
        DbVerb::Migrate { dry_run, failed, compat, json } => {
            let options = MigrateOptions {
                failed_hold: failed == Some(verbs::FailedRule::Hold),
                debezium: compat == Some(verbs::Compat::Debezium),
                source: context.config().source.clone(),
                actor: context::actor(),
            };
            db::migrate(path, &options, dry_run, json.json)
        }
        DbVerb::Schema => db::schema(),
        DbVerb::Check { json } => db::check(path, json.json),
        DbVerb::Backup { file } => db::backup(path, &file),
        DbVerb::Prune { json } => {
            let kept = &context.config().retention;
            let keep =
                db::Keep { published: kept.published, processed: kept.processed, inbox: kept.inbox, audit: kept.audit };
            db::prune(path, &keep, context::now(), &context::actor(), json.json)
        }
        DbVerb::Uninstall { yes, force, json } => db::uninstall(path, yes, force, json.json),
    }
}

fn events_verb(context: &Context, verb: EventsVerb) -> Result<Exit, CliError> {
    /// Between two looks of `tail`: short against a person, long against the database.
    const REST: Duration = Duration::from_millis(250);
    let path = context.database();
    match verb {
        EventsVerb::List { status, aggregate, event_type, older_than, limit, json } => {
            let options = events::ListOptions { status, aggregate, event_type, older_than, limit };
            events::list(path, &options, context::now(), json.json)
        }
        EventsVerb::Show { id, json } => events::show(path, &id, context::now(), json.json),
        EventsVerb::Tail { json } => events::tail(path, json, || std::thread::sleep(REST)),
        EventsVerb::Retry { ids, change } => {
            let request = Request::EventsRetry { ids, dry_run: change.dry_run };
            control::bulk(context, &request, change.json.json)
        }
        EventsVerb::Discard { ids, reason, change } => {
            let request = Request::EventsDiscard { ids, reason, dry_run: change.dry_run };
            control::bulk(context, &request, change.json.json)
        }
    }
}

fn inbox_verb(context: &Context, verb: InboxVerb) -> Result<Exit, CliError> {
    match verb {
        InboxVerb::List { state, limit, json } => inbox::list(context.database(), &state, limit, json.json),
        InboxVerb::Show { id, json } => inbox::show(context.database(), id, json.json),
        InboxVerb::Retry { ids, json } => control::bulk(context, &Request::InboxRetry { ids }, json.json),
        InboxVerb::Discard { ids, reason, json } => {
            control::bulk(context, &Request::InboxDiscard { ids, reason }, json.json)
        }
    }
}

fn asset_verb(context: &Context, verb: AssetVerb) -> Result<Exit, CliError> {
    let (path, now) = (context.database(), context::now());
    match verb {
        AssetVerb::Get { id, json } => asset::get(path, &id, json.json),
        AssetVerb::Create { id, name, material, json } => asset::create(path, &id, &name, &material, now, json.json),
        AssetVerb::Update { id, expected_version, name, material, json } => {
            asset::update(path, &id, expected_version, &name, &material, now, json.json)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_definition_of_the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn an_unknown_verb_is_a_usage_error_and_help_is_none() {
        let run = |args: &[&str]| main(args.iter().map(OsString::from));
        assert_eq!(run(&["outboxd", "publsh"]), Exit::Usage);
        assert_eq!(run(&["outboxd"]), Exit::Usage);
        assert_eq!(run(&["outboxd", "--help"]), Exit::Ok);
        assert_eq!(run(&["outboxd", "explain", "78"]), Exit::Ok);
    }
}
