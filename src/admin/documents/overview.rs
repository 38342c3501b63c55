//! What the dashboard and `tidegate top` show, and the state of the process.

use super::LimitDocument;
use crate::admin::problems::Problem;
use crate::telemetry::metrics::{CertificateExpiry, ConnectionCounts, LastReload, StoreStatus};
use crate::telemetry::top_rejections::RejectionRanking;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

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
