//! The configuration file: the shipped one, the strict parse, relations, environment, discovery, the reload plan.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use outboxd::config::keys::{Class, KEYS, Kind};
use outboxd::config::{self, Apply, Config, LoadOptions, Loaded, Problem, Problems, Synchronous};
use proptest::prelude::*;

const PATH: &str = "/srv/app/config.toml";

fn parse(text: &str) -> Result<Loaded, Problems> {
    config::parse(Path::new(PATH), text, &[])
}

fn parse_env(variables: &[(&str, &str)]) -> Result<Loaded, Problems> {
    let variables: Vec<_> = variables.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect();
    config::parse(Path::new(PATH), "", &variables)
}

/// The problems of a text, one a line, without the path.
fn problems(text: &str) -> Vec<String> {
    let problems = parse(text).expect_err(&format!("this should be refused:\n{text}"));
    problems.0.iter().map(|p| p.to_string().replace(&format!("{PATH}:"), "")).collect()
}

fn warnings(text: &str) -> Vec<String> {
    let loaded = parse(text).unwrap_or_else(|p| panic!("this should pass:\n{text}\n{p}"));
    loaded.warnings.iter().map(|p| p.to_string().replace(&format!("{PATH}:"), "")).collect()
}

#[track_caller]
fn assert_one(found: &[String], place: &str, words: &[&str]) {
    assert_eq!(found.len(), 1, "{found:#?}");
    assert!(found[0].starts_with(place), "{found:#?}");
    for word in words {
        assert!(found[0].contains(word), "{word:?} is missing in {found:#?}");
    }
}

// ---- the shipped file

fn shipped() -> String {
    std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/config.toml")).unwrap()
}

#[test]
fn the_shipped_file_is_what_the_table_of_keys_says() {
    let wanted = config::shipped_file();
    if shipped() != wanted {
        let copy = concat!(env!("CARGO_TARGET_TMPDIR"), "/config.toml");
        std::fs::write(copy, &wanted).unwrap();
        panic!("config.toml differs from the table of keys; if the table is right: cp {copy} config.toml");
    }
}

#[test]
fn the_shipped_file_equals_the_defaults_of_the_code() {
    let loaded = parse(&shipped()).unwrap();
    let mut defaults = Config::default();
    defaults.database.path = "/srv/app/outboxd.db".into();
    assert_eq!(loaded.config, defaults);
    assert_eq!(loaded.warnings, []);
}

#[test]
fn the_shipped_file_sets_every_key_but_the_handlers() {
    let loaded = parse(&shipped()).unwrap();
    let set: BTreeSet<&str> = loaded.origins.keys().copied().collect();
    let all: BTreeSet<&str> = KEYS.iter().map(|key| key.path).filter(|path| *path != "inbox.handler").collect();
    assert_eq!(set, all);
}

#[test]
fn the_handlers_of_the_shipped_file_work_when_their_comment_is_taken_away() {
    let text = shipped();
    let start = text.find("# [[inbox.handler]]").unwrap();
    let example: String = text[start..].lines().take(4).map(|line| format!("{}\n", &line[2..])).collect();
    let loaded = parse(&example).unwrap();
    assert_eq!((loaded.config.inbox.handler.len(), loaded.config.inbox.handler[0].apply), (1, Apply::Assets));
}

#[test]
fn no_line_of_the_shipped_file_is_wider_than_an_editor() {
    let wide: Vec<String> = shipped().lines().filter(|l| l.chars().count() > 120).map(str::to_owned).collect();
    assert_eq!(wide, [""; 0]);
}

#[test]
fn an_empty_file_is_the_defaults() {
    assert_eq!(parse("").unwrap().config, parse(&shipped()).unwrap().config);
}

#[test]
fn the_default_of_each_key_is_the_default_of_the_code() {
    for key in KEYS {
        let text = match key.path.rsplit_once('.') {
            Some((table, name)) => format!("[{table}]\n{name} = {}\n", key.default),
            None => format!("{} = {}\n", key.path, key.default),
        };
        let loaded = parse(&text).unwrap_or_else(|p| panic!("{}: {p}", key.path));
        assert!(config::diff(&parse("").unwrap().config, &loaded.config).is_empty(), "{}", key.path);
        assert_eq!(loaded.origins.keys().collect::<Vec<_>>(), [&key.path]);
    }
}

