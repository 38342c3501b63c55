//! Decides a request that no single script call can decide: its charges are in several slots, or in
//! a slot that moves.
//!
//! Each part reserves its charges. A part that may refuse is asked before all others, so a refusal
//! usually reserves nothing elsewhere. Reservations of a request that is not forwarded are
//! returned.

use super::router::RedisRouter;
use super::slot_charges::HashSlotPart;
use crate::limiter::{
    Amendment, Charge, ChargeEffect, ChargeOutcome, Decision, Limit, LimitStatus, PolicyCharges,
    Refusal, determine_effects, each_charge,
};
use crate::store::redis::error::RedisErrorKind;
use crate::store::{DecisionFailure, PartialDecision, Settlement};
use futures_util::future::join_all;
use smallvec::SmallVec;
use std::sync::Arc;
use tokio::sync::oneshot;
use tokio::time::Instant;

/// A part of a request, and its decision, expanded to the request.
struct DecidedPart {
    slot_part: HashSlotPart,
    answer: Result<Decision, RedisErrorKind>,
}

/// What a part's decision did to one counter.
struct SplitChargeOutcome<'a> {
    charge: Charge<'a, 'static>,
    /// The limit that the part has decided.
    limit: Limit,
    /// The clock of the part's server.
    now_us: u64,
    outcome: ChargeOutcome,
    /// The effect that one decision of all parts would have had.
    effect: ChargeEffect,
}

impl DecidedPart {
    fn is_refused(&self) -> bool {
        self.answer.as_ref().is_ok_and(|answer| !answer.admitted)
    }

    /// Why the part was not decided, unless it only affects shadow policies.
    fn failure(&self) -> Option<RedisErrorKind> {
        let failure = self.answer.as_ref().err().copied();
        failure.filter(|_| self.slot_part.has_enforced_charges())
    }
}

impl SplitChargeOutcome<'_> {
    /// Whether units were charged that a refusal of the request returns.
    fn is_reserved(&self) -> bool {
        self.outcome.charged_at_us.is_some() && !self.charge.is_block()
    }

    /// Whether a block starts that was decided apart from its limit.
    fn starts_block(&self) -> bool {
        let is_start = self.charge.is_block() && self.effect == ChargeEffect::Charge;
        is_start && self.outcome.charged_at_us.is_none()
    }

    /// The outcome on the clock of the request's decision. In a refusal, the statuses of reserved
    /// charges are left out: they include units that are being returned.
    fn merged_outcome(&self, now_us: u64, admitted: bool) -> ChargeOutcome {
        let ends_us = self.now_us.saturating_add(self.charge.limit.per_us);
        let status = self.outcome.status.map(|status| {
            if self.starts_block() {
                LimitStatus {
                    remaining: 0,
                    next_growth_us: Some(ends_us),
                    ..status
                }
            } else {
                status
            }
        });
        let expires_at_ms = self
            .outcome
            .override_expires_at_ms
            .map(|at_ms| (at_ms.saturating_add(now_us / 1000)).saturating_sub(self.now_us / 1000));
        ChargeOutcome {
            status: (status.filter(|_| admitted || !self.is_reserved()))
                .map(|status| status.convert_clock(self.now_us, now_us)),
            override_expires_at_ms: expires_at_ms,
            ..self.outcome
        }
    }

    /// The amendment that gives the counter the effect that one decision of all parts would have
    /// had. `is_dropped`: the request is not forwarded although no limit refuses it.
    fn correction(&self, is_dropped: bool) -> Option<Settlement<'_>> {
        let is_kept = self.effect != ChargeEffect::NoChange && !is_dropped;
        let amendment = match self.outcome.charged_at_us {
            Some(at_us) if self.is_reserved() && !is_kept => self.charge.return_amendment(at_us),
            _ if self.starts_block() => Amendment::Charge(1),
            _ => return None,
        };
        Some(Settlement {
            limit: &self.limit,
            key: self.charge.key,
            amendment,
        })
    }
}

