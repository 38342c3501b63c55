//! What a limit *is*: pure rules over (state, limit, cost, now).
//!
//! Nothing here knows a clock, a network, HTTP or a file format. Each algorithm is one file with its
//! formula, worst case and memory per key in the top comment. A store (see [`crate::store`]) keeps the
//! states, brings the time, and makes the decision over several limits atomic.
//!
//! Times are microseconds since the Unix epoch, on the store's clock. Everything that a rule says about
//! the future is an absolute time, so that whoever asked can subtract *his* reading of that clock.

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

/// The largest `requests` and cost: integers up to here are exact in a double, which Lua computes with.
pub const MAX_UNITS: u64 = 1 << 53;

/// The last time that a rule tells, for the same reason: in the year 2255.
const MAX_TIME_US: u64 = 1 << 53;

/// The longest warm-up, a day: it is reckoned exactly up to some weeks.
pub const MAX_WARM_UP_US: u64 = 86_400_000_000;

/// An amount per period, by an algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Limit {
    /// Units that may be used in one period, 0..=[`MAX_UNITS`]. 0 refuses everything, for ever.
    pub requests: u64,
    /// The period, in microseconds, at least 1; of [`Algorithm::Concurrency`] how long a slot is kept unless renewed.
    pub per_us: u64,
    pub algorithm: Algorithm,
}

/// How the units of a [`Limit`] come back. The files of this room say what each promises.
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
    /// Up to `burst` units at once, at least 1; max(burst, requests) × per_us is at most [`MAX_UNITS`].
    /// It is cold when it was not charged for `warm_up_us`, at most [`MAX_WARM_UP_US`]; 0: never.
    TokenBucket {
        burst: u64,
        warm_up_us: u64,
    },
    /// Holds a request for up to `max_delay_us`; max_delay_us × requests + per_us is at most [`MAX_UNITS`].
    LeakyBucket {
        max_delay_us: u64,
    },
    /// At most `requests` at a time. A request is ended after `max_duration_us`; 0: never.
    Concurrency {
        max_duration_us: u64,
    },
    /// No limit: the policy stays closed for `per_us` once one of its limits has refused. `requests` is 1.
    Block,
}

/// One limit asked for one key at one cost.
#[derive(Clone, Copy, Debug)]
pub struct Charge<'a> {
    pub limit: &'a Limit,
    pub key: &'a Key,
    /// Units wanted, 0..=[`MAX_UNITS`].
    pub cost: u64,
    /// Charges of one policy share a number; within one question they stand side by side.
    pub group: u32,
    /// A shadow group is charged only if every enforced charge and its whole group admit,
    /// and never changes what the others get.
    pub shadow: bool,
    /// Its policy counts what it refuses: [`ChargeEffect::ChargeRejected`].
    pub counts_rejected: bool,
    /// What it really costs will be said later: [`Amendment::Credit`].
    pub settles: bool,
    /// The slot that a charge of [`Algorithm::Concurrency`] takes: unique among all replicas.
    pub slot_id: u128,
    /// Its policy goes on in this process while the store is away.
    pub has_fallback: bool,
    /// How many counters of a cluster share the limit ([`Limit::shard`]); elsewhere it is one whatever this says.
    pub shard_count: u16,
    /// How its policy takes units in advance, if it does; the same for all charges of a group.
    pub lease: Option<Lease>,
    /// So many units are wanted in advance, if the request is admitted; 0: none. The same for all charges of a group.
    pub requested_lease_units: u64,
}

/// How units are taken in advance, to be handed out without asking the store.
///
/// Units that are lent count from the moment of the grant on, and as if used at the last moment at which they may be:
/// whenever they are handed out in between, no limit is passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Lease {
    /// Units in hand at most, at least 1; `None`: as the rate of requests suggests, and never more than one in
    /// [`AUTO_LEASE_DIVISOR`] of those that are free.
    pub size: Option<u64>,
    /// How long they may be handed out, in microseconds, at least 1 and at most half of the policy's shortest period.
    pub ttl_us: u64,
}

/// What one process takes of the free units at a time, if its size is its own choice: near the limit nothing is lent,
/// and who asks is decided exactly.
pub const AUTO_LEASE_DIVISOR: u64 = 4;

