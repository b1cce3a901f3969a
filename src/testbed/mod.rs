//! The world around the product, with real parts: a nats-server of our own, daemons as child processes, applications
//! that write events, subscribers that read them. `demo`, `bench` and the tests are played here.
//!
//! Invariants: only processes that were started here are ever signalled; nothing started here outlives its owner,
//! whether that returns, panics or is killed; nothing here shares code with what it judges.
//!
//! May import: std, rustix, async_nats, rusqlite, serde_json, toml, tokio. Of ours nothing: it stands outside and uses
//! the tables, the wire and the command line as a stranger would.

pub mod application;
pub mod finder;
pub mod flood;
pub mod node;
pub mod process;
pub mod producer;
pub mod proof;
pub mod server;
pub mod stream;
pub mod wait;
pub mod workdir;

use std::path::PathBuf;
use std::time::Duration;

/// Why a step of the testbed could not be done. `Display` is for a person who ran `outboxd demo`.
#[derive(Debug, thiserror::Error)]
pub enum Trouble {
    /// There is no nats-server and none could be fetched; the text says what to type.
    #[error("{0}")]
    NoServer(String),
    /// A file or a process could not be handled.
    #[error("cannot {step}")]
    Io {
        step: String,
        #[source]
        source: std::io::Error,
    },
    /// A process did something else than it was asked for.
    #[error("{0}")]
    Failed(String),
    /// The person at the terminal does not want to wait any more.
    #[error("interrupted")]
    Interrupted,
    /// A level was not reached in time.
    #[error("{what}: not within {} s, last seen: {last}", bound.as_secs_f64())]
    Late { what: String, bound: Duration, last: String },
}

impl Trouble {
    /// For `map_err`: names the step that failed.
    pub fn io(step: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Io { step: step.into(), source }
    }

    /// A failure in words.
    pub fn failed(what: impl Into<String>) -> Self {
        Self::Failed(what.into())
    }
}

/// The executable that is running, as the daemon to start; it stays the same file even where it is rebuilt meanwhile.
pub fn this_executable() -> Result<PathBuf, Trouble> {
    std::env::current_exe().map_err(Trouble::io("find the path of this executable"))
}

/// Ctrl-C and SIGTERM end every wait, so that what was started is ended and the folder removed.
pub fn end_on_interrupt() {
    std::thread::spawn(|| {
        let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else { return };
        runtime.block_on(async {
            use tokio::signal::unix::{SignalKind, signal};
            let (Ok(mut int), Ok(mut term)) = (signal(SignalKind::interrupt()), signal(SignalKind::terminate())) else {
                return;
            };
            loop {
                tokio::select! { _ = int.recv() => (), _ = term.recv() => () }
                wait::interrupt();
            }
        });
    });
}

/// An error with its causes on one line.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        text = format!("{text}: {next}");
        cause = next.source();
    }
    text
}
