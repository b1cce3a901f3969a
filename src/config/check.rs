//! Checks of single string values. Each says what is wrong with the value, after `must be ...`; a secret is not
//! repeated.
//!
//! May import: domain, std.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use crate::domain::subject::{Template, check_filter};

/// Any string.
pub(super) fn any(_: &str) -> Result<(), String> {
    Ok(())
}

/// `source`: it stands in a message id, where control characters and blanks at the ends get lost.
pub(super) fn source(text: &str) -> Result<(), String> {
    if text.chars().any(char::is_control) || text.trim() != text {
        return Err("it has a control character, or a blank at an end".into());
    }
    if text.len() > 256 {
        return Err(format!("it has {} bytes", text.len()));
    }
    Ok(())
}

/// A stream or consumer name (nats-server refuses these characters, and names above 255 bytes).
pub(super) fn name(text: &str) -> Result<(), String> {
    if text.is_empty() {
        return Err("it is empty".into());
    }
    if let Some(bad) = text.chars().find(|c| c.is_whitespace() || c.is_control() || ".*>/\\".contains(*c)) {
        return Err(format!("it has {bad:?}"));
    }
    if text.len() > 255 {
        return Err(format!("it has {} bytes, 255 is the limit", text.len()));
    }
    Ok(())
}

/// A JetStream domain or nothing.
pub(super) fn domain(text: &str) -> Result<(), String> {
    if text.is_empty() { Ok(()) } else { name(text) }
}

/// A subject with wildcards.
pub(super) fn filter(text: &str) -> Result<(), String> {
    check_filter(text).map_err(|e| e.to_string())
}

/// A subject template.
pub(super) fn template(text: &str) -> Result<(), String> {
    Template::parse(text).map(|_| ()).map_err(|e| e.to_string())
}

/// A server URL without credentials: `[nats://|tls://]host[:port]`.
pub(super) fn url(text: &str) -> Result<(), String> {
    let (scheme, rest) = text.split_once("://").unwrap_or(("nats", text));
    if rest.contains('@') {
        return Err("it carries credentials, which are refused in a URL: use user with password_file, token_file, \
                    nkey_seed_file or credentials_file"
            .into());
    }
    if !matches!(scheme, "nats" | "tls") {
        return Err(format!("{scheme:?} is no scheme we speak: nats or tls"));
    }
    if rest.contains(',') {
        return Err("it is a comma list: write several strings".into());
    }
    let rest = rest.strip_suffix('/').unwrap_or(rest);
    let (host, port) = match rest.strip_prefix('[').and_then(|inner| inner.split_once(']')) {
        Some((host, "")) => (host, None),
        Some((host, tail)) => (host, Some(tail.strip_prefix(':').unwrap_or("?"))),
        None => match rest.rsplit_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (rest, None),
        },
    };
    let bracketed = rest.starts_with('[');
    if bracketed && host.parse::<std::net::Ipv6Addr>().is_err() {
        return Err(format!("{host:?} is no IPv6 address"));
    }
    if host.is_empty() || host.chars().any(|c| c.is_whitespace() || c.is_control() || "/?#".contains(c)) {
        return Err("it has no host, or more than host and port".into());
    }
    if !bracketed && host.contains(':') {
        return Err("an IPv6 address stands in brackets".into());
    }
    match port {
        Some(port) if !port.parse::<u16>().is_ok_and(|p| p > 0) => Err(format!("{port:?} is no port")),
        Some(_) | None => Ok(()),
    }
}

/// The address of `http.listen`: `None` for off. No host means loopback.
pub(super) fn address(text: &str) -> Result<Option<SocketAddr>, String> {
    if text.is_empty() {
        return Ok(None);
    }
    let (host, port) = text.rsplit_once(':').ok_or("it has no port")?;
    let port: u16 = port.parse().map_err(|_| format!("{port:?} is no port"))?;
    let host: IpAddr = match host {
        "" | "localhost" => Ipv4Addr::LOCALHOST.into(),
        _ => {
            let bare = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
            bare.parse().map_err(|_| format!("{host:?} is no IP address"))?
        }
    };
    Ok(Some(SocketAddr::new(host, port)))
}

