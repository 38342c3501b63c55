//! The report as text: a table of episodes, or a plot by minute.

use super::WhyReport;
use super::refusal_history::{RefusalPeriod, SeriesName};
use super::searched_policy::SearchedPolicy;
use crate::cli::limit_status::format_limit;
use crate::config::format_duration;
use crate::limiter::{Limit, OverrideInEffect};
use crate::text::{count_noun, format_count, format_time, format_time_range, format_wait};
use std::time::Duration;

/// Maximum number of rows in the table and in the plot; the newest are printed.
const MAX_ROWS: usize = 200;

/// Maximum number of listed policies whose key the values do not fit.
const MAX_SKIPPED_POLICIES: usize = 10;

/// Length of the longest bar.
const BAR_WIDTH: u64 = 40;

/// Renders the keys, the episodes and what the log left out.
pub(super) fn render_table(report: &WhyReport<'_>) -> String {
    let mut text = render_heading(report);
    let episodes = report.history.episodes();
    if !episodes.is_empty() {
        text.push_str(&format!(
            "\n{:<31}  {:>8}  {:<40}  {:<20}  LAST REQUEST\n",
            "WHEN (UTC)", "REFUSED", "BY", "WAIT"
        ));
    }
    push_omitted_rows(&mut text, episodes.len());
    let first_row = episodes.len().saturating_sub(MAX_ROWS);
    for (name, episode) in episodes.iter().skip(first_row) {
        text.push_str(&format!(
            "{:<31}  {:>8}  {:<40}  {:<20}  {}\n",
            format_range(episode.first_us, episode.last_us),
            format_count(episode.refused),
            describe_series(report, name),
            describe_wait(report, name, episode),
            episode.last_request.escape_debug()
        ));
    }
    text + &render_coverage(report)
}

/// Renders a bar of refusals for each minute with refusals.
pub(super) fn render_plot(report: &WhyReport<'_>) -> String {
    let mut text = render_heading(report);
    let periods = report.history.periods();
    let sum = |series: &[(&SeriesName, &RefusalPeriod)]| -> u64 {
        series.iter().map(|(_, period)| period.refused).sum()
    };
    let highest = periods.values().map(|series| sum(series)).max();
    let period_s = report.history.period_s;
    if highest.is_some() {
        let width = format_duration(Duration::from_secs(period_s));
        text.push_str(&format!("\nRefused requests per {width} (UTC)\n"));
    }
    push_omitted_rows(&mut text, periods.len());
    let mut next_s = None;
    let first_row = periods.len().saturating_sub(MAX_ROWS);
    for (start_s, series) in periods.iter().skip(first_row) {
        let pause_s = next_s.map_or(0, |next_s| start_s.saturating_sub(next_s));
        if pause_s > 0 {
            let pause = format_wait(pause_s.saturating_mul(1_000_000));
            text.push_str(&format!("{:<16}  none for {pause}\n", "…"));
        }
        next_s = Some(start_s + period_s);
        let refused = sum(series);
        let bar = (refused * BAR_WIDTH).div_ceil(highest.unwrap_or(1).max(1));
        let names: Vec<String> = series
            .iter()
            .map(|(name, period)| format!("{} {}", name_series(name), period.refused))
            .collect();
        let time = format_time(start_s.saturating_mul(1_000_000));
        text.push_str(&format!(
            "{:<16}  {:<40}  {:>8}  {}\n",
            time.get(..16).unwrap_or(&time),
            "█".repeat(usize::try_from(bar).unwrap_or(0)),
            format_count(refused),
            names.join(", ")
        ));
    }
    text + &render_coverage(report)
}

fn render_heading(report: &WhyReport<'_>) -> String {
    let values: Vec<String> = report
        .values
        .iter()
        .map(|value| format!("{value:?}"))
        .collect();
    let (refused, unenforced) = (
        report.history.total_refused(true),
        report.history.total_refused(false),
    );
    let mut text = format!("Key {}: ", values.join(" "));
    text.push_str(&match refused {
        0 => "no refusal is in the log".to_owned(),
        1 => "refused once".to_owned(),
        many => format!("refused {} times", format_count(many)),
    });
    if unenforced > 0 {
        let times = count_noun(unenforced, "time");
        text.push_str(&format!(
            "; {times} by a policy in mode shadow or mark only"
        ));
    }
    if report.admitted > 0 {
        let admitted = count_noun(report.admitted, "logged request");
        text.push_str(&format!("; {admitted} admitted"));
    }
    text.push_str(".\n");
    for searched in &report.searched {
        let key = match searched.key() {
            Some(key) => format!("key {key}, in the log {:032x}", key.id()),
            None if searched.values.is_none() => "part of a key: any key with it".to_owned(),
            None => "the key depends on each request".to_owned(),
        };
        let mode = searched.policy.mode.suffix();
        text.push_str(&format!("  {:<16} {key}{mode}\n", searched.policy.name));
        if let Some(now) = searched.describe_override() {
            text.push_str(&format!("  {:<16} {now}\n", ""));
        }
        push_partial_keys(&mut text, report, searched);
    }
    for skipped in report.skipped.iter().take(MAX_SKIPPED_POLICIES) {
        let (name, reason) = (&skipped.policy.name, &skipped.reason);
        text.push_str(&format!("  {name:<16} not searched: {reason}\n"));
    }
    if let Some(more @ 1..) = report.skipped.len().checked_sub(MAX_SKIPPED_POLICIES) {
        text.push_str(&format!("  {more} more policies are not searched\n"));
    }
    text
}

