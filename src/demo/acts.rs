//! The acts. Each leaves the scene at rest: everything that was committed is published and applied.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::stage::Stage;
use crate::testbed::application::{self, Application, Generator, Ledger, NewEvent, write_asset};
use crate::testbed::node::Node;
use crate::testbed::producer::{Pace, Producer};
use crate::testbed::server::NatsServer;
use crate::testbed::stream::{Client, Listener};
use crate::testbed::{Trouble, wait};

/// What the server takes at first: the poison event is larger.
pub(super) const SMALL_MESSAGES: &str = "max_payload: 64KB";

/// What it takes once the operator has raised the limit.
const LARGER_MESSAGES: &str = "max_payload: 1MB";

pub(super) const STREAM: &str = "EVENTS";

/// Anything that should happen soon has happened by then, also on a busy machine.
const SOON: Duration = Duration::from_secs(30);

/// At node b: one row a change of `assets`, kept by triggers, so that an effect that happens twice shows.
const WITNESS: &str = "CREATE TABLE demo_effects (asset_id TEXT NOT NULL, version INTEGER NOT NULL);\
    CREATE TRIGGER demo_created AFTER INSERT ON assets BEGIN \
      INSERT INTO demo_effects VALUES (NEW.asset_id, NEW.version); END;\
    CREATE TRIGGER demo_updated AFTER UPDATE ON assets BEGIN \
      INSERT INTO demo_effects VALUES (NEW.asset_id, NEW.version); END;";

/// Everything on stage.
pub(super) struct Scene {
    pub(super) a: Node,
    pub(super) b: Node,
    pub(super) nats: NatsServer,
    pub(super) ledger: Ledger,
    pub(super) fast: bool,
    /// Events that a killed relay had stored and not yet recorded: each would have gone out twice.
    pub(super) caught: u64,
    pub(super) kills: usize,
    folder: PathBuf,
    applications: usize,
}

impl Scene {
    pub(super) fn new(executable: &Path, folder: &Path, nats: NatsServer, fast: bool) -> Result<Self, Trouble> {
        let mut a = Node::new(executable, folder, "plant-a", &nats.url())?;
        let mut b = Node::new(executable, folder, "plant-b", &nats.url())?;
        for node in [&mut a, &mut b] {
            node.set("nats.ping_interval", "1s").set("log.format", "text");
        }
        a.set("relay.lease", "5s").set("relay.ack_wait", "1s");
        b.set("relay.enabled", false).handle("asset.*", "assets", "");
        for node in [&a, &b] {
            node.write_config()?;
            node.init(&["--example"])?;
        }
        let witness = application::open(&b.database())?;
        witness.execute_batch(WITNESS).map_err(application::sqlite("add a witness to node b"))?;
        Ok(Self {
            a,
            b,
            nats,
            ledger: Ledger::default(),
            fast,
            caught: 0,
            kills: 0,
            folder: folder.to_owned(),
            applications: 0,
        })
    }

    pub(super) fn commit_and_roll_back(&mut self, stage: &mut Stage) -> Result<(), Trouble> {
        stage.act("One transaction writes the business row and its event");
        let count = if self.fast { 200 } else { 1_000 };
        let mut application = self.application()?;
        let mut events = Generator::new("pump", 100);
        stage.step("transactions commit", || {
            for _ in 0..count {
                wait::interrupted()?;
                application.commit_with(&events.take(1), write_asset)?;
            }
            Ok(format!("{count} transactions committed: an asset changed, an event inserted, synchronous=full"))
        })?;
        stage.step("transactions roll back", || {
            for _ in 0..25 {
                application.roll_back_with(&events.take(1), write_asset)?;
            }
            Ok("25 transactions rolled back: neither the change nor its event exists")
        })?;
        let create = ["asset", "create", "valve-1", "--name", "油圧バルブ", "--material", "S45C"];
        let update = ["asset", "update", "valve-1", "--expected-version", "7", "--name", "x", "--material", "y"];
        stage.step("the command line does the same", || {
            self.a.cli(&create)?.ok()?;
            self.ledger.adopt(&self.a.database(), "valve-1")?;
            Ok("outboxd asset create valve-1 --name 油圧バルブ --material S45C")
        })?;
        stage.step("a stale version", || {
            let refused = self.a.cli(&update)?;
            if refused.code == Some(0) || self.ledger.adopt(&self.a.database(), "valve-1")? != 0 {
                return Err(Trouble::failed(format!(
                    "an update of a version that is not there went through: {refused:?}"
                )));
            }
            Ok("an update that expects version 7 is refused and writes nothing")
        })?;
        let waiting = application::count(&self.a.database(), "pending")?;
        let owed = self.ledger.len() as i64;
        stage.step("the outbox", || match waiting == owed {
            true => Ok(format!("{waiting} events wait in outbox_events; no daemon runs yet")),
            false => Err(Trouble::failed(format!("{owed} events were committed, {waiting} wait in the outbox"))),
        })
    }

