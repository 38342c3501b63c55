//! Charges of `scope = "instance"` beside charges that Redis decides.
//!
//! The instance charges first, in its own memory. If it refuses, Redis is not called. If Redis
//! refuses, or the request ends before the decision, the charges are returned
//! ([decision 77](../../docs/decisions/0077-instance-scope.md)).

use super::memory::MemoryStore;
use super::{LimitAndKey, Settlement};
use crate::clock::monotonic_now;
use crate::limiter::{Algorithm, Amendment, Charge, Decision};
use smallvec::SmallVec;
use std::sync::Arc;
use std::time::Instant;

/// Charges that this process has made for a request that is not decided yet. Dropping it returns
/// them.
#[derive(Debug)]
pub(super) struct InstanceReservation {
    memory: Arc<MemoryStore>,
    /// The amendment that returns each charge.
    returns: SmallVec<[(LimitAndKey, Amendment); 1]>,
}

impl InstanceReservation {
    /// Decides charges in this process. They are made if all enforced ones are admitted.
    pub(super) fn decide(
        memory: &Arc<MemoryStore>,
        charges: &[Charge<'_>],
        requested_at: Instant,
    ) -> (Decision, Self) {
        // A bucket can return only charges that are marked as estimates.
        let returnable: SmallVec<[Charge<'_>; 4]> = charges
            .iter()
            .map(|charge| Charge {
                is_estimate: !charge.is_block() && !charge.is_counted,
                ..*charge
            })
            .collect();
        let decision = memory.decide_at(&returnable, requested_at);
        let made = charges.iter().zip(&decision.charged_at_us);
        let returns = made
            .filter(|_| decision.admitted)
            .filter_map(|(charge, at_us)| {
                let counter = (*charge.limit, charge.key.clone());
                at_us.map(|at_us| (counter, build_return(charge, at_us)))
            });
        let reservation = Self {
            memory: Arc::clone(memory),
            returns: returns.collect(),
        };
        (decision, reservation)
    }

    /// Keeps the charges, because the request is admitted.
    pub(super) fn keep_charges(mut self) {
        self.returns.clear();
    }

    /// Returns the charges, because Redis refused the request. `decision` gets the statuses without
    /// them.
    pub(super) fn return_charges(self, charges: &[Charge<'_>], decision: Decision) -> Decision {
        let memory = Arc::clone(&self.memory);
        drop(self);
        let reads: SmallVec<[Charge<'_>; 4]> = charges
            .iter()
            .map(|charge| Charge { cost: 0, ..*charge })
            .collect();
        let mut read = memory.decide_at(&reads, monotonic_now());
        for (status, decided) in read.statuses.iter_mut().zip(decision.statuses) {
            if let Some(status) = status {
                status.refusal = decided.and_then(|decided| decided.refusal);
            }
        }
        read.admitted = decision.admitted;
        read
    }
}

impl Drop for InstanceReservation {
    fn drop(&mut self) {
        for made in &self.returns {
            self.memory
                .apply_settlement_if_present(&Settlement::from_pending(made));
        }
    }
}

fn build_return(charge: &Charge<'_>, at_us: u64) -> Amendment {
    match charge.limit.algorithm {
        Algorithm::Concurrency { .. } => Amendment::Release {
            slot: charge.slot_id,
        },
        _ => Amendment::Credit {
            units: charge.cost,
            at_us,
        },
    }
}
