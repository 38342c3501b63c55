//! Refusals that are still true, so that an exhausted key costs no round trip.
//!
//! While a sliding log or a window is full, room can only shrink until the time of the refusal has come. So a
//! refusal is the answer to any ask of at least that cost until then, counted from the moment of *sending*:
//! never longer than Redis would say. All or nothing does the rest: if one enforced limit refuses, none is
//! charged. At most [`LOOK`] each, so that what people reset by hand is felt soon; with leases [`LEASED_MAX_AGE`].
//!
//! One per worker, not per process: a lock that nobody else wants costs nothing, and a second worker that asks
//! once per second and key is cheap. The counter's identity and the limit's amount are in the key, so a reload
//! that changes either forgets by itself.

use crate::limiter::{Algorithm, Charge, Decision, Limit, LimitStatus, Refusal};
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::collections::HashMap;
use std::time::Duration;
use tokio::time::Instant;

/// The longest that a refusal is believed.
const MAX_AGE: Duration = Duration::from_secs(1);

/// The same of a policy with leases, or `ttl` if that is shorter: what others give back unused may come at any time, and
/// is told up to `ttl` late. Long enough to keep an exhausted key from asking Redis with every request.
const LEASED_MAX_AGE: Duration = Duration::from_millis(20);

/// Counters remembered in each half; about 1 MiB per half. When they are full, Redis is asked.
const MAX_GENERATION_ENTRIES: usize = 8192;

/// Recent refusals of one worker.
#[derive(Debug)]
pub struct DenyCache(Mutex<DenyGenerations>);

/// How much of an ask must be known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DenyMatchScope {
    /// Every enforced limit was seen within a [`LOOK`], at the same cost: refusal and time are Redis' own. A limit
    /// that was never seen might refuse for longer than the others, and the client would be told to come too early.
    AllLimits,
    /// One refusal of the same or a smaller cost: certainly refused, perhaps for longer than can be said.
    AnyLimit,
}

/// Nothing is believed for longer than a second, so dropping the older half every second loses nothing
/// and needs no sweep.
#[derive(Debug)]
struct DenyGenerations {
    current: DenyGeneration,
    previous: DenyGeneration,
    rotated_at: Option<Instant>,
}

type DenyGeneration = HashMap<DenyCacheKey, DenyCacheEntry, foldhash::fast::RandomState>;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct DenyCacheKey {
    key: u128,
    limit: Limit,
}

/// What a refused request learnt about one of its limits.
#[derive(Clone, Copy, Debug)]
struct DenyCacheEntry {
    cost: u64,
    standing: LimitStatus,
    /// The store's clock when it decided, and ours before and after.
    store_now_us: u64,
    sent_at: Instant,
    received_at: Instant,
}

impl Default for DenyCache {
    fn default() -> Self {
        let generations = DenyGenerations {
            current: DenyGeneration::default(),
            previous: DenyGeneration::default(),
            rotated_at: None,
        };
        Self(Mutex::new(generations))
    }
}

