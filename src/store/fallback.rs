//! Limiting goes on in this process while Redis is away: `on_store_failure = "local"`.
//!
//! Each instance allows its *share* of every limit ([`Share`]). A key starts from the last answer that Redis gave
//! about it ([`answers`]), and what is admitted is noted ([`write_back`]) and written back when Redis is there again.
//!
//! An outage ends in two steps, because instances find Redis again one after the other: who is first would be
//! given what others have admitted and not yet written back. So from the first failure until all instances have
//! written back ([`super::redis`] finds that out) a request has to pass its share *and* Redis, if that answers.
//!
//! Of a cluster some slots may be away while others are not: all this is by parts of the store, and the others go on
//! as if nothing had happened.
//!
//! One per process, shared by its workers.

mod partition_set;
mod share;
mod standing_cache;
mod write_back;

pub use share::Share;

use super::Settlement;
use super::memory::{CounterId, MemorySettings, MemoryStore, counter_id};
use crate::clock::Clock;
use crate::limiter::{Algorithm, Amendment, Charge, Decision, Key, Limit, LimitStatus, Refusal};
use parking_lot::Mutex;
use partition_set::PartitionSet;
use smallvec::SmallVec;
use standing_cache::StandingCache;
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;
use tokio::sync::Notify;
use write_back::WriteBackTable;

/// Counters that an outage may make; the least used go first.
const COUNTER_BOUNDS: MemorySettings = MemorySettings {
    max_keys: 1 << 17,
    max_bytes: 64 << 20,
};

/// The part of a store that is in one piece.
pub(super) const SINGLE_PARTITION: u16 = 0;

/// What this process decides by while Redis is away.
#[derive(Debug)]
pub struct FallbackStore {
    clock: Clock,
    memory: MemoryStore,
    packed_share: AtomicU64,
    standing_cache: StandingCache,
    write_back: Mutex<WriteBackTable>,
    /// There are debts, or some are just being written back: what Redis answers may lack them.
    has_pending_write_back: AtomicBool,
    /// From the first failure until everybody has written back.
    is_in_outage: AtomicBool,
    /// About what is kept there Redis may not know all.
    stale_partitions: PartitionSet,
    /// Which part keeps a key.
    partition_of: fn(&Key) -> u16,
    /// A failure since somebody last asked.
    has_new_failure: AtomicBool,
    /// There is something for the background to do.
    changed: Notify,
}

/// Some debts on their way to Redis; see [`Local::owed`].
#[derive(Debug)]
pub struct WriteBackBatch(Vec<write_back::CounterWriteBack>);

impl WriteBackBatch {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl FallbackStore {
    /// For a fleet of so many instances, until more is known.
    pub fn new(instances: u32, clock: Clock) -> Self {
        Self {
            memory: MemoryStore::new(COUNTER_BOUNDS, clock.clone()),
            clock,
            packed_share: AtomicU64::new(Share::with_unknown_rank(instances).to_bits()),
            standing_cache: StandingCache::default(),
            write_back: Mutex::default(),
            has_pending_write_back: AtomicBool::new(false),
            is_in_outage: AtomicBool::new(false),
            stale_partitions: PartitionSet::default(),
            partition_of: |_| SINGLE_PARTITION,
            has_new_failure: AtomicBool::new(false),
            changed: Notify::new(),
        }
    }

    /// The same over a store in several parts, of which each may be away.
    pub fn with_partitions(self, partition_of: fn(&Key) -> u16) -> Self {
        Self {
            partition_of,
            ..self
        }
    }

    /// Which part keeps a key.
    pub fn partition(&self, key: &Key) -> u16 {
        (self.partition_of)(key)
    }

    /// This instance's part of every limit.
    pub fn share(&self) -> Share {
        Share::from_bits(self.packed_share.load(Ordering::Relaxed))
    }

    pub fn set_share(&self, share: Share) {
        self.packed_share.store(share.to_bits(), Ordering::Relaxed);
    }

    /// Whether an outage is not wholly over, of any part.
    pub fn is_in_outage(&self) -> bool {
        self.is_in_outage.load(Ordering::Relaxed)
    }

