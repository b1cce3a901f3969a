//! What an operator sees and changes: counts, lists, retry, discard, replay, pause, retention, check, backup, uninstall.

use std::cell::Cell;
use std::path::PathBuf;

use outboxd::store::connection::{self, Access, Settings};
use outboxd::store::error::{Result, StoreError};
use outboxd::store::report::{self, Filter};
use outboxd::store::retention::{self, Class};
use outboxd::store::upkeep::{self, Level};
use outboxd::store::{audit, lease, migrate, operate, schema, time};
use rusqlite::{Connection, Transaction, TransactionBehavior, params};

/// 2026-10-07 01:20:00 UTC.
const NOW: i64 = 1_791_336_000_000;

struct File {
    dir: tempfile::TempDir,
    path: PathBuf,
    conn: Connection,
}

fn fresh() -> File {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("app.db");
    schema::init(&path, "test", false).unwrap();
    let conn = connection::open(&path, Access::Write, &Settings::default()).unwrap().conn;
    File { dir, path, conn }
}

impl File {
    /// An event of `aggregate` at a version, created `age` seconds before [`NOW`].
    fn event(&self, id: &str, aggregate: &str, version: i64, age: i64) {
        let at = time::text(NOW - age * 1_000);
        self.conn
            .execute(
                "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, aggregate_version, event_type,
                    schema_version, payload_json, created_at, available_at) VALUES (?1, 'asset', ?2, ?3, 'asset.made', 1, ?4, ?5, ?5)",
                params![id, aggregate, version, format!("{{\"id\":\"{id}\"}}"), at],
            )
            .unwrap();
    }

    fn run(&self, sql: &str) {
        self.conn.execute_batch(sql).unwrap();
    }

    fn fail(&self, id: &str) {
        self.run(&format!("UPDATE outbox_events SET status = 'failed', last_error = 'boom', attempt_count = 10, failing_since = 5 WHERE event_id = '{id}'"));
    }

    fn publish(&self, id: &str, seq: i64) {
        let at = time::text(NOW - 1_000);
        self.run(&format!(
            "UPDATE outbox_events SET status = 'published', stream = 'EVENTS', stream_seq = {seq}, published_at = '{at}' WHERE event_id = '{id}'"
        ));
    }

    fn write<T>(&mut self, job: impl FnOnce(&Transaction<'_>) -> Result<T>) -> Result<T> {
        let tx = self.conn.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
        let answer = job(&tx)?;
        tx.commit().unwrap();
        Ok(answer)
    }

    fn text(&self, sql: &str) -> String {
        self.conn.query_row(sql, [], |r| r.get(0)).unwrap_or_else(|e| panic!("{sql}: {e}"))
    }

    fn number(&self, sql: &str) -> i64 {
        self.conn.query_row(sql, [], |r| r.get(0)).unwrap_or_else(|e| panic!("{sql}: {e}"))
    }
}

fn ids(ids: &[&str]) -> Vec<String> {
    ids.iter().map(|s| (*s).to_owned()).collect()
}

