//! A machine with a systemd of its own, for one test: booted by `boot-systemd.sh` in namespaces, thrown away at the end.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use outboxd::testbed::process::Process;
use outboxd::testbed::wait;

const REPOSITORY: &str = env!("CARGO_MANIFEST_DIR");

/// A booted machine; powered off when it is dropped.
pub(crate) struct Machine {
    _boot: Process,
    _folder: tempfile::TempDir,
    pid: String,
}

impl Machine {
    /// Boots, and installs what a package would: binary, unit, user, folders. `nats` is a server outside.
    pub(crate) fn boot(nats: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (work, units) = (folder.path().join("work"), folder.path().join("units"));
        fs::create_dir(&units).unwrap();
        fs::copy(Path::new(REPOSITORY).join("systemd/outboxd.service"), units.join("outboxd.service")).unwrap();
        let log = fs::File::create(folder.path().join("console")).unwrap();
        let mut command = Command::new(Path::new(REPOSITORY).join("tests/system/boot-systemd.sh"));
        command.args([&work, &units]).stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        let boot = Process::spawn(&mut command, "boot-systemd.sh").unwrap();
        let number = work.join("pid");
        let console = folder.path().join("console");
        let pid = wait::until("systemd is started", Duration::from_secs(20), || {
            fs::read_to_string(&number).map_err(|_| fs::read_to_string(&console).unwrap_or_default())
        })
        .unwrap();
        let machine = Self { _boot: boot, _folder: folder, pid: pid.trim().into() };
        machine.await_up();
        machine.install(nats);
        machine
    }

    fn await_up(&self) {
        wait::until("the machine is up", Duration::from_secs(60), || {
            let output = self.try_run(&["systemctl", "is-system-running"]);
            let state = String::from_utf8_lossy(&output.stdout).trim().to_owned();
            if state == "running" {
                Ok(())
            } else {
                Err(format!("{state} {}", String::from_utf8_lossy(&output.stderr)))
            }
        })
        .unwrap();
    }

    fn install(&self, nats: &str) {
        self.put_file("usr/bin/outboxd", Path::new(env!("CARGO_BIN_EXE_outboxd")));
        let systemd = Path::new(REPOSITORY).join("systemd");
        self.put_file("usr/lib/sysusers.d/outboxd.conf", &systemd.join("sysusers.d/outboxd.conf"));
        self.put_file("usr/lib/tmpfiles.d/outboxd.conf", &systemd.join("tmpfiles.d/outboxd.conf"));
        self.run(&["systemd-sysusers", "/usr/lib/sysusers.d/outboxd.conf"]);
        self.run(&["systemd-tmpfiles", "--create", "/usr/lib/tmpfiles.d/outboxd.conf"]);
        self.configure(&config(nats));
    }

    /// A path as seen from outside.
    pub(crate) fn path(&self, inside: &str) -> PathBuf {
        Path::new("/proc").join(&self.pid).join("root").join(inside.trim_start_matches('/'))
    }

    fn put_file(&self, inside: &str, file: &Path) {
        let target = self.path(inside);
        fs::create_dir_all(target.parent().unwrap()).unwrap();
        fs::copy(file, &target).unwrap_or_else(|e| panic!("copy {} into the machine: {e}", file.display()));
    }

    pub(crate) fn put(&self, inside: &str, text: &str) {
        let target = self.path(inside);
        fs::create_dir_all(target.parent().unwrap()).unwrap();
        fs::write(&target, text).unwrap();
    }

    /// Writes the configuration as a package manager leaves it: root's, readable for the service.
    pub(crate) fn configure(&self, text: &str) {
        self.put("etc/outboxd/config.toml", text);
        self.run(&["chown", "root:outboxd", "/etc/outboxd/config.toml"]);
        self.run(&["chmod", "0640", "/etc/outboxd/config.toml"]);
    }

    /// A command inside, as root; bounded in time.
    pub(crate) fn try_run(&self, command: &[&str]) -> Output {
        Command::new("timeout")
            .args(["--kill-after=5", "60", "nsenter", "--target", &self.pid])
            .args(["--mount", "--uts", "--ipc", "--pid", "--cgroup", "--root", "--wd=/"])
            .args(["env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "SYSTEMD_PAGER=cat"])
            .args(command)
            .stdin(Stdio::null())
            .output()
            .unwrap()
    }

    /// A command that has to succeed; its output.
    #[track_caller]
    pub(crate) fn run(&self, command: &[&str]) -> String {
        let output = self.try_run(command);
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{command:?}: {}\n{out}{err}\n{}", output.status, self.journal());
        out.into_owned()
    }

    /// A property of the service as systemd sees it.
    pub(crate) fn property(&self, name: &str) -> String {
        self.run(&["systemctl", "show", "--value", "--property", name, "outboxd.service"]).trim().into()
    }

    /// Waits until a property has a value.
    #[track_caller]
    pub(crate) fn await_property(&self, name: &str, wanted: impl Fn(&str) -> bool) -> String {
        wait::until(format!("{name} of the service"), Duration::from_secs(60), || {
            let value = self.property(name);
            if wanted(&value) { Ok(value) } else { Err(value) }
        })
        .unwrap_or_else(|late| panic!("{late}\n{}", self.journal()))
    }

    /// What the service wrote to its log.
    pub(crate) fn journal(&self) -> String {
        let output = self.try_run(&["journalctl", "--no-pager", "--output=short-iso", "--unit=outboxd.service"]);
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Commits `count` events from outside, as an application in another process does.
    pub(crate) fn commit(&self, database: &str, first: usize, count: usize) {
        let sql: String = (first..first + count)
            .map(|i| {
                format!(
                    "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, aggregate_version, event_type, \
                     schema_version, payload_json) VALUES ('evt-{i}', 'asset', 'a', {}, 'asset.updated', 1, '{{}}');",
                    i + 1
                )
            })
            .collect();
        self.run(&["sqlite3", "-cmd", ".timeout 10000", database, &format!("BEGIN IMMEDIATE; {sql} COMMIT;")]);
    }

    pub(crate) fn await_published(&self, database: &str, count: usize) {
        wait::until("events are published", Duration::from_secs(60), || {
            let query = "SELECT count(*) FROM outbox_events WHERE status = 'published' AND stream_seq IS NOT NULL";
            let published = self.run(&["sqlite3", "-readonly", database, query]).trim().to_owned();
            if published == count.to_string() { Ok(()) } else { Err(published) }
        })
        .unwrap_or_else(|late| panic!("{late}\n{}", self.journal()));
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.try_run(&["systemctl", "poweroff", "--force", "--force"]);
    }
}

/// The configuration of a packaged installation.
pub(crate) fn config(nats: &str) -> String {
    format!(
        "source = \"machine\"\n[database]\npath = \"{DATABASE}\"\n[nats]\nurls = [\"{nats}\"]\n[http]\nlisten = \"127.0.0.1:0\"\n"
    )
}

/// The database of [`config`].
pub(crate) const DATABASE: &str = "/var/lib/outboxd/outboxd.db";
