//! Leases and settlements: every write of the relay, fenced.
//!
//! A lease is one small row of `outboxd_leases` for a whole batch; the leased rows are not touched. Invariants: I2 a
//! row has at most one live lease, because one owner (the epoch) leases and keeps its own books; I3 a settlement
//! without the current epoch and the token of its lease changes nothing; I4 `attempt_count` grows only by a verdict of
//! the row's own. The commit of a lease is the barrier against ghost events: it is synchronous, so everything that was
//! read before it is on disk (`relay.barrier`).

use rusqlite::{OptionalExtension, Transaction, params};

use super::error::{Result, Step};
use super::time;
use crate::domain::event::{Millis, Seq};
use crate::domain::ordering::Token;
use crate::domain::settle::Verdict;

/// Who owns the relay of this database: grows with each take-over. A write of another epoch changes nothing.
pub type Epoch = i64;

/// Answer of a fenced write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fenced<T> {
    Applied(T),
    /// Another owner has taken over; nothing was written.
    Lost,
}

/// A batch to be leased.
#[derive(Clone, Debug)]
pub struct LeaseRequest {
    pub epoch: Epoch,
    pub publisher: usize,
    /// Ascending.
    pub seqs: Vec<Seq>,
    pub now: Millis,
    pub expires_at: Millis,
    /// Last sequence of the stream, and its creation time: whatever is published under this lease stands above it.
    pub floor: u64,
    pub stream_created: String,
}

/// A granted lease: the rows that were still pending.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    pub token: Token,
    pub seqs: Vec<Seq>,
}

/// One row's verdict under its lease.
#[derive(Clone, Debug)]
pub struct Settlement {
    pub token: Token,
    pub seq: Seq,
    pub verdict: Verdict,
    /// The row is in `outboxd_suspects`.
    pub suspect: bool,
}

/// Settlements to be written together.
#[derive(Clone, Debug, Default)]
pub struct SettleRequest {
    pub epoch: Epoch,
    pub now: Millis,
    pub stream: String,
    /// A failed row of this batch holds its aggregate.
    pub hold: bool,
    pub settlements: Vec<Settlement>,
    /// Leases with nothing left to settle.
    pub finished: Vec<Token>,
    /// Rows given back although they may be stored.
    pub unknown: Vec<Unknown>,
}

/// Whether this epoch still owns the relay.
fn owns(tx: &Transaction<'_>, epoch: Epoch) -> Result<bool> {
    let current: Option<Epoch> = tx
        .prepare_cached("SELECT CAST(value AS INTEGER) FROM outboxd_meta WHERE key = 'epoch'")
        .and_then(|mut s| s.query_row([], |row| row.get(0)).optional())
        .step("read the owner")?;
    Ok(current == Some(epoch))
}

/// Becomes the owner of the relay, with a new epoch. The leases of earlier owners are void; the rows in them that are
/// still pending become suspects: they are looked for in the stream before they are sent.
///
/// `crashed`: the owner before ended without settling; each such row's count of crashes grows.
pub fn take_over(tx: &Transaction<'_>, crashed: bool) -> Result<Epoch> {
    let step = "take the relay over";
    let epoch: Epoch = tx
        .prepare_cached(
            "INSERT INTO outboxd_meta (key, value) VALUES ('epoch', 1)
             ON CONFLICT (key) DO UPDATE SET value = CAST(value AS INTEGER) + 1 RETURNING CAST(value AS INTEGER)",
        )
        .and_then(|mut s| s.query_row([], |row| row.get(0)))
        .step(step)?;
    void_leases(tx, None, crashed)?;
    Ok(epoch)
}

/// Turns the leases of one publisher that crashed inside of this daemon into suspects. Fenced by the epoch.
pub fn rescue_publisher(tx: &Transaction<'_>, epoch: Epoch, publisher: usize) -> Result<Fenced<usize>> {
    if !owns(tx, epoch)? {
        return Ok(Fenced::Lost);
    }
    void_leases(tx, Some(publisher), true).map(Fenced::Applied)
}

