//! The root: starts the actors of one database and starts those again that crash.
//!
//! Every part can lose its memory: the database knows what was leased, settled and applied. So each is restarted alone,
//! after a growing delay, and the others keep their handles: the writer's is a seat, the relay's a slot. More than
//! [`limits::RESTARTS`] crashes within [`limits::RESTART_WINDOW`] end the root, and the daemon with exit code 70.
//!
//! The shutdown is not a message to the root but a function of the composition root: it must not wait behind a handler.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef, SupervisionEvent};

use super::consumer::{Consumer, ConsumerArgs, ConsumerMsg};
use super::janitor::{Janitor, JanitorArgs, JanitorMsg};
use super::relay::{Relay, RelayArgs, RelayMsg};
use super::writer::{Writer, WriterActor, WriterArgs};
use crate::limits;
use crate::telemetry::metrics::Metrics;

/// A place that always holds the living actor of a kind.
#[derive(Debug)]
pub struct Slot<M>(Arc<Mutex<Option<ActorRef<M>>>>);

impl<M> Clone for Slot<M> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<M> Default for Slot<M> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<M: ractor::Message> Slot<M> {
    /// The living actor, if there is one.
    pub fn get(&self) -> Option<ActorRef<M>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sends where somebody lives; a message to nobody is dropped, because the next one reads everything anew.
    pub fn cast(&self, message: M) {
        if let Some(actor) = self.get() {
            let _ = actor.cast(message);
        }
    }

    fn put(&self, actor: Option<ActorRef<M>>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = actor;
    }
}

/// What the root starts.
pub struct RootArgs {
    pub writer: WriterArgs,
    pub writer_seat: Writer,
    /// `None`: `relay.enabled = false`.
    pub relay: Option<RelayArgs>,
    pub relay_slot: Slot<RelayMsg>,
    pub janitor: JanitorArgs,
    pub janitor_slot: Slot<JanitorMsg>,
    /// `None`: `inbox.enabled = false`.
    pub consumer: Option<ConsumerArgs>,
    pub consumer_slot: Slot<ConsumerMsg>,
    pub metrics: Metrics,
}

/// Parts of the daemon that the root starts again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    Writer,
    Relay,
    Janitor,
    Consumer,
}

impl Part {
    fn name(self) -> &'static str {
        match self {
            Part::Writer => "writer",
            Part::Relay => "relay",
            Part::Janitor => "janitor",
            Part::Consumer => "consumer",
        }
    }
}

/// Messages of the root.
#[derive(Debug)]
pub enum RootMsg {
    /// Start this part again.
    Respawn(Part),
    /// Parts that end from now on are meant to.
    Quiesce,
}

/// The actor; see the module.
pub struct Root;

/// State of the root.
pub struct RootState {
    args: RootArgs,
    children: Vec<(Part, ActorCell)>,
    crashes: VecDeque<Instant>,
    quiescing: bool,
}

impl Actor for Root {
    type Msg = RootMsg;
    type State = RootState;
    type Arguments = RootArgs;

    async fn pre_start(&self, myself: ActorRef<RootMsg>, args: RootArgs) -> Result<RootState, ActorProcessingErr> {
        let mut state = RootState { args, children: Vec::new(), crashes: VecDeque::new(), quiescing: false };
        for part in [Part::Writer, Part::Janitor, Part::Relay, Part::Consumer] {
            state.start(&myself, part).await?;
        }
        Ok(state)
    }

    async fn handle(
        &self,
        myself: ActorRef<RootMsg>,
        message: RootMsg,
        state: &mut RootState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            RootMsg::Respawn(part) if !state.quiescing => state.start(&myself, part).await,
            RootMsg::Respawn(_) => Ok(()),
            RootMsg::Quiesce => {
                state.quiescing = true;
                Ok(())
            }
        }
    }

    async fn handle_supervisor_evt(
        &self,
        myself: ActorRef<RootMsg>,
        event: SupervisionEvent,
        state: &mut RootState,
    ) -> Result<(), ActorProcessingErr> {
        match event {
            SupervisionEvent::ActorFailed(who, error) => state.ended(&myself, &who, &error.to_string()),
            // a kill arrives as a termination too
            SupervisionEvent::ActorTerminated(who, _, reason) => {
                state.ended(&myself, &who, reason.as_deref().unwrap_or("ended"))
            }
            SupervisionEvent::ActorStarted(_) | SupervisionEvent::ProcessGroupChanged(_) => Ok(()),
        }
    }
}

