//! A part of a request's charges, decided apart from the others.

use super::{Charge, Decision};
use smallvec::SmallVec;

/// The charges of a request that one part of the store decides, in the order of the request.
#[derive(Debug)]
pub struct ChargePart<'c> {
    pub charges: SmallVec<[Charge<'c>; 4]>,
    /// For each charge of the request: whether it is in this part.
    included: SmallVec<[bool; 8]>,
}

impl<'c> ChargePart<'c> {
    /// Selects charges of a request. `included` has one flag for each of them.
    pub fn new(charges: &[Charge<'c>], included: impl IntoIterator<Item = bool>) -> Self {
        let included: SmallVec<[bool; 8]> = included.into_iter().collect();
        let selected = charges.iter().zip(&included);
        let selected = selected.filter(|(_, is_included)| **is_included);
        Self {
            charges: selected.map(|(charge, _)| *charge).collect(),
            included,
        }
    }

    /// The decision about the whole request, from the one about this part. All other charges have
    /// no outcome.
    #[must_use]
    pub fn expand(&self, decision: Decision) -> Decision {
        let mut own = decision.outcomes.into_iter();
        let outcomes = self.included.iter();
        let outcomes = outcomes.map(|is_included| is_included.then(|| own.next()).flatten());
        Decision {
            outcomes: outcomes.map(Option::unwrap_or_default).collect(),
            ..decision
        }
    }
}
