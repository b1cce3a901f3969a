//! A reader of Rust source that knows just enough to tell code from comments, strings and test code.

use std::path::{Path, PathBuf};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Token {
    Word(String),
    /// A string literal, as it is written between its quotes.
    Text(String),
    Comment(String),
    Sign(char),
}

/// One source file, split where its test code begins.
pub(crate) struct Source {
    /// Relative to the package, such as `src/domain/event.rs`.
    pub path: PathBuf,
    pub lines: usize,
    /// Without test code; each token with its line.
    pub code: Vec<(Token, usize)>,
    /// The text of the test code, empty where there is none.
    pub tests: String,
}

impl Source {
    pub(crate) fn new(path: impl Into<PathBuf>, text: &str) -> Self {
        let path = path.into();
        let only_tests = path.file_stem().is_some_and(|s| s.to_string_lossy().ends_with("tests"));
        let split = if only_tests { 0 } else { tests_begin(text) };
        Self { lines: text.lines().count(), code: tokens(&text[..split]), tests: text[split..].to_owned(), path }
    }

    /// The directory or file under `src/`: `domain`, `ports`, ...
    pub(crate) fn layer(&self) -> String {
        let inside = self.path.strip_prefix("src").unwrap_or(&self.path);
        let first = inside.iter().next().unwrap_or_default().to_string_lossy();
        first.strip_suffix(".rs").unwrap_or(&first).to_owned()
    }

    /// Module path below the crate: `src/admin/socket.rs` is `admin::socket`.
    fn module(&self) -> Vec<String> {
        let inside = self.path.strip_prefix("src").unwrap_or(&self.path).with_extension("");
        let mut parts: Vec<String> = inside.iter().map(|part| part.to_string_lossy().into_owned()).collect();
        if parts.last().is_some_and(|last| matches!(last.as_str(), "mod" | "lib" | "main")) {
            parts.pop();
        }
        parts
    }

    /// Words and signs only.
    pub(crate) fn bare(&self) -> Vec<(&Token, usize)> {
        let code = self.code.iter().filter(|(token, _)| matches!(token, Token::Word(_) | Token::Sign(_)));
        code.map(|(token, line)| (token, *line)).collect()
    }

    /// Layers of ours that the code names, by `crate::` or by enough `super::`.
    pub(crate) fn layers_named(&self) -> Vec<(String, usize)> {
        let code = self.bare();
        let depth = self.module().len();
        let mut named = Vec::new();
        let mut at = 0;
        while at < code.len() {
            let mut climbed = 0;
            let mut next = at;
            if is_word(&code, at, "crate") && !is_path_before(&code, at) {
                next += 1;
                climbed = depth;
            } else {
                while is_word(&code, next, "super") {
                    climbed += 1;
                    next += 1;
                    if is_word(&code, next + 2, "super") && is_path(&code, next) {
                        next += 2;
                    }
                }
            }
            if next > at && climbed >= depth && is_path(&code, next) {
                named.extend(first_names(&code, next + 2));
            }
            at = next.max(at + 1);
        }
        named
    }

    /// Crates that the code names, out of `known`.
    pub(crate) fn crates_named<'a>(&self, known: &'a [String]) -> Vec<(&'a str, usize)> {
        let code = self.bare();
        let mut named = Vec::new();
        for (at, (token, line)) in code.iter().enumerate() {
            let Token::Word(word) = token else { continue };
            let Some(found) = known.iter().find(|name| *name == word) else { continue };
            let whole = at > 0 && is_word(&code, at - 1, "use") && is_sign(&code, at + 1, ';');
            if (is_path(&code, at + 1) && !is_path_before(&code, at)) || whole {
                named.push((found.as_str(), *line));
            }
        }
        named
    }

    /// Where a sequence such as `Connection::open` or `.unwrap()` stands in the code.
    pub(crate) fn find(&self, pattern: &str) -> Vec<usize> {
        let wanted = tokens(pattern);
        let code = self.bare();
        let hit = |window: &&[(&Token, usize)]| window.iter().zip(&wanted).all(|((a, _), (b, _))| *a == b);
        code.windows(wanted.len()).filter(hit).map(|window| window[0].1).collect()
    }
}

fn is_word(code: &[(&Token, usize)], at: usize, word: &str) -> bool {
    matches!(code.get(at), Some((Token::Word(found), _)) if found == word)
}

fn is_sign(code: &[(&Token, usize)], at: usize, sign: char) -> bool {
    matches!(code.get(at), Some((Token::Sign(found), _)) if *found == sign)
}

fn is_path(code: &[(&Token, usize)], at: usize) -> bool {
    is_sign(code, at, ':') && is_sign(code, at + 1, ':')
}

fn is_path_before(code: &[(&Token, usize)], at: usize) -> bool {
    at >= 2 && is_path(code, at - 2)
}

/// The name at `at`, or the first name of each entry of a group in braces.
fn first_names(code: &[(&Token, usize)], at: usize) -> Vec<(String, usize)> {
    let name = |at: usize| match code.get(at) {
        Some((Token::Word(word), line)) => Some((word.clone(), *line)),
        _ => None,
    };
    if !is_sign(code, at, '{') {
        return name(at).into_iter().collect();
    }
    let (mut depth, mut names) = (0, Vec::new());
    for index in at..code.len() {
        match code[index].0 {
            Token::Sign('{') => depth += 1,
            Token::Sign('}') => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            break;
        }
        if depth == 1 && (is_sign(code, index, '{') || is_sign(code, index, ',')) {
            names.extend(name(index + 1));
        }
    }
    names
}

