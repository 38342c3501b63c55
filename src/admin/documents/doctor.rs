//! The report of `tidegate doctor`.

use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use strum::IntoStaticStr;

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
