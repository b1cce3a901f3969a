//! A child process that cannot outlive its owner, and the signals a test needs.
//!
//! Each child has a guard beside it: a shell that waits on a pipe whose other end only we hold. However we end, also by
//! SIGKILL, the pipe closes and the guard kills the child. (A parent-death signal would need unsafe code, and follows
//! the thread that started the child, not the process.)

use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use super::{Trouble, wait};

/// A running child and its guard.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    guard: Option<Child>,
    ended: Option<ExitStatus>,
}

impl Process {
    /// Starts `command` in a process group of its own, so that a Ctrl-C at the terminal reaches us only.
    pub fn spawn(command: &mut Command, name: &str) -> Result<Self, Trouble> {
        let child = command.process_group(0).spawn().map_err(Trouble::io(format!("start {name}")))?;
        let mut process = Self { name: name.to_owned(), child, guard: None, ended: None };
        let guard = Command::new("/bin/sh")
            .args(["-c", r#"read -r _; kill -9 "$0" 2>/dev/null"#, &process.child.id().to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .map_err(Trouble::io(format!("start the guard of {name}")))?;
        process.guard = Some(guard);
        Ok(process)
    }

    /// The process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Closes our end of pipes that were set up for its outputs: whatever it writes from now on has no reader.
    pub fn close_output(&mut self) {
        self.child.stdout = None;
        self.child.stderr = None;
    }

    /// Sends a signal; a child that has ended is an error, so that no stranger with its number is hit.
    pub fn signal(&mut self, signal: Signal) -> Result<(), Trouble> {
        if let Some(status) = self.ended() {
            return Err(Trouble::failed(format!("{} has ended already ({status})", self.name)));
        }
        let pid = Pid::from_child(&self.child);
        kill_process(pid, signal).map_err(|e| Trouble::io(format!("send {signal:?} to {}", self.name))(e.into()))
    }

    /// How it ended, if it has.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        if self.ended.is_none()
            && let Ok(Some(status)) = self.child.try_wait()
        {
            self.ended = Some(status);
            self.dismiss_guard();
        }
        self.ended
    }

    /// Waits until it ends by itself.
    pub fn wait(&mut self, bound: Duration) -> Result<ExitStatus, Trouble> {
        let what = format!("end of {}", self.name);
        wait::until(what, bound, || self.ended().ok_or("it still runs"))
    }

    /// SIGKILL, then waits for the end. A child that has ended already stays as it is.
    pub fn kill(&mut self) -> Result<ExitStatus, Trouble> {
        if let Some(status) = self.ended() {
            return Ok(status);
        }
        self.child.kill().map_err(Trouble::io(format!("kill {}", self.name)))?;
        let status = self.child.wait().map_err(Trouble::io(format!("wait for {}", self.name)))?;
        self.ended = Some(status);
        self.dismiss_guard();
        Ok(status)
    }

    /// The guard goes as soon as its charge is reaped: the number may belong to somebody else from then on.
    fn dismiss_guard(&mut self) {
        if let Some(mut guard) = self.guard.take() {
            let _ = guard.kill();
            let _ = guard.wait();
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.kill();
        self.dismiss_guard();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn alive(pid: u32) -> bool {
        // a zombie is dead too: only its parent has not looked yet
        std::fs::read_to_string(format!("/proc/{pid}/stat"))
            .is_ok_and(|stat| !stat.rsplit(')').next().unwrap_or("").trim_start().starts_with('Z'))
    }

    fn sleeper() -> Process {
        Process::spawn(Command::new("sleep").arg("600"), "sleeper").expect("sleep starts")
    }

    #[test]
    fn a_child_ends_with_its_owner_also_while_frozen() {
        let mut child = sleeper();
        child.signal(Signal::STOP).expect("stopped");
        let pid = child.id();
        drop(child);
        assert!(!alive(pid));
    }

    #[test]
    fn a_guard_kills_the_child_when_the_owner_cannot() {
        let mut child = sleeper();
        let pid = child.id();
        // what the guard sees of a killed owner: its pipe closes
        drop(child.guard.as_mut().expect("a guard").stdin.take());
        wait::until("the child killed", Duration::from_secs(10), || if alive(pid) { Err("alive") } else { Ok(()) })
            .expect("the guard killed it");
    }

    #[test]
    fn a_signal_to_an_ended_child_is_an_error() {
        let mut child = Process::spawn(&mut Command::new("true"), "true").expect("true starts");
        let status = child.wait(Duration::from_secs(10)).expect("it ends");
        assert!(status.success());
        assert!(child.signal(Signal::TERM).is_err());
        assert!(child.kill().expect("killing it is no error").success());
    }
}
