//! The command line as a shell sees it: the real binary, its output, its exit codes. Verbs that need no daemon.

use std::process::{Command, Output, Stdio};

fn outboxd(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_outboxd"));
    // neither the environment nor the folder of whoever runs the tests may lend a configuration
    command.args(arguments).env_clear().current_dir(env!("CARGO_TARGET_TMPDIR")).stdin(Stdio::null());
    command
}

fn run(arguments: &[&str]) -> (Option<i32>, String, String) {
    let Output { status, stdout, stderr } = outboxd(arguments).output().unwrap();
    (status.code(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

#[test]
fn help_teaches_with_examples_and_exit_codes() {
    let (code, out, err) = run(&["--help"]);
    assert_eq!((code, err.as_str()), (Some(0), ""));
    for part in ["Examples:", "outboxd explain 10077", "Exit codes: 0 ok", "--config <FILE>"] {
        assert!(out.contains(part), "no {part:?} in\n{out}");
    }
}

#[test]
fn a_misspelt_verb_is_usage_and_names_the_nearest() {
    let (code, out, err) = run(&["explian", "78"]);
    assert_eq!((code, out.as_str()), (Some(2), ""));
    assert!(err.contains("explain"), "{err}");
}

#[test]
fn every_shell_gets_its_completions() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let (code, out, _) = run(&["completions", shell]);
        assert_eq!(code, Some(0), "{shell}");
        assert!(out.contains("outboxd") && out.contains("explain"), "{shell}: {out}");
    }
}

#[test]
fn the_completions_of_bash_are_a_script_that_bash_takes() {
    let (_, script, _) = run(&["completions", "bash"]);
    let check = Command::new("bash").args(["-n", "-c", &script]).output().unwrap();
    assert!(check.status.success(), "{}", String::from_utf8_lossy(&check.stderr));
}

#[test]
fn manual_pages_are_written_one_a_verb() {
    let folder = tempfile::tempdir().unwrap();
    let pages = folder.path().join("man/man1");
    let (code, _, err) = run(&["man", pages.to_str().unwrap()]);
    assert_eq!(code, Some(0), "{err}");
    for page in ["outboxd.1", "outboxd-explain.1", "outboxd-config-check.1"] {
        let text = std::fs::read_to_string(pages.join(page)).unwrap_or_else(|e| panic!("{page}: {e}"));
        assert!(text.contains(".TH outboxd"), "{page}: {text}");
    }
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    let (code, _, err) = run(&["man", file.to_str().unwrap()]);
    assert_eq!(code, Some(1));
    assert!(err.contains("what to do: name a folder"), "{err}");
}

#[test]
fn version_names_what_a_report_needs() {
    let (code, out, _) = run(&["version"]);
    assert_eq!(code, Some(0));
    assert!(out.starts_with(&format!("outboxd {}\n", env!("CARGO_PKG_VERSION"))), "{out}");
    assert!(out.contains("sqlite 3."), "{out}");
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let mut child = outboxd(&["explain", "all"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // closed before anything is read: the write of the program meets a broken pipe, or it was faster
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(0), &b""[..]));
}

#[test]
fn output_that_cannot_be_written_is_a_failure() {
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let output = outboxd(&["explain", "all"]).stdout(full).stderr(Stdio::piped()).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("cannot write the output"), "{output:?}");
}

#[test]
fn no_configuration_is_78_and_says_where_it_was_looked_for() {
    let (code, _, err) = run(&["config", "check"]);
    assert_eq!(code, Some(78));
    assert!(err.contains("--config") && err.contains("OUTBOXD_CONFIG"), "{err}");
}

// ---- verbs on a database that no daemon serves

struct Place {
    folder: tempfile::TempDir,
}

impl Place {
    /// A folder with a configuration and, with `tables`, a database.
    fn new(tables: bool) -> Self {
        let place = Self { folder: tempfile::tempdir().unwrap() };
        place.configure("");
        if tables {
            let (code, _, err) = place.run(&["db", "init"]);
            assert_eq!(code, Some(0), "{err}");
        }
        place
    }

    fn configure(&self, more: &str) {
        let text = format!("source = \"plant\"\n[database]\npath = \"app.db\"\n[http]\nlisten = \"\"\n{more}");
        std::fs::write(self.folder.path().join("config.toml"), text).unwrap();
    }

    fn run(&self, arguments: &[&str]) -> (Option<i32>, String, String) {
        let config = self.folder.path().join("config.toml");
        run(&[&["--config", config.to_str().unwrap()], arguments].concat())
    }

    fn status(&self) -> serde_json::Value {
        let (code, out, err) = self.run(&["status", "--json"]);
        assert_eq!(code, Some(0), "{err}");
        serde_json::from_str(&out).unwrap()
    }
}

#[test]
fn status_of_a_stopped_daemon_comes_from_the_file() {
    let place = Place::new(true);
    let status = place.status();
    assert_eq!((&status["state"], &status["outbox"]["pending"]), (&"stopped".into(), &0.into()));
    assert_eq!((&status["source"], &status["config"]["last_reload"]), (&"plant".into(), &"none".into()));
    let (_, out, _) = place.run(&["status"]);
    assert!(out.contains("no daemon runs; figures are from the database"), "{out}");
}

