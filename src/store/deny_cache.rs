//! Refusals that are still true, so that an exhausted key costs no round trip.
//!
//! While a sliding log or a window is full, room can only shrink until the time of the refusal has come. So a
//! refusal is the answer to any ask of at least that cost until then, counted from the moment of *sending*:
//! never longer than Redis would say. All or nothing does the rest: if one enforced limit refuses, none is
//! charged. At most [`LOOK`] each, so that what people reset by hand is felt soon; with leases [`LEASED_LOOK`].
//!
//! One per worker, not per process: a lock that nobody else wants costs nothing, and a second worker that asks
//! once per second and key is cheap. The counter's identity and the limit's amount are in the key, so a reload
//! that changes either forgets by itself.

use crate::limiter::{Algorithm, Charge, Decision, Limit, Refusal, Standing};
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::collections::HashMap;
use std::time::Duration;
use tokio::time::Instant;

/// The longest that a refusal is believed.
const LOOK: Duration = Duration::from_secs(1);

/// The same of a policy with leases, or `ttl` if that is shorter: what others give back unused may come at any time, and
/// is told up to `ttl` late. Long enough to keep an exhausted key from asking Redis with every request.
const LEASED_LOOK: Duration = Duration::from_millis(20);

/// Counters remembered in each half; about 1 MiB per half. When they are full, Redis is asked.
const MAX_HALF: usize = 8192;

/// Recent refusals of one worker.
#[derive(Debug)]
pub struct DenyCache(Mutex<Halves>);

/// How much of an ask must be known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fit {
    /// Every enforced limit was seen within a [`LOOK`], at the same cost: refusal and time are Redis' own. A limit
    /// that was never seen might refuse for longer than the others, and the client would be told to come too early.
    Whole,
    /// One refusal of the same or a smaller cost: certainly refused, perhaps for longer than can be said.
    Any,
}

/// Nothing is believed for longer than a second, so dropping the older half every second loses nothing
/// and needs no sweep.
#[derive(Debug)]
struct Halves {
    young: Map,
    old: Map,
    turned: Option<Instant>,
}

type Map = HashMap<Counter, Seen, foldhash::fast::RandomState>;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Counter {
    key: u128,
    limit: Limit,
}

/// What a refused request learnt about one of its limits.
#[derive(Clone, Copy, Debug)]
struct Seen {
    cost: u64,
    standing: Standing,
    /// The store's clock when it decided, and ours before and after.
    now_us: u64,
    sent: Instant,
    received: Instant,
}

impl Default for DenyCache {
    fn default() -> Self {
        let halves = Halves {
            young: Map::default(),
            old: Map::default(),
            turned: None,
        };
        Self(Mutex::new(halves))
    }
}

