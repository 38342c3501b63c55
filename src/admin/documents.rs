//! Documents of the admin API that commands or other instances read too.
//!
//! Missing fields are no error, so that the answers of an older proxy can be shown.

mod doctor;
mod keys;

pub use doctor::*;
pub use keys::*;

use crate::telemetry::metrics::{CertificateExpiry, ConnectionCounts, LastReload, StoreStatus};
use crate::telemetry::top_rejections::RejectionRanking;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

/// Decisions that refuse a request, or would refuse it if the policy were not in mode `shadow` or
/// `mark`. Among all requests, `degraded_refused` is a part of `degraded`.
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

#[cfg(test)]
mod tests;