fn void_leases(tx: &Transaction<'_>, publisher: Option<usize>, crashed: bool) -> Result<usize> {
    let step = "rescue leases";
    let publisher = publisher.map(|p| p as i64);
    let leases: Vec<(Token, String, i64, String)> = tx
        .prepare_cached(
            "SELECT token, seqs, floor, stream_created FROM outboxd_leases WHERE ?1 IS NULL OR publisher = ?1",
        )
        .and_then(|mut s| {
            s.query_map([publisher], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?)))?.collect()
        })
        .step(step)?;
    let mut suspect = tx
        .prepare_cached(
            "INSERT INTO outboxd_suspects (seq, crashes, floor, stream_created)
             SELECT seq, ?2, ?3, ?4 FROM outbox_events WHERE seq = ?1 AND status = 'pending'
             ON CONFLICT (seq) DO UPDATE SET crashes = crashes + excluded.crashes",
        )
        .step(step)?;
    let mut rescued = 0;
    for (_, seqs, floor, created) in &leases {
        for seq in parse_ranges(seqs) {
            rescued += suspect.execute(params![seq, i64::from(crashed), floor, created]).step(step)?;
        }
    }
    tx.prepare_cached("DELETE FROM outboxd_leases WHERE ?1 IS NULL OR publisher = ?1")
        .and_then(|mut s| s.execute([publisher]))
        .step(step)?;
    Ok(rescued)
}

/// Leases the rows of the request that are still pending.
pub fn lease(tx: &Transaction<'_>, request: &LeaseRequest) -> Result<Fenced<Grant>> {
    let step = "lease a batch";
    if !owns(tx, request.epoch)? {
        return Ok(Fenced::Lost);
    }
    let mut pending = tx
        .prepare_cached(
            "SELECT 1 FROM outbox_events INDEXED BY idx_outbox_delivery WHERE status = 'pending' AND seq = ?1",
        )
        .step(step)?;
    let mut seqs = Vec::with_capacity(request.seqs.len());
    for seq in &request.seqs {
        if pending.exists([seq]).step(step)? {
            seqs.push(*seq);
        }
    }
    if seqs.is_empty() {
        return Ok(Fenced::Applied(Grant { token: 0, seqs }));
    }
    tx.prepare_cached(
        "INSERT INTO outboxd_leases (epoch, publisher, leased_at, expires_at, stream_created, floor, seqs)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
    )
    .and_then(|mut s| {
        s.execute(params![
            request.epoch,
            request.publisher as i64,
            request.now,
            request.expires_at,
            request.stream_created,
            i64::try_from(request.floor).unwrap_or(i64::MAX),
            ranges(&seqs)
        ])
    })
    .step(step)?;
    Ok(Fenced::Applied(Grant { token: tx.last_insert_rowid(), seqs }))
}

/// Extends leases of the owner. One that is settled meanwhile is left out: the epoch is the fence.
pub fn renew(tx: &Transaction<'_>, epoch: Epoch, tokens: &[Token], expires_at: Millis) -> Result<Fenced<()>> {
    if !owns(tx, epoch)? {
        return Ok(Fenced::Lost);
    }
    let mut update = tx
        .prepare_cached("UPDATE outboxd_leases SET expires_at = ?3 WHERE token = ?1 AND epoch = ?2")
        .step("renew leases")?;
    for token in tokens {
        update.execute(params![token, epoch, expires_at]).step("renew leases")?;
    }
    Ok(Fenced::Applied(()))
}

