//! The rate limit algorithms: pure functions of (state, limit, cost, now).
//!
//! This module uses no clock, network, HTTP or file format. The top comment of each algorithm's
//! file has its formula, worst case and memory per key. A store (see [`crate::store`]) keeps the
//! states, supplies the time, and makes the decision over several limits atomic.
//!
//! Times are microseconds since the Unix epoch, on the store's clock. Future times are absolute, so
//! that the caller can subtract its own reading of that clock.

mod block;
mod concurrency;
mod fixed_window;
mod key;
mod leaky_bucket;
mod shards;
mod sliding_log;
mod sliding_window;
mod token_bucket;

pub use key::{Key, KeyBuilder};
use smallvec::SmallVec;

/// The largest `requests` and cost. Integers up to here are exact in a double, the number type of
/// Lua.
pub const MAX_UNITS: u64 = 1 << 53;

/// The latest time that an algorithm returns, for the same reason: in the year 2255.
const MAX_TIME_US: u64 = 1 << 53;

/// The longest warm-up: a day. The arithmetic is exact up to some weeks.
pub const MAX_WARM_UP_US: u64 = 86_400_000_000;

/// An amount per period, with the algorithm that enforces it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Limit {
    /// Units that may be used in one period, 0..=[`MAX_UNITS`]. 0 refuses everything.
    pub requests: u64,
    /// The period, in microseconds, at least 1. For [`Algorithm::Concurrency`]: how long a slot is
    /// kept unless it is renewed.
    pub per_us: u64,
    pub algorithm: Algorithm,
}

/// How the units of a [`Limit`] become free again. Each algorithm's module documents its
/// guarantees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Algorithm {
    SlidingLog,
    /// With `buckets` sub-windows, 2..=100.
    SlidingWindow {
        buckets: u64,
    },
    /// Windows start at `offset_us` (below `per_us`) after multiples of the period since the epoch.
    FixedWindow {
        offset_us: u64,
    },
    /// Up to `burst` units at once, at least 1; max(burst, requests) × per_us is at most
    /// [`MAX_UNITS`]. The bucket is cold if it was not charged for `warm_up_us`, at most
    /// [`MAX_WARM_UP_US`]; 0: never cold.
    TokenBucket {
        burst: u64,
        warm_up_us: u64,
    },
    /// Delays a request by up to `max_delay_us`; max_delay_us × requests + per_us is at most
    /// [`MAX_UNITS`].
    LeakyBucket {
        max_delay_us: u64,
    },
    /// At most `requests` requests at a time. A request is aborted after `max_duration_us`; 0:
    /// never.
    Concurrency {
        max_duration_us: u64,
    },
    /// Not a limit: the policy stays closed for `per_us` after one of its limits refused.
    /// `requests` is 1.
    Block,
}

/// A request's cost against one limit and one key.
#[derive(Clone, Copy, Debug)]
pub struct Charge<'a> {
    pub limit: &'a Limit,
    pub key: &'a Key,
    /// Requested units, 0..=[`MAX_UNITS`].
    pub cost: u64,
    /// The number of the policy. Charges of one policy are adjacent within a request.
    pub group: u32,
    /// A shadow policy is charged only if every enforced charge and all its own charges are
    /// admitted. It never affects other policies.
    pub shadow: bool,
    /// The policy counts rejected requests: [`ChargeEffect::ChargeRejected`].
    pub counts_rejected: bool,
    /// The final cost is settled later: [`Amendment::Credit`].
    pub settles: bool,
    /// The slot that a charge of [`Algorithm::Concurrency`] takes: unique among all replicas.
    pub slot_id: u128,
    /// While the store is unreachable, the policy is decided by this process.
    pub has_fallback: bool,
    /// How many counters of a cluster share the limit ([`Limit::shard_limit`]). Other topologies
    /// use one counter and ignore it.
    pub shard_count: u16,
    /// How the policy leases units, if it does; the same for all charges of a policy.
    pub lease: Option<Lease>,
    /// Units to lease if the request is admitted; 0: none. The same for all charges of a policy.
    pub requested_lease_units: u64,
}

