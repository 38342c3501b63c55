//! The state of one counter, whatever its algorithm.

use super::block::BlockState;
use super::concurrency::ConcurrencyState;
use super::fixed_window::FixedWindowState;
use super::sliding_log::ChargeLog;
use super::token_bucket::TokenBucketState;
use super::{Algorithm, Amendment, Charge, Limit, LimitStatus, Refusal, TimeWindow};

/// The state of one key of one limit, as a store keeps it.
#[derive(Clone, Debug)]
pub struct CounterState(AlgorithmState);

#[derive(Clone, Debug)]
enum AlgorithmState {
    Log(ChargeLog),
    FixedWindow(FixedWindowState),
    Bucket(TokenBucketState),
    Concurrency(ConcurrencyState),
    Block(BlockState),
}

impl Limit {
    /// The state of a key without charges.
    pub fn initial_state(&self) -> CounterState {
        CounterState(match self.algorithm {
            Algorithm::SlidingLog => AlgorithmState::Log(ChargeLog::new(1)),
            Algorithm::SlidingWindow { .. } => {
                AlgorithmState::Log(ChargeLog::new(self.sub_window_width_us()))
            }
            Algorithm::FixedWindow { .. } | Algorithm::CalendarWindow { .. } => {
                AlgorithmState::FixedWindow(FixedWindowState::default())
            }
            Algorithm::TokenBucket { .. } | Algorithm::LeakyBucket { .. } => {
                AlgorithmState::Bucket(TokenBucketState::default())
            }
            Algorithm::Concurrency { .. } => {
                AlgorithmState::Concurrency(ConcurrencyState::default())
            }
            Algorithm::Block => AlgorithmState::Block(BlockState::default()),
        })
    }
}

impl CounterState {
    /// The state of a key without charges, whose window is the present one or a later one.
    pub fn from_window(window: TimeWindow) -> Self {
        Self(AlgorithmState::FixedWindow(FixedWindowState::from_window(
            window,
        )))
    }

    /// Returns a view of the state at `now_us`, or at its newest charge if that is later: a clock
    /// that steps back never loosens a limit. The view does not change the state, so a read at a
    /// time that the clock then takes back loses no charge.
    pub fn view_at<'a>(&'a self, limit: &'a Limit, clock_us: u64) -> CounterView<'a> {
        let now_us = clock_us.max(self.now_lower_bound_us());
        let used = match &self.0 {
            AlgorithmState::Log(log) => log.used_units(limit, now_us),
            AlgorithmState::Bucket(bucket) => bucket.used_units(limit, now_us),
            AlgorithmState::FixedWindow(window) => window.used_units(now_us),
            AlgorithmState::Concurrency(slots) => slots.used_slots(now_us),
            AlgorithmState::Block(block) => block.used_units(now_us),
        };
        CounterView {
            state: self,
            limit,
            now_us,
            used,
            clock_us: (clock_us, clock_us),
        }
    }

    /// The last window with charges, of algorithms whose windows follow the wall clock.
    pub fn wall_clock_window(&self) -> Option<TimeWindow> {
        match &self.0 {
            AlgorithmState::FixedWindow(state) => Some(state.window),
            _ => None,
        }
    }

    /// Takes the units of a charge, at least 1, at the time of [`Self::view_at`].
    pub fn charge(&mut self, charge: &Charge<'_, '_>, now_us: u64) {
        if let AlgorithmState::Concurrency(slots) = &mut self.0 {
            return slots.hold_slot(
                charge.policy.slot_id,
                now_us.saturating_add(charge.limit.per_us),
                now_us,
            );
        }
        self.take_units(charge.limit, charge.cost, now_us, charge.is_estimate);
    }

    /// Takes units, at least 1, for a lease until `until_us`, as [`super::compute_lease_grant`]
    /// determined.
    pub fn grant_lease(&mut self, limit: &Limit, units: u64, now_us: u64, until_us: u64) {
        match &mut self.0 {
            AlgorithmState::Log(log) => log.grant_lease(limit, units, now_us, until_us),
            AlgorithmState::FixedWindow(window) => window.charge(limit, units, now_us),
            AlgorithmState::Bucket(bucket) => bucket.grant_lease(limit, units, now_us, until_us),
            // These algorithms grant no leases.
            AlgorithmState::Concurrency(_) | AlgorithmState::Block(_) => {}
        }
    }

    /// Takes the units of a rejected charge as [`super::ChargeEffect::ChargeRejected`] defines.
    pub fn charge_rejected(&mut self, charge: &Charge<'_, '_>, now_us: u64) {
        let now_us = now_us.max(self.now_lower_bound_us());
        let Charge {
            limit,
            cost,
            is_estimate,
            ..
        } = *charge;
        match &mut self.0 {
            AlgorithmState::FixedWindow(window) => window.charge_rejected(limit, cost, now_us),
            AlgorithmState::Log(log) => log.charge_rejected(limit, cost, now_us),
            AlgorithmState::Bucket(bucket) => {
                bucket.charge_rejected(limit, cost, now_us, is_estimate)
            }
            // Slots are only held by requests in flight, and a block counts nothing.
            AlgorithmState::Concurrency(_) | AlgorithmState::Block(_) => {}
        }
    }

