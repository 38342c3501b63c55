//! The results of a replay, and their text, JSON and HTML reports.

mod html;
mod html_escape;
mod html_plots;
mod json;
mod text;

use super::log_merge::LogSource;
use super::missing_fields::describe_missing_fields;
use super::parsers::{AccessLogFormat, RequiredHeaders};
use super::settings::Settings;
use super::simulator::{PolicySimulator, ReplayPolicyStats, SimulationStats};
use super::statistics::{RequestSeries, SeriesBin};
use super::suggestions::{LimitSuggestion, PeakDemandTracker};
use crate::policy::PolicyAction;
use time::OffsetDateTime;
use time::macros::format_description;

/// All results of one replay.
#[derive(Debug)]
pub struct ReplayReport {
    logs: Vec<LogSummary>,
    /// One policy set, or two that are compared.
    sets: Vec<PolicySetReport>,
    differences: SetDifferences,
    suggest_percent: Option<f64>,
    /// Time range of the chart (s since the Unix epoch).
    from_s: u64,
    to_s: u64,
}

/// Requests that the second of two policy sets decides differently from the first.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SetDifferences {
    pub(super) refused_by_first_only: u64,
    pub(super) refused_by_second_only: u64,
}

/// Line counts of one log.
#[derive(Debug)]
pub(super) struct LogSummary {
    name: String,
    format: AccessLogFormat,
    lines: u64,
    requests: u64,
    other_records: u64,
    broken_lines: u64,
    /// Line numbers and beginnings of broken lines, escaped for terminals.
    broken_examples: Vec<(u64, String)>,
    /// Error that ended the log early.
    read_error: Option<String>,
}

/// Results of one policy set.
#[derive(Debug)]
pub(super) struct PolicySetReport {
    name: String,
    stats: SimulationStats,
    policies: Vec<ReplayPolicySummary>,
    most_refused_keys: Vec<MostRefusedKey>,
    suggestions: Vec<(usize, Vec<LimitSuggestion>)>,
    /// Sentences about log fields that were missing for the simulation.
    missing_fields: Vec<String>,
    evicted_counters: u64,
}

/// Description of one policy.
#[derive(Debug)]
struct ReplayPolicySummary {
    name: String,
    shadow: bool,
    /// The action of a policy without limits.
    action: Option<&'static str>,
}

/// One of the most refused keys.
#[derive(Debug)]
struct MostRefusedKey {
    policy: String,
    shadow: bool,
    key: String,
    requests: u64,
    refused: u64,
    error: u64,
    first_refused_us: u64,
    last_refused_us: u64,
}

impl ReplayReport {
    pub(super) fn new(
        logs: Vec<LogSummary>,
        sets: Vec<PolicySetReport>,
        differences: SetDifferences,
        settings: &Settings,
    ) -> Self {
        let from_s = sets
            .iter()
            .map(|set| set.stats.first_request_us / 1_000_000)
            .min()
            .unwrap_or_default();
        let to_s = sets
            .iter()
            .map(|set| set.stats.last_request_us / 1_000_000 + 1)
            .max()
            .unwrap_or_default();
        Self {
            logs,
            sets,
            differences,
            suggest_percent: settings.suggest_percent,
            from_s,
            to_s,
        }
    }

    /// Renders the report for a terminal with `width` columns.
    pub fn render_text(&self, width: usize, is_bold: bool) -> String {
        text::render_text(self, width, is_bold)
    }

    /// Renders the report for scripts.
    pub fn render_json(&self) -> String {
        json::render_json(self)
    }

    /// Renders the report as a self-contained page.
    pub fn render_html(&self) -> String {
        html::render_html(self)
    }

    fn request_count(&self) -> u64 {
        self.logs.iter().map(|log| log.requests).sum()
    }

    fn line_count(&self) -> u64 {
        self.logs.iter().map(|log| log.lines).sum()
    }

    /// Divides the time range into at most `max_steps` bins: returns the bin width in seconds, and
    /// the number of bins. All bins have the same width, so that steady traffic has a flat chart.
    fn time_grid(&self, max_steps: usize) -> (u64, usize) {
        let span_s = self.to_s.saturating_sub(self.from_s).max(1);
        let bin_width_s = self
            .sets
            .iter()
            .map(|set| set.stats.series.bin_width_s())
            .max()
            .unwrap_or(1);
        let width_s = span_s
            .div_ceil((max_steps as u64).max(1))
            .next_multiple_of(bin_width_s.max(1));
        (
            width_s,
            usize::try_from(span_s.div_ceil(width_s))
                .unwrap_or(max_steps)
                .clamp(1, max_steps.max(1)),
        )
    }

