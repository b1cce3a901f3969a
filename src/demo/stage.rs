//! What the person at the terminal sees: acts, steps that turn from "under way" to "done", a closing table.
//!
//! Colour and the moving line only on a terminal (and without `NO_COLOR`); elsewhere one plain line a step. A closed
//! pipe is no reason to stop.

use std::fmt::Display;
use std::io::{IsTerminal, Write, stdout};
use std::time::{Duration, Instant};

use crate::testbed::Trouble;

const BOLD: &str = "\x1b[1m";
const DIM: &str = "\x1b[2m";
const GREEN: &str = "\x1b[32m";
const RED: &str = "\x1b[31m";
const CYAN: &str = "\x1b[36m";

/// Below this a duration says nothing to a reader.
const WORTH_TELLING: Duration = Duration::from_millis(100);

/// The terminal, or whatever stands in its place.
#[derive(Debug)]
pub(super) struct Stage {
    live: bool,
    colour: bool,
    acts: usize,
    began: Instant,
}

impl Stage {
    pub(super) fn new() -> Self {
        let live = stdout().is_terminal();
        let colour = live && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty());
        Self { live, colour, acts: 0, began: Instant::now() }
    }

    /// Since the demo began.
    pub(super) fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    pub(super) fn title(&self, title: &str, subtitle: &str) {
        self.line(&format!("{}\n{}", self.paint(BOLD, title), self.paint(DIM, subtitle)));
    }

    /// A picture or an aside, as it stands.
    pub(super) fn plain(&self, text: &str) {
        self.line(text);
    }

    pub(super) fn act(&mut self, heading: &str) {
        self.acts += 1;
        let number = self.acts.to_string();
        self.line(&format!("\n{}  {}", self.paint(CYAN, &number), self.paint(BOLD, heading)));
    }

    /// Does `work` while the terminal says what is under way, then says what came of it. `work` answers the line that
    /// stays.
    pub(super) fn step<D: Display>(
        &self,
        under_way: &str,
        work: impl FnOnce() -> Result<D, Trouble>,
    ) -> Result<(), Trouble> {
        if self.live {
            self.write(&format!("   {} {}", self.paint(DIM, "…"), self.paint(DIM, under_way)));
        }
        let begun = Instant::now();
        let done = work();
        if self.live {
            self.write("\r\x1b[2K");
        }
        match done {
            Ok(line) => {
                let took = begun.elapsed();
                let tail = if took >= WORTH_TELLING { format!("  {:.1} s", took.as_secs_f64()) } else { String::new() };
                self.line(&format!("   {} {line}{}", self.paint(GREEN, "✓"), self.paint(DIM, &tail)));
                Ok(())
            }
            Err(trouble) => {
                self.line(&format!("   {} {under_way}", self.paint(RED, "✗")));
                Err(trouble)
            }
        }
    }

    /// What a program of the scene said, indented and quiet.
    pub(super) fn quote(&self, text: &str) {
        for line in text.lines().filter(|l| !l.trim().is_empty()) {
            self.line(&format!("     {}", self.paint(DIM, line.trim_end())));
        }
    }

    /// A row of the closing table: `good` is `None` for a figure that is neither.
    pub(super) fn row(&self, name: &str, value: &str, good: Option<bool>, note: &str) {
        let mark = match good {
            Some(true) => self.paint(GREEN, "✓"),
            Some(false) => self.paint(RED, "✗"),
            None => " ".to_owned(),
        };
        let value = format!("{value:>12}");
        let value = if good == Some(false) { self.paint(RED, &value) } else { self.paint(BOLD, &value) };
        self.line(&format!("   {mark} {name:<34}{value}   {}", self.paint(DIM, note)).replace("   \x1b[2m\x1b[0m", ""));
    }

    /// The last line.
    pub(super) fn close(&self, good: bool, text: &str) {
        self.line(&format!("\n{}", self.paint(if good { GREEN } else { RED }, text)));
    }

    fn paint(&self, code: &str, text: &str) -> String {
        if self.colour && !text.is_empty() { format!("{code}{text}\x1b[0m") } else { text.to_owned() }
    }

    fn line(&self, text: &str) {
        let text: Vec<&str> = text.split('\n').map(str::trim_end).collect();
        self.write(&(text.join("\n") + "\n"));
    }

    fn write(&self, text: &str) {
        let mut out = stdout().lock();
        // a reader that has gone away misses the show, the demo goes on and its exit code tells the rest
        let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    }
}
