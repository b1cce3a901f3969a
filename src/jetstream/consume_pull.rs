//! The pulling itself: credit at the server, messages collected while a batch commits, answers told to the broker.
//!
//! Bounds: two batches are with the inbox at most, two more are collected or asked for. A batch that takes long is kept
//! alive at the server by progress acks. Silence longer than two heartbeats is looked into.
//!
//! May import: domain, ports, async_nats, tokio.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use async_nats::{Client, Event, Message, Subject, Subscriber};
use bytes::Bytes;
use futures_util::{FutureExt, StreamExt};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior};

use super::consume::{Context, Settings};
use super::consume_api::Api;
use super::consume_reply;
use super::consume_session::{End, History, LOST_BATCH, Opening};
use crate::domain::apply::Fate;
use crate::domain::inbox::{Headers, Inbound};
use crate::ports::{Answer, Delivery, Receipt};

/// Batches that may be with the inbox: one that commits, one that waits for it.
const AT_THE_INBOX: usize = 2;
/// Life of a pull request.
const EXPIRES: Duration = Duration::from_secs(30);
/// The server says so often that a pull request is alive.
const HEARTBEAT: Duration = Duration::from_secs(5);
/// Silence that is looked into.
const SILENCE: Duration = Duration::from_secs(11);
/// An ack whose arrival was not confirmed by then is looked into.
const CONFIRM: Duration = Duration::from_secs(10);
/// Longest wait for the client to take what is sent.
const SEND: Duration = Duration::from_secs(10);
/// Looks in vain, one after the other, that end the session: within twice the silence.
const MISSES: u32 = 2;
/// Bytes that are collected before a batch is handed over, and asked for in one pull request.
const BYTES: usize = 8 << 20;
/// Longest time between two looks at the clock.
const TICK: Duration = Duration::from_secs(1);
const SHORTEST_TICK: Duration = Duration::from_millis(50);
/// Pause after the server ended a pull request for a reason of its own.
const BREATH: Duration = Duration::from_millis(200);

/// A batch that is with the inbox.
struct Flight {
    ticket: u64,
    replies: Vec<Subject>,
    /// When it was delivered, or its last progress ack.
    touched: Instant,
}

/// One session that pulls.
pub(super) struct Pulling<'a> {
    context: &'a Context,
    settings: Arc<Settings>,
    client: Client,
    api: Api,
    opening: Opening,
    changes: watch::Receiver<Arc<Settings>>,
    stream: Arc<str>,
    inbox: String,
    messages: Subscriber,
    /// Messages that the server may still send by our requests.
    credit: usize,
    pulled: Instant,
    pull_not_before: Instant,
    heard: Instant,
    misses: u32,
    collected: Vec<Inbound>,
    replies: Vec<Subject>,
    bytes: usize,
    touched: Instant,
    gate: Arc<Semaphore>,
    tickets: u64,
    flights: VecDeque<Flight>,
    answers: mpsc::UnboundedSender<Answer>,
    answered: mpsc::UnboundedReceiver<Answer>,
    confirmations: VecDeque<(u64, Instant)>,
    /// The last error that the server sent, in words.
    complaint: String,
}

type Step = Result<(), End>;

fn lost(reason: impl Into<String>) -> End {
    End::Lost { reason: reason.into() }
}

