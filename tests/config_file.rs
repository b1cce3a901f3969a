//! The configuration file: the shipped one, the strict parse, relations, environment, discovery, the reload plan.

#[path = "config_file/relations.rs"]
mod relations;
#[path = "config_file/reload.rs"]
mod reload;
#[path = "config_file/sources.rs"]
mod sources;
#[path = "config_file/strict.rs"]
mod strict;

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use outboxd::config::keys::KEYS;
use outboxd::config::{self, Apply, Config, Loaded, Problem, Problems};
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

/// Compares a file of the repository with what the table of keys says, and leaves the latter where it can be copied from.
fn assert_generated(file: &str, wanted: &str) {
    let found = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).unwrap_or_default();
    if found != wanted {
        let copy = Path::new(env!("CARGO_TARGET_TMPDIR")).join(Path::new(file).file_name().unwrap());
        std::fs::write(&copy, wanted).unwrap();
        panic!("{file} differs from the table of keys; if the table is right: cp {} {file}", copy.display());
    }
}

#[test]
fn the_shipped_file_is_what_the_table_of_keys_says() {
    assert_generated("config.toml", &config::shipped_file());
}

#[test]
fn the_reference_page_is_what_the_table_of_keys_says() {
    assert_generated("docs/configuration.md", &config::reference());
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

// ---- damage

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// A damaged file is refused or read, never a panic, and every problem has a place inside the file.
    #[test]
    fn no_damage_to_the_file_makes_it_panic(
        at in 0usize..8_000, cut in 0usize..40, put in "[\\[\\]{}\"'=.#a-z0-9 \n\\\\ü]{0,6}",
    ) {
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
}
