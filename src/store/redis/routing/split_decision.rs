//! Decides a request that no single script call can decide: its charges are in several slots, or in
//! a slot that moves.
//!
//! Each part reserves its charges. A part that may refuse is asked before all others, so a refusal
//! usually reserves nothing elsewhere. Reservations of a request that is not forwarded are
//! returned.

use crate::limiter::{
    Amendment, Charge, ChargeEffect, ChargeOutcome, Decision, Limit, LimitStatus,
    OverriddenCharges, OverrideInEffect, PolicyCharges, Refusal, RequestPart, determine_effects,
    each_charge,
};
use crate::store::memory::{CounterId, counter_id};
use crate::store::redis::RedisStore;
use crate::store::redis::error::RedisErrorKind;
use crate::store::redis::hash_slot::{group_by_hash_slot, hash_slot_for_key};
use crate::store::stored_override::split_rule_and_expiry;
use crate::store::{
    DecisionFailure, PartialDecision, Settlement, override_end_us, parse_override_rule,
};
use futures_util::future::join_all;
use parking_lot::Mutex;
use redis::{Value, cmd, from_redis_value};
use smallvec::SmallVec;
use std::collections::HashMap;
use tokio::sync::oneshot;
use tokio::time::Instant;

/// Maximum number of counters in the table. A full table is cleared: each key then costs one more
/// round trip, once.
const MAX_ENTRIES: usize = 4096;

/// Remaining units by counter. Each worker has its own table.
#[derive(Debug, Default)]
pub(crate) struct AdmissionHints(Mutex<HashMap<CounterId, u64, foldhash::fast::RandomState>>);

