//! The report for scripts: one JSON object. Times are seconds since the epoch.

use super::super::run::PolicyBook;
use super::super::suggest::Suggestion;
use super::super::tally::Series;
use super::{Log, PolicyWords, Report, Set, Top};
use serde_json::{Value, json};

/// Steps of time in it at most.
const STEPS: usize = 60;

pub(super) fn write(report: &Report) -> String {
    let logs: Vec<Value> = report.logs.iter().map(log).collect();
    let sets: Vec<Value> = report
        .sets
        .iter()
        .map(|of_set| set(report, of_set))
        .collect();
    // Of one set nothing differs.
    let parted = (report.sets.len() > 1).then_some(report.parted);
    let value = json!({
        "requests": report.requests(),
        "lines": report.lines(),
        "from": report.from_s,
        "to": report.to_s,
        "logs": logs,
        "sets": sets,
        "refused_by_second_only": parted.map(|[second, _]| second),
        "refused_by_first_only": parted.map(|[_, first]| first),
        "warnings": report.warnings(),
    });
    format!("{value:#}\n")
}

fn log(log: &Log) -> Value {
    json!({
        "name": log.name,
        "format": log.format.name(),
        "lines": log.lines,
        "requests": log.requests,
        "other": log.other,
        "broken": log.broken,
        "fault": log.fault,
    })
}

fn set(report: &Report, set: &Set) -> Value {
    let books = &set.books;
    let policies = set.policies.iter().zip(&books.policies).enumerate();
    let policies: Vec<Value> = policies
        .map(|(at, (words, book))| {
            let suggested = set.suggestions.iter().find(|(of, _)| *of == at);
            policy(
                report,
                words,
                book,
                suggested.map_or(&[], |(_, all)| all.as_slice()),
            )
        })
        .collect();
    json!({
        "config": set.name,
        "forwarded": books.forwarded,
        "delayed": books.delayed,
        "longest_delay_seconds": seconds(books.longest_delay_us),
        "limited": books.limited,
        "denied": books.denied,
        "bad_key": books.bad_key,
        "malformed": books.malformed,
        "late": books.late,
        "refused_then": books.told.refused_then,
        "evicted_counters": set.evicted,
        "series": series(report, &books.series),
        "policies": policies,
        "top": set.top.iter().map(top).collect::<Vec<_>>(),
        "lacks": set.lacks,
    })
}

fn policy(
    report: &Report,
    words: &PolicyWords,
    book: &PolicyBook,
    suggested: &[Suggestion],
) -> Value {
    let (keys, exact) = book.keys.count();
    let refused_at = |at_us: u64| (book.refused() > 0).then(|| seconds(at_us));
    json!({
        "name": words.name,
        "shadow": words.shadow,
        "action": words.action.unwrap_or("limit"),
        "matched": book.matched(),
        "allowed": book.allowed,
        "delayed": book.delayed,
        "rejected": book.rejected,
        "blocked": book.blocked,
        "denied": book.denied,
        "exempt": book.exempt,
        "shadow_rejected": book.shadow_rejected,
        "keys": keys,
        "keys_exact": exact,
        "keys_touched": book.keys.touched(),
        "first_refused": refused_at(book.first_refused_us),
        "last_refused": refused_at(book.last_refused_us),
        "series": series(report, &book.series),
        "suggested": suggested.iter().map(suggestion).collect::<Vec<_>>(),
    })
}

fn suggestion(suggestion: &Suggestion) -> Value {
    let limit = &suggestion.limit;
    let drawn = suggestion.drawn.as_ref().map(|drawn| {
        json!({
            "requests": drawn.requests,
            "touched": drawn.touched,
            "touched_now": drawn.touched_now,
            "keys": drawn.keys,
            "one_key_in": drawn.one_in,
            "quantiles": drawn.quantiles.iter().map(|(share, peak)| json!([f64::from(*share) / 1000.0, peak]))
                .collect::<Vec<_>>(),
            "histogram": drawn.histogram,
        })
    });
    json!({
        "limit": limit.name,
        "now": limit.limit.requests,
        "per_seconds": seconds(limit.limit.per_us),
        "drawn": drawn,
    })
}

fn series(report: &Report, series: &Series) -> Value {
    let bins = report.bins(series, STEPS);
    json!({
        "step_seconds": report.grid(STEPS).0,
        "requests": bins.iter().map(|bin| bin.all).collect::<Vec<_>>(),
        "refused": bins.iter().map(|bin| bin.refused).collect::<Vec<_>>(),
    })
}

fn top(top: &Top) -> Value {
    json!({
        "policy": top.policy,
        "shadow": top.shadow,
        "key": top.key,
        "requests": top.requests,
        "refused": top.refused,
        "error": top.error,
        "first": seconds(top.first_us),
        "last": seconds(top.last_us),
    })
}

#[allow(
    clippy::cast_precision_loss,
    reason = "microseconds of this century are exact in a double"
)]
fn seconds(us: u64) -> f64 {
    us as f64 / 1e6
}
