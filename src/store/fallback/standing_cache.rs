//! The last answer of Redis about each key of a `local` policy: where an outage begins for it.

use super::Share;
use crate::limiter::{Algorithm, Amendment, Charge, Limit, LimitStatus};
use crate::store::memory::{CounterId, counter_id};
use parking_lot::Mutex;
use std::collections::HashMap;

/// Answers remembered in each half of a part, about 100 bytes each: 16 MiB in all. Of more keys than that the latest
/// are known.
const MAX_GENERATION_ENTRIES: usize = 1 << 12;
const SHARD_COUNT: usize = 16;

#[derive(Debug, Default)]
pub(super) struct StandingCache([Mutex<StandingGenerations>; SHARD_COUNT]);

/// When the young are too many they become the old, which are forgotten.
#[derive(Debug, Default)]
struct StandingGenerations {
    current: StandingGeneration,
    previous: StandingGeneration,
}

type StandingGeneration = HashMap<CounterId, CachedStanding, foldhash::fast::RandomState>;

/// What was left, by the local clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CachedStanding {
    remaining: u64,
    received_at_us: u64,
    /// When a block ends.
    block_ends_us: Option<u64>,
}

impl StandingCache {
    /// Remembers how a counter stood at `at_us`, when Redis' clock showed `now_us`.
    pub(super) fn insert(
        &self,
        charge: &Charge<'_>,
        standing: LimitStatus,
        now_us: u64,
        received_at_us: u64,
    ) {
        let is_block = charge.limit.algorithm == Algorithm::Block;
        let ends = standing.next_growth_us.filter(|_| is_block);
        if is_block && ends.is_none() {
            return;
        }
        let ends_us =
            ends.map(|ends_us| received_at_us.saturating_add(ends_us.saturating_sub(now_us)));
        let answer = CachedStanding {
            remaining: standing.remaining,
            received_at_us,
            block_ends_us: ends_us,
        };
        if let Some(part) = self.shard(charge) {
            let mut generations = part.lock();
            if generations.current.len() >= MAX_GENERATION_ENTRIES {
                generations.previous = std::mem::take(&mut generations.current);
            }
            generations
                .current
                .insert(counter_id(charge.limit, charge.key), answer);
        }
    }

    /// Hands the last answer to `begin`, once: what is decided by it is newer. Whoever asks for it meanwhile waits: what
    /// he charges must not be forgotten by a counter that begins after it.
    pub(super) fn take_with(&self, charge: &Charge<'_>, apply: impl FnOnce(CachedStanding)) {
        let id = counter_id(charge.limit, charge.key);
        let Some(part) = self.shard(charge) else {
            return;
        };
        let mut generations = part.lock();
        let previous = generations.previous.remove(&id);
        if let Some(answer) = generations.current.remove(&id).or(previous) {
            apply(answer);
        }
    }

    fn shard(&self, charge: &Charge<'_>) -> Option<&Mutex<StandingGenerations>> {
        self.0
            .get(usize::try_from(charge.key.id() % SHARD_COUNT as u128).ok()?)
    }
}

impl CachedStanding {
    /// What an instance has used of its share `limit`, if its share of what remained then is what it may still use.
    ///
    /// Nobody knows how long the units had been in use: they count as taken when the answer came. That is too
    /// strict for a sliding window, and exact for all others.
    pub(super) fn to_amendment(self, share: Share, limit: &Limit, now_us: u64) -> Amendment {
        let age_us = now_us.saturating_sub(self.received_at_us);
        if let Some(ends_us) = self.block_ends_us {
            // It lasts for `per` from when it began.
            let block_start_us = ends_us.saturating_sub(limit.per_us);
            return Amendment::BackdatedCharge {
                units: 1,
                age_us: now_us.saturating_sub(block_start_us),
            };
        }
        let capacity = limit.capacity();
        Amendment::BackdatedCharge {
            units: capacity - share.scale_units(self.remaining).min(capacity),
            age_us,
        }
    }
}
