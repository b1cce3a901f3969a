//! From the shapes of the configuration to values of the domain.
//!
//! A configuration that was loaded has been checked: these conversions cannot fail for it. May import: domain, std.

use std::net::SocketAddr;

use super::check;
use super::shape::{Backoff, Http, Relay};
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

impl Http {
    /// The address to listen on; `None` is off. No host in the text means loopback.
    pub fn address(&self) -> Option<SocketAddr> {
        check::address(&self.listen).expect("the address was checked when the configuration was loaded")
    }
}
