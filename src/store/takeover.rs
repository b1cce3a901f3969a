//! Taking over a file with the classic tables: what it holds ([`inventory`], reads only) and the rebuild ([`run`]).
//!
//! Invariants: every row is kept, in every state · seq follows the order of insertion, and the version within an
//! aggregate · indexes, triggers, views and references are kept and tried before the commit · the caller has set
//! foreign_keys off and legacy_alter_table on before BEGIN, and rolls back on any error.
//! May import: the rest of the store, rusqlite.

use std::path::Path;

use rusqlite::functions::FunctionFlags;
use rusqlite::types::{ToSqlOutput, Value, ValueRef};
use rusqlite::{Connection, Transaction};

use super::dependents::{self, Dependents};
use super::error::{Result, Step, StoreError};
use super::migrate::MigrateOptions;
use super::sql_text::{count, quote};
use super::{ddl, schema, time};

/// Odd rows that a plan names; the rest is counted only.
const EXAMPLES: usize = 100;

/// What stands in a classic file and what becomes of it.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    pub file_bytes: u64,
    pub rows: u64,
    pub pending: u64,
    pub published: u64,
    pub failed: u64,
    /// Aggregates with an old failed row and later pending ones: `--failed hold` would hold them.
    pub held_aggregates: u64,
    /// Aggregates whose rows were not inserted in the order of their versions.
    pub reordered_aggregates: u64,
    /// Rows with a time in another form than the classic one, rewritten as the same instant.
    pub times_rewritten: u64,
    /// Rows with a time that cannot be read.
    pub times_unreadable: u64,
    /// Pending rows that could never be published; they become failed with their reason, holding nobody.
    pub withdrawn: u64,
    /// Rows whose payload is not JSON; kept as they are.
    pub not_json: u64,
    /// Odd rows by name, at most a hundred: event id, what is odd.
    pub odd: Vec<(String, String)>,
    pub dependents: Dependents,
    /// Columns beyond the classic ones, which are kept.
    pub extra_columns: Vec<String>,
    /// What is not carried over, or cannot be tried.
    pub warnings: Vec<String>,
    /// Why it cannot be done; empty where it can.
    pub refusals: Vec<String>,
    /// Estimated time under the write lock, from a copy of a part of the rows in memory.
    pub estimate: Option<std::time::Duration>,
    /// The table is ours already: left by an uninstall after a takeover.
    already: bool,
    /// Rows have no rowid, or one that cannot be a seq.
    renumber: bool,
    /// An own `headers_json` column of the application, in the shape of ours.
    has_headers: bool,
}

/// A pending row of this kind can never become a message.
const UNPUBLISHABLE: &str = "(status = 'pending' AND (typeof(event_id) <> 'text' OR event_id = ''
    OR typeof(aggregate_type) <> 'text' OR aggregate_type = '' OR typeof(aggregate_id) <> 'text' OR aggregate_id = ''
    OR typeof(event_type) <> 'text' OR event_type = '' OR typeof(aggregate_version) <> 'integer'
    OR typeof(schema_version) <> 'integer'))";

/// Registers `outboxd_time(x)`: the time as the classic table writes it, or NULL where it cannot be read.
fn register(conn: &Connection) -> Result<()> {
    let flags = FunctionFlags::SQLITE_UTF8 | FunctionFlags::SQLITE_DETERMINISTIC;
    conn.create_scalar_function("outboxd_time", 1, flags, |ctx| Ok(normal_time(ctx.get_raw(0))))
        .and_then(|()| {
            conn.create_scalar_function("outboxd_odd_times", 2, flags, |ctx| {
                Ok([0, 1].into_iter().map(|i| oddity(ctx.get_raw(i))).max().unwrap_or(0))
            })
        })
        .step("prepare the migration")
}

/// A row with an unreadable time, where one that is only rewritten counts 1: one sum counts both.
const UNREADABLE: i64 = 1 << 32;

fn oddity(value: ValueRef<'_>) -> i64 {
    match (normal_time(value), value) {
        (None, _) => UNREADABLE,
        (Some(text), ValueRef::Text(stored)) if text.as_bytes() == stored => 0,
        (Some(_), _) => 1,
    }
}

