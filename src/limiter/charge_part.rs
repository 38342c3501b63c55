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
    /// no status.
    #[must_use]
    pub fn expand(&self, decision: Decision) -> Decision {
        let mut statuses: SmallVec<_> = self.spread(decision.statuses);
        statuses.resize(self.included.len(), None);
        Decision {
            statuses,
            charged_at_us: self.spread(decision.charged_at_us),
            override_expiries_ms: self.spread(decision.override_expiries_ms),
            ..decision
        }
    }

    /// The values of this part's charges, with `None` for all other charges. Empty stays empty.
    fn spread<T, L>(&self, values: L) -> L
    where
        L: IntoIterator<Item = Option<T>> + FromIterator<Option<T>>,
    {
        let mut values = values.into_iter().peekable();
        match values.peek() {
            None => L::from_iter([]),
            Some(_) => (self.included.iter())
                .map(|is_included| is_included.then(|| values.next()).flatten().flatten())
                .collect(),
        }
    }
}
