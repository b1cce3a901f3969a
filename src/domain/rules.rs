//! The rules of the relay as values: what the configuration says, checked, and free of its shapes.

use std::time::Duration;

use super::settle::RetryRules;
use super::subject::Template;
use super::wire::Format;

/// Everything that a publisher needs to know to decide.
#[derive(Clone, Debug)]
pub struct RelayRules {
    /// Identity in `ce-source` and `Nats-Msg-Id`.
    pub source: String,
    pub template: Template,
    pub format: Format,
    /// Order per aggregate is kept (`relay.ordering`).
    pub ordered: bool,
    /// A failed event holds its successors (`relay.on_failed`).
    pub hold: bool,
    /// Most rows of one lease.
    pub batch: usize,
    /// Most bytes of one lease.
    pub batch_bytes: usize,
    pub lease: Duration,
    pub ack_wait: Duration,
    pub retry: RetryRules,
}