impl RedisRouter {
    /// Decides all parts and sends the result. Returns when the charges of a request that is not
    /// forwarded are returned. The caller forwards an admitted request, and confirms a partial
    /// decision if it forwards the request.
    pub(super) async fn decide_parts(
        self: Arc<Self>,
        request: Vec<PolicyCharges<'static>>,
        mut waiting: Vec<HashSlotPart>,
        deadline: Instant,
        result_sender: oneshot::Sender<Result<Decision, DecisionFailure>>,
    ) {
        let fails_closed = waiting.iter().any(HashSlotPart::fails_closed);
        let mut decided: Vec<DecidedPart> = Vec::with_capacity(waiting.len());
        while !waiting.is_empty() {
            let round = self.take_parts_of_next_round(&mut waiting);
            let answers =
                join_all(round.iter().map(|part| self.reserve_part(part, deadline))).await;
            for (slot_part, answer) in round.into_iter().zip(answers) {
                match answer {
                    Err(RedisErrorKind::TryAgain) if !slot_part.is_one_charge() => {
                        waiting.extend(slot_part.split_by_charge(&request));
                    }
                    answer => decided.push(DecidedPart {
                        answer: answer.map(|decision| slot_part.part.expand(decision)),
                        slot_part,
                    }),
                }
            }
            let is_failed = decided.iter().any(|part| part.failure().is_some());
            let is_refused = decided.iter().any(DecidedPart::is_refused);
            // The channel is closed if the client has disconnected.
            if is_refused || (fails_closed && is_failed) || result_sender.is_closed() {
                break;
            }
        }
        let outcomes = collect_outcomes(&request, &decided);
        let decision = merge_decisions(&request, &decided, &outcomes);
        let is_refused = decided.iter().any(DecidedPart::is_refused);
        let without_answer = decision.is_none().then_some(RedisErrorKind::ClusterDown);
        let failure = decided.iter().find_map(DecidedPart::failure);
        let failure = failure.or(without_answer);
        let failure = failure.map(|kind| self.decision_failure(kind));
        let is_forwarded = send_result(decision, failure, result_sender).await;
        let is_dropped = !is_forwarded && !is_refused;
        let corrections: Vec<Settlement<'_>> = (outcomes.iter().flatten())
            .filter_map(|outcome| outcome.correction(is_dropped))
            .collect();
        if !corrections.is_empty() {
            drop(self.apply_settlements(&corrections).await);
        }
    }

    /// Takes the parts that are asked next, at once. Parts of unreachable nodes come first: they
    /// fail without a call. Then the parts that may refuse come one after the other, narrowest
    /// first. All other parts come last, together.
    fn take_parts_of_next_round(&self, waiting: &mut Vec<HashSlotPart>) -> Vec<HashSlotPart> {
        let slot_map = self.slot_map.get();
        let is_unreachable = |part: &HashSlotPart| {
            let node = slot_map.node_for_hash_slot(part.hash_slot);
            part.is_held_back() || node.is_none_or(|node| !node.is_available())
        };
        let mut round: Vec<HashSlotPart> = waiting
            .extract_if(.., |part| is_unreachable(part))
            .collect();
        if !round.is_empty() {
            return round;
        }
        let may_refuse = |part: &HashSlotPart| {
            part.has_enforced_charges() && !self.hints.expects_admission(&part.part.policies)
        };
        let doubtful = waiting
            .iter()
            .enumerate()
            .filter(|(_, part)| may_refuse(part));
        let narrowest = doubtful.min_by_key(|(_, part)| part.min_capacity());
        match narrowest.map(|(index, _)| index) {
            Some(index) => {
                round.push(waiting.swap_remove(index));
                round.extend(waiting.extract_if(.., |part| part.counts_refused_requests()));
            }
            None => round.append(waiting),
        }
        for part in &round {
            self.hints.deduct_charges(&part.part.policies);
        }
        round
    }

    /// Decides one part, and remembers its remaining units.
    async fn reserve_part(
        &self,
        slot_part: &HashSlotPart,
        deadline: Instant,
    ) -> Result<Decision, RedisErrorKind> {
        let hash_slot = slot_part.hash_slot;
        if slot_part.is_held_back() {
            return Err(self.refuse_held_back(hash_slot));
        }
        let policies = &slot_part.part.policies;
        let mut answer = self.request_decision(hash_slot, policies, deadline).await;
        if answer == Err(RedisErrorKind::TryAgain)
            && slot_part.is_one_charge()
            && let [policy] = policies.as_slice()
            && each_charge(policies).any(|charge| charge.name.is_some())
        {
            answer = self
                .decide_in_moving_slot(hash_slot, policy, deadline)
                .await;
        }
        let decision = answer?;
        self.hints.record_remaining(policies, &decision);
        Ok(decision)
    }
}