/// Units lent of all limits of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrantedUnits {
    pub group: u32,
    /// At least 1.
    pub units: u64,
    /// The last microsecond (store's clock) at which they may be handed out, and at which they count.
    pub until_us: u64,
}

/// What a decision does to a charge's counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChargeEffect {
    NoChange,
    /// The units are taken.
    Charge,
    /// The units are taken as far as the capacity goes, though they were refused: what is in use ends at
    /// max(before, min(capacity, before + cost)), the newest units kept.
    ChargeRejected,
}

/// What the decision does to the counter of the charge at `at`; `refusals` are those of all charges, found before
/// anything was changed.
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
        // It begins when a limit of its own policy is full, and doesn't hold already.
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

/// What is lent beside a request that was admitted, once its own units were taken. `lends` is [`View::lends`] for a
/// charge's counter.
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
    /// An enforced charge of the first policy.
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

    /// How units are taken in advance with this charge, if any are wanted.
    pub fn requested_lease(&self) -> Option<Lease> {
        self.lease.filter(|_| self.requested_lease_units > 0)
    }

    pub fn is_block(&self) -> bool {
        self.limit.algorithm == Algorithm::Block
    }

    /// Whether both belong to one policy.
    pub fn is_same_policy(&self, other: &Self) -> bool {
        (self.group, self.shadow) == (other.group, other.shadow)
    }

    /// Shadow groups have numbers; what is enforced stands together.
    fn shadow_group(&self) -> Option<u32> {
        self.shadow.then_some(self.group)
    }
}

/// What becomes known of a request after it was decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Amendment {
    /// It took so many units more: they are charged now, whether they fit or not.
    Charge(u64),
    /// So many units were taken `age_us` ago, and nobody has told yet. They are charged at that age, but not before
    /// the newest charge: a state has no room in between.
    BackdatedCharge { units: u64, age_us: u64 },
    /// It took fewer than the charge that stands at `at_us` ([`Decision::stands_us`]): so many units go back, as far as they
    /// still count.
    Credit { units: u64, at_us: u64 },
    /// It is still in flight: its slot is kept for another lease, or taken again.
    Renew { slot: u128 },
    /// It has ended.
    Release { slot: u128 },
}

/// Why, and until when, a limit refuses.
/// In the order of how long it is sure to last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Refusal {
    /// Until a request in flight ends, and nobody knows when.
    Unknown,
    /// From this time on (µs, store's clock) the same cost fits, if nobody else takes it.
    Until(u64),
    /// The cost is above what the limit ever allows.
    Never,
}

/// Where one limit stands once the decision is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitStatus {
    /// Units that a further request would still get now.
    pub remaining: u64,
    /// When `remaining` next grows (µs, store's clock); `None` if it is as large as it ever gets.
    pub next_growth_us: Option<u64>,
    /// `None`: this limit admits the charge (which says nothing about the others').
    pub refusal: Option<Refusal>,
}

impl LimitStatus {
    /// The same, told by another clock: the one that said `to_us` when this one said `from_us`.
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

/// The answer to one question: all enforced charges were made, or none was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// The store's clock as read for this decision.
    pub now_us: u64,
    /// Whether every enforced charge was admitted (and so was made).
    pub admitted: bool,
    /// One per charge, in the order asked. `None`: not known, because a refusal that the store gave
    /// before was answered from memory. At least one enforced standing then says why.
    pub statuses: SmallVec<[Option<LimitStatus>; 4]>,
    /// How long an admitted request has to be held: the longest that an enforced limit wants, for most 0.
    pub delay_us: u64,
    /// What was lent beside.
    pub grants: SmallVec<[GrantedUnits; 1]>,
    /// Where the charges that will be settled stand (µs), on the clock of the server that keeps them: what a later
    /// [`Amendment::Credit`] names. Mostly that is `now_us`, but beside a lease it is that one's end. One per charge, `None`
    /// where it was not made; empty if none settles.
    pub charged_at_us: SmallVec<[Option<u64>; 1]>,
}

