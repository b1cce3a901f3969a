//! NATS JetStream: the only directory that imports `async_nats`. Implements [`crate::ports::Broker`].
//!
//! May import: domain, limits, ports, config shapes of `nats` and `stream`, telemetry, async_nats, tokio.
