//! The key `shards` of a policy.

use super::context::PolicyContext;
use super::limits::is_concurrency_limit;
use crate::config::keywords::ON_STORE_FAILURE_MODES;
use crate::config::table_reader::TableReader;
use crate::limiter::{Algorithm, Limit};
use crate::policy::{CostSource, NamedLimit, OnStoreFailure, PolicyMode};

/// Checks the settings of a sharded policy. One shard decides each request, so settings that need
/// all counters of a key are errors.
pub(super) fn check_shards<'a>(
    reader: &TableReader<'_>,
    context: &PolicyContext,
    mode: PolicyMode,
    shards: u16,
    cost: Option<&CostSource>,
    limits: impl Iterator<Item = &'a NamedLimit> + Clone,
) {
    if !context.uses_redis_cluster {
        reader.report_warning("shards", "without effect: sharding needs a Redis Cluster");
    }
    if mode != PolicyMode::Enforce {
        reader.report_warning(
            "shards",
            &format!(
                "in mode \"{}\" a policy asks only one shard, so it reports more rejections than enforcement would cause",
                mode.name()
            ),
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
    check_capacity_per_shard(reader, shards, cost, limits.clone());
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
    if reader.get_bool("dynamic") == Some(true) {
        reader.report_error(
            "dynamic",
            "an override is stored in the slot of one counter; shards are in several slots; expected false, or no shards",
        );
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
            "an estimate (also of count_when) is settled on one counter; expected no shards",
        );
    }
}

/// Checks that each shard has a unit of every limit, and enough for the largest cost.
fn check_capacity_per_shard<'a>(
    reader: &TableReader<'_>,
    shards: u16,
    cost: Option<&CostSource>,
    limits: impl Iterator<Item = &'a NamedLimit> + Clone,
) {
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
}
