//! From the shapes of the configuration to values of the domain.
//!
//! A configuration that was loaded has been checked: these conversions cannot fail for it. May import: domain, std.

use std::net::SocketAddr;

use super::check;
use super::shape::{self, Backoff, Http, Inbox, OnGap, Relay};
use crate::domain::apply::{Action, GapRule, InboxRules, OwnEvents, PatienceRules, Unmatched};
use crate::domain::backoff;
use crate::domain::settle::RetryRules;
use crate::domain::subject::Template;

impl Backoff {
    /// # Panics
    /// For values that a load refuses.
    pub fn to_domain(&self) -> backoff::Backoff {
        backoff::Backoff::new(self.initial, self.factor, self.cap, self.jitter)
            .expect("initial <= cap and factor >= 1 were checked when the configuration was loaded")
    }
}

impl Relay {
    /// When a row that fails by itself is withdrawn, and how long it waits in between.
    pub fn retry_rules(&self) -> RetryRules {
        RetryRules {
            backoff: self.backoff.to_domain(),
            max_attempts: self.max_attempts,
            min_failing_for: self.min_failing_for,
        }
    }

    /// The subject template.
    ///
    /// # Panics
    /// For a template that a load refuses.
    pub fn template(&self) -> Template {
        Template::parse(&self.subject).expect("the template was checked when the configuration was loaded")
    }
}

impl Inbox {
    /// How the durable treats what arrives; `source` is the identity of this database.
    pub fn rules(&self, source: &str) -> InboxRules {
        let action = |handler: &shape::Handler| match handler.apply {
            shape::Apply::Assets => Action::Assets,
            shape::Apply::Store => Action::Store,
            shape::Apply::Sql => Action::Sql(handler.sql.clone()),
        };
        InboxRules {
            durable: self.durable.clone(),
            is_first: true,
            own_source: source.to_owned(),
            own_events: match self.own_events {
                shape::OwnEvents::Skip => OwnEvents::Skip,
                shape::OwnEvents::Apply => OwnEvents::Apply,
            },
            unmatched: match self.unmatched {
                shape::Unmatched::Skip => Unmatched::Skip,
                shape::Unmatched::Store => Unmatched::Store,
                shape::Unmatched::Dead => Unmatched::Dead,
            },
            gap: match self.on_gap {
                OnGap::Apply => GapRule::Apply,
                OnGap::Wait => GapRule::Wait(self.gap_wait),
            },
            patience: PatienceRules::new(self.max_deliver),
            handlers: self.handler.iter().map(|handler| (handler.event_type.clone(), action(handler))).collect(),
        }
    }
}

impl Http {
    /// The address to listen on; `None` is off. No host in the text means loopback.
    pub fn address(&self) -> Option<SocketAddr> {
        check::address(&self.listen).expect("the address was checked when the configuration was loaded")
    }
}
