//! `tidegate explain`: shows which policies apply to a request and what the outcome would be.

use super::limit_status;
use super::output::{CommandError, block_on, format_json};
use super::request::RequestArguments;
use crate::admin::{ExplainRequest, add_fields};
use crate::app::StoreBackend;
use crate::app::explanation::{self, ExpectedOutcome, ExplainError, ExplainedRequest};
use crate::config::{self, Config, ConfigSources, StoreSettings};
use crate::enforcer::{PolicyExplanation, PolicyStep};
use serde_json::{Value, json};

/// Explains the matching policies, the keys and limits of the request, and their state, as text or
/// as the JSON of the admin API. Notes about ignored parts of the request go to stderr.
///
/// # Errors
/// A message for the user if the configuration or the request is invalid.
#[allow(
    clippy::print_stderr,
    reason = "notes must not mix with the result on stdout"
)]
pub(super) fn explain_request(
    sources: &ConfigSources,
    arguments: &RequestArguments,
    as_json: bool,
) -> Result<String, CommandError> {
    let config = config::load(sources)?;
    let (request, notes) = arguments
        .to_request()
        .map_err(|error| format!("error: {error}\n"))?;
    for note in notes {
        eprintln!("note: {}", note.escape_debug());
    }
    let title = format!(
        "{} {} from {}\n\n",
        request.method.escape_debug(),
        request.url.escape_debug(),
        request.peer_ip
    );
    let printed: Result<String, String> = block_on(async {
        let store = StoreBackend::new(&config.store).open_for_inspection().await;
        let mut explained =
            explanation::explain_request(&store, &config.policy_table, &request).await;
        if let Ok(explained) = &mut explained {
            clear_instance_statuses(&mut explained.explanation);
        }
        match explained {
            Ok(explained) if as_json => Ok(explanation_to_json(&config, &request, &explained)),
            Ok(explained) => {
                let token = explained
                    .token_error
                    .as_ref()
                    .map_or_else(String::new, |error| {
                        format!("The request's token is not used: {error}.\n")
                    });
                Ok(title + &format_explanation(&config, &explained) + &token)
            }
            Err(ExplainError::InvalidRequest(why)) => Err(format!("error: {why}\n")),
            Err(ExplainError::RequestRejected(why)) if as_json => Ok(format_json(
                &add_request_to_json(&request, explanation::rejected_request_to_json(&why)),
            )),
            Err(ExplainError::RequestRejected(why)) => Err(format!("{title}error: {why}\n")),
        }
    })?;
    Ok(printed?)
}

/// Removes the statuses of counters that only the instances know.
fn clear_instance_statuses(explanation: &mut PolicyExplanation<'_>) {
    for (_, step) in &mut explanation.steps {
        if let PolicyStep::Limits(limits) = step
            && limits.key.is_instance_scoped()
        {
            limits.statuses.clear();
            limits.blocked_until_us = None;
        }
    }
}

fn explanation_to_json(
    config: &Config,
    request: &ExplainRequest,
    explained: &ExplainedRequest<'_>,
) -> String {
    // The memory store of this process does not share counters with the proxy.
    let is_store_known = matches!(config.store, StoreSettings::Redis(_));
    let explanation = explanation::explanation_to_json(explained, is_store_known);
    format_json(&add_request_to_json(request, explanation))
}

fn add_request_to_json(request: &ExplainRequest, mut explanation: Value) -> Value {
    let described = json!({ "method": request.method, "url": request.url, "ip": request.peer_ip });
    add_fields(&mut explanation, json!({ "request": described }));
    explanation
}

