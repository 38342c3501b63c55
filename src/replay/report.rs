//! The results of a replay, and their text, JSON and HTML reports. The JSON report is the
//! serialized [`ReplayReport`]; its times are seconds since the Unix epoch.

mod html;
mod text;

use super::log_merge::LogReport;
use super::missing_fields::FieldCoverage;
use super::statistics::{ReplayKeyStats, RequestSeries};
use super::suggestions::{LimitProposal, LimitSuggestion};
use super::{serialize_seconds, serialize_seconds_if_any};
use crate::text::{count_noun, format_count, format_time};
use indexmap::IndexSet;
use serde::Serialize;

/// Maximum number of bins of a time series in the JSON report.
const MAX_JSON_BINS: usize = 60;

/// All results of one replay.
#[derive(Debug, Default, Serialize)]
pub struct ReplayReport {
    requests: u64,
    lines: u64,
    /// Time range of the charts (s since the Unix epoch).
    from: u64,
    to: u64,
    logs: Vec<LogReport>,
    /// One policy set, or two that are compared.
    sets: Vec<PolicySetReport>,
    /// Numbers of requests that two policy sets decide differently.
    refused_by_first_only: Option<u64>,
    refused_by_second_only: Option<u64>,
    /// The caveats, then the other warnings.
    warnings: Vec<String>,
    #[serde(skip)]
    caveat_count: usize,
    /// The widest bin of the time series.
    #[serde(skip)]
    bin_width_s: u64,
    #[serde(skip)]
    suggest_percent: Option<f64>,
}

/// Request counts and other results of one policy set.
#[derive(Debug, Default, Serialize)]
pub(super) struct PolicySetReport {
    /// Name of the configuration.
    pub(super) config: String,
    pub(super) forwarded: u64,
    pub(super) delayed: u64,
    /// Longest delay of a request (µs).
    #[serde(rename = "longest_delay_seconds", serialize_with = "serialize_seconds")]
    pub(super) max_delay_us: u64,
    pub(super) limited: u64,
    pub(super) denied: u64,
    pub(super) bad_key: u64,
    /// Requests that are rejected before any policy is evaluated.
    pub(super) malformed: u64,
    /// Requests older than a request that was already simulated.
    pub(super) late: u64,
    /// Active counters that the stores evicted at their size limits.
    pub(super) evicted_counters: u64,
    pub(super) series: TimeSeries,
    /// The policies in the order of the policy table.
    pub(super) policies: Vec<PolicyReport>,
    /// The most refused keys.
    pub(super) top: Vec<RefusedKeyReport>,
    /// Sentences about log fields that were missing for the simulation.
    pub(super) lacks: Vec<String>,
    /// Requests that the server answered with status 429 at the time of the log.
    pub(super) refused_then: u64,
    #[serde(skip)]
    pub(super) field_coverage: FieldCoverage,
    #[serde(skip)]
    pub(super) first_request_us: u64,
    #[serde(skip)]
    pub(super) last_request_us: u64,
}

/// Request counts and other results of one policy.
#[derive(Debug, Default, Serialize)]
pub(super) struct PolicyReport {
    pub(super) name: String,
    /// Name of its mode.
    pub(super) mode: &'static str,
    pub(super) shadow: bool,
    /// `allow`, `deny`, or `limit` for a policy with limits.
    pub(super) action: &'static str,
    /// Whether the policy did not apply, because the log lacks its key.
    pub(super) left_out: bool,
    pub(super) matched: u64,
    #[serde(skip)]
    pub(super) refused: u64,
    pub(super) allowed: u64,
    pub(super) delayed: u64,
    pub(super) rejected: u64,
    pub(super) blocked: u64,
    pub(super) denied: u64,
    pub(super) exempt: u64,
    pub(super) shadow_rejected: u64,
    pub(super) marked: u64,
    pub(super) keys: u64,
    /// Whether no key was evicted from the statistics.
    pub(super) keys_exact: bool,
    /// Number of keys that were refused at least once.
    pub(super) keys_touched: u64,
    #[serde(rename = "first_refused", serialize_with = "serialize_seconds_if_any")]
    pub(super) first_refused_us: u64,
    #[serde(rename = "last_refused", serialize_with = "serialize_seconds_if_any")]
    pub(super) last_refused_us: u64,
    pub(super) series: TimeSeries,
    pub(super) suggested: Vec<LimitSuggestion>,
}

/// One of the most refused keys.
#[derive(Debug, Serialize)]
pub(super) struct RefusedKeyReport {
    pub(super) policy: String,
    #[serde(skip)]
    pub(super) mode: &'static str,
    pub(super) shadow: bool,
    /// The key without the policy name.
    pub(super) key: String,
    #[serde(flatten)]
    pub(super) stats: ReplayKeyStats,
}

