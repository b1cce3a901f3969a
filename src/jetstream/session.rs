//! One connection from its first look at the stream to its end: the only place that knows whether publishing works.
//!
//! A session is a task on a runtime of its own. Whatever wakes it, a turn drains what is ready (bounded), hands a
//! slice of messages to the client, lets overdue flights expire, and sends the reports of the turn home as one group
//! an outlet.
//!
//! Invariants: nothing is sent before `STREAM.INFO` was read on this connection · an ack is believed only where its
//! stream, domain and sequence can be true · the end of a session reports every open ticket, whatever ended it.
//!
//! May import: domain, limits, ports, async_nats, tokio.

use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use async_nats::{Client, Event, ServerError, Subscriber};
use futures_util::{FutureExt, Sink, StreamExt};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::task::coop::unconstrained;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::Settings;
use super::answers::Claim;
use super::api::{Api, ApiFault};
use super::belief::Belief;
use super::link::Owner;
use super::outcome;
use super::publish::{Consignment, Dispatch, Pumped};
use super::readback::{self, Compared};
use super::topology::{self, Seen, Server, Shape, Size};
use crate::domain::settle::Duplicate;
use crate::limits;
use crate::ports::{Sought, Unreadable, Whereabouts};

/// What outlets and the daemon ask of a session.
pub(super) enum Command {
    Ship(Consignment),
    LookUp(Vec<Sought>, oneshot::Sender<Result<Vec<Whereabouts>, Unreadable>>),
    Suspect,
}

/// Why a session ended.
#[derive(Debug)]
pub(super) enum End {
    /// The connection is lost; the reason is for people.
    Lost(String),
    /// The server asked its clients to go elsewhere; everything was answered.
    Asked,
    /// We wanted it.
    Stopped,
}

/// Acks, commands and events taken in one turn.
const TURN: usize = 256;

/// How often an idle session makes sure that it is still connected: the client may drop an event under a flood.
const CHECK: Duration = Duration::from_millis(500);

/// How often the stream is looked at while all is well, so that a change of its settings is noticed.
const REFRESH: Duration = Duration::from_secs(30);

/// Shortest time between two looks: suspicion may come with every event.
const LOOKS_APART: Duration = Duration::from_millis(100);

/// The same while an ack waits to be believed.
const CLAIMS_APART: Duration = Duration::from_millis(2);

/// Duplicates read back at the same time.
const READERS: usize = 64;

/// How long a full stream whose numbers stay the same is believed to be still full.
const STILL_FULL: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(super) enum Inner {
    Looked(Box<Result<Seen, String>>),
    Compared { id: u64, seq: u64, as_: Duplicate, result: Result<Compared, ApiFault> },
}

/// Whether publishing works, as far as this session knows.
enum Standing {
    /// Before the first look.
    New,
    Up,
    Unusable,
    /// Takes nothing more and waits for what is in flight.
    Leaving,
}

pub(super) struct Session {
    owner: Owner,
    pub(super) settings: Arc<Settings>,
    client: Client,
    pub(super) api: Arc<Api>,
    server: Server,
    pub(super) dispatch: Dispatch,
    standing: Standing,
    pub(super) shape: Shape,
    pub(super) belief: Belief,
    pub(super) last_ack: Instant,
    looking: bool,
    pub(super) want_look: bool,
    looked_at: Option<Instant>,
    pub(super) size: Option<Size>,
    /// The store refused at this size.
    pub(super) refused_at: Option<(Instant, Size)>,
    /// Looks begun so far.
    pub(super) looks: u64,
    /// Settled messages when the current look began.
    settled: u64,
    /// Flights that nobody listened to, with the number of the last look before, until a later one tells why.
    pub(super) unheard: Vec<(u64, u64)>,
    pub(super) claims: Vec<Claim>,
    pub(super) readers: Arc<Semaphore>,
    pub(super) inner: mpsc::UnboundedSender<Inner>,
    stuck: bool,
    more: bool,
    last_error: Option<String>,
    leave_by: Option<Instant>,
}

