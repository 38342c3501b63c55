//! Explains the decision about a request, policy by policy, without charging anything.

use super::charge_plan::ChargePlan;
use super::planned_policy::{PlannedPolicy, PolicyStatuses};
use crate::limiter::{Key, LimitStatus};
use crate::policy::{
    ClientQuota, Facts, KeyDigests, KeyError, OverrideRule, Policy, PolicyAction, PolicyTable,
    UnmetCondition, read_request_amounts,
};
use crate::store::{Store, StoreUnavailable};
use smallvec::smallvec;

/// The effect of one policy on a request.
#[derive(Debug)]
pub enum PolicyStep<'t> {
    /// The policy does not match.
    NotMatched(UnmetCondition<'t>),
    /// An earlier policy has ended the evaluation.
    NotReached,
    Exempts,
    Denies,
    /// A part of the key is missing, so the policy does not apply.
    Skipped,
    /// The request is rejected because the policy cannot form its key.
    InvalidKey(KeyError),
    Limits(PolicyLimits<'t>),
    /// An override exempts the key from this policy.
    ExemptsKey(Key),
    /// An override denies the key.
    DeniesKey(Key),
    /// An override switches the policy off for the key.
    Off(Key),
}

/// The limits of one policy for a request.
#[derive(Debug)]
pub struct PolicyLimits<'t> {
    pub own: ClientQuota<'t>,
    pub cost: u64,
    /// End of the current block (µs, store's clock), if any.
    pub blocked_until_us: Option<u64>,
    /// Current status of each limit; empty if the store is unavailable.
    pub statuses: Vec<LimitStatus>,
}

/// The effect of every policy on a request, in order of evaluation.
#[derive(Debug)]
pub struct PolicyExplanation<'t> {
    pub steps: Vec<(&'t Policy, PolicyStep<'t>)>,
    /// The store's clock (µs since the epoch), or the error if the store is unavailable. `None` if
    /// no policy limits the request: the store has nothing to answer.
    pub store: Result<Option<u64>, StoreUnavailable>,
}

/// Explains how `table` decides a request. Reads the counters and changes none.
pub async fn explain_request<'t>(
    store: &Store,
    table: &'t PolicyTable,
    facts: &Facts<'_>,
) -> PolicyExplanation<'t> {
    let mut steps = explain_policies(table, facts);
    let planned_policies = steps.iter().filter_map(|(_, step)| match step {
        PolicyStep::Limits(limits) => Some(PlannedPolicy::new_read_only(&limits.own)),
        _ => None,
    });
    let read = read_policies(
        store,
        planned_policies.collect(),
        |planned_policy, statuses| {
            let step = steps.get_mut(planned_policy.policy_index);
            if let Some((_, PolicyStep::Limits(limits))) = step {
                limits.blocked_until_us = statuses.blocked_until_us();
                limits.statuses = statuses.known_limits().collect();
            }
        },
    );
    let store = read.await;
    PolicyExplanation { steps, store }
}

/// Reads the counters of planned policies without a charge, and reports the statuses of each
/// policy. Returns the store's clock at the first reading, `None` without policies.
pub(super) async fn read_policies<'t>(
    store: &Store,
    planned_policies: Vec<PlannedPolicy<'t>>,
    mut report: impl FnMut(&PlannedPolicy<'t>, PolicyStatuses<'_>),
) -> Result<Option<u64>, StoreUnavailable> {
    let mut now_us = None;
    for plan in separate_shared_counters(planned_policies) {
        let mut decision = store.decide(&plan.build_charges(0, 0)).await?;
        plan.report_amounts(&mut decision);
        for (planned_policy, statuses) in plan.policies_with_statuses(&decision) {
            report(planned_policy, statuses);
        }
        now_us = now_us.or(Some(decision.now_us));
    }
    Ok(now_us)
}

/// Divides planned policies so that no plan has a key twice: policies with one `counter` read it
/// one after the other, each by its own limits.
fn separate_shared_counters(planned_policies: Vec<PlannedPolicy<'_>>) -> Vec<ChargePlan<'_>> {
    let mut plans: Vec<ChargePlan<'_>> = Vec::new();
    for planned_policy in planned_policies {
        let lacks_key = |plan: &&mut ChargePlan<'_>| {
            let mut planned = plan.planned_policies.iter();
            planned.all(|other| other.key.id() != planned_policy.key.id())
        };
        match plans.iter_mut().find(lacks_key) {
            Some(plan) => plan.planned_policies.push(planned_policy),
            None => plans.push(ChargePlan {
                planned_policies: smallvec![planned_policy],
                ..ChargePlan::default()
            }),
        }
    }
    plans
}

fn explain_policies<'t>(
    table: &'t PolicyTable,
    facts: &Facts<'_>,
) -> Vec<(&'t Policy, PolicyStep<'t>)> {
    let mut is_walk_ended = false;
    let steps = table.policies().iter().enumerate().map(|(index, policy)| {
        let step = match policy.find_ambiguity(facts, table.client.value_checks) {
            _ if is_walk_ended => PolicyStep::NotReached,
            Some(error) => PolicyStep::InvalidKey(error),
            None => match policy.first_unmet_condition(facts) {
                Some(unmet) => PolicyStep::NotMatched(unmet),
                None => explain_policy((index, policy), table, facts),
            },
        };
        is_walk_ended |= policy.is_enforced()
            && matches!(
                step,
                PolicyStep::Exempts
                    | PolicyStep::Denies
                    | PolicyStep::DeniesKey(_)
                    | PolicyStep::InvalidKey(_)
            );
        (policy, step)
    });
    steps.collect()
}

fn explain_policy<'t>(
    (policy_index, policy): (usize, &'t Policy),
    table: &'t PolicyTable,
    facts: &Facts<'_>,
) -> PolicyStep<'t> {
    let quota = match &policy.action {
        PolicyAction::Allow => return PolicyStep::Exempts,
        PolicyAction::Deny => return PolicyStep::Denies,
        PolicyAction::Limit(quota) => quota,
    };
    let (context, mut digests) = (table.key_context(policy), KeyDigests::default());
    match quota.key_and_limits_for_facts(&policy.name, (facts, None), &context, &mut digests) {
        Ok(Some((key, selected))) => {
            match selected.rule {
                OverrideRule::Limit(_) => {}
                OverrideRule::Allow => return PolicyStep::ExemptsKey(key),
                OverrideRule::Deny => return PolicyStep::DeniesKey(key),
                OverrideRule::Off => return PolicyStep::Off(key),
            }
            let own = ClientQuota {
                policy_index,
                policy,
                quota,
                mode: selected.mode(policy.mode),
                key,
                limits: selected.limits,
                amounts: read_request_amounts(selected.limits, facts),
            };
            PolicyStep::Limits(PolicyLimits {
                own,
                cost: quota.cost.compute_units(facts),
                blocked_until_us: None,
                statuses: Vec::new(),
            })
        }
        Ok(None) => PolicyStep::Skipped,
        Err(error) => PolicyStep::InvalidKey(error),
    }
}
