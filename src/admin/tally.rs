//! What only the database knows, for status, metrics and readiness: read by the daemon, or by a command from the file.
//!
//! The count of published rows is the one that grows with the history: it is kept for a hundred times of what it cost,
//! and never longer than a minute. May import: the store's public calls.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::ReadTally;
use super::status::Tally;
use crate::domain::event::Millis;
use crate::ports::Clock;
use crate::store::connection::{self, Access, Settings};
use crate::store::error::Result;
use crate::store::pool::Store;
use crate::store::report::{self, Counts, Sizes};
use crate::store::schema;

/// Oldest count of published rows that is shown.
const KEEP_MOST: Duration = Duration::from_secs(60);

/// A count may use one part in so many of a core.
const KEEP_TIMES: u32 = 100;

/// Reads through the reading connections of the daemon. `source` is the one in force.
pub fn reader(store: Store, source: String, clock: Arc<dyn Clock>) -> ReadTally {
    let kept = Arc::new(Kept::default());
    Arc::new(move || {
        let (store, kept, source, now) = (store.clone(), kept.clone(), source.clone(), clock.now());
        Box::pin(async move {
            let path = store.path().to_path_buf();
            let place = path.clone();
            let (counted, published, sizes) = store
                .read(move |conn| {
                    let published = kept.get(|| report::published(conn))?;
                    Ok((report::counts(conn, now)?, published, report::sizes(&place)))
                })
                .await?;
            Ok(shown(&path, Some(source), counted, published, sizes))
        })
    })
}

/// Reads the file at `path`, which no daemon serves.
pub fn from_file(path: &Path, now: Millis) -> Result<Tally> {
    let opened = connection::open(path, Access::Read, &Settings::default())?;
    schema::require(&opened.conn, path)?;
    let counted = report::counts(&opened.conn, now)?;
    let published = report::published(&opened.conn)?;
    Ok(shown(path, None, counted, published, report::sizes(path)))
}

fn shown(path: &Path, source: Option<String>, counted: Counts, published: u64, sizes: Sizes) -> Tally {
    let Counts {
        source: kept_source,
        pending,
        failed,
        oldest_pending_age_seconds,
        held_aggregates,
        leased,
        inbox_processed,
        inbox_duplicates,
        inbox_dead,
        inbox_stored: _,
        paused_until,
    } = counted;
    Tally {
        source: source.unwrap_or(kept_source),
        path: path.display().to_string(),
        pending,
        failed,
        published,
        oldest_pending_age_seconds,
        held_aggregates,
        leased,
        inbox_processed,
        inbox_duplicates,
        inbox_dead,
        paused_until,
        bytes: sizes.bytes,
        wal_bytes: sizes.wal_bytes,
        disk_free_bytes: sizes.disk_free_bytes,
    }
}

/// A count that is expensive, with the time until which it is good.
#[derive(Debug, Default)]
struct Kept(Mutex<Option<(Instant, u64)>>);

impl Kept {
    fn get(&self, count: impl FnOnce() -> Result<u64>) -> Result<u64> {
        let start = Instant::now();
        let known = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, value)) = known.filter(|(until, _)| start < *until) {
            return Ok(value);
        }
        let value = count()?;
        let end = Instant::now();
        let good_until = end + ((end - start) * KEEP_TIMES).min(KEEP_MOST);
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some((good_until, value));
        Ok(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_count_is_kept_for_a_hundred_times_its_cost_and_a_minute_at_most() {
        let kept = Kept::default();
        // under a paused clock counting costs nothing: it is done each time
        assert_eq!(kept.get(|| Ok(1)).unwrap(), 1);
        assert_eq!(kept.get(|| Ok(2)).unwrap(), 2);
        *kept.0.lock().unwrap() = Some((Instant::now() + KEEP_MOST, 4));
        assert_eq!(kept.get(|| Ok(5)).unwrap(), 4);
        tokio::time::advance(KEEP_MOST).await;
        assert_eq!(kept.get(|| Ok(5)).unwrap(), 5);
    }

    #[test]
    fn a_file_is_counted_without_a_daemon_and_a_missing_one_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.db");
        let missing = from_file(&path, 0).unwrap_err();
        assert!(missing.to_string().contains("a.db"), "{missing}");
        schema::init(&path, "plant-a", false).unwrap();
        let tally = from_file(&path, 0).unwrap();
        assert_eq!((tally.source.as_str(), tally.pending, tally.published), ("plant-a", 0, 0));
        assert!(tally.bytes > 0);
    }
}
