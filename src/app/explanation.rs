//! Explains the decision about a described request, for `tidegate explain` and the admin endpoint.

use super::key_status::{describe_limit, describe_limit_status, micros_to_seconds};
use super::store_backend::StoreBackend;
use crate::admin::{
    AdminError, ExpectedOutcome, ExplainRequest, ExplainedKey, ExplainedPolicy,
    ExplanationDocument, LimitDocument,
};
use crate::enforcer::{self, PolicyExplanation, PolicyLimits, PolicyStep};
use crate::limiter::LimitStatus;
use crate::policy::{
    self, BodyFacts, BodyFormat, Facts, OnStoreFailure, Policy, PolicyMode, PolicyTable,
};
use crate::proxy::InboundRequest;
use crate::tls::CertificateSubject;
use http::{HeaderName, HeaderValue, Method, Request, Uri, request};

/// What each policy does with a request, and the error in the request's token.
#[derive(Debug)]
pub(crate) struct ExplainedRequest<'t> {
    pub(crate) explanation: PolicyExplanation<'t>,
    /// Why the proxy rejects the request before policies apply.
    pub(crate) rejection: Option<String>,
    pub(crate) token_error: Option<String>,
    /// Why the counters cannot be read, and what to do.
    pub(crate) store_error: Option<String>,
}

/// Explains the decision of `table` about a request, with the counters of a store. No counter is
/// changed.
///
/// # Errors
/// If the description is not a valid request.
pub(crate) async fn explain_request<'t>(
    backend: &StoreBackend,
    table: &'t PolicyTable,
    description: &ExplainRequest,
) -> Result<ExplainedRequest<'t>, AdminError> {
    let mut parts = build_request_head(description).map_err(AdminError::InvalidRequest)?;
    let text = |text: &Option<String>| text.as_deref().map(Into::into);
    let certificate = CertificateSubject {
        san: text(&description.client_cert_san),
        cn: text(&description.client_cert_cn),
    };
    let inbound = match InboundRequest::validate_and_rewrite(
        &mut parts,
        description.peer_ip,
        table,
        table.path.forward,
    ) {
        Ok(inbound) => inbound,
        Err(error) => {
            let rejection = format!("the request is rejected before policies apply: {error}");
            return Ok(ExplainedRequest {
                explanation: PolicyExplanation {
                    steps: Vec::new(),
                    store: Ok(None),
                },
                rejection: Some(rejection),
                token_error: None,
                store_error: None,
            });
        }
    };
    let store = backend.open_for_inspection().await;
    let facts = inbound.facts(&parts, Some(&certificate), None);
    let body = read_described_body(description.body.as_bytes(), &parts, table, &facts);
    let facts = Facts {
        body: body.as_ref(),
        ..facts
    };
    let explanation = enforcer::explain_request(&store, table, &facts).await;
    let store_error = explanation.store.as_ref().err();
    Ok(ExplainedRequest {
        rejection: None,
        token_error: inbound.token_error().map(|error| error.to_string()),
        store_error: store_error.map(|error| backend.describe_failure(&store, error)),
        explanation,
    })
}

/// Reads the body as the proxy does. `facts` have none.
fn read_described_body(
    body: &[u8],
    parts: &request::Parts,
    table: &PolicyTable,
    facts: &Facts<'_>,
) -> Option<BodyFacts> {
    let size = u64::try_from(body.len()).ok().filter(|size| *size > 0)?;
    let unread = BodyFacts::unreadable(Some(size));
    let facts = Facts {
        body: Some(&unread),
        ..*facts
    };
    let is_short = size <= table.body_bytes_to_read(&facts);
    let format = BodyFormat::from_headers(&parts.headers).filter(|_| is_short);
    let (pointers, checks) = (table.body_pointers(), table.client.value_checks);
    Some(policy::read_body(body, format, pointers, checks))
}

