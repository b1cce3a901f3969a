//! The store against a model: random operations on a real SQLite file and on a `BTreeMap`; after every step both agree.
//! A crash drops the connection in the middle of a transaction and opens the file again.

use std::collections::{BTreeMap, BTreeSet};

use outboxd::domain::event::{Millis, Seq};
use outboxd::domain::settle::Verdict;
use outboxd::store::connection::{self, Access};
use outboxd::store::error::Result;
use outboxd::store::lease::{self, Fenced, LeaseRequest, SettleRequest, Settlement};
use outboxd::store::{operate, schema};
use proptest::prelude::*;
use rusqlite::{Connection, Transaction, TransactionBehavior};

const NOW: Millis = 1_800_000_000_000;

#[derive(Clone, Debug, PartialEq, Eq)]
struct Row {
    status: &'static str,
    attempts: i64,
    stream_seq: Option<i64>,
    has_reason: bool,
}

#[derive(Clone, Debug)]
enum Step {
    /// The application commits a row, or rolls it back.
    Insert {
        commit: bool,
    },
    /// The owner leases the pending rows among the first `n`.
    Lease(usize),
    /// An owner settles a row of one of its leases; `stale`: one that was taken over.
    Settle {
        lease: usize,
        row: usize,
        fate: Fate,
        stale: bool,
    },
    Finish(usize),
    /// The process dies, with a transaction open, and another takes over.
    Crash,
    Retry(usize),
    Discard(usize),
}

#[derive(Clone, Copy, Debug)]
enum Fate {
    Published,
    Retry,
    Failed,
}

struct World {
    path: std::path::PathBuf,
    conn: Option<Connection>,
    epoch: i64,
    model: BTreeMap<Seq, Row>,
    leases: Vec<(i64, Vec<Seq>)>,
    /// Leases of epochs that are over.
    void: Vec<(i64, i64, Vec<Seq>)>,
    suspects: BTreeSet<Seq>,
    inserted: usize,
    discarded: usize,
    next_stream_seq: u64,
    _dir: tempfile::TempDir,
}