/// Writes verdicts. Answers how many rows changed: a row that somebody else settled meanwhile is left alone.
pub fn settle(tx: &Transaction<'_>, request: &SettleRequest) -> Result<Fenced<usize>> {
    let step = "settle a batch";
    if !owns(tx, request.epoch)? {
        return Ok(Fenced::Lost);
    }
    let mut token_alive =
        tx.prepare_cached("SELECT 1 FROM outboxd_leases WHERE token = ?1 AND epoch = ?2").step(step)?;
    let mut checked = 0;
    for settlement in &request.settlements {
        if settlement.token != checked {
            if !token_alive.exists(params![settlement.token, request.epoch]).step(step)? {
                return Ok(Fenced::Lost);
            }
            checked = settlement.token;
        }
    }
    let now = time::text(request.now);
    let mut changed = publish_rows(tx, request, &now)?;
    for settlement in request.settlements.iter().filter(|one| !is_plain(&one.verdict)) {
        changed += write_verdict(tx, request, settlement, &now)?;
    }
    forget_suspects(tx, request)?;
    remember_unknown(tx, &request.unknown)?;
    let mut finish = tx.prepare_cached("DELETE FROM outboxd_leases WHERE token = ?1 AND epoch = ?2").step(step)?;
    for token in &request.finished {
        finish.execute(params![token, request.epoch]).step(step)?;
    }
    Ok(Fenced::Applied(changed))
}

/// A verdict that [`publish_rows`] writes together with its neighbours.
fn is_plain(verdict: &Verdict) -> bool {
    matches!(verdict, Verdict::Published { note: None, .. })
}

/// All plain publishes in one statement. A statement that can fire a trigger keeps a journal of the pages it changes, so
/// one UPDATE a row would copy the same pages again and again.
fn publish_rows(tx: &Transaction<'_>, request: &SettleRequest, now: &str) -> Result<usize> {
    use std::fmt::Write as _;
    let mut rows = String::from("{");
    for one in &request.settlements {
        if let Verdict::Published { stream_seq, note: None } = one.verdict {
            let comma = if rows.len() > 1 { "," } else { "" };
            // writing to a string cannot fail
            let _ = write!(rows, "{comma}\"{}\":{stream_seq}", one.seq);
        }
    }
    if rows.len() == 1 {
        return Ok(0);
    }
    rows.push('}');
    tx.prepare_cached(
        "UPDATE outbox_events SET status = 'published', attempt_count = attempt_count + 1, published_at = ?2,
             last_error = NULL, stream = ?3, stream_seq = row.value, failing_since = NULL
         FROM json_each(?1) AS row
         WHERE outbox_events.seq = CAST(row.key AS INTEGER) AND outbox_events.status = 'pending'",
    )
    .and_then(|mut s| s.execute(params![rows, now, request.stream]))
    .step("settle a batch")
}

fn forget_suspects(tx: &Transaction<'_>, request: &SettleRequest) -> Result<()> {
    for one in request.settlements.iter().filter(|one| one.suspect) {
        tx.prepare_cached("DELETE FROM outboxd_suspects WHERE seq = ?1")
            .and_then(|mut s| s.execute([one.seq]))
            .step("settle a row")?;
    }
    Ok(())
}

fn write_verdict(tx: &Transaction<'_>, request: &SettleRequest, one: &Settlement, now: &str) -> Result<usize> {
    let step = "settle a row";
    let changed = match &one.verdict {
        Verdict::Published { stream_seq, note } => tx
            .prepare_cached(
                "UPDATE outbox_events SET status = 'published', attempt_count = attempt_count + 1, published_at = ?2,
                     last_error = ?3, stream = ?4, stream_seq = ?5, failing_since = NULL
                 WHERE seq = ?1 AND status = 'pending'",
            )
            .and_then(|mut s| {
                let stream_seq = i64::try_from(*stream_seq).unwrap_or(i64::MAX);
                s.execute(params![one.seq, now, note, request.stream, stream_seq])
            })
            .step(step)?,
        Verdict::RetryAt { available_at, reason } => {
            let before = last_touched(tx)?;
            let changed = tx
                .prepare_cached(
                    "UPDATE outbox_events SET attempt_count = attempt_count + 1, available_at = ?2, last_error = ?3,
                         failing_since = coalesce(failing_since, ?4)
                     WHERE seq = ?1 AND status = 'pending'",
                )
                .and_then(|mut s| s.execute(params![one.seq, time::text(*available_at), reason, request.now]))
                .step(step)?;
            // the relay knows what it wrote itself
            tx.prepare_cached("DELETE FROM outboxd_touched WHERE id > ?1")
                .and_then(|mut s| s.execute([before]))
                .step(step)?;
            changed
        }
        Verdict::Failed { reason } => tx
            .prepare_cached(
                "UPDATE outbox_events SET status = 'failed', attempt_count = attempt_count + 1, last_error = ?2,
                     holds = ?3, failing_since = coalesce(failing_since, ?4)
                 WHERE seq = ?1 AND status = 'pending'",
            )
            .and_then(|mut s| s.execute(params![one.seq, reason, request.hold, request.now]))
            .step(step)?,
        Verdict::Release => 0,
    };
    Ok(changed)
}

