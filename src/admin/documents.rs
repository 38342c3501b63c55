//! Documents of the admin API that commands or other instances read too.
//!
//! Missing fields are no error, so that the answers of an older proxy can be shown.

use crate::telemetry::metrics::{CertificateExpiry, ConnectionCounts, LastReload, StoreStatus};
use crate::telemetry::top_rejections::RejectionRanking;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use strum::IntoStaticStr;

/// Decisions that refuse a request, or would refuse it if the policy were not in mode `shadow` or `mark`.
/// Among all requests, `degraded_refused` is a part of `degraded`.
pub(crate) const REFUSED_SERIES: [&str; 6] = [
    "rejected",
    "blocked",
    "denied",
    "degraded_refused",
    "shadow_rejected",
    "marked",
];

/// An override of a key in the store.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct OverrideDocument {
    pub policy: String,
    /// The values of the key.
    pub key: Vec<String>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub unlimited: bool,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub blocked: bool,
    /// The amounts by the names of their limits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limits: Option<BTreeMap<String, AmountsDocument>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub author: Option<String>,
}

/// The amounts of one limit in an override.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AmountsDocument {
    pub requests: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub burst: Option<u64>,
}

/// Overrides, and whether there are more.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct OverrideListDocument {
    pub overrides: Vec<OverrideDocument>,
    pub more: bool,
}

/// Result of removing an override.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct OverrideRemovalDocument {
    pub policy: String,
    pub key: Vec<String>,
    /// Whether there was one.
    pub removed: bool,
}

/// A limit, and its status if that is known.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct LimitDocument {
    pub name: String,
    pub algorithm: String,
    pub requests: u64,
    /// The period as in the configuration; `None` for `concurrency`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub per: Option<String>,
    /// The time zone of a calendar period.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tz: Option<String>,
    /// The field of the request that may state another amount.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requests_from: Option<String>,
    /// `unlimited`, `blocked` or `limits`, for a key with an override.
    #[serde(rename = "override", skip_serializing_if = "Option::is_none")]
    pub override_kind: Option<String>,
    /// Whether the explained request states the amounts.
    #[serde(skip)]
    pub is_stated: bool,
    /// `None` if the status is unknown, or nothing is counted.
    #[serde(flatten)]
    pub usage: Option<LimitUsage>,
    /// What only programs read, such as the settings of the algorithm.
    #[serde(flatten)]
    pub details: Map<String, Value>,
}

/// The units of a limit.
#[derive(Debug, Serialize, Deserialize)]
pub struct LimitUsage {
    pub used: u64,
    pub remaining: u64,
    /// Seconds until more units are available; `None` if none is used.
    pub grows_in_s: Option<f64>,
}

/// A key of a policy and the status of its limits.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct KeyDocument {
    pub policy: String,
    pub key: String,
    /// The hash of the key, as in the log; older proxies send none.
    pub key_hash: Option<String>,
    /// Whether a request of the lowest cost would be admitted.
    pub admitted: bool,
    pub mode: String,
    pub scope: String,
    pub shadow: bool,
    pub least_cost: u64,
    pub blocked_s: Option<f64>,
    pub limits: Vec<LimitDocument>,
    /// Describes the key's override in the store.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub override_words: Option<String>,
    /// `allow`, `deny` or `off`, by an override of the configuration.
    #[serde(rename = "override", skip_serializing_if = "Option::is_none")]
    pub override_rule: Option<String>,
    /// The Redis keys of the counters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub counters: Option<Vec<String>>,
}

/// Result of resetting a key.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct KeyResetDocument {
    pub policy: String,
    pub key: String,
    pub counters_forgotten: u64,
    /// Names of the limits that were reset.
    pub limits: Vec<String>,
    /// Whether a block was deleted.
    pub unblocked: bool,
    /// Remaining seconds of the key's block, if it stays because only one limit was reset.
    pub blocked_s: Option<f64>,
}

/// Counters in Redis, and whether there are more.
#[derive(Debug, Serialize)]
pub struct CounterListDocument {
    pub counters: Vec<CounterDocument>,
    pub more: bool,
}

/// A counter in Redis.
#[derive(Debug, Serialize)]
pub struct CounterDocument {
    /// The Redis key.
    pub key: String,
    /// The policy and the values of the key, if the Redis key contains them.
    pub readable: Option<String>,
    pub algorithm: &'static str,
    pub per_s: f64,
    pub used: u64,
    /// Seconds until units become available; `None` if none is used.
    pub frees_in_s: Option<f64>,
    /// The unit and the time zone of a calendar period.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub per: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tz: Option<String>,
}

/// What each policy does with a request, and the expected result.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ExplanationDocument {
    pub expected: ExpectedOutcome,
    pub policies: Vec<ExplainedPolicy>,
    /// Why the counters cannot be read.
    pub store_error: Option<String>,
    /// The error in the request's token.
    pub token_fault: Option<String>,
}

/// The expected result for the client.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct ExpectedOutcome {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    /// `None` if the counters cannot be read, or the request is rejected before policies apply.
    pub decision: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub by: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// What one policy does with a request.
