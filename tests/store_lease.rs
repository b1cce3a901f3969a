//! Leases and settlements on a real file: I1 to I4, I7 and I8 of ARCHITECTURE.md.

use outboxd::domain::event::{Millis, Seq};
use outboxd::domain::settle::Verdict;
use outboxd::store::connection::{self, Access};
use outboxd::store::error::Result;
use outboxd::store::lease::{self, Fenced, Grant, LeaseRequest, SettleRequest, Settlement, Unknown};
use outboxd::store::{outbox, schema};
use rusqlite::{Connection, Transaction, TransactionBehavior};

const NOW: Millis = 1_800_000_000_000;

struct Db {
    conn: Connection,
    _dir: tempfile::TempDir,
}

impl Db {
    fn with_rows(rows: usize) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.db");
        schema::init(&path, "test", false).unwrap();
        let conn = connection::open(&path, Access::Write, &connection::Settings::default()).unwrap().conn;
        for i in 1..=rows {
            insert(&conn, &format!("e{i}"), &format!("a{}", i % 3), i as i64);
        }
        Self { conn, _dir: dir }
    }

    fn write<T>(&mut self, job: impl FnOnce(&Transaction<'_>) -> Result<T>) -> T {
        let tx = self.conn.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
        let value = job(&tx).unwrap();
        tx.commit().unwrap();
        value
    }

    fn take_over(&mut self) -> i64 {
        self.write(|tx| lease::take_over(tx, true))
    }

    fn lease(&mut self, epoch: i64, seqs: &[Seq]) -> Fenced<Grant> {
        let request = LeaseRequest {
            epoch,
            publisher: 0,
            seqs: seqs.to_vec(),
            now: NOW,
            expires_at: NOW + 30_000,
            floor: 41,
            stream_created: "then".into(),
        };
        self.write(|tx| lease::lease(tx, &request))
    }

    fn granted(&mut self, epoch: i64, seqs: &[Seq]) -> Grant {
        match self.lease(epoch, seqs) {
            Fenced::Applied(grant) => grant,
            Fenced::Lost => panic!("lost"),
        }
    }

    fn settle(&mut self, epoch: i64, token: i64, verdicts: &[(Seq, Verdict)], finished: bool) -> Fenced<usize> {
        let settlements = verdicts.iter().map(|(seq, verdict)| Settlement {
            token,
            seq: *seq,
            verdict: verdict.clone(),
            suspect: true,
        });
        let request = SettleRequest {
            epoch,
            now: NOW,
            stream: "EVENTS".into(),
            hold: true,
            settlements: settlements.collect(),
            finished: if finished { vec![token] } else { Vec::new() },
            unknown: Vec::new(),
        };
        self.write(|tx| lease::settle(tx, &request))
    }

    fn row(&self, seq: Seq) -> (String, i64, Option<String>, Option<i64>) {
        let sql = "SELECT status, attempt_count, last_error, stream_seq FROM outbox_events WHERE seq = ?1";
        self.conn.query_row(sql, [seq], |r| Ok((r.get(0)?, r.get(1)?, r.get(2)?, r.get(3)?))).unwrap()
    }

    fn count(&self, sql: &str) -> i64 {
        self.conn.query_row(sql, [], |r| r.get(0)).unwrap()
    }
}

fn insert(conn: &Connection, id: &str, aggregate: &str, version: i64) {
    conn.execute(
        "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, aggregate_version, event_type,
             schema_version, payload_json) VALUES (?1, 'asset', ?2, ?3, 'asset.updated', 1, '{}')",
        rusqlite::params![id, aggregate, version],
    )
    .unwrap();
}

fn published(stream_seq: u64) -> Verdict {
    Verdict::Published { stream_seq, note: None }
}

#[test]
fn i1_a_published_row_carries_its_stream_sequence_and_counts_once() {
    let mut db = Db::with_rows(3);
    let epoch = db.take_over();
    let grant = db.granted(epoch, &[1, 2, 3]);
    assert_eq!(db.settle(epoch, grant.token, &[(1, published(7)), (2, published(8))], false), Fenced::Applied(2));
    assert_eq!(db.row(1), ("published".into(), 1, None, Some(7)));
    assert_eq!(db.row(3), ("pending".into(), 0, None, None));
    assert_eq!(db.count("SELECT count(*) FROM outboxd_leases"), 1, "one row is still leased");
    db.settle(epoch, grant.token, &[(3, published(9))], true);
    assert_eq!(db.count("SELECT count(*) FROM outboxd_leases"), 0);
}

