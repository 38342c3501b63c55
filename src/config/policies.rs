//! Builds policies from `[[policy]]` tables.

use super::diagnostic::SourceSpan;
use super::lints::SpannedPolicy;
use super::settings::{ALGORITHMS, MISSING_KEY_MODES, ON_STORE_FAILURE_MODES};
use super::table_reader::TableReader;
use super::{PolicyDescription, describe, leases, match_conditions};
use crate::limiter::{Algorithm, Limit, MAX_UNITS};
use crate::policy::{
    ActualCostSource, CostSource, EstimateCost, HeaderCost, KeyPart, KeyTemplate, LimitOverride,
    LimitOverrides, MissingKeyAction, NamedLimit, OnStoreFailure, Policy, PolicyAction, Quota,
    RejectResponse, client, path,
};
use http::{HeaderName, HeaderValue, StatusCode, header};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Above this, `sliding_log` needs much memory, because it keeps one entry per request.
const LARGE_SLIDING_LOG: u64 = 100_000;

/// Default lifetime of a concurrency slot that its sidecar does not renew.
const DEFAULT_SLOT_TTL: Duration = Duration::from_secs(10);

/// Settings that apply to all policies.
pub(super) struct PolicyContext {
    /// Whether counters are in a Redis Cluster.
    pub uses_redis_cluster: bool,
    pub client: client::Settings,
    pub path: path::Settings,
    pub on_store_failure: OnStoreFailure,
    pub algorithm: Algorithm,
    pub missing_key: MissingKeyAction,
    /// Whether the listener requests client certificates.
    pub requests_client_certificates: bool,
    pub uses_memory_store: bool,
    /// How token claims are trusted. `None` if they are not.
    pub claim_trust: Option<ClaimTrust>,
    /// Whether `[check]` is configured.
    pub has_ext_authz: bool,
}

/// Whether token signatures are verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClaimTrust {
    Signed,
    Unverified,
}

