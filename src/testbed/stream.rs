//! A plain NATS client beside the product: reads what a stream holds, publishes as a stranger, listens on the wire.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_nats::jetstream::{self, consumer};
use bytes::Bytes;
use futures_util::StreamExt;
use tokio::runtime::Runtime;

use super::Trouble;

/// One request to the server answers within this time.
const ANSWER: Duration = Duration::from_secs(10);

/// A message as the stream holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    pub sequence: u64,
    pub subject: String,
    pub headers: HashMap<String, String>,
    pub payload: Bytes,
    /// When JetStream stored it, nanoseconds since the epoch by the server's clock.
    pub stored_ns: i128,
}

impl Stored {
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", String::as_str)
    }
}

/// A client with a thread of its own, so that it answers pings whatever its owner does.
pub struct Client {
    runtime: Runtime,
    client: async_nats::Client,
    jetstream: jetstream::Context,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").finish_non_exhaustive()
    }
}

impl Client {
    /// Connects to a server that is up.
    pub fn connect(url: &str) -> Result<Self, Trouble> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("testbed-nats")
            .enable_all()
            .build()
            .map_err(Trouble::io("start a runtime for a NATS client"))?;
        let options = async_nats::ConnectOptions::new().request_timeout(Some(ANSWER));
        let client = runtime.block_on(options.connect(url)).map_err(nats("connect to nats-server"))?;
        // the context starts a task of its own
        let inside = runtime.enter();
        let mut jetstream = jetstream::new(client.clone());
        jetstream.set_timeout(ANSWER);
        drop(inside);
        Ok(Self { runtime, client, jetstream })
    }

    /// Messages in a stream; 0 where there is no such stream.
    pub fn count(&self, stream: &str) -> Result<u64, Trouble> {
        self.runtime.block_on(async {
            match self.jetstream.get_stream(stream).await {
                Ok(stream) => Ok(stream.cached_info().state.messages),
                Err(e) if e.to_string().contains("not found") => Ok(0),
                Err(e) => Err(nats("read the state of the stream")(e)),
            }
        })
    }

    /// All messages of a stream, oldest first.
    pub fn messages(&self, stream: &str) -> Result<Vec<Stored>, Trouble> {
        self.runtime.block_on(self.read(stream))
    }

    /// Makes a stream as an operator would: file storage over `subjects`, changed by `change`.
    pub fn create_stream(
        &self,
        name: &str,
        subjects: &[&str],
        change: impl FnOnce(&mut jetstream::stream::Config),
    ) -> Result<(), Trouble> {
        let mut config = jetstream::stream::Config {
            name: name.to_owned(),
            subjects: subjects.iter().map(|s| (*s).to_owned()).collect(),
            ..Default::default()
        };
        change(&mut config);
        self.runtime.block_on(self.jetstream.create_stream(config)).map(drop).map_err(nats("make a stream"))
    }

    /// Deletes a stream with all that it holds.
    pub fn delete_stream(&self, name: &str) -> Result<(), Trouble> {
        self.runtime.block_on(self.jetstream.delete_stream(name)).map(drop).map_err(nats("delete a stream"))
    }

    /// Publishes to JetStream and awaits the ack.
    pub fn publish(&self, subject: &str, headers: &[(&str, &str)], payload: &[u8]) -> Result<u64, Trouble> {
        let mut map = async_nats::HeaderMap::new();
        for (name, value) in headers {
            map.insert(*name, *value);
        }
        let (subject, payload) = (subject.to_owned(), Bytes::copy_from_slice(payload));
        self.runtime.block_on(async {
            let sent = self.jetstream.publish_with_headers(subject, map, payload).await;
            let ack = sent.map_err(nats("publish"))?.await.map_err(nats("publish"))?;
            Ok(ack.sequence)
        })
    }

    /// Listens on a subject as a plain subscriber, without JetStream, until the answer is dropped.
    pub fn listen(&self, subject: &str) -> Result<Listener, Trouble> {
        let heard: Arc<Mutex<Vec<Heard>>> = Arc::default();
        let into = heard.clone();
        let task = self.runtime.block_on(async {
            let mut subscriber = self.client.subscribe(subject.to_owned()).await.map_err(nats("subscribe"))?;
            // the server has the subscription once it answers the flush
            self.client.flush().await.map_err(nats("subscribe"))?;
            Ok::<_, Trouble>(tokio::spawn(async move {
                while let Some(message) = subscriber.next().await {
                    let headers = message.headers.as_ref();
                    let id = headers.and_then(|h| h.get("Nats-Msg-Id")).map(|v| v.to_string()).unwrap_or_default();
                    let heard = Heard { subject: message.subject.to_string(), msg_id: id };
                    into.lock().unwrap_or_else(PoisonError::into_inner).push(heard);
                }
            }))
        })?;
        Ok(Listener { heard, task })
    }

    /// Reads everything through a durable pull consumer, explicit acks, as any other program would.
    pub fn drain_durable(&self, stream: &str, durable: &str) -> Result<u64, Trouble> {
        self.runtime.block_on(async {
            let found = self.jetstream.get_stream(stream).await.map_err(nats("read the stream"))?;
            let config = consumer::pull::Config {
                durable_name: Some(durable.to_owned()),
                ack_policy: consumer::AckPolicy::Explicit,
                max_ack_pending: 1_000_000,
                ..Default::default()
            };
            let made = found.create_consumer(config).await.map_err(nats("make a durable consumer"))?;
            let mut read = 0;
            loop {
                let mut batch = made.fetch().max_messages(500).messages().await.map_err(nats("fetch"))?;
                let before = read;
                while let Some(message) = batch.next().await {
                    let message = message.map_err(|e| Trouble::failed(format!("cannot fetch: {e}")))?;
                    message.ack().await.map_err(|e| Trouble::failed(format!("cannot ack: {e}")))?;
                    read += 1;
                }
                if read == before {
                    return Ok(read);
                }
            }
        })
    }

    async fn read(&self, name: &str) -> Result<Vec<Stored>, Trouble> {
        let stream = self.jetstream.get_stream(name).await.map_err(nats("read the stream"))?;
        let wanted = stream.cached_info().state.messages as usize;
        let config = consumer::pull::Config { ack_policy: consumer::AckPolicy::None, ..Default::default() };
        let reader = stream.create_consumer(config).await.map_err(nats("make a consumer"))?;
        let mut all = Vec::with_capacity(wanted);
        while all.len() < wanted {
            let batch = reader.batch().max_messages(1_000).expires(Duration::from_secs(2)).messages().await;
            let mut batch = batch.map_err(nats("read the stream"))?;
            let before = all.len();
            while let Some(message) = batch.next().await {
                let message = message.map_err(|e| Trouble::failed(format!("cannot read the stream: {e}")))?;
                all.push(stored(&message)?);
            }
            if all.len() == before {
                return Err(Trouble::failed(format!("the stream holds {wanted} messages, {before} could be read")));
            }
        }
        Ok(all)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // a listener's task never ends by itself: do not wait for it
        let fresh = tokio::runtime::Builder::new_current_thread().build();
        if let Ok(fresh) = fresh {
            std::mem::replace(&mut self.runtime, fresh).shutdown_background();
        }
    }
}

