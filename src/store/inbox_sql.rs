//! Statements of the operator as a handler: checked against the real schema at start, run in the dedupe transaction.
//!
//! Rules: only the parameters of [`PARAMETERS`]; reading, and INSERT, UPDATE, DELETE on the application's tables; an
//! INSERT into `outbox_events` is allowed (an answer in the same transaction); no transaction control, schema change,
//! ATTACH or PRAGMA, and nothing that writes the other tables of outboxd. An event whose version is not above the one
//! that was applied of its aggregate is stale.
//!
//! May import: domain, the rest of the store, rusqlite.

use rusqlite::hooks::{AuthAction, AuthContext, Authorization};
use rusqlite::types::{Null, ToSql};
use rusqlite::{Connection, OptionalExtension, Transaction};

use super::error::StoreError;
use super::inbox_handlers::{Effect, Handler, Place, Trouble, version_effect};
use crate::domain::apply::{Action, InboxRules};
use crate::domain::inbox::{Body, Event};

/// The parameters that a statement may use.
pub const PARAMETERS: [&str; 8] = [
    ":event_id",
    ":event_type",
    ":aggregate_type",
    ":aggregate_id",
    ":aggregate_version",
    ":source",
    ":event",
    ":data",
];

/// What is wrong with the statements of a handler.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line} of its sql: {what}")]
pub struct SqlProblem {
    /// Line within the text of the statements, from 1.
    pub line: usize,
    pub what: String,
}

/// One statement and the line on which it starts.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Statement {
    sql: String,
    line: usize,
}

/// Checks statements against the schema of `conn`, which must not be used by anybody else meanwhile. Nothing is run.
/// All problems at once; empty: they can be used.
pub fn check(conn: &Connection, sql: &str) -> Vec<SqlProblem> {
    let statements = split(sql);
    if statements.is_empty() {
        return vec![SqlProblem { line: 1, what: "there is no statement".into() }];
    }
    statements.iter().filter_map(|statement| check_one(conn, statement).err()).collect()
}

/// What is wrong with a handler of the configuration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("[[inbox.handler]] number {number} (event_type {event_type:?}): {problem}")]
pub struct HandlerProblem {
    /// Its place in the configuration, from 1.
    pub number: usize,
    pub event_type: String,
    pub problem: SqlProblem,
}

/// Checks the statements of every handler, as [`check`] does.
pub fn check_rules(conn: &Connection, rules: &InboxRules) -> Vec<HandlerProblem> {
    let mut problems = Vec::new();
    for (number, (event_type, action)) in (1..).zip(&rules.handlers) {
        if let Action::Sql(sql) = action {
            let found = check(conn, sql).into_iter();
            problems.extend(found.map(|problem| HandlerProblem { number, event_type: event_type.clone(), problem }));
        }
    }
    problems
}

