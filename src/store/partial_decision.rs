//! The decision on a request if a part of the store gave no answer.

use super::StoreUnavailable;
use super::instance_counters::InstanceReservation;
use crate::limiter::{Charge, Decision};
use smallvec::SmallVec;
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

    /// The indexes of the charges whose counter gave no answer.
    pub(super) fn undecided_positions(&self) -> SmallVec<[usize; 4]> {
        let statuses = self.decision.statuses.iter().enumerate();
        statuses
            .filter_map(|(position, status)| status.is_none().then_some(position))
            .collect()
    }

    /// Completes the decision with `local`, a local decision on the charges at `positions`. If
    /// `local` refuses, the statuses of all other charges are left out, because they include units
    /// that are being returned.
    pub(super) fn complete(self, positions: &[usize], local: &Decision) -> Decision {
        let mut completed = match local.admitted {
            true => self.confirm_charges(),
            false => Decision {
                admitted: false,
                statuses: SmallVec::from_elem(None, self.decision.statuses.len()),
                delay_us: 0,
                charged_at_us: SmallVec::new(),
                ..self.decision
            },
        };
        for (position, status) in positions.iter().zip(&local.statuses) {
            if let Some(target) = completed.statuses.get_mut(*position) {
                *target = status.map(|status| status.convert_clock(local.now_us, completed.now_us));
            }
        }
        completed
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
    /// Expands the partial decision to the whole request ([`Decision::expand_to_request`]).
    pub(super) fn expand_to_request(
        mut self,
        included: &[(usize, Charge<'_>)],
        charge_count: usize,
    ) -> Self {
        if let Some(partial) = &mut self.partial {
            let indices = included.iter().map(|(index, _)| *index);
            let decision = std::mem::take(&mut partial.decision);
            partial.decision = decision.expand_to_request(indices, charge_count);
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
