//! The DDL of the shared file. Pure text.
//!
//! Invariants: every statement parses and runs on SQLite 3.35, the oldest library that applications bring (one newer
//! word in here and the whole file is a "malformed database schema" for them): no STRICT, no expression in RAISE, one
//! argument to json_valid, no 'subsec' · no index on a date expression (library versions round differently) · texts are
//! written as SQLite stores them, so that `db check` can compare.

/// Version of the schema that this program makes, kept in `outboxd_meta`.
pub const VERSION: i64 = 1;

/// One object of the schema.
#[derive(Clone, Copy, Debug)]
pub struct Object {
    /// `table`, `index`, `trigger` or `view`.
    pub kind: &'static str,
    pub name: &'static str,
    /// Without a closing semicolon.
    pub sql: &'static str,
}

const fn table(name: &'static str, sql: &'static str) -> Object {
    Object { kind: "table", name, sql }
}
const fn index(name: &'static str, sql: &'static str) -> Object {
    Object { kind: "index", name, sql }
}
const fn trigger(name: &'static str, sql: &'static str) -> Object {
    Object { kind: "trigger", name, sql }
}

/// The columns of `outbox_events` that a classic table has too.
pub const CLASSIC_COLUMNS: [&str; 13] = [
    "event_id",
    "aggregate_type",
    "aggregate_id",
    "aggregate_version",
    "event_type",
    "schema_version",
    "payload_json",
    "status",
    "attempt_count",
    "available_at",
    "created_at",
    "published_at",
    "last_error",
];

/// The outbox: seven columns are the application's, the rest has defaults. The payload stands last, so that reading the
/// other columns of a row does not walk the overflow pages of a large one.
pub const OUTBOX: Object = table(
    "outbox_events",
    "CREATE TABLE outbox_events (
    event_id          TEXT NOT NULL UNIQUE,
    aggregate_type    TEXT NOT NULL,
    aggregate_id      TEXT NOT NULL,
    aggregate_version INTEGER NOT NULL CHECK (aggregate_version > 0),
    event_type        TEXT NOT NULL,
    schema_version    INTEGER NOT NULL CHECK (schema_version > 0),
    status            TEXT NOT NULL DEFAULT 'pending' CHECK (status IN ('pending', 'published', 'failed')),
    attempt_count     INTEGER NOT NULL DEFAULT 0,
    available_at      TEXT NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now')),
    created_at        TEXT NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now')),
    published_at      TEXT,
    last_error        TEXT,
    seq               INTEGER PRIMARY KEY AUTOINCREMENT CHECK (seq > 0),
    stream            TEXT,
    stream_seq        INTEGER,
    failing_since     INTEGER,
    holds             INTEGER NOT NULL DEFAULT 1,
    headers_json      TEXT,
    payload_json      TEXT NOT NULL,
    UNIQUE (aggregate_type, aggregate_id, aggregate_version)
)",
);

/// What a consumer has processed; the classic table has the same two columns and stays as it is.
pub const PROCESSED: Object = table(
    "processed_events",
    "CREATE TABLE processed_events (
    event_id     TEXT PRIMARY KEY NOT NULL,
    processed_at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP
)",
);

/// The example domain; only made when asked for.
pub const ASSETS: Object = table(
    "assets",
    "CREATE TABLE assets (
    asset_id   TEXT PRIMARY KEY NOT NULL,
    name       TEXT NOT NULL,
    material   TEXT NOT NULL,
    version    INTEGER NOT NULL CHECK (version > 0),
    updated_at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP
)",
);

