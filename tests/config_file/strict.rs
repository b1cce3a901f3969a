//! The strict parse: places, nearest names, types, values, handlers.

use std::path::PathBuf;
use std::time::Duration;

use outboxd::config::Apply;
use outboxd::config::keys::{KEYS, Kind};

use super::{assert_one, parse, problems};

#[test]
fn a_mistyped_key_is_named_with_its_place_and_the_nearest_name() {
    assert_one(
        &problems("[relay]\nbatch = 8\n  batchh = 3\n"),
        "3:3: ",
        &["unknown key \"batchh\" in [relay]", "did you mean \"batch\"?", "known there: enabled, publishers, batch,"],
    );
    assert_one(&problems("sorce = \"x\"\n"), "1:1: ", &["at the top of the file", "did you mean \"source\"?"]);
}

#[test]
fn a_mistyped_key_is_named_beside_a_table_that_stands_twice() {
    let text = "[relay]\nbatch = 8\n\n[relay]\nbatchh = 3\nlease = \"0s\"\n";
    let found = problems(text);
    assert!(found.iter().any(|p| p.starts_with("4:2: not valid TOML: duplicate key at \"relay\"")), "{found:#?}");
    assert!(
        found.iter().any(|p| p.starts_with("5:1: unknown key \"batchh\"") && p.contains("\"batch\"")),
        "{found:#?}"
    );
    assert!(found.iter().any(|p| p.starts_with("6:9: relay.lease must be a duration greater")), "{found:#?}");
}

#[test]
fn a_key_in_the_wrong_table_is_told_where_it_belongs() {
    assert_one(&problems("[stream]\nmax_attempts = 3\n"), "2:1: ", &["it belongs to [relay]"]);
    assert_one(&problems("batch = 3\n"), "1:1: ", &["it belongs to [relay] or [inbox]"]);
    assert_one(&problems("[relay]\nsource = \"x\"\n"), "2:1: ", &["it belongs to the top of the file"]);
}

#[test]
fn an_unknown_table_is_named_with_the_known_ones() {
    assert_one(&problems("[relai]\nbatch = 3\n"), "1:2: ", &["unknown table [relai]", "did you mean \"relay\"?"]);
    assert_one(&problems("[relay.backof]\ncap = \"1s\"\n"), "1:8: ", &["[relay.backof]", "\"relay.backoff\""]);
    assert_one(&problems("relay = 3\n"), "1:9: ", &["relay must be a table, written as [relay], not 3"]);
}

#[test]
fn all_problems_are_told_at_once_in_the_order_of_the_file() {
    let found = problems(
        "[http]\nlisten = \"8787\"\n[relay]\nmax_atempts = 3\nbatch = 0\nlease = \"soon\"\n[stream]\nreplicas = \"3\"\n\
         [database]\nsynchronous = \"ful\"\n",
    );
    let starts = [
        "2:10: http.listen must be ",
        "4:1: unknown key \"max_atempts\"",
        "5:9: relay.batch must be a whole number from 1 to 10000, not 0",
        "6:9: relay.lease must be a duration greater than zero, such as \"30s\" or \"5m\": \"soon\" is no duration",
        "8:12: stream.replicas must be a whole number from 1 to 5, not the string \"3\"",
        "10:15: database.synchronous must be one of \"full\", \"normal\", not \"ful\"; did you mean \"full\"?",
    ];
    assert_eq!(found.len(), starts.len(), "{found:#?}");
    for (found, start) in found.iter().zip(starts) {
        assert!(found.starts_with(start), "{found}\n{start}");
    }
}

#[test]
fn a_syntax_error_has_its_line_and_column() {
    assert_one(&problems("[relay]\nbatch = 3\n[stream\n"), "3:", &["not valid TOML"]);
    assert_one(&problems("[relay]\nbatch = \n"), "2:", &["not valid TOML"]);
    assert_one(&problems("[relay]\nbatch = 3 4\n"), "2:", &["not valid TOML"]);
    assert_one(&problems("source = \"ü\" x\n"), "1:14: ", &["not valid TOML"]);
}

#[test]
fn every_wrong_type_is_refused_for_every_key() {
    // no key takes a time of day, and each message names its key
    for key in KEYS {
        let (table, name) = key.path.rsplit_once('.').unwrap_or(("", key.path));
        let header = if table.is_empty() { String::new() } else { format!("[{table}]\n") };
        assert_one(&problems(&format!("{header}{name} = 07:32:00\n")), "", &[key.path, " must be ", "07:32:00"]);
    }
}

#[test]
fn values_that_cannot_be_are_refused() {
    let cases = [
        ("source = \"a\\nb\"", "source must be a string: an identity"),
        ("[database]\npath = \"\"", "database.path must be a string: the path of a file"),
        ("[database]\nbusy_timeout = \"0s\"", "it is zero"),
        ("[database]\nbusy_timeout = 5", "database.busy_timeout must be a duration"),
        ("[nats]\nurls = []", "nats.urls must be a list of strings, at least one"),
        ("[nats]\nurls = \"nats://h\"", "nats.urls must be a list of strings"),
        ("[nats]\nurls = [4222]", "not 4222"),
        ("[stream]\nname = \"a.b\"", "stream.name must be a string: a JetStream name"),
        ("[stream]\nsubjects = [\"events..x\"]", "empty token"),
        ("[stream]\nmax_bytes = -1", "stream.max_bytes must be a size"),
        ("[stream]\nmax_bytes = \"lots\"", "is no size"),
        ("[relay]\nsubject = \"{event}\"", "the first token must be literal"),
        ("[relay]\nsubject = \"events.{evnt}\"", "unknown placeholder {evnt}"),
        ("[relay]\nbatch = 1.5", "not 1.5"),
        ("[relay]\nenabled = 1", "relay.enabled must be true or false, not 1"),
        ("[relay.backoff]\nfactor = 0.5", "relay.backoff.factor must be a number of at least 1, not 0.5"),
        ("[relay.backoff]\nfactor = inf", "relay.backoff.factor must be"),
        ("[relay.backoff]\nfactor = nan", "relay.backoff.factor must be"),
        ("[inbox]\nfilter_subjects = [\"a b\"]", "blanks or control characters"),
        ("[inbox]\ndurable = \"\"", "inbox.durable must be"),
        ("[retention]\npublished = \"-7d\"", "retention.published must be"),
        ("[http]\nlisten = \"example.org:80\"", "is no IP address"),
        ("[log]\nlevel = \"inof\"", "\"inof\" is no level"),
    ];
    for (text, words) in cases {
        assert_one(&problems(text), "", &[words]);
    }
}

