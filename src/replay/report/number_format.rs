//! Numbers, times and shares as the text and HTML reports print them.

use super::PolicyReport;
use crate::replay::suggestions::LimitProposal;
use crate::text::format_count;
use time::OffsetDateTime;
use time::macros::format_description;

/// Formats a time as `2026-11-19 13:55:36` in UTC.
pub(crate) fn format_time(at_us: u64) -> String {
    let format = format_description!("[year]-[month]-[day] [hour]:[minute]:[second]");
    let at = i64::try_from(at_us / 1_000_000)
        .ok()
        .and_then(|at_s| OffsetDateTime::from_unix_timestamp(at_s).ok());
    at.and_then(|at| at.format(&format).ok())
        .unwrap_or_default()
}

/// Formats a time range. The date appears once if both times have the same date.
pub(crate) fn format_time_range(from_us: u64, to_us: u64, dash: char) -> String {
    let (from, to) = (format_time(from_us), format_time(to_us));
    let time = match (from.get(..10), to.split_once(' ')) {
        (Some(from_day), Some((day, time))) if day == from_day => time,
        _ => &to,
    };
    format!("{from} {dash} {time}")
}

/// Formats a share as `12.3 %`. A small nonzero share is not rounded to zero.
pub(super) fn format_share(part: u64, whole: u64) -> String {
    match part as f64 * 100.0 / whole.max(1) as f64 {
        _ if part == 0 || whole == 0 => "0 %".to_owned(),
        share if share < 0.01 => "<0.01 %".to_owned(),
        share if share < 10.0 => format!("{share:.2} %"),
        share => format!("{share:.1} %"),
    }
}

/// Formats the number of keys (`>5` if keys were evicted), and of the touched ones. Both are
/// `absent` for a policy without limits.
pub(super) fn format_key_counts(policy: &PolicyReport, absent: &str) -> [String; 2] {
    if policy.action != "limit" {
        return [absent, absent].map(str::to_owned);
    }
    let mark = if policy.keys_exact { "" } else { ">" };
    let keys = format!("{mark}{}", format_count(policy.keys));
    [keys, format_count(policy.keys_touched)]
}

/// How many keys the suggested limit touches, and how many the present one, as ends of sentences.
pub(super) fn describe_touched_keys(proposal: &LimitProposal) -> [String; 2] {
    let touched = |touched, keys: &str| {
        let share = format_share(touched, proposal.keys);
        format!("{}{keys} ({share})", format_count(touched))
    };
    let of_keys = format!(" of {} keys", format_count(proposal.keys));
    let suggested = touched(proposal.touched, &of_keys);
    [
        format!(
            "(a peak of {} and headroom) touches {suggested}",
            format_count(proposal.peak)
        ),
        format!("touches at most {}", touched(proposal.touched_now, "")),
    ]
}

/// The highest peak within each share of the keys.
pub(super) fn describe_peaks(proposal: &LimitProposal) -> String {
    let quantiles = proposal.quantiles.iter();
    let quantiles = quantiles.map(|(share, peak)| match share * 100.0 {
        100.0.. => format!("and the highest {}", format_count(*peak)),
        percent => format!("{percent} % of the keys up to {}", format_count(*peak)),
    });
    quantiles.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::format_time_range;

    #[test]
    fn a_time_range_repeats_the_date_only_if_it_differs() {
        let from_us = 1_795_000_000_000_000;
        let to = |seconds: u64| format_time_range(from_us, from_us + seconds * 1_000_000, '…');
        assert_eq!(to(60), "2026-11-18 11:06:40 … 11:07:40");
        assert_eq!(to(86_460), "2026-11-18 11:06:40 … 2026-11-19 11:07:40");
    }
}
