//! The leases of one policy for one key, the clocks by which they end, and the credits for their
//! unused units.

use crate::clock::{Clock, saturating_micros};
use crate::limiter::{Amendment, Key, LeaseTerms, Limit, LimitStatus, PolicyCharges};
use crate::store::PendingSettlement;
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::ops::Add;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

/// Maximum units of a lease, if the size is automatic.
const MAX_AUTO_LEASE_UNITS: u64 = 1000;

/// Minimum demand per lease TTL before a key is leased, if the size is automatic.
pub(super) const MIN_DEMAND_UNITS: u64 = 4;

/// The leases of a policy for one key.
#[derive(Debug)]
pub(super) struct LeaseEntry {
    pub counters: Arc<LeasedCounters>,
    /// Ordered by expiry.
    pub leases: SmallVec<[Lease; 2]>,
    /// The refill in progress, if any; callers may wait for it.
    pub refill: Option<Arc<Notify>>,
    /// Whether the last refill got no units.
    pub is_last_grant_empty: bool,
    pub last_grant_answer: Option<LastGrantAnswer>,
    pub demand: LeaseDemand,
}

/// Units that Redis charged in advance, less those already issued.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lease {
    pub remaining_units: u64,
    /// End of the lease by the store's clock (µs).
    pub store_end_us: u64,
    pub expires_at: ClockReading,
}

/// The store's answer that granted the last lease of a key.
#[derive(Debug)]
pub(super) struct LastGrantAnswer {
    pub store_now_us: u64,
    pub received_at: Instant,
    /// The status of each limit in the answer.
    pub statuses: SmallVec<[LimitStatus; 2]>,
    /// Units issued since the answer.
    pub issued_units: u64,
}

/// Units requested in the current and in the previous interval of one lease TTL.
#[derive(Clone, Copy, Debug)]
pub(super) struct LeaseDemand {
    pub interval_start: Instant,
    pub current_units: u64,
    pub previous_units: u64,
}

/// Units issued to one request.
#[derive(Debug)]
pub(super) struct LeasePermit {
    pub counters: Arc<LeasedCounters>,
    pub units: u64,
    pub store_end_us: u64,
    /// The request has to be decided before this time.
    pub expires_at: ClockReading,
    /// Lower bound of the store's clock at the issue (µs).
    pub store_now_us: u64,
    /// Status of each limit. `remaining` lacks what other instances did since the last grant.
    pub statuses: SmallVec<[LimitStatus; 2]>,
}

impl LeaseEntry {
    pub(super) fn new(policy: &PolicyCharges<'_>, now: Instant) -> Self {
        Self {
            counters: LeasedCounters::from_policy(policy),
            leases: SmallVec::new(),
            refill: None,
            is_last_grant_empty: false,
            last_grant_answer: None,
            demand: LeaseDemand {
                interval_start: now,
                current_units: 0,
                previous_units: 0,
            },
        }
    }

    pub(super) fn matches_limits(&self, policy: &PolicyCharges<'_>) -> bool {
        let limits = self.counters.limits.iter().map(|(limit, _)| limit);
        limits.eq(policy.limits.iter().map(|charge| &charge.limit))
    }

    pub(super) fn is_in_use(&self) -> bool {
        !self.leases.is_empty() || self.refill.is_some()
    }

    /// Units to request when `available_units` are left; 0 while more than a quarter of the lease
    /// is left. A lease is refilled early, because more requests arrive until the store answers.
    pub(super) fn units_to_request(&self, terms: &LeaseTerms, available_units: u64) -> u64 {
        let size = terms.size.unwrap_or_else(|| {
            match self.demand.current_units.max(self.demand.previous_units) {
                0..MIN_DEMAND_UNITS => 0,
                units => units.min(MAX_AUTO_LEASE_UNITS),
            }
        });
        // After a refill without units, the units in hand are used up before the next refill.
        if available_units <= size / 4 && !(self.is_last_grant_empty && available_units > 0) {
            size - available_units
        } else {
            0
        }
    }

    pub(super) fn issue_permit(&mut self, units: u64, now: Instant) -> Option<LeasePermit> {
        let lease = self
            .leases
            .iter_mut()
            .find(|lease| lease.remaining_units >= units)?;
        let answer = self.last_grant_answer.as_mut()?;
        lease.remaining_units -= units;
        answer.issued_units = answer.issued_units.saturating_add(units);
        let now_us = answer.store_now_us.saturating_add(saturating_micros(
            now.saturating_duration_since(answer.received_at),
        ));
        let status = |status: &LimitStatus| LimitStatus {
            remaining: status.remaining.saturating_sub(answer.issued_units),
            next_growth_us: status.next_growth_us.map(|at_us| at_us.max(now_us)),
            refusal: None,
            in_effect: status.in_effect,
        };
        Some(LeasePermit {
            counters: Arc::clone(&self.counters),
            units,
            store_end_us: lease.store_end_us,
            expires_at: lease.expires_at,
            store_now_us: now_us,
            statuses: answer.statuses.iter().map(status).collect(),
        })
    }

