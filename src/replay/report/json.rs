//! The report as one JSON object for scripts. Times are seconds since the Unix epoch.

use super::results::{
    LogSummary, MostRefusedKey, PolicySetReport, ReplayPolicySummary, ReplayReport,
};
use crate::policy::PolicyMode;
use crate::replay::simulator::ReplayPolicyStats;
use crate::replay::statistics::RequestSeries;
use crate::replay::suggestions::LimitSuggestion;
use serde_json::{Value, json};

/// Maximum number of bins in a time series.
const MAX_SERIES_BINS: usize = 60;

pub(super) fn render_json(report: &ReplayReport) -> String {
    let logs: Vec<Value> = report.logs.iter().map(log_summary_to_json).collect();
    let sets: Vec<Value> = report
        .sets
        .iter()
        .map(|set| policy_set_to_json(report, set))
        .collect();
    // Differences exist only between two policy sets.
    let differences = (report.sets.len() > 1).then_some(report.differences);
    let warnings = [report.caveats(), report.warnings()].concat();
    let value = json!({
        "requests": report.request_count(),
        "lines": report.line_count(),
        "from": report.from_s,
        "to": report.to_s,
        "logs": logs,
        "sets": sets,
        "refused_by_second_only": differences.map(|counts| counts.rejected_by_second_only),
        "refused_by_first_only": differences.map(|counts| counts.rejected_by_first_only),
        "warnings": warnings,
    });
    format!("{value:#}\n")
}

fn log_summary_to_json(log: &LogSummary) -> Value {
    json!({
        "name": log.name,
        "format": log.format.into_str(),
        "lines": log.counts.lines,
        "requests": log.counts.requests,
        "other": log.counts.other_records,
        "broken": log.counts.broken_lines,
        "fault": log.read_error,
    })
}

fn policy_set_to_json(report: &ReplayReport, set: &PolicySetReport) -> Value {
    let stats = &set.stats;
    let policies = set.policies.iter().zip(&stats.policies);
    let policies = policies.map(|(summary, stats)| policy_to_json(report, set, summary, stats));
    json!({
        "config": set.name,
        "forwarded": stats.forwarded,
        "delayed": stats.delayed,
        "longest_delay_seconds": micros_to_seconds(stats.max_delay_us),
        "limited": stats.limited,
        "denied": stats.denied,
        "bad_key": stats.bad_key,
        "malformed": stats.malformed,
        "late": stats.late_requests,
        "refused_then": stats.field_coverage.answered_429,
        "evicted_counters": set.evicted_counters,
        "series": series_to_json(report, &stats.series),
        "policies": policies.collect::<Vec<_>>(),
        "top": set.most_refused_keys.iter().map(most_refused_key_to_json).collect::<Vec<_>>(),
        "lacks": set.missing_fields,
    })
}

fn policy_to_json(
    report: &ReplayReport,
    set: &PolicySetReport,
    summary: &ReplayPolicySummary,
    stats: &ReplayPolicyStats,
) -> Value {
    let suggestions = set.suggestions.iter();
    let suggestions = suggestions.filter(|one| *one.policy == *summary.name);
    let (keys, exact) = stats.keys.key_count();
    let refused_at = |at_us: u64| (stats.refused_count() > 0).then(|| micros_to_seconds(at_us));
    json!({
        "name": summary.name,
        "mode": summary.mode.name(),
        "shadow": summary.mode == PolicyMode::Shadow,
        "left_out": summary.is_left_out,
        "action": summary.action.unwrap_or("limit"),
        "matched": stats.matched_count(),
        "allowed": stats.allowed,
        "delayed": stats.delayed,
        "rejected": stats.rejected,
        "blocked": stats.blocked,
        "denied": stats.denied,
        "exempt": stats.exempt,
        "shadow_rejected": stats.shadow_rejected,
        "marked": stats.marked,
        "keys": keys,
        "keys_exact": exact,
        "keys_touched": stats.keys.refused_key_count(),
        "first_refused": refused_at(stats.first_refused_us),
        "last_refused": refused_at(stats.last_refused_us),
        "series": series_to_json(report, &stats.series),
        "suggested": suggestions.map(suggestion_to_json).collect::<Vec<_>>(),
    })
}

fn suggestion_to_json(suggestion: &LimitSuggestion) -> Value {
    let limit = &suggestion.limit;
    let proposal = suggestion.proposal.as_ref().ok().map(|proposal| {
        json!({
            "requests": proposal.requests,
            "peak": proposal.peak,
            "touched": proposal.touched_keys,
            "touched_now": proposal.touched_keys_now,
            "keys": proposal.sampled_keys,
            "one_key_in": proposal.keys_per_sample,
            "quantiles": proposal.quantiles.iter().map(|(share, peak)| json!([f64::from(*share) / 1000.0, peak]))
                .collect::<Vec<_>>(),
            "histogram": proposal.histogram,
        })
    });
    json!({
        "limit": &*limit.name,
        "now": limit.limit.requests,
        "per_seconds": micros_to_seconds(limit.limit.per_us),
        "drawn": proposal,
        "reason": suggestion.proposal.as_ref().err(),
    })
}

fn series_to_json(report: &ReplayReport, series: &RequestSeries) -> Value {
    let bins = report.resample_series(series, MAX_SERIES_BINS);
    json!({
        "step_seconds": report.time_grid(MAX_SERIES_BINS).0,
        "requests": bins.iter().map(|bin| bin.requests).collect::<Vec<_>>(),
        "refused": bins.iter().map(|bin| bin.refused).collect::<Vec<_>>(),
    })
}

fn most_refused_key_to_json(top: &MostRefusedKey) -> Value {
    json!({
        "policy": top.policy,
        "shadow": top.mode == PolicyMode::Shadow,
        "key": top.key,
        "requests": top.stats.requests,
        "refused": top.stats.refused,
        "error": top.stats.error,
        "first": micros_to_seconds(top.stats.first_refused_us),
        "last": micros_to_seconds(top.stats.last_refused_us),
    })
}

#[allow(
    clippy::cast_precision_loss,
    reason = "microseconds of this century are exact in a double"
)]
fn micros_to_seconds(us: u64) -> f64 {
    us as f64 / 1e6
}
