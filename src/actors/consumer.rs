//! The consumer: applies what the source delivers, one request at the writer at a time, and answers after the commit.
//!
//! No handler waits for anything. A database that is locked or full makes the batch wait: the source keeps its messages
//! alive meanwhile and pulls no more, because its permits are here. A batch that the database refuses as a whole, though
//! nothing is wrong with the database, is halved until the message at fault is found; that one is counted.
//!
//! What it keeps in memory can be lost at any time: a new session with the stream starts at the database's position.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use ractor::rpc::CallResult;
use ractor::{Actor, ActorProcessingErr, ActorRef, RpcReplyPort};
use tokio::task::JoinHandle;

use super::writer::{Kind, Writer};
use crate::domain::apply::{Position, Progress, Verdict};
use crate::ports::{Clock, Delivery, Inlet, Receipt, Source, Tap};
use crate::store::error::{Result, StoreError, chain};
use crate::store::inbox::{self, Applied, Batch, Inbox};
use crate::store::inbox_position;
use crate::store::pool::Store;
use crate::telemetry::board::Board;
use crate::telemetry::metrics::Metrics;
use crate::telemetry::progress::Heart;

/// First pause before a batch is tried again; doubled up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// A writer that crashed is started again; a job that panics crashes always. Tries before the job is suspected.
const CRASHES: u32 = 3;

/// The consumer registers its sign of life with this bound; it rests between messages, and so never misses it alone.
const PROGRESS_BOUND: Duration = Duration::from_secs(30);

/// Messages of the consumer.
#[derive(Debug)]
pub enum ConsumerMsg {
    /// Opens the source; sent by itself.
    Start,
    /// Messages of the stream.
    Inbound(Box<Delivery>),
    /// The writer has answered.
    Done(Range<usize>, Result<Applied>),
    /// Try again what could not be written.
    Again,
    /// The recorded position, for a session that begins.
    Position(RpcReplyPort<std::result::Result<Option<Position>, String>>),
    /// Record a position.
    Establish(Position, RpcReplyPort<std::result::Result<(), String>>),
    /// Rules for the batches that come.
    Adopt(Arc<Inbox>),
    /// Pull nothing more, and answer when everything on its way is applied and told to the broker.
    Quiesce(RpcReplyPort<()>),
    Snapshot(RpcReplyPort<Snapshot>),
}

/// Where the consumer is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Everything at or below it is settled.
    pub settled_seq: u64,
    /// Messages that wait: for a retry, a version, a table.
    pub waiting: usize,
    /// Messages that are here and not settled.
    pub held: usize,
}

/// What a consumer is made of.
#[derive(Clone)]
pub struct ConsumerArgs {
    pub store: Store,
    pub writer: Writer,
    pub source: Arc<dyn Source>,
    pub inbox: Arc<Inbox>,
    pub clock: Arc<dyn Clock>,
    pub board: Board,
    pub metrics: Metrics,
}

/// The actor; see the module.
pub struct Consumer;

/// A delivery that is being applied.
#[derive(Debug)]
struct Current {
    batch: Batch,
    receipt: Receipt,
    /// Still to be written, the next one last.
    ranges: Vec<Range<usize>>,
    verdicts: Vec<Verdict>,
    /// The one message left of a batch that was refused, and why.
    blame: Option<String>,
    /// The last message that was blamed, by its place: blamed twice, the database cannot even count.
    blamed: Option<usize>,
    crashes: u32,
}

/// State of the consumer.
pub struct ConsumerState {
    args: ConsumerArgs,
    myself: ActorRef<ConsumerMsg>,
    heart: Heart,
    tap: Option<Box<dyn Tap>>,
    session: u64,
    progress: Progress,
    queue: VecDeque<Delivery>,
    current: Option<Current>,
    pause: Duration,
    again: Option<JoinHandle<std::result::Result<(), ractor::MessagingErr<ConsumerMsg>>>>,
}

impl Actor for Consumer {
    type Msg = ConsumerMsg;
    type State = ConsumerState;
    type Arguments = ConsumerArgs;

    async fn pre_start(
        &self,
        myself: ActorRef<ConsumerMsg>,
        args: ConsumerArgs,
    ) -> std::result::Result<ConsumerState, ActorProcessingErr> {
        let heart = args.board.loops().register("consumer", PROGRESS_BOUND);
        heart.rest();
        myself.cast(ConsumerMsg::Start)?;
        Ok(ConsumerState {
            args,
            myself,
            heart,
            tap: None,
            session: 0,
            progress: Progress::default(),
            queue: VecDeque::new(),
            current: None,
            pause: FIRST_PAUSE,
            again: None,
        })
    }

