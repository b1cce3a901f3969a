//! Documents that derive from the table of keys: the shipped `config.toml`, its reference page, the JSON Schema.
//!
//! May import: serde_json, std.

use serde_json::{Map, Value as Json, json};

use super::keys::{Class, KEYS, Key, Kind, tables};

const HEAD: &str = "\
# outboxd: every key with its default. What you do not set keeps its default; an unknown key is refused.
# Relative paths are relative to this file. Durations: \"200ms\", \"30s\", \"5m\", \"7d\"; sizes: 4096 or \"4MiB\".
# Each key can be overridden by an environment variable: OUTBOXD_ and its path in capitals (OUTBOXD_RELAY_BATCH=256).
# `outboxd config check` validates, `outboxd config show` prints what is in force and where it comes from.
# A reload (SIGHUP, `outboxd reload`) takes a change over at once, with a new connection where a key says [reconnect],
# and is refused as a whole where a key says [restart].
";

const HANDLERS: &str = "\
# [[inbox.handler]]
# event_type = \"asset.*\"  # exact, a prefix with *, or \"*\"
# apply = \"assets\"        # assets: the example domain; store: keep it in inbox_events; sql: run the statements below
# sql = \"\"                # for \"sql\": statements run in the dedupe transaction, with :event_id, :event_type,
#                         # :aggregate_type, :aggregate_id, :aggregate_version, :source, :event (JSON), :data (JSON)
";

/// The shipped `config.toml`: every key with its default and its reason.
pub fn shipped_file() -> String {
    let mut text = HEAD.to_owned();
    for table in tables() {
        text.push('\n');
        if !table.is_empty() {
            text.push_str(&format!("[{table}]\n"));
        }
        for key in KEYS.iter().filter(|key| key.split().0 == table) {
            let class = match key.class {
                Class::Hot => String::new(),
                Class::Reconnect | Class::Restart => format!(" [{}]", key.class.as_str()),
            };
            for line in wrapped(&format!("{}{class}", key.doc), 116) {
                text.push_str(&format!("# {line}\n"));
            }
            match key.kind {
                Kind::Handlers => text.push_str(HANDLERS),
                _ => text.push_str(&format!("{} = {}\n", key.split().1, key.default)),
            }
        }
    }
    text
}

/// The reference of all keys as a Markdown page.
pub fn reference() -> String {
    let mut text = "# Configuration\n\n\
        Every key of `config.toml`, generated from the table of keys in `src/config/keys.rs`. On reload: *hot* is taken \
        over at once,\n*reconnect* by a new connection that is made before the old one is given up, *restart* refuses the \
        reload by name.\n"
        .to_owned();
    for table in tables() {
        match table {
            "" => text.push_str("\n## Top level\n"),
            _ => text.push_str(&format!("\n## [{table}]\n")),
        }
        text.push_str("\n| key | default | must be | reload | environment | what it is, and why this default |\n|---|---|---|---|---|---|\n");
        for key in KEYS.iter().filter(|key| key.split().0 == table) {
            let cells = [
                format!("`{}`", key.split().1),
                format!("`{}`", key.default),
                key.kind.allowed(),
                key.class.as_str().to_owned(),
                format!("`{}`", key.variable()),
                key.doc.to_owned(),
            ];
            text.push_str(&format!("| {} |\n", cells.map(|cell| cell.replace('|', "\\|")).join(" | ")));
        }
    }
    text
}

/// Breaks text at blanks into lines of at most `width` characters where words allow it.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split(' ') {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

/// The JSON Schema (draft 2020-12) of the file, for editors.
pub fn schema() -> Json {
    let mut root = object("outboxd configuration");
    root["$schema"] = json!("https://json-schema.org/draft/2020-12/schema");
    for key in KEYS {
        let (table, name) = key.split();
        let mut node = &mut root;
        for part in table.split('.').filter(|part| !part.is_empty()) {
            node = node["properties"]
                .as_object_mut()
                .expect("every object of this schema has properties")
                .entry(part)
                .or_insert_with(|| object(part));
        }
        node["properties"][name] = property(key);
    }
    root
}

fn object(title: &str) -> Json {
    json!({ "title": title, "type": "object", "additionalProperties": false, "properties": {} })
}

fn property(key: &Key) -> Json {
    const DURATION: &str = r"^\s*([0-9]+(\.[0-9]+)?\s*[A-Za-zµ]+\s*)+$";
    const SIZE: &str = r"^[0-9]+\s*([kKMGT]i?[bB]|[kmgt]i?b|B)?$";
    let of_kind = match &key.kind {
        Kind::Text { .. } | Kind::Path { required: false } => json!({ "type": "string" }),
        Kind::Path { required: true } => json!({ "type": "string", "minLength": 1 }),
        Kind::Bool => json!({ "type": "boolean" }),
        Kind::Count { min, max } => json!({ "type": "integer", "minimum": min, "maximum": max }),
        Kind::Size { min } => json!({ "oneOf": [
            { "type": "integer", "minimum": min },
            { "type": "string", "pattern": SIZE },
        ] }),
        Kind::Duration { .. } => json!({ "type": "string", "pattern": DURATION }),
        Kind::Factor => json!({ "type": "number", "minimum": 1 }),
        Kind::Choice(names) => json!({ "enum": names() }),
        Kind::Texts { .. } => json!({ "type": "array", "minItems": 1, "items": { "type": "string" } }),
        Kind::Handlers => json!({ "type": "array", "items": {
            "type": "object",
            "additionalProperties": false,
            "required": ["event_type", "apply"],
            "properties": {
                "event_type": { "type": "string", "pattern": r"^([^*]+\*?|\*)$" },
                "apply": { "enum": ["assets", "store", "sql"] },
                "sql": { "type": "string" },
            },
        } }),
    };
    let default: toml::Table = format!("default = {}", key.default).parse().expect("a default of the table is TOML");
    let mut property: Map<String, Json> = of_kind.as_object().expect("each arm above is an object").clone();
    property.insert("default".into(), json!(default["default"]));
    let description = format!("{}\nmust be {}; on reload: {}", key.doc, key.kind.allowed(), key.class.as_str());
    property.insert("description".into(), json!(description));
    Json::Object(property)
}
