//! Reading messages back: what a duplicate ack stands for, and whether a message of unknown fate is in the stream.
//!
//! Reads go to the stream's leader (`STREAM.MSG.GET`): a direct get is served by any replica and may lag, and "it is
//! not there" must be true before something is sent again.
//!
//! May import: domain, ports, async_nats.

use std::collections::HashMap;
use std::time::Duration;

use async_nats::header::NATS_MESSAGE_ID;
use async_nats::jetstream::message::StreamMessage;
use futures_util::stream::{self, StreamExt, TryStreamExt};
use serde_json::json;

use super::api::{Api, ApiFault};
use super::publish::Kept;
use super::topology::Shape;
use crate::ports::{Sought, Unreadable, Whereabouts};

/// Subjects that are walked at the same time.
const WALKS: usize = 64;

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
    let Some(raw) = api.message(json!({ "seq": seq }).to_string()).await? else { return Ok(Compared::Gone) };
    let message = StreamMessage::try_from(raw).map_err(|error| ApiFault::Garbled(error.to_string()))?;
    if id_of(&message) != Some(kept.msg_id.as_str()) {
        return Ok(Compared::Stranger);
    }
    Ok(match difference(&message, shape, &kept.subject, &kept.payload) {
        None => Compared::Same,
        Some(detail) => Compared::Differs(detail),
    })
}

fn id_of(message: &StreamMessage) -> Option<&str> {
    message.headers.get(NATS_MESSAGE_ID).map(|id| id.as_str())
}

fn difference(stored: &StreamMessage, shape: Shape, subject: &str, payload: &[u8]) -> Option<String> {
    if !shape.transformed && stored.subject.as_str() != subject {
        return Some(format!("it stands on subject {} instead of {subject}", stored.subject.as_str()));
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
    let mut next = walk.from;
    while next <= last && !walk.wanted.is_empty() {
        let request = json!({ "next_by_subj": walk.filter, "seq": next }).to_string();
        let Some(raw) = api.message(request).await? else { break };
        let stream_seq = raw.sequence;
        if stream_seq > last || stream_seq < next {
            break;
        }
        next = stream_seq + 1;
        let message = StreamMessage::try_from(raw).map_err(|error| ApiFault::Garbled(error.to_string()))?;
        let Some(indexes) = id_of(&message).and_then(|id| walk.wanted.remove(id)) else { continue };
        for index in indexes {
            let Some(question) = sought.get(index) else { continue };
            let whereabouts = match difference(&message, shape, &question.subject, &question.payload) {
                None => Whereabouts::Stored { stream_seq },
                Some(detail) => Whereabouts::Differs { stream_seq, detail },
            };
            found.push((index, whereabouts));
        }
    }
    Ok(found)
}
