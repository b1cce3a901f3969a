//! `explain CODE`: what an exit code or a JetStream code means, and what to do about it.

use std::io;

use super::error::{CliError, Exit};
use super::render;

/// One code: its name, what it means here, what to do.
struct Entry {
    code: &'static str,
    title: &'static str,
    meaning: &'static str,
    remedy: &'static str,
}

const fn entry(code: &'static str, title: &'static str, meaning: &'static str, remedy: &'static str) -> Entry {
    Entry { code, title, meaning, remedy }
}

/// Exit codes of this program, then codes of the JetStream API that show in `last_error` and in status.
const ENTRIES: &[Entry] = &[
    entry("0", "exit 0: done", "the verb did what was asked; `run` drained everything it had leased", "nothing"),
    entry(
        "1",
        "exit 1: failure",
        "the verb failed, or the daemon had to be stopped by force before its leases were given back; no event is lost \
         by a forced stop, its leases expire by themselves",
        "read the message on standard error; after a forced stop look whether --grace is long enough",
    ),
    entry("2", "exit 2: usage", "the command line itself is wrong", "outboxd help VERB"),
    entry(
        "3",
        "exit 3: partly",
        "some of it: `doctor` has warnings, `verify` found events that the stream does not hold, or not all of several \
         ids could be changed",
        "read the list that the verb printed; `outboxd verify --repair` sends missing events again",
    ),
    entry(
        "69",
        "exit 69: unavailable",
        "something that is needed is not there now: no database file or no tables yet, or a daemon that holds its \
         socket and does not answer; nothing was written",
        "no database: outboxd db init; a silent daemon: look at its log and at `systemctl status outboxd`",
    ),
    entry(
        "70",
        "exit 70: internal",
        "a part of the daemon crashed more often than its restart budget allows; the service manager starts it again",
        "report it with the log lines before the end",
    ),
    entry(
        "78",
        "exit 78: configuration",
        "a person has to act first: the configuration is refused, or the file has classic tables or newer ones; the \
         unit file does not restart the service then",
        "outboxd config check; for classic tables: outboxd db migrate --dry-run, then outboxd db migrate",
    ),
    entry(
        "503",
        "JetStream: no responders",
        "nobody listens on the subject: no stream covers it, JetStream is switched off, or the stream has no leader for \
         the moment; not counted against the event",
        "outboxd doctor; nats stream info EVENTS",
    ),
    entry(
        "10002",
        "JetStream: resource limits exceeded",
        "the account or the server has no storage left for this stream; the relay pauses and goes on by itself",
        "raise the account's limit or free storage on the server",
    ),
    entry(
        "10023",
        "JetStream: insufficient resources",
        "the server cannot store: memory or file storage is used up; the relay pauses and goes on by itself",
        "free storage on the server, or raise max_file_store",
    ),
    entry(
        "10037",
        "JetStream: no message found",
        "the message at this sequence is gone: purged, expired, or removed by hand",
        "nothing, unless outboxd verify reports it as missing",
    ),
    entry(
        "10047",
        "JetStream: storage resources exceeded",
        "the server cannot store: its file storage is used up; the relay pauses and goes on by itself",
        "free storage on the server, or raise max_file_store",
    ),
    entry(
        "10054",
        "JetStream: message size exceeds maximum allowed",
        "the message is larger than max_msg_size of the stream: the event's own fault, it is failed at once",
        "raise max_msg_size, then outboxd events retry ID; or outboxd events discard ID --reason WHY",
    ),
    entry(
        "10058",
        "JetStream: stream name already in use",
        "a stream of this name exists with another configuration; outboxd never alters it",
        "outboxd doctor lists what differs",
    ),
    entry(
        "10059",
        "JetStream: stream not found",
        "the configured stream does not exist; the relay waits and goes on by itself when it is there",
        "create it, or set stream.manage = \"create\"",
    ),
    entry(
        "10060",
        "JetStream: expected stream does not match",
        "another stream takes the same subject and answered first (overlapping streams, a leaf node and its hub); the \
         outcome is unknown until ack_wait and the event is looked up before it is sent again",
        "make the subjects of the streams disjoint, or set stream.domain",
    ),
    entry(
        "10071",
        "JetStream: wrong last sequence",
        "the subject's last message is not the expected one: somebody else published in between; the event is looked up",
        "nothing; if it repeats, find who else writes to this subject",
    ),
    entry(
        "10076",
        "JetStream: not enabled",
        "the server runs without JetStream; the relay waits and goes on by itself",
        "start nats-server with -js, or enable JetStream for the account",
    ),
    entry(
        "10039",
        "JetStream: not enabled for account",
        "the account that the credentials belong to has no JetStream; the relay waits and goes on by itself",
        "enable JetStream for the account",
    ),
    entry(
        "10077",
        "JetStream: maximum reached (messages or bytes)",
        "the stream is full and set to discard new messages; the relay pauses and goes on by itself when there is room",
        "consume, purge, or raise max_msgs, max_bytes or max_msgs_per_subject",
    ),
    entry(
        "10109",
        "JetStream: stream is sealed",
        "nothing can be written to a sealed stream any more",
        "configure another stream",
    ),
    entry(
        "10158",
        "JetStream: duplicate message id is in process",
        "the cluster is still deciding on a message with the same id; it is sent again",
        "nothing",
    ),
    entry(
        "10167",
        "JetStream: too many requests",
        "the server sheds load; it is sent again with a growing delay",
        "nothing; if it persists, lower relay.publishers or look at the server",
    ),
    entry(
        "10201",
        "JetStream: atomic publish contains a duplicate message id",
        "one message of a batch is in the stream already; the batch is sent again message by message",
        "nothing",
    ),
];

