//! The stream: made where it is missing and we may, otherwise only judged; an operator's stream is never altered.
//!
//! Everything that could make an ack a lie or an event vanish is a [`Finding`]: the fatal ones stop publishing until
//! they are mended (the stream is looked at again every second), the others are warnings for `doctor` and `status`.
//!
//! May import: config shapes, limits, ports.

use std::fmt;
use std::time::Duration;

use serde_json::json;

use super::Settings;
use super::api::{Api, ApiFault, StreamConfig, StreamInfo};
use super::outcome::{INVALID_JSON, STREAM_NAME_EXISTS, STREAM_NOT_FOUND};
use crate::config::Manage;
use crate::limits;
use crate::ports::Topology;

/// How much a finding matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    Warning,
    /// Publishing would lose or duplicate events, or cannot work at all.
    Fatal,
}

/// One setting of the stream that is not as it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    pub severity: Severity,
    /// Name of the setting as the `nats` command line and the JSON configuration call it.
    pub field: &'static str,
    pub is: String,
    pub should: String,
    /// What to do.
    pub fix: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is {}, should be {}: {}", self.field, self.is, self.should, self.fix)
    }
}

/// What the connected server said of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Server {
    pub(super) version: String,
    pub(super) max_payload: usize,
}

/// A look at the stream that succeeded.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    pub(super) topology: Topology,
    pub(super) findings: Vec<Finding>,
    /// Why nothing can be stored now, where the numbers say so.
    pub(super) full: Option<String>,
    /// Messages and bytes, to tell whether anything has changed since a refusal.
    pub(super) size: Size,
    pub(super) shape: Shape,
    /// It was made by this look.
    pub(super) made: bool,
}

/// Contents and ceilings of the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Size {
    pub(super) messages: u64,
    pub(super) bytes: u64,
    pub(super) max_msgs: i64,
    pub(super) max_bytes: i64,
}

/// What reading back has to know.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Shape {
    /// Subjects are rewritten on their way in: a stored subject says nothing.
    pub(super) transformed: bool,
    /// Batched direct gets are allowed, and the server knows them.
    pub(super) direct: bool,
}

impl Seen {
    /// The fatal findings and a full store, as one reason; `None` where publishing can work.
    pub(super) fn obstacle(&self) -> Option<String> {
        let fatal = self.findings.iter().filter(|f| f.severity == Severity::Fatal).map(Finding::to_string);
        let all: Vec<String> = fatal.chain(self.full.clone()).collect();
        (!all.is_empty()).then(|| format!("stream {}: {}", self.topology.stream, all.join("; ")))
    }
}

/// Looks at the stream, making it first where it is missing and `stream.manage` is `create`.
///
/// Errors are reasons for people; the link is unusable then, and asks again.
pub(super) async fn look(api: &Api, settings: &Settings, server: &Server) -> Result<Seen, String> {
    let name = &settings.stream.name;
    let missing = match api.info().await {
        Ok(info) => return Ok(judge(&info, settings, server, false)),
        Err(fault) => fault,
    };
    if missing.code() != STREAM_NOT_FOUND {
        return Err(explain(&missing, settings));
    }
    match settings.stream.manage {
        Manage::Create => {}
        Manage::Check | Manage::Off => {
            return Err(format!("stream {name} does not exist: create it, or set stream.manage = \"create\""));
        }
    }
    let info = create(api, settings, server).await.map_err(|fault| match fault {
        ApiFault::Refused(error) => format!("stream {name} does not exist and cannot be created: {error}"),
        other => explain(&other, settings),
    })?;
    Ok(judge(&info, settings, server, true))
}

async fn create(api: &Api, settings: &Settings, server: &Server) -> Result<StreamInfo, ApiFault> {
    let atomic = takes_batches(&server.version);
    let made: Result<StreamInfo, ApiFault> = api.ask("STREAM.CREATE", blueprint(settings, atomic)).await;
    match made {
        // the server that answers for the stream's domain may be older than the one we are connected to
        Err(fault) if atomic && fault.code() == INVALID_JSON => {
            api.ask("STREAM.CREATE", blueprint(settings, false)).await
        }
        // another node was faster
        Err(fault) if fault.code() == STREAM_NAME_EXISTS => api.info().await,
        other => other,
    }
}

