//! The unit under a real systemd. Needs root, systemd and sqlite3: `cargo test --features system --test system`.

#![cfg(feature = "system")]

mod machine;

use machine::{DATABASE, Machine, config};
use outboxd::testbed::server::NatsServer;

/// A port where nobody listens: NATS is away.
const NOWHERE: &str = "nats://127.0.0.1:9";

struct World {
    machine: Machine,
    _nats: Option<NatsServer>,
    _folder: tempfile::TempDir,
    url: String,
}

fn world(with_nats: bool) -> World {
    let folder = tempfile::tempdir().unwrap();
    let nats = with_nats.then(|| NatsServer::start(folder.path()).unwrap());
    let url = nats.as_ref().map_or(NOWHERE.into(), NatsServer::url);
    let machine = Machine::boot(&url);
    World { machine, _nats: nats, _folder: folder, url }
}

impl World {
    fn init(&self) -> &Machine {
        self.machine.run(&["runuser", "-u", "outboxd", "--", "outboxd", "db", "init"]);
        &self.machine
    }
}

#[test]
fn the_unit_is_sound_and_well_confined() {
    let world = world(false);
    let unit = "/run/systemd/system/outboxd.service";
    let output = world.machine.try_run(&["systemd-analyze", "verify", "--man=no", unit]);
    let said = [output.stdout, output.stderr].concat();
    assert_eq!(String::from_utf8_lossy(&said), "", "verify says nothing about a sound unit");
    let arguments = ["systemd-analyze", "security", "--offline=true", "--no-pager", "--threshold=15", unit];
    world.machine.run(&arguments);
}

#[test]
fn it_is_ready_without_nats_and_says_what_it_waits_for() {
    let world = world(false);
    let machine = world.init();
    machine.run(&["systemctl", "start", "outboxd.service"]);
    assert_eq!(machine.property("ActiveState"), "active");
    machine.await_property("StatusText", |text| text.contains("waiting for NATS"));
    machine.run(&["systemctl", "stop", "outboxd.service"]);
    assert_eq!(machine.property("Result"), "success");
    assert_eq!(machine.property("ExecMainStatus"), "0");
}

#[test]
fn it_publishes_from_inside_its_sandbox_and_comes_back_after_a_kill() {
    let world = world(true);
    let machine = world.init();
    machine.run(&["systemctl", "start", "outboxd.service"]);
    machine.commit(DATABASE, 0, 20);
    machine.await_published(DATABASE, 20);
    let before = machine.property("MainPID");
    machine.run(&["kill", "-9", &before]);
    machine.await_property("MainPID", |pid| pid != before && pid != "0");
    machine.await_property("ActiveState", |state| state == "active");
    machine.commit(DATABASE, 20, 20);
    machine.await_published(DATABASE, 40);
    assert!(machine.journal().contains("outboxd runs version="), "the journal has its lines, with their fields");
}

#[test]
fn a_reload_is_a_job_that_fails_where_it_is_rejected_and_leaves_the_service_up() {
    let world = world(true);
    let machine = world.init();
    machine.run(&["systemctl", "start", "outboxd.service"]);
    let pid = machine.property("MainPID");

    machine.configure(&format!("{}[relay]\nbatch = 64\n", config(&world.url)));
    machine.run(&["systemctl", "reload", "outboxd.service"]);
    machine.await_property("ActiveState", |state| state == "active");

    machine.configure(&format!("{}[relay]\nbatchh = 64\n", config(&world.url)));
    let output = machine.try_run(&["systemctl", "reload", "outboxd.service"]);
    assert!(!output.status.success(), "a rejected reload fails its job");
    machine.await_property("ActiveState", |state| state == "active");
    machine.await_property("StatusText", |text| text.contains("last reload was rejected"));
    assert_eq!(machine.property("MainPID"), pid, "the same process serves on");
    machine.commit(DATABASE, 0, 5);
    machine.await_published(DATABASE, 5);
}

