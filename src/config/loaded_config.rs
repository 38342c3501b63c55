//! The result of a load.

use super::describe::PolicyDescription;
use super::diagnostic::{ConfigDiagnostic, DiagnosticGroup, group_diagnostics};
use super::input::FileSet;
use super::schema::{self, AppliedAt};
use super::schema_value::content_or_default;
use super::value_tree::ValueNode;
use crate::admin::AdminSettings;
use crate::policy::jwt::TokenReader;
use crate::policy::{KeyPart, Policy, PolicyTable, ValueHasher};
use crate::proxy::{
    ExtAuthzSettings, ExtraListenerSettings, ListenSettings, ListenerKind, ShutdownSettings,
    UpstreamSettings,
};
use crate::store::MemorySettings;
use crate::store::redis::{RedisSettings, RedisTopology};
use crate::telemetry::LogSettings;
use crate::telemetry::metrics::MetricExportSettings;
use crate::telemetry::trace::TraceSettings;
use crate::tls::ServerTls;
use std::sync::Arc;

/// A valid configuration.
#[derive(Debug)]
pub struct Config {
    pub listen: ListenSettings,
    /// TLS of the proxy's listener. `None` for cleartext.
    pub tls: Option<Arc<ServerTls>>,
    pub upstream: UpstreamSettings,
    /// Whether there is an upstream. If not, nothing listens at `listen.address`.
    pub has_upstream: bool,
    /// The listeners of `[rls]` and `[check]`.
    pub service_listeners: Vec<ExtraListenerSettings>,
    pub ext_authz: ExtAuthzSettings,
    pub policy_table: Arc<PolicyTable>,
    /// Hashes the values of key parts.
    pub value_hasher: ValueHasher,
    pub store: StoreSettings,
    pub shutdown: ShutdownSettings,
    pub admin: AdminSettings,
    pub log: LogSettings,
    /// `None` if tracing is off.
    pub trace: Option<TraceSettings>,
    /// `None` if metrics are not exported by OTLP.
    pub metric_export: Option<MetricExportSettings>,
    /// A description of each policy in file order, including those with `mode = "off"`.
    pub policy_descriptions: Vec<PolicyDescription>,
    pub warnings: Vec<ConfigDiagnostic>,
    /// The files and globs that the configuration was read from.
    pub files: FileSet,
    pub(super) raw: ValueNode,
}

impl Config {
    /// Facts that the owner should know and that are no mistakes, for `check`.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = self.policy_table.spelling_notes();
        if self
            .service_listener_tls(ListenerKind::RateLimitService)
            .is_some()
        {
            let store = match &self.store {
                StoreSettings::Redis(redis) => {
                    let timeout = redis.timeout.as_millis();
                    format!(", longer than store.redis.timeout ({timeout} ms)")
                }
                StoreSettings::Memory(_) => String::new(),
            };
            notes.push(format!("[rls]: Envoy waits 20 ms for an answer unless its filter sets timeout, then lets the request pass; expected for example timeout: 0.1s{store}. Envoy counts these requests in cluster.NAME.ratelimit.failure_mode_allowed; given_up in tidegate_rls_calls_total is less"));
        }
        let has_several = |reader: &Arc<TokenReader>| !reader.settings.several_issuers().is_empty();
        if self
            .policy_table
            .token_reader
            .as_ref()
            .is_some_and(has_several)
        {
            let names = self.list_policies(|policy| {
                let conditions = policy.matcher.all_conditions().into_iter();
                let claims = conditions.filter_map(|one| match &one.part {
                    KeyPart::Claim(name) => Some(name.is_issuer()),
                    _ => None,
                });
                let claims: Vec<bool> = claims.collect();
                !claims.is_empty() && !claims.contains(&true)
            });
            notes.extend(names.map(|names| format!("match.jwt ({names}): each of the issuers can state these claims; expected iss beside them if only one may")));
        }
        let risk = match self.store {
            StoreSettings::Redis(_) => {
                "are data in Redis: data loss, or eviction by maxmemory-policy allkeys-*, lifts blocks; expected persistence, and a copy of tidegate overrides export"
            }
            StoreSettings::Memory(_) => {
                "are set at admin.address, hold for this process and end with it; expected store.kind = \"redis\" to keep them"
            }
        };
        let is_dynamic = |policy: &Policy| policy.quota().is_some_and(|quota| quota.is_dynamic);
        let names = self.list_policies(is_dynamic);
        notes.extend(
            names.map(|names| format!("dynamic = true ({names}): overrides of keys {risk}")),
        );
        notes
    }

    /// The names of the policies for which `is_listed` holds. `None` if there is none.
    fn list_policies(&self, is_listed: impl Fn(&Policy) -> bool) -> Option<String> {
        let policies = self.policy_table.policies().iter();
        let policies = policies.filter(|policy| is_listed(policy));
        let names: Vec<&str> = policies.map(|policy| &*policy.name).collect();
        (!names.is_empty()).then(|| names.join(", "))
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
    pub(super) raw: ValueNode,
    trace: Option<TraceSettings>,
    metric_export: Option<MetricExportSettings>,
}

