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

/// The text may hold passwords, so it is not printed.
impl fmt::Debug for FileSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => path.fmt(f),
            Self::Text { name, .. } => name.fmt(f),
            Self::None => f.write_str("None"),
        }
    }
}