fn build_request_head(description: &ExplainRequest) -> Result<request::Parts, String> {
    let ExplainRequest { method, url, .. } = description;
    let parsed = method.parse::<Method>();
    let method = parsed.map_err(|error| format!("method {method:?}: {error}"))?;
    let parsed = url.parse::<Uri>();
    let uri = parsed.map_err(|error| format!("{url:?} is no URL: {error}"))?;
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
        let authority = uri.authority().map(|authority| authority.as_str());
        request = request.header("host", authority.unwrap_or("localhost"));
    }
    let request = request.uri(uri).body(());
    Ok(request.map_err(|error| error.to_string())?.into_parts().0)
}

/// Predicts the result of a request. If `is_usage_known` is false, the statuses assume no usage.
fn predict_outcome(explanation: &PolicyExplanation<'_>, is_usage_known: bool) -> ExpectedOutcome {
    let (mut exhausted, mut has_limits, mut has_unknown_status) = (Vec::new(), false, false);
    let (mut closed, mut local) = (Vec::new(), Vec::new());
    let is_enforced =
        |(policy, step): &&(&Policy, PolicyStep<'_>)| effective_mode(policy, step).is_enforced();
    for (policy, step) in explanation.steps.iter().filter(is_enforced) {
        let name = policy.name.to_string();
        match step {
            PolicyStep::Denies | PolicyStep::DeniesKey(_) => {
                return new_outcome("denied", Some(403), vec![name], "");
            }
            PolicyStep::InvalidKey(_) => {
                return new_outcome("malformed", Some(400), vec![name], "");
            }
            PolicyStep::Limits(limits) => {
                has_limits = true;
                let is_known = |status: &LimitStatus| is_usage_known || status.is_unlimited();
                let mut statuses = limits.statuses.iter();
                has_unknown_status |= limits.statuses.is_empty()
                    || !statuses.all(|status| status.as_ref().is_some_and(is_known));
                let mut known = limits.statuses.iter().flatten();
                let is_exhausted = known.any(|status| status.remaining < limits.cost);
                if is_exhausted || limits.blocked_until_us.is_some() {
                    exhausted.push(name.clone());
                }
                match policy.on_store_failure {
                    _ if limits.own.key.is_instance_scoped() => local.push(name),
                    OnStoreFailure::Closed => closed.push(name),
                    OnStoreFailure::Local => local.push(name),
                    OnStoreFailure::Open => {}
                }
            }
            _ => {}
        }
    }
    let is_store_down = explanation.store.is_err();
    match (has_limits, is_store_down, closed.is_empty()) {
        (false, ..) => new_outcome("allowed", None, Vec::new(), "no limit applies"),
        (true, true, false) => new_outcome(
            "degraded",
            Some(503),
            closed,
            "on_store_failure = \"closed\"",
        ),
        (true, true, true) => {
            let why = if local.is_empty() {
                "admitted: on_store_failure = \"open\""
            } else {
                "each instance counts by itself"
            };
            new_outcome("degraded", None, local, why)
        }
        _ if !exhausted.is_empty() => new_outcome("rejected", Some(429), exhausted, ""),
        _ if !has_unknown_status => new_outcome("allowed", None, Vec::new(), ""),
        _ => new_outcome(None, None, Vec::new(), "the counters cannot be read"),
    }
}

/// An empty `why` or `by` is left out.
fn new_outcome(
    decision: impl Into<Option<&'static str>>,
    status: Option<u16>,
    by: Vec<String>,
    why: &str,
) -> ExpectedOutcome {
    ExpectedOutcome {
        status,
        decision: decision.into().map(str::to_owned),
        by: (!by.is_empty()).then_some(by),
        why: (!why.is_empty()).then(|| why.to_owned()),
    }
}

/// The mode in which a policy decides a request.
fn effective_mode(policy: &Policy, step: &PolicyStep<'_>) -> PolicyMode {
    match step {
        PolicyStep::Limits(limits) => limits.own.mode,
        _ => policy.mode,
    }
}

impl ExplainedRequest<'_> {
    /// Describes the explanation. `is_usage_known` is whether its counters are those of the proxy.
    pub(crate) fn describe(&self, is_usage_known: bool) -> ExplanationDocument {
        let explanation = &self.explanation;
        let now_us = explanation.store.as_ref().ok().copied().flatten();
        let steps = explanation.steps.iter();
        let rejected = self.rejection.as_ref();
        let rejected = rejected.map(|why| new_outcome(None, Some(400), Vec::new(), why));
        ExplanationDocument {
            expected: rejected.unwrap_or_else(|| predict_outcome(explanation, is_usage_known)),
            policies: steps
                .map(|(policy, step)| describe_step(policy, step, now_us, is_usage_known))
                .collect(),
            store_error: self.store_error.clone(),
            token_fault: self.token_error.clone(),
        }
    }
}

