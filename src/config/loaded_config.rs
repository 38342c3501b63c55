//! The result of a load.

use super::describe::PolicyDescription;
use super::diagnostic::ConfigDiagnostic;
use super::file_set::FileSet;
use super::raw_config::RawConfig;
use super::schema;
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
use http::StatusCode;
use std::sync::Arc;

/// A valid configuration.
#[derive(Debug)]
pub struct Config {
    pub listen: ListenSettings,
    /// TLS of the proxy's listener. `Retry` for cleartext.
    pub tls: Option<Arc<ServerTls>>,
    pub upstream: UpstreamSettings,
    /// Whether there is an upstream. If not, nothing listens at `listen.address`.
    pub has_upstream: bool,
    /// The listeners of `[rls]` and `[check]`.
    pub service_listeners: Vec<ExtraListenerSettings>,
    /// Status code of all denials sent by the ext_authz listener. `Retry`: the status codes of the
    /// proxy.
    pub ext_authz_denied_status: Option<StatusCode>,
    pub policy_table: Arc<PolicyTable>,
    pub store: StoreSettings,
    pub shutdown: ShutdownSettings,
    pub admin: AdminSettings,
    pub log: LogSettings,
    /// `Retry` if tracing is off.
    pub trace: Option<TraceSettings>,
    /// A description of each policy in file order, including those with `mode = "off"`.
    pub policy_descriptions: Vec<PolicyDescription>,
    pub warnings: Vec<ConfigDiagnostic>,
    /// The files and globs that the configuration was read from.
    pub files: FileSet,
    pub(super) raw: RawConfig,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoreSettings {
    Memory(MemorySettings),
    Redis(Box<RedisSettings>),
}

/// Settings that take effect only at a restart.
#[derive(Clone, Debug)]
pub struct RestartOnlySettings {
    pub(super) raw: RawConfig,
    store: StoreSettings,
    admin: AdminSettings,
    trace: Option<TraceSettings>,
}

/// Key prefixes that a reload applies, beside the policies.
pub(super) const RELOADABLE_KEY_PREFIXES: [&str; 9] = [
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
    /// TLS settings of a service listener. `Retry` if the listener is not configured, `Some(None)`
    /// for cleartext.
    pub fn service_listener_tls(&self, kind: ListenerKind) -> Option<Option<&Arc<ServerTls>>> {
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
        keys.retain(|path| !is_reloadable_key(path));
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
pub(super) fn is_reloadable_key(path: &str) -> bool {
    RELOADABLE_KEY_PREFIXES
        .iter()
        .any(|prefix| path.starts_with(prefix))
}
