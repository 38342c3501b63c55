//! Explains the decision about a request, policy by policy, without charging anything.

use super::LimitReport;
use super::charge_plan::ChargePlan;
use super::planned_policy::PlannedPolicy;
use crate::limiter::{Key, LimitStatus};
use crate::policy::{
    ClientQuota, Facts, KeyError, OverrideRule, Policy, PolicyAction, PolicyTable, UnmetCondition,
    ValueDigests,
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
    /// Current status of each limit, if it is known; empty if the store is unavailable.
    pub statuses: Vec<Option<LimitStatus>>,
}

impl<'t> PolicyLimits<'t> {
    pub(super) fn unread(own: ClientQuota<'t>, cost: u64) -> Self {
        Self {
            own,
            cost,
            blocked_until_us: None,
            statuses: Vec::new(),
        }
    }

    /// The limits with known statuses, unless the key is unlimited.
    pub fn reports(&self) -> impl Iterator<Item = LimitReport<'t>> {
        let limits = self.own.limits.iter().zip(&self.statuses);
        limits.filter_map(|(limit, status)| {
            Some(LimitReport {
                limit,
                status: status.filter(|status| !status.is_unlimited())?,
                key_id: self.own.key.id(),
            })
        })
    }
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
    let limited = steps.iter_mut().filter_map(|(_, step)| match step {
        PolicyStep::Limits(limits) => Some(limits),
        _ => None,
    });
    let store = read_limits(store, &mut limited.collect::<Vec<_>>()).await;
    PolicyExplanation { steps, store }
}

/// Reads the statuses of limits without a charge. Returns the store's clock at the first reading,
/// `None` without policies.
pub(super) async fn read_limits(
    store: &Store,
    limited: &mut [&mut PolicyLimits<'_>],
) -> Result<Option<u64>, StoreUnavailable> {
    let mut now_us = None;
    for plan in separate_shared_counters(limited) {
        let mut decision = store.decide(&plan.build_charges(0, 0)).await?;
        plan.report_amounts(&mut decision);
        for (planned_policy, statuses) in plan.policies_with_statuses(&decision) {
            let index = planned_policy.own.policy_index;
            for limits in limited
                .iter_mut()
                .filter(|one| one.own.policy_index == index)
            {
                limits.blocked_until_us = statuses.blocked_until_us();
                limits.statuses = statuses
                    .limits
                    .iter()
                    .map(|outcome| outcome.status)
                    .collect();
            }
        }
        now_us = now_us.or(Some(decision.now_us));
    }
    Ok(now_us)
}

/// Plans the reading of limits so that no plan has a key twice: policies with one `counter` read it
/// one after the other, each by its own limits.
fn separate_shared_counters<'t>(limited: &[&mut PolicyLimits<'t>]) -> Vec<ChargePlan<'t>> {
    let mut plans: Vec<ChargePlan<'t>> = Vec::new();
    for limits in limited {
        let planned_policy = PlannedPolicy::new_read_only(limits.own.clone());
        let lacks_key = |plan: &&mut ChargePlan<'t>| {
            let mut planned = plan.planned_policies.iter();
            planned.all(|other| other.own.key.id() != planned_policy.own.key.id())
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

pub(super) fn explain_policies<'t>(
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
    let (context, mut digests) = (table.key_context(policy), ValueDigests::default());
    match quota.key_and_limits_for_facts(&policy.name, (facts, None), &context, &mut digests) {
        Ok(Some((key, selected))) => {
            match selected.rule {
                OverrideRule::Limit(_) => {}
                OverrideRule::Allow => return PolicyStep::ExemptsKey(key),
                OverrideRule::Deny => return PolicyStep::DeniesKey(key),
                OverrideRule::Off => return PolicyStep::Off(key),
            }
            let own = ClientQuota::new((policy_index, policy), quota, (key, selected), facts);
            PolicyStep::Limits(PolicyLimits::unread(own, quota.cost.compute_units(facts)))
        }
        Ok(None) => PolicyStep::Skipped,
        Err(error) => PolicyStep::InvalidKey(error),
    }
}