/// Requests over time: as counted, and on the time grid of the JSON report.
#[derive(Debug, Default, Serialize)]
pub(super) struct TimeSeries {
    #[serde(skip)]
    pub(super) counts: RequestSeries,
    #[serde(flatten)]
    json_bins: PlottedSeries,
}

/// A time series on the common time grid of the report.
#[derive(Debug, Default, Serialize)]
struct PlottedSeries {
    step_seconds: u64,
    requests: Vec<u64>,
    refused: Vec<u64>,
}

impl ReplayReport {
    pub(super) fn new(
        logs: Vec<LogReport>,
        sets: Vec<PolicySetReport>,
        [refused_by_first_only, refused_by_second_only]: [u64; 2],
        suggest_percent: Option<f64>,
    ) -> Self {
        let from = sets
            .iter()
            .map(|set| set.first_request_us / 1_000_000)
            .min();
        let to = sets
            .iter()
            .map(|set| set.last_request_us / 1_000_000 + 1)
            .max();
        let bin_width_s = sets.iter().map(|set| set.series.counts.bin_width_s).max();
        let is_comparison = sets.len() > 1;
        let mut report = Self {
            requests: logs.iter().map(|log| log.requests).sum(),
            lines: logs.iter().map(|log| log.lines).sum(),
            from: from.unwrap_or_default(),
            to: to.unwrap_or_default(),
            logs,
            sets,
            refused_by_first_only: is_comparison.then_some(refused_by_first_only),
            refused_by_second_only: is_comparison.then_some(refused_by_second_only),
            bin_width_s: bin_width_s.unwrap_or(1),
            suggest_percent,
            ..Self::default()
        };
        report.warnings = report.find_caveats();
        report.caveat_count = report.warnings.len();
        report.warnings.extend(report.find_warnings());
        let mut sets = std::mem::take(&mut report.sets);
        for set in &mut sets {
            let of_policies = set.policies.iter_mut().map(|policy| &mut policy.series);
            for series in of_policies.chain([&mut set.series]) {
                series.json_bins = report.plot(&series.counts, MAX_JSON_BINS);
            }
        }
        report.sets = sets;
        report
    }

    /// Renders the report for scripts.
    pub fn render_json(&self) -> String {
        let value = serde_json::to_value(self).unwrap_or_default();
        format!("{value:#}\n")
    }

    /// Resamples a series into at most `max_steps` bins over the time range. All bins have the same
    /// width, so that steady traffic has a flat chart.
    fn plot(&self, series: &RequestSeries, max_steps: usize) -> PlottedSeries {
        let span_s = self.to.saturating_sub(self.from).max(1);
        let step_seconds = span_s
            .div_ceil((max_steps as u64).max(1))
            .next_multiple_of(self.bin_width_s);
        let count = usize::try_from(span_s.div_ceil(step_seconds)).unwrap_or(max_steps);
        let bins = series.resample(self.from, step_seconds, count.clamp(1, max_steps.max(1)));
        let (requests, refused) = bins.iter().map(|bin| (bin.requests, bin.refused)).unzip();
        PlottedSeries {
            step_seconds,
            requests,
            refused,
        }
    }

    /// Numbers of requests that only the second policy set refuses, and only the first.
    fn differences(&self) -> [u64; 2] {
        [self.refused_by_second_only, self.refused_by_first_only].map(Option::unwrap_or_default)
    }

    /// The ends of the time range as texts.
    fn time_texts(&self) -> [String; 2] {
        [self.from, self.to].map(|at_s| format_time(at_s * 1_000_000))
    }

    /// What must be known before the results are read: requests and fields that the logs lack.
    fn caveats(&self) -> &[String] {
        self.warnings.get(..self.caveat_count).unwrap_or_default()
    }

    /// Warnings about the logs and about the accuracy of the results, beside the caveats.
    fn other_warnings(&self) -> &[String] {
        self.warnings.get(self.caveat_count..).unwrap_or_default()
    }

    fn find_caveats(&self) -> Vec<String> {
        let coverage = self.sets.first().map(|set| &set.field_coverage);
        let lacks_admitted = coverage
            .is_some_and(|seen| seen.requests > 0 && seen.answered_with_error == seen.requests);
        let only_rejections = lacks_admitted.then(|| {
            "no request in the log succeeded: a log of rejections (log.access = \"rejected\") lacks the admitted \
             requests, so most limits seem to refuse nothing; replay a log of all requests (log.access = \"all\")"
                .to_owned()
        });
        let sentences = self.sets.iter().flat_map(|set| {
            let prefix = self.set_prefix(set);
            let missing = set.lacks.iter();
            missing.map(move |sentence| format!("{prefix}{sentence}"))
        });
        only_rejections.into_iter().chain(sentences).collect()
    }

    /// Returns the name of a set before a sentence about it, if there are several sets.
    fn set_prefix(&self, set: &PolicySetReport) -> String {
        match self.sets.len() {
            0 | 1 => String::new(),
            _ => format!("{}: ", set.config.escape_debug()),
        }
    }

