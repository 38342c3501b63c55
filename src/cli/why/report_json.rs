//! The report as one JSON object.

use super::WhyReport;
use super::refusal_history::{RefusalPeriod, SeriesName};
use crate::admin::add_fields;
use crate::limiter::OverrideInEffect;
use crate::policy::PolicyMode;
use crate::replay::format_time;
use serde_json::{Value, json};

pub(super) fn render_json(report: &WhyReport<'_>) -> String {
    let lines = &report.lines;
    let searched = report.searched.iter().map(|searched| {
        json!({
            "policy": searched.policy.name,
            "mode": searched.policy.mode.name(),
            "shadow": searched.policy.mode == PolicyMode::Shadow,
            "key": searched.key.as_ref().map(ToString::to_string),
            "key_hash": searched.key.as_ref().map(|key| format!("{:032x}", key.id())),
            "override": searched.describe_override(),
        })
    });
    let skipped = report
        .skipped
        .iter()
        .map(|skipped| json!({ "policy": skipped.policy.name, "reason": skipped.reason }));
    let episodes = report.history.episodes();
    let episodes = episodes.iter().map(|(name, episode)| {
        let mut fields = period_to_json(name, episode);
        add_fields(&mut fields, json!({ "last_request": episode.last_request }));
        fields
    });
    let periods = report.history.periods();
    let periods = periods.iter().map(|(start_s, series)| {
        let series = series.iter().map(|(name, period)| period_to_json(name, period));
        json!({ "start": rfc3339(start_s.saturating_mul(1_000_000)), "refused_by": series.collect::<Vec<_>>() })
    });
    let without_key = report.without_key.iter().map(|((policy, decision), count)| {
        json!({ "policy": policy, "decision": decision, "requests": count })
    });
    let first_unreadable = lines
        .first_unreadable
        .as_ref()
        .map(|(log, number, quoted)| json!({ "log": log, "line": number, "text": quoted }));
    let partial_keys = report.partial_keys.iter().map(|((policy, key_id), found)| {
        let parts = report
            .find_searched(policy)
            .map(|one| one.describe_positions(&found.positions));
        json!({
            "policy": policy,
            "key_hash": format!("{key_id:032x}"),
            "parts": parts,
            "refused": found.refused,
        })
    });
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
        "range": lines.range_us.map(|(first, last)| json!({ "from": rfc3339(first), "to": rfc3339(last) })),
        "lines": {
            "read": lines.total,
            "requests": lines.requests,
            "before_since": lines.too_old,
            "unreadable": lines.unreadable,
            "first_unreadable": first_unreadable,
            "read_errors": lines.read_errors,
        },
        "left_out": {
            "not_logged": report.omitted,
            "without_key": without_key.collect::<Vec<_>>(),
            "lost_lines": report.dropped,
            "access_sample": report.log.access_sample,
            "notes": report.describe_gaps(),
        },
    });
    format!("{document:#}\n")
}

fn period_to_json(name: &SeriesName, period: &RefusalPeriod) -> Value {
    json!({
        "policy": name.policy,
        "limit": name.limit,
        "decision": name.decision,
        "override": name.in_effect.map(describe_amounts),
        "refused": period.refused,
        "from": rfc3339(period.first_us),
        "to": rfc3339(period.last_us),
        "min_wait_ms": period.wait_ms.map(|(shortest, _)| shortest),
        "max_wait_ms": period.wait_ms.map(|(_, longest)| longest),
    })
}

/// What decided instead of the limit of the configuration.
fn describe_amounts(in_effect: OverrideInEffect) -> Value {
    match in_effect {
        OverrideInEffect::Unlimited => json!("unlimited"),
        OverrideInEffect::Blocked => json!("blocked"),
        OverrideInEffect::Amounts { requests, burst } => {
            json!({ "requests": requests, "burst": burst })
        }
        OverrideInEffect::StatedAmounts { requests, burst } => {
            json!({ "requests": requests, "burst": burst, "stated": true })
        }
    }
}

/// A time such as `2026-11-22T09:14:03Z`.
fn rfc3339(at_us: u64) -> String {
    format_time(at_us).replace(' ', "T") + "Z"
}
