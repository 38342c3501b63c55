//! State of the process, its store and its configuration, read when the metrics are requested.

use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

/// State of the process that is read on request instead of counted by workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessStatus {
    pub phase: ProcessPhase,
    /// Seconds since the start.
    pub uptime_s: u64,
    /// Number of policies in effect.
    pub policy_count: usize,
    pub connections: ConnectionCounts,
    /// Connections and HTTP/2 requests that ended in a panic.
    pub panics: u64,
    /// The store, without its `errors`.
    pub store: StoreStatus,
    /// Number of store errors since the start, by kind.
    pub store_errors: Vec<(&'static str, u64)>,
    /// State of the Redis server; `None` without Redis.
    pub redis: Option<RedisServerMetrics>,
    /// Number of the configuration in effect, starting at 1.
    pub config_generation: u64,
    /// Spans by export result; `None` if no spans are exported.
    pub spans: Option<[(&'static str, u64); 3]>,
    /// Fetches of token keys; empty if no keys are fetched.
    pub key_fetches: Vec<KeyFetchCounts>,
    pub last_reload: LastReload,
    /// The configuration in effect, as JSON without secrets.
    pub config_json: Arc<str>,
    /// Time when the configuration in effect was applied, in seconds since the Unix epoch.
    pub config_applied_at_s: u64,
    /// Hash of the settings that all replicas should share: 48 bits, which a double holds exactly.
    pub config_hash: u64,
    /// Warnings of the configuration in effect, one line each.
    pub config_warnings: Vec<String>,
    pub certificates: Vec<CertificateExpiry>,
}

/// The connections of clients.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ConnectionCounts {
    pub open: usize,
    pub max: usize,
    /// How often the maximum was reached and new connections had to wait.
    pub full: u64,
}

/// The store of the counters.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct StoreStatus {
    /// `memory` or `redis`.
    pub kind: Cow<'static, str>,
    /// Empty for `memory`.
    pub address: String,
    pub up: bool,
    pub breaker_open: bool,
    /// `None` if the store is up or was not reached yet.
    pub outage: Option<StoreOutage>,
    /// Number of errors since the start, by kind.
    pub errors: BTreeMap<String, u64>,
    /// Number of instances that share the limits; `None` without Redis.
    pub instances: Option<u32>,
    /// Leased units that could not be returned; `None` without Redis.
    pub lease_units_lost: Option<u64>,
    /// Usage of the memory store; `None` if nothing is counted there.
    pub memory: Option<MemoryStoreUsage>,
}

/// The last load of the configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LastReload {
    /// Time of the load, successful or not, in seconds since the Unix epoch.
    pub at_s: u64,
    /// The number of refused configurations.
    pub refused: u64,
    /// Errors in the newest configuration files; empty if these files are in effect.
    pub errors: Vec<String>,
    /// Settings that were changed since the start and take effect only after a restart.
    pub pending_restart: Vec<String>,
}

/// The source of a server certificate, and its expiry in seconds since the Unix epoch.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct CertificateExpiry {
    pub file: String,
    pub ends_s: u64,
}

impl StoreStatus {
    /// `up` or `degraded`.
    pub fn availability(&self) -> &'static str {
        if self.up { "up" } else { "degraded" }
    }
}

/// Why the store is unavailable, and what policies do until it is back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreOutage {
    /// Stable name of the failure.
    pub kind: Cow<'static, str>,
    /// The message of the server or of the operating system.
    pub reason: String,
    pub remedy: Cow<'static, str>,
    pub lasts_s: u64,
    /// The policies that reject requests, count in this process, and admit requests.
    #[serde(skip)]
    pub closed: Vec<String>,
    #[serde(skip)]
    pub local: Vec<String>,
    #[serde(skip)]
    pub open: Vec<String>,
}

/// Lifecycle phase of the process, with its name in documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display)]
#[strum(serialize_all = "lowercase")]
pub enum ProcessPhase {
    /// Clients cannot connect yet.
    Starting,
    #[strum(serialize = "ready")]
    Serving,
    /// Shutdown was requested; requests may still be served.
    Stopping,
}

/// Fetches of the keys of a token issuer since the start, by result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyFetchCounts {
    /// The configured URL without its query.
    pub url: String,
    pub succeeded: u64,
    pub failed: u64,
}

/// Usage of the memory store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryStoreUsage {
    pub keys: usize,
    pub bytes: usize,
    /// Counters evicted before they expired.
    pub evictions: u64,
}

/// State of the Redis server. A field is `None` if Redis does not report its value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RedisServerMetrics {
    /// Calls of this instance to Redis since the start.
    pub calls: u64,
    /// Checks that found sentinels with different masters.
    pub sentinel_disagreements: u64,
    /// Overrides of keys that requests found changed.
    pub override_changes: u64,
    /// Decisions that found a value at the key of an override that is none.
    pub foreign_overrides: u64,
    pub memory_bytes: Option<u64>,
    /// `maxmemory`; also `None` if it is unlimited.
    pub memory_max_bytes: Option<u64>,
    /// Whether the eviction policy may evict counters when memory is full.
    pub may_evict: Option<bool>,
    /// Clock of this machine minus the clock of Redis in µs, accurate to half a round trip.
    pub clock_skew_us: Option<i64>,
}
