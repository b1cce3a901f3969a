//! The closing proof: what was committed against what the stream holds and what node b applied.

use std::time::Duration;

use super::acts::{STREAM, Scene};
use super::stage::Stage;
use crate::testbed::application::{self, Ledger, NewEvent, write_asset};
use crate::testbed::proof::{Proof, percentile};
use crate::testbed::stream::Stored;
use crate::testbed::{Trouble, wait};

impl Scene {
    /// A last event, an orderly stop, the table. Answers whether all of it holds.
    pub(super) fn close(&mut self, stage: &mut Stage) -> Result<bool, Trouble> {
        stage.act("The proof");
        let inbox_duplicates = self.b.status()?["inbox"]["duplicates"].as_u64().unwrap_or(0);
        stage.step("a last event, then SIGTERM", || {
            let record = self.a.folder().join("last");
            let mut last = application::Application::open(&self.a.database(), &record, &self.ledger)?;
            last.commit_with(&[NewEvent::asset("last-evt-1", "last", 1, "Last")], write_asset)?;
            self.rest()?;
            let bound = Duration::from_secs(30);
            let ends = [self.a.stop(bound)?, self.b.stop(bound)?];
            match ends.iter().all(|end| end.success()) {
                true => Ok("a fresh event passed; both daemons drained and ended with exit code 0"),
                false => Err(Trouble::failed(format!("SIGTERM ended the daemons with {} and {}", ends[0], ends[1]))),
            }
        })?;
        wait::interrupted()?;

        let messages = self.client()?.messages(STREAM)?;
        let proof = Proof::of(&self.ledger, &messages);
        let steady = latencies_of(&self.ledger, &messages, "steady-");
        let (a, b) = (self.a.database(), self.b.database());
        let published = application::count(&a, "published")?;
        let applied =
            application::number(&b, "SELECT count(*) FROM (SELECT DISTINCT asset_id, version FROM demo_effects)")?;
        let effects = application::number(&b, "SELECT count(*) FROM demo_effects")?;
        const DIGEST: &str = "SELECT count(*) || ' ' || coalesce(group_concat(asset_id || ' ' || name || ' ' || version, \
                              char(10)), '') FROM (SELECT * FROM assets ORDER BY asset_id)";
        let same = application::text(&a, DIGEST)? == application::text(&b, DIGEST)?;
        let assets = application::number(&b, "SELECT count(*) FROM assets")?;

        let owed = proof.committed;
        let stopped = self.caught + inbox_duplicates;
        let count = |n: usize| (n.to_string(), Some(n == 0));
        let rows: Vec<Row> = vec![
            ("committed", (owed.to_string(), Some(owed > 0)), "events in transactions of node a"),
            (
                "published",
                (published.to_string(), Some(published == owed as i64)),
                "with the stream sequence of their ack",
            ),
            (
                "in the stream",
                (proof.stored.to_string(), Some(proof.stored == owed)),
                "read back, payloads compared byte by byte",
            ),
            ("applied once", (applied.to_string(), Some(applied == owed as i64)), "effects at node b"),
            ("lost", count(proof.lost.len()), ""),
            ("out of order", count(proof.out_of_order.len()), "within an aggregate, in the stream"),
            ("stored twice", count(proof.twice.len()), ""),
            ("applied twice", count((effects - applied).max(0) as usize), ""),
            ("altered or unknown", count(proof.altered.len() + proof.unissued.len()), ""),
            ("equal assets", (assets.to_string(), Some(same)), "both databases, row by row"),
            ("kill -9", (self.kills.to_string(), None), ""),
            (
                "duplicates stopped",
                (stopped.to_string(), Some(stopped > 0)),
                "stored but not noted at a kill, or delivered again",
            ),
            ("commit to stream, p50", (millis(percentile(&steady, 0.50)), None), "at 200 transactions a second"),
            ("commit to stream, p95", (millis(percentile(&steady, 0.95)), None), ""),
        ];
        stage.plain("");
        for (name, (value, good), note) in &rows {
            stage.row(name, value, *good, note);
        }
        if !proof.holds() {
            stage.quote(&proof.to_string());
        }
        Ok(proof.holds() && rows.iter().all(|(_, (_, good), _)| *good != Some(false)))
    }
}

/// Name, value and whether it is as it must be (`None`: no claim), note.
type Row = (&'static str, (String, Option<bool>), &'static str);

/// Commit-to-stream times of the events whose id begins with `prefix`, sorted.
fn latencies_of(ledger: &Ledger, messages: &[Stored], prefix: &str) -> Vec<Duration> {
    let issued = ledger.entries();
    let mut all: Vec<Duration> = messages
        .iter()
        .filter_map(|m| {
            let id = m.header("ce-id");
            let event = issued.get(id).filter(|_| id.starts_with(prefix))?;
            Some(Duration::from_nanos(u64::try_from(m.stored_ns - event.committed_ns).unwrap_or(0)))
        })
        .collect();
    all.sort();
    all
}

fn millis(d: Duration) -> String {
    format!("{:.2} ms", d.as_secs_f64() * 1_000.0)
}