/// How an instance takes units in advance, to admit requests without a call to the store.
///
/// Granted units count from the moment of the grant, and as if used at the last moment of the
/// lease. No limit is exceeded, whenever they are used in between.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Lease {
    /// Maximum unused units, at least 1. `None`: by the rate of requests, and at most one in
    /// [`AUTO_LEASE_DIVISOR`] of the free units.
    pub size: Option<u64>,
    /// How long the units may be used, in microseconds: at least 1 and at most half of the policy's
    /// shortest period.
    pub ttl_us: u64,
}

/// The divisor of the free units for one grant of automatic size. Near the limit no units are
/// granted, and the store decides each request exactly.
pub const AUTO_LEASE_DIVISOR: u64 = 4;

/// Units granted on all limits of a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrantedUnits {
    pub group: u32,
    /// At least 1.
    pub units: u64,
    /// The last microsecond (store's clock) at which the units may be used, and at which they
    /// count.
    pub until_us: u64,
}

/// The effect of a decision on the counter of a charge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChargeEffect {
    NoChange,
    /// The units are charged.
    Charge,
    /// The units of a rejected request are charged up to the capacity: the used units become
    /// max(before, min(capacity, before + cost)), with the newest units kept.
    ChargeRejected,
}

/// Determines the effect on the counter of the charge at index `at`. `refusals` has the refusals of
/// all charges, read before any counter changed.
pub fn determine_effect(
    charges: &[Charge<'_>],
    refusals: &[Option<Refusal>],
    at: usize,
) -> ChargeEffect {
    let Some(charge) = charges.get(at).filter(|charge| charge.cost > 0) else {
        return ChargeEffect::NoChange;
    };
    let refuses = |group: Option<u32>| {
        charges
            .iter()
            .zip(refusals)
            .any(|(other, refusal)| refusal.is_some() && other.shadow_group() == group)
    };
    if charge.is_block() {
        // A block starts when a limit of its policy is full and the block is not active.
        let is_inactive = refusals.get(at).is_some_and(Option::is_none);
        let is_full = charges.iter().zip(refusals).any(|(other, refusal)| {
            let is_limit = charge.is_same_policy(other) && !other.is_block();
            is_limit && matches!(refusal, Some(Refusal::Until(_) | Refusal::Unknown))
        });
        return if is_inactive && is_full {
            ChargeEffect::Charge
        } else {
            ChargeEffect::NoChange
        };
    }
    let admitted = !refuses(None);
    if admitted && !(charge.shadow && refuses(charge.shadow_group())) {
        return ChargeEffect::Charge;
    }
    let mut policy_refusals = charges
        .iter()
        .zip(refusals)
        .filter(|(other, _)| charge.is_same_policy(other));
    let counts = charge.counts_rejected && (admitted || !charge.shadow);
    if counts && policy_refusals.any(|(_, refusal)| refusal.is_some()) {
        ChargeEffect::ChargeRejected
    } else {
        ChargeEffect::NoChange
    }
}

/// Computes the grants for an admitted request, after its own units were charged. `grantable_units`
/// is [`CounterView::grantable_units`] for a charge's counter.
pub fn compute_grants(
    charges: &[Charge<'_>],
    now_us: u64,
    grantable_units: impl Fn(&Charge<'_>, u64) -> Option<(u64, u64)>,
) -> SmallVec<[GrantedUnits; 1]> {
    let by_policy = charges.chunk_by(|one, other| one.is_same_policy(other));
    let grant = |charges: &[Charge<'_>]| {
        let (first, lease) = charges
            .first()
            .and_then(|first| Some((first, first.lease?)))?;
        let divisor = if lease.size.is_none() {
            AUTO_LEASE_DIVISOR
        } else {
            1
        };
        let (mut units, mut until_us) = (
            first.requested_lease_units,
            now_us.saturating_add(lease.ttl_us.saturating_sub(1)),
        );
        for charge in charges.iter().filter(|_| first.requested_lease_units > 0) {
            let (free, ends_us) = grantable_units(charge, until_us)?;
            (units, until_us) = (units.min(free / divisor), ends_us);
        }
        (units > 0).then_some(GrantedUnits {
            group: first.group,
            units,
            until_us,
        })
    };
    by_policy.filter_map(grant).collect()
}

impl<'a> Charge<'a> {
    /// Returns an enforced charge of the first policy.
    pub fn new(limit: &'a Limit, key: &'a Key, cost: u64) -> Self {
        Self {
            limit,
            key,
            cost,
            group: 0,
            shadow: false,
            counts_rejected: false,
            settles: false,
            slot_id: 0,
            has_fallback: false,
            shard_count: 1,
            lease: None,
            requested_lease_units: 0,
        }
    }

    /// The lease terms, if this charge requests units in advance.
    pub fn requested_lease(&self) -> Option<Lease> {
        self.lease.filter(|_| self.requested_lease_units > 0)
    }

    pub fn is_block(&self) -> bool {
        self.limit.algorithm == Algorithm::Block
    }

    /// Whether both charges belong to the same policy.
    pub fn is_same_policy(&self, other: &Self) -> bool {
        (self.group, self.shadow) == (other.group, other.shadow)
    }

    /// The policy's number if it is shadow. All enforced charges share `None`.
    fn shadow_group(&self) -> Option<u32> {
        self.shadow.then_some(self.group)
    }
}

/// A correction of an earlier charge, known only after the decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Amendment {
    /// The request cost more: charges further units now, even beyond the capacity.
    Charge(u64),
    /// Charges units that were used `age_us` ago without the store. They are charged at that age,
    /// but not before the newest charge, because a state can't insert earlier charges.
    BackdatedCharge { units: u64, age_us: u64 },
    /// The request cost less than the charge at `at_us` ([`Decision::charged_at_us`]): returns
    /// those of the units that still count.
    Credit { units: u64, at_us: u64 },
    /// The request is in flight: renews its slot, or takes an expired slot again.
    Renew { slot: u128 },
    /// The request has ended: releases its slot.
    Release { slot: u128 },
}

/// Why a limit refuses, and until when. Ordered by how long the refusal certainly lasts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Refusal {
    /// Until a request in flight ends, which is unknown.
    Unknown,
    /// From this time on (µs, store's clock) the same cost fits, if no other request takes the
    /// units.
    Until(u64),
    /// The cost exceeds the capacity of the limit.
    Never,
}

/// The status of one limit after the decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitStatus {
    /// Units that a further request could take now.
    pub remaining: u64,
    /// When `remaining` next grows (µs, store's clock); `None` if it is at its maximum.
    pub next_growth_us: Option<u64>,
    /// `None` if this limit admits the charge, regardless of other limits.
    pub refusal: Option<Refusal>,
}

