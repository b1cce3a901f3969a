//! Configuration: shapes, strict parse, problems, reload classification.
//!
//! May import: domain, serde, toml, humantime.

mod shape;

pub use shape::*;
