//! Metrics of the store.

use super::output::MetricOutput;
use super::status::{ProcessStatus, RedisServerMetrics};

pub(super) fn write_store_metrics(page: &mut dyn MetricOutput, status: &ProcessStatus) {
    page.gauge(
        "tidegate_store_up",
        "Whether the store is available (1) or not (0).",
    )
    .write_sample(&[], status.store_up.into());
    page.gauge(
        "tidegate_breaker_open",
        "Whether the circuit breaker blocks calls to Redis (1) or not (0).",
    )
    .write_sample(&[], status.breaker_open.into());
    page.counter("tidegate_store_errors", "Store errors by kind.")
        .write_counts("kind", status.store_errors.iter().copied());
    if let Some(instances) = status.instance_count {
        page.gauge(
            "tidegate_instances",
            "Instances that share the limits, as last read from Redis; before the first read, store.redis.instances.",
        )
        .write_sample(&[], instances.into());
    }
    if let Some(units) = status.lease_units_lost {
        page.counter(
            "tidegate_lease_units_lost",
            "Unused leased units that could not be returned to Redis. They stay charged until they expire.",
        )
        .write_sample(&[], units);
    }
    if let Some(redis) = &status.redis {
        write_redis_metrics(page, redis);
    }
    let Some(memory) = status.memory else {
        return;
    };
    page.gauge(
        "tidegate_store_memory_keys",
        "Counters in the memory store.",
    )
    .write_sample(&[], memory.keys as u64);
    page.gauge(
        "tidegate_store_memory_bytes",
        "Estimated size of the counters in the memory store in bytes.",
    )
    .write_sample(&[], memory.bytes as u64);
    page.counter(
        "tidegate_store_memory_evictions",
        "Counters that the memory store evicted before they expired.",
    )
    .write_sample(&[], memory.evictions);
}

fn write_redis_metrics(page: &mut dyn MetricOutput, redis: &RedisServerMetrics) {
    page.counter(
        "tidegate_redis_calls",
        "Calls of this instance to Redis, for requests and in the background. One call may decide several requests.",
    )
    .write_sample(&[], redis.calls);
    page.counter(
        "tidegate_redis_sentinel_disagreements",
        "Checks, four per second and worker, that found sentinels with different masters.",
    )
    .write_sample(&[], redis.sentinel_disagreements);
    page.counter(
        "tidegate_override_changes",
        "Changes of key overrides that this instance noticed in Redis: set, replaced, removed, expired, or seen for the first time since the start or an eviction from its cache.",
    )
    .write_sample(&[], redis.override_changes);
    page.counter(
        "tidegate_foreign_overrides",
        "Decisions that ignored a foreign value in the Redis key of an override.",
    )
    .write_sample(&[], redis.foreign_overrides);
    if let Some(bytes) = redis.memory_bytes {
        let help = "Memory used by Redis in bytes; in a cluster, the sum over its masters.";
        page.gauge("tidegate_redis_memory_bytes", help)
            .write_sample(&[], bytes);
    }
    if let Some(bytes) = redis.memory_max_bytes {
        let help =
            "maxmemory of Redis in bytes, if configured; in a cluster, the sum over its masters.";
        page.gauge("tidegate_redis_memory_max_bytes", help)
            .write_sample(&[], bytes);
    }
    if let Some(may_evict) = redis.may_evict {
        let help = "Whether the maxmemory-policy of Redis may evict counters when memory is full (1) or not (0).";
        page.gauge("tidegate_redis_may_evict", help)
            .write_sample(&[], may_evict.into());
    }
    if let Some(skew_us) = redis.clock_skew_us {
        let help = "Clock of this machine minus the clock of Redis, corrected by half a round trip; in a cluster, the largest difference.";
        page.gauge("tidegate_redis_clock_skew_seconds", help)
            .write_micros_as_seconds(skew_us);
    }
}
