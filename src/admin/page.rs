//! The page at `/`: the status as plain HTML, nothing loaded from anywhere, every value escaped.

use std::fmt::Write as _;

use super::status::Status;

const TEMPLATE: &str = include_str!("page.html");

/// The whole page.
pub fn page(status: &Status) -> String {
    let pid = status.pid.map_or_else(|| "-".to_string(), |pid| pid.to_string());
    let values: [(&str, String); 6] = [
        ("state", escape(&status.state)),
        ("doing", escape(&status.doing)),
        ("version", escape(&status.version)),
        ("pid", pid),
        ("figures", figures(status)),
        ("sections", sections(status)),
    ];
    fill(TEMPLATE, &values)
}

/// Puts values in the place of `{{name}}`, in one pass: what a value contains is never a placeholder.
fn fill(template: &str, values: &[(&str, String)]) -> String {
    let mut page = String::with_capacity(template.len() * 2);
    let mut rest = template;
    while let Some((before, after)) = rest.split_once("{{") {
        page.push_str(before);
        let Some((name, tail)) = after.split_once("}}") else { break };
        if let Some((_, value)) = values.iter().find(|(n, _)| *n == name) {
            page.push_str(value);
        }
        rest = tail;
    }
    page.push_str(rest);
    page
}

fn figures(status: &Status) -> String {
    let outbox = &status.outbox;
    let mut html = String::new();
    let mut figure = |label: &str, value: String, bad: bool| {
        let class = if bad { "figure bad" } else { "figure" };
        // writing into a String does not fail
        let _ = writeln!(html, "<div class=\"{class}\"><b>{}</b>{label}</div>", escape(&value));
    };
    figure("pending", outbox.pending.to_string(), false);
    figure(
        "oldest due, s",
        format!("{:.1}", outbox.oldest_pending_age_seconds),
        outbox.oldest_pending_age_seconds > 60.0,
    );
    figure("published", outbox.published.to_string(), false);
    figure("failed", outbox.failed.to_string(), outbox.failed > 0);
    figure("held aggregates", outbox.held_aggregates.to_string(), outbox.held_aggregates > 0);
    figure("parked aggregates", outbox.parked_aggregates.to_string(), outbox.parked_aggregates > 0);
    figure("inbox processed", status.inbox.processed.to_string(), false);
    figure("inbox dead", status.inbox.dead.to_string(), status.inbox.dead > 0);
    html
}

fn sections(status: &Status) -> String {
    let connected = |yes: bool, reason: &str| match (yes, reason) {
        (true, "") => "connected".to_string(),
        (true, reason) => format!("connected, but {reason}"),
        (false, "") => "not connected".to_string(),
        (false, reason) => format!("not connected: {reason}"),
    };
    let mut html = String::new();
    let mut section = |title: &str, rows: &[(&str, String)]| {
        let _ = writeln!(html, "<h2>{title}</h2>\n<table>");
        for (name, value) in rows.iter().filter(|(_, value)| !value.is_empty()) {
            let _ = writeln!(html, "<tr><th>{name}</th><td>{}</td></tr>", escape(value));
        }
        html.push_str("</table>\n");
    };
    let or_empty = |value: &Option<String>| value.clone().unwrap_or_default();
    section(
        "NATS",
        &[
            ("relay", connected(status.nats.connected, &status.nats.reason)),
            ("since", or_empty(&status.nats.since)),
            ("server", status.nats.server.clone()),
            ("reconnects", status.nats.reconnects.to_string()),
            ("inbox", connected(status.inbox.connected, &status.inbox.reason)),
        ],
    );
    section(
        "Relay",
        &[
            ("role", status.relay.role.clone()),
            ("leased", status.relay.leased.to_string()),
            ("way of publishing", status.relay.path.clone()),
            ("paused until", or_empty(&status.paused_until)),
            ("last error", status.last_error.clone()),
        ],
    );
    let parked: Vec<(&str, String)> =
        status.outbox.parked.iter().map(|p| (p.aggregate.as_str(), p.reason.clone())).collect();
    if !parked.is_empty() {
        let named: Vec<(String, String)> = parked.into_iter().map(|(a, r)| (escape(a), r)).collect();
        let rows: Vec<(&str, String)> = named.iter().map(|(a, r)| (a.as_str(), r.clone())).collect();
        section("Parked aggregates", &rows);
    }
    section(
        "Configuration",
        &[
            ("generation", status.config.generation.to_string()),
            ("last reload", status.config.last_reload.clone()),
            ("what it said", status.config.last_reload_message.clone()),
            ("source", status.source.clone()),
            ("command socket", status.admin.listen.clone()),
            ("command socket problem", status.admin.problem.clone()),
        ],
    );
    section(
        "Database",
        &[
            ("path", status.database.path.clone()),
            ("bytes", status.database.bytes.to_string()),
            ("write-ahead log, bytes", status.database.wal_bytes.to_string()),
            ("free on its disk, bytes", status.database.disk_free_bytes.map(|b| b.to_string()).unwrap_or_default()),
            ("stuck", status.stuck.join("; ")),
        ],
    );
    html
}

fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            c if c.is_control() => escaped.push(' '),
            c => escaped.push(c),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::super::status::{Parked, Tally};
    use super::*;

    fn status() -> Status {
        Status::stopped(&Tally { pending: 7, ..Tally::default() }, "127.0.0.1:1")
    }

    #[test]
    fn the_page_shows_the_status_and_leaves_no_placeholder() {
        let page = page(&status());
        assert!(page.contains("<html") && page.contains("<b>7</b>pending"), "{page}");
        assert!(!page.contains("{{") && !page.contains("}}"), "{page}");
    }

    #[test]
    fn nothing_is_loaded_from_outside() {
        let page = page(&status());
        for word in ["http:", "https:", "src=", "<script", "@import", "url("] {
            assert!(!page.contains(word), "{word} in the page");
        }
    }

    #[test]
    fn what_events_and_servers_say_is_escaped() {
        let mut status = status();
        status.nats.reason = "<script>alert(1)</script>{{state}}".into();
        status.outbox.parked =
            vec![Parked { aggregate: "a<b>/\"1\"".into(), since: None, reason: "'503' & more".into() }];
        let page = page(&status);
        assert!(page.contains("&lt;script&gt;alert(1)&lt;/script&gt;{{state}}"), "{page}");
        assert!(page.contains("a&lt;b&gt;/&quot;1&quot;") && page.contains("&#39;503&#39; &amp; more"), "{page}");
    }
}
