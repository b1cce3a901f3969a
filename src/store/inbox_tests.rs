//! Tests of the inbox on a real file: what one transaction does to dedupe records, effects, failures and position.

use std::time::Duration;

use bytes::Bytes;
use rusqlite::Connection;

use super::*;
use crate::domain::apply::{Action, GapRule, PatienceRules, Position};
use crate::store::{inbox_handlers, schema};

const NOW: Millis = 1_790_000_000_000;

struct Bed {
    _dir: tempfile::TempDir,
    conn: Connection,
    inbox: Inbox,
    progress: Progress,
    now: Millis,
}

fn rules(handlers: &[(&str, Action)]) -> InboxRules {
    InboxRules {
        durable: "hub".into(),
        is_first: true,
        own_source: "hub".into(),
        own_events: OwnEvents::Skip,
        unmatched: Unmatched::Skip,
        gap: GapRule::Apply,
        patience: PatienceRules::new(3),
        handlers: handlers.iter().map(|(pattern, action)| ((*pattern).to_owned(), action.clone())).collect(),
    }
}

fn sql(text: &str) -> Action {
    Action::Sql(text.to_owned())
}

impl Bed {
    fn new(rules: InboxRules) -> Self {
        Self::with(Inbox::new(rules))
    }

    fn with(inbox: Inbox) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.db");
        schema::init(&path, "hub", false).unwrap();
        let mut conn = Connection::open(&path).unwrap();
        let tx = conn.transaction().unwrap();
        let position = Position { stream: "EVENTS".into(), stream_created: "t1".into(), settled_seq: 0 };
        inbox_position::establish(&tx, "hub", &position).unwrap();
        tx.commit().unwrap();
        conn.execute_batch("CREATE TABLE stock (id TEXT PRIMARY KEY, n INTEGER NOT NULL CHECK (n < 100))").unwrap();
        Self { _dir: dir, conn, inbox, progress: Progress::starting_at(0), now: NOW }
    }

    fn try_apply(&mut self, messages: Vec<Inbound>, blame: Option<&str>) -> Result<Vec<Verdict>> {
        let tx = self.conn.transaction().unwrap();
        let range = 0..messages.len();
        let batch =
            Batch { stream: "EVENTS".into(), stream_created: "t1".into(), messages: Arc::new(messages), limit: None };
        let applied = apply(&tx, &self.inbox, &batch, range, self.progress.clone(), blame, self.now)?;
        tx.commit().unwrap();
        self.progress = applied.progress;
        Ok(applied.verdicts)
    }

    fn apply(&mut self, messages: Vec<Inbound>) -> Vec<Verdict> {
        self.try_apply(messages, None).unwrap()
    }

    fn int(&self, sql: &str) -> i64 {
        self.conn.query_row(sql, [], |row| row.get(0)).unwrap()
    }

    fn text(&self, sql: &str) -> String {
        self.conn.query_row(sql, [], |row| row.get(0)).unwrap()
    }

    fn settled(&self) -> i64 {
        self.int("SELECT settled_seq FROM outboxd_inbox_position")
    }
}

/// An event of the plant: asset `id`, version `version`.
fn event(seq: u64, id: &str, version: i64) -> Inbound {
    named(seq, &format!("e-{id}-{version}"), "asset.updated", id, version)
}

fn named(seq: u64, event_id: &str, kind: &str, id: &str, version: i64) -> Inbound {
    let body = format!(
        r#"{{"event_id":"{event_id}","event_type":"{kind}","schema_version":1,"aggregate_type":"asset","aggregate_id":"{id}","aggregate_version":{version},"occurred_at":"2026-10-07T01:20:00Z","data":{{"name":"Pump {version}","material":"S45C","n":{version}}}}}"#
    );
    let headers = [("ce-id", event_id), ("ce-source", "plant"), ("ce-type", kind)];
    Inbound {
        stream_seq: seq,
        subject: format!("events.asset.{id}.updated"),
        headers: headers.into_iter().collect(),
        payload: Bytes::from(body),
        unreadable: None,
    }
}

fn raw(seq: u64, body: &'static [u8]) -> Inbound {
    Inbound { stream_seq: seq, subject: "events.x".into(), payload: Bytes::from_static(body), ..Inbound::default() }
}

fn later(verdict: &Verdict) -> (Duration, bool, &str) {
    match verdict {
        Verdict::Later { after, counted, reason } => (*after, *counted, reason.as_str()),
        other => panic!("not later: {other:?}"),
    }
}