impl AdmissionHints {
    /// Whether all enforced charges are within the units that Redis last reported as left.
    pub(crate) fn expects_admission(&self, request: &[PolicyCharges<'_>]) -> bool {
        let entries = self.0.lock();
        let mut enforced = each_charge(request).filter(|charge| charge.is_enforced());
        enforced.all(|charge| {
            let remaining = entries.get(&counter_id(charge.counter()));
            charge.cost == 0 || remaining.is_some_and(|units| *units >= charge.cost)
        })
    }

    /// Deducts charges that are about to be requested, so that concurrent requests do not all
    /// expect the same units.
    pub(crate) fn deduct_charges(&self, request: &[PolicyCharges<'_>]) {
        let mut entries = self.0.lock();
        // A block has no units that a request would use up.
        for charge in each_charge(request).filter(|charge| !charge.is_block()) {
            if let Some(remaining) = entries.get_mut(&counter_id(charge.counter())) {
                *remaining = remaining.saturating_sub(charge.cost);
            }
        }
    }

    pub(crate) fn record_remaining(&self, request: &[PolicyCharges<'_>], decision: &Decision) {
        let mut entries = self.0.lock();
        for (charge, outcome) in each_charge(request).zip(decision.outcomes()) {
            if entries.len() >= MAX_ENTRIES {
                entries.clear();
            }
            if let Some(status) = outcome.status {
                entries.insert(counter_id(charge.counter()), status.remaining);
            }
        }
    }
}

/// The charges of one request that are in one slot.
pub(super) struct HashSlotPart {
    pub(super) hash_slot: u16,
    pub(super) part: RequestPart<'static>,
}

/// The charges marked as estimates, so that they can be credited later, and without a lease,
/// because units granted by one slot can't be revoked when another slot refuses. They outlive their
/// caller.
pub(super) fn to_creditable_charges(request: &[PolicyCharges<'_>]) -> Vec<PolicyCharges<'static>> {
    let policies = request.iter().map(|policy| PolicyCharges {
        requested_lease_units: 0,
        ..policy.to_owned_charges()
    });
    let creditable = policies.map(|policy| policy.map_limits(|charge| charge.is_estimate = true));
    creditable.collect()
}

impl HashSlotPart {
    /// Groups the charges of a request by slot.
    pub(super) fn from_request(request: &[PolicyCharges<'static>]) -> Vec<Self> {
        let slots = group_by_hash_slot(request, |policy| hash_slot_for_key(&policy.key));
        let parts = slots.into_iter().map(|(hash_slot, _)| Self {
            hash_slot,
            part: RequestPart::new(request, |charge| {
                hash_slot_for_key(&charge.policy.key) == hash_slot
            }),
        });
        parts.collect()
    }

    /// Divides the charges into calls with one key each: the only ones that Redis accepts while the
    /// slot moves.
    pub(super) fn split_by_charge(&self, request: &[PolicyCharges<'static>]) -> Vec<Self> {
        let included = self.part.included().enumerate();
        let own = included.filter(|(_, is_included)| *is_included);
        let parts = own.map(|(selected, _)| {
            let mut positions = 0..;
            Self {
                hash_slot: self.hash_slot,
                part: RequestPart::new(request, |_| positions.next() == Some(selected)),
            }
        });
        parts.collect()
    }

    /// Whether the part is one charge.
    pub(super) fn is_one_charge(&self) -> bool {
        each_charge(&self.part.policies).count() == 1
    }

    /// Whether the slot counts as unreachable for this request.
    pub(super) fn is_held_back(&self) -> bool {
        self.part.policies.iter().any(|policy| policy.is_held_back)
    }

    fn enforced_policies(&self) -> impl Iterator<Item = &PolicyCharges<'static>> {
        self.part.policies.iter().filter(|policy| !policy.shadow)
    }

    /// Whether these charges can refuse the request.
    pub(super) fn has_enforced_charges(&self) -> bool {
        self.enforced_policies().next().is_some()
    }

    /// Whether Redis must see the request although other charges may refuse it: to count a rejected
    /// request, or to start a block.
    pub(super) fn counts_refused_requests(&self) -> bool {
        self.enforced_policies().any(|policy| {
            let mut charges = policy.charges();
            policy.counts_rejected || charges.any(|charge| charge.is_read || charge.is_block())
        })
    }

    /// The smallest capacity of the enforced limits.
    pub(super) fn min_capacity(&self) -> u64 {
        let limits = self.enforced_policies().flat_map(PolicyCharges::charges);
        let capacities = limits.map(|charge| charge.limit.capacity());
        capacities.min().unwrap_or(u64::MAX)
    }
}

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

impl RedisStore {
    /// Decides all parts and sends the result. Returns when the charges of a request that is not
    /// forwarded are returned. The caller forwards an admitted request, and confirms a partial
    /// decision if it forwards the request.
    pub(super) async fn decide_parts(
        self,
        request: Vec<PolicyCharges<'static>>,
        mut waiting: Vec<HashSlotPart>,
        deadline: Instant,
        result_sender: oneshot::Sender<Result<Decision, DecisionFailure>>,
    ) {
        let has_closed = |part: &HashSlotPart| part.enforced_policies().any(|own| own.fails_closed);
        let fails_closed = waiting.iter().any(has_closed);
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
        let decision = merge_decisions(&decided, &outcomes);
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
            drop(self.send_settlements(&corrections).await);
        }
    }

    /// Takes the parts that are asked next, at once. Parts of unreachable nodes come first: they
    /// fail without a call. Then the parts that may refuse come one after the other, narrowest
    /// first. All other parts come last, together.
    fn take_parts_of_next_round(&self, waiting: &mut Vec<HashSlotPart>) -> Vec<HashSlotPart> {
        let slot_map = self.worker.slot_map.get();
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
            part.has_enforced_charges() && !self.worker.hints.expects_admission(&part.part.policies)
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
            self.worker.hints.deduct_charges(&part.part.policies);
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
        self.worker.hints.record_remaining(policies, &decision);
        Ok(decision)
    }

    /// Decides one charge with an override while its slot moves. Redis then accepts only calls with
    /// one key, but the charge has two: the counter and the override. So the override is read
    /// first, and the charge is decided with the amounts in effect.
    pub(super) async fn decide_in_moving_slot(
        &self,
        hash_slot: u16,
        charge: &PolicyCharges<'_>,
        deadline: Instant,
    ) -> Result<Decision, RedisErrorKind> {
        let in_effect = self.read_override(hash_slot, charge, deadline).await?;
        let request = async |charge: &PolicyCharges<'_>| {
            let charge = [charge.map_limits(|limit| limit.name = None)];
            self.request_decision(hash_slot, &charge, deadline).await
        };
        let charges = std::slice::from_ref(charge);
        let Some(overridden) = OverriddenCharges::resolve(charges, |_| in_effect) else {
            return request(charge).await;
        };
        let limited = overridden.limited_charges();
        // An unlimited key is not charged. A call of cost 0 returns the server's time.
        let without_cost = charge.map_limits(|limit| limit.cost = 0);
        let limited_charge = limited.policies.first();
        let mut decision = request(limited_charge.unwrap_or(&without_cost)).await?;
        decision.admitted |= limited.is_empty();
        let mut decision = overridden.complete_decision(&limited, decision);
        let late = overridden.charges_after_ends(&decision);
        // As in the script, the times of the override stay if the counter can't be read: the charge
        // is made.
        if let Some(read) = late.policies.first()
            && let Ok(later) = request(read).await
        {
            overridden.apply_ends(&mut decision, &late, later);
        }
        Ok(decision)
    }

    /// Reads the override of a charge's key, as the script does: a value of another type is none.
    async fn read_override(
        &self,
        hash_slot: u16,
        policy: &PolicyCharges<'_>,
        deadline: Instant,
    ) -> Result<Option<(OverrideInEffect, Option<u64>)>, RedisErrorKind> {
        let mut command = cmd("MGET");
        command.arg(self.scripts.override_key(&policy.key));
        let (reply, _) = self.request_reply(hash_slot, &command, deadline).await?;
        let values: Vec<Value> =
            from_redis_value(reply).map_err(|_other| RedisErrorKind::InvalidReply)?;
        let Some(Value::BulkString(text)) = values.into_iter().next() else {
            return Ok(None);
        };
        let text = String::from_utf8_lossy(&text);
        let Some((rule, expiry)) = split_rule_and_expiry(&text) else {
            return Ok(None);
        };
        let rule = parse_override_rule(rule);
        let charge = policy.charges().next();
        let in_effect = rule
            .zip(charge)
            .and_then(|(rule, charge)| rule.for_charge(&charge));
        Ok(in_effect.map(|in_effect| (in_effect, expiry.map(override_end_us))))
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
    decided: &[DecidedPart],
    outcomes: &[Option<SplitChargeOutcome<'_>>],
) -> Option<Decision> {
    let answers = decided.iter().filter_map(|part| part.answer.clone().ok());
    let mut merged = answers.reduce(Decision::merge)?;
    let (now_us, admitted) = (merged.now_us, merged.admitted);
    for (outcome, split) in merged.outcomes_mut().zip(outcomes) {
        if let Some(split) = split {
            *outcome = split.merged_outcome(now_us, admitted);
        }
    }
    Some(merged)
}

#[cfg(test)]
mod tests {
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
        merge_decisions(decided, &collect_outcomes(request, decided)).unwrap()
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
