//! Rate limiting in this process while Redis is unavailable: `on_store_failure = "local"`.
//!
//! Each instance enforces its [`Share`] of every limit. A key starts from the last status that
//! Redis reported ([`status_cache`]). Admitted charges are recorded ([`write_back`]) and written
//! back when Redis is available again.
//!
//! An outage ends in two steps, because instances reconnect at different times. Until an instance
//! has written back, Redis lacks its charges. Until all instances have written back
//! ([`super::redis`] tracks this), a request has to pass both the share and Redis.
//!
//! In a cluster some slots may be unavailable while others are not. The store records which of its
//! partitions are affected, so available partitions are decided by Redis alone.
//!
//! Each process has one fallback store, shared by its workers.

pub(super) mod outage_usage;
mod share;
mod status_cache;
pub(super) mod usage_directory;
mod write_back;

pub use share::Share;
pub use status_cache::STATUS_EXCHANGE_US;

use super::memory::{CounterId, MemorySettings, MemoryStore, counter_id};
use super::{PendingSettlement, Settlement};
use crate::clock::Clock;
use crate::limiter::{
    Amendment, Charge, CounterRef, Decision, Key, OverriddenCharges, PolicyCharges, Refusal,
    RequestPart, each_charge,
};
use parking_lot::{Mutex, MutexGuard, RwLock};
use smallvec::SmallVec;
use status_cache::{CachedOverride, CounterCache, StatusCache};
use std::collections::{BTreeSet, HashSet};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::Instant;
use tokio::sync::Notify;
use write_back::WriteBackTable;

/// Bounds of the counters of an outage; the least used counters are evicted first.
const COUNTER_BOUNDS: MemorySettings = MemorySettings {
    max_keys: 1 << 17,
    max_bytes: 64 << 20,
};

/// The only partition of a store without slots.
pub(super) const SINGLE_PARTITION: u16 = 0;

/// Whether Redis has all charges. The last two are phases of an outage.
#[derive(Clone, Copy, Debug)]
enum OutagePhase {
    /// Redis has all charges and decides alone.
    UpToDate,
    /// Charges wait for write-back, because single calls have failed.
    PendingWithoutOutage,
    /// Redis was unreachable since the last call of [`FallbackStore::take_new_failure_flag`].
    Failing,
    /// No new failure, but not all instances have written back.
    Recovering,
}

/// Decides charges in this process while Redis is unavailable.
#[derive(Debug)]
pub struct FallbackStore {
    clock: Clock,
    memory: MemoryStore,
    share: RwLock<Share>,
    status_cache: StatusCache,
    /// The last override that Redis reported for each counter of a `dynamic` policy: 2 × 2048
    /// entries in each of 16 shards, of about 100 bytes each, so 6 MiB at most. Keys whose override
    /// is dropped get the limits of the file.
    override_cache: CounterCache<CachedOverride, 2048>,
    /// Overrides that Redis reported and that differed from the last ones, since the start.
    pub(super) override_change_count: AtomicU64,
    /// The charges that Redis may lack. Process-wide. Requests lock it in an outage; slot releases
    /// and heartbeats lock it at any time.
    write_back: Mutex<WriteBackTable>,
    /// The [`OutagePhase`]. [`FallbackStore::enter_phase`] needs the lock of `write_back`; requests
    /// read it without a lock.
    phase: AtomicU8,
    /// End of the last outage, by the local clock (µs).
    outage_ended_us: AtomicU64,
    /// Partitions for which Redis may lack charges. Empty in the phase [`OutagePhase::UpToDate`].
    /// Process-wide; requests read it in any other phase.
    stale_partitions: RwLock<BTreeSet<u16>>,
    /// Function that finds the partition of a key.
    partition_of: fn(&Key) -> u16,
    /// Wakes the background task.
    changed: Notify,
}

