//! Counters in this process, bounded by number and by bytes.
//!
//! Keys are spread over shards by their id, a cryptographic hash. A shard is therefore a random
//! sample of all keys, and no client can target one. A call locks the shards of all its keys in
//! ascending order, so that it is one atomic step.
//!
//! Above a bound, the policy that uses the most of it evicts one of its own counters: from a random
//! sample, an expired counter, else the one with the least of its quota used. A client therefore
//! cannot evict its own exhausted key by inventing keys ([decision
//! 36](../../docs/decisions/0036-fair-eviction.md)).

mod counter_shard;

pub(super) use counter_shard::{CounterId, counter_id};

use super::{Settlement, StoredOverride, override_end_us};
use crate::clock::{Clock, monotonic_now};
use crate::limiter::{
    Amendment, Charge, ChargeEffect, ChargeOutcome, CounterRef, CounterState, CounterView,
    Decision, Key, LeaseGrant, OverriddenCharges, PolicyCharges, PolicyOutcome, Refusal,
    compute_lease_grant, determine_effects, each_charge,
};
use counter_shard::{CounterShard, MemoryUsage, StoreBound, StoreTime, StoredCounter};
use foldhash::HashMap;
use parking_lot::{Mutex, MutexGuard, RwLock};
use smallvec::SmallVec;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Bounds of the memory store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemorySettings {
    /// Maximum number of counters, at least 1.
    pub max_keys: usize,
    /// Maximum estimated size of all counters in bytes, including the map.
    pub max_bytes: usize,
}

/// Maximum number of overrides: some 300 MiB without notes. Only operators add them.
pub const MAX_MEMORY_OVERRIDES: usize = 1 << 20;

/// Overrides by [`Key::id`].
type OverrideTable = HashMap<u128, StoredOverride>;

/// Counters of this process, and overrides, which end with it.
#[derive(Debug)]
pub struct MemoryStore {
    clock: Clock,
    settings: MemorySettings,
    /// Process-wide. A decision locks the shards of its charges, in ascending order.
    shards: Box<[Mutex<CounterShard>]>,
    usage: MemoryUsage,
    overrides: RwLock<OverrideTable>,
}

/// Up to this number of keys there is one shard.
const KEYS_PER_SHARD: usize = 1 << 14;
const MAX_SHARDS: usize = 64;

const SECOND_US: u64 = 1_000_000;

/// Counters checked for expiry by each call, so that memory is freed without pressure.
const MAX_SWEPT_PER_CALL: usize = 2;
/// Counters checked for expiry before one is evicted.
const MAX_SWEPT_AT_BOUND: usize = 32;

impl MemoryStore {
    pub fn new(settings: MemorySettings, clock: Clock) -> Self {
        let shards = (settings.max_keys / KEYS_PER_SHARD)
            .next_power_of_two()
            .clamp(1, MAX_SHARDS);
        Self {
            clock,
            settings,
            shards: (0..shards).map(|_| Mutex::default()).collect(),
            usage: MemoryUsage::default(),
            overrides: RwLock::default(),
        }
    }