impl PolicyContext {
    pub(super) fn is_client_chosen(&self, part: &KeyPart) -> bool {
        let is_claim = matches!(part, KeyPart::Claim(_));
        part.is_client_chosen() || (is_claim && self.claim_trust == Some(ClaimTrust::Unverified))
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum PolicyMode {
    Enforce,
    Shadow,
    Off,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum PolicyActionKind {
    Limit,
    Allow,
    Deny,
}

/// Builds and describes all policies in file order. Policies with `mode = "off"` are validated and
/// described, but not returned.
pub(super) fn build_policies<'a>(
    tables: impl Iterator<Item = TableReader<'a>>,
    context: &PolicyContext,
) -> (Vec<SpannedPolicy<'a>>, Vec<PolicyDescription>) {
    let mut names = BTreeMap::new();
    let (mut spanned_policies, mut descriptions) = (Vec::new(), Vec::new());
    for at in tables {
        reject_duplicate_name(&at, &mut names);
        let mode = at.get_keyword("mode", &POLICY_MODES);
        let Some(policy) = build_policy(&at, context, mode == Some(PolicyMode::Shadow)) else {
            continue;
        };
        let is_off = mode == Some(PolicyMode::Off);
        let sentence = describe::describe_policy(&policy, &at, is_off);
        descriptions.push(PolicyDescription {
            policy: policy.name.clone(),
            is_off,
            sentence,
        });
        if !is_off {
            spanned_policies.push(SpannedPolicy { policy, reader: at });
        }
    }
    (spanned_policies, descriptions)
}

const POLICY_MODES: [(&str, PolicyMode); 3] = [
    ("enforce", PolicyMode::Enforce),
    ("shadow", PolicyMode::Shadow),
    ("off", PolicyMode::Off),
];

/// Reports a name that another policy has. Policies that are off or invalid count too.
fn reject_duplicate_name(reader: &TableReader<'_>, names: &mut BTreeMap<String, SourceSpan>) {
    let Some(item) = reader.get("name") else {
        return;
    };
    let Some(name) = item.value.as_str() else {
        return;
    };
    match names.get(name) {
        Some(first) => {
            item.report_error::<()>(&format!(
                "another policy has this name, at {first}; expected a unique name"
            ));
        }
        None => {
            names.insert(name.to_owned(), item.source_span());
        }
    }
}

fn build_policy(
    reader: &TableReader<'_>,
    context: &PolicyContext,
    is_shadow: bool,
) -> Option<Policy> {
    let name = reader.get_parsed("name", parse_name);
    let action_kind = reader.get_keyword(
        "action",
        &[
            ("limit", PolicyActionKind::Limit),
            ("allow", PolicyActionKind::Allow),
            ("deny", PolicyActionKind::Deny),
        ],
    )?;
    let conditions = reader.get_optional_table("match").map(|table| {
        match_conditions::build_matcher(&table, &context.path, context.claim_trust.is_some())
    });
    let matches_descriptors = conditions
        .as_ref()
        .is_some_and(|matcher| matcher.descriptor_conditions.is_some());
    let action = match action_kind {
        PolicyActionKind::Limit => {
            build_quota(reader, context, name.as_deref().unwrap_or("policy"))
                .map(|quota| PolicyAction::Limit(Box::new(quota)))
        }
        PolicyActionKind::Allow => reject_quota_keys(reader, "allow").map(|()| PolicyAction::Allow),
        PolicyActionKind::Deny => reject_quota_keys(reader, "deny").map(|()| PolicyAction::Deny),
    };
    let reject = reader.get_optional_table("reject").and_then(|table| {
        if action_kind == PolicyActionKind::Allow {
            reader.report_error("reject", "a policy with action = \"allow\" rejects no request");
        }
        if matches_descriptors && table.contains_key("status") {
            table.report_error(
                "status",
                "Envoy sets the status; expected no status here, but rate_limited_status in Envoy's filter",
            );
        }
        build_reject(
            &table,
            if action_kind == PolicyActionKind::Deny {
                StatusCode::FORBIDDEN
            } else {
                StatusCode::TOO_MANY_REQUESTS
            },
        )
    });
    if let Some(PolicyAction::Limit(quota)) = &action {
        match matches_descriptors {
            true => reject_request_only_settings(reader, quota),
            false => reject_descriptor_key_parts(reader, quota),
        }
        if context.has_ext_authz && !matches_descriptors {
            reject_response_dependent_settings(reader, quota);
        }
    }
    Some(Policy {
        priority: reader.get_integer("priority")?,
        matcher: conditions.unwrap_or_default(),
        shadow: is_shadow,
        on_store_failure: read_store_failure_mode(reader, context, matches_descriptors),
        reject_response: reject,
        // Last, so that errors in the other keys are reported first.
        action: action?,
        name: name?.into(),
    })
}

/// Reads `on_store_failure`. Envoy has its own failure mode (`failure_mode_deny`), so a descriptor
/// policy either decides locally or returns an error to Envoy.
fn read_store_failure_mode(
    reader: &TableReader<'_>,
    context: &PolicyContext,
    matches_descriptors: bool,
) -> OnStoreFailure {
    let configured = reader.get_keyword("on_store_failure", &ON_STORE_FAILURE_MODES);
    if !matches_descriptors {
        return configured.unwrap_or(context.on_store_failure);
    }
    if configured.is_some_and(|mode| mode != OnStoreFailure::Local) {
        reader.report_error(
            "on_store_failure",
            "the call returns UNAVAILABLE, and Envoy's failure_mode_deny decides; expected \"local\" or no such key",
        );
    }
    match configured.unwrap_or(context.on_store_failure) {
        OnStoreFailure::Local => OnStoreFailure::Local,
        OnStoreFailure::Open | OnStoreFailure::Closed => OnStoreFailure::Closed,
    }
}

/// Reports settings that a call of the rate-limit service does not support. Such a call has no
/// request, response or end of request, and cannot be delayed.
fn reject_request_only_settings(reader: &TableReader<'_>, quota: &Quota) {
    let expected = "expected descriptor:NAME, descriptor or const:TEXT";
    if let Some(part) = quota
        .key
        .parts()
        .iter()
        .find(|part| part.is_from_descriptor() == Some(false))
    {
        reader.report_error(
            "key",
            &format!("a call of the rate-limit service has no {part}; {expected}"),
        );
    }
    match &quota.cost {
        CostSource::Fixed(_) => {}
        CostSource::Header(_) => {
            reader.report_error("cost", "a call of the rate-limit service has no header; expected a number, which is multiplied by hits_addend");
        }
        CostSource::Estimate(_) => {
            reader.report_error("cost", "a call of the rate-limit service has no response; expected a number, which is multiplied by hits_addend");
        }
    }
    let key = if reader.contains_key("limits") {
        "limits"
    } else {
        "limit"
    };
    if all_limits(quota).any(is_concurrency_limit) {
        reader.report_error(key, "the rate-limit service does not learn when a request ends; expected no algorithm = \"concurrency\"");
    }
    if all_limits(quota).any(|named| matches!(named.limit.algorithm, Algorithm::LeakyBucket { .. }))
    {
        reader.report_error(key, "a call of the rate-limit service can't be delayed; expected another algorithm, such as \"token_bucket\" with burst = 1");
    }
}

fn all_limits(quota: &Quota) -> impl Iterator<Item = &NamedLimit> {
    quota.limits.iter().chain(
        quota
            .overrides
            .as_slice()
            .iter()
            .flat_map(|entry| &entry.limits),
    )
}

fn reject_descriptor_key_parts(reader: &TableReader<'_>, quota: &Quota) {
    if let Some(part) = quota
        .key
        .parts()
        .iter()
        .find(|part| part.is_from_descriptor() == Some(true))
    {
        reader.report_error(
            "key",
            &format!("a request has no {part}; expected domain or descriptors in match"),
        );
    }
}

/// Reports settings that need the response or the end of a request, which `[check]` never receives.
fn reject_response_dependent_settings(reader: &TableReader<'_>, quota: &Quota) {
    if quota.cost.as_estimate().is_some() {
        reader.report_error(
            "cost",
            "calls at check.address carry no response; expected no estimate, or no [check]",
        );
    }
    if all_limits(quota).any(is_concurrency_limit) {
        let key = if reader.contains_key("limits") {
            "limits"
        } else {
            "limit"
        };
        reader.report_error(key, "calls at check.address do not report the end of a request; expected no algorithm = \"concurrency\", or no [check]");
    }
}

/// Parses a name: `[A-Za-z0-9][A-Za-z0-9_.-]{0,62}`.
fn parse_name(text: &str) -> Result<String, String> {
    let starts_well = text.starts_with(|c: char| c.is_ascii_alphanumeric());
    if starts_well
        && text.len() <= 63
        && text
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"_.-".contains(&b))
    {
        return Ok(text.to_owned());
    }
    Err(
        "expected a letter or digit, then up to 62 letters, digits, \"_\", \".\" or \"-\""
            .to_owned(),
    )
}

fn reject_quota_keys(reader: &TableReader<'_>, action: &str) -> Option<()> {
    for key in [
        "key",
        "limit",
        "limits",
        "cost",
        "block_for",
        "count_rejected",
        "lease",
        "missing_key",
        "on_store_failure",
        "override",
    ] {
        if reader.contains_key(key) {
            reader.report_error(
                key,
                &format!("a policy with action = \"{action}\" has no quota; expected no such key"),
            );
        }
    }
    Some(())
}

fn build_quota(reader: &TableReader<'_>, context: &PolicyContext, name: &str) -> Option<Quota> {
    let parts = reader.get_list("key", |text| match KeyPart::parse(text, &context.path)? {
        KeyPart::Claim(_) if context.claim_trust.is_none() => {
            Err(match_conditions::NO_TRUSTED_TOKENS.to_owned())
        }
        part => Ok(part),
    });
    // An invalid part is left out of `key`, so overrides cannot be compared with it.
    let all_parts_valid = parts.len() == reader.get_items("key").len();
    let key = KeyTemplate::new(parts);
    let cost = build_cost(reader);
    let limits = build_limits(reader, context, name);
    if cost.as_ref().is_some_and(|cost| cost.min_units() == 0) {
        reader.report_warning("cost", "requests with cost 0 are never limited");
    }
    if let (Some(CostSource::Estimate(_)), Some(limits)) = (&cost, &limits)
        && limits.iter().all(is_concurrency_limit)
    {
        reader.report_error("cost", "never settled: a request takes one concurrency slot, whatever its cost; expected another limit too");
    }
    let overrides = reader.get_tables("override");
    let overrides = overrides
        .iter()
        .filter_map(|table| build_override(table, context, name, all_parts_valid.then_some(&key)));
    let overrides = LimitOverrides::new(name, overrides.collect());
    if let (Some(cost), Some(limits)) = (&cost, &limits) {
        warn_if_cost_exceeds_capacity(reader, cost.min_units(), limits);
    }
    let all_limits = || {
        limits
            .iter()
            .flatten()
            .chain(overrides.as_slice().iter().flat_map(|entry| &entry.limits))
    };
    if let Some(cost) = &cost {
        reject_cost_above_cold_capacity(reader, cost.max_units(), all_limits());
    }
    let count_rejected = reader.get_bool("count_rejected");
    if count_rejected == Some(true) && all_limits().any(is_concurrency_limit) {
        reader.report_error(
            "count_rejected",
            "algorithm = \"concurrency\" can't count rejected requests: they are not in flight; expected false",
        );
    }
    let shards = reader.get_integer("shards").unwrap_or(1);
    if shards > 1 {
        check_shards(reader, context, shards, cost.as_ref(), all_limits());
    }
    let block_for = reader.get_duration("block_for");
    if block_for.is_some() && reader.get_keyword("mode", &POLICY_MODES) == Some(PolicyMode::Shadow)
    {
        reader.report_warning("block_for", "without effect: a shadow policy blocks no key");
    }
    let quota = Quota {
        key,
        lease: None,
        block: block_for.map(|time| Limit {
            requests: 1,
            per_us: to_micros(time),
            algorithm: Algorithm::Block,
        }),
        missing_key: reader
            .get_keyword("missing_key", &MISSING_KEY_MODES)
            .unwrap_or(context.missing_key),
        count_rejected: count_rejected?,
        shards,
        cost: cost?,
        limits: limits?,
        overrides,
    };
    let is_shadow = reader.get_keyword("mode", &POLICY_MODES) == Some(PolicyMode::Shadow);
    Some(Quota {
        lease: leases::build_lease(reader, &quota, is_shadow, context.uses_memory_store),
        ..quota
    })
}

/// Checks the settings of a sharded policy. One shard decides each request, so settings that need
/// all counters of a key are errors.
fn check_shards<'a>(
    reader: &TableReader<'_>,
    context: &PolicyContext,
    shards: u16,
    cost: Option<&CostSource>,
    limits: impl Iterator<Item = &'a NamedLimit> + Clone,
) {
    if !context.uses_redis_cluster {
        reader.report_warning("shards", "without effect: sharding needs a Redis Cluster");
    }
    if reader.get_keyword("mode", &POLICY_MODES) == Some(PolicyMode::Shadow) {
        reader.report_warning(
            "shards",
            "a shadow policy asks only one shard, so it reports more rejections than enforcement would cause",
        );
    }
    let store_failure_mode = reader
        .get_keyword("on_store_failure", &ON_STORE_FAILURE_MODES)
        .unwrap_or(context.on_store_failure);
    if context.uses_redis_cluster && store_failure_mode == OnStoreFailure::Local {
        let expected = "expected on_store_failure = \"open\" or \"closed\"";
        reader.report_error(
            "shards",
            &format!("usage during an outage is written back to one counter; {expected}"),
        );
    }
    let least = |limit: &Limit| match limit.algorithm {
        Algorithm::TokenBucket { burst, .. } => limit.requests.min(burst),
        _ => limit.requests,
    };
    if let Some(few) = limits
        .clone()
        .find(|named| least(&named.limit) < u64::from(shards))
    {
        let most = least(&few.limit);
        reader.report_error(
            "shards",
            &format!(
                "each shard needs one unit, and the limit \"{}\" has {most}; expected at most {most}",
                few.name
            ),
        );
    } else if let Some(few) = limits.clone().find(|named| {
        least(&named.limit) / u64::from(shards) < cost.map_or(0, CostSource::max_units)
    }) {
        reader.report_warning(
            "shards",
            &format!(
                "a request may cost more than one shard of the limit \"{}\" has; such requests are always rejected",
                few.name
            ),
        );
    }
    for (algorithm, is_used) in [
        ("concurrency", limits.clone().any(is_concurrency_limit)),
        (
            "leaky_bucket",
            limits
                .clone()
                .any(|named| matches!(named.limit.algorithm, Algorithm::LeakyBucket { .. })),
        ),
    ] {
        if is_used {
            reader.report_error(
                "shards",
                &format!(
                    "algorithm = \"{algorithm}\" can't be sharded; expected another algorithm, or no shards"
                ),
            );
        }
    }
    for key in ["block_for", "count_rejected"] {
        if reader.contains_key(key)
            && reader
                .get(key)
                .is_some_and(|item| item.value.to_bool() != Some(false))
        {
            reader.report_error(
                key,
                "needs one counter that sees every rejection; expected no shards",
            );
        }
    }
    if reader.contains_key("lease") {
        reader.report_error(
            "lease",
            "units are leased from one counter; expected no shards",
        );
    }
    if cost.is_some_and(|cost| cost.as_estimate().is_some()) {
        reader.report_error(
            "shards",
            "an estimate is settled on one counter; expected no shards",
        );
    }
}

