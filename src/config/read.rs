//! The strict parse: TOML with positions in, a configuration and every problem out.
//!
//! Invariants: a key that is set has its place in `places`; a key whose value was refused is in `broken` and keeps its
//! default, so that relations are not judged on it. May import: domain, toml, std.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::check;
use super::keys::{self, KEYS, Key, Kind, PREFIX, RESERVED};
use super::problem::{Place, Problem, did_you_mean};
use super::shape::{Apply, Config, Handler};
use super::value::{Choice, Value, names, parse_duration, parse_size, quoted};

/// What has been read so far.
pub(super) struct Reading {
    pub(super) config: Config,
    /// The file, absolute; relative paths in it are relative to its folder.
    pub(super) path: PathBuf,
    pub(super) problems: Vec<Problem>,
    pub(super) warnings: Vec<Problem>,
    pub(super) places: BTreeMap<&'static str, Place>,
    pub(super) broken: BTreeSet<&'static str>,
}

/// Where a value is being read from.
enum Source<'a> {
    File { path: &'a Path, text: &'a str },
    Variable(&'a str),
}

impl Source<'_> {
    fn place(&self, span: Range<usize>) -> Place {
        match self {
            Source::File { path, text } => {
                let before = text.get(..span.start).unwrap_or(text);
                let line_start = before.rfind('\n').map_or(0, |at| at + 1);
                Place::File {
                    path: path.to_path_buf(),
                    line: before.matches('\n').count() + 1,
                    column: before[line_start..].chars().count() + 1,
                }
            }
            Source::Variable(name) => Place::Environment((*name).to_owned()),
        }
    }
}

impl Reading {
    /// Nothing read yet: the defaults, for a file at `path`.
    pub(super) fn new(path: &Path) -> Self {
        let mut config = Config::default();
        config.database.path = resolve(path, &config.database.path);
        Self {
            config,
            path: path.to_path_buf(),
            problems: Vec::new(),
            warnings: Vec::new(),
            places: BTreeMap::new(),
            broken: BTreeSet::new(),
        }
    }

    /// Reads the text of the file. Returns whether it was TOML at all; even if not, what could be made out is read, so
    /// that a mistyped key is reported beside a syntax error.
    pub(super) fn file(&mut self, text: &str) -> bool {
        let path = self.path.clone();
        let source = Source::File { path: &path, text };
        let (table, errors) = DeTable::parse_recoverable(text);
        let syntax: Vec<Problem> = errors.iter().map(|error| syntax_problem(&source, text, error)).collect();
        self.table(&source, table.get_ref(), "");
        if syntax.is_empty() {
            return true;
        }
        // what recovery made of a broken line says nothing
        let line = |place: &Place| if let Place::File { line, .. } = place { Some(*line) } else { None };
        let lines: BTreeSet<_> = syntax.iter().filter_map(|p| line(&p.place)).collect();
        self.problems.retain(|p| line(&p.place).is_none_or(|l| !lines.contains(&l)));
        self.problems.extend(syntax);
        false
    }

    /// Reads environment variables; those that do not begin with our prefix are none of our business.
    pub(super) fn environment(&mut self, variables: &[(String, String)]) {
        for (name, text) in variables {
            if !name.starts_with(PREFIX) || RESERVED.contains(&name.as_str()) {
                continue;
            }
            let source = Source::Variable(name);
            let Some(key) = KEYS.iter().find(|key| key.variable() == *name) else {
                let known: Vec<String> = KEYS.iter().map(Key::variable).collect();
                let hint = did_you_mean(name, known.iter().map(String::as_str).chain(RESERVED));
                let message = format!("no key has this name, it is ignored{hint}");
                self.warnings.push(Problem { place: source.place(0..0), message });
                continue;
            };
            let plain = || Spanned::new(0..text.len(), DeValue::String(Cow::Borrowed(text)));
            let value = match DeValue::parse(text) {
                Ok(value) if takes_text(&key.kind) && !value.get_ref().is_str() => plain(),
                Ok(value) => value,
                Err(_) => plain(),
            };
            self.key(&source, key, &value);
        }
    }

