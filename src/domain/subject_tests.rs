//! Claims about templates, escaping and filters.

use proptest::prelude::*;

use super::*;

const DEFAULT: &str = "events.{aggregate_type}.{aggregate_id}.{event}";

fn fields<'a>(aggregate_type: &'a str, aggregate_id: &'a str, event_type: &'a str) -> Fields<'a> {
    Fields { aggregate_type, aggregate_id, event_type, event_id: "evt-1", schema_version: 3, source: "edge 7" }
}

fn render(template: &str, aggregate_type: &str, aggregate_id: &str, event_type: &str) -> String {
    Template::parse(template).unwrap().render(&fields(aggregate_type, aggregate_id, event_type)).unwrap()
}

#[test]
fn the_default_drops_the_leading_aggregate_type() {
    assert_eq!(render(DEFAULT, "asset", "asset-042", "asset.updated"), "events.asset.asset-042.updated");
    assert_eq!(render(DEFAULT, "asset", "asset-042", "moved"), "events.asset.asset-042.moved");
    assert_eq!(render(DEFAULT, "asset", "a", "assets.updated"), "events.asset.a.assets.updated");
    assert_eq!(render(DEFAULT, "asset", "a", "asset"), "events.asset.a.asset");
}

#[test]
fn event_and_event_type_keep_their_dots_and_nothing_else_does() {
    assert_eq!(render(DEFAULT, "a.b", "1.2", "a.b.c.d"), "events.a%2Eb.1%2E2.c.d");
    assert_eq!(render("e.{event_type}", "asset", "1", "asset.name.changed"), "e.asset.name.changed");
}

#[test]
fn every_placeholder_has_its_value() {
    let all = "e.{source}.v{schema_version}.{event_id}.{aggregate_type}-{aggregate_id}.{event_type}";
    assert_eq!(render(all, "t", "i", "t.x"), "e.edge%207.v3.evt-1.t-i.t.x");
}

#[test]
fn what_is_not_legal_in_a_token_is_escaped() {
    let cases = [
        ("a b", "a%20b"),
        ("*", "%2A"),
        (">", "%3E"),
        ("50%", "50%25"),
        ("ü", "%C3%BC"),
        ("部品", "%E9%83%A8%E5%93%81"),
        ("a\r\nPUB x", "a%0D%0APUB%20x"),
        ("\u{7f}", "%7F"),
        ("", "%-"),
        ("%-", "%25-"),
        ("$JS.API", "$JS%2EAPI"),
        ("asset-042_/:@{}", "asset-042_/:@{}"),
    ];
    for (value, wanted) in cases {
        assert_eq!(render("e.{aggregate_id}", "t", value, "x"), format!("e.{wanted}"), "{value:?}");
    }
}

/// The examples of docs/wire.md are true, and its table of placeholders is complete.
#[test]
fn the_documented_escapes_are_the_real_ones() {
    let page = include_str!("../../docs/wire.md");
    let table = page.split_once("| value | token |").unwrap().1.split_once("\n\n").unwrap().0;
    let rows: Vec<Vec<&str>> = table.lines().skip(2).map(|row| row.split('`').collect()).collect();
    assert!(rows.len() >= 8, "{rows:?}");
    for row in rows {
        assert_eq!(encoded(row[1]), row[3]);
        assert_eq!(decode_token(row[3]).as_deref(), Some(row[1]));
    }
    for (name, _) in Placeholder::ALL {
        assert!(page.contains(&format!("| `{{{name}}}` |")), "{name} is not documented");
    }
}

#[test]
fn empty_tokens_of_an_event_type_are_escaped_too() {
    assert_eq!(render(DEFAULT, "t", "i", "t."), "events.t.i.%-");
    assert_eq!(render(DEFAULT, "t", "i", "t..x."), "events.t.i.%-.x.%-");
}