impl LimitStatus {
    /// Converts the times to another clock, which showed `to_us` when this one showed `from_us`.
    pub fn convert_clock(self, from_us: u64, to_us: u64) -> Self {
        let convert = |at_us: u64| to_us.saturating_add(at_us.saturating_sub(from_us));
        let refusal = match self.refusal {
            Some(Refusal::Until(until_us)) => Some(Refusal::Until(convert(until_us))),
            refusal => refusal,
        };
        Self {
            next_growth_us: self.next_growth_us.map(convert),
            refusal,
            ..self
        }
    }
}

/// The decision about one request. Either all enforced charges were made, or none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// The store's clock at the decision.
    pub now_us: u64,
    /// Whether all enforced charges were admitted, and so made.
    pub admitted: bool,
    /// One per charge, in order. `None` if unknown because a cached refusal answered the request.
    /// Then at least one enforced charge has a status with the refusal.
    pub statuses: SmallVec<[Option<LimitStatus>; 4]>,
    /// How long an admitted request must be delayed: the longest delay of its enforced limits,
    /// usually 0.
    pub delay_us: u64,
    /// Leased units granted with this decision.
    pub grants: SmallVec<[GrantedUnits; 1]>,
    /// The times (µs) under which charges that will be settled are recorded, on the clock of their
    /// server. A later [`Amendment::Credit`] names them. Usually `now_us`; if the newest charge is
    /// a lease, the lease's end. One per charge, `None` where it was not made; empty if none will
    /// be settled.
    pub charged_at_us: SmallVec<[Option<u64>; 1]>,
}

