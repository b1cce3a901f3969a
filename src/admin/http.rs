//! HTTP: health, metrics, status and the page. The listener is retried for ever; the daemon never depends on it.
//!
//! Invariants: `/livez` looks at progress only, never at NATS or the database · `Host` is checked, so that a web page
//! elsewhere cannot read us through a name that it lets point here · connections are bounded in number and in silence ·
//! errors are `application/problem+json` (RFC 9457). May import: admin, telemetry, axum, tokio.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{Instant, Sleep};
use tokio_util::sync::CancellationToken;

use super::Services;
use super::page;
use super::status::Tally;
use crate::telemetry::board::State as Condition;
use crate::telemetry::metrics::{self, Gauges};

/// Connections served at once.
const CONNECTIONS: usize = 64;

/// A connection that neither asks nor takes for this long is closed.
const IDLE: Duration = Duration::from_secs(30);

/// How long a request waits for the database before it says so.
const DATABASE_WAIT: Duration = Duration::from_secs(3);

/// Pause between two tries to bind.
const RETRY: Duration = Duration::from_secs(1);

/// How long open connections may take to end when the listener moves or the daemon stops.
const LEAVE: Duration = Duration::from_secs(1);

/// Where to listen, and the secret that a change needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rules {
    /// `host:port`, port 0 for a free one; empty: off.
    pub listen: String,
    pub token_file: Option<PathBuf>,
}

/// Serves under the rules as they change, until `stop`. A listener that cannot be bound is tried again each second and
/// shown in status.
pub async fn run(services: Services, mut rules: watch::Receiver<Rules>, stop: CancellationToken) {
    loop {
        let wanted = rules.borrow_and_update().clone();
        let end = stop.child_token();
        let serving = serve_one(&services, &wanted, &end);
        tokio::select! {
            () = serving => {}
            changed = changed_to_other(&mut rules, &wanted) => {
                end.cancel();
                if !changed {
                    // nobody can change the rules any more: serve until the stop
                    serve_one(&services, &wanted, &stop).await;
                }
            }
        }
        if stop.is_cancelled() {
            services.board.write(|f| f.http_listen.clear());
            return;
        }
    }
}

/// Waits for rules that differ; false where there will be none.
async fn changed_to_other(rules: &mut watch::Receiver<Rules>, wanted: &Rules) -> bool {
    rules.wait_for(|now| now != wanted).await.is_ok()
}

async fn serve_one(services: &Services, rules: &Rules, stop: &CancellationToken) {
    let board = &services.board;
    if rules.listen.is_empty() {
        board.write(|f| (f.http_listen, f.http_problem) = (String::new(), String::new()));
        return stop.cancelled().await;
    }
    let mut told = String::new();
    while !stop.is_cancelled() {
        match bind(&rules.listen).await {
            Ok((listener, address)) => {
                board.write(|f| (f.http_listen, f.http_problem) = (address.to_string(), String::new()));
                tracing::info!(listen = %address, "http is served");
                let ended = serve(services.clone(), listener, stop.clone()).await;
                board.write(|f| f.http_listen.clear());
                if let Err(error) = ended {
                    tracing::warn!(%error, "the http listener failed; it is opened again");
                }
            }
            Err(error) => {
                let problem = format!("cannot listen on {}: {error}", rules.listen);
                board.write(|f| (f.http_listen, f.http_problem) = (String::new(), problem.clone()));
                if problem != told {
                    tracing::warn!(problem, "http is not served; tried again each second");
                    told = problem;
                }
                let _ = tokio::time::timeout(RETRY, stop.cancelled()).await;
            }
        }
    }
}

async fn bind(listen: &str) -> io::Result<(TcpListener, SocketAddr)> {
    // "127.0.0.1:8787", "localhost:8787", ":0" (all interfaces would be a surprise: loopback)
    let address = if listen.starts_with(':') { format!("127.0.0.1{listen}") } else { listen.to_string() };
    let listener = TcpListener::bind(&address).await?;
    let bound = listener.local_addr()?;
    Ok((listener, bound))
}

