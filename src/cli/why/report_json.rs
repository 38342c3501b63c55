//! The report as one JSON object.

use super::WhyReport;
use super::refusal_history::{RefusalPeriod, SeriesName};
use crate::policy::PolicyMode;
use crate::text::format_rfc3339;
use serde::Serialize;
use serde_json::{Value, json};

/// The refusals of one series in one period, or in one episode.
#[derive(Serialize)]
struct SeriesPeriod<'r> {
    #[serde(flatten)]
    name: &'r SeriesName,
    #[serde(flatten)]
    period: &'r RefusalPeriod,
    /// Only of an episode.
    #[serde(skip_serializing_if = "Option::is_none")]
    last_request: Option<&'r str>,
}

pub(super) fn render_json(report: &WhyReport<'_>) -> String {
    let searched = report.searched.iter().map(|searched| {
        json!({
            "policy": searched.policy.name,
            "mode": searched.policy.mode.name(),
            "shadow": searched.policy.mode == PolicyMode::Shadow,
            "key": searched.key().map(ToString::to_string),
            "key_hash": searched.key().map(|key| format!("{:032x}", key.id())),
            "override": searched.describe_override(),
        })
    });
    let skipped = report
        .skipped
        .iter()
        .map(|skipped| json!({ "policy": skipped.policy.name, "reason": skipped.reason }));
    let episodes = report.history.episodes();
    let episodes = episodes.iter().map(|(name, period)| SeriesPeriod {
        name,
        period,
        last_request: Some(&period.last_request),
    });
    let periods = report.history.periods();
    let periods = periods.iter().map(|(start_s, series)| {
        let series = series.iter().map(|(name, period)| SeriesPeriod {
            name,
            period,
            last_request: None,
        });
        let start = format_rfc3339(start_s.saturating_mul(1_000_000));
        json!({ "start": start, "refused_by": series.collect::<Vec<_>>() })
    });
    let without_key = report.without_key.iter().map(|((policy, decision), count)| {
        json!({ "policy": policy, "decision": decision, "requests": count })
    });
    let partial_keys = report.partial_keys.iter().map(|((policy, key_id), found)| {
        let searched = report.find_searched(policy);
        json!({
            "policy": policy,
            "key_hash": format!("{key_id:032x}"),
            "parts": searched.map(|one| one.describe_positions(&found.positions)),
            "refused": found.refused,
        })
    });
    let range = report
        .lines
        .range_us
        .map(|(first, last)| json!({ "from": format_rfc3339(first), "to": format_rfc3339(last) }));
    let document = json!({
        "key": report.values,
        "partial_keys": partial_keys.collect::<Vec<_>>(),
        "refused": report.history.total_refused(true),
        "shadow_rejected": report.history.total_refused(false),
        "admitted": report.admitted,
        "searched": searched.collect::<Vec<_>>(),
        "not_searched": skipped.collect::<Vec<_>>(),
        "episodes": episodes.collect::<Vec<_>>(),
        "period_s": report.history.period_s,
        "periods": periods.collect::<Vec<_>>(),
        "range": range,
        "lines": report.lines,
        "left_out": {
            "not_logged": report.omitted,
            "without_key": without_key.collect::<Vec<Value>>(),
            "lost_lines": report.dropped,
            "access_sample": report.log.access_sample,
            "notes": report.describe_gaps(),
        },
    });
    format!("{document:#}\n")
}
