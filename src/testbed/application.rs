//! An application: it changes a business row and inserts the event in one transaction, as any program with any SQLite
//! would, and keeps a record of its own of what was committed.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rusqlite::{Connection, OpenFlags, TransactionBehavior, params};

use super::Trouble;

/// An application waits this long for the write lock before it gives up.
const BUSY: Duration = Duration::from_secs(30);

/// The insert that every application knows: seven columns, the rest has defaults.
const INSERT_EVENT: &str = "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, aggregate_version, \
                            event_type, schema_version, payload_json) VALUES (?1, ?2, ?3, ?4, ?5, 1, ?6)";

/// An event before it is inserted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewEvent {
    pub event_id: String,
    pub aggregate_type: String,
    pub aggregate_id: String,
    pub version: i64,
    pub event_type: String,
    pub payload: String,
}

impl NewEvent {
    /// An envelope of an asset: version 1 is `asset.created`, later ones are `asset.updated`. `name` is free text.
    pub fn asset(event_id: &str, asset_id: &str, version: i64, name: &str) -> Self {
        let event_type = if version == 1 { "asset.created" } else { "asset.updated" };
        let payload = serde_json::json!({
            "event_id": event_id, "event_type": event_type, "schema_version": 1, "aggregate_type": "asset",
            "aggregate_id": asset_id, "aggregate_version": version, "occurred_at": "2026-10-07T01:20:00Z",
            "data": { "name": name, "material": "S45C" },
        });
        Self {
            event_id: event_id.to_owned(),
            aggregate_type: "asset".to_owned(),
            aggregate_id: asset_id.to_owned(),
            version,
            event_type: event_type.to_owned(),
            payload: payload.to_string(),
        }
    }
}

/// A committed event as the application remembers it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Issued {
    pub aggregate: String,
    pub version: i64,
    pub payload: String,
    /// Nanoseconds since the epoch when COMMIT had returned.
    pub committed_ns: i128,
}

/// What was committed, by event id. Shared by the applications of a run; what they withdraw is taken out by hand.
#[derive(Clone, Debug, Default)]
pub struct Ledger(Arc<Mutex<HashMap<String, Issued>>>);

impl Ledger {
    pub fn len(&self) -> usize {
        self.lock().len()
    }

    pub fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    /// A copy of all entries.
    pub fn entries(&self) -> HashMap<String, Issued> {
        self.lock().clone()
    }

    /// Takes over what another program has committed just now: reads it from the database by the aggregate's id.
    pub fn adopt(&self, database: &Path, aggregate_id: &str) -> Result<usize, Trouble> {
        const QUERY: &str = "SELECT event_id, aggregate_type || '/' || aggregate_id, aggregate_version, payload_json \
                             FROM outbox_events WHERE aggregate_id = ?1";
        let connection = open(database)?;
        let mut statement = connection.prepare(QUERY).map_err(sqlite("read events"))?;
        let rows = statement.query_map([aggregate_id], |row| {
            let (aggregate, version, payload) = (row.get(1)?, row.get(2)?, row.get(3)?);
            Ok((row.get::<_, String>(0)?, Issued { aggregate, version, payload, committed_ns: now_ns() }))
        });
        let rows: Result<Vec<_>, _> = rows.map_err(sqlite("read events"))?.collect();
        let mut adopted = 0;
        for (id, issued) in rows.map_err(sqlite("read events"))? {
            let mut ledger = self.lock();
            adopted += usize::from(!ledger.contains_key(&id));
            ledger.entry(id).or_insert(issued);
        }
        Ok(adopted)
    }

