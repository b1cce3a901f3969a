//! What the daemon tells about itself: the board of live facts, metrics, logging.
//!
//! May import: domain, limits.

pub mod board;