    /// The same, of a part that keeps any of these counters.
    pub fn is_in_outage_for(&self, charges: &[Charge<'_>]) -> bool {
        self.is_in_outage()
            && charges
                .iter()
                .any(|charge| self.stale_partitions.contains(self.partition(charge.key)))
    }

    /// These parts can't be reached, if any.
    pub fn mark_unreachable(&self, partitions: impl IntoIterator<Item = u16>) {
        let mut parts = partitions.into_iter().peekable();
        if parts.peek().is_none() {
            return;
        }
        parts.for_each(|part| self.stale_partitions.insert(part));
        // Read first: in an outage every request comes by.
        if !self.has_new_failure.load(Ordering::Relaxed) || !self.is_in_outage() {
            self.has_new_failure.store(true, Ordering::Relaxed);
            self.is_in_outage.store(true, Ordering::Relaxed);
            self.changed.notify_one();
        }
    }

    /// Whether Redis could not be reached since this was last asked.
    pub fn take_failure(&self) -> bool {
        self.has_new_failure.swap(false, Ordering::Relaxed)
    }

    /// Redis knows all: from now on it decides alone.
    pub fn end_outage(&self) {
        self.is_in_outage.store(false, Ordering::Relaxed);
        self.finish_write_back();
    }

    /// Ends when there is something new to do.
    pub async fn wait_for_change(&self) {
        self.changed.notified().await;
    }

    /// Remembers what Redis said, for the case that it is away next time.
    pub fn cache_standings(
        &self,
        charges: &[Charge<'_>],
        decision: &Decision,
        received_at: Instant,
    ) {
        for (charge, standing) in charges.iter().zip(&decision.statuses) {
            let Some(standing) = standing.filter(|_| uses_fallback(charge)) else {
                continue;
            };
            match charge.limit.algorithm {
                // In flight is what this process says, not what Redis said last.
                Algorithm::Concurrency { .. } if decision.admitted => {
                    let amendment = Amendment::Renew {
                        slot: charge.slot_id,
                    };
                    self.memory.apply_settlements(&[Settlement {
                        limit: charge.limit,
                        key: charge.key,
                        amendment,
                    }]);
                }
                Algorithm::Concurrency { .. } => {}
                _ if !self.may_be_stale(charge) => self.standing_cache.insert(
                    charge,
                    standing,
                    decision.now_us,
                    self.clock.time_at_us(received_at),
                ),
                _ => {}
            }
        }
    }

    /// Decides the charges of `local` policies without Redis, all or nothing; the others have no standing. What is
    /// admitted will be written back.
    pub fn decide(&self, charges: &[Charge<'_>], requested_at: Instant) -> Decision {
        let share = self.share();
        for charge in charges.iter().filter(|charge| uses_fallback(charge)) {
            self.standing_cache.take_with(charge, |answer| {
                let limit = share.scale_limit(charge.limit);
                let amendment =
                    answer.to_amendment(share, &limit, self.clock.time_at_us(requested_at));
                self.memory.replace_counter(&Settlement {
                    limit: &limit,
                    key: charge.key,
                    amendment,
                });
            });
        }
        let decision = self.decide_share(charges, share, requested_at, uses_fallback);
        if decision.admitted {
            let mut write_back = self.write_back.lock();
            for charge in charges
                .iter()
                .filter(|charge| uses_fallback(charge) && charge.cost > 0)
            {
                let part = self.partition(charge.key);
                self.stale_partitions.insert(part);
                write_back.record_charge(charge, part, decision.now_us);
            }
            if !write_back.is_empty() && !self.has_pending_write_back.swap(true, Ordering::Relaxed)
            {
                self.changed.notify_one();
            }
        }
        decision
    }

    /// Decides them beside Redis, which has still to be asked: for the end of an outage. `None`: there are none that were
    /// in it.
    pub fn check_share(&self, charges: &[Charge<'_>], requested_at: Instant) -> Option<Decision> {
        let is_in_outage_charge =
            |charge: &Charge<'_>| uses_fallback(charge) && self.may_be_stale(charge);
        charges
            .iter()
            .any(is_in_outage_charge)
            .then(|| self.decide_share(charges, self.share(), requested_at, is_in_outage_charge))
    }

    /// Whether what Redis says about a charge may lack what is still to be written back.
    fn may_be_stale(&self, charge: &Charge<'_>) -> bool {
        let is_up_to_date = !self.is_in_outage() && !self.has_pending_write_back();
        !is_up_to_date && self.stale_partitions.contains(self.partition(charge.key))
    }

    fn decide_share(
        &self,
        charges: &[Charge<'_>],
        share: Share,
        requested_at: Instant,
        is_included: impl Fn(&Charge<'_>) -> bool,
    ) -> Decision {
        let included: SmallVec<[(&Charge<'_>, Limit); 4]> = charges
            .iter()
            .filter(|charge| is_included(charge))
            .map(|charge| (charge, share.scale_limit(charge.limit)))
            .collect();
        let share_charges: SmallVec<[Charge<'_>; 4]> = included
            .iter()
            .map(|(charge, limit)| Charge { limit, ..**charge })
            .collect();
        let mut decision = self.memory.decide_at(&share_charges, requested_at);
        // Where it is written back it stands elsewhere: further units are charged, and none given back.
        decision.charged_at_us.clear();
        let mut remaining_standings = std::mem::take(&mut decision.statuses).into_iter();
        let mut standing = |charge: &Charge<'_>| {
            if is_included(charge) {
                remaining_standings.next()?
            } else {
                None
            }
        };
        decision.statuses = charges
            .iter()
            .map(|charge| standing(charge).map(|standing| correct_share_refusal(charge, standing)))
            .collect();
        decision
    }

    /// Follows what becomes known of charges that were decided here, or whose slots are counted here.
    pub fn apply_settlements(&self, settlements: &[Settlement<'_>]) {
        for settlement in settlements {
            match settlement.amendment {
                Amendment::Release { slot } => {
                    self.memory.apply_if_present(settlement);
                    self.write_back
                        .lock()
                        .release_slot(settlement.limit, settlement.key, slot);
                }
                Amendment::Renew { .. } => {
                    self.memory.apply_if_present(settlement);
                }
                Amendment::Charge(_) if self.is_in_outage() => {
                    self.memory.apply_if_present(settlement);
                }
                // What is given back is not worth a search: it is too strict, and not for long.
                Amendment::Charge(_)
                | Amendment::Credit { .. }
                | Amendment::BackdatedCharge { .. } => {}
            }
        }
    }

    /// Notes what Redis could not be told, if it is further units for what was admitted here. Whether it is.
    pub fn defer_settlement(&self, settlement: &Settlement<'_>) -> bool {
        let Amendment::Charge(units) = settlement.amendment else {
            return false;
        };
        let is_counted_here = self
            .memory
            .contains_counter(settlement.limit, settlement.key);
        if is_counted_here {
            let part = self.partition(settlement.key);
            let mut write_back = self.write_back.lock();
            self.stale_partitions.insert(part);
            write_back.record_charge(
                &Charge::new(settlement.limit, settlement.key, units),
                part,
                self.clock.now_us(),
            );
            self.has_pending_write_back.store(true, Ordering::Relaxed);
        }
        is_counted_here
    }

    /// Whether something is still to be written back.
    pub fn has_pending_write_back(&self) -> bool {
        self.has_pending_write_back.load(Ordering::Relaxed)
    }

    /// Some of what is to be written back, but nothing to these parts. It is owed until [`Local::paid`] or
    /// [`Local::requeue_unsent`] hears of it.
    pub fn take_write_back(&self, unreachable: impl IntoIterator<Item = u16>) -> WriteBackBatch {
        let unreachable_set = PartitionSet::default();
        unreachable
            .into_iter()
            .for_each(|part| unreachable_set.insert(part));
        WriteBackBatch(
            self.write_back
                .lock()
                .take_batch(|part| !unreachable_set.contains(part)),
        )
    }

    /// It was written back.
    pub fn finish_write_back(&self) {
        let write_back = self.write_back.lock();
        self.has_pending_write_back
            .store(!write_back.is_empty(), Ordering::Relaxed);
        if write_back.is_empty() && !self.is_in_outage() {
            self.stale_partitions.clear();
        }
    }

    /// These counters were not told, as far as is known; the others were.
    pub fn requeue_unsent<'l>(
        &self,
        batch: WriteBackBatch,
        unsent: impl Iterator<Item = &'l Settlement<'l>>,
    ) {
        let unsent_ids: HashSet<CounterId> = unsent
            .map(|late| counter_id(late.limit, late.key))
            .collect();
        let unsent_entries = batch
            .0
            .into_iter()
            .filter(|debt| unsent_ids.contains(&debt.counter_id()));
        self.write_back.lock().merge_batch(unsent_entries);
    }

    /// What Redis has to be told of these debts now: how long ago they were made.
    pub fn write_back_amendments(&self, batch: &WriteBackBatch) -> Vec<(Limit, Key, Amendment)> {
        let now_us = self.clock.now_us();
        let units_in_use = |limit: &Limit, key: &Key| {
            let limit = self.share().scale_limit(limit);
            let look = self.memory.decide(&[Charge::new(&limit, key, 0)]);
            let standing = look.statuses.first().copied().flatten();
            standing.map_or(0, |standing| {
                limit.capacity().saturating_sub(standing.remaining)
            })
        };
        batch
            .0
            .iter()
            .flat_map(|debt| debt.amendments(now_us, units_in_use))
            .collect()
    }
}

/// What this process may have to decide.
fn uses_fallback(charge: &Charge<'_>) -> bool {
    charge.has_fallback && !charge.shadow
}

/// What is above the share only is refused for as long as the outage lasts, and nobody knows how long.
fn correct_share_refusal(charge: &Charge<'_>, standing: LimitStatus) -> LimitStatus {
    let is_never = standing.refusal == Some(Refusal::Never);
    let fits = charge.limit.capacity() > 0 && charge.cost <= charge.limit.capacity();
    if is_never && fits {
        LimitStatus {
            refusal: Some(Refusal::Unknown),
            ..standing
        }
    } else {
        standing
    }
}

#[cfg(test)]
mod tests;