/// The ends of a session that wake it.
pub(super) struct Inlets {
    pub(super) commands: mpsc::UnboundedReceiver<Command>,
    pub(super) events: mpsc::UnboundedReceiver<Event>,
    /// Finish what is in flight, then end.
    pub(super) retire: CancellationToken,
}

impl Session {
    /// Runs until the connection ends; every ticket is reported when it returns.
    pub(super) async fn run(client: Client, owner: Owner, settings: Arc<Settings>, mut inlets: Inlets) -> End {
        let inbox = format!("{}.", client.new_inbox());
        let subscribed = client.subscribe(format!("{inbox}*")).await;
        let (inner, mut inner_rx) = mpsc::unbounded_channel();
        let mut session = Self::new(client, owner, settings, inbox, inner);
        let end = match subscribed {
            Ok(mut acks) => session.turns(&mut inlets, &mut acks, &mut inner_rx).await,
            Err(error) => End::Lost(error.to_string()),
        };
        session.close(&mut inlets.commands, &end).await;
        end
    }

    fn new(
        client: Client,
        owner: Owner,
        settings: Arc<Settings>,
        inbox: String,
        inner: mpsc::UnboundedSender<Inner>,
    ) -> Self {
        let info = client.server_info();
        let stream = &settings.stream;
        let domain = if stream.domain.is_empty() { info.domain.unwrap_or_default() } else { stream.domain.clone() };
        let now = Instant::now();
        Self {
            api: Arc::new(Api::new(client.clone(), &stream.domain, &stream.name)),
            server: Server { version: info.version, max_payload: info.max_payload },
            dispatch: Dispatch::new(inbox, &stream.name, settings.ack_wait),
            owner,
            settings,
            client,
            standing: Standing::New,
            shape: Shape::default(),
            belief: Belief::new(domain, now),
            last_ack: now,
            looking: false,
            want_look: true,
            looked_at: None,
            size: None,
            refused_at: None,
            looks: 0,
            settled: 0,
            unheard: Vec::new(),
            claims: Vec::new(),
            readers: Arc::new(Semaphore::new(READERS)),
            inner,
            stuck: false,
            more: false,
            last_error: None,
            leave_by: None,
        }
    }

    async fn turns(
        &mut self,
        inlets: &mut Inlets,
        acks: &mut Subscriber,
        inner: &mut mpsc::UnboundedReceiver<Inner>,
    ) -> End {
        let timer = tokio::time::sleep(Duration::ZERO);
        tokio::pin!(timer);
        loop {
            let Inlets { commands, events, retire } = &mut *inlets;
            tokio::select! {
                biased;
                Some(event) = events.recv() => self.on_event(event),
                Some(done) = inner.recv() => self.on_inner(done),
                ack = acks.next() => match ack {
                    Some(ack) => self.on_ack(&ack),
                    None => return self.lost(),
                },
                Some(command) = commands.recv() => self.on_command(command),
                () = retire.cancelled(), if self.leave_by.is_none() => {
                    self.leave_by = Some(Instant::now() + self.settings.ack_wait);
                }
                () = timer.as_mut() => {}
                _ = std::future::poll_fn(|cx| std::pin::Pin::new(&mut self.client).poll_ready(cx)), if self.stuck => {}
                () = tokio::task::yield_now(), if self.more => {}
            }
            self.drain(inlets, acks, inner);
            if let Some(end) = self.turn(inlets).await {
                return end;
            }
            let wake = self.next_wake();
            if timer.is_elapsed() || wake < timer.deadline() {
                timer.as_mut().reset(wake);
            }
        }
    }

