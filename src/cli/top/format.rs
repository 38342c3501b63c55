//! Formats numbers and durations for narrow columns.

/// Formats a rate per second: `0`, `0.4`, `12`, `12000`.
pub(super) fn format_rate(per_s: f64) -> String {
    match per_s {
        0.0 => "0".to_owned(),
        per_s if per_s < 9.95 => format!("{per_s:.1}"),
        per_s => format!("{per_s:.0}"),
    }
}

/// Formats a ratio in percent: `-`, `0%`, `5.5%`.
pub(super) fn format_share(part: u64, all: u64) -> String {
    match (part, all) {
        (_, 0) => "-".to_owned(),
        (0, _) => "0%".to_owned(),
        _ => format!("{:.1}%", 100.0 * part as f64 / all as f64),
    }
}

/// Formats a latency: `-`, `400us`, `12.5ms`, `1.5s`.
pub(super) fn format_latency(seconds: Option<f64>) -> String {
    match seconds {
        None => "-".to_owned(),
        Some(s) if s < 0.001 => format!("{:.0}us", s * 1e6),
        Some(s) if s < 1.0 => format!("{:.1}ms", s * 1e3),
        Some(s) => format!("{s:.1}s"),
    }
}

/// Formats a duration in at most two units: `5s`, `3m5s`, `1h2m`, `2d4h`.
pub(super) fn format_short_duration(s: u64) -> String {
    match s {
        0..60 => format!("{s}s"),
        60..3600 => format!("{}m{}s", s / 60, s % 60),
        3600..86_400 => format!("{}h{}m", s / 3600, s % 3600 / 60),
        _ => format!("{}d{}h", s / 86_400, s % 86_400 / 3600),
    }
}