    pub(super) fn relay_and_apply(&mut self, stage: &mut Stage) -> Result<(), Trouble> {
        stage.act("The relay publishes, a second node applies");
        let client = self.client()?;
        let listener = client.listen("events.>")?;
        stage.step("both daemons start", || {
            self.a.start()?;
            self.b.start()?;
            Ok("two daemons started; the stream was made by the relay")
        })?;
        stage.step("events on their way", || {
            self.rest().map(|()| format!("{} in JetStream and in plant-b.db", self.owed()))
        })?;
        let messages = client.messages(STREAM)?;
        if let Some(first) = messages.first() {
            stage.quote(&format!("{}  →  {} bytes of JSON, unchanged", first.subject, first.payload.len()));
            for name in ["Nats-Msg-Id", "ce-type", "Outboxd-Aggregate-Version"] {
                stage.quote(&format!("{name}: {}", first.header(name)));
            }
        }
        let steady = if self.fast { 200 } else { 600 };
        stage.step("one transaction after the other at 200 a second", || {
            let pace = Pace { per_transaction: 1, every: Duration::from_millis(5), also: write_asset };
            Producer::start(self.application()?, Generator::new("steady", 20), pace, steady).finish()?;
            self.rest()?;
            Ok(format!("{steady} more, one transaction each at 200 a second"))
        })?;
        stage.step("plain subscribers", || {
            self.heard_all(&listener)?;
            let durable = client.drain_durable(STREAM, "reporting")?;
            if durable != self.owed() as u64 {
                return Err(Trouble::failed(format!("a durable consumer read {durable} of {} messages", self.owed())));
            }
            Ok(format!("a plain NATS subscriber heard {}, a plain durable consumer read {durable}", listener.count()))
        })?;
        Ok(())
    }

    pub(super) fn kill_between_ack_and_settle(&mut self, stage: &mut Stage) -> Result<(), Trouble> {
        stage.act("kill -9, between JetStream's ack and the note of it in the outbox");
        let client = self.client()?;
        let listener = client.listen("events.>")?;
        let (wanted, most) = if self.fast { (2, 12) } else { (5, 25) };
        let mut events = Generator::new("burst", 200);
        let (mut hits, mut round) = (0, 0);
        while hits < wanted && round < most {
            round += 1;
            let mut caught = 0;
            stage.step("events flow, the relay is killed", || {
                caught = self.kill_relay_in_a_burst(&client, &mut events, round)?;
                if round % 2 == 0 {
                    self.b.kill()?;
                    self.b.spawn()?;
                    self.kills += 1;
                }
                let also = if round % 2 == 0 { ", node b killed too" } else { "" };
                self.rest()?;
                Ok(format!("kill -9: {caught} events were stored, not yet noted; restarted, all delivered{also}"))
            })?;
            self.caught += caught;
            hits += usize::from(caught > 0);
        }
        if hits == 0 {
            return Err(Trouble::failed(format!(
                "{most} kills, none of them between ack and settle: nothing was shown"
            )));
        }
        stage.step("the wire", || {
            self.heard_all(&listener)?;
            Ok(format!("{} publishes on the wire were repeats, JetStream stored none of them", listener.repeated()))
        })?;
        Ok(())
    }

