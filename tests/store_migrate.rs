//! `db migrate` on classic files of many kinds: rows kept, order kept, what depends on the outbox kept, all or nothing.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use outboxd::store::error::StoreError;
use outboxd::store::migrate::{self, MigrateOptions, Migration};
use outboxd::store::schema::{self, Layout};
use proptest::prelude::*;
use rusqlite::{Connection, params};

const CLASSIC: &str = "
CREATE TABLE outbox_events (
    event_id          TEXT PRIMARY KEY NOT NULL,
    aggregate_type    TEXT NOT NULL,
    aggregate_id      TEXT NOT NULL,
    aggregate_version INTEGER NOT NULL CHECK (aggregate_version > 0),
    event_type        TEXT NOT NULL,
    schema_version    INTEGER NOT NULL CHECK (schema_version > 0),
    payload_json      TEXT NOT NULL,
    status            TEXT NOT NULL DEFAULT 'pending' CHECK (status IN ('pending', 'published', 'failed')),
    attempt_count     INTEGER NOT NULL DEFAULT 0,
    available_at      TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP,
    created_at        TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP,
    published_at      TEXT,
    last_error        TEXT,
    UNIQUE (aggregate_type, aggregate_id, aggregate_version)
);
CREATE INDEX idx_outbox_delivery ON outbox_events (status, available_at, created_at);
CREATE TABLE processed_events (event_id TEXT PRIMARY KEY NOT NULL, processed_at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP);
";

const INSERT: &str = "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, aggregate_version, event_type,
    schema_version, payload_json) VALUES (?1, 'asset', ?2, ?3, 'asset.updated', 1, ?4)";

struct Old {
    _dir: tempfile::TempDir,
    path: PathBuf,
    conn: Connection,
}

/// A classic file in the rollback-journal mode that Python's sqlite3 makes.
fn old(more: &str) -> Old {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("app.db");
    let conn = Connection::open(&path).unwrap();
    conn.execute_batch("PRAGMA foreign_keys = OFF").unwrap();
    conn.execute_batch(CLASSIC).unwrap();
    conn.execute_batch(more).unwrap();
    Old { _dir: dir, path, conn }
}

impl Old {
    fn insert(&self, id: &str, aggregate: &str, version: i64) {
        self.conn.execute(INSERT, params![id, aggregate, version, format!("{{\"event_id\":\"{id}\"}}")]).unwrap();
    }

    fn run(&self, sql: &str) {
        self.conn.execute_batch(sql).unwrap();
    }

    fn migrate(self) -> (New, Migration) {
        self.migrate_with(&MigrateOptions::default())
    }

    fn migrate_with(self, options: &MigrateOptions) -> (New, Migration) {
        let Old { _dir, path, conn } = self;
        drop(conn);
        let migration = migrate::migrate(&path, options).unwrap();
        let conn = Connection::open(&path).unwrap();
        assert_eq!(text(&conn, "PRAGMA integrity_check"), "ok");
        (New { _dir, path, conn }, migration)
    }

    /// Expects a refusal that contains `why`, and the file byte for byte as it was.
    fn refused(self, why: &str) {
        let Old { _dir, path, conn } = self;
        drop(conn);
        let before = std::fs::read(&path).unwrap();
        let error = migrate::migrate(&path, &MigrateOptions::default()).unwrap_err();
        assert!(matches!(&error, StoreError::Refused(text) if text.contains(why)), "{error:?}");
        let dry = migrate::examine(&path, &MigrateOptions::default()).unwrap_err();
        assert!(dry.to_string().contains(why), "{dry}");
        assert!(before == std::fs::read(&path).unwrap(), "the file was changed by a refusal");
    }
}

struct New {
    _dir: tempfile::TempDir,
    path: PathBuf,
    conn: Connection,
}

fn text(conn: &Connection, sql: &str) -> String {
    conn.query_row(sql, [], |r| r.get::<_, String>(0)).unwrap()
}

fn number(conn: &Connection, sql: &str) -> i64 {
    conn.query_row(sql, [], |r| r.get(0)).unwrap_or_else(|e| panic!("{sql}: {e}"))
}