// ---- the strict parse

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
        ("[database]\nbusy_timeout = \"0s\"", "must be greater than zero"),
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

// ---- handlers

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

// ---- relations

#[test]
fn impossible_relations_are_refused() {
    let cases = [
        ("[relay]\nlease = \"5s\"\n", "2:9: ", "relay.ack_wait (5s) must be shorter than relay.lease (5s)"),
        ("[relay]\nack_wait = \"40s\"\nlease = \"30s\"\n", "2:12: ", "must be shorter"),
        (
            "[relay.backoff]\ninitial = \"2m\"\n",
            "2:11: ",
            "relay.backoff.initial (2m) must not exceed relay.backoff.cap (1m)",
        ),
        ("[relay.backoff]\ncap = \"100ms\"\n", "2:7: ", "must not exceed"),
        ("[relay]\nsubject = \"orders.{event}\"\n", "2:11: ", "does not cover"),
        ("[stream]\nsubjects = [\"events.*\"]\n", "2:12: ", "does not cover"),
        ("[http]\nlisten = \"0.0.0.0:8787\"\n", "2:10: ", "http.token_file"),
        ("[http]\nlisten = \"[::]:8787\"\n", "2:10: ", "http.token_file"),
        ("[inbox]\nenabled = true\n", "2:11: ", "needs at least one [[inbox.handler]]"),
    ];
    for (text, place, words) in cases {
        assert_one(&problems(text), place, &[words]);
    }
}

#[test]
fn relations_that_hold_pass() {
    for text in [
        "[relay]\nlease = \"5001ms\"\n[stream]\nduplicate_window = \"1m\"\n",
        "[relay.backoff]\ninitial = \"1m\"\n",
        "[stream]\nsubjects = [\"events.*.*.*\", \"events.*.*.*.>\"]\n",
        "[relay]\nenabled = false\n[stream]\nsubjects = [\"orders.>\"]\n",
        "[http]\nlisten = \"0.0.0.0:8787\"\ntoken_file = \"token\"\n",
        "[http]\nlisten = \":0\"\n",
        "[http]\nlisten = \"[::1]:8787\"\n",
        "[http]\nlisten = \"\"\n",
        "[retention]\npublished = \"0s\"\nprocessed = \"0s\"\ninbox = \"0s\"\naudit = \"0s\"\n[stream]\nmax_age = \"0s\"\n",
    ] {
        assert_eq!(warnings(text), [""; 0], "{text}");
    }
}

#[test]
fn a_relation_is_not_judged_on_a_refused_value() {
    assert_one(&problems("[relay]\nlease = \"0s\"\n"), "2:9: ", &["relay.lease must be"]);
}

#[test]
fn what_is_unwise_is_a_warning() {
    let cases = [
        ("[stream]\nduplicate_window = \"40s\"\n", "2:20: ", "should exceed relay.lease + 2 x relay.ack_wait (40s)"),
        ("[stream]\nmax_age = \"1m\"\n", "2:11: ", "longer than stream.max_age"),
        ("[stream]\nreplicas = 2\n", "2:12: ", "survives no more failures than 1"),
        ("[stream]\nsubjects = [\"events.>\", \"events.x\"]\n", "2:12: ", "overlap"),
        ("[inbox]\nfilter_subjects = [\"a.*\", \"a.b\"]\n", "2:19: ", "overlap"),
        ("[nats]\nuser = \"bob\"\n", "2:8: ", "belong together"),
        ("[nats]\ntoken_file = \"t\"\nnkey_seed_file = \"s\"\n", "3:18: ", "more than one way to log in"),
        ("[nats.tls]\ncert_file = \"c\"\n", "2:13: ", "belong together"),
        ("[nats]\nping_interval = \"1m\"\n", "2:17: ", "frozen server"),
        ("[retention]\npublished = \"1m\"\n", "2:13: ", "at least 10m"),
        ("[[inbox.handler]]\nevent_type = \"*\"\napply = \"store\"\n", "1:1: ", "inbox.enabled is false"),
    ];
    for (text, place, words) in cases {
        assert_one(&warnings(text), place, &[words]);
    }
    let inbox = "[inbox]\nenabled = true\n[[inbox.handler]]\nevent_type = \"a*\"\napply = \"store\"\n";
    assert_eq!(warnings(inbox), [""; 0]);
    let cases = [
        (format!("{inbox}[[inbox.handler]]\nevent_type = \"asset.*\"\napply = \"assets\"\n"), "never reached"),
        (format!("{inbox}[retention]\nprocessed = \"1h\"\n"), "is applied twice"),
        (format!("{inbox}[relay]\nenabled = false\n[stream]\nsubjects = [\"x.>\"]\n"), "nothing in stream.subjects"),
    ];
    for (text, words) in cases {
        assert_one(&warnings(&text), "", &[words]);
    }
}

