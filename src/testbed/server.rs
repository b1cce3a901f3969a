//! A nats-server of our own, on a port that stays the same over restarts, with its store in a folder of the run.
//!
//! The port is drawn from below the kernel's range for outgoing connections: a client that reconnects to a port inside
//! that range can meet itself while the server is away, and then the server cannot come back.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::process::Signal;

use super::process::Process;
use super::{Trouble, finder, wait};

/// A server that is asked to stop ends within this time; one that is killed at once.
const STOP: Duration = Duration::from_secs(15);

/// Ports tried before giving up: another process may take one between the look and the start.
const PORTS: usize = 20;

/// One nats-server, running or not. Dropping it kills the process and leaves the folder to its owner.
#[derive(Debug)]
pub struct NatsServer {
    folder: PathBuf,
    name: String,
    port: u16,
    jetstream: bool,
    extra: String,
    process: Option<Process>,
}

impl NatsServer {
    /// Starts a server with JetStream; its store, configuration and log live in `folder`.
    pub fn start(folder: &Path) -> Result<Self, Trouble> {
        Self::start_with(folder, "")
    }

    /// The same with more lines of server configuration, for instance `max_payload: 64KB`.
    pub fn start_with(folder: &Path, extra: &str) -> Result<Self, Trouble> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let unique = COUNT.fetch_add(1, Ordering::Relaxed);
        let mut server = Self {
            folder: folder.to_owned(),
            name: format!("testbed-{}-{unique}", std::process::id()),
            port: 0,
            jetstream: true,
            extra: extra.to_owned(),
            process: None,
        };
        std::fs::create_dir_all(folder).map_err(Trouble::io(format!("make the folder {}", folder.display())))?;
        let mut last = None;
        for _ in 0..PORTS {
            server.port = unused_port()?;
            match server.resume() {
                Ok(()) => return Ok(server),
                Err(e) if server.log().contains("address already in use") => last = Some(e),
                Err(e) => return Err(e),
            }
        }
        Err(last.unwrap_or_else(|| Trouble::failed("no port for a nats-server")))
    }

    /// Where clients connect.
    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// The process id while it runs.
    pub fn id(&self) -> Option<u32> {
        self.process.as_ref().map(Process::id)
    }

    /// Starts it again after [`Self::stop`] or [`Self::kill`]: same port, same store.
    pub fn resume(&mut self) -> Result<(), Trouble> {
        self.process = None;
        let config = self.write_config()?;
        let log_path = self.log_path();
        let log = OpenOptions::new().create(true).append(true).open(&log_path);
        let log = log.map_err(Trouble::io(format!("open {}", log_path.display())))?;
        let log_too = log.try_clone().map_err(Trouble::io("share the log of the nats-server"))?;
        let mut command = Command::new(finder::nats_server()?);
        command.arg("-c").arg(config).stdin(Stdio::null()).stdout(log).stderr(log_too);
        let mut process = Process::spawn(&mut command, "nats-server")?;
        let ready = wait::until("nats-server ready", Duration::from_secs(20), || match process.ended() {
            Some(status) => Ok(Err(status)),
            None => greeting(self.port, &self.name).map(Ok),
        })?;
        if let Err(status) = ready {
            let log = self.log();
            let tail: Vec<_> = log.lines().filter(|l| !l.trim().is_empty()).collect();
            let tail = tail.last().unwrap_or(&"it said nothing");
            return Err(Trouble::failed(format!("nats-server ended at once ({status}): {tail}")));
        }
        self.process = Some(process);
        Ok(())
    }

    /// Asks it to stop (SIGTERM) and waits; acked messages are on disk then.
    pub fn stop(&mut self) -> Result<(), Trouble> {
        let mut process = self.running()?;
        process.signal(Signal::CONT)?;
        process.signal(Signal::TERM)?;
        process.wait(STOP).map(drop)
    }

    /// kill -9.
    pub fn kill(&mut self) -> Result<(), Trouble> {
        self.running()?.kill().map(drop)
    }

    /// SIGSTOP: connections stay open and nobody answers. What was sent meanwhile is read after [`Self::thaw`].
    pub fn freeze(&mut self) -> Result<(), Trouble> {
        self.signal(Signal::STOP)?;
        // the signal is on its way when `kill` returns: frozen is when every thread is
        let tasks = format!("/proc/{}/task", self.id().unwrap_or_default());
        wait::until("a stopped process", Duration::from_secs(5), || {
            for task in std::fs::read_dir(&tasks).map_err(|e| e.to_string())? {
                let stat = task.map_err(|e| e.to_string())?.path().join("stat");
                // a thread that has ended meanwhile runs no more
                let text = std::fs::read_to_string(stat).unwrap_or_else(|_| ") T".into());
                if !text.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T')) {
                    return Err(text);
                }
            }
            Ok(())
        })
    }

    /// SIGCONT.
    pub fn thaw(&mut self) -> Result<(), Trouble> {
        self.signal(Signal::CONT)
    }

    /// Changes the extra lines of its configuration and has it read them again, without a restart.
    pub fn reconfigure(&mut self, extra: &str) -> Result<(), Trouble> {
        self.extra = extra.to_owned();
        self.write_config()?;
        self.signal(Signal::HUP)
    }

    /// Extra lines that hold from the next [`Self::resume`] on.
    pub fn set_extra(&mut self, extra: &str) {
        self.extra = extra.to_owned();
    }

    /// JetStream on or off from the next [`Self::resume`] on; the store stays.
    pub fn set_jetstream(&mut self, on: bool) {
        self.jetstream = on;
    }

    /// All that it has logged.
    pub fn log(&self) -> String {
        std::fs::read(self.log_path()).map(|b| String::from_utf8_lossy(&b).into_owned()).unwrap_or_default()
    }

    fn signal(&mut self, signal: Signal) -> Result<(), Trouble> {
        self.process.as_mut().ok_or_else(|| Trouble::failed("the nats-server is not running"))?.signal(signal)
    }

    fn running(&mut self) -> Result<Process, Trouble> {
        self.process.take().ok_or_else(|| Trouble::failed("the nats-server is not running"))
    }

    fn log_path(&self) -> PathBuf {
        self.folder.join("nats-server.log")
    }

    fn write_config(&self) -> Result<PathBuf, Trouble> {
        let path = self.folder.join("nats-server.conf");
        let mut text = format!("server_name: {}\nlisten: \"127.0.0.1:{}\"\n", self.name, self.port);
        if self.jetstream {
            text += &format!("jetstream {{ store_dir: \"{}\" }}\n", self.folder.join("store").display());
        }
        text += &self.extra;
        text.push('\n');
        File::create(&path)
            .and_then(|mut f| f.write_all(text.as_bytes()))
            .map_err(Trouble::io(format!("write {}", path.display())))?;
        Ok(path)
    }
}

