//! What an operator talks to while the daemon runs: the unix socket of the command line and HTTP.
//!
//! May import: config, domain, store and actors by their public calls, telemetry, limits, ports.

pub mod client;
pub mod protocol;
pub mod socket;
