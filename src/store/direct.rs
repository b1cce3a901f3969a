//! Work on the file without a daemon: one connection, one transaction, gone afterwards. For the command line.
//!
//! May import: the store's connection, schema, error; rusqlite.

use std::path::Path;

use rusqlite::{Connection, Transaction, TransactionBehavior};

use super::connection::{self, Access, Settings};
use super::error::{Result, Step};
use super::schema;

/// Reads from a file that has our tables.
///
/// # Errors
/// Those of [`connection::open`], [`schema::require`] and the job.
pub fn read<T>(path: &Path, job: impl FnOnce(&Connection) -> Result<T>) -> Result<T> {
    let conn = connection::open(path, Access::Read, &Settings::default())?.conn;
    schema::require(&conn, path)?;
    job(&conn)
}

/// Changes a file that has our tables in one transaction, on disk when this returns. An error of the job undoes all.
///
/// # Errors
/// Those of [`connection::open`], [`schema::require`], the job and the commit.
pub fn change<T>(path: &Path, job: impl FnOnce(&Transaction<'_>) -> Result<T>) -> Result<T> {
    let mut conn = connection::open(path, Access::Write, &Settings::default())?.conn;
    let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate).step("take the write lock")?;
    schema::require(&tx, path)?;
    let answer = job(&tx)?;
    tx.commit().step("commit the change")?;
    Ok(answer)
}