#[test]
fn each_event_has_its_effect_once_whatever_sequence_it_comes_under() {
    let mut bed = Bed::new(rules(&[("asset.*", Action::Assets)]));
    assert_eq!(bed.apply(vec![event(1, "a", 1), event(2, "a", 2)]), [Verdict::Applied, Verdict::Applied]);
    assert_eq!(bed.apply(vec![event(2, "a", 2), event(3, "a", 1)]), [Verdict::Duplicate, Verdict::Duplicate]);
    assert_eq!(bed.int("SELECT version FROM assets WHERE asset_id = 'a'"), 2);
    assert_eq!(bed.text("SELECT name FROM assets"), "Pump 2");
    assert_eq!(bed.text("SELECT group_concat(event_id) FROM processed_events"), "plant:e-a-1,plant:e-a-2");
    assert_eq!((bed.settled(), bed.int("SELECT processed FROM outboxd_inbox_position")), (3, 2));
    assert_eq!(bed.int("SELECT duplicates FROM outboxd_inbox_position"), 2);
}

#[test]
fn a_classic_consumers_record_counts_and_our_own_bare_one_does_not() {
    let mut bed = Bed::new(rules(&[("*", Action::Assets)]));
    bed.conn.execute("INSERT INTO processed_events (event_id) VALUES ('e-a-1')", []).unwrap();
    assert_eq!(bed.apply(vec![event(1, "a", 1)]), [Verdict::Duplicate]);
    let mut bare = event(2, "b", 1);
    bare.headers = [("x", "y")].into_iter().collect();
    assert_eq!(bed.apply(vec![bare]), [Verdict::Applied], "source-less, recorded under its bare id");
    assert_eq!(bed.apply(vec![event(3, "b", 1)]), [Verdict::Stale], "the same id of a named source is another event");
    assert_eq!(bed.int("SELECT count(*) FROM processed_events WHERE event_id IN ('e-b-1', 'plant:e-b-1')"), 2);
}

#[test]
fn a_stale_version_changes_nothing_and_is_recorded() {
    let count = sql("INSERT INTO stock VALUES (:event_id, :aggregate_version)");
    for action in [Action::Assets, count] {
        let mut bed = Bed::new(rules(&[("*", action)]));
        assert_eq!(bed.apply(vec![event(1, "a", 5), event(2, "a", 4)]), [Verdict::Applied, Verdict::Stale]);
        assert_eq!(bed.int("SELECT count(*) FROM processed_events"), 2);
    }
}

