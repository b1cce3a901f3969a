//! `completions`, `man`, `version`: what packages and shells ask of the program.

use std::path::Path;

use clap::CommandFactory;

use super::error::{CliError, Exit};
use super::{Cli, render};

/// Prints the completion script of a shell.
pub(super) fn completions(shell: clap_complete::Shell) -> Result<Exit, CliError> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "outboxd", &mut script);
    render::text(&String::from_utf8_lossy(&script))?;
    Ok(Exit::Ok)
}

/// Writes `outboxd.1` and a page a verb into `dir`, which is made where it is missing.
pub(super) fn man(dir: &Path) -> Result<Exit, CliError> {
    let failed = |error: std::io::Error| {
        CliError::failure(format!("cannot write manual pages into {}: {error}", dir.display()))
            .fix("name a folder that you may write to")
    };
    std::fs::create_dir_all(dir).map_err(failed)?;
    clap_mangen::generate_to(Cli::command(), dir).map_err(failed)?;
    Ok(Exit::Ok)
}

/// Prints the versions that a report of a fault needs.
pub(super) fn version() -> Result<Exit, CliError> {
    let sqlite = rusqlite::version();
    render::text(&format!("outboxd {}\nsqlite {sqlite} (bundled)\n", env!("CARGO_PKG_VERSION")))?;
    Ok(Exit::Ok)
}
