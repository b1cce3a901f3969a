//! One session of a durable: connect, decide where it starts, read around what the client cannot parse, pull.
//!
//! Invariants: nothing is acked before the inbox has answered for it, and it answers after the commit · an ack is known
//! to have arrived, or the consumer is looked at · what a session loses comes again, because the next one starts where
//! the database is.
//!
//! May import: domain, ports, async_nats, tokio.

use std::sync::Arc;
use std::time::Duration;

use async_nats::Event;
use tokio::sync::{Semaphore, mpsc};

use super::connect;
use super::consume::{Context, Settings};
use super::consume_api::{Api, Fault};
use super::consume_plan::{self, ConsumerFacts, Release, Start, StreamFacts};
use super::consume_pull::Pulling;
use super::consume_reply::Continuity;
use crate::domain::apply::Position;
use crate::domain::inbox::Inbound;
use crate::limits;
use crate::ports::{Delivery, Receipt};

/// Looks at a consumer that somebody else seems to pull from, before it is believed: what a dead daemon of ours had
/// asked for is forgotten by the server within moments.
const SECOND_LOOKS: u32 = 5;

/// Between two of them.
const LOOK: Duration = Duration::from_millis(100);

/// Longest wait for the inbox to answer for what is on its way, after a connection was lost.
const AFTERMATH: Duration = Duration::from_secs(5);

/// How a session ended.
#[derive(Debug)]
pub(super) enum End {
    /// As asked; everything on its way was answered for.
    Stopped,
    /// Other settings are in force.
    Changed,
    /// It was pulling, and cannot any more.
    Lost { reason: String },
    /// It did not get as far as pulling. `refused`: trying often is pointless.
    Down { refused: bool, reason: String },
}

/// What one session leaves to the next.
#[derive(Debug, Default)]
pub(super) struct History {
    /// Numbers sessions for the inbox.
    pub(super) sessions: u64,
    /// The connection broke: perhaps over a message that the client cannot parse.
    pub(super) broken: bool,
    /// The inbox has answered for messages since this was last looked at.
    pub(super) progressed: bool,
}

/// Runs one session to its end.
pub(super) async fn run(context: &Context, settings: &Arc<Settings>, history: &mut History) -> End {
    let (sender, mut events) = mpsc::unbounded_channel();
    let name = format!("outboxd inbox {}", settings.inbox.durable);
    let client = match connect::dial(&settings.nats, &name, sender).await {
        Ok(client) => client,
        Err(error) => return End::Down { refused: error.refused, reason: error.reason },
    };
    let api = Api::new(client.clone(), &settings.inbox);
    let session = Session { context, settings, api };
    let ready = match session.prepare(history).await {
        Ok(ready) => ready,
        Err(end) => return with_complaint(end, &mut events),
    };
    history.sessions += 1;
    let opening = Opening { ready, number: history.sessions, events };
    let mut pulling = match Pulling::start(context, settings, client, session.api, opening).await {
        Ok(pulling) => pulling,
        Err(end) => return end,
    };
    context.tell(true, "");
    let end = pulling.run(history).await;
    if matches!(end, End::Lost { .. }) {
        // what is at the inbox now decides where the next session starts
        let _ = tokio::time::timeout(AFTERMATH, pulling.await_answers(history)).await;
    }
    end
}

/// What a session knows when it begins to pull.
pub(super) struct Ready {
    pub(super) stream_created: Arc<str>,
    pub(super) floor: u64,
    pub(super) continuity: Continuity,
}

/// What it needs besides.
pub(super) struct Opening {
    pub(super) ready: Ready,
    pub(super) number: u64,
    pub(super) events: mpsc::UnboundedReceiver<Event>,
}

struct Session<'a> {
    context: &'a Context,
    settings: &'a Arc<Settings>,
    api: Api,
}