/// Sends the result to the caller, and waits for the confirmation of a partial decision. Returns
/// whether the request is forwarded.
async fn send_result(
    decision: Option<Decision>,
    failure: Option<DecisionFailure>,
    result_sender: oneshot::Sender<Result<Decision, DecisionFailure>>,
) -> bool {
    match (decision, failure) {
        (Some(decision), Some(failure)) if decision.admitted => {
            let (partial, confirmed) = PartialDecision::new(decision);
            drop(result_sender.send(Err(DecisionFailure {
                partial: Some(Box::new(partial)),
                ..failure
            })));
            // The channel is closed if the caller does not forward the request.
            confirmed.await.is_ok()
        }
        // A refusal is final, whatever the failed parts would have decided.
        (Some(decision), _) => {
            let is_admitted = decision.admitted;
            result_sender.send(Ok(decision)).is_ok() && is_admitted
        }
        (None, None) => false,
        (None, Some(failure)) => {
            drop(result_sender.send(Err(failure)));
            false
        }
    }
}

/// The outcomes of all charges of a request, in order; `None` if their parts did not answer.
fn collect_outcomes<'r>(
    request: &'r [PolicyCharges<'static>],
    decided: &[DecidedPart],
) -> Vec<Option<SplitChargeOutcome<'r>>> {
    let mut outcomes: Vec<Option<SplitChargeOutcome<'r>>> = Vec::new();
    outcomes.resize_with(each_charge(request).count(), || None);
    for DecidedPart { slot_part, answer } in decided {
        let Ok(answer) = answer else { continue };
        let answered = each_charge(request).zip(answer.outcomes());
        let answered = answered.zip(slot_part.part.included());
        for (collected, ((charge, outcome), is_included)) in outcomes.iter_mut().zip(answered) {
            if is_included {
                *collected = Some(SplitChargeOutcome {
                    limit: outcome.limit_in_effect(charge.limit),
                    charge,
                    now_us: answer.now_us,
                    outcome: *outcome,
                    effect: ChargeEffect::NoChange,
                });
            }
        }
    }
    let refusals = (outcomes.iter()).map(|split| split.as_ref()?.outcome.refusal());
    let refusals: SmallVec<[Option<Refusal>; 4]> = refusals.collect();
    let effects = determine_effects(request, &refusals);
    for (split, effect) in outcomes.iter_mut().zip(effects) {
        if let Some(split) = split {
            split.effect = effect;
        }
    }
    outcomes
}