    async fn handle(
        &self,
        myself: ActorRef<ConsumerMsg>,
        message: ConsumerMsg,
        state: &mut ConsumerState,
    ) -> std::result::Result<(), ActorProcessingErr> {
        match message {
            ConsumerMsg::Start => state.open(myself),
            ConsumerMsg::Inbound(delivery) => state.queue.push_back(*delivery),
            ConsumerMsg::Done(range, Ok(applied)) => state.written(range, applied),
            ConsumerMsg::Done(range, Err(error)) => state.refused(range, error),
            ConsumerMsg::Again => {
                state.again = None;
                state.write();
            }
            ConsumerMsg::Position(reply) => state.position(reply),
            ConsumerMsg::Establish(position, reply) => state.establish(position, reply),
            ConsumerMsg::Adopt(inbox) => state.args.inbox = inbox,
            ConsumerMsg::Quiesce(reply) => state.quiesce(reply),
            ConsumerMsg::Snapshot(reply) => state.snapshot(reply),
        }
        state.pump();
        state.heart.rest();
        Ok(())
    }

    async fn post_stop(
        &self,
        _: ActorRef<ConsumerMsg>,
        state: &mut ConsumerState,
    ) -> std::result::Result<(), ActorProcessingErr> {
        // a clean stop is no loop that is gone
        std::mem::replace(&mut state.heart, state.args.board.loops().register("consumer", PROGRESS_BOUND)).retire();
        Ok(())
    }
}

impl ConsumerState {
    fn open(&mut self, myself: ActorRef<ConsumerMsg>) {
        self.tap = Some(self.args.source.open(Arc::new(Door(myself))));
    }

    fn position(&self, reply: RpcReplyPort<std::result::Result<Option<Position>, String>>) {
        let (store, inbox) = (self.args.store.clone(), Arc::clone(&self.args.inbox));
        tokio::spawn(async move {
            let read = store.read(move |conn| inbox_position::read(conn, &inbox.rules.durable)).await;
            // the session may be gone
            let _ = reply.send(read.map_err(|error| chain(&error)));
        });
    }

    fn establish(&self, position: Position, reply: RpcReplyPort<std::result::Result<(), String>>) {
        let (writer, inbox) = (self.args.writer.clone(), Arc::clone(&self.args.inbox));
        tokio::spawn(async move {
            let job =
                move |tx: &rusqlite::Transaction<'_>| inbox_position::establish(tx, &inbox.rules.durable, &position);
            let written = writer.write(Kind::Apply, job).await;
            let _ = reply.send(written.map_err(|error| chain(&error)));
        });
    }

    /// Takes the next delivery where none is under way, and asks the writer where it is not asked.
    fn pump(&mut self) {
        if self.current.is_some() {
            return;
        }
        while let Some(delivery) = self.queue.pop_front() {
            if delivery.session < self.session {
                // its session is over: its messages come again, and it is told so by the dropped receipt
                continue;
            }
            if delivery.session > self.session {
                self.session = delivery.session;
                self.progress = Progress::starting_at(delivery.floor);
            }
            let Delivery { stream, stream_created, messages, limit, receipt, .. } = delivery;
            let count = messages.len();
            self.current = Some(Current {
                batch: Batch { stream, stream_created, messages: Arc::new(messages), limit },
                receipt,
                ranges: std::iter::once(0..count).collect(),
                verdicts: Vec::with_capacity(count),
                blame: None,
                blamed: None,
                crashes: 0,
            });
            return self.write();
        }
    }