/// A classic time keeps its text; every other readable one is rewritten in UTC with milliseconds.
fn normal_time(value: ValueRef<'_>) -> Option<String> {
    const DAY: usize = "YYYY-MM-DD".len();
    let text = match value {
        ValueRef::Text(bytes) => std::str::from_utf8(bytes).ok()?.trim(),
        // no application writes milliseconds before 1973 or seconds after 5138
        ValueRef::Integer(n @ 100_000_000..=99_999_999_999) => return Some(time::text(n * 1_000)),
        ValueRef::Integer(n @ 100_000_000_000..=99_999_999_999_999) => return Some(time::text(n)),
        ValueRef::Integer(_) | ValueRef::Real(_) | ValueRef::Blob(_) | ValueRef::Null => return None,
    };
    if let Some(millis) = time::parse(text) {
        let classic = text.as_bytes()[10] == b' '
            && text.len() >= 19
            && text[DAY..].bytes().all(|c| matches!(c, b'0'..=b'9' | b':' | b'.' | b' '));
        return Some(if classic { text.to_owned() } else { time::text(millis) });
    }
    let day = (text.len() == DAY).then(|| time::parse(&format!("{text} 00:00"))).flatten();
    if let Some(millis) = day {
        return Some(time::text(millis));
    }
    match text.parse::<i64>() {
        Ok(n) => normal_time(ValueRef::Integer(n)),
        Err(_) => None,
    }
}

/// Reads everything that decides how the file is taken over. Inside a transaction, so that it is one moment.
pub(super) fn inventory(conn: &Connection, path: &Path) -> Result<Plan> {
    register(conn)?;
    let mut plan = Plan { file_bytes: std::fs::metadata(path).map_or(0, |m| m.len()), ..Plan::default() };
    shape(conn, &mut plan)?;
    if plan.refusals.is_empty() {
        count_rows(conn, &mut plan)?;
        find_odd(conn, &mut plan)?;
    }
    plan.dependents = dependents::find(conn)?;
    for table in ddl::TABLES.iter().map(|t| t.name) {
        if !schema::columns(conn, table).step("read the schema")?.is_empty() {
            plan.refusals.push(format!("a table named {table} is in the way"));
        }
    }
    if let Err(StoreError::Refused(why)) = schema::keep_processed(conn) {
        plan.refusals.push(why);
    }
    if plan.refusals.is_empty() {
        plan.estimate = Some(estimate(conn, &plan)?);
    }
    Ok(plan)
}

/// Columns and keys of the old table.
fn shape(conn: &Connection, plan: &mut Plan) -> Result<()> {
    const STEP: &str = "read the classic table";
    let (_, sql) = schema::stored_sql(conn, "outbox_events")?.unwrap_or_default();
    let mut statement =
        conn.prepare("SELECT name, pk, hidden FROM pragma_table_xinfo('outbox_events') ORDER BY cid").step(STEP)?;
    let columns: Vec<(String, i64, i64)> =
        statement.query_map([], |r| Ok((r.get(0)?, r.get(1)?, r.get(2)?))).and_then(Iterator::collect).step(STEP)?;
    let ours = ["seq", "stream", "stream_seq", "failing_since", "holds"];
    if columns.iter().any(|(name, pk, _)| name == "seq" && *pk == 1) && count(&sql, "autoincrement") == 1 {
        plan.already = ours.iter().chain(&["headers_json"]).all(|c| columns.iter().any(|(name, ..)| name == c));
    }
    if plan.already {
        return Ok(());
    }
    for (name, pk, hidden) in &columns {
        let known = ddl::CLASSIC_COLUMNS.iter().any(|c| c.eq_ignore_ascii_case(name));
        if *pk > 0 && !name.eq_ignore_ascii_case("event_id") {
            plan.refusals.push(format!("its primary key is {name} and not event_id"));
        } else if *hidden > 1 {
            plan.refusals.push(format!("the column {name} is generated; drop it first and make it again afterwards"));
        } else if ours.iter().any(|c| c.eq_ignore_ascii_case(name)) {
            plan.refusals.push(format!("it has a column {name} of its own; rename it first"));
        } else if name.eq_ignore_ascii_case("headers_json") {
            plan.has_headers = true;
        } else if !known {
            plan.extra_columns.push(name.clone());
        }
    }
    let checks = count(&sql, "check");
    if checks > 3 {
        plan.warnings.push(format!("{} CHECK constraints beyond the classic three are not carried over", checks - 3));
    }
    if count(&sql, "collate") > 0 {
        plan.warnings.push("COLLATE clauses of the old table are not carried over".into());
    }
    let no_rowid = conn.prepare("SELECT rowid FROM outbox_events LIMIT 0").is_err();
    plan.renumber = no_rowid
        || conn
            .query_row("SELECT coalesce(min(rowid), 1) < 1 FROM outbox_events", [], |r| r.get::<_, bool>(0))
            .step(STEP)?;
    Ok(())
}

