//! Putting the daemon together.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::{Daemon, Failure, RunOptions, SystemClock, SystemDice, exit, services};
use crate::actors::consumer::ConsumerArgs;
use crate::actors::janitor::{JanitorArgs, Keep};
use crate::actors::relay::{RelayArgs, RelayMsg};
use crate::actors::root::{RootArgs, Slot, Tree};
use crate::actors::writer::{Durability, Writer, WriterArgs};
use crate::admin::rates::Rates;
use crate::admin::{self, Services, http};
use crate::config::{Apply, Checkpoint, Config, Format, Loaded, OnFailed, Ordering, Synchronous};
use crate::domain::rules::RelayRules;
use crate::domain::wire;
use crate::jetstream::consume::{self, JetStreamSource};
use crate::jetstream::{JetStream, Settings};
use crate::ports::{Broker, Clock, Link};
use crate::signals::Signals;
use crate::store::connection;
use crate::store::error::{StoreError, chain};
use crate::store::inbox::Inbox;
use crate::store::pool::{Store, StoreOptions};
use crate::store::watch::{self as store_watch, Seen, Watcher};
use crate::telemetry::board::{Board, State};
use crate::telemetry::logging::Logging;
use crate::telemetry::metrics::Metrics;
use crate::telemetry::notify::Notifier;

/// Autocheckpoint of our own commits, in pages: SQLite's default.
const CHECKPOINT_PAGES: u32 = 1_000;

impl Daemon {
    pub(super) async fn start(loaded: Loaded, options: RunOptions, logging: Option<Logging>) -> Result<Self, Failure> {
        // before anything slow: a signal during the start is not lost
        let signals = Signals::install().map_err(|error| fail(exit::INTERNAL, "cannot take signals over", &error))?;
        let notifier = Notifier::from_env();
        let clock: Arc<dyn Clock> = Arc::new(SystemClock);
        let (board, metrics) = (Board::default(), Metrics::new());
        board.write(|facts| {
            facts.state = State::Starting;
            facts.started_at = clock.now();
            facts.config_generation = 1;
            facts.config_digest = loaded.digest.clone();
            facts.config_last_reload = "none".into();
            facts.relay_role = "off".into();
        });
        for warning in &loaded.warnings {
            tracing::warn!("{warning}");
        }
        let config = &loaded.config;
        notifier.extend(Duration::from_secs(60));
        let store = open(config).await?;
        let source = source(config, &store).await?;
        let paused_until = services::paused_until(&store, clock.now()).await.map_err(store_failure)?;

        let broker = JetStream::start(broker_settings(config), clock.clone())
            .map_err(|error| fail(exit::INTERNAL, "cannot start the connection to NATS", &error))?;
        let broker = Arc::new(broker);
        let (fatal_sink, fatal) = mpsc::unbounded_channel();
        let (writer, relay, janitor, consumer) = (Writer::default(), Slot::default(), Slot::default(), Slot::default());
        let inlet = Arc::new(JetStreamSource::new(inlet_settings(config), board.clone()));
        let inbox = inbox(config, &source, &store).await?;
        let args = RootArgs {
            writer: WriterArgs {
                store: store.clone(),
                board: board.clone(),
                clock: clock.clone(),
                durability: durability(config),
            },
            writer_seat: writer.clone(),
            relay: config.relay.enabled.then(|| RelayArgs {
                store: store.clone(),
                writer: writer.clone(),
                broker: broker.clone(),
                clock: clock.clone(),
                dice: Arc::new(SystemDice),
                rules: Arc::new(rules(config, &source)),
                publishers: config.relay.publishers,
                paused: paused_until.is_some(),
                board: board.clone(),
                metrics: metrics.clone(),
                loops: board.loops().clone(),
                fatal: fatal_sink.clone(),
            }),
            relay_slot: relay.clone(),
            janitor: JanitorArgs {
                store: store.clone(),
                writer: writer.clone(),
                clock: clock.clone(),
                metrics: metrics.clone(),
                keep: keep(config),
            },
            janitor_slot: janitor.clone(),
            consumer: inbox.map(|inbox| ConsumerArgs {
                store: store.clone(),
                writer: writer.clone(),
                source: inlet.clone(),
                inbox: Arc::new(inbox),
                clock: clock.clone(),
                board: board.clone(),
                metrics: metrics.clone(),
            }),
            consumer_slot: consumer.clone(),
            metrics: metrics.clone(),
        };
        let tree = Tree::start(args).await.map_err(|error| fail(exit::INTERNAL, "cannot start the actors", &error))?;
        let watcher = watch_database(&store, relay.clone(), fatal_sink)?;
        tokio::spawn(mirror_link(broker.link(), board.clone()));

        let rates = Rates::default();
        let (sampled, counters) = (rates.clone(), metrics.clone());
        tokio::spawn(async move { sampled.run(&counters).await });
        let (control_sender, control) = mpsc::channel(16);
        let services = Services {
            board: board.clone(),
            metrics: metrics.clone(),
            rates: rates.clone(),
            clock: clock.clone(),
            tally: admin::tally::reader(store.clone(), source.clone(), clock.clone()),
            write: services::write(writer.clone()),
            control: control_sender,
            inbox: services::inbox(config, &source),
        };
        let stop_admin = CancellationToken::new();
        let (http_rules, rules_receiver) = watch::channel(http_rules(config));
        tokio::spawn(http::run(services.clone(), rules_receiver, stop_admin.clone()));
        services::serve_socket(config, &store, services, stop_admin.clone());

        board.write(|facts| facts.state = if paused_until.is_some() { State::Paused } else { State::Running });
        notifier.ready("running");
        tokio::spawn(notifier.clone().accompany(board.clone()));
        tracing::info!(
            version = env!("CARGO_PKG_VERSION"),
            source,
            database = %store.path().display(),
            config = %loaded.path.display(),
            "outboxd runs"
        );
        let daemon = Self {
            loaded,
            options,
            logging,
            generation: 1,
            source,
            board,
            clock,
            store,
            writer,
            broker,
            tree,
            relay,
            janitor,
            consumer,
            inlet,
            signals,
            control,
            fatal,
            http_rules,
            stop_admin,
            notifier,
            _watcher: watcher,
        };
        daemon.wake_at_end_of_pause(paused_until);
        Ok(daemon)
    }
}

