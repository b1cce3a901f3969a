//! What the README tells a stranger to type works as it stands there.

use std::process::{Command, Stdio};

use outboxd::testbed::application;
use outboxd::testbed::node::Node;

use super::support::{World, await_published, eventually, executable, s};

/// The first block of a language that contains a word.
fn block(language: &str, word: &str) -> String {
    let readme = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/README.md")).expect("README.md");
    let found = readme.split(&format!("```{language}\n")).skip(1).find_map(|rest| {
        let code = rest.split("\n```").next().unwrap_or("");
        code.contains(word).then(|| code.to_owned())
    });
    found.unwrap_or_else(|| panic!("the README has no {language} block with {word:?}"))
}

/// Runs a program of Python in the node's folder, against the node's database.
fn python(node: &Node, code: &str) {
    let code = code.replace("outboxd.db", "app.db");
    let mut command = Command::new("python3");
    command.arg("-c").arg(code).current_dir(node.folder()).stdin(Stdio::null());
    let done = command.output().expect("python3");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

#[test]
fn the_producers_and_the_sql_consumer_of_the_readme_work() {
    let world = World::new();
    let mut node = world.node("plant-a");
    let sql = block("sql", "outbox_events");
    python(&node, &format!("import sqlite3\nsqlite3.connect('app.db').executescript({sql:?})"));
    python(&node, &block("python", "sqlite3.connect"));
    node.start().expect("up");
    await_published(&node, 2, s(20));
    let messages = world.client().messages("EVENTS").expect("read");
    let types: Vec<_> = messages.iter().map(|m| m.header("ce-type")).collect();
    assert_eq!(types, ["asset.created", "asset.updated"]);

    let mut second = Node::new(&executable(), world.path(), "plant-b", &world.nats.url()).expect("a node");
    second.set("relay.enabled", false);
    second
        .write_config_text(&format!("{}\n{}\n", second.config_text(), block("toml", "apply = \"sql\"")))
        .expect("written");
    second.init(&[]).expect("db init");
    let stock = "CREATE TABLE stock (asset_id TEXT PRIMARY KEY, name TEXT, version INTEGER)";
    application::open(&second.database()).expect("open").execute_batch(stock).expect("a table");
    second.spawn().expect("started");
    eventually("both applied", s(20), || {
        let version = "SELECT coalesce(max(version), 0) FROM stock WHERE asset_id = 'asset-042'";
        match application::number(&second.database(), version) {
            Ok(2) => Ok(()),
            Ok(n) => Err(format!("version {n}; {}", second.log())),
            Err(e) => Err(e.to_string()),
        }
    });
    let name = application::text(&second.database(), "SELECT name FROM stock").expect("readable");
    assert_eq!(name, "Hydraulic unit B");
}
