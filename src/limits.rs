//! Named ceilings. Every queue and every loop of the daemon has one, and the relations between them are asserted.

use std::time::Duration;

/// Events in flight over all publishers: the knee of JetStream's throughput (docs/adr/0005).
pub const WINDOW: usize = 1_024;

/// Messages of one atomic batch that a JetStream server takes at most.
pub const ATOMIC_BATCH: usize = 1_000;

/// Requests that may wait at the writer from open edges (command line, HTTP); closed loops need no gate.
pub const WRITER_GATE: usize = 256;

/// Time one write transaction of the daemon should hold the lock at most; more work waits for the next one.
pub const WRITER_HOLD: Duration = Duration::from_millis(5);

/// Sequence numbers remembered for one blocked aggregate; beyond it the aggregate is read again when it is free.
pub const LANE_MEMORY: usize = 4_096;

/// Blocked aggregates remembered by one publisher; beyond it reading ahead stops until some are free.
pub const LANES: usize = 262_144;

/// Rows scheduled for later that one publisher remembers.
pub const SCHEDULED: usize = 262_144;

/// Longest subject in bytes. The server drops the connection above about 4,040.
pub const SUBJECT: usize = 1_024;

/// Largest `headers_json` in bytes.
pub const HEADERS_JSON: usize = 16 * 1_024;

/// How often an unusable broker is probed.
pub const PROBE: Duration = Duration::from_secs(1);

/// Longest wait of the waking thread without a look at the database: the safety net under inotify.
pub const SAFETY_POLL: Duration = Duration::from_millis(500);

/// Longest path of a unix socket (`sun_path` of Linux, less its final zero byte).
pub const SOCKET_PATH: usize = 107;

/// Restarts of a crashed actor within [`RESTART_WINDOW`] before the failure goes one level up.
pub const RESTARTS: usize = 5;

/// See [`RESTARTS`].
pub const RESTART_WINDOW: Duration = Duration::from_secs(60);

const _: () = assert!(WINDOW >= 1 && ATOMIC_BATCH <= 1_000);
const _: () = assert!(SUBJECT < 4_000);