impl<'a> Pulling<'a> {
    pub(super) async fn start(
        context: &'a Context,
        settings: &Arc<Settings>,
        client: Client,
        api: Api,
        opening: Opening,
    ) -> Result<Pulling<'a>, End> {
        let inbox = client.new_inbox();
        let messages = client.subscribe(format!("{inbox}.>")).await.map_err(|e| lost(e.to_string()))?;
        let (answers, answered) = mpsc::unbounded_channel();
        let (now, changes) = context.settings();
        if now != *settings {
            return Err(End::Changed);
        }
        let instant = Instant::now();
        Ok(Pulling {
            context,
            stream: settings.inbox.stream.as_str().into(),
            settings: now,
            client,
            api,
            opening,
            changes,
            inbox,
            messages,
            credit: 0,
            pulled: instant,
            pull_not_before: instant,
            heard: instant,
            misses: 0,
            collected: Vec::new(),
            replies: Vec::new(),
            bytes: 0,
            touched: instant,
            gate: Arc::new(Semaphore::new(AT_THE_INBOX)),
            tickets: 0,
            flights: VecDeque::new(),
            answers,
            answered,
            confirmations: VecDeque::new(),
            complaint: String::new(),
        })
    }

    /// Pulls until it has to end.
    pub(super) async fn run(&mut self, history: &mut History) -> End {
        match self.pull_on(history).await {
            Err(end) => end,
            Ok(()) => End::Stopped,
        }
    }

    async fn pull_on(&mut self, history: &mut History) -> Step {
        let mut tick = tokio::time::interval(self.beat());
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            self.hand_over();
            self.pull().await?;
            tokio::select! {
                biased;
                () = self.context.stop.cancelled() => return self.finish(history).await,
                answer = self.answered.recv() => {
                    if let Some((ticket, fates)) = answer {
                        self.answer(ticket, fates, history).await?;
                    }
                }
                message = self.messages.next() => {
                    let Some(message) = message else { return Err(lost("the subscription ended")) };
                    self.take(message)?;
                    self.take_ready()?;
                }
                event = self.opening.events.recv() => self.event(event, history)?,
                _ = tick.tick() => self.tick().await?,
                () = tokio::time::sleep_until(self.pull_not_before), if self.pull_not_before > Instant::now() => {}
                _ = self.changes.changed() => {
                    self.finish(history).await?;
                    return Err(End::Changed);
                }
            }
        }
    }

    /// Between two looks at the clock: a short `ack_wait` needs them often.
    fn beat(&self) -> Duration {
        TICK.min(self.settings.inbox.ack_wait / 6).max(SHORTEST_TICK)
    }

    /// What arrived already, without waiting, up to a batch.
    fn take_ready(&mut self) -> Step {
        while self.collected.len() < self.settings.inbox.batch {
            match self.messages.next().now_or_never() {
                Some(Some(message)) => self.take(message)?,
                Some(None) => return Err(lost("the subscription ended")),
                None => break,
            }
        }
        Ok(())
    }

    fn take(&mut self, message: Message) -> Step {
        self.heard = Instant::now();
        self.misses = 0;
        // a message of the stream is told by its reply subject, whatever status a publisher wrote into it
        let place = message.reply.as_ref().and_then(|reply| consume_reply::parse(reply));
        let (Some(place), Some(reply)) = (place, message.reply) else {
            let status = message.status.map(|status| status.as_u16());
            let pending =
                message.headers.as_ref().and_then(|h| h.get("Nats-Pending-Messages")).map(ToString::to_string);
            let description = message.description.as_deref().unwrap_or_default();
            return self.status(&message.subject, status, description, pending.as_deref());
        };
        self.credit = self.credit.saturating_sub(1);
        self.opening.ready.continuity.saw(place);
        if self.collected.is_empty() {
            self.touched = self.heard;
        }
        self.bytes += message.length;
        self.collected.push(Inbound {
            stream_seq: place.stream_seq,
            subject: message.subject.to_string(),
            headers: headers(message.headers.as_ref()),
            payload: message.payload,
            unreadable: None,
        });
        self.replies.push(reply);
        Ok(())
    }

    /// What the server says about our requests and acks.
    fn status(&mut self, subject: &str, status: Option<u16>, description: &str, pending: Option<&str>) -> Step {
        let rest = subject.strip_prefix(self.inbox.as_str()).unwrap_or_default();
        match status {
            // an ack of an ack
            None => {
                if let Some(number) = rest.strip_prefix(".a.").and_then(|n| n.parse::<u64>().ok()) {
                    self.confirmations.retain(|(waiting, _)| *waiting > number);
                }
                Ok(())
            }
            // a heartbeat; a request that got all it asked for
            Some(100) => Ok(()),
            Some(409) if description.contains("Batch Completed") => Ok(()),
            Some(503) => Err(lost("the consumer is gone, or JetStream is off: nobody takes its acks and requests")),
            Some(409) if description.contains("Consumer Deleted") => Err(lost("the consumer was deleted")),
            Some(400) => Err(lost(format!("the server does not take our pull request: {description}"))),
            Some(code) => {
                let left = pending.and_then(|n| n.parse::<usize>().ok());
                self.credit = left.map_or(0, |left| self.credit.saturating_sub(left));
                if code == 409 {
                    tracing::debug!(description, "inbox: the server ended a pull request");
                    self.pull_not_before = Instant::now() + BREATH;
                }
                Ok(())
            }
        }
    }

    fn event(&mut self, event: Option<Event>, history: &mut History) -> Step {
        match event {
            Some(Event::Disconnected | Event::Closed) | None => {
                history.broken = true;
                Err(lost("the connection was lost"))
            }
            Some(Event::ServerError(error)) => {
                tracing::warn!(%error, "inbox: the server complains");
                self.complaint = format!(" (it says: {error})");
                Ok(())
            }
            Some(
                Event::Connected
                | Event::LameDuckMode
                | Event::Draining
                | Event::SlowConsumer(_)
                | Event::ClientError(_),
            ) => Ok(()),
        }
    }

    /// Gives collected messages to the inbox: all there are where it is idle, whole batches where it is busy.
    fn hand_over(&mut self) {
        let batch = self.settings.inbox.batch;
        while !self.collected.is_empty() {
            let full = self.collected.len() >= batch || self.bytes >= BYTES;
            if !self.flights.is_empty() && !full {
                return;
            }
            let Ok(permit) = Arc::clone(&self.gate).try_acquire_owned() else { return };
            let count = self.collected.len().min(batch);
            let messages: Vec<Inbound> = self.collected.drain(..count).collect();
            let replies = self.replies.drain(..count).collect();
            if self.collected.is_empty() {
                self.bytes = 0;
            }
            self.tickets += 1;
            self.flights.push_back(Flight { ticket: self.tickets, replies, touched: self.touched });
            let Opening { ready, number, .. } = &self.opening;
            self.context.inlet.deliver(Delivery {
                stream: Arc::clone(&self.stream),
                stream_created: Arc::clone(&ready.stream_created),
                session: *number,
                floor: ready.floor,
                messages,
                limit: ready.continuity.limit(),
                receipt: Receipt::new(self.tickets, permit, self.answers.clone()),
            });
        }
    }

    /// Asks for more where the credit runs low and there is room.
    async fn pull(&mut self) -> Step {
        let batch = self.settings.inbox.batch;
        let now = Instant::now();
        if self.credit > 0 && now.duration_since(self.pulled) > EXPIRES + HEARTBEAT {
            // every request has ended by now, whatever became of the word of it
            self.credit = 0;
        }
        let room = (2 * batch).saturating_sub(self.collected.len() + self.credit);
        if self.credit > batch / 2 || room == 0 || now < self.pull_not_before {
            return Ok(());
        }
        let count = room.min(batch);
        let bytes = BYTES.max(self.client.max_payload().saturating_mul(2));
        let request = serde_json::json!({
            "batch": count,
            "max_bytes": bytes,
            "expires": nanos(EXPIRES),
            "idle_heartbeat": nanos(HEARTBEAT),
        });
        if self.credit == 0 {
            self.heard = now;
        }
        self.credit += count;
        self.pulled = now;
        let send = self.client.publish_with_reply(
            self.api.next_subject(),
            format!("{}.p", self.inbox),
            request.to_string().into(),
        );
        sent(send).await
    }

    /// The inbox has answered for a batch: tells the broker.
    async fn answer(&mut self, ticket: u64, fates: Option<Vec<Fate>>, history: &mut History) -> Step {
        let Some(at) = self.flights.iter().position(|flight| flight.ticket == ticket) else { return Ok(()) };
        let Some(flight) = self.flights.remove(at) else { return Ok(()) };
        let Some(fates) = fates else { return Err(lost(LOST_BATCH)) };
        history.progressed = true;
        let last = flight.replies.len().saturating_sub(1);
        let confirm = format!("{}.a.{ticket}", self.inbox);
        let client = &self.client;
        let tell = async {
            for (index, (reply, fate)) in flight.replies.into_iter().zip(&fates).enumerate() {
                if index == last {
                    // the server takes acks in their order: this answer confirms those before it
                    client.publish_with_reply(reply, confirm.clone(), ack(fate)).await?;
                } else {
                    client.publish(reply, ack(fate)).await?;
                }
            }
            Ok::<(), async_nats::PublishError>(())
        };
        sent(tell).await?;
        self.confirmations.push_back((ticket, Instant::now() + CONFIRM));
        Ok(())
    }

    async fn tick(&mut self) -> Step {
        let now = Instant::now();
        self.keep_alive(now).await?;
        let unconfirmed = self.confirmations.front().is_some_and(|(_, until)| now > *until);
        let silent = self.credit > 0 && now.duration_since(self.heard) > SILENCE;
        let shared = self.opening.ready.continuity.limit().is_some();
        if unconfirmed || silent || shared {
            self.look(silent).await?;
        }
        if unconfirmed {
            self.confirmations.retain(|(_, until)| now <= *until);
        }
        Ok(())
    }

    /// Progress acks for everything that is here for long.
    async fn keep_alive(&mut self, now: Instant) -> Step {
        let age = self.settings.inbox.ack_wait / 3;
        let due = |touched: Instant| now.duration_since(touched) >= age;
        let mut replies: Vec<Subject> = Vec::new();
        for flight in self.flights.iter_mut().filter(|flight| due(flight.touched)) {
            flight.touched = now;
            replies.extend(flight.replies.iter().cloned());
        }
        if !self.collected.is_empty() && due(self.touched) {
            self.touched = now;
            replies.extend(self.replies.iter().cloned());
        }
        let client = &self.client;
        sent(async {
            for reply in replies {
                client.publish(reply, Bytes::from_static(b"+WPI")).await?;
            }
            Ok::<(), async_nats::PublishError>(())
        })
        .await
    }

    /// Looks whether the consumer is there, and how far it is acked.
    async fn look(&mut self, silent: bool) -> Step {
        match self.api.consumer().await {
            Ok(Some(facts)) => {
                let (acked, last) = (facts.ack_floor.stream_seq, facts.delivered.consumer_seq);
                self.opening.ready.continuity.heard(acked, facts.num_ack_pending, last);
                if silent {
                    self.misses += 1;
                    self.credit = 0;
                }
            }
            Ok(None) => return Err(lost("the consumer was deleted")),
            Err(fault) => {
                self.misses += 1;
                if self.misses >= MISSES {
                    return Err(lost(fault.to_string()));
                }
            }
        }
        if self.misses >= MISSES {
            let complaint = std::mem::take(&mut self.complaint);
            return Err(lost(format!("the server sends neither messages nor heartbeats{complaint}")));
        }
        Ok(())
    }

    /// Pulls no more: waits for the inbox, tells the broker, and gives back what was not handed over.
    async fn finish(&mut self, history: &mut History) -> Step {
        let beat = self.beat();
        while !self.flights.is_empty() {
            tokio::select! {
                answer = self.answered.recv() => {
                    if let Some((ticket, fates)) = answer {
                        self.answer(ticket, fates, history).await?;
                    }
                }
                event = self.opening.events.recv() => self.event(event, history)?,
                () = tokio::time::sleep(beat) => self.keep_alive(Instant::now()).await?,
            }
        }
        let (client, replies) = (&self.client, std::mem::take(&mut self.replies));
        self.collected.clear();
        sent(async {
            for reply in replies {
                client.publish(reply, Bytes::from_static(b"-NAK")).await?;
            }
            Ok::<(), async_nats::PublishError>(())
        })
        .await?;
        // a connection that does not flush loses acks only: their messages come again and are duplicates
        let _ = tokio::time::timeout(SEND, self.client.flush()).await;
        Ok(())
    }

    /// Waits until the inbox has answered for everything, telling nobody.
    pub(super) async fn await_answers(&mut self, history: &mut History) {
        while !self.flights.is_empty() {
            let Some((ticket, fates)) = self.answered.recv().await else { return };
            history.progressed |= fates.is_some();
            self.flights.retain(|flight| flight.ticket != ticket);
        }
    }
}

/// A send that does not hang where the connection is gone and the client's queue is full.
async fn sent<E: std::fmt::Display>(send: impl Future<Output = Result<(), E>>) -> Step {
    match tokio::time::timeout(SEND, send).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => Err(lost(format!("cannot send: {error}"))),
        Err(_) => Err(lost(format!("cannot send within {SEND:?}"))),
    }
}

/// The ack of the protocol (nats-architecture-and-design, ADR-13; `+TERM` with its reason since server 2.10.4).
fn ack(fate: &Fate) -> Bytes {
    match fate {
        Fate::Ack => Bytes::from_static(b"+ACK"),
        Fate::Later { after } => format!("-NAK {{\"delay\":{}}}", nanos(*after)).into(),
        Fate::Terminate { reason } => format!("+TERM {reason}").into(),
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

fn headers(map: Option<&async_nats::HeaderMap>) -> Headers {
    let mut headers = Headers::default();
    for (name, values) in map.into_iter().flat_map(async_nats::HeaderMap::iter) {
        for value in values {
            headers.push(name.as_ref(), value.as_str());
        }
    }
    headers
}
