//! Exports the usage of an outage for a later process, and restores it in that process.

use super::outage_usage::{OutageCounter, OutageUsage};
use super::write_back::{CounterWriteBack, is_bucket, may_be_in_use};
use super::{FallbackStore, PHASE_UP_TO_DATE, UsageEntry};
use crate::limiter::{Algorithm, Amendment, Charge, Key, Limit};
use crate::store::Settlement;

impl FallbackStore {
    /// What a later process needs to continue this outage. `None` if Redis has all usage.
    /// `wall_clock_us`: the current wall clock.
    pub(in crate::store) fn export_usage(&self, wall_clock_us: u64) -> Option<OutageUsage> {
        if self.phase() == PHASE_UP_TO_DATE {
            return None;
        }
        let now_us = self.clock.now_us();
        // The statuses are exported before the table is locked, because other callers lock the
        // table while they hold the lock of a status shard.
        let statuses = self.status_cache.export_statuses(now_us);
        let mut table = self.write_back.lock();
        table.finish_batch(|_| false);
        Some(OutageUsage {
            saved_at_us: wall_clock_us,
            share: self.share(),
            stale_partitions: self.stale_partitions.to_vec(),
            counters: table
                .iter()
                .filter_map(|(limit, key, usage)| {
                    self.counter_for_later_process(limit, key, usage, now_us)
                })
                .collect(),
            statuses,
        })
    }

    fn counter_for_later_process<'u>(
        &self,
        limit: &Limit,
        key: &Key,
        usage: impl Iterator<Item = &'u UsageEntry>,
        now_us: u64,
    ) -> Option<OutageCounter> {
        if let Algorithm::Concurrency { .. } = limit.algorithm {
            return None;
        }
        let usage: Vec<UsageEntry> = usage
            .filter(|entry| may_be_in_use(limit, entry.at_us, now_us))
            .map(|entry| UsageEntry {
                at_us: now_us.saturating_sub(entry.at_us),
                ..*entry
            })
            .collect();
        let (units_in_use, next_growth_us) = self.usage_of_share(limit, key);
        // The entries of a bucket have no age: all its usage counts as one charge now.
        let known_units = if is_bucket(limit) {
            0
        } else {
            usage.iter().map(|entry| entry.units).sum()
        };
        let other_age_us = match limit.algorithm {
            Algorithm::Block => {
                let ends_in_us = next_growth_us.unwrap_or(now_us).saturating_sub(now_us);
                limit.per_us.saturating_sub(ends_in_us)
            }
            _ => 0,
        };
        (units_in_use > 0 || !usage.is_empty()).then(|| OutageCounter {
            limit: *limit,
            key: key.clone(),
            other_units: units_in_use.saturating_sub(known_units),
            other_age_us,
            usage,
        })
    }

    /// Continues the outage of a process that stopped `downtime_us` ago.
    pub(in crate::store) fn restore_usage(&self, usage: OutageUsage, downtime_us: u64) {
        self.set_share(usage.share);
        self.status_cache
            .restore_statuses(&usage.statuses, self.clock.now_us(), downtime_us);
        let mut partitions = usage.stale_partitions;
        for counter in usage.counters {
            let partition = self.partition(&counter.key);
            partitions.push(partition);
            self.restore_counter(counter, partition, downtime_us);
        }
        self.mark_partitions_unreachable(partitions);
    }

    fn restore_counter(&self, counter: OutageCounter, partition: u16, downtime_us: u64) {
        let OutageCounter {
            limit, key, usage, ..
        } = counter;
        let share_limit = self.share().scale_limit(&limit);
        let charge_share = |units: u64, age_us: u64| {
            let amendment = Amendment::BackdatedCharge {
                units,
                age_us: age_us.saturating_add(downtime_us),
            };
            self.memory.apply_settlements(&[Settlement {
                limit: &share_limit,
                key: &key,
                amendment,
            }]);
        };
        for entry in usage.iter().filter(|_| !is_bucket(&limit)) {
            charge_share(entry.units, entry.at_us);
        }
        if counter.other_units > 0 {
            charge_share(counter.other_units, counter.other_age_us);
        }
        let now_us = self.clock.now_us();
        let usage = usage.into_iter().map(|entry| UsageEntry {
            at_us: now_us.saturating_sub(entry.at_us.saturating_add(downtime_us)),
            ..entry
        });
        let mut table = self.write_back.lock();
        table.record_counter_without_usage(&Charge::new(&limit, &key, 0));
        table.merge_older_usage(CounterWriteBack::new(
            limit,
            key,
            partition,
            usage.collect(),
        ));
    }
}