impl Limit {
    /// The part of a limit that identifies a counter beside its key. A changed amount keeps the
    /// usage; a changed algorithm or period starts a new counter.
    pub fn counter_identity(&self) -> (Algorithm, u64) {
        let algorithm = match self.algorithm {
            // A changed `block_for` ends no block.
            Algorithm::Block => return (Algorithm::Block, 0),
            Algorithm::TokenBucket { .. } => Algorithm::TokenBucket {
                burst: 0,
                warm_up_us: 0,
            },
            Algorithm::LeakyBucket { .. } => Algorithm::LeakyBucket { max_delay_us: 0 },
            // A changed `lease_ttl` keeps the slots of requests in flight.
            Algorithm::Concurrency { .. } => {
                return (Algorithm::Concurrency { max_duration_us: 0 }, 0);
            }
            algorithm => algorithm,
        };
        (algorithm, self.per_us)
    }

    /// Units that can be in use at once: the largest cost that is ever admitted.
    pub fn capacity(&self) -> u64 {
        match self.algorithm {
            _ if self.requests == 0 => 0,
            Algorithm::TokenBucket { burst, .. } => burst,
            Algorithm::LeakyBucket { max_delay_us } => {
                let queue_length = u128::from(max_delay_us) * u128::from(self.requests)
                    / u128::from(self.per_us.max(1));
                u64::try_from(queue_length)
                    .unwrap_or(u64::MAX)
                    .saturating_add(1)
            }
            _ => self.requests,
        }
    }

    /// The largest cost that is admitted when no units are in use: the capacity, or less for a
    /// bucket with a warm-up.
    pub fn cold_capacity(&self) -> u64 {
        match self.algorithm {
            Algorithm::TokenBucket { burst, warm_up_us } if warm_up_us > 0 => {
                (burst / 3).max(1).min(burst)
            }
            _ => self.capacity(),
        }
    }

    /// The part of the longest delay of [`Algorithm::LeakyBucket`] beyond whole units, in units of
    /// 1 / per_us; else 0.
    pub fn delay_remainder(&self) -> u64 {
        match self.algorithm {
            Algorithm::LeakyBucket { max_delay_us } => {
                let remainder = u128::from(max_delay_us) * u128::from(self.requests)
                    % u128::from(self.per_us.max(1));
                u64::try_from(remainder).unwrap_or_default()
            }
            _ => 0,
        }
    }

    /// The width of the sub-windows of [`Algorithm::SlidingWindow`], in microseconds; else the
    /// period.
    pub fn sub_window_us(&self) -> u64 {
        match self.algorithm {
            Algorithm::SlidingWindow { buckets } => self.per_us.div_ceil(buckets.max(1)).max(1),
            _ => self.per_us,
        }
    }

    /// The state of a key without charges.
    pub fn initial_state(&self) -> CounterState {
        CounterState(match self.algorithm {
            Algorithm::SlidingLog => AlgorithmState::SlidingLog(sliding_log::ChargeLog::default()),
            Algorithm::SlidingWindow { .. } => AlgorithmState::SlidingWindow(
                sliding_window::SubWindowLog::new(self.sub_window_us()),
            ),
            Algorithm::FixedWindow { offset_us } => {
                AlgorithmState::FixedWindow(fixed_window::FixedWindowState::new(offset_us))
            }
            Algorithm::TokenBucket { .. } => {
                AlgorithmState::TokenBucket(token_bucket::TokenBucketState::default())
            }
            Algorithm::LeakyBucket { .. } => {
                AlgorithmState::LeakyBucket(leaky_bucket::LeakyBucketQueue::default())
            }
            Algorithm::Concurrency { .. } => {
                AlgorithmState::Concurrency(concurrency::ConcurrencySlots::default())
            }
            Algorithm::Block => AlgorithmState::Block(block::BlockState::default()),
        })
    }
}

/// The state of one key of one limit, as a store keeps it.
#[derive(Clone, Debug)]
pub struct CounterState(AlgorithmState);

#[derive(Clone, Debug)]
enum AlgorithmState {
    SlidingLog(sliding_log::ChargeLog),
    SlidingWindow(sliding_window::SubWindowLog),
    FixedWindow(fixed_window::FixedWindowState),
    TokenBucket(token_bucket::TokenBucketState),
    LeakyBucket(leaky_bucket::LeakyBucketQueue),
    Concurrency(concurrency::ConcurrencySlots),
    Block(block::BlockState),
}