/// Builds the cost: a number, a request header, or an estimate settled by the response.
fn build_cost(reader: &TableReader<'_>) -> Option<CostSource> {
    if reader
        .get("cost")
        .is_none_or(|item| item.value.as_dict().is_none())
    {
        return get_units(reader, "cost").map(CostSource::Fixed);
    }
    let table = reader.get_optional_table("cost")?;
    if table.contains_key("estimate") || table.contains_key("actual") {
        return build_estimate_cost(&table);
    }
    let name = table.get_parsed("header", match_conditions::parse_header_name);
    let (default, min, max) = (
        get_units(&table, "default")?,
        get_units(&table, "min")?,
        get_units(&table, "max")?,
    );
    if min > max {
        table.report_error("min", &format!("more than max; expected at most {max}"));
    } else if default < min {
        table.report_warning(
            "default",
            "less than min: requests without the header cost less than any with it",
        );
    }
    Some(CostSource::Header(Box::new(HeaderCost {
        name: name?,
        default,
        min,
        max,
    })))
}

fn build_estimate_cost(reader: &TableReader<'_>) -> Option<CostSource> {
    for key in ["header", "default", "min", "max"] {
        if reader.contains_key(key) {
            reader.report_error(
                key,
                "not with an estimate; expected either header, or estimate and actual",
            );
        }
    }
    let (estimate, actual) = (
        get_units(reader, "estimate"),
        reader.get_parsed("actual", ActualCostSource::parse),
    );
    Some(CostSource::Estimate(Arc::new(EstimateCost {
        estimate: estimate?,
        actual_source: actual?,
    })))
}

