//! Formats the state of limits as text.

use crate::admin::{KeyDocument, LimitDocument};
use crate::config::format_period;
use crate::limiter::Limit;
use crate::text::{escape_unprintable, format_wait};
use std::time::Duration;

/// Formats the status of a key: the key, its block, and its limits.
pub(super) fn format_key_status(status: &KeyDocument) -> String {
    let mut lines: Vec<String> = Vec::new();
    lines.extend(status.blocked_s.map(format_block));
    lines.extend(status.override_words.as_deref().map(escape_unprintable));
    if status.scope == "instance" {
        lines.push("counted per instance: usage of this instance only".to_owned());
    }
    let describe_amounts = |limit| format_limit_status(limit) + &describe_stated_amounts(limit);
    lines.extend(status.limits.iter().map(describe_amounts));
    let hash = status.key_hash.as_ref();
    lines.extend(hash.map(|hash| format!("{} in the log", hash.escape_debug())));
    lines.extend(match status.override_rule.as_deref() {
        Some("allow") => Some("exempt by an override".to_owned()),
        Some("deny") => Some("denied by an override".to_owned()),
        Some("off") => Some("policy is off for this key (override)".to_owned()),
        _ => None,
    });
    let mut text = format!("{}\n", status.key.escape_debug());
    for line in lines {
        text.push_str(&format!("  {line}\n"));
    }
    text.push_str(match (status.admitted, status.shadow) {
        (false, _) if status.mode == "mark" => "Over the limit: admitted now with a mark.\n",
        (false, false) => "Rejected now.\n",
        (false, true) => "Would be rejected now (shadow).\n",
        (true, _) => "Admitted now.\n",
    });
    text
}

pub(super) fn format_block(blocked_s: f64) -> String {
    format!("blocked for {}", format_wait(seconds_to_micros(blocked_s)))
}

/// Formats one limit and its status: `login   5 per 1m, sliding_log   3 left, more in 12.5 s`.
pub(super) fn format_limit_status(limit: &LimitDocument) -> String {
    let name = limit.name.escape_debug().to_string();
    if let Some(kind @ ("unlimited" | "blocked")) = limit.override_kind.as_deref() {
        return format!("{name:<16} {kind} by an override");
    }
    let period = limit.per.as_ref().map(|per| {
        let period = format!("{per} {}", limit.tz.as_deref().unwrap_or_default());
        period.trim_end().escape_debug().to_string()
    });
    let algorithm = limit.algorithm.escape_debug().to_string();
    let quota = format_quota(limit.requests, period.as_deref(), &algorithm);
    let source = match &limit.override_kind {
        Some(_) => ", by an override",
        None if limit.is_stated => ", as the request states",
        None => "",
    };
    let Some(usage) = &limit.usage else {
        return format!("{name:<16} {quota}{source}");
    };
    let growth = usage.grows_in_s.map_or_else(String::new, |seconds| {
        format!(", more in {}", format_wait(seconds_to_micros(seconds)))
    });
    let unit = limit.details.get("unit").and_then(|unit| unit.as_str());
    let unit = unit.map_or_else(String::new, |unit| format!(" {}", unit.escape_debug()));
    let remaining = usage.remaining;
    format!("{name:<16} {quota:<32} {remaining}{unit} left{growth}{source}")
}

/// That a request may state other amounts, if the limit has them from requests.
fn describe_stated_amounts(limit: &LimitDocument) -> String {
    let is_counted = limit.usage.is_some() && limit.override_kind.as_deref() != Some("blocked");
    match limit.requests_from.as_deref().filter(|_| is_counted) {
        Some(field) => format!(
            ", unless the {} states another amount",
            field.escape_debug()
        ),
        None => String::new(),
    }
}

fn seconds_to_micros(seconds: f64) -> u64 {
    Duration::try_from_secs_f64(seconds).map_or(0, |wait| {
        u64::try_from(wait.as_micros()).unwrap_or(u64::MAX)
    })
}

/// Formats a limit: `5 per 1m, sliding_log`.
pub(super) fn format_limit(limit: &Limit) -> String {
    let has_period = !limit.algorithm.counts_slots();
    let period = has_period.then(|| format_period(limit));
    format_quota(
        limit.requests,
        period.as_deref(),
        limit.algorithm.into_str(),
    )
}

fn format_quota(requests: u64, period: Option<&str>, algorithm: &str) -> String {
    match period {
        Some(period) => format!("{requests} per {period}, {algorithm}"),
        None => format!("{requests} at a time, {algorithm}"),
    }
}
