//! A question whose charges are in several slots: what each slot is asked, and what their answers come to.

use super::slot_map::slot_for_key;
use crate::limiter::{Charge, Decision, Key, Limit};
use crate::store::redis::error::RedisErrorKind;
use smallvec::SmallVec;

/// The charges of one question that are kept in one slot.
pub(super) struct SlotCharges {
    pub(super) slot: u16,
    pub(super) charges: SmallVec<[OwnedCharge; 2]>,
    /// Where they stand in the question.
    pub(super) positions: SmallVec<[usize; 4]>,
}

/// A charge that outlives who asks for it.
pub(super) struct OwnedCharge {
    limit: Limit,
    key: Key,
    cost: u64,
    group: u32,
    shadow: bool,
    counts_rejected: bool,
    slot_id: u128,
}

impl SlotCharges {
    pub(super) fn borrow_charges(&self) -> SmallVec<[Charge<'_>; 4]> {
        self.charges.iter().map(OwnedCharge::as_charge).collect()
    }
}

impl OwnedCharge {
    fn from_charge(charge: &Charge<'_>) -> Self {
        let Charge {
            limit,
            key,
            cost,
            group,
            shadow,
            counts_rejected,
            slot_id: slot,
            ..
        } = *charge;
        Self {
            limit: *limit,
            key: key.clone(),
            cost,
            group,
            shadow,
            counts_rejected,
            slot_id: slot,
        }
    }

    /// It says that it may be given back. It comes without a lease: what one slot lends, another's refusal could not take
    /// back.
    fn as_charge(&self) -> Charge<'_> {
        Charge {
            group: self.group,
            shadow: self.shadow,
            counts_rejected: self.counts_rejected,
            settles: true,
            slot_id: self.slot_id,
            ..Charge::new(&self.limit, &self.key, self.cost)
        }
    }
}

/// The charges by their slots.
pub(super) fn group_by_slot(charges: &[Charge<'_>]) -> SmallVec<[SlotCharges; 4]> {
    let mut slots: SmallVec<[SlotCharges; 4]> = SmallVec::new();
    for (position, charge) in charges.iter().enumerate() {
        let (slot, charge) = (slot_for_key(charge.key), OwnedCharge::from_charge(charge));
        match slots.iter_mut().find(|part| part.slot == slot) {
            Some(part) => {
                part.charges.push(charge);
                part.positions.push(position);
            }
            None => slots.push(SlotCharges {
                slot,
                charges: SmallVec::from_iter([charge]),
                positions: SmallVec::from_iter([position]),
            }),
        }
    }
    slots
}

/// What the answers of several slots come to, on one clock: that of the first that answered.
pub(super) fn merge_slot_decisions(
    charge_count: usize,
    slots: &[SlotCharges],
    answers: &[Result<Decision, RedisErrorKind>],
) -> Result<Decision, RedisErrorKind> {
    let mut merged: Option<Decision> = None;
    let mut first_failure = None;
    for (part, answer) in slots.iter().zip(answers) {
        let answer = match answer {
            Ok(answer) => answer,
            Err(failure) => {
                // Shadow policies stop nobody, not even by being away.
                if !part.charges.iter().all(|charge| charge.shadow) {
                    first_failure.get_or_insert(*failure);
                }
                continue;
            }
        };
        let merged = merged.get_or_insert_with(|| Decision {
            now_us: answer.now_us,
            admitted: true,
            statuses: SmallVec::from_elem(None, charge_count),
            delay_us: 0,
            grants: SmallVec::new(),
            charged_at_us: SmallVec::from_elem(None, charge_count),
        });
        merged.admitted &= answer.admitted;
        merged.delay_us = merged.delay_us.max(answer.delay_us);
        for (place, standing) in part.positions.iter().zip(&answer.statuses) {
            if let Some(target) = merged.statuses.get_mut(*place) {
                *target =
                    standing.map(|standing| standing.convert_clock(answer.now_us, merged.now_us));
            }
        }
        for (place, at_us) in part.positions.iter().zip(&answer.charged_at_us) {
            if let Some(target) = merged.charged_at_us.get_mut(*place) {
                *target = *at_us;
            }
        }
    }
    match (merged, first_failure) {
        // Whatever the others would have said.
        (Some(whole), _) if !whole.admitted => Ok(Decision {
            delay_us: 0,
            ..whole
        }),
        (_, Some(failure)) => Err(failure),
        (Some(whole), None) => Ok(whole),
        (None, None) => Err(RedisErrorKind::ClusterDown),
    }
}

#[cfg(test)]
mod tests {
    use super::super::is_split;
    use super::*;
    use crate::limiter::{Algorithm, KeyBuilder, LimitStatus, Refusal};

    const LIMIT: Limit = Limit {
        requests: 9,
        per_us: 1_000_000,
        algorithm: Algorithm::SlidingLog,
    };

    fn decision(now_us: u64, until_us: Option<u64>) -> Decision {
        let refusal = until_us.map(Refusal::Until);
        let standing = LimitStatus {
            remaining: 3,
            next_growth_us: Some(now_us + 500),
            refusal,
        };
        Decision {
            now_us,
            admitted: until_us.is_none(),
            statuses: SmallVec::from_iter([Some(standing)]),
            delay_us: 0,
            grants: SmallVec::new(),
            charged_at_us: SmallVec::new(),
        }
    }

    fn merge_two_slots(
        shadow: bool,
        answers: [Result<Decision, RedisErrorKind>; 2],
    ) -> Result<Decision, RedisErrorKind> {
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
        assert!(is_split(&charges) && group_by_slot(&charges).len() == 2);
        merge_slot_decisions(2, &group_by_slot(&charges), &answers)
    }

    #[test]
    fn converts_times_of_several_slots_to_one_clock() {
        let whole = merge_two_slots(
            false,
            [
                Ok(decision(1_000_000, None)),
                Ok(decision(5_000, Some(7_000))),
            ],
        )
        .unwrap();
        assert_eq!((whole.now_us, whole.admitted), (1_000_000, false));
        let other = whole.statuses[1].unwrap();
        assert_eq!(other.refusal, Some(Refusal::Until(1_002_000)));
        assert_eq!(other.next_growth_us, Some(1_000_500));
    }

    #[test]
    fn a_failed_slot_fails_the_decision_unless_another_slot_refuses_or_its_policy_is_shadow() {
        let timed_out = || Err(RedisErrorKind::Timeout);
        assert_eq!(
            merge_two_slots(false, [Ok(decision(1000, None)), timed_out()]).unwrap_err(),
            RedisErrorKind::Timeout
        );
        let refused =
            merge_two_slots(false, [timed_out(), Ok(decision(1000, Some(2000)))]).unwrap();
        assert!(!refused.admitted && refused.statuses[0].is_none());
        let without_shadow =
            merge_two_slots(true, [Ok(decision(1000, None)), timed_out()]).unwrap();
        assert!(without_shadow.admitted && without_shadow.statuses[1].is_none());
        assert_eq!(
            merge_two_slots(true, [timed_out(), Ok(decision(1000, None))]).unwrap_err(),
            RedisErrorKind::Timeout
        );
    }
}