/// The schema lets only what isn't negative through.
fn get_units(reader: &TableReader<'_>, name: &str) -> Option<u64> {
    reader
        .get_integer::<i64>(name)
        .and_then(|units| u64::try_from(units).ok())
}

/// Reports a cost above the capacity of a cold bucket: such requests would never warm it up.
fn reject_cost_above_cold_capacity<'a>(
    reader: &TableReader<'_>,
    cost: u64,
    mut limits: impl Iterator<Item = &'a NamedLimit>,
) {
    let is_too_small =
        |limit: &Limit| limit.capacity() > limit.cold_capacity() && limit.cold_capacity() < cost;
    if let Some(limit) = limits.find(|limit| is_too_small(&limit.limit)) {
        let most = limit.limit.cold_capacity();
        reader.report_error("cost", &format!("a request may cost {cost}, but before its warm_up the limit \"{}\" has {most}, a third of burst; expected at most {most}", limit.name));
    }
}

/// Whether the limit counts requests in flight. A request takes one slot, whatever its cost.
fn is_concurrency_limit(named: &NamedLimit) -> bool {
    matches!(named.limit.algorithm, Algorithm::Concurrency { .. })
}

fn warn_if_cost_exceeds_capacity(reader: &TableReader<'_>, cost: u64, limits: &[NamedLimit]) {
    let mut limits = limits.iter().filter(|named| !is_concurrency_limit(named));
    if let Some(limit) =
        limits.find(|limit| limit.limit.requests > 0 && limit.limit.capacity() < cost)
    {
        let most = limit.limit.capacity();
        reader.report_warning(
            "cost",
            &format!("rejects every request: each costs at least {cost}, and the limit has {most}"),
        );
    }
}

