//! The files and globs of a configuration.

use indexmap::IndexSet;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Maximum size of a file of the configuration.
const MAX_FILE_BYTES: u64 = 16 * 1024 * 1024;

/// Files and globs of a configuration. A reload reads them again.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileSet {
    /// Files that were read or that failed to be read.
    files: IndexSet<PathBuf>,
    /// Globs of `include`. A new file that matches belongs to the configuration.
    globs: Vec<String>,
}

impl FileSet {
    pub(super) fn insert_file(&mut self, file: PathBuf) {
        self.files.insert(file);
    }

    pub(super) fn contains(&self, file: &Path) -> bool {
        self.files.contains(file)
    }

    /// Adds the files of another set.
    pub fn extend(&mut self, other: &Self) {
        self.files.extend(other.files.iter().cloned());
    }

    pub(super) fn insert_glob(&mut self, glob: String) {
        self.globs.push(glob);
    }

    /// All paths of the configuration. Evaluates the globs again.
    pub fn expand_paths(&self) -> Vec<PathBuf> {
        let mut paths: Vec<PathBuf> = self.files.iter().cloned().collect();
        for glob in &self.globs {
            paths.extend(expand_glob(glob).unwrap_or_default());
        }
        paths.sort();
        paths.dedup();
        paths
    }
}

/// Expands a glob. Skips hidden names: a mounted ConfigMap keeps its link targets in them.
pub(super) fn expand_glob(glob: &str) -> Result<Vec<PathBuf>, String> {
    let options = glob::MatchOptions {
        case_sensitive: true,
        require_literal_separator: true,
        require_literal_leading_dot: true,
    };
    let paths =
        glob::glob_with(glob, options).map_err(|error| format!("not a glob: {}", error.msg))?;
    paths
        .collect::<Result<_, _>>()
        .map_err(|error| error.to_string())
}

/// Reads a file of the configuration.
///
/// # Errors
/// Returns an error for a device, pipe or socket, which could block or never end, and for a file
/// above [`MAX_FILE_BYTES`].
pub fn read_config_file(path: &Path) -> io::Result<Vec<u8>> {
    if !std::fs::metadata(path)?.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    let mut bytes = Vec::new();
    File::open(path)?
        .take(MAX_FILE_BYTES + 1)
        .read_to_end(&mut bytes)?;
    if u64::try_from(bytes.len()).is_ok_and(|length| length > MAX_FILE_BYTES) {
        return Err(io::Error::other("larger than 16 MiB"));
    }
    Ok(bytes)
}