fn check_one(conn: &Connection, statement: &Statement) -> Result<(), SqlProblem> {
    let problem = |line: usize, what: String| SqlProblem { line, what };
    let refused = std::sync::Arc::new(std::sync::Mutex::new(None::<String>));
    let note = std::sync::Arc::clone(&refused);
    let hook = move |context: AuthContext<'_>| match refusal(&context) {
        None => Authorization::Allow,
        Some(why) => {
            *note.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(why);
            Authorization::Deny
        }
    };
    let set = conn.authorizer(Some(hook));
    let prepared = set.and_then(|()| {
        let prepared = conn.prepare(&statement.sql)?;
        let names = (1..=prepared.parameter_count()).map(|i| prepared.parameter_name(i).map(str::to_owned));
        Ok(names.collect::<Vec<_>>())
    });
    let cleared = conn.authorizer(None::<fn(AuthContext<'_>) -> Authorization>);
    let why = refused.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
    let names = match (prepared, why) {
        (_, Some(why)) => return Err(problem(statement.line, why)),
        (Err(rusqlite::Error::SqlInputError { msg, offset, .. }), None) => {
            let before = usize::try_from(offset).ok().and_then(|at| statement.sql.get(..at)).unwrap_or("");
            return Err(problem(statement.line + before.matches('\n').count(), msg));
        }
        (Err(other), None) => return Err(problem(statement.line, other.to_string())),
        (Ok(names), None) => names,
    };
    cleared.map_err(|e| problem(statement.line, e.to_string()))?;
    for name in names {
        match name {
            Some(name) if PARAMETERS.contains(&name.as_str()) => {}
            Some(name) => {
                let what = format!("there is no parameter {name}; there are {}", PARAMETERS.join(", "));
                return Err(problem(statement.line, what));
            }
            None => {
                let what = format!("parameters have names here: {}", PARAMETERS.join(", "));
                return Err(problem(statement.line, what));
            }
        }
    }
    Ok(())
}

/// Why an action of a statement is not allowed. What triggers and views do below it is theirs.
fn refusal(context: &AuthContext<'_>) -> Option<String> {
    if context.accessor.is_some() {
        return None;
    }
    let ours = |table: &str| {
        let table = table.to_ascii_lowercase();
        table.starts_with("outboxd_") || ["processed_events", "inbox_events", "outbox_events"].contains(&table.as_str())
    };
    let only = || "only SELECT, INSERT, UPDATE and DELETE are allowed".to_owned();
    let writes = |table: &str| format!("it writes {table}, which belongs to outboxd");
    match context.action {
        AuthAction::Select | AuthAction::Read { .. } | AuthAction::Recursive => None,
        AuthAction::Insert { table_name } if table_name.eq_ignore_ascii_case("outbox_events") => None,
        AuthAction::Insert { table_name }
        | AuthAction::Delete { table_name }
        | AuthAction::Update { table_name, .. } => ours(table_name).then(|| writes(table_name)),
        AuthAction::Function { function_name } if function_name.eq_ignore_ascii_case("load_extension") => {
            Some("load_extension is not allowed".into())
        }
        AuthAction::Function { .. } => None,
        AuthAction::Transaction { .. } | AuthAction::Savepoint { .. } => {
            Some("it begins or ends a transaction; it runs inside of the one that records the event".into())
        }
        _ => Some(only()),
    }
}

/// Splits at the semicolons that end statements: not those in texts, quoted names and comments.
fn split(sql: &str) -> Vec<Statement> {
    let bytes = sql.as_bytes();
    let mut statements = Vec::new();
    let (mut start, mut at, mut is_empty) = (0, 0, true);
    let mut end = |start: usize, at: usize, is_empty: bool| {
        if !is_empty {
            let text = &sql[start..at];
            let blank = text.len() - text.trim_start().len();
            let line = 1 + sql[..start + blank].matches('\n').count();
            statements.push(Statement { sql: text.trim().to_owned(), line });
        }
    };
    while at < bytes.len() {
        let skip_to = |end: &str| {
            sql.get(at + 2..).and_then(|rest| rest.find(end)).map_or(bytes.len(), |i| at + 2 + i + end.len())
        };
        match bytes[at] {
            b'-' if bytes.get(at + 1) == Some(&b'-') => at = skip_to("\n"),
            b'/' if bytes.get(at + 1) == Some(&b'*') => at = skip_to("*/"),
            quote @ (b'\'' | b'"' | b'`' | b'[') => {
                let close = if quote == b'[' { b']' } else { quote };
                // a doubled quote closes and opens again, which comes to the same
                at = bytes[at + 1..].iter().position(|b| *b == close).map_or(bytes.len(), |i| at + 1 + i + 1);
                is_empty = false;
            }
            b';' => {
                end(start, at, is_empty);
                at += 1;
                (start, is_empty) = (at, true);
            }
            byte => {
                is_empty &= byte.is_ascii_whitespace();
                at += 1;
            }
        }
    }
    end(start, bytes.len(), is_empty);
    statements
}

/// The handler.
pub(super) struct Sql {
    statements: Vec<Statement>,
}

impl Sql {
    pub(super) fn new(sql: &str) -> Self {
        Self { statements: split(sql) }
    }

    fn run(&self, tx: &Transaction<'_>, event: &Event<'_>) -> Result<(), Trouble> {
        for statement in &self.statements {
            let step = |cause| StoreError::at("run the sql of a handler", cause);
            let mut prepared = tx.prepare_cached(&statement.sql).map_err(step)?;
            for index in 1..=prepared.parameter_count() {
                let name = prepared.parameter_name(index).unwrap_or_default().to_owned();
                prepared.raw_bind_parameter(index, value(&name, event)?).map_err(step)?;
            }
            let mut rows = prepared.raw_query();
            while rows.next().map_err(step)?.is_some() {}
        }
        Ok(())
    }
}

fn value<'a>(name: &str, event: &'a Event<'_>) -> Result<Box<dyn ToSql + 'a>, Trouble> {
    fn optional<'a, T: ToSql + 'a>(value: Option<T>) -> Box<dyn ToSql + 'a> {
        value.map_or_else(|| Box::new(Null) as Box<dyn ToSql>, |v| Box::new(v))
    }
    Ok(match name {
        ":event_id" => Box::new(&*event.event_id),
        ":event_type" => Box::new(&*event.event_type),
        ":source" => Box::new(&*event.source),
        ":aggregate_type" => optional(event.aggregate_type.as_deref()),
        ":aggregate_id" => optional(event.aggregate_id.as_deref()),
        ":aggregate_version" => optional(event.aggregate_version),
        ":event" | ":data" => match &event.body {
            Body::Opaque(why) => return Err(Trouble::Own(format!("the statement needs {name}, but the body: {why}"))),
            Body::Json { event: whole, .. } if name == ":event" => Box::new(*whole),
            Body::Json { data, .. } => optional(*data),
        },
        other => return Err(Trouble::Own(format!("there is no parameter {other}"))),
    })
}