// ---- environment

#[test]
fn the_environment_overrides_the_file() {
    let env = [("OUTBOXD_RELAY_BATCH".to_owned(), "256".to_owned())];
    let loaded = config::parse(Path::new(PATH), "[relay]\nbatch = 8\nlease = \"1m\"\n", &env).unwrap();
    assert_eq!((loaded.config.relay.batch, loaded.config.relay.lease), (256, Duration::from_secs(60)));
    assert_eq!(loaded.origins["relay.batch"].to_string(), "environment variable OUTBOXD_RELAY_BATCH");
}

#[test]
fn the_environment_can_mend_a_refused_value() {
    let env = [("OUTBOXD_DATABASE_SYNCHRONOUS".to_owned(), "normal".to_owned())];
    let loaded = config::parse(Path::new(PATH), "", &env).unwrap();
    assert_eq!(loaded.config.database.synchronous, Synchronous::Normal);
}

#[test]
fn bare_text_and_toml_are_both_understood() {
    let loaded = parse_env(&[
        ("OUTBOXD_SOURCE", "007"),
        ("OUTBOXD_STREAM_NAME", "\"QUOTED\""),
        ("OUTBOXD_RELAY_LEASE", "45s"),
        ("OUTBOXD_RELAY_BARRIER", "false"),
        ("OUTBOXD_RELAY_BATCH_BYTES", "8MiB"),
        ("OUTBOXD_STREAM_MAX_BYTES", "1024"),
        ("OUTBOXD_RELAY_BACKOFF_FACTOR", "1.5"),
        ("OUTBOXD_STREAM_SUBJECTS", "[\"events.>\", \"other.>\"]"),
        ("OUTBOXD_NATS_TLS_CA_FILE", "ca.pem"),
        ("OUTBOXD_INBOX_HANDLER", "[{ event_type = \"*\", apply = \"store\" }]"),
        ("OUTBOXD_INBOX_ENABLED", "true"),
        ("PATH", "/usr/bin"),
        ("OUTBOXD_NATS_SERVER", "/usr/bin/nats-server"),
        ("OUTBOXD_CONFIG", "/elsewhere"),
    ])
    .unwrap();
    let config = loaded.config;
    assert_eq!((config.source.as_str(), config.stream.name.as_str()), ("007", "QUOTED"));
    assert_eq!((config.relay.lease, config.relay.barrier), (Duration::from_secs(45), false));
    assert_eq!((config.relay.batch_bytes, config.stream.max_bytes), (8 << 20, 1024));
    assert_eq!((config.relay.backoff.factor, config.stream.subjects.len()), (1.5, 2));
    assert_eq!(config.nats.tls.ca_file, Some("/srv/app/ca.pem".into()));
    assert_eq!(config.inbox.handler.len(), 1);
    assert_eq!(loaded.warnings, []);
}

#[test]
fn a_bad_variable_is_refused_by_its_name() {
    let cases = [
        ("OUTBOXD_RELAY_BATCH", "many", "relay.batch must be a whole number from 1 to 10000, not the string \"many\""),
        ("OUTBOXD_STREAM_SUBJECTS", "events.>", "stream.subjects must be a list of strings"),
        ("OUTBOXD_RELAY_LEASE", "3s", "must be shorter than relay.lease (3s)"),
    ];
    for (name, value, words) in cases {
        let found = parse_env(&[(name, value)]).unwrap_err().to_string();
        assert!(found.starts_with(&format!("environment variable {name}: ")) && found.contains(words), "{found}");
    }
}

