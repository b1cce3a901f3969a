//! `status`: from the daemon where one answers, else from the database alone.

use std::io::IsTerminal;
use std::time::Duration;

use serde_json::Value;

use super::context::Context;
use super::error::{CliError, Exit};
use super::render::{self, bytes, span, visible};
use crate::admin::client::Answer;
use crate::admin::protocol::Request;
use crate::admin::status::Status;
use crate::admin::tally;

/// Time between two looks of `--watch`.
const PACE: Duration = Duration::from_secs(2);

/// Prints the status once, or again and again until it is interrupted. Exit 0 in every state.
pub fn status(context: &Context, json: bool, watch: bool) -> Result<Exit, CliError> {
    loop {
        let (status, whole) = read(context)?;
        let clear = watch && !json && std::io::stdout().is_terminal();
        if clear {
            // home, and erase what is below
            render::text("\u{1b}[H\u{1b}[J")?;
        }
        match (json, watch) {
            (true, false) => render::json(&whole)?,
            (true, true) => render::text(&format!("{whole}\n"))?,
            (false, _) => render::text(&text(&status))?,
        }
        if !watch {
            return Ok(Exit::Ok);
        }
        std::thread::sleep(PACE);
    }
}

/// The status, and all that the daemon said of it: one of another version may say more.
fn read(context: &Context) -> Result<(Status, Value), CliError> {
    match context.ask(&Request::Status) {
        Answer::Replied(reply) => {
            let (_, whole) = super::context::result(reply)?;
            let status = serde_json::from_value(whole.clone())
                .map_err(|e| CliError::internal(format!("the daemon's status is not understood: {e}")))?;
            Ok((status, whole))
        }
        Answer::Absent => from_file(context, "stopped", "no daemon runs; figures are from the database"),
        Answer::Forbidden(fault) => {
            from_file(context, "running", &format!("{}; figures are from the database", fault.what))
        }
        Answer::Silent(fault) | Answer::Unknown(fault) => {
            from_file(context, "halted", &format!("{}; figures are from the database", fault.what))
        }
    }
}

fn from_file(context: &Context, state: &str, doing: &str) -> Result<(Status, Value), CliError> {
    let tally = tally::from_file(context.database(), super::context::now())?;
    let mut status = Status::stopped(&tally, &context.config().http.listen);
    (status.state, status.doing) = (state.into(), doing.into());
    let whole = serde_json::to_value(&status).map_err(|e| CliError::internal(e.to_string()))?;
    Ok((status, whole))
}

/// The status for people.
pub fn text(status: &Status) -> String {
    let mut lines = vec![headline(status)];
    let mut line = |name: &str, value: String| lines.push(format!("  {name:<10} {value}"));
    line("nats", nats(status));
    let outbox = &status.outbox;
    line(
        "outbox",
        format!(
            "{} pending, oldest due {}; {} failed; {} published",
            outbox.pending,
            span(outbox.oldest_pending_age_seconds),
            outbox.failed,
            outbox.published
        ),
    );
    line(
        "aggregates",
        format!(
            "{} held behind a failed event; {} parked by their subject",
            outbox.held_aggregates, outbox.parked_aggregates
        ),
    );
    for parked in outbox.parked.iter().take(5) {
        line("", format!("{}: {}", visible(&parked.aggregate), visible(&parked.reason)));
    }
    let rate = status.rates.published_per_second;
    line(
        "relay",
        join(&[
            &status.relay.role,
            &format!("{} leased", status.relay.leased),
            &format!("{rate:.1} events/s"),
            &status.relay.path,
        ]),
    );
    let inbox = &status.inbox;
    line(
        "inbox",
        join(&[
            if inbox.connected { "connected" } else { "not connected" },
            &inbox.reason,
            &format!("{} processed, {} duplicates, {} dead", inbox.processed, inbox.duplicates, inbox.dead),
        ]),
    );
    if let Some(until) = &status.paused_until {
        line("paused", until.clone());
    }
    let config = &status.config;
    line(
        "config",
        join(&[
            &format!("generation {}", config.generation),
            &format!("last reload {}", config.last_reload),
            &config.last_reload_message,
        ]),
    );
    line("http", served(&status.http.listen, &status.http.problem));
    line("socket", served(&status.admin.listen, &status.admin.problem));
    let database = &status.database;
    let free = database.disk_free_bytes.map_or(String::new(), |free| format!("{} free on its disk", bytes(free)));
    line(
        "database",
        join(&[
            &database.path,
            &bytes(database.bytes),
            &format!("write-ahead log {}", bytes(database.wal_bytes)),
            &free,
        ]),
    );
    if database.locked_seconds > 0.0 {
        line("locked", format!("by another process for {}", span(database.locked_seconds)));
    }
    for stuck in &status.stuck {
        line("stuck", visible(stuck));
    }
    if !status.last_error.is_empty() {
        line("last error", visible(&status.last_error));
    }
    lines.push(String::new());
    lines.join("\n")
}

