//! The judge: what applications committed against what the stream holds and what a second node applied. It shares no
//! code with the product, and knows only the tables, the wire and the application's own record.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::time::Duration;

use super::application::Ledger;
use super::stream::Stored;

/// What was found. All but `committed`, `stored` and the latencies must be zero.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Proof {
    pub committed: usize,
    /// Committed events that the stream holds.
    pub stored: usize,
    /// Committed events that it does not hold.
    pub lost: Vec<String>,
    /// Second and later copies of an event.
    pub twice: Vec<String>,
    /// Events behind a later version of their aggregate.
    pub out_of_order: Vec<String>,
    /// Messages that nobody committed.
    pub unissued: Vec<String>,
    /// Messages whose payload is not the committed one.
    pub altered: Vec<String>,
    /// From the return of COMMIT to the time at which JetStream stored the event, sorted.
    pub latencies: Vec<Duration>,
}

impl Proof {
    /// Compares the stream with the record; `messages` stand in stream order.
    pub fn of(ledger: &Ledger, messages: &[Stored]) -> Self {
        let issued = ledger.entries();
        let mut proof = Self { committed: issued.len(), ..Self::default() };
        let mut seen: HashSet<&str> = HashSet::new();
        let mut newest: HashMap<&str, i64> = HashMap::new();
        for message in messages {
            let id = message.header("ce-id");
            let Some((id, event)) = issued.get_key_value(id) else {
                proof.unissued.push(format!("{id} at {}", message.sequence));
                continue;
            };
            if event.payload.as_bytes() != &message.payload[..] {
                proof.altered.push(id.clone());
            }
            if !seen.insert(id) {
                proof.twice.push(id.clone());
                continue;
            }
            let newest = newest.entry(&event.aggregate).or_insert(0);
            if event.version <= *newest {
                proof.out_of_order.push(id.clone());
            }
            *newest = event.version.max(*newest);
            let took = u64::try_from(message.stored_ns - event.committed_ns).unwrap_or(0);
            proof.latencies.push(Duration::from_nanos(took));
        }
        proof.stored = seen.len();
        proof.lost = issued.keys().filter(|id| !seen.contains(id.as_str())).cloned().collect();
        proof.lost.sort();
        proof.latencies.sort();
        proof
    }

    /// Nothing is lost, doubled, disordered, invented or altered, and there was something to judge.
    pub fn holds(&self) -> bool {
        let wrong = [&self.lost, &self.twice, &self.out_of_order, &self.unissued, &self.altered];
        self.committed > 0 && wrong.iter().all(|w| w.is_empty())
    }

    /// The latency below which `share` (0 to 1) of the events stayed; zero where there were none.
    pub fn latency(&self, share: f64) -> Duration {
        percentile(&self.latencies, share)
    }
}

impl fmt::Display for Proof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "committed {}, stored {}", self.committed, self.stored)?;
        let kinds = [
            ("lost", &self.lost),
            ("twice", &self.twice),
            ("out of order", &self.out_of_order),
            ("unissued", &self.unissued),
            ("altered", &self.altered),
        ];
        for (name, ids) in kinds {
            write!(f, ", {name} {}", ids.len())?;
            if let Some(first) = ids.first() {
                write!(f, " (first {first})")?;
            }
        }
        Ok(())
    }
}

/// The value below which `share` (0 to 1) of sorted values stay (nearest rank).
pub fn percentile(sorted: &[Duration], share: f64) -> Duration {
    let rank = (share.clamp(0.0, 1.0) * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::super::application::{Application, Generator, NewEvent};
    use super::super::workdir::Workdir;
    use super::*;

    /// A ledger of `events` through a real table, so that the application's part is tried too.
    fn ledger(events: &[NewEvent]) -> Ledger {
        let dir = Workdir::new("proof").expect("a folder");
        let database = dir.path().join("app.db");
        let made = rusqlite::Connection::open(&database).expect("a database");
        let columns =
            "event_id, aggregate_type, aggregate_id, aggregate_version, event_type, schema_version, payload_json";
        made.execute_batch(&format!("CREATE TABLE outbox_events ({columns})")).expect("a table");
        let ledger = Ledger::default();
        let record = dir.path().join("record");
        let mut application = Application::open(&database, &record, &ledger).expect("an application");
        application.roll_back_with(&Generator::new("undone", 1).take(3), |_, _| Ok(())).expect("rolled back");
        application.commit(events).expect("committed");
        let recorded = std::fs::read_to_string(&record).expect("a record");
        assert_eq!(recorded.lines().count(), events.len(), "only committed ids are recorded");
        ledger
    }

    fn stored(event: &NewEvent, sequence: u64) -> Stored {
        Stored {
            sequence,
            subject: format!("events.asset.{}.updated", event.aggregate_id),
            headers: HashMap::from([("ce-id".to_owned(), event.event_id.clone())]),
            payload: Bytes::copy_from_slice(event.payload.as_bytes()),
            stored_ns: i128::MAX >> 64,
        }
    }

    #[test]
    fn a_faithful_stream_passes() {
        let events = Generator::new("a", 3).take(9);
        let stream: Vec<_> = (1..).zip(&events).map(|(n, e)| stored(e, n)).collect();
        let proof = Proof::of(&ledger(&events), &stream);
        assert!(proof.holds(), "{proof}");
        assert_eq!((proof.committed, proof.stored, proof.latencies.len()), (9, 9, 9));
    }

    #[test]
    fn every_kind_of_wrong_is_seen() {
        let events = Generator::new("a", 1).take(4);
        let ledger = ledger(&events);
        let faithful: Vec<_> = (1..).zip(&events).map(|(n, e)| stored(e, n)).collect();
        let told = |change: &dyn Fn(&mut Vec<Stored>)| {
            let mut stream = faithful.clone();
            change(&mut stream);
            let proof = Proof::of(&ledger, &stream);
            assert!(!proof.holds(), "{proof}");
            proof
        };
        assert_eq!(told(&|s| drop(s.remove(2))).lost.len(), 1);
        assert_eq!(told(&|s| s.push(faithful[3].clone())).twice.len(), 1);
        assert_eq!(told(&|s| s.swap(1, 2)).out_of_order.len(), 1);
        assert_eq!(told(&|s| s[0].payload = Bytes::from_static(b"{}")).altered.len(), 1);
        let stranger = stored(&NewEvent::asset("stranger", "x", 1, "x"), 5);
        assert_eq!(told(&|s| s.push(stranger.clone())).unissued.len(), 1);
        assert!(!Proof::of(&Ledger::default(), &[]).holds(), "nothing at all proves nothing");
    }

    #[test]
    fn percentiles_are_nearest_ranks() {
        let ms: Vec<_> = (1..=100).map(Duration::from_millis).collect();
        assert_eq!(percentile(&ms, 0.5), Duration::from_millis(50));
        assert_eq!(percentile(&ms, 0.99), Duration::from_millis(99));
        assert_eq!(percentile(&ms, 1.0), Duration::from_millis(100));
        assert_eq!(percentile(&[], 0.5), Duration::ZERO);
    }

    #[test]
    fn a_sized_generator_makes_payloads_of_that_size() {
        let mut generator = Generator::new("a", 1000).sized(300);
        for event in generator.take(50) {
            assert!((295..=305).contains(&event.payload.len()), "{}", event.payload.len());
        }
    }
}
