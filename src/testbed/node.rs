//! A node: one outboxd with a folder, a configuration and a database of its own, run as a child process.

use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;

use super::process::Process;
use super::{Trouble, wait};

/// A command of the command line ends within this time, also on a busy machine.
const COMMAND: Duration = Duration::from_secs(60);

/// A daemon is up within this time.
const UP: Duration = Duration::from_secs(30);

/// Clock ticks a second in `/proc/*/stat`: 100 in every ABI of Linux that Rust supports.
const TICKS: f64 = 100.0;

/// What a command answered.
#[derive(Debug)]
pub struct Answer {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl Answer {
    /// The output of a command that had to succeed.
    pub fn ok(self) -> Result<String, Trouble> {
        match self.code {
            Some(0) => Ok(self.out),
            _ => Err(Trouble::failed(format!("the command ended with {:?}: {}", self.code, self.err.trim()))),
        }
    }
}

/// One outboxd, running or not. Dropping it kills the daemon and leaves the folder to its owner.
#[derive(Debug)]
pub struct Node {
    executable: PathBuf,
    folder: PathBuf,
    settings: toml::Table,
    arguments: Vec<String>,
    process: Option<Process>,
}

impl Node {
    /// A node called `name` in a folder of that name below `parent`; `name` is its source too. Nothing is started and
    /// no database is made yet.
    pub fn new(executable: &Path, parent: &Path, name: &str, nats_url: &str) -> Result<Self, Trouble> {
        let folder = parent.join(name);
        std::fs::create_dir_all(&folder).map_err(Trouble::io(format!("make the folder {}", folder.display())))?;
        let mut node = Self {
            executable: executable.to_owned(),
            folder,
            settings: toml::Table::new(),
            arguments: Vec::new(),
            process: None,
        };
        node.set("source", name);
        node.set("database.path", "app.db");
        node.set("nats.urls", vec![nats_url]);
        node.set("http.listen", "");
        node.write_config()?;
        Ok(node)
    }

    /// Sets a key of the configuration, `relay.lease` for instance; it is in the file after [`Self::write_config`],
    /// which [`Self::start`] calls too.
    pub fn set(&mut self, path: &str, value: impl Into<toml::Value>) -> &mut Self {
        let mut keys: Vec<&str> = path.split('.').collect();
        let last = keys.pop().unwrap_or(path);
        let mut table = &mut self.settings;
        for key in keys {
            let next = table.entry(key).or_insert_with(|| toml::Value::Table(toml::Table::new()));
            table = next.as_table_mut().expect("a path of the testbed never runs through a plain value");
        }
        table.insert(last.to_owned(), value.into());
        self
    }

    /// Turns the inbox on and adds a handler; `sql` is empty for all but `apply = "sql"`.
    pub fn handle(&mut self, event_type: &str, apply: &str, sql: &str) -> &mut Self {
        self.set("inbox.enabled", true);
        let mut handler = toml::Table::new();
        handler.insert("event_type".into(), event_type.into());
        handler.insert("apply".into(), apply.into());
        if !sql.is_empty() {
            handler.insert("sql".into(), sql.into());
        }
        let inbox = self.settings["inbox"].as_table_mut().expect("set above");
        let list = inbox.entry("handler").or_insert_with(|| toml::Value::Array(Vec::new()));
        list.as_array_mut().expect("made here").push(handler.into());
        self
    }

    /// Extra arguments of `outboxd run`, `--grace 2s` for instance.
    pub fn run_with(&mut self, arguments: &[&str]) -> &mut Self {
        self.arguments = arguments.iter().map(|a| (*a).to_owned()).collect();
        self
    }

    /// Writes the settings to the configuration file.
    pub fn write_config(&self) -> Result<(), Trouble> {
        self.write_config_text(&self.config_text())
    }

    /// The settings as the configuration file has them.
    pub fn config_text(&self) -> String {
        self.settings.to_string()
    }