/// Builds the limits of a policy or of an override. Names and counters must be distinct.
fn build_limits(
    reader: &TableReader<'_>,
    context: &PolicyContext,
    policy: &str,
) -> Option<Vec<NamedLimit>> {
    let tables = match (reader.contains_key("limit"), reader.contains_key("limits")) {
        (true, true) => {
            reader.report_error(
                "limits",
                "both limit and limits are set; expected one of them",
            );
            return None;
        }
        (false, false) => {
            reader.report_error(
                "limit",
                "missing; expected a limit such as { requests = 100, per = \"1m\" }",
            );
            return None;
        }
        (true, false) => reader.get_optional_table("limit").into_iter().collect(),
        (false, true) => reader.get_tables("limits"),
    };
    if tables.is_empty()
        && reader
            .get("limits")
            .is_some_and(|item| item.value.as_array().is_some_and(<[_]>::is_empty))
    {
        reader.report_error(
            "limits",
            "expected at least one limit such as { requests = 100, per = \"1m\" }",
        );
    }
    let mut limits: Vec<NamedLimit> = Vec::new();
    let mut unnamed = 0_usize;
    for table in &tables {
        let name = table.get_parsed("name", parse_name).unwrap_or_else(|| {
            unnamed += 1;
            if unnamed == 1 {
                policy.to_owned()
            } else {
                format!("{policy}-{unnamed}")
            }
        });
        let Some(limit) = build_limit(table, context) else {
            continue;
        };
        if limits.iter().any(|other| *other.name == *name) {
            table.report_error(
                "name",
                &format!(
                    "another limit of this policy has the name \"{name}\"; expected a unique name"
                ),
            );
        }
        if limits
            .iter()
            .any(|other| other.limit.counter_identity() == limit.counter_identity())
        {
            table.report_error("per", "another limit of this policy has the same period and algorithm, so they would share a counter; expected another period or algorithm");
        }
        limits.push(NamedLimit {
            name: name.into(),
            unit: table.get_parsed("unit", parse_unit),
            limit,
        });
    }
    (limits.len() == tables.len() && !limits.is_empty()).then_some(limits)
}

