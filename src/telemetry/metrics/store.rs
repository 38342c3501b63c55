//! The store's part of the page, and what Redis was last seen to say of itself.

use super::Observed;
use super::page::{Kind, Page};

/// What Redis says; `None`: it doesn't, or has no such thing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RedisVitals {
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

pub(super) fn write(page: &mut Page, observed: &Observed) {
    page.family(
        Kind::Gauge,
        "tidegate_store_up",
        "Whether the store answers: 1, or 0.",
    )
    .sample(&[], observed.store_up.into());
    page.family(
        Kind::Gauge,
        "tidegate_breaker_open",
        "Whether failures keep requests from asking Redis: 1, or 0.",
    )
    .sample(&[], observed.breaker_open.into());
    let mut errors = page.family(
        Kind::Counter,
        "tidegate_store_errors",
        "Failures of the store by kind.",
    );
    for (kind, count) in &observed.store_errors {
        errors.sample(&[("kind", kind)], *count);
    }
    if let Some(instances) = observed.instances {
        page.family(
            Kind::Gauge,
            "tidegate_instances",
            "Instances that share this one's limits, as last seen in Redis; before that store.redis.instances.",
        )
        .sample(&[], instances.into());
    }
    if let Some(units) = observed.lease_units_lost {
        page.family(
            Kind::Counter,
            "tidegate_lease_units_lost",
            "Units lent and not used of whose return Redis was not told, as far as is known: they count until they leave.",
        )
        .sample(&[], units);
    }
    if let Some(vitals) = &observed.redis {
        write_redis(page, vitals);
    }
    let Some(memory) = observed.memory else {
        return;
    };
    page.family(
        Kind::Gauge,
        "tidegate_store_memory_keys",
        "Counters in the memory store.",
    )
    .sample(&[], memory.keys as u64);
    page.family(
        Kind::Gauge,
        "tidegate_store_memory_bytes",
        "Bytes that they take, estimated.",
    )
    .sample(&[], memory.bytes as u64);
    page.family(
        Kind::Counter,
        "tidegate_store_memory_evictions",
        "Counters that the memory store dropped while they still mattered.",
    )
    .sample(&[], memory.evictions);
}

fn write_redis(page: &mut Page, vitals: &RedisVitals) {
    page.family(
        Kind::Counter,
        "tidegate_redis_calls",
        "Calls to Redis by this instance, for requests and in the background; one can decide several requests.",
    )
    .sample(&[], vitals.calls);
    if let Some(bytes) = vitals.memory_bytes {
        let help = "Memory that Redis uses, as it says; of a cluster the sum over its masters.";
        page.family(Kind::Gauge, "tidegate_redis_memory_bytes", help)
            .sample(&[], bytes);
    }
    if let Some(bytes) = vitals.memory_max_bytes {
        let help = "Redis' maxmemory, if it has one; of a cluster the sum over its masters.";
        page.family(Kind::Gauge, "tidegate_redis_memory_max_bytes", help)
            .sample(&[], bytes);
    }
    if let Some(may_evict) = vitals.may_evict {
        let help =
            "Whether Redis' maxmemory-policy lets it forget counters when memory is full: 1, or 0.";
        page.family(Kind::Gauge, "tidegate_redis_may_evict", help)
            .sample(&[], may_evict.into());
    }
    if let Some(skew_us) = vitals.clock_skew_us {
        let help = "This machine's clock minus that of Redis, half a round trip taken off; of a cluster the largest.";
        page.family(Kind::Gauge, "tidegate_redis_clock_skew_seconds", help)
            .micros(skew_us);
    }
}
