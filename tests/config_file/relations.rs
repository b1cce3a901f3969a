//! Relations between keys: impossible ones are refused, unwise ones are warnings.

use super::{assert_one, problems, warnings};

#[test]
fn impossible_relations_are_refused() {
    let cases = [
        ("[relay]\nlease = \"5s\"\n", "2:9: ", "relay.ack_wait (5s) must be shorter than relay.lease (5s)"),
        ("[relay]\nack_wait = \"40s\"\nlease = \"30s\"\n", "2:12: ", "must be shorter"),
        (
            "[relay.backoff]\ninitial = \"2m\"\n",
            "2:11: ",
            "relay.backoff.initial (2m) must not exceed relay.backoff.cap (1m)",
        ),
        ("[relay.backoff]\ncap = \"100ms\"\n", "2:7: ", "must not exceed"),
        ("[relay]\nsubject = \"orders.{event}\"\n", "2:11: ", "does not cover"),
        ("[stream]\nsubjects = [\"events.*\"]\n", "2:12: ", "does not cover"),
        ("[http]\nlisten = \"0.0.0.0:8787\"\n", "2:10: ", "http.token_file"),
        ("[http]\nlisten = \"[::]:8787\"\n", "2:10: ", "http.token_file"),
        ("[inbox]\nenabled = true\n", "2:11: ", "needs at least one [[inbox.handler]]"),
    ];
    for (text, place, words) in cases {
        assert_one(&problems(text), place, &[words]);
    }
}

#[test]
fn relations_that_hold_pass() {
    for text in [
        "[relay]\nlease = \"5001ms\"\n[stream]\nduplicate_window = \"1m\"\n",
        "[relay.backoff]\ninitial = \"1m\"\n",
        "[stream]\nsubjects = [\"events.*.*.*\", \"events.*.*.*.>\"]\n",
        "[relay]\nenabled = false\n[stream]\nsubjects = [\"orders.>\"]\n",
        "[http]\nlisten = \"0.0.0.0:8787\"\ntoken_file = \"token\"\n",
        "[http]\nlisten = \":0\"\n",
        "[http]\nlisten = \"[::1]:8787\"\n",
        "[http]\nlisten = \"\"\n",
        "[retention]\npublished = \"0s\"\nprocessed = \"0s\"\ninbox = \"0s\"\naudit = \"0s\"\n[stream]\nmax_age = \"0s\"\n",
    ] {
        assert_eq!(warnings(text), [""; 0], "{text}");
    }
}

#[test]
fn a_relation_is_not_judged_on_a_refused_value() {
    assert_one(&problems("[relay]\nlease = \"0s\"\n"), "2:9: ", &["relay.lease must be"]);
}

#[test]
fn what_is_unwise_is_a_warning() {
    let cases = [
        ("[stream]\nduplicate_window = \"40s\"\n", "2:20: ", "should exceed relay.lease + 2 x relay.ack_wait (40s)"),
        ("[stream]\nmax_age = \"1m\"\n", "2:11: ", "longer than stream.max_age"),
        ("[stream]\nreplicas = 2\n", "2:12: ", "survives no more failures than 1"),
        ("[stream]\nsubjects = [\"events.>\", \"events.x\"]\n", "2:12: ", "overlap"),
        ("[inbox]\nfilter_subjects = [\"a.*\", \"a.b\"]\n", "2:19: ", "overlap"),
        ("[nats]\nuser = \"bob\"\n", "2:8: ", "belong together"),
        ("[nats]\ntoken_file = \"t\"\nnkey_seed_file = \"s\"\n", "3:18: ", "more than one way to log in"),
        ("[nats.tls]\ncert_file = \"c\"\n", "2:13: ", "belong together"),
        ("[nats]\nping_interval = \"1m\"\n", "2:17: ", "frozen server"),
        ("[retention]\npublished = \"1m\"\n", "2:13: ", "at least 10m"),
        ("[[inbox.handler]]\nevent_type = \"*\"\napply = \"store\"\n", "1:1: ", "inbox.enabled is false"),
    ];
    for (text, place, words) in cases {
        assert_one(&warnings(text), place, &[words]);
    }
    let inbox = "[inbox]\nenabled = true\n[[inbox.handler]]\nevent_type = \"a*\"\napply = \"store\"\n";
    assert_eq!(warnings(inbox), [""; 0]);
    let cases = [
        (format!("{inbox}[[inbox.handler]]\nevent_type = \"asset.*\"\napply = \"assets\"\n"), "never reached"),
        (format!("{inbox}[retention]\nprocessed = \"1h\"\n"), "is applied twice"),
        (format!("{inbox}[relay]\nenabled = false\n[stream]\nsubjects = [\"x.>\"]\n"), "nothing in stream.subjects"),
    ];
    for (text, words) in cases {
        assert_one(&warnings(&text), "", &[words]);
    }
}
