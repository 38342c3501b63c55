//! The key `lease` of a policy.

use crate::config::table_reader::TableReader;
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
    let shortest_us = quota
        .all_limits()
        .map(|named| named.limit.period_range_us().0)
        .min()?;
    let lease = if item.value.as_table().is_some() {
        let table = reader.get_optional_table("lease")?;
        let (size, ttl) = (table.read("size"), table.read::<Duration>("ttl")?);
        let most = Duration::from_micros(shortest_us / 2);
        if ttl > most {
            let most = format_duration(most);
            table.report_error(
                "ttl",
                &format!("more than half of the policy's shortest period; expected at most {most}"),
            );
        }
        let (size, least) = (size?, quota.cost.min_units());
        if size < least {
            table.report_warning(
                "size",
                &format!("too small for any request: each costs at least {least}"),
            );
        }
        LeaseTerms {
            size: Some(size),
            ttl_us: u64::try_from(ttl.as_micros()).ok()?,
        }
    } else {
        reader.get_mapped_keyword("lease", &[("auto", ())])?;
        LeaseTerms {
            size: None,
            ttl_us: DEFAULT_TTL_US.min(shortest_us / 2).max(1),
        }
    };
    match (mode, uses_memory_store) {
        (PolicyMode::Mark | PolicyMode::Shadow, _) => reader.report_warning(
            "lease",
            &format!(
                "without effect: a policy in mode \"{}\" counts each request in the store",
                mode.name()
            ),
        ),
        (_, true) => reader.report_warning(
            "lease",
            "without effect with store.kind = \"memory\": counters are in this process",
        ),
        _ => return Some(lease),
    }
    None
}
