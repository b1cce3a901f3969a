//! Who relays: the owner's lock file, and the signs that a stand-by and an owner leave for each other.
//!
//! `<db>.outboxd.lock` is held by `flock` as long as its owner lives, so a dead owner is told at once. A frozen one
//! still holds it: a stand-by announces itself in `outboxd_meta`, only then the owner shows signs of life there, and
//! when these are older than the lease the stand-by takes over by epoch alone. The lock is never taken on the database
//! itself, whose POSIX locks belong to SQLite.

use std::fs::File;
use std::path::{Path, PathBuf};

use rusqlite::{Connection, OptionalExtension, Transaction, params};
use rustix::fs::FlockOperation;

use super::error::{Result, Step, StoreError};
use crate::domain::event::Millis;

/// The lock, held as long as this lives.
#[derive(Debug)]
pub struct OwnerLock {
    _file: File,
}

/// Path of the lock file of a database.
pub fn lock_path(database: &Path) -> PathBuf {
    let mut name = database.as_os_str().to_owned();
    name.push(".outboxd.lock");
    name.into()
}

impl OwnerLock {
    /// Takes the lock if nobody holds it.
    ///
    /// # Errors
    /// [`StoreError::Unsuitable`] where the file cannot be made or locked for another reason than its owner.
    pub fn try_take(database: &Path) -> Result<Option<Self>> {
        let path = lock_path(database);
        let unsuitable = |what: &str, e: &dyn std::fmt::Display| StoreError::Unsuitable {
            path: path.clone(),
            why: format!("{what}: {e}"),
        };
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .map_err(|e| unsuitable("the lock file cannot be opened", &e))?;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(Self { _file: file })),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(e) => Err(unsuitable("the lock file cannot be locked", &e)),
        }
    }
}

/// Signs of life in `outboxd_meta`, in wall-clock milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Signs {
    pub owner_seen: Option<Millis>,
    pub standby_seen: Option<Millis>,
}

const OWNER: &str = "owner_seen_ms";
const STANDBY: &str = "standby_seen_ms";

/// Reads the signs.
pub fn read_signs(conn: &Connection) -> Result<Signs> {
    let mut read = conn
        .prepare_cached("SELECT CAST(value AS INTEGER) FROM outboxd_meta WHERE key = ?1")
        .step("read the signs of the owner")?;
    let mut sign = |key| read.query_row([key], |row| row.get(0)).optional().step("read the signs of the owner");
    Ok(Signs { owner_seen: sign(OWNER)?, standby_seen: sign(STANDBY)? })
}

fn show(tx: &Transaction<'_>, key: &str, now: Millis) -> Result<()> {
    tx.prepare_cached(
        "INSERT INTO outboxd_meta (key, value) VALUES (?1, ?2) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
    )
    .and_then(|mut s| s.execute(params![key, now]))
    .step("show a sign of life")?;
    Ok(())
}

/// The owner lives.
pub fn show_owner(tx: &Transaction<'_>, now: Millis) -> Result<()> {
    show(tx, OWNER, now)
}

/// Somebody stands by.
pub fn show_standby(tx: &Transaction<'_>, now: Millis) -> Result<()> {
    show(tx, STANDBY, now)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lock_has_one_owner_and_ends_with_it() {
        let dir = tempfile::tempdir().unwrap();
        let db = dir.path().join("a.db");
        let first = OwnerLock::try_take(&db).unwrap();
        assert!(first.is_some());
        assert!(OwnerLock::try_take(&db).unwrap().is_none());
        drop(first);
        assert!(OwnerLock::try_take(&db).unwrap().is_some());
    }
}
