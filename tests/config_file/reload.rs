//! The reload plan: what changed and what it costs.

use outboxd::config::keys::{Class, KEYS};
use outboxd::config::{self, Config, LoadOptions};
use proptest::prelude::*;

use super::parse;

#[test]
fn a_plan_names_key_old_new_and_class() {
    let old = parse("[nats]\nuser = \"bob\"\npassword_file = \"p\"\n").unwrap().config;
    let new = parse(
        "[nats]\nuser = \"eve\"\npassword_file = \"p\"\n[relay]\nbatch = 64\n[database]\npath = \"other.db\"\n\
         [[inbox.handler]]\nevent_type = \"*\"\napply = \"store\"\n",
    )
    .unwrap()
    .config;
    let plan = config::diff(&old, &new);
    let shown: Vec<(String, Class)> = plan.changed.iter().map(|c| (c.to_string(), c.class)).collect();
    let wanted = [
        ("database.path: \"/srv/app/outboxd.db\" -> \"/srv/app/other.db\"", Class::Restart),
        ("nats.user: \"***\" -> \"***\"", Class::Reconnect),
        ("relay.batch: 512 -> 64", Class::Hot),
        ("inbox.handler: [] -> [{ event_type = \"*\", apply = \"store\" }]", Class::Hot),
    ];
    assert_eq!(shown, wanted.map(|(text, class)| (text.to_owned(), class)));
    let refusal = plan.refusal().unwrap();
    assert!(refusal.contains("database.path") && !refusal.contains("relay.batch"), "{refusal}");
    assert!(plan.touches("relay.batch") && plan.has(Class::Reconnect));
}

#[test]
fn a_plan_without_restart_keys_is_not_refused() {
    let old = Config::default();
    let mut new = old.clone();
    new.relay.batch = 7;
    assert_eq!(config::diff(&old, &new).refusal(), None);
}

#[test]
fn a_new_password_under_the_old_name_is_a_change() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    let load = || {
        let path = Some(folder.path().join("config.toml"));
        config::load(&LoadOptions { path, ..LoadOptions::default() }).unwrap()
    };
    file("config.toml", "[nats]\nuser = \"bob\"\npassword_file = \"pw\"\n");
    file("pw", "hunter2");
    let old = load();
    assert_eq!((old.warnings.len(), config::plan(&old, &load())), (0, config::Plan::default()), "nothing changed");

    file("pw", "hunter3");
    let plan = config::plan(&old, &load());
    assert_eq!(
        plan.changed.iter().map(|c| (c.key, c.class)).collect::<Vec<_>>(),
        [("nats.password_file", Class::Reconnect)]
    );
    assert_eq!(plan.refusal(), None);
    assert!(!format!("{plan:?}").contains("hunter"), "{plan:?}");
}

#[test]
fn a_reload_onto_a_file_that_cannot_be_read_is_refused_and_a_start_is_warned() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.toml");
    let options = LoadOptions { path: Some(path.clone()), ..LoadOptions::default() };
    std::fs::write(&path, "").unwrap();
    let old = config::load(&options).unwrap();
    std::fs::write(&path, "[nats]\ncredentials_file = \"gone.creds\"\n").unwrap();
    let new = config::load(&options).unwrap();
    let warning = new.warnings[0].to_string();
    assert!(
        warning.contains(":2:20: nats.credentials_file: cannot read ") && warning.contains("gone.creds"),
        "{warning}"
    );
    let refusal = config::plan(&old, &new).refusal().unwrap();
    assert!(refusal.starts_with("nothing was changed: nats.credentials_file: cannot read "), "{refusal}");
}

#[test]
fn every_key_is_compared_and_stands_in_the_order_of_the_table() {
    let shown: Vec<&str> = parse("").unwrap().shown().iter().map(|shown| shown.key).collect();
    let table: Vec<&str> = KEYS.iter().map(|key| key.path).collect();
    assert_eq!(shown, table);
}

#[test]
fn the_digest_depends_on_the_values_only() {
    let one = parse("[relay]\nbatch = 512\n").unwrap();
    let two = parse("# a comment\nrelay.batch = 0x200\n").unwrap();
    let three = parse("[relay]\nbatch = 511\n").unwrap();
    assert_eq!(one.digest, two.digest);
    assert_ne!(one.digest, three.digest);
}

proptest! {
    #[test]
    fn a_plan_of_a_configuration_with_itself_is_empty(batch in 1u64..10_000, lease in 6u64..100, user in "[a-z]{0,4}") {
        let text = format!("[relay]\nbatch = {batch}\nlease = \"{lease}s\"\n[nats]\nuser = \"{user}\"\n");
        let (one, two) = (parse(&text).unwrap(), parse(&text).unwrap());
        prop_assert!(config::diff(&one.config, &two.config).is_empty());
        prop_assert_eq!(one.digest, two.digest);
    }
}