async fn serve(services: Services, listener: TcpListener, stop: CancellationToken) -> io::Result<()> {
    let guarded = Guarded { listener, slots: Arc::new(Semaphore::new(CONNECTIONS)) };
    let leave = stop.clone();
    let serving = axum::serve(guarded, router(services)).with_graceful_shutdown(async move { leave.cancelled().await });
    tokio::select! {
        ended = serving.into_future() => ended,
        () = async { stop.cancelled().await; tokio::time::sleep(LEAVE).await } => Ok(()),
    }
}

/// All routes.
pub fn router(services: Services) -> Router {
    Router::new()
        .route("/", get(root))
        .route("/livez", get(livez))
        .route("/readyz", get(readyz))
        .route("/metrics", get(scrape))
        .route("/v1/status", get(status))
        .fallback(|| async { problem(StatusCode::NOT_FOUND, "there is nothing here; see / for what there is") })
        .method_not_allowed_fallback(|| async {
            problem(StatusCode::METHOD_NOT_ALLOWED, "this method is not for this path")
        })
        .layer(middleware::from_fn(guard))
        .with_state(services)
}

/// An error as `application/problem+json`.
pub fn problem(status: StatusCode, detail: &str) -> Response {
    let title = status.canonical_reason().unwrap_or("error");
    let body = json!({"type": "about:blank", "title": title, "status": status.as_u16(), "detail": detail});
    let mut response = (status, body.to_string()).into_response();
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
    response
}

