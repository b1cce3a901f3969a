//! SIGTERM, SIGINT and SIGHUP as a stream of [`Signal`]: the first stop drains, a second one stops at once.
//!
//! Installed before anything else of the daemon, so that a SIGHUP during the start reloads and does not kill. May import:
//! std, tokio.

use std::io;

use tokio::signal::unix::{Signal as Source, SignalKind, signal};

/// What an operator or the service manager asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// Drain and stop within the grace time: the first SIGTERM or SIGINT.
    Stop,
    /// Stop at once: every further SIGTERM or SIGINT, whichever came first.
    StopNow,
    /// Read the configuration again: SIGHUP.
    Reload,
}

/// The installed handlers. Signals of one kind that arrive before they are read count once, as with the kernel.
#[derive(Debug)]
pub struct Signals {
    terminate: Source,
    interrupt: Source,
    hangup: Source,
    stopping: bool,
}

impl Signals {
    /// Takes the three signals over. Needs a tokio runtime with io and signals enabled.
    pub fn install() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
            stopping: false,
        })
    }

    /// The next one. Can be dropped and called again without losing any; a stop goes before a reload.
    pub async fn next(&mut self) -> Signal {
        tokio::select! {
            biased;
            _ = self.terminate.recv() => self.stop(),
            _ = self.interrupt.recv() => self.stop(),
            _ = self.hangup.recv() => Signal::Reload,
        }
    }

    fn stop(&mut self) -> Signal {
        if std::mem::replace(&mut self.stopping, true) { Signal::StopNow } else { Signal::Stop }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{Signal as Number, getpid, kill_process};
    use std::time::Duration;

    async fn next(signals: &mut Signals) -> Signal {
        tokio::time::timeout(Duration::from_secs(10), signals.next()).await.expect("no signal within 10 s")
    }

    // one test, because the signals of a process belong to all its tests
    #[tokio::test]
    async fn the_first_stop_drains_and_a_second_of_either_kind_stops_at_once() {
        let mut signals = Signals::install().unwrap();
        kill_process(getpid(), Number::HUP).unwrap();
        assert_eq!(next(&mut signals).await, Signal::Reload);
        kill_process(getpid(), Number::INT).unwrap();
        assert_eq!(next(&mut signals).await, Signal::Stop);
        kill_process(getpid(), Number::HUP).unwrap();
        assert_eq!(next(&mut signals).await, Signal::Reload);
        kill_process(getpid(), Number::TERM).unwrap();
        assert_eq!(next(&mut signals).await, Signal::StopNow);
    }
}