#[derive(Debug, Serialize, Deserialize)]
pub struct ExplainedPolicy {
    pub policy: String,
    pub mode: String,
    pub shadow: bool,
    pub result: String,
    pub why: Option<String>,
    /// The result in words.
    #[serde(skip)]
    pub words: String,
    #[serde(flatten)]
    pub limited: Option<ExplainedKey>,
}

/// The key of a request in one policy, and its limits.
#[derive(Debug, Serialize, Deserialize)]
pub struct ExplainedKey {
    pub key: String,
    pub key_hash: String,
    pub scope: String,
    pub cost: u64,
    pub limits: Vec<LimitDocument>,
    pub blocked_s: Option<f64>,
}

/// The summary of one instance: state, rate, and rankings.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct InstanceSummary {
    pub id: String,
    pub name: String,
    pub version: String,
    /// The phase of the process.
    pub status: Option<String>,
    /// The number of instances that it divides limits by.
    pub instances: Option<u64>,
    #[serde(flatten)]
    pub figures: InstanceFigures,
    pub keys: RejectionRanking,
    pub paths: RejectionRanking,
}

/// What an instance says about itself; `None` if it did not answer.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct InstanceFigures {
    /// `up` or `degraded`.
    pub store: Option<String>,
    pub decisions_per_s: Option<f64>,
    pub uptime_s: Option<u64>,
    pub generation: Option<u64>,
    pub config_hash: Option<u64>,
}

/// All instances that share the limits.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct FleetDocument {
    pub store: String,
    pub shared: bool,
    pub total: usize,
    pub listed: usize,
    pub answered: usize,
    /// Why the heartbeats could not be read.
    pub problem: Option<String>,
    pub decisions_per_s: f64,
    pub instances: Vec<FleetInstanceDocument>,
    pub keys: RejectionRanking,
    pub paths: RejectionRanking,
}

/// One instance as its heartbeat and its summary describe it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct FleetInstanceDocument {
    pub id: String,
    pub name: Option<String>,
    pub version: Option<String>,
    pub admin: Option<String>,
    #[serde(rename = "self")]
    pub is_self: bool,
    pub heartbeat_age_s: Option<f64>,
    pub state: String,
    pub share: f64,
    #[serde(flatten)]
    pub figures: InstanceFigures,
    /// Why it was not queried, or did not answer.
    pub not_asked: Option<String>,
}

/// Numbers by name.
pub type NamedCounts = BTreeMap<String, u64>;

/// The overview of the dashboard: status, store, traffic, latency and problems.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct OverviewDocument {
    pub instance: OverviewInstance,
    pub status: String,
    pub policies: usize,
    pub generation: u64,
    pub last_reload: LastReload,
    /// Warnings about the configuration.
    pub warnings: Vec<String>,
    pub store: StoreStatus,
    pub connections: ConnectionCounts,
    pub requests: RequestCounts,
    pub http: HttpCounts,
    pub latency: LatencyDocument,
    pub certificates: Vec<CertificateExpiry>,
    /// Requests with forwarding headers from peers that are not trusted.
    pub untrusted_forwarding: u64,
    pub untrusted_peers: BTreeSet<IpAddr>,
    /// The problems as sentences.
    pub hints: Vec<String>,
    pub problems: Vec<Problem>,
}

/// A problem and its remedy, in words.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Problem {
    /// Names the rule; the dashboard has its own texts for some rules.
    pub id: Cow<'static, str>,
    /// `error` or `warning`.
    pub level: Cow<'static, str>,
    pub title: Cow<'static, str>,
    pub remedy: Cow<'static, str>,
}

/// The process that answers.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct OverviewInstance {
    /// Random instance id, new with every start.
    pub id: String,
    /// Host name; in Kubernetes, the name of the pod.
    pub host: String,
    pub version: String,
    /// Seconds since the Unix epoch.
    pub started_s: u64,
    pub uptime_s: u64,
    pub workers: usize,
}

/// The decisions about requests: since the start, and by second.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct RequestCounts {
    pub total: NamedCounts,
    /// Columns for charts: `at`, decisions and classes of status codes. The last second is
    /// incomplete.
    pub seconds: BTreeMap<String, Vec<u64>>,
}

/// Responses and errors since the start.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct HttpCounts {
    pub codes: NamedCounts,
    pub upstream_errors: NamedCounts,
    pub app_errors: u64,
}

/// Durations in the last seconds.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct LatencyDocument {
    pub window_s: u64,
    /// By what decided.
    pub decisions: BTreeMap<String, DurationQuantiles>,
    pub responses: DurationQuantiles,
}

/// Quantiles of a duration; `None` beyond the largest bound, or if nothing was measured.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct DurationQuantiles {
    pub count: u64,
    pub p50_s: Option<f64>,
    pub p90_s: Option<f64>,
    pub p99_s: Option<f64>,
    pub p999_s: Option<f64>,
}

/// The configuration in effect, without secrets.
#[derive(Debug, Serialize)]
pub struct ConfigDocument {
    pub generation: u64,
    pub reload_errors: Vec<String>,
    pub config: Value,
}