/// See [`address`].
pub(super) fn listen(text: &str) -> Result<(), String> {
    address(text).map(|_| ())
}

/// Levels of the log, quietest last.
pub(super) const LEVELS: [&str; 6] = ["trace", "debug", "info", "warn", "error", "off"];

/// A level, or directives `target=level` and levels, separated by commas.
pub(super) fn level(text: &str) -> Result<(), String> {
    for directive in text.split(',') {
        let (target, level) = directive.split_once('=').unwrap_or(("", directive));
        if !LEVELS.contains(&level.trim()) {
            return Err(format!("{:?} is no level", level.trim()));
        }
        let legal = |c: char| c.is_ascii_alphanumeric() || "_:- ".contains(c);
        if !target.chars().all(legal) || directive.starts_with('=') {
            return Err(format!("{target:?} is no module path"));
        }
    }
    Ok(())
}

/// `event_type` of a handler: exact, a prefix with `*` at its end, or `*`.
pub(super) fn event_pattern(text: &str) -> Result<(), String> {
    match text.find('*') {
        _ if text.is_empty() => Err("it is empty".into()),
        Some(at) if at + 1 != text.len() => Err("'*' stands at the end only".into()),
        Some(_) | None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_host_and_port() {
        for good in [
            "nats://127.0.0.1:4222",
            "tls://nats.example",
            "localhost:4222",
            "nats://[::1]:4222",
            "nats://[::1]",
            "nats://h:4222/",
        ] {
            assert_eq!(url(good), Ok(()), "{good}");
        }
        for bad in [
            "",
            "nats://",
            "http://x",
            "nats://a,b",
            "nats://a:0",
            "nats://a:99999",
            "nats://a:x",
            "nats://a b:1",
            "nats://a/b",
            "nats://::1:4222",
            "nats://[::x]:1",
            "nats://[::1]x",
        ] {
            assert!(url(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn credentials_in_a_url_are_refused_and_not_repeated() {
        for bad in ["nats://bob:hunter2@h:4222", "hunter2@h", "tls://hunter2@h", "ftp://bob:hunter2@h"] {
            let error = url(bad).unwrap_err();
            assert!(error.contains("credentials") && !error.contains("hunter2"), "{bad}: {error}");
        }
    }

    #[test]
    fn listen_without_a_host_is_loopback() {
        let shown = |text: &str| address(text).unwrap().map(|a| a.to_string());
        assert_eq!(shown(""), None);
        assert_eq!(shown(":0").as_deref(), Some("127.0.0.1:0"));
        assert_eq!(shown("localhost:80").as_deref(), Some("127.0.0.1:80"));
        assert_eq!(shown("[::1]:80").as_deref(), Some("[::1]:80"));
        assert_eq!(shown("0.0.0.0:80").as_deref(), Some("0.0.0.0:80"));
        for bad in ["8787", "127.0.0.1", "host:80", "127.0.0.1:http", "127.0.0.1:65536"] {
            assert!(address(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn levels_and_directives() {
        for good in ["info", "off", "info,outboxd=debug", "warn, outboxd::actors=trace"] {
            assert_eq!(level(good), Ok(()), "{good}");
        }
        for bad in ["", "inof", "info,", "outboxd=loud", "=info", "a b/c=info"] {
            assert!(level(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn names_sources_and_patterns() {
        assert_eq!((name("EVENTS"), domain(""), source("edge/7:x")), (Ok(()), Ok(()), Ok(())));
        for bad in ["", "a b", "a.b", "a*", "a>", "a/b", "a\\b", "a\u{7}"] {
            assert!(name(bad).is_err(), "{bad:?}");
        }
        for bad in [" a", "a ", "a\nb"] {
            assert!(source(bad).is_err(), "{bad:?}");
        }
        for good in ["*", "asset.*", "asset.updated", "a*"] {
            assert_eq!(event_pattern(good), Ok(()), "{good}");
        }
        for bad in ["", "*.updated", "a*b", "**"] {
            assert!(event_pattern(bad).is_err(), "{bad}");
        }
    }
}
