//! A reload: read -> problems -> plan -> build the new parts -> one swap -> report.
//!
//! Any failure keeps the running generation fully in force; the same content reconnects nothing.

use std::sync::Arc;

use super::Daemon;
use super::start::{broker_settings, check_handlers, durability, http_rules, inlet_settings, keep, rules};
use crate::actors::consumer::ConsumerMsg;
use crate::actors::janitor::JanitorMsg;
use crate::actors::relay::RelayMsg;
use crate::admin::{Changed, Reloaded};
use crate::config::keys::Class;
use crate::config::{self, Loaded, Plan};
use crate::store::error::chain;
use crate::store::inbox::Inbox;

impl Daemon {
    /// Reloads, and tells the service manager, the log, the board and the asker what came of it.
    pub(super) async fn reload(&mut self) -> Reloaded {
        self.notifier.reloading();
        let outcome = self.try_reload().await;
        let reloaded = match outcome {
            Ok((plan, message)) => Reloaded {
                result: if plan.is_empty() { "unchanged".into() } else { "ok".into() },
                generation: self.generation,
                digest: self.loaded.digest.clone(),
                message,
                changed: plan.changed.iter().map(changed).collect(),
            },
            Err((plan, why)) => Reloaded {
                result: "rejected".into(),
                generation: self.generation,
                digest: self.loaded.digest.clone(),
                message: why,
                changed: plan.changed.iter().map(changed).collect(),
            },
        };
        let rejected = reloaded.result == "rejected";
        if rejected {
            tracing::error!(generation = self.generation, why = %reloaded.message, "reload rejected; the running configuration stays in force");
        } else {
            let keys: Vec<String> =
                reloaded.changed.iter().map(|c| format!("{}: {} -> {}", c.key, c.old, c.new)).collect();
            tracing::info!(generation = self.generation, changed = ?keys, "reload {}", reloaded.result);
        }
        let now = self.clock.now();
        self.board.write(|facts| {
            facts.config_generation = self.generation;
            facts.config_digest = self.loaded.digest.clone();
            facts.config_last_reload = if rejected { "rejected".into() } else { "ok".into() };
            facts.config_last_reload_message = reloaded.message.clone();
            facts.config_last_reload_at = now;
            if !rejected {
                facts.config_applied_at = now;
            }
        });
        self.notifier.ready(if rejected {
            "reload rejected; the running configuration stays in force"
        } else {
            "running"
        });
        reloaded
    }

    async fn try_reload(&mut self) -> Result<(Plan, String), (Plan, String)> {
        let wanted = config::load(&self.options.load).map_err(|problems| (Plan::default(), problems.to_string()))?;
        let plan = config::plan(&self.loaded, &wanted);
        if let Some(why) = plan.refusal() {
            return Err((plan, why));
        }
        match check_handlers(&wanted.config, &self.store).await {
            Ok(problems) if problems.is_empty() => {}
            Ok(problems) => return Err((plan, problems.join("; "))),
            Err(error) => return Err((plan, chain(&error))),
        }
        if let Some(logging) = &self.logging
            && let Err(error) = logging.set_level(&wanted.config.log.level)
        {
            return Err((plan, error.to_string()));
        }
        if plan.is_empty() {
            return Ok((plan, "nothing changed".into()));
        }
        // the last step that can fail: until here nothing has changed but the level of the log
        if plan.has(Class::Reconnect)
            && let Err(error) = self.broker.reconfigure(broker_settings(&wanted.config)).await
        {
            return Err((plan, error.to_string()));
        }
        self.adopt(wanted);
        let message = format!("{} keys changed", plan.changed.len());
        Ok((plan, message))
    }

    /// The swap: from here on the new configuration is in force.
    fn adopt(&mut self, wanted: Loaded) {
        for warning in &wanted.warnings {
            tracing::warn!("{warning}");
        }
        self.generation += 1;
        let config = &wanted.config;
        self.writer.adopt(durability(config));
        self.relay.cast(RelayMsg::Adopt(Arc::new(rules(config, &self.source))));
        self.consumer.cast(ConsumerMsg::Adopt(Arc::new(Inbox::new(config.inbox.rules(&self.source)))));
        self.inlet.adopt(inlet_settings(config));
        self.janitor.cast(JanitorMsg::Adopt(keep(config)));
        // nobody serves where HTTP has ended for good
        let _ = self.http_rules.send(http_rules(config));
        self.loaded = wanted;
    }
}

fn changed(change: &config::Change) -> Changed {
    Changed {
        key: change.key.into(),
        old: change.old.clone(),
        new: change.new.clone(),
        class: change.class.as_str().into(),
    }
}
