//! The example domain: a row of `assets` and its event in one transaction, with optimistic concurrency.
//!
//! Invariants: a conflict writes nothing · the event's version is the row's · the clock is the caller's.
//! May import: the rest of the store, rusqlite, serde_json, uuid (event ids).

use rusqlite::{Connection, OptionalExtension, Transaction};
use serde::Serialize;

use super::error::{Result, Step, StoreError};
use super::{ddl, schema, time};
use crate::domain::event::Millis;

/// A row of `assets`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Asset {
    pub asset_id: String,
    pub name: String,
    pub material: String,
    pub version: i64,
    pub updated_at: String,
}

/// What became of a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Row and event are written, to be committed by the caller.
    Written { asset: Asset, event_id: String },
    /// It is at another version; nothing was written. A create finds it this way too.
    Conflict { current: i64 },
    /// There is no such asset; nothing was written.
    Missing,
}

#[derive(Serialize)]
struct Envelope<'a> {
    event_id: &'a str,
    event_type: &'a str,
    schema_version: i64,
    aggregate_type: &'a str,
    aggregate_id: &'a str,
    aggregate_version: i64,
    occurred_at: String,
    data: Data<'a>,
}

#[derive(Serialize)]
struct Data<'a> {
    name: &'a str,
    material: &'a str,
}

/// An asset as it is now.
///
/// # Errors
/// [`StoreError::Refused`] where the table `assets` is the application's own.
pub fn get(conn: &Connection, id: &str) -> Result<Option<Asset>> {
    if schema::columns(conn, ddl::ASSETS.name).step("read the schema")?.is_empty() {
        return Ok(None);
    }
    schema::create_assets(conn)?;
    read(conn, id)
}

fn read(conn: &Connection, id: &str) -> Result<Option<Asset>> {
    const SQL: &str = "SELECT asset_id, name, material, version, updated_at FROM assets WHERE asset_id = ?1";
    conn.prepare_cached(SQL)
        .and_then(|mut s| {
            s.query_row([id], |r| {
                Ok(Asset {
                    asset_id: r.get(0)?,
                    name: r.get(1)?,
                    material: r.get(2)?,
                    version: r.get(3)?,
                    updated_at: r.get(4)?,
                })
            })
            .optional()
        })
        .step("read an asset")
}

/// Makes an asset at version 1 and its `asset.created`.
pub fn create(tx: &Transaction<'_>, id: &str, name: &str, material: &str, now: Millis) -> Result<Change> {
    const SQL: &str = "INSERT INTO assets (asset_id, name, material, version, updated_at) VALUES (?1, ?2, ?3, 1, ?4)";
    check(id, name, material)?;
    schema::create_assets(tx)?;
    if let Some(there) = read(tx, id)? {
        return Ok(Change::Conflict { current: there.version });
    }
    tx.prepare_cached(SQL).and_then(|mut s| s.execute((id, name, material, time::text(now)))).step("make an asset")?;
    written(tx, id, "asset.created", now)
}

/// Changes an asset that is at `expected`, and writes its `asset.updated` at the next version.
pub fn update(
    tx: &Transaction<'_>,
    id: &str,
    expected: i64,
    name: &str,
    material: &str,
    now: Millis,
) -> Result<Change> {
    const SQL: &str = "UPDATE assets SET name = ?2, material = ?3, version = version + 1, updated_at = ?4
        WHERE asset_id = ?1 AND version = ?5";
    check(id, name, material)?;
    if schema::columns(tx, ddl::ASSETS.name).step("read the schema")?.is_empty() {
        return Ok(Change::Missing);
    }
    schema::create_assets(tx)?;
    let changed = tx
        .prepare_cached(SQL)
        .and_then(|mut s| s.execute((id, name, material, time::text(now), expected)))
        .step("change an asset")?;
    if changed == 1 {
        return written(tx, id, "asset.updated", now);
    }
    Ok(read(tx, id)?.map_or(Change::Missing, |there| Change::Conflict { current: there.version }))
}

fn check(id: &str, name: &str, material: &str) -> Result<()> {
    for (what, text) in [("id", id), ("name", name), ("material", material)] {
        if text.is_empty() {
            return Err(StoreError::Refused(format!("the {what} of an asset must not be empty")));
        }
        if text.contains('\0') {
            return Err(StoreError::Refused(format!("the {what} of an asset must not contain a zero byte")));
        }
    }
    Ok(())
}

