//! Simulations of fleets in virtual time.

mod fault_simulation;
mod scale_simulation;

use crate::limiter::Amendment;
use crate::store::PendingSettlement;

/// The units of a credit, and the end of their lease (µs, store's clock).
pub(super) fn credited_units_and_time((_, amendment): &PendingSettlement) -> (u64, u64) {
    match *amendment {
        Amendment::Credit { units, at_us } => (units, at_us),
        other => panic!("{other:?}"),
    }
}
