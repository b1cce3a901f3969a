//! What a handler does with an inbound event, inside of the transaction that records it.
//!
//! Rules: a version at or below the applied one is stale and changes nothing; a version that is missing in between is
//! waited for or not, by configuration; an error is the event's own, or the schema's (a table that is not there yet:
//! nobody is blamed), or the database's as a whole. `store` keeps every event: it is the application that applies it.
//!
//! May import: domain, the rest of the store, rusqlite, serde_json.

use std::sync::Arc;
use std::time::Duration;

use rusqlite::{OptionalExtension, Transaction};
use serde::Deserialize;

use super::error::{StoreError, chain};
use super::inbox_letters::{self, Letter};
use super::{inbox_sql, schema};
use crate::domain::apply::{Action, GapRule, InboxRules, VersionStep, version_step};
use crate::domain::inbox::{Body, Event, Inbound};

/// What a handler did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    Applied,
    /// Kept for the application.
    Stored,
    /// Its version is not above the applied one: nothing was changed.
    Stale,
    /// A version in between is missing: nothing was changed, look again after this.
    Wait(Duration),
}

/// Why a handler did nothing.
#[derive(Debug)]
pub enum Trouble {
    /// The event's own fault: counted, and after `max_deliver` of them it is dead.
    Own(String),
    /// Something outside of the event is missing, a table for instance: it waits, not counted.
    Blocked(String),
    /// The database as a whole.
    Store(StoreError),
}

impl From<StoreError> for Trouble {
    fn from(error: StoreError) -> Self {
        if let Some(fault) = error.fault()
            && let Some(missing) = missing(&fault.cause)
        {
            return Trouble::Blocked(missing);
        }
        match error {
            StoreError::Constraint(_) | StoreError::Sqlite(_) | StoreError::Refused(_) => Trouble::Own(chain(&error)),
            other => Trouble::Store(other),
        }
    }
}

/// A table, column, view or function that a statement names and the schema does not have (now).
fn missing(cause: &rusqlite::Error) -> Option<String> {
    let text = match cause {
        rusqlite::Error::SqlInputError { msg, .. } => msg,
        rusqlite::Error::SqliteFailure(_, Some(msg)) => msg,
        _ => return None,
    };
    ["no such table", "no such column", "no such function", "no such module", "has no column named"]
        .iter()
        .any(|start| text.contains(start))
        .then(|| text.clone())
}

/// What is around an event when a handler gets it.
#[derive(Debug)]
pub struct Place<'a> {
    pub rules: &'a InboxRules,
    pub stream: &'a str,
    pub message: &'a Inbound,
    /// How long this message has waited for a version that is missing.
    pub waited: Duration,
    /// The time of the batch as text.
    pub stamp: &'a str,
}

/// A handler of inbound events. It runs in the dedupe transaction: all it may do is write to this transaction, and it
/// must neither commit nor roll it back. It holds the write lock while it runs, so it has to be quick.
pub trait Handler: Send + Sync {
    /// Applies one event. After an error nothing of what it wrote remains.
    fn apply(&self, tx: &Transaction<'_>, event: &Event<'_>, place: &Place<'_>) -> Result<Effect, Trouble>;

    /// Its effect is one statement at most, so that no savepoint is needed to undo it.
    fn is_one_statement(&self) -> bool {
        false
    }
}

/// The handler of an action.
pub(super) fn of(action: &Action) -> Arc<dyn Handler> {
    match action {
        Action::Assets => Arc::new(Assets),
        Action::Store => keep(),
        Action::Sql(sql) => Arc::new(inbox_sql::Sql::new(sql)),
    }
}

/// The handler that keeps events for the application.
pub(super) fn keep() -> Arc<dyn Handler> {
    Arc::new(Keep)
}

/// Compares the version of an event with the one that is applied, and says what that means, `None`: go on.
pub(super) fn version_effect(applied: Option<i64>, event: &Event<'_>, place: &Place<'_>) -> Option<Effect> {
    let incoming = event.aggregate_version?;
    match version_step(applied, incoming, place.rules.gap, place.waited) {
        VersionStep::Apply => None,
        VersionStep::Stale => Some(Effect::Stale),
        VersionStep::Wait { after } => Some(Effect::Wait(after)),
    }
}

struct Keep;

impl Handler for Keep {
    fn apply(&self, tx: &Transaction<'_>, event: &Event<'_>, place: &Place<'_>) -> Result<Effect, Trouble> {
        inbox_letters::insert(
            tx,
            &Letter {
                durable: &place.rules.durable,
                stream: place.stream,
                message: place.message,
                event: Some(event),
                state: "stored",
                reason: None,
                stamp: place.stamp,
            },
        )?;
        Ok(Effect::Stored)
    }