fn format_explanation(config: &Config, explained: &ExplainedRequest<'_>) -> String {
    let explanation = &explained.explanation;
    let is_redis = matches!(config.store, StoreSettings::Redis(_));
    let now_us = explanation::status_time_us(explanation).filter(|_| is_redis);
    let mut text = String::new();
    for (policy, step) in &explanation.steps {
        let mode = explanation::effective_mode(policy, step).suffix();
        let result = match step {
            PolicyStep::NotMatched(unmet) => unmet.to_string(),
            PolicyStep::NotReached => "not reached".to_owned(),
            PolicyStep::Exempts => "matches: exempt".to_owned(),
            PolicyStep::Denies => "matches: denied".to_owned(),
            PolicyStep::Skipped => "matches, but a part of its key is missing: skipped".to_owned(),
            PolicyStep::InvalidKey(error) => format!("matches, but {error}"),
            PolicyStep::ExemptsKey(key) => {
                format!("matches: key {key}, exempt from this policy by an override")
            }
            PolicyStep::DeniesKey(key) => format!("matches: key {key}, denied by an override"),
            PolicyStep::Off(key) => {
                format!("matches: key {key}, policy is off for this key (override)")
            }
            PolicyStep::Limits(limits) => {
                let scope = match limits.key.is_instance_scoped() {
                    true => ", counted per instance",
                    false => "",
                };
                format!("matches: key {}, cost {}{scope}", limits.key, limits.cost)
            }
        };
        text.push_str(&format!("  {:<16} {result}{mode}\n", policy.name));
        if let PolicyStep::Limits(limits) = step {
            let hash = limits.key.id();
            text.push_str(&format!("  {:<16}   {hash:032x} in the log\n", ""));
            if let Some((until_us, now_us)) = limits.blocked_until_us.zip(now_us) {
                let remaining = limit_status::format_wait(until_us.saturating_sub(now_us));
                text.push_str(&format!("  {:<16}   blocked for {remaining}\n", ""));
            }
            for (index, named) in limits.limits.iter().enumerate() {
                let status = limits.statuses.get(index).zip(now_us);
                text.push_str(&format!(
                    "  {:<16}   {}\n",
                    "",
                    limit_status::format_limit_line(named, status)
                ));
            }
        }
    }
    text.push('\n');
    text.push_str(&describe_expected_outcome(explanation, now_us.is_some()));
    if !is_redis {
        text.push_str(
            "The state of the limits is known only to the running proxy: store.kind is \"memory\".\n",
        );
    } else if let Some(error) = explanation::describe_store_error(explained) {
        text.push_str(&format!("The state of the limits is unknown: {error}.\n"));
    }
    let mut matching = explanation.steps.iter();
    let is_counted_by_instances = matching.any(
        |(_, step)| matches!(step, PolicyStep::Limits(limits) if limits.key.is_instance_scoped()),
    );
    if is_redis && is_counted_by_instances {
        text.push_str("The state of limits with scope = \"instance\" is known only to each running proxy; send POST /explain to its admin.address.\n");
    }
    text
}

/// Describes the expected outcome for the client.
fn describe_expected_outcome(explanation: &PolicyExplanation<'_>, is_store_known: bool) -> String {
    match explanation::predict_outcome(explanation, is_store_known) {
        ExpectedOutcome::Denied(policy) => format!("Denied by {policy}: 403.\n"),
        ExpectedOutcome::CannotKey(policy) => format!("Rejected by {policy}: 400.\n"),
        ExpectedOutcome::Unlimited => "Admitted: no limit applies.\n".to_owned(),
        ExpectedOutcome::Unknown => {
            "Admitted unless one of these limits is exhausted.\n".to_owned()
        }
        ExpectedOutcome::Admitted => "Admitted.\n".to_owned(),
        ExpectedOutcome::StoreRequired(policies) => format!(
            "Rejected by {} while Redis is unavailable (on_store_failure = \"closed\"): 503.\n",
            policies.join(", ")
        ),
        ExpectedOutcome::CountedLocally(policies) if policies.is_empty() => {
            "Admitted while Redis is unavailable (on_store_failure = \"open\").\n".to_owned()
        }
        ExpectedOutcome::CountedLocally(policies) => format!(
            "Decided by each instance alone while Redis is unavailable: {}.\n",
            policies.join(", ")
        ),
        ExpectedOutcome::Rejected(policies) => {
            format!("Rejected by {}: 429.\n", policies.join(", "))
        }
    }
}