impl World {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.db");
        schema::init(&path, "test", false).unwrap();
        let mut world = Self {
            path,
            conn: None,
            epoch: 0,
            model: BTreeMap::new(),
            leases: Vec::new(),
            void: Vec::new(),
            suspects: BTreeSet::new(),
            inserted: 0,
            discarded: 0,
            next_stream_seq: 1,
            _dir: dir,
        };
        world.open();
        world
    }

    fn open(&mut self) {
        let settings = connection::Settings::default();
        self.conn = Some(connection::open(&self.path, Access::Write, &settings).unwrap().conn);
        self.epoch = self.write(|tx| lease::take_over(tx, true));
    }

    fn write<T>(&mut self, job: impl FnOnce(&Transaction<'_>) -> Result<T>) -> T {
        let tx = self.conn.as_mut().unwrap().transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
        let value = job(&tx).unwrap();
        tx.commit().unwrap();
        value
    }

    fn insert(&mut self, commit: bool) {
        let n = self.inserted + 1;
        let tx = self.conn.as_mut().unwrap().transaction().unwrap();
        tx.execute(
            "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, aggregate_version, event_type,
                 schema_version, payload_json) VALUES (?1, 'asset', 'a', ?2, 'asset.updated', 1, '{}')",
            (format!("e{n}"), n as i64),
        )
        .unwrap();
        let seq = tx.last_insert_rowid();
        if commit {
            tx.commit().unwrap();
            self.inserted += 1;
            self.model.insert(seq, Row { status: "pending", attempts: 0, stream_seq: None, has_reason: false });
        }
    }

    fn lease(&mut self, rows: usize) {
        let seqs: Vec<Seq> = self.model.keys().copied().take(rows).collect();
        let leased: BTreeSet<Seq> = self.leases.iter().flat_map(|(_, seqs)| seqs.iter().copied()).collect();
        // the owner keeps its own books: what it holds already it does not lease again
        let seqs: Vec<Seq> = seqs.into_iter().filter(|seq| !leased.contains(seq)).collect();
        let request = LeaseRequest {
            epoch: self.epoch,
            publisher: 0,
            seqs: seqs.clone(),
            now: NOW,
            expires_at: NOW + 1_000,
            floor: self.next_stream_seq,
            stream_created: "then".into(),
        };
        let Fenced::Applied(grant) = self.write(|tx| lease::lease(tx, &request)) else { panic!("the owner lost") };
        let pending: Vec<Seq> = seqs.into_iter().filter(|seq| self.model[seq].status == "pending").collect();
        assert_eq!(grant.seqs, pending);
        if !pending.is_empty() {
            self.leases.push((grant.token, pending));
        }
    }

    fn settle(&mut self, which: usize, row: usize, fate: Fate, stale: bool) {
        let (epoch, token, seqs) = if stale {
            let Some((epoch, token, seqs)) = self.void.get(which % self.void.len().max(1)) else { return };
            (*epoch, *token, seqs.clone())
        } else {
            let Some((token, seqs)) = self.leases.get(which % self.leases.len().max(1)) else { return };
            (self.epoch, *token, seqs.clone())
        };
        let seq = seqs[row % seqs.len()];
        let stream_seq = self.next_stream_seq;
        let verdict = match fate {
            Fate::Published => Verdict::Published { stream_seq, note: None },
            Fate::Retry => Verdict::RetryAt { available_at: NOW + 5, reason: "why".into() },
            Fate::Failed => Verdict::Failed { reason: "why".into() },
        };
        let request = SettleRequest {
            epoch,
            now: NOW,
            stream: "EVENTS".into(),
            hold: true,
            settlements: vec![Settlement { token, seq, verdict, suspect: true }],
            ..SettleRequest::default()
        };
        let outcome = self.write(|tx| lease::settle(tx, &request));
        if stale {
            assert_eq!(outcome, Fenced::Lost, "I3");
            return;
        }
        let known = self.model.get_mut(&seq).filter(|row| row.status == "pending");
        assert_eq!(outcome, Fenced::Applied(usize::from(known.is_some())));
        self.suspects.remove(&seq);
        let Some(known) = known else { return };
        known.attempts += 1;
        match fate {
            Fate::Published => {
                (known.status, known.stream_seq, known.has_reason) = ("published", Some(stream_seq as i64), false);
                self.next_stream_seq += 1;
            }
            Fate::Retry => known.has_reason = true,
            Fate::Failed => (known.status, known.has_reason) = ("failed", true),
        }
    }

    fn finish(&mut self, which: usize) {
        if self.leases.is_empty() {
            return;
        }
        let (token, _) = self.leases.remove(which % self.leases.len());
        let epoch = self.epoch;
        assert_eq!(self.write(|tx| lease::release(tx, epoch, &[token], &[])), Fenced::Applied(()));
    }

    fn crash(&mut self) {
        let conn = self.conn.take().unwrap();
        conn.execute_batch("BEGIN IMMEDIATE; UPDATE outbox_events SET attempt_count = 99").unwrap();
        drop(conn);
        for (token, seqs) in std::mem::take(&mut self.leases) {
            self.suspects.extend(seqs.iter().filter(|seq| self.model.get(seq).is_some_and(|r| r.status == "pending")));
            self.void.push((self.epoch, token, seqs));
        }
        self.open();
    }

    fn ids(&self, which: usize) -> Option<(Seq, Vec<String>)> {
        let seq = *self.model.keys().nth(which % self.model.len().max(1))?;
        let sql = "SELECT event_id FROM outbox_events WHERE seq = ?1";
        let id = self.conn.as_ref().unwrap().query_row(sql, [seq], |r| r.get(0)).unwrap();
        Some((seq, vec![id]))
    }

    fn retry(&mut self, which: usize) {
        let Some((seq, ids)) = self.ids(which) else { return };
        let changed = self.write(|tx| operate::retry(tx, "test", &ids));
        let row = self.model.get_mut(&seq).unwrap();
        assert_eq!(changed.done.len(), usize::from(row.status == "failed"));
        if row.status == "failed" {
            *row = Row { status: "pending", attempts: 0, stream_seq: None, has_reason: false };
        }
    }

    fn discard(&mut self, which: usize) {
        let Some((seq, ids)) = self.ids(which) else { return };
        let changed = self.write(|tx| operate::discard(tx, "test", &ids, "test", NOW));
        if changed.done.len() == 1 {
            let leased = self.leases.iter().any(|(_, seqs)| seqs.contains(&seq));
            let row = self.model.remove(&seq).unwrap();
            assert!(row.status != "published" && !(leased && row.status == "pending"), "discarded {row:?}");
            self.suspects.remove(&seq);
            self.discarded += 1;
        }
    }

    /// The file says what the model says, and the invariants hold in it.
    fn agree(&self) {
        let conn = self.conn.as_ref().unwrap();
        let mut statement = conn
            .prepare("SELECT seq, status, attempt_count, stream_seq, last_error IS NOT NULL FROM outbox_events")
            .unwrap();
        let rows = statement.query_map([], |r| {
            let status: String = r.get(1)?;
            let status = ["pending", "published", "failed"].into_iter().find(|s| *s == status).expect("a known status");
            let row = Row { status, attempts: r.get(2)?, stream_seq: r.get(3)?, has_reason: r.get(4)? };
            Ok((r.get::<_, Seq>(0)?, row))
        });
        let found: BTreeMap<Seq, Row> = rows.unwrap().map(std::result::Result::unwrap).collect();
        assert_eq!(found, self.model);
        for (seq, row) in &found {
            assert_eq!(row.status == "published", row.stream_seq.is_some(), "I1: {seq} {row:?}");
            assert!(row.status != "failed" || row.has_reason, "I7: {seq} {row:?}");
        }
        assert_eq!(found.len(), self.inserted - self.discarded, "I8");
        let number = |sql: &str| conn.query_row(sql, [], |r| r.get::<_, i64>(0)).unwrap();
        assert_eq!(number("SELECT count(*) FROM outboxd_leases") as usize, self.leases.len(), "I2");
        let mut statement = conn.prepare("SELECT seq FROM outboxd_suspects ORDER BY seq").unwrap();
        let suspects: Vec<Seq> =
            statement.query_map([], |r| r.get(0)).unwrap().map(std::result::Result::unwrap).collect();
        assert_eq!(suspects, self.suspects.iter().copied().collect::<Vec<_>>());
    }
}