    /// Asks the writer for the next part of the delivery.
    fn write(&mut self) {
        let Some(current) = &mut self.current else { return };
        let Some(range) = current.ranges.pop() else { return };
        let (batch, inbox) = (current.batch.clone(), Arc::clone(&self.args.inbox));
        let (progress, blame) = (self.progress.clone(), current.blame.take());
        let (writer, clock, myself) = (self.args.writer.clone(), Arc::clone(&self.args.clock), self.myself.clone());
        tokio::spawn(async move {
            let part = range.clone();
            let job = move |tx: &rusqlite::Transaction<'_>| {
                inbox::apply(tx, &inbox, &batch, part, progress, blame.as_deref(), clock.now())
            };
            let result = writer.write(Kind::Apply, job).await;
            // the consumer may be gone: then its messages come again and are duplicates
            let _ = myself.cast(ConsumerMsg::Done(range, result));
        });
    }

    fn written(&mut self, range: Range<usize>, applied: Applied) {
        self.progress = applied.progress;
        self.pause = FIRST_PAUSE;
        let Some(current) = &mut self.current else { return };
        debug_assert_eq!(current.verdicts.len(), range.start);
        current.verdicts.extend(applied.verdicts);
        current.crashes = 0;
        if !current.ranges.is_empty() {
            return self.write();
        }
        if let Some(current) = self.current.take() {
            self.tell(&current.verdicts);
            current.receipt.settle(current.verdicts.iter().map(Verdict::fate).collect());
        }
    }

    /// Counters, and what a person should know.
    fn tell(&self, verdicts: &[Verdict]) {
        let (mut applied, mut duplicates) = (0u64, 0u64);
        let mut trouble = None;
        for verdict in verdicts {
            match verdict {
                Verdict::Applied | Verdict::Stored | Verdict::Stale => applied += 1,
                Verdict::Duplicate => duplicates += 1,
                Verdict::Skipped => {}
                Verdict::Dead(cause) => {
                    self.args.metrics.inbox_dead(cause.label());
                    tracing::warn!(%cause, "inbox: kept a dead letter, `outboxd inbox list` shows it");
                }
                Verdict::Later { reason, .. } => trouble = Some(reason),
            }
        }
        self.args.metrics.inbox_applied(applied);
        self.args.metrics.inbox_duplicates(duplicates);
        let waiting = self.progress.waiting() as u64;
        if let Some(reason) = trouble {
            tracing::debug!(waiting, reason, "inbox: messages wait");
        }
        self.args.board.write(|facts| {
            facts.inbox_waiting = waiting;
            match trouble {
                Some(reason) => facts.inbox_trouble.clone_from(reason),
                None if waiting == 0 => facts.inbox_trouble.clear(),
                None => {}
            }
        });
    }

    /// The writer could not write a part of the delivery.
    fn refused(&mut self, range: Range<usize>, error: StoreError) {
        let Some(current) = &mut self.current else { return };
        match &error {
            StoreError::Conflict(_) => {
                // the position is another session's: what is here comes again
                tracing::warn!(%error, "inbox: dropped a batch");
                self.current = None;
                return;
            }
            StoreError::Constraint(_) | StoreError::Sqlite(_) | StoreError::Refused(_) => {
                self.suspect(range, &error);
                return;
            }
            StoreError::Crashed(_) if current.crashes >= CRASHES => {
                self.suspect(range, &error);
                return;
            }
            StoreError::Crashed(_) => current.crashes += 1,
            _ => {}
        }
        current.ranges.push(range);
        self.wait(&error);
    }

    /// Nothing is counted; the next try is after a pause.
    fn wait(&mut self, error: &StoreError) {
        let text = chain(error);
        if self.args.board.write(|facts| std::mem::replace(&mut facts.inbox_trouble, text.clone()) != text) {
            tracing::warn!(error = text, "inbox: the database cannot be written, nothing is counted, trying for ever");
        }
        self.again = Some(self.myself.send_after(self.pause, || ConsumerMsg::Again));
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
    }

    /// A batch that the database refuses though nothing is wrong with it: halved, and the last one left is to blame.
    fn suspect(&mut self, range: Range<usize>, error: &StoreError) {
        let Some(current) = &mut self.current else { return };
        if range.len() <= 1 {
            let is_second = current.blamed.replace(range.start) == Some(range.start);
            current.ranges.push(range);
            if is_second {
                return self.wait(error);
            }
            current.blame = Some(chain(error));
        } else {
            let middle = range.start + range.len() / 2;
            current.ranges.push(middle..range.end);
            current.ranges.push(range.start..middle);
        }
        self.write();
    }

    fn quiesce(&mut self, reply: RpcReplyPort<()>) {
        let Some(tap) = &self.tap else {
            let _ = reply.send(());
            return;
        };
        tap.stop_pulling();
        let closed = tap.closed();
        tokio::spawn(async move {
            closed.await;
            // who asked may have stopped waiting
            let _ = reply.send(());
        });
    }

    fn snapshot(&self, reply: RpcReplyPort<Snapshot>) {
        let here = self.current.as_ref().map_or(0, |current| current.batch.messages.len());
        let held = here + self.queue.iter().map(|delivery| delivery.messages.len()).sum::<usize>();
        let waiting = self.progress.waiting();
        let _ = reply.send(Snapshot { settled_seq: self.progress.floor(), waiting, held });
    }
}

/// The inbox as the source sees it. It holds the actor only: the source lives on a thread of its own, where the last
/// handle of the database must not be dropped.
struct Door(ActorRef<ConsumerMsg>);

fn answer<T>(
    called: std::result::Result<CallResult<std::result::Result<T, String>>, ractor::MessagingErr<ConsumerMsg>>,
) -> std::result::Result<T, String> {
    match called {
        Ok(CallResult::Success(answer)) => answer,
        Ok(CallResult::Timeout | CallResult::SenderError) | Err(_) => Err("the consumer has stopped".into()),
    }
}

impl Inlet for Door {
    fn position(&self) -> BoxFuture<'static, std::result::Result<Option<Position>, String>> {
        let actor = self.0.clone();
        Box::pin(async move { answer(actor.call(ConsumerMsg::Position, None).await) })
    }

    fn establish(&self, position: Position) -> BoxFuture<'static, std::result::Result<(), String>> {
        let actor = self.0.clone();
        Box::pin(async move { answer(actor.call(|reply| ConsumerMsg::Establish(position, reply), None).await) })
    }

    fn deliver(&self, delivery: Delivery) {
        // refused where the consumer is draining or gone: the receipt says so when it drops
        let _ = self.0.cast(ConsumerMsg::Inbound(Box::new(delivery)));
    }
}