#[test]
fn an_unknown_variable_is_a_warning_with_the_nearest_name() {
    let warnings = parse_env(&[("OUTBOXD_RELAY_BACTH", "3")]).unwrap().warnings;
    assert_eq!(warnings.len(), 1);
    let text = warnings[0].to_string();
    assert!(text.contains("OUTBOXD_RELAY_BACTH") && text.contains("did you mean \"OUTBOXD_RELAY_BATCH\""), "{text}");
}

// ---- discovery

struct Folder(tempfile::TempDir);

impl Folder {
    fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    fn options(&self, flag: Option<&str>, variable: Option<&str>, places: &[&str]) -> LoadOptions {
        let path = |name: &str| self.0.path().join(name);
        LoadOptions {
            path: flag.map(path),
            environment: variable
                .map(|name| vec![("OUTBOXD_CONFIG".to_owned(), path(name).display().to_string())])
                .unwrap_or_default(),
            places: places.iter().map(|name| path(name)).collect(),
        }
    }
}

#[test]
fn the_first_file_that_exists_is_taken_alone() {
    let folder = Folder(tempfile::tempdir().unwrap());
    for name in ["flag", "variable", "etc", "here"] {
        folder.file(name, &format!("source = \"{name}\"\n"));
    }
    let source = |options: &LoadOptions| config::load(options).unwrap().config.source;
    assert_eq!(source(&folder.options(Some("flag"), Some("variable"), &["etc", "here"])), "flag");
    assert_eq!(source(&folder.options(None, Some("variable"), &["etc", "here"])), "variable");
    assert_eq!(source(&folder.options(None, None, &["etc", "here"])), "etc");
    assert_eq!(source(&folder.options(None, None, &["missing", "here"])), "here");
}

#[test]
fn a_named_file_that_is_missing_is_an_error_and_not_another_file() {
    let folder = Folder(tempfile::tempdir().unwrap());
    folder.file("etc", "");
    for options in [folder.options(Some("gone"), None, &["etc"]), folder.options(None, Some("gone"), &["etc"])] {
        let text = config::load(&options).unwrap_err().to_string();
        assert!(text.contains("gone: no such file, named by"), "{text}");
    }
    let text = config::load(&folder.options(None, None, &["a", "b"])).unwrap_err().to_string();
    assert!(text.contains("no file found") && text.contains("/a or ") && text.contains("/b"), "{text}");
}

#[test]
fn a_file_that_cannot_be_read_says_why() {
    let folder = Folder(tempfile::tempdir().unwrap());
    std::fs::create_dir(folder.0.path().join("folder")).unwrap();
    let text = config::load(&folder.options(Some("folder"), None, &[])).unwrap_err().to_string();
    assert!(text.contains("folder: cannot read the configuration"), "{text}");
    std::fs::write(folder.0.path().join("latin1"), b"# ok\nsource = \"\xfc\"\n").unwrap();
    let text = config::load(&folder.options(Some("latin1"), None, &[])).unwrap_err().to_string();
    assert!(text.contains("latin1:2:11: not UTF-8"), "{text}");
}

// ---- reload

#[test]
fn a_plan_names_key_old_new_and_class() {
    let old = parse("[nats]\nuser = \"bob\"\npassword_file = \"p\"\n").unwrap().config;
    let new = parse(
        "[nats]\nuser = \"eve\"\npassword_file = \"p\"\n[relay]\nbatch = 64\n[database]\npath = \"other.db\"\n\
         [[inbox.handler]]\nevent_type = \"*\"\napply = \"store\"\n",
    )
    .unwrap()
    .config;
    let plan = config::diff(&old, &new);
    let shown: Vec<(String, Class)> = plan.changed.iter().map(|c| (c.to_string(), c.class)).collect();
    let wanted = [
        ("database.path: \"/srv/app/outboxd.db\" -> \"/srv/app/other.db\"", Class::Restart),
        ("nats.user: \"***\" -> \"***\"", Class::Reconnect),
        ("relay.batch: 512 -> 64", Class::Hot),
        ("inbox.handler: [] -> [{ event_type = \"*\", apply = \"store\" }]", Class::Hot),
    ];
    assert_eq!(shown, wanted.map(|(text, class)| (text.to_owned(), class)));
    let refusal = plan.refusal().unwrap();
    assert!(refusal.contains("database.path") && !refusal.contains("relay.batch"), "{refusal}");
    assert!(plan.touches("relay.batch") && plan.has(Class::Reconnect));
}