fn count_rows(conn: &Connection, plan: &mut Plan) -> Result<()> {
    const STEP: &str = "count the classic rows";
    let sql = format!(
        "SELECT count(*), coalesce(sum(status = 'pending'), 0), coalesce(sum(status = 'published'), 0),
            coalesce(sum(status = 'failed'), 0),
            coalesce(sum(event_id IS NULL OR aggregate_type IS NULL OR aggregate_id IS NULL OR aggregate_version IS NULL
                OR event_type IS NULL OR schema_version IS NULL OR payload_json IS NULL), 0),
            coalesce(sum({UNPUBLISHABLE}), 0), coalesce(sum(json_valid(CAST(payload_json AS TEXT)) IS NOT 1), 0),
            coalesce(sum(outboxd_odd_times(created_at, available_at)), 0),
            coalesce(sum(CASE WHEN aggregate_version <= 0 OR schema_version <= 0 THEN 1 ELSE 0 END), 0)
        FROM outbox_events"
    );
    let (mut nulls, mut below) = (0, 0);
    conn.query_row(&sql, [], |r| {
        let n = |i: usize| r.get::<_, i64>(i).map(|n| n.unsigned_abs());
        (plan.rows, plan.pending, plan.published, plan.failed) = (n(0)?, n(1)?, n(2)?, n(3)?);
        (nulls, plan.withdrawn, plan.not_json) = (n(4)?, n(5)?, n(6)?);
        let times: i64 = r.get(7)?;
        plan.times_rewritten = times.rem_euclid(UNREADABLE).unsigned_abs();
        plan.times_unreadable = (times / UNREADABLE).unsigned_abs();
        below = n(8)?;
        Ok(())
    })
    .step(STEP)?;
    let other = plan.rows - plan.pending - plan.published - plan.failed;
    for (rows, what) in [
        (other, "have a status other than pending, published or failed"),
        (nulls, "have NULL where an event needs a value"),
        (below, "have a version below 1"),
    ] {
        if rows > 0 {
            plan.refusals.push(format!("{rows} rows {what}; correct or delete them first"));
        }
    }
    let number = |sql: &str| conn.query_row(sql, [], |r| r.get::<_, i64>(0)).map(|n| n.unsigned_abs()).step(STEP);
    let twice =
        number(
            "SELECT count(*) FROM (SELECT 1 FROM outbox_events
            GROUP BY aggregate_type, aggregate_id, aggregate_version HAVING count(*) > 1)",
        )? + number("SELECT count(*) FROM (SELECT 1 FROM outbox_events GROUP BY event_id HAVING count(*) > 1)")?;
    if twice > 0 {
        plan.refusals.push(format!("{twice} event ids or versions of an aggregate stand there more than once"));
    }
    plan.reordered_aggregates =
        if no_rowid(conn) { 0 } else { number(&format!("SELECT count(*) FROM ({MISORDERED})"))? };
    plan.held_aggregates = number(
        "SELECT count(DISTINCT f.aggregate_type || char(0) || f.aggregate_id) FROM outbox_events f
            WHERE f.status = 'failed' AND EXISTS (SELECT 1 FROM outbox_events p WHERE p.aggregate_type = f.aggregate_type
                AND p.aggregate_id = f.aggregate_id AND p.aggregate_version > f.aggregate_version AND p.status = 'pending')",
    )?;
    Ok(())
}

fn no_rowid(conn: &Connection) -> bool {
    conn.prepare("SELECT rowid FROM outbox_events LIMIT 0").is_err()
}

/// Aggregates in which a later version was inserted before an earlier one. Walks the UNIQUE index, no sort.
const MISORDERED: &str = "SELECT DISTINCT aggregate_type, aggregate_id FROM (
    SELECT aggregate_type, aggregate_id, rowid AS pos,
        lag(rowid) OVER (PARTITION BY aggregate_type, aggregate_id ORDER BY aggregate_version) AS before
    FROM outbox_events) WHERE before > pos";

