//! The files and globs of a configuration.

use std::path::PathBuf;

/// Files and globs of a configuration. A reload reads them again.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileSet {
    /// Files that were read or that failed to be read.
    files: Vec<PathBuf>,
    /// Globs of `include`. A new file that matches belongs to the configuration.
    globs: Vec<String>,
}

impl FileSet {
    pub(super) fn insert_file(&mut self, file: PathBuf) {
        if !self.files.contains(&file) {
            self.files.push(file);
        }
    }

    pub(super) fn insert_glob(&mut self, glob: String) {
        self.globs.push(glob);
    }

    /// All paths of the configuration. Evaluates the globs again.
    pub fn expand_paths(&self) -> Vec<PathBuf> {
        let mut paths = self.files.clone();
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
