//! `outboxd demo`: the whole flow on this machine with real parts: a nats-server of its own, two daemons, two SQLite
//! files, an application; processes are killed and the broker is taken away while it runs. It ends with a proof.
//!
//! The exit code tells the truth: 0 only if nothing was lost, doubled, disordered or altered.
//! May import: testbed. It plays the product from outside, by its tables, its wire and its command line.

mod acts;
mod closing;
mod stage;

use crate::testbed::server::NatsServer;
use crate::testbed::workdir::Workdir;
use crate::testbed::{self, Trouble, finder};

use acts::Scene;
use stage::Stage;

/// How the demo is played.
#[derive(Clone, Copy, Debug, Default)]
pub struct DemoOptions {
    /// Fewer events and shorter outages: well under half a minute.
    pub fast: bool,
    /// The folder with databases, logs and configuration stays.
    pub keep: bool,
}

/// Plays the demo. Exit code 0: its closing proof holds; 1: it does not, or something could not be played; 69: there is
/// no nats-server and none could be fetched.
pub fn run(options: DemoOptions) -> u8 {
    let mut stage = Stage::new();
    testbed::end_on_interrupt();
    match play(&mut stage, options) {
        Ok(true) => 0,
        Ok(false) => 1,
        Err(trouble) => {
            stage.close(false, &format!("the demo could not be played to its end: {}", testbed::chain(&trouble)));
            if matches!(trouble, Trouble::NoServer(_)) { 69 } else { 1 }
        }
    }
}

fn play(stage: &mut Stage, options: DemoOptions) -> Result<bool, Trouble> {
    stage.title(
        "outboxd demo",
        "what one SQLite transaction commits reaches NATS JetStream in order, and is applied once elsewhere",
    );
    stage.plain(
        "\n  plant-a.db ──commit──▶ outboxd ──publish──▶ JetStream ──▶ outboxd ──apply──▶ plant-b.db\
         \n                                                  └───────▶ plain NATS subscribers\n",
    );
    // found, or fetched, before anything is promised
    let server = finder::nats_server()?;
    let mut folder = Workdir::new("demo")?;
    if options.keep {
        folder.keep();
    }
    let nats = NatsServer::start_with(&folder.path().join("nats"), acts::SMALL_MESSAGES)?;
    stage.plain(&format!("  nats-server  {} on port {}", finder::said_version(&server), nats.port()));
    stage.plain(&format!("  files        {}", folder.path().display()));

    let mut scene = Scene::new(&testbed::this_executable()?, folder.path(), nats, options.fast)?;
    scene.commit_and_roll_back(stage)?;
    scene.relay_and_apply(stage)?;
    scene.kill_between_ack_and_settle(stage)?;
    scene.take_the_broker_away(stage)?;
    scene.poison(stage)?;
    scene.reload(stage)?;
    let good = scene.close(stage)?;
    let seconds = stage.elapsed().as_secs_f64();
    if good {
        stage.close(true, &format!("everything holds, after {seconds:.0} s"));
    } else {
        folder.keep();
        stage.close(false, &format!("the proof does not hold; the files are kept in {}", folder.path().display()));
    }
    if good && options.keep {
        stage.plain(&format!("the files are in {}", folder.path().display()));
    }
    Ok(good)
}
