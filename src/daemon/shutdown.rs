//! The orderly stop: an async function of the composition root, so that it never waits behind a busy handler.
//!
//! In the order of the data flow: nothing new is pulled or leased -> what is in flight is acked or times out -> verdicts
//! are settled, unsent leases given back -> the writer commits what it has -> the connections end. A second signal, or
//! the end of the grace time, ends it at once; leases then run out or are taken over by the lock.

use std::time::Duration;

use super::{Daemon, exit};
use crate::signals::Signal;
use crate::telemetry::board::State;

impl Daemon {
    pub(super) async fn stop(mut self) -> u8 {
        let grace = self.options.grace;
        self.board.write(|facts| facts.state = State::Draining);
        self.notifier.stopping("draining");
        self.notifier.extend(grace + Duration::from_secs(5));
        tracing::info!(grace_s = grace.as_secs(), "stopping: what is in flight is settled first");
        let drain = self.tree.drain();
        tokio::pin!(drain);
        let deadline = tokio::time::sleep(grace);
        tokio::pin!(deadline);
        let code = loop {
            tokio::select! {
                () = &mut drain => break exit::OK,
                () = &mut deadline => {
                    tracing::warn!("not everything was settled within the grace time; its leases are taken over later");
                    break exit::FORCED;
                }
                signal = self.signals.next() => match signal {
                    Signal::Reload => tracing::warn!("no reload while stopping"),
                    Signal::Stop | Signal::StopNow => {
                        tracing::warn!("told to stop at once");
                        break exit::FORCED;
                    }
                },
            }
        };
        self.stop_admin.cancel();
        self.broker.close();
        self.tree.stop();
        tracing::info!(code, "stopped");
        code
    }
}
