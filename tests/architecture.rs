//! The architecture as tests: who may import whom, where SQL, files and clocks may stand, how long a file may be, and
//! that every invariant of ARCHITECTURE.md has a test that names it.
//!
//! Test code (`#[cfg(test)] mod ..` at the end of a file, and files named `*tests.rs`) is free of these rules.

#[path = "architecture/lexer.rs"]
mod lexer;
#[path = "architecture/rules.rs"]
mod rules;

use std::path::Path;

use lexer::{Source, Token, sources, tokens};
use rules::{LAYERS, Layer};

fn path_of(source: &Source) -> String {
    source.path.display().to_string()
}

#[track_caller]
fn assert_none(violations: Vec<String>) {
    assert!(violations.is_empty(), "{} violations:\n{}", violations.len(), violations.join("\n"));
}

/// The crates that the package depends on, as they are named in code.
fn dependencies() -> Vec<String> {
    let manifest: toml::Table = include_str!("../Cargo.toml").parse().unwrap();
    let names = manifest["dependencies"].as_table().unwrap().keys().map(|name| name.replace('-', "_"));
    names.chain(["std".into(), "core".into(), "alloc".into()]).collect()
}

fn layer_of(source: &Source) -> &'static Layer {
    let name = source.layer();
    LAYERS.iter().find(|layer| layer.name == name).unwrap_or_else(|| {
        panic!("src/{name} is new: give it a row in tests/architecture/rules.rs that says what it may import")
    })
}

fn import_violations(source: &Source, crates: &[String]) -> Vec<String> {
    let layer = layer_of(source);
    let path = path_of(source);
    let mut violations = Vec::new();
    for (name, line) in source.layers_named() {
        let known = LAYERS.iter().any(|layer| layer.name == name);
        if known && name != layer.name && !layer.may_import(&path, &name) {
            violations.push(format!("{path}:{line}: {} may not import {name}", layer.name));
        }
    }
    for (name, line) in source.crates_named(crates) {
        let free = matches!(name, "std" | "core" | "alloc");
        if !free && !layer.crates.contains(&name) {
            violations.push(format!("{path}:{line}: {} may not use the crate {name}", layer.name));
        }
    }
    violations
}

#[test]
fn layers_import_only_what_they_may() {
    let crates = dependencies();
    assert_none(sources("src").iter().flat_map(|source| import_violations(source, &crates)).collect());
}

#[test]
fn the_broker_the_actors_and_the_database_have_one_home_each() {
    let homes = |name: &str| -> Vec<&str> {
        LAYERS.iter().filter(|layer| layer.crates.contains(&name)).map(|layer| layer.name).collect()
    };
    // the testbed plays clients that are not ours
    assert_eq!(homes("async_nats"), ["jetstream", "testbed"]);
    assert_eq!(homes("ractor"), ["actors"]);
    assert_eq!(homes("deadpool_sqlite"), ["store"]);
    assert_eq!(homes("clap"), ["cli"]);
    assert_eq!(homes("axum"), ["admin"]);
    assert_eq!(homes("rand"), ["daemon", "testbed"], "chance comes from the composition root");
    let pool = Path::new("src/store/pool.rs");
    let crates = ["deadpool_sqlite".to_owned()];
    let named = sources("src").into_iter().filter(|s| s.path != pool && !s.crates_named(&crates).is_empty());
    assert_none(named.map(|s| format!("{}: only store/pool.rs knows deadpool", path_of(&s))).collect());
}

#[test]
fn the_import_rule_sees_every_way_to_name_a_layer() {
    let crates = dependencies();
    let cases = [
        ("src/domain/x.rs", "use crate::store::pool;", 1),
        ("src/domain/x.rs", "use crate::{limits, store::{pool, error}};", 1),
        ("src/domain/x.rs", "fn f() { crate::actors::go() }", 1),
        ("src/domain/x.rs", "use super::super::store;", 1),
        ("src/domain/x/y.rs", "use super::super::store;", 0),
        ("src/domain/x/y.rs", "use super::super::super::store;", 1),
        ("src/domain/mod.rs", "use super::store;", 1),
        ("src/domain/x.rs", "use tokio::sync::mpsc;", 1),
        ("src/domain/x.rs", "#[tokio::main] fn f() {}", 1),
        ("src/domain/x.rs", "use serde_json::Value; use crate::limits;", 0),
        ("src/domain/x.rs", "// crate::store is no import\nconst A: &str = \"crate::store\";", 0),
        ("src/domain/x.rs", "use super::tokio::x;", 0),
        ("src/actors/x.rs", "use async_nats::Client;", 1),
        ("src/jetstream/x.rs", "use ractor;", 1),
        ("src/admin/x.rs", "use crate::jetstream::publish;", 1),
        ("src/cli/doctor.rs", "use crate::jetstream::connect;", 0),
        ("src/cli/status.rs", "use crate::jetstream::connect;", 1),
        ("src/domain/x.rs", "fn f() {}\n#[cfg(test)]\nmod tests { use crate::store; }", 0),
        ("src/domain/x.rs", "#[cfg(test)]\nuse crate::store;", 1),
    ];
    for (path, text, wanted) in cases {
        let found = import_violations(&Source::new(path, text), &crates);
        assert_eq!(found.len(), wanted, "{path}: {text}\n{found:?}");
    }
}