    fn resample_series(&self, series: &RequestSeries, max_steps: usize) -> Vec<SeriesBin> {
        let (width_s, count) = self.time_grid(max_steps);
        series.resample(self.from_s, width_s, count)
    }

    /// Returns the caveats of the results.
    fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        for log in &self.logs {
            let name = log.name.escape_debug();
            if let Some(error) = &log.read_error {
                warnings.push(format!(
                    "{name}: the log ended early ({error}); the report covers the lines before that"
                ));
            }
            if log.broken_lines > 0 {
                warnings.push(format!(
                    "{name}: {} of {} lines are broken",
                    format_count(log.broken_lines),
                    format_count(log.lines)
                ));
                warnings.extend(
                    log.broken_examples
                        .iter()
                        .map(|(line, text)| format!("{name}: line {line}: {text}")),
                );
            }
            if log.other_records > 0 {
                warnings.push(format!(
                    "{name}: {} lines are not requests",
                    format_count(log.other_records)
                ));
            }
        }
        for set in &self.sets {
            let prefix = if self.sets.len() > 1 {
                format!("{}: ", set.name.escape_debug())
            } else {
                String::new()
            };
            warnings.extend(
                set.missing_fields
                    .iter()
                    .map(|sentence| format!("{prefix}{sentence}")),
            );
            if set.evicted_counters > 0 {
                warnings.push(format!(
                    "{prefix}{} counters were evicted at the memory limit; the numbers may be too low",
                    format_count(set.evicted_counters)
                ));
            }
        }
        // These counts are of the log, so all policy sets have the same.
        if let Some(refused) = self
            .sets
            .first()
            .map(|set| set.stats.field_coverage.answered_429)
            .filter(|refused| *refused > 0)
        {
            warnings.push(format!(
                "{} requests were answered with 429 at the time; the replay treats them like all others",
                format_count(refused)
            ));
        }
        if let Some(late) = self
            .sets
            .first()
            .map(|set| set.stats.late_requests)
            .filter(|late| *late > 0)
        {
            warnings.push(format!(
                "{} requests are more than 10 s out of order in the log; they count at the time of the preceding request",
                format_count(late)
            ));
        }
        warnings
    }
}

impl LogSummary {
    pub(super) fn from_source(source: LogSource, format: AccessLogFormat) -> Self {
        let LogSource {
            reader: input,
            counts,
            ..
        } = source;
        let escape_bytes = |bytes: &[u8]| String::from_utf8_lossy(bytes).escape_debug().to_string();
        Self {
            name: input.name,
            format,
            lines: counts.lines,
            requests: counts.requests,
            other_records: counts.other_records,
            broken_lines: counts.broken_lines,
            broken_examples: counts
                .broken_examples
                .iter()
                .map(|(line, text)| (*line, escape_bytes(text)))
                .collect(),
            read_error: input.read_error.map(|error| error.to_string()),
        }
    }
}

impl PolicySetReport {
    pub(super) fn from_simulator(
        name: String,
        simulator: PolicySimulator<'_>,
        required_headers: &RequiredHeaders,
        settings: &Settings,
    ) -> Self {
        let policies = simulator.table.policies();
        let mut most_refused_keys = Vec::new();
        let mut suggestions = Vec::new();
        for (policy_index, (policy, stats)) in
            policies.iter().zip(&simulator.stats.policies).enumerate()
        {
            most_refused_keys.extend(
                stats
                    .keys
                    .most_refused_keys(settings.top_keys)
                    .into_iter()
                    .map(|key| {
                        MostRefusedKey {
                            policy: policy.name.to_string(),
                            shadow: policy.shadow,
                            // The report shows the policy name in its own column.
                            key: key
                                .readable_key
                                .split_once('/')
                                .map_or("(all requests)", |(_, values)| values)
                                .to_owned(),
                            requests: key.requests,
                            refused: key.refused,
                            error: key.error,
                            first_refused_us: key.first_refused_us,
                            last_refused_us: key.last_refused_us,
                        }
                    }),
            );
            let peaks_and_percent = simulator.peaks.as_ref().zip(settings.suggest_percent);
            if let (PolicyAction::Limit(quota), Some((peaks, percent))) =
                (&policy.action, peaks_and_percent)
            {
                suggestions.push((
                    policy_index,
                    PeakDemandTracker::suggest_limits(peaks, policy_index, &quota.limits, percent),
                ));
            }
        }
        most_refused_keys.sort_by_key(|top| std::cmp::Reverse(top.refused));
        most_refused_keys.truncate(settings.top_keys);
        let summaries = policies.iter().map(|policy| ReplayPolicySummary {
            name: policy.name.to_string(),
            shadow: policy.shadow,
            action: match policy.action {
                PolicyAction::Limit(_) => None,
                PolicyAction::Allow => Some("allow"),
                PolicyAction::Deny => Some("deny"),
            },
        });
        Self {
            name,
            policies: summaries.collect(),
            most_refused_keys,
            suggestions,
            missing_fields: describe_missing_fields(
                simulator.table,
                &simulator.stats.field_coverage,
                required_headers,
            ),
            evicted_counters: simulator.evicted_counters(),
            stats: simulator.stats,
        }
    }
}