fn blueprint(settings: &Settings, atomic: bool) -> bytes::Bytes {
    let stream = &settings.stream;
    let mut config = json!({
        "name": stream.name,
        "description": "events of a transactional outbox, made by outboxd",
        "subjects": stream.subjects,
        "retention": "limits",
        "storage": "file",
        // a full stream must stop us, not push out what nobody has read yet
        "discard": "new",
        "num_replicas": stream.replicas,
        "max_age": nanos(stream.max_age),
        "max_bytes": if stream.max_bytes == 0 { -1 } else { i64::try_from(stream.max_bytes).unwrap_or(i64::MAX) },
        "max_msgs": -1,
        "max_consumers": -1,
        "max_msgs_per_subject": -1,
        "max_msg_size": -1,
        "duplicate_window": nanos(window_of(stream.duplicate_window, stream.max_age)),
        "allow_direct": true,
    });
    if atomic && let Some(object) = config.as_object_mut() {
        object.insert("allow_atomic".into(), true.into());
    }
    config.to_string().into()
}

/// The server refuses a duplicate window above the maximum age.
fn window_of(window: Duration, max_age: Duration) -> Duration {
    if max_age.is_zero() { window } else { window.min(max_age) }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

fn explain(fault: &ApiFault, settings: &Settings) -> String {
    let domain = &settings.stream.domain;
    let where_ = if domain.is_empty() { String::new() } else { format!(" in domain {domain}") };
    match fault {
        ApiFault::Absent => format!("no JetStream{where_}: it is off on the server, or not enabled for this account"),
        ApiFault::Silent(wait) => format!(
            "JetStream{where_} does not answer within {wait:?}: it is stalled, the stream has no leader, or this user \
             may not publish to $JS.API.STREAM.INFO.{} or subscribe to _INBOX.>",
            settings.stream.name
        ),
        ApiFault::Refused(error) => format!("stream {}{where_} cannot be read: {error}", settings.stream.name),
        ApiFault::Garbled(_) | ApiFault::Lost(_) => format!("stream {}{where_}: {fault}", settings.stream.name),
    }
}

/// Atomic batches whose messages carry ids: 2.12.1 and later.
pub(super) fn takes_batches(version: &str) -> bool {
    version_of(version).is_some_and(|v| v >= (2, 12, 1))
}

fn version_of(text: &str) -> Option<(u64, u64, u64)> {
    let core = text.trim_start_matches('v').split(['-', '+']).next()?;
    let mut numbers = core.split('.').map(str::parse::<u64>);
    match (numbers.next()?, numbers.next()?, numbers.next()?) {
        (Ok(major), Ok(minor), Ok(patch)) => Some((major, minor, patch)),
        _ => None,
    }
}

/// Judges what `STREAM.INFO` said.
pub(super) fn judge(info: &StreamInfo, settings: &Settings, server: &Server, made: bool) -> Seen {
    let config = &info.config;
    // the leader of the stream writes its own version there (since 2.11); it may sit behind a leaf node
    let version = config.metadata.get("_nats.ver").unwrap_or(&server.version);
    let atomic = config.allow_atomic && takes_batches(version);
    let max_message = match usize::try_from(config.max_msg_size) {
        Ok(size) if size > 0 => size.min(server.max_payload),
        _ => server.max_payload,
    };
    let topology = Topology {
        stream: config.name.as_str().into(),
        created: info.created.clone(),
        last_seq: info.state.last_seq,
        atomic,
        max_batch: if atomic { limits::ATOMIC_BATCH } else { 1 },
        max_message,
        duplicate_window: duration(config.duplicate_window),
        server_version: version.clone(),
        replicas: config.num_replicas,
    };
    Seen {
        findings: findings(config, settings, version),
        full: fullness(info),
        size: Size {
            messages: info.state.messages,
            bytes: info.state.bytes,
            max_msgs: config.max_msgs,
            max_bytes: config.max_bytes,
        },
        shape: Shape {
            transformed: config.subject_transform.is_some(),
            direct: config.allow_direct && version_of(version).is_some_and(|v| v >= (2, 11, 0)),
        },
        topology,
        made,
    }
}

fn duration(nanos: i64) -> Duration {
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(0))
}

fn fullness(info: &StreamInfo) -> Option<String> {
    let (config, state) = (&info.config, &info.state);
    if config.discard != "new" {
        return None;
    }
    let reached = |is: u64, max: i64| u64::try_from(max).is_ok_and(|max| max > 0 && is >= max);
    if reached(state.messages, config.max_msgs) {
        return Some(format!("full: {} of {} messages, discard new", state.messages, config.max_msgs));
    }
    reached(state.bytes, config.max_bytes)
        .then(|| format!("full: {} of {} bytes, discard new", state.bytes, config.max_bytes))
}

