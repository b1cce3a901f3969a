//! Problems of a configuration: where they stand and what is wrong. All of them are reported at once.
//!
//! May import: std, strsim.

use std::fmt;
use std::path::PathBuf;

/// Where something in the configuration comes from.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// Line and column (in characters) count from 1.
    File { path: PathBuf, line: usize, column: usize },
    /// A file as a whole, or its absence.
    Whole(PathBuf),
    /// An environment variable.
    Environment(String),
    /// No place at all: nothing was found.
    Nowhere,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::File { path, line, column } => write!(f, "{}:{line}:{column}", path.display()),
            Place::Whole(path) => write!(f, "{}", path.display()),
            Place::Environment(name) => write!(f, "environment variable {name}"),
            Place::Nowhere => f.write_str("configuration"),
        }
    }
}

/// One problem, or one warning.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    pub place: Place,
    pub message: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.message)
    }
}

/// Why a configuration is refused: at least one problem, in the order of the file. Prints one a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problems(pub Vec<Problem>);

impl Problems {
    /// A single one.
    pub fn one(place: Place, message: impl Into<String>) -> Self {
        Self(vec![Problem { place, message: message.into() }])
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, problem) in self.0.iter().enumerate() {
            if index > 0 {
                f.write_str("\n")?;
            }
            write!(f, "{problem}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Problems {}

/// The candidate that somebody may have meant, where one is near enough.
pub(super) fn nearest<'a>(wrong: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let limit = (wrong.chars().count() / 3).max(1);
    candidates
        .into_iter()
        .map(|candidate| (strsim::osa_distance(wrong, candidate), candidate))
        .filter(|(distance, _)| *distance <= limit)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

/// [`nearest`] as the end of a message, or nothing.
pub(super) fn did_you_mean<'a>(wrong: &str, candidates: impl IntoIterator<Item = &'a str>) -> String {
    nearest(wrong, candidates).map_or(String::new(), |name| format!("; did you mean \"{name}\"?"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_name_is_near() {
        let known = ["batch", "batch_bytes", "lease", "max_attempts"];
        let cases = [
            ("batchh", Some("batch")),
            ("max_atempts", Some("max_attempts")),
            ("leaes", Some("lease")),
            ("zzz", None),
            ("", None),
        ];
        for (wrong, wanted) in cases {
            assert_eq!(nearest(wrong, known), wanted, "{wrong}");
        }
    }

    #[test]
    fn a_problem_is_one_line_that_an_editor_can_follow() {
        let place = Place::File { path: "/etc/outboxd/config.toml".into(), line: 3, column: 1 };
        let problems = Problems(vec![
            Problem { place, message: "first".into() },
            Problem { place: Place::Environment("OUTBOXD_X".into()), message: "second".into() },
        ]);
        assert_eq!(problems.to_string(), "/etc/outboxd/config.toml:3:1: first\nenvironment variable OUTBOXD_X: second");
    }
}
