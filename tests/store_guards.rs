//! What is refused at the INSERT, whoever inserts: the bundled SQLite, the system's program, Python's module.

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use outboxd::store::{ddl, schema, time};
use proptest::prelude::*;
use rusqlite::types::Value;
use rusqlite::{Connection, params};

fn fresh() -> (tempfile::TempDir, Connection) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("app.db");
    schema::init(&path, "test", false).unwrap();
    let conn = Connection::open(&path).unwrap();
    (dir, conn)
}

const COLUMNS: [&str; 7] =
    ["event_id", "aggregate_type", "aggregate_id", "aggregate_version", "event_type", "schema_version", "payload_json"];

fn good() -> Vec<(&'static str, Value)> {
    let text = |t: &str| Value::Text(t.into());
    let values = [
        text("e1"),
        text("asset"),
        text("a"),
        Value::Integer(1),
        text("asset.made"),
        Value::Integer(1),
        text("{\"k\":1}"),
    ];
    COLUMNS.into_iter().zip(values).collect()
}

fn with(column: &'static str, value: impl Into<Value>) -> Vec<(&'static str, Value)> {
    let mut row = good();
    row.retain(|(c, _)| *c != column);
    row.push((column, value.into()));
    row
}

fn insert(conn: &Connection, how: &str, row: &[(&'static str, Value)], tail: &str) -> rusqlite::Result<usize> {
    let columns: Vec<&str> = row.iter().map(|(c, _)| *c).collect();
    let marks: Vec<String> = (1..=row.len()).map(|i| format!("?{i}")).collect();
    let sql = format!("INSERT {how} INTO outbox_events ({}) VALUES ({}) {tail}", columns.join(", "), marks.join(", "));
    conn.execute(&sql, rusqlite::params_from_iter(row.iter().map(|(_, v)| v)))
}

/// Every way to write an INSERT that changes what a conflict does.
const WAYS: [(&str, &str); 6] = [
    ("", ""),
    ("OR IGNORE", ""),
    ("OR REPLACE", ""),
    ("OR ROLLBACK", ""),
    ("", "ON CONFLICT DO NOTHING"),
    ("", "ON CONFLICT (event_id) DO UPDATE SET status = 'published'"),
];

fn count(conn: &Connection) -> i64 {
    conn.query_row("SELECT count(*) FROM outbox_events", [], |r| r.get(0)).unwrap()
}

#[test]
fn the_seven_columns_are_enough() {
    let (_dir, conn) = fresh();
    assert_eq!(insert(&conn, "", &good(), "").unwrap(), 1);
    let row: (String, i64, String, String, i64) = conn
        .query_row("SELECT status, attempt_count, available_at, created_at, seq FROM outbox_events", [], |r| {
            Ok((r.get(0)?, r.get(1)?, r.get(2)?, r.get(3)?, r.get(4)?))
        })
        .unwrap();
    assert_eq!((row.0.as_str(), row.1, row.4), ("pending", 0, 1));
    assert_eq!(row.2, row.3, "due at once");
    assert_eq!(row.3.len(), time::TEXT_LEN, "with milliseconds: {}", row.3);
}

#[test]
fn what_can_never_be_published_is_refused_in_every_way_of_inserting() {
    let blob = |b: &[u8]| Value::Blob(b.to_vec());
    let text = |t: &str| Value::Text(t.into());
    let bad: Vec<(Vec<(&'static str, Value)>, &str)> = vec![
        (with("event_id", text("")), "event_id"),
        (with("event_id", Value::Null), "event_id"),
        (with("event_id", blob(b"e1")), "event_id"),
        (with("aggregate_type", text("")), "aggregate_type"),
        (with("aggregate_type", Value::Null), "aggregate_type"),
        (with("aggregate_id", text("")), "aggregate_id"),
        (with("aggregate_id", Value::Null), "aggregate_id"),
        (with("event_type", text("")), "event_type"),
        (with("event_type", Value::Null), "event_type"),
        (with("aggregate_version", 0), "aggregate_version"),
        (with("aggregate_version", -1), "aggregate_version"),
        (with("aggregate_version", 1.5), "aggregate_version"),
        (with("aggregate_version", text("many")), "aggregate_version"),
        (with("aggregate_version", Value::Null), "aggregate_version"),
        (with("schema_version", 0), "schema_version"),
        (with("schema_version", text("v1")), "schema_version"),
        (with("payload_json", text("{nope")), "payload_json"),
        (with("payload_json", text("")), "payload_json"),
        (with("payload_json", blob(b"\x00\x01")), "payload_json"),
        (with("payload_json", Value::Null), "payload_json"),
        (with("status", text("published")), "status"),
        (with("status", text("failed")), "status"),
        (with("status", text("sent")), "status"),
        (with("status", Value::Null), "status"),
        (with("seq", 7), "seq"),
        (with("attempt_count", 3), "attempt_count"),
        (with("stream_seq", 3), "stream_seq"),
        (with("created_at", text("yesterday")), "created_at"),
        (with("created_at", Value::Null), "created_at"),
        (with("available_at", text("2026-02-30 00:00:00")), "available_at"),
        (with("available_at", text("now")), "available_at"),
        (with("available_at", 2461320.5), "available_at"),
        (with("headers_json", text("[]")), "headers_json"),
        (with("headers_json", text("{nope")), "headers_json"),
        (with("headers_json", blob(b"{}")), "headers_json"),
        (with("headers_json", text("{\"a\":1}")), "headers_json"),
        (with("headers_json", text("{\"a\":\"b\\nc\"}")), "headers_json"),
        (with("headers_json", text("{\"a\":\"b\\u0000c\"}")), "headers_json"),
        (with("headers_json", text("{\"\":\"b\"}")), "headers_json"),
        (with("headers_json", text("{\"a b\":\"c\"}")), "headers_json"),
        (with("headers_json", text("{\"nats-Msg-Id\":\"c\"}")), "headers_json"),
        (with("headers_json", text("{\"CE-id\":\"c\"}")), "headers_json"),
        (with("headers_json", text("{\"outboxd-Seq\":\"c\"}")), "headers_json"),
        (with("headers_json", text(&format!("{{\"a\":\"{}\"}}", "x".repeat(20_000)))), "headers_json"),
    ];
    let (_dir, conn) = fresh();
    for (row, names) in bad {
        for (how, tail) in WAYS {
            let error = insert(&conn, how, &row, tail).expect_err(&format!("{how} {tail} took {row:?}"));
            let text = error.to_string();
            assert!(text.starts_with("outboxd: ") && text.contains(names), "{how} {tail} {row:?}: {text}");
        }
    }
    assert_eq!(count(&conn), 0);
    // the one number that a BEFORE trigger cannot tell from none
    assert!(insert(&conn, "", &with("seq", -1), "").is_err());
}

#[test]
fn what_an_application_may_write_is_taken() {
    let text = |t: &str| Value::Text(t.into());
    let (_dir, conn) = fresh();
    for (i, mut row) in [
        with("payload_json", Value::Blob(b"{\"go\":true}".to_vec())),
        with("payload_json", text("[1,2]")),
        with("payload_json", text("\"just a text\"")),
        with("aggregate_version", text("7")),
        with("headers_json", text("{}")),
        with(
            "headers_json",
            text("{\"traceparent\":\"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01\",\"X-Note\":\"ü\"}"),
        ),
        with("available_at", text("2099-01-01T00:00:00+02:00")),
        with("created_at", text("2026-01-01 00:00")),
    ]
    .into_iter()
    .enumerate()
    {
        row.retain(|(c, _)| !matches!(*c, "event_id" | "aggregate_id"));
        row.push(("event_id", text(&format!("e{i}"))));
        row.push(("aggregate_id", text(&format!("a{i}"))));
        assert_eq!(insert(&conn, "", &row, "").unwrap_or_else(|e| panic!("{row:?}: {e}")), 1);
    }
    let kept: String =
        conn.query_row("SELECT typeof(payload_json) FROM outbox_events WHERE seq = 1", [], |r| r.get(0)).unwrap();
    assert_eq!(kept, "blob");
}

#[test]
fn the_identical_event_again_is_no_op_and_a_different_one_is_refused() {
    let text = |t: &str| Value::Text(t.into());
    let (_dir, conn) = fresh();
    insert(&conn, "", &good(), "").unwrap();
    conn.execute_batch("UPDATE outbox_events SET status = 'published', stream_seq = 9").unwrap();
    for (how, tail) in WAYS {
        assert_eq!(insert(&conn, how, &good(), tail).unwrap(), 0, "{how} {tail}");
        let same_bytes = with("payload_json", Value::Blob(b"{\"k\":1}".to_vec()));
        assert_eq!(insert(&conn, how, &same_bytes, tail).unwrap(), 0, "{how} {tail}");
        for (row, why) in [
            (with("payload_json", text("{\"k\":2}")), "this event_id"),
            (with("aggregate_version", 2), "this event_id"),
            (with("aggregate_id", text("b")), "this event_id"),
            (with("event_type", text("asset.lost")), "this event_id"),
            (with("schema_version", 2), "this event_id"),
            (with("event_id", text("e2")), "this version of the aggregate"),
        ] {
            let error = insert(&conn, how, &row, tail).expect_err(&format!("{how} {tail} took {row:?}"));
            assert!(error.to_string().contains(why), "{how} {tail} {row:?}: {error}");
        }
    }
    let whole: (i64, String, i64) = conn
        .query_row("SELECT seq, status, stream_seq FROM outbox_events", [], |r| Ok((r.get(0)?, r.get(1)?, r.get(2)?)))
        .unwrap();
    assert_eq!(whole, (1, "published".into(), 9));
}

#[test]
fn an_outer_trigger_cannot_overrule_the_guard() {
    let (_dir, conn) = fresh();
    conn.execute_batch(
        "CREATE TABLE parts (id INTEGER PRIMARY KEY, event TEXT, version);
         CREATE TRIGGER part AFTER INSERT ON parts BEGIN
            INSERT OR IGNORE INTO outbox_events (event_id, aggregate_type, aggregate_id, aggregate_version, event_type, schema_version, payload_json)
            VALUES (NEW.event, 'part', 'p', NEW.version, 'part.made', 1, '{}'); END",
    )
    .unwrap();
    conn.execute_batch("INSERT INTO parts VALUES (1, 'e1', 1)").unwrap();
    for how in ["INSERT", "INSERT OR IGNORE", "INSERT OR REPLACE"] {
        for values in ["(2, 'e2', 1)", "(2, 'e1', 2)", "(2, 'e2', 'many')", "(2, '', 2)"] {
            assert!(conn.execute_batch(&format!("{how} INTO parts VALUES {values}")).is_err(), "{how} {values}");
        }
    }
    let parts: i64 = conn.query_row("SELECT count(*) FROM parts", [], |r| r.get(0)).unwrap();
    assert_eq!((parts, count(&conn)), (1, 1), "no business row without its event");
}

#[test]
fn what_makes_an_event_that_event_cannot_be_changed() {
    let (_dir, conn) = fresh();
    insert(&conn, "", &good(), "").unwrap();
    for change in [
        "seq = 5",
        "event_id = 'x'",
        "aggregate_type = 'x'",
        "aggregate_id = 'x'",
        "aggregate_version = 2",
        "event_type = ''",
        "schema_version = 'x'",
        "payload_json = 'no json'",
        "headers_json = '[]'",
    ] {
        for how in ["UPDATE", "UPDATE OR IGNORE", "UPDATE OR REPLACE"] {
            let error = conn.execute_batch(&format!("{how} outbox_events SET {change}")).expect_err(change);
            assert!(error.to_string().starts_with("outboxd: "), "{how} {change}: {error}");
        }
    }
    conn.execute_batch(
        "UPDATE outbox_events SET payload_json = '{\"k\":2}', headers_json = '{\"a\":\"b\"}', event_id = event_id",
    )
    .unwrap();
}

#[test]
fn the_classic_programs_statements_work() {
    let (_dir, conn) = fresh();
    insert(&conn, "", &good(), "").unwrap();
    let due = "SELECT event_id, payload_json FROM outbox_events WHERE status = 'pending' AND available_at <= ?1 ORDER BY created_at, event_id LIMIT 1";
    let soon: String = conn.query_row("SELECT datetime('now', '+2 seconds')", [], |r| r.get(0)).unwrap();
    assert_eq!(conn.query_row(due, [&soon], |r| r.get::<_, String>(0)).unwrap(), "e1");
    let failed = "UPDATE outbox_events SET attempt_count = attempt_count + 1, available_at = datetime('now', '+1 minute'), last_error = ?1 WHERE event_id = ?2 AND status = 'pending'";
    assert_eq!(conn.execute(failed, params!["boom", "e1"]).unwrap(), 1);
    assert!(conn.query_row(due, [&soon], |_| Ok(())).is_err(), "not due now");
    let done = "UPDATE outbox_events SET status = 'published', attempt_count = attempt_count + 1, published_at = CURRENT_TIMESTAMP, last_error = NULL WHERE event_id = ?1 AND status = 'pending'";
    assert_eq!(conn.execute(done, ["e1"]).unwrap(), 1);
    let once = "INSERT INTO processed_events (event_id) VALUES ('x') ON CONFLICT (event_id) DO NOTHING";
    assert_eq!((conn.execute(once, []).unwrap(), conn.execute(once, []).unwrap()), (1, 0));
}

#[test]
fn changes_behind_the_read_position_leave_a_mark() {
    let (_dir, conn) = fresh();
    let marks = || -> i64 {
        let n = conn
            .query_row(
                "SELECT count(*) FROM outboxd_touched WHERE aggregate_type = 'asset' AND aggregate_id = 'a'",
                [],
                |r| r.get(0),
            )
            .unwrap();
        conn.execute_batch("DELETE FROM outboxd_touched").unwrap();
        n
    };
    insert(&conn, "", &good(), "").unwrap();
    assert_eq!(marks(), 0, "an insert is in front of it");
    for (change, wanted) in [
        ("UPDATE outbox_events SET available_at = '2099-01-01 00:00:00'", 1),
        ("UPDATE outbox_events SET attempt_count = 1", 0),
        ("UPDATE outbox_events SET status = 'failed', last_error = 'x'", 0),
        ("UPDATE outbox_events SET status = 'pending'", 1),
        ("UPDATE outbox_events SET status = 'published', stream_seq = 1", 0),
        ("UPDATE outbox_events SET status = 'pending'", 1),
        ("UPDATE outbox_events SET status = 'failed'", 0),
        ("UPDATE outbox_events SET status = 'published'", 1),
        ("DELETE FROM outbox_events", 0),
    ] {
        conn.execute_batch(change).unwrap();
        assert_eq!(marks(), wanted, "{change}");
    }
    insert(&conn, "", &good(), "").unwrap();
    conn.execute_batch("DELETE FROM outbox_events").unwrap();
    assert_eq!(marks(), 1, "a pending one deleted");
}

/// Statements in plain SQL with what they must end in; played with every library at hand.
const SCRIPT: [(&str, bool); 9] = [
    (
        "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, aggregate_version, event_type, schema_version, payload_json) VALUES ('s1','asset','s',1,'asset.made',1,'{}')",
        true,
    ),
    (
        "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, aggregate_version, event_type, schema_version, payload_json) VALUES ('s1','asset','s',1,'asset.made',1,'{}')",
        true,
    ),
    (
        "INSERT OR IGNORE INTO outbox_events (event_id, aggregate_type, aggregate_id, aggregate_version, event_type, schema_version, payload_json) VALUES ('s2','asset','s',1,'asset.made',1,'{}')",
        false,
    ),
    (
        "INSERT OR REPLACE INTO outbox_events (event_id, aggregate_type, aggregate_id, aggregate_version, event_type, schema_version, payload_json) VALUES ('s1','asset','s',2,'asset.made',1,'{}')",
        false,
    ),
    (
        "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, aggregate_version, event_type, schema_version, payload_json) VALUES ('s3','asset','s',1.5,'asset.made',1,'{}')",
        false,
    ),
    (
        "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, aggregate_version, event_type, schema_version, payload_json) VALUES ('s3','asset','s',2,'asset.made',1,'{no')",
        false,
    ),
    (
        "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, aggregate_version, event_type, schema_version, payload_json, headers_json, available_at) VALUES ('s4','asset','s',2,'asset.made',1,x'7b7d','{\"traceparent\":\"x\"}','2026-01-01T00:00Z')",
        true,
    ),
    (
        "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, aggregate_version, event_type, schema_version, payload_json, available_at) VALUES ('s5','asset','s',3,'asset.made',1,'{}','2026-02-30 00:00')",
        false,
    ),
    ("UPDATE outbox_events SET seq = 9 WHERE event_id = 's1'", false),
];

fn played(path: &Path, who: &str) {
    let conn = Connection::open(path).unwrap();
    let found: String = conn
        .query_row("SELECT group_concat(event_id) FROM (SELECT event_id FROM outbox_events ORDER BY seq)", [], |r| {
            r.get(0)
        })
        .unwrap();
    assert_eq!(found, "s1,s4", "{who}");
    assert_eq!(conn.query_row("PRAGMA integrity_check", [], |r| r.get::<_, String>(0)).unwrap(), "ok", "{who}");
}

#[test]
fn the_schema_works_with_the_systems_sqlite_program() {
    let Ok(version) = Command::new("sqlite3").arg("--version").output() else {
        eprintln!("the program sqlite3 is not installed; the same library is played through Python");
        return;
    };
    let (dir, conn) = fresh();
    drop(conn);
    let path = dir.path().join("app.db");
    for (sql, passes) in SCRIPT {
        let run = Command::new("sqlite3").arg("-bail").arg(&path).arg(sql).output().unwrap();
        assert_eq!(run.status.success(), passes, "{sql}: {}", String::from_utf8_lossy(&run.stderr));
    }
    played(&path, &String::from_utf8_lossy(&version.stdout));

    // and it makes the same schema from the text that `db schema` prints
    let made = dir.path().join("made.db");
    let mut child =
        Command::new("sqlite3").arg("-bail").arg(&made).stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(schema::script().as_bytes()).unwrap();
    assert!(child.wait().unwrap().success());
    let conn = Connection::open(&made).unwrap();
    assert_eq!(schema::inspect(&conn).unwrap(), schema::Layout::Ours { version: ddl::VERSION });
    assert_eq!(schema::differences(&conn).unwrap(), [] as [String; 0]);
}

#[test]
fn the_schema_works_with_pythons_sqlite() {
    const PLAY: &str = "
import json, sqlite3, sys
c = sqlite3.connect(sys.argv[1], isolation_level=None)
for sql, passes in json.load(sys.stdin):
    try:
        c.execute(sql)
        assert passes, 'took ' + sql
    except sqlite3.IntegrityError as e:
        assert not passes, sql + ': ' + str(e)
";
    let (dir, conn) = fresh();
    drop(conn);
    let path = dir.path().join("app.db");
    let mut child = Command::new("python3").args(["-c", PLAY]).arg(&path).stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(serde_json::to_string(&SCRIPT).unwrap().as_bytes()).unwrap();
    assert!(child.wait().unwrap().success());
    played(&path, "python");

    // and it makes the same schema from the text that `db schema` prints
    let made = dir.path().join("made.db");
    let play =
        "import sqlite3, sys; sqlite3.connect(sys.argv[1], isolation_level=None).executescript(sys.stdin.read())";
    let mut child = Command::new("python3").args(["-c", play]).arg(&made).stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(schema::script().as_bytes()).unwrap();
    assert!(child.wait().unwrap().success());
    let conn = Connection::open(&made).unwrap();
    assert_eq!(schema::inspect(&conn).unwrap(), schema::Layout::Ours { version: ddl::VERSION });
    assert_eq!(schema::differences(&conn).unwrap(), [] as [String; 0]);
}

#[test]
fn the_ddl_has_nothing_that_sqlite_3_35_cannot_read() {
    let script = schema::script().to_lowercase();
    for newer in [
        " strict",
        "subsec",
        "jsonb",
        "unixepoch",
        "->",
        "iif(",
        "format(",
        "unistr",
        "concat(",
        " is not distinct",
        "string_agg",
        "returning",
    ] {
        assert!(!script.contains(newer), "{newer} is newer than SQLite 3.35");
    }
    // json_valid had one argument, RAISE takes a literal only
    for (at, _) in script.match_indices("raise(abort,") {
        let rest = script[at + "raise(abort,".len()..].trim_start();
        let literal = rest.strip_prefix('\'').unwrap_or_else(|| panic!("no literal: {}", &rest[..40]));
        let mut end = 0;
        while let Some(quote) = literal[end..].find('\'') {
            end += quote + 1;
            if !literal[end..].starts_with('\'') {
                break;
            }
            end += 1;
        }
        assert!(literal[end..].starts_with(')'), "more than a literal in RAISE: {}", &rest[..80]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// The guard and the parser that the relay uses read the same times.
    #[test]
    fn the_guard_takes_exactly_the_times_that_can_be_read(
        form in prop_oneof![
            "[0-9]{4}-[01][0-9]-[0-3][0-9][ T][0-2][0-9]:[0-6][0-9](:[0-6][0-9](\\.[0-9]{0,4})?)?(Z|z|[+-][01][0-9]:[0-6][0-9]|)",
            "[0-9TZ:. +-]{0,26}",
            "20[0-9]{2}-0[1-9]-[0-2][1-9] [01][0-9]:[0-5][0-9][^\\x00]{0,4}",
        ]
    ) {
        thread_local! {
            static FILE: (tempfile::TempDir, Connection) = fresh();
        }
        FILE.with(|(_, conn)| {
            conn.execute_batch("DELETE FROM outbox_events").unwrap();
            let taken = insert(conn, "", &with("available_at", Value::Text(form.clone())), "").is_ok();
            prop_assert_eq!(taken, time::parse(&form).is_some(), "{:?}", form);
            Ok(())
        })?;
    }
}
