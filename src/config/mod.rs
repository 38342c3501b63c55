//! Configuration: text from a file, the environment and flags turned into every room's settings.
//!
//! An outer adapter: it knows all rooms, and none knows it. [`schema`] lists the keys, [`layers`] merges
//! what was written, a [`table_reader`] reads it and collects every error with its place, [`build`] and
//! [`policies`] give it its meaning.

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

/// Where a configuration comes from. The caller captures it once, so that a reload reads the same.
#[derive(Clone, Default)]
pub struct ConfigSources {
    pub file: FileSource,
    /// All variables; only those are read that begin with `TIDEGATE_` and hold a double underscore.
    pub env: Vec<(String, String)>,
    pub flags: FlagOverrides,
}

/// The file to read.
#[derive(Clone, Default)]
pub enum FileSource {
    Path(PathBuf),
    /// A text that isn't on disk. What it includes is looked for in the working directory.
    Text {
        name: String,
        text: String,
    },
    #[default]
    None,
}

/// Values given on the command line: they override all others.
#[derive(Clone, Debug, Default)]
pub struct FlagOverrides {
    pub upstream: Option<String>,
    pub listen: Option<String>,
}

/// Everything that was configured, checked.
#[derive(Debug)]
pub struct Config {
    pub listen: ListenSettings,
    /// `None`: cleartext.
    pub tls: Option<Arc<ServerTls>>,
    pub upstream: UpstreamSettings,
    /// Whether there is an upstream. If not, nothing listens at `listen.address`.
    pub has_upstream: bool,
    /// What else is served.
    pub service_listeners: Vec<ExtraListenerSettings>,
    /// Of refusals to those who only ask; `None`: as from the proxy.
    pub ext_authz_denied_status: Option<StatusCode>,
    pub policy_table: Arc<PolicyTable>,
    pub store: StoreSettings,
    pub shutdown: ShutdownSettings,
    pub admin: AdminSettings,
    pub log: LogSettings,
    /// `None`: nothing is recorded.
    pub trace: Option<TraceSettings>,
    /// Each policy in words, in file order; those that are off too.
    pub policy_descriptions: Vec<PolicyDescription>,
    pub warnings: Vec<ConfigDiagnostic>,
    /// What was read.
    pub files: FileSet,
    raw: RawConfig,
}

/// What a policy means, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyDescription {
    pub policy: Box<str>,
    /// It applies to nothing.
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

/// Settings that a reload does not change.
#[derive(Clone, Debug)]
pub struct RestartOnlySettings {
    raw: RawConfig,
    store: StoreSettings,
    admin: AdminSettings,
    trace: Option<TraceSettings>,
}

/// The merged values. They may hold a password, so they don't show themselves.
#[derive(Clone)]
struct RawConfig(Dict);

impl fmt::Debug for RawConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// Variables may hold passwords, so they don't show themselves.
impl fmt::Debug for ConfigSources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sources")
            .field("file", &self.file)
            .field("flags", &self.flags)
            .finish_non_exhaustive()
    }
}

/// So may the text.
impl fmt::Debug for FileSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => path.fmt(f),
            Self::Text { name, .. } => name.fmt(f),
            Self::None => f.write_str("None"),
        }
    }
}

/// Reads and checks a configuration.
///
/// # Errors
/// A [`Report`] with everything that is wrong.
pub fn load(sources: &ConfigSources) -> Result<Config, ConfigErrors> {
    let mut input = ConfigInput::default();
    let Some(main) = files::read_main_file(&mut input, &sources.file) else {
        // What could be said of half a file would mislead.
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

/// Reads the settings of the admin port alone: who asks a running proxy for its health must find it, whatever
/// else has become of its configuration.
///
/// # Errors
/// A [`Report`] if the main file is no TOML, or these settings are wrong.
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
    // What is wrong with others is not said here.
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

/// What a reload brings into effect, beside the policies.
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
    /// How TLS is spoken at one of [`Config::doors`]; `None`: it isn't there.
    pub fn listener_tls(&self, door: ListenerKind) -> Option<Option<&Arc<ServerTls>>> {
        self.service_listeners
            .iter()
            .find(|settings| settings.kind == door)
            .map(|settings| settings.tls.as_ref())
    }

    /// What runs until the process ends.
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
    /// The keys whose values differ in a newer configuration, and that only a restart brings into effect.
    pub fn changed_keys(&self, newer: &Config) -> Vec<String> {
        let mut keys = schema::key_paths();
        keys.retain(|path| !is_reloadable(path));
        keys.retain(|path| self.raw.value_or_default(path) != newer.raw.value_or_default(path));
        if !keys.iter().any(|path| path.starts_with("store.")) && self.store != newer.store {
            keys.push("store.redis (what a file holds that it names)".to_owned());
        }
        if !keys.iter().any(|path| path.starts_with("admin.")) && self.admin != newer.admin {
            keys.push("admin.token_file (what it holds)".to_owned());
        }
        if !keys.iter().any(|path| path.starts_with("trace.")) && self.trace != newer.trace {
            keys.push("trace (what a file holds that it names)".to_owned());
        }
        keys
    }
}

/// Whether a reload brings a key into effect.
fn is_reloadable(path: &str) -> bool {
    RELOADABLE_KEY_PREFIXES
        .iter()
        .any(|live| path.starts_with(live))
}

impl RawConfig {
    /// Puts the policies of an included file behind those that are there.
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

    /// What holds for a key: its value, or its default.
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
