//! Exports the usage of an outage for a later process, and restores it in that process.

use super::outage_usage::OutageUsage;
use super::status_cache::CachedStatus;
use super::write_back::{CounterWriteBack, UsageEntry};
use super::{FallbackStore, OutagePhase};
use crate::limiter::{Algorithm, Amendment, CounterRef};
use std::sync::atomic::Ordering;

impl FallbackStore {
    /// What a later process needs to continue this outage. `None` if Redis has all usage.
    /// `wall_clock_us`: the current wall clock.
    pub(crate) fn export_usage(&self, wall_clock_us: u64) -> Option<OutageUsage> {
        // The statuses are exported before the table is locked, because other callers lock the
        // table while they hold the lock of a status shard.
        let statuses = self.status_cache.to_vec();
        let mut write_back = self.write_back.lock();
        write_back.finish_batch(|_| false);
        let now_us = self.clock.now_us();
        let counters = write_back.iter();
        (!self.is_in_phase(OutagePhase::UpToDate)).then(|| OutageUsage {
            saved_at_us: wall_clock_us,
            now_us,
            outage_ended_us: self.outage_ended_us.load(Ordering::Relaxed),
            share: self.share(),
            stale_partitions: self.stale_partitions.read().iter().copied().collect(),
            counters: counters
                .filter_map(|counter| self.export_counter(counter, now_us))
                .collect(),
            statuses,
        })
    }

    fn export_counter(
        &self,
        counter: &CounterWriteBack,
        now_us: u64,
    ) -> Option<(CounterWriteBack, UsageEntry)> {
        let limit = counter.limit;
        if let Algorithm::Concurrency { .. } = limit.algorithm {
            return None;
        }
        let mut exported = CounterWriteBack::new(counter.counter(), counter.partition);
        exported.usage = counter.usage_in_use(now_us).copied().collect();
        let (units_in_use, next_growth_us) = self.usage_of_share(counter.counter());
        // The entries of a bucket have no age: all its usage counts as one charge now.
        let known_units = if limit.is_bucket() {
            0
        } else {
            exported.usage.iter().map(|entry| entry.units).sum()
        };
        let at_us = match limit.algorithm {
            // A block lasts for `per_us` from its start.
            Algorithm::Block => next_growth_us.map_or(0, |ends| ends.saturating_sub(limit.per_us)),
            _ => now_us,
        };
        let other_usage = UsageEntry {
            at_us,
            units: units_in_use.saturating_sub(known_units),
        };
        (units_in_use > 0 || !exported.usage.is_empty()).then_some((exported, other_usage))
    }

    /// Continues the outage of a process that stopped `downtime_us` ago.
    pub(crate) fn restore_usage(&self, usage: OutageUsage, downtime_us: u64) {
        let now_us = self.clock.now_us();
        let to_local_time = |at_us: u64| {
            (at_us.saturating_add(now_us)).saturating_sub(usage.now_us.saturating_add(downtime_us))
        };
        self.set_share(usage.share);
        let ended_us = to_local_time(usage.outage_ended_us);
        self.outage_ended_us.store(ended_us, Ordering::Relaxed);
        for (id, status) in usage.statuses {
            let status = CachedStatus {
                remaining: status.remaining,
                received_at_us: to_local_time(status.received_at_us),
                block_ends_us: status.block_ends_us.map(to_local_time),
            };
            self.status_cache.replace(id, Some(status));
        }
        let mut partitions = usage.stale_partitions;
        for (mut counter, mut other_usage) in usage.counters {
            counter.partition = self.partition(&counter.key);
            partitions.push(counter.partition);
            for entry in counter.usage.iter_mut().chain([&mut other_usage]) {
                entry.at_us = to_local_time(entry.at_us);
            }
            self.restore_counter(counter, other_usage, now_us);
        }
        self.mark_partitions_unreachable(partitions);
    }

    fn restore_counter(&self, counter: CounterWriteBack, other_usage: UsageEntry, now_us: u64) {
        let limit = self.share().scale_limit(&counter.limit);
        let usage = counter.usage.iter().filter(|_| !limit.is_bucket());
        for entry in usage.chain([&other_usage]).filter(|entry| entry.units > 0) {
            let amendment = Amendment::BackdatedCharge {
                units: entry.units,
                age_us: now_us.saturating_sub(entry.at_us),
            };
            let counter = CounterRef {
                limit: &limit,
                key: &counter.key,
            };
            self.amend_share(counter, amendment);
        }
        self.write_back.lock().merge_older_usage(counter);
    }
}
