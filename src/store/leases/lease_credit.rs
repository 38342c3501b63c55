//! Credits: unused leased units on their way back to the store.

use crate::limiter::{Amendment, Key, Limit, PolicyCharges};
use crate::store::PendingSettlement;
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Maximum number of queued credits: a few megabytes. The units of further credits stay charged
/// until they expire.
pub(super) const MAX_QUEUED_CREDITS: usize = 1 << 14;

/// Credits that wait to be sent to the store.
#[derive(Debug, Default)]
pub(super) struct LeaseCreditQueue {
    credits: Mutex<Vec<PendingSettlement>>,
    /// Units that could not be returned.
    lost_units: AtomicU64,
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
            return self.record_lost_units(units);
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

    /// Counts units that could not be returned.
    pub(super) fn record_lost_units(&self, units: u64) {
        self.lost_units.fetch_add(units, Ordering::Relaxed);
    }

    /// Units that could not be returned since the start.
    pub(super) fn lost_units(&self) -> u64 {
        self.lost_units.load(Ordering::Relaxed)
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