#[test]
fn a_plan_without_restart_keys_is_not_refused() {
    let old = Config::default();
    let mut new = old.clone();
    new.relay.batch = 7;
    assert_eq!(config::diff(&old, &new).refusal(), None);
}

#[test]
fn every_key_is_compared_and_stands_in_the_order_of_the_table() {
    let shown: Vec<&str> = parse("").unwrap().shown().iter().map(|shown| shown.key).collect();
    let table: Vec<&str> = KEYS.iter().map(|key| key.path).collect();
    assert_eq!(shown, table);
}

#[test]
fn the_digest_depends_on_the_values_only() {
    let one = parse("[relay]\nbatch = 512\n").unwrap();
    let two = parse("# a comment\nrelay.batch = 0x200\n").unwrap();
    let three = parse("[relay]\nbatch = 511\n").unwrap();
    assert_eq!(one.digest, two.digest);
    assert_ne!(one.digest, three.digest);
}

// ---- conversions and the schema

#[test]
fn the_defaults_convert_into_values_of_the_domain() {
    let config = Config::default();
    let rules = config.relay.retry_rules();
    assert_eq!(rules.backoff.ceiling(1), Duration::from_millis(200));
    assert_eq!(rules.backoff.ceiling(99), Duration::from_secs(60));
    assert!(config.relay.template().covered_by(&config.stream.subjects));
    assert_eq!(config.http.address().unwrap().port(), 8787);
}

#[test]
fn the_schema_has_every_key_with_its_default() {
    let schema = config::schema();
    for key in KEYS {
        let pointer: String = key.path.split('.').map(|part| format!("/properties/{part}")).collect();
        let property = schema.pointer(&pointer).unwrap_or_else(|| panic!("{} is not in the schema", key.path));
        assert!(!property["default"].is_null(), "{}", key.path);
        assert!(property["description"].as_str().is_some_and(|d| d.starts_with(key.doc)), "{}", key.path);
    }
    assert_eq!(schema["additionalProperties"], false);
    assert_eq!(schema["properties"]["nats"]["properties"]["tls"]["additionalProperties"], false);
}

// ---- properties

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// A damaged file is refused or read, never a panic, and every problem has a place inside the file.
    #[test]
    fn no_damage_to_the_file_makes_it_panic(at in 0usize..8_000, cut in 0usize..40, put in "[\\[\\]{}\"'=.#a-z0-9 \n\\\\ü]{0,6}") {
        let mut text = shipped();
        let at = (0..=at.min(text.len())).rev().find(|i| text.is_char_boundary(*i)).unwrap();
        let end = (at + cut..=text.len()).find(|i| text.is_char_boundary(*i)).unwrap_or(text.len()).max(at);
        text.replace_range(at..end, &put);
        if let Err(Problems(problems)) = parse(&text) {
            prop_assert!(!problems.is_empty());
            for Problem { place, .. } in problems {
                if let config::Place::File { line, .. } = place {
                    prop_assert!(line >= 1 && line <= text.lines().count() + 1);
                }
            }
        }
    }

    #[test]
    fn a_plan_of_a_configuration_with_itself_is_empty(batch in 1u64..10_000, lease in 6u64..100, user in "[a-z]{0,4}") {
        let text = format!("[relay]\nbatch = {batch}\nlease = \"{lease}s\"\n[nats]\nuser = \"{user}\"\n");
        let (one, two) = (parse(&text).unwrap(), parse(&text).unwrap());
        prop_assert!(config::diff(&one.config, &two.config).is_empty());
        prop_assert_eq!(one.digest, two.digest);
    }
}
