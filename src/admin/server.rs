//! The daemon's end of the unix socket: binds it for as long as the daemon lives, and does what is asked.
//!
//! A change goes through the writer in one transaction, unless its asker's patience has run out before it is begun.
//! May import: socket, operate, the store's errors.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use super::operate::{self, Effect};
use super::protocol::{Envelope, Fault, Reply, Request};
use super::socket::{self, Bound, Handler, Peer};
use super::{Control, Services};

/// Pause between two tries to bind: another daemon on the same database may end.
const RETRY: Duration = Duration::from_secs(1);

/// How long a reload may take before its asker is told that it goes on.
const RELOAD_WAIT: Duration = Duration::from_secs(55);

/// Serves the command line until `stop`. A socket that cannot be bound is tried again each second and shown in status.
pub async fn run(services: Services, candidates: Vec<PathBuf>, database: PathBuf, stop: CancellationToken) {
    let path = socket::choose(&candidates).to_path_buf();
    let operator = Arc::new(Operator { services: services.clone(), database: database.clone() });
    let mut told = String::new();
    while !stop.is_cancelled() {
        match Bound::bind(&path, mode(&database)) {
            Ok(bound) => {
                services.board.write(|f| {
                    (f.admin_listen, f.admin_problem) = (bound.path().display().to_string(), String::new());
                });
                told.clear();
                tokio::select! {
                    ended = socket::serve(&bound, operator.clone()) => {
                        if let Err(error) = ended {
                            tracing::warn!(%error, "the command socket failed; it is opened again");
                        }
                    }
                    () = replaced(&bound) => {
                        tracing::warn!(path = %path.display(), "the command socket was removed; it is made again");
                    }
                    () = stop.cancelled() => {}
                }
                services.board.write(|f| f.admin_listen.clear());
            }
            Err(error) => {
                let problem = format!("cannot serve {}: {error}", path.display());
                services.board.write(|f| f.admin_problem = problem.clone());
                if problem != told {
                    tracing::warn!(problem, "the command socket is not served; tried again each second");
                    told = problem;
                }
            }
        }
        let _ = tokio::time::timeout(RETRY, stop.cancelled()).await;
    }
}

/// Ends when the file of the socket is no longer ours: a clean-up of temporary files, a hand.
async fn replaced(bound: &Bound) {
    while bound.is_in_place() {
        tokio::time::sleep(Duration::from_secs(5)).await;
    }
}

/// The group may connect where it may write the database; who it is then decides whether it is served.
fn mode(database: &std::path::Path) -> u32 {
    let group = std::fs::metadata(database).is_ok_and(|m| m.permissions().mode() & 0o020 != 0);
    if group { 0o660 } else { 0o600 }
}

/// Does what a peer asks for.
struct Operator {
    services: Services,
    database: PathBuf,
}

impl Handler for Operator {
    async fn handle(&self, peer: Peer, envelope: Envelope) -> Reply {
        match &envelope.request {
            Request::Status => self.status().await,
            Request::Reload => self.reload().await,
            _ => self.change(peer, envelope).await,
        }
    }

    fn owner(&self) -> u32 {
        // a database that cannot be seen has no owner that could be served: root's number, whom we serve anyway
        std::fs::metadata(&self.database).map_or(0, |m| m.uid())
    }
}

impl Operator {
    async fn status(&self) -> Reply {
        match self.services.status().await.map(serde_json::to_value) {
            Ok(Ok(status)) => Reply::done(status),
            Ok(Err(error)) => Reply::failed(Fault::new(70, error.to_string(), "report it")),
            Err(error) => Reply::failed(operate::fault(&error)),
        }
    }

    async fn reload(&self) -> Reply {
        let (reply, answer) = oneshot::channel();
        let busy = || Fault::new(69, "the daemon takes no reload now: it is starting or ending", "try again");
        if self.services.control.send(Control::Reload { reply }).await.is_err() {
            return Reply::failed(busy());
        }
        match tokio::time::timeout(RELOAD_WAIT, answer).await {
            Ok(Ok(reloaded)) => {
                let exit = if reloaded.result == "rejected" { 78 } else { 0 };
                Reply::with_exit(exit, serde_json::to_value(&reloaded).unwrap_or(Value::Null))
            }
            Ok(Err(_)) => Reply::failed(busy()),
            Err(_) => Reply::failed(Fault::new(
                69,
                format!("the reload is not done after {} s and goes on", RELOAD_WAIT.as_secs()),
                "look at config.last_reload in outboxd status",
            )),
        }
    }

    async fn change(&self, peer: Peer, envelope: Envelope) -> Reply {
        let actor = peer.actor(envelope.sudo_user.as_deref());
        let request = envelope.request.clone();
        let (clock, inbox) = (self.services.clock.clone(), self.services.inbox.clone());
        let job: super::Job = Box::new(move |tx| {
            let now = clock.now();
            if now > envelope.expires_at {
                return Err(operate::expired());
            }
            operate::perform(tx, &envelope.request, inbox.as_deref(), &actor, now)
        });
        match (self.services.write)(job).await {
            Ok(result) => {
                self.tell(operate::effect(&request)).await;
                operate::reply(result)
            }
            Err(error) => Reply::failed(operate::fault(&error)),
        }
    }

    /// Lets the daemon know what it would not notice by itself. It is in no hurry: what is told is a level in the
    /// database that it also reads when it starts.
    async fn tell(&self, effect: Effect) {
        let control = match effect {
            Effect::Pause => Control::PauseChanged,
            Effect::Outbox => Control::OutboxChanged,
            Effect::Inbox => Control::InboxChanged,
            Effect::None => return,
        };
        if tokio::time::timeout(RETRY, self.services.control.send(control)).await.is_err() {
            tracing::debug!("the daemon is busy; it learns of the change when it next looks");
        }
    }
}