    /// A burst, and kill -9 as soon as some of it is stored. Answers how many events were stored, but not settled.
    fn kill_relay_in_a_burst(&mut self, client: &Client, events: &mut Generator, round: u64) -> Result<u64, Trouble> {
        let before = client.count(STREAM)?;
        let mut application = self.application()?;
        application.commit_with(&events.take(2_000), write_asset)?;
        wait::until("the first event of a burst in the stream", SOON, || match client.count(STREAM) {
            // each round a little later into the burst
            Ok(count) if count > before + 100 * (round % 5) => Ok(()),
            Ok(count) => Err(format!("{} of 2,000 stored", count - before)),
            Err(e) => Err(e.to_string()),
        })?;
        self.a.kill()?;
        self.kills += 1;
        // what the killed process had written to its socket is still stored
        let stored = wait::until_still("the stream at rest", Duration::from_millis(150), SOON, || {
            client.count(STREAM).unwrap_or(0)
        })?;
        let noted = application::count(&self.a.database(), "published")?;
        self.a.spawn()?;
        Ok(stored.saturating_sub(noted as u64))
    }

    pub(super) fn take_the_broker_away(&mut self, stage: &mut Stage) -> Result<(), Trouble> {
        stage.act("NATS goes away, the application does not notice");
        let (count, away) = if self.fast { (200, 2) } else { (1_000, 6) };
        self.nats.kill()?;
        let begun = Instant::now();
        stage.step("nats-server is down, transactions commit", || {
            let every = Duration::from_secs(away) / count;
            let pace = Pace { per_transaction: 1, every, also: write_asset };
            let written =
                Producer::start(self.application()?, Generator::new("outage", 50), pace, count as usize).finish()?;
            Ok(format!("nats-server killed; {written} transactions committed meanwhile"))
        })?;
        stage.step("status", || {
            let status = wait::until("the outage in status", SOON, || match self.a.status() {
                Ok(s) if s["nats"]["connected"] == false => Ok(s),
                Ok(s) => Err(format!("nats.connected is {}", s["nats"]["connected"])),
                Err(e) => Err(e.to_string()),
            })?;
            let (pending, failed) = (&status["outbox"]["pending"], &status["outbox"]["failed"]);
            if failed != 0 {
                return Err(Trouble::failed(format!("an outage made {failed} events fail")));
            }
            Ok(format!("outboxd status: not connected, {pending} pending, {failed} failed, no attempt counted"))
        })?;
        let down = begun.elapsed().as_secs_f64();
        stage.step("nats-server is back, the outbox drains", || {
            self.nats.resume()?;
            let back = Instant::now();
            self.rest()?;
            Ok(format!("back after {down:.1} s; drained in order within {:.1} s", back.elapsed().as_secs_f64()))
        })
    }

    pub(super) fn poison(&mut self, stage: &mut Stage) -> Result<(), Trouble> {
        stage.act("A poison event stops its own aggregate, nobody else");
        let mut application = self.application()?;
        let event = |id: &str, asset: &str, version: i64, name: &str| NewEvent::asset(id, asset, version, name);
        let poison = "tank-evt-2";
        stage.step("an event that is too large", || {
            let large = "x".repeat(100_000);
            application.commit_with(
                &[event("tank-evt-1", "tank", 1, "Tank"), event(poison, "tank", 2, &large)],
                write_asset,
            )?;
            application.commit_with(&[event("tank-evt-3", "tank", 3, "Tank")], write_asset)?;
            application.commit_with(&Generator::new("others", 10).take(100), write_asset)?;
            let database = self.a.database();
            let pending_and_failed = || {
                let failed = application::count(&database, "failed").map_err(|e| e.to_string())?;
                let pending = application::count(&database, "pending").map_err(|e| e.to_string())?;
                if (pending, failed) == (1, 1) { Ok(()) } else { Err(format!("{pending} pending, {failed} failed")) }
            };
            wait::until("the poison event failed, only its successor waits", SOON, pending_and_failed)?;
            Ok("100 KB against max_payload 64 KB: failed at once; its successor waits, 100 other events passed")
        })?;
        let reason = format!("SELECT last_error FROM outbox_events WHERE event_id = '{poison}'");
        stage.quote(&format!("last_error: {}", application::text(&self.a.database(), &reason)?));
        stage.step("the operator raises the limit and retries", || {
            self.nats.stop()?;
            self.nats.set_extra(LARGER_MESSAGES);
            self.nats.resume()?;
            wait::until("the relay connected again", SOON, || match self.a.status() {
                Ok(s) if s["nats"]["connected"] == true => Ok(()),
                Ok(s) => Err(format!("nats.connected is {}", s["nats"]["connected"])),
                Err(e) => Err(e.to_string()),
            })?;
            self.a.cli(&["events", "retry", poison])?.ok()?;
            self.rest()?;
            Ok("limit raised, `outboxd events retry tank-evt-2`: it went out, then its successor")
        })
    }

