//! The examples of docs/inbox.md, played: a page that lies fails here.

use std::path::Path;

use outboxd::domain::inbox::{Body, Inbound, identify};
use outboxd::store::inbox_sql;
use outboxd::store::schema;
use rusqlite::Connection;

fn blocks(language: &str) -> Vec<String> {
    let page = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/inbox.md")).unwrap();
    let start = format!("```{language}\n");
    let blocks = page.split(&start).skip(1).map(|rest| rest.split("\n```").next().unwrap().to_owned());
    blocks.collect()
}

#[test]
fn the_messages_of_foreign_producers_are_understood() {
    let examples = blocks("json");
    assert_eq!(examples.len(), 2);
    for (body, content_type, source) in
        [(&examples[0], "application/json", ""), (&examples[1], "application/cloudevents+json", "shop")]
    {
        let message = Inbound {
            headers: [("Content-Type", content_type)].into_iter().collect(),
            payload: body.clone().into(),
            ..Inbound::default()
        };
        let event = identify(&message).unwrap();
        assert_eq!((&*event.source, &*event.event_id, &*event.event_type), (source, "ord-17", "order.placed"));
        assert!(matches!(event.body, Body::Json { data: Some(r#"{"total":99}"#), .. }), "{event:?}");
    }
}

#[test]
fn the_handler_and_the_statements_for_the_application_work() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.db");
    schema::init(&path, "hub", false).unwrap();
    let conn = Connection::open(&path).unwrap();
    conn.execute_batch("CREATE TABLE order_totals (order_id TEXT PRIMARY KEY, total REAL)").unwrap();
    let statements = blocks("sql");
    assert_eq!(statements.len(), 2);
    assert_eq!(inbox_sql::check(&conn, &statements[0]), []);

    conn.execute(
        "INSERT INTO inbox_events (id, event_type, subject, payload, state) VALUES (1, 'order.placed', 's', '{}', 'stored')",
        [],
    )
    .unwrap();
    conn.execute_batch(&statements[1]).unwrap();
    let (state, done_at): (String, String) =
        conn.query_row("SELECT state, done_at FROM inbox_events", [], |row| Ok((row.get(0)?, row.get(1)?))).unwrap();
    assert_eq!((state.as_str(), done_at.len()), ("done", 23));
}
