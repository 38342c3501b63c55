//! Explains the decision about a described request, for `tidegate explain` and the admin endpoint.

use super::limit_json;
use crate::admin::{ExplainRequest, add_fields};
use crate::enforcer::{self, PolicyExplanation, PolicyStep};
use crate::policy::{OnStoreFailure, Policy, PolicyMode, PolicyTable};
use crate::proxy::InboundRequest;
use crate::store::Store;
use crate::store::redis::RedisOutage;
use crate::tls::CertificateSubject;
use http::{HeaderName, HeaderValue, Method, Request, Uri, request};
use serde_json::{Value, json};

/// What each policy does with a request, and the error in the request's token.
#[derive(Debug)]
pub(crate) struct ExplainedRequest<'t> {
    pub(crate) explanation: PolicyExplanation<'t>,
    pub(crate) token_error: Option<String>,
    /// Why Redis is unavailable, if it is.
    pub(crate) outage: Option<RedisOutage>,
}

/// Why a request cannot be explained, with a message for the operator.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ExplainError {
    /// The description is not a valid request.
    #[error("{0}")]
    InvalidRequest(String),
    /// The proxy rejects the request before policies apply.
    #[error("{0}")]
    RequestRejected(String),
}

/// The expected result for the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ExpectedOutcome<'t> {
    Denied(&'t str),
    CannotKey(&'t str),
    /// Forwarded: no limit applies.
    Unlimited,
    /// Forwarded: all limits have units left.
    Admitted,
    /// Unknown: the counters cannot be read.
    Unknown,
    /// 503 by these policies, because the store is unavailable.
    StoreRequired(Vec<&'t str>),
    /// Without the store, these policies count in each process by itself. None: nothing is limited.
    CountedLocally(Vec<&'t str>),
    Rejected(Vec<&'t str>),
}

/// Explains the decision of `table` about a request, with the counters in `store`. No counter is
/// changed.
///
/// # Errors
/// Returns an [`ExplainError`] with a message for the operator.
pub(crate) async fn explain_request<'t>(
    store: &Store,
    table: &'t PolicyTable,
    description: &ExplainRequest,
) -> Result<ExplainedRequest<'t>, ExplainError> {
    let mut parts = build_request_head(description).map_err(ExplainError::InvalidRequest)?;
    let text = |text: &Option<String>| text.as_deref().map(Into::into);
    let certificate = CertificateSubject {
        san: text(&description.client_cert_san),
        cn: text(&description.client_cert_cn),
    };
    let inbound = InboundRequest::validate_and_rewrite(
        &mut parts,
        description.peer_ip,
        table,
        table.path.forward,
    )
    .map_err(|error| {
        ExplainError::RequestRejected(format!(
            "the request is rejected before policies apply: {error}"
        ))
    })?;
    let explanation =
        enforcer::explain_request(store, table, &inbound.facts(&parts, Some(&certificate))).await;
    Ok(ExplainedRequest {
        explanation,
        token_error: inbound.token_error().map(|error| error.to_string()),
        outage: store.outage(),
    })
}

fn build_request_head(description: &ExplainRequest) -> Result<request::Parts, String> {
    let method: Method = description
        .method
        .parse()
        .map_err(|error| format!("method {:?}: {error}", description.method))?;
    let uri: Uri = description
        .url
        .parse()
        .map_err(|error| format!("{:?} is no URL: {error}", description.url))?;
    let mut request = Request::builder().method(method);
    let mut has_host = false;
    for (name, value) in &description.headers {
        let name: HeaderName = name
            .parse()
            .map_err(|error| format!("header name {name:?}: {error}"))?;
        let value = HeaderValue::from_str(value)
            .map_err(|error| format!("header value {value:?}: {error}"))?;
        has_host |= name == http::header::HOST;
        request = request.header(name, value);
    }
    if !has_host {
        request = request.header(
            "host",
            uri.authority()
                .map_or("localhost", |authority| authority.as_str()),
        );
    }
    let request = request
        .uri(uri)
        .body(())
        .map_err(|error| error.to_string())?;
    Ok(request.into_parts().0)
}

/// Predicts the result of a request. `is_limit_status_known` is whether the counters could be read.
pub(crate) fn predict_outcome<'t>(
    explanation: &PolicyExplanation<'t>,
    is_limit_status_known: bool,
) -> ExpectedOutcome<'t> {
    let (mut exhausted, mut has_limits, mut has_unknown_status) = (Vec::new(), false, false);
    let (mut closed, mut local) = (Vec::new(), Vec::new());
    let is_enforced =
        |(policy, step): &&(&Policy, PolicyStep<'t>)| effective_mode(policy, step).is_enforced();
    for (policy, step) in explanation.steps.iter().filter(is_enforced) {
        match step {
            PolicyStep::Denies | PolicyStep::DeniesKey(_) => {
                return ExpectedOutcome::Denied(&policy.name);
            }
            PolicyStep::InvalidKey(_) => return ExpectedOutcome::CannotKey(&policy.name),
            PolicyStep::Limits(limits) => {
                has_limits = true;
                match policy.on_store_failure {
                    _ if limits.key.is_instance_scoped() => local.push(&*policy.name),
                    OnStoreFailure::Closed => closed.push(&*policy.name),
                    OnStoreFailure::Local => local.push(&*policy.name),
                    OnStoreFailure::Open => {}
                }
                has_unknown_status |= limits.statuses.is_empty();
                let is_exhausted = limits
                    .statuses
                    .iter()
                    .any(|status| status.remaining < limits.cost);
                if is_exhausted || limits.blocked_until_us.is_some() {
                    exhausted.push(&*policy.name);
                }
            }
            _ => {}
        }
    }
    match (has_limits, is_limit_status_known, exhausted.is_empty()) {
        (false, ..) => ExpectedOutcome::Unlimited,
        _ if explanation.store.is_err() && closed.is_empty() => {
            ExpectedOutcome::CountedLocally(local)
        }
        _ if explanation.store.is_err() => ExpectedOutcome::StoreRequired(closed),
        (true, false, _) => ExpectedOutcome::Unknown,
        (true, true, true) if has_unknown_status => ExpectedOutcome::Unknown,
        (true, true, true) => ExpectedOutcome::Admitted,
        (true, true, false) => ExpectedOutcome::Rejected(exhausted),
    }
}

/// The time of the statuses, if the store has one.
pub(crate) fn status_time_us(explanation: &PolicyExplanation<'_>) -> Option<u64> {
    *explanation.store.as_ref().ok()?
}

/// The mode in which a policy decides a request.
pub(crate) fn effective_mode(policy: &Policy, step: &PolicyStep<'_>) -> PolicyMode {
    match step {
        PolicyStep::Limits(limits) => limits.mode,
        _ => policy.mode,
    }
}

/// Returns the explanation as JSON. `is_limit_status_known` is whether its counters are those of
/// the proxy.
pub(crate) fn explanation_to_json(
    explained: &ExplainedRequest<'_>,
    is_limit_status_known: bool,
) -> Value {
    let explanation = &explained.explanation;
    let now_us = status_time_us(explanation).filter(|_| is_limit_status_known);
    let policies = explanation.steps.iter().map(|(policy, step)| {
        let (result, why) = match step {
            PolicyStep::NotMatched(unmet) => ("unmet", Some(unmet.to_string())),
            PolicyStep::NotReached => ("not_reached", None),
            PolicyStep::Exempts => ("exempts", None),
            PolicyStep::Denies => ("denies", None),
            PolicyStep::Skipped => ("skipped", Some("a part of its key is missing".to_owned())),
            PolicyStep::InvalidKey(error) => ("cannot_key", Some(error.to_string())),
            PolicyStep::Limits(_) => ("limits", None),
            PolicyStep::ExemptsKey(key) => ("exempts_key", Some(format!("an override exempts {key}"))),
            PolicyStep::DeniesKey(key) => ("denies", Some(format!("an override denies {key}"))),
            PolicyStep::Off(key) => ("skipped", Some(format!("policy is off for key {key} (override)"))),
        };
        let mode = effective_mode(policy, step);
        let mut policy_json =
            json!({ "policy": policy.name, "mode": mode.name(), "shadow": mode == PolicyMode::Shadow, "result": result, "why": why });
        if let PolicyStep::Limits(limited) = step {
            let blocked = limited.blocked_until_us.zip(now_us);
            let limits = limited.limits.iter().enumerate().map(|(index, named)| {
                match limited.statuses.get(index).zip(now_us) {
                    Some((status, now_us)) => {
                        limit_json::limit_with_status_to_json(named, status, now_us)
                    }
                    None => limit_json::limit_to_json(named),
                }
            });
            let limited_json = json!({
                "key": limited.key.to_readable_string(),
                "key_hash": format!("{:032x}", limited.key.id()),
                "scope": limited.key.scope().name(),
                "cost": limited.cost,
                "limits": limits.collect::<Vec<_>>(),
                "blocked_s": blocked
                    .map(|(until, now)| limit_json::micros_to_seconds_json(until.saturating_sub(now))),
            });
            add_fields(&mut policy_json, limited_json);
        }
        policy_json
    });
    json!({
        "expected": outcome_to_json(&predict_outcome(explanation, now_us.is_some())),
        "policies": policies.collect::<Vec<_>>(),
        "store_error": describe_store_error(explained),
        "token_fault": explained.token_error,
    })
}

/// Why the counters cannot be read, since when, and what to do.
pub(crate) fn describe_store_error(explained: &ExplainedRequest<'_>) -> Option<String> {
    let error = explained.explanation.store.as_ref().err()?;
    Some(match &explained.outage {
        None => error.to_string(),
        Some(RedisOutage { since, cause }) => {
            let (message, remedy) = (&cause.message, cause.remedy());
            match since.elapsed().as_secs() {
                // This process has just tried to connect.
                0 => format!("{error}: {message}; {remedy}"),
                lasts_s => format!("{error} for {lasts_s} s: {message}; {remedy}"),
            }
        }
    })
}

/// JSON for a request that is rejected before policies apply.
pub(crate) fn rejected_request_to_json(why: &str) -> Value {
    json!({ "expected": { "status": 400, "why": why }, "policies": [] })
}

fn outcome_to_json(expected: &ExpectedOutcome<'_>) -> Value {
    match expected {
        ExpectedOutcome::Denied(policy) => {
            json!({ "status": 403, "decision": "denied", "by": [policy] })
        }
        ExpectedOutcome::CannotKey(policy) => {
            json!({ "status": 400, "decision": "malformed", "by": [policy] })
        }
        ExpectedOutcome::Rejected(policies) => {
            json!({ "status": 429, "decision": "rejected", "by": policies })
        }
        ExpectedOutcome::Unlimited => json!({ "decision": "allowed", "why": "no limit applies" }),
        ExpectedOutcome::Admitted => json!({ "decision": "allowed" }),
        ExpectedOutcome::Unknown => {
            json!({ "decision": null, "why": "the counters cannot be read" })
        }
        ExpectedOutcome::StoreRequired(policies) => {
            json!({ "status": 503, "decision": "degraded", "by": policies, "why": "on_store_failure = \"closed\"" })
        }
        ExpectedOutcome::CountedLocally(policies) if policies.is_empty() => {
            json!({ "decision": "degraded", "why": "admitted: on_store_failure = \"open\"" })
        }
        ExpectedOutcome::CountedLocally(policies) => {
            json!({ "decision": "degraded", "by": policies, "why": "each instance counts by itself" })
        }
    }
}
