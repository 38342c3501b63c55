//! Configuration: builds the settings of every module from a file, the environment and flags.
//!
//! An outer adapter: it depends on the modules it configures, and they do not depend on it.
//! [`schema`] lists the keys, [`layers`] merges the sources, [`table_reader`] reads values and
//! collects every error with its position, [`settings`] and [`policies`] build the result.

mod client_tls;
mod describe;
mod diagnostic;
mod document;
mod effective_config;
mod files;
mod input;
mod layers;
mod leases;
mod lints;
mod listen_tls;
mod match_conditions;
mod policies;
#[cfg(any(test, fuzzing))]
pub mod properties;
mod redis;
#[cfg(test)]
mod reference_page;
mod schema;
mod settings;
mod table_reader;
#[cfg(test)]
mod tests;
mod values;

pub use diagnostic::{
    ConfigDiagnostic, ConfigErrors, DiagnosticSeverity, SourcePosition, SourceSpan,
};
pub use files::FileSet;
pub use values::format_duration;

use crate::admin::AdminSettings;
use crate::policy::PolicyTable;
use crate::proxy::{
    ExtraListenerSettings, ListenSettings, ListenerKind, ShutdownSettings, UpstreamSettings,
};
use crate::store::MemorySettings;
use crate::store::redis::RedisSettings;
use crate::telemetry::LogSettings;
use crate::telemetry::trace::TraceSettings;
use crate::tls::ServerTls;
use figment::Provider;
use figment::value::{Dict, Value};
use http::StatusCode;
use input::ConfigInput;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use table_reader::TableReader;

/// Sources of a configuration. The caller captures them once, so that a reload uses the same.
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

/// A valid configuration.
#[derive(Debug)]
pub struct Config {
    pub listen: ListenSettings,
    /// `None` for cleartext.
    pub tls: Option<Arc<ServerTls>>,
    pub upstream: UpstreamSettings,
    /// Whether there is an upstream. If not, nothing listens at `listen.address`.
    pub has_upstream: bool,
    /// The listeners of `[rls]` and `[check]`.
    pub service_listeners: Vec<ExtraListenerSettings>,
    /// Status code of all denials sent by the ext_authz listener. `None` for the proxy's codes.
    pub ext_authz_denied_status: Option<StatusCode>,
    pub policy_table: Arc<PolicyTable>,
    pub store: StoreSettings,
    pub shutdown: ShutdownSettings,
    pub admin: AdminSettings,
    pub log: LogSettings,
    /// `None` if tracing is off.
    pub trace: Option<TraceSettings>,
    /// A description of each policy in file order, including those with `mode = "off"`.
    pub policy_descriptions: Vec<PolicyDescription>,
    pub warnings: Vec<ConfigDiagnostic>,
    /// The files read.
    pub files: FileSet,
    raw: RawConfig,
}

/// A policy described in one sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyDescription {
    pub policy: Box<str>,
    /// The policy has `mode = "off"`.
    pub is_off: bool,
    pub sentence: String,
}

impl fmt::Display for PolicyDescription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.sentence)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoreSettings {
    Memory(MemorySettings),
    Redis(Box<RedisSettings>),
}

/// Settings that take effect only at a restart.
#[derive(Clone, Debug)]
pub struct RestartOnlySettings {
    raw: RawConfig,
    store: StoreSettings,
    admin: AdminSettings,
    trace: Option<TraceSettings>,
}

/// The merged values. They may hold a password, so `Debug` prints none of them.
#[derive(Clone)]
struct RawConfig(Dict);

impl fmt::Debug for RawConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
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

/// Loads and validates a configuration.
///
/// # Errors
/// [`ConfigErrors`] with all errors.
pub fn load(sources: &ConfigSources) -> Result<Config, ConfigErrors> {
    let mut input = ConfigInput::default();
    let Some(main) = files::read_main_file(&mut input, &sources.file) else {
        // Diagnostics of the readable part of a broken file would mislead.
        return input.finish(None, settings::complete_config);
    };
    let main_values = input
        .documents()
        .get(main)
        .map(|document| document.values().clone())
        .unwrap_or_default();
    let layers = layers::merge_layers(&input, &main_values, &sources.env, &sources.flags);
    let merged = layers
        .data()
        .unwrap_or_default()
        .remove(&figment::Profile::Default)
        .unwrap_or_default();
    input.set_layers(layers);
    let included = files::read_included_files(&mut input, main, &merged, &sources.file);
    let built = {
        let top = TableReader::from_document(&input, main, &schema::ROOT, &merged);
        let included: Vec<TableReader<'_>> = included
            .iter()
            .filter_map(|at| Some((*at, input.documents().get(*at)?)))
            .map(|(at, document)| {
                TableReader::from_document(&input, at, &schema::INCLUDED_ROOT, document.values())
            })
            .collect();
        settings::build_settings(&input, &top, &included)
    };
    let mut raw = RawConfig(merged);
    for document in included.iter().filter_map(|at| input.documents().get(*at)) {
        raw.add_policies(document.values());
    }
    input.finish(built.map(|built| (built, raw)), settings::complete_config)
}

