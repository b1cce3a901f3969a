//! Finds the file, reads it and the environment, judges the whole.
//!
//! May import: domain, std.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use super::keys::KEYS;
use super::problem::{Place, Problem, Problems};
use super::read::Reading;
use super::relations;
use super::reload::values;
use super::shape::{Config, Nats};
use super::value::Value;

/// Where to look for the file, and the environment.
#[derive(Clone, Debug, Default)]
pub struct LoadOptions {
    /// `--config`.
    pub path: Option<PathBuf>,
    /// All environment variables whose name and value are UTF-8.
    pub environment: Vec<(String, String)>,
    /// Where to look when neither `--config` nor `OUTBOXD_CONFIG` names a file; the first that exists, alone.
    pub places: Vec<PathBuf>,
}

impl LoadOptions {
    /// With the environment of this process and the usual places.
    pub fn from_process(path: Option<PathBuf>) -> Self {
        let utf8 = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        };
        Self { path, environment: std::env::vars_os().filter_map(utf8).collect(), places: usual_places() }
    }
}

fn usual_places() -> Vec<PathBuf> {
    vec!["/etc/outboxd/config.toml".into(), "config.toml".into()]
}

/// A configuration in force, with where each value comes from.
#[derive(Clone, Debug)]
pub struct Loaded {
    pub config: Config,
    /// The file, absolute.
    pub path: PathBuf,
    /// Where each key was set; a key that is missing here has its default.
    pub origins: BTreeMap<&'static str, Place>,
    pub warnings: Vec<Problem>,
    /// Of the effective values: the same digest means that nothing changed. 16 hex digits.
    pub digest: String,
    /// What the files hold that `nats` names, as they were when this was loaded.
    pub(super) stamps: Vec<Stamp>,
}

/// Loads a configuration, or says everything that is wrong with it.
pub fn load(options: &LoadOptions) -> Result<Loaded, Problems> {
    let path = find(options)?;
    let path = std::path::absolute(&path).unwrap_or(path);
    let bytes = std::fs::read(&path).map_err(|error| {
        Problems::one(Place::Whole(path.clone()), format!("cannot read the configuration: {error}"))
    })?;
    let text = match String::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) => {
            let good = &error.as_bytes()[..error.utf8_error().valid_up_to()];
            let line = good.iter().filter(|b| **b == b'\n').count() + 1;
            let column = String::from_utf8_lossy(good).rsplit('\n').next().map_or(0, |l| l.chars().count()) + 1;
            return Err(Problems::one(Place::File { path, line, column }, "not UTF-8, as TOML must be"));
        }
    };
    let mut loaded = parse(&path, &text, &options.environment)?;
    loaded.stamps = stamps(&loaded.config);
    for stamp in &loaded.stamps {
        if let Err(why) = &stamp.content {
            let place = loaded.origins.get(stamp.key).cloned().unwrap_or_else(|| Place::Whole(loaded.path.clone()));
            let message = format!("{}: cannot read {}: {why}", stamp.key, stamp.path.display());
            loaded.warnings.push(Problem { place, message });
        }
    }
    loaded.warnings.sort();
    Ok(loaded)
}

/// A fingerprint of a file with credentials, keys or certificates, so that a reload sees a new one under an old name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    pub(super) key: &'static str,
    pub(super) path: PathBuf,
    /// The hash of its bytes, or why it could not be read.
    pub(super) content: Result<u64, String>,
}

/// The stamps of all files that `nats` names. The files are opened for reading and nothing else.
fn stamps(config: &Config) -> Vec<Stamp> {
    let Nats { password_file, token_file, nkey_seed_file, credentials_file, tls, .. } = &config.nats;
    let files = [
        ("nats.password_file", password_file),
        ("nats.token_file", token_file),
        ("nats.nkey_seed_file", nkey_seed_file),
        ("nats.credentials_file", credentials_file),
        ("nats.tls.ca_file", &tls.ca_file),
        ("nats.tls.cert_file", &tls.cert_file),
        ("nats.tls.key_file", &tls.key_file),
    ];
    let named = files.into_iter().filter_map(|(key, path)| path.clone().map(|path| (key, path)));
    let stamp = |(key, path): (&'static str, PathBuf)| {
        let content = std::fs::read(&path).map(|bytes| fnv(FNV_OFFSET, &bytes)).map_err(|error| error.to_string());
        Stamp { key, path, content }
    };
    named.map(stamp).collect()
}