/// Whether the server of this name greets on the port (`INFO {..}` is the first line of the protocol).
fn greeting(port: u16, name: &str) -> Result<(), String> {
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let read = || -> std::io::Result<String> {
        let socket = TcpStream::connect_timeout(&address, Duration::from_millis(500))?;
        socket.set_read_timeout(Some(Duration::from_secs(1)))?;
        let mut line = String::new();
        BufReader::new(socket).read_line(&mut line)?;
        Ok(line)
    };
    match read() {
        Ok(line) if line.starts_with("INFO ") && line.contains(&format!("\"{name}\"")) => Ok(()),
        Ok(line) => Err(format!("port {port} greets with {:?}", line.chars().take(60).collect::<String>())),
        Err(e) => Err(format!("port {port}: {e}")),
    }
}

/// A port that nobody listens on and that no outgoing connection is given.
pub fn unused_port() -> Result<u16, Trouble> {
    let lowest_outgoing = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range")
        .ok()
        .and_then(|text| text.split_whitespace().next()?.parse::<u16>().ok())
        .unwrap_or(32_768);
    let below = lowest_outgoing.clamp(12_000, 32_768);
    for _ in 0..1_000 {
        let port = rand::random_range(10_000..below);
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return Ok(port);
        }
    }
    Err(Trouble::failed("no free port was found on 127.0.0.1"))
}

#[cfg(test)]
mod tests {
    use super::super::workdir::Workdir;
    use super::*;

    #[test]
    fn a_server_comes_back_on_its_port_after_a_stop_and_a_kill() {
        let dir = Workdir::new("server").expect("a folder");
        let mut server = NatsServer::start(dir.path()).expect("it starts");
        let url = server.url();
        server.stop().expect("it stops");
        assert!(greeting(server.port(), &server.name).is_err());
        server.resume().expect("it is back");
        server.kill().expect("it is killed");
        server.resume().expect("it is back again");
        assert_eq!(server.url(), url);
        greeting(server.port(), &server.name).expect("it greets");
    }

    #[test]
    fn a_frozen_server_answers_nobody_until_it_is_thawed() {
        let dir = Workdir::new("server").expect("a folder");
        let mut server = NatsServer::start(dir.path()).expect("it starts");
        server.freeze().expect("frozen");
        assert!(greeting(server.port(), &server.name).is_err(), "the kernel connects, nobody greets");
        server.thaw().expect("thawed");
        wait::until("a greeting", Duration::from_secs(10), || greeting(server.port(), &server.name))
            .expect("it greets");
    }

    #[test]
    fn a_broken_configuration_is_told_with_the_servers_own_words() {
        let dir = Workdir::new("server").expect("a folder");
        let refused = NatsServer::start_with(dir.path(), "max_payload: sixty").expect_err("refused");
        assert!(refused.to_string().contains("nats-server.conf:4:1"), "{refused}");
    }
}
