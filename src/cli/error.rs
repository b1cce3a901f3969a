//! How a command ends: the exit codes and the one error type of the command line.

use std::fmt;

use crate::store::error::{StoreError, chain};

/// Exit codes of every verb.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    Ok = 0,
    /// It failed, or a stop had to be forced.
    Failure = 1,
    /// The command line itself is wrong; clap uses the same number.
    Usage = 2,
    /// Done in part: warnings of `doctor`, missing events of `verify`, some of several ids.
    Partly = 3,
    /// Something that is needed is not there now: the database, the daemon (EX_UNAVAILABLE).
    Unavailable = 69,
    /// A defect of outboxd (EX_SOFTWARE).
    Internal = 70,
    /// A person has to change the configuration or run a named command first (EX_CONFIG); systemd does not restart.
    Config = 78,
}

impl Exit {
    /// The number that the process ends with.
    pub fn code(self) -> u8 {
        self as u8
    }

    /// The exit that a number stands for; an unknown one is a failure.
    pub fn from_code(code: u8) -> Self {
        match code {
            0 => Exit::Ok,
            2 => Exit::Usage,
            3 => Exit::Partly,
            69 => Exit::Unavailable,
            70 => Exit::Internal,
            78 => Exit::Config,
            _ => Exit::Failure,
        }
    }
}

impl From<Exit> for std::process::ExitCode {
    fn from(exit: Exit) -> Self {
        exit.code().into()
    }
}

/// What a verb says when it does not do what was asked: what happened, to what, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CliError {
    pub exit: Exit,
    /// What happened, to which file, key or row. Lower case, no full stop.
    pub what: String,
    /// What to do; one instruction, best a command to type.
    pub fix: Option<String>,
}

impl CliError {
    pub fn new(exit: Exit, what: impl Into<String>) -> Self {
        Self { exit, what: what.into(), fix: None }
    }

    /// Exit 1.
    pub fn failure(what: impl Into<String>) -> Self {
        Self::new(Exit::Failure, what)
    }

    /// Exit 2.
    pub fn usage(what: impl Into<String>) -> Self {
        Self::new(Exit::Usage, what)
    }

    /// Exit 69.
    pub fn unavailable(what: impl Into<String>) -> Self {
        Self::new(Exit::Unavailable, what)
    }

    /// Exit 70.
    pub fn internal(what: impl Into<String>) -> Self {
        Self::new(Exit::Internal, what)
    }

    /// Exit 78.
    pub fn config(what: impl Into<String>) -> Self {
        Self::new(Exit::Config, what)
    }

    /// Adds what to do.
    pub fn fix(mut self, fix: impl Into<String>) -> Self {
        self.fix = Some(fix.into());
        self
    }
}

impl fmt::Display for CliError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)?;
        if let Some(fix) = &self.fix {
            write!(f, "\n  what to do: {fix}")?;
        }
        Ok(())
    }
}

impl std::error::Error for CliError {}

/// Writing to standard output failed. A reader that went away (`outboxd events list | head`) is no failure.
impl From<std::io::Error> for CliError {
    fn from(error: std::io::Error) -> Self {
        match error.kind() {
            std::io::ErrorKind::BrokenPipe => Self::new(Exit::Ok, String::new()),
            _ => Self::failure(format!("cannot write the output: {error}")),
        }
    }
}

/// What an error of the store means for the one who typed the command; its text names the file and what to do.
impl From<StoreError> for CliError {
    fn from(error: StoreError) -> Self {
        Self::new(exit_of(&error), chain(&error))
    }
}

/// The exit code that goes with an error of the store.
pub fn exit_of(error: &StoreError) -> Exit {
    match error {
        StoreError::NoFile { .. }
        | StoreError::NoTables { .. }
        | StoreError::Replaced { .. }
        | StoreError::Busy(_)
        | StoreError::Full(_)
        | StoreError::ReadOnly(_)
        | StoreError::Denied(_)
        | StoreError::Io(_) => Exit::Unavailable,
        StoreError::Classic { .. }
        | StoreError::Foreign { .. }
        | StoreError::Older { .. }
        | StoreError::Newer { .. }
        | StoreError::NotADatabase { .. }
        | StoreError::Unsuitable { .. } => Exit::Config,
        StoreError::Corrupt(_)
        | StoreError::Constraint(_)
        | StoreError::Sqlite(_)
        | StoreError::Refused(_)
        | StoreError::NotFound(_)
        | StoreError::Conflict(_) => Exit::Failure,
        StoreError::Crashed(_) => Exit::Internal,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_exit_survives_the_way_through_its_number() {
        for exit in
            [Exit::Ok, Exit::Failure, Exit::Usage, Exit::Partly, Exit::Unavailable, Exit::Internal, Exit::Config]
        {
            assert_eq!(Exit::from_code(exit.code()), exit);
        }
        assert_eq!(Exit::from_code(137), Exit::Failure);
    }

    #[test]
    fn an_error_says_what_happened_and_then_what_to_do() {
        let error = CliError::unavailable("no database at /srv/app.db").fix("outboxd db init");
        assert_eq!(error.to_string(), "no database at /srv/app.db\n  what to do: outboxd db init");
    }

    #[test]
    fn a_reader_that_went_away_is_no_failure() {
        let error = CliError::from(std::io::Error::from(std::io::ErrorKind::BrokenPipe));
        assert_eq!((error.exit, error.what.as_str()), (Exit::Ok, ""));
    }

    #[test]
    fn what_a_person_has_to_mend_is_78_and_what_may_come_yet_is_69() {
        let path = std::path::PathBuf::from("/srv/app.db");
        let missing = CliError::from(StoreError::NoFile { path: path.clone() });
        assert_eq!(missing.exit, Exit::Unavailable);
        assert!(missing.what.contains("/srv/app.db") && missing.what.contains("outboxd db init"), "{}", missing.what);
        let classic = CliError::from(StoreError::Classic { path });
        assert_eq!(classic.exit, Exit::Config);
        assert!(classic.what.contains("outboxd db migrate"), "{}", classic.what);
    }
}
