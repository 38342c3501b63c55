//! The quota of a policy: key, cost, limits, overrides and their options.

use super::conflicts::{PolicyKind, report_conflicts};
use super::context::PolicyContext;
use super::cost::{build_cost, reject_cost_above_cold_capacity, warn_if_cost_exceeds_capacity};
use super::lease;
use super::limits::{build_limits, to_micros};
use super::match_conditions::NO_TRUSTED_TOKENS_ERROR;
use super::overrides::build_overrides;
use super::shards::check_shards;
use crate::config::table_reader::{TableReader, report};
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
    kind: PolicyKind,
) -> Option<Quota> {
    let parts = read_key_components(reader, context);
    // An invalid part is left out of `key`, so overrides cannot be compared with it.
    let all_parts_valid = parts.len() == reader.get_items("key").len();
    let mut key = KeyTemplate::from_components(parts, context.key_hasher.clone());
    key.scope = reader.read("scope").unwrap_or_default();
    let key = key.with_counter(reader.get_text("counter", parse_name));
    let is_instance_scoped = key.scope == CounterScope::Instance;
    // Policies that share a counter have the same names for its limits.
    let limit_name = key.counter_name().unwrap_or(name).to_owned();
    let cost = build_cost(reader);
    let limits = build_limits(reader, context, &limit_name);
    report! { reader;
        Warning("on_store_failure") if is_instance_scoped && reader.contains_key("on_store_failure") => "without effect with scope = \"instance\": the counters are in this process; expected no such key";
        Warning("cost") if cost.as_ref().is_some_and(|cost| cost.min_units() == 0) => "requests with cost 0 are never limited";
    }
    let is_dynamic = reader.read("dynamic")?;
    let valid_key = all_parts_valid.then_some(&key);
    let overrides = build_overrides(reader, context, &limit_name, valid_key, is_dynamic);
    let overrides = LimitOverrides::new(name, &key, overrides);
    if let (Some(cost), Some(limits)) = (&cost, &limits) {
        warn_if_cost_exceeds_capacity(reader, cost.min_units(), limits);
    }
    // Invalid parts are left out of the quota, which serves only to report further errors then.
    let is_valid = cost.is_some() && limits.is_some();
    let missing_key = reader.read("missing_key");
    let quota = Quota {
        lease: None,
        block: build_block(reader, kind.mode, &overrides),
        missing_key: missing_key.unwrap_or(context.missing_key),
        count_rejected: reader.read("count_rejected")?,
        shards: reader.read("shards")?,
        cost: cost.unwrap_or(CostSource::Fixed(0)),
        limits: limits.unwrap_or_default(),
        key,
        overrides,
        is_dynamic,
    };
    report_conflicts(reader, context, kind, &quota);
    reject_cost_above_cold_capacity(reader, &quota);
    if quota.shards > 1 {
        check_shards(reader, context, kind.mode, &quota);
    }
    is_valid.then(|| Quota {
        lease: lease::build_lease(reader, &quota, kind.mode, context.uses_memory_store),
        ..quota
    })
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
    if reads_claim && context.claim_trust.is_none() {
        Err(NO_TRUSTED_TOKENS_ERROR.to_owned())
    } else {
        Ok(component)
    }
}

/// Builds the block of `block_for`.
fn build_block(
    reader: &TableReader<'_>,
    mode: PolicyMode,
    overrides: &LimitOverrides,
) -> Option<Limit> {
    let duration = reader.read("block_for")?;
    let is_enforced = mode.is_enforced() || overrides.modes().any(PolicyMode::is_enforced);
    report! { reader;
        Warning("block_for") if !is_enforced => "without effect: a policy in mode \"{}\" blocks no key", mode.name();
    }
    Some(Limit {
        requests: 1,
        per_us: to_micros(duration),
        algorithm: Algorithm::Block,
    })
}
