//! Describes limits and their status for operators.

use crate::admin::{LimitDocument, LimitUsage};
use crate::config::format_period;
use crate::limiter::{Algorithm, LimitStatus, OverrideInEffect};
use crate::policy::NamedLimit;
use serde_json::{Map, Value, json};
use std::time::Duration;

/// Describes a limit, with the names of the configuration and durations in seconds.
pub(crate) fn describe_limit(named: &NamedLimit) -> LimitDocument {
    let limit = &named.limit;
    let (mut per, mut tz) = (Some(format_period(limit)), None);
    let mut details = Map::new();
    let mut add = |name: &str, value: Value| drop(details.insert(name.to_owned(), value));
    let seconds = |us| json!(micros_to_seconds(us));
    match limit.algorithm {
        Algorithm::SlidingWindow { buckets } => add("buckets", json!(buckets)),
        Algorithm::FixedWindow { offset_us } => add("offset_s", seconds(offset_us)),
        Algorithm::TokenBucket { burst, warm_up_us } => {
            add("burst", json!(burst));
            add("warm_up_s", seconds(warm_up_us));
        }
        Algorithm::LeakyBucket { max_delay_us } => add("max_delay_s", seconds(max_delay_us)),
        Algorithm::Concurrency { max_duration_us } => {
            per = None;
            add("max_duration_s", seconds(max_duration_us));
            add("release", json!(named.release.name()));
        }
        Algorithm::CalendarWindow { calendar } => {
            per = Some(calendar.unit().as_str().to_owned());
            tz = Some(calendar.zone_name().to_owned());
        }
        Algorithm::SlidingLog | Algorithm::Block => {}
    }
    if per.is_some() {
        add("per_s", seconds(limit.per_us));
    }
    if let Some(source) = &named.amount {
        add("max", json!(source.max));
    }
    if let Some(unit) = &named.unit {
        add("unit", json!(unit));
    }
    LimitDocument {
        name: named.name.to_string(),
        algorithm: limit.algorithm.into_str().to_owned(),
        requests: limit.requests,
        per,
        tz,
        requests_from: named.amount.as_ref().map(|source| source.field.to_string()),
        details,
        ..LimitDocument::default()
    }
}

/// Describes a limit with its status at `now_us`. A limit of a key with an override has the amounts
/// in effect.
pub(crate) fn describe_limit_status(
    named: &NamedLimit,
    status: &LimitStatus,
    now_us: u64,
) -> LimitDocument {
    let in_effect = NamedLimit {
        limit: status.limit_in_effect(&named.limit),
        ..named.clone()
    };
    let override_kind = status.in_effect.and_then(|in_effect| match in_effect {
        OverrideInEffect::Unlimited => Some("unlimited"),
        OverrideInEffect::Blocked => Some("blocked"),
        OverrideInEffect::Amounts { .. } => Some("limits"),
        OverrideInEffect::StatedAmounts { .. } => None,
    });
    let usage = LimitUsage {
        used: in_effect.limit.capacity().saturating_sub(status.remaining),
        remaining: status.remaining,
        grows_in_s: status
            .next_growth_us
            .map(|at_us| micros_to_seconds(at_us.saturating_sub(now_us))),
    };
    LimitDocument {
        override_kind: override_kind.map(str::to_owned),
        is_stated: override_kind.is_none() && status.in_effect.is_some(),
        usage: (!status.is_unlimited()).then_some(usage),
        ..describe_limit(&in_effect)
    }
}

pub(crate) fn micros_to_seconds(us: u64) -> f64 {
    Duration::from_micros(us).as_secs_f64()
}