#[test]
fn bad_messages_become_dead_rows_and_good_neighbours_flow() {
    let mut bed = Bed::new(rules(&[("*", Action::Assets)]));
    let bad: [&'static [u8]; 6] = [b"", b"not json", b"[1,2]", b"{{{{", b"{\"event_id\":\"\"}", b"\xff\x00"];
    let mut messages = vec![event(1, "a", 1)];
    messages.extend(bad.iter().zip(2..).map(|(body, seq)| raw(seq, body)));
    messages.push(event(8, "a", 2));
    let verdicts = bed.apply(messages.clone());
    assert!(matches!(verdicts[0], Verdict::Applied) && matches!(verdicts[7], Verdict::Applied), "{verdicts:?}");
    assert!(verdicts[1..7].iter().all(|v| matches!(v, Verdict::Dead(Cause::NoIdentity(_)))), "{verdicts:?}");
    assert_eq!(bed.int("SELECT count(*) FROM inbox_events WHERE state = 'dead' AND reason <> ''"), 6);
    assert_eq!(bed.int("SELECT stream_seq FROM inbox_events WHERE payload = x'ff00'"), 7);
    assert_eq!(bed.settled(), 8);
    assert!(bed.apply(messages).iter().all(|v| *v == Verdict::Duplicate));
    assert_eq!(bed.int("SELECT count(*) FROM inbox_events"), 6, "redelivery does not bury twice");
}

#[test]
fn a_dead_message_above_the_settled_sequence_is_not_buried_twice() {
    let mut bed = Bed::new(rules(&[("*", sql("INSERT INTO stock VALUES (:aggregate_id, :aggregate_version)"))]));
    let verdicts = bed.apply(vec![event(1, "a", 200), raw(2, b"x")]);
    assert!(matches!(&verdicts[0], Verdict::Later { counted: true, .. }), "{verdicts:?}");
    assert_eq!(bed.settled(), 0, "the first waits");
    bed.progress = Progress::starting_at(0);
    assert_eq!(bed.apply(vec![raw(2, b"x")]), [Verdict::Duplicate]);
    assert_eq!(bed.int("SELECT count(*) FROM inbox_events"), 1);
}

#[test]
fn a_failing_handler_is_counted_spaced_and_then_dead_and_undoes_only_itself() {
    let statements =
        "INSERT INTO stock VALUES (:event_id, 1); UPDATE stock SET n = :aggregate_version WHERE id = :event_id";
    let mut bed = Bed::new(rules(&[("*", sql(statements))]));
    let messages = || vec![event(1, "a", 1), event(2, "b", 100), event(3, "c", 1)];
    let verdicts = bed.apply(messages());
    assert_eq!((&verdicts[0], &verdicts[2]), (&Verdict::Applied, &Verdict::Applied));
    let (after, counted, reason) = later(&verdicts[1]);
    assert!(counted && after == Duration::from_millis(500) && reason.contains("CHECK constraint"), "{reason}");
    assert_eq!(bed.int("SELECT count(*) FROM stock"), 2, "nothing of the failed one remains");
    assert_eq!(bed.int("SELECT count(*) FROM processed_events"), 2);
    assert_eq!(bed.settled(), 1);

    // a session that begins anew brings it at once: not due yet, not counted
    bed.progress = Progress::starting_at(1);
    let verdicts = bed.apply(messages().split_off(1));
    assert!(matches!(&verdicts[0], Verdict::Later { counted: false, .. }), "{verdicts:?}");
    assert_eq!(bed.int("SELECT failures FROM outboxd_inbox_failures"), 1);

    bed.now += 500;
    assert_eq!(later(&bed.apply(messages().split_off(1))[0]).0, Duration::from_secs(1));
    bed.now += 1_000;
    let verdicts = bed.apply(messages().split_off(1));
    assert!(matches!(&verdicts[0], Verdict::Dead(Cause::Failed { failures: 3, .. })), "{verdicts:?}");
    assert_eq!(
        bed.text("SELECT event_id || stream || stream_seq FROM inbox_events WHERE state = 'dead'"),
        "e-b-100EVENTS2"
    );
    assert_eq!((bed.settled(), bed.int("SELECT count(*) FROM outboxd_inbox_failures")), (3, 0));
}

#[test]
fn a_failing_event_holds_its_aggregate_and_no_other() {
    let mut bed = Bed::new(rules(&[("*", sql("INSERT INTO stock VALUES (:event_id, json_extract(:data, '$.n'))"))]));
    let mut broken = named(1, "bad", "asset.updated", "a", 1);
    broken.payload = Bytes::from(String::from_utf8(broken.payload.to_vec()).unwrap().replace("\"n\":1", "\"n\":100"));
    let verdicts = bed.apply(vec![broken.clone(), event(2, "a", 2), event(3, "b", 1)]);
    assert!(
        matches!(
            verdicts[..],
            [Verdict::Later { counted: true, .. }, Verdict::Later { counted: false, .. }, Verdict::Applied]
        ),
        "{verdicts:?}"
    );
    bed.now += 500;
    bed.conn
        .execute_batch("ALTER TABLE stock RENAME TO old; CREATE TABLE stock (id TEXT PRIMARY KEY, n INTEGER)")
        .unwrap();
    assert_eq!(bed.apply(vec![broken, event(2, "a", 2)]), [Verdict::Applied, Verdict::Applied]);
    assert_eq!(bed.settled(), 3);
}

#[test]
fn a_table_that_is_missing_blames_nobody() {
    let mut bed = Bed::new(rules(&[("*", sql("INSERT INTO nowhere VALUES (:event_id)"))]));
    for _ in 0..5 {
        let verdicts = bed.apply(vec![event(1, "a", 1)]);
        let (_, counted, reason) = later(&verdicts[0]);
        assert!(!counted && reason.contains("no such table: nowhere"), "{reason}");
    }
    assert_eq!(bed.int("SELECT count(*) FROM outboxd_inbox_failures"), 0);
    bed.conn.execute_batch("CREATE TABLE nowhere (id)").unwrap();
    assert_eq!(bed.apply(vec![event(1, "a", 1)]), [Verdict::Applied]);
}

#[test]
fn a_foreign_assets_table_stops_only_its_handler() {
    let mut bed = Bed::new(rules(&[("asset.updated", Action::Assets), ("*", Action::Store)]));
    bed.conn.execute_batch("CREATE TABLE assets (price REAL)").unwrap();
    let verdicts = bed.apply(vec![event(1, "a", 1), named(2, "o", "order.made", "b", 1)]);
    let (_, counted, reason) = later(&verdicts[0]);
    assert!(!counted && reason.contains("assets of another kind"), "{reason}");
    assert_eq!(verdicts[1], Verdict::Stored);
}

#[test]
fn own_echoes_and_unmatched_events_follow_their_rule() {
    let mut own = event(1, "a", 1);
    own.headers = [("ce-id", "e-a-1"), ("ce-source", "hub"), ("ce-type", "asset.updated")].into_iter().collect();
    let mut bed = Bed::new(rules(&[("asset.updated", Action::Assets)]));
    assert_eq!(bed.apply(vec![own.clone(), named(2, "o", "order.made", "b", 1)]), [Verdict::Skipped, Verdict::Skipped]);
    assert_eq!(bed.int("SELECT count(*) FROM processed_events"), 0);

    let mut apply_own = rules(&[("asset.updated", Action::Assets)]);
    apply_own.own_events = OwnEvents::Apply;
    apply_own.unmatched = Unmatched::Store;
    let mut bed = Bed::new(apply_own);
    assert_eq!(bed.apply(vec![own, named(2, "o", "order.made", "b", 1)]), [Verdict::Applied, Verdict::Stored]);
    assert_eq!(bed.text("SELECT state || event_type FROM inbox_events"), "storedorder.made");

    let mut dead = rules(&[("asset.updated", Action::Assets)]);
    dead.unmatched = Unmatched::Dead;
    let mut bed = Bed::new(dead);
    assert!(matches!(bed.apply(vec![named(2, "o", "order.made", "b", 1)])[0], Verdict::Dead(Cause::Unmatched(_))));
}

#[test]
fn a_stored_event_keeps_headers_and_bytes_for_the_application() {
    let mut bed = Bed::new(rules(&[("*", Action::Store)]));
    let mut message = raw(4, b"\xff\xfe");
    message.headers = [("ce-id", "e"), ("ce-type", "t"), ("x", "1"), ("x", "2")].into_iter().collect();
    assert_eq!(bed.apply(vec![message]), [Verdict::Stored]);
    assert_eq!(bed.text("SELECT headers_json FROM inbox_events"), r#"{"ce-id":"e","ce-type":"t","x":["1","2"]}"#);
    assert_eq!(bed.int("SELECT payload = x'fffe' AND typeof(payload) = 'blob' FROM inbox_events"), 1);
}

#[test]
fn a_gap_waits_for_its_predecessor_and_not_for_ever() {
    let mut waiting = rules(&[("*", Action::Assets)]);
    waiting.gap = GapRule::Wait(Duration::from_secs(60));
    let mut bed = Bed::new(waiting);
    let verdicts = bed.apply(vec![event(1, "a", 1), event(2, "a", 3), event(3, "a", 2)]);
    assert!(
        matches!(verdicts[..], [Verdict::Applied, Verdict::Later { counted: false, .. }, Verdict::Applied]),
        "{verdicts:?}"
    );
    assert_eq!(bed.apply(vec![event(2, "a", 3)]), [Verdict::Applied]);
    assert_eq!(bed.int("SELECT version FROM assets"), 3);
    assert!(matches!(bed.apply(vec![event(4, "a", 9)])[0], Verdict::Later { .. }));
    bed.now += 60_000;
    assert_eq!(bed.apply(vec![event(4, "a", 9)]), [Verdict::Applied]);
}

#[test]
fn a_handler_that_rolls_the_transaction_back_is_told_apart_and_can_be_blamed() {
    let mut bed =
        Bed::new(rules(&[("*", sql("INSERT OR ROLLBACK INTO stock VALUES (:aggregate_id, :aggregate_version)"))]));
    let error = bed.try_apply(vec![event(1, "a", 1), event(2, "b", 200)], None).unwrap_err();
    assert!(matches!(error, StoreError::Refused(_)), "{error:?}");
    assert_eq!(bed.int("SELECT count(*) FROM processed_events"), 0);
    assert_eq!(bed.apply(vec![event(1, "a", 1)]), [Verdict::Applied]);
    let verdicts = bed.try_apply(vec![event(2, "b", 200)], Some("it rolled back")).unwrap();
    assert_eq!(later(&verdicts[0]).2, "it rolled back");
    assert_eq!(bed.int("SELECT failures FROM outboxd_inbox_failures"), 1);
}

#[test]
fn a_batch_of_another_stream_changes_nothing() {
    let mut bed = Bed::new(rules(&[("*", Action::Store)]));
    bed.conn.execute("UPDATE outboxd_inbox_position SET stream_created = 't2'", []).unwrap();
    let error = bed.try_apply(vec![event(1, "a", 1)], None).unwrap_err();
    assert!(matches!(error, StoreError::Conflict(_)), "{error:?}");
}

#[test]
fn a_later_durable_keeps_its_own_records() {
    let mut second = rules(&[("*", Action::Store)]);
    second.is_first = false;
    let mut bed = Bed::new(second);
    bed.conn.execute("INSERT INTO processed_events (event_id) VALUES ('plant:e-a-1')", []).unwrap();
    assert_eq!(bed.apply(vec![event(1, "a", 1)]), [Verdict::Stored]);
    assert_eq!(bed.int("SELECT count(*) FROM processed_events WHERE event_id = 'hub/plant:e-a-1'"), 1);
}

#[test]
fn a_library_user_brings_a_handler_of_his_own() {
    struct Twice;
    impl inbox_handlers::Handler for Twice {
        fn apply(
            &self,
            tx: &Transaction<'_>,
            event: &Event<'_>,
            _: &inbox_handlers::Place<'_>,
        ) -> std::result::Result<inbox_handlers::Effect, inbox_handlers::Trouble> {
            tx.execute("INSERT INTO stock VALUES (?1, 1)", [&*event.event_id]).step("apply twice")?;
            match event.aggregate_version {
                Some(7) => Err(inbox_handlers::Trouble::Own("seven".into())),
                _ => Ok(inbox_handlers::Effect::Applied),
            }
        }
    }
    let own: Vec<(String, Arc<dyn Handler>)> = vec![("asset.updated".into(), Arc::new(Twice))];
    let mut bed = Bed::with(Inbox::with_handlers(rules(&[("*", Action::Store)]), own));
    let verdicts = bed.apply(vec![event(1, "a", 1), event(2, "b", 7), named(3, "x", "other", "c", 1)]);
    assert!(
        matches!(verdicts[..], [Verdict::Applied, Verdict::Later { counted: true, .. }, Verdict::Stored]),
        "{verdicts:?}"
    );
    assert_eq!(bed.int("SELECT count(*) FROM stock"), 1);
}

#[test]
fn dead_letters_are_listed_shown_tried_again_and_discarded() {
    let mut dead = rules(&[("asset.updated", sql("INSERT INTO stock VALUES (:event_id, :aggregate_version)"))]);
    dead.patience = PatienceRules::new(1);
    let mut bed = Bed::new(dead);
    bed.apply(vec![event(1, "a", 100), raw(2, b"x")]);
    let rows = inbox_letters::list(&bed.conn, "dead", 10).unwrap();
    assert_eq!(rows.iter().map(|r| r.stream_seq).collect::<Vec<_>>(), [Some(1), Some(2)]);
    let shown = inbox_letters::show(&bed.conn, rows[1].id).unwrap();
    assert_eq!((shown.payload.as_str(), shown.payload_bytes), ("x", 1));
    assert!(matches!(inbox_letters::show(&bed.conn, 99), Err(StoreError::NotFound(_))));

    let (first, second) = (rows[0].id, rows[1].id);
    let tx = bed.conn.transaction().unwrap();
    let still = inbox_letters::retry(&tx, &bed.inbox, first, NOW).unwrap();
    assert_eq!(still.state, "dead");
    assert_eq!(inbox_letters::retry(&tx, &bed.inbox, second, NOW).unwrap().state, "dead");
    tx.execute_batch("DROP TABLE stock; CREATE TABLE stock (id, n)").unwrap();
    assert_eq!(inbox_letters::retry(&tx, &bed.inbox, first, NOW).unwrap().state, "done");
    assert!(matches!(inbox_letters::retry(&tx, &bed.inbox, first, NOW), Err(StoreError::Refused(_))));
    assert!(matches!(inbox_letters::discard(&tx, first), Err(StoreError::Refused(_))));
    assert_eq!(inbox_letters::discard(&tx, second).unwrap().payload, "x");
    tx.commit().unwrap();
    assert_eq!(bed.int("SELECT count(*) FROM stock"), 1);
    assert_eq!(bed.text("SELECT group_concat(state) FROM inbox_events"), "done");
    assert_eq!(bed.apply(vec![event(9, "a", 100)]), [Verdict::Duplicate], "what a retry applied is recorded");
}

#[test]
fn a_locked_or_full_database_blames_no_message() {
    let mut bed = Bed::new(rules(&[("*", Action::Store)]));
    let pages = bed.int("PRAGMA page_count") + 8;
    bed.conn.pragma_update(None, "max_page_count", pages).unwrap();
    let mut big = event(1, "a", 1);
    big.payload =
        Bytes::from(format!(r#"{{"event_id":"e-a-1","event_type":"asset.updated","data":"{}"}}"#, "x".repeat(200_000)));
    let error = bed.try_apply(vec![big], None).unwrap_err();
    assert!(matches!(error, StoreError::Full(_)), "{error:?}");
    assert_eq!(bed.int("SELECT count(*) FROM outboxd_inbox_failures"), 0);
}