#[test]
fn a_bad_configuration_ends_it_before_it_is_ready_and_is_not_tried_again() {
    let world = world(false);
    let machine = world.init();
    machine.configure("[relay]\nbatchh = 3\n");
    let output = machine.try_run(&["systemctl", "start", "outboxd.service"]);
    assert!(!output.status.success());
    machine.await_property("ActiveState", |state| state == "failed");
    assert_eq!(machine.property("ExecMainStatus"), "78");
    assert_eq!(machine.property("NRestarts"), "0");
    assert!(machine.journal().contains("batchh"), "{}", machine.journal());
}

#[test]
fn a_database_that_is_not_there_yet_is_tried_again_until_it_is() {
    let world = world(true);
    let machine = &world.machine;
    machine.try_run(&["systemctl", "start", "outboxd.service"]);
    machine.await_property("NRestarts", |n| n != "0");
    // between two tries; during one it is 0
    machine.await_property("ExecMainStatus", |status| status == "69");
    world.init();
    machine.await_property("ActiveState", |state| state == "active");
    machine.commit(DATABASE, 0, 1);
    machine.await_published(DATABASE, 1);
}

#[test]
fn the_watchdog_ends_a_daemon_that_hangs_and_systemd_starts_another() {
    let world = world(true);
    let machine = world.init();
    machine.put("run/systemd/system/outboxd.service.d/watchdog.conf", "[Service]\nWatchdogSec=2\n");
    machine.run(&["systemctl", "daemon-reload"]);
    machine.run(&["systemctl", "start", "outboxd.service"]);
    let pid = machine.property("MainPID");
    machine.run(&["kill", "-STOP", &pid]);
    machine.await_property("MainPID", |now| now != pid && now != "0");
    machine.await_property("ActiveState", |state| state == "active");
    assert_ne!(machine.property("NRestarts"), "0");
    machine.commit(DATABASE, 0, 3);
    machine.await_published(DATABASE, 3);
}

#[test]
fn it_serves_a_database_of_another_user_through_the_drop_in() {
    let world = world(true);
    let machine = &world.machine;
    machine.run(&["useradd", "--system", "--user-group", "shop"]);
    machine.run(&["install", "-d", "-o", "shop", "-g", "shop", "-m", "2770", "/srv/shop/data"]);
    let database = "/srv/shop/data/app.db";
    machine.configure(&config(&world.url).replace(DATABASE, database));
    machine.run(&["outboxd", "db", "init"]);
    machine.run(&["sh", "-c", "chown shop:shop /srv/shop/data/* && chmod 0660 /srv/shop/data/*"]);
    let example = include_str!("../../systemd/outboxd.service.d/database.conf.example");
    machine.put("run/systemd/system/outboxd.service.d/database.conf", example);
    machine.run(&["systemctl", "daemon-reload"]);
    machine.run(&["systemctl", "start", "outboxd.service"]);
    machine.commit(database, 0, 3);
    machine.await_published(database, 3);
    // the owner of the database may use the command line, a stranger may not
    machine.run(&["usermod", "-aG", "outboxd", "shop"]);
    machine.run(&["runuser", "-u", "shop", "--", "outboxd", "pause"]);
    machine.run(&["outboxd", "resume"]);
    machine.run(&["useradd", "--system", "--groups", "shop,outboxd", "stranger"]);
    let output = machine.try_run(&["runuser", "-u", "stranger", "--", "outboxd", "pause"]);
    assert_eq!(output.status.code(), Some(69), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn secrets_come_as_credentials() {
    let world = world(true);
    let machine = world.init();
    machine.put("etc/outboxd/token", "s3cr3t\n");
    let with_token = "token_file = \"/run/credentials/outboxd.service/token\"\n[http]";
    machine.configure(&config(&world.url).replace("[http]", with_token));
    machine.put(
        "run/systemd/system/outboxd.service.d/secret.conf",
        "[Service]\nLoadCredential=token:/etc/outboxd/token\n",
    );
    machine.run(&["systemctl", "daemon-reload"]);
    machine.run(&["systemctl", "start", "outboxd.service"]);
    machine.commit(DATABASE, 0, 1);
    machine.await_published(DATABASE, 1);
    assert!(!machine.journal().contains("s3cr3t"));
}
