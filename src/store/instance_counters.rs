//! Charges of `scope = "instance"` beside charges that Redis decides.
//!
//! If Redis will probably admit the request, the instance charges first, in its own memory.
//! Otherwise Redis decides first, so that its refusals take nothing from other requests. If one
//! side refuses, or the request ends before the decision, the charges of the other are returned
//! ([decision 34](../../docs/decisions/0034-split-decisions.md)).

use super::memory::MemoryStore;
use super::{PendingSettlement, Settlement};
use crate::clock::monotonic_now;
use crate::limiter::{Decision, PolicyCharges, each_charge};
use smallvec::SmallVec;
use std::sync::Arc;
use std::time::Instant;

/// Charges that this process has made for a request that is not decided yet. Dropping it returns
/// them.
#[derive(Debug)]
pub(super) struct InstanceReservation {
    memory: Arc<MemoryStore>,
    /// The amendment that returns each charge.
    returns: Vec<PendingSettlement>,
}

impl InstanceReservation {
    /// Decides charges in this process. They are made if all enforced ones are admitted.
    pub(super) fn decide(
        memory: &Arc<MemoryStore>,
        request: &[PolicyCharges<'_>],
        requested_at: Instant,
    ) -> (Decision, Self) {
        let decision = memory.decide_at(&mark_returnable(request), requested_at);
        let reservation = Self {
            memory: Arc::clone(memory),
            returns: list_returns(request, &decision),
        };
        (decision, reservation)
    }

    /// Reads the counters of this process. Returns the admission if they have room for the charges
    /// now, without any charge made.
    pub(super) fn preview(
        memory: &Arc<MemoryStore>,
        request: &[PolicyCharges<'_>],
    ) -> Option<(Decision, Self)> {
        let decision = read_counters(memory, request);
        let has_room = each_charge(request)
            .zip(decision.outcomes())
            .all(|(charge, outcome)| !charge.is_enforced() || outcome.refusal().is_none());
        let reservation = Self {
            memory: Arc::clone(memory),
            returns: Vec::new(),
        };
        has_room.then_some((decision, reservation))
    }

    /// Keeps the charges, because the request is admitted.
    pub(super) fn keep_charges(mut self) {
        self.returns.clear();
    }

    /// Returns the charges, because Redis refused the request. `decision` gets the statuses without
    /// them.
    pub(super) fn return_charges(
        self,
        request: &[PolicyCharges<'_>],
        decision: Decision,
    ) -> Decision {
        let memory = Arc::clone(&self.memory);
        drop(self);
        let mut read = read_counters(&memory, request);
        for (outcome, decided) in read.outcomes_mut().zip(decision.outcomes()) {
            if let Some(status) = &mut outcome.status {
                status.refusal = decided.refusal();
            }
        }
        read.admitted = decision.admitted;
        read
    }
}

impl Drop for InstanceReservation {
    fn drop(&mut self) {
        for made in &self.returns {
            (self.memory).amend_counter(&Settlement::from_pending(made), false);
        }
    }
}

/// The charges, such that they can be returned: a decision reports the time only of charges that
/// are marked as estimates.
pub(super) fn mark_returnable<'c>(
    request: &[PolicyCharges<'c>],
) -> SmallVec<[PolicyCharges<'c>; 2]> {
    let policies = request.iter().map(|policy| {
        policy.map_limits(|charge| charge.is_estimate = !charge.is_block() && !charge.is_read)
    });
    policies.collect()
}

/// The amendments that return the charges of an admitted request, which were marked by
/// [`mark_returnable`].
pub(super) fn list_returns(
    request: &[PolicyCharges<'_>],
    decision: &Decision,
) -> Vec<PendingSettlement> {
    let outcomes = decision.outcomes().filter(|_| decision.admitted);
    let made = each_charge(request).zip(outcomes);
    made.filter_map(|(charge, outcome)| {
        let limit = outcome.limit_in_effect(charge.limit);
        let amendment = charge.return_amendment(outcome.charged_at_us?);
        Some(((limit, charge.key.clone()), amendment))
    })
    .collect()
}

/// Reads the counters, and which of them refuse, without a change: of the counters of responses, a
/// decision changes none.
fn read_counters(memory: &MemoryStore, request: &[PolicyCharges<'_>]) -> Decision {
    let reads = request.iter().map(PolicyCharges::to_read);
    memory.decide_at(&reads.collect::<SmallVec<[_; 2]>>(), monotonic_now())
}