impl DenyCache {
    /// The refusal of `charges`, if one is known at `now`. Limits about which nothing certain is known are `None`.
    pub fn recall(&self, charges: &[Charge<'_>], now: Instant, fit: Fit) -> Option<Decision> {
        let halves = self.0.lock();
        if halves.young.is_empty() && halves.old.is_empty() {
            return None;
        }
        let found: SmallVec<[Option<Seen>; 4]> =
            charges.iter().map(|charge| halves.find(charge)).collect();
        drop(halves);
        let mut both = charges.iter().zip(&found);
        let is_fresh =
            |seen: &Option<Seen>, charge| seen.is_some_and(|seen| seen.is_fresh(charge, now));
        if fit == Fit::Whole
            && both.any(|(charge, seen)| must_be_known(charge) && !is_fresh(seen, charge))
        {
            return None;
        }
        let both = charges.iter().zip(found);
        let seen: SmallVec<[Option<Seen>; 4]> = both
            .map(|(charge, seen)| seen.filter(|seen| seen.applies(charge, now, fit)))
            .collect();
        let refused = seen
            .iter()
            .flatten()
            .find(|seen| seen.standing.refusal.is_some())?;
        let standings = seen
            .iter()
            .map(|seen| seen.map(|seen| seen.standing))
            .collect();
        Some(Decision {
            now_us: refused.store_time_us(now),
            admitted: false,
            standings,
            delay_us: 0,
            grants: SmallVec::new(),
            stands_us: SmallVec::new(),
        })
    }

    /// Remembers what a refusal says; anything else says nothing for later.
    pub fn remember(
        &self,
        charges: &[Charge<'_>],
        decision: &Decision,
        sent: Instant,
        received: Instant,
    ) {
        if decision.admitted {
            return;
        }
        let mut halves = self.0.lock();
        halves.turn(received);
        for (charge, standing) in charges.iter().zip(&decision.standings) {
            let Some(mut standing) = *standing else {
                continue;
            };
            if charge.shadow || !can_be_known(charge) {
                continue;
            }
            if charge.is_block() {
                // One that has just begun refuses from now on.
                standing.refusal = standing.grows_at_us.map(Refusal::Until);
            }
            let smaller = halves.find(charge).is_some_and(|seen| {
                seen.standing.refusal.is_some()
                    && seen.cost < charge.cost
                    && seen.applies(charge, received, Fit::Any)
            });
            if !smaller {
                let seen = Seen {
                    cost: charge.cost,
                    standing,
                    now_us: decision.now_us,
                    sent,
                    received,
                };
                halves.insert(charge, seen);
            }
        }
    }
}

/// Whether a refusal of this lasts as long as it was said: slots and estimates are given back early, and where a refusal
/// is counted Redis has to be told of every one.
fn can_be_known(charge: &Charge<'_>) -> bool {
    let is_counted = matches!(charge.limit.algorithm, Algorithm::Concurrency { .. });
    !(is_counted || charge.counts_rejected || charge.settles)
}

/// How long an answer about a charge is believed.
fn look(charge: &Charge<'_>) -> Duration {
    charge.lease.map_or(LOOK, |lease| {
        LEASED_LOOK.min(Duration::from_micros(lease.ttl_us))
    })
}

/// Whether an answer from memory needs this to be known. A limit of slots says nothing about when to come back.
fn must_be_known(charge: &Charge<'_>) -> bool {
    let is_counted = matches!(charge.limit.algorithm, Algorithm::Concurrency { .. });
    !charge.shadow && (!is_counted || charge.counts_rejected)
}

impl Halves {
    fn find(&self, charge: &Charge<'_>) -> Option<Seen> {
        if charge.shadow || !can_be_known(charge) {
            return None;
        }
        let counter = Counter::of(charge);
        self.young
            .get(&counter)
            .or_else(|| self.old.get(&counter))
            .copied()
    }

    fn insert(&mut self, charge: &Charge<'_>, seen: Seen) {
        let counter = Counter::of(charge);
        if self.young.len() < MAX_HALF || self.young.contains_key(&counter) {
            self.young.insert(counter, seen);
        }
    }

    fn turn(&mut self, now: Instant) {
        if self
            .turned
            .is_none_or(|turned| now.saturating_duration_since(turned) >= LOOK)
        {
            std::mem::swap(&mut self.young, &mut self.old);
            self.young.clear();
            self.turned = Some(now);
        }
    }
}

impl Counter {
    fn of(charge: &Charge<'_>) -> Self {
        Self {
            key: charge.key.id(),
            limit: *charge.limit,
        }
    }
}

impl Seen {
    /// Whether the charge was asked for within a look.
    fn is_fresh(&self, charge: &Charge<'_>, now: Instant) -> bool {
        charge.cost == self.cost && now.saturating_duration_since(self.sent) < look(charge)
    }

    /// Whether this is still worth saying about a charge.
    fn applies(&self, charge: &Charge<'_>, now: Instant, fit: Fit) -> bool {
        let age = now.saturating_duration_since(self.sent);
        let fits = match fit {
            Fit::Any if self.standing.refusal.is_some() => charge.cost >= self.cost,
            _ => charge.cost == self.cost,
        };
        let changes_at_us = match self.standing.refusal {
            Some(Refusal::Never | Refusal::Unknown) => None,
            Some(Refusal::Until(until_us)) => Some(until_us),
            None => self.standing.grows_at_us,
        };
        // Measured from sending: by then the store's clock had not passed `now_us`.
        let changed = changes_at_us
            .is_some_and(|at_us| age >= Duration::from_micros(at_us.saturating_sub(self.now_us)));
        fits && age < look(charge) && !changed
    }

    /// The store's clock at `now`, at the earliest: whoever waits by it waits long enough.
    fn store_time_us(&self, now: Instant) -> u64 {
        let since = now.saturating_duration_since(self.received);
        self.now_us
            .saturating_add(u64::try_from(since.as_micros()).unwrap_or(u64::MAX))
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

    fn refused(after_us: u64) -> Standing {
        let until_us = NOW_US + after_us;
        Standing {
            remaining: 1,
            grows_at_us: Some(until_us),
            refusal: Some(Refusal::Until(until_us)),
        }
    }

    fn decision(standings: &[Standing]) -> Decision {
        let standings = standings.iter().copied().map(Some).collect();
        Decision {
            now_us: NOW_US,
            admitted: false,
            standings,
            delay_us: 0,
            grants: SmallVec::new(),
            stands_us: SmallVec::new(),
        }
    }

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn a_refusal_holds_from_sending_until_it_ends() {
        let (cache, key, sent) = (DenyCache::default(), key("a"), Instant::now());
        let charges = [charge(&LIMIT, &key)];
        cache.remember(
            &charges,
            &decision(&[refused(500_000)]),
            sent,
            sent + ms(40),
        );
        let answer = cache.recall(&charges, sent + ms(499), Fit::Whole).unwrap();
        assert!(!answer.admitted);
        assert_eq!(
            answer.now_us,
            NOW_US + 459_000,
            "what is left to wait is counted from the answer"
        );
        assert_eq!(answer.standings.as_slice(), [Some(refused(500_000))]);
        assert_eq!(cache.recall(&charges, sent + ms(500), Fit::Whole), None);
    }

    #[test]
    fn no_refusal_is_believed_for_longer_than_a_second() {
        let (cache, key, sent) = (DenyCache::default(), key("a"), Instant::now());
        let charges = [charge(&LIMIT, &key)];
        cache.remember(&charges, &decision(&[refused(9_000_000)]), sent, sent);
        assert!(cache.recall(&charges, sent + ms(999), Fit::Whole).is_some());
        assert_eq!(cache.recall(&charges, sent + ms(1000), Fit::Whole), None);
    }

    #[test]
    fn what_leases_may_give_back_is_refused_for_a_moment_only() {
        let (cache, key, sent) = (DenyCache::default(), key("a"), Instant::now());
        let until = |ttl_us, after_us| {
            let lease = Some(Lease { size: None, ttl_us });
            let asked = [Charge {
                lease,
                ..charge(&LIMIT, &key)
            }];
            cache.remember(&asked, &decision(&[refused(after_us)]), sent, sent);
            let ends =
                (0..2000).find(|n| cache.recall(&asked, sent + ms(*n), Fit::Whole).is_none());
            assert_eq!(
                cache.recall(&asked, sent + ms(ends.unwrap()), Fit::Any),
                None
            );
            ends
        };
        assert_eq!(until(100_000, 9_000_000), Some(20));
        assert_eq!(until(5_000, 9_000_000), Some(5));
        assert_eq!(
            until(100_000, 3_000),
            Some(3),
            "who waits as long as he was told gets in"
        );
    }

    #[test]
    fn a_refusal_says_nothing_about_smaller_costs_other_amounts_keys_and_shadows() {
        let (cache, a, b, sent) = (DenyCache::default(), key("a"), key("b"), Instant::now());
        let asked = charge(&LIMIT, &a);
        cache.remember(&[asked], &decision(&[refused(500_000)]), sent, sent);
        let raised = Limit {
            requests: 6,
            ..LIMIT
        };
        let knows = |charge, fit| cache.recall(&[charge], sent, fit).is_some();
        assert!(knows(asked, Fit::Whole));
        for other in [
            Charge { cost: 1, ..asked },
            Charge {
                limit: &raised,
                ..asked
            },
            Charge { key: &b, ..asked },
            Charge {
                shadow: true,
                ..asked
            },
        ] {
            assert!(
                !knows(other, Fit::Whole) && !knows(other, Fit::Any),
                "{other:?}"
            );
        }
        let larger = Charge { cost: 3, ..asked };
        assert!(!knows(larger, Fit::Whole), "its time is not known");
        assert!(knows(larger, Fit::Any));
    }

    #[test]
    fn one_exhausted_limit_refuses_the_request_and_the_others_are_reported_while_they_hold() {
        let (cache, a, b, sent) = (DenyCache::default(), key("a"), key("b"), Instant::now());
        let c = key("c");
        let free = Standing {
            remaining: 3,
            grows_at_us: Some(NOW_US + 200_000),
            refusal: None,
        };
        let asked = [charge(&LIMIT, &a), charge(&LIMIT, &b)];
        cache.remember(&asked, &decision(&[refused(500_000), free]), sent, sent);
        let answer = cache.recall(&asked, sent + ms(100), Fit::Whole).unwrap();
        assert_eq!(
            answer.standings.as_slice(),
            [Some(refused(500_000)), Some(free)]
        );
        let answer = cache.recall(&asked, sent + ms(200), Fit::Whole).unwrap();
        assert_eq!(answer.standings.as_slice(), [Some(refused(500_000)), None]);
        assert_eq!(
            cache.recall(&asked[1..], sent, Fit::Whole),
            None,
            "a free limit refuses nobody"
        );

        let more = [asked[0], charge(&LIMIT, &c)];
        assert_eq!(
            cache.recall(&more, sent, Fit::Whole),
            None,
            "it might refuse for longer"
        );
        let answer = cache.recall(&more, sent, Fit::Any).unwrap();
        assert_eq!(answer.standings.as_slice(), [Some(refused(500_000)), None]);
        let shadow = [
            asked[0],
            Charge {
                shadow: true,
                ..more[1]
            },
        ];
        assert!(
            cache.recall(&shadow, sent, Fit::Whole).is_some(),
            "shadows are not asked"
        );
    }

    #[test]
    fn the_smallest_refused_cost_stays() {
        let (cache, key, sent) = (DenyCache::default(), key("a"), Instant::now());
        let small = charge(&LIMIT, &key);
        let large = Charge { cost: 4, ..small };
        cache.remember(&[small], &decision(&[refused(500_000)]), sent, sent);
        cache.remember(&[large], &decision(&[refused(700_000)]), sent, sent);
        assert!(cache.recall(&[small], sent, Fit::Whole).is_some());
    }

    #[test]
    fn never_is_known_without_a_time() {
        let (cache, key, sent) = (DenyCache::default(), key("a"), Instant::now());
        let asked = Charge {
            cost: 6,
            ..charge(&LIMIT, &key)
        };
        let never = Standing {
            remaining: 5,
            grows_at_us: None,
            refusal: Some(Refusal::Never),
        };
        cache.remember(&[asked], &decision(&[never]), sent, sent);
        assert_eq!(
            cache
                .recall(&[asked], sent, Fit::Whole)
                .unwrap()
                .standings
                .as_slice(),
            [Some(never)]
        );
    }

    #[test]
    fn memory_is_bounded_and_comes_free() {
        let (cache, start) = (DenyCache::default(), Instant::now());
        let keys: Vec<Key> = (0..2 * MAX_HALF + 1).map(|n| key(&n.to_string())).collect();
        for key in &keys {
            cache.remember(
                &[charge(&LIMIT, key)],
                &decision(&[refused(500_000)]),
                start,
                start,
            );
        }
        assert_eq!(cache.0.lock().young.len(), MAX_HALF);
        let later = start + 2 * LOOK;
        let last = [charge(&LIMIT, &keys[2 * MAX_HALF])];
        cache.remember(&last, &decision(&[refused(500_000)]), later, later);
        assert!(cache.recall(&last, later, Fit::Whole).is_some());
    }
}