#[test]
fn no_database_is_69_and_names_db_init_and_nothing_is_created() {
    let place = Place::new(false);
    for verb in [&["status"][..], &["pause"], &["events", "list"], &["db", "check"], &["run"]] {
        let (code, _, err) = place.run(verb);
        assert_eq!(code, Some(69), "{verb:?}: {err}");
        assert!(err.contains("app.db") && err.contains("outboxd db init"), "{verb:?}: {err}");
    }
    assert!(!place.folder.path().join("app.db").exists());
}

#[test]
fn a_pause_without_a_daemon_is_done_on_the_file_and_is_audited() {
    let place = Place::new(true);
    assert_eq!(place.run(&["pause", "--for", "1h"]).0, Some(0));
    assert!(place.status()["paused_until"].is_string());
    assert_eq!(place.run(&["resume"]).1, "resumed\n");
    assert_eq!(place.run(&["resume"]).1, "it was not paused\n");
    assert!(place.status()["paused_until"].is_null());
    let (_, out, _) = place.run(&["audit", "--json"]);
    let rows: Vec<serde_json::Value> = serde_json::from_str(&out).unwrap();
    let verbs: Vec<&str> = rows.iter().filter_map(|row| row["verb"].as_str()).collect();
    assert_eq!(verbs, ["resume", "pause"]);
    assert!(rows[0]["actor"].as_str().unwrap().starts_with("uid "), "{out}");
}

#[test]
fn a_silent_daemon_is_69_and_nothing_is_written() {
    let place = Place::new(true);
    // somebody holds the socket and never speaks, as a stopped process does
    let _silent = std::os::unix::net::UnixListener::bind(place.folder.path().join("app.db.outboxd.sock")).unwrap();
    let (code, _, err) = place.run(&["pause"]);
    assert_eq!(code, Some(69));
    assert!(err.contains("does not answer") && err.contains("nothing was written"), "{err}");
    let status = place.status();
    assert_eq!(status["state"], "halted");
    assert!(status["paused_until"].is_null());
}

#[test]
fn a_stale_socket_is_no_daemon() {
    let place = Place::new(true);
    drop(std::os::unix::net::UnixListener::bind(place.folder.path().join("app.db.outboxd.sock")).unwrap());
    assert_eq!(place.run(&["pause"]).0, Some(0));
    assert_eq!(place.status()["state"], "stopped");
}

#[test]
fn a_broken_configuration_still_shows_the_database_and_changes_nothing() {
    let place = Place::new(true);
    place.configure("[relay]\nbatchh = 3\n");
    assert_eq!(place.status()["state"], "stopped");
    let (code, _, err) = place.run(&["pause"]);
    assert_eq!(code, Some(78));
    assert!(err.contains("config.toml:7:1") && err.contains("batchh"), "{err}");
    assert!(place.status()["paused_until"].is_null());
}

#[test]
fn a_reload_without_a_daemon_is_69() {
    let place = Place::new(true);
    let (code, _, err) = place.run(&["reload", "--wait"]);
    assert_eq!(code, Some(69));
    assert!(err.contains("no daemon runs"), "{err}");
}

#[test]
fn an_asset_and_its_event_are_one_and_a_conflict_writes_nothing() {
    let place = Place::new(true);
    let create = ["asset", "create", "pump-1", "--name", "Pump", "--material", "S45C", "--json"];
    let (code, out, err) = place.run(&create);
    assert_eq!(code, Some(0), "{err}");
    let asset: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((&asset["version"], asset["event_id"].is_string()), (&1.into(), true));
    assert_eq!(place.run(&create).0, Some(1));
    let update = |expected| {
        place.run(&["asset", "update", "pump-1", "--expected-version", expected, "--name", "P", "--material", "X"])
    };
    assert_eq!(update("1").0, Some(0));
    let (code, _, err) = update("1");
    assert_eq!(code, Some(1));
    assert!(err.contains("is at version 2, not 1; nothing was written"), "{err}");
    let (_, out, _) = place.run(&["events", "list", "--json"]);
    let events: Vec<serde_json::Value> = serde_json::from_str(&out).unwrap();
    assert_eq!(events.iter().filter(|e| e["aggregate_id"] == "pump-1").count(), 2, "{out}");
    assert_eq!(place.status()["outbox"]["pending"], 2);
}

#[test]
fn changes_of_several_events_say_what_was_left() {
    let place = Place::new(true);
    let (code, out, _) = place.run(&["events", "retry", "nope", "--json"]);
    assert_eq!(code, Some(1));
    assert!(out.contains("there is no such event"), "{out}");
    assert_eq!(place.run(&["events", "retry"]).0, Some(2), "ids are needed");
    assert_eq!(place.run(&["events", "discard", "x"]).0, Some(2), "a reason is needed");
}
