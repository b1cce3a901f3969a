//! SQLite: functions over `&Transaction` or `&Connection`, the SQL beside its function. Only `pool.rs` knows deadpool.
//!
//! May import: domain, limits, rusqlite, serde_json, std. Only this directory opens the database, its -wal or its -shm.
