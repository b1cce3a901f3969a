//! `outboxd inbox`: list, show. They read the file, whether a daemon runs or not; retry and discard are changes and go
//! through the daemon where there is one.

use std::path::Path;

use rusqlite::Connection;
use serde_json::{Value, json};

use super::render::{self, Listing, visible};
use super::{CliError, Exit};
use crate::store::connection::{self, Access, Settings};
use crate::store::error::StoreError;
use crate::store::inbox_letters::{self, Row, Whole};
use crate::store::schema;

/// Most rows that a list shows where nobody says how many.
pub const LIMIT: usize = 1_000;

/// States that can be listed.
pub const STATES: [&str; 3] = ["dead", "stored", "done"];

fn open(database: &Path) -> Result<Connection, StoreError> {
    let opened = connection::open(database, Access::Read, &Settings::default())?;
    schema::require(&opened.conn, database)?;
    Ok(opened.conn)
}

/// `inbox list`: rows in one of [`STATES`], oldest first.
///
/// # Errors
/// Exit 2 for another state, exit 69 where there is no database.
pub fn list(database: &Path, state: &str, limit: usize, as_json: bool) -> Result<Exit, CliError> {
    if !STATES.contains(&state) {
        return Err(CliError::usage(format!("there is no state {state:?}; there are {}", STATES.join(", "))));
    }
    let rows = inbox_letters::list(&open(database)?, state, limit)?;
    render::list(&listing(&rows, as_json), as_json)?;
    Ok(Exit::Ok)
}

/// All columns for programs, the ones that fit a terminal for people.
fn listing(rows: &[Row], all: bool) -> Listing {
    let narrow: &[&str] = &["id", "received_at", "subject", "stream_seq", "source", "event_id", "event_type", "reason"];
    let wide: &[&str] = &[
        "id",
        "source",
        "event_id",
        "event_type",
        "aggregate_type",
        "aggregate_id",
        "aggregate_version",
        "subject",
        "stream",
        "stream_seq",
        "state",
        "reason",
        "received_at",
        "done_at",
        "durable",
    ];
    let columns = if all { wide } else { narrow };
    let mut listing = Listing::new(columns);
    for row in rows {
        let value = json!(row);
        listing.row(columns.iter().map(|column| value[*column].clone()).collect());
    }
    listing
}

/// `inbox show ID`: one row whole.
///
/// # Errors
/// Exit 1 where there is no such row.
pub fn show(database: &Path, id: i64, as_json: bool) -> Result<Exit, CliError> {
    let whole = inbox_letters::show(&open(database)?, id)?;
    if as_json {
        render::json(&json!(whole))?;
    } else {
        render::text(&text(&whole))?;
    }
    Ok(Exit::Ok)
}

/// A line a column; foreign bytes are made visible.
fn text(whole: &Whole) -> String {
    let mut text = String::new();
    let Value::Object(members) = json!(whole) else { return text };
    for (name, value) in &members {
        if name != "payload" && !value.is_null() {
            text.push_str(&format!("{name:<18} {}\n", visible(&render::cell(value))));
        }
    }
    text.push_str(&format!("\n{}\n", visible(&whole.payload)));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row() -> Row {
        Row {
            id: 7,
            source: None,
            event_id: None,
            event_type: None,
            aggregate_type: None,
            aggregate_id: None,
            aggregate_version: None,
            subject: "events.x".into(),
            stream: Some("EVENTS".into()),
            stream_seq: Some(9),
            state: "dead".into(),
            reason: Some("no identity: \u{1b}[31m".into()),
            received_at: "2026-10-07 01:20:00.000".into(),
            done_at: None,
            durable: "hub".into(),
        }
    }

    #[test]
    fn a_list_for_programs_has_every_column() {
        let value = listing(&[row()], true).to_json();
        let first = value[0].as_object().unwrap();
        assert_eq!(first.len(), json!(row()).as_object().unwrap().len());
        assert_eq!((&first["id"], &first["stream_seq"], &first["done_at"]), (&json!(7), &json!(9), &Value::Null));
    }

    #[test]
    fn what_a_stranger_wrote_cannot_steer_the_terminal() {
        let whole = Whole { row: row(), headers_json: None, payload: "\u{1b}]0;x\u{7}".into(), payload_bytes: 6 };
        let text = text(&whole);
        assert!(!text.contains(['\u{1b}', '\u{7}']), "{text:?}");
        assert!(!listing(&[row()], false).to_table(Some(200)).contains('\u{1b}'));
    }

    #[test]
    fn an_unknown_state_and_a_missing_file_are_told_apart() {
        let folder = tempfile::tempdir().unwrap();
        let database = folder.path().join("none.db");
        assert_eq!(list(&database, "lost", 10, true).unwrap_err().exit, Exit::Usage);
        assert_eq!(list(&database, "dead", 10, true).unwrap_err().exit, Exit::Unavailable);
        schema::init(&database, "hub", false).unwrap();
        assert_eq!(show(&database, 1, true).unwrap_err().exit, Exit::Failure);
    }
}