impl DenyCache {
    /// The refusal of `charges`, if one is known at `now`. Limits about which nothing certain is known are `None`.
    pub fn find_refusal(
        &self,
        charges: &[Charge<'_>],
        now: Instant,
        scope: DenyMatchScope,
    ) -> Option<Decision> {
        let generations = self.0.lock();
        if generations.current.is_empty() && generations.previous.is_empty() {
            return None;
        }
        let entries: SmallVec<[Option<DenyCacheEntry>; 4]> = charges
            .iter()
            .map(|charge| generations.get_entry(charge))
            .collect();
        drop(generations);
        let mut both = charges.iter().zip(&entries);
        let is_fresh = |seen: &Option<DenyCacheEntry>, charge| {
            seen.is_some_and(|seen| seen.is_fresh_for(charge, now))
        };
        if scope == DenyMatchScope::AllLimits
            && both.any(|(charge, seen)| must_be_cached(charge) && !is_fresh(seen, charge))
        {
            return None;
        }
        let both = charges.iter().zip(entries);
        let valid_entries: SmallVec<[Option<DenyCacheEntry>; 4]> = both
            .map(|(charge, seen)| seen.filter(|seen| seen.is_valid_for(charge, now, scope)))
            .collect();
        let refused_entry = valid_entries
            .iter()
            .flatten()
            .find(|seen| seen.standing.refusal.is_some())?;
        let standings = valid_entries
            .iter()
            .map(|seen| seen.map(|seen| seen.standing))
            .collect();
        Some(Decision {
            now_us: refused_entry.earliest_store_time_us(now),
            admitted: false,
            statuses: standings,
            delay_us: 0,
            grants: SmallVec::new(),
            charged_at_us: SmallVec::new(),
        })
    }

    /// Remembers what a refusal says; anything else says nothing for later.
    pub fn record_refusal(
        &self,
        charges: &[Charge<'_>],
        decision: &Decision,
        sent_at: Instant,
        received_at: Instant,
    ) {
        if decision.admitted {
            return;
        }
        let mut generations = self.0.lock();
        generations.rotate(received_at);
        for (charge, standing) in charges.iter().zip(&decision.statuses) {
            let Some(mut standing) = *standing else {
                continue;
            };
            if charge.shadow || !is_cacheable(charge) {
                continue;
            }
            if charge.is_block() {
                // One that has just begun refuses from now on.
                standing.refusal = standing.next_growth_us.map(Refusal::Until);
            }
            let has_smaller_cost = generations.get_entry(charge).is_some_and(|seen| {
                seen.standing.refusal.is_some()
                    && seen.cost < charge.cost
                    && seen.is_valid_for(charge, received_at, DenyMatchScope::AnyLimit)
            });
            if !has_smaller_cost {
                let entry = DenyCacheEntry {
                    cost: charge.cost,
                    standing,
                    store_now_us: decision.now_us,
                    sent_at,
                    received_at,
                };
                generations.insert_entry(charge, entry);
            }
        }
    }
}

/// Whether a refusal of this lasts as long as it was said: slots and estimates are given back early, and where a refusal
/// is counted Redis has to be told of every one.
fn is_cacheable(charge: &Charge<'_>) -> bool {
    let is_counted = matches!(charge.limit.algorithm, Algorithm::Concurrency { .. });
    !(is_counted || charge.counts_rejected || charge.settles)
}

/// How long an answer about a charge is believed.
fn max_age(charge: &Charge<'_>) -> Duration {
    charge.lease.map_or(MAX_AGE, |lease| {
        LEASED_MAX_AGE.min(Duration::from_micros(lease.ttl_us))
    })
}

/// Whether an answer from memory needs this to be known. A limit of slots says nothing about when to come back.
fn must_be_cached(charge: &Charge<'_>) -> bool {
    let is_counted = matches!(charge.limit.algorithm, Algorithm::Concurrency { .. });
    !charge.shadow && (!is_counted || charge.counts_rejected)
}

impl DenyGenerations {
    fn get_entry(&self, charge: &Charge<'_>) -> Option<DenyCacheEntry> {
        if charge.shadow || !is_cacheable(charge) {
            return None;
        }
        let counter = DenyCacheKey::from_charge(charge);
        self.current
            .get(&counter)
            .or_else(|| self.previous.get(&counter))
            .copied()
    }

    fn insert_entry(&mut self, charge: &Charge<'_>, entry: DenyCacheEntry) {
        let counter = DenyCacheKey::from_charge(charge);
        if self.current.len() < MAX_GENERATION_ENTRIES || self.current.contains_key(&counter) {
            self.current.insert(counter, entry);
        }
    }

    fn rotate(&mut self, now: Instant) {
        if self
            .rotated_at
            .is_none_or(|turned| now.saturating_duration_since(turned) >= MAX_AGE)
        {
            std::mem::swap(&mut self.current, &mut self.previous);
            self.current.clear();
            self.rotated_at = Some(now);
        }
    }
}

impl DenyCacheKey {
    fn from_charge(charge: &Charge<'_>) -> Self {
        Self {
            key: charge.key.id(),
            limit: *charge.limit,
        }
    }
}

impl DenyCacheEntry {
    /// Whether the charge was asked for within a look.
    fn is_fresh_for(&self, charge: &Charge<'_>, now: Instant) -> bool {
        charge.cost == self.cost && now.saturating_duration_since(self.sent_at) < max_age(charge)
    }

    /// Whether this is still worth saying about a charge.
    fn is_valid_for(&self, charge: &Charge<'_>, now: Instant, scope: DenyMatchScope) -> bool {
        let age = now.saturating_duration_since(self.sent_at);
        let matches_cost = match scope {
            DenyMatchScope::AnyLimit if self.standing.refusal.is_some() => charge.cost >= self.cost,
            _ => charge.cost == self.cost,
        };
        let changes_at_us = match self.standing.refusal {
            Some(Refusal::Never | Refusal::Unknown) => None,
            Some(Refusal::Until(until_us)) => Some(until_us),
            None => self.standing.next_growth_us,
        };
        // Measured from sending: by then the store's clock had not passed `now_us`.
        let changed = changes_at_us.is_some_and(|at_us| {
            age >= Duration::from_micros(at_us.saturating_sub(self.store_now_us))
        });
        matches_cost && age < max_age(charge) && !changed
    }

    /// The store's clock at `now`, at the earliest: whoever waits by it waits long enough.
    fn earliest_store_time_us(&self, now: Instant) -> u64 {
        let elapsed = now.saturating_duration_since(self.received_at);
        self.store_now_us
            .saturating_add(u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limiter::{Algorithm, Key, KeyBuilder, Lease};

    const LIMIT: Limit = Limit {
        requests: 5,
        per_us: 10_000_000,
        algorithm: Algorithm::SlidingLog,
    };
    const NOW_US: u64 = 1_700_000_000_000_000;

    fn key(policy: &str) -> Key {
        KeyBuilder::new(policy).finish()
    }

    fn charge<'a>(limit: &'a Limit, key: &'a Key) -> Charge<'a> {
        Charge::new(limit, key, 2)
    }

    fn refused(after_us: u64) -> LimitStatus {
        let until_us = NOW_US + after_us;
        LimitStatus {
            remaining: 1,
            next_growth_us: Some(until_us),
            refusal: Some(Refusal::Until(until_us)),
        }
    }

    fn decision(standings: &[LimitStatus]) -> Decision {
        let standings = standings.iter().copied().map(Some).collect();
        Decision {
            now_us: NOW_US,
            admitted: false,
            statuses: standings,
            delay_us: 0,
            grants: SmallVec::new(),
            charged_at_us: SmallVec::new(),
        }
    }

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn a_refusal_holds_from_sending_until_it_ends() {
        let (cache, key, sent) = (DenyCache::default(), key("a"), Instant::now());
        let charges = [charge(&LIMIT, &key)];
        cache.record_refusal(
            &charges,
            &decision(&[refused(500_000)]),
            sent,
            sent + ms(40),
        );
        let answer = cache
            .find_refusal(&charges, sent + ms(499), DenyMatchScope::AllLimits)
            .unwrap();
        assert!(!answer.admitted);
        assert_eq!(
            answer.now_us,
            NOW_US + 459_000,
            "what is left to wait is counted from the answer"
        );
        assert_eq!(answer.statuses.as_slice(), [Some(refused(500_000))]);
        assert_eq!(
            cache.find_refusal(&charges, sent + ms(500), DenyMatchScope::AllLimits),
            None
        );
    }

    #[test]
    fn no_refusal_is_cached_for_longer_than_a_second() {
        let (cache, key, sent) = (DenyCache::default(), key("a"), Instant::now());
        let charges = [charge(&LIMIT, &key)];
        cache.record_refusal(&charges, &decision(&[refused(9_000_000)]), sent, sent);
        assert!(
            cache
                .find_refusal(&charges, sent + ms(999), DenyMatchScope::AllLimits)
                .is_some()
        );
        assert_eq!(
            cache.find_refusal(&charges, sent + ms(1000), DenyMatchScope::AllLimits),
            None
        );
    }

    #[test]
    fn a_refusal_of_a_leased_limit_is_cached_for_20_ms_at_most() {
        let (cache, key, sent) = (DenyCache::default(), key("a"), Instant::now());
        let cached_ms = |ttl_us, after_us| {
            let lease = Some(Lease { size: None, ttl_us });
            let charges = [Charge {
                lease,
                ..charge(&LIMIT, &key)
            }];
            cache.record_refusal(&charges, &decision(&[refused(after_us)]), sent, sent);
            let expires_ms = (0..2000).find(|n| {
                cache
                    .find_refusal(&charges, sent + ms(*n), DenyMatchScope::AllLimits)
                    .is_none()
            });
            assert_eq!(
                cache.find_refusal(
                    &charges,
                    sent + ms(expires_ms.unwrap()),
                    DenyMatchScope::AnyLimit
                ),
                None
            );
            expires_ms
        };
        assert_eq!(cached_ms(100_000, 9_000_000), Some(20));
        assert_eq!(cached_ms(5_000, 9_000_000), Some(5));
        assert_eq!(
            cached_ms(100_000, 3_000),
            Some(3),
            "who waits as long as he was told gets in"
        );
    }

    #[test]
    fn a_refusal_does_not_match_smaller_costs_other_limits_other_keys_or_shadows() {
        let (cache, a, b, sent) = (DenyCache::default(), key("a"), key("b"), Instant::now());
        let refused_charge = charge(&LIMIT, &a);
        cache.record_refusal(
            &[refused_charge],
            &decision(&[refused(500_000)]),
            sent,
            sent,
        );
        let raised = Limit {
            requests: 6,
            ..LIMIT
        };
        let is_refused = |charge, fit| cache.find_refusal(&[charge], sent, fit).is_some();
        assert!(is_refused(refused_charge, DenyMatchScope::AllLimits));
        for other in [
            Charge {
                cost: 1,
                ..refused_charge
            },
            Charge {
                limit: &raised,
                ..refused_charge
            },
            Charge {
                key: &b,
                ..refused_charge
            },
            Charge {
                shadow: true,
                ..refused_charge
            },
        ] {
            assert!(
                !is_refused(other, DenyMatchScope::AllLimits)
                    && !is_refused(other, DenyMatchScope::AnyLimit),
                "{other:?}"
            );
        }
        let larger = Charge {
            cost: 3,
            ..refused_charge
        };
        assert!(
            !is_refused(larger, DenyMatchScope::AllLimits),
            "its time is not known"
        );
        assert!(is_refused(larger, DenyMatchScope::AnyLimit));
    }

    #[test]
    fn one_exhausted_limit_refuses_and_the_other_limits_are_reported_until_they_change() {
        let (cache, a, b, sent) = (DenyCache::default(), key("a"), key("b"), Instant::now());
        let c = key("c");
        let available = LimitStatus {
            remaining: 3,
            next_growth_us: Some(NOW_US + 200_000),
            refusal: None,
        };
        let charges = [charge(&LIMIT, &a), charge(&LIMIT, &b)];
        cache.record_refusal(
            &charges,
            &decision(&[refused(500_000), available]),
            sent,
            sent,
        );
        let answer = cache
            .find_refusal(&charges, sent + ms(100), DenyMatchScope::AllLimits)
            .unwrap();
        assert_eq!(
            answer.statuses.as_slice(),
            [Some(refused(500_000)), Some(available)]
        );
        let answer = cache
            .find_refusal(&charges, sent + ms(200), DenyMatchScope::AllLimits)
            .unwrap();
        assert_eq!(answer.statuses.as_slice(), [Some(refused(500_000)), None]);
        assert_eq!(
            cache.find_refusal(&charges[1..], sent, DenyMatchScope::AllLimits),
            None,
            "a free limit refuses nobody"
        );

        let with_unknown = [charges[0], charge(&LIMIT, &c)];
        assert_eq!(
            cache.find_refusal(&with_unknown, sent, DenyMatchScope::AllLimits),
            None,
            "it might refuse for longer"
        );
        let answer = cache
            .find_refusal(&with_unknown, sent, DenyMatchScope::AnyLimit)
            .unwrap();
        assert_eq!(answer.statuses.as_slice(), [Some(refused(500_000)), None]);
        let shadow = [
            charges[0],
            Charge {
                shadow: true,
                ..with_unknown[1]
            },
        ];
        assert!(
            cache
                .find_refusal(&shadow, sent, DenyMatchScope::AllLimits)
                .is_some(),
            "shadows are not asked"
        );
    }

    #[test]
    fn the_smallest_refused_cost_stays_cached() {
        let (cache, key, sent) = (DenyCache::default(), key("a"), Instant::now());
        let small = charge(&LIMIT, &key);
        let large = Charge { cost: 4, ..small };
        cache.record_refusal(&[small], &decision(&[refused(500_000)]), sent, sent);
        cache.record_refusal(&[large], &decision(&[refused(700_000)]), sent, sent);
        assert!(
            cache
                .find_refusal(&[small], sent, DenyMatchScope::AllLimits)
                .is_some()
        );
    }

    #[test]
    fn a_permanent_refusal_is_cached_without_an_end_time() {
        let (cache, key, sent) = (DenyCache::default(), key("a"), Instant::now());
        let charge_above_limit = Charge {
            cost: 6,
            ..charge(&LIMIT, &key)
        };
        let never = LimitStatus {
            remaining: 5,
            next_growth_us: None,
            refusal: Some(Refusal::Never),
        };
        cache.record_refusal(&[charge_above_limit], &decision(&[never]), sent, sent);
        assert_eq!(
            cache
                .find_refusal(&[charge_above_limit], sent, DenyMatchScope::AllLimits)
                .unwrap()
                .statuses
                .as_slice(),
            [Some(never)]
        );
    }

    #[test]
    fn the_cache_is_bounded_and_expired_entries_are_freed() {
        let (cache, start) = (DenyCache::default(), Instant::now());
        let keys: Vec<Key> = (0..2 * MAX_GENERATION_ENTRIES + 1)
            .map(|n| key(&n.to_string()))
            .collect();
        for key in &keys {
            cache.record_refusal(
                &[charge(&LIMIT, key)],
                &decision(&[refused(500_000)]),
                start,
                start,
            );
        }
        assert_eq!(cache.0.lock().current.len(), MAX_GENERATION_ENTRIES);
        let later = start + 2 * MAX_AGE;
        let last = [charge(&LIMIT, &keys[2 * MAX_GENERATION_ENTRIES])];
        cache.record_refusal(&last, &decision(&[refused(500_000)]), later, later);
        assert!(
            cache
                .find_refusal(&last, later, DenyMatchScope::AllLimits)
                .is_some()
        );
    }
}
