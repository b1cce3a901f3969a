//! Relations between keys: the closed list of impossible ones, and what is merely unwise.
//!
//! Invariant: a relation is not judged on a key whose own value was refused. May import: domain, std.

use std::time::Duration;

use super::check;
use super::problem::{Place, Problem};
use super::read::Reading;
use super::shape::{Config, Manage};
use super::value::duration_text;
use crate::domain::subject::{Template, overlap};

/// What a relation found: the keys that it is about, the one to blame first, and the message.
type Finding = (&'static [&'static str], String);

/// Adds the problems and warnings of all relations to a reading.
pub(super) fn judge(reading: &mut Reading) {
    let (problems, warnings) = (impossible(&reading.config), unwise(&reading.config));
    for (findings, fatal) in [(problems, true), (warnings, false)] {
        for (keys, message) in findings {
            if keys.iter().any(|key| reading.broken.contains(key)) {
                continue;
            }
            let place = keys.iter().find_map(|key| reading.places.get(key)).cloned();
            let place = place.unwrap_or_else(|| Place::Whole(reading.path.clone()));
            let list = if fatal { &mut reading.problems } else { &mut reading.warnings };
            list.push(Problem { place, message });
        }
    }
}

/// The closed list. Counts, durations above zero, factors and legal subjects are checked key by key.
fn impossible(config: &Config) -> Vec<Finding> {
    let Config { stream, relay, inbox, http, .. } = config;
    let mut found: Vec<Finding> = Vec::new();
    if relay.ack_wait >= relay.lease {
        let (ack_wait, lease) = (duration_text(relay.ack_wait), duration_text(relay.lease));
        found.push((
            &["relay.ack_wait", "relay.lease"],
            format!(
                "relay.ack_wait ({ack_wait}) must be shorter than relay.lease ({lease}): a batch must \
                 be able to hear of its fate while it is leased"
            ),
        ));
    }
    if relay.backoff.initial > relay.backoff.cap {
        let (initial, cap) = (duration_text(relay.backoff.initial), duration_text(relay.backoff.cap));
        found.push((
            &["relay.backoff.initial", "relay.backoff.cap"],
            format!("relay.backoff.initial ({initial}) must not exceed relay.backoff.cap ({cap})"),
        ));
    }
    if relay.enabled && Template::parse(&relay.subject).is_ok_and(|t| !t.covered_by(&stream.subjects)) {
        found.push((
            &["relay.subject", "stream.subjects", "relay.enabled"],
            format!(
                "relay.subject ({}) can make subjects that stream.subjects ({}) does not cover: \
                 no stream would acknowledge them",
                relay.subject,
                stream.subjects.join(", ")
            ),
        ));
    }
    let open = check::address(&http.listen).ok().flatten().filter(|address| !address.ip().is_loopback());
    if let Some(address) = open.filter(|_| http.token_file.is_none()) {
        found.push((
            &["http.listen", "http.token_file"],
            format!(
                "http.listen ({address}) is not a loopback address, so http.token_file must name a file with a token"
            ),
        ));
    }
    if inbox.enabled && inbox.handler.is_empty() {
        found.push((
            &["inbox.enabled", "inbox.handler"],
            "inbox.enabled needs at least one [[inbox.handler]], such as event_type = \"*\" with apply = \"store\""
                .into(),
        ));
    }
    found
}

/// Unwise, but possible: the daemon starts and says so.
fn unwise(config: &Config) -> Vec<Finding> {
    let mut found = Vec::new();
    stream_warnings(config, &mut found);
    inbox_warnings(config, &mut found);
    nats_warnings(config, &mut found);
    retention_warnings(config, &mut found);
    found
}

fn stream_warnings(config: &Config, found: &mut Vec<Finding>) {
    let Config { stream, relay, .. } = config;
    let needed = relay.lease + 2 * relay.ack_wait;
    if relay.enabled && stream.duplicate_window <= needed {
        found.push((
            &["stream.duplicate_window", "relay.lease", "relay.ack_wait"],
            format!(
                "stream.duplicate_window ({}) should exceed relay.lease + 2 x relay.ack_wait ({}), or every \
                 repeat after a crash has to be looked up",
                duration_text(stream.duplicate_window),
                duration_text(needed)
            ),
        ));
    }
    if !stream.max_age.is_zero() && stream.duplicate_window > stream.max_age && stream.manage == Manage::Create {
        found.push((
            &["stream.duplicate_window", "stream.max_age"],
            format!(
                "stream.duplicate_window ({}) is longer than stream.max_age ({}): \
                 the server refuses to make such a stream",
                duration_text(stream.duplicate_window),
                duration_text(stream.max_age)
            ),
        ));
    }
    if stream.replicas % 2 == 0 {
        found.push((
            &["stream.replicas"],
            format!("stream.replicas = {} survives no more failures than {}", stream.replicas, stream.replicas - 1),
        ));
    }
    if let Some((one, other)) = overlapping(&stream.subjects) {
        found.push((
            &["stream.subjects"],
            format!("stream.subjects {one} and {other} overlap: the server refuses to make such a stream"),
        ));
    }
}