    /// An event that an operator discarded is no longer owed to anybody.
    pub fn withdraw(&self, event_id: &str) -> Option<Issued> {
        self.lock().remove(event_id)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<String, Issued>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One program that writes events. Each committed id is in a file of its own, on disk, before the next one is written.
#[derive(Debug)]
pub struct Application {
    connection: Connection,
    ledger: Ledger,
    record: File,
}

impl Application {
    /// Opens the database of a node; `record` is the file of committed ids.
    pub fn open(database: &Path, record: &Path, ledger: &Ledger) -> Result<Self, Trouble> {
        let connection = open(database)?;
        let file = OpenOptions::new().create(true).append(true).open(record);
        let record = file.map_err(Trouble::io(format!("open {}", record.display())))?;
        Ok(Self { connection, ledger: ledger.clone(), record })
    }

    /// Inserts events in one transaction.
    pub fn commit(&mut self, events: &[NewEvent]) -> Result<(), Trouble> {
        self.commit_with(events, |_, _| Ok(()))
    }

    /// Inserts events in one transaction together with what `also` does for each.
    pub fn commit_with(
        &mut self,
        events: &[NewEvent],
        also: impl Fn(&Connection, &NewEvent) -> rusqlite::Result<()>,
    ) -> Result<(), Trouble> {
        let transaction = begin(&mut self.connection)?;
        insert(&transaction, events, also).map_err(sqlite("insert events"))?;
        transaction.commit().map_err(sqlite("commit events"))?;
        let committed_ns = now_ns();
        let mut lines = String::new();
        let mut ledger = self.ledger.lock();
        for event in events {
            lines.push_str(&event.event_id);
            lines.push('\n');
            let issued = Issued {
                aggregate: format!("{}/{}", event.aggregate_type, event.aggregate_id),
                version: event.version,
                payload: event.payload.clone(),
                committed_ns,
            };
            ledger.insert(event.event_id.clone(), issued);
        }
        drop(ledger);
        let written = self.record.write_all(lines.as_bytes()).and_then(|()| self.record.sync_data());
        written.map_err(Trouble::io("record what was committed"))
    }

    /// Does the same, then rolls back: nothing of it ever existed.
    pub fn roll_back_with(
        &mut self,
        events: &[NewEvent],
        also: impl Fn(&Connection, &NewEvent) -> rusqlite::Result<()>,
    ) -> Result<(), Trouble> {
        let transaction = begin(&mut self.connection)?;
        insert(&transaction, events, also).map_err(sqlite("insert events"))?;
        transaction.rollback().map_err(sqlite("roll back"))
    }

    /// The connection, for statements of the application's own.
    pub fn connection(&mut self) -> &mut Connection {
        &mut self.connection
    }
}

/// Writes the business row of an asset event, as an application with an `assets` table would.
pub fn write_asset(connection: &Connection, event: &NewEvent) -> rusqlite::Result<()> {
    const UPSERT: &str = "INSERT INTO assets (asset_id, name, material, version) VALUES (?1, ?2, 'S45C', ?3) \
                          ON CONFLICT (asset_id) DO UPDATE SET name = excluded.name, version = excluded.version, \
                          updated_at = CURRENT_TIMESTAMP";
    let envelope: serde_json::Value = serde_json::from_str(&event.payload).unwrap_or_default();
    let name = envelope["data"]["name"].as_str().unwrap_or_default().to_owned();
    connection.prepare_cached(UPSERT)?.execute(params![event.aggregate_id, name, event.version]).map(drop)
}

/// Opens an existing database as any program would; full synchronous, foreign locks waited for.
pub fn open(database: &Path) -> Result<Connection, Trouble> {
    let connection = Connection::open_with_flags(database, OpenFlags::SQLITE_OPEN_READ_WRITE)
        .map_err(sqlite(&format!("open {}", database.display())))?;
    connection.busy_timeout(BUSY).map_err(sqlite("set the busy timeout"))?;
    connection.pragma_update(None, "synchronous", "FULL").map_err(sqlite("set synchronous"))?;
    Ok(connection)
}

/// One number by a query without parameters.
pub fn number(database: &Path, query: &str) -> Result<i64, Trouble> {
    open(database)?.query_row(query, [], |row| row.get(0)).map_err(sqlite(query))
}

/// One text by a query without parameters.
pub fn text(database: &Path, query: &str) -> Result<String, Trouble> {
    open(database)?.query_row(query, [], |row| row.get(0)).map_err(sqlite(query))
}

/// Rows of `outbox_events` in a status.
pub fn count(database: &Path, status: &str) -> Result<i64, Trouble> {
    let query = "SELECT count(*) FROM outbox_events WHERE status = ?1";
    open(database)?.query_row(query, [status], |row| row.get(0)).map_err(sqlite(query))
}

/// Events that the inbox of a node has processed.
pub fn processed(database: &Path) -> Result<i64, Trouble> {
    number(database, "SELECT count(*) FROM processed_events")
}

/// Looks at one outbox again and again, cheaply: whether anything is pending, whatever the backlog.
#[derive(Debug)]
pub struct Watcher(Connection);

impl Watcher {
    pub fn open(database: &Path) -> Result<Self, Trouble> {
        open(database).map(Self)
    }

    /// Nothing is pending.
    pub fn drained(&self) -> Result<bool, Trouble> {
        const NONE: &str = "SELECT NOT EXISTS (SELECT 1 FROM outbox_events WHERE status = 'pending')";
        let looked = self.0.prepare_cached(NONE).and_then(|mut s| s.query_row([], |row| row.get(0)));
        looked.map_err(sqlite("watch the outbox"))
    }
}

/// For `map_err`: names the step that failed in SQLite.
pub fn sqlite(step: &str) -> impl FnOnce(rusqlite::Error) -> Trouble {
    let step = step.to_owned();
    move |e| Trouble::failed(format!("cannot {step}: {e}"))
}

/// Nanoseconds since the epoch, by this machine's clock.
pub fn now_ns() -> i128 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as i128)
}

fn begin(connection: &mut Connection) -> Result<rusqlite::Transaction<'_>, Trouble> {
    connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(sqlite("begin a transaction"))
}

fn insert(
    connection: &Connection,
    events: &[NewEvent],
    also: impl Fn(&Connection, &NewEvent) -> rusqlite::Result<()>,
) -> rusqlite::Result<()> {
    let mut statement = connection.prepare_cached(INSERT_EVENT)?;
    for e in events {
        also(connection, e)?;
        statement.execute(params![e.event_id, e.aggregate_type, e.aggregate_id, e.version, e.event_type, e.payload])?;
    }
    Ok(())
}

/// Makes events one after the other, round robin over aggregates, each with its next version.
#[derive(Clone, Debug)]
pub struct Generator {
    prefix: String,
    aggregates: usize,
    filler: String,
    next: usize,
}

impl Generator {
    /// `prefix` makes ids and aggregates unique in a run.
    pub fn new(prefix: &str, aggregates: usize) -> Self {
        Self { prefix: prefix.to_owned(), aggregates: aggregates.max(1), filler: String::new(), next: 0 }
    }

    /// Pads the name so that each payload has about `bytes` bytes.
    pub fn sized(mut self, bytes: usize) -> Self {
        let bare = self.clone().next_event().payload.len();
        self.filler = "x".repeat(bytes.saturating_sub(bare));
        self
    }

    pub fn next_event(&mut self) -> NewEvent {
        let (n, prefix) = (self.next, &self.prefix);
        self.next += 1;
        let asset = format!("{prefix}-{:05}", n % self.aggregates);
        let version = (n / self.aggregates) as i64 + 1;
        NewEvent::asset(&format!("{prefix}-evt-{n:09}"), &asset, version, &format!("Pump {n}{}", self.filler))
    }

    pub fn take(&mut self, count: usize) -> Vec<NewEvent> {
        (0..count).map(|_| self.next_event()).collect()
    }
}