impl Limit {
    /// Everything that names a counter beside its key: a changed amount keeps the usage so far,
    /// a changed algorithm or period starts a new counter.
    pub fn counter_identity(&self) -> (Algorithm, u64) {
        let algorithm = match self.algorithm {
            // A changed `block_for` ends no block.
            Algorithm::Block => return (Algorithm::Block, 0),
            Algorithm::TokenBucket { .. } => Algorithm::TokenBucket {
                burst: 0,
                warm_up_us: 0,
            },
            Algorithm::LeakyBucket { .. } => Algorithm::LeakyBucket { max_delay_us: 0 },
            // Nor does a changed `lease_ttl` forget who is in flight.
            Algorithm::Concurrency { .. } => {
                return (Algorithm::Concurrency { max_duration_us: 0 }, 0);
            }
            algorithm => algorithm,
        };
        (algorithm, self.per_us)
    }

    /// Units that can be in use at once, and so the largest cost that is ever admitted.
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

    /// The largest cost that is sure to be admitted once nothing is in use: the capacity, unless that is still to
    /// warm up.
    pub fn cold_capacity(&self) -> u64 {
        match self.algorithm {
            Algorithm::TokenBucket { burst, warm_up_us } if warm_up_us > 0 => {
                (burst / 3).max(1).min(burst)
            }
            _ => self.capacity(),
        }
    }

    /// What the longest delay of [`Algorithm::LeakyBucket`] is worth beyond whole units, in units of 1 / per_us;
    /// else 0.
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

    /// The width of the sub-windows of [`Algorithm::SlidingWindow`], in microseconds; else the period.
    pub fn sub_window_us(&self) -> u64 {
        match self.algorithm {
            Algorithm::SlidingWindow { buckets } => self.per_us.div_ceil(buckets.max(1)).max(1),
            _ => self.per_us,
        }
    }

    /// The state of a key that was never seen.
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

/// What a store keeps for one key of one limit.
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
    /// The state as it stands at `now_us`, or at the newest charge it has seen: a clock that steps back
    /// never loosens. Looking changes nothing, so that a look at a time that the clock then takes back
    /// forgets no charge.
    pub fn view_at<'a>(&'a self, limit: &'a Limit, now_us: u64) -> CounterView<'a> {
        let now_us = now_us.max(self.latest_proven_us());
        let used = match &self.0 {
            AlgorithmState::SlidingLog(log) => log.used(limit, now_us),
            AlgorithmState::SlidingWindow(buckets) => buckets.used(limit, now_us),
            AlgorithmState::TokenBucket(bucket) => bucket.used(limit, now_us),
            AlgorithmState::LeakyBucket(line) => line.used(limit, now_us),
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

    /// Takes the units of a charge, at least 1, at the time that [`State::at`] would look at.
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

    /// Takes units, at least 1, that will be used until `until_us`, as [`grants`] says.
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
            // These lend nothing.
            AlgorithmState::LeakyBucket(_)
            | AlgorithmState::Concurrency(_)
            | AlgorithmState::Block(_) => {}
        }
    }

