//! The reload plan: what changed between two configurations, and what each change costs.
//!
//! [`values`] destructures every shape without `..`: a new key does not compile until it is listed here, and a test
//! compares the list with the table of keys, where its class is. May import: std.

use super::keys::{self, Class};
use super::load::{Loaded, masked};
use super::shape::{Admin, Backoff, Config, Database, Http, Inbox, Log, Nats, Relay, Retention, Stream, Tls};
use super::value::{Field, Value};

/// One changed key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    pub key: &'static str,
    /// As TOML, masked where secret. The same for `new`.
    pub old: String,
    pub new: String,
    pub class: Class,
}

impl std::fmt::Display for Change {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {} -> {}", self.key, self.old, self.new)
    }
}

/// What a reload would change, in the order of the file.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Plan {
    pub changed: Vec<Change>,
    /// Files that a changed connection needs and that cannot be read.
    pub unreadable: Vec<String>,
}

impl Plan {
    pub fn is_empty(&self) -> bool {
        self.changed.is_empty()
    }

    /// Whether some change has this class.
    pub fn has(&self, class: Class) -> bool {
        self.changed.iter().any(|change| change.class == class)
    }

    /// Whether this key changed.
    pub fn touches(&self, key: &str) -> bool {
        self.changed.iter().any(|change| change.key == key)
    }

    /// Why the reload is refused as a whole, naming every key that only a restart can change and every file that cannot
    /// be read; `None` if it is not.
    pub fn refusal(&self) -> Option<String> {
        let restart: Vec<String> =
            self.changed.iter().filter(|change| change.class == Class::Restart).map(Change::to_string).collect();
        let mut reasons = Vec::new();
        if !restart.is_empty() {
            reasons.push(format!("only a restart can change {}", restart.join("; ")));
        }
        reasons.extend(self.unreadable.iter().cloned());
        (!reasons.is_empty()).then(|| format!("nothing was changed: {}", reasons.join("; ")))
    }
}

/// Compares the running configuration with a wanted one, and the contents of the files that `nats` names: a new
/// password under the old name is a change too.
pub fn plan(running: &Loaded, wanted: &Loaded) -> Plan {
    let mut plan = diff(&running.config, &wanted.config);
    for stamp in &wanted.stamps {
        let before = running.stamps.iter().find(|old| old.key == stamp.key && old.path == stamp.path);
        match &stamp.content {
            Err(why) => plan.unreadable.push(format!("{}: cannot read {}: {why}", stamp.key, stamp.path.display())),
            Ok(content) if before.is_some_and(|old| old.content.as_ref() != Ok(content)) => {
                let (old, new) = ("(its old content)".to_owned(), "(new content)".to_owned());
                plan.changed.push(Change { key: stamp.key, old, new, class: Class::Reconnect });
            }
            Ok(_) => {}
        }
    }
    plan
}

/// Compares the values of two configurations.
pub fn diff(running: &Config, wanted: &Config) -> Plan {
    let pairs = values(running).into_iter().zip(values(wanted));
    let changed = pairs.filter(|((_, old), (_, new))| old != new).map(|((path, old), (_, new))| Change {
        key: path,
        old: masked(path, &old),
        new: masked(path, &new),
        class: keys::find(path).map_or(Class::Restart, |key| key.class),
    });
    Plan { changed: changed.collect(), unreadable: Vec::new() }
}

macro_rules! list {
    ($list:ident, $table:literal: $($field:ident)+) => {
        $($list.push((concat!($table, stringify!($field)), $field.value()));)+
    };
}

/// Every key with its value, in the order of the file.
pub(super) fn values(config: &Config) -> Vec<(&'static str, Value)> {
    let mut all: Vec<(&'static str, Value)> = Vec::with_capacity(keys::KEYS.len());
    let Config { source, database, nats, stream, relay, inbox, retention, http, admin, log } = config;
    list!(all, "": source);
    let Database { path, synchronous, busy_timeout, readers, checkpoint } = database;
    list!(all, "database.": path synchronous busy_timeout readers checkpoint);
    let Nats {
        urls,
        user,
        password_file,
        token_file,
        nkey_seed_file,
        credentials_file,
        ping_interval,
        tls: Tls { ca_file, cert_file, key_file, first },
    } = nats;
    list!(all, "nats.": urls user password_file token_file nkey_seed_file credentials_file ping_interval);
    list!(all, "nats.tls.": ca_file cert_file key_file first);
    let Stream { name, subjects, domain, manage, replicas, max_age, max_bytes, duplicate_window } = stream;
    list!(all, "stream.": name subjects domain manage replicas max_age max_bytes duplicate_window);
    relay_values(relay, &mut all);
    inbox_values(inbox, &mut all);
    let Retention { published, processed, inbox, audit } = retention;
    list!(all, "retention.": published processed inbox audit);
    let Http { listen, token_file } = http;
    list!(all, "http.": listen token_file);
    let Admin { socket } = admin;
    list!(all, "admin.": socket);
    let Log { level, format } = log;
    list!(all, "log.": level format);
    all
}

fn relay_values(relay: &Relay, all: &mut Vec<(&'static str, Value)>) {
    let Relay {
        enabled,
        publishers,
        batch,
        batch_bytes,
        lease,
        ack_wait,
        subject,
        format,
        ordering,
        on_failed,
        max_attempts,
        min_failing_for,
        barrier,
        backoff: Backoff { initial, factor, cap, jitter },
    } = relay;
    list!(all, "relay.": enabled publishers batch batch_bytes lease ack_wait subject format ordering on_failed
        max_attempts min_failing_for barrier);
    list!(all, "relay.backoff.": initial factor cap jitter);
}

fn inbox_values(inbox: &Inbox, all: &mut Vec<(&'static str, Value)>) {
    let Inbox {
        enabled,
        stream,
        domain,
        durable,
        filter_subjects,
        deliver,
        batch,
        ack_wait,
        max_deliver,
        own_events,
        unmatched,
        on_gap,
        gap_wait,
        handler,
    } = inbox;
    list!(all, "inbox.": enabled stream domain durable filter_subjects deliver batch ack_wait max_deliver own_events
        unmatched on_gap gap_wait handler);
}