    fn is_one_statement(&self) -> bool {
        true
    }
}

/// The example domain: the asset takes name and material of the event's data, and its version.
struct Assets;

#[derive(Deserialize)]
struct AssetData {
    name: String,
    material: String,
}

impl Assets {
    fn write(tx: &Transaction<'_>, id: &str, version: i64, data: &AssetData, stamp: &str) -> rusqlite::Result<bool> {
        const SQL: &str =
            "INSERT INTO assets (asset_id, name, material, version, updated_at) VALUES (?1, ?2, ?3, ?4, ?5)
            ON CONFLICT (asset_id) DO UPDATE SET name = excluded.name, material = excluded.material,
                version = excluded.version, updated_at = excluded.updated_at
            WHERE excluded.version > assets.version";
        let params = (id, data.name.as_str(), data.material.as_str(), version, stamp);
        Ok(tx.prepare_cached(SQL)?.execute(params)? > 0)
    }

    fn version(tx: &Transaction<'_>, id: &str) -> rusqlite::Result<Option<i64>> {
        const SQL: &str = "SELECT version FROM assets WHERE asset_id = ?1";
        tx.prepare_cached(SQL)?.query_row([id], |row| row.get(0)).optional()
    }
}

impl Handler for Assets {
    fn apply(&self, tx: &Transaction<'_>, event: &Event<'_>, place: &Place<'_>) -> Result<Effect, Trouble> {
        let lacks = |what: &str| Trouble::Own(format!("the assets handler needs {what}"));
        let id = event.aggregate_id.as_deref().filter(|id| !id.is_empty()).ok_or_else(|| lacks("an aggregate_id"))?;
        let version = event.aggregate_version.ok_or_else(|| lacks("an aggregate_version"))?;
        let data = match &event.body {
            Body::Opaque(why) => return Err(lacks(&format!("an envelope in the body ({why})"))),
            Body::Json { data, .. } => data.ok_or_else(|| lacks("data"))?,
        };
        let data: AssetData =
            serde_json::from_str(data).map_err(|e| lacks(&format!("name and material in data: {e}")))?;
        const STEP: &str = "apply an event to assets";
        let step = |cause| StoreError::at(STEP, cause);
        let mut tried = self.try_once(tx, id, version, &data, event, place);
        if matches!(&tried, Err(cause) if missing(cause).is_some()) {
            // the table is made by its first use; another one of that name is the application's
            match schema::create_assets(tx) {
                Ok(true) => tried = self.try_once(tx, id, version, &data, event, place),
                Ok(false) => {}
                Err(StoreError::Refused(why)) => return Err(Trouble::Blocked(why)),
                Err(other) => return Err(other.into()),
            }
        }
        Ok(tried.map_err(step)?)
    }

    fn is_one_statement(&self) -> bool {
        true
    }
}

impl Assets {
    fn try_once(
        &self,
        tx: &Transaction<'_>,
        id: &str,
        version: i64,
        data: &AssetData,
        event: &Event<'_>,
        place: &Place<'_>,
    ) -> rusqlite::Result<Effect> {
        if matches!(place.rules.gap, GapRule::Wait(_))
            && let Some(effect) = version_effect(Self::version(tx, id)?, event, place)
        {
            return Ok(effect);
        }
        Ok(if Self::write(tx, id, version, data, place.stamp)? { Effect::Applied } else { Effect::Stale })
    }
}
