//! A call of the rate-limit service: several descriptors, decided together, each with its own
//! status.

use super::charge_plan::ChargePlan;
use super::decisions::PolicyDecision;
use super::{Enforcer, LimitReport, PolicySnapshot, RequestOutcome, StoreAnswer, Verdict};
use crate::limiter::{Decision, Key, Refusal};
use crate::policy::{Descriptor, Facts};
use crate::store::DecisionSource;
use smallvec::SmallVec;
use tokio::time::Instant;

/// The decision about a call.
#[derive(Debug)]
pub struct CallVerdict<'t> {
    pub verdict: Verdict<'t>,
    /// The verdict on each descriptor, in order.
    pub statuses: Vec<DescriptorVerdict<'t>>,
}

/// The decision about one descriptor.
#[derive(Debug, Default)]
pub struct DescriptorVerdict<'t> {
    /// Whether any policy matches the descriptor.
    pub is_matched: bool,
    pub is_over_limit: bool,
    /// Of the reported limits: one that refused, or the one with the fewest remaining units.
    pub tightest_limit: Option<LimitReport<'t>>,
}

impl<'t> CallVerdict<'t> {
    /// The verdict about a call that a policy rejects because of one descriptor, without a charge.
    /// `statuses` has the verdicts on the descriptors before it; the call has `descriptor_count`.
    fn from_outcome(
        outcome: RequestOutcome<'t>,
        mut statuses: Vec<DescriptorVerdict<'t>>,
        descriptor_count: usize,
    ) -> Self {
        statuses.push(DescriptorVerdict {
            is_matched: true,
            is_over_limit: true,
            tightest_limit: None,
        });
        statuses.resize_with(descriptor_count, || DescriptorVerdict {
            is_matched: true,
            ..DescriptorVerdict::default()
        });
        Self {
            verdict: Verdict::from_outcome(outcome),
            statuses,
        }
    }
}

