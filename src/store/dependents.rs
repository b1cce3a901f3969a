//! What else in a file depends on `outbox_events`: found before the rebuild, put back after it, tried before the commit.
//!
//! Invariants: an object that worked before works after, or nothing is committed · one that was broken before does not
//! stand in the way. May import: the store's error, ddl, sql_text, schema; rusqlite.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use rusqlite::Connection;

use super::error::{Result, Step, StoreError};
use super::sql_text::{mentions, name_parent_column, quote};
use super::{ddl, schema};

/// A foreign key of another table that points at the outbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reference {
    pub table: String,
    pub column: String,
    /// `None` where the declaration names no column and so means the primary key.
    pub parent_column: Option<String>,
    pub on_delete: String,
}

/// The objects of an application around its outbox.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dependents {
    /// Indexes of the table itself: name and SQL.
    pub indexes: Vec<(String, String)>,
    /// Triggers of the table itself: name and SQL.
    pub triggers: Vec<(String, String)>,
    /// Triggers of other tables and views that name the outbox: name and table.
    pub outer_triggers: Vec<(String, String)>,
    /// Views that name the outbox.
    pub views: Vec<String>,
    pub references: Vec<Reference>,
}

const STEP: &str = "read what depends on the outbox";

/// Everything in the file that names `outbox_events`, ours apart.
pub(super) fn find(conn: &Connection) -> Result<Dependents> {
    let mut found = Dependents::default();
    let mut statement = conn
        .prepare("SELECT type, name, tbl_name, sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid")
        .step(STEP)?;
    let mut rows = statement.query([]).step(STEP)?;
    while let Some(row) = rows.next().step(STEP)? {
        let text = |i: usize| row.get::<_, String>(i).step(STEP);
        let (kind, name, table, sql) = (text(0)?, text(1)?, text(2)?, text(3)?);
        let own = table.eq_ignore_ascii_case("outbox_events");
        if is_ours(&name) {
            continue;
        }
        match kind.as_str() {
            "index" if own => found.indexes.push((name, sql)),
            "trigger" if own => found.triggers.push((name, sql)),
            "trigger" if mentions(&sql, "outbox_events") => found.outer_triggers.push((name, table)),
            "view" if mentions(&sql, "outbox_events") => found.views.push(name),
            _ => {}
        }
    }
    let mut statement = conn
        .prepare(
            "SELECT m.name, f.\"from\", f.\"to\", f.on_delete FROM sqlite_master m, pragma_foreign_key_list(m.name) f
            WHERE m.type = 'table' AND lower(f.\"table\") = 'outbox_events' AND lower(m.name) <> 'outbox_events'",
        )
        .step(STEP)?;
    found.references = statement
        .query_map([], |r| {
            Ok(Reference { table: r.get(0)?, column: r.get(1)?, parent_column: r.get(2)?, on_delete: r.get(3)? })
        })
        .and_then(Iterator::collect)
        .step(STEP)?;
    Ok(found)
}

/// Made by us; the name of the classic index is ours too.
pub(super) fn is_ours(name: &str) -> bool {
    ddl::objects().chain([&ddl::DEBEZIUM_VIEW, &ddl::DEBEZIUM_INSERT, &ddl::DEBEZIUM_DELETE]).any(|o| o.name == name)
}

/// What was tried and what SQLite said: an error, or how many rows break a foreign key.
pub(super) type Tried = BTreeMap<String, std::result::Result<i64, String>>;

/// Compiles, without running them, a query on every view and a change of every table that has triggers; counts the
/// rows that break a foreign key.
pub(super) fn try_all(conn: &Connection, dependents: &Dependents) -> Result<Tried> {
    let mut tried = Tried::new();
    let names = |sql: &str| -> Result<Vec<String>> {
        let mut statement = conn.prepare(sql).step(STEP)?;
        statement.query_map([], |r| r.get(0)).and_then(Iterator::collect).step(STEP)
    };
    let mut compile = |what: String, sql: &str| {
        tried.insert(what, conn.prepare(sql).map(|_| 0).map_err(|e| e.to_string()));
    };
    for view in names("SELECT name FROM sqlite_master WHERE type = 'view'")? {
        compile(format!("view {view}"), &format!("SELECT * FROM {}", quote(&view)));
    }
    for table in names("SELECT DISTINCT tbl_name FROM sqlite_master WHERE type = 'trigger'")? {
        let name = quote(&table);
        compile(format!("insert into {table}"), &format!("INSERT INTO {name} DEFAULT VALUES"));
        compile(format!("delete from {table}"), &format!("DELETE FROM {name}"));
        // every column, so that every UPDATE OF trigger is compiled
        for column in schema::columns(conn, &table).step(STEP)? {
            let column = quote(&column);
            compile(format!("update {table} {column}"), &format!("UPDATE {name} SET {column} = {column}"));
        }
    }
    let children = dependents.references.iter().map(|r| r.table.as_str()).chain(["outbox_events"]);
    for child in children {
        tried.insert(format!("foreign keys of {child}"), broken_keys(conn, child).map_err(|e| e.to_string()));
    }
    Ok(tried)
}

fn broken_keys(conn: &Connection, table: &str) -> rusqlite::Result<i64> {
    conn.query_row("SELECT count(*) FROM pragma_foreign_key_check(?1)", [table], |r| r.get(0))
}

/// Answers with an error where something worked before and does not now.
pub(super) fn compare(before: &Tried, after: &Tried) -> Result<()> {
    let mut broken = Vec::new();
    for (what, was) in before {
        match (was, after.get(what)) {
            (Ok(was), Some(Ok(now))) if now > was => broken.push(format!("{what}: {} more rows break one", now - was)),
            (Ok(_), Some(Err(why))) => broken.push(format!("{what}: {why}")),
            (Ok(_), None) => broken.push(format!("{what}: it is gone")),
            (Ok(_) | Err(_), _) => {}
        }
    }
    if broken.is_empty() {
        return Ok(());
    }
    Err(StoreError::Refused(format!(
        "some of the application's own would stop working, nothing was changed: {}",
        broken.join("; ")
    )))
}

/// Rows of every table that refers to the outbox.
pub(super) fn row_counts(conn: &Connection, dependents: &Dependents) -> Result<BTreeMap<String, i64>> {
    let count = |table: &str| conn.query_row(&format!("SELECT count(*) FROM {}", quote(table)), [], |r| r.get(0));
    dependents.references.iter().map(|r| Ok((r.table.clone(), count(&r.table).step(STEP)?))).collect()
}

/// Makes the application's own indexes and triggers again.
pub(super) fn restore(conn: &Connection, dependents: &Dependents) -> Result<()> {
    for (name, sql) in dependents.indexes.iter().chain(&dependents.triggers) {
        conn.execute_batch(sql)
            .map_err(|e| StoreError::Refused(format!("{name} cannot be made again, nothing was changed: {e}")))?;
    }
    Ok(())
}

/// A reference without a column meant the old primary key, `event_id`; it would now mean `seq`. The column is written
/// into the declaration.
pub(super) fn name_parent_columns(conn: &Connection, dependents: &Dependents) -> Result<()> {
    const STEP: &str = "name the column that other tables refer to";
    let implicit: Vec<&str> =
        dependents.references.iter().filter(|r| r.parent_column.is_none()).map(|r| r.table.as_str()).collect();
    if implicit.is_empty() {
        return Ok(());
    }
    conn.execute_batch("PRAGMA writable_schema = ON").step(STEP)?;
    for table in implicit {
        let Some((_, sql)) = schema::stored_sql(conn, table)? else { continue };
        if let Some(edited) = name_parent_column(&sql, "outbox_events", "event_id") {
            conn.execute("UPDATE sqlite_master SET sql = ?1 WHERE type = 'table' AND name = ?2", (edited, table))
                .step(STEP)?;
        }
    }
    conn.execute_batch("PRAGMA writable_schema = RESET").step(STEP)
}

/// Column definitions and table constraints for columns that only the application knows: each line with its comma.
pub(super) fn extra_definitions(conn: &Connection, columns: &[String]) -> Result<(String, String)> {
    let mut text = String::new();
    for column in columns {
        let (kind, not_null, default): (String, bool, Option<String>) = conn
            .query_row(
                "SELECT type, \"notnull\", dflt_value FROM pragma_table_xinfo('outbox_events') WHERE name = ?1",
                [column],
                |r| Ok((r.get(0)?, r.get(1)?, r.get(2)?)),
            )
            .step(STEP)?;
        let not_null = if not_null { " NOT NULL" } else { "" };
        let default = default.map(|d| format!(" DEFAULT ({d})")).unwrap_or_default();
        let _ = writeln!(text, "    {} {kind}{not_null}{default},", quote(column));
    }
    Ok((text, own_keys(conn)?))
}

fn own_keys(conn: &Connection) -> Result<String> {
    type Key = (String, Vec<String>, Vec<String>, String);
    let mut keys: BTreeMap<i64, Key> = BTreeMap::new();
    let mut statement = conn
        .prepare(
            "SELECT id, \"table\", \"from\", \"to\", on_update, on_delete FROM pragma_foreign_key_list('outbox_events')
            ORDER BY id, seq",
        )
        .step(STEP)?;
    let mut rows = statement.query([]).step(STEP)?;
    while let Some(row) = rows.next().step(STEP)? {
        let text = |i: usize| row.get::<_, Option<String>>(i).step(STEP).map(Option::unwrap_or_default);
        let (table, from, mut to) = (text(1)?, text(2)?, text(3)?);
        if to.is_empty() && table.eq_ignore_ascii_case("outbox_events") {
            to = "event_id".into();
        }
        let rules = format!("ON UPDATE {} ON DELETE {}", text(4)?, text(5)?);
        let key = keys.entry(row.get(0).step(STEP)?).or_insert_with(|| (table, Vec::new(), Vec::new(), rules));
        key.1.push(quote(&from));
        if !to.is_empty() {
            key.2.push(quote(&to));
        }
    }
    let mut text = String::new();
    for (table, from, to, rules) in keys.into_values() {
        let to = if to.is_empty() { String::new() } else { format!(" ({})", to.join(", ")) };
        let _ = write!(text, ",\n    FOREIGN KEY ({}) REFERENCES {}{to} {rules}", from.join(", "), quote(&table));
    }
    Ok(text)
}
