//! What a limit *is*: pure rules over (state, limit, cost, now).
//!
//! Nothing here knows a clock, a network, HTTP or a file format. Each algorithm is one file with its
//! formula, worst case and memory per key in the top comment. A store (see [`crate::store`]) keeps the
//! states, brings the time, and makes the decision over several limits atomic.
//!
//! Times are microseconds since the Unix epoch, on the store's clock. Everything that a rule says about
//! the future is an absolute time, so that whoever asked can subtract *his* reading of that clock.

mod block;
mod fixed_window;
mod key;
mod leaky_bucket;
mod sliding_log;
mod sliding_window;
mod token_bucket;

pub use key::{Key, KeyBuilder};
use smallvec::SmallVec;

/// The largest `requests` and cost: integers up to here are exact in a double, which Lua computes with.
pub const MAX_UNITS: u64 = 1 << 53;

/// An amount per period, by an algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Limit {
    /// Units that may be used in one period, 0..=[`MAX_UNITS`]. 0 refuses everything, for ever.
    pub requests: u64,
    /// The period, in microseconds, at least 1.
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
    TokenBucket {
        burst: u64,
    },
    /// Holds a request for up to `max_delay_us`; max_delay_us × requests + per_us is at most [`MAX_UNITS`].
    LeakyBucket {
        max_delay_us: u64,
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
}

/// Whether the block at `at` begins: a limit of its own policy is full, and it doesn't hold already.
/// `refusals` are those of all charges, found before anything was charged.
pub fn begins_block(charges: &[Charge<'_>], refusals: &[Option<Refusal>], at: usize) -> bool {
    let Some(block) = charges.get(at) else { return false };
    let is_free = refusals.get(at).is_some_and(Option::is_none);
    let mut limits = charges.iter().zip(refusals).skip(at + 1).take_while(|(charge, _)| block.guards(charge));
    block.cost > 0 && is_free && limits.any(|(_, refusal)| matches!(refusal, Some(Refusal::Until(_))))
}

impl Charge<'_> {
    pub fn is_block(&self) -> bool {
        self.limit.algorithm == Algorithm::Block
    }

    /// Whether `other`, somewhere behind this block, is a limit of its policy.
    pub fn guards(&self, other: &Self) -> bool {
        (self.group, self.shadow) == (other.group, other.shadow)
    }
}

/// Why, and until when, a limit refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// From this time on (µs, store's clock) the same cost fits, if nobody else takes it.
    Until(u64),
    /// The cost is above what the limit ever allows.
    Never,
}

/// Where one limit stands once the decision is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing {
    /// Units that a further request would still get now.
    pub remaining: u64,
    /// When `remaining` next grows (µs, store's clock); `None` if it is as large as it ever gets.
    pub grows_at_us: Option<u64>,
    /// `None`: this limit admits the charge (which says nothing about the others').
    pub refusal: Option<Refusal>,
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
    pub standings: SmallVec<[Option<Standing>; 4]>,
    /// How long an admitted request has to be held: the longest that an enforced limit wants, for most 0.
    pub delay_us: u64,
}

impl Limit {
    /// Everything that names a counter beside its key: a changed amount keeps the usage so far,
    /// a changed algorithm or period starts a new counter.
    pub fn identity(&self) -> (Algorithm, u64) {
        let algorithm = match self.algorithm {
            // A changed `block_for` ends no block.
            Algorithm::Block => return (Algorithm::Block, 0),
            Algorithm::TokenBucket { .. } => Algorithm::TokenBucket { burst: 0 },
            Algorithm::LeakyBucket { .. } => Algorithm::LeakyBucket { max_delay_us: 0 },
            algorithm => algorithm,
        };
        (algorithm, self.per_us)
    }

    /// Units that can be in use at once, and so the largest cost that is ever admitted.
    pub fn capacity(&self) -> u64 {
        match self.algorithm {
            _ if self.requests == 0 => 0,
            Algorithm::TokenBucket { burst } => burst,
            Algorithm::LeakyBucket { max_delay_us } => {
                let waiting =
                    u128::from(max_delay_us) * u128::from(self.requests) / u128::from(self.per_us.max(1));
                u64::try_from(waiting).unwrap_or(u64::MAX).saturating_add(1)
            }
            _ => self.requests,
        }
    }

