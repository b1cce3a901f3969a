//! What a verb that works on a daemon or on its database needs: the configuration, the socket, the clock.
//!
//! A verb is a composition root of its own, so the wall clock is read here and nowhere else in `cli`.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use super::error::{CliError, Exit};
use super::render;
use crate::admin::client::{self, Answer};
use crate::admin::protocol::{Fault, Reply, Request};
use crate::admin::socket;
use crate::config::{self, Config, LoadOptions, Problems};
use crate::domain::event::Millis;
use crate::store::inbox::Inbox;

/// The configuration of a verb, and where its daemon would be.
#[derive(Debug)]
pub struct Context {
    config: Config,
    /// Why the file would be refused; the daemon may still run with the one before.
    problems: Option<Problems>,
    sockets: Vec<PathBuf>,
}

impl Context {
    /// Loads the configuration as the daemon does. Warnings are the daemon's and `config check`'s to tell.
    ///
    /// # Errors
    /// Exit 78 with every problem.
    pub fn load(path: Option<PathBuf>) -> Result<Self, CliError> {
        let context = Self::find(path)?;
        context.require_sound()?;
        Ok(context)
    }

    /// As [`Context::load`], but a refused file is good enough where it still says where the database is: an operator who
    /// has just broken the file must be able to look at the daemon that runs on with the one before.
    ///
    /// # Errors
    /// Exit 78 with every problem.
    pub fn find(path: Option<PathBuf>) -> Result<Self, CliError> {
        let options = LoadOptions::from_process(path);
        let (config, problems) = match config::load(&options) {
            Ok(loaded) => (loaded.config, None),
            Err(problems) => match config::salvage(&options) {
                Some(config) => (config, Some(problems)),
                None => return Err(refused(&problems)),
            },
        };
        let sockets = socket::candidates(config.admin.socket.as_deref(), &config.database.path);
        Ok(Self { config, problems, sockets })
    }

    /// For what is done without a daemon.
    ///
    /// # Errors
    /// Exit 78 with every problem.
    pub fn require_sound(&self) -> Result<(), CliError> {
        self.problems.as_ref().map_or(Ok(()), |problems| Err(refused(problems)))
    }

    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The database's file.
    pub fn database(&self) -> &Path {
        &self.config.database.path
    }

    /// The handlers of the inbox, for a message that is tried again; `None` where the configuration has none.
    pub fn inbox(&self, source: &str) -> Option<Inbox> {
        let inbox = &self.config.inbox;
        (!inbox.handler.is_empty()).then(|| Inbox::new(inbox.rules(source)))
    }

    /// Asks the daemon, if there is one.
    pub fn ask(&self, request: &Request) -> Answer {
        client::ask(&self.sockets, request, now())
    }
}

/// Problems as bare lines, so that an editor can follow file:line:column.
fn refused(problems: &Problems) -> CliError {
    render::complain(&problems.to_string());
    CliError::new(Exit::Config, String::new())
}

/// Who types, for the audit of a change on the file itself.
pub fn actor() -> String {
    socket::actor(rustix::process::geteuid().as_raw(), std::env::var("SUDO_USER").ok().as_deref())
}

/// The wall clock.
pub fn now() -> Millis {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Millis::try_from(since.as_millis()).unwrap_or(Millis::MAX)
}

/// A reply of the daemon as what the verb returns.
pub fn result(reply: Reply) -> Result<(Exit, serde_json::Value), CliError> {
    match reply.error {
        Some(fault) => Err(fault.into()),
        None => Ok((Exit::from_code(reply.exit), reply.result)),
    }
}

impl From<Fault> for CliError {
    fn from(fault: Fault) -> Self {
        Self { exit: Exit::from_code(fault.exit), what: fault.what, fix: fault.fix }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(text: &str) -> (tempfile::TempDir, Option<PathBuf>) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.toml");
        std::fs::write(&path, text).unwrap();
        (folder, Some(path))
    }

    #[test]
    fn a_broken_file_is_good_enough_to_find_the_daemon_and_nothing_else() {
        for end in ["[relay]\nbatchh = 3\n", "[relay\n", "[relay]\nlease = \"0s\"\n", "[nats]\nurls = 3\n"] {
            let (folder, path) = file(&format!("[database]\npath = \"app.db\"\n{end}"));
            let context = Context::find(path.clone()).unwrap_or_else(|e| panic!("{end}: {e}"));
            assert_eq!(context.database(), folder.path().join("app.db"), "{end}");
            assert_eq!(context.require_sound().unwrap_err().exit, Exit::Config, "{end}");
            assert_eq!(Context::load(path).unwrap_err().exit, Exit::Config, "{end}");
        }
    }

    #[test]
    fn a_broken_file_that_names_no_database_is_no_reason_to_guess_one() {
        for text in ["[relay\n", "[database]\npath = 3\n", "[relay]\nbatchh = 3\n"] {
            let (_folder, path) = file(text);
            assert_eq!(Context::find(path).unwrap_err().exit, Exit::Config, "{text}");
        }
    }
}