#[test]
fn i2_only_pending_rows_are_leased_and_the_lease_does_not_touch_them() {
    let mut db = Db::with_rows(3);
    let epoch = db.take_over();
    let first = db.granted(epoch, &[1, 2]);
    db.settle(epoch, first.token, &[(1, published(1))], false);
    assert_eq!(db.granted(epoch, &[1, 2, 3]).seqs, [2, 3]);
    assert_eq!(db.row(2), ("pending".into(), 0, None, None));
    assert_eq!(db.granted(epoch, &[1]).seqs, [] as [Seq; 0], "nothing to lease leaves no lease behind");
    assert_eq!(db.count("SELECT count(*) FROM outboxd_leases WHERE seqs = ''"), 0);
}

#[test]
fn i3_an_older_epoch_changes_nothing() {
    let mut db = Db::with_rows(2);
    let old = db.take_over();
    let grant = db.granted(old, &[1, 2]);
    let new = db.take_over();
    assert!(new > old);
    assert_eq!(db.settle(old, grant.token, &[(1, published(5))], true), Fenced::Lost);
    assert_eq!(db.lease(old, &[1]), Fenced::Lost);
    assert_eq!(db.write(|tx| lease::renew(tx, old, &[grant.token], NOW)), Fenced::Lost);
    assert_eq!(db.write(|tx| lease::release(tx, old, &[grant.token], &[])), Fenced::Lost);
    assert_eq!(db.write(|tx| lease::rescue_publisher(tx, old, 0)), Fenced::Lost);
    assert_eq!(db.row(1), ("pending".into(), 0, None, None));
    assert_eq!(db.settle(new, grant.token, &[(1, published(5))], false), Fenced::Lost, "nor does a void token");
    assert_eq!(db.row(1), ("pending".into(), 0, None, None));
}

#[test]
fn a_take_over_makes_what_was_leased_suspect_and_counts_the_crash() {
    let mut db = Db::with_rows(3);
    let first = db.take_over();
    let grant = db.granted(first, &[1, 2, 3]);
    db.settle(first, grant.token, &[(2, published(1))], false);
    let second = db.take_over();
    assert_eq!(db.count("SELECT count(*) FROM outboxd_leases"), 0);
    let suspects = || "SELECT count(*) FROM outboxd_suspects WHERE floor = 41 AND stream_created = 'then'";
    assert_eq!(db.count(suspects()), 2, "the published one is not suspect");
    db.granted(second, &[1, 3]);
    let third = db.take_over();
    assert_eq!(db.count("SELECT crashes FROM outboxd_suspects WHERE seq = 1"), 2);
    let found = outbox::read_rows(&db.conn, &[1], 1 << 20).unwrap();
    let outbox::Numbered::Pending(found) = &found[0] else { panic!("{found:?}") };
    assert_eq!((found.event.crashes, found.event.suspect.as_ref().map(|s| s.floor)), (2, Some(41)));
    let grant = db.granted(third, &[1]);
    db.settle(third, grant.token, &[(1, published(2))], true);
    assert_eq!(db.count("SELECT count(*) FROM outboxd_suspects WHERE seq = 1"), 0, "its fate is known now");
}

#[test]
fn an_orderly_release_keeps_the_doubt_and_counts_no_crash() {
    let mut db = Db::with_rows(2);
    let epoch = db.take_over();
    let grant = db.granted(epoch, &[1, 2]);
    let unknown = [Unknown { seq: 1, floor: 9, stream_created: "then".into() }];
    assert_eq!(db.write(|tx| lease::release(tx, epoch, &[grant.token], &unknown)), Fenced::Applied(()));
    assert_eq!(db.count("SELECT count(*) FROM outboxd_leases"), 0);
    assert_eq!(db.count("SELECT count(*) FROM outboxd_suspects WHERE seq = 1 AND crashes = 0 AND floor = 9"), 1);
    assert_eq!(db.count("SELECT sum(attempt_count) FROM outbox_events"), 0, "not counted");
}

