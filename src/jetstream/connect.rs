//! One connection to NATS from the configuration: addresses, credentials, TLS.
//!
//! Every file is read again at each connect, so that rotated secrets and certificates are taken without a restart.
//! The client never reconnects by itself: commands in its queue would be sent after the reconnect, long after their
//! outcome was reported as unknown. A lost connection is dropped with its runtime, and a new one is made.
//!
//! Invariants: no secret is ever part of an error or a log line.
//!
//! May import: config shapes, async_nats.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_nats::{Client, ConnectErrorKind, ConnectOptions, Event, ServerAddr};
use tokio::sync::mpsc;

use super::outcome;
use crate::config::Nats;

/// Longest wait for one address: TCP, TLS, INFO and the answer to CONNECT.
const CONNECT: Duration = Duration::from_secs(5);

/// Commands that the client may hold before they are written to the socket.
const QUEUE: usize = 4_096;

/// Why there is no connection.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct DialError {
    /// The server refused the credentials: trying often is pointless, and looks like an attack.
    pub refused: bool,
    pub reason: String,
}

/// What the credential files held. Compared, never shown.
#[derive(Clone, Default, PartialEq, Eq)]
pub(super) struct Secrets {
    password: Option<String>,
    token: Option<String>,
    nkey_seed: Option<String>,
    credentials: Option<String>,
}

impl Secrets {
    /// Reads every file that the configuration names.
    pub(super) fn read(nats: &Nats) -> Result<Self, DialError> {
        let read = |key: &str, path: &Option<PathBuf>| match path {
            None => Ok(None),
            Some(path) => read_secret(key, path).map(Some),
        };
        Ok(Self {
            password: read("password_file", &nats.password_file)?,
            token: read("token_file", &nats.token_file)?,
            nkey_seed: read("nkey_seed_file", &nats.nkey_seed_file)?,
            credentials: read("credentials_file", &nats.credentials_file)?,
        })
    }
}

fn read_secret(key: &str, path: &Path) -> Result<String, DialError> {
    let fault = |what: String| DialError { refused: false, reason: format!("nats.{key} {}: {what}", path.display()) };
    let text = std::fs::read_to_string(path).map_err(|error| fault(error.to_string()))?;
    let text = text.trim_end_matches(['\r', '\n']);
    if text.is_empty() { Err(fault("is empty".into())) } else { Ok(text.to_owned()) }
}

/// Connects once, to the first of the addresses that answers. What the client notices later (a lost connection,
/// errors of the server, lame duck mode) arrives in `events`; the sender never waits.
pub async fn dial(nats: &Nats, name: &str, events: mpsc::UnboundedSender<Event>) -> Result<Client, DialError> {
    let secrets = Secrets::read(nats)?;
    dial_with(nats, &secrets, name, events).await
}

pub(super) async fn dial_with(
    nats: &Nats,
    secrets: &Secrets,
    name: &str,
    events: mpsc::UnboundedSender<Event>,
) -> Result<Client, DialError> {
    let addresses = addresses(&nats.urls)?;
    let connected = Arc::new(AtomicBool::new(false));
    let options = options(nats, secrets, name, events, connected.clone())?;
    let client = options.connect(addresses.as_slice()).await.map_err(|error| explain(&error, nats))?;
    // nothing can run between the line above and this one: the first reconnect attempt sees it
    connected.store(true, Ordering::SeqCst);
    Ok(client)
}

fn addresses(urls: &[String]) -> Result<Vec<ServerAddr>, DialError> {
    let addresses: Result<Vec<ServerAddr>, _> = urls.iter().map(|url| url.parse()).collect();
    let fault = |reason| DialError { refused: false, reason };
    let addresses = addresses.map_err(|error| fault(format!("nats.urls: {error}")))?;
    if addresses.is_empty() { Err(fault("nats.urls is empty".into())) } else { Ok(addresses) }
}