    /// Any text as the configuration file, also a broken one.
    pub fn write_config_text(&self, text: &str) -> Result<(), Trouble> {
        let path = self.config();
        std::fs::write(&path, text).map_err(Trouble::io(format!("write {}", path.display())))
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    pub fn config(&self) -> PathBuf {
        self.folder.join("config.toml")
    }

    pub fn database(&self) -> PathBuf {
        self.folder.join("app.db")
    }

    /// A command of this node, ready to run: its configuration, none of our own environment's settings.
    pub fn command<S: AsRef<OsStr>>(&self, arguments: &[S]) -> Command {
        let mut command = Command::new(&self.executable);
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("OUTBOXD_") {
                command.env_remove(name);
            }
        }
        command.env_remove("NOTIFY_SOCKET").env_remove("JOURNAL_STREAM");
        command.current_dir(&self.folder).arg("--config").arg(self.config()).args(arguments);
        command
    }

    /// Runs a command to its end.
    pub fn cli<S: AsRef<OsStr>>(&self, arguments: &[S]) -> Result<Answer, Trouble> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let n = COUNT.fetch_add(1, Ordering::Relaxed);
        let file = |kind: &str| self.folder.join(format!("command-{n}.{kind}"));
        let (out, err) = (file("out"), file("err"));
        let make = |path: &Path| File::create(path).map_err(Trouble::io(format!("make {}", path.display())));
        let mut command = self.command(arguments);
        command.stdin(Stdio::null()).stdout(make(&out)?).stderr(make(&err)?);
        let words: Vec<_> = arguments.iter().map(|a| a.as_ref().to_string_lossy().into_owned()).collect();
        let status = Process::spawn(&mut command, &format!("outboxd {}", words.join(" ")))?.wait(COMMAND)?;
        let take = |path: &Path| {
            let text = std::fs::read(path).map(|b| String::from_utf8_lossy(&b).into_owned()).unwrap_or_default();
            let _ = std::fs::remove_file(path);
            text
        };
        Ok(Answer { code: status.code(), out: take(&out), err: take(&err) })
    }

    /// `db init`, with more arguments (`--example`).
    pub fn init(&self, arguments: &[&str]) -> Result<(), Trouble> {
        let all: Vec<_> = ["db", "init"].iter().chain(arguments).copied().collect();
        self.cli(&all)?.ok().map(drop)
    }

    /// Starts the daemon with the settings as they are now and waits until it runs.
    pub fn start(&mut self) -> Result<(), Trouble> {
        self.write_config()?;
        self.spawn()?;
        self.await_up()
    }

    /// Starts the daemon with the configuration file as it stands and returns at once.
    pub fn spawn(&mut self) -> Result<(), Trouble> {
        self.process = None;
        let path = self.log_path();
        let log = OpenOptions::new().create(true).append(true).open(&path);
        let log = log.map_err(Trouble::io(format!("open {}", path.display())))?;
        let log_too = log.try_clone().map_err(Trouble::io("share the log of the daemon"))?;
        let mut arguments = vec!["run".to_owned()];
        arguments.extend(self.arguments.iter().cloned());
        let mut command = self.command(&arguments);
        command.stdin(Stdio::null()).stdout(log).stderr(log_too);
        self.process = Some(Process::spawn(&mut command, "outboxd run")?);
        Ok(())
    }

    /// Waits until the daemon answers that it runs; one that ended is told with its last words.
    pub fn await_up(&mut self) -> Result<(), Trouble> {
        let ended = wait::until("daemon up", UP, || {
            if let Some(status) = self.daemon().ok().and_then(Process::ended) {
                return Ok(Some(status));
            }
            match self.state() {
                Ok(state) if ["running", "paused", "halted"].contains(&state.as_str()) => Ok(None),
                Ok(state) => Err(format!("state {state:?}")),
                Err(e) => Err(e.to_string()),
            }
        })?;
        match ended {
            None => Ok(()),
            Some(status) => Err(Trouble::failed(format!("the daemon ended at once ({status}): {}", self.last_words()))),
        }
    }

    /// `status --json`.
    pub fn status(&self) -> Result<Value, Trouble> {
        let text = self.cli(&["status", "--json"])?.ok()?;
        serde_json::from_str(&text).map_err(|e| Trouble::failed(format!("status is no JSON ({e}): {text}")))
    }

