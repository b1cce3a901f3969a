//! The writer: every write transaction of the daemon, one after the other.
//!
//! Group commit: the first job of a batch makes the writer send itself `Commit` behind everything that is queued then,
//! so all jobs ahead of it join one `BEGIN IMMEDIATE` transaction, each in a savepoint of its own. A job is answered
//! after the commit, never before. A transaction is closed once it has held the lock for [`limits::WRITER_HOLD`]; the
//! rest follows in the next one. A lock held by another process is waited out, for ever, and costs nobody anything.
//! Where other processes write, the writer leaves gaps, so that they are not starved by us.
//!
//! Its callers (publishers, consumer, janitor, command line) have one or two jobs each at a time; the open edges pass a
//! gate before they get here. The writer calls nobody.

use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ractor::{Actor, ActorProcessingErr, ActorRef};
use rusqlite::{Connection, Transaction, TransactionBehavior};
use tokio::sync::oneshot;

use crate::limits;
use crate::ports::Clock;
use crate::store::connection::{self, Synchronous};
use crate::store::error::{Result, Step, StoreError};
use crate::store::pool::Store;
use crate::telemetry::board::Board;

/// What a job is, for the log and for its durability.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    Lease,
    Settle,
    Release,
    Rescue,
    Apply,
    Asset,
    Enqueue,
    Prune,
    Operate,
    TakeOver,
}

impl Kind {
    /// Somebody waits for it: it goes ahead of the gaps that are left to other writers, within a bound. Settlements can
    /// wait for company.
    fn is_urgent(self) -> bool {
        !matches!(self, Kind::Settle | Kind::Release | Kind::Prune)
    }

    /// Whether its commit must be on disk before it is answered. Losing a settlement in a power cut only repeats a
    /// publish, which the stream or the look before the send makes harmless. The commit of a lease is the barrier
    /// against ghost events (`relay.barrier`): everything that was read before it is on disk once it is.
    fn must_be_synchronous(self, barrier: bool) -> bool {
        match self {
            Kind::Settle => false,
            Kind::Lease => barrier,
            Kind::Release
            | Kind::Rescue
            | Kind::Apply
            | Kind::Asset
            | Kind::Enqueue
            | Kind::Prune
            | Kind::Operate
            | Kind::TakeOver => true,
        }
    }
}

/// Which commits must be on disk before they are answered; all others are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Durability {
    /// Level of settlements, and of leases without a barrier (`database.synchronous`).
    pub settle: Synchronous,
    /// `relay.barrier`.
    pub barrier: bool,
}

trait Job: Send {
    /// Runs inside of the transaction; `false`: roll its savepoint back.
    fn run(&mut self, tx: &Transaction<'_>) -> bool;
    /// Nobody waits for it any more.
    fn is_abandoned(&self) -> bool;
    /// Answers; `committed` is the fate of the transaction.
    fn finish(self: Box<Self>, committed: &Result<()>);
}

struct TypedJob<T, F> {
    work: Option<F>,
    result: Option<Result<T>>,
    reply: oneshot::Sender<Result<T>>,
}

impl<T: Send, F: FnOnce(&Transaction<'_>) -> Result<T> + Send> Job for TypedJob<T, F> {
    fn run(&mut self, tx: &Transaction<'_>) -> bool {
        let Some(work) = self.work.take() else { return false };
        let result = std::panic::catch_unwind(AssertUnwindSafe(|| work(tx)))
            .unwrap_or_else(|panic| Err(StoreError::Crashed(panic_text(&*panic))));
        let keep = result.is_ok();
        self.result = Some(result);
        keep
    }

    fn is_abandoned(&self) -> bool {
        self.reply.is_closed()
    }

    fn finish(self: Box<Self>, committed: &Result<()>) {
        let answer = match (committed, self.result) {
            (Ok(()), Some(result)) | (Err(_), Some(result @ Err(_))) => result,
            (Err(error), _) => Err(error.clone()),
            (Ok(()), None) => Err(StoreError::Crashed("the job was not run".into())),
        };
        // the asker may be gone: then nobody needs the answer
        let _ = self.reply.send(answer);
    }
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "a panic without a text".into())
}