fn options(
    nats: &Nats,
    secrets: &Secrets,
    name: &str,
    events: mpsc::UnboundedSender<Event>,
    connected: Arc<AtomicBool>,
) -> Result<ConnectOptions, DialError> {
    let mut options = ConnectOptions::new()
        .name(name)
        .connection_timeout(CONNECT)
        .ping_interval(nats.ping_interval)
        .client_capacity(QUEUE)
        .event_callback(move |event| {
            // the receiver is gone only when the session is
            let _ = events.send(event);
            std::future::ready(())
        })
        .reconnect_delay_callback(move |_| {
            if connected.load(Ordering::SeqCst) { Duration::from_secs(u64::from(u32::MAX)) } else { Duration::ZERO }
        });
    if let Some(token) = &secrets.token {
        options = options.token(token.clone());
    }
    if !nats.user.is_empty() {
        options = options.user_and_password(nats.user.clone(), secrets.password.clone().unwrap_or_default());
    }
    if let Some(seed) = &secrets.nkey_seed {
        options = options.nkey(seed.trim().to_owned());
    }
    if let (Some(credentials), Some(path)) = (&secrets.credentials, &nats.credentials_file) {
        // the client's parser wants the last line ended
        let credentials = format!("{credentials}\n");
        options = options.credentials(&credentials).map_err(|error| DialError {
            refused: false,
            reason: format!("nats.credentials_file {}: {error}", path.display()),
        })?;
    }
    with_tls(options, nats)
}

fn with_tls(mut options: ConnectOptions, nats: &Nats) -> Result<ConnectOptions, DialError> {
    let tls = &nats.tls;
    for (key, path) in [("ca_file", &tls.ca_file), ("cert_file", &tls.cert_file), ("key_file", &tls.key_file)] {
        // the client's own message does not name the file
        if let Some(path) = path
            && let Err(error) = std::fs::File::open(path)
        {
            return Err(DialError { refused: false, reason: format!("nats.tls.{key} {}: {error}", path.display()) });
        }
    }
    if let Some(ca) = &tls.ca_file {
        options = options.add_root_certificates(ca.clone()).require_tls(true);
    }
    match (&tls.cert_file, &tls.key_file) {
        (Some(cert), Some(key)) => {
            options = options.add_client_certificate(cert.clone(), key.clone()).require_tls(true);
        }
        (None, None) => {}
        (Some(_), None) | (None, Some(_)) => {
            let reason = "nats.tls.cert_file and nats.tls.key_file belong together: set both or none".to_owned();
            return Err(DialError { refused: false, reason });
        }
    }
    Ok(if tls.first { options.tls_first().require_tls(true) } else { options })
}

/// An error of the client in words, with what to look at.
fn explain(error: &async_nats::ConnectError, nats: &Nats) -> DialError {
    let urls = nats.urls.join(", ");
    let mut causes = String::new();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        let text = cause.to_string();
        // the client wraps the same words more than once
        if !causes.contains(&text) {
            causes.push_str(": ");
            causes.push_str(&text);
        }
        source = cause.source();
    }
    let reason = match error.kind() {
        ConnectErrorKind::AuthorizationViolation | ConnectErrorKind::Authentication => {
            format!("{urls} refuses the credentials of [nats]{causes}")
        }
        ConnectErrorKind::Dns => format!("{urls} does not resolve{causes}"),
        ConnectErrorKind::TimedOut => format!("{urls} does not answer within {CONNECT:?}"),
        ConnectErrorKind::Tls => format!("TLS with {urls} failed{causes}"),
        ConnectErrorKind::ServerParse => format!("nats.urls {urls} cannot be read{causes}"),
        ConnectErrorKind::Io | ConnectErrorKind::MaxReconnects => format!("cannot connect to {urls}{causes}"),
    };
    DialError { refused: outcome::is_refusal(error.kind()), reason }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn nats() -> Nats {
        Config::default().nats
    }

    #[test]
    fn a_secret_loses_its_final_line_end_only() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("password");
        std::fs::write(&path, " p w \r\n").unwrap();
        let nats = Nats { password_file: Some(path), ..nats() };
        assert_eq!(Secrets::read(&nats).unwrap_or_default().password.as_deref(), Some(" p w "));
    }

    #[test]
    fn a_missing_or_empty_secret_names_key_and_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let nats = Nats { token_file: Some(path.clone()), ..nats() };
        let reason = |nats: &Nats| Secrets::read(nats).err().map(|e| e.reason).unwrap_or_default();
        assert!(reason(&nats).starts_with(&format!("nats.token_file {}: ", path.display())), "{}", reason(&nats));
        std::fs::write(&path, "\n").unwrap();
        assert!(reason(&nats).ends_with("is empty"), "{}", reason(&nats));
    }

    #[test]
    fn addresses_are_read_one_by_one() {
        assert_eq!(addresses(&["nats://a:4222".into(), "tls://b".into()]).map(|a| a.len()), Ok(2));
        assert!(addresses(&[]).is_err());
    }
}