/// One page of the policies. All of them share one time axis.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct PoliciesDocument {
    pub generation: u64,
    /// The number of selected policies, of which this is one page.
    pub total: usize,
    pub offset: usize,
    pub policies: Vec<PolicyDocument>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub minutes: Option<Vec<u64>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hours: Option<Vec<u64>>,
}

/// A policy, and its numbers of decisions.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct PolicyDocument {
    pub name: String,
    pub mode: String,
    pub words: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority: Option<i64>,
    /// `allow`, `deny` or `limit`; `None` if the policy is off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub action: Option<String>,
    #[serde(flatten)]
    pub quota: Option<QuotaDocument>,
    /// Numbers of decisions since the start.
    #[serde(flatten)]
    pub decisions: Map<String, Value>,
    /// Outcomes of the decisions without the store.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub degraded_by: Option<NamedCounts>,
    /// Decisions that occurred, by minute and by hour.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_hour: Option<BTreeMap<String, Vec<u32>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_day: Option<BTreeMap<String, Vec<u32>>>,
}

/// What a policy limits.
#[derive(Debug, Serialize, Deserialize)]
pub struct QuotaDocument {
    pub key: Vec<String>,
    pub limits: Vec<LimitDocument>,
    /// The number of overrides in the configuration.
    pub overrides: usize,
    pub dynamic: bool,
    pub scope: String,
    pub counter: Option<String>,
    pub on_store_failure: Option<String>,
    pub block_s: Option<f64>,
    pub lease: Option<LeaseDocument>,
}

/// The leases of a policy.
#[derive(Debug, Serialize, Deserialize)]
pub struct LeaseDocument {
    /// The number of units, or `auto`.
    pub size: Value,
    pub ttl_s: f64,
}

/// The most rejected keys and paths.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct TopDocument {
    pub keys: RejectionRanking,
    pub paths: RejectionRanking,
    pub app_errors: RejectionRanking,
}

/// Whether requests are served.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ReadinessDocument {
    /// The phase of the process.
    pub status: String,
    /// `up` or `degraded`.
    pub store: String,
    pub generation: u64,
    pub reload_errors: Vec<String>,
    pub untrusted_forwarding: u64,
    pub hints: Vec<String>,
}

/// A started drain, and the maximum durations of its phases.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct DrainDocument {
    pub status: String,
    pub delay_s: f64,
    pub grace_s: f64,
}

/// The level of the log, as in the configuration.
#[derive(Debug, Serialize, Deserialize)]
pub struct LogLevelDocument {
    pub level: Option<String>,
}

/// What was examined and found.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DoctorReport {
    /// Whether every check has a result and none is a fault.
    pub ok: bool,
    pub faults: usize,
    pub warnings: usize,
    pub unknown: usize,
    pub checked_at_s: u64,
    pub store: ExaminedStore,
    /// By server, in the order of the checks.
    pub findings: Vec<DoctorFinding>,
    pub servers: Vec<ExaminedServer>,
    /// The counters of each policy, over all servers.
    pub policies: Vec<PolicyMemory>,
}

/// The store of the configuration.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum ExaminedStore {
    Memory,
    Redis { address: String, key_prefix: String },
}

/// The result of one check.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DoctorFinding {
    pub level: FindingLevel,
    /// A stable name, such as `eviction`.
    pub check: Cow<'static, str>,
    /// `None` if the finding is about the configuration or all servers.
    pub server: Option<String>,
    pub found: String,
    pub advice: Option<String>,
}

/// How serious a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr, Serialize, Deserialize)]
#[strum(serialize_all = "lowercase", const_into_str)]
#[serde(rename_all = "lowercase")]
pub enum FindingLevel {
    Ok,
    /// The check has no result: Redis did not answer in time.
    Unknown,
    /// Works now, and may fail or lose usage in some event.
    Warning,
    /// Decisions fail, or limits are not kept.
    Fault,
}

/// The figures of one server. A field is `None` if the server does not report it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ExaminedServer {
    pub address: String,
    pub version: Option<String>,
    pub valkey_version: Option<String>,
    pub mode: Option<String>,
    pub role: Option<String>,
    pub uptime_s: Option<u64>,
    pub memory_bytes: Option<u64>,
    pub memory_max_bytes: Option<u64>,
    pub maxmemory_policy: Option<String>,
    pub append_only_file: Option<bool>,
    pub replicas: Option<Vec<ExaminedReplica>>,
    pub clock_ahead_ms: Option<f64>,
    pub clock_error_ms: Option<f64>,
    pub latency_p50_ms: Option<f64>,
    pub latency_p99_ms: Option<f64>,
    pub denied_commands: Option<Vec<String>>,
    pub scanned_share: Option<f64>,
}

/// A replica of a server.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ExaminedReplica {
    pub address: String,
    pub state: String,
    pub behind_bytes: u64,
    /// Seconds since its last acknowledgement.
    pub lag_s: Option<u64>,
}

/// Counters and memory of one policy, estimated from a sample.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PolicyMemory {
    /// `None` for counters whose names are too long to contain the policy.
    pub policy: Option<String>,
    pub counters: u64,
    pub bytes: u64,
    pub without_expiry: u64,
}

#[cfg(test)]
mod tests;
