//! The key `lease` of a policy.

use super::limits::to_micros;
use crate::config::table_reader::{TableReader, report};
use crate::config::values::format_duration;
use crate::limiter::LeaseTerms;
use crate::policy::{PolicyMode, Quota};
use std::time::Duration;

/// Default lease TTL, unless half of the policy's shortest period is less.
const DEFAULT_TTL_US: u64 = 100_000;

/// Builds the lease of a policy from `quota`, which holds its other settings.
pub(super) fn build_lease(
    reader: &TableReader<'_>,
    quota: &Quota,
    mode: PolicyMode,
    uses_memory_store: bool,
) -> Option<LeaseTerms> {
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
    let is_watching = matches!(mode, PolicyMode::Mark | PolicyMode::Shadow);
    report! { reader;
        Warning("lease") if is_watching => "without effect: a policy in mode \"{}\" counts each request in the store", mode.name();
        Warning("lease") if !is_watching && uses_memory_store => "without effect with store.kind = \"memory\": counters are in this process";
    }
    (!is_watching && !uses_memory_store).then_some(lease)
}
