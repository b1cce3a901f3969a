//! `reload`, `pause`, `resume`: orders to the daemon; a pause is also done on the file while no daemon runs.

use std::time::Duration;

use serde_json::Value;

use super::context::{self, Context};
use super::error::{CliError, Exit};
use super::render::{self, Listing, visible};
use crate::admin::client::Answer;
use crate::admin::operate;
use crate::admin::protocol::Request;
use crate::admin::{Changed, Reloaded};
use crate::store::connection::{self, Access, Settings};
use crate::store::error::{Step, StoreError};
use crate::store::schema;

/// Does a change: the daemon where one answers, else on the file in one transaction. A daemon that is silent or not for
/// this user is never worked around.
pub fn change(context: &Context, request: &Request) -> Result<(Exit, Value), CliError> {
    match context.ask(request) {
        Answer::Replied(reply) => context::result(reply),
        Answer::Absent => {
            context.require_sound()?;
            context::result(on_file(context, request)?)
        }
        Answer::Forbidden(fault) | Answer::Silent(fault) | Answer::Unknown(fault) => Err(fault.into()),
    }
}

fn on_file(context: &Context, request: &Request) -> Result<crate::admin::protocol::Reply, StoreError> {
    let path = context.database();
    let settings = Settings { busy_timeout: context.config().database.busy_timeout, ..Settings::default() };
    let mut conn = connection::open(path, Access::Write, &settings)?.conn;
    schema::require(&conn, path)?;
    let tx = conn
        .transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)
        .step("begin a change of the database")?;
    let source = match &context.config().source {
        source if source.is_empty() => schema::meta_get(&tx, "source")?.unwrap_or_default(),
        source => source.clone(),
    };
    let inbox = context.inbox(&source);
    let result = operate::perform(&tx, request, inbox.as_ref(), &context::actor(), context::now())?;
    tx.commit().step("commit a change of the database")?;
    Ok(operate::reply(result))
}

/// A change of several rows; what became of each is listed.
pub fn bulk(context: &Context, request: &Request, json: bool) -> Result<Exit, CliError> {
    let (exit, result) = change(context, request)?;
    let mut listing = Listing::new(&["id", "state", "detail"]);
    for row in result.as_array().into_iter().flatten() {
        listing.row(listing.columns.iter().map(|column| row[*column].clone()).collect());
    }
    render::list(&listing, json)?;
    Ok(exit)
}

/// `pause [--for D]`.
pub fn pause(context: &Context, period: Option<Duration>) -> Result<Exit, CliError> {
    let for_ms = period.map(|period| u64::try_from(period.as_millis()).unwrap_or(u64::MAX));
    let (exit, result) = change(context, &Request::Pause { for_ms })?;
    render::text(&format!("paused: {}\n", text(&result["paused_until"])))?;
    Ok(exit)
}

/// `resume`.
pub fn resume(context: &Context) -> Result<Exit, CliError> {
    let (exit, result) = change(context, &Request::Resume)?;
    render::text(if result["was_paused"] == true { "resumed\n" } else { "it was not paused\n" })?;
    Ok(exit)
}

/// `reload [--wait]`: what SIGHUP does, with its result. The socket answers when it is done, so it is always waited for.
pub fn reload(context: &Context, json: bool) -> Result<Exit, CliError> {
    let (exit, result) = match context.ask(&Request::Reload) {
        Answer::Replied(reply) => context::result(reply)?,
        Answer::Absent => {
            return Err(CliError::unavailable("no daemon runs on this database, nothing to reload")
                .fix("the configuration is read when it starts; outboxd config check judges it now"));
        }
        Answer::Forbidden(fault) | Answer::Silent(fault) | Answer::Unknown(fault) => return Err(fault.into()),
    };
    if json {
        render::json(&result)?;
        return Ok(exit);
    }
    let reloaded: Reloaded = serde_json::from_value(result)
        .map_err(|e| CliError::internal(format!("the daemon's answer is not understood: {e}")))?;
    let shown = report(&reloaded);
    if exit == Exit::Ok {
        render::text(&shown)?
    } else {
        render::complain(shown.trim_end())
    }
    Ok(exit)
}

fn report(reloaded: &Reloaded) -> String {
    let Reloaded { result, generation, digest, message, changed } = reloaded;
    let mut text = match result.as_str() {
        "rejected" => format!("reload rejected, generation {generation} stays in force\n"),
        other => format!("reload {other}: generation {generation}, digest {digest}\n"),
    };
    if !message.is_empty() {
        for line in message.lines() {
            text.push_str(&format!("  {}\n", visible(line)));
        }
    }
    for Changed { key, old, new, class } in changed {
        text.push_str(&format!("  {key}: {} -> {} ({class})\n", visible(old), visible(new)));
    }
    text
}

fn text(value: &Value) -> String {
    render::cell(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rejected_reload_names_what_stays_and_every_problem() {
        let reloaded = Reloaded {
            result: "rejected".into(),
            generation: 3,
            message: "config.toml:4:1: unknown key \"batchh\"\nconfig.toml:9:1: lease is 0s".into(),
            ..Reloaded::default()
        };
        let text = report(&reloaded);
        assert_eq!(text.lines().count(), 3, "{text}");
        assert!(text.starts_with("reload rejected, generation 3 stays in force\n"), "{text}");
    }

    #[test]
    fn an_accepted_reload_shows_the_difference() {
        let changed = Changed { key: "relay.batch".into(), old: "512".into(), new: "64".into(), class: "hot".into() };
        let reloaded = Reloaded {
            result: "ok".into(),
            generation: 2,
            digest: "ab".into(),
            changed: vec![changed],
            ..Reloaded::default()
        };
        assert_eq!(report(&reloaded), "reload ok: generation 2, digest ab\n  relay.batch: 512 -> 64 (hot)\n");
    }
}
