//! The key `shards` of a policy.

use super::context::PolicyContext;
use crate::config::table_reader::{TableReader, report};
use crate::limiter::{Algorithm, Limit};
use crate::policy::{PolicyMode, Quota};

/// Checks the amounts of a sharded policy, and warns of what sharding changes. Each shard needs a
/// unit of every limit, and enough for the largest cost.
pub(super) fn check_shards(
    reader: &TableReader<'_>,
    context: &PolicyContext,
    mode: PolicyMode,
    quota: &Quota,
) {
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
    report! { reader;
        Warning("shards") if !context.uses_redis_cluster => "without effect: sharding needs a Redis Cluster";
        Warning("shards") if mode != PolicyMode::Enforce => "in mode \"{}\" a policy asks only one shard, so it reports more rejections than enforcement would cause", mode.name();
    }
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