fn find_odd(conn: &Connection, plan: &mut Plan) -> Result<()> {
    const STEP: &str = "read the odd rows";
    if plan.withdrawn + plan.not_json + plan.times_rewritten + plan.times_unreadable == 0 {
        return Ok(());
    }
    let sql = format!(
        "SELECT CAST(event_id AS TEXT), created_at, available_at, {UNPUBLISHABLE},
            json_valid(CAST(payload_json AS TEXT)) IS NOT 1 FROM outbox_events
        WHERE {UNPUBLISHABLE} OR json_valid(CAST(payload_json AS TEXT)) IS NOT 1
            OR outboxd_odd_times(created_at, available_at) > 0
        LIMIT {EXAMPLES}"
    );
    let mut statement = conn.prepare(&sql).step(STEP)?;
    let mut rows = statement.query([]).step(STEP)?;
    while let Some(row) = rows.next().step(STEP)? {
        let id: Option<String> = row.get(0).step(STEP)?;
        let mut what = Vec::new();
        for (i, column) in [(1, "created_at"), (2, "available_at")] {
            let value: Value = row.get(i).step(STEP)?;
            match normal_time(row.get_ref(i).step(STEP)?) {
                Some(text) if Value::Text(text.clone()) == value => {}
                Some(text) => what.push(format!("{column} {} becomes {text}", shown(&value))),
                None => what.push(format!("{column} {} cannot be read", shown(&value))),
            }
        }
        if row.get::<_, bool>(3).step(STEP)? {
            what.push("it can never be published and becomes failed".into());
        }
        if row.get::<_, bool>(4).step(STEP)? {
            what.push("its payload is not JSON and is kept as it is".into());
        }
        plan.odd.push((id.unwrap_or_default(), what.join(", ")));
    }
    Ok(())
}

fn shown(value: &Value) -> String {
    match value {
        Value::Text(text) => format!("'{text}'"),
        Value::Integer(n) => n.to_string(),
        Value::Real(x) => x.to_string(),
        Value::Null => "NULL".into(),
        Value::Blob(_) => "a blob".into(),
    }
}

/// Times a copy of the first rows into the new table in memory.
fn estimate(conn: &Connection, plan: &Plan) -> Result<std::time::Duration> {
    const SAMPLE: u32 = 20_000;
    const STEP: &str = "estimate the time";
    let memory = Connection::open_in_memory().step(STEP)?;
    memory.execute_batch(ddl::OUTBOX.sql).step(STEP)?;
    for index in &ddl::INDEXES[..2] {
        memory.execute_batch(index.sql).step(STEP)?;
    }
    let began = std::time::Instant::now();
    let mut read = conn
        .prepare(
            "SELECT event_id, aggregate_type, aggregate_id, aggregate_version, event_type, schema_version, payload_json,
                status, attempt_count FROM outbox_events LIMIT ?1",
        )
        .step(STEP)?;
    let mut write = memory
        .prepare(
            "INSERT OR IGNORE INTO outbox_events (event_id, aggregate_type, aggregate_id, aggregate_version, event_type,
                schema_version, payload_json, status, attempt_count) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)",
        )
        .step(STEP)?;
    let mut rows = read.query([SAMPLE]).step(STEP)?;
    let mut copied = 0u32;
    while let Some(row) = rows.next().step(STEP)? {
        for i in 0..9 {
            write.raw_bind_parameter(i + 1, ToSqlOutput::Borrowed(row.get_ref(i).step(STEP)?)).step(STEP)?;
        }
        write.raw_execute().step(STEP)?;
        copied += 1;
    }
    if copied == 0 {
        return Ok(std::time::Duration::ZERO);
    }
    Ok(began.elapsed().mul_f64(plan.rows as f64 / f64::from(copied)))
}

