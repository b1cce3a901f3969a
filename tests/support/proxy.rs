//! A TCP proxy on a port of its own in front of a server: passes, cuts, or swallows what it is given.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

const PASS: u8 = 0;
const CUT: u8 = 1;
const SWALLOW: u8 = 2;
const SWALLOW_ANSWERS: u8 = 3;

/// The proxy; dropping it closes every connection.
pub struct Proxy {
    port: u16,
    shared: Arc<Shared>,
}

struct Shared {
    mode: AtomicU8,
    accepted: AtomicU64,
    open: Mutex<Vec<TcpStream>>,
}

impl Proxy {
    /// A proxy to 127.0.0.1:`target`.
    pub fn to(target: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("listening");
        let port = listener.local_addr().expect("an address").port();
        let shared =
            Arc::new(Shared { mode: AtomicU8::new(PASS), accepted: AtomicU64::new(0), open: Mutex::default() });
        let inside = Arc::downgrade(&shared);
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let Some(shared) = inside.upgrade() else { return };
                shared.accepted.fetch_add(1, Ordering::Relaxed);
                if shared.mode.load(Ordering::Relaxed) != CUT {
                    connect(&shared, client, target);
                }
            }
        });
        Self { port, shared }
    }

    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    /// Connections accepted so far.
    pub fn accepted(&self) -> u64 {
        self.shared.accepted.load(Ordering::Relaxed)
    }

    /// Everything passes again; connections made while swallowing stay dead, as they would behind a firewall.
    pub fn pass(&self) {
        self.shared.mode.store(PASS, Ordering::Relaxed);
        self.close_all();
    }

    /// Closes every connection and refuses new ones.
    pub fn cut(&self) {
        self.shared.mode.store(CUT, Ordering::Relaxed);
        self.close_all();
    }

    /// Keeps connections open and throws away what passes, both ways.
    pub fn swallow(&self) {
        self.shared.mode.store(SWALLOW, Ordering::Relaxed);
    }

    /// The server still receives; its answers are thrown away: stored, and the ack is lost.
    pub fn swallow_answers(&self) {
        self.shared.mode.store(SWALLOW_ANSWERS, Ordering::Relaxed);
    }

    fn close_all(&self) {
        for socket in self.shared.open.lock().expect("no panic inside").drain(..) {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.cut();
        // wakes the accepting thread, which then sees that nobody needs it
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}

fn connect(shared: &Arc<Shared>, client: TcpStream, target: u16) {
    let Ok(server) = TcpStream::connect(("127.0.0.1", target)) else { return };
    let Ok(pair) = client.try_clone().and_then(|c| Ok((c, server.try_clone()?))) else { return };
    let mut open = shared.open.lock().expect("no panic inside");
    open.extend([&client, &server].into_iter().flat_map(|s| s.try_clone()));
    drop(open);
    let (client_too, server_too) = pair;
    pump(shared.clone(), client, server, [SWALLOW, SWALLOW]);
    pump(shared.clone(), server_too, client_too, [SWALLOW, SWALLOW_ANSWERS]);
}

/// Copies until one side closes; in a mode of `thrown_away` the bytes go nowhere.
fn pump(shared: Arc<Shared>, mut from: TcpStream, mut to: TcpStream, thrown_away: [u8; 2]) {
    thread::spawn(move || {
        let mut buffer = [0; 16 * 1024];
        while let Ok(n) = from.read(&mut buffer) {
            if n == 0 {
                break;
            }
            if thrown_away.contains(&shared.mode.load(Ordering::Relaxed)) {
                continue;
            }
            if to.write_all(&buffer[..n]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Both);
        let _ = from.shutdown(Shutdown::Both);
    });
}
