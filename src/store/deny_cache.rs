//! Refusals that still hold, so that an exhausted key costs no round trip.
//!
//! Until a refusal ends, a full counter frees no units, unless units are returned or the counter is
//! reset. A cached refusal therefore answers every request of the same cost, for at most as long as
//! Redis would refuse it. The refusal of one limit is enough, because charges are all or nothing;
//! the caller reads the limits that are [unknown](CachedStatuses::unknown). [`MAX_AGE`] and
//! [`LEASED_MAX_AGE`] bound the delay until a manual reset takes effect.
//!
//! Each worker has its own cache: its lock is uncontended. An entry's key includes the counter and
//! the limit, so a reload that changes either needs no invalidation.

use super::Settlement;
use crate::clock::saturating_micros;
use crate::limiter::{
    Charge, CounterRef, Decision, Limit, LimitStatus, PolicyCharges, Refusal, each_charge,
};
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::collections::HashMap;
use std::time::Duration;
use tokio::time::Instant;

/// Maximum age of an entry, measured from sending the request to Redis.
const MAX_AGE: Duration = Duration::from_secs(1);

/// Maximum age of the reading of a limit that admits, beside a limit that refuses for long.
const MAX_ADMITTING_AGE: Duration = Duration::from_secs(10);

/// Time after which the current generation of entries becomes the previous one.
const GENERATION_DURATION: Duration = MAX_AGE.saturating_add(REVALIDATION_INTERVAL);

/// Maximum age of a refusal by a policy with leases, unless the lease TTL is shorter. The age is
/// short because other instances may return unused units at any time. The age is long enough that
/// not every request for an exhausted key asks Redis.
const LEASED_MAX_AGE: Duration = Duration::from_millis(20);

/// After an entry has expired, one request per this interval asks Redis. All other requests are
/// refused until Redis has answered, so a key with many requests costs one call.
const REVALIDATION_INTERVAL: Duration = Duration::from_millis(250);

/// Maximum number of entries per generation: about 1 MiB. Further refusals are not cached.
const MAX_GENERATION_ENTRIES: usize = 8192;

/// Recent refusals of one worker. The lock is uncontended: only its worker uses it.
#[derive(Debug, Default)]
pub(super) struct DenyCache(Mutex<DenyGenerations>);

/// What the cache knows about the limits of a request.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct CachedStatuses {
    /// A refusal with the statuses of the limits that refuse. Other requests may have charged the
    /// other limits since, so their cached `remaining` could exceed one that the client knows.
    pub decision: Decision,
    /// Whether one of these limits certainly refuses the request.
    pub is_certain: bool,
    /// For each charge: whether its limit has no fresh entry of this cost, and may refuse for
    /// longer, until a known time.
    pub unknown: SmallVec<[bool; 8]>,
}

/// Two generations of entries. After [`GENERATION_DURATION`] most entries are renewed or obsolete,
/// and the older generation is dropped, except for readings of limits that admit.
#[derive(Debug, Default)]
struct DenyGenerations {
    current: DenyGeneration,
    previous: DenyGeneration,
    rotated_at: Option<Instant>,
}

type DenyGeneration = HashMap<DenyCacheKey, DenyCacheEntry, foldhash::fast::RandomState>;

/// The id of a key, and the limit.
type DenyCacheKey = (u128, Limit);

/// Status of one limit as reported by a refusal.
#[derive(Clone, Copy, Debug)]
struct DenyCacheEntry {
    cost: u64,
    status: LimitStatus,
    /// The store's clock at the decision.
    store_now_us: u64,
    sent_at: Instant,
    received_at: Instant,
    /// The end of the maximum age.
    fresh_until: Instant,
    /// As `fresh_until`, or later while a request asks Redis.
    expires_at: Instant,
}

