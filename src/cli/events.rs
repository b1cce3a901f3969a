//! `outboxd events list | show | tail` and `audit`: read from the file, whether a daemon runs or not.

use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use super::render::{self, Listing};
use super::{CliError, Exit};
use crate::domain::event::{Millis, Seq};
use crate::store::report::{self, EventLine, Filter};
use crate::store::{audit as trail, direct};

/// The filters of `events list`, as typed.
#[derive(Clone, Debug, Default)]
pub struct ListOptions {
    pub status: Option<String>,
    /// `TYPE/ID`.
    pub aggregate: Option<String>,
    pub event_type: Option<String>,
    pub older_than: Option<Duration>,
    pub limit: u32,
}

impl ListOptions {
    /// The filter for the store.
    ///
    /// # Errors
    /// A usage error for an unknown status, or an aggregate without a slash.
    pub fn filter(&self, now: Millis) -> Result<Filter, CliError> {
        if let Some(status) = self.status.as_deref().filter(|s| !matches!(*s, "pending" | "published" | "failed")) {
            return Err(
                CliError::usage(format!("no event has the status {status}")).fix("pending, published or failed")
            );
        }
        let aggregate = match self.aggregate.as_deref().map(|a| a.split_once('/')) {
            None => None,
            Some(Some((kind, id))) => Some((kind.to_owned(), id.to_owned())),
            Some(None) => {
                return Err(CliError::usage("an aggregate is written TYPE/ID").fix("--aggregate asset/asset-042"));
            }
        };
        let age = |d: Duration| i64::try_from(d.as_millis()).unwrap_or(i64::MAX);
        Ok(Filter {
            status: self.status.clone(),
            aggregate,
            event_type: self.event_type.clone(),
            created_before: self.older_than.map(|d| now.saturating_sub(age(d))),
        })
    }
}

const COLUMNS: [&str; 14] = [
    "seq",
    "event_id",
    "aggregate_type",
    "aggregate_id",
    "aggregate_version",
    "event_type",
    "status",
    "attempt_count",
    "created_at",
    "available_at",
    "published_at",
    "stream",
    "stream_seq",
    "last_error",
];

fn row(line: &EventLine) -> Vec<Value> {
    vec![
        line.seq.into(),
        line.event_id.clone().into(),
        line.aggregate_type.clone().into(),
        line.aggregate_id.clone().into(),
        line.aggregate_version.into(),
        line.event_type.clone().into(),
        line.status.clone().into(),
        line.attempt_count.into(),
        line.created_at.clone().into(),
        line.available_at.clone().into(),
        line.published_at.clone().into(),
        line.stream.clone().into(),
        line.stream_seq.into(),
        line.last_error.clone().into(),
    ]
}

/// `events list`: of pending and failed events the oldest first, else the newest first.
pub fn list(path: &Path, options: &ListOptions, now: Millis, json: bool) -> Result<Exit, CliError> {
    let filter = options.filter(now)?;
    let lines = direct::read(path, |conn| report::list(conn, &filter, options.limit))?;
    let mut listing = Listing::new(&COLUMNS);
    lines.iter().for_each(|line| listing.row(row(line)));
    if json {
        render::list(&listing, true)?;
        return Ok(Exit::Ok);
    }
    render::list(&narrow(&listing), false)?;
    if lines.len() == options.limit as usize {
        render::complain(&format!("the first {} events; --limit shows more", options.limit));
    }
    Ok(Exit::Ok)
}

/// The columns that a person looks at first.
fn narrow(listing: &Listing) -> Listing {
    const SHOWN: [usize; 8] = [0, 1, 2, 3, 4, 5, 6, 13];
    let columns: Vec<&'static str> = SHOWN.iter().map(|i| listing.columns[*i]).collect();
    let mut narrow = Listing::new(&columns);
    for row in &listing.rows {
        narrow.row(SHOWN.iter().map(|i| row[*i].clone()).collect());
    }
    narrow
}

/// `events show ID`: every column, its lease, and how often a crash hit it.
pub fn show(path: &Path, event_id: &str, now: Millis, json: bool) -> Result<Exit, CliError> {
    let found = direct::read(path, |conn| report::show(conn, event_id, now))?;
    let Some(event) = found else {
        return Err(CliError::failure(format!("there is no event {event_id} in {}", path.display()))
            .fix("`outboxd events list` shows the ids; published ones are removed after their retention"));
    };
    let value =
        serde_json::to_value(&event).map_err(|e| CliError::internal(format!("cannot render the event: {e}")))?;
    if json {
        render::json(&value)?;
        return Ok(Exit::Ok);
    }
    let mut text = String::new();
    // in the order of the declaration, which an object of JSON does not keep
    const REST: [&str; 9] = [
        "schema_version",
        "failing_since",
        "holds",
        "lease",
        "lease_expires_at",
        "crashes",
        "payload_is_blob",
        "headers_json",
        "payload_json",
    ];
    for name in COLUMNS.iter().chain(&REST) {
        text.push_str(&format!("{name:<18} {}\n", render::cell(&value[*name])));
    }
    render::text(&text)?;
    Ok(Exit::Ok)
}

/// `events tail`: new events as they are committed, until the reader goes away. `rest` waits between two looks.
pub fn tail(path: &Path, json: bool, rest: impl Fn()) -> Result<Exit, CliError> {
    let newest = |conn: &_| Ok(report::list(conn, &Filter::default(), 1)?.first().map_or(0, |line| line.seq));
    let mut after: Seq = direct::read(path, newest)?;
    loop {
        for line in direct::read(path, |conn| report::newer(conn, after, 1_000))? {
            after = line.seq;
            let text = if json {
                serde_json::to_string(&line).map_err(|e| CliError::internal(format!("cannot render the event: {e}")))?
            } else {
                render::visible(&format!(
                    "{} {} {} {}/{} v{} {}",
                    line.created_at,
                    line.seq,
                    line.event_type,
                    line.aggregate_type,
                    line.aggregate_id,
                    line.aggregate_version,
                    line.event_id
                ))
            };
            render::text(&format!("{text}\n"))?;
        }
        rest();
    }
}

/// `audit`: who changed what, newest first.
pub fn audit(path: &Path, limit: u32, json: bool) -> Result<Exit, CliError> {
    let rows = direct::read(path, |conn| trail::list(conn, limit))?;
    let mut listing = Listing::new(&["id", "at", "actor", "verb", "target", "detail"]);
    for row in rows {
        listing.row(vec![
            row.id.into(),
            row.at.into(),
            row.actor.into(),
            row.verb.into(),
            row.target.into(),
            row.detail.into(),
        ]);
    }
    render::list(&listing, json)?;
    Ok(Exit::Ok)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_are_read_or_refused_with_an_example() {
        let of = |change: fn(&mut ListOptions)| {
            let mut options = ListOptions::default();
            change(&mut options);
            options.filter(10_000)
        };
        let filter = of(|o| {
            o.aggregate = Some("asset/a/b".into());
            o.older_than = Some(Duration::from_secs(3));
        })
        .unwrap();
        assert_eq!(filter.aggregate, Some(("asset".into(), "a/b".into())));
        assert_eq!(filter.created_before, Some(7_000));
        assert_eq!(of(|o| o.status = Some("dead".into())).unwrap_err().exit, Exit::Usage);
        assert_eq!(of(|o| o.aggregate = Some("asset".into())).unwrap_err().exit, Exit::Usage);
        assert_eq!(of(|o| o.older_than = Some(Duration::MAX)).unwrap().created_before, Some(10_000 - i64::MAX));
    }
}