impl FallbackStore {
    /// Creates a store that assumes `instances` instances until the instances are counted.
    pub fn new(instances: u32, clock: Clock) -> Self {
        Self {
            memory: MemoryStore::new(COUNTER_BOUNDS, clock.clone()),
            clock,
            share: RwLock::new(Share::with_unknown_rank(instances)),
            status_cache: StatusCache::default(),
            override_cache: CounterCache::default(),
            override_change_count: AtomicU64::new(0),
            write_back: Mutex::default(),
            phase: AtomicU8::new(OutagePhase::UpToDate as u8),
            outage_ended_us: AtomicU64::new(0),
            stale_partitions: RwLock::default(),
            partition_of: |_| SINGLE_PARTITION,
            changed: Notify::new(),
        }
    }

    /// Sets the function that finds the partition of a key, for a store of which single partitions
    /// may be unavailable.
    pub fn with_partitions(self, partition_of: fn(&Key) -> u16) -> Self {
        Self {
            partition_of,
            ..self
        }
    }

    /// Decides the charges of `local` policies without Redis, all or nothing; other charges have no
    /// status. Admitted charges will be written back.
    pub fn decide(&self, request: &[PolicyCharges<'_>], requested_at: Instant) -> Decision {
        match self.find_overrides(request, requested_at) {
            Some(overridden) => overridden.decide(
                |limited| self.decide_by_limits(limited, requested_at),
                |late| self.decide_by_share(late, |_| true, requested_at),
            ),
            None => self.decide_by_limits(request, requested_at),
        }
    }

    /// The last known overrides of the keys of charges that this process decides in an outage.
    fn find_overrides<'r, 'c>(
        &self,
        request: &'r [PolicyCharges<'c>],
        requested_at: Instant,
    ) -> Option<OverriddenCharges<'r, 'c>> {
        let now_us = self.clock.instant_to_unix_us(requested_at);
        OverriddenCharges::resolve(request, |charge| {
            if !uses_fallback(charge.policy) {
                return None;
            }
            let cached = self.override_cache.find(counter_id(charge.counter()))?;
            let is_current = cached.ends_us.is_none_or(|ends_us| now_us < ends_us);
            is_current.then(|| {
                // Decisions report the wall clock.
                let shift_us = self.clock.known_wall_shift_us();
                let ends_us = cached
                    .ends_us
                    .map(|at_us| at_us.saturating_add_signed(shift_us));
                (cached.in_effect.clamp_to(charge.limit), ends_us)
            })
        })
    }