#[test]
fn i4_and_i7_failures_count_and_have_a_reason() {
    let mut db = Db::with_rows(2);
    let epoch = db.take_over();
    let grant = db.granted(epoch, &[1, 2]);
    let retry = Verdict::RetryAt { available_at: NOW + 1_500, reason: "why".into() };
    let failed = Verdict::Failed { reason: "too large".into() };
    db.settle(epoch, grant.token, &[(1, retry), (2, failed)], true);
    assert_eq!(db.row(1), ("pending".into(), 1, Some("why".into()), None));
    assert_eq!(db.row(2), ("failed".into(), 1, Some("too large".into()), None));
    assert_eq!(db.count("SELECT failing_since FROM outbox_events WHERE seq = 1"), NOW);
    assert_eq!(db.count("SELECT count(*) FROM outboxd_touched"), 0, "the relay knows what it wrote itself");
    let found = outbox::read_rows(&db.conn, &[1], 1 << 20).unwrap();
    let outbox::Numbered::Pending(found) = &found[0] else { panic!("{found:?}") };
    assert_eq!((found.event.due_at, found.event.attempt_count), (Some(NOW + 1_500), 1));
}

#[test]
fn a_failed_event_holds_its_later_ones_only() {
    let mut db = Db::with_rows(9); // a1: 1 4 7, a2: 2 5 8, a0: 3 6 9
    let epoch = db.take_over();
    let grant = db.granted(epoch, &[4]);
    db.settle(epoch, grant.token, &[(4, Verdict::Failed { reason: "x".into() })], true);
    let share = outbox::Share { publisher: 0, publishers: 1, rows: 100, bytes: 1 << 20 };
    let held = || {
        let ahead = outbox::read_ahead(&db.conn, share, 0).unwrap();
        ahead.rows.iter().filter(|f| f.held).map(|f| f.event.seq).collect::<Vec<_>>()
    };
    assert_eq!(held(), [7]);
    db.conn.execute("UPDATE outbox_events SET holds = 0 WHERE seq = 4", []).unwrap();
    assert_eq!(held(), [] as [Seq; 0]);
}

#[test]
fn a_row_that_others_settled_is_left_alone() {
    let mut db = Db::with_rows(1);
    let epoch = db.take_over();
    let grant = db.granted(epoch, &[1]);
    db.conn.execute("UPDATE outbox_events SET status = 'published', published_at = CURRENT_TIMESTAMP", []).unwrap();
    assert_eq!(db.settle(epoch, grant.token, &[(1, published(3))], true), Fenced::Applied(0));
    assert_eq!(db.row(1), ("published".into(), 0, None, None), "unproven: others published it");
}

#[test]
fn reading_ahead_is_in_commit_order_bounded_and_complete_over_the_shares() {
    let db = Db::with_rows(300);
    let mut seen = Vec::new();
    for publisher in 0..3 {
        let share = outbox::Share { publisher, publishers: 3, rows: 20, bytes: 1 << 20 };
        let mut cursor = 0;
        loop {
            let ahead = outbox::read_ahead(&db.conn, share, cursor).unwrap();
            assert!(ahead.rows.len() <= 20);
            assert!(ahead.rows.windows(2).all(|w| w[0].event.seq < w[1].event.seq));
            assert!(ahead.rows.iter().all(|f| f.event.key.owner(3) == publisher));
            seen.extend(ahead.rows.iter().map(|f| f.event.seq));
            cursor = ahead.cursor;
            if !ahead.more {
                break;
            }
        }
    }
    seen.sort_unstable();
    assert_eq!(seen, (1..=300).collect::<Vec<_>>());
}

#[test]
fn what_changes_behind_the_position_is_told() {
    let mut db = Db::with_rows(3);
    let epoch = db.take_over();
    let grant = db.granted(epoch, &[1]);
    db.settle(epoch, grant.token, &[(1, Verdict::Failed { reason: "x".into() })], true);
    assert_eq!(outbox::read_touched(&db.conn, 10).unwrap(), []);
    db.conn.execute("UPDATE outbox_events SET status = 'pending', attempt_count = 0 WHERE seq = 1", []).unwrap();
    db.conn.execute("DELETE FROM outbox_events WHERE seq = 2", []).unwrap();
    let touched = outbox::read_touched(&db.conn, 10).unwrap();
    assert_eq!(touched.iter().map(|t| t.key.to_string()).collect::<Vec<_>>(), ["asset/a1", "asset/a2"]);
    let last = touched.last().unwrap().id;
    db.write(|tx| outbox::forget_touched(tx, last));
    assert_eq!(outbox::read_touched(&db.conn, 10).unwrap(), []);
}
