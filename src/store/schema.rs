//! Which tables a file has, and making ours in a file without them.
//!
//! Invariants: only [`init`] creates a file · all of it is made in one transaction · what is there already is never
//! altered here (that is `migrate.rs`). May import: the store's ddl, connection, error; rusqlite; uuid (the identity).

use std::path::Path;

use rusqlite::{Connection, OptionalExtension, Transaction, TransactionBehavior};

use super::connection::{self, Access, Settings};
use super::ddl;
use super::error::{Result, Step, StoreError};

/// Whose tables a file has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Layout {
    /// None of the outbox; perhaps tables of an application.
    Empty,
    /// The classic outbox, to be taken over by `db migrate`.
    Classic,
    /// Ours, at this version.
    Ours { version: i64 },
    /// A table of a name of ours that is neither.
    Foreign { table: String, why: String },
}

/// What [`init`] found and made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Made {
    /// False where our tables were there already and nothing was changed.
    pub tables: bool,
    /// The `assets` table was made now.
    pub example: bool,
    /// The identity kept in the database.
    pub source: String,
    /// What had to be done to the file, in words.
    pub notes: Vec<String>,
}

/// Looks at the tables of a file.
pub fn inspect(conn: &Connection) -> Result<Layout> {
    const STEP: &str = "read the schema";
    let outbox = columns(conn, "outbox_events").step(STEP)?;
    let meta = columns(conn, "outboxd_meta").step(STEP)?;
    if !meta.is_empty() {
        let version = meta_get(conn, "schema_version")?.and_then(|v| v.parse().ok());
        return Ok(match version {
            Some(version) if outbox.iter().any(|c| c == "seq") || version > ddl::VERSION => Layout::Ours { version },
            Some(_) => foreign("outbox_events", "outboxd_meta is there, but outbox_events is not the one of outboxd"),
            None => foreign("outboxd_meta", "it has no schema_version"),
        });
    }
    if outbox.is_empty() {
        return Ok(Layout::Empty);
    }
    let missing: Vec<&str> =
        ddl::CLASSIC_COLUMNS.into_iter().filter(|c| !outbox.iter().any(|o| o.eq_ignore_ascii_case(c))).collect();
    let is_table = stored_sql(conn, "outbox_events")?.is_some_and(|(kind, _)| kind == "table");
    Ok(match missing.as_slice() {
        [] if is_table => Layout::Classic,
        [] => foreign("outbox_events", "it is a view"),
        _ => foreign("outbox_events", &format!("it lacks the columns {}", missing.join(", "))),
    })
}

fn foreign(table: &str, why: &str) -> Layout {
    Layout::Foreign { table: table.into(), why: why.into() }
}

/// Answers with an error unless the file has our tables at this program's version.
pub fn require(conn: &Connection, path: &Path) -> Result<()> {
    let path = path.to_path_buf();
    match inspect(conn)? {
        Layout::Ours { version } if version == ddl::VERSION => Ok(()),
        Layout::Ours { version: found } if found < ddl::VERSION => {
            Err(StoreError::Older { path, found, known: ddl::VERSION })
        }
        Layout::Ours { version: found } => Err(StoreError::Newer { path, found, known: ddl::VERSION }),
        Layout::Empty => Err(StoreError::NoTables { path }),
        Layout::Classic => Err(StoreError::Classic { path }),
        Layout::Foreign { table, why } => Err(StoreError::Foreign { path, table, why }),
    }
}

/// Makes the file where there is none, and our tables where there are none. Running it again changes nothing.
///
/// `source` is the identity of this outbox; empty: one is made.
///
/// # Errors
/// [`StoreError::Classic`], [`StoreError::Foreign`], [`StoreError::Newer`], and what [`connection::open`] answers.
pub fn init(path: &Path, source: &str, example: bool) -> Result<Made> {
    let mut opened = connection::open(path, Access::Create, &Settings::default())?;
    let tx = opened.conn.transaction_with_behavior(TransactionBehavior::Immediate).step("begin")?;
    let tables = match require(&tx, path) {
        Ok(()) => false,
        Err(StoreError::NoTables { .. }) => {
            create(&tx, source)?;
            true
        }
        Err(other) => return Err(other),
    };
    let example = example && create_assets(&tx)?;
    let source = meta_get(&tx, "source")?.unwrap_or_default();
    tx.commit().step("commit the new tables")?;
    Ok(Made { tables, example, source, notes: opened.notes })
}

/// Makes our tables, indexes and triggers. A classic `processed_events` that is there already stays.
pub fn create(tx: &Transaction<'_>, source: &str) -> Result<()> {
    const STEP: &str = "make the tables";
    for object in ddl::objects() {
        if object.name == ddl::PROCESSED.name && keep_processed(tx)? {
            continue;
        }
        tx.execute_batch(object.sql).step(STEP)?;
    }
    write_meta(tx, source, "init")
}

/// The first rows of `outboxd_meta`; `origin` is how our tables came into the file: `init` or `migrate`.
pub(super) fn write_meta(tx: &Transaction<'_>, source: &str, origin: &str) -> Result<()> {
    const SQL: &str = "INSERT INTO outboxd_meta (key, value) VALUES ('schema_version', ?1), ('source', ?2),
        ('epoch', 0), ('created_at', strftime('%Y-%m-%d %H:%M:%f', 'now')), ('created_by', ?3), ('origin', ?4)";
    let source = if source.is_empty() { uuid::Uuid::now_v7().to_string() } else { source.to_owned() };
    let version = concat!("outboxd ", env!("CARGO_PKG_VERSION"));
    tx.execute(SQL, (ddl::VERSION, source, version, origin)).step("write the first settings")?;
    Ok(())
}