    fn table(&mut self, source: &Source<'_>, table: &DeTable<'_>, prefix: &str) {
        for (name, value) in table.iter() {
            let path =
                if prefix.is_empty() { name.get_ref().to_string() } else { format!("{prefix}.{}", name.get_ref()) };
            if let Some(key) = keys::find(&path) {
                self.key(source, key, value);
            } else if keys::tables().contains(&path.as_str()) {
                match value.get_ref() {
                    DeValue::Table(inner) => self.table(source, inner, &path),
                    other => {
                        let message = format!("{path} must be a table, written as [{path}], not {}", given(other));
                        self.problem(source, value.span(), message);
                    }
                }
            } else {
                self.problem(source, name.span(), unknown(prefix, name.get_ref(), value.get_ref()));
            }
        }
    }

    fn key(&mut self, source: &Source<'_>, key: &'static Key, value: &Spanned<DeValue<'_>>) {
        self.places.insert(key.path, source.place(value.span()));
        self.broken.remove(key.path);
        match self.convert(source, key, value) {
            Some(value) => (key.field)(&mut self.config).put(value),
            None => {
                self.broken.insert(key.path);
            }
        }
    }

    /// The value of a key, or `None` after its problems were noted.
    fn convert(&mut self, source: &Source<'_>, key: &Key, value: &Spanned<DeValue<'_>>) -> Option<Value> {
        let inner = value.get_ref();
        match (&key.kind, inner) {
            (Kind::Texts { check, .. }, DeValue::Array(items)) => {
                let mut texts = Vec::new();
                for item in items.iter() {
                    match item.get_ref().as_str() {
                        Some(text) => match check(text) {
                            Ok(()) => texts.push(text.to_owned()),
                            Err(why) => self.refuse(source, item.span(), key, &format!(": {why}")),
                        },
                        None => self.refuse(source, item.span(), key, &format!(", not {}", given(item.get_ref()))),
                    }
                }
                if items.is_empty() {
                    self.refuse(source, value.span(), key, ", not an empty list");
                }
                (texts.len() == items.len() && !texts.is_empty()).then_some(Value::List(texts))
            }
            (Kind::Handlers, DeValue::Array(items)) => {
                let handlers: Vec<_> = items.iter().map(|item| self.handler(source, item)).collect();
                handlers.into_iter().collect::<Option<Vec<_>>>().map(Value::Handlers)
            }
            _ => match scalar(&key.kind, inner) {
                Ok(Value::Text(text)) if matches!(key.kind, Kind::Path { .. }) && !text.is_empty() => {
                    Some(Value::Text(resolve(&self.path, Path::new(&text)).display().to_string()))
                }
                Ok(value) => Some(value),
                Err(why) => {
                    self.refuse(source, value.span(), key, &why);
                    None
                }
            },
        }
    }

