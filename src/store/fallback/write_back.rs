//! Charges admitted without Redis, until they are written back.

use crate::limiter::{Algorithm, Amendment, Charge, CounterRef, Key, Limit};
use crate::store::PendingSettlement;
use crate::store::memory::{CounterId, counter_id};
use indexmap::IndexMap;
use std::collections::{HashMap, VecDeque};

/// Maximum number of counters, about 300 bytes each. Further counters are not written back.
const MAX_COUNTERS: usize = 1 << 16;

/// Maximum number of usage entries of all counters, 16 bytes each. Above this number, units are
/// added to the newest entry of their counter, with the current time.
const MAX_USAGE_ENTRIES: usize = 1 << 18;

/// Resolution of usage entries: a period is divided into this many parts. Units of one part are
/// written back with the time of its last charge: slightly too late, never too early. Expired parts
/// are dropped.
const SUBPERIODS_PER_PERIOD: u64 = 64;

/// Minimum number of amendments per batch, if there are that many.
const MIN_BATCH_AMENDMENTS: usize = 64;

#[derive(Debug, Default)]
pub(super) struct WriteBackTable {
    /// Counters with usage to write back.
    by_counter: IndexMap<CounterId, CounterWriteBack, foldhash::fast::RandomState>,
    /// The batch that is being written. If the writing task is aborted, the batch stays here.
    sending: Vec<CounterWriteBack>,
    /// All other counters that were decided in this process in an outage. They stay while their
    /// units are in use: a later outage continues from them.
    without_usage: HashMap<CounterId, CounterWriteBack, foldhash::fast::RandomState>,
    usage_entry_count: usize,
}

/// Pending write-back of one counter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CounterWriteBack {
    pub(super) limit: Limit,
    pub(super) key: Key,
    /// Partition of the store that holds the counter.
    pub(super) partition: u16,
    /// Oldest first. A bucket has one entry, because its debt has no age.
    pub(super) usage: VecDeque<UsageEntry>,
    /// Renewals of slots in use, and releases of slots that an earlier batch may take again; for
    /// `concurrency` only.
    slot_calls: Vec<Amendment>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UsageEntry {
    /// Time of the last charge in this entry, by the local clock (µs).
    pub(super) at_us: u64,
    pub(super) units: u64,
}

impl WriteBackTable {
    pub(super) fn is_empty(&self) -> bool {
        self.by_counter.is_empty() && self.sending.is_empty()
    }

    /// Records a charge that was admitted at `now_us`.
    pub(super) fn record_charge(&mut self, charge: &Charge<'_, '_>, partition: u16, now_us: u64) {
        // Blocks are not shared: each instance blocks the clients that it rejected itself.
        if charge.is_block() {
            return;
        }
        let id = counter_id(charge.counter());
        if self.by_counter.len() >= MAX_COUNTERS && !self.by_counter.contains_key(&id) {
            return;
        }
        let pending = self.by_counter.entry(id).or_insert_with(|| {
            let known = self.without_usage.remove(&id);
            known.unwrap_or_else(|| CounterWriteBack::new(charge.counter(), partition))
        });
        pending.limit = *charge.limit;
        if charge.limit.algorithm.counts_slots() {
            let slot = charge.policy.slot_id;
            return pending.slot_calls.push(Amendment::Renew { slot });
        }
        self.usage_entry_count -= pending.usage.len();
        let entry = UsageEntry {
            at_us: now_us,
            units: charge.cost,
        };
        pending.add_usage(entry, self.usage_entry_count < MAX_USAGE_ENTRIES);
        self.usage_entry_count += pending.usage.len();
    }

    /// Records that a counter was decided in this process, even if no units were charged.
    pub(super) fn record_counter(&mut self, charge: &Charge<'_, '_>, partition: u16) {
        self.merge_older_usage(CounterWriteBack::new(charge.counter(), partition));
    }

