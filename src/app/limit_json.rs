//! Limits and their status as JSON.

use crate::config::format_period;
use crate::limiter::{Algorithm, Limit, LimitStatus, OverrideInEffect};
use crate::policy::NamedLimit;
use serde_json::{Map, Value, json};
use std::time::Duration;

pub(crate) fn algorithm_name(algorithm: Algorithm) -> &'static str {
    match algorithm {
        Algorithm::SlidingLog => "sliding_log",
        Algorithm::SlidingWindow { .. } => "sliding_window",
        Algorithm::FixedWindow { .. } | Algorithm::CalendarWindow { .. } => "fixed_window",
        Algorithm::TokenBucket { .. } => "token_bucket",
        Algorithm::LeakyBucket { .. } => "leaky_bucket",
        Algorithm::Concurrency { .. } => "concurrency",
        Algorithm::Block => "block",
    }
}

/// Returns a limit as JSON, with the names of the configuration and durations in seconds.
pub(crate) fn limit_to_json(named: &NamedLimit) -> Map<String, Value> {
    let Limit {
        requests, per_us, ..
    } = named.limit;
    let mut fields = Map::new();
    let mut set_field = |name: &str, value: Value| fields.insert(name.to_owned(), value);
    set_field("name", json!(&*named.name));
    set_field("algorithm", json!(algorithm_name(named.limit.algorithm)));
    set_field("requests", json!(requests));
    if let Some(source) = &named.amount {
        set_field("requests_from", json!(source.field.to_string()));
        set_field("max", json!(source.max));
    }
    if !matches!(named.limit.algorithm, Algorithm::Concurrency { .. }) {
        set_field("per", json!(format_period(&named.limit)));
        set_field("per_s", micros_to_seconds_json(per_us));
    }
    if let Some(unit) = &named.unit {
        set_field("unit", json!(unit));
    }
    match named.limit.algorithm {
        Algorithm::SlidingWindow { buckets } => _ = set_field("buckets", json!(buckets)),
        Algorithm::FixedWindow { offset_us } => {
            _ = set_field("offset_s", micros_to_seconds_json(offset_us))
        }
        Algorithm::TokenBucket { burst, warm_up_us } => {
            set_field("burst", json!(burst));
            set_field("warm_up_s", micros_to_seconds_json(warm_up_us));
        }
        Algorithm::LeakyBucket { max_delay_us } => {
            _ = set_field("max_delay_s", micros_to_seconds_json(max_delay_us))
        }
        Algorithm::Concurrency { max_duration_us } => {
            set_field("max_duration_s", micros_to_seconds_json(max_duration_us));
            set_field("release", json!(named.release.name()));
        }
        Algorithm::CalendarWindow { calendar } => {
            set_field("per", json!(calendar.unit().as_str()));
            set_field("tz", json!(calendar.zone_name()));
        }
        Algorithm::SlidingLog | Algorithm::Block => {}
    }
    fields
}

/// Returns a limit with its status at `now_us`. A limit of a key with an override has the amounts
/// in effect, and the override's kind.
pub(crate) fn limit_with_status_to_json(
    named: &NamedLimit,
    status: &LimitStatus,
    now_us: u64,
) -> Map<String, Value> {
    let in_effect = NamedLimit {
        limit: status.limit_in_effect(&named.limit),
        ..named.clone()
    };
    let mut fields = limit_to_json(&in_effect);
    if let Some(kind) = status.in_effect.and_then(override_kind) {
        fields.insert("override".to_owned(), json!(kind));
    }
    if !status.is_unlimited() {
        fields.extend(limit_status_to_json(&in_effect.limit, status, now_us));
    }
    fields
}

/// The kind of an override in JSON. `None` without an override.
fn override_kind(in_effect: OverrideInEffect) -> Option<&'static str> {
    match in_effect {
        OverrideInEffect::Unlimited => Some("unlimited"),
        OverrideInEffect::Blocked => Some("blocked"),
        OverrideInEffect::Amounts { .. } => Some("limits"),
        OverrideInEffect::StatedAmounts { .. } => None,
    }
}

/// Returns the status of a limit at `now_us`: units used and remaining, and seconds until more
/// units are available (null if none is used).
pub(crate) fn limit_status_to_json(
    limit: &Limit,
    status: &LimitStatus,
    now_us: u64,
) -> [(String, Value); 3] {
    let used = limit.capacity().saturating_sub(status.remaining);
    let grows = status
        .next_growth_us
        .map(|at_us| micros_to_seconds_json(at_us.saturating_sub(now_us)));
    [
        ("used".to_owned(), json!(used)),
        ("remaining".to_owned(), json!(status.remaining)),
        ("grows_in_s".to_owned(), json!(grows)),
    ]
}

pub(crate) fn micros_to_seconds_json(us: u64) -> Value {
    json!(Duration::from_micros(us).as_secs_f64())
}