#[test]
fn a_template_that_cannot_make_legal_subjects_is_refused() {
    use TemplateError as E;
    let cases = [
        ("", E::Empty),
        ("events..x", E::EmptyToken(2)),
        (".events", E::EmptyToken(1)),
        ("events.", E::EmptyToken(2)),
        ("events.{event", E::Unclosed),
        ("events.{evnt}", E::UnknownPlaceholder { name: "evnt".into() }),
        ("events.{a.b}", E::UnknownPlaceholder { name: "a.b".into() }),
        ("events.{}", E::UnknownPlaceholder { name: String::new() }),
        ("events.a b", E::Character(' ')),
        ("events.*", E::Character('*')),
        ("events.>", E::Character('>')),
        ("events.100%", E::Character('%')),
        ("events.x}", E::Character('}')),
        ("ereignisse.ü", E::Character('ü')),
        ("{aggregate_type}.x", E::FirstToken),
        ("e{event}.x", E::FirstToken),
        ("$JS.{event}", E::Reserved),
        ("_INBOX.{event}", E::Reserved),
    ];
    for (template, wanted) in cases {
        assert_eq!(Template::parse(template), Err(wanted), "{template:?}");
    }
    let long = format!("e.{}", "x".repeat(limits::SUBJECT));
    assert_eq!(Template::parse(&long), Err(TemplateError::TooLong));
}

#[test]
fn the_message_for_an_unknown_placeholder_lists_the_known_ones() {
    let text = Template::parse("e.{evnt}").unwrap_err().to_string();
    assert!(text.contains("{evnt}") && text.contains("{event}") && text.contains("{schema_version}"), "{text}");
}

#[test]
fn a_subject_is_refused_one_byte_above_the_ceiling() {
    let template = Template::parse("e.{aggregate_id}").unwrap();
    let fits = "x".repeat(limits::SUBJECT - 2);
    assert_eq!(template.render(&fields("t", &fits, "x")).unwrap().len(), limits::SUBJECT);
    let above = "x".repeat(limits::SUBJECT - 1);
    assert_eq!(template.render(&fields("t", &above, "x")), Err(SubjectTooLong { bytes: limits::SUBJECT + 1 }));
}

#[test]
fn coverage_takes_the_subjects_together() {
    let covered = |template: &str, subjects: &[&str]| Template::parse(template).unwrap().covered_by(subjects);
    let cases: [(&str, &[&str], bool); 17] = [
        (DEFAULT, &["events.>"], true),
        (DEFAULT, &[">"], true),
        (DEFAULT, &["events.*.*.>"], true),
        (DEFAULT, &["events.*.*.*"], false),
        (DEFAULT, &["events.*.*.*", "events.*.*.*.>"], true),
        (DEFAULT, &["events.*.*.*", "events.*.*.*.*.>"], false),
        (DEFAULT, &["events.asset.>"], false),
        (DEFAULT, &["orders.>", "events.>"], true),
        (DEFAULT, &["events.*.*.*.>"], false),
        (DEFAULT, &[], false),
        ("events.x", &["events.x"], true),
        ("events.x", &["events"], false),
        ("events.x", &["events.x.>"], false),
        ("events.{aggregate_id}", &["events.*"], true),
        ("events.v{aggregate_id}", &["events.v"], false),
        ("e.{event}.{event_type}.{event}.z", &["e.>"], true),
        ("e.{event}.z", &["e.*.z", "e.*.*.>"], true),
    ];
    for (template, subjects, wanted) in cases {
        assert_eq!(covered(template, subjects), wanted, "{template} in {subjects:?}");
    }
}

#[test]
fn coverage_of_many_open_placeholders_ends() {
    let template = format!("e{}", ".{event}".repeat(100));
    let subjects: Vec<String> = (1..40).map(|n| format!("e{}", ".*".repeat(n))).collect();
    assert!(!Template::parse(&template).unwrap().covered_by(&subjects));
}

#[test]
fn filters_are_checked() {
    for legal in ["a", "a.b", "a.*", "a.*.b", "a.>", ">", "*", "events.ü.%41", "$KV.x"] {
        assert_eq!(check_filter(legal), Ok(()), "{legal}");
    }
    use SubjectError as E;
    let cases = [
        ("", E::Empty),
        ("a..b", E::EmptyToken),
        (".a", E::EmptyToken),
        ("a.", E::EmptyToken),
        ("a b", E::Blank),
        ("a\n", E::Blank),
        ("a.b*", E::Star),
        ("a.>.b", E::Greater),
        ("a.b>", E::Greater),
    ];
    for (filter, wanted) in cases {
        assert_eq!(check_filter(filter), Err(wanted), "{filter:?}");
    }
    assert_eq!(check_subject("a.*"), Err(E::Wildcard));
    assert_eq!(check_subject("a.b"), Ok(()));
}

