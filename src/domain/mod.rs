//! Pure decisions: no clock, no randomness, no async, no input or output.
//!
//! Time and chance are arguments (`now`, `draw`). May import: std, bytes, thiserror, limits, serde and
//! serde_json for reading JSON.

pub mod apply;
pub mod backoff;
pub mod event;
pub mod headers;
pub mod inbox;
pub mod ordering;
pub mod rfc3339;
pub mod rules;
pub mod settle;
pub mod subject;
pub mod wire;
