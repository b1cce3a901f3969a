//! Reading messages back: what a duplicate ack stands for, and whether a message of unknown fate is in the stream.
//!
//! "It is not there" must be true before something is sent again, so the last word is the leader's
//! (`STREAM.MSG.GET`). A subject with many messages is first walked by batched direct gets: any replica serves them and
//! may lag, but what it has is a prefix of the stream, and the leader is asked from there on.
//!
//! May import: domain, ports.

use std::collections::HashMap;
use std::time::Duration;

use futures_util::stream::{self, StreamExt, TryStreamExt};
use serde_json::json;

use super::api::{Api, ApiFault, Read};
use super::publish::Kept;
use super::topology::Shape;
use crate::ports::{Sought, Unreadable, Whereabouts};

/// Subjects that are walked at the same time.
const WALKS: usize = 64;

/// Messages of a subject that are read one by one before batches are worth their set-up.
const STEPS: usize = 16;

/// Longest look-up; beyond it the caller asks again, with fewer or later.
const LOOK_UP: Duration = Duration::from_secs(20);

/// What stands at the sequence of a duplicate ack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Compared {
    Same,
    Gone,
    /// The same id with other contents.
    Differs(String),
    /// Something else altogether: that ack was not for this message.
    Stranger,
}

/// Compares the message at `seq` with what was sent.
pub(super) async fn compare(api: &Api, shape: Shape, seq: u64, kept: &Kept) -> Result<Compared, ApiFault> {
    let Some(read) = api.message(json!({ "seq": seq }).to_string()).await? else { return Ok(Compared::Gone) };
    if read.msg_id.as_deref() != Some(kept.msg_id.as_str()) {
        return Ok(Compared::Stranger);
    }
    Ok(match difference(&read, shape, &kept.subject, &kept.payload) {
        None => Compared::Same,
        Some(detail) => Compared::Differs(detail),
    })
}

fn difference(stored: &Read, shape: Shape, subject: &str, payload: &[u8]) -> Option<String> {
    if !shape.transformed && stored.subject != subject {
        return Some(format!("it stands on subject {} instead of {subject}", stored.subject));
    }
    (stored.payload != payload).then(|| match (stored.payload.len(), payload.len()) {
        (theirs, ours) if theirs == ours => format!("its payload of {theirs} bytes is another one"),
        (theirs, ours) => format!("its payload has {theirs} bytes, ours {ours}"),
    })
}

/// Looks for messages in the stream; one answer a question, in the same order.
///
/// What is stored after the look began is not waited for: the connection that could still do so is dropped by then, or
/// it is this one, whose commands the server takes in order; and the duplicate window covers what is on its way.
pub(super) async fn look_up(api: &Api, shape: Shape, sought: Vec<Sought>) -> Result<Vec<Whereabouts>, Unreadable> {
    let search = async {
        let last = api.info().await?.state.last_seq;
        let walks = walks(shape, last, &sought);
        let found: Vec<Vec<(usize, Whereabouts)>> = stream::iter(walks)
            .map(|walk| follow(api, shape, last, walk, &sought))
            .buffer_unordered(WALKS)
            .try_collect()
            .await?;
        Ok::<_, ApiFault>(found)
    };
    let found = tokio::time::timeout(LOOK_UP, search)
        .await
        .map_err(|_| Unreadable(format!("not done within {LOOK_UP:?}")))?
        .map_err(|fault| Unreadable(fault.to_string()))?;
    let mut answers = vec![Whereabouts::Missing; sought.len()];
    for (index, whereabouts) in found.into_iter().flatten() {
        if let Some(answer) = answers.get_mut(index) {
            *answer = whereabouts;
        }
    }
    Ok(answers)
}

/// One subject, walked from a sequence on, for several questions.
struct Walk {
    filter: String,
    from: u64,
    /// Indexes of the questions by message id.
    wanted: HashMap<String, Vec<usize>>,
}

fn walks(shape: Shape, last: u64, sought: &[Sought]) -> Vec<Walk> {
    let mut by_filter: HashMap<&str, Walk> = HashMap::new();
    for (index, question) in sought.iter().enumerate() {
        // where subjects are rewritten on their way in, every message of the stream is a candidate
        let filter = if shape.transformed { ">" } else { question.subject.as_str() };
        // a floor above the last sequence is of an older stream of that name: it says nothing about this one
        let from = if question.floor > last { 1 } else { question.floor + 1 };
        let walk =
            by_filter.entry(filter).or_insert_with(|| Walk { filter: filter.to_owned(), from, wanted: HashMap::new() });
        walk.from = walk.from.min(from);
        walk.wanted.entry(question.msg_id.clone()).or_default().push(index);
    }
    by_filter.into_values().collect()
}

async fn follow(
    api: &Api,
    shape: Shape,
    last: u64,
    mut walk: Walk,
    sought: &[Sought],
) -> Result<Vec<(usize, Whereabouts)>, ApiFault> {
    let mut found = Vec::new();
    let mut batches = shape.direct;
    let mut steps = 0;
    while walk.from <= last && !walk.wanted.is_empty() {
        if batches && steps >= STEPS {
            match api.batch(&walk.filter, walk.from).await {
                Ok(reads) if !reads.is_empty() => reads.iter().for_each(|r| walk.meet(r, shape, sought, &mut found)),
                // nothing more there, or no batches there: the leader goes on
                Ok(_) | Err(_) => batches = false,
            }
            continue;
        }
        steps += 1;
        let request = json!({ "next_by_subj": walk.filter, "seq": walk.from }).to_string();
        let Some(read) = api.message(request).await? else { break };
        if read.seq < walk.from {
            return Err(ApiFault::Garbled(format!("asked for {} or later, got sequence {}", walk.from, read.seq)));
        }
        walk.meet(&read, shape, sought, &mut found);
    }
    Ok(found)
}

impl Walk {
    /// Takes the next message of the subject: an answer, or one step on.
    fn meet(&mut self, read: &Read, shape: Shape, sought: &[Sought], found: &mut Vec<(usize, Whereabouts)>) {
        self.from = self.from.max(read.seq.saturating_add(1));
        let indexes = read.msg_id.as_ref().and_then(|id| self.wanted.remove(id)).unwrap_or_default();
        for index in indexes {
            let Some(question) = sought.get(index) else { continue };
            let whereabouts = match difference(read, shape, &question.subject, &question.payload) {
                None => Whereabouts::Stored { stream_seq: read.seq },
                Some(detail) => Whereabouts::Differs { stream_seq: read.seq, detail },
            };
            found.push((index, whereabouts));
        }
    }
}
