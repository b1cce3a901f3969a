//! Pure decisions: no clock, no randomness, no async, no input or output.
//!
//! Time and chance are arguments (`now`, `draw`). May import: std, bytes, thiserror, serde_json for reading envelopes.

pub mod backoff;
pub mod event;
pub mod settle;
