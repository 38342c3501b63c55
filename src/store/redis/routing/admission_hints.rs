//! The units that Redis last reported as left: which charges it probably admits.

use crate::limiter::{Decision, PolicyCharges, each_charge};
use crate::store::memory::{CounterId, counter_id};
use parking_lot::Mutex;
use std::collections::HashMap;

/// Maximum number of counters in the table. A full table is cleared: each key then costs one more
/// round trip, once.
const MAX_ENTRIES: usize = 4096;

/// Remaining units by counter. Each worker has its own table.
#[derive(Debug, Default)]
pub(crate) struct AdmissionHints(Mutex<HashMap<CounterId, u64, foldhash::fast::RandomState>>);

impl AdmissionHints {
    /// Whether all enforced charges are within the units that Redis last reported as left.
    pub(crate) fn expects_admission(&self, request: &[PolicyCharges<'_>]) -> bool {
        let entries = self.0.lock();
        let mut enforced = each_charge(request).filter(|charge| charge.is_enforced());
        enforced.all(|charge| {
            let remaining = entries.get(&counter_id(charge.counter()));
            charge.cost == 0 || remaining.is_some_and(|units| *units >= charge.cost)
        })
    }

    /// Deducts charges that are about to be requested, so that concurrent requests do not all
    /// expect the same units.
    pub(crate) fn deduct_charges(&self, request: &[PolicyCharges<'_>]) {
        let mut entries = self.0.lock();
        // A block has no units that a request would use up.
        for charge in each_charge(request).filter(|charge| !charge.is_block()) {
            if let Some(remaining) = entries.get_mut(&counter_id(charge.counter())) {
                *remaining = remaining.saturating_sub(charge.cost);
            }
        }
    }

    pub(crate) fn record_remaining(&self, request: &[PolicyCharges<'_>], decision: &Decision) {
        let mut entries = self.0.lock();
        for (charge, outcome) in each_charge(request).zip(decision.outcomes()) {
            if entries.len() >= MAX_ENTRIES {
                entries.clear();
            }
            if let Some(status) = outcome.status {
                entries.insert(counter_id(charge.counter()), status.remaining);
            }
        }
    }
}
