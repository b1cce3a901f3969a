//! Tests that run the real executable against a real nats-server and real SQLite files, and judge it from outside: by
//! its tables, its wire, its command line, its exit codes.

#[path = "../support/mod.rs"]
mod support;

mod chaos;
mod consuming;
mod demo;
mod kill;
mod lifecycle;
mod operator;
mod outage;
mod poison;
mod quiet;
mod readme;
mod reload;
mod sharing;