fn list(conn: &Connection, sql: &str) -> Vec<String> {
    let mut statement = conn.prepare(sql).unwrap();
    statement.query_map([], |r| r.get::<_, String>(0)).unwrap().map(Result::unwrap).collect()
}

#[test]
fn rows_in_every_state_are_kept() {
    let old = old("");
    for i in 1..=6 {
        old.insert(&format!("e{i}"), "a", i);
    }
    old.run(
        "UPDATE outbox_events SET status = 'published', published_at = '2026-01-01 00:00:00', attempt_count = 1 WHERE event_id = 'e1';
         UPDATE outbox_events SET status = 'failed', attempt_count = 9, last_error = 'boom' WHERE event_id = 'e2';
         UPDATE outbox_events SET attempt_count = 2, available_at = '2099-01-01 00:00:00', last_error = 'later' WHERE event_id = 'e3';
         UPDATE outbox_events SET payload_json = CAST(payload_json AS BLOB) WHERE event_id = 'e4';
         UPDATE outbox_events SET status = 'failed', last_error = NULL WHERE event_id = 'e5';
         INSERT INTO processed_events (event_id) VALUES ('x');",
    );
    let (new, migration) = old.migrate();
    let rows = list(
        &new.conn,
        "SELECT event_id || '|' || status || '|' || attempt_count || '|' || coalesce(last_error, '-') || '|' ||
            coalesce(published_at, '-') || '|' || typeof(payload_json) || '|' || coalesce(stream_seq, '-') || '|' || holds
         FROM outbox_events ORDER BY seq",
    );
    assert_eq!(
        rows,
        [
            "e1|published|1|-|2026-01-01 00:00:00|text|-|1",
            "e2|failed|9|boom|-|text|-|0",
            "e3|pending|2|later|-|text|-|1",
            "e4|pending|0|-|-|blob|-|1",
            "e5|failed|0|failed before outboxd came|-|text|-|0",
            "e6|pending|0|-|-|text|-|1",
        ]
    );
    assert_eq!(text(&new.conn, "SELECT available_at FROM outbox_events WHERE event_id = 'e3'"), "2099-01-01 00:00:00");
    assert_eq!(number(&new.conn, "SELECT count(*) FROM processed_events"), 1);
    let plan = migration.plan.unwrap();
    assert_eq!((plan.rows, plan.pending, plan.published, plan.failed, plan.held_aggregates), (6, 3, 1, 2, 1));
    assert!(migration.notes.iter().any(|n| n.contains("WAL")), "{:?}", migration.notes);
}

#[test]
fn running_it_again_is_fine() {
    let old = old("");
    old.insert("e1", "a", 1);
    let (new, _) = old.migrate();
    let again = migrate::migrate(&new.path, &MigrateOptions::default()).unwrap();
    assert_eq!(again.done, Vec::<String>::new());
    assert_eq!(again.from, Layout::Ours { version: outboxd::store::ddl::VERSION });
    assert_eq!(number(&new.conn, "SELECT count(*) FROM outbox_events"), 1);
}

#[test]
fn a_dry_run_changes_nothing_and_tells_the_same() {
    let old = old("CREATE VIEW waiting AS SELECT event_id FROM outbox_events WHERE status = 'pending';");
    for i in 1..=50 {
        old.insert(&format!("e{i}"), "a", i);
    }
    drop(old.conn);
    let before = std::fs::read(&old.path).unwrap();
    let dry = migrate::examine(&old.path, &MigrateOptions::default()).unwrap();
    let plan = dry.plan.unwrap();
    assert_eq!((plan.rows, plan.dependents.views.as_slice()), (50, ["waiting".to_owned()].as_slice()));
    assert!(plan.estimate.is_some());
    assert!(dry.done.is_empty() && dry.locked.is_none());
    assert!(before == std::fs::read(&old.path).unwrap());
}