/// Tables beside the outbox and `processed_events`.
pub static TABLES: &[Object] = &[
    table("outboxd_meta", "CREATE TABLE outboxd_meta (key TEXT PRIMARY KEY NOT NULL, value) WITHOUT ROWID"),
    table(
        "outboxd_leases",
        "CREATE TABLE outboxd_leases (
    token          INTEGER PRIMARY KEY AUTOINCREMENT,
    epoch          INTEGER NOT NULL,
    publisher      INTEGER NOT NULL,
    leased_at      INTEGER NOT NULL,
    expires_at     INTEGER NOT NULL,
    stream_created TEXT,
    floor          INTEGER,
    seqs           TEXT NOT NULL
)",
    ),
    table(
        "outboxd_suspects",
        "CREATE TABLE outboxd_suspects (
    seq            INTEGER PRIMARY KEY,
    crashes        INTEGER NOT NULL DEFAULT 0,
    floor          INTEGER NOT NULL DEFAULT 0,
    stream_created TEXT NOT NULL DEFAULT ''
)",
    ),
    table(
        "outboxd_touched",
        "CREATE TABLE outboxd_touched (
    id             INTEGER PRIMARY KEY AUTOINCREMENT,
    aggregate_type TEXT NOT NULL,
    aggregate_id   TEXT NOT NULL
)",
    ),
    table(
        "outboxd_audit",
        "CREATE TABLE outboxd_audit (
    id     INTEGER PRIMARY KEY AUTOINCREMENT,
    at     TEXT NOT NULL,
    actor  TEXT NOT NULL,
    verb   TEXT NOT NULL,
    target TEXT NOT NULL,
    detail TEXT
)",
    ),
    table(
        "outboxd_versions",
        "CREATE TABLE outboxd_versions (
    aggregate_type TEXT NOT NULL,
    aggregate_id   TEXT NOT NULL,
    version        INTEGER NOT NULL,
    PRIMARY KEY (aggregate_type, aggregate_id)
) WITHOUT ROWID",
    ),
    table(
        "inbox_events",
        "CREATE TABLE inbox_events (
    id                INTEGER PRIMARY KEY AUTOINCREMENT,
    source            TEXT,
    event_id          TEXT,
    event_type        TEXT,
    aggregate_type    TEXT,
    aggregate_id      TEXT,
    aggregate_version INTEGER,
    subject           TEXT NOT NULL,
    headers_json      TEXT,
    payload           BLOB NOT NULL,
    stream            TEXT,
    stream_seq        INTEGER,
    state             TEXT NOT NULL CHECK (state IN ('stored', 'done', 'dead')),
    reason            TEXT,
    received_at       TEXT NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now')),
    done_at           TEXT,
    durable           TEXT NOT NULL DEFAULT ''
)",
    ),
    table(
        "outboxd_inbox_position",
        "CREATE TABLE outboxd_inbox_position (
    durable        TEXT PRIMARY KEY NOT NULL,
    stream         TEXT NOT NULL,
    stream_created TEXT NOT NULL,
    settled_seq    INTEGER NOT NULL,
    processed      INTEGER NOT NULL DEFAULT 0,
    duplicates     INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID",
    ),
    table(
        "outboxd_inbox_failures",
        "CREATE TABLE outboxd_inbox_failures (
    durable    TEXT NOT NULL,
    stream_seq INTEGER NOT NULL,
    failures   INTEGER NOT NULL,
    last_error TEXT,
    retry_at   INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (durable, stream_seq)
) WITHOUT ROWID",
    ),
    table(
        "outboxd_inbox_versions",
        "CREATE TABLE outboxd_inbox_versions (
    durable        TEXT NOT NULL,
    source         TEXT NOT NULL,
    aggregate_type TEXT NOT NULL,
    aggregate_id   TEXT NOT NULL,
    version        INTEGER NOT NULL,
    PRIMARY KEY (durable, source, aggregate_type, aggregate_id)
) WITHOUT ROWID",
    ),
];

/// Indexes. The first has the classic program's name, whose `CREATE INDEX IF NOT EXISTS` at start is then a no-op.
pub static INDEXES: &[Object] = &[
    index("idx_outbox_delivery", "CREATE INDEX idx_outbox_delivery ON outbox_events (seq) WHERE status = 'pending'"),
    index(
        "outboxd_failed",
        "CREATE INDEX outboxd_failed ON outbox_events (aggregate_type, aggregate_id, seq) WHERE status = 'failed'",
    ),
    index("outboxd_inbox_state", "CREATE INDEX outboxd_inbox_state ON inbox_events (state, id)"),
];