fn parse_unit(text: &str) -> Result<Box<str>, String> {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"_-".contains(&byte);
    if (1..=32).contains(&text.len()) && text.bytes().all(fits) {
        return Ok(text.into());
    }
    Err("expected 1 to 32 letters, digits, \"_\" or \"-\"".to_owned())
}

fn build_limit(reader: &TableReader<'_>, context: &PolicyContext) -> Option<Limit> {
    let requests = reader
        .get_integer::<i64>("requests")
        .and_then(|requests| u64::try_from(requests).ok());
    let (per, lease_ttl) = (reader.get_duration("per"), reader.get_duration("lease_ttl"));
    let configured_algorithm = reader.get_keyword("algorithm", &ALGORITHMS);
    let offset = reader.get_duration("offset");
    if configured_algorithm.is_none() && reader.contains_key("algorithm") {
        // Without a valid algorithm, the other keys cannot be checked.
        return None;
    }
    let (buckets, burst) = (get_units(reader, "buckets"), get_units(reader, "burst"));
    let (max_delay, max_duration) = (
        reader.get_duration("max_delay"),
        reader.get_duration("max_duration"),
    );
    let algorithm = match configured_algorithm.unwrap_or(context.algorithm) {
        algorithm @ (Algorithm::SlidingLog | Algorithm::Block) => algorithm,
        Algorithm::SlidingWindow { buckets: usual } => Algorithm::SlidingWindow {
            buckets: buckets.unwrap_or(usual),
        },
        Algorithm::FixedWindow { .. } => Algorithm::FixedWindow {
            offset_us: to_micros(offset.unwrap_or_default()),
        },
        Algorithm::TokenBucket { .. } => {
            let warm_up_us = reader.get_duration("warm_up").map_or(0, to_micros);
            Algorithm::TokenBucket {
                burst: burst.or(requests).unwrap_or_default(),
                warm_up_us,
            }
        }
        Algorithm::LeakyBucket {
            max_delay_us: usual,
        } => Algorithm::LeakyBucket {
            max_delay_us: max_delay.map_or(usual, to_micros),
        },
        Algorithm::Concurrency { .. } => Algorithm::Concurrency {
            max_duration_us: to_micros(max_duration.unwrap_or_default()),
        },
    };
    let counts_slots = matches!(algorithm, Algorithm::Concurrency { .. });
    for (key, owner, is_allowed) in [
        (
            "buckets",
            "sliding_window",
            matches!(algorithm, Algorithm::SlidingWindow { .. }),
        ),
        (
            "offset",
            "fixed_window",
            matches!(algorithm, Algorithm::FixedWindow { .. }),
        ),
        (
            "burst",
            "token_bucket",
            matches!(algorithm, Algorithm::TokenBucket { .. }),
        ),
        (
            "warm_up",
            "token_bucket",
            matches!(algorithm, Algorithm::TokenBucket { .. }),
        ),
        (
            "max_delay",
            "leaky_bucket",
            matches!(algorithm, Algorithm::LeakyBucket { .. }),
        ),
        ("lease_ttl", "concurrency", counts_slots),
        ("max_duration", "concurrency", counts_slots),
    ] {
        if reader.contains_key(key) && !is_allowed {
            reader.report_error(
                key,
                &format!(
                    "only for algorithm = \"{owner}\"; expected that algorithm, or no such key"
                ),
            );
        }
    }
    let per = match (counts_slots, reader.contains_key("per")) {
        (true, is_written) => {
            if is_written {
                reader.report_error(
                    "per",
                    "not for algorithm = \"concurrency\", which counts requests in flight; expected no such key",
                );
            }
            Some(lease_ttl.unwrap_or(DEFAULT_SLOT_TTL))
        }
        (false, true) => per,
        (false, false) => {
            reader.report_error("per", "missing; expected a duration such as \"1m\"");
            None
        }
    };
    if let (Some(offset), Some(per)) = (offset, per)
        && offset >= per
    {
        reader.report_error("offset", "expected less than per");
    }
    if let (Some(requests), Some(per)) = (requests, per) {
        reject_inexact_limit(reader, algorithm, requests, to_micros(per));
    }
    match requests {
        Some(0) => reader.report_warning("requests", "0 rejects every request"),
        Some(requests) if requests > LARGE_SLIDING_LOG && algorithm == Algorithm::SlidingLog => reader.report_warning(
            "requests",
            "sliding_log keeps one entry per request; \"sliding_window\" needs less memory for a large limit",
        ),
        _ => {}
    }
    Some(Limit {
        requests: requests?,
        per_us: to_micros(per?),
        algorithm,
    })
}