    /// Removes expired leases and queues their unused units for return.
    pub(super) fn remove_expired_leases(&mut self, now: ClockReading, credits: &LeaseCreditQueue) {
        let counters = &self.counters;
        self.leases.retain(|lease| {
            let has_expired = now.has_reached(&lease.expires_at);
            if has_expired {
                credits.push(counters, lease.remaining_units, lease.store_end_us);
            }
            !has_expired
        });
    }

    pub(super) fn revoke_all_leases(&mut self, credits: &LeaseCreditQueue) {
        for lease in self.leases.drain(..) {
            credits.push(&self.counters, lease.remaining_units, lease.store_end_us);
        }
    }
}

impl LeasePermit {
    /// Whether the units are for this policy. The policies of a request have different keys.
    pub(super) fn is_for(&self, policy: &PolicyCharges<'_>) -> bool {
        self.counters.key.id() == policy.key.id()
    }
}

impl LeaseDemand {
    pub(super) fn record_units(&mut self, units: u64, now: Instant, terms: &LeaseTerms) {
        let ttl = Duration::from_micros(terms.ttl_us);
        let since = now.saturating_duration_since(self.interval_start);
        if since >= ttl {
            let previous_units = if since < 2 * ttl {
                self.current_units
            } else {
                0
            };
            *self = Self {
                interval_start: now,
                current_units: 0,
                previous_units,
            };
        }
        self.current_units = self.current_units.saturating_add(units);
    }
}

/// One moment on two clocks. [`Instant`] drives timers, but stops while the machine is suspended.
/// The boot time goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ClockReading {
    pub instant: Instant,
    pub boot_us: u64,
}

impl ClockReading {
    pub(super) fn now(clock: &Clock) -> Self {
        Self {
            instant: Instant::now(),
            boot_us: clock.boot_clock_us(),
        }
    }

    /// Whether this moment is at or after `end` on either clock.
    pub(super) fn has_reached(&self, end: &Self) -> bool {
        self.instant >= end.instant || self.boot_us >= end.boot_us
    }
}

impl Add<Duration> for ClockReading {
    type Output = Self;

    fn add(self, duration: Duration) -> Self {
        Self {
            instant: self.instant + duration,
            boot_us: self.boot_us.saturating_add(saturating_micros(duration)),
        }
    }
}

/// Maximum number of queued credits: a few megabytes. The units of further credits stay charged
/// until they expire.
pub(super) const MAX_QUEUED_CREDITS: usize = 1 << 14;

/// Credits that wait to be sent to the store.
#[derive(Debug, Default)]
pub(super) struct LeaseCreditQueue {
    credits: Mutex<Vec<PendingSettlement>>,
    /// Units that could not be returned since the start.
    pub lost_units: AtomicU64,
}

/// The key and limits that a lease was granted for. A lease for other limits belongs to another
/// policy or configuration.
#[derive(Debug)]
pub(super) struct LeasedCounters {
    pub key: Key,
    /// With whether overrides may apply.
    pub limits: SmallVec<[(Limit, bool); 2]>,
}

impl LeaseCreditQueue {
    /// Queues the credits of unused units of a lease that ends at `at_us` by the store's clock.
    pub(super) fn push(&self, owner: &LeasedCounters, units: u64, at_us: u64) {
        let mut credits = self.credits.lock();
        if credits.len() >= MAX_QUEUED_CREDITS {
            self.lost_units.fetch_add(units, Ordering::Relaxed);
            return;
        }
        let credit = Amendment::Credit { units, at_us };
        let limits = owner.limits.iter().filter(|_| units > 0);
        credits.extend(limits.map(|(limit, is_dynamic)| {
            // An override may have other amounts, also later ones. With a rate of 0, the debt of a
            // bucket is paid back at the rate of its last charge.
            let requests = if *is_dynamic { 0 } else { limit.requests };
            let limit = Limit { requests, ..*limit };
            ((limit, owner.key.clone()), credit)
        }));
    }

    pub(super) fn take_all(&self) -> Vec<PendingSettlement> {
        std::mem::take(&mut *self.credits.lock())
    }
}

impl LeasedCounters {
    pub(super) fn from_policy(policy: &PolicyCharges<'_>) -> Arc<Self> {
        let limits = policy.limits.iter();
        let limits = limits.map(|charge| (charge.limit, charge.name.is_some()));
        Arc::new(Self {
            key: policy.key.as_ref().clone(),
            limits: limits.collect(),
        })
    }
}
