//! Reading stored SQL just enough: tokens, so that a name in a string or a comment is not taken for a name. Pure.

/// One token of a statement and where it stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Token<'a> {
    /// As written, quotes included.
    pub(super) text: &'a str,
    /// Byte offset behind its last character.
    pub(super) end: usize,
    /// A string in single quotes: never a name.
    string: bool,
}

impl Token<'_> {
    /// The token is this name, bare or quoted, in any case.
    pub(super) fn is_name(&self, name: &str) -> bool {
        !self.string && bare(self.text).eq_ignore_ascii_case(name)
    }
}

/// The tokens of a statement, without blanks and comments.
pub(super) fn tokens(sql: &str) -> Vec<Token<'_>> {
    let b = sql.as_bytes();
    let mut found = Vec::new();
    let mut at = 0;
    while at < b.len() {
        let start = at;
        match b[at] {
            c if c.is_ascii_whitespace() => {
                at += 1;
                continue;
            }
            b'-' if b.get(at + 1) == Some(&b'-') => {
                at = sql[at..].find('\n').map_or(b.len(), |n| at + n);
                continue;
            }
            b'/' if b.get(at + 1) == Some(&b'*') => {
                at = sql[at + 2..].find("*/").map_or(b.len(), |n| at + n + 4);
                continue;
            }
            quote @ (b'\'' | b'"' | b'`') => at = closing(b, at, quote),
            b'[' => at = sql[at..].find(']').map_or(b.len(), |n| at + n + 1),
            c if is_word(c) => {
                while at < b.len() && is_word(b[at]) {
                    at += 1;
                }
            }
            _ => at += 1,
        }
        found.push(Token { text: &sql[start..at], end: at, string: b[start] == b'\'' });
    }
    found
}

/// Behind the closing quote; a doubled quote is one of the text.
fn closing(b: &[u8], start: usize, quote: u8) -> usize {
    let mut at = start + 1;
    while at < b.len() {
        if b[at] == quote {
            if b.get(at + 1) != Some(&quote) {
                return at + 1;
            }
            at += 1;
        }
        at += 1;
    }
    b.len()
}

fn is_word(c: u8) -> bool {
    c.is_ascii_alphanumeric() || c == b'_' || c == b'$' || c >= 0x80
}

fn bare(text: &str) -> &str {
    let b = text.as_bytes();
    match (b.first(), b.last()) {
        (Some(b'"'), Some(b'"')) | (Some(b'`'), Some(b'`')) | (Some(b'['), Some(b']')) if b.len() >= 2 => {
            &text[1..text.len() - 1]
        }
        _ => text,
    }
}

/// Whether a statement names this table or column.
pub(super) fn mentions(sql: &str, name: &str) -> bool {
    tokens(sql).iter().any(|t| t.is_name(name))
}

/// How often a keyword stands in a statement.
pub(super) fn count(sql: &str, keyword: &str) -> usize {
    tokens(sql).iter().filter(|t| t.text.eq_ignore_ascii_case(keyword)).count()
}

/// `REFERENCES parent` without a column becomes `REFERENCES parent (column)`; `None` where there is no such reference.
pub(super) fn name_parent_column(sql: &str, parent: &str, column: &str) -> Option<String> {
    let found = tokens(sql);
    let ends: Vec<usize> = found
        .windows(2)
        .enumerate()
        .filter(|(i, w)| {
            w[0].text.eq_ignore_ascii_case("references")
                && w[1].is_name(parent)
                && found.get(i + 2).is_none_or(|t| t.text != "(")
        })
        .map(|(_, w)| w[1].end)
        .collect();
    let mut edited = sql.to_owned();
    for end in ends.iter().rev() {
        edited.insert_str(*end, &format!("({column})"));
    }
    (!ends.is_empty()).then_some(edited)
}

/// An identifier, quoted.
pub(super) fn quote(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// A stored statement in a form that can be compared: one blank between tokens, no quotes around plain names.
pub(super) fn normal(sql: &str) -> String {
    let words: Vec<&str> =
        tokens(sql).iter().map(|t| if t.text.starts_with('"') { bare(t.text) } else { t.text }).collect();
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn names_in_strings_and_comments_are_no_names() {
        assert!(mentions("SELECT * FROM \"OutBox_Events\" e", "outbox_events"));
        assert!(mentions("select [outbox_events].x", "outbox_events"));
        for sql in [
            "SELECT 'outbox_events'",
            "SELECT 1 -- outbox_events\n+1",
            "/* outbox_events */ SELECT 'it''s'",
            "SELECT my_outbox_events",
        ] {
            assert!(!mentions(sql, "outbox_events"), "{sql}");
        }
    }

    #[test]
    fn a_reference_without_a_column_is_given_one() {
        let sql = "CREATE TABLE n (e TEXT REFERENCES outbox_events ON DELETE CASCADE, f REFERENCES \"outbox_events\", \
                   g REFERENCES outbox_events (event_id), h REFERENCES other, i DEFAULT 'references outbox_events')";
        let want = "CREATE TABLE n (e TEXT REFERENCES outbox_events(event_id) ON DELETE CASCADE, f REFERENCES \"outbox_events\"(event_id), \
                    g REFERENCES outbox_events (event_id), h REFERENCES other, i DEFAULT 'references outbox_events')";
        assert_eq!(name_parent_column(sql, "outbox_events", "event_id").as_deref(), Some(want));
        assert_eq!(name_parent_column(want, "outbox_events", "event_id"), None);
    }

    #[test]
    fn a_renamed_table_compares_equal() {
        assert_eq!(normal("CREATE TABLE \"t\" (a,\n  b)"), normal("CREATE TABLE t (a, b)"));
        assert_ne!(normal("CREATE TABLE t (a DEFAULT 'x')"), normal("CREATE TABLE t (a DEFAULT 'y')"));
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(sql in "\\PC{0,60}") {
            let _ = name_parent_column(&sql, "outbox_events", "event_id");
        }

        #[test]
        fn no_broken_quotes_make_it_panic(sql in "[a'\"`\\[\\]/*\\- \né]{0,20}") {
            let _ = normal(&sql);
        }
    }
}
