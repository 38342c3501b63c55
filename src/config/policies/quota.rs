//! The quota of a policy: key, cost, limits, overrides and their options.

use super::context::PolicyContext;
use super::cost::{build_cost, reject_cost_above_cold_capacity, warn_if_cost_exceeds_capacity};
use super::lease;
use super::limits::{build_limits, is_concurrency_limit, to_micros};
use super::match_conditions::NO_TRUSTED_TOKENS_ERROR;
use super::overrides::build_overrides;
use super::restrictions::reject_settings_without_response;
use super::scope::{build_scope, reject_uncounted_rejections};
use super::shards::check_shards;
use crate::config::keywords::MISSING_KEY_MODES;
use crate::config::table_reader::TableReader;
use crate::config::values::parse_name;
use crate::limiter::{Algorithm, CounterScope, Limit};
use crate::policy::{
    CostSource, KeyComponent, KeyPart, KeyTemplate, LimitOverrides, PolicyMode, Quota,
};

/// Builds the quota of a policy with action `limit`.
pub(super) fn build_quota(
    reader: &TableReader<'_>,
    context: &PolicyContext,
    name: &str,
    mode: PolicyMode,
) -> Option<Quota> {
    let parts = read_key_components(reader, context);
    // An invalid part is left out of `key`, so overrides cannot be compared with it.
    let all_parts_valid = parts.len() == reader.get_items("key").len();
    let key = KeyTemplate::from_components(parts, context.key_hasher.clone())
        .with_scope(build_scope(reader))
        .with_counter(read_counter(reader));
    // Policies that share a counter have the same names for its limits.
    let limit_name = key.counter_name().unwrap_or(name).to_owned();
    let cost = build_cost(reader);
    reject_settings_without_response(reader);
    let limits = build_limits(reader, context, &limit_name);
    if cost.as_ref().is_some_and(|cost| cost.min_units() == 0) {
        reader.report_warning("cost", "requests with cost 0 are never limited");
    }
    if let (Some(CostSource::Estimate(_)), Some(limits)) = (&cost, &limits)
        && limits.iter().all(is_concurrency_limit)
    {
        reader.report_error("cost", "never settled: a request takes one concurrency slot, whatever its cost; expected another limit too");
    }
    let overrides = build_overrides(
        reader,
        context,
        &limit_name,
        all_parts_valid.then_some(&key),
    );
    let overrides = LimitOverrides::new(name, &key, overrides);
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
    if key.scope() == CounterScope::Instance && count_rejected == Some(true) {
        reject_uncounted_rejections(reader, mode, &overrides);
    }
    let shards = reader.get_integer("shards").unwrap_or(1);
    if shards > 1 {
        check_shards(reader, context, mode, shards, cost.as_ref(), all_limits());
    }
    let quota = Quota {
        key,
        lease: None,
        block: build_block(reader, mode, &overrides),
        missing_key: reader
            .get_keyword("missing_key", &MISSING_KEY_MODES)
            .unwrap_or(context.missing_key),
        count_rejected: count_rejected?,
        shards,
        cost: cost?,
        limits: limits?,
        overrides,
        is_dynamic: reader.get_bool("dynamic").unwrap_or(false),
    };
    Some(Quota {
        lease: lease::build_lease(reader, &quota, mode, context.uses_memory_store),
        ..quota
    })
}

/// Reads the name of the counter that the policy shares with others.
fn read_counter(reader: &TableReader<'_>) -> Option<String> {
    let counter = reader.get_parsed("counter", parse_name)?;
    if reader.get_bool("dynamic") == Some(true) {
        reader.report_error(
            "dynamic",
            "not with counter: an override has the name of one policy, and a key of this counter belongs to several; expected false, or [[policy.override]] in all of them",
        );
    }
    Some(counter)
}

/// Reads the parts of the key. With several issuers, claims have theirs in the value, unless the
/// issuer is a part itself.
fn read_key_components(reader: &TableReader<'_>, context: &PolicyContext) -> Vec<KeyComponent> {
    let mut parts = reader.get_list("key", |text| parse_key_component(text, context));
    let is_issuer =
        |one: &KeyComponent| matches!(&one.part, KeyPart::Claim(name) if name.is_issuer());
    if !context.issuers.is_empty() && !parts.iter().any(is_issuer) {
        let parts = parts.iter_mut().map(|one| &mut one.part);
        parts.for_each(|part| part.set_issuers(&context.issuers));
    }
    parts
}

fn parse_key_component(text: &str, context: &PolicyContext) -> Result<KeyComponent, String> {
    let component = KeyComponent::parse(text, &context.path)?;
    let is_claim = |part: &KeyPart| matches!(part, KeyPart::Claim(_));
    let reads_claim = component.part.alternatives().any(is_claim);
    match reads_claim && context.claim_trust.is_none() {
        true => Err(NO_TRUSTED_TOKENS_ERROR.to_owned()),
        false => Ok(component),
    }
}

/// Builds the block of `block_for`.
fn build_block(
    reader: &TableReader<'_>,
    mode: PolicyMode,
    overrides: &LimitOverrides,
) -> Option<Limit> {
    let duration = reader.get_duration("block_for")?;
    if !mode.is_enforced() && !overrides.modes().any(PolicyMode::is_enforced) {
        reader.report_warning(
            "block_for",
            &format!(
                "without effect: a policy in mode \"{}\" blocks no key",
                mode.name()
            ),
        );
    }
    Some(Limit {
        requests: 1,
        per_us: to_micros(duration),
        algorithm: Algorithm::Block,
    })
}