/// What cannot be published is refused at the INSERT.
///
/// A BEFORE INSERT trigger, because a CHECK lets 'many' and 1.5 pass as a version, OR IGNORE drops a row in silence and
/// OR REPLACE deletes one: RAISE(ABORT) is overruled by none of them. For a row with the seven columns the condition
/// alone is evaluated ('now' is the same instant within one statement, so an equal time is the default's); the body
/// looks closer at the rest and names what is wrong. `NEW.seq` is -1 where the statement gives none.
pub const GUARD_INSERT: Object = trigger(
    "outboxd_guard_insert",
    "CREATE TRIGGER outboxd_guard_insert BEFORE INSERT ON outbox_events
WHEN (NEW.seq = -1 AND NEW.status = 'pending'
    AND typeof(NEW.event_id) = 'text' AND NEW.event_id <> ''
    AND typeof(NEW.aggregate_type) = 'text' AND NEW.aggregate_type <> ''
    AND typeof(NEW.aggregate_id) = 'text' AND NEW.aggregate_id <> ''
    AND typeof(NEW.event_type) = 'text' AND NEW.event_type <> ''
    AND typeof(NEW.aggregate_version) = 'integer' AND NEW.aggregate_version > 0
    AND typeof(NEW.schema_version) = 'integer' AND NEW.schema_version > 0
    AND NEW.attempt_count IS 0 AND NEW.stream_seq IS NULL
    AND json_valid(CAST(NEW.payload_json AS TEXT))
    AND NEW.headers_json IS NULL
    AND NEW.created_at = strftime('%Y-%m-%d %H:%M:%f', 'now')
    AND NEW.available_at = NEW.created_at
) IS NOT TRUE
    OR EXISTS (SELECT 1 FROM outbox_events WHERE event_id = NEW.event_id)
    OR EXISTS (SELECT 1 FROM outbox_events WHERE aggregate_type = NEW.aggregate_type
        AND aggregate_id = NEW.aggregate_id AND aggregate_version = NEW.aggregate_version)
BEGIN
    SELECT RAISE(ABORT, 'outboxd: seq is given by the database, leave it out') WHERE NEW.seq <> -1;
    SELECT RAISE(ABORT, 'outboxd: a new event has status pending') WHERE NEW.status IS NOT 'pending';
    SELECT RAISE(ABORT, 'outboxd: event_id must be a text that is not empty')
    WHERE typeof(NEW.event_id) <> 'text' OR NEW.event_id = '';
    SELECT RAISE(ABORT, 'outboxd: aggregate_type must be a text that is not empty')
    WHERE typeof(NEW.aggregate_type) <> 'text' OR NEW.aggregate_type = '';
    SELECT RAISE(ABORT, 'outboxd: aggregate_id must be a text that is not empty')
    WHERE typeof(NEW.aggregate_id) <> 'text' OR NEW.aggregate_id = '';
    SELECT RAISE(ABORT, 'outboxd: event_type must be a text that is not empty')
    WHERE typeof(NEW.event_type) <> 'text' OR NEW.event_type = '';
    SELECT RAISE(ABORT, 'outboxd: aggregate_version must be an integer above 0')
    WHERE typeof(NEW.aggregate_version) <> 'integer' OR NEW.aggregate_version <= 0;
    SELECT RAISE(ABORT, 'outboxd: schema_version must be an integer above 0')
    WHERE typeof(NEW.schema_version) <> 'integer' OR NEW.schema_version <= 0;
    SELECT RAISE(ABORT, 'outboxd: attempt_count and stream_seq are the relay''s, leave them out')
    WHERE NEW.attempt_count IS NOT 0 OR NEW.stream_seq IS NOT NULL;
    SELECT RAISE(ABORT, 'outboxd: payload_json must be JSON')
    WHERE json_valid(CAST(NEW.payload_json AS TEXT)) IS NOT 1;
    SELECT RAISE(ABORT, 'outboxd: headers_json must be a JSON object of at most 16 KiB')
    WHERE NEW.headers_json IS NOT NULL AND CASE WHEN typeof(NEW.headers_json) <> 'text' THEN 1
        WHEN json_valid(NEW.headers_json) IS NOT 1 THEN 1
        ELSE json_type(NEW.headers_json) <> 'object' OR length(CAST(NEW.headers_json AS BLOB)) > 16384 END;
    SELECT RAISE(ABORT, 'outboxd: every value in headers_json must be a string without control characters')
    FROM json_each(NEW.headers_json) AS h WHERE NEW.headers_json IS NOT NULL
        AND (h.type <> 'text' OR h.value GLOB '*[' || char(1) || '-' || char(31) || char(127) || ']*'
            OR instr(NEW.headers_json, '\\u0000') > 0);
    SELECT RAISE(ABORT, 'outboxd: a name in headers_json must be a token of HTTP, and none of Nats-*, ce-*, Outboxd-*')
    FROM json_each(NEW.headers_json) AS h WHERE NEW.headers_json IS NOT NULL
        AND (h.key = '' OR h.key GLOB '*[^-!#$%&''*+.^_`|~0-9A-Za-z]*' OR lower(h.key) GLOB 'nats-*'
            OR lower(h.key) GLOB 'ce-*' OR lower(h.key) GLOB 'outboxd-*');
    SELECT RAISE(ABORT, 'outboxd: created_at must be YYYY-MM-DD HH:MM[:SS[.f]] in UTC, or with Z or +hh:mm')
    WHERE (NEW.created_at GLOB '[0-9][0-9][0-9][0-9]-[01][0-9]-[0-3][0-9][ T][012][0-9]:[0-5][0-9]*'
        AND substr(NEW.created_at, 12) NOT GLOB '*[^0-9:.Z+-]*'
        AND substr(NEW.created_at, 12, 2) < '24' AND julianday(NEW.created_at) IS NOT NULL
        AND strftime('%Y-%m-%d', substr(NEW.created_at, 1, 10), '+0 days') = substr(NEW.created_at, 1, 10)
    ) IS NOT TRUE;
    SELECT RAISE(ABORT, 'outboxd: available_at must be YYYY-MM-DD HH:MM[:SS[.f]] in UTC, or with Z or +hh:mm')
    WHERE (NEW.available_at GLOB '[0-9][0-9][0-9][0-9]-[01][0-9]-[0-3][0-9][ T][012][0-9]:[0-5][0-9]*'
        AND substr(NEW.available_at, 12) NOT GLOB '*[^0-9:.Z+-]*'
        AND substr(NEW.available_at, 12, 2) < '24' AND julianday(NEW.available_at) IS NOT NULL
        AND strftime('%Y-%m-%d', substr(NEW.available_at, 1, 10), '+0 days') = substr(NEW.available_at, 1, 10)
    ) IS NOT TRUE;
    SELECT RAISE(IGNORE) FROM outbox_events WHERE event_id = NEW.event_id
        AND aggregate_type = NEW.aggregate_type AND aggregate_id = NEW.aggregate_id
        AND aggregate_version = NEW.aggregate_version AND event_type = NEW.event_type
        AND schema_version = NEW.schema_version
        AND CAST(payload_json AS BLOB) = CAST(NEW.payload_json AS BLOB);
    SELECT RAISE(ABORT, 'outboxd: a different event has this event_id')
    FROM outbox_events WHERE event_id = NEW.event_id;
    SELECT RAISE(ABORT, 'outboxd: a different event has this version of the aggregate')
    FROM outbox_events WHERE aggregate_type = NEW.aggregate_type
        AND aggregate_id = NEW.aggregate_id AND aggregate_version = NEW.aggregate_version;
END",
);

