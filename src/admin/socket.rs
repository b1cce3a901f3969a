//! The unix socket of the command line: where it lies, who may use it, and the loop that serves it.
//!
//! Invariants: the file appears with its final mode (bound under another name, then renamed) · a socket that answers is
//! never taken away from its owner · a peer is root, the daemon's own user or the owner of the database, by the kernel's
//! word (SO_PEERCRED). May import: protocol, tokio, rustix.

use std::future::Future;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;

use super::protocol::{self, Envelope, Fault, Greeting, LINE_MAX, Reply};
use crate::limits::SOCKET_PATH;

/// Connections served at once; more wait in the kernel's queue.
const CONNECTIONS: usize = 32;

/// A connection that says nothing for this long is closed.
const IDLE: Duration = Duration::from_secs(60);

/// A peer that does not take its answer for this long is given up.
const WRITE_WAIT: Duration = Duration::from_secs(10);

/// The user id that the kernel shows for users it cannot name here (user namespaces): never a proof of anything.
const NOBODY: u32 = 65_534;

/// Where the socket of a database can lie: the configured path alone, or beside the database, or where that is too long
/// a short name under the run-time folder.
pub fn candidates(configured: Option<&Path>, database: &Path) -> Vec<PathBuf> {
    if let Some(path) = configured {
        return vec![path.to_path_buf()];
    }
    // one file has one socket, by whatever link it is reached
    let file = std::fs::canonicalize(database).unwrap_or_else(|_| database.to_path_buf());
    let mut beside = file.clone().into_os_string();
    beside.push(".outboxd.sock");
    if beside.len() <= SOCKET_PATH {
        return vec![beside.into()];
    }
    let name = format!("outboxd-{:016x}.sock", fnv(file.as_os_str().as_encoded_bytes()));
    vec![Path::new("/run/outboxd").join(&name), Path::new("/tmp").join(&name)]
}

/// The candidate that a daemon takes: the first whose folder it can write to.
pub fn choose(candidates: &[PathBuf]) -> &Path {
    let writable = |path: &&PathBuf| {
        path.parent().is_some_and(|dir| rustix::fs::access(dir, rustix::fs::Access::WRITE_OK).is_ok())
    };
    candidates.iter().find(writable).or(candidates.first()).expect("there is at least one candidate")
}

