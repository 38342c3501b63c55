//! Decides recorded requests by the same policies, charges and algorithms, with counters in memory
//! and no waiting.

use super::charge_plan::ChargePlan;
use super::decisions::PolicyDecision;
use super::{EstimatedCharge, RequestOutcome};
use crate::limiter::{Key, Limit};
use crate::policy::{Facts, NamedLimit, PolicyTable};
use crate::store::{MemoryStore, SettlementQueue};
use smallvec::SmallVec;
use std::sync::Arc;
use std::time::Instant;

/// The decision of one policy about a request.
#[derive(Debug)]
pub struct PolicyOutcome<'a, 't> {
    /// Index of the policy in the table.
    pub policy_index: usize,
    pub decision: PolicyDecision,
    /// `None` for a policy without limits, and for a request without a valid key.
    pub quota_usage: Option<QuotaUsage<'a, 't>>,
}

/// The quota that a request used, or would have used, at one policy.
#[derive(Debug)]
pub struct QuotaUsage<'a, 't> {
    pub key: &'a Key,
    pub limits: &'t [NamedLimit],
    pub cost: u64,
}

/// The outcome of a dry run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DryRunOutcome {
    #[default]
    Forwarded,
    /// Status 429.
    Limited,
    /// Status 403.
    Denied,
    /// Status 400: a policy cannot form its key.
    InvalidKey,
}

/// The result of a dry run.
#[derive(Debug, Default)]
pub struct DryRunResult {
    pub outcome: DryRunOutcome,
    /// Time that the request would have been held (µs).
    pub delay_us: u64,
    /// The counters in which the request took a slot. The caller renews and releases the slots.
    pub slot_counters: SmallVec<[(Limit, Key); 1]>,
    /// Maximum duration of the request (µs), if bounded.
    pub max_duration_us: Option<u64>,
    /// Charges that the response settles.
    pub estimated_charges: Vec<EstimatedCharge>,
}

/// Decides a request at the time of `memory`'s clock. `settlements` are those of `memory`. `slot`
/// is unique among the slots of this memory. `requested_at` is any moment, because that clock is a
/// manual one. The decision of each matching policy is passed to `report`. Policies for whose index
/// `is_included` returns false do not apply.
pub fn dry_run_request<'t>(
    (memory, settlements): (&MemoryStore, &Arc<SettlementQueue>),
    table: &'t PolicyTable,
    facts: &Facts<'_>,
    (slot, requested_at): (u128, Instant),
    is_included: impl Fn(usize) -> bool,
    mut report: impl FnMut(PolicyOutcome<'_, 't>),
) -> DryRunResult {
    let result_without_charges = |outcome| DryRunResult {
        outcome,
        ..DryRunResult::default()
    };
    let matching = table.matching_policies(facts);
    let record_decision = |policy_index, _: Option<&Key>, decision| {
        report(PolicyOutcome {
            policy_index,
            decision,
            quota_usage: None,
        })
    };
    let facts_only = (facts, None);
    let plan =
        match ChargePlan::from_facts(table, matching, facts_only, is_included, record_decision) {
            Ok(plan) if plan.planned_policies.is_empty() => {
                return result_without_charges(DryRunOutcome::Forwarded);
            }
            Ok(plan) => plan,
            Err(RequestOutcome::InvalidKey { .. }) => {
                return result_without_charges(DryRunOutcome::InvalidKey);
            }
            Err(_) => return result_without_charges(DryRunOutcome::Denied),
        };
    let charges = plan.build_charges(1, slot);
    let decision = memory.decide_at(&charges, requested_at);
    plan.record_decisions(Some(&decision), false, |planned_policy, decision| {
        report(PolicyOutcome {
            policy_index: planned_policy.own.policy_index,
            decision,
            quota_usage: Some(QuotaUsage {
                key: &planned_policy.own.key,
                limits: planned_policy.own.limits,
                cost: planned_policy.cost,
            }),
        });
    });
    let (taken, terms) = plan.taken_slots(&decision);
    DryRunResult {
        outcome: if decision.admitted {
            DryRunOutcome::Forwarded
        } else {
            DryRunOutcome::Limited
        },
        delay_us: decision.delay_us,
        slot_counters: taken,
        max_duration_us: terms.max_duration_us,
        estimated_charges: plan.estimated_charges(&decision, settlements),
    }
}