/// Messages of the writer.
pub enum WriterMsg {
    /// A job to be done in the next transaction.
    Write(Entry),
    /// Everything queued ahead of this joins one transaction.
    Commit,
    /// Another durability from now on.
    Adopt(Durability),
}

/// A job on its way to the writer.
pub struct Entry {
    kind: Kind,
    job: Box<dyn Job>,
}

impl std::fmt::Debug for WriterMsg {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            WriterMsg::Write(entry) => write!(f, "Write({:?})", entry.kind),
            WriterMsg::Commit => f.write_str("Commit"),
            WriterMsg::Adopt(durability) => write!(f, "Adopt({durability:?})"),
        }
    }
}

/// The way to the writer: a seat that whoever writes now sits on, so that it outlives a crash of the actor. Cheap to
/// clone.
#[derive(Clone, Debug, Default)]
pub struct Writer(Arc<Mutex<Option<ActorRef<WriterMsg>>>>);

impl Writer {
    /// From now on jobs go to this actor.
    pub fn seat(&self, actor: ActorRef<WriterMsg>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(actor);
    }

    /// Who writes now.
    pub(super) fn actor(&self) -> Option<ActorRef<WriterMsg>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn cast(&self, message: WriterMsg) -> Result<()> {
        self.actor().and_then(|actor| actor.cast(message).ok()).ok_or_else(gone)
    }

    /// Runs `job` in the next transaction and answers after its commit. A job that fails is rolled back alone.
    ///
    /// # Errors
    /// What the job answers; what the commit answers; [`StoreError::Crashed`] where the writer is gone.
    pub async fn write<T, F>(&self, kind: Kind, job: F) -> Result<T>
    where
        T: Send + 'static,
        F: FnOnce(&Transaction<'_>) -> Result<T> + Send + 'static,
    {
        let (reply, answer) = oneshot::channel();
        let job = Box::new(TypedJob { work: Some(job), result: None, reply });
        self.cast(WriterMsg::Write(Entry { kind, job }))?;
        answer.await.unwrap_or_else(|_| Err(gone()))
    }

    /// Changes the durability of the commits that follow. Where nobody sits it is lost: a writer that crashed starts
    /// again with the durability of the start, which the next reload corrects.
    pub fn adopt(&self, durability: Durability) {
        let _ = self.cast(WriterMsg::Adopt(durability));
    }
}

fn gone() -> StoreError {
    StoreError::Crashed("the writer has stopped".into())
}

/// What the writer is made of.
#[derive(Clone)]
pub struct WriterArgs {
    pub store: Store,
    pub board: Board,
    pub clock: Arc<dyn Clock>,
    pub durability: Durability,
}

/// The actor; see the module.
pub struct WriterActor;

/// State of the writer.
pub struct WriterState {
    args: WriterArgs,
    queue: Vec<Entry>,
    /// A `Commit` is on its way.
    marked: bool,
    /// That `Commit`, where it waits for a gap.
    deferred: Option<tokio::task::JoinHandle<std::result::Result<(), ractor::MessagingErr<WriterMsg>>>>,
    /// With others writing, the lock has been left alone long enough at this instant.
    free_at: Instant,
    level: Option<Synchronous>,
    data_version: Option<i64>,
    foreign_at: Option<Instant>,
    locked: Option<Locked>,
}

struct Locked {
    since: Instant,
    told: Instant,
}

impl Actor for WriterActor {
    type Msg = WriterMsg;
    type State = WriterState;
    type Arguments = WriterArgs;

    async fn pre_start(&self, _: ActorRef<WriterMsg>, args: WriterArgs) -> Result<WriterState, ActorProcessingErr> {
        Ok(WriterState {
            args,
            queue: Vec::new(),
            marked: false,
            deferred: None,
            free_at: Instant::now(),
            level: None,
            data_version: None,
            foreign_at: None,
            locked: None,
        })
    }

    async fn handle(
        &self,
        myself: ActorRef<WriterMsg>,
        message: WriterMsg,
        state: &mut WriterState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            WriterMsg::Write(entry) => {
                let wait = state.take_in(entry);
                let sent = match wait {
                    None => Ok(()),
                    Some(Duration::ZERO) => myself.cast(WriterMsg::Commit),
                    Some(wait) => {
                        state.deferred = Some(myself.send_after(wait, || WriterMsg::Commit));
                        Ok(())
                    }
                };
                if sent.is_err() {
                    // draining: no marker can follow, so it is committed at once
                    state.commit_all().await;
                }
            }
            WriterMsg::Commit => state.commit_all().await,
            WriterMsg::Adopt(durability) => state.args.durability = durability,
        }
        Ok(())
    }
}

