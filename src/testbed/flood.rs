//! The limit that a relay is measured against: the same messages published by a plain async-nats client, with a fixed
//! number in flight, on a runtime of one thread (its fastest form).

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use async_nats::HeaderMap;
use async_nats::jetstream;

use super::Trouble;
use super::stream::Stored;

/// An ack that is not there by then makes the measurement void.
const ACK: Duration = Duration::from_secs(30);

/// Publishes `messages` with their subjects, headers and payloads; answers the time from the first publish to the last
/// ack.
pub fn flood(url: &str, messages: &[Stored], in_flight: usize) -> Result<Duration, Trouble> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(Trouble::io("start a runtime for a NATS client"))?.block_on(publish(url, messages, in_flight))
}

async fn publish(url: &str, messages: &[Stored], in_flight: usize) -> Result<Duration, Trouble> {
    let failed = |e: &dyn std::fmt::Display| Trouble::failed(format!("cannot publish: {e}"));
    let client = async_nats::connect(url).await.map_err(|e| failed(&e))?;
    let context =
        jetstream::ContextBuilder::new().timeout(ACK).ack_timeout(ACK).max_ack_inflight(in_flight.max(1)).build(client);
    let ready: Vec<(String, HeaderMap, bytes::Bytes)> = messages.iter().map(ready).collect();
    let mut acks = VecDeque::with_capacity(in_flight);
    let begun = Instant::now();
    for (subject, headers, payload) in ready {
        if acks.len() >= in_flight {
            let oldest: jetstream::context::PublishAckFuture = acks.pop_front().expect("it is not empty");
            oldest.await.map_err(|e| failed(&e))?;
        }
        let ack = context.publish_with_headers(subject, headers, payload).await.map_err(|e| failed(&e))?;
        acks.push_back(ack);
    }
    for ack in acks {
        ack.await.map_err(|e| failed(&e))?;
    }
    Ok(begun.elapsed())
}

fn ready(message: &Stored) -> (String, HeaderMap, bytes::Bytes) {
    let mut headers = HeaderMap::new();
    for (name, value) in &message.headers {
        headers.insert(name.as_str(), value.as_str());
    }
    (message.subject.clone(), headers, message.payload.clone())
}

#[cfg(test)]
mod tests {
    use super::super::server::NatsServer;
    use super::super::stream::Client;
    use super::super::workdir::Workdir;
    use super::*;

    #[test]
    fn a_flood_stores_every_message_as_it_was() {
        let dir = Workdir::new("flood").expect("a folder");
        let server = NatsServer::start(dir.path()).expect("a server");
        let client = Client::connect(&server.url()).expect("connected");
        client.create_stream("EVENTS", &["events.>"], |_| ()).expect("a stream");
        let messages: Vec<Stored> = (1..=3_000)
            .map(|n| Stored {
                sequence: n,
                subject: format!("events.{}", n % 7),
                headers: [("Nats-Msg-Id".to_owned(), format!("id-{n}"))].into(),
                payload: n.to_string().into(),
                stored_ns: 0,
            })
            .collect();
        let took = flood(&server.url(), &messages, 1_024).expect("published");
        assert!(took > Duration::ZERO);
        let mut read = client.messages("EVENTS").expect("read");
        read.iter_mut().for_each(|m| m.stored_ns = 0);
        assert!(read == messages, "the stream holds something else than was published");
    }
}
