//! The journal's own protocol (systemd.io/JOURNAL_NATIVE_PROTOCOL): one datagram an event.
//!
//! The message carries the fields too, because `journalctl -u` shows nothing else; each stands beside it as a field of
//! its own for those who filter. The socket never blocks: an event that the journal does not take is dropped and counted.

use std::fmt::{self, Write as _};
use std::io;
use std::os::unix::net::UnixDatagram;
use std::path::Path;

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;

/// Where journald listens.
pub(super) const SOCKET: &str = "/run/systemd/journal/socket";

/// Longest value in bytes: a datagram has to fit into the socket's buffer as a whole.
const VALUE_MAX: usize = 32 * 1_024;

/// Sends every event of its subscriber to the journal.
#[derive(Debug)]
pub(super) struct Journal(UnixDatagram);

impl Journal {
    /// Connects to the journal at `socket`.
    pub(super) fn connect(socket: impl AsRef<Path>) -> io::Result<Self> {
        let datagram = UnixDatagram::unbound()?;
        datagram.connect(socket)?;
        datagram.set_nonblocking(true)?;
        Ok(Self(datagram))
    }
}

impl<S: Subscriber> Layer<S> for Journal {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut said = Said::default();
        event.record(&mut said);
        let datagram = said.datagram(*event.metadata().level(), event.metadata().target());
        if self.0.send(&datagram).is_err() {
            super::logging::count_dropped();
        }
    }
}

/// Message and fields of one event.
#[derive(Default)]
struct Said {
    message: String,
    fields: Vec<(&'static str, String)>,
}

impl Visit for Said {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "message" {
            self.message = value.into()
        } else {
            self.fields.push((field.name(), value.into()))
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.record_str(field, &format!("{value:?}"));
    }
}

impl Said {
    fn datagram(&self, level: Level, target: &str) -> Vec<u8> {
        let mut text = self.message.clone();
        for (name, value) in &self.fields {
            // writing into a String does not fail
            let _ = write!(text, " {name}={value}");
        }
        let mut datagram = Vec::with_capacity(256 + text.len() * 2);
        put(&mut datagram, "PRIORITY", priority(level));
        put(&mut datagram, "SYSLOG_IDENTIFIER", "outboxd");
        put(&mut datagram, "TARGET", target);
        for (name, value) in &self.fields {
            put(&mut datagram, &format!("OUTBOXD_{}", key(name)), value);
        }
        put(&mut datagram, "MESSAGE", &text);
        datagram
    }
}

/// Levels of syslog: what needs a person is an error, what we coped with a warning, the life cycle a notice.
fn priority(level: Level) -> &'static str {
    match level {
        Level::ERROR => "3",
        Level::WARN => "4",
        Level::INFO => "5",
        Level::DEBUG => "6",
        Level::TRACE => "7",
    }
}

/// A field's name as the journal takes it: capitals, digits and underscores.
fn key(name: &str) -> String {
    name.chars().map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_uppercase() } else { '_' }).take(48).collect()
}

/// `KEY=value`, or with its length where the value has more than one line.
fn put(datagram: &mut Vec<u8>, name: &str, value: &str) {
    let mut end = value.len().min(VALUE_MAX);
    while !value.is_char_boundary(end) {
        end -= 1;
    }
    let value = &value.as_bytes()[..end];
    datagram.extend_from_slice(name.as_bytes());
    if value.contains(&b'\n') {
        datagram.push(b'\n');
        datagram.extend_from_slice(&(value.len() as u64).to_le_bytes());
    } else {
        datagram.push(b'=');
    }
    datagram.extend_from_slice(value);
    datagram.push(b'\n');
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tracing_subscriber::layer::SubscriberExt;

    fn heard(say: impl FnOnce()) -> Vec<u8> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        let journald = UnixDatagram::bind(&path).unwrap();
        journald.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let subscriber = tracing_subscriber::registry().with(Journal::connect(&path).unwrap());
        tracing::subscriber::with_default(subscriber, say);
        let mut buffer = vec![0; 256 * 1_024];
        let size = journald.recv(&mut buffer).expect("no datagram within 10 s");
        buffer.truncate(size);
        buffer
    }

    #[test]
    fn the_message_says_everything_and_each_field_stands_alone_too() {
        let datagram = heard(|| tracing::error!(why = %"unknown key", generation = 2, "reload rejected"));
        let text = String::from_utf8(datagram).unwrap();
        for line in [
            "PRIORITY=3",
            "SYSLOG_IDENTIFIER=outboxd",
            "OUTBOXD_WHY=unknown key",
            "OUTBOXD_GENERATION=2",
            "MESSAGE=reload rejected why=unknown key generation=2",
        ] {
            assert!(text.lines().any(|l| l == line), "no {line:?} in {text}");
        }
    }

    #[test]
    fn a_value_of_many_lines_cannot_forge_a_field() {
        let datagram = heard(|| tracing::info!(error = "first\nPRIORITY=0", "failed"));
        let mut expected = b"OUTBOXD_ERROR\n".to_vec();
        expected.extend_from_slice(&16u64.to_le_bytes());
        expected.extend_from_slice(b"first\nPRIORITY=0\n");
        assert!(datagram.windows(expected.len()).any(|w| w == expected), "{datagram:?}");
    }

    #[test]
    fn a_long_value_is_cut_between_characters_and_a_full_journal_costs_events_only() {
        let datagram = heard(|| tracing::info!("{}", "ü".repeat(VALUE_MAX)));
        assert!(String::from_utf8(datagram).unwrap().contains("MESSAGE=ü"));

        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        let _deaf = UnixDatagram::bind(&path).unwrap();
        let subscriber = tracing_subscriber::registry().with(Journal::connect(&path).unwrap());
        let before = super::super::logging::dropped_lines();
        tracing::subscriber::with_default(subscriber, || (0..10_000).for_each(|_| tracing::info!("nobody reads this")));
        assert!(super::super::logging::dropped_lines() > before);
    }
}
