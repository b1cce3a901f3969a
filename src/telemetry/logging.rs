//! Logging to standard error or to the journal, at a level that can be changed while the daemon runs.
//!
//! A log that nobody takes must not stop an event: a closed pipe, a full disk or a stalled reader costs log lines, which
//! are counted, and at most one short wait until the reader is back. May import: std, rustix, tracing.

use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd;
use std::os::linux::fs::MetadataExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tracing_subscriber::filter::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::Registry;
use tracing_subscriber::{Layer, reload};

use super::journal::{self, Journal};

/// The form of a log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    Text,
    Json,
    Journald,
    /// The journal where standard error is connected to it, else text.
    Auto,
}

/// A level that is neither one of the five nor a list of directives.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "log level {level:?} is not understood: {why}; allowed: error, warn, info, debug, trace, or directives such as \"info,outboxd::actors=debug\""
)]
pub struct BadLevel {
    pub level: String,
    pub why: String,
}

/// Why logging could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    #[error(transparent)]
    Level(#[from] BadLevel),
    #[error("the journal cannot be reached at /run/systemd/journal/socket (log.format = \"journald\")")]
    Journal(#[source] io::Error),
    #[error("logging is set up already")]
    Twice,
}

/// The running log, for changing its level.
#[derive(Debug)]
pub struct Logging {
    filter: reload::Handle<EnvFilter, Registry>,
    format: Format,
}

/// Log lines that nobody took, since the start of the process.
static DROPPED: AtomicU64 = AtomicU64::new(0);

/// See [`DROPPED`].
pub fn dropped_lines() -> u64 {
    DROPPED.load(Ordering::Relaxed)
}

/// One more of [`dropped_lines`].
pub(super) fn count_dropped() {
    DROPPED.fetch_add(1, Ordering::Relaxed);
}

/// Sets the log of this process up. Once only.
pub fn init(level: &str, format: Format) -> Result<Logging, LogError> {
    let (filter, handle) = reload::Layer::new(filter(level)?);
    let format = match format {
        Format::Auto if stderr_is_journal() => Format::Journald,
        Format::Auto => Format::Text,
        chosen => chosen,
    };
    let layer: Box<dyn Layer<_> + Send + Sync> = match format {
        Format::Journald => Box::new(Journal::connect(journal::SOCKET).map_err(LogError::Journal)?),
        Format::Json => Box::new(lines().json().flatten_event(true)),
        Format::Text | Format::Auto => Box::new(lines().with_ansi(colours())),
    };
    let subscriber = Registry::default().with(filter).with(layer);
    tracing::subscriber::set_global_default(subscriber).map_err(|_| LogError::Twice)?;
    Ok(Logging { filter: handle, format })
}

impl Logging {
    /// Changes the level at once.
    pub fn set_level(&self, level: &str) -> Result<(), BadLevel> {
        let new = filter(level)?;
        // fails only where the subscriber is gone, and then there is nothing to change
        let _ = self.filter.reload(new);
        Ok(())
    }

    /// The form that is in use; never [`Format::Auto`].
    pub fn format(&self) -> Format {
        self.format
    }
}

/// Whether a level of the configuration can be used.
pub fn check_level(level: &str) -> Result<(), BadLevel> {
    filter(level).map(|_| ())
}

/// A bare level speaks of this program; what its libraries say is of use only as a warning.
fn filter(level: &str) -> Result<EnvFilter, BadLevel> {
    let bad = |why: String| BadLevel { level: level.to_string(), why };
    let directives = match level.trim().to_ascii_lowercase().as_str() {
        "" => return Err(bad("it is empty".into())),
        bare @ ("off" | "error") => bare.to_string(),
        bare @ ("warn" | "info" | "debug" | "trace") => format!("warn,outboxd={bare}"),
        word if word.chars().all(char::is_alphanumeric) => return Err(bad("there is no such level".into())),
        _ => level.to_string(),
    };
    EnvFilter::try_new(directives).map_err(|e| bad(e.to_string()))
}

fn lines<S>() -> tracing_subscriber::fmt::Layer<
    S,
    tracing_subscriber::fmt::format::DefaultFields,
    tracing_subscriber::fmt::format::Format,
    Stderr,
>
where
    S: tracing::Subscriber + for<'a> tracing_subscriber::registry::LookupSpan<'a>,
{
    // internal errors would go out by eprintln!, which panics on the closed pipe that caused them
    tracing_subscriber::fmt::layer().with_writer(Stderr).with_ansi(false).log_internal_errors(false)
}

fn colours() -> bool {
    io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty())
}

/// systemd tells device and inode of the stream that it connected to the journal: another stream has others.
fn stderr_is_journal() -> bool {
    let Ok(named) = std::env::var("JOURNAL_STREAM") else { return false };
    let Ok(own) = io::stderr().as_fd().try_clone_to_owned() else { return false };
    let Ok(meta) = File::from(own).metadata() else { return false };
    named == format!("{}:{}", meta.st_dev(), meta.st_ino())
}

/// Standard error as a place that takes lines or loses them, and never fails.
#[derive(Clone, Copy, Debug)]
struct Stderr;

impl<'a> MakeWriter<'a> for Stderr {
    type Writer = Line;

    fn make_writer(&'a self) -> Line {
        Line(Vec::with_capacity(256))
    }
}

/// One event's line, written as a whole when it is dropped.
#[derive(Debug)]
struct Line(Vec<u8>);