/// Merges the decisions of the parts, on the clock of the first part that answered.
fn merge_decisions(
    request: &[PolicyCharges<'_>],
    decided: &[DecidedPart],
    outcomes: &[Option<SplitChargeOutcome<'_>>],
) -> Option<Decision> {
    let answers = || decided.iter().filter_map(|part| part.answer.as_ref().ok());
    let admitted = answers().all(|answer| answer.admitted);
    let now_us = answers().next()?.now_us;
    let delay_us = answers().map(|answer| answer.delay_us).max();
    let mut merged = Decision {
        now_us,
        admitted,
        delay_us: delay_us.filter(|_| admitted).unwrap_or(0),
        ..Decision::without_outcomes(request)
    };
    for (outcome, split) in merged.outcomes_mut().zip(outcomes) {
        if let Some(split) = split {
            *outcome = split.merged_outcome(now_us, admitted);
        }
    }
    Some(merged)
}

#[cfg(test)]
mod tests {
    use super::super::slot_charges::to_creditable_charges;
    use super::*;
    use crate::limiter::{Algorithm, Key, KeyBuilder};
    use crate::store::StoreUnavailable;

    const SLIDING_LOG_LIMIT: Limit = Limit {
        requests: 9,
        per_us: 1_000_000,
        algorithm: Algorithm::SlidingLog,
    };
    const BLOCK_LIMIT: Limit = Limit {
        requests: 1,
        per_us: 60_000_000,
        algorithm: Algorithm::Block,
    };

    fn key(name: &str) -> Key {
        KeyBuilder::new(name).finish()
    }

    fn admitted_decision(now_us: u64) -> Decision {
        let status = LimitStatus {
            remaining: 3,
            next_growth_us: Some(now_us + 500),
            refusal: None,
            in_effect: None,
        };
        let outcome = ChargeOutcome {
            status: Some(status),
            charged_at_us: Some(now_us),
            ..ChargeOutcome::default()
        };
        Decision {
            now_us,
            admitted: true,
            ..Decision::default()
        }
        .with_outcomes([outcome])
    }

    fn refused_decision(now_us: u64, until_us: u64) -> Decision {
        let mut decision = admitted_decision(now_us);
        decision.admitted = false;
        let outcome = decision.outcomes_mut().next().unwrap();
        outcome.status.as_mut().unwrap().refusal = Some(Refusal::Until(until_us));
        outcome.charged_at_us = None;
        decision
    }

    /// Two charges of different keys, which are in different slots, or of one slot that moves.
    fn decided_parts(
        request: &[PolicyCharges<'static>],
        answers: [Result<Decision, RedisErrorKind>; 2],
    ) -> Vec<DecidedPart> {
        let parts = HashSlotPart::from_request(request).into_iter();
        let parts = parts.flat_map(|part| part.split_by_charge(request));
        let decided = parts.zip(answers);
        decided
            .map(|(slot_part, answer)| DecidedPart {
                answer: answer.map(|decision| slot_part.part.expand(decision)),
                slot_part,
            })
            .collect()
    }

    fn merge_two_parts(request: &[PolicyCharges<'static>], decided: &[DecidedPart]) -> Decision {
        merge_decisions(request, decided, &collect_outcomes(request, decided)).unwrap()
    }

    #[test]
    fn converts_times_of_several_slots_to_one_clock() {
        let (one, other) = (key("one"), key("other"));
        let charges = [&one, &other].map(|key| PolicyCharges::new(&SLIDING_LOG_LIMIT, key, 1));
        let request = to_creditable_charges(&charges);
        let decided = decided_parts(
            &request,
            [
                Ok(admitted_decision(1_000_000)),
                Ok(refused_decision(5_000, 7_000)),
            ],
        );
        let merged = merge_two_parts(&request, &decided);
        assert_eq!((merged.now_us, merged.admitted), (1_000_000, false));
        let other = merged.outcomes().nth(1).unwrap().status.unwrap();
        assert_eq!(other.refusal, Some(Refusal::Until(1_002_000)));
        assert_eq!(other.next_growth_us, Some(1_000_500));
        assert_eq!(
            (
                merged.outcomes().next().unwrap().status,
                merged.outcomes().next().unwrap().charged_at_us
            ),
            (None, Some(1_000_000)),
            "its units are being returned"
        );
    }

    #[test]
    fn returns_units_of_refused_and_dropped_requests_only() {
        let (one, other) = (key("one"), key("other"));
        let charges = [&one, &other].map(|key| PolicyCharges::new(&SLIDING_LOG_LIMIT, key, 2));
        let shadow = [
            charges[0].clone(),
            PolicyCharges {
                shadow: true,
                ..charges[1].clone()
            },
        ];
        let slower_limit = Limit {
            per_us: 2_000_000,
            ..SLIDING_LOG_LIMIT
        };
        let shadow_pair = PolicyCharges {
            shadow: true,
            ..charges[0].clone().and_limit(&slower_limit, 2)
        };
        let failed = || Err(RedisErrorKind::Timeout);
        let admitted = || Ok(admitted_decision(10));
        let refused = || Ok(refused_decision(10, 20));
        let credit = Some(Amendment::Credit {
            units: 2,
            at_us: 10,
        });
        for (charges, answers, is_dropped, returned) in [
            (&charges[..], [admitted(), admitted()], false, [None, None]),
            (
                &charges[..],
                [admitted(), admitted()],
                true,
                [credit, credit],
            ),
            (&charges[..], [admitted(), refused()], false, [credit, None]),
            (&charges[..], [failed(), admitted()], true, [None, credit]),
            (&charges[..], [failed(), admitted()], false, [None, None]),
            (&shadow, [admitted(), refused()], false, [None, None]),
            (&shadow, [refused(), admitted()], false, [None, credit]),
            // A shadow policy is charged on all its counters or on none.
            (
                std::slice::from_ref(&shadow_pair),
                [admitted(), refused()],
                false,
                [credit, None],
            ),
        ] {
            let request = to_creditable_charges(charges);
            let decided = decided_parts(&request, answers);
            let outcomes = collect_outcomes(&request, &decided);
            let corrections: Vec<_> = outcomes
                .iter()
                .map(|outcome| Some(outcome.as_ref()?.correction(is_dropped)?.amendment))
                .collect();
            assert_eq!(corrections, returned, "{charges:?}");
        }
    }

    #[test]
    fn a_block_starts_when_its_limit_was_decided_apart_from_it() {
        let owner = key("owner");
        let charges =
            [PolicyCharges::new(&BLOCK_LIMIT, &owner, 1).and_limit(&SLIDING_LOG_LIMIT, 1)];
        let request = to_creditable_charges(&charges);
        let mut inactive = admitted_decision(10);
        let outcome = inactive.outcomes_mut().next().unwrap();
        outcome.charged_at_us = None;
        outcome.status.as_mut().unwrap().next_growth_us = None;
        for (limit_answer, starts) in [
            (refused_decision(10, 20), true),
            (admitted_decision(10), false),
        ] {
            let decided = decided_parts(&request, [Ok(inactive.clone()), Ok(limit_answer)]);
            let outcomes = collect_outcomes(&request, &decided);
            let amendment = outcomes[0]
                .as_ref()
                .unwrap()
                .correction(false)
                .map(|made| made.amendment);
            assert_eq!(amendment, starts.then_some(Amendment::Charge(1)));
            let ends_us = merge_two_parts(&request, &decided)
                .outcomes()
                .next()
                .unwrap()
                .status
                .unwrap()
                .next_growth_us;
            assert_eq!(ends_us, starts.then_some(10 + BLOCK_LIMIT.per_us));
        }
    }

    #[tokio::test]
    async fn a_failed_slot_fails_the_decision_unless_another_refuses_or_its_policy_is_shadow() {
        let (one, other) = (key("one"), key("other"));
        let timed_out = || Err(RedisErrorKind::Timeout);
        let send = async |is_shadow, answers| {
            let charges = [
                PolicyCharges::new(&SLIDING_LOG_LIMIT, &one, 1),
                PolicyCharges {
                    shadow: is_shadow,
                    ..PolicyCharges::new(&SLIDING_LOG_LIMIT, &other, 1)
                },
            ];
            let request = to_creditable_charges(&charges);
            let decided = decided_parts(&request, answers);
            let (sender, receiver) = oneshot::channel();
            let failure = decided.iter().find_map(DecidedPart::failure);
            let failure = failure.map(|kind| {
                DecisionFailure::from(StoreUnavailable {
                    kind: kind.into_str(),
                    retry_after_us: 0,
                })
            });
            let sending = send_result(Some(merge_two_parts(&request, &decided)), failure, sender);
            // The caller drops a partial decision at once.
            let (is_forwarded, result) = tokio::join!(sending, async {
                receiver
                    .await
                    .unwrap()
                    .map_err(|failure| (failure.unavailable.kind, failure.partial.is_some()))
            });
            (is_forwarded, result)
        };
        let failed = Err(("timeout", true));
        assert_eq!(
            send(false, [Ok(admitted_decision(10)), timed_out()]).await,
            (false, failed.clone())
        );
        assert_eq!(
            send(true, [timed_out(), Ok(admitted_decision(10))]).await,
            (false, failed)
        );
        let (is_forwarded, result) = send(false, [timed_out(), Ok(refused_decision(10, 20))]).await;
        assert!(!is_forwarded && result.is_ok_and(|decision| !decision.admitted));
        let (is_forwarded, result) = send(true, [Ok(admitted_decision(10)), timed_out()]).await;
        assert!(
            is_forwarded
                && result.is_ok_and(|decision| decision
                    .outcomes()
                    .nth(1)
                    .unwrap()
                    .status
                    .is_none())
        );
    }
}
