//! The protocol of the service manager (sd_notify(3)): READY, RELOADING, STOPPING, STATUS, more time, the watchdog.
//!
//! Without a manager every call does nothing. Nothing here fails the daemon: a manager that is not there, or does not
//! read, is not an error of ours. May import: board and progress.

use std::ffi::{OsStr, OsString};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::Arc;
use std::time::Duration;

use super::board::{Board, Facts, State};

/// Longest STATUS= that is sent, in bytes; `systemctl status` shows one line of it.
const STATUS_MAX: usize = 400;

/// How often STATUS= is looked at where there is no watchdog.
const PACE: Duration = Duration::from_secs(1);

/// The way to the service manager. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Notifier(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    to: Option<(UnixDatagram, SocketAddr)>,
    watchdog: Option<Duration>,
}

impl Notifier {
    /// From NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID of this process.
    pub fn from_env() -> Self {
        Self::new(|name| std::env::var_os(name), std::process::id())
    }

    /// From given variables; `pid` is compared with WATCHDOG_PID.
    pub fn new(variable: impl Fn(&str) -> Option<OsString>, pid: u32) -> Self {
        let to = variable("NOTIFY_SOCKET").and_then(|path| {
            let address = address(&path)?;
            let socket = UnixDatagram::unbound().ok()?;
            // a manager that does not read must not stop us
            socket.set_write_timeout(Some(Duration::from_millis(200))).ok()?;
            Some((socket, address))
        });
        let number = |name: &str| variable(name).and_then(|v| v.to_str()?.trim().parse::<u64>().ok());
        let ours = variable("WATCHDOG_PID").is_none() || number("WATCHDOG_PID") == Some(u64::from(pid));
        let watchdog = number("WATCHDOG_USEC").filter(|usec| ours && *usec > 0).map(Duration::from_micros);
        Self(Arc::new(Inner { to, watchdog }))
    }

    /// Whether there is a manager to talk to.
    pub fn is_managed(&self) -> bool {
        self.0.to.is_some()
    }

    /// The time after which the manager ends a silent daemon.
    pub fn watchdog(&self) -> Option<Duration> {
        self.0.watchdog
    }

    /// The start is done, or the reload is.
    pub fn ready(&self, status: &str) {
        self.send(&format!("READY=1\nSTATUS={}", one_line(status)));
    }

    /// A reload begins; [`Notifier::ready`] must follow in every case. One datagram, as systemd 253 and later ask for.
    pub fn reloading(&self) {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let usec = i128::from(now.tv_sec) * 1_000_000 + i128::from(now.tv_nsec) / 1_000;
        self.send(&format!("RELOADING=1\nMONOTONIC_USEC={usec}\nSTATUS=reloading the configuration"));
    }

    /// The drain begins.
    pub fn stopping(&self, status: &str) {
        self.send(&format!("STOPPING=1\nSTATUS={}", one_line(status)));
    }

    /// What the daemon does or waits for.
    pub fn status(&self, status: &str) {
        self.send(&format!("STATUS={}", one_line(status)));
    }

    /// More time for a start or a stop, counted from now.
    pub fn extend(&self, by: Duration) {
        self.send(&format!("EXTEND_TIMEOUT_USEC={}", by.as_micros()));
    }

    /// Pings the watchdog at half its limit while every loop makes progress, and tells the manager what the daemon
    /// does whenever that changes. Ends never; to be aborted at the end.
    pub async fn accompany(self, board: Board) {
        if !self.is_managed() {
            return std::future::pending().await;
        }
        let pace = self.watchdog().map_or(PACE, |limit| PACE.min(limit / 2));
        let (mut told, mut warned) = (String::new(), false);
        loop {
            let stuck = board.loops().stuck();
            let line = match stuck.first() {
                Some(first) => first.to_string(),
                None => status_line(&board.read()),
            };
            if self.watchdog().is_some() && stuck.is_empty() {
                self.send("WATCHDOG=1");
            }
            if !stuck.is_empty() && !warned {
                tracing::error!(what = %line, "the daemon is stuck; the watchdog is not pinged");
            }
            warned = !stuck.is_empty();
            if line != told {
                self.status(&line);
                told = line;
            }
            tokio::time::sleep(pace).await;
        }
    }

