//! The sources of a configuration: file, environment and flags.

use std::fmt;
use std::path::PathBuf;

/// Sources of a configuration. The caller captures them once, so that a reload uses the same
/// sources.
#[derive(Clone, Default)]
pub struct ConfigSources {
    pub file: FileSource,
    /// All environment variables. Only `TIDEGATE_` names with a double underscore are read.
    pub env: Vec<(String, String)>,
    pub flags: FlagOverrides,
    /// Does not read the files that keys name: secrets, certificates and key sets. Only for
    /// validation.
    pub skips_key_files: bool,
}

/// The main configuration file.
#[derive(Clone, Default)]
pub enum FileSource {
    Path(PathBuf),
    /// Text that is not on disk. Its includes are relative to the working directory.
    Text {
        name: String,
        text: String,
    },
    #[default]
    None,
}

/// Values from command-line flags. They override all other sources.
#[derive(Clone, Debug, Default)]
pub struct FlagOverrides {
    pub upstream: Option<String>,
    pub listen: Option<String>,
    /// For a command that never connects to the upstream: its URL may be absent from all sources.
    pub needs_no_upstream: bool,
}

/// Variables may hold passwords, so they are not printed.
impl fmt::Debug for ConfigSources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConfigSources")
            .field("file", &self.file)
            .field("flags", &self.flags)
            .finish_non_exhaustive()
    }
}

impl FileSource {
    /// Name of a configuration that was read from stdin.
    pub const STDIN_NAME: &'static str = "<stdin>";
}

/// Writes the name, for messages.
impl fmt::Display for FileSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => path.display().fmt(f),
            Self::Text { name, .. } => f.write_str(name),
            Self::None => f.write_str("no configuration file"),
        }
    }
}

/// The text may hold passwords, so it is not printed.
impl fmt::Debug for FileSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