fn fail(code: u8, what: &str, error: &dyn std::fmt::Display) -> Failure {
    tracing::error!(%error, "{what}");
    Failure { code }
}

fn store_failure(error: StoreError) -> Failure {
    let code = match &error {
        StoreError::Classic { .. } | StoreError::Newer { .. } | StoreError::Foreign { .. } => exit::CONFIGURATION,
        StoreError::Crashed(_) | StoreError::Corrupt(_) => exit::INTERNAL,
        _ => exit::UNAVAILABLE,
    };
    tracing::error!(error = %chain(&error), "cannot start");
    Failure { code }
}

async fn open(config: &Config) -> Result<Store, Failure> {
    let options = StoreOptions {
        path: config.database.path.clone(),
        busy_timeout: config.database.busy_timeout,
        readers: config.database.readers,
        autocheckpoint: match config.database.checkpoint {
            Checkpoint::Passive | Checkpoint::Truncate => Some(CHECKPOINT_PAGES),
            Checkpoint::Off => None,
        },
    };
    let store = Store::open(&options).await.map_err(store_failure)?;
    for note in store.notes() {
        tracing::warn!("{note}");
    }
    Ok(store)
}

/// The configured source, or the one made at `db init`.
async fn source(config: &Config, store: &Store) -> Result<String, Failure> {
    if !config.source.is_empty() {
        return Ok(config.source.clone());
    }
    let kept = store.read(|conn| crate::store::schema::meta_get(conn, "source")).await.map_err(store_failure)?;
    kept.filter(|source| !source.is_empty()).ok_or_else(|| {
        fail(exit::CONFIGURATION, "no source", &"the database has none; set `source` in the configuration")
    })
}

pub(super) fn durability(config: &Config) -> Durability {
    let settle = match config.database.synchronous {
        Synchronous::Full => connection::Synchronous::Full,
        Synchronous::Normal => connection::Synchronous::Normal,
    };
    Durability { settle, barrier: config.relay.barrier }
}

/// The inbox with its handlers, checked against the real schema; `None` where it is off.
async fn inbox(config: &Config, source: &str, store: &Store) -> Result<Option<Inbox>, Failure> {
    if !config.inbox.enabled {
        return Ok(None);
    }
    let problems = check_handlers(config, store).await.map_err(store_failure)?;
    if !problems.is_empty() {
        return Err(fail(exit::CONFIGURATION, "an inbox handler cannot work", &problems.join("; ")));
    }
    Ok(Some(Inbox::new(config.inbox.rules(source))))
}

