//! The command line's end of the unix socket. Blocking, because a command does one thing.
//!
//! What matters is what a failure means: [`Answer::Absent`] lets the caller work on the file itself; everything else
//! does not, because somebody holds the socket. May import: protocol, std, rustix.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect as connect_socket, socket_with};

use super::protocol::{self, Envelope, Fault, GREETING_WAIT, Greeting, LINE_MAX, Reply, Request};
use crate::domain::event::Millis;

/// How a request ended.
#[derive(Debug)]
pub enum Answer {
    /// The daemon answered.
    Replied(Reply),
    /// No daemon: no socket, or nobody listens on it. Nothing was asked.
    Absent,
    /// A daemon is there, but not for this user. Nothing was asked.
    Forbidden(Fault),
    /// Somebody holds the socket and does not greet: a daemon that hangs or is stopped. Nothing was asked.
    Silent(Fault),
    /// The daemon took the request and did not answer in time: it may be done, or be done yet, until it expires.
    Unknown(Fault),
}

/// Asks the daemon at the first of `sockets` that somebody holds. `now` is the wall clock.
pub fn ask(sockets: &[PathBuf], request: &Request, now: Millis) -> Answer {
    for path in sockets {
        match converse(path, request, now) {
            Answer::Absent => {}
            answer => return answer,
        }
    }
    Answer::Absent
}

fn converse(path: &Path, request: &Request, now: Millis) -> Answer {
    let stream = match connect(path, GREETING_WAIT) {
        Ok(stream) => stream,
        Err(error) => return refused(path, &error),
    };
    let mut reader = BufReader::new(&stream);
    let greeting: Greeting = match read(&stream, &mut reader, GREETING_WAIT) {
        Ok(greeting) => greeting,
        // whoever had it closed it without a word: a daemon that just ended
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Answer::Absent,
        Err(error) => return silent(path, &error),
    };
    if let Some(fault) = greeting.refused {
        return Answer::Forbidden(fault);
    }
    let patience = request.patience();
    let envelope = Envelope {
        v: protocol::VERSION,
        expires_at: now.saturating_add(i64::try_from((GREETING_WAIT + patience).as_millis()).unwrap_or(i64::MAX)),
        sudo_user: std::env::var("SUDO_USER").ok(),
        request: request.clone(),
    };
    let sent = stream
        .set_write_timeout(Some(GREETING_WAIT))
        .and_then(|()| (&stream).write_all(protocol::line(&envelope).as_bytes()));
    if let Err(error) = sent {
        // a line without its end is never acted upon
        return silent(path, &error);
    }
    match read(&stream, &mut reader, patience) {
        Ok(reply) => Answer::Replied(reply),
        Err(error) => Answer::Unknown(Fault::new(
            69,
            format!("the daemon (pid {}) took the request and did not answer: {error}", greeting.pid),
            "look with `outboxd status` and `outboxd audit` whether it was done, and at the daemon's log",
        )),
    }
}

fn refused(path: &Path, error: &io::Error) -> Answer {
    match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => Answer::Absent,
        io::ErrorKind::PermissionDenied => Answer::Forbidden(Fault::new(
            69,
            format!("the daemon's socket {} is forbidden to this user; nothing was written", path.display()),
            "run the command as root, as the daemon's user or as the owner of the database",
        )),
        _ => silent(path, error),
    }
}

fn silent(path: &Path, error: &io::Error) -> Answer {
    Answer::Silent(Fault::new(
        69,
        format!("a daemon holds {} and does not answer ({error}); nothing was written", path.display()),
        "look at its log; if it hangs, stop it: the command then works on the file itself",
    ))
}

/// Connects within `wait`, also where the queue of the other side is full.
pub(super) fn connect(path: &Path, wait: Duration) -> io::Result<UnixStream> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // Linux: the send time-out also bounds connect(2) of a unix socket
    set_socket_timeout(&socket, Timeout::Send, Some(wait))?;
    connect_socket(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(UnixStream::from(socket))
}

fn read<T: serde::de::DeserializeOwned>(
    stream: &UnixStream,
    reader: &mut BufReader<&UnixStream>,
    wait: Duration,
) -> io::Result<T> {
    stream.set_read_timeout(Some(wait))?;
    let mut line = Vec::new();
    reader.take(LINE_MAX as u64).read_until(b'\n', &mut line).map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock => {
            io::Error::new(io::ErrorKind::TimedOut, format!("nothing for {} s", wait.as_secs()))
        }
        _ => error,
    })?;
    if line.is_empty() {
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it closed the connection"));
    }
    serde_json::from_slice(&line).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
}