// ---- the domain reads no clock

const IMPURE: [&str; 12] = [
    "SystemTime",
    "Instant",
    "tokio",
    "rusqlite",
    "ractor",
    "async_nats",
    "async",
    "await",
    "thread",
    "fs",
    "net",
    "env",
];

fn impure(source: &Source) -> Vec<String> {
    let words = source.code.iter().filter_map(|(token, line)| match token {
        Token::Word(word) if IMPURE.contains(&word.as_str()) => Some(format!("{}:{line}: {word}", path_of(source))),
        _ => None,
    });
    words.collect()
}

#[test]
fn the_domain_is_pure() {
    assert_none(sources("src/domain").iter().flat_map(impure).collect());
    assert_eq!(impure(&Source::new("src/domain/x.rs", "fn f() { std::time::Instant::now(); }")).len(), 1);
}

// ---- SQL and files

/// Statements of SQL as they begin a string; what people read in messages is not upper case.
const STATEMENTS: [&str; 14] = [
    "SELECT ",
    "INSERT ",
    "UPDATE ",
    "DELETE ",
    "CREATE ",
    "DROP ",
    "ALTER ",
    "PRAGMA ",
    "BEGIN IMMEDIATE",
    "COMMIT",
    "ROLLBACK",
    "SAVEPOINT ",
    "VACUUM",
    "WITH RECURSIVE ",
];

fn sql(source: &Source) -> Vec<String> {
    let is_sql = |text: &str| STATEMENTS.iter().any(|word| text.trim_start().starts_with(word));
    let is_frame = |text: &str| source.path == Path::new(rules::FRAME.0) && rules::FRAME.1.contains(&text);
    let texts = source.code.iter().filter_map(|(token, line)| match token {
        Token::Text(text) if is_sql(text) && !is_frame(text) => Some(format!("{}:{line}: {text:?}", path_of(source))),
        _ => None,
    });
    texts.collect()
}

#[test]
fn sql_stands_only_in_the_store() {
    let outside = sources("src").into_iter().filter(|s| !rules::MAY_HOLD_SQL.iter().any(|ok| s.path.starts_with(ok.0)));
    assert_none(outside.flat_map(|source| sql(&source)).collect());
    assert_eq!(sql(&Source::new("src/cli/x.rs", "const Q: &str = \"\\\n  SELECT 1\";")).len(), 0, "an escape, no SQL");
    assert_eq!(sql(&Source::new("src/cli/x.rs", "const Q: &str = \"\n  SELECT 1\";")).len(), 1);
    assert_eq!(sql(&Source::new(rules::FRAME.0, "f(\"SAVEPOINT job\"); f(\"DELETE FROM t\")")).len(), 1);
}

/// Ways to open a database.
const OPENS: [&str; 4] =
    ["Connection::open", "Connection::open_with_flags", "Connection::open_with_flags_and_vfs", "Manager::new"];

/// Ways to reach a file. Opening the database, -wal or -shm by any of them drops the locks that SQLite holds in this
/// process (POSIX), and another process writes into an open transaction.
const FILES: [&str; 12] = [
    "File::open",
    "File::create",
    "File::options",
    "OpenOptions::new",
    "fs::read(",
    "fs::read_to_string",
    "fs::write",
    "fs::copy",
    "fs::hard_link",
    "fs::rename",
    "fs::remove_file",
    "fs::open",
];

fn finds(source: &Source, patterns: &[&str]) -> Vec<String> {
    let hits = patterns.iter().flat_map(|pattern| {
        source.find(pattern).into_iter().map(move |line| format!("{}:{line}: {pattern}", path_of(source)))
    });
    hits.collect()
}

