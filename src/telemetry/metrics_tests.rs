//! The exposition as a scraper sees it.

use super::*;

const NOW: Millis = 1_800_000_000_000;

fn rendered(metrics: &Metrics, board: &Board) -> String {
    metrics.render(board, &Gauges::default(), NOW)
}

fn has(text: &str, line: &str) {
    assert!(text.lines().any(|l| l == line), "no line {line:?} in\n{text}");
}

#[test]
fn counters_stand_under_their_names_and_start_at_zero() {
    let metrics = Metrics::new();
    let board = Board::default();
    for line in ["outboxd_published_total 0", "outboxd_failed_total{reason=\"collision\"} 0"] {
        has(&rendered(&metrics, &board), line);
    }
    metrics.published(3);
    metrics.failed(FailReason::collision);
    metrics.inbox_dead("identity mismatch");
    let text = rendered(&metrics, &board);
    has(&text, "outboxd_published_total 3");
    has(&text, "outboxd_failed_total{reason=\"collision\"} 1");
    has(&text, "outboxd_inbox_dead_total{reason=\"identity mismatch\"} 1");
    assert!(text.ends_with("# EOF\n"));
}

#[test]
fn an_unanswered_publish_is_counted_but_has_no_duration() {
    let metrics = Metrics::new();
    metrics.attempted(&Outcome::Unknown { detail: String::new() }, 2, Duration::from_secs(5));
    metrics.attempted(&Outcome::Stored { stream_seq: 1, duplicate: Duplicate::No }, 4, Duration::from_millis(4));
    let text = rendered(&metrics, &Board::default());
    has(&text, "outboxd_publish_attempts_total{result=\"unknown\"} 2");
    has(&text, "outboxd_publish_attempts_total{result=\"stored\"} 4");
    has(&text, "outboxd_publish_duration_seconds_count 1");
    has(&text, "outboxd_publish_duration_seconds_bucket{le=\"0.005\"} 1");
    has(&text, "outboxd_publish_duration_seconds_bucket{le=\"0.003\"} 0");
}

#[test]
fn what_could_not_be_read_is_nan_and_not_the_value_of_the_last_scrape() {
    let metrics = Metrics::new();
    let board = Board::default();
    let gauges = Gauges { oldest_pending_age: Some(1.5), pending: Some(7), ..Gauges::default() };
    let text = metrics.render(&board, &gauges, NOW);
    has(&text, "outboxd_oldest_pending_age_seconds 1.5");
    has(&text, "outboxd_events{state=\"pending\"} 7.0");
    has(&rendered(&metrics, &board), "outboxd_oldest_pending_age_seconds NaN");
}

#[test]
fn totals_kept_on_the_board_only_grow() {
    let metrics = Metrics::new();
    let board = Board::default();
    board.write(|f| f.nats_reconnects = 4);
    rendered(&metrics, &board);
    board.write(|f| f.nats_reconnects = 5);
    has(&rendered(&metrics, &board), "outboxd_nats_reconnects_total 5");
}

#[test]
fn facts_of_the_configuration_are_one_series_a_generation() {
    let metrics = Metrics::new();
    let board = Board::default();
    board.write(|f| (f.config_generation, f.config_digest) = (1, "aa".into()));
    rendered(&metrics, &board);
    board.write(|f| {
        (f.config_generation, f.config_digest) = (2, "bb".into());
        f.config_last_reload = "rejected".into();
    });
    let text = rendered(&metrics, &board);
    has(&text, "outboxd_config_info{digest=\"bb\",generation=\"2\"} 1");
    assert!(!text.contains("digest=\"aa\""), "{text}");
    has(&text, "outboxd_config_last_reload_successful 0");
    has(&text, &format!("outboxd_build_info{{version=\"{}\"}} 1", env!("CARGO_PKG_VERSION")));
}

#[test]
fn each_loop_shows_when_it_was_last_seen() {
    let metrics = Metrics::new();
    let board = Board::default();
    let heart = board.loops().register("writer", Duration::from_secs(1));
    heart.rest();
    has(&rendered(&metrics, &board), "outboxd_loop_last_progress_timestamp_seconds{loop=\"writer\"} 1800000000.0");
    heart.retire();
    assert!(!rendered(&metrics, &board).contains("loop=\"writer\""));
}

#[test]
fn every_outcome_has_its_own_counter() {
    for (i, result) in AttemptResult::ALL.into_iter().enumerate() {
        assert_eq!(result as usize, i, "{result:?}");
    }
}

/// Names of metrics that a text uses: words that begin with the prefix.
fn names(text: &str) -> std::collections::BTreeSet<String> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    text.split(|c| !is_name(c)).filter(|w| w.starts_with("outboxd_")).map(str::to_string).collect()
}

#[test]
fn every_metric_of_the_alerts_and_of_the_dashboard_is_exported() {
    let metrics = Metrics::new();
    let board = Board::default();
    let _heart = board.loops().register("writer", Duration::from_secs(1));
    metrics.inbox_dead("x");
    metrics.pruned("x", 1);
    metrics.actor_restarted("x");
    let exported = names(&rendered(&metrics, &board));
    for (file, text) in [
        ("alerts.yml", include_str!("../../monitoring/alerts.yml")),
        ("grafana.json", include_str!("../../monitoring/grafana.json")),
    ] {
        let used = names(text);
        assert!(used.len() > 10, "{file} uses {used:?}");
        let unknown: Vec<_> = used.difference(&exported).collect();
        assert!(unknown.is_empty(), "{file} uses metrics that are not exported: {unknown:?}");
    }
}

#[test]
fn no_label_can_carry_what_an_event_says() {
    // the only free texts in labels: a digest, a generation, a version, and names of loops that this program gives
    let metrics = Metrics::new();
    let text = rendered(&metrics, &Board::default());
    let labels: std::collections::BTreeSet<&str> = text
        .lines()
        .filter(|l| !l.starts_with('#'))
        .filter_map(|l| l.split_once('{')?.1.split_once('}'))
        .flat_map(|(set, _)| set.split(','))
        .filter_map(|pair| pair.split_once('=').map(|(name, _)| name))
        .collect();
    let known = ["digest", "generation", "le", "reason", "result", "state", "version"];
    assert!(labels.iter().all(|l| known.contains(l)), "{labels:?}");
}