/// Reports a limit whose bucket arithmetic would exceed the integers that a double represents exactly.
fn reject_inexact_limit(
    reader: &TableReader<'_>,
    algorithm: Algorithm,
    requests: u64,
    per_us: u64,
) {
    let (key, most) = match algorithm {
        Algorithm::TokenBucket { burst, .. } if burst > requests => {
            ("burst", MAX_UNITS / per_us.max(1))
        }
        Algorithm::TokenBucket { .. } => ("requests", MAX_UNITS / per_us.max(1)),
        Algorithm::LeakyBucket { max_delay_us } => (
            "requests",
            (MAX_UNITS - per_us.min(MAX_UNITS)) / max_delay_us.max(1),
        ),
        _ => return,
    };
    let burst = if let Algorithm::TokenBucket { burst, .. } = algorithm {
        burst
    } else {
        0
    };
    if burst.max(requests) > most {
        let interval = if burst > 0 { "a period" } else { "a max_delay" };
        reader.report_error(
            key,
            &format!(
                "too large to count exactly with {interval} this long; expected at most {most}"
            ),
        );
    }
}

/// Converts a duration to microseconds. The schema bounds durations to 400 days.
fn to_micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

fn build_override(
    reader: &TableReader<'_>,
    context: &PolicyContext,
    policy: &str,
    key: Option<&KeyTemplate>,
) -> Option<LimitOverride> {
    let limits = build_limits(reader, context, policy);
    if !reader.contains_key("key") {
        reader.report_error(
            "key",
            "missing; expected one value per position of the policy's key",
        );
        return None;
    }
    let items = reader.get_items("key");
    let key = key?;
    if items.len() != key.value_count() {
        let width = key.value_count();
        reader.report_error(
            "key",
            &format!(
                "{} values; expected {width}, as many as the policy's key has positions",
                items.len()
            ),
        );
        return None;
    }
    let mut values = Vec::new();
    for (position, item) in items.iter().enumerate() {
        match item.value.as_str() {
            Some("*") => values.push(None),
            Some(text) => {
                match key.canonicalize_value(position, text, &context.client, &context.path) {
                    Ok(value) => values.push(Some(value)),
                    Err(reason) => return item.report_error(&reason),
                }
            }
            None => return item.report_error("expected a string; \"*\" matches any value"),
        }
    }
    Some(LimitOverride {
        values,
        limits: limits?,
    })
}

