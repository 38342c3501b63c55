//! The limits of one client, read for the client itself.

use super::explain::read_policies;
use super::planned_policy::PlannedPolicy;
use super::{
    Enforcer, LimitRejection, LimitReport, RejectionReason, RequestOutcome, RetryHint, Verdict,
};
use crate::limiter::{PolicyCharges, Refusal};
use crate::policy::{ClientQuotas, Policy, SelfServiceSettings};
use crate::store::StoreUnavailable;
use smallvec::{SmallVec, smallvec};
use tokio::time::Instant;

/// The name of the limit on queries in rate-limit fields and problem details.
const SELF_SERVICE_NAME: &str = "self_service";

/// The answer to a client that asks for its limits.
#[derive(Debug)]
pub struct OwnLimits<'t> {
    /// Reports all limits, or rejects the query.
    pub verdict: Verdict<'t>,
    /// The limits by policy; empty if the query is rejected.
    pub policies: Vec<OwnPolicyLimits<'t>>,
}

/// The limits that one policy sets for the client.
#[derive(Debug)]
pub struct OwnPolicyLimits<'t> {
    pub policy: &'t Policy,
    /// End of the current block (µs, store's clock), if any.
    pub blocked_until_us: Option<u64>,
    pub limits: Vec<LimitReport<'t>>,
}

impl Enforcer {
    /// Reads the limits of a client without charging them. The query is charged to the limit of
    /// `settings`.
    pub async fn read_own_limits<'t>(
        &self,
        settings: &'t SelfServiceSettings,
        client: &ClientQuotas<'t>,
        arrived: Instant,
    ) -> OwnLimits<'t> {
        let ask = PolicyCharges::new(&settings.limit.limit, &client.client_key, 1);
        let rejected = |verdict| OwnLimits {
            verdict,
            policies: Vec::new(),
        };
        let unavailable =
            |error: StoreUnavailable| rejected(unavailable_verdict(error.retry_after_us));
        match self.store.decide_with_source(&[ask], arrived).await {
            Ok((decision, _)) if decision.admitted => {}
            Ok((decision, _)) => return rejected(reject_question(settings, client, &decision)),
            Err(failure) => return unavailable(failure.unavailable),
        }
        let mut policies = Vec::new();
        let planned_policies = client.quotas.iter().map(PlannedPolicy::new_read_only);
        let planned_policies = planned_policies.collect();
        let read = read_policies(&self.store, planned_policies, |planned_policy, statuses| {
            let limits = planned_policy.limits.iter().zip(statuses.limits);
            let reports = limits.filter_map(|(limit, outcome)| {
                let status = outcome.status.filter(|status| !status.is_unlimited())?;
                let key_id = planned_policy.key.id();
                Some(LimitReport {
                    limit,
                    status,
                    key_id,
                })
            });
            let own = OwnPolicyLimits {
                policy: planned_policy.policy,
                blocked_until_us: statuses.blocked_until_us(),
                limits: reports.collect(),
            };
            policies.push((planned_policy.policy_index, own));
        });
        let now_us = match read.await {
            Ok(now_us) => now_us,
            Err(error) => return unavailable(error),
        };
        policies.sort_by_key(|(policy_index, _)| *policy_index);
        let policies: Vec<OwnPolicyLimits<'t>> = policies.into_iter().map(|(_, own)| own).collect();
        let verdict = Verdict {
            limits: tightest_of_each_counter(&policies),
            now_us: now_us.unwrap_or_default(),
            ..Verdict::default()
        };
        OwnLimits { verdict, policies }
    }
}

/// The limits of all policies. Of limits of one counter, which have one name, only the tightest.
fn tightest_of_each_counter<'t>(
    policies: &[OwnPolicyLimits<'t>],
) -> SmallVec<[LimitReport<'t>; 2]> {
    let mut tightest: SmallVec<[LimitReport<'t>; 2]> = SmallVec::new();
    for report in policies.iter().flat_map(|policy| &policy.limits) {
        let is_same = |other: &&mut LimitReport<'t>| {
            (other.key_id, &other.limit.name) == (report.key_id, &report.limit.name)
        };
        match tightest.iter_mut().find(is_same) {
            Some(other) if report.status.remaining < other.status.remaining => *other = *report,
            Some(_) => {}
            None => tightest.push(*report),
        }
    }
    tightest
}

fn reject_question<'t>(
    settings: &'t SelfServiceSettings,
    client: &ClientQuotas<'t>,
    decision: &crate::limiter::Decision,
) -> Verdict<'t> {
    let status = decision.statuses().next();
    let retry = match status.and_then(|status| status.refusal) {
        Some(Refusal::Until(at_us)) => RetryHint::After(at_us.saturating_sub(decision.now_us)),
        _ => RetryHint::Unknown,
    };
    let rejection = LimitRejection {
        policy: SELF_SERVICE_NAME,
        is_reported: true,
        violated_limits: smallvec![&*settings.limit.name],
        retry,
        reason: RejectionReason::TooFewUnits,
        is_blocked: false,
        custom_response: None,
        key: None,
    };
    let report = status.map(|status| LimitReport {
        limit: &settings.limit,
        status,
        key_id: client.client_key.id(),
    });
    Verdict {
        limits: report.into_iter().collect(),
        now_us: decision.now_us,
        ..Verdict::from_outcome(RequestOutcome::Limited(rejection))
    }
}

fn unavailable_verdict<'t>(retry_after_us: u64) -> Verdict<'t> {
    Verdict::from_outcome(RequestOutcome::Unavailable {
        policy: SELF_SERVICE_NAME,
        is_reported: true,
        retry_after_us,
    })
}
