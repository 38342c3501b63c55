//! `tidegate explain`: shows which policies apply to a request and what the outcome would be.

use super::admin_client::AdminClient;
use super::flags::NO_POLICIES;
use super::limit_status;
use super::output::{CommandError, CommandOutput, block_on};
use super::overrides::store_client::StoreClient;
use super::request::RequestArguments;
use crate::admin::{
    ExpectedOutcome, ExplainRequest, ExplanationDocument, OverviewDocument, add_fields,
};
use crate::app::StoreBackend;
use crate::app::explanation;
use crate::config::{self, Config, ConfigSources, FileSource};
use crate::enforcer::{PolicyExplanation, PolicyStep};
use crate::store::StoredOverride;
use crate::text::escape_unprintable;
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
) -> Result<CommandOutput, CommandError> {
    let config = config::load(sources)?;
    let (request, mut notes) = arguments.to_request()?;
    if matches!(sources.file, FileSource::None) {
        notes.push(NO_POLICIES.to_owned());
    }
    for note in notes {
        eprintln!("note: {}", escape_unprintable(&note));
    }
    let title = format!(
        "{} {} from {}\n\n",
        request.method.escape_debug(),
        request.url.escape_debug(),
        request.peer_ip
    );
    let backend = StoreBackend::new(&config.store);
    let is_redis = backend.redis().is_some();
    block_on(async {
        let copied = if is_redis {
            Ok(())
        } else {
            copy_overrides(&config, &backend, &request).await
        };
        let mut explained =
            explanation::explain_request(&backend, &config.policy_table, &request).await?;
        clear_instance_statuses(&mut explained.explanation);
        if let Some(why) = &mut explained.store_error
            && let Some(outage_s) = outage_of_running_proxy(&config).await
        {
            why.push_str(&format!(
                "; the proxy on this machine has been without Redis for {outage_s} s"
            ));
        }
        if let Err(error) = copied {
            let why = error.cause();
            let why = format!("overrides of keys are known only to the running proxy: {why}");
            explained.store_error = Some(why);
        }
        if let (false, Some(why)) = (as_json, &explained.rejection) {
            eprint!("{title}");
            return Err(why.as_str().into());
        }
        let document = explained.describe(is_redis);
        let mut fields = json!(document);
        let request =
            json!({ "method": request.method, "url": request.url, "ip": request.peer_ip });
        add_fields(&mut fields, json!({ "request": request }));
        let text = title + &format_explanation(&document, is_redis);
        Ok(CommandOutput::new(&fields, text))
    })?
}

/// For how many seconds the running proxy has been without the store. `None` if it is not, or does
/// not answer.
async fn outage_of_running_proxy(config: &Config) -> Option<u64> {
    let client = AdminClient::from_settings(&config.admin).ok()?;
    let overview = client.get_json_at_once("/overview?seconds=1").await;
    let overview: OverviewDocument = serde_json::from_value(overview.ok()?).ok()?;
    Some(overview.store.outage?.lasts_s)
}

/// Copies the overrides of the request's keys from the memory of the running proxy to the memory
/// store of this process.
///
/// # Errors
/// A message for the user if the admin port does not answer.
async fn copy_overrides(
    config: &Config,
    backend: &StoreBackend,
    request: &ExplainRequest,
) -> Result<(), CommandError> {
    let explained = explanation::explain_request(backend, &config.policy_table, request).await?;
    for (policy, step) in &explained.explanation.steps {
        if let PolicyStep::Limits(limits) = step
            && policy.quota().is_some_and(|quota| quota.is_dynamic)
        {
            let store = StoreClient::open(config).await?;
            if let Some(stored) = store.find(&limits.own.key).await? {
                // The listed key lacks the kinds of its values.
                let key = limits.own.key.clone();
                backend
                    .memory()
                    .set_override(StoredOverride { key, ..stored });
            }
        }
    }
    Ok(())
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
            "The usage of the limits is known only to the running proxy: store.kind is \"memory\".\n",
        );
    }
    if let Some(error) = &document.store_error {
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
    let words = match (expected.decision.as_deref(), expected.status, by) {
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
