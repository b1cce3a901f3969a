//! `outboxd config`: check, show, schema, default. They work offline and touch nothing but the file that they read.

use std::path::PathBuf;

use serde_json::Value;

use super::render::{self, Listing};
use super::{CliError, Exit};
use crate::config::{self, LoadOptions, Loaded};

/// `config check`: every problem, one a line as `file:line:column: message`, and 78; or the warnings and 0.
pub fn check(path: Option<PathBuf>) -> Result<Exit, CliError> {
    let Some(loaded) = load(path) else { return Ok(Exit::Config) };
    let warnings = match loaded.warnings.len() {
        0 => String::new(),
        1 => ", 1 warning".into(),
        n => format!(", {n} warnings"),
    };
    render::text(&format!("{}: ok{warnings}\n", loaded.path.display()))?;
    Ok(Exit::Ok)
}

/// `config show`: the effective values as TOML with their origin, or with `--json` as key, value, origin.
pub fn show(path: Option<PathBuf>, json: bool) -> Result<Exit, CliError> {
    let Some(loaded) = load(path) else { return Ok(Exit::Config) };
    if json {
        let mut listing = Listing::new(&["key", "value", "origin"]);
        for shown in loaded.shown() {
            listing.row(vec![shown.key.into(), json_value(&shown.value), origin(&shown).into()]);
        }
        render::list(&listing, true)?;
    } else {
        render::text(&listing_text(&loaded))?;
    }
    Ok(Exit::Ok)
}

/// `config schema`: the JSON Schema of the file.
pub fn schema() -> Result<Exit, CliError> {
    render::json(&config::schema())?;
    Ok(Exit::Ok)
}

/// `config default`: a file with every key, its default and its reason, to start from.
pub fn default() -> Result<Exit, CliError> {
    render::text(&config::shipped_file())?;
    Ok(Exit::Ok)
}

/// Loads as the daemon would; complains about problems and warnings on standard error.
fn load(path: Option<PathBuf>) -> Option<Loaded> {
    match config::load(&LoadOptions::from_process(path)) {
        Ok(loaded) => {
            for warning in &loaded.warnings {
                render::complain(&format!("{}: warning: {}", warning.place, warning.message));
            }
            Some(loaded)
        }
        Err(problems) => {
            // bare lines, so that an editor can follow file:line:column
            render::complain(&problems.to_string());
            None
        }
    }
}

fn origin(shown: &config::Shown) -> String {
    shown.origin.as_ref().map_or("default".into(), ToString::to_string)
}

/// A TOML file again, with the origin of each value as a comment.
fn listing_text(loaded: &Loaded) -> String {
    let mut text = format!("# {}\n# digest {}\n", loaded.path.display(), loaded.digest);
    let mut table = "";
    for shown in loaded.shown() {
        let (here, name) = shown.key.rsplit_once('.').unwrap_or(("", shown.key));
        if here != table {
            text.push_str(&format!("\n[{here}]\n"));
            table = here;
        }
        text.push_str(&format!("{name} = {}  # {}\n", shown.value, origin(&shown)));
    }
    text
}

/// A value that was printed as TOML, as JSON.
fn json_value(toml_text: &str) -> Value {
    let table: Result<toml::Table, _> = format!("value = {toml_text}").parse();
    table.ok().and_then(|mut t| t.remove("value")).and_then(|v| serde_json::to_value(v).ok()).unwrap_or(Value::Null)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(text: &str) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.toml");
        std::fs::write(&path, text).unwrap();
        (folder, path)
    }

    #[test]
    fn check_ends_with_78_for_a_bad_file_and_0_for_a_good_one() {
        let (_folder, path) = file("[relay]\nbatchh = 3\n");
        assert_eq!(check(Some(path.clone())), Ok(Exit::Config));
        assert_eq!(show(Some(path), false), Ok(Exit::Config));
        let (_folder, path) = file("[relay]\nbatch = 3\n");
        assert_eq!(check(Some(path.clone())), Ok(Exit::Ok));
        assert_eq!(show(Some(path.clone()), true), Ok(Exit::Ok));
        let missing = path.with_extension("missing");
        assert_eq!(check(Some(missing)), Ok(Exit::Config));
    }

    #[test]
    fn what_show_prints_is_a_file_that_means_the_same() {
        let (_folder, path) = file("[nats]\nuser = \"bob\"\npassword_file = \"pw\"\n[relay.backoff]\nfactor = 3\n");
        let loaded = config::load(&LoadOptions { path: Some(path.clone()), ..LoadOptions::default() }).unwrap();
        let text = listing_text(&loaded);
        assert!(text.contains(&format!("factor = 3.0  # {}:5:10\n", path.display())), "{text}");
        assert!(text.contains("batch = 512  # default\n"), "{text}");
        assert!(text.contains("user = \"***\"") && !text.contains("bob"), "{text}");
        let again = config::parse(&path, &text, &[]).unwrap();
        let plan = config::diff(&loaded.config, &again.config);
        assert_eq!(
            plan.changed.iter().map(|c| c.key).collect::<Vec<_>>(),
            ["nats.user"],
            "only what is masked differs"
        );
    }

    #[test]
    fn values_keep_their_type_in_json() {
        assert_eq!(json_value("512"), serde_json::json!(512));
        assert_eq!(json_value("[\"a\", \"b\"]"), serde_json::json!(["a", "b"]));
        assert_eq!(json_value("\"2m\""), serde_json::json!("2m"));
    }
}
