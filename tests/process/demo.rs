//! The demo is a test too, so that it cannot rot.

use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};

use outboxd::testbed::process::Process;
use outboxd::testbed::workdir::Workdir;

use super::support::{eventually, executable, s};

/// Processes whose command line names a folder.
fn processes_of(folder: &Path) -> Vec<String> {
    let name = folder.display().to_string();
    let entries = std::fs::read_dir("/proc").expect("/proc").flatten();
    let lines = entries.filter_map(|e| std::fs::read_to_string(e.path().join("cmdline")).ok());
    lines.filter(|l| l.contains(&name)).map(|l| l.replace('\0', " ")).collect()
}

#[test]
fn the_demo_plays_to_its_end_and_its_proof_holds() {
    let dir = Workdir::new("demo-test").expect("a folder");
    let out = dir.path().join("out");
    let file = File::create(&out).expect("a file");
    let mut command = Command::new(executable());
    command.args(["demo", "--fast"]).stdin(Stdio::null()).stderr(file.try_clone().expect("shared")).stdout(file);
    // everything it makes goes with the folder, also where it is killed
    command.env("TMPDIR", dir.path());
    let ended = Process::spawn(&mut command, "outboxd demo").expect("it starts").wait(s(110));
    let said = String::from_utf8_lossy(&std::fs::read(&out).expect("its output")).into_owned();
    let ended = ended.unwrap_or_else(|late| panic!("{late}\n{said}"));
    assert!(ended.success(), "{ended}\n{said}");
    for claim in ["committed", "applied once", "lost", "out of order", "applied twice", "duplicates stopped"] {
        assert!(said.contains(claim), "the closing table says nothing of {claim:?}\n{said}");
    }
    assert!(!said.contains('\x1b'), "colour where there is no terminal\n{said}");
    let left: Vec<_> = std::fs::read_dir(dir.path()).expect("readable").flatten().map(|e| e.file_name()).collect();
    assert_eq!(left, ["out"], "the demo left something behind");
}

#[test]
fn a_demo_that_is_killed_leaves_no_process_behind() {
    let dir = Workdir::new("demo-killed").expect("a folder");
    let mut command = Command::new(executable());
    command.args(["demo", "--fast"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.env("TMPDIR", dir.path());
    let mut demo = Process::spawn(&mut command, "outboxd demo").expect("it starts");
    eventually("a nats-server and a daemon", s(60), || {
        let found = processes_of(dir.path());
        let runs = |what: &str| found.iter().any(|line| line.contains(what));
        if runs("nats-server.conf") && runs("config.toml run") { Ok(()) } else { Err(format!("{found:?}")) }
    });
    demo.kill().expect("killed");
    eventually("nothing left", s(20), || match processes_of(dir.path()) {
        left if left.is_empty() => Ok(()),
        left => Err(format!("{left:?}")),
    });
}

#[test]
fn a_demo_that_is_interrupted_cleans_up() {
    let dir = Workdir::new("demo-interrupted").expect("a folder");
    let mut command = Command::new(executable());
    command.args(["demo"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.env("TMPDIR", dir.path());
    let mut demo = Process::spawn(&mut command, "outboxd demo").expect("it starts");
    eventually("a nats-server", s(60), || {
        let found = processes_of(dir.path());
        if found.iter().any(|line| line.contains("nats-server.conf")) { Ok(()) } else { Err(format!("{found:?}")) }
    });
    demo.signal(rustix::process::Signal::INT).expect("sent");
    let end = demo.wait(s(30)).expect("it ends");
    assert_eq!(end.code(), Some(1));
    assert!(processes_of(dir.path()).is_empty());
    assert_eq!(std::fs::read_dir(dir.path()).expect("readable").count(), 0, "the demo left something behind");
}
