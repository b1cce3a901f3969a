//! What the tests that run the real executable share: a world of one nats-server and some nodes, waiting on levels,
//! and a proxy that cuts or swallows the connection between them.
//!
//! Each test file is a crate of its own and uses a part of this.
#![allow(dead_code, unreachable_pub)]

pub mod proxy;

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::time::Duration;

use outboxd::testbed::application::{self, Application, Ledger};
use outboxd::testbed::node::Node;
use outboxd::testbed::proof::Proof;
use outboxd::testbed::server::NatsServer;
use outboxd::testbed::stream::Client;
use outboxd::testbed::wait;
use outboxd::testbed::workdir::Workdir;

/// The executable under test.
pub fn executable() -> PathBuf {
    env!("CARGO_BIN_EXE_outboxd").into()
}

/// Waits for a level; a level that does not come fails the test with what was seen last.
pub fn eventually<T, E: Display>(what: &str, bound: Duration, look: impl FnMut() -> Result<T, E>) -> T {
    wait::until(what, bound, look).unwrap_or_else(|late| panic!("{late}"))
}

/// Seconds, shorter to read.
pub const fn s(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// A nats-server and a folder for nodes. Fields drop in this order: the server, then the folder.
pub struct World {
    pub nats: NatsServer,
    pub ledger: Ledger,
    dir: Workdir,
}

impl World {
    pub fn new() -> Self {
        Self::with("")
    }

    /// A server with more lines of configuration.
    pub fn with(extra: &str) -> Self {
        let dir = Workdir::new("test").expect("a folder");
        let nats = NatsServer::start_with(&dir.path().join("nats"), extra).expect("a nats-server");
        Self { nats, ledger: Ledger::default(), dir }
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// A node with an initialised database, not started. Leases and acks are short, so that a test of them is too.
    pub fn node(&self, name: &str) -> Node {
        let node = self.bare_node(name);
        node.init(&["--example"]).expect("db init");
        node
    }

    /// A node without a database.
    pub fn bare_node(&self, name: &str) -> Node {
        let mut node = Node::new(&executable(), self.path(), name, &self.nats.url()).expect("a node");
        node.set("relay.lease", "3s").set("relay.ack_wait", "1s").set("log.format", "text");
        node.write_config().expect("config.toml");
        node
    }

    /// An application that writes to the database of a node.
    pub fn application(&self, node: &Node) -> Application {
        let record = node.folder().join("committed");
        Application::open(&node.database(), &record, &self.ledger).expect("an application")
    }

    /// A plain client of the server.
    pub fn client(&self) -> Client {
        Client::connect(&self.nats.url()).expect("a client")
    }

    /// Judges what the stream holds.
    pub fn proof(&self) -> Proof {
        Proof::of(&self.ledger, &self.client().messages("EVENTS").expect("the stream"))
    }
}

/// Waits until every event of the node's outbox is published.
pub fn await_published(node: &Node, wanted: usize, bound: Duration) {
    eventually(&format!("{wanted} published"), bound, || {
        let published = application::count(&node.database(), "published").map_err(|e| e.to_string())?;
        if published == wanted as i64 { Ok(()) } else { Err(format!("{published} published")) }
    });
}

/// Rows in a status.
pub fn count(node: &Node, status: &str) -> i64 {
    application::count(&node.database(), status).expect("readable")
}

/// The proof of the whole of it; prints what was wrong.
pub fn assert_proven(world: &World) -> Proof {
    let proof = world.proof();
    assert!(proof.holds(), "{proof}");
    proof
}
