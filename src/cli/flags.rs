//! The flags of all commands, and the configuration sources that they select.

use super::output::CommandError;
use crate::config::{ConfigSources, FileSource, FlagOverrides};
use clap::Args;
use std::ffi::OsString;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Configuration file of a command without `--config`, if the file exists.
const DEFAULT_CONFIG: &str = "config.toml";
/// Environment variable that names the configuration file of a command without `--config`.
const CONFIG_VARIABLE: &str = "TIDEGATE_CONFIG";
/// What is wrong without a configuration file.
pub(super) const NO_POLICIES: &str = "the configuration has no policies; expected --config with the proxy's configuration, TIDEGATE_CONFIG or \
     ./config.toml";
/// Maximum size of a configuration on stdin, the same as of a file.
const MAX_STDIN_BYTES: u64 = 16 * 1024 * 1024;

/// Flags that every command accepts.
#[derive(Args, Debug, Default)]
pub(super) struct SharedFlags {
    /// Configuration file, or - for stdin. `check` accepts several
    /// [default: $TIDEGATE_CONFIG, or ./config.toml if it exists].
    #[arg(long, value_name = "FILE", global = true)]
    pub(super) config: Vec<PathBuf>,
    /// Print JSON on stdout, also for errors: {"ok": false, "errors": […]}.
    #[arg(long, global = true)]
    pub(super) json: bool,
}

/// `--json` of a command whose output is not JSON: only its errors are.
#[derive(Args, Debug)]
pub(super) struct HiddenJsonFlag {
    #[arg(long, hide = true)]
    json: bool,
}

/// Flags override environment variables (`TIDEGATE_UPSTREAM__URL`), which override the file.
#[derive(Args, Clone, Debug, Default)]
pub(super) struct OverrideFlags {
    /// Upstream URL, e.g. http://127.0.0.1:3000. With http://, `upstream.tls` is left out.
    #[arg(long, value_name = "URL")]
    pub(super) upstream: Option<String>,
    /// Listen address, e.g. [::]:8080.
    #[arg(long, value_name = "ADDRESS")]
    pub(super) listen: Option<String>,
}

impl SharedFlags {
    /// The sources of a command that reads one configuration.
    ///
    /// # Errors
    /// A message if several files are given or stdin cannot be read.
    pub(super) fn to_sources(
        &self,
        overrides: OverrideFlags,
    ) -> Result<ConfigSources, CommandError> {
        let file = match self.config.as_slice() {
            [] => default_file_source()?,
            [path] => read_file_source(path)?,
            _ => {
                return Err(
                    "--config is given several times; only check reads several files".into(),
                );
            }
        };
        Ok(sources_with_environment(file, overrides))
    }

    /// The sources of a command that never connects to the upstream: its URL may be absent.
    ///
    /// # Errors
    /// Same as [`SharedFlags::to_sources`].
    pub(super) fn to_sources_without_upstream(&self) -> Result<ConfigSources, CommandError> {
        let mut sources = self.to_sources(OverrideFlags::default())?;
        sources.flags.needs_no_upstream = true;
        Ok(sources)
    }

    /// [`Self::to_sources_without_upstream`] of a command that needs policies.
    ///
    /// # Errors
    /// Same as [`SharedFlags::to_sources`], or if there is no configuration file.
    pub(super) fn to_sources_with_policies(&self) -> Result<ConfigSources, CommandError> {
        let sources = self.to_sources_without_upstream()?;
        match sources.file {
            FileSource::None => Err(NO_POLICIES.into()),
            _ => Ok(sources),
        }
    }

    /// The sources of each file of `--config` and `files`, or of the default.
    ///
    /// # Errors
    /// A message if stdin cannot be read.
    pub(super) fn to_all_sources(
        &self,
        files: &[PathBuf],
        overrides: &OverrideFlags,
    ) -> Result<Vec<ConfigSources>, CommandError> {
        let paths = self.config.iter().chain(files);
        let mut files: Vec<_> = paths.map(|path| read_file_source(path)).collect();
        if files.is_empty() {
            files.push(default_file_source());
        }
        let files = files.into_iter();
        files
            .map(|file| Ok(sources_with_environment(file?, overrides.clone())))
            .collect()
    }
}

/// The sources of one file for a command that never connects to the upstream.
pub(super) fn sources_without_upstream(path: &Path) -> ConfigSources {
    let file = FileSource::Path(path.to_owned());
    let mut sources = sources_with_environment(file, OverrideFlags::default());
    sources.flags.needs_no_upstream = true;
    sources
}

fn default_file_source() -> Result<FileSource, CommandError> {
    match std::env::var_os(CONFIG_VARIABLE).filter(|path| !path.is_empty()) {
        Some(path) => read_file_source(Path::new(&path)),
        None if Path::new(DEFAULT_CONFIG).exists() => Ok(FileSource::Path(DEFAULT_CONFIG.into())),
        None => Ok(FileSource::None),
    }
}

fn read_file_source(path: &Path) -> Result<FileSource, CommandError> {
    if path != Path::new("-") {
        return Ok(FileSource::Path(path.to_owned()));
    }
    let mut text = String::new();
    let read = std::io::stdin()
        .take(MAX_STDIN_BYTES)
        .read_to_string(&mut text);
    read.map_err(|error| format!("stdin: can't be read: {error}"))?;
    Ok(FileSource::Text {
        name: FileSource::STDIN_NAME.to_owned(),
        text,
    })
}

fn sources_with_environment(file: FileSource, overrides: OverrideFlags) -> ConfigSources {
    // Invalid UTF-8 is replaced, because unrelated variables may hold it. In a TIDEGATE_ variable,
    // the replacement characters lead to an ordinary configuration error.
    let text = |text: OsString| text.to_string_lossy().into_owned();
    let env = std::env::vars_os()
        .map(|(name, value)| (text(name), text(value)))
        .collect();
    ConfigSources {
        file,
        env,
        flags: FlagOverrides {
            upstream: overrides.upstream,
            listen: overrides.listen,
            ..FlagOverrides::default()
        },
        ..ConfigSources::default()
    }
}
