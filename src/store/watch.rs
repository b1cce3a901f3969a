//! Notices commits of any process within a fraction of a millisecond, at next to no cost when idle.
//!
//! A thread of its own with a read-only connection of its own. It sleeps in `poll(2)` on an inotify watch of the
//! database's directory. inotify fires on the write-ahead log before the commit is visible (the index is mapped memory
//! and never fires), so one look per event would miss the last commit: after an event the thread looks at
//! `PRAGMA data_version` at 50 us, growing to 2 ms, until nothing has moved for 30 ms. A slow poll is the safety net
//! where inotify does not work. What it reports is what the relay can use: new rows, or touched ones.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rusqlite::Connection;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::inotify;

use super::error::{Result, Step, StoreError};
use crate::limits;

const FIRST_LOOK: Duration = Duration::from_micros(50);
const SLOWEST_LOOK: Duration = Duration::from_millis(2);
/// Writes to the log this far apart belong to different commits.
const APART: Duration = Duration::from_micros(500);
const QUIET: Duration = Duration::from_millis(30);

/// What the watcher has seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// Rows were inserted (or, `touched`, changed behind the read position) since the last report.
    Work { touched: bool },
    /// The database or its log is no longer the file that was opened.
    Replaced,
}

/// A running watcher; ends its thread when dropped.
#[derive(Debug)]
pub struct Watcher {
    stop: Arc<AtomicBool>,
    waker: Option<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

/// Starts the thread. `conn` must be a connection of its own that never writes; `report` is called from the thread and
/// must not block.
pub fn start(path: &Path, conn: Connection, report: impl Fn(Seen) + Send + 'static) -> Result<Watcher> {
    let stop = Arc::new(AtomicBool::new(false));
    let waker = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK)
        .map_err(|e| StoreError::Crashed(format!("eventfd: {e}")))?;
    let theirs = waker.try_clone().map_err(|e| StoreError::Crashed(format!("eventfd: {e}")))?;
    let mut watch = Watch::new(path, conn, stop.clone(), theirs)?;
    let thread = std::thread::Builder::new()
        .name("outboxd-watch".into())
        .spawn(move || watch.run(&report))
        .map_err(|e| StoreError::Crashed(format!("cannot start the waking thread: {e}")))?;
    Ok(Watcher { stop, waker: Some(waker), thread: Some(thread) })
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(waker) = self.waker.take() {
            let _ = rustix::io::write(&waker, &1u64.to_ne_bytes());
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Watch {
    path: PathBuf,
    conn: Connection,
    stop: Arc<AtomicBool>,
    waker: OwnedFd,
    /// `None` where inotify does not work: the poll alone.
    inotify: Option<OwnedFd>,
    identity: Option<(u64, u64)>,
    data_version: i64,
    last_seq: i64,
    last_touched: i64,
}

impl Watch {
    fn new(path: &Path, conn: Connection, stop: Arc<AtomicBool>, waker: OwnedFd) -> Result<Self> {
        let path = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let inotify = watch_directory(&path);
        if inotify.is_none() {
            tracing::warn!(
                path = %path.display(),
                poll_ms = limits::SAFETY_POLL.as_millis() as u64,
                "cannot watch the directory of the database by inotify; commits are noticed by polling"
            );
        }
        let identity = identity(&path);
        let mut watch =
            Self { path, conn, stop, waker, inotify, identity, data_version: -1, last_seq: 0, last_touched: 0 };
        watch.data_version = watch.read_version()?;
        Ok(watch)
    }

    fn run(&mut self, report: &impl Fn(Seen)) {
        while !self.stop.load(Ordering::Relaxed) {
            let woken = self.sleep(limits::SAFETY_POLL);
            if identity(&self.path) != self.identity {
                report(Seen::Replaced);
                self.identity = identity(&self.path);
            }
            if woken {
                self.look_until_quiet(report);
            } else {
                self.look(report);
            }
        }
    }

    /// Sleeps until something in the directory moves, `longest` at most; whether something did.
    fn sleep(&self, longest: Duration) -> bool {
        let timeout = Timespec { tv_sec: longest.as_secs() as i64, tv_nsec: i64::from(longest.subsec_nanos()) };
        let mut fds = vec![PollFd::new(&self.waker, PollFlags::IN)];
        if let Some(inotify) = &self.inotify {
            fds.push(PollFd::new(inotify, PollFlags::IN));
        }
        let ready = rustix::event::poll(&mut fds, Some(&timeout)).unwrap_or(0);
        ready > 0 && self.empty_inotify()
    }

    /// Reads all events; whether one of them concerns the database.
    fn empty_inotify(&self) -> bool {
        let Some(inotify) = &self.inotify else { return false };
        let name = self.path.file_name().map(|n| n.as_encoded_bytes().to_owned()).unwrap_or_default();
        let mut buffer = [std::mem::MaybeUninit::uninit(); 4096];
        let mut reader = inotify::Reader::new(inotify, &mut buffer);
        let mut ours = false;
        while let Ok(event) = reader.next() {
            ours |= event.file_name().is_none_or(|file| file.to_bytes().starts_with(&name));
        }
        ours
    }

    /// Looks often at first, then ever more rarely, until nothing has moved for [`QUIET`]. A new write to the log, after
    /// a moment without one, begins anew: its commit becomes visible only after its fsync. Writes that follow each other
    /// closely (our own, under load) do not, so that looking stays cheap.
    fn look_until_quiet(&mut self, report: &impl Fn(Seen)) {
        let (mut pause, mut last_move, mut last_write) = (FIRST_LOOK, Instant::now(), Instant::now());
        while last_move.elapsed() <= QUIET && !self.stop.load(Ordering::Relaxed) {
            if self.look(report) {
                last_move = Instant::now();
            }
            if self.sleep(pause) {
                if last_write.elapsed() > APART {
                    pause = FIRST_LOOK;
                }
                last_write = Instant::now();
                last_move = last_write;
                std::thread::sleep(FIRST_LOOK);
            } else {
                pause = (pause * 3 / 2).min(SLOWEST_LOOK);
            }
        }
    }

    /// Whether another connection has committed since the last look; reports where it left work.
    fn look(&mut self, report: &impl Fn(Seen)) -> bool {
        match self.read_version() {
            Ok(version) if version == self.data_version => false,
            Ok(version) => {
                self.data_version = version;
                match self.read_marks() {
                    Ok((seq, touched)) => {
                        if seq > self.last_seq || touched > self.last_touched {
                            report(Seen::Work { touched: touched > self.last_touched });
                        }
                        (self.last_seq, self.last_touched) = (seq, touched);
                    }
                    // the relay finds out what is wrong when it reads
                    Err(_) => report(Seen::Work { touched: true }),
                }
                true
            }
            Err(_) => false,
        }
    }

    fn read_version(&self) -> Result<i64> {
        self.conn
            .prepare_cached("PRAGMA data_version")
            .and_then(|mut s| s.query_row([], |row| row.get(0)))
            .step("look for commits")
    }

    /// The highest numbers of the outbox and of what was touched.
    fn read_marks(&self) -> Result<(i64, i64)> {
        self.conn
            .prepare_cached(
                "SELECT coalesce((SELECT max(seq) FROM outbox_events), 0),
                        coalesce((SELECT max(id) FROM outboxd_touched), 0)",
            )
            .and_then(|mut s| s.query_row([], |row| Ok((row.get(0)?, row.get(1)?))))
            .step("look for new rows")
    }
}

fn watch_directory(path: &Path) -> Option<OwnedFd> {
    let directory = path.parent()?;
    let fd = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK).ok()?;
    let events = inotify::WatchFlags::MODIFY | inotify::WatchFlags::CREATE | inotify::WatchFlags::MOVED_TO;
    inotify::add_watch(&fd, directory, events).ok()?;
    Some(fd)
}

/// Device and inode of the database file; `None` where it is gone.
fn identity(path: &Path) -> Option<(u64, u64)> {
    use std::os::unix::fs::MetadataExt as _;
    let meta = std::fs::metadata(path).ok()?;
    Some((meta.dev(), meta.ino()))
}
