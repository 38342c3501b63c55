//! A question whose charges are in several slots: what each slot is asked, and what their answers come to.

use super::map::slot_of;
use crate::limiter::{Charge, Decision, Key, Limit};
use crate::store::redis::failure::Failure;
use smallvec::SmallVec;

/// The charges of one question that are kept in one slot.
pub(super) struct Part {
    pub(super) slot: u16,
    pub(super) charges: SmallVec<[Owned; 2]>,
    /// Where they stand in the question.
    pub(super) places: SmallVec<[usize; 4]>,
}

/// A charge that outlives who asks for it.
pub(super) struct Owned {
    limit: Limit,
    key: Key,
    cost: u64,
    group: u32,
    shadow: bool,
    counts_rejected: bool,
    slot: u128,
}

impl Part {
    pub(super) fn charges(&self) -> SmallVec<[Charge<'_>; 4]> {
        self.charges.iter().map(Owned::charge).collect()
    }
}

impl Owned {
    fn of(charge: &Charge<'_>) -> Self {
        let Charge {
            limit,
            key,
            cost,
            group,
            shadow,
            counts_rejected,
            slot,
            ..
        } = *charge;
        Self {
            limit: *limit,
            key: key.clone(),
            cost,
            group,
            shadow,
            counts_rejected,
            slot,
        }
    }

    /// It says that it may be given back. It comes without a lease: what one slot lends, another's refusal could not take
    /// back.
    fn charge(&self) -> Charge<'_> {
        Charge {
            group: self.group,
            shadow: self.shadow,
            counts_rejected: self.counts_rejected,
            settles: true,
            slot: self.slot,
            ..Charge::new(&self.limit, &self.key, self.cost)
        }
    }
}

/// The charges by their slots.
pub(super) fn parts(charges: &[Charge<'_>]) -> SmallVec<[Part; 4]> {
    let mut parts: SmallVec<[Part; 4]> = SmallVec::new();
    for (place, charge) in charges.iter().enumerate() {
        let (slot, charge) = (slot_of(charge.key), Owned::of(charge));
        match parts.iter_mut().find(|part| part.slot == slot) {
            Some(part) => {
                part.charges.push(charge);
                part.places.push(place);
            }
            None => parts.push(Part {
                slot,
                charges: SmallVec::from_iter([charge]),
                places: SmallVec::from_iter([place]),
            }),
        }
    }
    parts
}

/// What the answers of several slots come to, on one clock: that of the first that answered.
pub(super) fn together(
    count: usize,
    parts: &[Part],
    answers: &[Result<Decision, Failure>],
) -> Result<Decision, Failure> {
    let mut whole: Option<Decision> = None;
    let mut away = None;
    for (part, answer) in parts.iter().zip(answers) {
        let answer = match answer {
            Ok(answer) => answer,
            Err(failure) => {
                // Shadow policies stop nobody, not even by being away.
                if !part.charges.iter().all(|charge| charge.shadow) {
                    away.get_or_insert(*failure);
                }
                continue;
            }
        };
        let whole = whole.get_or_insert_with(|| Decision {
            now_us: answer.now_us,
            admitted: true,
            standings: SmallVec::from_elem(None, count),
            delay_us: 0,
            grants: SmallVec::new(),
            stands_us: SmallVec::from_elem(None, count),
        });
        whole.admitted &= answer.admitted;
        whole.delay_us = whole.delay_us.max(answer.delay_us);
        for (place, standing) in part.places.iter().zip(&answer.standings) {
            if let Some(into) = whole.standings.get_mut(*place) {
                *into = standing.map(|standing| standing.on_clock(answer.now_us, whole.now_us));
            }
        }
        for (place, at_us) in part.places.iter().zip(&answer.stands_us) {
            if let Some(into) = whole.stands_us.get_mut(*place) {
                *into = *at_us;
            }
        }
    }
    match (whole, away) {
        // Whatever the others would have said.
        (Some(whole), _) if !whole.admitted => Ok(Decision {
            delay_us: 0,
            ..whole
        }),
        (_, Some(failure)) => Err(failure),
        (Some(whole), None) => Ok(whole),
        (None, None) => Err(Failure::ClusterDown),
    }
}

#[cfg(test)]
mod tests {
    use super::super::is_split;
    use super::*;
    use crate::limiter::{Algorithm, KeyBuilder, Refusal, Standing};

    const LIMIT: Limit = Limit {
        requests: 9,
        per_us: 1_000_000,
        algorithm: Algorithm::SlidingLog,
    };

    fn decision(now_us: u64, until_us: Option<u64>) -> Decision {
        let refusal = until_us.map(Refusal::Until);
        let standing = Standing {
            remaining: 3,
            grows_at_us: Some(now_us + 500),
            refusal,
        };
        Decision {
            now_us,
            admitted: until_us.is_none(),
            standings: SmallVec::from_iter([Some(standing)]),
            delay_us: 0,
            grants: SmallVec::new(),
            stands_us: SmallVec::new(),
        }
    }

    fn merged(shadow: bool, answers: [Result<Decision, Failure>; 2]) -> Result<Decision, Failure> {
        // In slots of their own.
        let (one, other) = (
            KeyBuilder::new("one").finish(),
            KeyBuilder::new("other").finish(),
        );
        let charges = [
            Charge::new(&LIMIT, &one, 1),
            Charge {
                group: 1,
                shadow,
                ..Charge::new(&LIMIT, &other, 1)
            },
        ];
        assert!(is_split(&charges) && parts(&charges).len() == 2);
        together(2, &parts(&charges), &answers)
    }

    #[test]
    fn several_clocks_become_one() {
        let whole = merged(
            false,
            [
                Ok(decision(1_000_000, None)),
                Ok(decision(5_000, Some(7_000))),
            ],
        )
        .unwrap();
        assert_eq!((whole.now_us, whole.admitted), (1_000_000, false));
        let other = whole.standings[1].unwrap();
        assert_eq!(other.refusal, Some(Refusal::Until(1_002_000)));
        assert_eq!(other.grows_at_us, Some(1_000_500));
    }

    #[test]
    fn a_slot_that_is_away_degrades_who_needs_it_and_nobody_who_is_refused_anyhow() {
        let away = || Err(Failure::Timeout);
        assert_eq!(
            merged(false, [Ok(decision(1000, None)), away()]).unwrap_err(),
            Failure::Timeout
        );
        let refused = merged(false, [away(), Ok(decision(1000, Some(2000)))]).unwrap();
        assert!(!refused.admitted && refused.standings[0].is_none());
        let without_shadow = merged(true, [Ok(decision(1000, None)), away()]).unwrap();
        assert!(without_shadow.admitted && without_shadow.standings[1].is_none());
        assert_eq!(
            merged(true, [away(), Ok(decision(1000, None))]).unwrap_err(),
            Failure::Timeout
        );
    }
}
