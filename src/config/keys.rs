//! The table of keys: path, kind, default, what a reload does with it, and the reason for the default.
//!
//! Everything else derives from it: the strict parse, environment variables, `config schema`, `config show`, the
//! shipped `config.toml` and its documentation. A key's path and its field in the shapes are the same tokens, so that
//! they cannot disagree. May import: domain, std.

use super::check;
use super::shape::Config;
use super::value::{Field, names};

/// What a reload does when the key changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// Taken over by the running parts.
    Hot,
    /// Taken over by a new connection to NATS, which is made before the old one is given up.
    Reconnect,
    /// Only a restart of the daemon can change it: the reload is refused by name.
    Restart,
}

impl Class {
    pub fn as_str(self) -> &'static str {
        match self {
            Class::Hot => "hot",
            Class::Reconnect => "reconnect",
            Class::Restart => "restart",
        }
    }
}

/// What a key's value may be.
#[derive(Clone, Copy)]
pub enum Kind {
    /// A string; `what` says in words which.
    Text {
        what: &'static str,
        check: fn(&str) -> Result<(), String>,
    },
    /// A path, relative to the configuration file; the empty string is "none" where it is not required.
    Path {
        required: bool,
    },
    Bool,
    /// A whole number.
    Count {
        min: u64,
        max: u64,
    },
    /// Bytes: a whole number or a string such as "4MiB".
    Size {
        min: u64,
    },
    /// A string in humantime's form.
    Duration {
        zero: bool,
    },
    /// A finite number of at least 1.
    Factor,
    /// One of some names.
    Choice(fn() -> Vec<&'static str>),
    /// A list of strings, each checked, at least one.
    Texts {
        what: &'static str,
        check: fn(&str) -> Result<(), String>,
    },
    /// `[[inbox.handler]]`.
    Handlers,
}

impl Kind {
    /// What is allowed, in words, after "must be".
    pub fn allowed(&self) -> String {
        match self {
            Kind::Text { what, .. } => format!("a string: {what}"),
            Kind::Path { required: true } => "a string: the path of a file".into(),
            Kind::Path { required: false } => "a string: the path of a file, or \"\" for none".into(),
            Kind::Bool => "true or false".into(),
            Kind::Count { min, max } => format!("a whole number from {min} to {max}"),
            Kind::Size { min } => format!("a size of at least {min} bytes, such as 4194304 or \"4MiB\""),
            Kind::Duration { zero: false } => "a duration greater than zero, such as \"30s\" or \"5m\"".into(),
            Kind::Duration { zero: true } => "a duration such as \"30s\" or \"7d\", or \"0s\"".into(),
            Kind::Factor => "a number of at least 1".into(),
            Kind::Choice(names) => {
                let quoted: Vec<String> = names().iter().map(|n| format!("\"{n}\"")).collect();
                format!("one of {}", quoted.join(", "))
            }
            Kind::Texts { what, .. } => format!("a list of strings, at least one: {what}"),
            Kind::Handlers => "tables written as [[inbox.handler]] with event_type, apply and, for \"sql\", sql".into(),
        }
    }
}

/// One key.
pub struct Key {
    /// With dots, such as `relay.batch`.
    pub path: &'static str,
    pub kind: Kind,
    /// As it stands in the file.
    pub default: &'static str,
    pub class: Class,
    /// Its value is not shown.
    pub secret: bool,
    /// What it is and why the default is what it is.
    pub doc: &'static str,
    /// Its field.
    pub field: fn(&mut Config) -> &mut dyn Field,
}

impl Key {
    /// The table it stands in, empty for the top level, and its name there.
    pub fn split(&self) -> (&'static str, &'static str) {
        self.path.rsplit_once('.').unwrap_or(("", self.path))
    }

    /// The environment variable that overrides it.
    pub fn variable(&self) -> String {
        format!("{PREFIX}{}", self.path.replace('.', "_").to_uppercase())
    }
}

/// What all environment variables of ours begin with.
pub const PREFIX: &str = "OUTBOXD_";

/// Variables with that prefix that are no keys.
pub const RESERVED: [&str; 2] = ["OUTBOXD_CONFIG", "OUTBOXD_NATS_SERVER"];

/// The key with this path.
pub fn find(path: &str) -> Option<&'static Key> {
    KEYS.iter().find(|key| key.path == path)
}

/// The tables in the order of the file, the top level (empty) first.
pub fn tables() -> Vec<&'static str> {
    let mut tables: Vec<&'static str> = KEYS.iter().map(|key| key.split().0).collect();
    tables.dedup();
    tables
}