    /// Checks the share in addition to Redis while an outage ends. Returns `None` if Redis decides
    /// no charge that is affected by the outage. Charges that are held back are left to
    /// [`FallbackStore::decide`], which would count them in the share again.
    pub fn check_share_during_recovery(
        &self,
        request: &[PolicyCharges<'_>],
        requested_at: Instant,
    ) -> Option<Decision> {
        let Some(overridden) = self.find_overrides(request, requested_at) else {
            return self.check_share(request, requested_at);
        };
        let limited = overridden.limited_charges();
        let checked = self.check_share(&limited.policies, requested_at)?;
        Some(overridden.complete_decision(&limited, checked))
    }

    /// Decides charges by this instance's share of their limits.
    fn decide_by_limits(&self, request: &[PolicyCharges<'_>], requested_at: Instant) -> Decision {
        let local = each_charge(request).filter(|charge| uses_fallback(charge.policy));
        for charge in local.clone() {
            // A concurrent charge must not be overwritten by the counter that this creates.
            let id = counter_id(charge.counter());
            self.status_cache.remove_and_apply(id, |status| {
                self.apply_status(&charge, status, requested_at);
            });
        }
        let decision = self.decide_by_share(request, uses_fallback, requested_at);
        if decision.admitted {
            let now_us = self.clock.instant_to_unix_us(requested_at);
            let charged = local.filter(|charge| charge.cost > 0 && !charge.is_read);
            if self.record_charges(charged, now_us) {
                self.changed.notify_one();
            }
        } else {
            // The refusal may have started a block.
            for block in local.filter(Charge::is_block) {
                self.record_counter(&block);
            }
        }
        decision
    }

    /// [`Self::check_share_during_recovery`] for charges with their limits in effect.
    fn check_share(
        &self,
        request: &[PolicyCharges<'_>],
        requested_at: Instant,
    ) -> Option<Decision> {
        let is_checked =
            |policy: &PolicyCharges<'_>| self.uses_share_for(policy) && !policy.is_held_back;
        let mut checked = each_charge(request).filter(|charge| is_checked(charge.policy));
        self.record_counter(&checked.next()?);
        checked.for_each(|charge| self.record_counter(&charge));
        Some(self.decide_by_share(request, is_checked, requested_at))
    }

    /// Partition that holds a key.
    pub fn partition(&self, key: &Key) -> u16 {
        (self.partition_of)(key)
    }

    /// This instance's part of every limit.
    pub fn share(&self) -> Share {
        *self.share.read()
    }

    pub fn set_share(&self, share: Share) {
        *self.share.write() = share;
    }

    /// Whether any partition is in an outage that has not ended.
    pub fn is_in_outage(&self) -> bool {
        self.phase.load(Ordering::Relaxed) >= OutagePhase::Failing as u8
    }

    /// Whether any partition is in an outage, or the last outage ended less than
    /// [`STATUS_EXCHANGE_US`] ago. A new outage then counts as the same one.
    pub fn is_near_outage(&self) -> bool {
        let ended_us = self.outage_ended_us.load(Ordering::Relaxed);
        self.is_in_outage() || self.clock.now_us().saturating_sub(ended_us) < STATUS_EXCHANGE_US
    }

    /// Whether a partition with any of these counters is in an outage that has not ended.
    pub fn is_in_outage_for(&self, request: &[PolicyCharges<'_>]) -> bool {
        self.is_in_outage() && request.iter().any(|policy| self.may_be_stale(policy))
    }

    /// Whether Redis may lack charges of a partition.
    pub fn is_stale(&self, partition: u16) -> bool {
        self.stale_partitions.read().contains(&partition)
    }

    /// Marks these partitions as unreachable. An empty iterator changes nothing.
    pub fn mark_partitions_unreachable(&self, partitions: impl IntoIterator<Item = u16>) {
        for partition in partitions {
            // Read first: in an outage every request calls this, and a lock would contend.
            if self.is_stale(partition) && self.is_in_phase(OutagePhase::Failing) {
                continue;
            }
            let write_back = self.write_back.lock();
            self.stale_partitions.write().insert(partition);
            if !self.is_in_phase(OutagePhase::Failing) {
                self.enter_phase(&write_back, OutagePhase::Failing);
                self.changed.notify_one();
            }
        }
    }

    /// Returns whether Redis was unreachable since the last call of this function. If so, the phase
    /// of recovery begins.
    pub fn take_new_failure_flag(&self) -> bool {
        let write_back = self.write_back.lock();
        let has_failed = self.is_in_phase(OutagePhase::Failing);
        if has_failed {
            self.enter_phase(&write_back, OutagePhase::Recovering);
        }
        has_failed
    }

    /// Ends the outage after all charges were written back: Redis decides alone again. The outage
    /// goes on if Redis was unreachable since [`FallbackStore::take_new_failure_flag`].
    pub fn end_outage(&self) {
        let write_back = self.write_back.lock();
        if self.is_in_phase(OutagePhase::Recovering) {
            self.enter_phase(&write_back, OutagePhase::PendingWithoutOutage);
            let now_us = self.clock.now_us();
            self.outage_ended_us.store(now_us, Ordering::Relaxed);
        }
        drop(write_back);
        self.confirm_write_back_batch();
    }

    /// Records charges for write-back. Begins the pending phase if Redis was up to date, and
    /// returns whether the phase began.
    fn record_charges<'c, 'a: 'c>(
        &self,
        charges: impl Iterator<Item = Charge<'c, 'a>>,
        now_us: u64,
    ) -> bool {
        let mut write_back = self.write_back.lock();
        for charge in charges {
            let partition = self.partition(charge.key);
            // Reading contends less with the workers that read it for each charge.
            if !self.is_stale(partition) {
                self.stale_partitions.write().insert(partition);
            }
            write_back.record_charge(&charge, partition, now_us);
        }
        let begins = self.is_in_phase(OutagePhase::UpToDate) && !write_back.is_empty();
        if begins {
            self.enter_phase(&write_back, OutagePhase::PendingWithoutOutage);
        }
        begins
    }

    fn is_in_phase(&self, phase: OutagePhase) -> bool {
        self.phase.load(Ordering::Relaxed) == phase as u8
    }

    /// Takes the lock that every change of the phase needs.
    fn enter_phase(&self, _write_back: &MutexGuard<'_, WriteBackTable>, phase: OutagePhase) {
        self.phase.store(phase as u8, Ordering::Relaxed);
    }

    /// Waits until the background task has work.
    pub async fn wait_for_change(&self) {
        self.changed.notified().await;
    }

    /// Whether this process decides the policy in an outage, and the outage of its counters has not
    /// ended.
    pub fn uses_share_for(&self, policy: &PolicyCharges<'_>) -> bool {
        uses_fallback(policy) && self.may_be_stale(policy)
    }

    /// Amends this process's counter of a limit.
    fn amend_share(&self, counter: CounterRef<'_>, amendment: Amendment) {
        let settlement = Settlement {
            limit: counter.limit,
            key: counter.key,
            amendment,
        };
        self.memory.amend_counter(&settlement, true);
    }

    /// Whether the answer of Redis for a policy may lack charges that are not written back yet.
    fn may_be_stale(&self, policy: &PolicyCharges<'_>) -> bool {
        !self.is_in_phase(OutagePhase::UpToDate) && self.is_stale(self.partition(&policy.key))
    }

    fn record_counter(&self, charge: &Charge<'_, '_>) {
        let partition = self.partition(charge.key);
        self.write_back.lock().record_counter(charge, partition);
    }

    /// Decides the policies that meet a condition. All other charges have no status.
    fn decide_by_share(
        &self,
        request: &[PolicyCharges<'_>],
        is_decided: impl Fn(&PolicyCharges<'_>) -> bool,
        requested_at: Instant,
    ) -> Decision {
        let share = self.share();
        let part = RequestPart::new(request, |charge| is_decided(charge.policy));
        let scaled = part.policies.iter().map(|policy| {
            policy.map_limits(|charge| charge.limit = share.scale_limit(&charge.limit))
        });
        let scaled: SmallVec<[_; 2]> = scaled.collect();
        let mut decision = self.memory.decide_at(&scaled, requested_at);
        for (charge, outcome) in each_charge(&part.policies).zip(decision.outcomes_mut()) {
            // Charge times of the local counter do not apply to Redis. Without them, settlements
            // can charge further units, but can't credit any.
            outcome.charged_at_us = None;
            // A permanent refusal by the share has an unknown end if the request fits the whole
            // limit: it lasts as long as the outage.
            let capacity = charge.limit.capacity();
            if let Some(status) = &mut outcome.status
                && status.refusal == Some(Refusal::Never)
                && capacity > 0
                && charge.cost <= capacity
            {
                status.refusal = Some(Refusal::Unknown);
            }
        }
        part.expand(decision)
    }

    /// Applies settlements to local counters: of charges decided here, and of slots counted here.
    pub fn apply_settlements(&self, settlements: &[Settlement<'_>]) {
        for settlement in settlements {
            let counter = settlement.counter();
            let applies = match settlement.amendment {
                Amendment::Release { slot } => {
                    (self.write_back.lock()).remove_released_slot(counter, slot);
                    true
                }
                Amendment::Renew { .. } => true,
                Amendment::Charge(_) => self.is_in_outage(),
                // Ignored credits make the share too strict, but only for a short time.
                Amendment::Credit { .. } | Amendment::BackdatedCharge { .. } => false,
            };
            if applies && counter.key.is_response_counter_key() && self.has_request_counter(counter)
            {
                // A decision only reads this counter, so the first response creates it.
                self.amend_share(counter, settlement.amendment);
            } else if applies {
                self.memory.amend_counter(settlement, false);
            }
        }
    }

    /// Records a settlement that could not be sent to Redis, for write-back. Applies only to
    /// further units of a counter that this process has; returns whether it was recorded.
    pub fn defer_settlement(&self, settlement: &Settlement<'_>) -> bool {
        let Amendment::Charge(units) = settlement.amendment else {
            return false;
        };
        let is_counted_here = self.has_request_counter(settlement.counter());
        if is_counted_here {
            let charge = [PolicyCharges::new(settlement.limit, settlement.key, units)];
            self.record_charges(each_charge(&charge), self.clock.now_us());
        }
        is_counted_here
    }

    /// Whether this process has the counter of a limit; for the key of a response counter, the
    /// request counter of the limit.
    fn has_request_counter(&self, counter: CounterRef<'_>) -> bool {
        if !counter.key.is_response_counter_key() {
            return self.memory.contains_counter(counter);
        }
        let key = &counter.key.to_request_counter_key();
        self.memory.contains_counter(CounterRef { key, ..counter })
    }

    /// Whether charges wait for write-back or are being written back.
    pub fn has_pending_write_back(&self) -> bool {
        !self.write_back.lock().is_empty()
    }

    /// Takes a batch of charges to write back, without those of `unreachable` partitions. Returns
    /// the batch as amendments, with the ages of the charges at this moment. The batch stays
    /// pending until [`FallbackStore::confirm_write_back_batch`] or
    /// [`FallbackStore::requeue_unconfirmed`]. Returns `None` if no charges are left.
    pub fn take_write_back_batch(
        &self,
        unreachable: impl IntoIterator<Item = u16>,
    ) -> Option<Vec<PendingSettlement>> {
        let unreachable: HashSet<u16> = unreachable.into_iter().collect();
        let mut write_back = self.write_back.lock();
        let batch = write_back.take_batch(|partition| !unreachable.contains(&partition));
        let now_us = self.clock.now_us();
        let amendments = batch
            .iter()
            .flat_map(|pending| {
                pending.amendments(now_us, |counter| self.usage_of_share(counter).0)
            })
            .collect();
        (!batch.is_empty()).then_some(amendments)
    }

    /// Ends the write-back of a batch: all of it is in Redis.
    pub fn confirm_write_back_batch(&self) {
        self.requeue_unconfirmed([]);
    }

    /// Ends the write-back of a batch. Counters of the `unsent` settlements are pending again; all
    /// other counters of the batch are in Redis.
    pub fn requeue_unconfirmed<'l>(&self, unsent: impl IntoIterator<Item = &'l Settlement<'l>>) {
        let unsent_ids: HashSet<CounterId> = unsent
            .into_iter()
            .map(|settlement| counter_id(settlement.counter()))
            .collect();
        let mut write_back = self.write_back.lock();
        write_back.finish_batch(|id| !unsent_ids.contains(&id));
        if write_back.is_empty() && self.is_in_phase(OutagePhase::PendingWithoutOutage) {
            self.enter_phase(&write_back, OutagePhase::UpToDate);
            self.stale_partitions.write().clear();
            write_back.retain_counters_in_use(|counter| self.usage_of_share(counter).0 > 0);
        }
    }

    /// Used units of this instance's share, and when the first of them are free again.
    fn usage_of_share(&self, counter: CounterRef<'_>) -> (u64, Option<u64>) {
        let limit = self.share().scale_limit(counter.limit);
        let read = PolicyCharges::new(&limit, counter.key, 0);
        let decision = self.memory.decide(&[read]);
        decision.statuses().next().map_or((0, None), |status| {
            let units = limit.capacity().saturating_sub(status.remaining);
            let status = status.convert_clock(decision.now_us, self.clock.now_us());
            (units, status.next_growth_us)
        })
    }
}

/// Whether this process decides the charge in an outage.
fn uses_fallback(policy: &PolicyCharges<'_>) -> bool {
    policy.has_fallback && !policy.shadow
}

#[cfg(test)]
mod tests;
