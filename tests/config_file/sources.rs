//! Where values come from: the environment, and which file is taken.

use std::path::{Path, PathBuf};
use std::time::Duration;

use outboxd::config::{self, LoadOptions, Synchronous};

use super::{PATH, parse_env};

#[test]
fn the_environment_overrides_the_file() {
    let env = [("OUTBOXD_RELAY_BATCH".to_owned(), "256".to_owned())];
    let loaded = config::parse(Path::new(PATH), "[relay]\nbatch = 8\nlease = \"1m\"\n", &env).unwrap();
    assert_eq!((loaded.config.relay.batch, loaded.config.relay.lease), (256, Duration::from_secs(60)));
    assert_eq!(loaded.origins["relay.batch"].to_string(), "environment variable OUTBOXD_RELAY_BATCH");
}

#[test]
fn a_refused_value_in_the_file_is_told_even_where_a_variable_hides_it() {
    let env = [("OUTBOXD_DATABASE_SYNCHRONOUS".to_owned(), "normal".to_owned())];
    let found = config::parse(Path::new(PATH), "[database]\nsynchronous = \"ful\"\n", &env).unwrap_err().to_string();
    assert!(found.starts_with("/srv/app/config.toml:2:15: database.synchronous must be"), "{found}");
    let loaded = config::parse(Path::new(PATH), "[database]\nsynchronous = \"full\"\n", &env).unwrap();
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