macro_rules! keys {
    ($($first:ident $(. $rest:ident)* $(($secret:ident))? : $kind:expr, $default:literal, $class:ident, $doc:literal;)*) => {
        /// Every key, in the order of the file.
        pub const KEYS: &[Key] = &[$(Key {
            path: concat!(stringify!($first) $(, ".", stringify!($rest))*),
            kind: $kind,
            default: $default,
            class: Class::$class,
            secret: !concat!($(stringify!($secret))?).is_empty(),
            doc: $doc,
            field: |config| &mut config.$first $(.$rest)*,
        }),*];
    };
}

use Kind::{Bool, Choice, Count, Duration, Factor, Handlers, Path, Size, Text, Texts};

use super::shape::{
    Checkpoint, Deliver, Format, Jitter, LogFormat, Manage, OnFailed, OnGap, Ordering, OwnEvents, Synchronous,
    Unmatched,
};

const FILE: Kind = Path { required: false };
const POSITIVE: Kind = Duration { zero: false };
const OR_ZERO: Kind = Duration { zero: true };
const NAME: Kind = Text { what: "a JetStream name, without blanks, dots, wildcards and slashes", check: check::name };
const DOMAIN: Kind = Text { what: "a JetStream domain, or \"\" for none", check: check::domain };
const FILTERS: Kind = Texts { what: "subjects such as \"events.>\"", check: check::filter };
const ATTEMPTS: Kind = Count { min: 1, max: 1_000_000 };