    /// Charges or returns units after the decision, or renews or releases a slot.
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
        let now_us = now_us.max(self.now_lower_bound_us());
        match &mut self.0 {
            AlgorithmState::FixedWindow(window) => window.credit(units, at_us, now_us),
            AlgorithmState::Log(log) => log.credit(limit, units, at_us, now_us),
            AlgorithmState::Bucket(bucket) => bucket.credit(limit, units, at_us, now_us),
            AlgorithmState::Concurrency(_) | AlgorithmState::Block(_) => {}
        }
    }

    /// `is_estimate`: some of the units may be credited later.
    fn take_units(&mut self, limit: &Limit, cost: u64, now_us: u64, is_estimate: bool) {
        let now_us = now_us.max(self.now_lower_bound_us());
        match &mut self.0 {
            AlgorithmState::Log(log) => log.charge(limit, cost, now_us),
            AlgorithmState::Bucket(bucket) => bucket.charge(limit, cost, now_us, is_estimate),
            AlgorithmState::FixedWindow(window) => window.charge(limit, cost, now_us),
            AlgorithmState::Block(block) => block.until_us = now_us.saturating_add(limit.per_us),
            // Slots are taken by their ids.
            AlgorithmState::Concurrency(_) => {}
        }
    }

    /// The time at which the state becomes indistinguishable from an initial one.
    pub fn expires_at_us(&self, limit: &Limit) -> u64 {
        match &self.0 {
            AlgorithmState::Log(log) => log.expires_at_us(limit),
            AlgorithmState::Bucket(bucket) => bucket.expires_at_us(limit),
            AlgorithmState::FixedWindow(state) => state.window.end_us,
            AlgorithmState::Concurrency(slots) => slots.expires_at_us(),
            AlgorithmState::Block(block) => block.until_us,
        }
    }

    /// Heap bytes of the state.
    pub fn heap_bytes(&self) -> usize {
        match &self.0 {
            AlgorithmState::Log(log) => log.heap_bytes(),
            AlgorithmState::Concurrency(slots) => slots.heap_bytes(),
            AlgorithmState::Bucket(bucket) => bucket.heap_bytes(),
            AlgorithmState::FixedWindow(_) | AlgorithmState::Block(_) => 0,
        }
    }

    /// The latest time that the state proves to have passed: the present is not earlier.
    pub fn now_lower_bound_us(&self) -> u64 {
        match &self.0 {
            AlgorithmState::Log(log) => log.now_lower_bound_us(),
            AlgorithmState::Bucket(bucket) => bucket.charged_at_us,
            AlgorithmState::FixedWindow(state) => state.window.start_us,
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
    /// The time for which the view was requested, and what the clock of reported times showed then.
    clock_us: (u64, u64),
}

impl CounterView<'_> {
    /// The view with its reported times on another clock, which shows `reported_us`.
    #[must_use]
    pub fn with_reported_clock(self, reported_us: u64) -> Self {
        Self {
            clock_us: (self.clock_us.0, reported_us),
            ..self
        }
    }

    /// Units in use. May exceed the capacity after a limit was lowered.
    pub fn used_units(&self) -> u64 {
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

    /// Returns how many units can be leased and until when (at most `until_us`); `None` if none.
    /// `now_us` is the store's clock. If the clock stepped back behind the state, nothing is
    /// granted.
    pub fn grantable_units(&self, now_us: u64, until_us: u64) -> Option<(u64, u64)> {
        let until_us = match &self.state.0 {
            AlgorithmState::FixedWindow(window) => {
                let window = window.window_at(self.limit, self.now_us);
                until_us.min(self.reported_time_us(window.end_us).saturating_sub(1))
            }
            AlgorithmState::Log(log) if log.has_newest_sub_window_begun_by(until_us) => until_us,
            AlgorithmState::Bucket(bucket)
                if bucket.can_grant_lease(self.limit, now_us, until_us) =>
            {
                until_us
            }
            _ => return None,
        };
        (self.now_us == self.clock_us.0)
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
            in_effect: None,
        }
    }

    /// The time under which a charge made at the time of the view is recorded: later than the view
    /// if the newest entry is a lease; in a queue, the end of its position.
    pub fn charged_at_us(&self) -> u64 {
        let recorded_at_us = match (&self.state.0, self.limit.algorithm) {
            (AlgorithmState::Log(log), _) => log.newest_sub_window_start_us(),
            (AlgorithmState::Bucket(queue), Algorithm::LeakyBucket { .. }) => {
                queue.queue_end_us(self.limit, self.now_us)
            }
            _ => 0,
        };
        recorded_at_us.max(self.now_us)
    }

    /// How long the request that was charged last must be delayed. The delay is counted from the
    /// time of the view, so a clock that stepped back never delays a request longer than the limit
    /// allows.
    pub fn delay_us(&self) -> u64 {
        match (&self.state.0, self.limit.algorithm) {
            (AlgorithmState::Bucket(queue), Algorithm::LeakyBucket { .. }) => {
                queue.delay_us(self.limit, self.now_us)
            }
            _ => 0,
        }
    }

    /// The time at which at most `units` are in use if nothing more is charged; `None` if unknown.
    fn usage_drop_time_us(&self, units: u64) -> Option<u64> {
        let at_us = match &self.state.0 {
            AlgorithmState::Log(log) => log.usage_drop_time_us(self.limit, self.now_us, units),
            AlgorithmState::Bucket(bucket) => {
                bucket.usage_drop_time_us(self.limit, self.now_us, units)?
            }
            AlgorithmState::FixedWindow(window) => window.window_at(self.limit, self.now_us).end_us,
            AlgorithmState::Block(block) => block.until_us,
            AlgorithmState::Concurrency(_) => return None,
        };
        Some(self.reported_time_us(at_us))
    }

    /// Converts a time of the state to the clock of reported times.
    pub fn reported_time_us(&self, at_us: u64) -> u64 {
        let (clock_us, reported_us) = self.clock_us;
        (at_us.saturating_add(reported_us)).saturating_sub(clock_us)
    }
}
