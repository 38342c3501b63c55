//! A request told by hand, and what becomes of it. For `tidegate explain` and the admin port.

use super::limits;
use crate::admin::Told;
use crate::enforcer::{self, Explanation, Step};
use crate::policy::PolicyTable;
use crate::proxy::Inbound;
use crate::store::Store;
use crate::tls::Subject;
use http::{HeaderName, HeaderValue, Method, Request, Uri, request};
use serde_json::{Value, json};

/// What every policy does with a request, and what is wrong with its token.
#[derive(Debug)]
pub(crate) struct Explained<'t> {
    pub(crate) explanation: Explanation<'t>,
    pub(crate) token: Option<String>,
}

/// Why there is nothing to explain. For people.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unclear {
    /// What was told is no request.
    #[error("{0}")]
    NoRequest(String),
    /// No policy would see it.
    #[error("{0}")]
    TurnedAway(String),
}

/// What the client would get, as far as it can be told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Expected<'t> {
    Denied(&'t str),
    CannotKey(&'t str),
    /// No limit applies.
    Free,
    /// By limits that have room.
    Admitted,
    /// Where its limits stand is not known.
    Depends,
    Rejected(Vec<&'t str>),
}

/// Explains what `table` does with a request, and where its limits stand in `store`. Changes nothing.
///
/// # Errors
/// [`Unclear`], with a sentence for people.
pub(crate) async fn explain<'t>(
    store: &Store,
    table: &'t PolicyTable,
    told: &Told,
) -> Result<Explained<'t>, Unclear> {
    let mut parts = head(told).map_err(Unclear::NoRequest)?;
    let text = |text: &Option<String>| text.as_deref().map(Into::into);
    let certificate = Subject {
        san: text(&told.client_cert_san),
        cn: text(&told.client_cert_cn),
    };
    let inbound = Inbound::read(&mut parts, told.ip, table).map_err(|fault| {
        Unclear::TurnedAway(format!(
            "the request is refused before any policy sees it: {fault}"
        ))
    })?;
    let explanation =
        enforcer::explain(store, table, &inbound.facts(&parts, Some(&certificate))).await;
    Ok(Explained {
        explanation,
        token: inbound.token_fault().map(|fault| fault.to_string()),
    })
}

fn head(told: &Told) -> Result<request::Parts, String> {
    let method: Method = told
        .method
        .parse()
        .map_err(|error| format!("method {:?}: {error}", told.method))?;
    let uri: Uri = told
        .url
        .parse()
        .map_err(|error| format!("{:?} is no URL: {error}", told.url))?;
    let mut request = Request::builder().method(method);
    let mut has_host = false;
    for (name, value) in &told.headers {
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

/// `known`: where the limits stand may be believed.
pub(crate) fn expected<'t>(explanation: &Explanation<'t>, known: bool) -> Expected<'t> {
    let (mut full, mut limited) = (Vec::new(), false);
    for (policy, step) in explanation
        .steps
        .iter()
        .filter(|(policy, _)| !policy.shadow)
    {
        match step {
            Step::Denies => return Expected::Denied(&policy.name),
            Step::CannotKey(_) => return Expected::CannotKey(&policy.name),
            Step::Limits(limits) => {
                limited = true;
                let is_full = limits
                    .standings
                    .iter()
                    .any(|standing| standing.remaining < limits.cost);
                if is_full || limits.blocked_until_us.is_some() {
                    full.push(&*policy.name);
                }
            }
            _ => {}
        }
    }
    match (limited, known, full.is_empty()) {
        (false, ..) => Expected::Free,
        (true, false, _) => Expected::Depends,
        (true, true, true) => Expected::Admitted,
        (true, true, false) => Expected::Rejected(full),
    }
}

/// For programs: what every policy does, and what is to be expected. `known`: where the limits stand may be believed.
pub(crate) fn in_json(explained: &Explained<'_>, known: bool) -> Value {
    let explanation = &explained.explanation;
    let now_us = explanation.store.as_ref().ok().copied().filter(|_| known);
    let policies = explanation.steps.iter().map(|(policy, step)| {
        let (result, why) = match step {
            Step::Unmet(unmet) => ("unmet", Some(unmet.to_string())),
            Step::NotReached => ("not_reached", None),
            Step::Exempts => ("exempts", None),
            Step::Denies => ("denies", None),
            Step::Skipped => ("skipped", Some("a part of its key is missing".to_owned())),
            Step::CannotKey(fault) => ("cannot_key", Some(fault.to_string())),
            Step::Limits(_) => ("limits", None),
        };
        let mut told =
            json!({ "policy": policy.name, "shadow": policy.shadow, "result": result, "why": why });
        if let (Step::Limits(limited), Some(told)) = (step, told.as_object_mut()) {
            let blocked = limited.blocked_until_us.zip(now_us);
            let limits = limited.limits.iter().enumerate().map(|(at, named)| {
                let mut told = limits::told(named);
                if let Some((standing, now_us)) = limited.standings.get(at).zip(now_us) {
                    told.extend(limits::stands(&named.limit, standing, now_us));
                }
                Value::Object(told)
            });
            told.insert("key".to_owned(), json!(limited.key.readable()));
            told.insert("cost".to_owned(), json!(limited.cost));
            told.insert("limits".to_owned(), limits.collect());
            let blocked_s = blocked.map(|(until, now)| limits::seconds(until.saturating_sub(now)));
            told.insert("blocked_s".to_owned(), json!(blocked_s));
        }
        told
    });
    json!({
        "expected": outcome(&expected(explanation, now_us.is_some())),
        "policies": policies.collect::<Vec<_>>(),
        "store_error": explanation.store.as_ref().err().map(ToString::to_string),
        "token_fault": explained.token,
    })
}

/// The same of a request that no policy sees.
pub(crate) fn turned_away(why: &str) -> Value {
    json!({ "expected": { "status": 400, "why": why }, "policies": [] })
}

fn outcome(expected: &Expected<'_>) -> Value {
    match expected {
        Expected::Denied(policy) => json!({ "status": 403, "decision": "denied", "by": [policy] }),
        Expected::CannotKey(policy) => {
            json!({ "status": 400, "decision": "malformed", "by": [policy] })
        }
        Expected::Rejected(policies) => {
            json!({ "status": 429, "decision": "rejected", "by": policies })
        }
        Expected::Free => json!({ "decision": "allowed", "why": "no limit applies" }),
        Expected::Admitted => json!({ "decision": "allowed" }),
        Expected::Depends => {
            json!({ "decision": null, "why": "where the limits stand is not known" })
        }
    }
}