impl CounterState {
    /// Returns a view of the state at `now_us`, or at its newest charge if that is later: a clock
    /// that steps back never loosens a limit. The view does not change the state, so a read at a
    /// time that the clock then takes back loses no charge.
    pub fn view_at<'a>(&'a self, limit: &'a Limit, now_us: u64) -> CounterView<'a> {
        let now_us = now_us.max(self.latest_proven_us());
        let used = match &self.0 {
            AlgorithmState::SlidingLog(log) => log.used(limit, now_us),
            AlgorithmState::SlidingWindow(buckets) => buckets.used(limit, now_us),
            AlgorithmState::TokenBucket(bucket) => bucket.used(limit, now_us),
            AlgorithmState::LeakyBucket(queue) => queue.used(limit, now_us),
            AlgorithmState::FixedWindow(window) => window.used(limit, now_us),
            AlgorithmState::Concurrency(slots) => slots.used(now_us),
            AlgorithmState::Block(block) => block.used(now_us),
        };
        CounterView {
            state: self,
            limit,
            now_us,
            used,
        }
    }

    /// Takes the units of a charge, at least 1, at the time of [`Self::view_at`].
    pub fn charge(&mut self, charge: &Charge<'_>, now_us: u64) {
        if let AlgorithmState::Concurrency(slots) = &mut self.0 {
            return slots.hold_slot(
                charge.slot_id,
                now_us.saturating_add(charge.limit.per_us),
                now_us,
            );
        }
        self.take_units(charge.limit, charge.cost, now_us, charge.settles);
    }

    /// Takes units, at least 1, for a lease until `until_us`, as [`compute_grants`] determined.
    pub fn grant_lease(&mut self, limit: &Limit, units: u64, now_us: u64, until_us: u64) {
        match &mut self.0 {
            AlgorithmState::SlidingLog(log) => {
                log.grant_lease(limit, units, now_us, now_us, until_us)
            }
            AlgorithmState::SlidingWindow(buckets) => {
                buckets.grant_lease(limit, units, now_us, until_us)
            }
            AlgorithmState::FixedWindow(window) => window.charge(limit, units, now_us),
            AlgorithmState::TokenBucket(bucket) => {
                bucket.grant_lease(limit, units, now_us, until_us)
            }
            // These algorithms grant no leases.
            AlgorithmState::LeakyBucket(_)
            | AlgorithmState::Concurrency(_)
            | AlgorithmState::Block(_) => {}
        }
    }

    /// Takes the units of a rejected charge as [`ChargeEffect::ChargeRejected`] defines.
    pub fn charge_rejected(&mut self, charge: &Charge<'_>, now_us: u64) {
        let now_us = now_us.max(self.latest_proven_us());
        let Charge {
            limit,
            cost,
            settles,
            ..
        } = *charge;
        match &mut self.0 {
            AlgorithmState::FixedWindow(window) => window.charge_rejected(limit, cost, now_us),
            AlgorithmState::SlidingLog(log) => log.charge_rejected(limit, cost, now_us),
            AlgorithmState::SlidingWindow(buckets) => buckets.charge_rejected(limit, cost, now_us),
            AlgorithmState::TokenBucket(bucket) => {
                bucket.charge_rejected(limit, cost, now_us, settles)
            }
            AlgorithmState::LeakyBucket(queue) => {
                queue.charge_rejected(limit, cost, now_us, settles)
            }
            // Slots are only held by requests in flight, and a block counts nothing.
            AlgorithmState::Concurrency(_) | AlgorithmState::Block(_) => {}
        }
    }

    /// Applies a correction of an earlier charge.
    pub fn amend(&mut self, limit: &Limit, amendment: Amendment, now_us: u64) {
        match amendment {
            Amendment::Charge(units) => self.take_units(limit, units, now_us, true),
            Amendment::BackdatedCharge { units, age_us } => {
                self.take_units(limit, units, now_us.saturating_sub(age_us), true);
            }
            Amendment::Credit { units, at_us } => self.credit(limit, units, at_us, now_us),
            Amendment::Renew { slot } => {
                if let AlgorithmState::Concurrency(slots) = &mut self.0 {
                    slots.hold_slot(slot, now_us.saturating_add(limit.per_us), now_us);
                }
            }
            Amendment::Release { slot } => {
                if let AlgorithmState::Concurrency(slots) = &mut self.0 {
                    slots.release_slot(slot);
                }
            }
        }
    }

