//! Values of keys: their text in TOML, durations and sizes, and the bridge to the typed fields of the shapes.
//!
//! Invariant: what [`Value`] prints as TOML reads back as the same value. May import: domain, humantime, std.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use super::shape::{
    Apply, Checkpoint, Deliver, Format, Handler, Jitter, LogFormat, Manage, OnFailed, OnGap, Ordering, OwnEvents,
    Synchronous, Unmatched,
};

/// The value of one key.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    Text(String),
    Bool(bool),
    Count(u64),
    Bytes(u64),
    Float(f64),
    Duration(Duration),
    List(Vec<String>),
    Handlers(Vec<Handler>),
}

impl fmt::Display for Value {
    /// As TOML.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Text(text) => f.write_str(&quoted(text)),
            Value::Bool(yes) => write!(f, "{yes}"),
            Value::Count(n) => write!(f, "{n}"),
            Value::Bytes(n) => f.write_str(&size_text(*n)),
            Value::Float(x) => write!(f, "{x:?}"),
            Value::Duration(d) => write!(f, "\"{}\"", duration_text(*d)),
            Value::List(items) => {
                let items: Vec<String> = items.iter().map(|item| quoted(item)).collect();
                write!(f, "[{}]", items.join(", "))
            }
            Value::Handlers(handlers) => {
                let one = |h: &Handler| {
                    let sql = if h.sql.is_empty() { String::new() } else { format!(", sql = {}", quoted(&h.sql)) };
                    let (event_type, apply) = (quoted(&h.event_type), quoted(h.apply.as_str()));
                    format!("{{ event_type = {event_type}, apply = {apply}{sql} }}")
                };
                let items: Vec<String> = handlers.iter().map(one).collect();
                write!(f, "[{}]", items.join(", "))
            }
        }
    }
}

/// A basic string of TOML.
pub fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c.is_control() => out.push_str(&format!("\\u{:04X}", u32::from(c))),
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

/// A duration in the largest unit that divides it, such as `90s`, `2m`, `7d`; precise to the nanosecond.
pub fn duration_text(duration: Duration) -> String {
    const UNITS: [(u128, &str); 7] = [
        (86_400_000_000_000, "d"),
        (3_600_000_000_000, "h"),
        (60_000_000_000, "m"),
        (1_000_000_000, "s"),
        (1_000_000, "ms"),
        (1_000, "us"),
        (1, "ns"),
    ];
    let nanos = duration.as_nanos();
    if nanos == 0 {
        return "0s".into();
    }
    let (unit, name) = UNITS.iter().find(|(unit, _)| nanos.is_multiple_of(*unit)).expect("one divides every number");
    format!("{}{name}", nanos / unit)
}

/// The longest duration a key takes: ten years, far from any overflow of milliseconds.
pub const LONGEST: Duration = Duration::from_secs(10 * 366 * 86_400);

/// Reads a duration in humantime's form.
pub fn parse_duration(text: &str, zero: bool) -> Result<Duration, String> {
    let duration = humantime::parse_duration(text).map_err(|e| format!("{text:?} is no duration: {e}"))?;
    if duration.is_zero() && !zero {
        return Err("it is zero".into());
    }
    if !duration.is_zero() && duration < Duration::from_millis(1) {
        return Err(format!("{text:?} is shorter than a millisecond"));
    }
    if duration > LONGEST {
        return Err(format!("{text:?} is longer than ten years"));
    }
    Ok(duration)
}

const SIZES: [(u64, &str); 8] = [
    (1 << 40, "TiB"),
    (1 << 30, "GiB"),
    (1 << 20, "MiB"),
    (1 << 10, "KiB"),
    (1_000_000_000_000, "TB"),
    (1_000_000_000, "GB"),
    (1_000_000, "MB"),
    (1_000, "kB"),
];

/// A size as TOML: a binary unit where it divides it, else plain bytes.
fn size_text(bytes: u64) -> String {
    match SIZES[..4].iter().find(|(unit, _)| bytes != 0 && bytes.is_multiple_of(*unit)) {
        Some((unit, name)) => format!("\"{}{name}\"", bytes / unit),
        None => bytes.to_string(),
    }
}

/// Reads a size such as `4MiB`, `500 kB`, `4096` or `64B`: whole numbers only.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let unit = unit.trim();
    let no_size = || format!("{text:?} is no size: a whole number with B, kB, MB, GB, TB, KiB, MiB, GiB or TiB");
    let factor = match SIZES.iter().find(|(_, name)| name.eq_ignore_ascii_case(unit)) {
        Some((factor, _)) => *factor,
        None if unit.is_empty() || unit == "B" => 1,
        None => return Err(no_size()),
    };
    let number: u64 = number.parse().map_err(|_| no_size())?;
    number.checked_mul(factor).filter(|n| i64::try_from(*n).is_ok()).ok_or(format!("{text:?} is too large"))
}

/// A field of the shapes that a [`Value`] can fill and that can be shown as one.
///
/// `put` panics where kind and field disagree; a test puts the default of every key.
pub trait Field {
    fn put(&mut self, value: Value);
    fn value(&self) -> Value;
}

macro_rules! field {
    ($type:ty, $variant:ident, $value:ident => $put:expr, $this:ident => $get:expr) => {
        impl Field for $type {
            fn put(&mut self, value: Value) {
                match value {
                    Value::$variant($value) => *self = $put,
                    other => unreachable!("a key's kind and its field disagree: {other:?}"),
                }
            }

            fn value(&self) -> Value {
                let $this = self;
                Value::$variant($get)
            }
        }
    };
}

