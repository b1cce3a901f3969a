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
    for part in ["Examples:", "outboxd explain 78", "Exit codes: 0 ok", "--config <FILE>"] {
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