    /// What the longest delay of [`Algorithm::LeakyBucket`] is worth beyond whole units, in units of 1 / per_us;
    /// else 0.
    pub fn slack(&self) -> u64 {
        match self.algorithm {
            Algorithm::LeakyBucket { max_delay_us } => {
                let part =
                    u128::from(max_delay_us) * u128::from(self.requests) % u128::from(self.per_us.max(1));
                u64::try_from(part).unwrap_or_default()
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
    pub fn fresh(&self) -> State {
        State(match self.algorithm {
            Algorithm::SlidingLog => Kind::SlidingLog(sliding_log::Log::default()),
            Algorithm::SlidingWindow { .. } => {
                Kind::SlidingWindow(sliding_window::Buckets::new(self.sub_window_us()))
            }
            Algorithm::FixedWindow { offset_us } => Kind::FixedWindow(fixed_window::Window::new(offset_us)),
            Algorithm::TokenBucket { .. } => Kind::TokenBucket(token_bucket::Bucket::default()),
            Algorithm::LeakyBucket { .. } => Kind::LeakyBucket(leaky_bucket::Line::default()),
            Algorithm::Block => Kind::Block(block::Block::default()),
        })
    }
}

/// What a store keeps for one key of one limit.
#[derive(Clone, Debug)]
pub struct State(Kind);

#[derive(Clone, Debug)]
enum Kind {
    SlidingLog(sliding_log::Log),
    SlidingWindow(sliding_window::Buckets),
    FixedWindow(fixed_window::Window),
    TokenBucket(token_bucket::Bucket),
    LeakyBucket(leaky_bucket::Line),
    Block(block::Block),
}

impl State {
    /// The state as it stands at `now_us`, or at the newest charge it has seen: a clock that steps back
    /// never loosens. Looking changes nothing, so that a look at a time that the clock then takes back
    /// forgets no charge.
    pub fn at<'a>(&'a self, limit: &'a Limit, now_us: u64) -> View<'a> {
        let now_us = now_us.max(self.newest_us());
        let used = match &self.0 {
            Kind::SlidingLog(log) => log.used(limit, now_us),
            Kind::SlidingWindow(buckets) => buckets.used(limit, now_us),
            Kind::TokenBucket(bucket) => bucket.used(limit, now_us),
            Kind::LeakyBucket(line) => line.used(limit, now_us),
            Kind::FixedWindow(window) => window.used(limit, now_us),
            Kind::Block(block) => block.used(now_us),
        };
        View { state: self, limit, now_us, used }
    }

    /// Takes `cost` units, at least 1, at the time that [`State::at`] would look at.
    pub fn charge(&mut self, limit: &Limit, cost: u64, now_us: u64) {
        let now_us = now_us.max(self.newest_us());
        match &mut self.0 {
            Kind::SlidingLog(log) => log.charge(limit, cost, now_us),
            Kind::SlidingWindow(buckets) => buckets.charge(limit, cost, now_us),
            Kind::TokenBucket(bucket) => bucket.charge(limit, cost, now_us),
            Kind::LeakyBucket(line) => line.charge(limit, cost, now_us),
            Kind::FixedWindow(window) => window.charge(limit, cost, now_us),
            Kind::Block(block) => block.until_us = now_us.saturating_add(limit.per_us),
        }
    }

    /// When the state becomes indistinguishable from a fresh one.
    pub fn expires_at_us(&self, limit: &Limit) -> u64 {
        match &self.0 {
            Kind::SlidingLog(log) => log.newest_us().saturating_add(limit.per_us),
            Kind::SlidingWindow(buckets) => buckets.expires_at_us(limit),
            Kind::TokenBucket(bucket) => bucket.expires_at_us(limit),
            Kind::LeakyBucket(line) => line.expires_at_us(limit),
            Kind::FixedWindow(window) => window.end_us(limit, window.newest_us()),
            Kind::Block(block) => block.until_us,
        }
    }

    /// Bytes held outside of the state itself.
    pub fn heap_bytes(&self) -> usize {
        match &self.0 {
            Kind::SlidingLog(log) => log.heap_bytes(),
            Kind::SlidingWindow(buckets) => buckets.heap_bytes(),
            Kind::FixedWindow(_) | Kind::TokenBucket(_) | Kind::LeakyBucket(_) | Kind::Block(_) => 0,
        }
    }

    fn newest_us(&self) -> u64 {
        match &self.0 {
            Kind::SlidingLog(log) => log.newest_us(),
            Kind::SlidingWindow(buckets) => buckets.newest_us(),
            Kind::TokenBucket(bucket) => bucket.newest_us(),
            Kind::LeakyBucket(line) => line.newest_us(),
            Kind::FixedWindow(window) => window.newest_us(),
            Kind::Block(_) => 0,
        }
    }
}

/// A [`State`] under one limit at one time.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    state: &'a State,
    limit: &'a Limit,
    now_us: u64,
    used: u64,
}

impl View<'_> {
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
        let room = capacity - cost;
        (self.used > room).then(|| Refusal::Until(self.at_most_at_us(room)))
    }

    /// How the limit looks from here, with the refusal that was found before anything was charged.
    pub fn standing(&self, refusal: Option<Refusal>) -> Standing {
        let capacity = self.limit.capacity();
        let grows_at_us = match (capacity.checked_sub(1), self.used.checked_sub(1)) {
            (Some(below_limit), Some(below_now)) => Some(self.at_most_at_us(below_limit.min(below_now))),
            _ => None,
        };
        Standing { remaining: capacity.saturating_sub(self.used), grows_at_us, refusal }
    }

    /// How long the request that was charged last has to be held. A clock that stepped back makes nobody wait
    /// for longer than the limit says: it is counted from the time that the state looks at.
    pub fn delay_us(&self) -> u64 {
        match &self.state.0 {
            Kind::LeakyBucket(line) => line.delay_us(self.limit, self.now_us),
            _ => 0,
        }
    }

    /// When, with nothing further charged, at most `units` of those in use still are.
    fn at_most_at_us(&self, units: u64) -> u64 {
        match &self.state.0 {
            Kind::SlidingLog(log) => log.at_most_at_us(self.limit, self.now_us, units),
            Kind::SlidingWindow(buckets) => buckets.at_most_at_us(self.limit, self.now_us, units),
            Kind::TokenBucket(bucket) => bucket.at_most_at_us(self.limit, self.now_us, units),
            Kind::LeakyBucket(line) => line.at_most_at_us(self.limit, self.now_us, units),
            Kind::FixedWindow(window) => window.end_us(self.limit, self.now_us),
            Kind::Block(block) => block.until_us,
        }
    }
}
