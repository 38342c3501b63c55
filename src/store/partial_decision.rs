//! The decision on a request if a part of the store gave no answer.

use super::StoreUnavailable;
use super::instance_counters::InstanceReservation;
use crate::limiter::{Charge, ChargePart, Decision};
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
    pub(super) fn undecided_charges<'c>(&self, charges: &[Charge<'c>]) -> ChargePart<'c> {
        let statuses = self.decision.statuses.iter();
        ChargePart::new(charges, statuses.map(Option::is_none))
    }

    /// Completes the decision with the local decision on all other charges of the request. If
    /// `local` refuses, the statuses of this decision are left out, because they include units that
    /// are being returned.
    pub(super) fn complete(self, local: Decision) -> Decision {
        match local.admitted {
            true => self.confirm_charges().merge(local),
            false => local,
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
    pub(super) fn expand(mut self, part: &ChargePart<'_>) -> Self {
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