    /// Decides all charges together, as [`super::Store::decide`] describes.
    pub fn decide(&self, request: &[PolicyCharges<'_>]) -> Decision {
        self.decide_at(request, monotonic_now())
    }

    /// Like [`MemoryStore::decide`], for a caller that has just read the clock.
    pub fn decide_at(&self, request: &[PolicyCharges<'_>], requested_at: Instant) -> Decision {
        let decide = |limited: &[PolicyCharges<'_>]| self.decide_by_limits(limited, requested_at);
        let is_dynamic = each_charge(request).any(|charge| charge.name.is_some());
        if is_dynamic && let Some(overridden) = self.find_overrides(request, requested_at) {
            return overridden.decide(decide, decide);
        }
        decide(request)
    }

    /// The overrides of the keys of charges. All charges of a key get the same one.
    fn find_overrides<'r, 'c>(
        &self,
        request: &'r [PolicyCharges<'c>],
        requested_at: Instant,
    ) -> Option<OverriddenCharges<'r, 'c>> {
        let now_us = self.clock.instant_to_unix_us(requested_at);
        let now_us = now_us.saturating_add_signed(self.clock.known_wall_shift_us());
        let overrides = self.overrides.read();
        OverriddenCharges::resolve(request, |charge| {
            let stored = overrides.get(&charge.key.quota_id())?;
            let rule = (!stored.is_expired(now_us)).then_some(&stored.rule)?;
            Some((
                rule.for_charge(charge)?,
                stored.expires_at_ms.map(override_end_us),
            ))
        })
    }

    fn decide_by_limits(&self, request: &[PolicyCharges<'_>], requested_at: Instant) -> Decision {
        let mut locked = self.lock_shards(each_charge(request).map(|charge| charge.counter()));
        let now_us = locked.advance_clock(requested_at);

        let refusals: SmallVec<[Option<Refusal>; 4]> = each_charge(request)
            .map(|charge| locked.view_counter(charge.counter(), |view| view.refusal(charge.cost)))
            .collect();
        let admitted = each_charge(request)
            .zip(&refusals)
            .all(|(charge, refusal)| !charge.is_enforced() || refusal.is_none());

        let mut delay_us = 0;
        let mut effects = determine_effects(request, &refusals)
            .into_iter()
            .zip(refusals);
        let mut policies: SmallVec<[PolicyOutcome; 1]> = request
            .iter()
            .map(|policy| {
                let decided = policy.charges().zip(effects.by_ref());
                let limits = decided.map(|(charge, (effect, refusal))| {
                    let outcome = locked.apply_effect(&charge, effect, refusal, &mut delay_us);
                    outcome.unwrap_or_default()
                });
                PolicyOutcome {
                    limits: limits.collect(),
                    grant: None,
                }
            })
            .collect();
        for (policy, outcome) in request.iter().zip(&mut policies) {
            outcome.grant = admitted
                .then(|| locked.grant_lease(policy, now_us))
                .flatten();
        }
        let reported_us = locked.time.wall_us;
        self.unlock_and_evict(locked, now_us);
        Decision {
            now_us: reported_us,
            admitted,
            policies,
            delay_us,
            may_have_charged: false,
        }
    }

    /// Charges a counter even above its limit, and returns the units in use afterwards. A charge of
    /// 0 units creates no counter.
    pub fn charge_unconditionally_at(
        &self,
        counter: CounterRef<'_>,
        units: u64,
        requested_at: Instant,
    ) -> u64 {
        let mut locked = self.lock_shards([counter]);
        let now_us = locked.advance_clock(requested_at);
        let used = |view: CounterView<'_>| view.used_units();
        let charge = |state: &mut CounterState, at_us| {
            state.amend(counter.limit, Amendment::Charge(units), at_us)
        };
        let used = match units {
            0 => locked.view_counter(counter, used),
            _ => locked.change_counter(counter, charge, used).unwrap_or(0),
        };
        self.unlock_and_evict(locked, now_us);
        used
    }

    /// Applies settlements, as [`super::Store::apply_settlements`] describes.
    pub fn apply_settlements(&self, settlements: &[Settlement<'_>]) {
        for settlement in settlements {
            self.amend_counter(settlement, true);
        }
    }

    /// Whether a counter exists.
    pub(super) fn contains_counter(&self, counter: CounterRef<'_>) -> bool {
        self.lock_shards([counter]).get_counter(counter).is_some()
    }

    /// Removes counters. Returns the number of counters that existed.
    pub fn remove_counters<'c>(
        &self,
        counters: impl IntoIterator<Item = CounterRef<'c>, IntoIter: Clone>,
    ) -> u64 {
        let counters = counters.into_iter();
        let mut locked = self.lock_shards(counters.clone());
        let removed = counters.filter(|counter| {
            let shard = locked.shard_mut(counter.key);
            shard.is_some_and(|shard| shard.remove_counter(&self.usage, *counter))
        });
        removed.count() as u64
    }

    /// Applies a settlement. Unless it `may_create` the counter, only if that exists.
    pub(super) fn amend_counter(&self, settlement: &Settlement<'_>, may_create: bool) {
        let counter = settlement.counter();
        let mut locked = self.lock_shards([counter]);
        let now_us = locked.advance_clock(monotonic_now());
        if may_create || locked.get_counter(counter).is_some() {
            let amend = |state: &mut CounterState, at_us| {
                state.amend(settlement.limit, settlement.amendment, at_us)
            };
            locked.change_counter(counter, amend, |_| ());
        }
        self.unlock_and_evict(locked, now_us);
    }

    /// Removes some expired counters, unlocks the shards, and evicts counters until both bounds
    /// hold.
    fn unlock_and_evict(&self, mut locked: LockedShards<'_>, now_us: u64) {
        for (_, shard) in &mut locked.shards {
            shard.sweep_expired(&self.usage, (now_us, &self.clock), MAX_SWEPT_PER_CALL);
        }
        let first_shard_index = locked.shards.first().map_or(0, |(index, _)| *index);
        drop(locked);
        self.enforce_bounds(first_shard_index, now_us);
    }

    /// Number of counters.
    pub fn key_count(&self) -> usize {
        self.usage.key_count.load(Ordering::Relaxed)
    }

    /// Estimated size of all counters in bytes.
    pub fn byte_count(&self) -> usize {
        self.usage.byte_count.load(Ordering::Relaxed)
    }

    /// Number of counters evicted before they expired.
    pub fn eviction_count(&self) -> u64 {
        self.usage.evictions.load(Ordering::Relaxed)
    }

    /// Locks shards in ascending order, so that two calls never deadlock.
    fn lock_shards<'c>(
        &self,
        counters: impl IntoIterator<Item = CounterRef<'c>>,
    ) -> LockedShards<'_> {
        let mut follows_wall_clock = false;
        let shard_indices = counters.into_iter().map(|counter| {
            follows_wall_clock |= counter.limit.algorithm.follows_wall_clock();
            self.shard_index(counter.key)
        });
        let mut shard_indices: SmallVec<[usize; 4]> = shard_indices.collect();
        shard_indices.sort_unstable();
        shard_indices.dedup();
        let shards = shard_indices
            .iter()
            .filter_map(|at| Some((*at, self.shards.get(*at)?.lock())))
            .collect();
        LockedShards {
            memory: self,
            shards,
            follows_wall_clock,
            time: StoreTime::default(),
        }
    }

    /// Selects a shard by the low bits of a cryptographic hash; the number of shards is a power of
    /// two.
    fn shard_index(&self, key: &Key) -> usize {
        usize::try_from(key.id() & 0xffff).unwrap_or(0) & (self.shards.len() - 1)
    }

    /// Evicts until both bounds hold, starting with the shard that grew.
    fn enforce_bounds(&self, first_shard_index: usize, now_us: u64) {
        for step in 0..self.shards.len() {
            if self.exceeded_bound().is_none() {
                return;
            }
            let Some(shard) = self
                .shards
                .get((first_shard_index + step) % self.shards.len())
            else {
                return;
            };
            let mut shard = shard.lock();
            shard.sweep_expired(&self.usage, (now_us, &self.clock), MAX_SWEPT_AT_BOUND);
            while let Some(bound) = self.exceeded_bound()
                && shard.evict_counter(&self.usage, now_us, bound)
            {}
        }
    }

    fn exceeded_bound(&self) -> Option<StoreBound> {
        if self.key_count() > self.settings.max_keys {
            Some(StoreBound::Keys)
        } else {
            (self.byte_count() > self.settings.max_bytes).then_some(StoreBound::Bytes)
        }
    }
}

impl MemoryStore {
    /// Sets the override of a key. Returns whether there was room for it.
    pub fn set_override(&self, stored: StoredOverride) -> bool {
        insert_override(&mut self.overrides.write(), stored, self.clock.wall_us())
    }

