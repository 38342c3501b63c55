//! Formats the state of limits as text.

use crate::app::limit_json::algorithm_name;
use crate::config::format_duration;
use crate::limiter::{Algorithm, Limit, LimitStatus};
use crate::policy::NamedLimit;
use std::time::Duration;

/// Formats one limit: `login   5 per 1m, sliding_log   3 left, more in 12.5 s`. `status` is the
/// limit's state and the current time in microseconds.
pub(super) fn format_limit_line(named: &NamedLimit, status: Option<(&LimitStatus, u64)>) -> String {
    let status_text = status.map_or(String::new(), |(status, now_us)| {
        format_status(status, now_us)
    });
    format!(
        "{:<16} {:<32} {status_text}",
        named.name,
        format_limit(&named.limit)
    )
    .trim_end()
    .to_owned()
}

/// Formats a limit: `5 per 1m, sliding_log`.
pub(super) fn format_limit(limit: &Limit) -> String {
    if let Algorithm::Concurrency { .. } = limit.algorithm {
        return format!("{} at a time, concurrency", limit.requests);
    }
    let per = format_duration(Duration::from_micros(limit.per_us));
    format!(
        "{} per {per}, {}",
        limit.requests,
        algorithm_name(limit.algorithm)
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