/// Describes what a policy does. `now_us` is the time of its statuses, if they are known.
fn describe_step(
    policy: &Policy,
    step: &PolicyStep<'_>,
    now_us: Option<u64>,
    is_usage_known: bool,
) -> ExplainedPolicy {
    let by_override = |result, why: String, words: String| (result, Some(why), words);
    let (result, why, words) = match step {
        PolicyStep::NotMatched(unmet) => ("unmet", Some(unmet.to_string()), unmet.to_string()),
        PolicyStep::NotReached => ("not_reached", None, "not reached".to_owned()),
        PolicyStep::Exempts => ("exempts", None, "matches: exempt".to_owned()),
        PolicyStep::Denies => ("denies", None, "matches: denied".to_owned()),
        PolicyStep::Skipped => {
            let why = "a part of its key is missing";
            (
                "skipped",
                Some(why.to_owned()),
                format!("matches, but {why}: skipped"),
            )
        }
        PolicyStep::InvalidKey(error) => (
            "cannot_key",
            Some(error.to_string()),
            format!("matches, but {error}"),
        ),
        PolicyStep::ExemptsKey(key) => by_override(
            "exempts_key",
            format!("an override exempts {key}"),
            format!("matches: key {key}, exempt from this policy by an override"),
        ),
        PolicyStep::DeniesKey(key) => by_override(
            "denies",
            format!("an override denies {key}"),
            format!("matches: key {key}, denied by an override"),
        ),
        PolicyStep::Off(key) => by_override(
            "skipped",
            format!("policy is off for key {key} (override)"),
            format!("matches: key {key}, policy is off for this key (override)"),
        ),
        PolicyStep::Limits(limits) => {
            let is_local = limits.own.key.is_instance_scoped();
            let scope = if is_local {
                ", counted per instance"
            } else {
                ""
            };
            let (key, cost) = (&limits.own.key, limits.cost);
            (
                "limits",
                None,
                format!("matches: key {key}, cost {cost}{scope}"),
            )
        }
    };
    let mode = effective_mode(policy, step);
    ExplainedPolicy {
        policy: policy.name.to_string(),
        mode: mode.name().to_owned(),
        shadow: mode == PolicyMode::Shadow,
        result: result.to_owned(),
        why,
        words: words + mode.suffix(),
        limited: match step {
            PolicyStep::Limits(limited) => Some(describe_key(limited, now_us, is_usage_known)),
            _ => None,
        },
    }
}

fn describe_key(
    limited: &PolicyLimits<'_>,
    now_us: Option<u64>,
    is_usage_known: bool,
) -> ExplainedKey {
    let mut statuses = limited.statuses.iter().copied();
    let limits = limited.own.limits.iter();
    let limits = limits.map(|named| match statuses.next().flatten().zip(now_us) {
        Some((status, now_us)) => {
            let described = describe_limit_status(named, &status, now_us);
            LimitDocument {
                usage: described.usage.filter(|_| is_usage_known),
                ..described
            }
        }
        None => describe_limit(named),
    });
    let blocked = limited.blocked_until_us.zip(now_us);
    ExplainedKey {
        key: limited.own.key.to_readable_string(),
        key_hash: format!("{:032x}", limited.own.key.id()),
        scope: limited.own.key.scope().name().to_owned(),
        cost: limited.cost,
        limits: limits.collect(),
        blocked_s: blocked.map(|(until, now)| micros_to_seconds(until.saturating_sub(now))),
    }
}