    /// Sets the override of a key if it still is `previous`. Returns whether it was, or `None` if
    /// there is no room for it.
    pub fn replace_override(
        &self,
        previous: Option<&StoredOverride>,
        stored: StoredOverride,
    ) -> Option<bool> {
        let (mut overrides, now_us) = (self.overrides.write(), self.clock.wall_us());
        let current = overrides.get(&stored.key.id());
        if current.filter(|stored| !stored.is_expired(now_us)) != previous {
            return Some(false);
        }
        insert_override(&mut overrides, stored, now_us).then_some(true)
    }

    /// Removes the override of a key. Returns the removed one.
    pub fn remove_override(&self, key: &Key) -> Option<StoredOverride> {
        let removed = self.overrides.write().remove(&key.id())?;
        (!removed.is_expired(self.clock.wall_us())).then_some(removed)
    }

    /// The override of a key.
    pub fn find_override(&self, key: &Key) -> Option<StoredOverride> {
        let stored = self.overrides.read().get(&key.id()).cloned()?;
        (!stored.is_expired(self.clock.wall_us())).then_some(stored)
    }

    /// All overrides, in no order.
    pub fn list_overrides(&self) -> Vec<StoredOverride> {
        let (overrides, now_us) = (self.overrides.read(), self.clock.wall_us());
        let current = overrides.values();
        let current = current.filter(|stored| !stored.is_expired(now_us));
        current.cloned().collect()
    }
}

/// Inserts or replaces an override. Returns false if the table is full.
fn insert_override(overrides: &mut OverrideTable, stored: StoredOverride, now_us: u64) -> bool {
    if overrides.len() >= MAX_MEMORY_OVERRIDES && !overrides.contains_key(&stored.key.id()) {
        overrides.retain(|_, stored| !stored.is_expired(now_us));
        if overrides.len() >= MAX_MEMORY_OVERRIDES {
            return false;
        }
    }
    overrides.insert(stored.key.id(), stored);
    true
}

/// The shards of one call, locked together, each with its index.
struct LockedShards<'a> {
    memory: &'a MemoryStore,
    shards: SmallVec<[(usize, MutexGuard<'a, CounterShard>); 4]>,
    /// Whether a limit of the call needs the wall clock.
    follows_wall_clock: bool,
    /// Set by [`LockedShards::advance_clock`].
    time: StoreTime,
}

impl LockedShards<'_> {
    /// Sets the time of the locked shards. The store's time never goes back, because a counter that
    /// expired once may already be removed.
    fn advance_clock(&mut self, requested_at: Instant) -> u64 {
        let newest_us = self.shards.iter().map(|(_, shard)| shard.newest_us);
        let earlier_us = newest_us.max().unwrap_or_default();
        let now_us = earlier_us.max(self.memory.clock.instant_to_unix_us(requested_at));
        for (_, shard) in &mut self.shards {
            shard.newest_us = now_us;
        }
        let clock = &self.memory.clock;
        // Other limits only report the wall clock: once per second is enough.
        let wall_shift_us =
            if self.follows_wall_clock || now_us / SECOND_US > earlier_us / SECOND_US {
                clock.wall_shift_us()
            } else {
                clock.known_wall_shift_us()
            };
        let wall_us = now_us.saturating_add_signed(wall_shift_us);
        let newest_wall_us = self.shards.iter().map(|(_, shard)| shard.newest_wall_us);
        let newest_wall_us = newest_wall_us.fold(wall_us, u64::max);
        for (_, shard) in &mut self.shards {
            shard.newest_wall_us = newest_wall_us;
        }
        self.time = StoreTime {
            now_us,
            wall_us,
            newest_wall_us,
        };
        now_us
    }

    /// Reads a counter; a missing counter reads as a fresh one.
    fn view_counter<T>(
        &self,
        counter: CounterRef<'_>,
        read_view: impl FnOnce(CounterView<'_>) -> T,
    ) -> T {
        self.time
            .view_counter(self.get_counter(counter), counter.limit, read_view)
    }

    /// Applies the effect of a decision to the counter of a charge. `refusal` was read before any
    /// counter changed. The largest delay stays in `delay_us`.
    fn apply_effect(
        &mut self,
        charge: &Charge<'_, '_>,
        effect: ChargeEffect,
        refusal: Option<Refusal>,
        delay_us: &mut u64,
    ) -> Option<ChargeOutcome> {
        let counter = charge.counter();
        let is_charged = effect == ChargeEffect::Charge;
        let read_view = |view: CounterView<'_>| {
            if is_charged && !charge.policy.shadow {
                *delay_us = view.delay_us().max(*delay_us);
            }
            // A rejected charge that is counted itself counts against the next request.
            let refusal = if effect == ChargeEffect::ChargeRejected {
                view.refusal(charge.cost)
            } else {
                refusal
            };
            let reports_charge_time = charge.is_estimate && is_charged;
            ChargeOutcome {
                status: Some(view.limit_status(refusal)),
                charged_at_us: reports_charge_time.then(|| view.charged_at_us()),
                ..ChargeOutcome::default()
            }
        };
        match effect {
            ChargeEffect::NoChange => Some(self.view_counter(counter, read_view)),
            ChargeEffect::Charge => {
                let change = |state: &mut CounterState, at_us| state.charge(charge, at_us);
                self.change_counter(counter, change, read_view)
            }
            ChargeEffect::ChargeRejected => {
                let change = |state: &mut CounterState, at_us| state.charge_rejected(charge, at_us);
                self.change_counter(counter, change, read_view)
            }
        }
    }

    /// Grants the lease that a policy requests, as far as units are available.
    fn grant_lease(&mut self, policy: &PolicyCharges<'_>, now_us: u64) -> Option<LeaseGrant> {
        let available_units = |charge: &Charge<'_, '_>, until_us| {
            let available = |view: CounterView<'_>| view.grantable_units(now_us, until_us);
            self.view_counter(charge.counter(), available)
        };
        let grant = compute_lease_grant(policy, now_us, available_units)?;
        for charge in policy.charges() {
            let grant_units = |state: &mut CounterState, at_us| {
                state.grant_lease(charge.limit, grant.units, at_us, grant.until_us)
            };
            self.change_counter(charge.counter(), grant_units, |_| ());
        }
        Some(grant)
    }

    /// Changes a counter, and reads it afterwards.
    fn change_counter<T>(
        &mut self,
        counter: CounterRef<'_>,
        change: impl FnOnce(&mut CounterState, u64),
        read_view: impl FnOnce(CounterView<'_>) -> T,
    ) -> Option<T> {
        let (usage, time) = (&self.memory.usage, self.time);
        let shard = self.shard_mut(counter.key)?;
        shard
            .change_counter(usage, counter, time, change)
            .map(read_view)
    }

    fn get_counter(&self, counter: CounterRef<'_>) -> Option<&StoredCounter> {
        let shard_index = self.memory.shard_index(counter.key);
        let (_, shard) = self.shards.iter().find(|(at, _)| *at == shard_index)?;
        shard.get_counter(counter)
    }

    fn shard_mut(&mut self, key: &Key) -> Option<&mut CounterShard> {
        let shard_index = self.memory.shard_index(key);
        self.shards
            .iter_mut()
            .find(|(at, _)| *at == shard_index)
            .map(|(_, shard)| &mut **shard)
    }
}

#[cfg(test)]
mod tests {
    use super::counter_shard::COUNTER_BYTES;
    use super::*;
    use crate::limiter::{Algorithm, KeyBuilder, Limit};

    const LIMIT: Limit = Limit {
        requests: 5,
        per_us: 60_000_000,
        algorithm: Algorithm::SlidingLog,
    };

    fn key_named(name: usize) -> Key {
        policy_key("p", name)
    }

    fn policy_key(policy: &str, name: usize) -> Key {
        let mut builder = KeyBuilder::new(policy);
        builder.push_key_value(Some(name.to_string().as_bytes()));
        builder.finish()
    }

    fn decide_one_unit(memory: &MemoryStore, limit: &Limit, key: &Key) -> bool {
        memory.decide(&[PolicyCharges::new(limit, key, 1)]).admitted
    }

    fn charge_unconditionally(memory: &MemoryStore, limit: &Limit, key: &Key, units: u64) -> u64 {
        memory.charge_unconditionally_at(CounterRef { limit, key }, units, Instant::now())
    }

    #[test]
    fn fresh_keys_never_evict_an_exhausted_key() {
        let (clock, _) = Clock::manual(1_000_000);
        let memory = MemoryStore::new(
            MemorySettings {
                max_keys: 100,
                max_bytes: 1 << 30,
            },
            clock,
        );
        let exhausted_key = key_named(0);
        assert_eq!(
            (0..6)
                .filter(|_| decide_one_unit(&memory, &LIMIT, &exhausted_key))
                .count(),
            5
        );
        for name in 1..5_000 {
            decide_one_unit(&memory, &LIMIT, &key_named(name));
            assert!(memory.key_count() <= 100);
        }
        assert!(!decide_one_unit(&memory, &LIMIT, &exhausted_key));
        assert_eq!(memory.eviction_count(), 4_900);
    }

    #[test]
    fn a_policy_within_its_fair_share_keeps_all_its_keys() {
        let (clock, _) = Clock::manual(1_000_000);
        let settings = MemorySettings {
            max_keys: 120,
            max_bytes: 1 << 30,
        };
        let memory = MemoryStore::new(settings, clock);
        let quiet_keys: Vec<Key> = (0..40)
            .flat_map(|name| [policy_key("a", name), policy_key("b", name)])
            .collect();
        for key in &quiet_keys {
            assert!(decide_one_unit(&memory, &LIMIT, key));
        }
        // One request exhausts each of these keys.
        let narrow_limit = Limit {
            requests: 1,
            per_us: LIMIT.per_us * 100,
            ..LIMIT
        };
        for name in 0..5_000 {
            let key = policy_key("flood", name);
            assert!(decide_one_unit(&memory, &narrow_limit, &key));
            assert!(!decide_one_unit(&memory, &narrow_limit, &key));
        }
        for key in &quiet_keys {
            let counter = CounterRef { limit: &LIMIT, key };
            assert!(memory.contains_counter(counter));
        }
        assert_eq!((memory.key_count(), memory.eviction_count()), (120, 4_960));
    }

    #[test]
    fn unconditional_charges_agree_with_decide_when_nothing_is_refused() {
        let settings = MemorySettings {
            max_keys: 1000,
            max_bytes: 1 << 30,
        };
        let (clock, manual_clock) = Clock::manual(1_000_000_000);
        let (charging_store, deciding_store) = (
            MemoryStore::new(settings, clock.clone()),
            MemoryStore::new(settings, clock),
        );
        let mut random = fastrand::Rng::with_seed(7);
        for algorithm in [
            Algorithm::SlidingWindow { buckets: 100 },
            Algorithm::FixedWindow { offset_us: 7 },
        ] {
            let limit = Limit {
                requests: 1 << 40,
                per_us: 60_000_000,
                algorithm,
            };
            for _ in 0..2_000 {
                manual_clock.advance_us(random.u64(..2_000_000));
                let (key, cost) = (key_named(random.usize(..5)), random.u64(..4));
                let charge = PolicyCharges::new(&limit, &key, cost);
                let used = charge_unconditionally(&charging_store, &limit, &key, cost);
                let status = deciding_store.decide(&[charge]).statuses().next().unwrap();
                assert_eq!(used, limit.requests - status.remaining);
            }
        }
        assert_eq!(charging_store.key_count(), deciding_store.key_count());
        // Units above the limit are counted too.
        let key = key_named(9);
        let used = [3, 4].map(|units| charge_unconditionally(&charging_store, &LIMIT, &key, units));
        assert_eq!(used, [3, 7]);
    }

    #[test]
    fn expired_keys_are_evicted_first_and_bytes_are_bounded() {
        let (clock, manual_clock) = Clock::manual(1_000_000);
        let memory = MemoryStore::new(
            MemorySettings {
                max_keys: 1000,
                max_bytes: 10 * COUNTER_BYTES + 1000,
            },
            clock,
        );
        for name in 0..5 {
            decide_one_unit(&memory, &LIMIT, &key_named(name));
        }
        manual_clock.advance_us(LIMIT.per_us);
        for name in 5..1000 {
            decide_one_unit(&memory, &LIMIT, &key_named(name));
            assert!(memory.byte_count() <= 10 * COUNTER_BYTES + 1000);
        }
        assert!(
            memory.eviction_count() <= 990,
            "expired keys are not evictions"
        );
    }

    #[test]
    fn expired_keys_are_swept_while_other_keys_are_used() {
        let (clock, manual_clock) = Clock::manual(1_000_000);
        let memory = MemoryStore::new(
            MemorySettings {
                max_keys: 100_000,
                max_bytes: 1 << 30,
            },
            clock,
        );
        for name in 0..1_000 {
            decide_one_unit(&memory, &LIMIT, &key_named(name));
        }
        manual_clock.advance_us(LIMIT.per_us);
        let expired_key = key_named(0);
        for _ in 0..8_000 {
            decide_one_unit(&memory, &LIMIT, &key_named(fastrand::usize(0..8)));
        }
        decide_one_unit(&memory, &LIMIT, &expired_key);
        assert!(memory.key_count() < 700, "{}", memory.key_count());
        assert_eq!(memory.eviction_count(), 0);
    }
}