/// Reads the text of a configuration file at `path` (absolute), which need not exist.
pub fn parse(path: &Path, text: &str, environment: &[(String, String)]) -> Result<Loaded, Problems> {
    let mut reading = Reading::new(path);
    let whole = reading.file(text);
    reading.environment(environment);
    if whole {
        relations::judge(&mut reading);
    }
    let Reading { config, path, mut problems, mut warnings, places, broken: _ } = reading;
    if !problems.is_empty() {
        problems.sort();
        problems.dedup();
        return Err(Problems(problems));
    }
    warnings.sort();
    let digest = digest(&config);
    Ok(Loaded { config, path, origins: places, warnings, digest, stamps: Vec::new() })
}

/// What can still be understood of a configuration that [`load`] refuses, for commands that only have to find the running
/// daemon and its database; `None` where the file or the environment names no database. Never good enough to run with.
pub fn salvage(options: &LoadOptions) -> Option<Config> {
    let path = std::path::absolute(find(options).ok()?).ok()?;
    let bytes = std::fs::read(&path).ok()?;
    let mut reading = Reading::new(&path);
    reading.file(&String::from_utf8_lossy(&bytes));
    reading.environment(&options.environment);
    let named = reading.places.contains_key("database.path") && !reading.broken.contains("database.path");
    named.then_some(reading.config)
}

/// The file to read. A file that was named but is not there is an error: silence would start another configuration.
fn find(options: &LoadOptions) -> Result<PathBuf, Problems> {
    let variable = options.environment.iter().find(|(name, value)| name == "OUTBOXD_CONFIG" && !value.is_empty());
    let named = [
        options.path.as_ref().map(|path| ("--config", path.clone())),
        variable.map(|(name, value)| (name.as_str(), PathBuf::from(value))),
    ];
    if let Some((how, path)) = named.into_iter().flatten().next() {
        return match std::fs::metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(Problems::one(Place::Whole(path), format!("no such file, named by {how}")))
            }
            // anything else is told by reading it
            Ok(_) | Err(_) => Ok(path),
        };
    }
    // a place that cannot be looked at is taken, so that its error is told instead of another file being used
    let there = |path: &&PathBuf| !matches!(std::fs::metadata(path), Err(e) if e.kind() == io::ErrorKind::NotFound);
    options.places.iter().find(there).cloned().ok_or_else(|| {
        let tried: Vec<String> = options.places.iter().map(|p| p.display().to_string()).collect();
        let message = format!(
            "no file found: --config and OUTBOXD_CONFIG name none, and there is none at {}; \
             name one, or start from what `outboxd config default` prints",
            tried.join(" or ")
        );
        Problems::one(Place::Nowhere, message)
    })
}

/// Of the effective values: no secret is in them, and nobody gains by a collision.
fn digest(config: &Config) -> String {
    let hash = values(config)
        .into_iter()
        .fold(FNV_OFFSET, |hash, (path, value)| fnv(hash, format!("{path} = {value}\n").as_bytes()));
    format!("{hash:016x}")
}

const FNV_OFFSET: u64 = 0xcbf2_9ce4_8422_2325;

/// FNV-1a.
fn fnv(hash: u64, bytes: &[u8]) -> u64 {
    bytes.iter().fold(hash, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

/// One line of `config show`.
#[derive(Clone, Debug, PartialEq)]
pub struct Shown {
    pub key: &'static str,
    /// As TOML; masked where the key is secret.
    pub value: String,
    /// `None`: the default.
    pub origin: Option<Place>,
}

impl Loaded {
    /// Every key with its effective value and its origin, in the order of the file.
    pub fn shown(&self) -> Vec<Shown> {
        let values = values(&self.config);
        debug_assert!(values.iter().map(|(path, _)| *path).eq(KEYS.iter().map(|key| key.path)));
        values
            .into_iter()
            .map(|(key, value)| Shown { key, value: masked(key, &value), origin: self.origins.get(key).cloned() })
            .collect()
    }
}

/// A value as TOML, unless it is secret and set.
pub(super) fn masked(path: &str, value: &Value) -> String {
    let secret = super::keys::find(path).is_some_and(|key| key.secret);
    let empty = matches!(value, Value::Text(text) if text.is_empty());
    if secret && !empty { "\"***\"".into() } else { value.to_string() }
}
