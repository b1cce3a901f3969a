//! `run`: the daemon.

use std::path::PathBuf;
use std::time::Duration;

use super::{CliError, Exit, render};
use crate::config::{self, LoadOptions, LogFormat};
use crate::daemon::{self, RunOptions};
use crate::telemetry::logging::{self, Format};

/// Loads the configuration, sets the log up and hands over to the daemon.
pub fn run(path: Option<PathBuf>, grace: Duration) -> Result<Exit, CliError> {
    let load = LoadOptions::from_process(path);
    let loaded = match config::load(&load) {
        Ok(loaded) => loaded,
        Err(problems) => {
            render::complain(&problems.to_string());
            return Ok(Exit::Config);
        }
    };
    let format = match loaded.config.log.format {
        LogFormat::Text => Format::Text,
        LogFormat::Json => Format::Json,
        LogFormat::Journald => Format::Journald,
        LogFormat::Auto => Format::Auto,
    };
    let logging = match logging::init(&loaded.config.log.level, format) {
        Ok(logging) => logging,
        Err(error) => {
            render::complain(&format!("outboxd: {error}"));
            return Ok(Exit::Config);
        }
    };
    Ok(Exit::from_code(daemon::run(loaded, RunOptions { grace, load }, Some(logging))))
}
