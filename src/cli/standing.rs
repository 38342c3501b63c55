//! Where limits stand, as text for people.

use crate::app::limits::algorithm;
use crate::config::duration_words;
use crate::limiter::{Algorithm, Limit, Standing};
use crate::policy::NamedLimit;
use std::time::Duration;

/// One line for one limit: `login   5 per 1m, sliding_log   3 left, more in 12.5 s`.
pub(super) fn line(named: &NamedLimit, standing: Option<(&Standing, u64)>) -> String {
    let stands = standing.map_or(String::new(), |(standing, now_us)| stands(standing, now_us));
    format!("{:<16} {:<32} {stands}", named.name, limit(&named.limit))
        .trim_end()
        .to_owned()
}

/// `5 per 1m, sliding_log`.
pub(super) fn limit(limit: &Limit) -> String {
    if let Algorithm::Concurrency { .. } = limit.algorithm {
        return format!("{} at a time, concurrency", limit.requests);
    }
    let per = duration_words(Duration::from_micros(limit.per_us));
    format!(
        "{} per {per}, {}",
        limit.requests,
        algorithm(limit.algorithm)
    )
}

/// `1.5 s`, `12 m 30 s`, `3 h 5 m`: two units at most.
pub(super) fn wait(us: u64) -> String {
    let seconds = us.div_ceil(1_000_000);
    match seconds {
        0..60 => format!("{}.{} s", us / 1_000_000, us % 1_000_000 / 100_000),
        60..3600 => format!("{} m {} s", seconds / 60, seconds % 60),
        3600..86_400 => format!("{} h {} m", seconds / 3600, seconds % 3600 / 60),
        _ => format!("{} d {} h", seconds / 86_400, seconds % 86_400 / 3600),
    }
}

fn stands(standing: &Standing, now_us: u64) -> String {
    let left = standing.remaining;
    match standing.grows_at_us {
        Some(at_us) => format!(
            "{left} left, more in {}",
            wait(at_us.saturating_sub(now_us))
        ),
        None => format!("{left} left"),
    }
}