impl Enforcer {
    /// Decides a call by `policies`: all descriptors are charged, or none. `arrived` is its arrival
    /// time.
    pub async fn decide_call<'t>(
        &self,
        policies: &'t PolicySnapshot,
        descriptors: &'t [Descriptor<'t>],
        arrived: Instant,
    ) -> CallVerdict<'t> {
        let mut plan = ChargePlan::default();
        let mut statuses: Vec<DescriptorVerdict<'t>> = Vec::with_capacity(descriptors.len());
        // Ids of the keys that each descriptor uses.
        let mut key_ids_by_descriptor: SmallVec<[SmallVec<[u128; 2]>; 4]> = SmallVec::new();
        let domain = descriptors
            .first()
            .map_or("", |descriptor| descriptor.domain);
        let record_decision = |index, key: Option<&Key>, decision: PolicyDecision| {
            policies.record_decision(index, &self.metrics, decision, (key, domain))
        };
        for descriptor in descriptors {
            let facts = Facts {
                descriptor: Some(descriptor),
                ..Facts::placeholder()
            };
            let matching = policies.table.matching_policies(&facts);
            let is_matched = !matching.is_empty();
            let described = (&facts, Some(descriptor));
            let descriptor_plan = match ChargePlan::from_facts(
                &policies.table,
                matching,
                described,
                |_| true,
                record_decision,
            ) {
                Ok(plan) => plan,
                Err(outcome) => {
                    return CallVerdict::from_outcome(outcome, statuses, descriptors.len());
                }
            };
            statuses.push(DescriptorVerdict {
                is_matched,
                ..DescriptorVerdict::default()
            });
            key_ids_by_descriptor.push(
                descriptor_plan
                    .planned_policies
                    .iter()
                    .map(|planned_policy| planned_policy.own.key.id())
                    .collect(),
            );
            plan.unenforced_rejections
                .extend(descriptor_plan.unenforced_rejections);
            descriptor_plan
                .planned_policies
                .into_iter()
                .for_each(|planned_policy| {
                    // Each descriptor of a call is a hit.
                    plan.add_planned_policy(planned_policy, u64::saturating_add);
                });
        }
        let has_zero_cost = plan
            .planned_policies
            .iter()
            .any(|planned_policy| planned_policy.cost == 0);
        let verdict = if has_zero_cost {
            self.decide_zero_cost_plan(&mut plan, record_decision, arrived)
                .await
        } else {
            self.decide_plan(&mut plan, record_decision, arrived).await
        };
        for (status, keys) in statuses.iter_mut().zip(&key_ids_by_descriptor) {
            let mut own = verdict.limits.clone();
            own.retain(|reported| keys.contains(&reported.key_id));
            status.is_over_limit = own.iter().any(|reported| reported.status.refusal.is_some());
            own.retain(|reported| reported.limit.is_reported);
            status.tightest_limit = LimitReport::find_tightest_limit(&own).copied();
        }
        CallVerdict { verdict, statuses }
    }

    /// Decides a plan with charges of cost 0, which only check whether units are left. If a
    /// checked quota is exhausted, nothing is charged. Otherwise a second call to the store makes
    /// the charges.
    async fn decide_zero_cost_plan<'t>(
        &self,
        plan: &mut ChargePlan<'t>,
        record_decision: impl Fn(usize, Option<&Key>, PolicyDecision) + Copy,
        arrived: Instant,
    ) -> Verdict<'t> {
        let mut charges = plan.build_charges(0, 0);
        for policy in &mut charges {
            policy.lease = None;
            policy.limits.iter_mut().for_each(|charge| charge.cost = 0);
        }
        let answer = self.store.decide_with_source(&charges, arrived).await;
        let StoreAnswer {
            decision, source, ..
        } = self.complete_answer(plan, &charges, answer);
        drop(charges);
        let is_all_zero_cost = plan
            .planned_policies
            .iter()
            .all(|planned_policy| planned_policy.cost == 0);
        let Some(mut decision) = decision else {
            return self.decide_plan(plan, record_decision, arrived).await;
        };
        let is_degraded = source == DecisionSource::Degraded;
        if !plan.refuse_exhausted(&mut decision) && (is_degraded || !is_all_zero_cost) {
            return self.decide_plan(plan, record_decision, arrived).await;
        }
        plan.record_decisions(Some(&decision), is_degraded, |planned_policy, decided| {
            let own = &planned_policy.own;
            record_decision(own.policy_index, Some(&own.key), decided);
        });
        let mut verdict = plan.build_verdict(&decision);
        verdict.is_degraded = is_degraded;
        self.complete_verdict(&mut verdict, source, arrived);
        verdict
    }
}

impl ChargePlan<'_> {
    /// Turns a read of all counters into a refusal if a quota of cost 0 is exhausted.
    fn refuse_exhausted(&self, decision: &mut Decision) -> bool {
        let mut is_refused = false;
        for (planned_policy, outcome) in self.planned_policies.iter().zip(&mut decision.policies) {
            // A charge of cost 0 is never refused by a block. A block that has an end time is in
            // effect.
            let mut is_exhausted = false;
            if planned_policy.block.is_some()
                && let Some(block) = outcome.limits.first_mut()
                && let Some(block) = &mut block.status
                && let Some(until_us) = block.next_growth_us
            {
                block.refusal = Some(Refusal::Until(until_us));
                is_exhausted = true;
            }
            let limits = planned_policy.limits_mut(outcome).iter_mut();
            for status in limits.filter_map(|outcome| outcome.status.as_mut()) {
                if status.refusal.is_none() && status.remaining < planned_policy.cost.max(1) {
                    status.refusal =
                        Some(status.next_growth_us.map_or(Refusal::Never, Refusal::Until));
                }
                is_exhausted |= status.refusal.is_some();
            }
            is_refused |=
                is_exhausted && planned_policy.cost == 0 && planned_policy.own.mode.is_enforced();
        }
        decision.admitted &= !is_refused;
        is_refused
    }
}
