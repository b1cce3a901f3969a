//! How fast events go, over the last half minute: differences of counters, sampled every few seconds.
//!
//! May import: telemetry, tokio's clock.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::status;
use crate::telemetry::metrics::{Metrics, Totals};

/// Time between two samples.
const PACE: Duration = Duration::from_secs(5);

/// Samples kept: the window is one less of them.
const SAMPLES: usize = 7;

/// The samples. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Rates(Arc<Mutex<VecDeque<(Instant, Totals)>>>);

impl Rates {
    /// Samples until it is dropped or aborted.
    pub async fn run(&self, metrics: &Metrics) {
        loop {
            self.sample(Instant::now(), metrics.totals());
            tokio::time::sleep(PACE).await;
        }
    }

    fn sample(&self, now: Instant, totals: Totals) {
        let mut samples = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if samples.len() == SAMPLES {
            samples.pop_front();
        }
        samples.push_back((now, totals));
    }

    /// From the oldest sample to now.
    pub fn per_second(&self, now: Instant, totals: Totals) -> status::Rates {
        let samples = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((since, before)) = samples.front() else { return status::Rates::default() };
        let seconds = now.saturating_duration_since(*since).as_secs_f64();
        // two readings right after each other say nothing
        let rate = |now: u64, before: u64| {
            if seconds < 0.1 { 0.0 } else { (now.saturating_sub(before) as f64 / seconds * 10.0).round() / 10.0 }
        };
        status::Rates {
            published_per_second: rate(totals.published, before.published),
            applied_per_second: rate(totals.applied, before.applied),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_rate_is_over_the_window_and_forgets_what_is_older() {
        let (rates, metrics) = (Rates::default(), Metrics::new());
        assert_eq!(rates.per_second(Instant::now(), metrics.totals()), status::Rates::default());
        metrics.published(1_000_000);
        let (sampler, counted) = (rates.clone(), metrics.clone());
        let task = tokio::spawn(async move { sampler.run(&counted).await });
        for _ in 0..40 {
            tokio::time::sleep(Duration::from_secs(1)).await;
            metrics.published(50);
            metrics.inbox_applied(2);
        }
        let now = rates.per_second(Instant::now(), metrics.totals());
        assert!((now.published_per_second - 50.0).abs() < 3.0, "{now:?}");
        assert!((now.applied_per_second - 2.0).abs() < 0.2, "{now:?}");
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(rates.per_second(Instant::now(), metrics.totals()), status::Rates::default());
        task.abort();
    }
}