fn last_touched(tx: &Transaction<'_>) -> Result<i64> {
    tx.prepare_cached("SELECT coalesce(max(id), 0) FROM outboxd_touched")
        .and_then(|mut s| s.query_row([], |row| row.get(0)))
        .step("read what was touched")
}

/// A row whose lease is given back although it may be stored: its successor looks for it first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unknown {
    pub seq: Seq,
    pub floor: u64,
    pub stream_created: String,
}

/// Gives leases back at the end of an orderly stop. Rows of unknown fate become suspects, not counted as a crash.
pub fn release(tx: &Transaction<'_>, epoch: Epoch, tokens: &[Token], unknown: &[Unknown]) -> Result<Fenced<()>> {
    let step = "release leases";
    if !owns(tx, epoch)? {
        return Ok(Fenced::Lost);
    }
    remember_unknown(tx, unknown)?;
    let mut delete = tx.prepare_cached("DELETE FROM outboxd_leases WHERE token = ?1 AND epoch = ?2").step(step)?;
    for token in tokens {
        delete.execute(params![token, epoch]).step(step)?;
    }
    Ok(Fenced::Applied(()))
}

fn remember_unknown(tx: &Transaction<'_>, unknown: &[Unknown]) -> Result<()> {
    let step = "remember rows of unknown fate";
    let mut suspect = tx
        .prepare_cached(
            "INSERT INTO outboxd_suspects (seq, crashes, floor, stream_created) VALUES (?1, 0, ?2, ?3)
             ON CONFLICT (seq) DO NOTHING",
        )
        .step(step)?;
    for one in unknown {
        let floor = i64::try_from(one.floor).unwrap_or(i64::MAX);
        suspect.execute(params![one.seq, floor, one.stream_created]).step(step)?;
    }
    Ok(())
}

/// Ascending numbers as text: `1-300,305`.
pub fn ranges(seqs: &[Seq]) -> String {
    use std::fmt::Write as _;
    let mut text = String::new();
    let mut rest = seqs.iter().copied().peekable();
    while let Some(first) = rest.next() {
        let mut last = first;
        while rest.peek() == Some(&(last + 1)) {
            last = rest.next().unwrap_or(last);
        }
        let comma = if text.is_empty() { "" } else { "," };
        let written =
            if first == last { write!(text, "{comma}{first}") } else { write!(text, "{comma}{first}-{last}") };
        debug_assert!(written.is_ok());
    }
    text
}

/// The numbers in a text made by [`ranges`]; what cannot be read is left out.
pub fn parse_ranges(text: &str) -> Vec<Seq> {
    let mut seqs = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(first), Ok(last)) = (first.parse::<Seq>(), last.parse::<Seq>()) {
            seqs.extend(first..=last);
        }
    }
    seqs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_short_and_reversible() {
        for seqs in [vec![], vec![7], vec![1, 2, 3], vec![1, 3, 4, 5, 9], (1..600).collect()] {
            assert_eq!(parse_ranges(&ranges(&seqs)), seqs);
        }
        assert_eq!(ranges(&[1, 2, 3, 7, 9, 10]), "1-3,7,9-10");
    }
}