#[test]
fn only_the_store_opens_a_database() {
    let outside =
        sources("src").into_iter().filter(|s| !s.path.starts_with("src/store") && !rules::is_testbed(&s.path));
    assert_none(outside.flat_map(|source| finds(&source, &OPENS)).collect());
    let bad = Source::new("src/cli/x.rs", "fn f() { rusqlite::Connection::open(p) }");
    assert_eq!(finds(&bad, &OPENS).len(), 1);
}

#[test]
fn files_are_touched_only_where_it_was_weighed() {
    let weighed =
        |path: &Path| rules::MAY_TOUCH_FILES.iter().any(|(ok, _)| path.starts_with(ok)) || rules::is_testbed(path);
    let outside = sources("src").into_iter().filter(|s| !weighed(&s.path));
    assert_none(outside.flat_map(|source| finds(&source, &FILES)).collect());
    let bad =
        Source::new("src/cli/x.rs", "fn f() { let a = std::fs::read(p); OpenOptions::new().open(p); fs::read_dir(p) }");
    assert_eq!(finds(&bad, &FILES).len(), 2);
}

#[test]
fn a_transaction_never_spans_an_await() {
    // a function over a transaction is never async, so that nothing can be awaited while one is open
    let spans = |source: &Source| -> Vec<String> {
        let code = source.bare();
        let word = |at: usize, text: &str| matches!(code.get(at), Some((Token::Word(w), _)) if w == text);
        let sign = |at: usize, c: char| matches!(code.get(at), Some((Token::Sign(s), _)) if *s == c);
        let asyncs = (0..code.len()).filter(|at| word(*at, "async") && word(at + 1, "fn"));
        let bad = asyncs.filter(|at| {
            // its parameters: closures that get a transaction are the parameters of the writer, and run in one piece
            let open = (at + 2..code.len()).find(|i| sign(*i, '(')).unwrap_or(code.len());
            let mut depth = 0;
            for i in open..code.len() {
                depth += i32::from(sign(i, '(')) - i32::from(sign(i, ')'));
                if depth == 0 {
                    return false;
                }
                if depth == 1 && word(i, "Transaction") {
                    return true;
                }
            }
            false
        });
        bad.map(|at| format!("{}:{}: async fn over a Transaction", path_of(source), code[at].1)).collect()
    };
    assert_none(sources("src").iter().flat_map(spans).collect());
    let bad = Source::new("src/store/x.rs", "async fn f(tx: &Transaction<'_>) {}");
    let good = Source::new(
        "src/actors/x.rs",
        "async fn f(job: impl FnOnce(&Transaction<'_>) -> u8) {} fn g(tx: &Transaction) {}",
    );
    assert_eq!((spans(&bad).len(), spans(&good).len()), (1, 0));
}

// ---- size and finish

#[test]
fn no_file_is_longer_than_six_hundred_lines() {
    let all = sources("src").into_iter().chain(sources("tests"));
    let long = all.filter(|s| s.lines > 600).map(|s| format!("{} has {} lines", path_of(&s), s.lines));
    assert_none(long.collect());
}

fn unfinished(source: &Source) -> Vec<String> {
    let marks = ["TODO", "FIXME", "XXX", "HACK"];
    let comments = source.code.iter().filter_map(|(token, line)| match token {
        Token::Comment(text) if marks.iter().any(|mark| text.contains(mark)) => {
            Some(format!("{}:{line}: {text}", path_of(source)))
        }
        _ => None,
    });
    let calls = finds(source, &[".unwrap()", "todo!", "unimplemented!", "dbg!"]);
    let code = &source.code;
    let empty = (2..code.len()).filter(|at| {
        matches!(&code[at - 2].0, Token::Word(w) if w == "expect")
            && code[at - 1].0 == Token::Sign('(')
            && matches!(&code[*at].0, Token::Text(text) if text.trim().is_empty())
    });
    let empty = empty.map(|at| format!("{}:{}: expect without a proof", path_of(source), code[at].1));
    comments.chain(calls).chain(empty).collect()
}

#[test]
fn nothing_is_left_unfinished_and_no_unwrap_stands_outside_tests() {
    let product = sources("src").into_iter();
    assert_none(product.flat_map(|source| unfinished(&source)).collect());
    let mark = ["TO", "DO"].concat();
    let text = format!("// {mark}: later\nfn f() {{ x.unwrap(); y.expect(\"\"); z.expect(\"a proof\"); todo!() }}");
    assert_eq!(unfinished(&Source::new("src/x.rs", &text)).len(), 4);
}

#[test]
fn every_module_says_what_it_is_for() {
    let silent = sources("src")
        .into_iter()
        .filter(|s| !s.path.ends_with("main.rs") && !s.code.is_empty())
        .filter(|s| !matches!(s.code.first(), Some((Token::Comment(text), 1)) if text.starts_with("//!")));
    assert_none(silent.map(|s| format!("{} begins without a //! header", path_of(&s))).collect());
}