/// Writes the event of the row as it stands now.
fn written(tx: &Transaction<'_>, id: &str, event_type: &str, now: Millis) -> Result<Change> {
    const SQL: &str =
        "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, aggregate_version, event_type,
        schema_version, payload_json) VALUES (?1, 'asset', ?2, ?3, ?4, 1, ?5)";
    let asset = read(tx, id)?.ok_or_else(|| StoreError::NotFound(format!("asset {id} is gone")))?;
    let event_id = uuid::Uuid::now_v7().to_string();
    let envelope = Envelope {
        event_id: &event_id,
        event_type,
        schema_version: 1,
        aggregate_type: "asset",
        aggregate_id: id,
        aggregate_version: asset.version,
        occurred_at: time::rfc3339(now),
        data: Data { name: &asset.name, material: &asset.material },
    };
    let payload =
        serde_json::to_string(&envelope).map_err(|e| StoreError::Refused(format!("cannot write the event: {e}")))?;
    tx.prepare_cached(SQL)
        .and_then(|mut s| s.execute((&event_id, id, asset.version, event_type, payload)))
        .step("write the event of an asset")?;
    Ok(Change::Written { asset, event_id })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::connection::{self, Access, Settings};
    use rusqlite::TransactionBehavior;

    const NOW: Millis = 1_791_336_000_250;

    fn fresh() -> (tempfile::TempDir, Connection) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.db");
        schema::init(&path, "test", false).unwrap();
        let conn = connection::open(&path, Access::Write, &Settings::default()).unwrap().conn;
        (dir, conn)
    }

    fn with<T>(conn: &mut Connection, job: impl FnOnce(&Transaction<'_>) -> T) -> T {
        let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
        let answer = job(&tx);
        tx.commit().unwrap();
        answer
    }

    fn events(conn: &Connection) -> Vec<String> {
        let sql =
            "SELECT event_type || ' ' || aggregate_id || ' ' || aggregate_version FROM outbox_events ORDER BY seq";
        conn.prepare(sql).unwrap().query_map([], |r| r.get(0)).unwrap().map(Result::unwrap).collect()
    }

    #[test]
    fn row_and_event_are_written_together_in_the_envelope_of_the_contract() {
        let (_dir, mut conn) = fresh();
        assert_eq!(get(&conn, "asset-042").unwrap(), None, "no table yet");
        with(&mut conn, |tx| create(tx, "asset-042", "油圧ユニットB", "S45C", NOW)).unwrap();
        let change = with(&mut conn, |tx| update(tx, "asset-042", 1, "Hydraulic unit B", "S50C", NOW)).unwrap();
        let Change::Written { asset, event_id } = change else { panic!("{change:?}") };
        assert_eq!((asset.version, asset.updated_at.as_str()), (2, "2026-10-07 01:20:00.250"));
        assert_eq!(events(&conn), ["asset.created asset-042 1", "asset.updated asset-042 2"]);
        let payload: String = conn
            .query_row("SELECT payload_json FROM outbox_events WHERE event_id = ?1", [&event_id], |r| r.get(0))
            .unwrap();
        assert_eq!(
            payload,
            format!(
                "{{\"event_id\":\"{event_id}\",\"event_type\":\"asset.updated\",\"schema_version\":1,\
                 \"aggregate_type\":\"asset\",\"aggregate_id\":\"asset-042\",\"aggregate_version\":2,\
                 \"occurred_at\":\"2026-10-07T01:20:00.250Z\",\"data\":{{\"name\":\"Hydraulic unit B\",\"material\":\"S50C\"}}}}"
            )
        );
        let first: String =
            conn.query_row("SELECT payload_json FROM outbox_events WHERE seq = 1", [], |r| r.get(0)).unwrap();
        assert!(first.contains("油圧ユニットB"), "{first}");
    }

    #[test]
    fn a_conflict_and_a_missing_asset_write_nothing() {
        let (_dir, mut conn) = fresh();
        assert_eq!(with(&mut conn, |tx| update(tx, "a", 1, "n", "m", NOW)).unwrap(), Change::Missing);
        with(&mut conn, |tx| create(tx, "a", "n", "m", NOW)).unwrap();
        assert_eq!(with(&mut conn, |tx| create(tx, "a", "other", "m", NOW)).unwrap(), Change::Conflict { current: 1 });
        for expected in [0, 2, 7] {
            let change = with(&mut conn, |tx| update(tx, "a", expected, "other", "m", NOW)).unwrap();
            assert_eq!(change, Change::Conflict { current: 1 });
        }
        assert_eq!(with(&mut conn, |tx| update(tx, "b", 1, "n", "m", NOW)).unwrap(), Change::Missing);
        assert!(with(&mut conn, |tx| create(tx, "", "n", "m", NOW)).is_err());
        assert_eq!(get(&conn, "a").unwrap().unwrap().name, "n");
        assert_eq!(events(&conn), ["asset.created a 1"]);
    }

    #[test]
    fn a_table_of_the_application_refuses_the_example_only() {
        let (_dir, mut conn) = fresh();
        conn.execute_batch("CREATE TABLE assets (isin TEXT, price REAL)").unwrap();
        let error = with(&mut conn, |tx| create(tx, "a", "n", "m", NOW)).unwrap_err();
        assert!(error.to_string().contains("of another kind"), "{error}");
        assert!(get(&conn, "a").is_err());
        assert_eq!(events(&conn), [] as [&str; 0]);
    }
}
