//! Limits and their status as JSON.

use crate::admin::add_fields;
use crate::config::format_period;
use crate::limiter::{Algorithm, Calendar, LimitStatus, OverrideInEffect};
use crate::policy::NamedLimit;
use serde_json::{Value, json};
use std::time::Duration;

/// Returns a limit as JSON, with the names of the configuration and durations in seconds.
pub(crate) fn limit_to_json(named: &NamedLimit) -> Value {
    let limit = &named.limit;
    let mut fields = json!({
        "name": &*named.name,
        "algorithm": limit.algorithm.into_str(),
        "requests": limit.requests,
    });
    if let Some(source) = &named.amount {
        let amount = json!({ "requests_from": source.field.to_string(), "max": source.max });
        add_fields(&mut fields, amount);
    }
    if let Some(unit) = &named.unit {
        add_fields(&mut fields, json!({ "unit": unit }));
    }
    if !matches!(limit.algorithm, Algorithm::Concurrency { .. }) {
        let per_s = micros_to_seconds_json(limit.per_us);
        add_fields(
            &mut fields,
            json!({ "per": format_period(limit), "per_s": per_s }),
        );
    }
    let seconds = micros_to_seconds_json;
    let of_algorithm = match limit.algorithm {
        Algorithm::SlidingWindow { buckets } => json!({ "buckets": buckets }),
        Algorithm::FixedWindow { offset_us } => json!({ "offset_s": seconds(offset_us) }),
        Algorithm::TokenBucket { burst, warm_up_us } => {
            json!({ "burst": burst, "warm_up_s": seconds(warm_up_us) })
        }
        Algorithm::LeakyBucket { max_delay_us } => {
            json!({ "max_delay_s": seconds(max_delay_us) })
        }
        Algorithm::Concurrency { max_duration_us } => {
            json!({ "max_duration_s": seconds(max_duration_us), "release": named.release.name() })
        }
        Algorithm::CalendarWindow { calendar } => calendar_to_json(calendar),
        Algorithm::SlidingLog | Algorithm::Block => Value::Null,
    };
    add_fields(&mut fields, of_algorithm);
    fields
}

pub(crate) fn calendar_to_json(calendar: Calendar) -> Value {
    json!({ "per": calendar.unit().as_str(), "tz": calendar.zone_name() })
}

/// Returns a limit with its status at `now_us`: units used and remaining, and seconds until more
/// units are available (null if none is used). A limit of a key with an override has the amounts
/// in effect, and the override's kind.
pub(crate) fn limit_with_status_to_json(
    named: &NamedLimit,
    status: &LimitStatus,
    now_us: u64,
) -> Value {
    let in_effect = NamedLimit {
        limit: status.limit_in_effect(&named.limit),
        ..named.clone()
    };
    let mut fields = limit_to_json(&in_effect);
    if let Some(kind) = status.in_effect.and_then(override_kind) {
        add_fields(&mut fields, json!({ "override": kind }));
    }
    if !status.is_unlimited() {
        let used = in_effect.limit.capacity().saturating_sub(status.remaining);
        let wait_us = status
            .next_growth_us
            .map(|at_us| at_us.saturating_sub(now_us));
        add_fields(
            &mut fields,
            json!({
                "used": used,
                "remaining": status.remaining,
                "grows_in_s": wait_us.map(micros_to_seconds_json),
            }),
        );
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

pub(crate) fn micros_to_seconds_json(us: u64) -> Value {
    json!(Duration::from_micros(us).as_secs_f64())
}
