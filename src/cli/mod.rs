//! The command line: one file a verb; tables and JSON are rendered in one place.
