//! SQLite: functions over `&Transaction` or `&Connection`, the SQL beside its function. Only `pool.rs` knows deadpool.
//!
//! May import: domain, limits, rusqlite, serde_json, std; `connection.rs` also rustix (the kind of the file system),
//! `pool.rs` also deadpool-sqlite and tokio (a blocking task). Only this directory opens the database, its -wal or
//! its -shm: opening and closing one of them by anything but SQLite drops SQLite's POSIX locks in the whole process.

pub mod assets;
pub mod audit;
pub mod connection;
pub mod ddl;
pub mod dependents;
pub mod direct;
pub mod error;
pub mod inbox;
pub mod inbox_handlers;
pub mod inbox_letters;
pub mod inbox_position;
pub mod inbox_sql;
pub mod lease;
pub mod migrate;
pub mod operate;
pub mod outbox;
pub mod owner;
pub mod pool;
pub mod report;
pub mod retention;
pub mod schema;
mod sql_text;
pub mod takeover;
pub mod time;
pub mod upkeep;
pub mod watch;