/// Where `#[cfg(test)]` at the start of a line begins the test code of a file; tests stand last by the house's order.
fn tests_begin(text: &str) -> usize {
    let mark = "\n#[cfg(test)]\n";
    let mut from = 0;
    while let Some(at) = text[from..].find(mark).map(|at| at + from) {
        let after = &text[at + mark.len()..];
        let item = after.lines().find(|line| !line.starts_with("#[")).unwrap_or("");
        if item.starts_with("mod ") || item.starts_with("pub mod ") || item.starts_with("pub(crate) mod ") {
            return at;
        }
        from = at + mark.len();
    }
    text.len()
}

/// Splits source text into tokens with their lines.
pub(crate) fn tokens(text: &str) -> Vec<(Token, usize)> {
    let chars: Vec<char> = text.chars().collect();
    let mut out = Vec::new();
    let (mut at, mut line) = (0, 1);
    while at < chars.len() {
        let start = at;
        let token = match chars[at] {
            '/' if chars.get(at + 1) == Some(&'/') => {
                at = (at..chars.len()).find(|i| chars[*i] == '\n').unwrap_or(chars.len());
                Some(Token::Comment(chars[start..at].iter().collect()))
            }
            '/' if chars.get(at + 1) == Some(&'*') => {
                at = block_comment_end(&chars, at);
                Some(Token::Comment(chars[start..at].iter().collect()))
            }
            '"' => {
                at = string_end(&chars, at);
                Some(Token::Text(chars[start + 1..at.saturating_sub(1).max(start + 1)].iter().collect()))
            }
            'r' | 'b' if raw_string(&chars, at).is_some() => {
                let (inner, end) = raw_string(&chars, at).unwrap();
                at = end;
                Some(Token::Text(inner))
            }
            '\'' => {
                at = char_or_lifetime_end(&chars, at);
                None
            }
            c if c.is_alphanumeric() || c == '_' => {
                at = (at..chars.len())
                    .find(|i| !(chars[*i].is_alphanumeric() || chars[*i] == '_'))
                    .unwrap_or(chars.len());
                Some(Token::Word(chars[start..at].iter().collect()))
            }
            c => {
                at += 1;
                (!c.is_whitespace()).then_some(Token::Sign(c))
            }
        };
        if let Some(token) = token {
            out.push((token, line));
        }
        line += chars[start..at].iter().filter(|c| **c == '\n').count();
    }
    out
}

fn block_comment_end(chars: &[char], start: usize) -> usize {
    let (mut at, mut depth) = (start, 0);
    while at < chars.len() {
        match (chars[at], chars.get(at + 1)) {
            ('/', Some('*')) => {
                depth += 1;
                at += 2;
            }
            ('*', Some('/')) => {
                depth -= 1;
                at += 2;
                if depth == 0 {
                    break;
                }
            }
            _ => at += 1,
        }
    }
    at
}

fn string_end(chars: &[char], start: usize) -> usize {
    let mut at = start + 1;
    while at < chars.len() && chars[at] != '"' {
        at += if chars[at] == '\\' { 2 } else { 1 };
    }
    (at + 1).min(chars.len())
}

/// `r"..."`, `r#"..."#`, `b"..."`, `br#"..."#`: the inside and the end.
fn raw_string(chars: &[char], start: usize) -> Option<(String, usize)> {
    let mut at = start;
    let bytes = chars[at] == 'b';
    at += usize::from(bytes);
    let raw = chars.get(at) == Some(&'r');
    at += usize::from(raw);
    let hashes = chars[at.min(chars.len())..].iter().take_while(|c| **c == '#').count();
    at += hashes;
    if chars.get(at) != Some(&'"') || (!raw && (hashes > 0 || !bytes)) {
        return None;
    }
    if !raw {
        let end = string_end(chars, at);
        return Some((chars[at + 1..end - 1].iter().collect(), end));
    }
    let closed =
        |i: usize| chars[i] == '"' && chars[i + 1..].iter().take(hashes).filter(|c| **c == '#').count() == hashes;
    let end = (at + 1..chars.len()).find(|i| closed(*i))?;
    Some((chars[at + 1..end].iter().collect(), end + 1 + hashes))
}

fn char_or_lifetime_end(chars: &[char], start: usize) -> usize {
    match (chars.get(start + 1), chars.get(start + 2)) {
        (Some('\\'), _) => (start + 3..chars.len()).find(|i| chars[*i] == '\'').map_or(chars.len(), |i| i + 1),
        (Some(_), Some('\'')) => start + 3,
        _ => start + 1,
    }
}

/// All `.rs` files below a folder of the package, sorted.
pub(crate) fn sources(folder: &str) -> Vec<Source> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found = Vec::new();
    let mut folders = vec![root.join(folder)];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display())) {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                let text = std::fs::read_to_string(&path).unwrap();
                found.push(Source::new(path.strip_prefix(root).unwrap(), &text));
            }
        }
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    assert!(!found.is_empty(), "no source found under {folder}");
    found
}
