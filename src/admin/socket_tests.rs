//! The socket with both its ends: who is served, who is not, and what the client makes of silence.

use std::os::unix::net::UnixListener as StdListener;
use std::sync::Mutex;

use serde_json::json;

use super::super::client::{Answer, ask};
use super::super::protocol::{Request, VERSION};
use super::*;

struct Echo {
    owner: u32,
    seen: Mutex<Vec<(Peer, Request)>>,
}

impl Handler for Echo {
    async fn handle(&self, peer: Peer, envelope: Envelope) -> Reply {
        self.seen.lock().unwrap().push((peer, envelope.request.clone()));
        Reply::done(json!({"did": format!("{:?}", envelope.request)}))
    }

    fn owner(&self) -> u32 {
        self.owner
    }
}

struct Served {
    dir: tempfile::TempDir,
    path: PathBuf,
    echo: Arc<Echo>,
    task: tokio::task::JoinHandle<()>,
}

fn served() -> Served {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("app.db.outboxd.sock");
    let bound = Bound::bind(&path, 0o600).unwrap();
    let echo = Arc::new(Echo { owner: 0, seen: Mutex::default() });
    let handler = echo.clone();
    let task = tokio::spawn(async move {
        serve(&bound, handler).await.unwrap();
    });
    Served { dir, path, echo, task }
}

async fn asked(path: &Path, request: Request) -> Answer {
    let paths = vec![path.to_path_buf()];
    tokio::task::spawn_blocking(move || ask(&paths, &request, 0)).await.unwrap()
}

#[tokio::test]
async fn a_request_is_answered_and_its_peer_is_known() {
    let served = served();
    let Answer::Replied(reply) = asked(&served.path, Request::Pause { for_ms: Some(5) }).await else { panic!() };
    assert_eq!(reply.exit, 0);
    let seen = served.echo.seen.lock().unwrap().clone();
    let uid = rustix::process::geteuid().as_raw();
    assert_eq!(seen, [(Peer { uid }, Request::Pause { for_ms: Some(5) })]);
    served.task.abort();
}

#[tokio::test]
async fn the_socket_is_for_its_owner_only_and_goes_with_the_daemon() {
    let served = served();
    let mode = std::fs::metadata(&served.path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert_eq!(std::fs::read_dir(served.dir.path()).unwrap().count(), 1, "no temporary name is left");
    served.task.abort();
    let _ = served.task.await;
    assert!(!served.path.exists());
}

#[test]
fn absent_and_stale_sockets_leave_the_work_to_the_caller() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    assert!(matches!(ask(std::slice::from_ref(&path), &Request::Status, 0), Answer::Absent));
    drop(StdListener::bind(&path).unwrap());
    assert!(path.exists());
    assert!(matches!(ask(&[path], &Request::Status, 0), Answer::Absent));
}

#[tokio::test]
async fn a_stale_socket_is_replaced_at_start() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    drop(StdListener::bind(&path).unwrap());
    drop(Bound::bind(&path, 0o660).unwrap());
    assert!(!path.exists());
}

#[tokio::test]
async fn a_socket_that_answers_is_not_taken_away() {
    let served = served();
    let error = Bound::bind(&served.path, 0o600).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
    assert!(matches!(asked(&served.path, Request::Status).await, Answer::Replied(_)));
    served.task.abort();
}

#[tokio::test]
async fn a_file_that_is_no_socket_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("precious");
    std::fs::write(&path, "text").unwrap();
    assert_eq!(Bound::bind(&path, 0o600).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "text");
}

#[test]
fn a_silent_daemon_is_asked_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    // its kernel takes the connection, the process never does: a stopped daemon
    let listener = StdListener::bind(&path).unwrap();
    let Answer::Silent(fault) = ask(&[path], &Request::Resume, 0) else { panic!() };
    assert_eq!(fault.exit, 69);
    assert!(fault.what.contains("nothing was written"), "{}", fault.what);
    let (mut stream, _) = listener.accept().unwrap();
    let mut heard = Vec::new();
    io::Read::read_to_end(&mut stream, &mut heard).unwrap();
    assert_eq!(heard, b"", "a request was sent before the greeting");
}

#[tokio::test]
async fn nonsense_another_version_and_endless_lines_are_answered_and_closed() {
    let served = served();
    let talk = |bytes: Vec<u8>| {
        let path = served.path.clone();
        tokio::task::spawn_blocking(move || {
            let mut stream = super::super::client::connect(&path, Duration::from_secs(5)).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            let _ = io::Write::write_all(&mut stream, &bytes);
            let mut heard = String::new();
            // the other side closes with bytes unread, which the kernel may tell as a reset after the answer
            let _ = io::Read::read_to_string(&mut stream, &mut heard);
            heard
        })
    };
    let other = format!("{{\"v\":{},\"expires_at\":0,\"request\":{{\"verb\":\"status\"}}}}\n", VERSION + 1);
    for (bytes, word) in [(b"what?\n".to_vec(), "did not understand"), (other.into_bytes(), "speaks version")] {
        let heard = talk(bytes).await.unwrap();
        assert_eq!(heard.lines().count(), 2, "a greeting and an answer: {heard}");
        assert!(heard.contains(word), "{heard}");
    }
    talk(vec![b'x'; LINE_MAX + 2]).await.unwrap();
    assert!(matches!(asked(&served.path, Request::Status).await, Answer::Replied(_)), "still served");
    assert_eq!(served.echo.seen.lock().unwrap().len(), 1);
    served.task.abort();
}

#[test]
fn root_the_daemon_and_the_owner_may_operate_and_nobody_else() {
    let may = |uid| Peer { uid }.may_operate(990, 1_000);
    assert!(may(0) && may(990) && may(1_000));
    assert!(!may(1_001));
    // in a user namespace every unknown user is the same number, the owner of the file included
    assert!(!Peer { uid: NOBODY }.may_operate(990, NOBODY));
}

#[test]
fn the_login_behind_sudo_is_believed_only_from_root() {
    assert_eq!(actor(0, Some("alice\n")), "uid 0 (sudo by alice)");
    assert_eq!(actor(1_000, Some("alice")), "uid 1000");
    assert_eq!(actor(0, None), "uid 0");
}

#[test]
fn the_socket_lies_beside_the_database_or_under_a_short_name() {
    let dir = tempfile::tempdir().unwrap();
    let db = dir.path().join("app.db");
    std::fs::write(&db, "").unwrap();
    std::os::unix::fs::symlink(&db, dir.path().join("link.db")).unwrap();
    let beside = candidates(None, &db);
    assert_eq!(beside.len(), 1);
    assert!(beside[0].ends_with("app.db.outboxd.sock"));
    assert_eq!(candidates(None, &dir.path().join("link.db")), beside, "one file has one socket");
    assert_eq!(candidates(Some(Path::new("/run/x")), &db), [Path::new("/run/x")]);
    let long = PathBuf::from(format!("/{}/app.db", "d".repeat(100)));
    let short = candidates(None, &long);
    assert!(short.iter().all(|p| p.as_os_str().len() <= SOCKET_PATH), "{short:?}");
    assert!(short[0].starts_with("/run/outboxd"));
    assert_ne!(short, candidates(None, &PathBuf::from(format!("/{}/b.db", "d".repeat(100)))));
}