#[test]
fn counts_are_those_of_the_rows() {
    let file = fresh();
    assert_eq!(
        report::counts(&file.conn, NOW).unwrap(),
        report::Counts { source: "test".into(), ..Default::default() }
    );
    for (id, aggregate, version, age) in
        [("a1", "a", 1, 90), ("a2", "a", 2, 80), ("b1", "b", 1, 70), ("c1", "c", 1, 60), ("d1", "d", 1, 50)]
    {
        file.event(id, aggregate, version, age);
    }
    file.fail("a1");
    file.fail("c1");
    file.publish("d1", 1);
    file.run(&format!(
        "INSERT INTO outboxd_leases (epoch, publisher, leased_at, expires_at, seqs) VALUES (1, 0, 0, {}, '2-3'), (1, 1, 0, {}, '4')",
        NOW + 1,
        NOW
    ));
    file.run("INSERT INTO outboxd_inbox_position (durable, stream, stream_created, settled_seq, processed, duplicates) VALUES ('x', 's', 'c', 1, 5, 2), ('y', 's', 'c', 1, 3, 0);
        INSERT INTO inbox_events (subject, payload, state) VALUES ('s', 'p', 'dead'), ('s', 'p', 'stored'), ('s', 'p', 'done')");
    let counts = report::counts(&file.conn, NOW).unwrap();
    assert_eq!((counts.pending, counts.failed, counts.leased), (2, 2, 2));
    assert_eq!(counts.held_aggregates, 1, "c has nothing behind its failed event");
    assert_eq!(counts.oldest_pending_age_seconds, 80.0);
    assert_eq!((counts.inbox_processed, counts.inbox_duplicates, counts.inbox_dead, counts.inbox_stored), (8, 2, 1, 1));
    assert_eq!(report::published(&file.conn).unwrap(), 1);
    file.run("UPDATE outbox_events SET holds = 0");
    assert_eq!(report::counts(&file.conn, NOW).unwrap().held_aggregates, 0);
}

#[test]
fn the_oldest_age_is_that_of_an_event_that_is_due() {
    let file = fresh();
    let age = || report::counts(&file.conn, NOW).unwrap().oldest_pending_age_seconds;
    let at = |seconds: i64| time::text(NOW + seconds * 1_000);
    file.event("later", "a", 1, 500);
    file.run(&format!("UPDATE outbox_events SET available_at = '{}'", at(3600)));
    assert_eq!(age(), 0.0, "scheduled for later");
    file.event("retried", "b", 1, 400);
    file.run(&format!("UPDATE outbox_events SET available_at = '{}' WHERE event_id = 'retried'", at(-10)));
    assert_eq!(age(), 10.0, "due since its retry time");
    file.event("plain", "c", 1, 30);
    assert_eq!(age(), 30.0);
    file.run("UPDATE outbox_events SET available_at = '2026-10-07T03:19:40+02:00' WHERE event_id = 'later'");
    assert_eq!(age(), 30.0);
    file.run("UPDATE outbox_events SET available_at = '2026-10-07T03:19:20+02:00' WHERE event_id = 'later'");
    assert_eq!(age(), 40.0, "an instant with an offset");
    file.run("UPDATE outbox_events SET available_at = 'soon', created_at = 'once' WHERE event_id = 'later'");
    assert!(age() > 1e9, "a time that cannot be read is long past");
}

#[test]
fn many_scheduled_events_at_the_head_do_not_hide_the_one_that_is_due() {
    let file = fresh();
    file.run("WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 12000)
        INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, aggregate_version, event_type, schema_version, payload_json, available_at)
        SELECT 'e' || i, 'asset', 'a' || i, 1, 'asset.made', 1, '{}', '2099-01-01 00:00:00' FROM n");
    file.event("due", "z", 1, 25);
    assert_eq!(report::counts(&file.conn, NOW).unwrap().oldest_pending_age_seconds, 25.0);
}

#[test]
fn lists_are_narrowed_by_every_filter() {
    let file = fresh();
    for (id, aggregate, version, age) in
        [("a1", "a", 1, 90), ("a2", "a", 2, 80), ("b1", "b", 1, 70), ("c1", "c", 1, 60)]
    {
        file.event(id, aggregate, version, age);
    }
    file.fail("a1");
    file.publish("c1", 7);
    file.run("UPDATE outbox_events SET event_type = 'asset.lost' WHERE event_id = 'b1'");
    let list = |filter: Filter, limit| -> Vec<String> {
        report::list(&file.conn, &filter, limit).unwrap().into_iter().map(|l| l.event_id).collect()
    };
    let status = |s: &str| Filter { status: Some(s.into()), ..Filter::default() };
    assert_eq!(list(Filter::default(), 9), ["c1", "b1", "a2", "a1"]);
    assert_eq!(list(Filter::default(), 2), ["c1", "b1"]);
    assert_eq!(list(status("pending"), 9), ["a2", "b1"]);
    assert_eq!(list(status("failed"), 9), ["a1"]);
    assert_eq!(list(status("published"), 9), ["c1"]);
    assert_eq!(list(Filter { aggregate: Some(("asset".into(), "a".into())), ..Filter::default() }, 9), ["a2", "a1"]);
    assert_eq!(list(Filter { event_type: Some("asset.lost".into()), ..Filter::default() }, 9), ["b1"]);
    assert_eq!(list(Filter { created_before: Some(NOW - 75_000), ..Filter::default() }, 9), ["a2", "a1"]);
    assert_eq!(
        list(Filter { status: Some("pending".into()), event_type: Some("asset.lost".into()), ..Filter::default() }, 9),
        ["b1"]
    );
}

#[test]
fn an_event_is_shown_whole_with_its_lease() {
    let file = fresh();
    file.event("a1", "a", 1, 90);
    assert_eq!(report::show(&file.conn, "nobody", NOW).unwrap(), None);
    let event = report::show(&file.conn, "a1", NOW).unwrap().unwrap();
    assert_eq!(
        (event.payload_json.as_str(), event.payload_is_blob, event.lease, event.crashes),
        ("{\"id\":\"a1\"}", false, None, 0)
    );
    file.run(&format!(
        "INSERT INTO outboxd_leases (epoch, publisher, leased_at, expires_at, seqs) VALUES (1, 0, 0, {}, '1-3');
         INSERT INTO outboxd_suspects (seq, crashes) VALUES (1, 2)",
        NOW + 1_000
    ));
    file.fail("a1");
    let event = report::show(&file.conn, "a1", NOW).unwrap().unwrap();
    assert_eq!(
        (event.lease, event.lease_expires_at.as_deref(), event.crashes),
        (Some(1), Some("2026-10-07 01:20:01.000"), 2)
    );
    assert_eq!(
        (event.line.last_error.as_deref(), event.failing_since.as_deref()),
        (Some("boom"), Some("1970-01-01 00:00:00.005"))
    );
}

#[test]
fn a_retry_gives_a_clean_start_and_leaves_a_trace() {
    let mut file = fresh();
    file.event("a1", "a", 1, 90);
    file.event("a2", "a", 2, 80);
    file.fail("a1");
    file.run("UPDATE outbox_events SET available_at = '2099-01-01 00:00:00', holds = 0 WHERE event_id = 'a1'");
    let dry = operate::would_retry(&file.conn, &ids(&["a1", "a1"])).unwrap();
    assert_eq!((dry.done.len(), file.number("SELECT count(*) FROM outboxd_audit")), (1, 0));
    assert_eq!(file.text("SELECT status FROM outbox_events WHERE event_id = 'a1'"), "failed");
    let changed = file.write(|tx| operate::retry(tx, "ann", &ids(&["a1", "a2", "a9"]))).unwrap();
    assert_eq!(changed.done, ["a1"]);
    assert_eq!(
        changed.left.iter().map(|(id, why)| format!("{id}: {why}")).collect::<Vec<_>>(),
        ["a2: it is pending, not failed", "a9: there is no such event"]
    );
    let clean = "SELECT count(*) FROM outbox_events WHERE event_id = 'a1' AND status = 'pending' AND attempt_count = 0
        AND available_at = created_at AND failing_since IS NULL AND last_error IS NULL AND holds = 1";
    assert_eq!(file.number(clean), 1);
    let trace = audit::list(&file.conn, 9).unwrap();
    assert_eq!(
        (trace.len(), trace[0].actor.as_str(), trace[0].verb.as_str(), trace[0].target.as_str()),
        (1, "ann", "events retry", "a1")
    );
    assert_eq!(file.number("SELECT count(*) FROM outboxd_touched WHERE aggregate_id = 'a'"), 2, "the relay is told");
}

#[test]
fn a_discard_keeps_the_payload_and_spares_what_is_leased() {
    let mut file = fresh();
    for (i, id) in ["e1", "e2", "e3", "e4"].into_iter().enumerate() {
        file.event(id, "a", i as i64 + 1, 90);
    }
    file.fail("e1");
    file.publish("e4", 9);
    file.run(&format!(
        "INSERT INTO outboxd_leases (epoch, publisher, leased_at, expires_at, seqs) VALUES (1, 0, 0, {}, '{}'), (1, 0, 0, {}, '3')",
        NOW + 1,
        lease::ranges(&[2]),
        NOW
    ));
    assert!(file.write(|tx| operate::discard(tx, "ann", &ids(&["e1"]), " ", NOW)).is_err(), "without a reason");
    let all = ids(&["e1", "e2", "e3", "e4", "e9", "e1"]);
    let dry = operate::would_discard(&file.conn, &all, NOW).unwrap();
    let changed = file.write(|tx| operate::discard(tx, "ann", &all, "poison", NOW)).unwrap();
    assert_eq!(dry, changed);
    assert_eq!(changed.done, ["e1", "e3"], "a lease that ran out holds nobody");
    assert_eq!(changed.left.len(), 3);
    assert_eq!(file.number("SELECT count(*) FROM outbox_events"), 2);
    let trace = audit::list(&file.conn, 9).unwrap();
    let detail: serde_json::Value = serde_json::from_str(trace[1].detail.as_deref().unwrap()).unwrap();
    assert_eq!((detail["reason"].as_str(), detail["payload_json"].as_str()), (Some("poison"), Some("{\"id\":\"e1\"}")));
}

#[test]
fn a_replay_puts_published_events_back_in_their_place() {
    let mut file = fresh();
    for (i, (id, age)) in [("e1", 300), ("e2", 200), ("e3", 100)].into_iter().enumerate() {
        file.event(id, "a", i as i64 + 1, age);
        file.publish(id, i as i64 + 1);
    }
    file.event("e4", "a", 4, 50);
    let of = |from: i64, to: Option<i64>, after, limit| -> Vec<String> {
        operate::replayable(&file.conn, NOW - from * 1_000, to.map(|t| NOW - t * 1_000), after, limit)
            .unwrap()
            .into_iter()
            .map(|r| r.event_id)
            .collect()
    };
    assert_eq!(of(1000, None, 0, 9), ["e1", "e2", "e3"]);
    assert_eq!(of(250, Some(150), 0, 9), ["e2"]);
    assert_eq!(of(1000, None, 0, 2), ["e1", "e2"]);
    assert_eq!(of(1000, None, 2, 2), ["e3"]);
    let changed = file.write(|tx| operate::replay(tx, "ann", &ids(&["e2", "e4"]))).unwrap();
    assert_eq!((changed.done.len(), changed.left.len()), (1, 1));
    assert_eq!(
        file.number(
            "SELECT seq FROM outbox_events WHERE event_id = 'e2' AND status = 'pending' AND stream_seq IS NULL"
        ),
        2
    );
}

#[test]
fn a_pause_lasts_until_its_end_or_until_somebody_resumes() {
    let mut file = fresh();
    let until = |file: &File, now| operate::paused_until(&file.conn, now).unwrap();
    assert_eq!(until(&file, NOW), None);
    file.write(|tx| operate::pause(tx, "ann", Some(NOW + 10))).unwrap();
    assert_eq!((until(&file, NOW), until(&file, NOW + 10)), (Some(NOW + 10), None));
    file.write(|tx| operate::pause(tx, "ann", None)).unwrap();
    assert_eq!(until(&file, NOW), Some(i64::MAX));
    assert!(file.write(|tx| operate::resume(tx, "ann")).unwrap());
    assert!(!file.write(|tx| operate::resume(tx, "ann")).unwrap(), "again changes nothing");
    assert_eq!(until(&file, NOW), None);
    let verbs: Vec<String> = audit::list(&file.conn, 9).unwrap().into_iter().map(|a| a.verb).collect();
    assert_eq!(verbs, ["resume", "pause", "pause"]);
}

#[test]
fn retention_takes_only_what_is_old_and_proven() {
    let file = fresh();
    let old = time::text(NOW - 10_000);
    for (i, id) in ["old", "unproven", "failed", "pending", "kept", "young"].into_iter().enumerate() {
        file.event(id, id, 1, 100);
        if !matches!(id, "failed" | "pending") {
            file.publish(id, i as i64 + 1);
            if id != "young" {
                file.run(&format!("UPDATE outbox_events SET published_at = '{old}' WHERE event_id = '{id}'"));
            }
        }
    }
    file.fail("failed");
    file.run(
        "UPDATE outbox_events SET stream_seq = NULL WHERE event_id = 'unproven';
        CREATE TABLE notes (event TEXT REFERENCES outbox_events (event_id)); INSERT INTO notes VALUES ('kept')",
    );
    file.run(&format!(
        "INSERT INTO processed_events VALUES ('p1', '{old}'), ('p2', '{young}'), ('p3', 'once');
         INSERT INTO inbox_events (subject, payload, state, done_at) VALUES ('s', 'p', 'done', '{old}'), ('s', 'p', 'dead', '{old}'), ('s', 'p', 'stored', NULL), ('s', 'p', 'done', '{young}');
         INSERT INTO outboxd_audit (at, actor, verb, target) VALUES ('{old}', 'a', 'v', 't'), ('{young}', 'a', 'v', 't')",
        young = time::text(NOW)
    ));
    let before: Vec<(Class, i64)> = Class::ALL.into_iter().map(|c| (c, NOW - 5_000)).collect();
    let pauses = Cell::new(0);
    let removed = upkeep::prune(&file.path, &before, "ann", |_| pauses.set(pauses.get() + 1)).unwrap();
    assert_eq!(removed, [("outbox_events", 1), ("processed_events", 1), ("inbox_events", 1), ("outboxd_audit", 1)]);
    assert_eq!(pauses.get(), 4);
    assert_eq!(
        file.text("SELECT group_concat(event_id) FROM (SELECT event_id FROM outbox_events ORDER BY seq)"),
        "unproven,failed,pending,kept,young"
    );
    assert_eq!(file.text("SELECT group_concat(event_id) FROM processed_events"), "p2,p3");
    assert_eq!(
        upkeep::prune(&file.path, &before, "ann", |_| ()).unwrap().iter().map(|(_, n)| n).sum::<u64>(),
        0,
        "nothing more the second time"
    );
}

#[test]
fn a_walk_over_many_rows_goes_in_pieces_and_ends_at_the_young_ones() {
    let mut file = fresh();
    file.run(&format!("WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 1000)
        INSERT INTO outboxd_audit (at, actor, verb, target) SELECT CASE WHEN i <= 450 THEN '{}' ELSE '{}' END, 'a', 'v', 't' FROM n", time::text(NOW - 10_000), time::text(NOW)));
    let (mut cursor, mut pieces, mut gone) = (0, 0, 0);
    loop {
        let found = retention::expired(&file.conn, Class::Audit, NOW - 5_000, cursor, 100).unwrap();
        cursor = found.cursor;
        pieces += 1;
        gone += file.write(|tx| retention::delete(tx, Class::Audit, &found.ids)).unwrap();
        if !found.more {
            break;
        }
    }
    assert_eq!((gone, pieces, file.number("SELECT count(*) FROM outboxd_audit")), (450, 6, 550));
}

#[test]
fn a_check_finds_what_is_wrong() {
    let file = fresh();
    file.event("e1", "a", 1, 10);
    let findings = upkeep::check(&file.path).unwrap();
    assert!(findings.iter().all(|f| f.level == Level::Ok), "{findings:?}");
    file.run(
        "UPDATE outbox_events SET status = 'failed'; DROP TRIGGER outboxd_guard_insert; DROP INDEX outboxd_inbox_state",
    );
    file.run("UPDATE sqlite_sequence SET seq = 0 WHERE name = 'outbox_events'");
    let findings = upkeep::check(&file.path).unwrap();
    let bad: Vec<&str> = findings.iter().filter(|f| f.level == Level::Fail).map(|f| f.check).collect();
    assert_eq!(bad, ["schema", "failed events", "seq"]);
    let schema = &findings.iter().find(|f| f.check == "schema").unwrap().detail;
    assert!(schema.contains("outboxd_guard_insert is missing") && schema.contains("outboxd_inbox_state"), "{schema}");
}

#[test]
fn a_migrated_file_passes_the_check() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("app.db");
    let columns = outboxd::store::ddl::CLASSIC_COLUMNS
        .map(|c| if c == "event_id" { "event_id TEXT PRIMARY KEY NOT NULL".into() } else { format!("{c} TEXT") });
    Connection::open(&path)
        .unwrap()
        .execute_batch(&format!("CREATE TABLE outbox_events ({})", columns.join(", ")))
        .unwrap();
    migrate::migrate(&path, &migrate::MigrateOptions::default()).unwrap();
    let findings = upkeep::check(&path).unwrap();
    assert!(findings.iter().all(|f| f.level == Level::Ok), "{findings:?}");
}

#[test]
fn a_backup_is_whole_beside_a_writer_and_never_overwrites() {
    let file = fresh();
    file.event("e1", "a", 1, 10);
    let copy = file.dir.path().join("copy of today.db");
    // a writer in the middle of its transaction
    let other = Connection::open(&file.path).unwrap();
    other.execute_batch("BEGIN IMMEDIATE; INSERT INTO outboxd_meta VALUES ('x', 'not committed')").unwrap();
    let made = upkeep::backup(&file.path, &copy).unwrap();
    assert_eq!((made.events, made.bytes > 0), (1, true));
    let opened = Connection::open(&copy).unwrap();
    schema::require(&opened, &copy).unwrap();
    assert_eq!(schema::meta_get(&opened, "x").unwrap(), None);
    assert!(upkeep::backup(&file.path, &copy).unwrap_err().to_string().contains("exists already"));
    let nowhere = file.dir.path().join("no/such/folder/x.db");
    assert!(upkeep::backup(&file.path, &nowhere).is_err());
    let left: Vec<String> = std::fs::read_dir(file.dir.path())
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .filter(|n| n.contains("part"))
        .collect();
    assert_eq!(left, [] as [String; 0]);
}

#[test]
fn an_uninstall_lists_first_and_then_removes_what_was_made() {
    let file = fresh();
    file.run("CREATE TABLE business (id INTEGER PRIMARY KEY); INSERT INTO business VALUES (1)");
    schema::create_assets(&file.conn).unwrap();
    file.event("e1", "a", 1, 10);
    let plan = upkeep::uninstall(&file.path, false, false).unwrap();
    assert!(!plan.done && plan.unpublished == 1 && plan.removes.iter().any(|(_, n)| n == "assets"), "{plan:?}");
    let error = upkeep::uninstall(&file.path, true, false).unwrap_err();
    assert!(matches!(&error, StoreError::Refused(why) if why.contains("1 events are not published")), "{error}");
    file.run("CREATE TRIGGER made AFTER INSERT ON business BEGIN DELETE FROM outbox_events WHERE 0; END");
    assert!(upkeep::uninstall(&file.path, true, true).unwrap_err().to_string().contains("made of business"));
    file.run("DROP TRIGGER made");
    assert!(upkeep::uninstall(&file.path, true, true).unwrap().done);
    assert_eq!(file.text("SELECT group_concat(name) FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'"), "business");
    assert_eq!(schema::inspect(&file.conn).unwrap(), schema::Layout::Empty);
}

#[test]
fn an_uninstall_after_a_takeover_leaves_the_classic_outbox_working() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("app.db");
    let conn = Connection::open(&path).unwrap();
    conn.execute_batch("CREATE TABLE outbox_events (event_id TEXT PRIMARY KEY NOT NULL, aggregate_type TEXT NOT NULL, aggregate_id TEXT NOT NULL,
        aggregate_version INTEGER NOT NULL, event_type TEXT NOT NULL, schema_version INTEGER NOT NULL, payload_json TEXT NOT NULL, status TEXT NOT NULL DEFAULT 'pending',
        attempt_count INTEGER NOT NULL DEFAULT 0, available_at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP, created_at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP,
        published_at TEXT, last_error TEXT, UNIQUE (aggregate_type, aggregate_id, aggregate_version));
        CREATE VIEW waiting AS SELECT * FROM outbox_events").unwrap();
    let insert = "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, aggregate_version, event_type, schema_version, payload_json) VALUES (?1, 'a', ?1, 1, 't', 1, '{}')";
    conn.execute(insert, ["e1"]).unwrap();
    drop(conn);
    migrate::migrate(&path, &migrate::MigrateOptions { debezium: true, ..Default::default() }).unwrap();
    assert!(upkeep::uninstall(&path, true, true).unwrap().done);
    let conn = Connection::open(&path).unwrap();
    conn.execute(insert, ["e2"]).unwrap();
    let rest: Vec<String> = conn
        .prepare("SELECT name FROM sqlite_master WHERE name NOT LIKE 'sqlite_%' ORDER BY name")
        .unwrap()
        .query_map([], |r| r.get(0))
        .unwrap()
        .map(|r| r.unwrap())
        .collect();
    assert_eq!(rest, ["idx_outbox_delivery", "outbox_events", "processed_events", "waiting"]);
    assert_eq!(conn.query_row("SELECT count(*) FROM waiting", [], |r| r.get::<_, i64>(0)).unwrap(), 2);
    drop(conn);
    // and it can be taken over again, with the numbers that it has
    let again = migrate::migrate(&path, &migrate::MigrateOptions::default()).unwrap();
    assert_eq!(again.plan.unwrap().rows, 2);
    assert!(upkeep::check(&path).unwrap().iter().all(|f| f.level == Level::Ok));
    let conn = Connection::open(&path).unwrap();
    conn.execute(insert, ["e3"]).unwrap();
    assert_eq!(
        conn.query_row("SELECT group_concat(seq) FROM outbox_events", [], |r| r.get::<_, String>(0)).unwrap(),
        "1,2,3"
    );
}