    fn credit(&mut self, limit: &Limit, units: u64, at_us: u64, now_us: u64) {
        let now_us = now_us.max(self.latest_proven_us());
        match &mut self.0 {
            AlgorithmState::FixedWindow(window) => window.credit(limit, units, at_us, now_us),
            AlgorithmState::SlidingLog(log) => log.credit(limit, units, at_us, now_us),
            AlgorithmState::SlidingWindow(buckets) => buckets.credit(limit, units, at_us, now_us),
            AlgorithmState::TokenBucket(bucket) => bucket.credit(limit, units, at_us, now_us),
            AlgorithmState::LeakyBucket(queue) => queue.credit(limit, units, at_us, now_us),
            AlgorithmState::Concurrency(_) | AlgorithmState::Block(_) => {}
        }
    }

    /// `settles`: some of the units may be credited later.
    fn take_units(&mut self, limit: &Limit, cost: u64, now_us: u64, settles: bool) {
        let now_us = now_us.max(self.latest_proven_us());
        match &mut self.0 {
            AlgorithmState::SlidingLog(log) => log.charge(limit, cost, now_us),
            AlgorithmState::SlidingWindow(buckets) => buckets.charge(limit, cost, now_us),
            AlgorithmState::TokenBucket(bucket) => bucket.charge(limit, cost, now_us, settles),
            AlgorithmState::LeakyBucket(queue) => queue.charge(limit, cost, now_us, settles),
            AlgorithmState::FixedWindow(window) => window.charge(limit, cost, now_us),
            AlgorithmState::Block(block) => block.until_us = now_us.saturating_add(limit.per_us),
            // Slots are taken by their ids.
            AlgorithmState::Concurrency(_) => {}
        }
    }

    /// When the state becomes indistinguishable from an initial one.
    pub fn expires_at_us(&self, limit: &Limit) -> u64 {
        match &self.0 {
            AlgorithmState::SlidingLog(log) => log.newest_entry_us().saturating_add(limit.per_us),
            AlgorithmState::SlidingWindow(buckets) => buckets.expires_at_us(limit),
            AlgorithmState::TokenBucket(bucket) => bucket.expires_at_us(limit),
            AlgorithmState::LeakyBucket(queue) => queue.expires_at_us(limit),
            AlgorithmState::FixedWindow(window) => {
                window.window_end_us(limit, window.latest_proven_us())
            }
            AlgorithmState::Concurrency(slots) => slots.expires_at_us(),
            AlgorithmState::Block(block) => block.until_us,
        }
    }

    /// Heap bytes of the state.
    pub fn heap_bytes(&self) -> usize {
        match &self.0 {
            AlgorithmState::SlidingLog(log) => log.heap_bytes(),
            AlgorithmState::SlidingWindow(buckets) => buckets.heap_bytes(),
            AlgorithmState::Concurrency(slots) => slots.heap_bytes(),
            AlgorithmState::TokenBucket(bucket) => bucket.heap_bytes(),
            AlgorithmState::LeakyBucket(queue) => queue.heap_bytes(),
            AlgorithmState::FixedWindow(_) | AlgorithmState::Block(_) => 0,
        }
    }

    fn latest_proven_us(&self) -> u64 {
        match &self.0 {
            AlgorithmState::SlidingLog(log) => log.latest_proven_us(),
            AlgorithmState::SlidingWindow(buckets) => buckets.latest_proven_us(),
            AlgorithmState::TokenBucket(bucket) => bucket.newest_us(),
            AlgorithmState::LeakyBucket(queue) => queue.latest_proven_us(),
            AlgorithmState::FixedWindow(window) => window.latest_proven_us(),
            AlgorithmState::Concurrency(_) | AlgorithmState::Block(_) => 0,
        }
    }
}