    /// Takes what else is ready, so that one wake-up serves many.
    fn drain(&mut self, inlets: &mut Inlets, acks: &mut Subscriber, inner: &mut mpsc::UnboundedReceiver<Inner>) {
        for _ in 0..TURN {
            match acks.next().now_or_never() {
                Some(Some(ack)) => self.on_ack(&ack),
                Some(None) | None => break,
            }
        }
        while let Ok(done) = inner.try_recv() {
            self.on_inner(done);
        }
        for _ in 0..TURN {
            match inlets.commands.try_recv() {
                Ok(command) => self.on_command(command),
                Err(_) => break,
            }
        }
    }

    /// What every turn ends with.
    async fn turn(&mut self, inlets: &mut Inlets) -> Option<End> {
        let now = Instant::now();
        if matches!(self.client.connection_state(), async_nats::connection::State::Disconnected) {
            return Some(self.lost());
        }
        // the client's queue is asked without tokio's budget: "full" must mean full
        let pumped =
            unconstrained(std::future::poll_fn(|cx| Poll::Ready(self.dispatch.pump(&mut self.client, cx, now)))).await;
        self.stuck = pumped == Pumped::Full;
        self.more = pumped == Pumped::More;
        let expired = self.dispatch.expire(now);
        if expired > 0 {
            self.on_silence(expired, now);
        }
        self.look_if_due(now);
        self.dispatch.flush();
        if inlets.retire.is_cancelled() || matches!(self.standing, Standing::Leaving) {
            let over = self.leave_by.is_some_and(|by| by <= now);
            if (self.dispatch.is_empty() && inlets.commands.is_empty()) || over {
                return Some(if inlets.retire.is_cancelled() { End::Stopped } else { End::Asked });
            }
        }
        None
    }

    fn lost(&self) -> End {
        End::Lost(self.last_error.clone().unwrap_or_else(|| "the server closed the connection".into()))
    }

    fn next_wake(&mut self) -> Instant {
        let now = Instant::now();
        let mut wake = now + CHECK;
        if let Some(at) = self.dispatch.next_expiry() {
            wake = wake.min(at);
        }
        if !self.looking {
            wake = wake.min(self.look_due(now));
        }
        self.leave_by.map_or(wake, |by| wake.min(by))
    }

    fn on_command(&mut self, command: Command) {
        match command {
            Command::Ship(consignment) => {
                if matches!(self.standing, Standing::Up) {
                    self.dispatch.accept(consignment, Instant::now());
                }
                // else: dropped, and thereby reported as not sent
            }
            Command::LookUp(sought, reply) => {
                let (api, shape) = (self.api.clone(), self.shape);
                tokio::spawn(async move {
                    // the asker may be gone
                    let _ = reply.send(readback::look_up(&api, shape, sought).await);
                });
            }
            Command::Suspect => self.want_look = true,
        }
    }

    fn on_event(&mut self, event: Event) {
        match event {
            Event::ServerError(ServerError::Other(text)) => self.on_server_error(&text),
            Event::ServerError(error) => self.last_error = Some(error.to_string()),
            Event::LameDuckMode => {
                self.standing = Standing::Leaving;
                self.dispatch.give_back_unsent();
                self.leave_by.get_or_insert(Instant::now() + self.settings.ack_wait);
                self.owner.down("the server is shutting down (lame duck mode)".into());
            }
            Event::ClientError(error) => self.last_error = Some(error.to_string()),
            // the state itself is asked in every turn
            Event::Connected | Event::Disconnected | Event::Draining | Event::Closed | Event::SlowConsumer(_) => {}
        }
    }

    fn on_server_error(&mut self, text: &str) {
        if let Some(subject) = outcome::forbidden_subject(text) {
            let landed = self.dispatch.land_subject(&subject, &outcome::forbidden(&subject));
            if landed == 0 {
                self.last_error = Some(text.to_owned());
            }
        } else if let Some(subject) = outcome::forbidden_inbox(text) {
            self.unusable(format!(
                "the server forbids this user {subject}, so no ack can arrive: allow it to subscribe to _INBOX.>"
            ));
        } else {
            self.last_error = Some(text.to_owned());
        }
    }