impl Config {
    /// TLS settings of a service listener. `None` if the listener is not configured, `Some(None)`
    /// for cleartext.
    pub fn service_listener_tls(&self, kind: ListenerKind) -> Option<Option<&Arc<ServerTls>>> {
        self.service_listeners
            .iter()
            .find(|settings| settings.kind == kind)
            .map(|settings| settings.tls.as_ref())
    }

    /// The warnings as lines for the log and the dashboard. Equal ones are one line.
    pub fn warning_lines(&self) -> Vec<String> {
        let groups = group_diagnostics(&self.warnings);
        groups.iter().map(DiagnosticGroup::to_log_line).collect()
    }

    /// The settings that this process keeps until it ends.
    pub fn restart_only_settings(&self) -> RestartOnlySettings {
        RestartOnlySettings {
            raw: self.raw.clone_settings(),
            trace: self.trace.clone(),
            metric_export: self.metric_export.clone(),
        }
    }
}

impl RestartOnlySettings {
    /// Keys that differ in `newer` and take effect only at a restart.
    pub fn changed_keys(&self, newer: &Config) -> Vec<String> {
        let mut leaves = schema::leaf_keys();
        leaves.retain(|leaf| leaf.applied_at == AppliedAt::Restart);
        leaves.retain(|leaf| {
            content_or_default(&self.raw, leaf) != content_or_default(&newer.raw, leaf)
        });
        let mut keys: Vec<String> = leaves.into_iter().map(|leaf| leaf.path).collect();
        for (table, is_changed) in [
            ("trace", self.trace != newer.trace),
            ("metrics", self.metric_export != newer.metric_export),
        ] {
            let is_listed = |path: &String| path.split('.').next() == Some(table);
            if is_changed && !keys.iter().any(is_listed) {
                keys.push(format!("{table} (contents of a file)"));
            }
        }
        keys
    }
}

impl Config {
    /// The listeners, the upstream and the store, each with its name. Contains no secret.
    pub fn summarize_addresses(&self) -> Vec<(&'static str, String)> {
        let encryption = |is_tls: bool| if is_tls { "TLS" } else { "cleartext" };
        let mut lines = Vec::new();
        if self.has_upstream {
            let tls = encryption(self.tls.is_some());
            lines.push(("listen", format!("{}, {tls}", self.listen.address)));
        }
        for listener in &self.service_listeners {
            let name = match listener.kind {
                ListenerKind::RateLimitService => "rls",
                ListenerKind::ExtAuthz => "check",
                ListenerKind::Proxy => "listen",
            };
            let tls = encryption(listener.tls.is_some());
            lines.push((name, format!("{}, {tls}", listener.listen.address)));
        }
        if self.has_upstream {
            lines.push(("upstream", self.upstream.url.to_string()));
        }
        let store = match &self.store {
            StoreSettings::Memory(_) => "memory, of this process only".to_owned(),
            StoreSettings::Redis(redis) => summarize_redis(redis),
        };
        lines.push(("store", store));
        lines.push(("admin", self.admin.address.to_string()));
        if let Some(probes) = self.admin.probes {
            lines.push(("probes", probes.to_string()));
        }
        lines
    }
}

fn summarize_redis(redis: &RedisSettings) -> String {
    let servers: Vec<String> = redis.servers.iter().map(ToString::to_string).collect();
    let servers = servers.join(", ");
    let at = match &redis.topology {
        RedisTopology::Standalone => servers,
        RedisTopology::Cluster => format!("cluster {servers}"),
        RedisTopology::Sentinel { master, .. } => {
            format!("master {master:?} of sentinels {servers}")
        }
    };
    let tls = if redis.tls.is_some() { ", TLS" } else { "" };
    format!(
        "redis, {at}, database {}{tls}, key prefix {:?}",
        redis.database, redis.key_prefix
    )
}