impl DenyCache {
    /// Returns what is known about a new request at `now`. `None` if there is no fresh entry. The
    /// first request after the expiry of an entry does not get it, so that it asks Redis; for all
    /// other requests the entry is prolonged.
    pub(super) fn find_statuses(
        &self,
        request: &[PolicyCharges<'_>],
        now: Instant,
    ) -> Option<CachedStatuses> {
        self.read_statuses(request, now, |charge, entry| {
            let is_current = now < entry.expires_at;
            // A charge without cost is admitted, so it does not renew the entry.
            if !is_current && charge.cost > 0 {
                let max_age = max_age(charge, &entry.status);
                entry.expires_at = now + REVALIDATION_INTERVAL.min(max_age);
            }
            is_current
        })
    }

    /// Like [`DenyCache::find_statuses`], for a request that asks Redis about all other limits.
    pub(super) fn find_fresh_statuses(
        &self,
        request: &[PolicyCharges<'_>],
        now: Instant,
    ) -> Option<CachedStatuses> {
        self.read_statuses(request, now, |_, entry| now < entry.fresh_until)
    }

    fn read_statuses(
        &self,
        request: &[PolicyCharges<'_>],
        now: Instant,
        is_fresh: impl Fn(&Charge<'_, '_>, &mut DenyCacheEntry) -> bool,
    ) -> Option<CachedStatuses> {
        let mut generations = self.0.lock();
        if generations.is_empty() {
            return None;
        }
        let entries = each_charge(request).map(|charge| {
            let entry = generations.get_entry(&charge)?;
            is_fresh(&charge, entry).then_some(*entry)
        });
        let entries: SmallVec<[Option<DenyCacheEntry>; 4]> = entries.collect();
        if !entries.iter().any(Option::is_some) {
            return None;
        }
        let mut found = CachedStatuses {
            decision: Decision::without_outcomes(request),
            is_certain: false,
            unknown: SmallVec::new(),
        };
        let mut now_us = 0;
        let outcomes = found.decision.outcomes_mut();
        for ((charge, entry), outcome) in each_charge(request).zip(entries).zip(outcomes) {
            let entry = entry.filter(|entry| entry.cost == charge.cost);
            let is_unknown = entry.is_none() && charge.has_retry_time();
            found.unknown.push(is_unknown);
            if let Some(entry) = entry
                && entry.status.refusal.is_some()
                && entry.holds_at(now)
            {
                found.is_certain |= is_certain(&charge);
                outcome.status = Some(entry.status_at(now, &mut now_us));
            }
        }
        found.decision.now_us = now_us;
        // Redis must see each rejected request of a policy with `count_rejected`.
        let must_count = |policy: &PolicyCharges<'_>| policy.counts_rejected && !policy.shadow;
        found.is_certain &= !request.iter().any(must_count);
        Some(found)
    }

    /// After a failed call, returns a refusal of the same or a smaller cost, even an expired one
    /// that has not ended. The request is certainly refused, perhaps for longer than stated.
    pub(super) fn find_any_refusal(
        &self,
        request: &[PolicyCharges<'_>],
        now: Instant,
    ) -> Option<Decision> {
        let mut generations = self.0.lock();
        let (mut refusal, mut now_us) = (Decision::without_outcomes(request), 0);
        for (charge, outcome) in each_charge(request).zip(refusal.outcomes_mut()) {
            let entry = generations.get_entry(&charge).filter(|entry| {
                let is_kept = match charge.name {
                    // An override can lift any refusal.
                    Some(_) => now.saturating_duration_since(entry.sent_at) < MAX_AGE,
                    // A definite refusal stays true until its end.
                    None => now < entry.expires_at || entry.status.refusal > Some(Refusal::Unknown),
                };
                is_kept && is_certain(&charge) && charge.cost >= entry.cost && entry.holds_at(now)
            });
            if let Some(entry) = entry.filter(|entry| entry.status.refusal.is_some()) {
                outcome.status = Some(entry.status_at(now, &mut now_us));
            }
        }
        refusal.now_us = now_us;
        let is_refused = refusal.statuses().next().is_some();
        is_refused.then_some(refusal)
    }

    /// An admission proves cached refusals of these counters obsolete, for example after `keys
    /// reset`. A refusal of a larger cost holds, but its `remaining` is obsolete if it is not 0. A
    /// limit that admits is unknown again when its units are used up.
    pub(super) fn forget_refusals(&self, request: &[PolicyCharges<'_>], admission: &Decision) {
        let outcomes = each_charge(request).zip(admission.outcomes());
        self.remove_entries(outcomes, |entry, charge, outcome| {
            match entry.status.refusal {
                Some(_) => entry.cost <= charge.cost || entry.status.remaining > 0,
                None => (outcome.status).is_none_or(|status| status.remaining < entry.cost),
            }
        });
    }

    /// Removes the refusals of `charges` that are older than their maximum age. Called when Redis
    /// is unreachable: nothing can renew them.
    pub(super) fn forget_outdated(&self, request: &[PolicyCharges<'_>], now: Instant) {
        let charges = each_charge(request).map(|charge| (charge, ()));
        self.remove_entries(charges, |entry, charge, ()| {
            now >= entry.sent_at + max_age(charge, &entry.status)
        });
    }

    /// Removes the entry of a counter whose units a settlement changes.
    pub(super) fn forget_settled(&self, settlement: &Settlement<'_>) {
        let mut generations = self.0.lock();
        if !generations.is_empty() {
            generations.remove_entry(settlement.counter());
        }
    }

    fn remove_entries<'c, 'a: 'c, T>(
        &self,
        charges: impl Iterator<Item = (Charge<'c, 'a>, T)>,
        is_obsolete: impl Fn(&DenyCacheEntry, &Charge<'_, '_>, T) -> bool,
    ) {
        let mut generations = self.0.lock();
        if generations.is_empty() {
            return;
        }
        for (charge, context) in charges {
            let entry = generations.get_entry(&charge);
            if entry.is_some_and(|entry| is_obsolete(entry, &charge, context)) {
                generations.remove_entry(charge.counter());
            }
        }
    }

    /// Caches the statuses of a refused request. Admitted requests are ignored.
    pub(super) fn record_refusal(
        &self,
        request: &[PolicyCharges<'_>],
        decision: &Decision,
        sent_at: Instant,
        received_at: Instant,
    ) {
        self.record_statuses(request, decision, (sent_at, received_at), MAX_AGE);
    }

    /// Caches the statuses that were read for a request that is refused for `wait_us` anyway. The
    /// longer it is refused, the less it matters if limits that admit are exhausted meanwhile. A
    /// limit without a status gave no answer: its last status counts for another second.
    pub(super) fn record_reading(
        &self,
        request: &[PolicyCharges<'_>],
        decision: &Decision,
        times: (Instant, Instant),
        wait_us: u64,
    ) {
        let admitting_max_age =
            Duration::from_micros(wait_us / 10).clamp(MAX_AGE, MAX_ADMITTING_AGE);
        self.record_statuses(request, decision, times, admitting_max_age);
        let mut generations = self.0.lock();
        for (charge, outcome) in each_charge(request).zip(decision.outcomes()) {
            if !outcome.is_unknown() {
                continue;
            }
            let (read_at, fresh_until) = ((0, times.1, times.1), times.1 + MAX_AGE);
            match generations.get_entry(&charge) {
                Some(entry) => entry.fresh_until = fresh_until,
                None => {
                    let status = LimitStatus::default();
                    generations.insert_entry(&charge, status, read_at, fresh_until);
                }
            }
        }
    }

    fn record_statuses(
        &self,
        request: &[PolicyCharges<'_>],
        decision: &Decision,
        (sent_at, received_at): (Instant, Instant),
        admitting_max_age: Duration,
    ) {
        if decision.admitted {
            return;
        }
        let mut generations = self.0.lock();
        generations.rotate_if_due(received_at);
        for (charge, outcome) in each_charge(request).zip(decision.outcomes()) {
            // A charge with a time was admitted, and is being returned.
            let admitted = outcome.charged_at_us.map(|_| LimitStatus::default());
            let Some(mut status) = outcome.status.or(admitted) else {
                continue;
            };
            if !charge.has_retry_time() {
                continue;
            }
            if charge.is_block() {
                // A block that has just begun refuses from now on.
                status.refusal = status.next_growth_us.map(Refusal::Until);
            }
            let is_outranked = generations.get_entry(&charge).is_some_and(|entry| {
                entry.status.refusal.is_some()
                    && rank_cost(entry.cost) < rank_cost(charge.cost)
                    && received_at < entry.expires_at
                    && entry.holds_at(received_at)
            });
            if !is_outranked {
                let fresh_until = sent_at
                    + match status.refusal {
                        Some(_) => max_age(&charge, &status),
                        None => admitting_max_age,
                    };
                let read_at = (decision.now_us, sent_at, received_at);
                generations.insert_entry(&charge, status, read_at, fresh_until);
            }
        }
    }
}

/// Which refusal of a counter is kept: the one of the lowest rank. A refusal of a smaller cost
/// matches more requests. A query, without cost, comes last: its refusal states no retry time of a
/// request.
fn rank_cost(cost: u64) -> u64 {
    cost.wrapping_sub(1)
}

/// Whether a cached refusal of this charge refuses requests. Estimates may be returned early, and
/// `count_rejected` changes the counter with every request.
fn is_certain(charge: &Charge<'_, '_>) -> bool {
    !charge.is_estimate && !charge.policy.counts_rejected
}

/// Maximum age of an entry with this status.
fn max_age(charge: &Charge<'_, '_>, status: &LimitStatus) -> Duration {
    match charge.policy.lease {
        Some(lease) if status.refusal.is_some() => {
            LEASED_MAX_AGE.min(Duration::from_micros(lease.ttl_us))
        }
        _ => MAX_AGE,
    }
}

impl DenyGenerations {
    fn is_empty(&self) -> bool {
        self.current.is_empty() && self.previous.is_empty()
    }

    fn get_entry(&mut self, charge: &Charge<'_, '_>) -> Option<&mut DenyCacheEntry> {
        if !charge.has_retry_time() {
            return None;
        }
        let counter = cache_key(charge.counter());
        self.current
            .get_mut(&counter)
            .or_else(|| self.previous.get_mut(&counter))
    }

    /// Inserts a status with the store's clock at the decision, and the times of the call.
    fn insert_entry(
        &mut self,
        charge: &Charge<'_, '_>,
        status: LimitStatus,
        (store_now_us, sent_at, received_at): (u64, Instant, Instant),
        fresh_until: Instant,
    ) {
        let counter = cache_key(charge.counter());
        // Otherwise a rotation could bring an older entry back.
        self.previous.remove(&counter);
        if self.current.len() < MAX_GENERATION_ENTRIES || self.current.contains_key(&counter) {
            let entry = DenyCacheEntry {
                cost: charge.cost,
                status,
                store_now_us,
                sent_at,
                received_at,
                fresh_until,
                expires_at: fresh_until,
            };
            self.current.insert(counter, entry);
        }
    }

    fn remove_entry(&mut self, counter: CounterRef<'_>) {
        let counter = cache_key(counter);
        self.current.remove(&counter);
        self.previous.remove(&counter);
    }

    fn rotate_if_due(&mut self, now: Instant) {
        if self.rotated_at.is_none_or(|rotated_at| {
            now.saturating_duration_since(rotated_at) >= GENERATION_DURATION
        }) {
            std::mem::swap(&mut self.current, &mut self.previous);
            self.current.retain(|_, entry| now < entry.fresh_until);
            self.rotated_at = Some(now);
        }
    }
}

fn cache_key(counter: CounterRef<'_>) -> DenyCacheKey {
    (counter.key.id(), *counter.limit)
}

impl DenyCacheEntry {
    /// The status for a refusal, on the clock of the refusal's first status. `refusal_us` is its
    /// time, 0 before the first status.
    fn status_at(&self, now: Instant, refusal_us: &mut u64) -> LimitStatus {
        // The earliest time that the store's clock can show now.
        let elapsed_us = saturating_micros(now.saturating_duration_since(self.received_at));
        let now_us = self.store_now_us.saturating_add(elapsed_us);
        if *refusal_us == 0 {
            *refusal_us = now_us;
        }
        self.status.convert_clock(now_us, *refusal_us)
    }

    /// Whether the status of the store has certainly not changed with time.
    fn holds_at(&self, now: Instant) -> bool {
        let age = now.saturating_duration_since(self.sent_at);
        let changes_at_us = match self.status.refusal {
            Some(Refusal::Never | Refusal::Unknown) => None,
            Some(Refusal::Until(until_us)) => Some(until_us),
            None => self.status.next_growth_us,
        };
        // The age counts from sending: at that moment the store's clock had not passed
        // `store_now_us`.
        changes_at_us.is_none_or(|at_us| {
            age < Duration::from_micros(at_us.saturating_sub(self.store_now_us))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limiter::{Algorithm, ChargeOutcome, Key, KeyBuilder, LeaseTerms};
    use std::borrow::Cow;
    use std::slice::from_ref;
    use std::sync::Arc;

    const LIMIT: Limit = Limit {
        requests: 5,
        per_us: 10_000_000,
        algorithm: Algorithm::SlidingLog,
    };
    const NOW_US: u64 = 1_700_000_000_000_000;

    fn key(policy: &str) -> Key {
        KeyBuilder::new(policy).finish()
    }

    fn charge_of_two_units<'a>(limit: &'a Limit, key: &'a Key) -> PolicyCharges<'a> {
        PolicyCharges::new(limit, key, 2)
    }

    fn refused_status(after_us: u64) -> LimitStatus {
        let until_us = NOW_US + after_us;
        LimitStatus {
            remaining: 1,
            next_growth_us: Some(until_us),
            refusal: Some(Refusal::Until(until_us)),
            in_effect: None,
        }
    }

    fn refused_decision(statuses: &[LimitStatus]) -> Decision {
        let outcomes = statuses.iter().map(|status| ChargeOutcome {
            status: Some(*status),
            ..ChargeOutcome::default()
        });
        Decision {
            now_us: NOW_US,
            ..Decision::default()
        }
        .with_outcomes(outcomes)
    }

    /// The status of each limit.
    fn statuses_of(decision: &Decision) -> Vec<Option<LimitStatus>> {
        let outcomes = decision.outcomes();
        outcomes.map(|outcome| outcome.status).collect()
    }

    /// A refusal that needs no call.
    fn find_refusal(
        cache: &DenyCache,
        charges: &[PolicyCharges<'_>],
        now: Instant,
    ) -> Option<Decision> {
        let found = cache.find_statuses(charges, now)?;
        (found.is_certain && !found.unknown.contains(&true)).then_some(found.decision)
    }

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn a_refusal_holds_from_sending_until_it_ends() {
        let (cache, key, sent) = (DenyCache::default(), key("a"), Instant::now());
        let charges = [charge_of_two_units(&LIMIT, &key)];
        cache.record_refusal(
            &charges,
            &refused_decision(&[refused_status(500_000)]),
            sent,
            sent + ms(40),
        );
        let answer = find_refusal(&cache, &charges, sent + ms(499)).unwrap();
        assert!(!answer.admitted);
        assert_eq!(
            answer.now_us,
            NOW_US + 459_000,
            "the remaining wait is counted from the receipt"
        );
        assert_eq!(statuses_of(&answer), [Some(refused_status(500_000))]);
        assert_eq!(find_refusal(&cache, &charges, sent + ms(500)), None);
    }

    #[test]
    fn no_refusal_is_cached_for_longer_than_a_second() {
        let (cache, key, sent) = (DenyCache::default(), key("a"), Instant::now());
        let charges = [charge_of_two_units(&LIMIT, &key)];
        cache.record_refusal(
            &charges,
            &refused_decision(&[refused_status(9_000_000)]),
            sent,
            sent,
        );
        assert!(find_refusal(&cache, &charges, sent + ms(999)).is_some());
        assert_eq!(find_refusal(&cache, &charges, sent + ms(1000)), None);
    }

    #[test]
    fn a_leased_limit_shortens_only_its_own_refusals() {
        let (cache, sent) = (DenyCache::default(), Instant::now());
        let (refusing, leased) = (key("refusing"), key("leased"));
        let terms = LeaseTerms {
            size: None,
            ttl_us: 100_000,
        };
        let charges = [
            charge_of_two_units(&LIMIT, &refusing),
            PolicyCharges {
                lease: Some(terms),
                ..charge_of_two_units(&LIMIT, &leased)
            },
        ];
        let admitted = LimitStatus {
            refusal: None,
            ..refused_status(9_000_000)
        };
        for (leased_status, holds_for_ms) in [(admitted, 999), (refused_status(9_000_000), 19)] {
            let statuses = [refused_status(9_000_000), leased_status];
            cache.record_refusal(&charges, &refused_decision(&statuses), sent, sent);
            let find = |after_ms| find_refusal(&cache, &charges, sent + ms(after_ms));
            assert!(find(holds_for_ms).is_some(), "{leased_status:?}");
            assert_eq!(find(holds_for_ms + 1), None, "{leased_status:?}");
        }
    }

    #[test]
    fn an_old_refusal_of_a_dynamic_policy_does_not_replace_a_failed_call() {
        let (cache, key, sent) = (DenyCache::default(), key("a"), Instant::now());
        let name: Arc<str> = Arc::from("api");
        let charge = charge_of_two_units(&LIMIT, &key);
        let charges = [charge.map_limits(|charge| charge.name = Some(Cow::Borrowed(&name)))];
        let blocked = LimitStatus {
            refusal: Some(Refusal::Never),
            ..refused_status(2_000_000)
        };
        cache.record_refusal(&charges, &refused_decision(&[blocked]), sent, sent);
        let is_refused_after_failure = |after_ms| {
            let refusal = cache.find_any_refusal(&charges, sent + ms(after_ms));
            refusal.is_some()
        };
        assert!(is_refused_after_failure(999));
        assert_eq!(find_refusal(&cache, &charges, sent + ms(1000)), None);
        assert!(!is_refused_after_failure(1000));
    }

    #[test]
    fn one_request_asks_again_while_others_are_refused_and_an_outage_needs_no_fresh_entry() {
        let (cache, key, sent) = (DenyCache::default(), key("a"), Instant::now());
        let charges = [charge_of_two_units(&LIMIT, &key)];
        let is_refused = |after_ms| find_refusal(&cache, &charges, sent + ms(after_ms)).is_some();
        let is_refused_after_failure = |after_ms| {
            let refusal = cache.find_any_refusal(&charges, sent + ms(after_ms));
            refusal.is_some()
        };
        cache.record_refusal(
            &charges,
            &refused_decision(&[refused_status(2_000_000)]),
            sent,
            sent,
        );
        let answers = [999, 1000, 1001, 1249, 1250, 1251].map(&is_refused);
        assert_eq!(answers, [true, false, true, true, false, true]);
        let answers = [1250, 1999, 2000].map(is_refused_after_failure);
        assert_eq!(answers, [true, true, false], "until the refusal ends");
        let asked = sent + ms(1010);
        cache.record_refusal(
            &charges,
            &refused_decision(&[refused_status(9_000_000)]),
            asked,
            asked,
        );
        assert!(is_refused(2009) && !is_refused(2010) && is_refused(2011));
        cache.forget_refusals(&charges, &Decision::without_outcomes(&charges));
        assert!(!is_refused(2012), "the request that asked was admitted");
    }

    #[test]
    fn a_request_without_cost_does_not_prolong_an_expired_refusal() {
        let (cache, key, sent) = (DenyCache::default(), key("a"), Instant::now());
        let charges = [charge_of_two_units(&LIMIT, &key)];
        let refused = refused_decision(&[refused_status(9_000_000)]);
        cache.record_refusal(&charges, &refused, sent, sent);
        let find = |charges: &[PolicyCharges<'_>]| find_refusal(&cache, charges, sent + ms(1001));
        let reading = [charges[0].with_cost(0)];
        assert!(find(&reading).is_none());
        assert!(find(&charges).is_none(), "this request asks Redis");
        assert!(find(&charges).is_some(), "others wait for its answer");
    }

    /// The limits of a refused request whose counters give no answer, or count each rejected
    /// request, are read once per second.
    #[test]
    fn a_reading_without_an_answer_or_of_count_rejected_is_cached_for_a_second() {
        let (cache, sent) = (DenyCache::default(), Instant::now());
        let (unanswered, outdated, counting) = (key("a"), key("b"), key("c"));
        let charges = [
            charge_of_two_units(&LIMIT, &unanswered),
            charge_of_two_units(&LIMIT, &outdated),
            PolicyCharges {
                counts_rejected: true,
                ..charge_of_two_units(&LIMIT, &counting)
            },
        ];
        let refused = refused_decision(&[refused_status(9_000_000)]);
        cache.record_refusal(&charges[1..2], &refused, sent, sent);
        let read_at = sent + ms(1500);
        let mut reading = refused_decision(&[refused_status(9_000_000); 3]);
        for outcome in reading.outcomes_mut().take(2) {
            *outcome = ChargeOutcome::default();
        }
        cache.record_reading(&charges, &reading, (read_at, read_at), 0);
        let found = cache.find_fresh_statuses(&charges, read_at + ms(999));
        let found = found.unwrap();
        assert_eq!(found.unknown.as_slice(), [false; 3]);
        let refusals: Vec<_> = statuses_of(&found.decision)
            .iter()
            .map(Option::is_some)
            .collect();
        assert_eq!(refusals, [false, true, true]);
        let found = cache.find_statuses(&charges, read_at + ms(999)).unwrap();
        assert!(!found.is_certain, "Redis counts the rejected request");
        let refusal = cache.find_any_refusal(&charges[2..], read_at + ms(999));
        assert_eq!(refusal, None, "the call that failed may have counted it");
        let refusal = cache.find_any_refusal(&charges[..2], read_at + ms(999));
        assert!(refusal.is_some(), "the refusal that gave no newer answer");
        let found = cache.find_fresh_statuses(&charges, read_at + ms(1000));
        assert_eq!(found, None);
    }

    /// `None`: no certain refusal. Otherwise the positions that are not known.
    fn unknown_positions(
        cache: &DenyCache,
        charges: &[PolicyCharges<'_>],
        at: Instant,
    ) -> Option<Vec<usize>> {
        let found = cache.find_statuses(charges, at)?;
        let numbered = (0..)
            .zip(&found.unknown)
            .filter(|(_, is_unknown)| **is_unknown);
        let positions = numbered.map(|(position, _)| position).collect();
        found.is_certain.then_some(positions)
    }

    #[test]
    fn one_limit_refuses_and_the_unknown_ones_are_listed() {
        let (cache, a, b, sent) = (DenyCache::default(), key("a"), key("b"), Instant::now());
        let hourly = Limit {
            per_us: 3_600_000_000,
            ..LIMIT
        };
        let slots = Limit {
            algorithm: Algorithm::Concurrency { max_duration_us: 0 },
            ..LIMIT
        };
        let charges = [
            charge_of_two_units(&LIMIT, &a),
            charge_of_two_units(&hourly, &a),
            charge_of_two_units(&LIMIT, &b),
            charge_of_two_units(&slots, &b),
        ];
        let refused = refused_decision(&[refused_status(500_000)]);
        cache.record_refusal(&charges[..1], &refused, sent, sent);
        assert_eq!(unknown_positions(&cache, &charges, sent), Some(vec![1, 2]));
        let available = LimitStatus {
            refusal: None,
            ..refused_status(500_000)
        };
        let statuses = refused_decision(&[refused_status(500_000), available]);
        cache.record_refusal(&charges[..2], &statuses, sent, sent);
        assert_eq!(unknown_positions(&cache, &charges, sent), Some(vec![2]));
        assert_eq!(unknown_positions(&cache, &charges[2..], sent), None);
        let cheaper = charges.each_ref().map(|charge| charge.with_cost(1));
        assert_eq!(unknown_positions(&cache, &cheaper, sent), None);
        let counting = PolicyCharges {
            counts_rejected: true,
            ..charges[2].clone()
        };
        let [first, second, ..] = charges;
        let counted = [first, second, counting];
        assert_eq!(unknown_positions(&cache, &counted, sent), None);
    }

    /// A block lasts, and the units of estimates in flight may be returned.
    #[test]
    fn an_estimate_refuses_nothing_but_its_retry_time_is_kept() {
        const BLOCK: Limit = Limit {
            requests: 1,
            per_us: 5_000_000,
            algorithm: Algorithm::Block,
        };
        let (cache, key, sent) = (DenyCache::default(), key("a"), Instant::now());
        let estimate = charge_of_two_units(&LIMIT, &key).with_estimate();
        let charges = [PolicyCharges::new(&BLOCK, &key, 1), estimate];
        let statuses = [refused_status(5_000_000), refused_status(60_000_000)];
        cache.record_refusal(&charges, &refused_decision(&statuses), sent, sent);
        let refusal = find_refusal(&cache, &charges, sent + ms(999)).unwrap();
        assert_eq!(statuses_of(&refusal), statuses.map(Some));
        assert!(!cache.find_statuses(&charges[1..], sent).unwrap().is_certain);
        assert_eq!(cache.find_any_refusal(&charges[1..], sent), None);
    }

    /// The clocks of the nodes of a cluster differ.
    #[test]
    fn statuses_of_different_clocks_are_converted_to_one() {
        let (cache, a, b, sent) = (DenyCache::default(), key("a"), key("b"), Instant::now());
        let charges = [&a, &b].map(|key| charge_of_two_units(&LIMIT, key));
        cache.record_refusal(
            &charges[..1],
            &refused_decision(&[refused_status(2_000_000)]),
            sent,
            sent,
        );
        let other = Decision {
            now_us: 1_000_000,
            ..refused_decision(&[LimitStatus {
                next_growth_us: Some(31_000_000),
                refusal: Some(Refusal::Until(31_000_000)),
                ..refused_status(0)
            }])
        };
        cache.record_refusal(&charges[1..], &other, sent, sent);
        let refusal = find_refusal(&cache, &charges, sent + ms(100)).unwrap();
        let wait_us = |position: usize| match refusal
            .outcomes()
            .nth(position)
            .unwrap()
            .status
            .unwrap()
            .refusal
        {
            Some(Refusal::Until(at_us)) => at_us - refusal.now_us,
            other => panic!("{other:?}"),
        };
        assert_eq!([0, 1].map(wait_us), [1_900_000, 29_900_000]);
    }

    /// Otherwise the limit would never be read again while others refuse first.
    #[test]
    fn a_prolonged_entry_does_not_answer_a_request_that_asks() {
        let (cache, key, sent) = (DenyCache::default(), key("a"), Instant::now());
        let charges = [charge_of_two_units(&LIMIT, &key)];
        let refused = refused_decision(&[refused_status(9_000_000)]);
        cache.record_refusal(&charges, &refused, sent, sent);
        let later = sent + ms(1_000);
        assert!(
            cache
                .find_fresh_statuses(&charges, sent + ms(999))
                .is_some()
        );
        assert_eq!(cache.find_statuses(&charges, later), None);
        assert!(cache.find_statuses(&charges, later).is_some());
        assert_eq!(cache.find_fresh_statuses(&charges, later), None);
    }

    #[test]
    fn a_refusal_of_a_leased_limit_is_cached_for_20_ms_at_most() {
        let (cache, key, sent) = (DenyCache::default(), key("a"), Instant::now());
        let cached_ms = |ttl_us, after_us| {
            let lease = Some(LeaseTerms { size: None, ttl_us });
            let charges = [PolicyCharges {
                lease,
                ..charge_of_two_units(&LIMIT, &key)
            }];
            cache.record_refusal(
                &charges,
                &refused_decision(&[refused_status(after_us)]),
                sent,
                sent,
            );
            (0..2000).find(|n| find_refusal(&cache, &charges, sent + ms(*n)).is_none())
        };
        assert_eq!(cached_ms(100_000, 9_000_000), Some(20));
        assert_eq!(cached_ms(5_000, 9_000_000), Some(5));
        assert_eq!(
            cached_ms(100_000, 3_000),
            Some(3),
            "a client that waits for Retry-After is not refused"
        );
    }

    #[test]
    fn a_refusal_does_not_match_smaller_costs_other_limits_other_keys_or_shadows() {
        let (cache, a, b, sent) = (DenyCache::default(), key("a"), key("b"), Instant::now());
        let refused_charge = &charge_of_two_units(&LIMIT, &a);
        cache.record_refusal(
            from_ref(refused_charge),
            &refused_decision(&[refused_status(500_000)]),
            sent,
            sent,
        );
        let raised = Limit {
            requests: 6,
            ..LIMIT
        };
        let is_refused =
            |charge: &PolicyCharges<'_>| find_refusal(&cache, from_ref(charge), sent).is_some();
        let is_refused_after_failure =
            |charge: &PolicyCharges<'_>| cache.find_any_refusal(from_ref(charge), sent).is_some();
        assert!(is_refused(refused_charge));
        for other in [
            refused_charge.with_cost(1),
            refused_charge.with_limit(&raised),
            PolicyCharges {
                key: Cow::Borrowed(&b),
                ..refused_charge.clone()
            },
            PolicyCharges {
                shadow: true,
                ..refused_charge.clone()
            },
        ] {
            assert!(
                !is_refused(&other) && !is_refused_after_failure(&other),
                "{other:?}"
            );
        }
        let larger = &refused_charge.with_cost(3);
        assert!(!is_refused(larger), "the time for a larger cost is unknown");
        assert!(is_refused_after_failure(larger));
    }

    #[test]
    fn a_full_counter_of_responses_refuses_no_request() {
        let (cache, sent) = (DenyCache::default(), Instant::now());
        let (requests, responses) = (key("a"), key("a").to_response_counter_key());
        let charges = [
            charge_of_two_units(&LIMIT, &requests).with_estimate(),
            charge_of_two_units(&LIMIT, &responses).to_read(),
        ];
        let refused = [refused_status(500_000), refused_status(500_000)];
        cache.record_refusal(&charges, &refused_decision(&refused), sent, sent);
        let found = cache.find_statuses(&charges, sent).unwrap();
        assert!(!found.is_certain && !found.unknown.contains(&true));
        assert_eq!(statuses_of(&found.decision), [Some(refused[0]), None]);
        assert_eq!(cache.find_any_refusal(&charges, sent), None);
    }

    #[test]
    fn one_exhausted_limit_refuses_and_the_other_limits_are_not_reported() {
        let (cache, a, b, sent) = (DenyCache::default(), key("a"), key("b"), Instant::now());
        let c = key("c");
        let available = LimitStatus {
            remaining: 3,
            next_growth_us: Some(NOW_US + 200_000),
            refusal: None,
            in_effect: None,
        };
        let charges = [
            charge_of_two_units(&LIMIT, &a),
            charge_of_two_units(&LIMIT, &b),
        ];
        cache.record_refusal(
            &charges,
            &refused_decision(&[refused_status(500_000), available]),
            sent,
            sent,
        );
        let answer = find_refusal(&cache, &charges, sent + ms(100)).unwrap();
        assert_eq!(
            statuses_of(&answer),
            [Some(refused_status(500_000)), None],
            "another worker may have charged the other limit since"
        );
        let answer = find_refusal(&cache, &charges, sent + ms(200)).unwrap();
        assert_eq!(statuses_of(&answer), [Some(refused_status(500_000)), None]);
        assert_eq!(
            find_refusal(&cache, &charges[1..], sent),
            None,
            "a limit with capacity refuses no request"
        );

        let with_unknown = [charges[0].clone(), charge_of_two_units(&LIMIT, &c)];
        assert_eq!(
            find_refusal(&cache, &with_unknown, sent),
            None,
            "the unknown limit might refuse for longer"
        );
        let answer = cache.find_any_refusal(&with_unknown, sent).unwrap();
        assert_eq!(statuses_of(&answer), [Some(refused_status(500_000)), None]);
        let shadow = [
            charges[0].clone(),
            PolicyCharges {
                shadow: true,
                ..with_unknown[1].clone()
            },
        ];
        assert!(
            find_refusal(&cache, &shadow, sent).is_some(),
            "shadow limits need no entry"
        );
    }

    /// Both generations of a cache can have an entry of one counter, and a rotation brings the
    /// older one back.
    #[test]
    fn an_older_admitting_reading_does_not_return_after_a_rotation() {
        let (cache, key, start) = (DenyCache::default(), key("a"), Instant::now());
        let charges = [charge_of_two_units(&LIMIT, &key)];
        let admitted = LimitStatus {
            remaining: 5,
            next_growth_us: None,
            refusal: None,
            in_effect: None,
        };
        let reading = refused_decision(&[admitted]);
        cache.record_reading(&charges, &reading, (start, start), 100_000_000);
        let other = self::key("other");
        let record_refusal_of = |key: &Key, at: Instant| {
            let refused = refused_decision(&[refused_status(9_000_000)]);
            cache.record_refusal(&[charge_of_two_units(&LIMIT, key)], &refused, at, at);
        };
        let rotation = GENERATION_DURATION;
        record_refusal_of(&other, start + rotation);
        let refused_at = start + rotation + ms(900);
        record_refusal_of(&key, refused_at);
        record_refusal_of(&other, start + rotation * 2);
        let at = refused_at + ms(500);
        assert!(find_refusal(&cache, &charges, at).is_some());
    }

    #[test]
    fn a_larger_refused_cost_does_not_replace_a_smaller_one() {
        let (cache, key, sent) = (DenyCache::default(), key("a"), Instant::now());
        let small = [charge_of_two_units(&LIMIT, &key)];
        let large = [small[0].with_cost(4)];
        cache.record_refusal(
            &small,
            &refused_decision(&[refused_status(500_000)]),
            sent,
            sent,
        );
        cache.record_refusal(
            &large,
            &refused_decision(&[refused_status(700_000)]),
            sent,
            sent,
        );
        assert!(find_refusal(&cache, &small, sent).is_some());
    }

    /// Charges of an outage can fill a counter beyond its capacity. Then even a query without cost
    /// is refused, for another time than requests.
    #[test]
    fn a_refused_query_does_not_displace_the_refusal_of_a_request() {
        let (cache, key, sent) = (DenyCache::default(), key("a"), Instant::now());
        let request = &[charge_of_two_units(&LIMIT, &key)];
        let query = &[request[0].with_cost(0)];
        let refused = refused_decision(&[refused_status(9_000_000)]);
        let is_refused = |charges| find_refusal(&cache, charges, sent).is_some();
        cache.record_refusal(query, &refused, sent, sent);
        assert!(is_refused(query) && !is_refused(request));
        for charges in [request, query] {
            cache.record_refusal(charges, &refused, sent, sent);
            assert!(is_refused(request), "after {charges:?}");
        }
    }

    #[test]
    fn an_admitted_smaller_cost_makes_the_remaining_units_of_a_refusal_obsolete() {
        let (cache, key, sent) = (DenyCache::default(), key("a"), Instant::now());
        let large = [charge_of_two_units(&LIMIT, &key)];
        let small = [large[0].with_cost(1)];
        let is_refused_after_small_charge = |remaining| {
            let status = LimitStatus {
                remaining,
                ..refused_status(500_000)
            };
            cache.record_refusal(&large, &refused_decision(&[status]), sent, sent);
            cache.forget_refusals(&small, &Decision::without_outcomes(&small));
            find_refusal(&cache, &large, sent).is_some()
        };
        assert!(is_refused_after_small_charge(0) && !is_refused_after_small_charge(1));
    }

    #[test]
    fn a_permanent_refusal_is_cached_without_an_end_time() {
        let (cache, key, sent) = (DenyCache::default(), key("a"), Instant::now());
        let charge_above_limit = [charge_of_two_units(&LIMIT, &key).with_cost(6)];
        let never = LimitStatus {
            remaining: 5,
            next_growth_us: None,
            refusal: Some(Refusal::Never),
            in_effect: None,
        };
        cache.record_refusal(&charge_above_limit, &refused_decision(&[never]), sent, sent);
        assert_eq!(
            statuses_of(&find_refusal(&cache, &charge_above_limit, sent).unwrap()),
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
                &[charge_of_two_units(&LIMIT, key)],
                &refused_decision(&[refused_status(500_000)]),
                start,
                start,
            );
        }
        assert_eq!(cache.0.lock().current.len(), MAX_GENERATION_ENTRIES);
        let later = start + 2 * MAX_AGE;
        let last = [charge_of_two_units(
            &LIMIT,
            &keys[2 * MAX_GENERATION_ENTRIES],
        )];
        cache.record_refusal(
            &last,
            &refused_decision(&[refused_status(500_000)]),
            later,
            later,
        );
        assert!(find_refusal(&cache, &last, later).is_some());
    }
}
