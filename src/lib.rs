//! `outboxd`: the transactional outbox for SQLite, delivered by NATS JetStream.
//!
//! The way of an event, and the directory where each step lives:
//!
//! ```text
//!  application ── one transaction ──▶ business row + outbox_events        (store/schema.rs)
//!        │ commit
//!        ▼
//!  store/watch.rs notices the commit ─▶ actors/publisher.rs reads ahead   (store/outbox.rs)
//!        │ lease (store/lease.rs, through actors/writer.rs)
//!        ▼
//!  domain/ordering.rs picks heads and runs ─▶ jetstream/publish.rs ─▶ JetStream
//!        │ PubAck ─▶ domain/settle.rs: verdict
//!        ▼
//!  settle (store/lease.rs, fenced by the lease token)
//!
//!  JetStream ─▶ jetstream/consume.rs ─▶ actors/consumer.rs ─▶ dedupe + apply in one transaction (store/inbox.rs) ─▶ ack
//! ```
//!
//! `ARCHITECTURE.md` has the actor tree, the invariants and the glossary.

pub mod actors;
pub mod admin;
pub mod bench;
pub mod cli;
pub mod config;
pub mod daemon;
pub mod demo;
pub mod domain;
pub mod jetstream;
pub mod limits;
pub mod ports;
pub mod signals;
pub mod store;
pub mod telemetry;
#[doc(hidden)]
pub mod testbed;
