//! The leases of one policy for one key.

use super::clock_reading::ClockReading;
use super::lease_credit::{LeaseCreditQueue, LeasedCounters};
use crate::clock::saturating_micros;
use crate::limiter::{LeaseTerms, LimitStatus, PolicyCharges};
use smallvec::SmallVec;
use std::sync::Arc;
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
    /// Status of each limit; `remaining` is a lower bound.
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
