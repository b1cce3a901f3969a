//! HTTP over a real socket, with a board and a tally of the test's own.

use std::sync::Mutex;

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;
use crate::ports::Clock;
use crate::store::error::StoreError;
use crate::telemetry::board::Board;
use crate::telemetry::metrics::Metrics;

struct Fixed;

impl Clock for Fixed {
    fn now(&self) -> i64 {
        1_800_000_000_000
    }
}

struct World {
    services: Services,
    /// What the database answers; an error where it is `None`.
    tally: Arc<Mutex<Option<Tally>>>,
    rules: watch::Sender<Rules>,
    stop: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for World {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn world(listen: &str) -> World {
    let tally = Arc::new(Mutex::new(Some(Tally { pending: 4, ..Tally::default() })));
    let shared = tally.clone();
    let read: super::super::ReadTally = Arc::new(move || {
        let answer = shared.lock().unwrap().clone().ok_or(StoreError::Crashed("gone".into()));
        Box::pin(std::future::ready(answer))
    });
    let services = Services {
        board: Board::default(),
        metrics: Metrics::new(),
        clock: Arc::new(Fixed),
        tally: read,
        write: Arc::new(|_| Box::pin(std::future::ready(Err(StoreError::Crashed("no writer".into()))))),
        control: tokio::sync::mpsc::channel(1).0,
        rates: super::super::rates::Rates::default(),
        inbox: None,
    };
    let (rules, receiver) = watch::channel(Rules { listen: listen.into(), token_file: None });
    let stop = CancellationToken::new();
    let task = tokio::spawn(run(services.clone(), receiver, stop.clone()));
    World { services, tally, rules, stop, task }
}

async fn until<T>(what: &str, mut look: impl FnMut() -> Result<T, String>) -> T {
    let mut last = String::new();
    for _ in 0..1_000 {
        match look() {
            Ok(value) => return value,
            Err(now) => last = now,
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{what}: not within 10 s, last: {last}");
}

impl World {
    async fn address(&self) -> String {
        until("http is served", || {
            let facts = self.services.board.read();
            if facts.http_listen.is_empty() { Err(facts.http_problem) } else { Ok(facts.http_listen) }
        })
        .await
    }

    async fn get(&self, path: &str) -> (u16, String) {
        let address = self.address().await;
        self.ask(&format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n")).await
    }

    async fn ask(&self, request: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(self.address().await).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        let read = tokio::time::timeout(Duration::from_secs(10), stream.read_to_string(&mut answer));
        read.await.expect("no answer within 10 s").unwrap();
        let status = answer.split(' ').nth(1).and_then(|s| s.parse().ok()).unwrap_or(0);
        (status, answer)
    }

    fn running(&self) {
        self.services.board.write(|f| f.state = Condition::Running);
    }
}

#[tokio::test]
async fn livez_is_about_progress_and_nothing_else() {
    let world = world("127.0.0.1:0");
    *world.tally.lock().unwrap() = None;
    assert_eq!(world.get("/livez").await.0, 200, "neither the database nor NATS matters");
    drop(world.services.board.loops().register("writer", Duration::ZERO));
    until("the loop is noticed", || {
        let stuck = world.services.board.loops().stuck();
        if stuck.is_empty() { Err("alive".into()) } else { Ok(()) }
    })
    .await;
    let (status, body) = world.get("/livez").await;
    assert_eq!(status, 503);
    assert!(body.contains("loop writer is gone"), "{body}");
}

#[tokio::test]
async fn readyz_needs_the_database_and_tells_of_nats_without_needing_it() {
    let world = world("127.0.0.1:0");
    assert_eq!(world.get("/readyz").await.0, 503, "starting");
    world.running();
    let (status, body) = world.get("/readyz").await;
    assert_eq!(status, 200, "{body}");
    assert!(body.contains("\"nats\":\"buffering\""), "{body}");
    world.services.board.write(|f| f.state = Condition::Paused);
    let (status, body) = world.get("/readyz").await;
    assert!(status == 200 && body.contains("\"paused\":true"), "{body}");
    *world.tally.lock().unwrap() = None;
    let (status, body) = world.get("/readyz").await;
    assert!(status == 503 && body.contains("the database worker stopped: gone"), "{body}");
}

#[tokio::test]
async fn metrics_status_and_the_page_show_the_same_figures() {
    let world = world("127.0.0.1:0");
    world.running();
    let (_, metrics) = world.get("/metrics").await;
    assert!(metrics.contains("outboxd_events{state=\"pending\"} 4"), "{metrics}");
    assert!(metrics.contains("application/openmetrics-text"), "{metrics}");
    let (_, status) = world.get("/v1/status").await;
    let body: Value = serde_json::from_str(status.split("\r\n\r\n").nth(1).unwrap()).unwrap();
    assert_eq!((&body["outbox"]["pending"], &body["state"]), (&json!(4), &json!("running")));
    let (_, page) = world.get("/").await;
    assert!(page.contains("<b>4</b>pending") && page.contains("content-security-policy: default-src 'none'"), "{page}");
}

#[tokio::test]
async fn metrics_are_served_while_the_database_is_gone() {
    let world = world("127.0.0.1:0");
    *world.tally.lock().unwrap() = None;
    let (status, body) = world.get("/metrics").await;
    assert_eq!(status, 200);
    assert!(body.contains("outboxd_oldest_pending_age_seconds NaN"), "{body}");
    assert_eq!(world.get("/v1/status").await.0, 503);
}

#[tokio::test]
async fn a_foreign_host_is_turned_away() {
    let world = world("127.0.0.1:0");
    let ask = |host: &str| format!("GET /livez HTTP/1.1\r\n{host}Connection: close\r\n\r\n");
    for host in ["Host: attacker.example\r\n", "Host: localhost.attacker.example:8787\r\n"] {
        let (status, body) = world.ask(&ask(host)).await;
        assert_eq!(status, 421, "{host}");
        assert!(body.contains("application/problem+json"), "{body}");
    }
    assert_eq!(world.ask(&ask("")).await.0, 400);
    for host in ["Host: localhost:8787\r\n", "Host: 127.0.0.1\r\n", "Host: [::1]:8787\r\n"] {
        assert_eq!(world.ask(&ask(host)).await.0, 200, "{host}");
    }
}

#[tokio::test]
async fn errors_are_problems() {
    let world = world("127.0.0.1:0");
    let (status, body) = world.get("/nothing").await;
    assert!(status == 404 && body.contains("application/problem+json"), "{body}");
    let address = world.address().await;
    let request = format!("DELETE /livez HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    let (status, body) = world.ask(&request).await;
    assert!(status == 405 && body.contains("\"status\":405"), "{body}");
}

#[tokio::test]
async fn a_taken_port_is_a_problem_in_status_and_is_tried_again() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let world = world(&address);
    until("the problem is told", || {
        let facts = world.services.board.read();
        if facts.http_problem.contains(&address) { Ok(()) } else { Err(facts.http_problem) }
    })
    .await;
    drop(taken);
    assert_eq!(world.get("/livez").await.0, 200);
    assert_eq!(world.services.board.read().http_problem, "");
}

#[tokio::test]
async fn the_listener_moves_and_can_be_switched_off() {
    let world = world("127.0.0.1:0");
    let first = world.address().await;
    world.rules.send_replace(Rules { listen: ":0".into(), token_file: None });
    until("another port", || {
        let now = world.services.board.read().http_listen;
        if now.is_empty() || now == first { Err(now) } else { Ok(()) }
    })
    .await;
    assert_eq!(world.get("/livez").await.0, 200);
    until("the old port is closed", || match std::net::TcpStream::connect(&first) {
        Ok(_) => Err("it is open".into()),
        Err(_) => Ok(()),
    })
    .await;
    world.rules.send_replace(Rules::default());
    until("off", || {
        let now = world.services.board.read().http_listen;
        if now.is_empty() { Ok(()) } else { Err(now) }
    })
    .await;
}

#[tokio::test]
async fn a_stop_ends_it_though_a_client_holds_its_connection() {
    let mut world = world("127.0.0.1:0");
    let _idle = TcpStream::connect(world.address().await).await.unwrap();
    world.stop.cancel();
    let task = std::mem::replace(&mut world.task, tokio::spawn(async {}));
    tokio::time::timeout(Duration::from_secs(10), task).await.expect("it did not end within 10 s").unwrap();
}

#[test]
fn a_token_is_compared_whole() {
    let headers = |value: &str| {
        let mut headers = HeaderMap::new();
        headers.insert(header::AUTHORIZATION, HeaderValue::from_str(value).unwrap());
        headers
    };
    let token = Some(&b"secret"[..]);
    assert!(is_authorised(&headers("Bearer secret"), token));
    assert!(is_authorised(&headers("bearer secret "), token));
    for wrong in ["Bearer secre", "Bearer secrets", "Bearer", "Basic secret", "Bearer ", ""] {
        assert!(!is_authorised(&headers(wrong), token), "{wrong:?}");
    }
    assert!(!is_authorised(&HeaderMap::new(), token));
    assert!(!is_authorised(&headers("Bearer "), Some(b"")), "an empty token file lets nobody in");
    assert!(is_authorised(&HeaderMap::new(), None));
}
