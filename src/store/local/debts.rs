//! What was admitted without Redis, until that knows.

use crate::limiter::{Algorithm, Amendment, Charge, Key, Limit};
use crate::store::memory::{Id, id};
use indexmap::IndexMap;
use std::collections::VecDeque;

/// Keys that are noted at a time, about 300 bytes each. Who comes with more of them is not written back: each has a
/// quota of its own.
const MAX_KEYS: usize = 1 << 16;

/// Entries of all keys together, 16 bytes each. When there are so many, no key gets another: what it takes joins
/// its newest, as of now.
const MAX_ENTRIES: usize = 1 << 18;

/// A period is noted in so many parts: what falls into one is written back as of the latest of it, a little too late
/// and never too early. Parts that count no more are dropped.
const PARTS: u64 = 64;

/// Amendments that are wanted at a time, at least.
const PORTION: usize = 64;

#[derive(Debug, Default)]
pub(super) struct Debts {
    by_counter: IndexMap<Id, Debt, foldhash::fast::RandomState>,
    entries: usize,
}

/// What one counter has to be told.
#[derive(Clone, Debug)]
pub(super) struct Debt {
    limit: Limit,
    key: Key,
    /// Which part of the store keeps it.
    part: u16,
    /// Oldest first. Of buckets, whose debt has no age, one.
    spent: VecDeque<Spent>,
    /// Taken and not given back; of `concurrency` only.
    slots: Vec<u128>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Spent {
    /// When the last of them was taken, by the local clock.
    at_us: u64,
    units: u64,
}

impl Debts {
    pub(super) fn is_empty(&self) -> bool {
        self.by_counter.is_empty()
    }

    /// Notes what was admitted at `now_us`, of a counter in a part of the store.
    pub(super) fn note(&mut self, charge: &Charge<'_>, part: u16, now_us: u64) {
        // Who was refused, and for how long, is each instance's own affair.
        if charge.is_block() {
            return;
        }
        let id = id(charge.limit, charge.key);
        if self.by_counter.len() >= MAX_KEYS && !self.by_counter.contains_key(&id) {
            return;
        }
        let debt = self.by_counter.entry(id).or_insert_with(|| Debt {
            limit: *charge.limit,
            key: charge.key.clone(),
            part,
            spent: VecDeque::new(),
            slots: Vec::new(),
        });
        debt.limit = *charge.limit;
        if let Algorithm::Concurrency { .. } = charge.limit.algorithm {
            return debt.slots.push(charge.slot);
        }
        self.entries -= debt.spent.len();
        debt.add(
            Spent {
                at_us: now_us,
                units: charge.cost,
            },
            self.entries < MAX_ENTRIES,
        );
        self.entries += debt.spent.len();
    }

    /// A slot was given back: nothing is owed for it.
    pub(super) fn release(&mut self, limit: &Limit, key: &Key, slot: u128) {
        if let Some(debt) = self.by_counter.get_mut(&id(limit, key)) {
            debt.slots.retain(|held| *held != slot);
        }
    }

    /// Takes out whole debts of the parts that are there, until there is enough for a call.
    pub(super) fn take(&mut self, is_there: impl Fn(u16) -> bool) -> Vec<Debt> {
        let (mut taken, mut count) = (Vec::new(), 0);
        for at in (0..self.by_counter.len()).rev() {
            if count >= PORTION {
                break;
            }
            let is_wanted = self
                .by_counter
                .get_index(at)
                .is_some_and(|(_, debt)| is_there(debt.part));
            // The last takes its place, which was looked at before.
            if is_wanted && let Some((_, debt)) = self.by_counter.swap_remove_index(at) {
                count += debt.spent.len() + debt.slots.len();
                self.entries -= debt.spent.len();
                taken.push(debt);
            }
        }
        taken
    }

    /// Notes again what was taken out.
    pub(super) fn put_back(&mut self, taken: impl Iterator<Item = Debt>) {
        for mut debt in taken {
            let id = debt.id();
            if let Some(newer) = self.by_counter.swap_remove(&id) {
                self.entries -= newer.spent.len();
                debt.limit = newer.limit;
                debt.slots.extend(newer.slots);
                newer
                    .spent
                    .into_iter()
                    .for_each(|spent| debt.add(spent, true));
            }
            self.entries += debt.spent.len();
            self.by_counter.insert(id, debt);
        }
    }
}

impl Debt {
    pub(super) fn id(&self) -> Id {
        id(&self.limit, &self.key)
    }

    /// What Redis has to be told at `now_us`, if the key uses so many units of its share now. Where units have no age
    /// of their own, what is paid back already need not be told.
    pub(super) fn amendments(
        &self,
        now_us: u64,
        used: impl Fn(&Limit, &Key) -> u64,
    ) -> impl Iterator<Item = (Limit, Key, Amendment)> {
        let most = if is_bucket(&self.limit) {
            used(&self.limit, &self.key)
        } else {
            u64::MAX
        };
        let back = move |spent: &Spent| Amendment::Back {
            units: spent.units.min(most),
            age_us: if most == u64::MAX {
                now_us.saturating_sub(spent.at_us)
            } else {
                0
            },
        };
        let counting = self
            .spent
            .iter()
            .filter(move |spent| counts(&self.limit, spent.at_us, now_us));
        let slots = self
            .slots
            .iter()
            .map(|slot| Amendment::Renew { slot: *slot });
        counting
            .map(back)
            .chain(slots)
            .map(|amendment| (self.limit, self.key.clone(), amendment))
    }

    fn add(&mut self, new: Spent, may_grow: bool) {
        let part = |at_us: u64| match self.limit.algorithm {
            Algorithm::FixedWindow { offset_us } => at_us.saturating_sub(offset_us),
            _ => at_us,
        } / (self.limit.per_us / PARTS).max(1);
        match self.spent.back_mut() {
            Some(last)
                if is_bucket(&self.limit) || !may_grow || part(last.at_us) == part(new.at_us) =>
            {
                *last = Spent {
                    units: last.units.saturating_add(new.units),
                    ..new
                };
            }
            _ => self.spent.push_back(new),
        }
        while self
            .spent
            .front()
            .is_some_and(|oldest| !counts(&self.limit, oldest.at_us, new.at_us))
        {
            self.spent.pop_front();
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
fn counts(limit: &Limit, at_us: u64, now_us: u64) -> bool {
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
