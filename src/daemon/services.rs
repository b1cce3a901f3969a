//! What the admin side gets from the daemon: counts, writes, the socket.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use super::Daemon;
use crate::actors::relay::RelayMsg;
use crate::actors::writer::{Kind, Writer};
use crate::admin::{self, Job, Services, Write};
use crate::config::Config;
use crate::domain::event::Millis;
use crate::store::error::StoreError;
use crate::store::inbox::Inbox;
use crate::store::pool::Store;
use crate::store::schema;
use crate::telemetry::board::State;

/// Runs an operator's transaction through the writer.
pub(super) fn write(writer: Writer) -> Write {
    Arc::new(move |job: Job| {
        let writer = writer.clone();
        Box::pin(async move { writer.write(Kind::Operate, job).await })
    })
}

/// Until when publishing is paused; `None` where it is not.
pub(super) async fn paused_until(store: &Store, now: Millis) -> Result<Option<Millis>, StoreError> {
    let kept = store.read(|conn| schema::meta_get(conn, "paused_until_ms")).await?;
    Ok(kept.and_then(|text| text.parse().ok()).filter(|until: &Millis| *until > now))
}

impl Daemon {
    /// A pause with an end ends by itself.
    pub(super) fn wake_at_end_of_pause(&self, until: Option<Millis>) {
        let Some(until) = until.filter(|until| *until < Millis::MAX / 2) else { return };
        let wait = u64::try_from(until - self.clock.now()).unwrap_or(0);
        let (store, clock, relay, board) =
            (self.store.clone(), self.clock.clone(), self.relay.clone(), self.board.clone());
        tokio::spawn(async move {
            tokio::time::sleep(std::time::Duration::from_millis(wait + 1)).await;
            // it may have been prolonged or ended meanwhile: then another waits for that
            if matches!(paused_until(&store, clock.now()).await, Ok(None)) {
                board.write(|f| {
                    if f.state == State::Paused {
                        f.state = State::Running;
                    }
                });
                relay.cast(RelayMsg::Pause(false));
            }
        });
    }
}

/// The handlers of the inbox, for a dead letter that is tried again.
pub(super) fn inbox(config: &Config, source: &str) -> Option<Arc<Inbox>> {
    (!config.inbox.handler.is_empty()).then(|| Arc::new(Inbox::new(config.inbox.rules(source))))
}

/// Serves the operator's socket until the end.
pub(super) fn serve_socket(config: &Config, store: &Store, services: Services, stop: CancellationToken) {
    let candidates = admin::socket::candidates(config.admin.socket.as_deref(), store.path());
    tokio::spawn(admin::server::run(services, candidates, store.path().to_path_buf(), stop));
}
