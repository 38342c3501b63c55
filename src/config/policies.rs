//! Builds policies from `[[policy]]` tables.

mod conflicts;
mod cost;
mod counters;
mod limits;
mod match_conditions;
mod overrides;
mod quota;

pub(super) use limits::is_concurrency_limit;

use super::describe::{self, PolicyDescription};
use super::schema::PolicyActionKind;
use super::table_reader::{ConfigValue, TableReader, report};
use super::values;
use crate::limiter::{Algorithm, CounterScope};
use crate::policy::{
    KeyPart, Matcher, MissingKeyAction, OnStoreFailure, Policy, PolicyAction, PolicyMode, Quota,
    RejectResponse, ValueHasher, client, jwt, path,
};
use crate::proxy::{is_client_cert_field, is_stripped_before_policies};
use conflicts::PolicyKind;
use http::{HeaderName, HeaderValue, StatusCode, header};
use quota::build_quota;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Settings that apply to all policies.
pub(super) struct PolicyContext {
    /// Whether counters are in a Redis Cluster.
    pub(super) uses_redis_cluster: bool,
    pub(super) client: client::Settings,
    pub(super) path: path::Settings,
    pub(super) value_hasher: ValueHasher,
    /// Headers that the gateway in front always sets or removes.
    pub(super) trusted_headers: Vec<HeaderName>,
    pub(super) on_store_failure: OnStoreFailure,
    pub(super) algorithm: Algorithm,
    pub(super) missing_key: MissingKeyAction,
    /// Whether the listener requests client certificates.
    pub(super) requests_client_certificates: bool,
    pub(super) uses_memory_store: bool,
    /// How token claims are trusted. `None` if they are not.
    pub(super) claim_trust: Option<ClaimTrust>,
    pub(super) tokens: Option<jwt::Settings>,
    /// The issuers of tokens if there are several; empty otherwise.
    pub(super) issuers: Arc<[Box<str>]>,
    /// Request header that is removed before policies see it ([`PolicyTable::mark_header`]).
    ///
    /// [`PolicyTable::mark_header`]: crate::policy::PolicyTable::mark_header
    pub(super) mark_header: HeaderName,
    /// Whether `[check]` is configured.
    pub(super) has_ext_authz: bool,
}

/// Whether token signatures are verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClaimTrust {
    Signed,
    Unverified,
}

/// A policy with the reader of its table, for diagnostics.
pub(super) struct PolicyWithReader<'a> {
    pub(super) policy: Policy,
    pub(super) reader: TableReader<'a>,
}

impl PolicyContext {
    /// Whether tidegate removes the header before policies see it.
    pub(super) fn is_removed_header(&self, name: &HeaderName) -> bool {
        *name == self.mark_header
            || is_stripped_before_policies(name)
            || (is_client_cert_field(name) && !self.trusted_headers.contains(name))
    }

    pub(super) fn is_client_chosen(&self, part: &KeyPart) -> bool {
        if matches!(part, KeyPart::Alternatives(_)) {
            return part.alternatives().any(|one| self.is_client_chosen(one));
        }
        let is_claim = matches!(part, KeyPart::Claim(_));
        if matches!(part, KeyPart::Header(name) if self.trusted_headers.contains(name)) {
            return false;
        }
        part.is_client_chosen() || (is_claim && self.claim_trust == Some(ClaimTrust::Unverified))
    }
}

impl PolicyWithReader<'_> {
    pub(super) fn quota(&self) -> Option<&Quota> {
        self.policy.quota()
    }

    pub(super) fn key_parts(&self) -> impl Iterator<Item = &KeyPart> {
        self.quota().into_iter().flat_map(|quota| quota.key.parts())
    }

    /// The policy's name and position: `"login" (config.toml:12:8)`.
    pub(super) fn quote_name_and_position(&self) -> String {
        let span = self
            .reader
            .get("name")
            .map_or_else(String::new, |item| format!(" ({})", item.source_span()));
        format!("\"{}\"{span}", self.policy.name)
    }
}

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
fn reject_duplicate_name<'a>(
    reader: &TableReader<'a>,
    names: &mut BTreeMap<&'a str, ConfigValue<'a>>,
) {
    let Some(item) = reader.get("name") else {
        return;
    };
    let name = item.value.as_str().unwrap_or_default();
    if let Some(first) = names.get(name) {
        let first = first.source_span();
        let problem = format!("another policy has this name, at {first}; expected a unique name");
        item.report_error::<()>(problem);
    } else if !name.is_empty() {
        names.insert(name, item);
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
        matches_body: (conditions.iter().flat_map(Matcher::all_conditions))
            .any(|one| matches!(one.part, KeyPart::Body(_))),
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
        max_scan: reader.read("max_scan")?,
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
    let status = table.read("status");
    let status = status.and_then(|code: u16| StatusCode::from_u16(code).ok());
    let entries = table.get_entries("headers").into_iter();
    let headers = entries.filter_map(|(name, item)| {
        let Some(text) = item.value.as_str() else {
            return item.report_error("expected a string");
        };
        match (parse_reject_header(name), HeaderValue::from_str(text)) {
            (Ok(name), Ok(value)) => Some((name, value)),
            (Err(reason), _) => item.report_error(reason),
            (_, Err(_)) => item.report_error("expected a valid header value"),
        }
    });
    Some(RejectResponse {
        status,
        headers: headers.collect(),
        body: table.read::<String>("body")?.into(),
        content_type: table.get_parsed("content_type", |text| {
            match HeaderValue::from_str(text) {
                Ok(value) if text.contains('/') => Ok(value),
                _ => Err("expected a media type such as \"application/json\"".to_owned()),
            }
        })?,
    })
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

/// Parses the name of a response header. Rejects headers that tidegate sets for framing or routing.
fn parse_reject_header(text: &str) -> Result<HeaderName, String> {
    const RESERVED_HEADERS: [HeaderName; 8] = [
        header::CONNECTION,
        header::CONTENT_LENGTH,
        header::CONTENT_TYPE,
        header::TE,
        header::TRAILER,
        header::TRANSFER_ENCODING,
        header::UPGRADE,
        header::RETRY_AFTER,
    ];
    match values::parse_header_name(text)? {
        header::CONTENT_TYPE => Err("expected the key content_type instead".to_owned()),
        name if RESERVED_HEADERS.contains(&name) => Err(format!("{name} is set by tidegate")),
        name => Ok(name),
    }
}