    fn send(&self, message: &str) {
        if let Some((socket, address)) = &self.0.to
            && let Err(error) = socket.send_to_addr(message.as_bytes(), address)
        {
            tracing::debug!(%error, "the service manager did not take a message");
        }
    }
}

/// A path, or `@name` for the abstract namespace. Others (vsock) are for managers outside of this machine.
fn address(path: &OsStr) -> Option<SocketAddr> {
    match path.as_bytes() {
        [b'@', name @ ..] if !name.is_empty() => SocketAddr::from_abstract_name(name).ok(),
        [b'/', ..] => SocketAddr::from_pathname(path).ok(),
        _ => None,
    }
}

/// A message is lines: a status has none inside, and an end.
fn one_line(text: &str) -> String {
    let mut line: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    while line.len() > STATUS_MAX {
        line.pop();
    }
    line
}

/// What the daemon does, in one line for `systemctl status`.
pub fn status_line(facts: &Facts) -> String {
    let mut line = facts.state.as_str().to_string();
    let mut add = |text: &str| {
        line.push_str("; ");
        line.push_str(text);
    };
    match facts.state {
        State::Running | State::Paused => {
            if !facts.nats_reason.is_empty() {
                add(&format!("waiting for NATS: {}", facts.nats_reason));
            } else if facts.nats_connected {
                add("connected to NATS");
            }
            if facts.relay_role == "standby" {
                add("another daemon relays this database, standing by");
            }
        }
        State::Starting | State::Draining | State::Halted => {}
    }
    if facts.locked_since > 0 {
        add("another process holds the write lock of the database");
    }
    if facts.config_last_reload == "rejected" {
        add("the last reload was rejected, the configuration before it is in force");
    }
    if !facts.doing.is_empty() {
        add(&facts.doing);
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    struct Manager {
        socket: UnixDatagram,
        _dir: tempfile::TempDir,
        path: String,
    }

    impl Manager {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("notify");
            let socket = UnixDatagram::bind(&path).unwrap();
            socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            Self { socket, path: path.to_str().unwrap().into(), _dir: dir }
        }

        fn next(&self) -> String {
            let mut buffer = [0; 2048];
            let size = self.socket.recv(&mut buffer).expect("no message within 10 s");
            String::from_utf8_lossy(&buffer[..size]).into_owned()
        }

        fn is_silent(&self) -> bool {
            self.socket.set_nonblocking(true).unwrap();
            let silent = self.socket.recv(&mut [0; 2048]).is_err();
            self.socket.set_nonblocking(false).unwrap();
            silent
        }
    }

    fn notifier(variables: &[(&str, &str)]) -> Notifier {
        let map: HashMap<String, OsString> =
            variables.iter().map(|(k, v)| (k.to_string(), OsString::from(v))).collect();
        Notifier::new(move |name| map.get(name).cloned(), 42)
    }

    #[test]
    fn reloading_and_its_clock_come_in_one_datagram() {
        let manager = Manager::new();
        notifier(&[("NOTIFY_SOCKET", &manager.path)]).reloading();
        let message = manager.next();
        let usec: u64 = message
            .lines()
            .find_map(|l| l.strip_prefix("MONOTONIC_USEC="))
            .unwrap_or_else(|| panic!("no clock in {message:?}"))
            .parse()
            .unwrap();
        assert!(message.starts_with("RELOADING=1\n") && usec > 0, "{message:?}");
    }

    #[test]
    fn ready_stopping_and_more_time_are_told() {
        let manager = Manager::new();
        let notifier = notifier(&[("NOTIFY_SOCKET", &manager.path)]);
        notifier.ready("generation 2\nREADY=0");
        assert_eq!(manager.next(), "READY=1\nSTATUS=generation 2 READY=0");
        notifier.stopping("draining");
        assert_eq!(manager.next(), "STOPPING=1\nSTATUS=draining");
        notifier.extend(Duration::from_secs(30));
        assert_eq!(manager.next(), "EXTEND_TIMEOUT_USEC=30000000");
        notifier.status(&"ü".repeat(1000));
        assert_eq!(manager.next().len(), "STATUS=".len() + STATUS_MAX);
    }

    #[test]
    fn an_abstract_socket_is_reached() {
        let name = format!("outboxd-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let socket = UnixDatagram::bind_addr(&address).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        notifier(&[("NOTIFY_SOCKET", &format!("@{name}"))]).ready("up");
        let mut buffer = [0; 100];
        let size = socket.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..size], b"READY=1\nSTATUS=up");
    }

    #[test]
    fn no_manager_and_a_dead_one_are_no_error() {
        assert!(!notifier(&[]).is_managed());
        assert!(!notifier(&[("NOTIFY_SOCKET", "")]).is_managed());
        notifier(&[]).ready("up");
        notifier(&[("NOTIFY_SOCKET", "/nonexistent/notify")]).ready("up");
    }

    #[test]
    fn the_watchdog_is_ours_only_where_its_pid_is() {
        let usec = ("WATCHDOG_USEC", "2000000");
        let two = Some(Duration::from_secs(2));
        assert_eq!(notifier(&[usec]).watchdog(), two);
        assert_eq!(notifier(&[usec, ("WATCHDOG_PID", "42")]).watchdog(), two);
        assert_eq!(notifier(&[usec, ("WATCHDOG_PID", "43")]).watchdog(), None);
        assert_eq!(notifier(&[usec, ("WATCHDOG_PID", "what")]).watchdog(), None);
        assert_eq!(notifier(&[("WATCHDOG_USEC", "0")]).watchdog(), None);
        assert_eq!(notifier(&[]).watchdog(), None);
    }

    fn watched(manager: &Manager, board: &Board) -> tokio::task::JoinHandle<()> {
        let notifier = notifier(&[("NOTIFY_SOCKET", &manager.path), ("WATCHDOG_USEC", "500000")]);
        tokio::spawn(notifier.accompany(board.clone()))
    }

    #[tokio::test(start_paused = true)]
    async fn pings_come_at_half_the_limit_while_the_loops_make_progress() {
        let (manager, board) = (Manager::new(), Board::default());
        board.loops().register("writer", Duration::from_secs(60)).rest();
        let _heart = board.loops().register("relay", Duration::from_secs(60));
        let task = watched(&manager, &board);
        tokio::time::sleep(Duration::from_millis(1)).await;
        assert_eq!([manager.next(), manager.next()], ["WATCHDOG=1", "STATUS=starting"]);
        tokio::time::sleep(Duration::from_millis(1_000)).await;
        let pings = std::iter::from_fn(|| (!manager.is_silent()).then_some(())).count();
        assert_eq!(pings, 4, "one each 250 ms");
        task.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn a_stuck_loop_gets_no_ping_and_is_named_in_the_status() {
        let (manager, board) = (Manager::new(), Board::default());
        drop(board.loops().register("writer", Duration::ZERO));
        // the register's clock is the real one: wait until a millisecond has passed on it
        while board.loops().stuck().is_empty() {
            std::thread::yield_now();
        }
        let task = watched(&manager, &board);
        tokio::time::sleep(Duration::from_millis(1)).await;
        let message = manager.next();
        assert!(message.starts_with("STATUS=loop writer is gone"), "{message}");
        tokio::time::sleep(Duration::from_millis(500)).await;
        assert!(manager.is_silent());
        task.abort();
    }

    #[test]
    fn the_status_line_says_what_is_waited_for() {
        let mut facts = Facts { state: State::Running, nats_reason: "connection refused".into(), ..Facts::default() };
        assert_eq!(status_line(&facts), "running; waiting for NATS: connection refused");
        facts.nats_reason.clear();
        facts.nats_connected = true;
        facts.config_last_reload = "rejected".into();
        assert!(status_line(&facts).starts_with("running; connected to NATS; the last reload was rejected"));
    }
}