    /// Takes as much of a refused charge as [`ChargeEffect::ChargeRejected`] says.
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
            AlgorithmState::LeakyBucket(line) => line.charge_rejected(limit, cost, now_us, settles),
            // Slots are not spent, and a block counts nothing.
            AlgorithmState::Concurrency(_) | AlgorithmState::Block(_) => {}
        }
    }

    /// Puts right what was charged before.
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
            AlgorithmState::LeakyBucket(line) => line.credit(limit, units, at_us, now_us),
            AlgorithmState::Concurrency(_) | AlgorithmState::Block(_) => {}
        }
    }

    /// `settles`: some of it may be given back.
    fn take_units(&mut self, limit: &Limit, cost: u64, now_us: u64, settles: bool) {
        let now_us = now_us.max(self.latest_proven_us());
        match &mut self.0 {
            AlgorithmState::SlidingLog(log) => log.charge(limit, cost, now_us),
            AlgorithmState::SlidingWindow(buckets) => buckets.charge(limit, cost, now_us),
            AlgorithmState::TokenBucket(bucket) => bucket.charge(limit, cost, now_us, settles),
            AlgorithmState::LeakyBucket(line) => line.charge(limit, cost, now_us, settles),
            AlgorithmState::FixedWindow(window) => window.charge(limit, cost, now_us),
            AlgorithmState::Block(block) => block.until_us = now_us.saturating_add(limit.per_us),
            // Taken by their ids.
            AlgorithmState::Concurrency(_) => {}
        }
    }

    /// When the state becomes indistinguishable from a fresh one.
    pub fn expires_at_us(&self, limit: &Limit) -> u64 {
        match &self.0 {
            AlgorithmState::SlidingLog(log) => log.newest_entry_us().saturating_add(limit.per_us),
            AlgorithmState::SlidingWindow(buckets) => buckets.expires_at_us(limit),
            AlgorithmState::TokenBucket(bucket) => bucket.expires_at_us(limit),
            AlgorithmState::LeakyBucket(line) => line.expires_at_us(limit),
            AlgorithmState::FixedWindow(window) => {
                window.window_end_us(limit, window.latest_proven_us())
            }
            AlgorithmState::Concurrency(slots) => slots.expires_at_us(),
            AlgorithmState::Block(block) => block.until_us,
        }
    }

    /// Bytes held outside of the state itself.
    pub fn heap_bytes(&self) -> usize {
        match &self.0 {
            AlgorithmState::SlidingLog(log) => log.heap_bytes(),
            AlgorithmState::SlidingWindow(buckets) => buckets.heap_bytes(),
            AlgorithmState::Concurrency(slots) => slots.heap_bytes(),
            AlgorithmState::TokenBucket(bucket) => bucket.heap_bytes(),
            AlgorithmState::LeakyBucket(line) => line.heap_bytes(),
            AlgorithmState::FixedWindow(_) | AlgorithmState::Block(_) => 0,
        }
    }

    fn latest_proven_us(&self) -> u64 {
        match &self.0 {
            AlgorithmState::SlidingLog(log) => log.latest_proven_us(),
            AlgorithmState::SlidingWindow(buckets) => buckets.latest_proven_us(),
            AlgorithmState::TokenBucket(bucket) => bucket.newest_us(),
            AlgorithmState::LeakyBucket(line) => line.latest_proven_us(),
            AlgorithmState::FixedWindow(window) => window.latest_proven_us(),
            AlgorithmState::Concurrency(_) | AlgorithmState::Block(_) => 0,
        }
    }
}

/// A [`State`] under one limit at one time.
#[derive(Clone, Copy, Debug)]
pub struct CounterView<'a> {
    state: &'a CounterState,
    limit: &'a Limit,
    now_us: u64,
    used: u64,
}

impl CounterView<'_> {
    /// Units in use. More than `requests` after a limit was lowered.
    pub fn used(&self) -> u64 {
        self.used
    }

    /// Whether `cost` units fit, and if not, until when they don't.
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

    /// How many units can be lent until a time, and until when at most; `None`: none can. `now_us` is the store's clock:
    /// while it stands behind the state, because it stepped back, nobody knows how long it is until then.
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

    /// How the limit looks from here, with the refusal that was found before anything was charged.
    pub fn limit_status(&self, refusal: Option<Refusal>) -> LimitStatus {
        let capacity = self.limit.capacity();
        let grows_at_us = match (capacity.checked_sub(1), self.used.checked_sub(1)) {
            (Some(below_limit), Some(below_now)) => {
                self.usage_drop_time_us(below_limit.min(below_now))
            }
            _ => None,
        };
        LimitStatus {
            remaining: capacity.saturating_sub(self.used),
            next_growth_us: grows_at_us,
            refusal,
        }
    }

    /// Where what was charged last stands, or would if it were charged now.
    pub fn charged_at_us(&self) -> u64 {
        let newest_entry_us = match &self.state.0 {
            AlgorithmState::SlidingLog(log) => log.newest_entry_us(),
            AlgorithmState::SlidingWindow(buckets) => buckets.newest_start_us(),
            _ => 0,
        };
        newest_entry_us.max(self.now_us)
    }

    /// How long the request that was charged last has to be held. A clock that stepped back makes nobody wait
    /// for longer than the limit says: it is counted from the time that the state looks at.
    pub fn delay_us(&self) -> u64 {
        match &self.state.0 {
            AlgorithmState::LeakyBucket(line) => line.delay_us(self.limit, self.now_us),
            _ => 0,
        }
    }

    /// When, with nothing further charged, at most `units` of those in use still are; `None`: nobody knows.
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
            AlgorithmState::LeakyBucket(line) => {
                line.usage_drop_time_us(self.limit, self.now_us, units)
            }
            AlgorithmState::FixedWindow(window) => window.window_end_us(self.limit, self.now_us),
            AlgorithmState::Block(block) => block.until_us,
            AlgorithmState::Concurrency(_) => return None,
        })
    }
}
