//! What was admitted without Redis, until that knows.

use crate::limiter::{Algorithm, Amendment, Charge, Key, Limit};
use crate::store::memory::{CounterId, counter_id};
use indexmap::IndexMap;
use std::collections::VecDeque;

/// Keys that are noted at a time, about 300 bytes each. Who comes with more of them is not written back: each has a
/// quota of its own.
const MAX_KEYS: usize = 1 << 16;

/// Entries of all keys together, 16 bytes each. When there are so many, no key gets another: what it takes joins
/// its newest, as of now.
const MAX_USAGE_ENTRIES: usize = 1 << 18;

/// A period is noted in so many parts: what falls into one is written back as of the latest of it, a little too late
/// and never too early. Parts that count no more are dropped.
const SUBPERIODS: u64 = 64;

/// Amendments that are wanted at a time, at least.
const MIN_BATCH_AMENDMENTS: usize = 64;

#[derive(Debug, Default)]
pub(super) struct WriteBackTable {
    by_counter: IndexMap<CounterId, CounterWriteBack, foldhash::fast::RandomState>,
    usage_entry_count: usize,
}

/// What one counter has to be told.
#[derive(Clone, Debug)]
pub(super) struct CounterWriteBack {
    limit: Limit,
    key: Key,
    /// Which part of the store keeps it.
    partition: u16,
    /// Oldest first. Of buckets, whose debt has no age, one.
    usage: VecDeque<UsageEntry>,
    /// Taken and not given back; of `concurrency` only.
    held_slots: Vec<u128>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct UsageEntry {
    /// When the last of them was taken, by the local clock.
    at_us: u64,
    units: u64,
}

impl WriteBackTable {
    pub(super) fn is_empty(&self) -> bool {
        self.by_counter.is_empty()
    }

    /// Notes what was admitted at `now_us`, of a counter in a part of the store.
    pub(super) fn record_charge(&mut self, charge: &Charge<'_>, partition: u16, now_us: u64) {
        // Who was refused, and for how long, is each instance's own affair.
        if charge.is_block() {
            return;
        }
        let id = counter_id(charge.limit, charge.key);
        if self.by_counter.len() >= MAX_KEYS && !self.by_counter.contains_key(&id) {
            return;
        }
        let pending = self
            .by_counter
            .entry(id)
            .or_insert_with(|| CounterWriteBack {
                limit: *charge.limit,
                key: charge.key.clone(),
                partition,
                usage: VecDeque::new(),
                held_slots: Vec::new(),
            });
        pending.limit = *charge.limit;
        if let Algorithm::Concurrency { .. } = charge.limit.algorithm {
            return pending.held_slots.push(charge.slot_id);
        }
        self.usage_entry_count -= pending.usage.len();
        pending.add_usage(
            UsageEntry {
                at_us: now_us,
                units: charge.cost,
            },
            self.usage_entry_count < MAX_USAGE_ENTRIES,
        );
        self.usage_entry_count += pending.usage.len();
    }

    /// A slot was given back: nothing is owed for it.
    pub(super) fn release_slot(&mut self, limit: &Limit, key: &Key, slot: u128) {
        if let Some(debt) = self.by_counter.get_mut(&counter_id(limit, key)) {
            debt.held_slots.retain(|held| *held != slot);
        }
    }

    /// Takes out whole debts of the parts that are there, until there is enough for a call.
    pub(super) fn take_batch(
        &mut self,
        is_reachable: impl Fn(u16) -> bool,
    ) -> Vec<CounterWriteBack> {
        let (mut batch, mut amendment_count) = (Vec::new(), 0);
        for at in (0..self.by_counter.len()).rev() {
            if amendment_count >= MIN_BATCH_AMENDMENTS {
                break;
            }
            let is_wanted = self
                .by_counter
                .get_index(at)
                .is_some_and(|(_, debt)| is_reachable(debt.partition));
            // The last takes its place, which was looked at before.
            if is_wanted && let Some((_, debt)) = self.by_counter.swap_remove_index(at) {
                amendment_count += debt.usage.len() + debt.held_slots.len();
                self.usage_entry_count -= debt.usage.len();
                batch.push(debt);
            }
        }
        batch
    }

    /// Notes again what was taken out.
    pub(super) fn merge_batch(&mut self, batch: impl Iterator<Item = CounterWriteBack>) {
        for mut debt in batch {
            let id = debt.counter_id();
            if let Some(newer) = self.by_counter.swap_remove(&id) {
                self.usage_entry_count -= newer.usage.len();
                debt.limit = newer.limit;
                debt.held_slots.extend(newer.held_slots);
                newer
                    .usage
                    .into_iter()
                    .for_each(|spent| debt.add_usage(spent, true));
            }
            self.usage_entry_count += debt.usage.len();
            self.by_counter.insert(id, debt);
        }
    }
}

impl CounterWriteBack {
    pub(super) fn counter_id(&self) -> CounterId {
        counter_id(&self.limit, &self.key)
    }

    /// What Redis has to be told at `now_us`, if the key uses so many units of its share now. Where units have no age
    /// of their own, what is paid back already need not be told.
    pub(super) fn amendments(
        &self,
        now_us: u64,
        units_in_use: impl Fn(&Limit, &Key) -> u64,
    ) -> impl Iterator<Item = (Limit, Key, Amendment)> {
        let max_units = if is_bucket(&self.limit) {
            units_in_use(&self.limit, &self.key)
        } else {
            u64::MAX
        };
        let to_amendment = move |spent: &UsageEntry| Amendment::BackdatedCharge {
            units: spent.units.min(max_units),
            age_us: if max_units == u64::MAX {
                now_us.saturating_sub(spent.at_us)
            } else {
                0
            },
        };
        let in_use = self
            .usage
            .iter()
            .filter(move |spent| may_be_in_use(&self.limit, spent.at_us, now_us));
        let slots = self
            .held_slots
            .iter()
            .map(|slot| Amendment::Renew { slot: *slot });
        in_use
            .map(to_amendment)
            .chain(slots)
            .map(|amendment| (self.limit, self.key.clone(), amendment))
    }

    fn add_usage(&mut self, entry: UsageEntry, may_grow: bool) {
        let subperiod = |at_us: u64| match self.limit.algorithm {
            Algorithm::FixedWindow { offset_us } => at_us.saturating_sub(offset_us),
            _ => at_us,
        } / (self.limit.per_us / SUBPERIODS).max(1);
        match self.usage.back_mut() {
            Some(last)
                if is_bucket(&self.limit)
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

fn is_bucket(limit: &Limit) -> bool {
    matches!(
        limit.algorithm,
        Algorithm::TokenBucket { .. } | Algorithm::LeakyBucket { .. }
    )
}

/// Whether units that were taken at a time may still be in use.
fn may_be_in_use(limit: &Limit, at_us: u64, now_us: u64) -> bool {
    let per_us = limit.per_us.max(1);
    match limit.algorithm {
        Algorithm::FixedWindow { offset_us } => {
            let window = |at_us: u64| at_us.checked_sub(offset_us).map(|since| since / per_us);
            window(at_us) == window(now_us)
        }
        Algorithm::SlidingWindow { .. } => {
            now_us.saturating_sub(at_us) < per_us + limit.sub_window_us()
        }
        _ => is_bucket(limit) || now_us.saturating_sub(at_us) < per_us,
    }
}