impl Handler for Sql {
    fn apply(&self, tx: &Transaction<'_>, event: &Event<'_>, place: &Place<'_>) -> Result<Effect, Trouble> {
        const READ: &str = "SELECT version FROM outboxd_inbox_versions
            WHERE durable = ?1 AND source = ?2 AND aggregate_type = ?3 AND aggregate_id = ?4";
        const WRITE: &str = "INSERT INTO outboxd_inbox_versions
            (durable, source, aggregate_type, aggregate_id, version) VALUES (?1, ?2, ?3, ?4, ?5)
            ON CONFLICT (durable, source, aggregate_type, aggregate_id) DO UPDATE SET version = excluded.version";
        let step = |cause| StoreError::at("compare versions of an aggregate", cause);
        let (Some(kind), Some(id), Some(version)) =
            (event.aggregate_type.as_deref(), event.aggregate_id.as_deref(), event.aggregate_version)
        else {
            self.run(tx, event)?;
            return Ok(Effect::Applied);
        };
        let lane = (place.rules.durable.as_str(), &*event.source, kind, id);
        let mut read = tx.prepare_cached(READ).map_err(step)?;
        let applied = read.query_row(lane, |row| row.get(0)).optional().map_err(step)?;
        if let Some(effect) = version_effect(applied, event, place) {
            return Ok(effect);
        }
        self.run(tx, event)?;
        let row = (lane.0, lane.1, lane.2, lane.3, version);
        tx.prepare_cached(WRITE).and_then(|mut s| s.execute(row)).map_err(step)?;
        Ok(Effect::Applied)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(sql: &str) -> Vec<(String, usize)> {
        split(sql).into_iter().map(|s| (s.sql, s.line)).collect()
    }

    #[test]
    fn statements_are_split_outside_of_texts_and_comments() {
        let sql = "INSERT INTO a VALUES (';', \"x;y\", [b;c], 'it''s;');\n-- none; here\n;;\n  /* ; */ DELETE FROM a\n";
        let got = texts(sql);
        assert_eq!(got.len(), 2, "{got:?}");
        assert_eq!(got[0], ("INSERT INTO a VALUES (';', \"x;y\", [b;c], 'it''s;')".into(), 1));
        assert_eq!(got[1], ("/* ; */ DELETE FROM a".into(), 4));
        assert!(texts(" ; -- nothing\n").is_empty());
        assert_eq!(texts("SELECT 'open").len(), 1);
        assert_eq!(texts("SELECT 1 -- ü").len(), 1);
    }

    fn schema() -> Connection {
        let conn = Connection::open_in_memory().unwrap();
        conn.execute_batch(
            "CREATE TABLE stock (id TEXT PRIMARY KEY, n INTEGER);
             CREATE TABLE outbox_events (event_id, payload_json);
             CREATE TABLE processed_events (event_id TEXT PRIMARY KEY);
             CREATE TABLE outboxd_touched (id INTEGER PRIMARY KEY);
             CREATE TRIGGER answer AFTER DELETE ON stock BEGIN DELETE FROM processed_events; END;",
        )
        .unwrap();
        conn
    }

    fn problems(sql: &str) -> Vec<String> {
        check(&schema(), sql).into_iter().map(|p| p.to_string()).collect()
    }

    #[test]
    fn good_statements_pass_and_nothing_is_run() {
        let conn = schema();
        let sql = "INSERT INTO stock VALUES (:aggregate_id, json_extract(:data, '$.n')) ON CONFLICT DO NOTHING;
                   UPDATE stock SET n = n + 1 WHERE id = :aggregate_id;
                   DELETE FROM stock WHERE n < 0;
                   WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c WHERE x < 3) SELECT max(x) FROM c;
                   INSERT INTO outbox_events (event_id, payload_json) VALUES (:event_id || '/reply', :event)";
        assert_eq!(check(&conn, sql), []);
        assert_eq!(conn.query_row("SELECT count(*) FROM stock", [], |r| r.get::<_, i64>(0)).unwrap(), 0);
        assert!(conn.execute("DELETE FROM processed_events", []).is_ok(), "the authorizer is taken off again");
    }

