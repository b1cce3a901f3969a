//! `outboxd asset`: the example domain. Row and event are written in one transaction on the file; a daemon beside it
//! notices the commit like that of any application.

use std::path::Path;

use serde_json::json;

use super::render;
use super::{CliError, Exit};
use crate::domain::event::Millis;
use crate::store::assets::{self, Asset, Change};
use crate::store::direct;

/// `asset get ID`.
pub fn get(path: &Path, id: &str, json: bool) -> Result<Exit, CliError> {
    match direct::read(path, |conn| assets::get(conn, id))? {
        Some(asset) => show(&asset, None, json),
        None => Err(missing(path, id)),
    }
}

/// `asset create ID --name .. --material ..`.
pub fn create(path: &Path, id: &str, name: &str, material: &str, now: Millis, json: bool) -> Result<Exit, CliError> {
    match direct::change(path, |tx| assets::create(tx, id, name, material, now))? {
        Change::Written { asset, event_id } => show(&asset, Some(&event_id), json),
        Change::Conflict { current } => {
            Err(CliError::failure(format!("asset {id} is there already, at version {current}; nothing was written"))
                .fix(format!("outboxd asset update {id} --expected-version {current} --name .. --material ..")))
        }
        Change::Missing => Err(missing(path, id)),
    }
}

/// `asset update ID --expected-version N --name .. --material ..`.
pub fn update(
    path: &Path,
    id: &str,
    expected: i64,
    name: &str,
    material: &str,
    now: Millis,
    json: bool,
) -> Result<Exit, CliError> {
    match direct::change(path, |tx| assets::update(tx, id, expected, name, material, now))? {
        Change::Written { asset, event_id } => show(&asset, Some(&event_id), json),
        Change::Conflict { current } => Err(CliError::failure(format!(
            "version conflict: asset {id} is at version {current}, not {expected}; nothing was written"
        ))
        .fix(format!("read it again (`outboxd asset get {id}`) and decide anew"))),
        Change::Missing => Err(missing(path, id)),
    }
}

fn missing(path: &Path, id: &str) -> CliError {
    CliError::failure(format!("there is no asset {id} in {}; nothing was written", path.display()))
        .fix(format!("outboxd asset create {id} --name .. --material .."))
}

fn show(asset: &Asset, event_id: Option<&str>, json: bool) -> Result<Exit, CliError> {
    let mut value = json!({
        "asset_id": asset.asset_id, "name": asset.name, "material": asset.material, "version": asset.version,
        "updated_at": asset.updated_at,
    });
    if let Some(event_id) = event_id {
        value["event_id"] = event_id.into();
    }
    if json {
        render::json(&value)?;
        return Ok(Exit::Ok);
    }
    let event = event_id.map(|id| format!(", event {id}")).unwrap_or_default();
    let text = format!(
        "{}: {} / {}, version {}, {}{event}",
        asset.asset_id, asset.name, asset.material, asset.version, asset.updated_at
    );
    render::text(&(render::visible(&text) + "\n"))?;
    Ok(Exit::Ok)
}