#[test]
fn no_message_of_the_product_names_a_path_of_the_builders_machine() {
    let home = concat!("/", "work/");
    let all = sources("src").into_iter().chain(sources("tests"));
    let named = all.filter(|s| {
        let in_code = s.code.iter().any(|(t, _)| matches!(t, Token::Text(x) | Token::Comment(x) if x.contains(home)));
        in_code || s.tests.contains(home)
    });
    assert_none(named.map(|s| path_of(&s)).collect());
}

// ---- invariants

/// The invariants that a document lists as `I1`, `I2`, ... under its heading "Invariants".
fn invariants(document: &str) -> Vec<String> {
    let mut inside = false;
    let mut found = Vec::new();
    for line in document.lines() {
        if let Some(heading) = line.strip_prefix('#') {
            inside = heading.trim_start_matches('#').trim().eq_ignore_ascii_case("invariants");
        } else if inside {
            let words = line.split(|c: char| !c.is_ascii_alphanumeric());
            let first = words.filter(|w| !w.is_empty()).find(|w| is_invariant(w));
            found.extend(first.map(str::to_owned));
        }
    }
    found.dedup();
    found
}

fn is_invariant(word: &str) -> bool {
    word.strip_prefix('I').is_some_and(|digits| !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()))
}

/// A test names an invariant in a comment (`I3`) or in its name (`i3_...`).
fn is_named(invariant: &str, test_code: &str) -> bool {
    let lower = format!("{}_", invariant.to_lowercase());
    tokens(test_code).iter().any(|(token, _)| match token {
        Token::Comment(text) => text.split(|c: char| !c.is_ascii_alphanumeric()).any(|word| word == invariant),
        Token::Word(word) => word.starts_with(&lower) || word.contains(&format!("_{lower}")),
        Token::Text(_) | Token::Sign(_) => false,
    })
}

#[test]
fn every_invariant_has_a_test_that_names_it() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("ARCHITECTURE.md");
    let Ok(document) = std::fs::read_to_string(&path) else { return };
    let invariants = invariants(&document);
    assert!(invariants.len() >= 8, "ARCHITECTURE.md lists only {invariants:?} under its heading \"Invariants\"");
    let own = Path::new("tests/architecture.rs");
    let mut test_code = String::new();
    for source in sources("src").into_iter().chain(sources("tests")).filter(|s| s.path != own) {
        let whole = source.path.starts_with("tests");
        let text = if whole { std::fs::read_to_string(&source.path).unwrap() } else { source.tests };
        test_code.push_str(&text);
        test_code.push('\n');
    }
    let missing = invariants.iter().filter(|invariant| !is_named(invariant, &test_code));
    assert_none(missing.map(|invariant| format!("no test names {invariant}")).collect());
}

#[test]
fn the_rule_about_invariants_can_fail() {
    let document =
        "# A\nI9 is not in the list\n## Invariants\n- **I1** a row\n| I2 | another, see I1 |\nsomething\n# B\nI3\n";
    assert_eq!(invariants(document), ["I1", "I2"]);
    assert!(is_named("I1", "/// I1: a published row was acked\nfn f() {}"));
    assert!(is_named("I2", "fn i2_at_most_one_lease() {}") && is_named("I2", "fn test_i2_holds() {}"));
    assert!(!is_named("I1", "// I12\nfn i12_x() {} const A: &str = \"I1\";"));
}

// ---- the reader itself

#[test]
fn strings_comments_and_lifetimes_do_not_confuse_the_reader() {
    let text = "fn f<'a>(x: &'a str) { let c = '\"'; let d = '\\''; r#\"a \"crate::b\" c\"#; b\"d\"; /* a /* b */ c */ e }\n// g\nh";
    let words: Vec<String> = tokens(text)
        .into_iter()
        .filter_map(|(token, line)| match token {
            Token::Word(word) => Some(word),
            Token::Text(text) => Some(format!("<{text}>")),
            Token::Comment(_) => Some(format!("comment {line}")),
            Token::Sign(_) => None,
        })
        .collect();
    let wanted = [
        "fn",
        "f",
        "a",
        "x",
        "a",
        "str",
        "let",
        "c",
        "let",
        "d",
        "<a \"crate::b\" c>",
        "<d>",
        "comment 1",
        "e",
        "comment 2",
        "h",
    ];
    let without_lifetimes: Vec<&String> = words.iter().collect();
    assert_eq!(without_lifetimes, wanted);
}