/// Rebuilds the table. Answers what was done, in words.
pub(super) fn run(tx: &Transaction<'_>, plan: &Plan, options: &MigrateOptions) -> Result<Vec<String>> {
    let before = dependents::try_all(tx, &plan.dependents)?;
    let aside = dependents::row_counts(tx, &plan.dependents)?;
    if plan.already {
        tx.execute_batch("DROP INDEX IF EXISTS idx_outbox_delivery").step("drop the classic index")?;
    } else {
        order(tx, plan)?;
        copy(tx, plan, options)?;
        tx.execute_batch("DROP TABLE outbox_events; ALTER TABLE outboxd_new_events RENAME TO outbox_events")
            .step("put the new table in place")?;
        dependents::name_parent_columns(tx, &plan.dependents)?;
    }
    for object in ddl::objects() {
        let there =
            object.name == ddl::OUTBOX.name || (object.name == ddl::PROCESSED.name && schema::keep_processed(tx)?);
        if !there && object.kind != "trigger" {
            tx.execute_batch(object.sql).step("make the tables")?;
        }
    }
    if !plan.already {
        dependents::restore(tx, &plan.dependents)?;
    }
    for object in ddl::TRIGGERS {
        tx.execute_batch(object.sql).step("make the triggers")?;
    }
    schema::write_meta(tx, &options.source, "migrate")?;
    let after = dependents::try_all(tx, &plan.dependents)?;
    dependents::compare(&before, &after)?;
    if aside != dependents::row_counts(tx, &plan.dependents)? {
        return Err(StoreError::Refused(
            "rows of a table that refers to outbox_events would be lost; nothing was changed".into(),
        ));
    }
    let kept = tx.query_row("SELECT count(*) FROM outbox_events", [], |r| r.get::<_, i64>(0)).step("count the rows")?;
    if kept.unsigned_abs() != plan.rows {
        return Err(StoreError::Refused(format!("{kept} of {} rows would be kept; nothing was changed", plan.rows)));
    }
    Ok(summary(plan, options))
}

fn summary(plan: &Plan, options: &MigrateOptions) -> Vec<String> {
    let mut done = vec![format!(
        "the classic outbox was taken over with {} rows ({} pending, {} published, {} failed)",
        plan.rows, plan.pending, plan.published, plan.failed
    )];
    for (rows, what) in [
        (plan.times_rewritten, "rows had a time in another form, rewritten as the same instant"),
        (plan.times_unreadable, "rows had a time that cannot be read"),
        (plan.withdrawn, "pending rows can never be published and are failed now, with the reason"),
        (plan.reordered_aggregates, "aggregates were not inserted in the order of their versions and are now"),
    ] {
        if rows > 0 {
            done.push(format!("{rows} {what}"));
        }
    }
    if options.failed_hold && plan.held_aggregates > 0 {
        done.push(format!("{} aggregates are held by an old failed row", plan.held_aggregates));
    }
    done
}

/// Where a row's rowid is not its place: `temp.outboxd_slots`. Within an aggregate the same places are taken, in the
/// order of the versions, so that no other aggregate moves.
fn order(tx: &Transaction<'_>, plan: &Plan) -> Result<()> {
    const STEP: &str = "find the order of the rows";
    tx.execute_batch("CREATE TEMP TABLE outboxd_slots (event_id PRIMARY KEY, slot INTEGER NOT NULL) WITHOUT ROWID")
        .step(STEP)?;
    if plan.reordered_aggregates == 0 && !plan.renumber {
        return Ok(());
    }
    let place = match (no_rowid(tx), plan.renumber) {
        (true, _) => "row_number() OVER (ORDER BY created_at, event_id)",
        (false, true) => "row_number() OVER (ORDER BY rowid)",
        (false, false) => "rowid",
    };
    let only =
        if plan.renumber { String::new() } else { format!("WHERE (aggregate_type, aggregate_id) IN ({MISORDERED})") };
    tx.execute_batch(&format!(
        "INSERT INTO temp.outboxd_slots
        WITH base AS MATERIALIZED (SELECT event_id, aggregate_type AS t, aggregate_id AS i, aggregate_version AS v,
                {place} AS pos FROM main.outbox_events {only}),
            wanted AS (SELECT event_id, t, i, row_number() OVER (PARTITION BY t, i ORDER BY v, pos) AS k FROM base),
            places AS (SELECT t, i, pos, row_number() OVER (PARTITION BY t, i ORDER BY pos) AS k FROM base)
        SELECT event_id, pos FROM wanted JOIN places USING (t, i, k)"
    ))
    .step(STEP)
}

