//! `tidegate explain`: shows which policies apply to a request and what the outcome would be.

use super::limit_status;
use super::output::{CommandError, block_on, format_json};
use super::request::RequestArguments;
use crate::admin::{ExpectedOutcome, ExplanationDocument, add_fields};
use crate::app::StoreBackend;
use crate::app::explanation::{self, ExplainError};
use crate::config::{self, ConfigSources, StoreSettings};
use crate::enforcer::{PolicyExplanation, PolicyStep};
use serde_json::json;

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
        // The memory store of this process does not share counters with the proxy.
        let is_redis = matches!(config.store, StoreSettings::Redis(_));
        let (document, rejection) = match explained {
            Ok(explained) => (explained.describe(is_redis), None),
            Err(ExplainError::InvalidRequest(why)) => return Err(format!("error: {why}\n")),
            Err(ExplainError::RequestRejected(why)) => {
                let text = format!("{title}error: {why}\n");
                (explanation::describe_rejection(why), Some(text))
            }
        };
        if as_json {
            let mut fields = json!(document);
            let request =
                json!({ "method": request.method, "url": request.url, "ip": request.peer_ip });
            add_fields(&mut fields, json!({ "request": request }));
            return Ok(format_json(&fields));
        }
        match rejection {
            Some(text) => Err(text),
            None => Ok(title + &format_explanation(&document, is_redis)),
        }
    })?;
    Ok(printed?)
}

/// Removes the statuses of counters that only the instances know.
fn clear_instance_statuses(explanation: &mut PolicyExplanation<'_>) {
    for (_, step) in &mut explanation.steps {
        if let PolicyStep::Limits(limits) = step
            && limits.own.key.is_instance_scoped()
        {
            limits.statuses.clear();
            limits.blocked_until_us = None;
        }
    }
}

fn format_explanation(document: &ExplanationDocument, is_redis: bool) -> String {
    let mut text = String::new();
    let mut is_counted_by_instances = false;
    for policy in &document.policies {
        text.push_str(&format!("  {:<16} {}\n", policy.policy, policy.words));
        let Some(limited) = &policy.limited else {
            continue;
        };
        is_counted_by_instances |= limited.scope == "instance";
        let mut lines = vec![format!("{} in the log", limited.key_hash)];
        lines.extend(limited.blocked_s.map(limit_status::format_block));
        lines.extend(limited.limits.iter().map(limit_status::format_limit_status));
        for line in lines {
            text.push_str(&format!("  {:<16}   {line}\n", ""));
        }
    }
    text.push('\n');
    text.push_str(&describe_expected_outcome(&document.expected));
    if !is_redis {
        text.push_str(
            "The state of the limits is known only to the running proxy: store.kind is \"memory\".\n",
        );
    } else if let Some(error) = &document.store_error {
        text.push_str(&format!("The state of the limits is unknown: {error}.\n"));
    }
    if is_redis && is_counted_by_instances {
        text.push_str("The state of limits with scope = \"instance\" is known only to each running proxy; send POST /explain to its admin.address.\n");
    }
    if let Some(error) = &document.token_fault {
        text.push_str(&format!("The request's token is not used: {error}.\n"));
    }
    text
}

/// Describes the expected outcome for the client.
fn describe_expected_outcome(expected: &ExpectedOutcome) -> String {
    let by = expected.by.as_ref().map(|names| names.join(", "));
    let words = match (expected.decision, expected.status, by) {
        (Some("denied"), _, Some(by)) => format!("Denied by {by}: 403"),
        (Some("degraded"), Some(_), Some(by)) => format!(
            "Rejected by {by} while Redis is unavailable (on_store_failure = \"closed\"): 503"
        ),
        (Some("degraded"), _, Some(by)) => {
            format!("Decided by each instance alone while Redis is unavailable: {by}")
        }
        (Some("degraded"), ..) => {
            "Admitted while Redis is unavailable (on_store_failure = \"open\")".to_owned()
        }
        (_, Some(status), Some(by)) => format!("Rejected by {by}: {status}"),
        (None, ..) => "Admitted unless one of these limits is exhausted".to_owned(),
        _ => match &expected.why {
            Some(why) => format!("Admitted: {why}"),
            None => "Admitted".to_owned(),
        },
    };
    words + ".\n"
}