fn headline(status: &Status) -> String {
    let mut line = format!("outboxd {} {}", status.version, status.state);
    if let (Some(pid), Some(since)) = (status.pid, &status.started_at) {
        line.push_str(&format!(" for {} (since {since}, pid {pid})", span(status.uptime_seconds)));
    }
    // what it does begins with its state where the daemon says it
    let doing = status.doing.strip_prefix(&status.state).unwrap_or(&status.doing).trim_start_matches("; ");
    if !doing.is_empty() {
        line.push_str(&format!("\n  {}", visible(doing)));
    }
    line
}

fn nats(status: &Status) -> String {
    let nats = &status.nats;
    let connected = if nats.connected { "connected" } else { "not connected" };
    let since = nats.since.as_deref().map_or(String::new(), |since| format!("since {since}"));
    join(&[connected, &nats.reason, &since, &nats.server, &format!("{} reconnects", nats.reconnects)])
}

fn served(listen: &str, problem: &str) -> String {
    match (listen, problem) {
        ("", "") => "off".into(),
        ("", problem) => visible(problem),
        (listen, _) => visible(listen),
    }
}

fn join(parts: &[&str]) -> String {
    let there: Vec<String> = parts.iter().filter(|p| !p.is_empty()).map(|p| visible(p)).collect();
    there.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::status::{Parked, Tally};
    use crate::telemetry::board::{Facts, State};

    #[test]
    fn a_running_daemon_reads_well() {
        let facts = Facts {
            state: State::Running,
            started_at: 1_800_000_000_000,
            nats_connected: true,
            nats_server: "nats-server 2.15.1".into(),
            relay_role: "active".into(),
            relay_path: "pipelined".into(),
            leased: 24,
            config_generation: 2,
            config_last_reload: "ok".into(),
            http_listen: "127.0.0.1:8787".into(),
            ..Facts::default()
        };
        let tally = Tally {
            path: "/srv/app.db".into(),
            pending: 12,
            oldest_pending_age_seconds: 0.25,
            published: 5_000,
            bytes: 1_572_864,
            ..Tally::default()
        };
        let text = text(&Status::running(&facts, &tally, vec![], 1_800_000_200_000));
        let expected = [
            "running for 3m 20s (since 2027-01-15T08:00:00.000Z, pid ",
            "nats       connected, nats-server 2.15.1, 0 reconnects",
            "outbox     12 pending, oldest due 250ms; 0 failed; 5000 published",
            "relay      active, 24 leased, 0.0 events/s, pipelined",
            "config     generation 2, last reload ok",
            "http       127.0.0.1:8787",
            "database   /srv/app.db, 1.5 MiB, write-ahead log 0 B",
        ];
        for part in expected {
            assert!(text.contains(part), "no {part:?} in\n{text}");
        }
        assert!(!text.contains("paused") && !text.contains("stuck") && !text.contains("locked"), "{text}");
    }

    #[test]
    fn trouble_has_lines_of_its_own_and_cannot_steer_the_terminal() {
        let mut status = Status::stopped(&Tally::default(), "");
        status.stuck = vec!["loop writer is gone".into()];
        status.last_error = "a\u{1b}[2Jb".into();
        status.http.problem = "cannot listen on 127.0.0.1:80: permission denied".into();
        status.outbox.parked =
            vec![Parked { aggregate: "asset/1".into(), since: None, reason: "no permission".into() }];
        let text = text(&status);
        for part in ["stuck      loop writer is gone", "http       cannot listen", "asset/1: no permission"] {
            assert!(text.contains(part), "no {part:?} in\n{text}");
        }
        assert!(!text.contains('\u{1b}'));
    }
}
