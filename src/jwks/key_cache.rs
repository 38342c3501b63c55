//! Fetched keys in a file, with which the next process starts.

use crate::clock;
use crate::http_client::HttpUrl;
use sha2::{Digest, Sha256};
use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;
use tokio::task::spawn_blocking;

/// Maximum size of a cached JWK set.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// The file of one URL.
#[derive(Debug)]
pub(super) struct KeyCache {
    path: PathBuf,
}

impl KeyCache {
    pub(super) fn new(directory: &Path, url: &HttpUrl) -> Self {
        let id = format!("{}{}", url.authority, url.path_and_query);
        let mut name = "keys-".to_owned();
        for byte in Sha256::digest(id).iter().take(16) {
            // Writing to a string never fails.
            write!(name, "{byte:02x}").ok();
        }
        Self {
            path: directory.join(format!("{name}.json")),
        }
    }

    /// Reads the keys, and when they were stored, in seconds since the Unix epoch. A time in the
    /// future counts as now.
    pub(super) async fn load(&self) -> Option<(String, u64)> {
        let path = self.path.clone();
        let read = move || -> io::Result<_> {
            let metadata = fs::metadata(&path)?;
            if !metadata.is_file() || metadata.len() > MAX_FILE_BYTES {
                return Err(io::Error::other("not a file of keys"));
            }
            let stored = metadata.modified()?.duration_since(UNIX_EPOCH);
            let stored_s = stored.map_or(0, |since| since.as_secs());
            Ok((
                fs::read_to_string(&path)?,
                stored_s.min(clock::unix_time_s()),
            ))
        };
        match spawn_blocking(read).await.ok()? {
            Ok(loaded) => Some(loaded),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => {
                tracing::warn!(file = %self.path.display(), %error, "cannot read cached token keys");
                None
            }
        }
    }

    /// Writes the keys. Instances may share the directory: the file is replaced as a whole.
    pub(super) async fn store(&self, text: String) {
        let path = self.path.clone();
        let write = move || -> io::Result<()> {
            let new = path.with_extension(format!("{}.tmp", fastrand::u32(..)));
            let written = fs::write(&new, text).and_then(|()| fs::rename(&new, &path));
            written.inspect_err(|_| drop(fs::remove_file(&new)))
        };
        if let Ok(Err(error)) = spawn_blocking(write).await {
            tracing::warn!(file = %self.path.display(), %error, "cannot store token keys");
        }
    }
}