fn fnv(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

/// A bound socket; its file is removed with it, where it is still this one.
#[derive(Debug)]
pub struct Bound {
    listener: UnixListener,
    path: PathBuf,
    inode: (u64, u64),
}

impl Bound {
    /// Takes the path over, unless somebody answers there. `mode` is 0o600 or 0o660.
    pub fn bind(path: &Path, mode: u32) -> io::Result<Self> {
        if path.as_os_str().len() > SOCKET_PATH {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("the path is longer than {SOCKET_PATH} bytes; set admin.socket to a shorter one"),
            ));
        }
        refuse_if_taken(path)?;
        // a name of its own first: until the rename nobody sees a socket with a mode that is not final
        let own = path.with_file_name(format!(".ob{}", std::process::id()));
        let _ = std::fs::remove_file(&own);
        let listener = UnixListener::bind(&own)?;
        let placed = std::fs::set_permissions(&own, std::fs::Permissions::from_mode(mode))
            .and_then(|()| std::fs::symlink_metadata(&own))
            .and_then(|meta| std::fs::rename(&own, path).map(|()| (meta.dev(), meta.ino())));
        match placed {
            Ok(inode) => Ok(Self { listener, path: path.to_path_buf(), inode }),
            Err(error) => {
                let _ = std::fs::remove_file(&own);
                Err(error)
            }
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the file at the path is this socket.
    pub fn is_in_place(&self) -> bool {
        std::fs::symlink_metadata(&self.path).is_ok_and(|m| (m.dev(), m.ino()) == self.inode)
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        if self.is_in_place() {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// A stale socket may be replaced; a living one, and anything that is no socket, may not.
fn refuse_if_taken(path: &Path) -> io::Result<()> {
    let meta = match std::fs::symlink_metadata(path) {
        Ok(meta) => meta,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    if !meta.file_type().is_socket() {
        let why = "a file that is no socket lies there; remove it or set admin.socket";
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, why));
    }
    match super::client::connect(path, Duration::from_millis(500)) {
        Ok(_) => Err(io::Error::new(io::ErrorKind::AddrInUse, "another daemon serves it")),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

/// Who sits at the other end, as the kernel says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    pub uid: u32,
}

impl Peer {
    /// Root, the daemon's own user, and the owner of the database may change things; nobody else.
    pub fn may_operate(self, daemon: u32, owner: u32) -> bool {
        self.uid == 0 || (self.uid != NOBODY && (self.uid == daemon || self.uid == owner))
    }

    /// The name for the audit: the kernel's user id, and from root the login behind `sudo`.
    pub fn actor(self, sudo_user: Option<&str>) -> String {
        actor(self.uid, sudo_user)
    }
}

/// See [`Peer::actor`]; also for a command that works on the file itself.
pub fn actor(uid: u32, sudo_user: Option<&str>) -> String {
    match sudo_user {
        Some(login) if uid == 0 && !login.is_empty() => {
            let login: String = login.chars().filter(|c| !c.is_control()).take(64).collect();
            format!("uid 0 (sudo by {login})")
        }
        _ => format!("uid {uid}"),
    }
}

/// What a server does with a request. Called concurrently.
pub trait Handler: Send + Sync + 'static {
    /// Answers one request of a peer that may operate.
    fn handle(&self, peer: Peer, envelope: Envelope) -> impl Future<Output = Reply> + Send;

    /// The user that owns the database now; asked at each connection, because a restored file may have another.
    fn owner(&self) -> u32;
}

/// Serves until it is dropped or aborted; ends only where the listener fails for good.
pub async fn serve(bound: &Bound, handler: Arc<impl Handler>) -> io::Result<()> {
    let slots = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let slot = slots.clone().acquire_owned().await.map_err(io::Error::other)?;
        let stream = match bound.listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) if is_passing(&error) => {
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
            Err(error) => return Err(error),
        };
        let handler = handler.clone();
        tokio::spawn(async move {
            // a peer that hangs up in the middle is its own business
            let _ = converse(stream, &*handler).await;
            drop(slot);
        });
    }
}

/// No descriptors left, or a peer that was gone before it was accepted: the listener itself is sound.
fn is_passing(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let passing = [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM, Errno::CONNABORTED, Errno::INTR];
    error.raw_os_error().is_some_and(|code| passing.iter().any(|e| e.raw_os_error() == code))
}

async fn converse(stream: UnixStream, handler: &impl Handler) -> io::Result<()> {
    let peer = Peer { uid: stream.peer_cred()?.uid() };
    let daemon = rustix::process::geteuid().as_raw();
    let (reader, mut writer) = stream.into_split();
    let mut greeting = Greeting {
        outboxd: protocol::VERSION,
        version: env!("CARGO_PKG_VERSION").into(),
        pid: std::process::id(),
        refused: None,
    };
    if !peer.may_operate(daemon, handler.owner()) {
        greeting.refused = Some(Fault::new(
            69,
            format!("the daemon does not serve uid {}", peer.uid),
            "run the command as root, as the daemon's user or as the owner of the database",
        ));
        return send(&mut writer, &greeting).await;
    }
    send(&mut writer, &greeting).await?;
    let mut reader = BufReader::new(reader);
    loop {
        let mut line = Vec::new();
        let mut limited = (&mut reader).take(LINE_MAX as u64 + 1);
        let read = tokio::time::timeout(IDLE, limited.read_until(b'\n', &mut line)).await;
        let Ok(Ok(1..)) = read else { return Ok(()) };
        if line.last() != Some(&b'\n') {
            return send(&mut writer, &Reply::failed(malformed("it is too long or has no end"))).await;
        }
        let envelope = match serde_json::from_slice::<Envelope>(&line) {
            Ok(envelope) if envelope.v == protocol::VERSION => envelope,
            Ok(other) => {
                let what = format!("the daemon speaks version {}, the command {}", protocol::VERSION, other.v);
                let fault = Fault::new(69, what, "use the command of the version that runs, or restart the daemon");
                return send(&mut writer, &Reply::failed(fault)).await;
            }
            Err(error) => return send(&mut writer, &Reply::failed(malformed(&error.to_string()))).await,
        };
        // once begun it is finished, whether its asker waits or not: a half-done request would be the worse answer
        let reply = handler.handle(peer, envelope).await;
        send(&mut writer, &reply).await?;
    }
}

fn malformed(why: &str) -> Fault {
    Fault::new(70, format!("the daemon did not understand the request: {why}"), "compare `outboxd version` of both")
}

async fn send(writer: &mut tokio::net::unix::OwnedWriteHalf, value: &impl serde::Serialize) -> io::Result<()> {
    let line = protocol::line(value);
    tokio::time::timeout(WRITE_WAIT, writer.write_all(line.as_bytes()))
        .await
        .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

#[cfg(test)]
#[path = "socket_tests.rs"]
mod tests;
