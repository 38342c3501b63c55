//! `store.state_dir`: files that carry the usage of an outage from one process to the next.
//!
//! Each process writes its own file. A file is locked (`flock`) by the process that reads it, until
//! its usage is in Redis and the file is removed. The lock ends with the process, so a file is
//! never read by two processes at once, and is not lost by a crash.

use super::outage_usage::OutageUsage;
use crate::clock::Clock;
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Maximum size of a file that is read. The bounds of the fallback store keep its files smaller.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// Maximum age of a usage file. Older files are refused.
const MAX_FILE_AGE: Duration = Duration::from_secs(31 * 24 * 3600);

const FILE_SUFFIX: &str = ".usage";
const TEMPORARY_SUFFIX: &str = ".tmp";
const REFUSED_SUFFIX: &str = ".refused";

/// The files of one service in the directory.
#[derive(Debug)]
pub(crate) struct UsageDirectory {
    pub(crate) path: PathBuf,
    /// Common start of the names of this service's files.
    name_prefix: String,
    instance_id: Box<str>,
    clock: Clock,
    /// The file whose usage this process has restored. It stays locked until
    /// [`Self::remove_restored_file`].
    pub(crate) restored_file: Mutex<Option<UsageFile>>,
}

/// A locked file with usage that is not in Redis yet.
#[derive(Debug)]
pub(crate) struct UsageFile {
    path: PathBuf,
    _lock: File,
}

impl UsageDirectory {
    /// `service` separates the files of services that share the directory.
    pub(crate) fn new(path: &Path, service: &str, instance_id: &str, clock: Clock) -> Self {
        let digest = Sha256::digest(service.as_bytes());
        let name_prefix = digest.iter().take(8).map(|byte| format!("{byte:02x}"));
        Self {
            path: path.to_owned(),
            name_prefix: name_prefix.chain(["-".to_owned()]).collect(),
            instance_id: instance_id.into(),
            clock,
            restored_file: Mutex::default(),
        }
    }

    /// Locks and reads the newest file that no process has locked. Unusable files are renamed.
    /// Returns the time (µs) since the file was saved, by the wall clock.
    pub(crate) fn lock_and_read_newest_file(&self) -> Option<(UsageFile, OutageUsage, u64)> {
        self.find_files(FILE_SUFFIX).into_iter().find_map(|path| {
            let mut file = lock_file(&path)?;
            match read_usage(&mut file, &self.clock) {
                Ok((usage, downtime_us)) => {
                    Some((UsageFile { path, _lock: file }, usage, downtime_us))
                }
                Err(reason) => {
                    tracing::warn!(file = %path.display(), reason, "stored usage refused");
                    let mut refused = path.clone().into_os_string();
                    refused.push(REFUSED_SUFFIX);
                    drop(fs::rename(path, refused));
                    None
                }
            }
        })
    }

    /// Removes the restored file after its usage was written to Redis or to a newer file.
    pub(crate) fn remove_restored_file(&self) {
        if let Some(file) = self.restored_file.lock().take() {
            file.remove();
        }
    }

    /// Writes this process's file completely, or leaves the directory unchanged.
    ///
    /// # Errors
    /// The error of the file system.
    pub(crate) fn save_usage(&self, usage: &OutageUsage) -> io::Result<PathBuf> {
        for abandoned in self.find_files(TEMPORARY_SUFFIX) {
            // Locked until the file is removed: its process may be about to lock it.
            if let Some(_lock) = lock_file(&abandoned) {
                drop(fs::remove_file(abandoned));
            }
        }
        let name = format!("{}{}", self.name_prefix, self.instance_id);
        let temporary = self.path.join(format!("{name}{TEMPORARY_SUFFIX}"));
        let path = self.path.join(format!("{name}{FILE_SUFFIX}"));
        let write = || {
            let mut file = create_locked_file(&temporary)?;
            file.write_all(&usage.encode())?;
            file.sync_all()?;
            fs::rename(&temporary, &path)?;
            File::open(&self.path)?.sync_all()
        };
        write().inspect_err(|_| drop(fs::remove_file(&temporary)))?;
        Ok(path)
    }

    /// This service's files with a suffix, newest first.
    fn find_files(&self, suffix: &str) -> Vec<PathBuf> {
        let entries = match fs::read_dir(&self.path) {
            Ok(entries) => entries,
            Err(error) => {
                tracing::debug!(directory = %self.path.display(), %error, "cannot read store.state_dir");
                return Vec::new();
            }
        };
        let mut files: Vec<_> = entries
            .flatten()
            .filter(|entry| {
                entry.file_name().to_str().is_some_and(|name| {
                    name.starts_with(&self.name_prefix) && name.ends_with(suffix)
                })
            })
            .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
            .collect();
        files.sort_unstable_by(|first, second| second.cmp(first));
        files.into_iter().map(|(_, path)| path).collect()
    }
}

impl UsageFile {
    /// Removes the file: its usage is in Redis.
    pub(crate) fn remove(self) {
        if let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!(file = %self.path.display(), %error, "cannot remove stored usage; it may count twice");
        }
    }
}

/// Opens and locks a regular file. `None` if another process has locked or removed it.
fn lock_file(path: &Path) -> Option<File> {
    if !fs::symlink_metadata(path).ok()?.is_file() {
        return None;
    }
    let file = File::open(path).ok()?;
    file.try_lock().ok()?;
    (file.metadata().ok()?.nlink() > 0).then_some(file)
}

/// Creates and locks a file. Another process that took it for an abandoned one may remove it before
/// it is locked; then it is created again.
fn create_locked_file(path: &Path) -> io::Result<File> {
    loop {
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(0o600);
        let file = options.open(path)?;
        file.lock()?;
        if file.metadata()?.nlink() > 0 {
            return Ok(file);
        }
    }
}

fn read_usage(file: &mut File, clock: &Clock) -> Result<(OutageUsage, u64), String> {
    let mut bytes = Vec::new();
    let length = file
        .take(MAX_FILE_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| error.to_string())?;
    if length as u64 > MAX_FILE_BYTES {
        return Err("it is larger than 64 MiB".to_owned());
    }
    let usage = OutageUsage::decode(&bytes)?;
    // A clock that stepped back makes the usage look younger than it is: too strict, never too lax.
    let downtime_us = clock.wall_us().saturating_sub(usage.saved_at_us);
    if u128::from(downtime_us) > MAX_FILE_AGE.as_micros() {
        return Err("it is older than 31 days".to_owned());
    }
    Ok((usage, downtime_us))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    /// Each process takes the other's temporary file for an abandoned one.
    #[test]
    fn processes_that_save_at_once_do_not_remove_each_others_files() {
        let folder = tempfile::tempdir().unwrap();
        let (clock, _) = Clock::manual(1);
        let usage = OutageUsage {
            saved_at_us: 1,
            now_us: 1,
            outage_ended_us: 0,
            share: crate::store::Share::with_unknown_rank(1),
            stale_partitions: Vec::new(),
            counters: Vec::new(),
            statuses: Vec::new(),
        };
        thread::scope(|scope| {
            for instance in ["one", "two", "three"] {
                let directory = UsageDirectory::new(folder.path(), "shop", instance, clock.clone());
                let usage = &usage;
                scope.spawn(move || {
                    for _ in 0..300 {
                        let saved = directory.save_usage(usage).unwrap();
                        assert!(saved.exists());
                    }
                });
            }
        });
    }
}