#[test]
fn seq_follows_insertion_and_the_version_within_an_aggregate() {
    let old = old("");
    // b is inserted backwards; the places of b are 2, 3 and 5, and are taken in the order of its versions
    for (id, aggregate, version) in
        [("a1", "a", 1), ("b3", "b", 3), ("b1", "b", 1), ("a2", "a", 2), ("b2", "b", 2), ("c1", "c", 1)]
    {
        old.insert(id, aggregate, version);
    }
    let (new, migration) = old.migrate();
    assert_eq!(
        list(&new.conn, "SELECT event_id FROM outbox_events ORDER BY seq"),
        ["a1", "b1", "b2", "a2", "b3", "c1"]
    );
    assert_eq!(migration.plan.unwrap().reordered_aggregates, 1);
    // and a later insert comes behind all of them, also when the table is emptied
    new.conn.execute_batch("DELETE FROM outbox_events").unwrap();
    new.conn.execute(INSERT, params!["z", "z", 1, "{}"]).unwrap();
    assert_eq!(number(&new.conn, "SELECT seq FROM outbox_events"), 7);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Whatever the order of insertion: within an aggregate seq follows the version, and each aggregate keeps the places
    /// in the sequence that its rows had.
    #[test]
    fn any_order_of_insertion_becomes_an_order_of_versions(rows in prop::collection::vec((0u8..4, any::<u32>()), 1..40)) {
        let old = old("");
        old.run("BEGIN");
        for (i, (aggregate, key)) in rows.iter().enumerate() {
            let version = rows.iter().enumerate().filter(|(j, (a, k))| a == aggregate && (k, j) <= (key, &i)).count();
            old.insert(&format!("e{i}"), &aggregate.to_string(), version as i64);
        }
        old.run("COMMIT");
        let (new, _) = old.migrate();
        let aggregates = list(&new.conn, "SELECT aggregate_id FROM outbox_events ORDER BY seq");
        prop_assert_eq!(aggregates, rows.iter().map(|(a, _)| a.to_string()).collect::<Vec<_>>());
        prop_assert_eq!(number(&new.conn, "SELECT count(*) FROM outbox_events a JOIN outbox_events b
            ON a.aggregate_id = b.aggregate_id AND a.aggregate_version < b.aggregate_version AND a.seq > b.seq"), 0);
        prop_assert_eq!(number(&new.conn, "SELECT count(*) FROM outbox_events WHERE json_extract(payload_json, '$.event_id') <> event_id"), 0);
    }
}

#[test]
fn a_table_without_usable_rowids_is_numbered_anew() {
    let old = old("");
    old.insert("e2", "a", 2);
    old.insert("e1", "a", 1);
    old.run("UPDATE outbox_events SET rowid = rowid - 5");
    let (new, _) = old.migrate();
    assert_eq!(list(&new.conn, "SELECT event_id || seq FROM outbox_events ORDER BY seq"), ["e11", "e22"]);

    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("app.db");
    let conn = Connection::open(&path).unwrap();
    let sql = CLASSIC.replace("aggregate_version)\n);", "aggregate_version)\n) WITHOUT ROWID;");
    assert_ne!(sql, CLASSIC);
    conn.execute_batch(&sql).unwrap();
    let old = Old { _dir: dir, path, conn };
    old.insert("x2", "a", 2);
    old.insert("x1", "a", 1);
    old.insert("w", "b", 1);
    old.run("UPDATE outbox_events SET created_at = '2020-01-01 00:00:00' WHERE event_id = 'w'");
    let (new, _) = old.migrate();
    assert_eq!(list(&new.conn, "SELECT event_id || seq FROM outbox_events ORDER BY seq"), ["w1", "x12", "x23"]);
}

#[test]
fn what_depends_on_the_outbox_is_kept() {
    let old = old("
        CREATE INDEX by_type ON outbox_events (event_type, created_at);
        CREATE UNIQUE INDEX once ON outbox_events (event_id, status);
        CREATE VIEW waiting AS SELECT event_id, payload_json FROM outbox_events WHERE status = 'pending';
        CREATE TABLE log (what TEXT);
        CREATE TRIGGER own AFTER INSERT ON outbox_events BEGIN INSERT INTO log VALUES (NEW.event_id); END;
        CREATE TABLE parts (id INTEGER PRIMARY KEY, name TEXT);
        CREATE TRIGGER part_made AFTER INSERT ON parts BEGIN
            INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, aggregate_version, event_type, schema_version, payload_json)
            VALUES ('part-' || NEW.id, 'part', NEW.id, 1, 'part.made', 1, '{}'); END;
        CREATE TABLE notes (id INTEGER PRIMARY KEY, event TEXT REFERENCES outbox_events (event_id) ON DELETE CASCADE);
        CREATE TABLE tags (tag TEXT, event TEXT NOT NULL REFERENCES outbox_events ON DELETE CASCADE);
    ");
    for i in 1..=3 {
        old.insert(&format!("e{i}"), "a", i);
    }
    old.run("INSERT INTO notes (event) VALUES ('e1'), ('e2'); INSERT INTO tags VALUES ('t', 'e2'), ('u', 'e3')");
    let (new, migration) = old.migrate();
    let plan = migration.plan.unwrap();
    assert_eq!(plan.dependents.references.len(), 2);
    assert_eq!(
        (number(&new.conn, "SELECT count(*) FROM notes"), number(&new.conn, "SELECT count(*) FROM tags")),
        (2, 2)
    );
    assert_eq!(number(&new.conn, "SELECT count(*) FROM waiting"), 3);
    assert!(
        !text(&new.conn, "SELECT sql FROM sqlite_master WHERE name = 'idx_outbox_delivery'").contains("available_at")
    );
    for name in ["by_type", "once", "own", "part_made"] {
        assert_eq!(
            number(&new.conn, &format!("SELECT count(*) FROM sqlite_master WHERE name = '{name}'")),
            1,
            "{name}"
        );
    }
    // everything works, with foreign keys on
    new.conn.execute_batch("PRAGMA foreign_keys = ON").unwrap();
    assert_eq!(number(&new.conn, "SELECT count(*) FROM pragma_foreign_key_check"), 0);
    new.conn.execute_batch("INSERT INTO parts (name) VALUES ('pump')").unwrap();
    assert_eq!(text(&new.conn, "SELECT max(what) FROM log"), "part-1");
    new.conn.execute_batch("INSERT INTO tags VALUES ('v', 'e1')").unwrap();
    assert!(new.conn.execute_batch("INSERT INTO tags VALUES ('v', 'nobody')").is_err(), "the reference is enforced");
    new.conn.execute_batch("DELETE FROM outbox_events WHERE event_id = 'e2'").unwrap();
    assert_eq!(
        (number(&new.conn, "SELECT count(*) FROM notes"), number(&new.conn, "SELECT count(*) FROM tags")),
        (1, 2)
    );
    // the classic program's statement at start changes nothing
    new.conn
        .execute_batch(
            "CREATE INDEX IF NOT EXISTS idx_outbox_delivery ON outbox_events (status, available_at, created_at)",
        )
        .unwrap();
}

#[test]
fn an_object_that_was_broken_before_does_not_stand_in_the_way() {
    let old = old("CREATE TABLE gone (a); CREATE VIEW broken AS SELECT a FROM gone, outbox_events;
        CREATE TRIGGER odd AFTER UPDATE ON outbox_events BEGIN SELECT no_such_function(NEW.event_id); END;
        DROP TABLE gone;");
    old.insert("e1", "a", 1);
    let (new, _) = old.migrate();
    assert_eq!(number(&new.conn, "SELECT count(*) FROM sqlite_master WHERE name IN ('broken', 'odd')"), 2);
}

#[test]
fn columns_and_keys_of_the_application_are_kept() {
    let old = old("CREATE TABLE tenants (id TEXT PRIMARY KEY); INSERT INTO tenants VALUES ('t1');
        ALTER TABLE outbox_events ADD COLUMN \"tenant id\" TEXT REFERENCES tenants (id) ON DELETE CASCADE;
        ALTER TABLE outbox_events ADD COLUMN weight INTEGER NOT NULL DEFAULT 7;
        ALTER TABLE outbox_events ADD COLUMN headers_json TEXT;");
    old.insert("e1", "a", 1);
    old.insert("e2", "a", 2);
    old.run(
        "UPDATE outbox_events SET \"tenant id\" = 't1', headers_json = '{\"k\":\"v\"}' WHERE event_id = 'e1';
        UPDATE outbox_events SET weight = 8, headers_json = 'no json' WHERE event_id = 'e2';",
    );
    let (new, _) = old.migrate();
    assert_eq!(
        list(
            &new.conn,
            "SELECT coalesce(\"tenant id\", '-') || weight || coalesce(headers_json, '-') FROM outbox_events ORDER BY seq"
        ),
        ["t17{\"k\":\"v\"}", "-8-"]
    );
    new.conn.execute(INSERT, params!["e3", "a", 3, "{}"]).unwrap();
    assert_eq!(number(&new.conn, "SELECT weight FROM outbox_events WHERE event_id = 'e3'"), 7);
    new.conn.execute_batch("PRAGMA foreign_keys = ON; DELETE FROM tenants").unwrap();
    assert_eq!(list(&new.conn, "SELECT event_id FROM outbox_events"), ["e2", "e3"]);
}

#[test]
fn odd_times_keep_their_instant_and_unreadable_ones_are_reported() {
    let old = old("");
    for (i, (created, available)) in [
        ("2026-01-02 03:04:05", "2026-01-02 03:04:05"),
        ("2026-01-02T03:04:05Z", "2020-01-01T00:00:00Z"),
        ("2026-01-02T03:04:05.678+01:00", "2099-01-02T03:04:05+01:00"),
        ("1767323045", "1767323045000"),
        ("yesterday", "2026-01-02 03:04:05"),
        ("2026-01-02 03:04:05", "soon"),
    ]
    .into_iter()
    .enumerate()
    {
        old.insert(&format!("e{i}"), "a", i as i64 + 1);
        old.conn
            .execute(
                "UPDATE outbox_events SET created_at = ?1, available_at = ?2 WHERE event_id = ?3",
                params![created, available, format!("e{i}")],
            )
            .unwrap();
    }
    let (new, migration) = old.migrate();
    assert_eq!(
        list(&new.conn, "SELECT created_at || ' / ' || available_at FROM outbox_events ORDER BY seq"),
        [
            "2026-01-02 03:04:05 / 2026-01-02 03:04:05",
            "2026-01-02 03:04:05.000 / 2020-01-01 00:00:00.000",
            "2026-01-02 02:04:05.678 / 2099-01-02 02:04:05.000",
            "2026-01-02 03:04:05.000 / 2026-01-02 03:04:05.000",
            "2026-01-02 03:04:05 / 2026-01-02 03:04:05",
            "2026-01-02 03:04:05 / 2026-01-02 03:04:05",
        ]
    );
    let plan = migration.plan.unwrap();
    assert_eq!((plan.times_rewritten, plan.times_unreadable, plan.odd.len()), (3, 2, 5));
    assert!(plan.odd.iter().any(|(id, what)| id == "e5" && what.contains("'soon' cannot be read")), "{:?}", plan.odd);
}

#[test]
fn rows_that_can_never_be_published_are_failed_with_the_reason() {
    let old = old("");
    old.insert("", "a", 1);
    old.insert("e2", "", 1);
    old.insert("e3", "a", 3);
    old.insert("e4", "a", 4);
    old.insert("e5", "a", 5);
    old.run(
        "UPDATE outbox_events SET aggregate_version = 'many' WHERE event_id = 'e3';
        UPDATE outbox_events SET payload_json = 'no json' WHERE event_id = 'e4'",
    );
    let (new, migration) = old.migrate();
    let plan = migration.plan.unwrap();
    assert_eq!((plan.withdrawn, plan.not_json), (3, 1));
    assert_eq!(
        number(
            &new.conn,
            "SELECT count(*) FROM outbox_events WHERE status = 'failed' AND holds = 0 AND last_error <> ''"
        ),
        3
    );
    assert_eq!(
        text(&new.conn, "SELECT status || payload_json FROM outbox_events WHERE event_id = 'e4'"),
        "pendingno json"
    );
}

#[test]
fn old_failed_rows_hold_when_asked() {
    let old = old("");
    old.insert("e1", "a", 1);
    old.insert("e2", "a", 2);
    old.run("UPDATE outbox_events SET status = 'failed' WHERE event_id = 'e1'");
    let (new, migration) = old.migrate_with(&MigrateOptions { failed_hold: true, ..MigrateOptions::default() });
    assert_eq!(number(&new.conn, "SELECT holds FROM outbox_events WHERE event_id = 'e1'"), 1);
    assert!(migration.done.iter().any(|d| d.contains("1 aggregates are held")), "{:?}", migration.done);
}

#[test]
fn a_refusal_leaves_the_file_as_it_was() {
    old("ALTER TABLE outbox_events ADD COLUMN seq INTEGER").refused("a column seq of its own");
    old("CREATE TABLE outboxd_leases (a)").refused("outboxd_leases is in the way");
    old("CREATE TABLE inbox_events (a)").refused("inbox_events is in the way");
    old("DROP TABLE processed_events; CREATE TABLE processed_events (id)").refused("processed_events of another kind");
    old("ALTER TABLE outbox_events ADD COLUMN twice AS (schema_version * 2)").refused("generated");
    let sent = old("PRAGMA ignore_check_constraints = ON");
    sent.insert("e1", "a", 1);
    sent.run("UPDATE outbox_events SET status = 'sent'");
    sent.refused("status other than");
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("app.db");
    let conn = Connection::open(&path).unwrap();
    conn.execute_batch(
        &CLASSIC
            .replace("UNIQUE (", "CHECK (1 OR (")
            .replace("aggregate_version)\n", "aggregate_version) IS NULL)\n")
            .replace("(1 OR (aggregate_type, aggregate_id, aggregate_version)", "(1 OR (1, 2, 3)")
            .replace("(1, 2, 3) IS NULL", "1"),
    )
    .unwrap();
    let loose = Old { _dir: dir, path, conn };
    loose.insert("e1", "a", 1);
    loose.insert("e2", "a", 1);
    loose.refused("more than once");
}

#[test]
fn another_table_of_that_name_and_a_newer_file_are_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("app.db");
    let conn = Connection::open(&path).unwrap();
    conn.execute_batch("CREATE TABLE outbox_events (id INTEGER PRIMARY KEY, body)").unwrap();
    let error = migrate::migrate(&path, &MigrateOptions::default()).unwrap_err();
    assert!(matches!(error, StoreError::Foreign { .. }), "{error:?}");
    conn.execute_batch("DROP TABLE outbox_events").unwrap();
    assert!(matches!(migrate::migrate(&path, &MigrateOptions::default()), Err(StoreError::NoTables { .. })));
    drop(conn);
    schema::init(&path, "s", false).unwrap();
    Connection::open(&path)
        .unwrap()
        .execute_batch("UPDATE outboxd_meta SET value = 99 WHERE key = 'schema_version'")
        .unwrap();
    assert!(matches!(migrate::migrate(&path, &MigrateOptions::default()), Err(StoreError::Newer { found: 99, .. })));
    let missing = migrate::migrate(&dir.path().join("no.db"), &MigrateOptions::default()).unwrap_err();
    assert!(matches!(missing, StoreError::NoFile { .. }), "{missing:?}");
}

#[test]
fn debezium_applications_write_through_the_view() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("app.db");
    schema::init(&path, "s", false).unwrap();
    let options = MigrateOptions { debezium: true, ..MigrateOptions::default() };
    assert_eq!(migrate::migrate(&path, &options).unwrap().done.len(), 1);
    assert_eq!(migrate::migrate(&path, &options).unwrap().done.len(), 0, "again is fine");
    let conn = Connection::open(&path).unwrap();
    let put = |id: &str, aggregate: &str, payload: &str| {
        conn.execute("INSERT INTO outbox (id, aggregatetype, aggregateid, type, payload) VALUES (?1, 'order', ?2, 'OrderCreated', ?3)", [id, aggregate, payload])
            .and_then(|_| conn.execute("DELETE FROM outbox WHERE id = ?1", [id]))
    };
    for (id, aggregate) in [("1", "a"), ("2", "a"), ("3", "b"), ("2", "a")] {
        put(id, aggregate, "{}").unwrap();
    }
    assert!(put("2", "a", "{\"other\":1}").unwrap_err().to_string().contains("different event"));
    assert!(put("9", "a", "no json").is_err());
    let rows = || list(&conn, "SELECT event_id || aggregate_id || aggregate_version FROM outbox_events ORDER BY seq");
    assert_eq!(rows(), ["1a1", "2a2", "3b1"]);
    // versions go on after a purge
    conn.execute_batch("DELETE FROM outbox_events").unwrap();
    put("4", "a", "{}").unwrap();
    assert_eq!(rows(), ["4a3"]);

    let other = dir.path().join("other.db");
    schema::init(&other, "s", false).unwrap();
    Connection::open(&other).unwrap().execute_batch("CREATE TABLE outbox (id)").unwrap();
    let error = migrate::migrate(&other, &options).unwrap_err();
    assert!(error.to_string().contains("a table named outbox already"), "{error}");
}

const CHILD: &str = "OUTBOXD_TEST_MIGRATE_CHILD";

/// Not a test of its own: the process that is killed by the next one.
#[test]
fn child_that_migrates() {
    if let Ok(path) = std::env::var(CHILD) {
        migrate::migrate(Path::new(&path), &MigrateOptions::default()).unwrap();
    }
}

#[test]
fn a_kill_in_the_middle_leaves_a_file_in_wal_mode_as_it_was() {
    kill_in_the_middle("WAL");
}

#[test]
fn a_kill_in_the_middle_leaves_a_file_with_a_rollback_journal_as_it_was() {
    kill_in_the_middle("DELETE");
}

fn kill_in_the_middle(mode: &str) {
    let old = old(&format!("PRAGMA journal_mode = {mode};"));
    old.run("WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 100000)
        INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, aggregate_version, event_type, schema_version, payload_json)
        SELECT 'e' || i, 'asset', i % 100, i, 'asset.updated', 1, json_object('i', i, 'fill', hex(zeroblob(200))) FROM n");
    let Old { _dir, path, conn } = old;
    let sum = "SELECT count(*) || '/' || sum(length(payload_json)) FROM outbox_events";
    let before = text(&conn, sum);
    drop(conn);
    let bytes = || {
        let of = |p: &Path| std::fs::metadata(p).map_or(0, |m| m.len());
        of(&path) + of(&path.with_file_name("app.db-wal"))
    };
    let small = bytes();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child_that_migrates", "--nocapture"])
        .env(CHILD, &path)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let began = Instant::now();
    // the new table is being written, and not yet committed: that comes with its last page
    let written = loop {
        let written = bytes() - small;
        if written > 20_000_000 {
            break written;
        }
        assert!(child.try_wait().unwrap().is_none(), "the child ended before it was killed, it wrote {written} bytes");
        assert!(began.elapsed() < Duration::from_secs(120), "it wrote only {written} bytes");
        std::thread::yield_now();
    };
    child.kill().unwrap();
    let status = child.wait().unwrap();
    assert!(!status.success(), "it was killed after {written} bytes, and yet ended with {status}");
    // also for a reader, who has to roll the other's half transaction back first
    let dry = migrate::examine(&path, &MigrateOptions::default()).unwrap();
    assert_eq!(dry.plan.unwrap().rows, 100_000);
    let conn = Connection::open(&path).unwrap();
    assert_eq!(schema::inspect(&conn).unwrap(), Layout::Classic);
    assert_eq!(text(&conn, sum), before);
    assert_eq!(text(&conn, "PRAGMA integrity_check"), "ok");
    drop(conn);
    migrate::migrate(&path, &MigrateOptions::default()).unwrap();
    assert_eq!(text(&Connection::open(&path).unwrap(), sum), before);
}
