//! Unused leased units on their way back to the store.

use crate::limiter::{Amendment, Charge, Key, Limit};
use crate::store::Settlement;
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Maximum number of queued returns: a few megabytes. The units of further returns stay charged
/// until they expire.
pub(super) const MAX_RETURNS: usize = 1 << 14;

/// Returns that wait to be sent to the store.
#[derive(Debug, Default)]
pub(super) struct LeaseReturnQueue {
    returns: Mutex<Vec<LeaseReturn>>,
    /// Units that could not be returned.
    lost_units: AtomicU64,
}

/// The key and limits that a lease was granted for. A lease for other limits belongs to another
/// policy or configuration.
#[derive(Debug)]
pub(super) struct LeaseOwner {
    pub key: Key,
    pub limits: SmallVec<[Limit; 2]>,
}

/// Unused units of a lease.
#[derive(Clone, Debug)]
pub(super) struct LeaseReturn {
    pub owner: Arc<LeaseOwner>,
    pub units: u64,
    pub until_us: u64,
}

impl LeaseReturnQueue {
    pub(super) fn push(&self, lease_return: LeaseReturn) {
        let mut returns = self.returns.lock();
        match returns.len() < MAX_RETURNS {
            true => returns.push(lease_return),
            false => self.record_lost_units(lease_return.units),
        }
    }

    pub(super) fn take_all(&self) -> Vec<LeaseReturn> {
        std::mem::take(&mut *self.returns.lock())
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

impl LeaseOwner {
    pub(super) fn from_charges(charges: &[Charge<'_>], key: &Key) -> Arc<Self> {
        let limits = charges.iter().map(|charge| *charge.limit).collect();
        Arc::new(Self {
            key: key.clone(),
            limits,
        })
    }
}

impl LeaseReturn {
    pub(super) fn settlements(&self) -> impl Iterator<Item = Settlement<'_>> {
        let amendment = Amendment::Credit {
            units: self.units,
            at_us: self.until_us,
        };
        self.owner.limits.iter().map(move |limit| Settlement {
            limit,
            key: &self.owner.key,
            amendment,
        })
    }

    pub(super) fn units(&self) -> u64 {
        self.units
    }
}
