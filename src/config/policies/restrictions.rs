//! Settings that exclude each other in a policy.

use super::limits::is_concurrency_limit;
use crate::config::table_reader::TableReader;
use crate::limiter::Algorithm;
use crate::policy::{CostSource, Quota};

/// Reports settings that a call of the rate-limit service does not support. Such a call has no
/// request, response or end of request, and cannot be delayed.
pub(super) fn reject_request_only_settings(reader: &TableReader<'_>, quota: &Quota) {
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
            reader.report_error(name_estimate_key(reader), "a call of the rate-limit service has no response; expected a number as cost, which is multiplied by hits_addend");
        }
    }
    let key = if reader.contains_key("limits") {
        "limits"
    } else {
        "limit"
    };
    if quota.all_limits().any(is_concurrency_limit) {
        reader.report_error(key, "the rate-limit service does not learn when a request ends; expected no algorithm = \"concurrency\"");
    }
    if quota
        .all_limits()
        .any(|named| matches!(named.limit.algorithm, Algorithm::LeakyBucket { .. }))
    {
        reader.report_error(key, "a call of the rate-limit service can't be delayed; expected another algorithm, such as \"token_bucket\" with burst = 1");
    }
}

/// Reports descriptor key parts in a policy for requests.
pub(super) fn reject_descriptor_key_parts(reader: &TableReader<'_>, quota: &Quota) {
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
pub(super) fn reject_response_dependent_settings(reader: &TableReader<'_>, quota: &Quota) {
    if quota.cost.as_estimate().is_some() {
        reader.report_error(
            name_estimate_key(reader),
            "calls at check.address carry no response; expected no estimate, or no [check]",
        );
    }
    if quota.all_limits().any(is_concurrency_limit) {
        let key = if reader.contains_key("limits") {
            "limits"
        } else {
            "limit"
        };
        reader.report_error(key, "calls at check.address do not report the end of a request; expected no algorithm = \"concurrency\", or no [check]");
    }
}

/// Reports settings that count requests before their response, beside `count_when`.
pub(super) fn reject_settings_without_response(reader: &TableReader<'_>) {
    if !reader.contains_key("count_when") {
        return;
    }
    if reader.get_bool("count_rejected") == Some(true) {
        reader.report_error(
            "count_rejected",
            "not with count_when: a rejected request has no response of the app; expected false",
        );
    }
}

/// The key that makes the response decide the cost.
fn name_estimate_key(reader: &TableReader<'_>) -> &'static str {
    match reader.contains_key("count_when") {
        true => "count_when",
        false => "cost",
    }
}

/// Reports quota keys in a policy with action `allow` or `deny`.
pub(super) fn reject_quota_keys(reader: &TableReader<'_>, action: &str) -> Option<()> {
    for key in [
        "key",
        "limit",
        "limits",
        "cost",
        "count_when",
        "block_for",
        "count_rejected",
        "lease",
        "missing_key",
        "on_store_failure",
        "override",
        "dynamic",
        "scope",
        "counter",
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