/// A request that is not allowed is not answered either: the server says so beside it.
fn with_complaint(end: End, events: &mut mpsc::UnboundedReceiver<Event>) -> End {
    match end {
        End::Down { refused, mut reason } => {
            while let Ok(event) = events.try_recv() {
                if let Event::ServerError(error) = event {
                    reason = format!("{reason} (the server says: {error})");
                }
            }
            End::Down { refused, reason }
        }
        other => other,
    }
}

fn down(fault: &Fault) -> End {
    End::Down { refused: false, reason: fault.to_string() }
}

fn database(reason: String) -> End {
    End::Down { refused: false, reason: format!("the database does not give the position of the inbox: {reason}") }
}

impl Session<'_> {
    /// Everything before the first pull.
    async fn prepare(&self, history: &mut History) -> Result<Ready, End> {
        if history.broken {
            self.read_around(history).await?;
            history.broken = false;
        }
        let inbox = &self.settings.inbox;
        let stream = self.stream().await?;
        let mut consumer = self.api.consumer().await.map_err(|f| down(&f))?;
        let mut plan = self.plan(&stream, consumer.as_ref()).await?;
        for _ in 0..SECOND_LOOKS {
            if !matches!(plan.start, Start::Join { .. }) {
                break;
            }
            tokio::time::sleep(LOOK).await;
            consumer = self.api.consumer().await.map_err(|f| down(&f))?;
            plan = self.plan(&stream, consumer.as_ref()).await?;
        }
        if let Some(note) = &plan.note {
            tracing::warn!(durable = inbox.durable, "inbox: {note}");
        }
        if let Some(position) = plan.establish {
            self.context.inlet.establish(position).await.map_err(database)?;
        }
        let floor = plan.start.floor();
        let continuity = match plan.start {
            Start::Create { floor } => {
                self.create(&stream, floor).await?;
                Continuity::new(1, floor)
            }
            Start::Recreate { floor } => match self.api.delete().await {
                Ok(()) => {
                    self.create(&stream, floor).await?;
                    Continuity::new(1, floor)
                }
                // not for this user: what is in flight comes again when the server thinks so
                Err(fault @ (Fault::Refused { .. } | Fault::Silent { .. })) => {
                    tracing::warn!(%fault, "inbox: the consumer cannot be made anew, going on with it as it is");
                    self.update(&stream, &plan.update, consumer.as_ref()).await?;
                    self.release(consumer.as_ref().and_then(Release::of)).await?;
                    Continuity::shared(floor)
                }
                Err(fault) => return Err(down(&fault)),
            },
            Start::Resume { floor, next_delivery } => {
                self.update(&stream, &plan.update, consumer.as_ref()).await?;
                Continuity::new(next_delivery, floor)
            }
            Start::Join { floor, acked, release } => {
                self.update(&stream, &plan.update, consumer.as_ref()).await?;
                self.release(release).await?;
                Continuity::shared(floor.max(acked))
            }
        };
        Ok(Ready { stream_created: stream.created.into(), floor, continuity })
    }

    async fn stream(&self) -> Result<StreamFacts, End> {
        let found = self.api.stream().await.map_err(|f| down(&f))?;
        let missing = || format!("stream {} does not exist", self.settings.inbox.stream);
        found.ok_or_else(|| End::Down { refused: false, reason: missing() })
    }

    async fn plan(&self, stream: &StreamFacts, consumer: Option<&ConsumerFacts>) -> Result<consume_plan::Plan, End> {
        let position = self.context.inlet.position().await.map_err(database)?;
        consume_plan::plan(&self.settings.inbox, stream, position.as_ref(), consumer)
            .map_err(|reason| End::Down { refused: true, reason })
    }

    async fn create(&self, stream: &StreamFacts, floor: u64) -> Result<(), End> {
        self.api.create(&self.settings.inbox, stream, floor).await.map(drop).map_err(|f| down(&f))
    }

    async fn update(&self, stream: &StreamFacts, fields: &[&str], have: Option<&ConsumerFacts>) -> Result<(), End> {
        let Some(have) = have.filter(|_| !fields.is_empty()) else { return Ok(()) };
        self.api.update(&self.settings.inbox, stream, have).await.map_err(|f| down(&f))?;
        tracing::info!(fields = fields.join(", "), "inbox: changed the consumer's settings");
        Ok(())
    }

    /// Gives back what the session before had in flight, so that it comes first and in order.
    async fn release(&self, release: Option<Release>) -> Result<(), End> {
        match release {
            Some(release) => self.api.release(&release).await.map_err(|f| down(&f)),
            None => Ok(()),
        }
    }

    /// After a broken connection: one message after the other from the stream itself, until what follows the settled
    /// sequence holds nothing that the client cannot parse.
    async fn read_around(&self, history: &mut History) -> Result<(), End> {
        let stream = self.stream().await?;
        let inbox = &self.settings.inbox;
        let mut before = None;
        loop {
            let position = self.context.inlet.position().await.map_err(database)?;
            // a durable without a position here, or of another stream, is for the plan
            let Some(Position { settled_seq: floor, .. }) =
                position.filter(|p| p.stream == inbox.stream && p.stream_created == stream.created)
            else {
                return Ok(());
            };
            if before.replace(floor) == Some(floor) {
                // a message before the unreadable one has to wait, and it is met again
                tokio::time::sleep(limits::PROBE).await;
            }
            let window = self.window(floor).await.map_err(|f| down(&f))?;
            let unreadable = window.iter().filter(|m| m.unreadable.is_some()).map(|m| m.stream_seq).max();
            if !window.is_empty() {
                self.deliver_read(&stream, floor, window, history).await?;
            }
            let Some(seq) = unreadable else { return Ok(()) };
            tracing::warn!(stream = inbox.stream, seq, "inbox: read around a message with unreadable headers");
            if self.context.stop.is_cancelled() {
                return Err(End::Stopped);
            }
        }
    }

    /// Up to a batch of messages above `floor`.
    async fn window(&self, floor: u64) -> Result<Vec<Inbound>, Fault> {
        let inbox = &self.settings.inbox;
        let mut window = Vec::new();
        let mut next = floor.saturating_add(1);
        while window.len() < inbox.batch {
            let mut first = None;
            for filter in &inbox.filter_subjects {
                if let Some(got) = self.api.message(next, filter).await?
                    && first.as_ref().is_none_or(|first: &super::consume_raw::Got| got.seq() < first.seq())
                {
                    first = Some(got);
                }
            }
            let Some(got) = first else { break };
            next = got.seq().saturating_add(1);
            let garbled = || Fault::Garbled { what: "STREAM.MSG.GET", detail: "no base64".into() };
            window.push(got.inbound().ok_or_else(garbled)?);
        }
        Ok(window)
    }

    async fn deliver_read(
        &self,
        stream: &StreamFacts,
        floor: u64,
        messages: Vec<Inbound>,
        history: &mut History,
    ) -> Result<(), End> {
        let (answers, mut answered) = mpsc::unbounded_channel();
        let gate = Arc::new(Semaphore::new(1));
        let Ok(permit) = gate.try_acquire_owned() else { return Ok(()) };
        history.sessions += 1;
        self.context.inlet.deliver(Delivery {
            stream: self.settings.inbox.stream.as_str().into(),
            stream_created: stream.created.as_str().into(),
            session: history.sessions,
            floor,
            messages,
            limit: None,
            receipt: Receipt::new(0, permit, answers),
        });
        match answered.recv().await {
            Some((_, Some(_))) => {
                history.progressed = true;
                Ok(())
            }
            Some((_, None)) | None => Err(End::Down { refused: false, reason: LOST_BATCH.into() }),
        }
    }
}

/// The consumer actor ended with a batch, or the database refused it as a whole.
pub(super) const LOST_BATCH: &str = "the inbox could not take a batch; it comes again";
