//! The results of a replay.

use super::number_format::{format_share, format_time};
use crate::policy::{PolicyAction, PolicyMode};
use crate::replay::log_merge::{LogLineCounts, LogSource};
use crate::replay::missing_fields::describe_missing_fields;
use crate::replay::parsers::{AccessLogFormat, RequiredHeaders};
use crate::replay::settings::Settings;
use crate::replay::simulator::{PolicySimulator, SimulationStats};
use crate::replay::statistics::{ReplayKeyStats, RequestSeries, SeriesBin};
use crate::replay::suggestions::{LimitProposal, LimitSuggestion};
use crate::text::{count_noun, format_count};
use indexmap::IndexSet;

/// All results of one replay.
#[derive(Debug)]
pub struct ReplayReport {
    pub(super) logs: Vec<LogSummary>,
    /// One policy set, or two that are compared.
    pub(super) sets: Vec<PolicySetReport>,
    pub(super) differences: SetDifferences,
    pub(super) suggest_percent: Option<f64>,
    /// Time range of the chart (s since the Unix epoch).
    pub(super) from_s: u64,
    pub(super) to_s: u64,
}

/// Numbers of requests that two policy sets decide differently.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SetDifferences {
    pub(crate) rejected_by_first_only: u64,
    pub(crate) rejected_by_second_only: u64,
}

/// Line counts of one log.
#[derive(Debug)]
pub(crate) struct LogSummary {
    pub(super) name: String,
    pub(super) format: AccessLogFormat,
    pub(super) counts: LogLineCounts,
    /// Error that ended the log early.
    pub(super) read_error: Option<String>,
}

/// Results of one policy set.
#[derive(Debug)]
pub(crate) struct PolicySetReport {
    pub(super) name: String,
    pub(super) stats: SimulationStats,
    pub(super) policies: Vec<ReplayPolicySummary>,
    pub(super) most_refused_keys: Vec<MostRefusedKey>,
    pub(super) suggestions: Vec<LimitSuggestion>,
    /// Sentences about log fields that were missing for the simulation.
    pub(super) missing_fields: Vec<String>,
    pub(super) evicted_counters: u64,
}

/// Description of one policy.
#[derive(Debug)]
pub(super) struct ReplayPolicySummary {
    pub(super) name: String,
    pub(super) mode: PolicyMode,
    /// `allow` or `deny`; `None` for a policy with limits.
    pub(super) action: Option<&'static str>,
    /// Whether the policy did not apply, because the log lacks its key.
    pub(super) is_left_out: bool,
}

/// One of the most refused keys.
#[derive(Debug)]
pub(super) struct MostRefusedKey {
    pub(super) policy: String,
    pub(super) mode: PolicyMode,
    pub(super) key: String,
    pub(super) stats: ReplayKeyStats,
}

