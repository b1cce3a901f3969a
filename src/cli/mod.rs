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

use std::ffi::OsString;
use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::{Parser, Subcommand, ValueHint};

pub use error::{CliError, Exit};

use context::Context;

use crate::demo;

const EXAMPLES: &str = "\
Examples:
  outboxd explain 78
  outboxd completions bash > /etc/bash_completion.d/outboxd

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

#[derive(Debug, Subcommand)]
enum Verb {
    /// Run the daemon: publish what is committed, apply what arrives
    Run {
        /// Longest orderly stop after SIGTERM or SIGINT
        #[arg(long, value_name = "DURATION", default_value = "20s", value_parser = humantime::parse_duration)]
        grace: std::time::Duration,
    },
    /// Show state, NATS, backlog, ages, failed and held events, sizes; exit 0 in every state
    Status {
        /// One JSON object
        #[arg(long)]
        json: bool,
        /// Again every two seconds, until it is interrupted
        #[arg(long)]
        watch: bool,
    },
    /// Stop publishing until `resume`, or for a while; outlives a restart
    Pause {
        /// For how long, such as 30m; without it until `resume`
        #[arg(long = "for", value_name = "DURATION", value_parser = humantime::parse_duration)]
        period: Option<std::time::Duration>,
    },
    /// Publish again
    Resume,
    /// Read the configuration again, as SIGHUP does, and say what came of it; exit 78 where it is rejected
    Reload {
        /// Wait for the result. It always is; scripts may say so
        #[arg(long)]
        wait: bool,
        /// One JSON object
        #[arg(long)]
        json: bool,
    },
    /// Make and keep the database
    #[command(subcommand)]
    Db(DbVerb),
    /// Play the whole flow on this machine, with a nats-server of its own, and prove it
    Demo {
        /// Fewer events and shorter outages
        #[arg(long)]
        fast: bool,
        /// Leave the folder with databases, configurations and logs
        #[arg(long)]
        keep: bool,
    },
    /// Check, show and describe the configuration, without a daemon
    #[command(subcommand)]
    Config(ConfigVerb),
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

#[derive(Debug, Subcommand)]
enum DbVerb {
    /// Make the file where there is none, and our tables in it where there are none
    Init {
        /// With the table `assets` of the example domain
        #[arg(long)]
        example: bool,
    },
}

#[derive(Debug, Subcommand)]
enum ConfigVerb {
    /// Say everything that is wrong with the file, one problem a line; exit 0 or 78
    Check,
    /// Print the effective values with where each comes from; secrets are masked
    Show {
        /// An array of key, value, origin
        #[arg(long)]
        json: bool,
    },
    /// Print the JSON Schema of the file
    Schema,
    /// Print a file with every key, its default and its reason, to start from
    Default,
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
    match cli.verb {
        Verb::Run { grace } => run::run(cli.config, grace),
        Verb::Status { json, watch } => status::status(&Context::find(cli.config)?, json, watch),
        Verb::Pause { period } => control::pause(&Context::find(cli.config)?, period),
        Verb::Resume => control::resume(&Context::find(cli.config)?),
        Verb::Reload { wait: _, json } => control::reload(&Context::find(cli.config)?, json),
        Verb::Db(DbVerb::Init { example }) => init(&Context::load(cli.config)?, example),
        Verb::Demo { fast, keep } => Ok(Exit::from_code(demo::run(demo::DemoOptions { fast, keep }))),
        Verb::Config(verb) => match verb {
            ConfigVerb::Check => config::check(cli.config),
            ConfigVerb::Show { json } => config::show(cli.config, json),
            ConfigVerb::Schema => config::schema(),
            ConfigVerb::Default => config::default(),
        },
        Verb::Explain { code } => explain::explain(&code),
        Verb::Completions { shell } => shell::completions(shell),
        Verb::Man { dir } => shell::man(&dir),
        Verb::Version => shell::version(),
    }
}

/// `db init`: the only verb that creates a file.
fn init(context: &Context, example: bool) -> Result<Exit, CliError> {
    let made = crate::store::schema::init(context.database(), &context.config().source, example)?;
    for note in &made.notes {
        render::complain(note);
    }
    let what = if made.tables { "tables made" } else { "tables are there already, nothing changed" };
    render::text(&format!("{}: {what}, source {}\n", context.database().display(), made.source))?;
    Ok(Exit::Ok)
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