#[test]
fn only_retention_and_max_age_may_be_zero() {
    for key in KEYS.iter().filter(|key| matches!(key.kind, Kind::Duration { .. })) {
        let (table, name) = key.split();
        let Err(problems) = parse(&format!("[{table}]\n{name} = \"0s\"\n")) else {
            assert!(table == "retention" || key.path == "stream.max_age", "{} took 0s", key.path);
            continue;
        };
        assert!(problems.to_string().contains(key.path), "{problems}");
    }
}

#[test]
fn credentials_in_a_url_are_refused_without_being_repeated() {
    let found = problems("[nats]\nurls = [\"nats://ok:1\", \"nats://bob:hunter2@h:4222\"]\n");
    assert_one(&found, "2:24: ", &["nats.urls", "credentials", "password_file"]);
    assert!(!found[0].contains("hunter2"), "{found:?}");
}

#[test]
fn paths_are_relative_to_the_file() {
    let config = parse("[database]\npath = \"data/app.db\"\n[nats]\ntoken_file = \"/run/token\"\n").unwrap().config;
    assert_eq!(config.database.path, PathBuf::from("/srv/app/data/app.db"));
    assert_eq!(config.nats.token_file, Some("/run/token".into()));
    assert_eq!(config.nats.password_file, None);
}

#[test]
fn sizes_durations_and_numbers_have_more_than_one_form() {
    let text = "[relay]\nbatch_bytes = 1_048_576\nbatch = 0x40\nlease = \"1min 30sec\"\n[stream]\nmax_bytes = \"2GiB\"\n\
                [relay.backoff]\nfactor = 3\n";
    let config = parse(text).unwrap().config;
    assert_eq!((config.relay.batch_bytes, config.relay.batch), (1 << 20, 64));
    assert_eq!((config.relay.lease, config.stream.max_bytes), (Duration::from_secs(90), 2 << 30));
    assert_eq!(config.relay.backoff.factor, 3.0);
}

#[test]
fn keys_may_be_dotted_or_inline() {
    let config = parse("relay.batch = 7\nstream = { name = \"X\" }\n").unwrap().config;
    assert_eq!((config.relay.batch, config.stream.name.as_str()), (7, "X"));
}

fn handler(lines: &str) -> String {
    format!("[[inbox.handler]]\n{lines}\n")
}

#[test]
fn handlers_are_read_in_their_order() {
    let text = handler("event_type = \"asset.*\"\napply = \"assets\"")
        + &handler("event_type = \"order.placed\"\napply = \"sql\"\nsql = \"INSERT INTO t VALUES (:event_id)\"")
        + &handler("event_type = \"*\"\napply = \"store\"\nsql = \"\"");
    let loaded = parse(&format!("{text}[inbox]\nenabled = true\n")).unwrap();
    let handlers = &loaded.config.inbox.handler;
    let shown: Vec<(&str, Apply)> = handlers.iter().map(|h| (h.event_type.as_str(), h.apply)).collect();
    assert_eq!(shown, [("asset.*", Apply::Assets), ("order.placed", Apply::Sql), ("*", Apply::Store)]);
    assert_eq!(handlers[1].sql, "INSERT INTO t VALUES (:event_id)");
    assert_eq!(loaded.warnings, []);
}

#[test]
fn a_handler_that_cannot_work_is_refused() {
    let cases = [
        ("event_type = \"*\"", "1:1: ", "has no apply"),
        ("apply = \"store\"", "1:1: ", "has no event_type"),
        ("event_type = \"*.x\"\napply = \"store\"", "2:14: ", "'*' stands at the end only"),
        ("event_type = \"\"\napply = \"store\"", "2:14: ", "it is empty"),
        ("event_type = \"*\"\napply = \"stor\"", "3:9: ", "did you mean \"store\"?"),
        ("event_type = \"*\"\napply = \"sql\"", "3:9: ", "needs statements"),
        ("event_type = \"*\"\napply = \"sql\"\nsql = \"  \"", "3:9: ", "needs statements"),
        ("event_type = \"*\"\napply = \"store\"\nsql = \"DELETE\"", "4:7: ", "sql is for apply = \"sql\" only"),
        ("event_type = \"*\"\napply = \"store\"\nevent = \"x\"", "4:1: ", "unknown key \"event\" in [[inbox.handler]]"),
        ("event_type = 1\napply = \"store\"", "2:14: ", "inbox.handler.event_type must be a string, not 1"),
    ];
    for (lines, place, words) in cases {
        assert_one(&problems(&handler(lines)), place, &[words]);
    }
    assert_one(&problems("[inbox.handler]\nevent_type = \"*\"\n"), "1:1: ", &["[[inbox.handler]]", "not a table"]);
}
