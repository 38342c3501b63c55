//! The units that Redis last reported as left: which charges of a split request it probably admits.

use crate::limiter::{Algorithm, Charge};
use parking_lot::Mutex;
use std::collections::HashMap;

/// Maximum number of counters. A full table is cleared: each key then costs one round trip more,
/// once.
const MAX_ENTRIES: usize = 4096;

/// Remaining units by counter. Each worker has its own table.
#[derive(Debug, Default)]
pub(super) struct AdmissionHints(Mutex<HashMap<CounterId, u64, foldhash::fast::RandomState>>);

/// The key's id, and the algorithm and period of the limit.
type CounterId = (u128, (Algorithm, u64));

impl AdmissionHints {
    /// Whether the charges were all within the remaining units.
    pub(super) fn expect_admission(&self, charges: &[Charge<'_>]) -> bool {
        let entries = self.0.lock();
        charges.iter().all(|charge| {
            let remaining = entries.get(&counter_id(charge));
            charge.cost == 0 || remaining.is_some_and(|units| *units >= charge.cost)
        })
    }

    /// Deducts charges that are about to be requested, so that concurrent requests do not all expect
    /// the same units.
    pub(super) fn deduct(&self, charges: &[Charge<'_>]) {
        let mut entries = self.0.lock();
        // A request does not use up the absence of a block.
        for charge in charges.iter().filter(|charge| !charge.is_block()) {
            if let Some(remaining) = entries.get_mut(&counter_id(charge)) {
                *remaining = remaining.saturating_sub(charge.cost);
            }
        }
    }

    pub(super) fn record_remaining(&self, charge: &Charge<'_>, remaining: u64) {
        let mut entries = self.0.lock();
        if entries.len() >= MAX_ENTRIES {
            entries.clear();
        }
        entries.insert(counter_id(charge), remaining);
    }
}

fn counter_id(charge: &Charge<'_>) -> CounterId {
    (charge.key.id(), charge.limit.counter_identity())
}
