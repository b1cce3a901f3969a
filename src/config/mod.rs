//! Configuration: shapes, strict parse, problems, reload classification.
//!
//! One table of keys ([`keys`]) is the source of everything: parse, environment, schema, the shipped file. A [`Config`]
//! that came out of [`load`] is valid: every value and every relation was checked, once.
//!
//! May import: domain, serde_json, toml, humantime, strsim.

mod check;
mod convert;
mod document;
pub mod keys;
mod load;
mod problem;
mod read;
mod relations;
mod reload;
mod shape;
pub mod value;

pub use document::{reference, schema, shipped_file};
pub use load::{LoadOptions, Loaded, Shown, load, parse, salvage};
pub use problem::{Place, Problem, Problems};
pub use reload::{Change, Plan, diff, plan};
pub use shape::*;