    fn find_warnings(&self) -> Vec<String> {
        let mut warnings: Vec<_> = self
            .logs
            .iter()
            .flat_map(LogReport::find_warnings)
            .collect();
        for set in self.sets.iter().filter(|set| set.evicted_counters > 0) {
            let (prefix, counters) = (
                self.set_prefix(set),
                count_noun(set.evicted_counters, "counter"),
            );
            warnings.push(format!(
                "{prefix}{counters} evicted at the memory limit; the numbers may be too low"
            ));
        }
        // The following counts are the same for all policy sets, so those of the first set are
        // used.
        let first = self.sets.first();
        let refused = first.map_or(0, |set| set.refused_then);
        let late = first.map_or(0, |set| set.late);
        for (count, text) in [
            (
                refused,
                "answered with 429 at the time; the replay treats them like all others",
            ),
            (
                late,
                "more than 10 s out of order in the log; they count at the time of the preceding request",
            ),
        ] {
            if count > 0 {
                warnings.push(format!("{} {text}", count_noun(count, "request")));
            }
        }
        warnings
    }
}

impl PolicySetReport {
    /// Returns the number of requests by outcome.
    fn outcome_counts(&self) -> [(&'static str, u64); 6] {
        [
            ("forwarded", self.forwarded),
            ("of them delayed", self.delayed),
            ("rejected (429)", self.limited),
            ("denied (403)", self.denied),
            ("without a key (400)", self.bad_key),
            ("malformed (400)", self.malformed),
        ]
    }

    /// Returns a sentence that names the policies that did not apply, if there are any.
    fn describe_left_out(&self) -> Option<String> {
        let left_out = self.policies.iter().filter(|policy| policy.left_out);
        let names: Vec<&str> = left_out.map(|policy| policy.name.as_str()).collect();
        (!names.is_empty()).then(|| format!("Without {}.", names.join(", ")))
    }

    /// How many requests of the named policy were refused; a dash if the set has no such policy, or
    /// if it matched none.
    fn describe_refused(&self, policy: &str) -> String {
        let mut policies = self.policies.iter();
        match policies.find(|found| found.name == policy && found.matched > 0) {
            None => "–".to_owned(),
            Some(policy) => {
                let (refused, matched) =
                    (format_count(policy.refused), format_count(policy.matched));
                format!("{refused} of {matched} refused")
            }
        }
    }

    fn suggestions(&self) -> impl Iterator<Item = &LimitSuggestion> {
        self.policies.iter().flat_map(|policy| &policy.suggested)
    }
}

/// Returns the names of the policies in either of two sets, without duplicates.
fn merged_policy_names(sets: [&PolicySetReport; 2]) -> IndexSet<&str> {
    let policies = sets.into_iter().flat_map(|set| &set.policies);
    policies.map(|policy| policy.name.as_str()).collect()
}

impl PolicyReport {
    /// Formats the number of keys (`>5` if keys were evicted), and of the touched ones. Both are
    /// `absent` for a policy without limits.
    fn format_key_counts(&self, absent: &str) -> [String; 2] {
        if self.action != "limit" {
            return [absent, absent].map(str::to_owned);
        }
        let mark = if self.keys_exact { "" } else { ">" };
        let keys = format!("{mark}{}", format_count(self.keys));
        [keys, format_count(self.keys_touched)]
    }
}

impl LimitProposal {
    /// How many keys the suggested limit touches, and how many the present one, as ends of
    /// sentences.
    fn describe_touched_keys(&self) -> [String; 2] {
        let touched = |touched, keys: &str| {
            let share = format_share(touched, self.keys);
            format!("{}{keys} ({share})", format_count(touched))
        };
        let of_keys = format!(" of {} keys", format_count(self.keys));
        let suggested = touched(self.touched, &of_keys);
        [
            format!(
                "(a peak of {} and headroom) touches {suggested}",
                format_count(self.peak)
            ),
            format!("touches at most {}", touched(self.touched_now, "")),
        ]
    }

    /// The highest peak within each share of the keys.
    fn describe_peaks(&self) -> String {
        let quantiles = self.quantiles.iter();
        let quantiles = quantiles.map(|(share, peak)| match share * 100.0 {
            100.0.. => format!("and the highest {}", format_count(*peak)),
            percent => format!("{percent} % of the keys up to {}", format_count(*peak)),
        });
        quantiles.collect::<Vec<_>>().join(", ")
    }
}

/// Formats a share as `12.3 %`. A small nonzero share is not rounded to zero.
fn format_share(part: u64, whole: u64) -> String {
    match part as f64 * 100.0 / whole.max(1) as f64 {
        _ if part == 0 || whole == 0 => "0 %".to_owned(),
        share if share < 0.01 => "<0.01 %".to_owned(),
        share if share < 10.0 => format!("{share:.2} %"),
        share => format!("{share:.1} %"),
    }
}