    pub(super) fn reload(&mut self, stage: &mut Stage) -> Result<(), Trouble> {
        stage.act("A reload is accepted whole or not at all");
        let generation = |node: &Node| node.status().map(|s| s["config"]["generation"].as_i64().unwrap_or(-1));
        let before = generation(&self.a)?;
        stage.step("SIGHUP with a typing error", || {
            self.a.write_config_text(&self.a.config_text().replacen("[relay]", "[relay]\nbatchh = 128", 1))?;
            self.a.signal(Signal::HUP)?;
            self.reloaded("rejected")?;
            let mut application = self.application()?;
            application.commit_with(&Generator::new("after-typo", 5).take(20), write_asset)?;
            self.rest()?;
            if generation(&self.a)? != before {
                return Err(Trouble::failed("a rejected reload changed the generation"));
            }
            Ok(format!("`batchh = 128` rejected; generation {before} stays in force and goes on publishing"))
        })?;
        let refused = self.a.cli(&["config", "check"])?;
        let said = format!("{}{}", refused.err, refused.out);
        if let Some(line) = said.lines().find(|l| l.contains("batchh")) {
            // the place without our folder, and without the list of all that is known there
            let place = line.rsplit_once("config.toml").map_or(line, |(folder, _)| &line[folder.len()..]);
            stage.quote(place.split(" (known").next().unwrap_or(place));
        }
        stage.step("SIGHUP with the error corrected", || {
            self.a.set("relay.batch", 128);
            self.a.write_config()?;
            self.a.signal(Signal::HUP)?;
            self.reloaded("ok")?;
            let now = generation(&self.a)?;
            if now <= before {
                return Err(Trouble::failed(format!("an accepted reload left generation {now}")));
            }
            let mut application = self.application()?;
            application.commit_with(&Generator::new("after-reload", 5).take(20), write_asset)?;
            self.rest()?;
            Ok(format!("`batch = 128` accepted: generation {now}, without a restart"))
        })
    }

    fn reloaded(&self, wanted: &str) -> Result<(), Trouble> {
        wait::until(format!("the reload {wanted}"), SOON, || match self.a.status() {
            Ok(s) if s["config"]["last_reload"] == wanted => Ok(()),
            Ok(s) => Err(format!("config.last_reload is {}", s["config"]["last_reload"])),
            Err(e) => Err(e.to_string()),
        })
    }

    /// Events that were committed and not withdrawn.
    pub(super) fn owed(&self) -> usize {
        self.ledger.len()
    }

    /// Waits until everything committed is published at node a and applied at node b.
    pub(super) fn rest(&self) -> Result<(), Trouble> {
        let owed = self.owed() as i64;
        let (a, b) = (self.a.database(), self.b.database());
        wait::until("everything published and applied", Duration::from_secs(60), || {
            let published = application::count(&a, "published").map_err(|e| e.to_string())?;
            let applied = application::number(&b, "SELECT count(*) FROM demo_effects").map_err(|e| e.to_string())?;
            if published == owed && applied >= owed {
                Ok(())
            } else {
                Err(format!("{published} and {applied} of {owed}"))
            }
        })
    }

    pub(super) fn client(&self) -> Result<Client, Trouble> {
        Client::connect(&self.nats.url())
    }

    fn application(&mut self) -> Result<Application, Trouble> {
        self.applications += 1;
        let record = self.folder.join(format!("committed-{}", self.applications));
        Application::open(&self.a.database(), &record, &self.ledger)
    }

    /// A plain subscriber has heard at least every event that is not older than itself.
    fn heard_all(&self, listener: &Listener) -> Result<(), Trouble> {
        wait::until_still("the wire at rest", Duration::from_millis(100), SOON, || listener.count()).map(drop)
    }
}