/// What one transaction did.
struct Done {
    left: Vec<Entry>,
    /// `None` where it could not be set.
    level: Option<Synchronous>,
    data_version: i64,
    foreign: bool,
    hold: Duration,
    busy: bool,
}

/// Another process has written within this time: leave gaps.
const FOREIGN_WITHIN: Duration = Duration::from_secs(1);
/// Gap after a transaction beside another writer, as a multiple of the hold: the lock is ours at most 15 % of the time.
const GAP: f64 = 5.7;
const LONGEST_GAP: Duration = Duration::from_millis(50);
/// Gaps that urgent jobs may owe: so a single event is leased at once, and a backlog is not.
const CREDIT: Duration = Duration::from_millis(30);
/// Repetition of the line about a held lock.
const LOCKED_EVERY: Duration = Duration::from_secs(30);

impl WriterState {
    /// Queues a job; how long the `Commit` that takes it may be put off, `None` where one is on its way that will do.
    fn take_in(&mut self, entry: Entry) -> Option<Duration> {
        let urgent = entry.kind.is_urgent();
        self.queue.push(entry);
        let put_off = self.deferred.take();
        if self.marked && put_off.is_none() {
            return None;
        }
        if let Some(put_off) = put_off {
            if !urgent {
                self.deferred = Some(put_off);
                return None;
            }
            put_off.abort();
        }
        self.marked = true;
        Some(self.gap(urgent))
    }

    /// How long the lock is still to be left to others.
    fn gap(&self, urgent: bool) -> Duration {
        if !self.others_write() {
            return Duration::ZERO;
        }
        let owed = self.free_at.saturating_duration_since(Instant::now());
        if urgent { owed.saturating_sub(CREDIT) } else { owed.min(LONGEST_GAP) }
    }

    fn others_write(&self) -> bool {
        self.foreign_at.is_some_and(|at| at.elapsed() < FOREIGN_WITHIN)
    }

    async fn commit_all(&mut self) {
        self.marked = false;
        self.deferred = None;
        let mut batch = std::mem::take(&mut self.queue);
        while !batch.is_empty() {
            batch = self.commit(batch).await;
        }
    }

    async fn commit(&mut self, batch: Vec<Entry>) -> Vec<Entry> {
        let synchronous = batch.iter().any(|entry| entry.kind.must_be_synchronous(self.args.durability.barrier));
        let level = if synchronous { Synchronous::Full } else { self.args.durability.settle };
        let (known_level, known_version) = (self.level, self.data_version);
        let in_place = self.args.store.assert_in_place();
        // the batch outlives a worker that could not be had
        let kept = Arc::new(Mutex::new(Some(batch)));
        let theirs = kept.clone();
        let outcome = match in_place {
            Err(error) => Err(error),
            Ok(()) => {
                self.args
                    .store
                    .with_writer(move |conn| {
                        let batch = theirs.lock().unwrap_or_else(PoisonError::into_inner).take();
                        Ok(transaction(conn, batch.unwrap_or_default(), level, known_level, known_version))
                    })
                    .await
            }
        };
        match outcome {
            Ok(done) => self.after(done).await,
            Err(error) => {
                self.level = None;
                self.data_version = None;
                let batch = kept.lock().unwrap_or_else(PoisonError::into_inner).take().unwrap_or_default();
                self.refuse(batch, error).await
            }
        }
    }

    async fn after(&mut self, done: Done) -> Vec<Entry> {
        self.level = done.level;
        if done.busy {
            self.tell_locked();
            return done.left;
        }
        self.data_version = Some(done.data_version);
        if let Some(locked) = self.locked.take() {
            self.args.board.write(|facts| facts.locked_since = 0);
            tracing::info!(waited_ms = locked.since.elapsed().as_millis() as u64, "the database is no longer locked");
        }
        if done.foreign {
            self.foreign_at = Some(Instant::now());
        }
        if self.others_write() {
            let now = Instant::now();
            self.free_at = self.free_at.max(now) + done.hold.mul_f64(GAP).min(LONGEST_GAP);
            if !done.left.is_empty() {
                // a gap at least as long as the hold before the rest
                tokio::time::sleep(done.hold).await;
            }
        }
        done.left
    }

