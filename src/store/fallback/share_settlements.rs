//! Settlements of charges that this process decided without Redis.

use super::FallbackStore;
use crate::limiter::{Amendment, CounterRef, PolicyCharges, each_charge};
use crate::store::Settlement;

impl FallbackStore {
    /// Applies settlements to local counters: of charges decided here, and of slots counted here.
    pub fn apply_settlements(&self, settlements: &[Settlement<'_>]) {
        for settlement in settlements {
            let counter = settlement.counter();
            let applies = match settlement.amendment {
                Amendment::Release { slot } => {
                    (self.write_back.lock()).remove_released_slot(counter, slot);
                    true
                }
                Amendment::Renew { .. } => true,
                Amendment::Charge(_) => self.is_in_outage(),
                // Ignored credits make the share too strict, but only for a short time.
                Amendment::Credit { .. } | Amendment::BackdatedCharge { .. } => false,
            };
            if applies && counter.key.is_response_counter_key() && self.has_request_counter(counter)
            {
                // A decision only reads this counter, so the first response creates it.
                self.amend_share(counter, settlement.amendment);
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
        let is_counted_here = self.has_request_counter(settlement.counter());
        if is_counted_here {
            let charge = [PolicyCharges::new(settlement.limit, settlement.key, units)];
            self.record_charges(each_charge(&charge), self.clock.now_us());
        }
        is_counted_here
    }

    /// Whether this process has the counter of a limit; for the key of a response counter, the
    /// request counter of the limit.
    fn has_request_counter(&self, counter: CounterRef<'_>) -> bool {
        if !counter.key.is_response_counter_key() {
            return self.memory.contains_counter(counter);
        }
        let key = &counter.key.to_request_counter_key();
        self.memory.contains_counter(CounterRef { key, ..counter })
    }
}
