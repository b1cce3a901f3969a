//! What the daemon tells about itself: the board of live facts, signs of life, metrics, logging, the service manager.
//!
//! May import: domain, limits.

pub mod board;
mod journal;
pub mod logging;
pub mod metrics;
pub mod notify;
pub mod progress;