/// What makes an event that event does not change, and what is changed by hand stays publishable.
pub const GUARD_UPDATE: Object = trigger(
    "outboxd_guard_update",
    "CREATE TRIGGER outboxd_guard_update BEFORE UPDATE OF seq, event_id, aggregate_type, aggregate_id,
    aggregate_version, event_type, schema_version, payload_json, headers_json ON outbox_events
BEGIN
    SELECT RAISE(ABORT, 'outboxd: seq, event_id and the aggregate of an event cannot be changed')
    WHERE NEW.seq IS NOT OLD.seq OR NEW.event_id IS NOT OLD.event_id
        OR NEW.aggregate_type IS NOT OLD.aggregate_type OR NEW.aggregate_id IS NOT OLD.aggregate_id
        OR NEW.aggregate_version IS NOT OLD.aggregate_version;
    SELECT RAISE(ABORT, 'outboxd: event_type must be a text that is not empty, schema_version an integer above 0')
    WHERE typeof(NEW.event_type) <> 'text' OR NEW.event_type = ''
        OR typeof(NEW.schema_version) <> 'integer' OR NEW.schema_version <= 0;
    SELECT RAISE(ABORT, 'outboxd: payload_json must be JSON')
    WHERE NEW.payload_json IS NOT OLD.payload_json AND json_valid(CAST(NEW.payload_json AS TEXT)) IS NOT 1;
    SELECT RAISE(ABORT, 'outboxd: headers_json must be a JSON object')
    WHERE NEW.headers_json IS NOT OLD.headers_json AND NEW.headers_json IS NOT NULL
        AND CASE WHEN json_valid(NEW.headers_json) THEN json_type(NEW.headers_json) <> 'object' ELSE 1 END;
END",
);