/// What is wrong with the statements of the `sql` handlers, in words.
pub(super) async fn check_handlers(config: &Config, store: &Store) -> Result<Vec<String>, StoreError> {
    let handlers: Vec<(String, String)> = config
        .inbox
        .handler
        .iter()
        .filter(|handler| handler.apply == Apply::Sql)
        .map(|handler| (handler.event_type.clone(), handler.sql.clone()))
        .collect();
    store
        .read(move |conn| {
            let check = |(event_type, sql): &(String, String)| {
                let problems = crate::store::inbox_sql::check(conn, sql);
                problems
                    .into_iter()
                    .map(|problem| format!("inbox.handler {event_type:?}: {problem}"))
                    .collect::<Vec<_>>()
            };
            Ok(handlers.iter().flat_map(check).collect())
        })
        .await
}

pub(super) fn inlet_settings(config: &Config) -> consume::Settings {
    consume::Settings { nats: config.nats.clone(), inbox: config.inbox.clone() }
}

/// The relay's rules as the configuration says them.
pub(super) fn rules(config: &Config, source: &str) -> RelayRules {
    let relay = &config.relay;
    RelayRules {
        source: source.to_owned(),
        template: relay.template(),
        format: match relay.format {
            Format::Envelope => wire::Format::Envelope,
            Format::CloudEvents => wire::Format::CloudEvents,
        },
        ordered: relay.ordering == Ordering::Aggregate,
        hold: relay.on_failed == OnFailed::Hold,
        batch: relay.batch,
        batch_bytes: usize::try_from(relay.batch_bytes).unwrap_or(usize::MAX),
        lease: relay.lease,
        ack_wait: relay.ack_wait,
        retry: relay.retry_rules(),
    }
}

pub(super) fn keep(config: &Config) -> Keep {
    let kept = &config.retention;
    Keep { published: kept.published, processed: kept.processed, inbox: kept.inbox, audit: kept.audit }
}

pub(super) fn http_rules(config: &Config) -> http::Rules {
    http::Rules { listen: config.http.listen.clone(), token_file: config.http.token_file.clone() }
}

pub(super) fn broker_settings(config: &Config) -> Settings {
    let template = config.relay.template();
    Settings {
        nats: config.nats.clone(),
        stream: config.stream.clone(),
        ack_wait: config.relay.ack_wait,
        lease: config.relay.lease,
        subject: config.relay.subject.clone(),
        covers: Arc::new(move |subjects| template.covered_by(subjects)),
    }
}

fn watch_database(
    store: &Store,
    relay: Slot<RelayMsg>,
    fatal: mpsc::UnboundedSender<StoreError>,
) -> Result<Watcher, Failure> {
    let settings = connection::Settings::default();
    let opened = connection::open(store.path(), connection::Access::Read, &settings).map_err(store_failure)?;
    let path = store.path().to_owned();
    store_watch::start(store.path(), opened.conn, move |seen| match seen {
        Seen::Work { touched } => relay.cast(RelayMsg::Wake { touched }),
        Seen::Replaced => {
            // the receiver is gone only at the very end
            let _ = fatal.send(StoreError::Replaced { path: path.clone() });
        }
    })
    .map_err(store_failure)
}

/// Keeps the board's facts about NATS as the link has them.
async fn mirror_link(mut link: watch::Receiver<Link>, board: Board) {
    loop {
        let now = link.borrow_and_update().clone();
        board.write(|facts| {
            facts.nats_connected = now.is_connected();
            match &now {
                Link::Down { since, reason } | Link::Unusable { since, reason } => {
                    facts.nats_since = *since;
                    facts.nats_reason = reason.clone();
                }
                Link::Up { generation, topology } => {
                    facts.nats_reason = String::new();
                    facts.nats_reconnects = generation.saturating_sub(1);
                    facts.nats_server = topology.server_version.clone();
                    facts.relay_path =
                        if topology.atomic { "pipelined + atomic runs".into() } else { "pipelined".into() };
                }
            }
        });
        if link.changed().await.is_err() {
            return;
        }
    }
}