    /// Removes the counters whose usage is written back and whose units are free again.
    pub(super) fn retain_counters_in_use(&mut self, is_in_use: impl Fn(CounterRef<'_>) -> bool) {
        self.without_usage
            .retain(|_, counter| is_in_use(counter.counter()));
        self.without_usage.shrink_to_fit();
    }

    /// All counters of this process's share whose units may be in use.
    pub(super) fn iter(&self) -> impl Iterator<Item = &CounterWriteBack> {
        self.by_counter.values().chain(self.without_usage.values())
    }

    /// Removes a released slot, so that it is not written back. If its batch is being sent, Redis
    /// may take the slot after the release, so the next batch releases it again.
    pub(super) fn remove_released_slot(&mut self, counter: CounterRef<'_>, slot: u128) {
        let id = counter_id(counter);
        if let Some(pending) = self.by_counter.get_mut(&id) {
            pending.remove_slot(slot);
        }
        let mut sending = self.sending.iter_mut();
        let sent = sending.find(|sent| sent.id() == id);
        let release = sent.and_then(|sent| {
            sent.remove_slot(slot).then(|| CounterWriteBack {
                slot_calls: vec![Amendment::Release { slot }],
                ..CounterWriteBack::new(counter, sent.partition)
            })
        });
        if let Some(release) = release {
            self.merge_older_usage(release);
        }
    }

    /// Takes whole counters of reachable partitions until the batch is large enough.
    pub(super) fn take_batch(&mut self, is_reachable: impl Fn(u16) -> bool) -> &[CounterWriteBack] {
        self.finish_batch(|_| false);
        let mut amendment_count = 0;
        for at in (0..self.by_counter.len()).rev() {
            if amendment_count >= MIN_BATCH_AMENDMENTS {
                break;
            }
            let is_wanted = self
                .by_counter
                .get_index(at)
                .is_some_and(|(_, pending)| is_reachable(pending.partition));
            // `swap_remove` moves the last entry to this index; that entry was already visited.
            if is_wanted && let Some((_, pending)) = self.by_counter.swap_remove_index(at) {
                amendment_count += pending.usage.len() + pending.slot_calls.len();
                self.usage_entry_count -= pending.usage.len();
                self.sending.push(pending);
            }
        }
        &self.sending
    }

    /// Ends the batch. Puts back the counters that were not written.
    pub(super) fn finish_batch(&mut self, is_written: impl Fn(CounterId) -> bool) {
        for mut pending in std::mem::take(&mut self.sending) {
            if is_written(pending.id()) {
                (pending.usage, pending.slot_calls) = Default::default();
            }
            self.merge_older_usage(pending);
        }
    }

    /// Adds a counter with usage that is older than its usage in the table.
    pub(super) fn merge_older_usage(&mut self, mut pending: CounterWriteBack) {
        let id = pending.id();
        if pending.usage.is_empty() && pending.slot_calls.is_empty() {
            if self.without_usage.len() < MAX_COUNTERS && !self.by_counter.contains_key(&id) {
                self.without_usage.insert(id, pending);
            }
            return;
        }
        if let Some(newer) = self.by_counter.swap_remove(&id) {
            self.usage_entry_count -= newer.usage.len();
            pending.limit = newer.limit;
            pending.slot_calls.extend(newer.slot_calls);
            for entry in newer.usage {
                pending.add_usage(entry, true);
            }
        }
        self.usage_entry_count += pending.usage.len();
        self.without_usage.remove(&id);
        self.by_counter.insert(id, pending);
    }
}

impl CounterWriteBack {
    pub(super) fn new(counter: CounterRef<'_>, partition: u16) -> Self {
        Self {
            limit: *counter.limit,
            key: counter.key.clone(),
            partition,
            usage: VecDeque::new(),
            slot_calls: Vec::new(),
        }
    }

    pub(super) fn counter(&self) -> CounterRef<'_> {
        CounterRef {
            limit: &self.limit,
            key: &self.key,
        }
    }

    fn id(&self) -> CounterId {
        counter_id(self.counter())
    }

    /// The usage to write back that may still be in use at `now_us`.
    pub(super) fn usage_in_use(&self, now_us: u64) -> impl Iterator<Item = &UsageEntry> {
        let usage = self.usage.iter();
        usage.filter(move |entry| may_be_in_use(&self.limit, entry.at_us, now_us))
    }

    /// The amendments to send to Redis at `now_us`. `units_in_use` returns the used units of this
    /// instance's share. The units of a bucket have no ages: at most the used units are written
    /// back, because all others have already drained.
    pub(super) fn amendments(
        &self,
        now_us: u64,
        units_in_use: impl Fn(CounterRef<'_>) -> u64,
    ) -> impl Iterator<Item = PendingSettlement> {
        let max_bucket_units = self
            .limit
            .algorithm
            .is_bucket()
            .then(|| units_in_use(self.counter()));
        let usage = self.usage_in_use(now_us).map(move |entry| {
            let (units, age_us) = match max_bucket_units {
                Some(max_units) => (entry.units.min(max_units), 0),
                None => (entry.units, now_us.saturating_sub(entry.at_us)),
            };
            Amendment::BackdatedCharge { units, age_us }
        });
        usage
            .chain(self.slot_calls.iter().copied())
            .map(|amendment| ((self.limit, self.key.clone()), amendment))
    }

    /// Removes the renewals of a slot. Returns whether there were any.
    fn remove_slot(&mut self, slot: u128) -> bool {
        let count = self.slot_calls.len();
        self.slot_calls
            .retain(|call| *call != Amendment::Renew { slot });
        self.slot_calls.len() < count
    }

    fn add_usage(&mut self, entry: UsageEntry, may_grow: bool) {
        let subperiod = |at_us: u64| {
            let start_us = if self.limit.algorithm.follows_wall_clock() {
                self.limit.window_at(at_us).start_us
            } else {
                0
            };
            let width_us = (self.limit.per_us / SUBPERIODS_PER_PERIOD).max(1);
            (start_us, (at_us - start_us) / width_us)
        };
        match self.usage.back_mut() {
            Some(last)
                if self.limit.algorithm.is_bucket()
                    || !may_grow
                    || subperiod(last.at_us) == subperiod(entry.at_us) =>
            {
                *last = UsageEntry {
                    units: last.units.saturating_add(entry.units),
                    ..entry
                };
            }
            _ => self.usage.push_back(entry),
        }
        while self
            .usage
            .front()
            .is_some_and(|oldest| !may_be_in_use(&self.limit, oldest.at_us, entry.at_us))
        {
            self.usage.pop_front();
        }
    }
}

/// Whether units charged at `at_us` may still be in use at `now_us`.
fn may_be_in_use(limit: &Limit, at_us: u64, now_us: u64) -> bool {
    let per_us = limit.per_us.max(1);
    let age_us = now_us.saturating_sub(at_us);
    match limit.algorithm {
        algorithm if algorithm.follows_wall_clock() => {
            limit.window_at(at_us) == limit.window_at(now_us)
        }
        Algorithm::SlidingWindow { .. } => age_us < per_us + limit.sub_window_width_us(),
        algorithm => algorithm.is_bucket() || age_us < per_us,
    }
}