fn build_reject(reader: &TableReader<'_>, status: StatusCode) -> Option<RejectResponse> {
    let status = reader
        .get_integer::<u16>("status")
        .and_then(|code| StatusCode::from_u16(code).ok())
        .unwrap_or(status);
    let headers = reader
        .get_entries("headers")
        .into_iter()
        .filter_map(|(name, item)| {
            let Some(text) = item.value.as_str() else {
                return item.report_error("expected a string");
            };
            match (parse_reject_header(name), HeaderValue::from_str(text)) {
                (Ok(name), Ok(value)) => Some((name, value)),
                (Err(reason), _) => item.report_error(&reason),
                (_, Err(_)) => item.report_error("expected a valid header value"),
            }
        });
    Some(RejectResponse {
        status,
        headers: headers.collect(),
        body: reader.get_string("body")?.into(),
        content_type: reader.get_parsed("content_type", |text| {
            match HeaderValue::from_str(text) {
                Ok(value) if text.contains('/') => Ok(value),
                _ => Err("expected a media type such as \"application/json\"".to_owned()),
            }
        })?,
    })
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
    match match_conditions::parse_header_name(text)? {
        header::CONTENT_TYPE => Err("expected the key content_type instead".to_owned()),
        name if RESERVED_HEADERS.contains(&name) => Err(format!("{name} is set by tidegate")),
        name => Ok(name),
    }
}