impl RootState {
    async fn start(&mut self, myself: &ActorRef<RootMsg>, part: Part) -> Result<(), ActorProcessingErr> {
        let supervisor = myself.get_cell();
        let cell = match part {
            Part::Writer => {
                let args = self.args.writer.clone();
                let (actor, _) = WriterActor::spawn_linked(None, WriterActor, args, supervisor).await?;
                self.args.writer_seat.seat(actor.clone());
                actor.get_cell()
            }
            Part::Relay => {
                let Some(args) = self.args.relay.clone() else { return Ok(()) };
                let (actor, _) = Relay::spawn_linked(None, Relay, args, supervisor).await?;
                self.args.relay_slot.put(Some(actor.clone()));
                actor.get_cell()
            }
            Part::Janitor => {
                let args = self.args.janitor.clone();
                let (actor, _) = Janitor::spawn_linked(None, Janitor, args, supervisor).await?;
                self.args.janitor_slot.put(Some(actor.clone()));
                actor.get_cell()
            }
            Part::Consumer => {
                let Some(args) = self.args.consumer.clone() else { return Ok(()) };
                let (actor, _) = Consumer::spawn_linked(None, Consumer, args, supervisor).await?;
                self.args.consumer_slot.put(Some(actor.clone()));
                actor.get_cell()
            }
        };
        self.children.push((part, cell));
        Ok(())
    }

    fn ended(&mut self, myself: &ActorRef<RootMsg>, who: &ActorCell, why: &str) -> Result<(), ActorProcessingErr> {
        let Some(at) = self.children.iter().position(|(_, cell)| cell.get_id() == who.get_id()) else { return Ok(()) };
        let (part, _) = self.children.remove(at);
        if self.quiescing {
            return Ok(());
        }
        match part {
            Part::Writer => {}
            Part::Relay => self.args.relay_slot.put(None),
            Part::Janitor => self.args.janitor_slot.put(None),
            Part::Consumer => self.args.consumer_slot.put(None),
        }
        let now = Instant::now();
        self.crashes.push_back(now);
        while self.crashes.front().is_some_and(|crash| now - *crash > limits::RESTART_WINDOW) {
            self.crashes.pop_front();
        }
        self.args.metrics.actor_restarted(part.name());
        tracing::error!(part = part.name(), error = why, crashes = self.crashes.len(), "a part of the daemon crashed");
        if self.crashes.len() > limits::RESTARTS {
            return Err(
                format!("{} crashes in a minute, the last of the {}: {why}", self.crashes.len(), part.name()).into()
            );
        }
        let delay = Duration::from_millis(20 << self.crashes.len().min(6));
        myself.send_after(delay, move || RootMsg::Respawn(part));
        Ok(())
    }
}

/// The running actors, for the composition root.
pub struct Tree {
    root: ActorRef<RootMsg>,
    task: tokio::task::JoinHandle<()>,
    consumer: Slot<ConsumerMsg>,
    relay: Slot<RelayMsg>,
    writer: Writer,
}

impl Tree {
    /// Starts all of them.
    ///
    /// # Errors
    /// The reason, where one of them could not start.
    pub async fn start(args: RootArgs) -> Result<Self, String> {
        let (consumer, relay) = (args.consumer_slot.clone(), args.relay_slot.clone());
        let writer = args.writer_seat.clone();
        let (root, task) = Root::spawn(None, Root, args).await.map_err(|error| error.to_string())?;
        Ok(Self { root, task, consumer, relay, writer })
    }

    /// Returns when the root has given up. Can be dropped and called again.
    pub async fn given_up(&mut self) {
        let _ = (&mut self.task).await;
    }

    /// Ends in the order of the data flow: the consumer applies and acks what it has pulled while the relay gives everything back, then the writer commits what it has.
    /// Bounded by the caller; nothing is lost where it is cut short.
    pub fn drain(&self) -> impl Future<Output = ()> + Send + 'static {
        let _ = self.root.cast(RootMsg::Quiesce);
        let (consumer, relay, writer) = (self.consumer.get(), self.relay.get(), self.writer.actor());
        async move {
            let consumer = async {
                if let Some(consumer) = consumer {
                    let _ = consumer.call(ConsumerMsg::Quiesce, None).await;
                }
            };
            let relay = async {
                if let Some(relay) = relay {
                    // it answers when every publisher has given everything back
                    let _ = relay.call(RelayMsg::Quiesce, None).await;
                }
            };
            futures_util::future::join(consumer, relay).await;
            if let Some(writer) = writer {
                let _ = writer.drain_and_wait(None).await;
            }
        }
    }

    /// Ends whoever is left.
    pub fn stop(&self) {
        self.root.stop(None);
    }
}