impl Write for Line {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        static SINK: Sink = Sink { stalled: Mutex::new(false), reported: AtomicBool::new(false) };
        if !self.0.is_empty() && !SINK.put(io::stderr().as_fd(), &self.0) {
            count_dropped();
        }
    }
}

/// Longest wait for a reader that does not keep up, paid once until it is back.
const PATIENCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };

/// `poll` promises room for this much in a pipe (PIPE_BUF of Linux): a write of it does not block.
const CHUNK: usize = 4_096;

/// Writes lines to a descriptor without ever waiting long.
#[derive(Debug)]
struct Sink {
    /// Guards the descriptor; true while its reader does not keep up.
    stalled: Mutex<bool>,
    /// A line was torn: the next one starts with a line break.
    reported: AtomicBool,
}

impl Sink {
    /// Whether all of it was written.
    fn put(&self, fd: impl AsFd, line: &[u8]) -> bool {
        let mut stalled = self.stalled.lock().unwrap_or_else(PoisonError::into_inner);
        if self.reported.load(Ordering::Relaxed) && self.write(&fd, b"\n", &mut stalled) {
            self.reported.store(false, Ordering::Relaxed);
        }
        for (i, chunk) in line.chunks(CHUNK).enumerate() {
            if !self.write(&fd, chunk, &mut stalled) {
                self.reported.store(i > 0 || self.reported.load(Ordering::Relaxed), Ordering::Relaxed);
                return false;
            }
        }
        true
    }

    fn write(&self, fd: impl AsFd, mut bytes: &[u8], stalled: &mut bool) -> bool {
        while !bytes.is_empty() {
            let wait = if *stalled { Timespec { tv_sec: 0, tv_nsec: 0 } } else { PATIENCE };
            let mut fds = [PollFd::new(&fd, PollFlags::OUT)];
            match poll(&mut fds, Some(&wait)) {
                Ok(0) => {
                    *stalled = true;
                    return false;
                }
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => continue,
                Err(_) => return false,
            }
            match rustix::io::write(&fd, bytes) {
                Ok(written) => {
                    *stalled = false;
                    bytes = &bytes[written..];
                }
                Err(rustix::io::Errno::INTR) => {}
                // a full disk, a closed pipe: this line is lost, the next one may find it mended
                Err(_) => return false,
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::time::Instant;

    fn sink() -> Sink {
        Sink { stalled: Mutex::new(false), reported: AtomicBool::new(false) }
    }

    #[test]
    fn a_bare_level_is_understood_and_a_misspelt_one_is_refused_with_what_is_allowed() {
        for level in ["off", "error", "warn", "info", "DEBUG", " trace ", "info,outboxd::store=trace"] {
            check_level(level).unwrap();
        }
        for level in ["", "inof", "information", "outboxd=loud"] {
            let error = check_level(level).unwrap_err().to_string();
            assert!(error.contains("allowed: error, warn, info, debug, trace"), "{error}");
        }
    }

    #[test]
    fn a_bare_level_leaves_libraries_at_warn() {
        assert_eq!(filter("debug").unwrap().to_string(), "outboxd=debug,warn");
        assert_eq!(filter("error").unwrap().to_string(), "error");
    }

    #[test]
    fn a_closed_pipe_costs_the_line_and_nothing_else() {
        let (reader, writer) = io::pipe().unwrap();
        drop(reader);
        assert!(!sink().put(&writer, b"hello\n"));
    }

    #[test]
    fn a_full_disk_costs_the_line_and_nothing_else() {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        assert!(!sink().put(&full, b"hello\n"));
    }

    #[test]
    fn a_stalled_reader_costs_one_short_wait_and_its_lines_and_gets_whole_lines_when_it_is_back() {
        let (mut reader, writer) = io::pipe().unwrap();
        let sink = sink();
        let line = [b"x".repeat(999), b"\n".to_vec()].concat();
        let mut taken = 0;
        while sink.put(&writer, &line) {
            taken += 1;
            assert!(taken < 10_000, "the pipe takes everything");
        }
        let start = Instant::now();
        for _ in 0..1_000 {
            assert!(!sink.put(&writer, &line));
        }
        // one wait was paid by the line that found the pipe full; a thousand waits would be 20 s
        assert!(start.elapsed().as_secs() < 10, "{:?}", start.elapsed());
        let mut buffer = vec![0; taken * line.len()];
        reader.read_exact(&mut buffer).unwrap();
        assert!(sink.put(&writer, b"back\n"));
        drop(writer);
        let mut rest = String::new();
        reader.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, "back\n");
    }

    #[test]
    fn after_a_torn_line_the_next_one_starts_afresh() {
        let (mut reader, writer) = io::pipe().unwrap();
        let sink = sink();
        // longer than any pipe: its head is written, its tail has no room
        assert!(!sink.put(&writer, &b"y".repeat(1 << 20)));
        let mut head = vec![0; 1 << 19];
        let read = reader.read(&mut head).unwrap();
        assert!(head[..read].iter().all(|b| *b == b'y'));
        assert!(sink.put(&writer, b"next\n"));
        drop(writer);
        let mut rest = String::new();
        reader.read_to_string(&mut rest).unwrap();
        assert!(rest.ends_with("\nnext\n") && rest.trim_start_matches('y') == "\nnext\n", "{rest:?}");
    }
}