field!(String, Text, v => v, this => this.clone());
field!(PathBuf, Text, v => v.into(), this => this.display().to_string());
field!(Option<PathBuf>, Text, v => (!v.is_empty()).then(|| v.into()),
    this => this.as_ref().map_or(String::new(), |p| p.display().to_string()));
field!(bool, Bool, v => v, this => *this);
field!(usize, Count, v => usize::try_from(v).unwrap_or(usize::MAX), this => *this as u64);
field!(u32, Count, v => u32::try_from(v).unwrap_or(u32::MAX), this => u64::from(*this));
field!(u64, Bytes, v => v, this => *this);
field!(f64, Float, v => v, this => *this);
field!(Duration, Duration, v => v, this => *this);
field!(Vec<String>, List, v => v, this => this.clone());
field!(Vec<Handler>, Handlers, v => v, this => this.clone());

/// Enumerations whose variants have a name in the file.
pub trait Choice: Sized + Copy + 'static {
    const CHOICES: &'static [(&'static str, Self)];
}

/// The names of a [`Choice`], in the order of its declaration.
pub fn names<T: Choice>() -> Vec<&'static str> {
    T::CHOICES.iter().map(|(name, _)| *name).collect()
}

macro_rules! choices {
    ($($type:ident { $($variant:ident = $name:literal),+ })+) => {$(
        impl Choice for $type {
            const CHOICES: &'static [(&'static str, Self)] = &[$(($name, $type::$variant)),+];
        }

        field!($type, Text,
            v => $type::CHOICES.iter().find(|(name, _)| *name == v).expect("the name was checked against the list").1,
            this => match this { $($type::$variant => $name.to_owned()),+ });
    )+};
}

choices! {
    Synchronous { Full = "full", Normal = "normal" }
    Checkpoint { Passive = "passive", Truncate = "truncate", Off = "off" }
    Manage { Create = "create", Check = "check", Off = "off" }
    Format { Envelope = "envelope", CloudEvents = "cloudevents" }
    Ordering { Aggregate = "aggregate", None = "none" }
    OnFailed { Hold = "hold", Skip = "skip" }
    Jitter { Full = "full", None = "none" }
    Deliver { All = "all", New = "new" }
    OwnEvents { Skip = "skip", Apply = "apply" }
    Unmatched { Skip = "skip", Store = "store", Dead = "dead" }
    OnGap { Apply = "apply", Wait = "wait" }
    Apply { Assets = "assets", Store = "store", Sql = "sql" }
    LogFormat { Auto = "auto", Text = "text", Json = "json", Journald = "journald" }
}

impl Apply {
    /// The name in the file.
    pub fn as_str(self) -> &'static str {
        match self {
            Apply::Assets => "assets",
            Apply::Store => "store",
            Apply::Sql => "sql",
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn durations_are_written_in_the_largest_unit_that_fits() {
        let cases = [
            (0, "0s"),
            (200, "200ms"),
            (1_500, "1500ms"),
            (30_000, "30s"),
            (90_000, "90s"),
            (120_000, "2m"),
            (7 * 86_400_000, "7d"),
            (365 * 86_400_000, "365d"),
        ];
        for (millis, text) in cases {
            assert_eq!(duration_text(Duration::from_millis(millis)), text);
            assert_eq!(parse_duration(text, true), Ok(Duration::from_millis(millis)));
        }
    }

    #[test]
    fn a_duration_that_is_none_is_refused_with_its_text() {
        for text in ["", "5", "5 parsecs", "-1s", "1us", "11years", "0s"] {
            let error = parse_duration(text, false).unwrap_err();
            assert!(error.contains(text) || error == "it is zero", "{error}");
        }
        assert_eq!(parse_duration("0s", true), Ok(Duration::ZERO));
    }

    #[test]
    fn sizes_are_whole_numbers_with_a_unit() {
        let cases = [
            ("0", 0),
            ("64B", 64),
            ("4MiB", 4 << 20),
            ("4 mib", 4 << 20),
            ("500kB", 500_000),
            ("500KB", 500_000),
            ("2GB", 2_000_000_000),
            ("1TiB", 1 << 40),
        ];
        for (text, bytes) in cases {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for text in ["", "MiB", "1.5MiB", "-1", "4Mib5", "4MiB 5", "99999999TiB", "1e3", "4M"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn what_is_written_reads_back(
            text in any::<String>(), millis in 0u64..=LONGEST.as_millis() as u64, n in 0u64..1 << 63,
        ) {
            let table: toml::Table = toml::from_str(&format!(
                "text = {}\nduration = {}\nsize = {}\nlist = {}\n",
                Value::Text(text.clone()), Value::Duration(Duration::from_millis(millis)), Value::Bytes(n),
                Value::List(vec![text.clone(), "x".into()]),
            )).unwrap();
            prop_assert_eq!(table["text"].as_str(), Some(text.as_str()));
            prop_assert_eq!(table["list"][0].as_str(), Some(text.as_str()));
            let duration = parse_duration(table["duration"].as_str().unwrap(), true);
            prop_assert_eq!(duration, Ok(Duration::from_millis(millis)));
            let size = match &table["size"] {
                toml::Value::Integer(plain) => Ok(*plain as u64),
                unit => parse_size(unit.as_str().unwrap()),
            };
            prop_assert_eq!(size, Ok(n));
        }
    }
}