    /// One `[[inbox.handler]]`.
    fn handler(&mut self, source: &Source<'_>, item: &Spanned<DeValue<'_>>) -> Option<Handler> {
        const NAMES: [&str; 3] = ["event_type", "apply", "sql"];
        let before = self.problems.len();
        let DeValue::Table(table) = item.get_ref() else {
            let message = format!("inbox.handler must hold {}", Kind::Handlers.allowed());
            self.problem(source, item.span(), message);
            return None;
        };
        let (mut event_type, mut apply, mut sql) = (None, None, None);
        for (name, value) in table.iter() {
            let path = format!("inbox.handler.{}", name.get_ref());
            let Some(text) = value.get_ref().as_str() else {
                if NAMES.contains(&name.get_ref().as_ref()) {
                    let message = format!("{path} must be a string, not {}", given(value.get_ref()));
                    self.problem(source, value.span(), message);
                } else {
                    self.problem(source, name.span(), unknown_in("[[inbox.handler]]", name.get_ref(), &NAMES));
                }
                continue;
            };
            match name.get_ref().as_ref() {
                "event_type" => match check::event_pattern(text) {
                    Ok(()) => event_type = Some(text.to_owned()),
                    Err(why) => {
                        let allowed = "an event type, a prefix with '*' at its end, or \"*\"";
                        self.problem(source, value.span(), format!("{path} must be {allowed}: {why}"));
                    }
                },
                "apply" => match Apply::CHOICES.iter().find(|(known, _)| *known == text) {
                    Some((_, found)) => apply = Some((*found, value.span())),
                    None => {
                        let why = choice(text, &names::<Apply>());
                        self.problem(source, value.span(), format!("{path} must be one of {why}"));
                    }
                },
                "sql" => sql = Some((text.to_owned(), value.span())),
                other => self.problem(source, name.span(), unknown_in("[[inbox.handler]]", other, &NAMES)),
            }
        }
        for required in &NAMES[..2] {
            if !table.contains_key(*required) {
                self.problem(source, item.span(), format!("this [[inbox.handler]] has no {required}"));
            }
        }
        let (apply, at) = apply?;
        match (apply, sql.as_ref().filter(|(text, _)| !text.trim().is_empty())) {
            (Apply::Sql, None) => self.problem(source, at, "apply = \"sql\" needs statements in sql".into()),
            (Apply::Assets | Apply::Store, Some((_, span))) => {
                let message = format!("sql is for apply = \"sql\" only, here apply is \"{}\"", apply.as_str());
                self.problem(source, span.clone(), message);
            }
            (Apply::Sql, Some(_)) | (Apply::Assets | Apply::Store, None) => {}
        }
        if self.problems.len() > before {
            return None;
        }
        let sql = sql.map(|(text, _)| text).filter(|_| apply == Apply::Sql).unwrap_or_default();
        Some(Handler { event_type: event_type?, apply, sql })
    }

    fn refuse(&mut self, source: &Source<'_>, span: Range<usize>, key: &Key, why: &str) {
        self.problem(source, span, format!("{} must be {}{why}", key.path, key.kind.allowed()));
    }

    fn problem(&mut self, source: &Source<'_>, span: Range<usize>, message: String) {
        self.problems.push(Problem { place: source.place(span), message });
    }
}

/// A path in the file, relative to the file's folder.
fn resolve(file: &Path, path: &Path) -> PathBuf {
    file.parent().map_or_else(|| path.to_path_buf(), |folder| folder.join(path))
}

/// The kinds whose bare text in an environment variable is the value, even where it looks like a number.
fn takes_text(kind: &Kind) -> bool {
    match kind {
        Kind::Text { .. } | Kind::Path { .. } | Kind::Choice(_) | Kind::Duration { .. } => true,
        Kind::Bool | Kind::Count { .. } | Kind::Size { .. } | Kind::Factor | Kind::Texts { .. } | Kind::Handlers => {
            false
        }
    }
}

/// A value that is neither a list nor a table, or what follows "must be {allowed}".
fn scalar(kind: &Kind, value: &DeValue<'_>) -> Result<Value, String> {
    let wrong = || format!(", not {}", given(value));
    match kind {
        Kind::Text { check, .. } => {
            let text = value.as_str().ok_or_else(wrong)?;
            check(text).map_err(|why| format!(": {why}"))?;
            Ok(Value::Text(text.to_owned()))
        }
        Kind::Path { required } => {
            let text = value.as_str().ok_or_else(wrong)?;
            if (*required && text.is_empty()) || text.contains('\0') {
                return Err(wrong());
            }
            Ok(Value::Text(text.to_owned()))
        }
        Kind::Bool => value.as_bool().map(Value::Bool).ok_or_else(wrong),
        Kind::Count { min, max } => {
            integer(value).filter(|n| (min..=max).contains(&n)).map(Value::Count).ok_or_else(wrong)
        }
        Kind::Size { min } => {
            let size = match value.as_str() {
                Some(text) => parse_size(text).map_err(|why| format!(": {why}"))?,
                None => integer(value).filter(|n| i64::try_from(*n).is_ok()).ok_or_else(wrong)?,
            };
            if size < *min { Err(wrong()) } else { Ok(Value::Bytes(size)) }
        }
        Kind::Duration { zero } => {
            let text = value.as_str().ok_or_else(wrong)?;
            parse_duration(text, *zero).map(Value::Duration).map_err(|why| format!(": {why}"))
        }
        Kind::Factor => {
            let number = match value {
                DeValue::Float(float) => float.as_str().parse().ok(),
                other => integer(other).map(|n| n as f64),
            };
            number.filter(|x: &f64| x.is_finite() && *x >= 1.0).map(Value::Float).ok_or_else(wrong)
        }
        Kind::Choice(names) => {
            let text = value.as_str().ok_or_else(wrong)?;
            let names = names();
            if names.contains(&text) {
                return Ok(Value::Text(text.to_owned()));
            }
            Err(format!(", not {}{}", quoted(text), did_you_mean(text, names)))
        }
        Kind::Texts { .. } | Kind::Handlers => Err(wrong()),
    }
}