impl ReplayReport {
    pub(crate) fn new(
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

    pub(super) fn request_count(&self) -> u64 {
        self.logs.iter().map(|log| log.counts.requests).sum()
    }

    pub(super) fn line_count(&self) -> u64 {
        self.logs.iter().map(|log| log.counts.lines).sum()
    }

    /// Divides the time range into at most `max_steps` bins: returns the bin width in seconds, and
    /// the number of bins. All bins have the same width, so that steady traffic has a flat chart.
    pub(super) fn time_grid(&self, max_steps: usize) -> (u64, usize) {
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

    /// The ends of the time range as texts.
    pub(super) fn time_texts(&self) -> [String; 2] {
        [self.from_s, self.to_s].map(|at_s| format_time(at_s * 1_000_000))
    }

    pub(super) fn resample_series(
        &self,
        series: &RequestSeries,
        max_steps: usize,
    ) -> Vec<SeriesBin> {
        let (width_s, count) = self.time_grid(max_steps);
        series.resample(self.from_s, width_s, count)
    }

    /// Returns what must be known before the results are read: requests and fields that the logs
    /// lack.
    pub(super) fn caveats(&self) -> Vec<String> {
        let coverage = self.sets.first().map(|set| &set.stats.field_coverage);
        let lacks_admitted = coverage
            .is_some_and(|seen| seen.requests > 0 && seen.answered_with_error == seen.requests);
        let only_rejections = lacks_admitted.then(|| {
            "no request in the log succeeded: a log of rejections (log.access = \"rejected\") lacks the admitted \
             requests, so most limits seem to refuse nothing; replay a log of all requests (log.access = \"all\")"
                .to_owned()
        });
        let sentences = self.sets.iter().flat_map(|set| {
            let prefix = self.set_prefix(set);
            let missing = set.missing_fields.iter();
            missing.map(move |sentence| format!("{prefix}{sentence}"))
        });
        only_rejections.into_iter().chain(sentences).collect()
    }

    /// Returns the name of a set before a sentence about it, if there are several sets.
    fn set_prefix(&self, set: &PolicySetReport) -> String {
        match self.sets.len() {
            0 | 1 => String::new(),
            _ => format!("{}: ", set.name.escape_debug()),
        }
    }

    /// Returns warnings about the logs and about the accuracy of the results, beside the caveats.
    pub(super) fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        for log in &self.logs {
            let (name, counts) = (log.name.escape_debug(), &log.counts);
            if let Some(error) = &log.read_error {
                warnings.push(format!(
                    "{name}: the log ended early ({error}); the report covers the lines before that"
                ));
            }
            if counts.broken_lines > 0 {
                warnings.push(format!(
                    "{name}: {} broken, of {}",
                    count_noun(counts.broken_lines, "line"),
                    format_count(counts.lines)
                ));
                for (line, text) in &counts.broken_examples {
                    let text = String::from_utf8_lossy(text);
                    warnings.push(format!("{name}: line {line}: {}", text.escape_debug()));
                }
            }
            if counts.other_records > 0 {
                warnings.push(format!(
                    "{name}: {} without a request",
                    count_noun(counts.other_records, "line")
                ));
            }
        }
        for set in &self.sets {
            if set.evicted_counters > 0 {
                warnings.push(format!(
                    "{}{} evicted at the memory limit; the numbers may be too low",
                    self.set_prefix(set),
                    count_noun(set.evicted_counters, "counter")
                ));
            }
        }
        // The following counts are the same for all policy sets, so those of the first set are
        // used.
        let first = self.sets.first().map(|set| &set.stats);
        let refused = first.map_or(0, |stats| stats.field_coverage.answered_429);
        if refused > 0 {
            warnings.push(format!(
                "{} answered with 429 at the time; the replay treats them like all others",
                count_noun(refused, "request")
            ));
        }
        let late = first.map_or(0, |stats| stats.late_requests);
        if late > 0 {
            warnings.push(format!(
                "{} more than 10 s out of order in the log; they count at the time of the preceding request",
                count_noun(late, "request")
            ));
        }
        warnings
    }
}

/// The name of a limit, with its policy if that differs.
pub(super) fn limit_title(suggestion: &LimitSuggestion) -> String {
    let policy = &*suggestion.policy;
    match &*suggestion.limit.name {
        name if name == policy => policy.to_owned(),
        name => format!("{policy} / {name}"),
    }
}

/// How many keys the suggested limit touches, and how many the present one, as ends of sentences.
pub(super) fn describe_touched_keys(proposal: &LimitProposal) -> [String; 2] {
    let touched = |touched, keys: &str| {
        let share = format_share(touched, proposal.sampled_keys);
        format!("{}{keys} ({share})", format_count(touched))
    };
    let of_keys = format!(" of {} keys", format_count(proposal.sampled_keys));
    let suggested = touched(proposal.touched_keys, &of_keys);
    [
        format!(
            "(a peak of {} and headroom) touches {suggested}",
            format_count(proposal.peak)
        ),
        format!("touches at most {}", touched(proposal.touched_keys_now, "")),
    ]
}

/// The highest peak within each share of the keys.
pub(super) fn describe_peaks(proposal: &LimitProposal) -> String {
    let quantiles = proposal.quantiles.iter();
    let quantiles = quantiles.map(|(of_1000, peak)| match of_1000 {
        1000 => format!("and the highest {}", format_count(*peak)),
        _ => {
            let percent = f64::from(*of_1000) / 10.0;
            format!("{percent} % of the keys up to {}", format_count(*peak))
        }
    });
    quantiles.collect::<Vec<_>>().join(", ")
}

impl LogSummary {
    pub(crate) fn from_source(source: LogSource) -> Self {
        let LogSource {
            reader,
            format,
            counts,
            ..
        } = source;
        Self {
            name: reader.name,
            format,
            counts,
            read_error: reader.read_error.map(|error| error.to_string()),
        }
    }
}

impl PolicySetReport {
    pub(crate) fn from_simulator(
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
                            mode: policy.mode,
                            // The key is shown without the policy name, which has its own column.
                            key: key
                                .readable_key
                                .split_once('/')
                                .map_or("(all requests)", |(_, values)| values)
                                .to_owned(),
                            stats: key.clone(),
                        }
                    }),
            );
            let peaks_and_percent = simulator.peaks.as_ref().zip(settings.suggest_percent);
            if let Some((peaks, percent)) = peaks_and_percent {
                suggestions.extend(peaks.suggest_limits(policy_index, policy, percent));
            }
        }
        most_refused_keys.sort_by_key(|top| std::cmp::Reverse(top.stats.refused));
        most_refused_keys.truncate(settings.top_keys);
        let left_out = &simulator.left_out;
        let summaries = policies
            .iter()
            .zip(0..)
            .map(|(policy, index)| ReplayPolicySummary {
                name: policy.name.to_string(),
                mode: policy.mode,
                is_left_out: left_out.contains(&index),
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
    pub(super) fn outcome_counts(&self) -> [(&'static str, u64); 6] {
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

    /// Returns a sentence that names the policies that did not apply, if there are any.
    pub(super) fn describe_left_out(&self) -> Option<String> {
        let left_out = self.policies.iter().filter(|policy| policy.is_left_out);
        let names: Vec<&str> = left_out.map(|policy| policy.name.as_str()).collect();
        (!names.is_empty()).then(|| format!("Without {}.", names.join(", ")))
    }

    /// How many requests of the named policy were refused; a dash if the set has no such policy, or
    /// if it matched none.
    pub(super) fn describe_refused(&self, policy: &str) -> String {
        let mut policies = self.policies.iter().zip(&self.stats.policies);
        let found = policies.find(|(summary, _)| summary.name == policy);
        match found.map(|(_, stats)| (stats.refused_count(), stats.matched_count())) {
            None | Some((_, 0)) => "–".to_owned(),
            Some((refused, matched)) => {
                format!(
                    "{} of {} refused",
                    format_count(refused),
                    format_count(matched)
                )
            }
        }
    }
}

/// Returns the names of the policies in either of two sets, without duplicates.
pub(super) fn merged_policy_names<'s>(
    first: &'s PolicySetReport,
    second: &'s PolicySetReport,
) -> Vec<&'s str> {
    let policies = first.policies.iter().chain(&second.policies);
    let names: IndexSet<&str> = policies.map(|policy| policy.name.as_str()).collect();
    names.into_iter().collect()
}