    /// `state` of the status.
    pub fn state(&self) -> Result<String, Trouble> {
        Ok(self.status()?["state"].as_str().unwrap_or("absent").to_owned())
    }

    /// The running daemon.
    pub fn daemon(&mut self) -> Result<&mut Process, Trouble> {
        self.process.as_mut().ok_or_else(|| Trouble::failed("the daemon was not started"))
    }

    /// Sends the daemon a signal.
    pub fn signal(&mut self, signal: Signal) -> Result<(), Trouble> {
        self.daemon()?.signal(signal)
    }

    /// kill -9.
    pub fn kill(&mut self) -> Result<(), Trouble> {
        self.daemon()?.kill().map(drop)
    }

    /// SIGTERM, then waits for the end.
    pub fn stop(&mut self, bound: Duration) -> Result<ExitStatus, Trouble> {
        self.signal(Signal::TERM)?;
        self.daemon()?.wait(bound)
    }

    /// All that the daemon has logged.
    pub fn log(&self) -> String {
        std::fs::read(self.log_path()).map(|b| String::from_utf8_lossy(&b).into_owned()).unwrap_or_default()
    }

    /// CPU seconds that the daemon has used, user and system.
    pub fn cpu_seconds(&mut self) -> Result<f64, Trouble> {
        let stat = self.proc_file("stat")?;
        // the fields after the name in parentheses; utime and stime are the 14th and 15th of the whole line
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or("").split_whitespace().collect();
        let ticks: u64 = fields.iter().skip(11).take(2).filter_map(|f| f.parse::<u64>().ok()).sum();
        Ok(ticks as f64 / TICKS)
    }

    /// Resident memory of the daemon in bytes.
    pub fn resident_bytes(&mut self) -> Result<u64, Trouble> {
        let status = self.proc_file("status")?;
        let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"));
        let kib = line.and_then(|l| l.split_whitespace().next()).and_then(|n| n.parse::<u64>().ok());
        kib.map(|k| k * 1024).ok_or_else(|| Trouble::failed("no VmRSS in the daemon's /proc status"))
    }

    fn proc_file(&mut self, name: &str) -> Result<String, Trouble> {
        let path = format!("/proc/{}/{name}", self.daemon()?.id());
        std::fs::read_to_string(&path).map_err(Trouble::io(format!("read {path}")))
    }

    fn log_path(&self) -> PathBuf {
        self.folder.join("outboxd.log")
    }

    fn last_words(&self) -> String {
        let log = self.log();
        log.lines().rfind(|l| !l.trim().is_empty()).unwrap_or("it said nothing").to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::super::workdir::Workdir;
    use super::*;

    #[test]
    fn settings_become_a_file_that_reads_back() {
        let dir = Workdir::new("node").expect("a folder");
        let mut node = Node::new(Path::new("outboxd"), dir.path(), "plant-a", "nats://127.0.0.1:1").expect("a node");
        node.set("relay.lease", "3s").set("relay.backoff.cap", "1s").handle("asset.*", "assets", "");
        node.write_config().expect("written");
        let text = std::fs::read_to_string(node.config()).expect("readable");
        let read: toml::Table = text.parse().expect("valid TOML");
        assert_eq!(read["source"].as_str(), Some("plant-a"));
        assert_eq!(read["relay"]["backoff"]["cap"].as_str(), Some("1s"));
        assert_eq!(read["inbox"]["handler"][0]["apply"].as_str(), Some("assets"));
        assert_eq!(read["inbox"]["enabled"].as_bool(), Some(true));
    }

    #[test]
    fn a_command_answers_with_its_code_and_both_outputs() {
        let dir = Workdir::new("node").expect("a folder");
        let node = Node::new(Path::new("/bin/echo"), dir.path(), "plant-a", "nats://127.0.0.1:1").expect("a node");
        let answer = node.cli(&["status"]).expect("it ran");
        assert_eq!(answer.code, Some(0));
        assert!(answer.out.starts_with("--config ") && answer.out.ends_with(" status\n"), "{answer:?}");
    }
}
