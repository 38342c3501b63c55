//! The decision on a request if a part of the store gave no answer.

use super::StoreUnavailable;
use super::instance_counters::InstanceReservation;
use crate::limiter::{Decision, PolicyCharges, RequestPart};
use tokio::sync::oneshot;

/// Why a request was not decided, and what the reachable part of the store decided.
#[derive(Debug)]
pub struct DecisionFailure {
    pub unavailable: StoreUnavailable,
    pub partial: Option<Box<PartialDecision>>,
}

/// An admission by all counters that answered; their charges are made. Charges whose counter gave
/// no answer have no status. Dropping this value returns the made charges.
#[derive(Debug)]
pub struct PartialDecision {
    pub decision: Decision,
    /// Confirms the charges that a part of Redis has made, if any has.
    confirmation: Option<oneshot::Sender<()>>,
    /// The charges that this process has made, if there are any of its scope.
    instance_charges: Option<InstanceReservation>,
}

impl PartialDecision {
    /// The returned receiver gets a message if the request is forwarded, and is closed if it is
    /// not.
    pub(super) fn new(decision: Decision) -> (Self, oneshot::Receiver<()>) {
        let (confirmation, confirmed) = oneshot::channel();
        let partial = Self {
            decision,
            confirmation: Some(confirmation),
            instance_charges: None,
        };
        (partial, confirmed)
    }

    /// The charges of the request whose counter gave no answer.
    pub(super) fn undecided_charges<'c>(&self, request: &[PolicyCharges<'c>]) -> RequestPart<'c> {
        let mut outcomes = self.decision.outcomes();
        RequestPart::new(request, |_| {
            outcomes
                .next()
                .is_some_and(|outcome| outcome.status.is_none())
        })
    }

    /// Completes the decision with the local decision on all other charges of the request. If
    /// `local` refuses, the statuses of this decision are left out, because they include units that
    /// are being returned.
    pub(super) fn complete(self, local: Decision) -> Decision {
        if local.admitted {
            self.confirm_charges().merge(local)
        } else {
            local
        }
    }

    /// Keeps the charges, because the request is forwarded.
    pub(super) fn confirm_charges(self) -> Decision {
        if let Some(confirmation) = self.confirmation {
            // Sending fails only if the runtime shuts down.
            confirmation.send(()).ok();
        }
        if let Some(instance_charges) = self.instance_charges {
            instance_charges.keep_charges();
        }
        self.decision
    }
}

impl DecisionFailure {
    /// Expands the partial decision to the whole request.
    pub(super) fn expand(mut self, part: &RequestPart<'_>) -> Self {
        if let Some(partial) = &mut self.partial {
            partial.decision = part.expand(std::mem::take(&mut partial.decision));
        }
        self
    }

    /// Adds the decision of this process.
    pub(super) fn with_instance_charges(
        self,
        decision: Decision,
        instance_charges: InstanceReservation,
    ) -> Self {
        let (decision, confirmation) = match self.partial {
            Some(partial) => (partial.decision.merge(decision), partial.confirmation),
            None => (decision, None),
        };
        let partial = PartialDecision {
            decision,
            confirmation,
            instance_charges: Some(instance_charges),
        };
        Self {
            unavailable: self.unavailable,
            partial: Some(Box::new(partial)),
        }
    }
}

impl From<StoreUnavailable> for DecisionFailure {
    fn from(unavailable: StoreUnavailable) -> Self {
        Self {
            unavailable,
            partial: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limiter::{
        Algorithm, ChargeOutcome, KeyBuilder, Limit, LimitStatus, PolicyOutcome, Refusal,
    };
    use smallvec::{SmallVec, smallvec};

    fn decision(now_us: u64, delay_us: u64, refusal: Option<Refusal>) -> Decision {
        let status = LimitStatus {
            remaining: 1,
            next_growth_us: None,
            refusal,
            in_effect: None,
        };
        Decision {
            now_us,
            delay_us,
            admitted: refusal.is_none(),
            policies: smallvec![PolicyOutcome {
                limits: smallvec![ChargeOutcome {
                    status: Some(status),
                    ..ChargeOutcome::default()
                }],
                grant: None,
            }],
            ..Decision::default()
        }
    }

    #[test]
    fn a_request_decided_in_part_waits_for_all_its_queues_and_reports_only_what_stands() {
        let limit = Limit {
            requests: 2,
            per_us: 1_000_000,
            algorithm: Algorithm::SlidingLog,
        };
        let keys = ["a", "b"].map(|name| KeyBuilder::new(name).finish());
        let charges = keys
            .each_ref()
            .map(|key| PolicyCharges::new(&limit, key, 1));
        let complete = |redis_delay_us, local: Decision| {
            let answered = RequestPart::new(&charges, |charge| charge.key.id() == keys[0].id());
            let redis = answered.expand(decision(1_000, redis_delay_us, None));
            let (partial, _confirmed) = PartialDecision::new(redis);
            let undecided = partial.undecided_charges(&charges);
            assert_eq!(undecided.policies.len(), 1);
            partial.complete(undecided.expand(local))
        };
        for (redis_delay_us, local_delay_us) in [(0, 70), (70, 0), (70, 30)] {
            let completed = complete(redis_delay_us, decision(9, local_delay_us, None));
            assert!(completed.admitted);
            assert_eq!((completed.now_us, completed.delay_us), (1_000, 70));
            assert_eq!(completed.statuses().count(), 2);
        }
        let refused = complete(70, decision(9, 0, Some(Refusal::Until(29))));
        let outcomes = refused.outcomes();
        let refusals: SmallVec<[_; 2]> = outcomes.map(|outcome| outcome.refusal()).collect();
        assert_eq!(refusals.as_slice(), [None, Some(Refusal::Until(29))]);
        assert_eq!(refused.outcomes().next().unwrap().status, None);
        assert_eq!((refused.now_us, refused.delay_us), (9, 0));
    }
}
