//! State of the process, its store and its configuration, read when the metrics are requested.

/// State that is read instead of counted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessStatus {
    pub phase: ProcessPhase,
    /// Seconds since the start.
    pub uptime_s: u64,
    /// Number of policies in effect.
    pub policy_count: usize,
    pub open_connections: usize,
    pub max_connections: usize,
    /// How often `max_connections` was reached and new connections had to wait.
    pub connection_limit_hits: u64,
    /// Connections and HTTP/2 requests that ended in a panic.
    pub panics: u64,
    pub store_up: bool,
    pub breaker_open: bool,
    /// Store errors so far, by kind.
    pub store_errors: Vec<(&'static str, u64)>,
    /// Number of instances that share the limits; `None` if they are not counted.
    pub instance_count: Option<u32>,
    /// Leased units that could not be returned; `None` if no policy uses leases.
    pub lease_units_lost: Option<u64>,
    /// `None` without Redis.
    pub redis: Option<RedisServerMetrics>,
    /// `None` without the memory store.
    pub memory: Option<MemoryStoreUsage>,
    /// Number of the configuration in effect, starting at 1.
    pub config_generation: u64,
    /// `None` if no spans are exported.
    pub spans: Option<SpanExportCounts>,
    /// Configurations that were rejected.
    pub rejected_reloads: u64,
    /// Time of the last load, successful or not, in seconds since the Unix epoch.
    pub last_load_at_s: u64,
    /// Time when the configuration in effect was applied, in seconds since the Unix epoch.
    pub config_applied_at_s: u64,
    /// Hash of the settings that all replicas should share: 48 bits, which a double holds exactly.
    pub config_hash: u64,
    /// Why the newest files are not in effect; empty if they are.
    pub reload_errors: Vec<String>,
    /// The source of each server certificate, and its expiry in seconds since the Unix epoch.
    pub certificates: Vec<(String, u64)>,
}

/// Lifecycle phase of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessPhase {
    /// Clients cannot connect yet.
    Starting,
    Serving,
    /// Shutdown was requested. Requests may still be served.
    Stopping,
}

/// Spans so far, by export result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpanExportCounts {
    pub exported: u64,
    /// Dropped because the queue was full.
    pub dropped: u64,
    /// The collector was unavailable or rejected the spans.
    pub failed: u64,
}

/// Usage of the memory store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryStoreUsage {
    pub keys: usize,
    pub bytes: usize,
    /// Counters evicted before they expired.
    pub evictions: u64,
}

/// State of the Redis server. `None` means that Redis does not report the value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RedisServerMetrics {
    /// Calls of this instance so far.
    pub calls: u64,
    pub memory_bytes: Option<u64>,
    /// `maxmemory`; also `None` if it is unlimited.
    pub memory_max_bytes: Option<u64>,
    /// Whether the eviction policy may evict counters when memory is full.
    pub may_evict: Option<bool>,
    /// Clock of this machine minus the clock of Redis in µs, accurate to half a round trip.
    pub clock_skew_us: Option<i64>,
}
