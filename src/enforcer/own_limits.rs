//! The limits of one client, read for the client itself.

use super::explain::{PolicyLimits, read_limits};
use super::{
    Enforcer, LimitRejection, LimitReport, RejectionReason, RequestOutcome, RetryHint, Verdict,
};
use crate::limiter::{PolicyCharges, Refusal};
use crate::policy::{ClientQuotas, SelfServiceSettings};
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
    pub policies: Vec<PolicyLimits<'t>>,
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
        let quotas = client.quotas.iter().cloned();
        let mut policies: Vec<_> = quotas.map(|own| PolicyLimits::unread(own, 0)).collect();
        let read = read_limits(&self.store, &mut policies.iter_mut().collect::<Vec<_>>()).await;
        let now_us = match read {
            Ok(now_us) => now_us,
            Err(error) => return unavailable(error),
        };
        let verdict = Verdict {
            limits: tightest_of_each_counter(&policies),
            now_us: now_us.unwrap_or_default(),
            ..Verdict::default()
        };
        OwnLimits { verdict, policies }
    }
}

/// The limits of all policies. Of limits of one counter, which have one name, only the tightest.
fn tightest_of_each_counter<'t>(policies: &[PolicyLimits<'t>]) -> SmallVec<[LimitReport<'t>; 1]> {
    let mut tightest: SmallVec<[LimitReport<'t>; 1]> = SmallVec::new();
    for report in policies.iter().flat_map(PolicyLimits::reports) {
        let is_same = |other: &&mut LimitReport<'t>| {
            (other.key_id, &other.limit.name) == (report.key_id, &report.limit.name)
        };
        match tightest.iter_mut().find(is_same) {
            Some(other) if report.status.remaining < other.status.remaining => *other = report,
            Some(_) => {}
            None => tightest.push(report),
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
    let refusal = status.and_then(|status| status.refusal);
    let refusal = refusal.unwrap_or(Refusal::Unknown);
    let rejection = LimitRejection {
        policy: SELF_SERVICE_NAME,
        is_reported: true,
        violated_limits: smallvec![&*settings.limit.name],
        retry: RetryHint::from_refusal(refusal, decision.now_us),
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
