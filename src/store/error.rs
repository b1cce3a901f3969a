//! Errors of the store: the step and the cause apart, classified so that the caller can decide.
//!
//! `Display` says what happened, to which file, and what to do; the cause is in `source()` and is not repeated.
//! An error is cheap to clone, because one failed commit is the answer to every job of its group.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rusqlite::ErrorCode;

/// What SQLite said (this is its text), and at which step.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{cause}")]
pub struct Fault {
    /// What was being done, as a phrase: `lease a batch`.
    pub step: &'static str,
    pub cause: Arc<rusqlite::Error>,
}

/// Everything that a function of the store can answer besides its value.
#[derive(Clone, Debug, thiserror::Error)]
pub enum StoreError {
    /// Another process holds the lock for longer than `busy_timeout`. Nothing was written; try again.
    #[error("cannot {}: another process holds the lock of the database", .0.step)]
    Busy(#[source] Fault),
    /// The disk or the quota is full. SQLite rolled the transaction back.
    #[error("cannot {}: the disk is full; free some space, nothing else is needed", .0.step)]
    Full(#[source] Fault),
    /// The file is damaged. Stop writing.
    #[error("cannot {}: the database is damaged; stop its writers and run `outboxd db check`", .0.step)]
    Corrupt(#[source] Fault),
    /// The file, its directory or its file system cannot be written by this user.
    #[error("cannot {}: the database cannot be written by this user; check owner and mode of the file, of its -wal and -shm, and of the directory", .0.step)]
    ReadOnly(#[source] Fault),
    /// The file or its directory cannot be opened by this user.
    #[error("cannot {}: the database cannot be opened by this user; check owner and mode of the file and of its directory", .0.step)]
    Denied(#[source] Fault),
    /// The operating system failed to read or write.
    #[error("cannot {}: reading or writing the file failed", .0.step)]
    Io(#[source] Fault),
    /// A constraint or a guard of the schema refused the row.
    #[error("cannot {}: the database refuses it", .0.step)]
    Constraint(#[source] Fault),
    /// Anything else that SQLite said.
    #[error("cannot {}", .0.step)]
    Sqlite(#[source] Fault),

    #[error("there is no database at {}; `outboxd db init` makes one", path.display())]
    NoFile { path: PathBuf },
    #[error("{} is not a SQLite database", path.display())]
    NotADatabase { path: PathBuf },
    /// Another file stands at the path, or the write-ahead log under it was changed or removed.
    #[error("{} was replaced or removed while it was in use; nothing more is written to the old file", path.display())]
    Replaced { path: PathBuf },
    /// The file is of a kind that cannot be used safely.
    #[error("{} cannot be used: {why}", path.display())]
    Unsuitable { path: PathBuf, why: String },
    #[error("{} has no tables of outboxd; `outboxd db init` makes them", path.display())]
    NoTables { path: PathBuf },
    #[error("{} has the classic outbox tables; `outboxd db migrate` takes them over, rows kept", path.display())]
    Classic { path: PathBuf },
    /// A table with a name of ours that is neither ours nor the classic one.
    #[error("{} has a table {table} of another kind: {why}", path.display())]
    Foreign { path: PathBuf, table: String, why: String },
    #[error("{} has schema version {found}, older than {known} of this program; `outboxd db migrate` brings it up", path.display())]
    Older { path: PathBuf, found: i64, known: i64 },
    #[error("{} has schema version {found}, newer than {known} of this program; install a newer outboxd", path.display())]
    Newer { path: PathBuf, found: i64, known: i64 },

    /// The request is refused for a reason of its own; nothing was written.
    #[error("{0}")]
    Refused(String),
    /// What was asked for is not there.
    #[error("{0}")]
    NotFound(String),
    /// Somebody else changed it first; nothing was written.
    #[error("{0}")]
    Conflict(String),
    /// A job panicked or its connection could not be had: a bug, or a runtime that is shutting down.
    #[error("the database worker stopped: {0}")]
    Crashed(String),
}

/// `Result` of the store.
pub type Result<T, E = StoreError> = std::result::Result<T, E>;

impl StoreError {
    /// Classifies an error of SQLite that happened at `step` (a phrase that continues "cannot ...").
    pub fn at(step: &'static str, cause: rusqlite::Error) -> Self {
        let class = class_of(&cause);
        let fault = Fault { step, cause: Arc::new(cause) };
        match class {
            Class::Busy => Self::Busy(fault),
            Class::Full => Self::Full(fault),
            Class::Corrupt => Self::Corrupt(fault),
            Class::ReadOnly => Self::ReadOnly(fault),
            Class::Denied => Self::Denied(fault),
            Class::Io => Self::Io(fault),
            Class::Constraint => Self::Constraint(fault),
            Class::Other => Self::Sqlite(fault),
        }
    }

    /// The same error with the file named, where the cause is the file as a whole.
    pub(crate) fn of_file(self, path: &Path) -> Self {
        match &self {
            Self::Corrupt(fault) if code(&fault.cause) == Some(ErrorCode::NotADatabase) => {
                Self::NotADatabase { path: path.into() }
            }
            Self::Denied(_) if matches!(std::fs::metadata(path), Err(e) if e.kind() == std::io::ErrorKind::NotFound) => {
                Self::NoFile { path: path.into() }
            }
            _ => self,
        }
    }

    /// Waiting helps: the same transaction may pass in a moment, nothing is wrong with its content.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Busy(_) | Self::Full(_) | Self::Io(_))
    }

    /// The file itself cannot be trusted any more: stop publishing, reopen or exit.
    pub fn is_fatal(&self) -> bool {
        matches!(self, Self::Corrupt(_) | Self::NotADatabase { .. } | Self::Replaced { .. } | Self::NoFile { .. })
    }

    /// The fault below, where SQLite was the one to refuse.
    pub fn fault(&self) -> Option<&Fault> {
        match self {
            Self::Busy(f)
            | Self::Full(f)
            | Self::Corrupt(f)
            | Self::ReadOnly(f)
            | Self::Denied(f)
            | Self::Io(f)
            | Self::Constraint(f)
            | Self::Sqlite(f) => Some(f),
            Self::NoFile { .. }
            | Self::NotADatabase { .. }
            | Self::Replaced { .. }
            | Self::Unsuitable { .. }
            | Self::NoTables { .. }
            | Self::Classic { .. }
            | Self::Foreign { .. }
            | Self::Older { .. }
            | Self::Newer { .. }
            | Self::Refused(_)
            | Self::NotFound(_)
            | Self::Conflict(_)
            | Self::Crashed(_) => None,
        }
    }

    /// The text of a guard of ours (`RAISE(ABORT, '...')`) or of a constraint, for a person.
    pub fn refusal(&self) -> Option<String> {
        match self {
            Self::Constraint(fault) => match &*fault.cause {
                rusqlite::Error::SqliteFailure(_, Some(text)) => Some(text.clone()),
                other => Some(other.to_string()),
            },
            _ => None,
        }
    }
}

/// An error without a step of its own: the caller gives one with [`Step::step`] where it helps.
impl From<rusqlite::Error> for StoreError {
    fn from(cause: rusqlite::Error) -> Self {
        Self::at("use the database", cause)
    }
}

/// Names the step that failed.
pub trait Step<T> {
    /// `step` continues the sentence "cannot ...".
    fn step(self, step: &'static str) -> Result<T>;
}

impl<T> Step<T> for rusqlite::Result<T> {
    fn step(self, step: &'static str) -> Result<T> {
        self.map_err(|cause| StoreError::at(step, cause))
    }
}

enum Class {
    Busy,
    Full,
    Corrupt,
    ReadOnly,
    Denied,
    Io,
    Constraint,
    Other,
}

fn code(cause: &rusqlite::Error) -> Option<ErrorCode> {
    match cause {
        rusqlite::Error::SqliteFailure(error, _) => Some(error.code),
        _ => None,
    }
}

fn class_of(cause: &rusqlite::Error) -> Class {
    match code(cause) {
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked | ErrorCode::FileLockingProtocolFailed) => Class::Busy,
        Some(ErrorCode::DiskFull) => Class::Full,
        Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => Class::Corrupt,
        Some(ErrorCode::ReadOnly) => Class::ReadOnly,
        Some(ErrorCode::CannotOpen | ErrorCode::PermissionDenied | ErrorCode::AuthorizationForStatementDenied) => {
            Class::Denied
        }
        Some(ErrorCode::SystemIoFailure) => Class::Io,
        Some(ErrorCode::ConstraintViolation) => Class::Constraint,
        // the enum of rusqlite is not exhaustive; what is new there is an error without a class here
        Some(_) | None => Class::Other,
    }
}

/// The chain of an error as one line: `a: b: c`.
pub fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut line = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        line.push_str(": ");
        line.push_str(&cause.to_string());
        next = cause.source();
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use rusqlite::Connection;

    #[test]
    fn a_constraint_is_told_with_the_text_of_its_guard() {
        let conn = Connection::open_in_memory().unwrap();
        conn.execute_batch(
            "CREATE TABLE t (a); CREATE TRIGGER g BEFORE INSERT ON t BEGIN SELECT RAISE(ABORT, 'not this one'); END",
        )
        .unwrap();
        let error = conn.execute("INSERT INTO t VALUES (1)", []).step("insert").unwrap_err();
        assert_eq!(error.refusal().as_deref(), Some("not this one"));
        assert_eq!(chain(&error), "cannot insert: the database refuses it: not this one");
    }

    #[test]
    fn a_locked_database_is_busy_and_transient() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.db");
        let (one, two) = (Connection::open(&path).unwrap(), Connection::open(&path).unwrap());
        two.busy_timeout(std::time::Duration::ZERO).unwrap();
        one.execute_batch("BEGIN IMMEDIATE").unwrap();
        let error = two.execute_batch("BEGIN IMMEDIATE").step("begin").unwrap_err();
        assert!(matches!(error, StoreError::Busy(_)) && error.is_transient() && !error.is_fatal(), "{error:?}");
    }
}