/// Loads only the settings of the admin listener. CLI commands use it to find a running proxy even
/// if the rest of the configuration is invalid.
///
/// # Errors
/// [`ConfigErrors`] if the main file is not TOML or `[admin]` is invalid.
pub fn load_admin_settings(sources: &ConfigSources) -> Result<AdminSettings, ConfigErrors> {
    let mut input = ConfigInput::default();
    let Some(main) = files::read_main_file(&mut input, &sources.file) else {
        return input.finish(None, |admin, _, _| admin);
    };
    let main_values = input
        .documents()
        .get(main)
        .map(|document| document.values().clone())
        .unwrap_or_default();
    // Errors in other tables are not reported here.
    let is_admin_table = |name: &str| name == "admin";
    let main_values = main_values
        .into_iter()
        .filter(|(name, _)| is_admin_table(name))
        .collect();
    let env: Vec<_> = sources
        .env
        .iter()
        .filter(|(name, _)| name.starts_with("TIDEGATE_ADMIN__"))
        .cloned()
        .collect();
    let layers = layers::merge_layers(&input, &main_values, &env, &FlagOverrides::default());
    let merged = layers
        .data()
        .unwrap_or_default()
        .remove(&figment::Profile::Default)
        .unwrap_or_default();
    input.set_layers(layers);
    let built = settings::build_admin_settings(
        &input,
        &TableReader::from_document(&input, main, &schema::ROOT, &merged).get_table("admin"),
    );
    input.finish(built, |admin, _, _| admin)
}

/// Key prefixes that a reload applies, beside the policies.
const RELOADABLE_KEY_PREFIXES: [&str; 9] = [
    "include",
    "listen.tls.",
    "rls.tls.",
    "check.tls.",
    "client.",
    "path.",
    "defaults.",
    "response.",
    "upstream.tls.",
];

impl Config {
    /// TLS settings of a service listener. `None` if the listener is not configured, `Some(None)` for
    /// cleartext.
    pub fn listener_tls(&self, kind: ListenerKind) -> Option<Option<&Arc<ServerTls>>> {
        self.service_listeners
            .iter()
            .find(|settings| settings.kind == kind)
            .map(|settings| settings.tls.as_ref())
    }

    /// The settings that this process keeps until it ends.
    pub fn restart_only_settings(&self) -> RestartOnlySettings {
        RestartOnlySettings {
            raw: self.raw.clone(),
            store: self.store.clone(),
            admin: self.admin.clone(),
            trace: self.trace.clone(),
        }
    }
}

impl RestartOnlySettings {
    /// Keys that differ in `newer` and take effect only at a restart.
    pub fn changed_keys(&self, newer: &Config) -> Vec<String> {
        let mut keys = schema::key_paths();
        keys.retain(|path| !is_reloadable(path));
        keys.retain(|path| self.raw.value_or_default(path) != newer.raw.value_or_default(path));
        if !keys.iter().any(|path| path.starts_with("store.")) && self.store != newer.store {
            keys.push("store.redis (contents of a file)".to_owned());
        }
        if !keys.iter().any(|path| path.starts_with("admin.")) && self.admin != newer.admin {
            keys.push("admin.token_file (contents)".to_owned());
        }
        if !keys.iter().any(|path| path.starts_with("trace.")) && self.trace != newer.trace {
            keys.push("trace (contents of a file)".to_owned());
        }
        keys
    }
}

/// Whether a reload applies the key.
fn is_reloadable(path: &str) -> bool {
    RELOADABLE_KEY_PREFIXES
        .iter()
        .any(|prefix| path.starts_with(prefix))
}

impl RawConfig {
    /// Appends the policies of an included file.
    fn add_policies(&mut self, included: &Dict) {
        let Some(Value::Array(_, more)) = included.get("policy") else {
            return;
        };
        let all = self
            .0
            .entry("policy".to_owned())
            .or_insert_with(|| Vec::<Value>::new().into());
        if let Value::Array(_, all) = all {
            all.extend(more.iter().cloned());
        }
    }

    /// The value of a key, or its default.
    fn value_or_default(&self, path: &str) -> Option<Value> {
        let mut names = path.split('.');
        let last = names.next_back()?;
        let table = names.try_fold(&self.0, |table, name| table.get(name)?.as_dict());
        table
            .and_then(|table| table.get(last).cloned())
            .or_else(|| match schema::find_key_by_path(path.split('.'))? {
                schema::SchemaKey {
                    kind,
                    requirement: schema::KeyRequirement::Default(text),
                    ..
                } => Some(values::value_from_text(kind, text)),
                _ => None,
            })
    }
}
