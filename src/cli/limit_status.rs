//! Formats the state of limits as text.

use super::json_fields::{is_true_at, list_at, text_at, value_at};
use crate::config::format_period;
use crate::limiter::{Algorithm, Limit, LimitStatus, OverrideInEffect};
use crate::policy::NamedLimit;
use crate::text::escape_unprintable;
use serde_json::Value;
use std::time::Duration;

/// Formats one limit: `login   5 per 1m, sliding_log   3 left, more in 12.5 s`. `status` is the
/// limit's state and the current time in microseconds.
pub(super) fn format_limit_line(named: &NamedLimit, status: Option<(&LimitStatus, u64)>) -> String {
    let in_effect = status.map_or(named.limit, |(status, _)| {
        status.limit_in_effect(&named.limit)
    });
    let status_text = status.map_or(String::new(), |(status, now_us)| {
        let status_text = format_status(status, now_us);
        match status.in_effect {
            None => status_text,
            Some(OverrideInEffect::Unlimited) => "unlimited by an override".to_owned(),
            Some(OverrideInEffect::Blocked) => "blocked by an override".to_owned(),
            Some(OverrideInEffect::StatedAmounts { .. }) => {
                format!("{status_text}, as the request states")
            }
            Some(OverrideInEffect::Amounts { .. }) => format!("{status_text}, by an override"),
        }
    });
    let is_blocked =
        status.is_some_and(|(status, _)| status.in_effect == Some(OverrideInEffect::Blocked));
    let limit = match is_blocked {
        true => String::new(),
        false => format_limit(&in_effect),
    };
    format!("{:<16} {limit:<32} {status_text}", named.name)
        .trim_end()
        .to_owned()
}

/// Formats the status of a key as the admin API reports it: the key, its block, and its limits.
pub(super) fn format_key_status(status: &Value) -> String {
    let mut text = format!("{}\n", text_at(status, "/key").escape_debug());
    if let Some(blocked_s) = value_at(status, "/blocked_s").as_f64() {
        text.push_str(&format!(
            "  blocked for {}\n",
            format_wait(seconds_to_micros(blocked_s))
        ));
    }
    if let Some(words) = value_at(status, "/override_words").as_str() {
        text.push_str(&format!("  {}\n", escape_unprintable(words)));
    }
    if text_at(status, "/scope") == "instance" {
        text.push_str("  counted per instance: usage of this instance only\n");
    }
    for limit in list_at(status, "/limits") {
        text.push_str(&format!("  {}\n", format_limit_status(limit)));
    }
    // Older proxies send no hash.
    if let Some(hash) = value_at(status, "/key_hash").as_str() {
        text.push_str(&format!("  {} in the log\n", hash.escape_debug()));
    }
    text.push_str(match text_at(status, "/override") {
        "allow" => "  exempt by an override\n",
        "deny" => "  denied by an override\n",
        "off" => "  policy is off for this key (override)\n",
        _ => "",
    });
    let is_mark = text_at(status, "/mode") == "mark";
    let is_shadow = is_true_at(status, "/shadow");
    text.push_str(match (is_true_at(status, "/admitted"), is_shadow) {
        (false, _) if is_mark => "Over the limit: admitted now with a mark.\n",
        (false, false) => "Rejected now.\n",
        (false, true) => "Would be rejected now (shadow).\n",
        (true, _) => "Admitted now.\n",
    });
    text
}

/// Formats one limit with its status, both from JSON, as [`format_limit_line`] does.
fn format_limit_status(limit: &Value) -> String {
    let field = |name: &str| match limit.get(name) {
        Some(Value::String(text)) => text.escape_debug().to_string(),
        Some(value) => value.to_string(),
        None => String::new(),
    };
    let quota = match limit.get("per") {
        Some(_) => format!(
            "{} per {}, {}",
            field("requests"),
            [field("per"), field("tz")].join(" ").trim_end(),
            field("algorithm")
        ),
        None => format!("{} at a time, {}", field("requests"), field("algorithm")),
    };
    if let kind @ ("unlimited" | "blocked") = text_at(limit, "/override") {
        return format!("{:<16} {kind} by an override", field("name"));
    }
    let stated = value_at(limit, "/requests_from").as_str();
    let stated = stated.map_or_else(String::new, |field| {
        format!(
            ", unless the {} states another amount",
            field.escape_debug()
        )
    });
    let growth = match value_at(limit, "/grows_in_s").as_f64() {
        Some(seconds) => format!(", more in {}", format_wait(seconds_to_micros(seconds))),
        None => String::new(),
    };
    format!(
        "{:<16} {quota:<32} {} left{growth}{stated}{}",
        field("name"),
        field("remaining"),
        match text_at(limit, "/override") {
            "" => "",
            _ => ", by an override",
        }
    )
}

fn seconds_to_micros(seconds: f64) -> u64 {
    Duration::try_from_secs_f64(seconds).map_or(0, |wait| {
        u64::try_from(wait.as_micros()).unwrap_or(u64::MAX)
    })
}

/// Formats a limit: `5 per 1m, sliding_log`.
pub(super) fn format_limit(limit: &Limit) -> String {
    if let Algorithm::Concurrency { .. } = limit.algorithm {
        return format!("{} at a time, concurrency", limit.requests);
    }
    format!(
        "{} per {}, {}",
        limit.requests,
        format_period(limit),
        limit.algorithm.into_str()
    )
}

/// Formats a duration in at most two units: `1.5 s`, `12 m 30 s`, `3 h 5 m`.
pub(super) fn format_wait(us: u64) -> String {
    let seconds = us.div_ceil(1_000_000);
    match seconds {
        0..60 => format!("{}.{} s", us / 1_000_000, us % 1_000_000 / 100_000),
        60..3600 => format!("{} m {} s", seconds / 60, seconds % 60),
        3600..86_400 => format!("{} h {} m", seconds / 3600, seconds % 3600 / 60),
        _ => format!("{} d {} h", seconds / 86_400, seconds % 86_400 / 3600),
    }
}

fn format_status(status: &LimitStatus, now_us: u64) -> String {
    let remaining = status.remaining;
    match status.next_growth_us {
        Some(at_us) => format!(
            "{remaining} left, more in {}",
            format_wait(at_us.saturating_sub(now_us))
        ),
        None => format!("{remaining} left"),
    }
}