/// A [`CounterState`] under one limit at one time.
#[derive(Clone, Copy, Debug)]
pub struct CounterView<'a> {
    state: &'a CounterState,
    limit: &'a Limit,
    now_us: u64,
    used: u64,
}

impl CounterView<'_> {
    /// Units in use. May exceed the capacity after a limit was lowered.
    pub fn used(&self) -> u64 {
        self.used
    }

    /// Returns `None` if `cost` units fit, else the refusal.
    pub fn refusal(&self, cost: u64) -> Option<Refusal> {
        let capacity = self.limit.capacity();
        if cost > capacity || capacity == 0 {
            return Some(Refusal::Never);
        }
        let max_used = capacity - cost;
        (self.used > max_used).then(|| {
            self.usage_drop_time_us(max_used)
                .map_or(Refusal::Unknown, Refusal::Until)
        })
    }

    /// How many units can be leased until `until_us`, and until when at most; `None` if none.
    /// `now_us` is the store's clock. If it stepped back behind the state, the time until then is
    /// unknown and nothing is granted.
    pub fn grantable_units(&self, now_us: u64, until_us: u64) -> Option<(u64, u64)> {
        let until_us = match &self.state.0 {
            AlgorithmState::FixedWindow(window) => {
                until_us.min(window.window_end_us(self.limit, now_us).saturating_sub(1))
            }
            AlgorithmState::SlidingLog(log) if log.newest_entry_us() <= until_us => until_us,
            AlgorithmState::SlidingWindow(buckets) if buckets.has_newest_started_by(until_us) => {
                until_us
            }
            AlgorithmState::TokenBucket(bucket)
                if bucket.can_grant(self.limit, now_us, until_us) =>
            {
                until_us
            }
            _ => return None,
        };
        (self.now_us == now_us)
            .then_some((self.limit.capacity().saturating_sub(self.used), until_us))
    }

    /// The status of the limit, with the refusal that was found before any counter changed.
    pub fn limit_status(&self, refusal: Option<Refusal>) -> LimitStatus {
        let capacity = self.limit.capacity();
        let next_growth_us = match (capacity.checked_sub(1), self.used.checked_sub(1)) {
            (Some(below_limit), Some(below_now)) => {
                self.usage_drop_time_us(below_limit.min(below_now))
            }
            _ => None,
        };
        LimitStatus {
            remaining: capacity.saturating_sub(self.used),
            next_growth_us,
            refusal,
        }
    }

    /// The time under which the last charge is recorded, or a charge now would be.
    pub fn charged_at_us(&self) -> u64 {
        let newest_entry_us = match &self.state.0 {
            AlgorithmState::SlidingLog(log) => log.newest_entry_us(),
            AlgorithmState::SlidingWindow(buckets) => buckets.newest_start_us(),
            _ => 0,
        };
        newest_entry_us.max(self.now_us)
    }

    /// How long the request that was charged last must be delayed. The delay is counted from the
    /// time of the view, so a clock that stepped back never delays a request longer than the limit
    /// allows.
    pub fn delay_us(&self) -> u64 {
        match &self.state.0 {
            AlgorithmState::LeakyBucket(queue) => queue.delay_us(self.limit, self.now_us),
            _ => 0,
        }
    }

    /// When at most `units` are in use if nothing more is charged; `None` if unknown.
    fn usage_drop_time_us(&self, units: u64) -> Option<u64> {
        Some(match &self.state.0 {
            AlgorithmState::SlidingLog(log) => {
                log.usage_drop_time_us(self.limit, self.now_us, units)
            }
            AlgorithmState::SlidingWindow(buckets) => {
                buckets.usage_drop_time_us(self.limit, self.now_us, units)
            }
            AlgorithmState::TokenBucket(bucket) => {
                return bucket.usage_drop_time_us(self.limit, self.now_us, units);
            }
            AlgorithmState::LeakyBucket(queue) => {
                queue.usage_drop_time_us(self.limit, self.now_us, units)
            }
            AlgorithmState::FixedWindow(window) => window.window_end_us(self.limit, self.now_us),
            AlgorithmState::Block(block) => block.until_us,
            AlgorithmState::Concurrency(_) => return None,
        })
    }
}