#[test]
fn matching_and_overlap_follow_the_servers_rules() {
    let matching = [
        ("a.*", "a.b", true),
        ("a.*", "a", false),
        ("a.*", "a.b.c", false),
        ("a.>", "a.b.c", true),
        ("a.>", "a", false),
        (">", "a", true),
        ("a.b", "a.b", true),
        ("a.b", "a.c", false),
    ];
    for (filter, subject, wanted) in matching {
        assert_eq!(matches(filter, subject), wanted, "{filter} {subject}");
    }
    let overlapping = [
        ("a.*", "*.b", true),
        ("a.>", "a.b.c", true),
        ("a.>", "a", false),
        ("a.b", "a.c", false),
        ("a.*", "a.*.c", false),
        ("a.>", "a.*.c", true),
    ];
    for (one, other, wanted) in overlapping {
        assert_eq!((overlap(one, other), overlap(other, one)), (wanted, wanted), "{one} {other}");
    }
}

fn encoded(text: &str) -> String {
    let mut out = String::new();
    encode_token(text, &mut out);
    out
}

proptest! {
    #[test]
    fn a_token_comes_back_as_it_was(text in any::<String>()) {
        prop_assert_eq!(decode_token(&encoded(&text)), Some(text));
    }

    #[test]
    fn an_encoded_token_is_one_legal_token(text in any::<String>()) {
        let token = encoded(&text);
        prop_assert_eq!(check_subject(&token), Ok(()));
        prop_assert!(!token.contains('.') && token.is_ascii());
    }

    #[test]
    fn two_texts_never_share_a_token(one in "[a%.\\- 2]{0,4}", other in "[a%.\\- 2]{0,4}") {
        prop_assert_eq!(one == other, encoded(&one) == encoded(&other));
    }

    #[test]
    fn decoding_accepts_only_what_encoding_writes(token in "[aA%0-9C*. -]{0,6}") {
        if let Some(text) = decode_token(&token) {
            prop_assert_eq!(encoded(&text), token);
        }
    }

    #[test]
    fn a_rendered_subject_is_legal_and_covered(
        kind in any::<String>(), id in any::<String>(), event in any::<String>()
    ) {
        let template = Template::parse(DEFAULT).unwrap();
        match template.render(&fields(&kind, &id, &event)) {
            Ok(subject) => {
                prop_assert_eq!(check_subject(&subject), Ok(()));
                prop_assert!(matches("events.*.*.>", &subject), "{}", subject);
            }
            Err(SubjectTooLong { bytes }) => prop_assert!(bytes > limits::SUBJECT),
        }
    }

    /// Against brute force: what `covered_by` promises holds for each subject; what it denies has a counter-example.
    #[test]
    fn coverage_agrees_with_matching(
        template in prop::sample::select(vec![
            "e.{aggregate_id}", "e.a.{event}", "e.{aggregate_id}.{event}", "e.{event}.a", "e.a", "e.{event}.{event}",
        ]),
        subjects in prop::collection::vec("e(\\.(a|b|\\*)){0,3}(\\.>)?", 0..4),
    ) {
        let parsed = Template::parse(template).unwrap();
        // every rendering with up to five tokens a placeholder, over an alphabet with a token that no filter names
        let mut rendered = vec![String::new()];
        for part in template.split('.') {
            let choices: Vec<String> = match part {
                "{aggregate_id}" => vec!["a".into(), "other".into()],
                "{event}" => (1..=5).map(|n| vec!["other"; n].join(".")).chain(["a".into(), "b.a".into()]).collect(),
                literal => vec![literal.to_owned()],
            };
            rendered = rendered.iter().flat_map(|head| choices.iter().map(move |c| {
                if head.is_empty() { c.clone() } else { format!("{head}.{c}") }
            })).collect();
        }
        let all = rendered.iter().all(|subject| subjects.iter().any(|filter| matches(filter, subject)));
        prop_assert_eq!(parsed.covered_by(&subjects), all, "{} in {:?}", template, subjects);
    }
}