/// What a plain subscriber saw of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Heard {
    pub subject: String,
    pub msg_id: String,
}

/// A plain subscriber: hears every publish on the wire, also the ones that JetStream does not store a second time.
#[derive(Debug)]
pub struct Listener {
    heard: Arc<Mutex<Vec<Heard>>>,
    task: tokio::task::JoinHandle<()>,
}

impl Listener {
    /// Messages heard so far.
    pub fn count(&self) -> usize {
        self.lock().len()
    }

    /// All messages heard so far, in their order.
    pub fn heard(&self) -> Vec<Heard> {
        self.lock().clone()
    }

    /// Publishes whose id had been heard before.
    pub fn repeated(&self) -> usize {
        let heard = self.lock();
        let distinct: std::collections::HashSet<&str> = heard.iter().map(|h| h.msg_id.as_str()).collect();
        heard.len() - distinct.len()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Heard>> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn stored(message: &jetstream::Message) -> Result<Stored, Trouble> {
    let info = message.info().map_err(|e| Trouble::failed(format!("a message without its sequence: {e}")))?;
    let headers = message.headers.iter().flat_map(|h| h.iter());
    let headers = headers.filter_map(|(name, values)| Some((name.to_string(), values.first()?.to_string()))).collect();
    Ok(Stored {
        sequence: info.stream_sequence,
        subject: message.subject.to_string(),
        headers,
        payload: Bytes::copy_from_slice(&message.payload),
        stored_ns: info.published.unix_timestamp_nanos(),
    })
}

/// For `map_err`: names the step that failed at the server.
fn nats<E: std::fmt::Display>(step: &str) -> impl FnOnce(E) -> Trouble {
    let step = step.to_owned();
    move |e| Trouble::failed(format!("cannot {step}: {e}"))
}

#[cfg(test)]
mod tests {
    use super::super::server::NatsServer;
    use super::super::wait;
    use super::super::workdir::Workdir;
    use super::*;

    #[test]
    fn a_stream_is_read_whole_and_a_listener_hears_what_is_not_stored_twice() {
        let dir = Workdir::new("stream").expect("a folder");
        let server = NatsServer::start(dir.path()).expect("a server");
        let client = Client::connect(&server.url()).expect("connected");
        assert_eq!(client.count("EVENTS").expect("readable"), 0);
        client.create_stream("EVENTS", &["events.>"], |_| ()).expect("a stream");
        let listener = client.listen("events.>").expect("listening");
        for n in 0..2_500 {
            let id = format!("id-{}", n.min(2_498));
            client.publish("events.a", &[("Nats-Msg-Id", &id)], n.to_string().as_bytes()).expect("published");
        }
        let all = client.messages("EVENTS").expect("read");
        assert_eq!(all.len(), 2_499);
        assert_eq!(all[17].header("Nats-Msg-Id"), "id-17");
        assert_eq!((all[17].sequence, &all[17].payload[..], all[17].header("absent")), (18, &b"17"[..], ""));
        assert!(all.is_sorted_by_key(|m| m.sequence) && all[0].stored_ns > 1_700_000_000_000_000_000);
        let count = || if listener.count() == 2_500 { Ok(()) } else { Err(listener.count()) };
        wait::until("2,500 heard", Duration::from_secs(10), count).expect("heard");
        assert_eq!(listener.repeated(), 1);
        assert_eq!(client.drain_durable("EVENTS", "other").expect("drained"), 2_499);
    }
}
