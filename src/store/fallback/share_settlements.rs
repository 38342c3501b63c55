//! Settlements of charges that this process decided without Redis.

use super::FallbackStore;
use crate::limiter::{Amendment, Charge, Key, Limit};
use crate::store::Settlement;

impl FallbackStore {
    /// Applies settlements to local counters: of charges decided here, and of slots counted here.
    pub fn apply_settlements(&self, settlements: &[Settlement<'_>]) {
        for settlement in settlements {
            let Settlement { limit, key, .. } = *settlement;
            let applies = match settlement.amendment {
                Amendment::Release { slot } => {
                    (self.write_back.lock()).remove_released_slot(limit, key, slot);
                    true
                }
                Amendment::Renew { .. } => true,
                Amendment::Charge(_) => self.is_in_outage(),
                // Ignored credits make the share too strict, but only for a short time.
                Amendment::Credit { .. } | Amendment::BackdatedCharge { .. } => false,
            };
            if applies && key.is_response_counter_key() && self.has_request_counter(limit, key) {
                // A decision only reads this counter, so the first response creates it.
                self.amend_share(limit, key, settlement.amendment);
            } else if applies {
                self.memory.amend_counter(settlement, false);
            }
        }
    }

    /// Records a settlement that could not be sent to Redis, for write-back. Applies only to
    /// further units of a counter that this process has; returns whether it was recorded.
    pub fn defer_settlement(&self, settlement: &Settlement<'_>) -> bool {
        let Amendment::Charge(units) = settlement.amendment else {
            return false;
        };
        let charge = Charge::new(settlement.limit, settlement.key, units);
        let is_counted_here = self.has_request_counter(charge.limit, charge.key);
        if is_counted_here {
            self.record_charges(&[charge], self.clock.now_us());
        }
        is_counted_here
    }

    /// Whether this process has the counter of a limit; for the key of a response counter, the
    /// request counter of the limit.
    fn has_request_counter(&self, limit: &Limit, key: &Key) -> bool {
        if key.is_response_counter_key() {
            self.memory
                .contains_counter(limit, &key.to_request_counter_key())
        } else {
            self.memory.contains_counter(limit, key)
        }
    }
}