/// Everything that `db init` makes, as a script for teams that keep their own migrations. Plays with any SQLite from
/// 3.35 on; to be run once, on a file in WAL mode.
pub fn script() -> String {
    let mut text = format!(
        "-- the tables of outboxd {} (schema version {}); SQLite 3.35 or newer\nPRAGMA journal_mode = WAL;\nBEGIN IMMEDIATE;\n\n",
        env!("CARGO_PKG_VERSION"),
        ddl::VERSION
    );
    for object in ddl::objects() {
        text.push_str(object.sql);
        text.push_str(";\n\n");
    }
    text.push_str(&format!(
        "-- source: the identity of this outbox; give it a name of your own, or keep the random one\n\
         INSERT INTO outboxd_meta (key, value) VALUES ('schema_version', {}), ('source', lower(hex(randomblob(16)))),\n    \
         ('epoch', 0), ('created_at', strftime('%Y-%m-%d %H:%M:%f', 'now')), ('created_by', 'db schema'), ('origin', 'init');\n\nCOMMIT;\n",
        ddl::VERSION
    ));
    text
}

/// Objects of ours that are missing from the file or differ from what this program makes.
pub fn differences(conn: &Connection) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for object in ddl::objects() {
        let normal = super::sql_text::normal;
        match stored_sql(conn, object.name)? {
            None => found.push(format!("the {} {} is missing", object.kind, object.name)),
            Some((kind, _)) if kind != object.kind => found.push(format!("{} is a {kind}", object.name)),
            // tables of the application may have columns of its own
            Some((_, sql)) if [ddl::OUTBOX.name, ddl::PROCESSED.name].contains(&object.name) => {
                let missing = missing_columns(conn, object, &sql)?;
                if !missing.is_empty() {
                    found.push(format!("the table {} lacks {}", object.name, missing.join(", ")));
                }
            }
            Some((_, sql)) if normal(&sql) != normal(object.sql) => {
                found.push(format!("the {} {} is not the one that this program makes", object.kind, object.name));
            }
            Some(_) => {}
        }
    }
    Ok(found)
}

fn missing_columns(conn: &Connection, object: &ddl::Object, sql: &str) -> Result<Vec<String>> {
    if object.name == ddl::OUTBOX.name && super::sql_text::count(sql, "autoincrement") == 0 {
        return Ok(vec!["AUTOINCREMENT".into()]);
    }
    let memory = Connection::open_in_memory().step("compare the schema")?;
    memory.execute_batch(object.sql).step("compare the schema")?;
    let wanted = columns(&memory, object.name).step("compare the schema")?;
    let have = columns(conn, object.name).step("read the schema")?;
    Ok(wanted.into_iter().filter(|w| !have.iter().any(|h| h.eq_ignore_ascii_case(w))).collect())
}

/// True where a `processed_events` that works with us is there; an error where it is another table.
pub(super) fn keep_processed(conn: &Connection) -> Result<bool> {
    let found = columns(conn, ddl::PROCESSED.name).step("read the schema")?;
    if found.is_empty() {
        return Ok(false);
    }
    if ["event_id", "processed_at"].iter().all(|c| found.iter().any(|f| f.eq_ignore_ascii_case(c))) {
        return Ok(true);
    }
    Err(StoreError::Refused(format!(
        "the file has a table processed_events of another kind (columns {}); rename it first",
        found.join(", ")
    )))
}

/// Makes the example's `assets` table where there is none; true where it was made now.
///
/// # Errors
/// [`StoreError::Refused`] where a table of that name has another shape: it is the application's.
pub fn create_assets(conn: &Connection) -> Result<bool> {
    let found = columns(conn, ddl::ASSETS.name).step("read the schema")?;
    if found.is_empty() {
        // who made it decides what an uninstall removes
        const NOTE: &str = "INSERT INTO outboxd_meta (key, value) VALUES ('assets', 'made by outboxd')
            ON CONFLICT (key) DO NOTHING";
        conn.execute_batch(ddl::ASSETS.sql).step("make the table assets")?;
        conn.execute(NOTE, []).step("make the table assets")?;
        return Ok(true);
    }
    let wanted = ["asset_id", "name", "material", "version", "updated_at"];
    if wanted.iter().all(|c| found.iter().any(|f| f == c)) {
        return Ok(false);
    }
    Err(StoreError::Refused(format!(
        "the file has a table assets of another kind (columns {}), so the example domain cannot be used here; \
         nothing else depends on it",
        found.join(", ")
    )))
}

/// A value of `outboxd_meta` as text.
pub fn meta_get(conn: &Connection, key: &str) -> Result<Option<String>> {
    const SQL: &str = "SELECT CAST(value AS TEXT) FROM outboxd_meta WHERE key = ?1";
    let found =
        conn.prepare_cached(SQL).and_then(|mut s| s.query_row([key], |r| r.get::<_, Option<String>>(0)).optional());
    Ok(found.step("read a setting")?.flatten())
}

/// Columns of a table or view in order; empty where there is none.
pub(super) fn columns(conn: &Connection, table: &str) -> rusqlite::Result<Vec<String>> {
    let mut statement = conn.prepare("SELECT name FROM pragma_table_xinfo(?1) ORDER BY cid")?;
    let rows = statement.query_map([table], |r| r.get(0))?;
    rows.collect()
}

/// Kind and SQL of an object of the schema.
pub(super) fn stored_sql(conn: &Connection, name: &str) -> Result<Option<(String, String)>> {
    const SQL: &str = "SELECT type, coalesce(sql, '') FROM sqlite_master WHERE lower(name) = lower(?1) AND type IN ('table', 'view', 'index', 'trigger')";
    conn.query_row(SQL, [name], |r| Ok((r.get(0)?, r.get(1)?))).optional().step("read the schema")
}
