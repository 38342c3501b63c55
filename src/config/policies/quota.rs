//! The quota of a policy: key, cost, limits, overrides and their options.

use super::PolicyContext;
use super::conflicts::{PolicyKind, report_conflicts};
use super::cost::{build_cost, reject_cost_above_cold_capacity, warn_if_cost_exceeds_capacity};
use super::limits::build_limits;
use super::match_conditions::NO_TRUSTED_TOKENS_ERROR;
use super::overrides::build_overrides;
use crate::config::schema::ValueKind;
use crate::config::schema_value::SchemaValue;
use crate::config::table_reader::{ConfigValue, TableReader, report};
use crate::config::values::{format_duration, parse_name, to_micros};
use crate::limiter::{Algorithm, LeaseTerms, Limit};
use crate::policy::{
    CostSource, KeyComponent, KeyPart, KeyTemplate, LimitOverrides, Quota, Threshold,
};
use std::time::Duration;

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
    let mut key = KeyTemplate::from_components(parts, context.value_hasher.clone());
    key.scope = reader.read("scope").unwrap_or_default();
    let key = key.with_counter(reader.get_text("counter", parse_name));
    // Policies that share a counter have the same names for its limits.
    let limit_name = key.counter_name().unwrap_or(name).to_owned();
    let cost = build_cost(reader, context);
    let limits = build_limits(reader, context, &limit_name);
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
        block: reader.read("block_for").map(|duration| Limit {
            requests: 1,
            per_us: to_micros(duration),
            algorithm: Algorithm::Block,
        }),
        missing_key: missing_key.unwrap_or(context.missing_key),
        count_rejected: reader.read("count_rejected")?,
        shards: reader.read("shards")?,
        cost: cost.unwrap_or(CostSource::Fixed(0)),
        limits: limits.unwrap_or_default(),
        key,
        overrides,
        is_dynamic,
        notify: read_thresholds(reader).into_boxed_slice(),
    };
    report_conflicts(reader, context, kind, &quota);
    reject_cost_above_cold_capacity(reader, &quota);
    if quota.shards > 1 {
        check_shards(reader, &quota);
    }
    let uses_lease = !kind.is_watching() && !context.uses_memory_store;
    is_valid.then(|| Quota {
        lease: build_lease(reader, &quota).filter(|_| uses_lease),
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

/// Reads the key `notify`. Leaves out invalid items.
fn read_thresholds(reader: &TableReader<'_>) -> Vec<Threshold> {
    let parse = |item: ConfigValue<'_>| {
        let fraction = f64::from_content(&ValueKind::Fraction, &item.value.content);
        let threshold = fraction.and_then(Threshold::from_fraction);
        threshold.or_else(|| {
            item.report_error("expected a number above 0, at most 1, with up to three decimals")
        })
    };
    let items = reader.get_items("notify");
    let count = items.len();
    let thresholds: Vec<Threshold> = items.into_iter().filter_map(parse).collect();
    let is_list = reader
        .get("notify")
        .is_some_and(|item| item.value.as_list().is_some());
    report! { reader;
        Error("notify") if is_list && !(1..=MAX_THRESHOLDS).contains(&count) => "expected 1 to {MAX_THRESHOLDS} numbers";
        Error("notify") if !thresholds.is_sorted_by(|one, next| one < next) => "expected ascending numbers, each once";
    }
    thresholds
}

/// Thresholds of a policy. Each is a label value of a metric.
const MAX_THRESHOLDS: usize = 4;

/// Default lease TTL, unless half of the policy's shortest period is less.
const DEFAULT_TTL_US: u64 = 100_000;

/// Builds the lease of a policy from `quota`, which holds its other settings.
fn build_lease(reader: &TableReader<'_>, quota: &Quota) -> Option<LeaseTerms> {
    let item = reader.get("lease")?;
    let periods = quota
        .all_limits()
        .map(|named| named.limit.period_range_us().0);
    let half_period_us = periods.min()? / 2;
    let lease = if item.value.as_table().is_some() {
        let table = reader.get_optional_table("lease")?;
        let (size, ttl): (Option<u64>, Duration) = (table.read("size"), table.read("ttl")?);
        let most = Duration::from_micros(half_period_us);
        let least = quota.cost.min_units();
        report! { table;
            Error("ttl") if ttl > most => "more than half of the policy's shortest period; expected at most {}", format_duration(most);
            Warning("size") if size.is_some_and(|size| size < least) => "too small for any request: each costs at least {least}";
        }
        LeaseTerms {
            size: Some(size?),
            ttl_us: to_micros(ttl),
        }
    } else {
        reader.is_keyword("lease", "auto")?;
        LeaseTerms {
            size: None,
            ttl_us: DEFAULT_TTL_US.min(half_period_us).max(1),
        }
    };
    Some(lease)
}

/// Checks the amounts of a sharded policy. Each shard needs a
/// unit of every limit, and enough for the largest cost.
fn check_shards(reader: &TableReader<'_>, quota: &Quota) {
    let (shards, max_cost) = (u64::from(quota.shards), quota.cost.max_units());
    let least = |limit: &Limit| match limit.algorithm {
        Algorithm::TokenBucket { burst, .. } => limit.requests.min(burst),
        _ => limit.requests,
    };
    let mut limits = quota
        .all_limits()
        .map(|named| (&named.name, least(&named.limit)));
    let too_small = limits.clone().find(|(_, most)| *most < shards);
    let too_small_for_cost = limits.find(|(_, most)| most / shards < max_cost);
    if let Some((name, most)) = too_small {
        report! { reader;
            Error("shards") => "each shard needs one unit, and the limit \"{name}\" has {most}; expected at most {most}";
        }
    } else if let Some((name, _)) = too_small_for_cost {
        report! { reader;
            Warning("shards") => "a request may cost more than one shard of the limit \"{name}\" has; such requests are always rejected";
        }
    }
}