fn step() -> impl Strategy<Value = Step> {
    let fate = prop_oneof![3 => Just(Fate::Published), 1 => Just(Fate::Retry), 1 => Just(Fate::Failed)];
    prop_oneof![
        6 => any::<bool>().prop_map(|commit| Step::Insert { commit }),
        4 => (1..6usize).prop_map(Step::Lease),
        6 => (0..4usize, 0..6usize, fate, prop::bool::weighted(0.2))
            .prop_map(|(lease, row, fate, stale)| Step::Settle { lease, row, fate, stale }),
        1 => (0..4usize).prop_map(Step::Finish),
        1 => Just(Step::Crash),
        1 => (0..8usize).prop_map(Step::Retry),
        1 => (0..8usize).prop_map(Step::Discard),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_file_says_what_the_model_says(steps in prop::collection::vec(step(), 1..60)) {
        let mut world = World::new();
        for step in steps {
            match step {
                Step::Insert { commit } => world.insert(commit),
                Step::Lease(rows) => world.lease(rows),
                Step::Settle { lease, row, fate, stale } => world.settle(lease, row, fate, stale),
                Step::Finish(lease) => world.finish(lease),
                Step::Crash => world.crash(),
                Step::Retry(row) => world.retry(row),
                Step::Discard(row) => world.discard(row),
            }
            world.agree();
        }
    }
}
