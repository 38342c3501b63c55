//! Divides a request with charges in several slots, and merges the decisions of the slots.

use super::slot_map::slot_for_key;
use crate::limiter::{Charge, Decision, Key, Limit};
use crate::store::redis::error::RedisErrorKind;
use smallvec::SmallVec;

/// The charges of one request that are in one slot.
pub(super) struct SlotCharges {
    pub(super) slot: u16,
    pub(super) charges: SmallVec<[OwnedCharge; 2]>,
    /// The indexes of the charges in the request.
    pub(super) positions: SmallVec<[usize; 4]>,
}

/// An owned charge, which outlives its caller.
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
            policy_number: group,
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

    /// Sets `settles`, so that the charge can be credited. It has no lease, because units granted
    /// by one slot can't be revoked when another refuses.
    fn as_charge(&self) -> Charge<'_> {
        Charge {
            policy_number: self.group,
            shadow: self.shadow,
            counts_rejected: self.counts_rejected,
            is_estimate: true,
            slot_id: self.slot_id,
            ..Charge::new(&self.limit, &self.key, self.cost)
        }
    }
}

/// Groups the charges by slot.
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

/// Merges the decisions of several slots, on the clock of the first that answered.
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
                // A failure that affects only shadow policies does not affect the decision.
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
        for (position, status) in part.positions.iter().zip(&answer.statuses) {
            if let Some(target) = merged.statuses.get_mut(*position) {
                *target = status.map(|status| status.convert_clock(answer.now_us, merged.now_us));
            }
        }
        for (position, at_us) in part.positions.iter().zip(&answer.charged_at_us) {
            if let Some(target) = merged.charged_at_us.get_mut(*position) {
                *target = *at_us;
            }
        }
    }
    match (merged, first_failure) {
        // A refusal is final, whatever the failed slots would have decided.
        (Some(merged), _) if !merged.admitted => Ok(Decision {
            delay_us: 0,
            ..merged
        }),
        (_, Some(failure)) => Err(failure),
        (Some(merged), None) => Ok(merged),
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
        let status = LimitStatus {
            remaining: 3,
            next_growth_us: Some(now_us + 500),
            refusal,
        };
        Decision {
            now_us,
            admitted: until_us.is_none(),
            statuses: SmallVec::from_iter([Some(status)]),
            delay_us: 0,
            grants: SmallVec::new(),
            charged_at_us: SmallVec::new(),
        }
    }

    fn merge_two_slots(
        shadow: bool,
        answers: [Result<Decision, RedisErrorKind>; 2],
    ) -> Result<Decision, RedisErrorKind> {
        // The keys are in different slots.
        let (one, other) = (
            KeyBuilder::new("one").finish(),
            KeyBuilder::new("other").finish(),
        );
        let charges = [
            Charge::new(&LIMIT, &one, 1),
            Charge {
                policy_number: 1,
                shadow,
                ..Charge::new(&LIMIT, &other, 1)
            },
        ];
        assert!(is_split(&charges) && group_by_slot(&charges).len() == 2);
        merge_slot_decisions(2, &group_by_slot(&charges), &answers)
    }

    #[test]
    fn converts_times_of_several_slots_to_one_clock() {
        let merged = merge_two_slots(
            false,
            [
                Ok(decision(1_000_000, None)),
                Ok(decision(5_000, Some(7_000))),
            ],
        )
        .unwrap();
        assert_eq!((merged.now_us, merged.admitted), (1_000_000, false));
        let other = merged.statuses[1].unwrap();
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