/// Prints the entry of a code, or the list of all of them where `code` is `all`.
pub fn explain(code: &str) -> Result<Exit, CliError> {
    if code.eq_ignore_ascii_case("all") {
        render::text(&overview())?;
        return Ok(Exit::Ok);
    }
    let Some(entry) = find(code) else {
        return Err(CliError::usage(format!("no explanation for code {code:?}"))
            .fix("outboxd explain all lists the codes; other codes of JetStream come with their text in last_error"));
    };
    let write = |entry: &Entry| -> io::Result<()> {
        render::text(&format!("{}\n\n  {}\n\n  what to do: {}\n", entry.title, entry.meaning, entry.remedy))
    };
    write(entry)?;
    Ok(Exit::Ok)
}

fn find(code: &str) -> Option<&'static Entry> {
    let wanted = code.trim().trim_start_matches("exit").trim();
    ENTRIES.iter().find(|e| e.code == wanted)
}

fn overview() -> String {
    let mut text = String::new();
    for entry in ENTRIES {
        text.push_str(&format!("{:>6}  {}\n", entry.code, entry.title));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_exit_code_has_an_explanation() {
        for exit in
            [Exit::Ok, Exit::Failure, Exit::Usage, Exit::Partly, Exit::Unavailable, Exit::Internal, Exit::Config]
        {
            let entry = find(&exit.code().to_string()).unwrap_or_else(|| panic!("{exit:?} is not explained"));
            assert!(entry.title.starts_with(&format!("exit {}:", exit.code())), "{}", entry.title);
        }
    }

    #[test]
    fn no_code_stands_there_twice_and_each_says_what_to_do() {
        let mut codes: Vec<&str> = ENTRIES.iter().map(|e| e.code).collect();
        codes.sort_unstable();
        let before = codes.len();
        codes.dedup();
        assert_eq!(codes.len(), before);
        for entry in ENTRIES {
            assert!(!entry.meaning.is_empty() && !entry.remedy.is_empty(), "{}", entry.code);
        }
    }

    #[test]
    fn an_unknown_code_is_a_usage_error_that_names_the_list() {
        let error = explain("4711").unwrap_err();
        assert_eq!(error.exit, Exit::Usage);
        assert!(error.to_string().contains("explain all"), "{error}");
    }
}
