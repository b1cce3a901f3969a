//! How figures are printed: for people as they come, or nothing at all where one JSON object is wanted at the end.

use std::io::Write;

use serde_json::Value;

/// The output for people.
pub(super) struct Report {
    quiet: bool,
}

impl Report {
    pub(super) fn new(quiet: bool) -> Self {
        Self { quiet }
    }

    /// What the figures depend on, and what makes them worthless.
    pub(super) fn about(&self, about: &Value) {
        let text = |name: &str| about[name].as_str().unwrap_or("?").to_owned();
        self.line(&format!(
            "outboxd {} ({} build) · nats-server {} · {} cores · files in {}",
            text("outboxd"),
            text("build"),
            text("nats_server"),
            about["cores"],
            text("folder")
        ));
        if about["build"] == "debug" {
            self.line("a debug build: measure with `cargo run --release -- bench`");
        }
        if about["folder_in_memory"] == true {
            self.line("the folder has no disk below it, so a sync costs nothing: set TMPDIR to a folder on a disk");
        }
    }

    /// What is measured next.
    pub(super) fn heading(&self, text: &str) {
        self.line(&format!("\n{text}"));
    }

    /// A figure, in columns.
    pub(super) fn figure(&self, name: &str, value: &str, note: &str) {
        self.line(format!("  {name:<34}{value:>14}   {note}").trim_end());
    }

    fn line(&self, text: &str) {
        if !self.quiet {
            print(&format!("{text}\n"));
        }
    }
}

/// To the output; a reader that has gone away is no reason to fail.
pub(super) fn print(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// 41234.5 -> "41,234".
pub(super) fn grouped(value: f64) -> String {
    let digits = format!("{value:.0}");
    let mut text = String::new();
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(c);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thousands_are_grouped() {
        assert_eq!(grouped(0.4), "0");
        assert_eq!(grouped(999.0), "999");
        assert_eq!(grouped(41_234.4), "41,234");
        assert_eq!(grouped(1_000_000.0), "1,000,000");
    }
}
