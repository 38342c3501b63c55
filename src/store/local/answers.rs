//! The last answer of Redis about each key of a `local` policy: where an outage begins for it.

use super::Share;
use crate::limiter::{Algorithm, Amendment, Charge, Limit, Standing};
use crate::store::memory::{Id, id};
use parking_lot::Mutex;
use std::collections::HashMap;

/// Answers remembered in each half of a part, about 100 bytes each: 16 MiB in all. Of more keys than that the latest
/// are known.
const MAX_HALF: usize = 1 << 12;
const PARTS: usize = 16;

#[derive(Debug, Default)]
pub(super) struct Answers([Mutex<Halves>; PARTS]);

/// When the young are too many they become the old, which are forgotten.
#[derive(Debug, Default)]
struct Halves {
    young: Map,
    old: Map,
}

type Map = HashMap<Id, Answer, foldhash::fast::RandomState>;

/// What was left, by the local clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Answer {
    remaining: u64,
    at_us: u64,
    /// When a block ends.
    ends_us: Option<u64>,
}

impl Answers {
    /// Remembers how a counter stood at `at_us`, when Redis' clock showed `now_us`.
    pub(super) fn insert(&self, charge: &Charge<'_>, standing: Standing, now_us: u64, at_us: u64) {
        let blocks = charge.limit.algorithm == Algorithm::Block;
        let ends = standing.grows_at_us.filter(|_| blocks);
        if blocks && ends.is_none() {
            return;
        }
        let ends_us = ends.map(|ends_us| at_us.saturating_add(ends_us.saturating_sub(now_us)));
        let answer = Answer {
            remaining: standing.remaining,
            at_us,
            ends_us,
        };
        if let Some(part) = self.part(charge) {
            let mut halves = part.lock();
            if halves.young.len() >= MAX_HALF {
                halves.old = std::mem::take(&mut halves.young);
            }
            halves.young.insert(id(charge.limit, charge.key), answer);
        }
    }

    /// Hands the last answer to `begin`, once: what is decided by it is newer. Whoever asks for it meanwhile waits: what
    /// he charges must not be forgotten by a counter that begins after it.
    pub(super) fn take(&self, charge: &Charge<'_>, begin: impl FnOnce(Answer)) {
        let id = id(charge.limit, charge.key);
        let Some(part) = self.part(charge) else {
            return;
        };
        let mut halves = part.lock();
        let old = halves.old.remove(&id);
        if let Some(answer) = halves.young.remove(&id).or(old) {
            begin(answer);
        }
    }

    fn part(&self, charge: &Charge<'_>) -> Option<&Mutex<Halves>> {
        self.0
            .get(usize::try_from(charge.key.id() % PARTS as u128).ok()?)
    }
}

impl Answer {
    /// What an instance has used of its share `limit`, if its share of what remained then is what it may still use.
    ///
    /// Nobody knows how long the units had been in use: they count as taken when the answer came. That is too
    /// strict for a sliding window, and exact for all others.
    pub(super) fn units_used(&self, share: Share, limit: &Limit, now_us: u64) -> Amendment {
        let age_us = now_us.saturating_sub(self.at_us);
        if let Some(ends_us) = self.ends_us {
            // It lasts for `per` from when it began.
            let began_us = ends_us.saturating_sub(limit.per_us);
            return Amendment::Back {
                units: 1,
                age_us: now_us.saturating_sub(began_us),
            };
        }
        let capacity = limit.capacity();
        Amendment::Back {
            units: capacity - share.of(self.remaining).min(capacity),
            age_us,
        }
    }
}