/// Checks `Host` and sets what every answer carries.
async fn guard(request: Request, next: Next) -> Response {
    let mut response = match host(&request) {
        Some(host) if is_ours(&host) => next.run(request).await,
        Some(host) => problem(
            StatusCode::MISDIRECTED_REQUEST,
            &format!("host {host:?} is not a name of this machine; use its address, its host name or localhost"),
        ),
        None => problem(StatusCode::BAD_REQUEST, "the request names no host"),
    };
    let headers = response.headers_mut();
    for (name, value) in [
        (header::CACHE_CONTROL, "no-store"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (
            header::CONTENT_SECURITY_POLICY,
            "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
        ),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}

/// The host that was asked for, without its port.
fn host(request: &Request) -> Option<String> {
    let named = match request.uri().authority() {
        Some(authority) => authority.as_str(),
        None => request.headers().get(header::HOST)?.to_str().ok()?,
    };
    let host = match named.strip_prefix('[') {
        Some(rest) => rest.split(']').next()?,
        None => named.rsplit_once(':').map_or(named, |(host, _)| host),
    };
    (!host.is_empty()).then(|| host.trim_end_matches('.').to_ascii_lowercase())
}

/// An address cannot be made to point elsewhere; a name can, unless it is one of this machine.
fn is_ours(host: &str) -> bool {
    if host.parse::<IpAddr>().is_ok() || host == "localhost" || host.ends_with(".localhost") {
        return true;
    }
    let name = rustix::system::uname().nodename().to_string_lossy().to_ascii_lowercase();
    let short = name.split('.').next().unwrap_or(&name);
    !name.is_empty() && (host == name || host == short)
}

/// Whether a request carries the bearer token of the file; without a file every request does. Compared in a time that
/// does not depend on where they differ.
pub fn is_authorised(headers: &HeaderMap, token: Option<&[u8]>) -> bool {
    let Some(token) = token else { return true };
    let given = headers
        .get(header::AUTHORIZATION)
        .map(HeaderValue::as_bytes)
        .and_then(|value| value.split_at_checked(7))
        .filter(|(scheme, _)| scheme.eq_ignore_ascii_case(b"bearer "))
        .map_or(&b""[..], |(_, given)| given.trim_ascii());
    let same = given.len() == token.len();
    let differing = given.iter().zip(token.iter().cycle()).fold(0, |acc, (a, b)| acc | (a ^ b));
    !token.is_empty() && same && differing == 0
}

fn json_response(status: StatusCode, body: &Value) -> Response {
    let mut response = (status, format!("{body}\n")).into_response();
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// Alive: every loop made progress within its bound.
async fn livez(State(services): State<Services>) -> Response {
    let stuck: Vec<String> = services.board.loops().stuck().iter().map(ToString::to_string).collect();
    let status = if stuck.is_empty() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    json_response(status, &json!({"alive": stuck.is_empty(), "stuck": stuck}))
}

/// Ready: the database can be used and the daemon is neither starting nor ending. NATS is told, not asked for: without
/// it events are kept.
async fn readyz(State(services): State<Services>) -> Response {
    let facts = services.board.read();
    let read = tally(&services).await;
    let serving = matches!(facts.state, Condition::Running | Condition::Paused);
    let nats = match (facts.nats_connected, facts.nats_reason.is_empty()) {
        (true, true) => "connected",
        (true, false) => "connected, but publishing cannot work now",
        (false, _) => "buffering",
    };
    let body = json!({
        "ready": serving && read.is_ok(),
        "state": facts.state.as_str(),
        "paused": facts.state == Condition::Paused,
        "nats": nats,
        "nats_reason": facts.nats_reason,
        "database": read.as_ref().err().map_or("ok", |e| e.as_str()),
    });
    let ready = serving && read.is_ok();
    json_response(if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }, &body)
}

async fn scrape(State(services): State<Services>) -> Response {
    let gauges = tally(&services).await.map_or_else(|_| Gauges::default(), |tally| gauges(&tally));
    let text = services.metrics.render(&services.board, &gauges, services.clock.now());
    ([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response()
}

fn gauges(tally: &Tally) -> Gauges {
    Gauges {
        oldest_pending_age: Some(tally.oldest_pending_age_seconds),
        pending: Some(tally.pending),
        failed: Some(tally.failed),
        published: Some(tally.published),
        held_aggregates: Some(tally.held_aggregates),
        db_bytes: Some(tally.bytes),
        db_wal_bytes: Some(tally.wal_bytes),
        disk_free_bytes: tally.disk_free_bytes,
    }
}

async fn status(State(services): State<Services>) -> Response {
    match bounded(services.status()).await {
        Ok(status) => match serde_json::to_value(&status) {
            Ok(body) => json_response(StatusCode::OK, &body),
            Err(error) => problem(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
        },
        Err(detail) => problem(StatusCode::SERVICE_UNAVAILABLE, &detail),
    }
}

async fn root(State(services): State<Services>) -> Response {
    match bounded(services.status()).await {
        Ok(status) => ([(header::CONTENT_TYPE, "text/html; charset=utf-8")], page::page(&status)).into_response(),
        Err(detail) => problem(StatusCode::SERVICE_UNAVAILABLE, &detail),
    }
}

async fn tally(services: &Services) -> Result<Tally, String> {
    bounded((services.tally)()).await
}

async fn bounded<T>(reading: impl Future<Output = Result<T, crate::store::error::StoreError>>) -> Result<T, String> {
    match tokio::time::timeout(DATABASE_WAIT, reading).await {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(crate::store::error::chain(&error)),
        Err(_) => Err(format!("the database did not answer within {} s", DATABASE_WAIT.as_secs())),
    }
}

/// A listener with a limit on connections, each of which is closed when it is silent for long.
struct Guarded {
    listener: TcpListener,
    slots: Arc<Semaphore>,
}

impl axum::serve::Listener for Guarded {
    type Io = Connection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection, SocketAddr) {
        let slot = loop {
            match self.slots.clone().acquire_owned().await {
                Ok(slot) => break slot,
                // the semaphore is never closed
                Err(_) => tokio::time::sleep(RETRY).await,
            }
        };
        loop {
            match self.listener.accept().await {
                Ok((stream, peer)) => return (Connection::new(stream, slot), peer),
                // no descriptors left, or the peer was gone before: the listener itself is sound
                Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A connection that ends by itself after [`IDLE`] without a byte read or written.
struct Connection {
    stream: TcpStream,
    idle: Pin<Box<Sleep>>,
    _slot: OwnedSemaphorePermit,
}

impl Connection {
    fn new(stream: TcpStream, slot: OwnedSemaphorePermit) -> Self {
        Self { stream, idle: Box::pin(tokio::time::sleep(IDLE)), _slot: slot }
    }

    fn watch<T>(&mut self, cx: &mut Context<'_>, polled: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        match polled {
            Poll::Ready(ready) => {
                self.idle.as_mut().reset(Instant::now() + IDLE);
                Poll::Ready(ready)
            }
            Poll::Pending => match self.idle.as_mut().poll(cx) {
                Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
                Poll::Pending => Poll::Pending,
            },
        }
    }
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_read(cx, buf);
        self.watch(cx, polled)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.watch(cx, polled)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_flush(cx);
        self.watch(cx, polled)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
#[path = "http_tests.rs"]
mod tests;
