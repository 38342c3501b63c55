//! The store's part of the page, and what Redis was last seen to say of itself.

use super::ProcessStatus;
use super::exposition::{ExpositionWriter, MetricKind};

/// What Redis says; `None`: it doesn't, or has no such thing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RedisServerMetrics {
    /// What this instance asked of it so far.
    pub calls: u64,
    pub memory_bytes: Option<u64>,
    /// `maxmemory`; `None` also without a limit.
    pub memory_max_bytes: Option<u64>,
    /// Its eviction policy forgets counters when memory is full.
    pub may_evict: Option<bool>,
    /// This machine's clock minus its own, in µs; as exact as half a round trip.
    pub clock_skew_us: Option<i64>,
}

pub(super) fn write_store_metrics(page: &mut ExpositionWriter, status: &ProcessStatus) {
    page.begin_family(
        MetricKind::Gauge,
        "tidegate_store_up",
        "Whether the store answers: 1, or 0.",
    )
    .write_sample(&[], status.store_up.into());
    page.begin_family(
        MetricKind::Gauge,
        "tidegate_breaker_open",
        "Whether failures keep requests from asking Redis: 1, or 0.",
    )
    .write_sample(&[], status.breaker_open.into());
    let mut errors = page.begin_family(
        MetricKind::Counter,
        "tidegate_store_errors",
        "Failures of the store by kind.",
    );
    for (kind, count) in &status.store_errors {
        errors.write_sample(&[("kind", kind)], *count);
    }
    if let Some(instances) = status.instance_count {
        page.begin_family(
            MetricKind::Gauge,
            "tidegate_instances",
            "Instances that share this one's limits, as last seen in Redis; before that store.redis.instances.",
        )
        .write_sample(&[], instances.into());
    }
    if let Some(units) = status.lease_units_lost {
        page.begin_family(
            MetricKind::Counter,
            "tidegate_lease_units_lost",
            "Units lent and not used of whose return Redis was not told, as far as is known: they count until they leave.",
        )
        .write_sample(&[], units);
    }
    if let Some(vitals) = &status.redis {
        write_redis_metrics(page, vitals);
    }
    let Some(memory) = status.memory else {
        return;
    };
    page.begin_family(
        MetricKind::Gauge,
        "tidegate_store_memory_keys",
        "Counters in the memory store.",
    )
    .write_sample(&[], memory.keys as u64);
    page.begin_family(
        MetricKind::Gauge,
        "tidegate_store_memory_bytes",
        "Bytes that they take, estimated.",
    )
    .write_sample(&[], memory.bytes as u64);
    page.begin_family(
        MetricKind::Counter,
        "tidegate_store_memory_evictions",
        "Counters that the memory store dropped while they still mattered.",
    )
    .write_sample(&[], memory.evictions);
}

fn write_redis_metrics(page: &mut ExpositionWriter, redis: &RedisServerMetrics) {
    page.begin_family(
        MetricKind::Counter,
        "tidegate_redis_calls",
        "Calls to Redis by this instance, for requests and in the background; one can decide several requests.",
    )
    .write_sample(&[], redis.calls);
    if let Some(bytes) = redis.memory_bytes {
        let help = "Memory that Redis uses, as it says; of a cluster the sum over its masters.";
        page.begin_family(MetricKind::Gauge, "tidegate_redis_memory_bytes", help)
            .write_sample(&[], bytes);
    }
    if let Some(bytes) = redis.memory_max_bytes {
        let help = "Redis' maxmemory, if it has one; of a cluster the sum over its masters.";
        page.begin_family(MetricKind::Gauge, "tidegate_redis_memory_max_bytes", help)
            .write_sample(&[], bytes);
    }
    if let Some(may_evict) = redis.may_evict {
        let help =
            "Whether Redis' maxmemory-policy lets it forget counters when memory is full: 1, or 0.";
        page.begin_family(MetricKind::Gauge, "tidegate_redis_may_evict", help)
            .write_sample(&[], may_evict.into());
    }
    if let Some(skew_us) = redis.clock_skew_us {
        let help = "This machine's clock minus that of Redis, half a round trip taken off; of a cluster the largest.";
        page.begin_family(MetricKind::Gauge, "tidegate_redis_clock_skew_seconds", help)
            .write_micros_as_seconds(skew_us);
    }
}