    fn on_inner(&mut self, inner: Inner) {
        match inner {
            Inner::Looked(result) => self.on_look(*result),
            Inner::Compared { id, seq, as_, result } => self.on_compared(id, seq, as_, result),
        }
    }

    fn look_due(&self, now: Instant) -> Instant {
        let Some(at) = self.looked_at else { return now };
        match self.standing {
            _ if !self.claims.is_empty() => at + CLAIMS_APART,
            _ if self.want_look => at + LOOKS_APART,
            Standing::New | Standing::Unusable => at + limits::PROBE,
            Standing::Up | Standing::Leaving => at + REFRESH,
        }
    }

    fn look_if_due(&mut self, now: Instant) {
        if self.looking || self.look_due(now) > now {
            return;
        }
        (self.looking, self.want_look, self.looked_at) = (true, false, Some(now));
        (self.looks, self.settled) = (self.looks + 1, self.dispatch.settled());
        let (api, settings, server) = (self.api.clone(), self.settings.clone(), self.server.clone());
        let inner = self.inner.clone();
        tokio::spawn(async move {
            let seen = topology::look(&api, &settings, &server).await;
            // the session may have ended
            let _ = inner.send(Inner::Looked(Box::new(seen)));
        });
    }

    fn on_look(&mut self, result: Result<Seen, String>) {
        self.looking = false;
        match result {
            Ok(seen) => self.on_seen(seen),
            Err(reason) => {
                let reason = match &self.last_error {
                    Some(error) => format!("{reason}; the server said: {error}"),
                    None => reason,
                };
                self.unusable(reason);
            }
        }
        self.settle_unheard(self.looks, matches!(self.standing, Standing::Up));
    }

    fn on_seen(&mut self, seen: Seen) {
        let now = Instant::now();
        let last_seq = seen.topology.last_seq;
        self.belief.learn(&seen.topology.created, last_seq, self.settled, now);
        (self.shape, self.size) = (seen.shape, Some(seen.size));
        self.settle_claims(self.looks, last_seq);
        if matches!(self.standing, Standing::Leaving) {
            return;
        }
        let still_full = self.refused_at.filter(|(at, size)| seen.size == *size && at.elapsed() < STILL_FULL);
        if let Some(reason) = seen.obstacle() {
            self.owner.findings(seen.findings);
            self.unusable(reason);
        } else if still_full.is_none() {
            (self.refused_at, self.last_error) = (None, None);
            self.standing = Standing::Up;
            self.owner.up(seen);
        }
    }

    /// Publishes without an answer: perhaps those subjects, perhaps the whole of JetStream.
    fn on_silence(&mut self, expired: usize, now: Instant) {
        self.want_look = true;
        self.owner.note_expired(expired);
        let wait = self.settings.ack_wait;
        if now.duration_since(self.last_ack) >= wait && matches!(self.standing, Standing::Up) {
            let reason = format!("nothing was acknowledged for {}", humantime::format_duration(wait));
            self.unusable(reason);
        }
    }

    pub(super) fn unusable(&mut self, reason: String) {
        if matches!(self.standing, Standing::Leaving) {
            return;
        }
        self.standing = Standing::Unusable;
        self.dispatch.give_back_unsent();
        self.owner.unusable(reason);
    }

    /// Reports everything that is left; nothing can be handed to this session afterwards.
    async fn close(&mut self, commands: &mut mpsc::UnboundedReceiver<Command>, end: &End) {
        let reason = match end {
            End::Lost(reason) => reason.clone(),
            End::Asked => "the server is shutting down (lame duck mode)".into(),
            End::Stopped => "stopped".into(),
        };
        self.owner.ended(reason.clone());
        commands.close();
        // what is left is dropped: shipments report themselves as not sent, look-ups as unreadable
        while commands.recv().await.is_some() {}
        self.dispatch.abandon(&reason);
    }
}