impl PolicySetReport {
    /// Returns the number of requests by outcome.
    fn outcomes(&self) -> [(&'static str, u64); 6] {
        let stats = &self.stats;
        [
            ("forwarded", stats.forwarded),
            ("of them delayed", stats.delayed),
            ("rejected (429)", stats.limited),
            ("denied (403)", stats.denied),
            ("without a key (400)", stats.bad_key),
            ("malformed (400)", stats.malformed),
        ]
    }

    /// Returns the statistics of the named policy, if the set has it.
    fn policy_stats(&self, policy: &str) -> Option<&ReplayPolicyStats> {
        let at = self
            .policies
            .iter()
            .position(|summary| summary.name == policy)?;
        self.stats.policies.get(at)
    }
}

/// Returns the policy names of two sets without duplicates.
fn policy_names<'s>(first: &'s PolicySetReport, second: &'s PolicySetReport) -> Vec<&'s str> {
    let mut names: Vec<&str> = Vec::new();
    for policy in first.policies.iter().chain(&second.policies) {
        if !names.contains(&policy.name.as_str()) {
            names.push(&policy.name);
        }
    }
    names
}

/// Formats a number as `1,234,567`.
fn format_count(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Formats a time as `2026-11-19 13:55:36` in UTC.
fn format_time(at_us: u64) -> String {
    let format = format_description!("[year]-[month]-[day] [hour]:[minute]:[second]");
    let at = i64::try_from(at_us / 1_000_000)
        .ok()
        .and_then(|at_s| OffsetDateTime::from_unix_timestamp(at_s).ok());
    at.and_then(|at| at.format(&format).ok())
        .unwrap_or_default()
}

/// Formats a time range. The date appears once if both times have the same.
fn format_time_range(from_us: u64, to_us: u64) -> String {
    let (from, to) = (format_time(from_us), format_time(to_us));
    let time = match (from.get(..10), to.split_once(' ')) {
        (Some(from_day), Some((day, time))) if day == from_day => time,
        _ => &to,
    };
    format!("{from} … {time}")
}

#[allow(clippy::cast_precision_loss, reason = "shares are for people")]
fn percent_of(part: u64, whole: u64) -> f64 {
    if whole == 0 {
        0.0
    } else {
        part as f64 * 100.0 / whole as f64
    }
}

/// Formats a share as `12.3 %`. A small nonzero share is not rounded to zero.
fn format_share(part: u64, whole: u64) -> String {
    match percent_of(part, whole) {
        _ if part == 0 => "0 %".to_owned(),
        share if share < 0.01 => "<0.01 %".to_owned(),
        share if share < 10.0 => format!("{share:.2} %"),
        share => format!("{share:.1} %"),
    }
}

/// Formats the number of keys; `>5` if keys were evicted.
fn format_key_count(stats: &ReplayPolicyStats) -> String {
    let (keys, exact) = stats.keys.key_count();
    format!("{}{}", if exact { "" } else { ">" }, format_count(keys))
}

#[cfg(test)]
mod tests {
    use super::format_time_range;

    #[test]
    fn a_time_range_repeats_the_date_only_if_it_differs() {
        let from_us = 1_795_000_000_000_000;
        let to = |seconds: u64| format_time_range(from_us, from_us + seconds * 1_000_000);
        assert_eq!(to(60), "2026-11-18 11:06:40 … 11:07:40");
        assert_eq!(to(86_460), "2026-11-18 11:06:40 … 2026-11-19 11:07:40");
    }
}
