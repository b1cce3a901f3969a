//! The limit that SQLite sets: the relay's own reads, leases and settlements of a backlog, with nothing published.

use std::fmt::Display;
use std::path::Path;
use std::time::{Duration, Instant};

use rusqlite::{Connection, Transaction, TransactionBehavior};

use crate::domain::event::Seq;
use crate::domain::settle::Verdict;
use crate::store::connection::{self, Access, Settings, Synchronous};
use crate::store::lease::{self, Fenced, LeaseRequest, SettleRequest, Settlement};
use crate::store::outbox::{self, Share};
use crate::testbed::Trouble;

/// Rows of one lease, and bytes: the defaults of `relay.batch` and `relay.batch_bytes`.
const BATCH: Share = Share { publisher: 0, publishers: 1, rows: 512, bytes: 4 << 20 };

/// Leases and settles every pending row in batches as the relay does, synchronous=full, one connection that reads and
/// one that writes; answers the time it took.
pub(super) fn lease_and_settle(database: &Path, events: usize) -> Result<Duration, Trouble> {
    let open = |access| connection::open(database, access, &Settings::default()).map(|opened| opened.conn);
    let reader = open(Access::Read).map_err(step("open a reader"))?;
    outbox::register(&reader).map_err(step("prepare a reader"))?;
    let mut writer = open(Access::Write).map_err(step("open a writer"))?;
    connection::set_synchronous(&writer, Synchronous::Full).map_err(step("set synchronous"))?;
    let epoch = write(&mut writer, |tx| lease::take_over(tx, false))?;

    let begun = Instant::now();
    let (mut cursor, mut settled) = (0, 0);
    loop {
        let ahead = outbox::read_ahead(&reader, BATCH, cursor).map_err(step("read the outbox"))?;
        cursor = ahead.cursor;
        let seqs: Vec<Seq> = ahead.rows.iter().map(|row| row.event.seq).collect();
        if !seqs.is_empty() {
            let request = LeaseRequest {
                epoch,
                publisher: 0,
                seqs,
                now: 0,
                expires_at: 30_000,
                floor: 0,
                stream_created: String::new(),
            };
            let grant = owned(write(&mut writer, |tx| lease::lease(tx, &request))?)?;
            let settlements = grant.seqs.iter().map(|seq| Settlement {
                token: grant.token,
                seq: *seq,
                verdict: Verdict::Published { stream_seq: *seq as u64, note: None },
                suspect: false,
            });
            let request = SettleRequest {
                epoch,
                now: 0,
                stream: "EVENTS".to_owned(),
                hold: true,
                settlements: settlements.collect(),
                finished: vec![grant.token],
                unknown: Vec::new(),
            };
            settled += owned(write(&mut writer, |tx| lease::settle(tx, &request))?)?;
        }
        if !ahead.more {
            break;
        }
    }
    let took = begun.elapsed();
    match settled == events {
        true => Ok(took),
        false => Err(Trouble::failed(format!("{settled} of {events} rows were settled"))),
    }
}

fn write<T, E: Display>(
    writer: &mut Connection,
    job: impl FnOnce(&Transaction<'_>) -> Result<T, E>,
) -> Result<T, Trouble> {
    let tx = writer.transaction_with_behavior(TransactionBehavior::Immediate).map_err(step("begin a transaction"))?;
    let done = job(&tx).map_err(step("write"))?;
    tx.commit().map_err(step("commit"))?;
    Ok(done)
}

fn owned<T>(fenced: Fenced<T>) -> Result<T, Trouble> {
    match fenced {
        Fenced::Applied(value) => Ok(value),
        Fenced::Lost => Err(Trouble::failed("somebody else took the relay over in a database of our own")),
    }
}

fn step<E: Display>(what: &'static str) -> impl FnOnce(E) -> Trouble {
    move |e| Trouble::failed(format!("cannot {what}: {e}"))
}

#[cfg(test)]
mod tests {
    use super::super::{AGGREGATES, PAYLOAD};
    use super::*;
    use crate::store::schema;
    use crate::testbed::application::{self, Application, Generator, Ledger};
    use crate::testbed::workdir::Workdir;

    #[test]
    fn every_row_of_a_backlog_is_leased_and_settled_once() {
        let dir = Workdir::new("limit").expect("a folder");
        let database = dir.path().join("app.db");
        schema::init(&database, "plant-a", false).expect("tables");
        let record = dir.path().join("record");
        let mut application = Application::open(&database, &record, &Ledger::default()).expect("an application");
        application.commit(&Generator::new("asset", AGGREGATES).sized(PAYLOAD).take(2_000)).expect("committed");
        let took = lease_and_settle(&database, 2_000).expect("settled");
        assert!(took > Duration::ZERO);
        assert_eq!(application::count(&database, "published").expect("readable"), 2_000);
        assert_eq!(application::number(&database, "SELECT count(*) FROM outboxd_leases").expect("readable"), 0);
        assert!(lease_and_settle(&database, 1).is_err(), "nothing is left to settle");
    }
}
