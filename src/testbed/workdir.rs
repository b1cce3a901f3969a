//! A folder of its own for a run, removed at the end; kept after a panic, so that there is something to look at.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use super::Trouble;

/// A folder that belongs to one run.
#[derive(Debug)]
pub struct Workdir {
    path: PathBuf,
    keep: bool,
}

impl Workdir {
    /// Makes `{temporary folder}/outboxd-{purpose}-{pid}-{n}`, readable by its owner only.
    pub fn new(purpose: &str) -> Result<Self, Trouble> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        loop {
            let n = COUNT.fetch_add(1, Ordering::Relaxed);
            let path = std::env::temp_dir().join(format!("outboxd-{purpose}-{}-{n}", std::process::id()));
            match DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => return Ok(Self { path, keep: false }),
                Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => continue,
                Err(e) => return Err(Trouble::io(format!("make the folder {}", path.display()))(e)),
            }
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The folder stays when this is dropped.
    pub fn keep(&mut self) {
        self.keep = true;
    }
}

impl Drop for Workdir {
    fn drop(&mut self) {
        if self.keep {
            return;
        }
        if std::thread::panicking() {
            eprintln!("kept for a look: {}", self.path.display());
            return;
        }
        // a folder in the temporary folder that cannot be removed harms nobody
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_lives_as_long_as_its_owner_unless_it_is_kept() {
        let dir = Workdir::new("workdir").expect("a folder");
        let gone = dir.path().to_owned();
        std::fs::write(gone.join("file"), "x").expect("a file in it");
        drop(dir);
        assert!(!gone.exists());

        let mut dir = Workdir::new("workdir").expect("a folder");
        dir.keep();
        let kept = dir.path().to_owned();
        drop(dir);
        assert!(kept.exists());
        std::fs::remove_dir_all(kept).expect("removed by hand");
    }
}
