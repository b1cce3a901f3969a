//! The actors: the only directory that imports `ractor`.
//!
//! May import: domain, store, ports, limits, telemetry, ractor, tokio. Never: async_nats, jetstream, configuration shapes.

pub mod consumer;
pub mod janitor;
pub mod publisher;
pub mod relay;
pub mod root;
pub mod writer;
