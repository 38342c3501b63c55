//! Decides requests of the past: the same walk, the same charges, the same rules, with counters in memory and nobody
//! who waits for an answer.

use super::{ChargePlan, PolicyDecision, RequestOutcome, taken_slots};
use crate::limiter::{Key, Limit};
use crate::policy::{Facts, NamedLimit, PolicyTable};
use crate::store::MemoryStore;
use smallvec::SmallVec;
use std::time::Instant;

/// What one policy did with a request.
#[derive(Debug)]
pub struct PolicyOutcome<'a, 't> {
    /// The policy's place in the table.
    pub policy_index: usize,
    pub decision: PolicyDecision,
    /// `None` for a policy without limits, and for a request that it cannot key.
    pub quota_usage: Option<QuotaUsage<'a, 't>>,
}

/// The quota that a request used at one policy, or would have.
#[derive(Debug)]
pub struct QuotaUsage<'a, 't> {
    pub key: &'a Key,
    pub limits: &'t [NamedLimit],
    pub cost: u64,
}

/// What would have become of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DryRunOutcome {
    Forwarded,
    /// 429
    Limited,
    /// 403
    Denied,
    /// 400: it cannot be keyed.
    InvalidKey,
}

/// A request that was rehearsed.
#[derive(Debug)]
pub struct DryRunResult {
    pub outcome: DryRunOutcome,
    /// How long it would have been held (µs).
    pub delay_us: u64,
    /// The slots that it took, to be renewed and given back by who knows how long it lasted.
    pub slot_counters: SmallVec<[(Limit, Key); 1]>,
    /// After what time it would have been ended (µs), if ever.
    pub max_duration_us: Option<u64>,
}

/// Decides a request at the time that `memory`'s clock tells. `slot` is unique among those of this memory; `asked` is any
/// moment, as that clock is moved by hand. `tell` hears what each policy that matches did.
pub fn dry_run_request<'t>(
    memory: &MemoryStore,
    table: &'t PolicyTable,
    facts: &Facts<'_>,
    (slot, requested_at): (u128, Instant),
    mut report: impl FnMut(PolicyOutcome<'_, 't>),
) -> DryRunResult {
    let result_without_charges = |past| DryRunResult {
        outcome: past,
        delay_us: 0,
        slot_counters: SmallVec::new(),
        max_duration_us: None,
    };
    let plan = match ChargePlan::from_facts(table, facts, |at, _, did| {
        report(PolicyOutcome {
            policy_index: at,
            decision: did,
            quota_usage: None,
        })
    }) {
        Ok(plan) if plan.policy_charges.is_empty() => {
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
    plan.record_decisions(&decision, |at, _, did| {
        let claim = plan
            .policy_charges
            .iter()
            .find(|claim| claim.policy_index == at);
        let claim = claim.map(|claim| QuotaUsage {
            key: &claim.key,
            limits: claim.limits,
            cost: claim.cost,
        });
        report(PolicyOutcome {
            policy_index: at,
            decision: did,
            quota_usage: claim,
        });
    });
    let (taken, max_duration_us) = taken_slots(&charges, &decision);
    DryRunResult {
        outcome: if decision.admitted {
            DryRunOutcome::Forwarded
        } else {
            DryRunOutcome::Limited
        },
        delay_us: decision.delay_us,
        slot_counters: taken
            .iter()
            .map(|charge| (*charge.limit, charge.key.clone()))
            .collect(),
        max_duration_us,
    }
}