fn integer(value: &DeValue<'_>) -> Option<u64> {
    let integer = value.as_integer()?;
    u64::from_str_radix(integer.as_str(), integer.radix()).ok()
}

/// `"a", "b", not "c"; did you mean "b"?`
fn choice(text: &str, names: &[&'static str]) -> String {
    let quoted_names: Vec<String> = names.iter().map(|n| quoted(n)).collect();
    format!("{}, not {}{}", quoted_names.join(", "), quoted(text), did_you_mean(text, names.iter().copied()))
}

/// A value as it was given, for a message.
fn given(value: &DeValue<'_>) -> String {
    match value {
        DeValue::String(text) => format!("the string {}", quoted(text)),
        DeValue::Integer(n) => n.to_string(),
        DeValue::Float(x) => x.to_string(),
        DeValue::Boolean(yes) => yes.to_string(),
        DeValue::Datetime(time) => format!("the time {time}"),
        DeValue::Array(_) => "a list".into(),
        DeValue::Table(_) => "a table".into(),
    }
}

/// What to say of a name that nobody knows at this place.
fn unknown(table: &str, name: &str, value: &DeValue<'_>) -> String {
    if value.is_table() {
        let path = if table.is_empty() { name.to_owned() } else { format!("{table}.{name}") };
        let known: Vec<&str> = keys::tables().into_iter().filter(|t| !t.is_empty()).collect();
        let hint = did_you_mean(&path, known.iter().copied());
        return format!("unknown table [{path}]{hint} (known: {})", known.join(", "));
    }
    let here: Vec<&str> = KEYS.iter().map(Key::split).filter(|(t, _)| *t == table).map(|(_, n)| n).collect();
    let elsewhere: Vec<String> = KEYS
        .iter()
        .map(Key::split)
        .filter(|(t, n)| *n == name && *t != table)
        .map(|(t, _)| if t.is_empty() { "the top of the file".into() } else { format!("[{t}]") })
        .collect();
    let place = if table.is_empty() { "at the top of the file".to_owned() } else { format!("in [{table}]") };
    if !elsewhere.is_empty() && super::problem::nearest(name, here.iter().copied()).is_none() {
        return format!("unknown key \"{name}\" {place}; it belongs to {}", elsewhere.join(" or "));
    }
    format!("unknown key \"{name}\" {place}{} (known there: {})", did_you_mean(name, here.clone()), here.join(", "))
}

fn unknown_in(table: &str, name: &str, known: &[&'static str]) -> String {
    let hint = did_you_mean(name, known.iter().copied());
    format!("unknown key \"{name}\" in {table}{hint} (known there: {})", known.join(", "))
}

/// A syntax error of TOML, with the text that caused it where that is short.
fn syntax_problem(source: &Source<'_>, text: &str, error: &toml::de::Error) -> Problem {
    let span = error.span().unwrap_or(0..0);
    let cause = text.get(span.clone()).filter(|t| !t.trim().is_empty() && t.len() <= 40 && !t.contains('\n'));
    let cause = cause.map_or(String::new(), |t| format!(" at {}", quoted(t)));
    Problem { place: source.place(span), message: format!("not valid TOML: {}{cause}", error.message()) }
}
