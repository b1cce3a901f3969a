//! `outboxd bench`: rates and latencies on this machine, each beside a limit measured in the same run.
//!
//! A shared machine is noisy: what is compared runs in turn (A B C, A B C, ..) and the medians stand in the result; a
//! ratio says more than a rate. Daemons are child processes of the same executable, the nats-server is our own.
//! May import: testbed, and the store's public calls for the limit that SQLite sets.

mod drain;
mod latency;
mod limit;
mod report;

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Map, Value, json};

use crate::testbed::application::{Application, Generator, Ledger};
use crate::testbed::node::Node;
use crate::testbed::server::NatsServer;
use crate::testbed::workdir::Workdir;
use crate::testbed::{self, Trouble, finder, wait};

/// What can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measure {
    /// Drain rate of a backlog beside raw publishing and beside lease + settle alone.
    Drain,
    /// Drain rate of a backlog of one single aggregate.
    OneAggregate,
    /// From the commit of another process to the stream.
    Latency,
    /// CPU and memory of a daemon with nothing to do.
    Idle,
    /// Rate at which a second node applies.
    Inbox,
}

impl Measure {
    /// All of them, in the order in which they are run.
    pub const ALL: [Self; 5] = [Self::Drain, Self::OneAggregate, Self::Latency, Self::Idle, Self::Inbox];

    /// The name on the command line and in the JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Drain => "drain",
            Self::OneAggregate => "one-aggregate",
            Self::Latency => "latency",
            Self::Idle => "idle",
            Self::Inbox => "inbox",
        }
    }

    /// The measure of a name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|m| m.name() == name)
    }
}

/// What is measured and how.
#[derive(Clone, Debug)]
pub struct BenchOptions {
    /// Empty: all.
    pub measures: Vec<Measure>,
    /// Events of a backlog.
    pub events: usize,
    /// Times that what is compared is run in turn.
    pub rounds: usize,
    /// Length of the latency and idle measurements.
    pub duration: Duration,
    /// One JSON object on the output, nothing else.
    pub json: bool,
}

impl Default for BenchOptions {
    fn default() -> Self {
        Self { measures: Vec::new(), events: 50_000, rounds: 3, duration: Duration::from_secs(10), json: false }
    }
}

/// Bytes of payload of a measured event.
const PAYLOAD: usize = 300;

/// Aggregates of a backlog.
const AGGREGATES: usize = 1_000;

/// Measures and prints. Exit code 0: measured; 1: something went wrong; 69: no nats-server.
pub fn run(options: BenchOptions) -> u8 {
    match measure(&options) {
        Ok(result) => {
            if options.json {
                report::print(&format!("{result:#}\n"));
            }
            0
        }
        Err(trouble) => {
            eprintln!("outboxd bench: {}", testbed::chain(&trouble));
            if matches!(trouble, Trouble::NoServer(_)) { 69 } else { 1 }
        }
    }
}

fn measure(options: &BenchOptions) -> Result<Value, Trouble> {
    testbed::end_on_interrupt();
    let measures = if options.measures.is_empty() { Measure::ALL.to_vec() } else { options.measures.clone() };
    let server = finder::nats_server()?;
    let ground = Ground::new(options)?;
    let about = ground.about(&server);
    let report = report::Report::new(options.json);
    report.about(&about);
    let mut result = Map::new();
    result.insert("about".into(), about);
    for measure in measures {
        wait::interrupted()?;
        let figures = match measure {
            Measure::Drain => drain::drain(&ground, &report)?,
            Measure::OneAggregate => drain::one_aggregate(&ground, &report)?,
            Measure::Latency => latency::latency(&ground, &report)?,
            Measure::Idle => latency::idle(&ground, &report)?,
            Measure::Inbox => drain::inbox(&ground, &report)?,
        };
        result.insert(measure.name().replace('-', "_"), figures);
    }
    Ok(Value::Object(result))
}

/// Where the measurements take place.
struct Ground<'a> {
    options: &'a BenchOptions,
    folder: Workdir,
    executable: PathBuf,
}

impl<'a> Ground<'a> {
    fn new(options: &'a BenchOptions) -> Result<Self, Trouble> {
        Ok(Self { options, folder: Workdir::new("bench")?, executable: testbed::this_executable()? })
    }

    /// What the figures depend on.
    fn about(&self, server: &Path) -> Value {
        let cores = std::thread::available_parallelism().map_or(0, usize::from);
        json!({
            "outboxd": env!("CARGO_PKG_VERSION"),
            "build": if cfg!(debug_assertions) { "debug" } else { "release" },
            "nats_server": finder::said_version(server),
            "cores": cores,
            "folder": self.folder.path(),
            "folder_in_memory": in_memory(self.folder.path()),
        })
    }

    /// A world of its own for one run: a server without a stream, a node without a daemon, a folder that goes with it.
    fn world(&self, name: &str) -> Result<BenchWorld, Trouble> {
        let folder = SubFolder::new(self.folder.path().join(name))?;
        let nats = NatsServer::start(&folder.0.join("nats"))?;
        let mut node = Node::new(&self.executable, &folder.0, "plant-a", &nats.url())?;
        node.set("log.format", "text");
        node.write_config()?;
        node.init(&["--example"])?;
        Ok(BenchWorld { node, nats, ledger: Ledger::default(), folder })
    }
}

/// Node and server end before the folder goes.
struct BenchWorld {
    node: Node,
    nats: NatsServer,
    ledger: Ledger,
    folder: SubFolder,
}

impl BenchWorld {
    fn application(&self) -> Result<Application, Trouble> {
        Application::open(&self.node.database(), &self.folder.0.join("committed"), &self.ledger)
    }

    /// Commits a backlog, 1,000 events a transaction.
    fn fill(&self, events: usize, aggregates: usize) -> Result<(), Trouble> {
        let mut application = self.application()?;
        let mut generator = Generator::new("asset", aggregates).sized(PAYLOAD);
        let mut left = events;
        while left > 0 {
            wait::interrupted()?;
            application.commit(&generator.take(left.min(1_000)))?;
            left -= left.min(1_000);
        }
        Ok(())
    }
}

/// A folder that goes when its run is over, so that a bench needs the space of one run only.
struct SubFolder(PathBuf);

impl SubFolder {
    fn new(path: PathBuf) -> Result<Self, Trouble> {
        std::fs::create_dir_all(&path).map_err(Trouble::io(format!("make the folder {}", path.display())))?;
        Ok(Self(path))
    }
}

impl Drop for SubFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Whether a folder lies in a file system without a disk, where a sync costs nothing.
fn in_memory(folder: &Path) -> bool {
    const TMPFS: u64 = 0x0102_1994;
    const RAMFS: u64 = 0x8584_58f6;
    rustix::fs::statfs(folder).is_ok_and(|fs| [TMPFS, RAMFS].contains(&(fs.f_type as u64)))
}

/// The middle value; the lower one of an even number.
fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len().saturating_sub(1) / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_median_is_a_value_that_was_measured() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0]), 1.0);
        assert_eq!(median(&[]), 0.0);
    }

    #[test]
    fn every_measure_is_found_by_its_name() {
        for measure in Measure::ALL {
            assert_eq!(Measure::named(measure.name()), Some(measure));
        }
        assert_eq!(Measure::named("speed"), None);
    }
}
