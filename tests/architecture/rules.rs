//! The rules: one row a layer.

use std::path::Path;

pub(crate) struct Layer {
    /// Directory or file under `src/`.
    pub name: &'static str,
    /// Layers of ours that it may import.
    pub layers: &'static [&'static str],
    /// Crates that it may use, beside std.
    pub crates: &'static [&'static str],
    /// Exceptions: a file of the layer, and one more layer that it may import.
    pub except: &'static [(&'static str, &'static str)],
}

impl Layer {
    pub(crate) fn may_import(&self, path: &str, layer: &str) -> bool {
        self.layers.contains(&layer)
            || self.except.iter().any(|(file, extra)| path.starts_with(file) && *extra == layer)
    }
}

const fn layer(name: &'static str, layers: &'static [&'static str], crates: &'static [&'static str]) -> Layer {
    Layer { name, layers, crates, except: &[] }
}

#[rustfmt::skip]
pub(crate) const LAYERS: &[Layer] = &[
    layer("limits", &[], &[]),
    layer("domain", &["limits"], &["bytes", "serde", "serde_json", "thiserror"]),
    layer("ports", &["domain", "limits"], &["bytes", "futures_util", "thiserror", "tokio"]),
    layer("config", &["domain", "limits"], &["humantime", "serde_json", "strsim", "thiserror", "toml"]),
    layer("telemetry", &["domain", "limits"], &[
        "prometheus_client", "rustix", "serde_json", "thiserror", "tokio", "tracing",
        "tracing_subscriber",
    ]),
    layer("store", &["domain", "limits"], &[
        "bytes", "deadpool_sqlite", "jiff", "rusqlite", "rustix", "serde", "serde_json", "thiserror", "tokio", "tracing",
        "uuid",
    ]),
    // the shapes of `nats` and `stream` are the one part of the configuration that it reads
    layer("jetstream", &["config", "domain", "limits", "ports", "telemetry"], &[
        "async_nats", "bytes", "futures_util", "humantime", "jiff", "rustix", "serde", "serde_json", "thiserror", "tokio", "tokio_util",
        "tracing", "uuid",
    ]),
    layer("actors", &["domain", "limits", "ports", "store", "telemetry"], &[
        "bytes", "futures_util", "ractor", "rusqlite", "serde_json", "thiserror", "tokio", "tokio_util", "tracing",
    ]),
    layer("admin", &["actors", "config", "domain", "limits", "ports", "store", "telemetry"], &[
        "axum", "bytes", "futures_util", "humantime", "jiff", "rusqlite", "rustix", "serde", "serde_json", "thiserror",
        "tokio", "tokio_util", "tracing", "uuid",
    ]),
    Layer {
        name: "cli",
        layers: &["actors", "admin", "bench", "config", "daemon", "demo", "domain", "limits", "ports", "signals", "store", "telemetry"],
        crates: &[
            "bytes", "clap", "clap_complete", "clap_mangen", "comfy_table", "futures_util", "humantime",
            "indicatif", "jiff", "rusqlite", "rustix", "serde", "serde_json", "thiserror", "tokio", "tokio_util", "toml",
            "tracing", "uuid",
        ],
        except: &[
            ("src/cli/doctor", "jetstream"), ("src/cli/verify", "jetstream"),
        ],
    },
    layer("signals", &[], &["futures_util", "rustix", "tokio", "tracing"]),
    layer("daemon", &[
        "actors", "admin", "cli", "config", "domain", "jetstream", "limits", "ports", "signals", "store", "telemetry",
    ], &[
        "bytes", "futures_util", "rand", "rusqlite", "rustix", "serde_json", "thiserror", "tokio", "tokio_util",
        "tracing", "uuid",
    ]),
    // a nats-server, nodes, applications and a judge, for the demo, the bench and the tests
    layer("testbed", &["domain", "limits"], &[
        "async_nats", "bytes", "futures_util", "rand", "rusqlite", "rustix", "serde_json", "thiserror", "tokio", "toml",
    ]),
    // the store for one limit only: its leases and settlements, with nothing published
    layer("bench", &["domain", "limits", "store", "testbed"], &["rusqlite", "rustix", "serde_json"]),
    layer("demo", &["domain", "limits", "testbed"], &["indicatif", "rusqlite", "rustix", "serde_json", "thiserror", "tokio"]),
    layer("lib", &[], &[]),
    layer("main", &["cli"], &[]),
];

/// Where strings may be SQL, and why.
pub(crate) const MAY_HOLD_SQL: &[(&str, &str)] = &[
    ("src/store", "its home"),
    ("src/testbed", "an application in another process, played for the demo and the tests"),
    ("src/demo", "the same"),
];

/// Single texts that may stand elsewhere: the frame of the writer's transactions, which names no table.
pub(crate) const FRAME: (&str, &[&str]) =
    ("src/actors/writer.rs", &["PRAGMA data_version", "SAVEPOINT job", "ROLLBACK TO job", "RELEASE job"]);

/// Where files may be touched, and which: never the database, its -wal or its -shm.
pub(crate) const MAY_TOUCH_FILES: &[(&str, &str)] = &[
    ("src/store", "the database and what stands beside it, which only it knows how to touch"),
    ("src/config/load.rs", "the configuration file"),
    ("src/admin/socket.rs", "the unix socket: it is bound under another name, then renamed"),
    ("src/admin/http", "the token file"),
    ("src/admin/token", "the token file"),
    ("src/admin/server", "the token file"),
    ("src/jetstream", "credentials, keys and certificates"),
    ("src/cli/shell.rs", "the manual pages that it writes"),
    ("src/cli/doctor", "modes and owners by stat, credentials"),
    ("src/bench", "its own folder"),
    ("src/telemetry", "cgroup and proc files of this process"),
];

/// The testbed and the demo play other processes, in folders of their own.
pub(crate) fn is_testbed(path: &Path) -> bool {
    path.starts_with("src/testbed") || path.starts_with("src/demo")
}