fn findings(config: &StreamConfig, settings: &Settings, version: &str) -> Vec<Finding> {
    let mut found = Vec::new();
    obstacles(config, settings, &mut found);
    doubts(config, settings, &mut found);
    if version_of(version).is_none_or(|v| v < (2, 15, 1)) {
        found.push(Finding {
            severity: Severity::Warning,
            field: "server version",
            is: version.to_owned(),
            should: "2.15.1 or later".into(),
            fix: "upgrade nats-server: earlier versions lost acknowledged messages in published tests".into(),
        });
    }
    found
}

/// What makes publishing impossible or its acks worthless.
fn obstacles(config: &StreamConfig, settings: &Settings, found: &mut Vec<Finding>) {
    let mut fatal = |field, is: String, should: String, fix: String| {
        found.push(Finding { severity: Severity::Fatal, field, is, should, fix });
    };
    let name = &config.name;
    if config.mirror.is_some() {
        let fix = "name the stream that it mirrors in stream.name".to_owned();
        fatal("mirror", "set".into(), "unset".into(), fix);
    } else if !(settings.covers)(&config.subjects) {
        fatal(
            "subjects",
            format!("{:?}", config.subjects),
            format!("a set that covers {}", settings.subject),
            format!("nats stream edit {name} --subjects=..., or change relay.subject"),
        );
    }
    if config.no_ack {
        let fix = format!("nats stream edit {name} --ack: without acks nothing can ever be proven");
        fatal("no_ack", "true".into(), "false".into(), fix);
    }
    if config.sealed {
        fatal("sealed", "true".into(), "false".into(), "a sealed stream takes nothing more: name another".into());
    }
    if config.allow_msg_counter {
        let fix = "name another stream: a counter stream takes no events".to_owned();
        fatal("allow_msg_counter", "true".into(), "false".into(), fix);
    }
}

/// What works, but not as well as its user may think.
fn doubts(config: &StreamConfig, settings: &Settings, found: &mut Vec<Finding>) {
    let mut warn = |field, is: String, should: String, fix: String| {
        found.push(Finding { severity: Severity::Warning, field, is, should, fix });
    };
    let name = &config.name;
    if config.retention != "limits" {
        warn(
            "retention",
            config.retention.clone(),
            "limits".into(),
            "messages leave this stream when they are consumed, and their ids are forgotten at a restart: an event \
             that is sent again may be stored twice, and verify cannot find it"
                .into(),
        );
    }
    if config.storage != "file" {
        let fix = "a restart of the server loses what was acknowledged; make the stream with file storage".to_owned();
        warn("storage", config.storage.clone(), "file".into(), fix);
    }
    let limited = config.max_msgs > 0 || config.max_bytes > 0;
    if limited && config.discard != "new" {
        warn(
            "discard",
            config.discard.clone(),
            "new".into(),
            format!("nats stream edit {name} --discard=new: at its limit the stream drops its oldest events, unread"),
        );
    }
    if config.max_msgs_per_subject > 0 {
        let fix = format!("nats stream edit {name} --max-msgs-per-subject=-1, unless only the latest events count");
        warn("max_msgs_per_subject", config.max_msgs_per_subject.to_string(), "-1".into(), fix);
    }
    if !limited && config.max_age <= 0 && config.max_msgs_per_subject <= 0 {
        let fix = "set stream.max_age or stream.max_bytes, or a limit on the stream: it grows until the disk is full";
        warn("max_age", "unlimited, as are max_bytes and max_msgs".into(), "some limit".into(), fix.into());
    }
    let window = duration(config.duplicate_window);
    let needed = settings.lease + 2 * settings.ack_wait;
    if window <= needed {
        warn(
            "duplicate_window",
            humantime::format_duration(window).to_string(),
            format!("more than lease + 2 x ack_wait = {}", humantime::format_duration(needed)),
            format!("nats stream edit {name} --dupe-window=2m, or shorten relay.lease"),
        );
    }
    if config.num_replicas < settings.stream.replicas {
        let fix = format!("nats stream edit {name} --replicas={}", settings.stream.replicas);
        warn("num_replicas", config.num_replicas.to_string(), settings.stream.replicas.to_string(), fix);
    }
    if config.subject_transform.is_some() {
        let fix = "looking an event up reads the whole stream: expect slow recoveries".to_owned();
        warn("subject_transform", "set".into(), "unset".into(), fix);
    }
}

#[cfg(test)]
#[path = "topology_tests.rs"]
mod tests;
