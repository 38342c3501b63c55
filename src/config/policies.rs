//! Builds policies from `[[policy]]` tables.

mod amounts;
mod calendar;
mod conflicts;
pub(super) mod context;
mod cost;
mod counters;
mod lease;
mod limits;
mod match_conditions;
mod overrides;
mod quota;
mod reject_response;
mod shards;

pub(super) use limits::is_concurrency_limit;

use super::describe::{self, PolicyDescription};
use super::diagnostic::SourceSpan;
use super::keywords::PolicyActionKind;
use super::table_reader::{TableReader, report};
use super::values;
use crate::limiter::CounterScope;
use crate::policy::{OnStoreFailure, Policy, PolicyAction, PolicyMode, RejectResponse};
use conflicts::PolicyKind;
use context::{PolicyContext, PolicyWithReader};
use quota::build_quota;
use reject_response::build_reject_response;
use std::collections::BTreeMap;

/// Builds and describes all policies in file order. Policies with `mode = "off"` are validated and
/// described, but not returned.
pub(super) fn build_policies<'a>(
    tables: impl Iterator<Item = TableReader<'a>>,
    context: &PolicyContext,
) -> (Vec<PolicyWithReader<'a>>, Vec<PolicyDescription>) {
    let mut names = BTreeMap::new();
    let (mut spanned_policies, mut descriptions) = (Vec::new(), Vec::new());
    for reader in tables {
        reject_duplicate_name(&reader, &mut names);
        let mode: Option<Option<PolicyMode>> = reader.read("mode");
        let is_off = mode == Some(None);
        let mode = mode.flatten().unwrap_or(PolicyMode::Enforce);
        let Some(policy) = build_policy(&reader, context, mode) else {
            continue;
        };
        descriptions.push(describe::describe_policy(&policy, &reader, is_off));
        if !is_off {
            spanned_policies.push(PolicyWithReader { policy, reader });
        }
    }
    counters::check_shared_counters(&spanned_policies);
    (spanned_policies, descriptions)
}

/// Reports a name that another policy has. The names of disabled and invalid policies count.
fn reject_duplicate_name(reader: &TableReader<'_>, names: &mut BTreeMap<String, SourceSpan>) {
    let Some(item) = reader.get("name") else {
        return;
    };
    let name = item.value.as_str().unwrap_or_default();
    if let Some(first) = names.get(name) {
        let problem = format!("another policy has this name, at {first}; expected a unique name");
        item.report_error::<()>(problem);
    } else if !name.is_empty() {
        names.insert(name.to_owned(), item.source_span());
    }
}

fn build_policy(
    reader: &TableReader<'_>,
    context: &PolicyContext,
    mode: PolicyMode,
) -> Option<Policy> {
    let name = reader.get_text("name", values::parse_name);
    let action_kind: PolicyActionKind = reader.read("action")?;
    let conditions = reader.get_optional_table("match");
    let conditions = conditions.map(|table| match_conditions::build_matcher(&table, context));
    let matches_descriptors = conditions
        .as_ref()
        .is_some_and(|matcher| matcher.is_for_descriptors());
    report! { reader;
        Error("mode") if mode == PolicyMode::Mark && action_kind == PolicyActionKind::Allow => "a policy with action = \"allow\" has no limit to mark; expected \"enforce\", \"shadow\" or \"off\"";
    }
    let is_instance_scoped = reader
        .get("scope")
        .is_some_and(|item| item.value.as_str() == Some(CounterScope::Instance.name()));
    let on_store_failure = if is_instance_scoped {
        // Redis does not decide this policy.
        OnStoreFailure::Open
    } else {
        read_store_failure_mode(reader, context, matches_descriptors)
    };
    let kind = PolicyKind {
        mode,
        matches_descriptors,
        on_store_failure,
    };
    let action: &str = action_kind.into();
    for key in reader.present_keys().filter(|key| key.is_of_quota) {
        report! { reader;
            Error(key.name) if action_kind != PolicyActionKind::Limit => "a policy with action = \"{action}\" has no quota; expected no such key";
        }
    }
    let mut action = match action_kind {
        PolicyActionKind::Limit => {
            build_quota(reader, context, name.as_deref().unwrap_or("policy"), kind)
                .map(|quota| PolicyAction::Limit(Box::new(quota)))
        }
        PolicyActionKind::Allow => Some(PolicyAction::Allow),
        PolicyActionKind::Deny => Some(PolicyAction::Deny),
    };
    let reject_response = build_reject(reader, action_kind, matches_descriptors);
    let is_reported = reader.read("report");
    if let (Some(PolicyAction::Limit(quota)), Some(false)) = (&mut action, is_reported) {
        quota.hide_limits();
    }
    Some(Policy {
        priority: reader.read("priority")?,
        matcher: conditions.unwrap_or_default(),
        mode,
        is_reported: is_reported?,
        on_store_failure,
        reject_response,
        // Unwrapped last, so that all errors of the policy are reported before it is dropped.
        action: action?,
        name: name?.into(),
    })
}

/// Reads `reject`: the response to requests that the policy rejects.
fn build_reject(
    reader: &TableReader<'_>,
    action_kind: PolicyActionKind,
    matches_descriptors: bool,
) -> Option<RejectResponse> {
    let table = reader.get_optional_table("reject")?;
    report! { reader;
        Error("reject") if action_kind == PolicyActionKind::Allow => "a policy with action = \"allow\" rejects no request";
    }
    report! { table;
        Error("status") if matches_descriptors && table.contains_key("status") => "Envoy sets the status; expected no status here, but rate_limited_status in Envoy's filter";
    }
    build_reject_response(&table)
}

/// Reads `on_store_failure`. Envoy has its own failure mode (`failure_mode_deny`), so a descriptor
/// policy either decides locally or returns an error to Envoy.
fn read_store_failure_mode(
    reader: &TableReader<'_>,
    context: &PolicyContext,
    matches_descriptors: bool,
) -> OnStoreFailure {
    let configured: Option<OnStoreFailure> = reader.read("on_store_failure");
    let effective = configured.unwrap_or(context.on_store_failure);
    if !matches_descriptors {
        return effective;
    }
    report! { reader;
        Error("on_store_failure") if configured.is_some_and(|mode| mode != OnStoreFailure::Local) => "the call returns UNAVAILABLE, and Envoy's failure_mode_deny decides; expected \"local\" or no such key";
    }
    match effective {
        OnStoreFailure::Local => OnStoreFailure::Local,
        OnStoreFailure::Open | OnStoreFailure::Closed => OnStoreFailure::Closed,
    }
}