fn inbox_warnings(config: &Config, found: &mut Vec<Finding>) {
    let Config { stream, inbox, .. } = config;
    if !inbox.enabled && !inbox.handler.is_empty() {
        found.push((&["inbox.enabled", "inbox.handler"], "there are handlers, but inbox.enabled is false".into()));
    }
    if let Some((one, other)) = overlapping(&inbox.filter_subjects) {
        found.push((
            &["inbox.filter_subjects"],
            format!("inbox.filter_subjects {one} and {other} overlap: the server refuses to make such a consumer"),
        ));
    }
    if inbox.enabled && inbox.stream == stream.name && inbox.domain == stream.domain && stream.manage == Manage::Create
    {
        let unfed = |filter: &&String| !stream.subjects.iter().any(|subject| overlap(subject, filter));
        if let Some(filter) = inbox.filter_subjects.iter().find(unfed) {
            found.push((
                &["inbox.filter_subjects", "stream.subjects"],
                format!("nothing in stream.subjects can match inbox.filter_subjects {filter}"),
            ));
        }
    }
    for (index, handler) in inbox.handler.iter().enumerate() {
        let shadow = inbox.handler[..index].iter().find(|earlier| takes_all(&earlier.event_type, &handler.event_type));
        if let Some(earlier) = shadow {
            found.push((
                &["inbox.handler"],
                format!(
                    "the handler for \"{}\" is never reached: the one for \"{}\" stands before it",
                    handler.event_type, earlier.event_type
                ),
            ));
        }
    }
}

fn nats_warnings(config: &Config, found: &mut Vec<Finding>) {
    let nats = &config.nats;
    if nats.user.is_empty() != nats.password_file.is_none() {
        found.push((
            &["nats.user", "nats.password_file"],
            "nats.user and nats.password_file belong together, one of them is empty".into(),
        ));
    }
    let ways = [
        nats.password_file.is_some(),
        nats.token_file.is_some(),
        nats.nkey_seed_file.is_some(),
        nats.credentials_file.is_some(),
    ];
    if ways.iter().filter(|set| **set).count() > 1 {
        found.push((
            &["nats.credentials_file", "nats.nkey_seed_file", "nats.token_file", "nats.password_file"],
            "more than one way to log in is set: password_file, token_file, nkey_seed_file, credentials_file".into(),
        ));
    }
    if nats.tls.cert_file.is_some() != nats.tls.key_file.is_some() {
        found.push((
            &["nats.tls.cert_file", "nats.tls.key_file"],
            "nats.tls.cert_file and nats.tls.key_file belong together, one of them is empty".into(),
        ));
    }
    if nats.ping_interval > Duration::from_secs(30) {
        found.push((
            &["nats.ping_interval"],
            format!(
                "nats.ping_interval = {}: a frozen server is noticed after two of them",
                duration_text(nats.ping_interval)
            ),
        ));
    }
}

/// Published rows are what can be sent again when a server lost what it had acknowledged.
const SHORTEST_PUBLISHED: Duration = Duration::from_secs(600);
/// A horizon below a day is over before somebody looks at a dead letter.
const SHORTEST_PROCESSED: Duration = Duration::from_secs(86_400);

fn retention_warnings(config: &Config, found: &mut Vec<Finding>) {
    let retention = &config.retention;
    if !retention.published.is_zero() && retention.published < SHORTEST_PUBLISHED {
        found.push((
            &["retention.published"],
            format!(
                "retention.published = {}: keep published rows at least 10m, so that they can be sent \
                 again when a server lost them",
                duration_text(retention.published)
            ),
        ));
    }
    if config.inbox.enabled && !retention.processed.is_zero() && retention.processed < SHORTEST_PROCESSED {
        found.push((
            &["retention.processed"],
            format!(
                "retention.processed = {}: an event that comes again later under another sequence is applied twice",
                duration_text(retention.processed)
            ),
        ));
    }
}

/// Two entries of a list that some subject matches both.
fn overlapping(subjects: &[String]) -> Option<(&String, &String)> {
    subjects.iter().enumerate().find_map(|(index, one)| {
        subjects[index + 1..].iter().find(|other| overlap(one, other)).map(|other| (one, other))
    })
}

/// Whether a handler's pattern takes everything that a later one could.
fn takes_all(earlier: &str, later: &str) -> bool {
    match earlier.strip_suffix('*') {
        Some(prefix) => later.starts_with(prefix),
        None => earlier == later,
    }
}
