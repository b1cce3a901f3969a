//! Lists for people and for programs: a table on the terminal, an array of objects with `--json`.

use std::io::{self, IsTerminal, Write};

use comfy_table::{ContentArrangement, Table, presets};
use serde_json::{Map, Value};

/// A list: the names of its columns, and a value a column in every row.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Listing {
    pub columns: Vec<&'static str>,
    pub rows: Vec<Vec<Value>>,
}

impl Listing {
    pub fn new(columns: &[&'static str]) -> Self {
        Self { columns: columns.to_vec(), rows: Vec::new() }
    }

    /// Adds a row, which has as many values as there are columns.
    pub fn row(&mut self, values: Vec<Value>) {
        debug_assert_eq!(values.len(), self.columns.len());
        self.rows.push(values);
    }

    /// The rows as objects under the names of the columns, in their order.
    pub fn to_json(&self) -> Value {
        let object = |row: &Vec<Value>| {
            let members: Map<String, Value> =
                self.columns.iter().map(|c| (*c).to_string()).zip(row.iter().cloned()).collect();
            Value::Object(members)
        };
        Value::Array(self.rows.iter().map(object).collect())
    }

    /// The list as aligned columns, no wider than `width` where one is given.
    pub fn to_table(&self, width: Option<u16>) -> String {
        let mut table = Table::new();
        table.load_style(presets::NOTHING);
        table.set_header(self.columns.iter().map(|c| c.to_uppercase()));
        if let Some(width) = width {
            table.set_content_arrangement(ContentArrangement::Dynamic);
            table.set_width(width);
        }
        for row in &self.rows {
            table.add_row(row.iter().map(cell));
        }
        let mut text = String::new();
        for line in table.to_string().lines() {
            text.push_str(line.strip_prefix(' ').unwrap_or(line).trim_end());
            text.push('\n');
        }
        text
    }
}

/// A value as a person reads it: text bare, control characters shown and not obeyed, nothing for null.
pub fn cell(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => visible(text),
        Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_) => visible(&value.to_string()),
    }
}

/// Text with its control characters escaped: what an event carries must not steer a terminal.
pub fn visible(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() { shown.extend(c.escape_debug()) } else { shown.push(c) }
    }
    shown
}

/// Writes a list to standard output.
pub fn list(listing: &Listing, json: bool) -> io::Result<()> {
    if json {
        return self::json(&listing.to_json());
    }
    let width = io::stdout().is_terminal().then(terminal_width).flatten();
    text(&listing.to_table(width))
}

/// Writes a value to standard output as indented JSON.
pub fn json(value: &Value) -> io::Result<()> {
    text(&format!("{value:#}\n"))
}

/// Writes text to standard output as it stands. Never panics where the reader went away, as `println!` would.
pub fn text(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// Writes text to standard error; nobody can be told where that fails.
pub fn complain(text: &str) {
    let mut err = io::stderr().lock();
    let _ = writeln!(err, "{text}");
}

/// Columns of the terminal on standard output.
fn terminal_width() -> Option<u16> {
    if let Some(columns) = std::env::var("COLUMNS").ok().and_then(|c| c.parse().ok()) {
        return Some(columns);
    }
    rustix::termios::tcgetwinsize(io::stdout()).ok().map(|size| size.ws_col).filter(|width| *width > 0)
}

/// Bytes as a person reads them: `1.5 MiB`.
pub fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = count as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{count} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

/// A length of time as a person reads it: at most two units, `250ms`, `12s`, `3m 20s`, `2h 5m`, `4d 1h`.
pub fn span(seconds: f64) -> String {
    if !seconds.is_finite() || seconds < 0.0 {
        return "0s".into();
    }
    if seconds < 1.0 {
        return format!("{}ms", (seconds * 1000.0).round() as u64);
    }
    let whole = seconds as u64;
    let (days, hours, minutes, rest) = (whole / 86_400, whole / 3_600 % 24, whole / 60 % 60, whole % 60);
    let two = |a: u64, an: &str, b: u64, bn: &str| if b == 0 { format!("{a}{an}") } else { format!("{a}{an} {b}{bn}") };
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{rest}s"),
        (0, 0, m) => two(m, "m", rest, "s"),
        (0, h, m) => two(h, "h", m, "m"),
        (d, h, _) => two(d, "d", h, "h"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn listing() -> Listing {
        let mut listing = Listing::new(&["seq", "event_id", "last_error"]);
        listing.row(vec![json!(7), json!("evt-7"), Value::Null]);
        listing.row(vec![json!(12), json!("evt-12"), json!("too large\u{1b}[2J")]);
        listing
    }

    #[test]
    fn json_is_an_array_of_objects_with_the_column_names() {
        assert_eq!(
            listing().to_json(),
            json!([{"seq": 7, "event_id": "evt-7", "last_error": null},
                   {"seq": 12, "event_id": "evt-12", "last_error": "too large\u{1b}[2J"}])
        );
    }

    #[test]
    fn a_table_has_a_line_a_row_under_its_header_and_no_trailing_blanks() {
        let table = listing().to_table(None);
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(lines.len(), 3, "{table}");
        assert!(lines[0].starts_with("SEQ"), "{table}");
        assert!(lines[1].starts_with('7') && lines[1].ends_with("evt-7"), "{table}");
    }

    #[test]
    fn an_event_cannot_steer_the_terminal() {
        assert!(!listing().to_table(None).contains('\u{1b}'));
        assert_eq!(visible("a\nb\u{9b}c"), "a\\nb\\u{9b}c");
    }

    #[test]
    fn an_empty_list_is_an_empty_array() {
        assert_eq!(Listing::new(&["id"]).to_json(), json!([]));
    }

    #[test]
    fn a_narrow_terminal_wraps_and_does_not_overflow() {
        let mut listing = Listing::new(&["id", "payload"]);
        listing.row(vec![json!(1), json!("word ".repeat(40))]);
        let table = listing.to_table(Some(40));
        assert!(table.lines().all(|l| l.chars().count() <= 40), "{table}");
    }

    #[test]
    fn spans_and_bytes_read_well() {
        let spans: Vec<String> = [0.0, 0.25, 12.9, 60.0, 200.0, 7_500.0, 349_200.0, f64::NAN, -1.0].map(span).into();
        assert_eq!(spans, ["0ms", "250ms", "12s", "1m", "3m 20s", "2h 5m", "4d 1h", "0s", "0s"]);
        assert_eq!([0, 1023, 1536, 5 << 30].map(bytes), ["0 B", "1023 B", "1.5 KiB", "5.0 GiB"]);
    }
}