fn copy(tx: &Transaction<'_>, plan: &Plan, options: &MigrateOptions) -> Result<()> {
    const STEP: &str = "copy the rows";
    let extra: String = plan.extra_columns.iter().map(|c| format!(", {}", quote(c))).collect();
    let (columns, keys) = dependents::extra_definitions(tx, &plan.extra_columns)?;
    let tail = "    UNIQUE (aggregate_type, aggregate_id, aggregate_version)";
    let table = ddl::OUTBOX.sql.replacen("CREATE TABLE outbox_events", "CREATE TABLE outboxd_new_events", 1).replacen(
        tail,
        &format!("{columns}{tail}{keys}"),
        1,
    );
    tx.execute_batch(&table).step("make the new table")?;
    let headers = if plan.has_headers {
        "CASE WHEN json_valid(headers_json) THEN CASE WHEN json_type(headers_json) = 'object' THEN headers_json END END"
    } else {
        "NULL"
    };
    let place = if no_rowid(tx) { "s.slot" } else { "coalesce(s.slot, o.rowid)" };
    let sql = format!(
        "INSERT INTO outboxd_new_events (event_id, aggregate_type, aggregate_id, aggregate_version, event_type,
            schema_version, payload_json, headers_json, status, attempt_count, available_at, created_at, published_at,
            last_error, seq, holds{extra})
        SELECT o.event_id, aggregate_type, aggregate_id, aggregate_version, event_type, schema_version, payload_json,
            {headers}, CASE WHEN bad THEN 'failed' ELSE status END,
            CASE WHEN typeof(attempt_count) = 'integer' AND attempt_count >= 0 THEN attempt_count ELSE 0 END,
            coalesce(outboxd_time(available_at), outboxd_time(created_at), ?1),
            coalesce(outboxd_time(created_at), outboxd_time(available_at), ?1),
            coalesce(outboxd_time(published_at), published_at),
            CASE WHEN bad THEN 'it can never be published: an id or a type is empty or no text, or a version is no integer'
                WHEN status = 'failed' THEN coalesce(nullif(substr(last_error, 1, 500), ''), 'failed before outboxd came')
                ELSE substr(last_error, 1, 500) END,
            {place}, CASE WHEN status = 'failed' THEN ?2 WHEN bad THEN 0 ELSE 1 END{extra}
        FROM (SELECT *, {UNPUBLISHABLE} AS bad{rowid} FROM main.outbox_events) AS o
        LEFT JOIN temp.outboxd_slots AS s ON s.event_id = o.event_id ORDER BY {sort}",
        rowid = if no_rowid(tx) { "" } else { ", rowid AS rowid" },
        sort = if plan.renumber { "s.slot" } else { "o.rowid" },
    );
    let now: String = tx.query_row("SELECT strftime('%Y-%m-%d %H:%M:%f', 'now')", [], |r| r.get(0)).step(STEP)?;
    tx.execute(&sql, (now, options.failed_hold)).step(STEP)?;
    tx.execute_batch("DROP TABLE temp.outboxd_slots").step(STEP)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_classic_time_keeps_its_text_and_others_keep_their_instant() {
        let text = |t: &'static str| normal_time(ValueRef::Text(t.as_bytes()));
        assert_eq!(text("2026-10-07 01:20:00").as_deref(), Some("2026-10-07 01:20:00"));
        assert_eq!(text("2026-10-07 01:20:00.5").as_deref(), Some("2026-10-07 01:20:00.5"));
        assert_eq!(text("2026-10-07T01:20:00Z").as_deref(), Some("2026-10-07 01:20:00.000"));
        assert_eq!(text("2026-10-07T10:20:00+09:00").as_deref(), Some("2026-10-07 01:20:00.000"));
        assert_eq!(text("2026-10-07 01:20").as_deref(), Some("2026-10-07 01:20:00.000"));
        assert_eq!(text("2026-10-07").as_deref(), Some("2026-10-07 00:00:00.000"));
        assert_eq!(text("1791336000").as_deref(), Some("2026-10-07 01:20:00.000"));
        assert_eq!(normal_time(ValueRef::Integer(1_791_336_000_250)).as_deref(), Some("2026-10-07 01:20:00.250"));
        assert_eq!(text("tomorrow"), None);
        assert_eq!(text(""), None);
        assert_eq!(normal_time(ValueRef::Null), None);
    }
}
