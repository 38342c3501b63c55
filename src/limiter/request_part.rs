//! A part of a request's charges, decided apart from the others.

use super::{Charge, Decision, PolicyCharges, PolicyOutcome};
use smallvec::SmallVec;

/// The charges of a request that one part of the store decides, in the order of the request.
#[derive(Debug)]
pub struct RequestPart<'c> {
    /// Only policies with charges in this part, each with these charges only.
    pub policies: SmallVec<[PolicyCharges<'c>; 2]>,
    /// For each policy of the request: which of its charges are in this part.
    included: SmallVec<[SmallVec<[bool; 4]>; 2]>,
}

impl<'c> RequestPart<'c> {
    /// Selects charges of a request. `is_included` is called once for each, in order.
    pub fn new(
        request: &[PolicyCharges<'c>],
        mut is_included: impl FnMut(&Charge<'_, '_>) -> bool,
    ) -> Self {
        let mut part = Self {
            policies: SmallVec::new(),
            included: SmallVec::new(),
        };
        for policy in request {
            let included = policy.charges().map(|charge| is_included(&charge));
            let included: SmallVec<[bool; 4]> = included.collect();
            if included.contains(&true) {
                let mut selected = policy.clone();
                let mut flags = included.iter();
                selected.limits.retain(|_| flags.next() == Some(&true));
                part.policies.push(selected);
            }
            part.included.push(included);
        }
        part
    }

    pub fn is_empty(&self) -> bool {
        self.policies.is_empty()
    }

    /// For each charge of the request, in order: whether it is in this part.
    pub fn included(&self) -> impl Iterator<Item = bool> {
        self.included.iter().flatten().copied()
    }

    /// The decision about the whole request, from the one about this part. All other charges have
    /// no outcome.
    #[must_use]
    pub fn expand(&self, decision: Decision) -> Decision {
        let mut answered = decision.policies.into_iter();
        let policies = self.included.iter().map(|included| {
            let own = included.contains(&true).then(|| answered.next());
            let PolicyOutcome { limits, grant } = own.flatten().unwrap_or_default();
            let mut outcomes = limits.into_iter();
            let limits = included
                .iter()
                .map(|is_included| is_included.then(|| outcomes.next()).flatten());
            PolicyOutcome {
                limits: limits.map(Option::unwrap_or_default).collect(),
                grant,
            }
        });
        Decision {
            policies: policies.collect(),
            ..decision
        }
    }
}
