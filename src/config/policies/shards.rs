//! The key `shards` of a policy.

use super::context::PolicyContext;
use crate::config::table_reader::TableReader;
use crate::limiter::{Algorithm, Limit};
use crate::policy::{PolicyMode, Quota};

/// Checks the amounts of a sharded policy, and warns of what sharding changes.
pub(super) fn check_shards(
    reader: &TableReader<'_>,
    context: &PolicyContext,
    mode: PolicyMode,
    quota: &Quota,
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
    check_capacity_per_shard(reader, quota);
}

/// Checks that each shard has a unit of every limit, and enough for the largest cost.
fn check_capacity_per_shard(reader: &TableReader<'_>, quota: &Quota) {
    let (shards, mut limits) = (u64::from(quota.shards), quota.all_limits());
    let least = |limit: &Limit| match limit.algorithm {
        Algorithm::TokenBucket { burst, .. } => limit.requests.min(burst),
        _ => limit.requests,
    };
    let max_cost = quota.cost.max_units();
    if let Some(few) = limits.clone().find(|named| least(&named.limit) < shards) {
        let most = least(&few.limit);
        reader.report_error(
            "shards",
            &format!(
                "each shard needs one unit, and the limit \"{}\" has {most}; expected at most {most}",
                few.name
            ),
        );
    } else if let Some(few) = limits.find(|named| least(&named.limit) / shards < max_cost) {
        reader.report_warning(
            "shards",
            &format!(
                "a request may cost more than one shard of the limit \"{}\" has; such requests are always rejected",
                few.name
            ),
        );
    }
}