    /// No connection could be had: the jobs are answered with the error, so that their owners decide.
    async fn refuse(&mut self, batch: Vec<Entry>, error: StoreError) -> Vec<Entry> {
        if matches!(error, StoreError::Busy(_)) {
            self.tell_locked();
            return batch;
        }
        let refused = Err(error);
        for entry in batch {
            entry.job.finish(&refused);
        }
        Vec::new()
    }

    fn tell_locked(&mut self) {
        let now = Instant::now();
        match &mut self.locked {
            None => {
                self.locked = Some(Locked { since: now, told: now });
                let since = self.args.clock.now();
                self.args.board.write(|facts| facts.locked_since = since);
                tracing::warn!("the database is locked by another process; waiting, nothing is lost");
            }
            Some(locked) if now - locked.told >= LOCKED_EVERY => {
                locked.told = now;
                tracing::warn!(
                    seconds = (now - locked.since).as_secs(),
                    "the database is still locked by another process; waiting, nothing is lost"
                );
            }
            Some(_) => {}
        }
    }
}

/// One transaction, on a worker thread.
fn transaction(
    conn: &mut Connection,
    batch: Vec<Entry>,
    level: Synchronous,
    known_level: Option<Synchronous>,
    known_version: Option<i64>,
) -> Done {
    let mut done =
        Done { left: Vec::new(), level: None, data_version: 0, foreign: false, hold: Duration::ZERO, busy: false };
    if known_level != Some(level) {
        // cannot be changed inside of a transaction
        if let Err(error) = connection::set_synchronous(conn, level) {
            finish(batch, &Err(error));
            return done;
        }
    }
    done.level = Some(level);
    let begun = match conn.transaction_with_behavior(TransactionBehavior::Immediate).step("begin a transaction") {
        Ok(tx) => tx,
        Err(StoreError::Busy(_)) => {
            done.busy = true;
            done.left = batch;
            return done;
        }
        Err(error) => {
            finish(batch, &Err(error));
            return done;
        }
    };
    let started = Instant::now();
    let version: Option<i64> =
        begun.prepare_cached("PRAGMA data_version").and_then(|mut s| s.query_row([], |row| row.get(0))).ok();
    done.data_version = version.unwrap_or(0);
    done.foreign = known_version.is_some_and(|known| version != Some(known));
    let (mut ran, mut rest) = (Vec::with_capacity(batch.len()), batch.into_iter());
    let mut fate = Ok(());
    while let Some(mut entry) = rest.next() {
        if entry.job.is_abandoned() {
            continue;
        }
        // a savepoint copies every page that it changes: a job that is alone does without, and takes the whole
        // transaction with it where it fails
        if ran.is_empty() && rest.len() == 0 {
            let keep = entry.job.run(&begun);
            ran.push(entry);
            if !keep {
                drop(begun);
                done.hold = started.elapsed();
                finish(ran, &Ok(()));
                return done;
            }
            break;
        }
        fate = in_savepoint(&begun, &mut *entry.job);
        ran.push(entry);
        if fate.is_err() || started.elapsed() >= limits::WRITER_HOLD {
            break;
        }
    }
    done.left = rest.collect();
    let fate = match fate {
        Ok(()) => begun.commit().step("commit a transaction"),
        Err(error) => {
            drop(begun);
            Err(error)
        }
    };
    done.hold = started.elapsed();
    finish(ran, &fate);
    done
}

/// A job that fails is rolled back alone; an error here means that the whole transaction is lost (disk full, input and
/// output).
fn in_savepoint(tx: &Transaction<'_>, job: &mut dyn Job) -> Result<()> {
    let sql = |text| tx.prepare_cached(text).and_then(|mut s| s.execute([])).step("use a savepoint");
    sql("SAVEPOINT job")?;
    if !job.run(tx) {
        sql("ROLLBACK TO job")?;
    }
    sql("RELEASE job")?;
    Ok(())
}

fn finish(batch: Vec<Entry>, fate: &Result<()>) {
    for entry in batch {
        entry.job.finish(fate);
    }
}