/// Lists the keys of which the given values are only a part.
fn push_partial_keys(text: &mut String, report: &WhyReport<'_>, searched: &SearchedPolicy<'_>) {
    let found = report.partial_keys.iter();
    for ((_, key_id), found) in found.filter(|((name, _), _)| *name == searched.policy.name) {
        let parts = searched.describe_positions(&found.positions).join(", ");
        let refused = format_count(found.refused);
        text.push_str(&format!(
            "  {:<16} partial match: {parts} of the key {key_id:032x} in the log, {refused} refused\n",
            ""
        ));
    }
}

fn render_coverage(report: &WhyReport<'_>) -> String {
    let lines = &report.lines;
    let mut text = format!(
        "\nRead {}, {} about requests",
        count_noun(lines.total, "line"),
        format_count(lines.requests)
    );
    match lines.range_us {
        Some((first_us, last_us)) => {
            let range = format_range(first_us, last_us);
            text.push_str(&format!(", {range} UTC"));
        }
        None => text.push_str(", none of them after --since"),
    }
    text.push_str(".\n");
    if lines.too_old > 0 {
        let too_old = count_noun(lines.too_old, "line");
        text.push_str(&format!("Older than --since: {too_old}.\n"));
    }
    if let Some(first) = &lines.first_unreadable {
        let unreadable = count_noun(lines.unreadable, "line");
        text.push_str(&format!(
            "Not readable: {unreadable}; the first is {}:{}: {}\n",
            first.log, first.line, first.text
        ));
    }
    for error in &lines.read_errors {
        text.push_str(&format!("The rest of a log could not be read: {error}.\n"));
    }
    for gap in report.describe_gaps() {
        text.push_str(&format!("Left out: {gap}.\n"));
    }
    text
}

fn push_omitted_rows(text: &mut String, rows: usize) {
    if let Some(omitted @ 1..) = rows.checked_sub(MAX_ROWS) {
        text.push_str(&format!("({omitted} earlier rows; --json has all)\n"));
    }
}

/// Policy and limit: `api/api-2, 1000 per 1h, fixed_window`.
fn describe_series(report: &WhyReport<'_>, name: &SeriesName) -> String {
    let text = name_series(name);
    let limit = find_limit(report, name).map(|limit| format_limit(&limit));
    let limit = limit.filter(|_| !name.is_block());
    match (limit, name.in_effect) {
        (_, Some(OverrideInEffect::Blocked)) => format!("{text}, blocked by an override"),
        (None, _) => text,
        (Some(limit), Some(OverrideInEffect::Amounts { .. })) => {
            format!("{text}, {limit}, by an override")
        }
        (Some(limit), Some(OverrideInEffect::StatedAmounts { .. })) => {
            format!("{text}, {limit}, as the request stated")
        }
        (Some(limit), _) => format!("{text}, {limit}"),
    }
}

/// The limit that refused, with the amounts that were in effect.
fn find_limit(report: &WhyReport<'_>, name: &SeriesName) -> Option<Limit> {
    let searched = report.find_searched(&name.policy)?;
    let named = searched.find_limit(name.limit.as_deref()?)?;
    Some(named.limit.with_override(name.in_effect))
}

/// `POLICY`, or `POLICY/LIMIT` if the names differ, and the decision unless a limit refused.
fn name_series(name: &SeriesName) -> String {
    let mut text = name.policy.to_string();
    let is_of_limit = |limit: &&str| **limit != *name.policy && !name.is_block();
    if let Some(limit) = name.limit.as_deref().filter(is_of_limit) {
        text.push_str(&format!("/{}", limit.escape_debug()));
    }
    match name.decision.as_str() {
        "rejected" => {}
        "shadow_rejected" => text.push_str(" (shadow)"),
        "marked" => text.push_str(" (mark)"),
        "degraded" => text.push_str(" (store unavailable)"),
        "blocked" => text.push_str(" (block_for)"),
        other => text.push_str(&format!(" ({})", other.escape_debug())),
    }
    text
}

fn describe_wait(report: &WhyReport<'_>, name: &SeriesName, episode: &RefusalPeriod) -> String {
    let is_zero = || find_limit(report, name).is_some_and(|limit| limit.requests == 0);
    match episode.min_wait_ms.zip(episode.max_wait_ms) {
        Some((shortest, longest)) => {
            let [shortest, longest] =
                [shortest, longest].map(|wait_ms| format_wait(wait_ms.saturating_mul(1000)));
            if shortest == longest {
                longest
            } else {
                format!("{shortest} to {longest}")
            }
        }
        None if !name.is_enforced() => "none".to_owned(),
        None if name.in_effect == Some(OverrideInEffect::Blocked) => "until removed".to_owned(),
        None if is_zero() => "never: limit 0".to_owned(),
        None => "unknown".to_owned(),
    }
}

/// `2026-11-22 09:14:03 – 09:16:59`, with one date if both times have the same.
fn format_range(first_us: u64, last_us: u64) -> String {
    match format_time(first_us) {
        first if first == format_time(last_us) => first,
        _ => format_time_range(first_us, last_us, '–'),
    }
}