keys! {
    source: Text { what: "an identity without blanks at its ends, at most 256 bytes", check: check::source },
        "\"\"", Restart,
        "identity in ce-source and Nats-Msg-Id; empty: the id made at `db init`, kept in the database, so that a \
         copied configuration cannot make two databases look like one";

    database.path: Path { required: true }, "\"outboxd.db\"", Restart,
        "the application's SQLite file, which holds the outbox beside its own tables";
    database.synchronous: Choice(names::<Synchronous>), "\"full\"", Hot,
        "full: each settle is on disk when it is done; normal: a power cut may undo settles, which costs repeats \
         within the duplicate window; leases, inbox, ingest and assets are always full";
    database.busy_timeout: POSITIVE, "\"5s\"", Restart,
        "how long one statement waits for the write lock of another process before the daemon reports it and goes \
         on waiting; nothing is counted against any event";
    database.readers: Count { min: 1, max: 64 }, "2", Restart,
        "connections that read; two keep status and metrics apart from the relay";
    database.checkpoint: Choice(names::<Checkpoint>), "\"passive\"", Restart,
        "passive never waits for readers; truncate also cuts the -wal file down, with a short time limit; off \
         leaves it to litestream";

    nats.urls: Texts {
            what: "servers such as \"nats://127.0.0.1:4222\" or \"tls://nats.example:4222\", without credentials",
            check: check::url,
        },
        "[\"nats://127.0.0.1:4222\"]", Reconnect,
        "servers of one cluster, tried in turn; credentials in a URL are refused, because URLs end in logs";
    nats.user(secret): Text { what: "a user name, or \"\" for none", check: check::any }, "\"\"", Reconnect,
        "user name, with password_file";
    nats.password_file: FILE, "\"\"", Reconnect,
        "file with the password of `user`; read again at each connect";
    nats.token_file: FILE, "\"\"", Reconnect,
        "file with a token; read again at each connect";
    nats.nkey_seed_file: FILE, "\"\"", Reconnect,
        "file with an nkey seed (SU...); read again at each connect";
    nats.credentials_file: FILE, "\"\"", Reconnect,
        "credentials file of `nsc` (JWT and seed); read again at each connect";
    nats.ping_interval: POSITIVE, "\"5s\"", Reconnect,
        "a server that answers no two pings is given up; the client's own default of a minute would see a frozen \
         one after minutes";
    nats.tls.ca_file: FILE, "\"\"", Reconnect,
        "PEM file of the authority that signed the server's certificate; none: the system's";
    nats.tls.cert_file: FILE, "\"\"", Reconnect,
        "PEM file of our own certificate, for mutual TLS, with key_file";
    nats.tls.key_file: FILE, "\"\"", Reconnect,
        "PEM file of the key of our own certificate";
    nats.tls.first: Bool, "false", Reconnect,
        "TLS handshake before the server says anything (handshake_first of the server)";

    stream.name: NAME, "\"EVENTS\"", Reconnect,
        "the stream that must acknowledge every event";
    stream.subjects: FILTERS, "[\"events.>\"]", Reconnect,
        "its subjects where it is made here; they must cover relay.subject, else nobody would acknowledge";
    stream.domain: DOMAIN, "\"\"", Reconnect,
        "JetStream domain of the stream, for leaf nodes; an acknowledgement of another domain does not count";
    stream.manage: Choice(names::<Manage>), "\"create\"", Reconnect,
        "create: make the stream if it is missing; check: only look at it; off: no opinion on its settings; a \
         stream that exists is never altered or shrunk";
    stream.replicas: Count { min: 1, max: 5 }, "1", Reconnect,
        "copies of the stream where it is made here; 3 in a cluster";
    stream.max_age: OR_ZERO, "\"0s\"", Reconnect,
        "age limit where it is made here; 0s: none, because only you know how long consumers may be away (`doctor` \
         warns of a stream without any limit)";
    stream.max_bytes: Size { min: 0 }, "0", Reconnect,
        "size limit where it is made here; 0: none";
    stream.duplicate_window: POSITIVE, "\"2m\"", Reconnect,
        "how long the server remembers ids; should exceed relay.lease + 2 x relay.ack_wait, so that a repeat after \
         a crash is recognised without a look";

    relay.enabled: Bool, "true", Restart,
        "false: this node only consumes";
    relay.publishers: Count { min: 1, max: 64 }, "2", Restart,
        "workers; an aggregate belongs to one of them; more gain little, because the server is the ceiling of a \
         stream";
    relay.batch: Count { min: 1, max: 10_000 }, "512", Hot,
        "most events of one lease: with two publishers the 1,024 in flight at which JetStream stops getting faster";
    relay.batch_bytes: Size { min: 1 }, "\"4MiB\"", Hot,
        "most bytes of one lease; a single larger event still goes alone";
    relay.lease: POSITIVE, "\"30s\"", Reconnect,
        "how long a batch belongs to its publisher; a frozen daemon is replaced after it, a dead one at once";
    relay.ack_wait: POSITIVE, "\"5s\"", Reconnect,
        "how long an acknowledgement may take before the outcome counts as unknown; shorter than the lease";
    relay.subject: Text { what: "a subject template that begins with a literal token", check: check::template },
        "\"events.{aggregate_type}.{aggregate_id}.{event}\"", Reconnect,
        "placeholders: {aggregate_type} {aggregate_id} {event} (the type without its leading aggregate type) \
         {event_type} {event_id} {schema_version} {source}; what is not legal in a token is escaped as %XX";
    relay.format: Choice(names::<Format>), "\"envelope\"", Hot,
        "envelope: the bytes of payload_json unchanged; cloudevents: a structured CloudEvent around them";
    relay.ordering: Choice(names::<Ordering>), "\"aggregate\"", Restart,
        "aggregate: events of one aggregate enter the stream in commit order, whatever happens; none gives that up";
    relay.on_failed: Choice(names::<OnFailed>), "\"hold\"", Hot,
        "hold: a failed event keeps later ones of its aggregate until someone retries or discards it; skip: they \
         pass";
    relay.max_attempts: ATTEMPTS, "10", Hot,
        "an event fails for good only after this many attempts of its own fault AND min_failing_for; outages never \
         count";
    relay.min_failing_for: POSITIVE, "\"5m\"", Hot,
        "see max_attempts: a minute of trouble must not use up ten quick attempts";
    relay.barrier: Bool, "true", Hot,
        "publish nothing that a power cut could still take back from the application's file; false trusts the \
         application to commit with synchronous=full";
    relay.backoff.initial: POSITIVE, "\"200ms\"", Hot,
        "first wait of an event or an aggregate that fails by itself";
    relay.backoff.factor: Factor, "2.0", Hot,
        "growth of the wait from attempt to attempt";
    relay.backoff.cap: POSITIVE, "\"1m\"", Hot,
        "longest wait; at least `initial`";
    relay.backoff.jitter: Choice(names::<Jitter>), "\"full\"", Hot,
        "full: a random wait below the computed one, so that aggregates do not come back in step; none: the \
         computed one";

    inbox.enabled: Bool, "false", Restart,
        "consume events into this database; needs at least one handler";
    inbox.stream: NAME, "\"EVENTS\"", Restart,
        "the stream to consume from";
    inbox.domain: DOMAIN, "\"\"", Restart,
        "its JetStream domain";
    inbox.durable: NAME, "\"outboxd\"", Restart,
        "name of the durable consumer; one per application, not per node";
    inbox.filter_subjects: FILTERS, "[\"events.>\"]", Reconnect,
        "what to consume of the stream";
    inbox.deliver: Choice(names::<Deliver>), "\"all\"", Restart,
        "where a new durable starts: all, or new for what comes from now on";
    inbox.batch: Count { min: 1, max: 10_000 }, "256", Hot,
        "most messages of one transaction: many enough to share its fsync, few enough to hold the lock for \
         milliseconds";
    inbox.ack_wait: POSITIVE, "\"30s\"", Reconnect,
        "after which the server delivers again what was not acknowledged";
    inbox.max_deliver: ATTEMPTS, "10", Hot,
        "failures of a message's own handler, counted in the database, before it becomes a dead row; the JetStream \
         consumer itself has no limit, because the server would drop the message in silence";
    inbox.own_events: Choice(names::<OwnEvents>), "\"skip\"", Hot,
        "events with our own source: skip them, or apply them too";
    inbox.unmatched: Choice(names::<Unmatched>), "\"skip\"", Hot,
        "events without a handler: skip, store, or dead; without identity or type always dead";
    inbox.on_gap: Choice(names::<OnGap>), "\"apply\"", Hot,
        "when an aggregate version is missing in between: apply anyway, or wait for it";
    inbox.gap_wait: POSITIVE, "\"1m\"", Hot,
        "longest wait for a missing version";
    inbox.handler: Handlers, "[]", Hot,
        "what to do with which events, first match; none by default";

    retention.published: OR_ZERO, "\"7d\"", Hot,
        "only rows with a stream_seq, so that `verify` and `replay` reach back a week; 0s: keep for ever";
    retention.processed: OR_ZERO, "\"30d\"", Hot,
        "the dedupe horizon for events that come again under another sequence";
    retention.inbox: OR_ZERO, "\"30d\"", Hot,
        "done rows of the inbox; dead ones stay until someone decides";
    retention.audit: OR_ZERO, "\"365d\"", Hot,
        "who changed what, when";

    http.listen: Text {
            what: "an address such as \"127.0.0.1:8787\", \":0\" for a free port, \"\" for off",
            check: check::listen,
        },
        "\"127.0.0.1:8787\"", Hot,
        "\"\" is off, \":0\" a free port (shown in status); a port that cannot be bound is an error in status and \
         tried again, the relay runs";
    http.token_file: FILE, "\"\"", Hot,
        "file with the bearer token that requests must carry; needed where `listen` is not a loopback address";

    admin.socket: FILE, "\"\"", Restart,
        "unix socket of the command line; empty: beside the database, or a short path under the run-time folder \
         where that is too long (107 bytes)";

    log.level: Text {
            what: "trace, debug, info, warn, error or off, or directives such as \"info,outboxd::actors=debug\"",
            check: check::level,
        },
        "\"info\"", Hot,
        "info tells the life cycle, debug each batch, trace each message";
    log.format: Choice(names::<LogFormat>), "\"auto\"", Restart,
        "auto: journald where standard error goes to the journal, else text; or text, json, journald";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_and_variables_are_unique_and_none_is_reserved() {
        let mut variables: Vec<String> = KEYS.iter().map(Key::variable).collect();
        assert!(RESERVED.iter().all(|reserved| !variables.iter().any(|v| v == reserved)));
        variables.sort();
        let all = variables.len();
        variables.dedup();
        assert_eq!(variables.len(), all);
    }

    #[test]
    fn keys_of_a_table_stand_together() {
        let mut tables = tables();
        let all = tables.len();
        tables.sort_unstable();
        tables.dedup();
        assert_eq!(tables.len(), all, "a table appears twice: its keys are apart in the list");
    }

    #[test]
    fn a_path_is_its_field() {
        assert_eq!(find("relay.backoff.cap").unwrap().variable(), "OUTBOXD_RELAY_BACKOFF_CAP");
        let mut config = Config::default();
        let key = find("relay.batch").unwrap();
        (key.field)(&mut config).put(super::super::value::Value::Count(7));
        assert_eq!(config.relay.batch, 7);
    }

    #[test]
    fn only_the_named_keys_are_secret() {
        let secret: Vec<&str> = KEYS.iter().filter(|key| key.secret).map(|key| key.path).collect();
        assert_eq!(secret, ["nats.user"]);
    }
}