/// Whoever changes a row behind the relay's read position leaves its aggregate here, in the same transaction.
pub const TOUCH_UPDATE: Object = trigger(
    "outboxd_touch_update",
    "CREATE TRIGGER outboxd_touch_update AFTER UPDATE OF status, available_at ON outbox_events
WHEN OLD.status = 'failed' OR (NEW.status = 'pending'
    AND (OLD.status <> 'pending' OR OLD.available_at IS NOT NEW.available_at))
BEGIN
    INSERT INTO outboxd_touched (aggregate_type, aggregate_id) VALUES (NEW.aggregate_type, NEW.aggregate_id);
END",
);

/// See [`TOUCH_UPDATE`].
pub const TOUCH_DELETE: Object = trigger(
    "outboxd_touch_delete",
    "CREATE TRIGGER outboxd_touch_delete AFTER DELETE ON outbox_events
WHEN OLD.status <> 'published'
BEGIN
    INSERT INTO outboxd_touched (aggregate_type, aggregate_id) VALUES (OLD.aggregate_type, OLD.aggregate_id);
END",
);

/// The outbox table as Debezium's outbox event router names it (`db migrate --compat debezium`).
pub const DEBEZIUM_VIEW: Object = Object {
    kind: "view",
    name: "outbox",
    sql: "CREATE VIEW outbox AS
SELECT event_id AS id, aggregate_type AS aggregatetype, aggregate_id AS aggregateid, event_type AS type,
    payload_json AS payload
FROM outbox_events",
};

/// The version comes from a counter, which never goes back when old rows are pruned. The same id again keeps its
/// version, so that the guard can tell a repeat from another event.
pub const DEBEZIUM_INSERT: Object = trigger(
    "outboxd_debezium_insert",
    "CREATE TRIGGER outboxd_debezium_insert INSTEAD OF INSERT ON outbox
BEGIN
    SELECT RAISE(ABORT, 'outboxd: id, aggregatetype and aggregateid must be given')
    WHERE NEW.id IS NULL OR NEW.aggregatetype IS NULL OR NEW.aggregateid IS NULL;
    INSERT INTO outboxd_versions (aggregate_type, aggregate_id, version)
    SELECT NEW.aggregatetype, NEW.aggregateid, 1 + coalesce((SELECT max(aggregate_version) FROM outbox_events
        WHERE aggregate_type = NEW.aggregatetype AND aggregate_id = NEW.aggregateid), 0)
    WHERE NOT EXISTS (SELECT 1 FROM outbox_events WHERE event_id = NEW.id)
    ON CONFLICT (aggregate_type, aggregate_id) DO UPDATE SET version = max(version, excluded.version - 1) + 1;
    INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, aggregate_version, event_type,
        schema_version, payload_json)
    VALUES (NEW.id, NEW.aggregatetype, NEW.aggregateid, coalesce(
        (SELECT aggregate_version FROM outbox_events WHERE event_id = NEW.id),
        (SELECT version FROM outboxd_versions WHERE aggregate_type = NEW.aggregatetype
            AND aggregate_id = NEW.aggregateid)), NEW.type, 1, NEW.payload);
END",
);

/// Applications of that layout delete their row at once; the event stays until it is published and pruned.
pub const DEBEZIUM_DELETE: Object = trigger(
    "outboxd_debezium_delete",
    "CREATE TRIGGER outboxd_debezium_delete INSTEAD OF DELETE ON outbox
BEGIN
    SELECT 1;
END",
);

/// Triggers of the outbox.
pub static TRIGGERS: &[Object] = &[GUARD_INSERT, GUARD_UPDATE, TOUCH_UPDATE, TOUCH_DELETE];

/// Everything that `db init` makes, in the order in which it can be made; `assets` apart.
pub fn objects() -> impl Iterator<Item = &'static Object> {
    static FIRST: [Object; 2] = [OUTBOX, PROCESSED];
    FIRST.iter().chain(TABLES).chain(INDEXES).chain(TRIGGERS)
}