    #[test]
    fn what_cannot_work_or_must_not_be_done_is_refused_with_its_line() {
        for (sql, expected) in [
            ("SELECT 1;\nINSERT INTO nowhere VALUES (1)", "line 2 of its sql: no such table: nowhere"),
            ("SELECT 1;\n\nUPDATE stock\nSET n = m", "line 4 of its sql: no such column: m"),
            ("DELETE FROM stock WHERE id = :id", "line 1 of its sql: there is no parameter :id; there are :event_id"),
            ("DELETE FROM stock WHERE id = ?", "parameters have names here"),
            ("DELETE FROM stock WHERE id = ?1", "there is no parameter ?1"),
            ("DELETE FROM processed_events", "it writes processed_events, which belongs to outboxd"),
            ("INSERT INTO processed_events VALUES ('x')", "it writes processed_events"),
            ("UPDATE OUTBOX_EVENTS SET event_id = 1", "belongs to outboxd"),
            ("INSERT INTO outboxd_touched VALUES (1)", "it writes outboxd_touched"),
            ("COMMIT", "it begins or ends a transaction"),
            ("SAVEPOINT x", "it begins or ends a transaction"),
            ("DROP TABLE stock", "only SELECT, INSERT, UPDATE and DELETE"),
            ("CREATE TABLE x (a)", "only SELECT, INSERT, UPDATE and DELETE"),
            ("PRAGMA synchronous = off", "only SELECT, INSERT, UPDATE and DELETE"),
            ("ATTACH 'x' AS y", "only SELECT, INSERT, UPDATE and DELETE"),
            ("SELECT load_extension('x')", "load_extension"),
            ("INSERT INTO stock", "incomplete input"),
            ("  ", "there is no statement"),
        ] {
            let got = problems(sql);
            assert!(got.len() == 1 && got[0].contains(expected), "{sql:?}: {got:?}");
        }
    }

    #[test]
    fn all_problems_are_told_at_once() {
        assert_eq!(problems("DELETE FROM nowhere;\nDELETE FROM elsewhere;").len(), 2);
    }
}
