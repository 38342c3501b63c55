//! Handlers that only read: configuration, policies, overview and rankings.
//!
//! Rendering ten thousand policies takes milliseconds, so responses are rendered on another thread.
//! The thread that runs the handlers must stay free to accept connections.

use super::health::phase_label;
use super::parameters::{BackendAndQuery, QueryParameters};
use super::problems::{Problem, find_problems};
use super::responses::{
    JsonResponse, JsonResult, ProblemDetails, add_fields, escape_json_for_display, run_blocking,
};
use super::{AdminBackend, PolicySelection};
use crate::telemetry::history::{
    DecisionCounts, DurationHistograms, PolicyTimeline, SECONDS_KEPT, STATUS_CLASS_COUNT,
    SecondCounts, TimelineAxis,
};
use crate::telemetry::metrics::{HistogramSnapshot, LabelledCounterIndices, ProcessStatus};
use crate::telemetry::top_rejections::RejectionDimension;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use http::header::CONTENT_TYPE;
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

/// Default and maximum number of policies in one response.
const DEFAULT_PAGE_SIZE: usize = 100;
const MAX_PAGE_SIZE: usize = 1000;
/// Maximum `offset` of a page, larger than any number of policies.
const MAX_OFFSET: usize = 1_000_000;
/// Default and maximum number of entries in a ranking.
const DEFAULT_RANKING_ENTRIES: usize = 20;
const MAX_RANKING_ENTRIES: usize = 500;
/// Seconds of history in an overview by default.
const DEFAULT_HISTORY_SECONDS: usize = 120;

/// Series of refused requests in the history of a policy. `degraded_refused` is a part of
/// `degraded`.
pub(crate) const REFUSED_SERIES: [&str; 6] = [
    "rejected",
    "blocked",
    "denied",
    "shadow_rejected",
    "marked",
    "degraded_refused",
];

pub(super) const OPENAPI_JSON: &str = include_str!("openapi.json");

pub(super) async fn get_config(
    BackendAndQuery(view, query): BackendAndQuery,
) -> Result<Response, ProblemDetails> {
    QueryParameters::parse(query.as_deref(), &[])?;
    run_blocking(move || {
        let observed = view.state.read_status();
        let errors = json!(observed.reload_errors);
        let (generation, config) = (observed.config_generation, view.state.config_json());
        let body = format!(
            "{{\"generation\":{generation},\"reload_errors\":{errors},\"config\":{config}}}\n"
        );
        (
            [(CONTENT_TYPE, "application/json")],
            escape_json_for_display(&body),
        )
            .into_response()
    })
    .await
}

#[allow(clippy::unused_async, reason = "a handler is async")]
pub(super) async fn get_openapi() -> Response {
    ([(CONTENT_TYPE, "application/json")], OPENAPI_JSON).into_response()
}

/// Returns for each policy its description and its numbers of decisions: since the start, by minute
/// of the last hour, and by hour of the last day.
pub(super) async fn get_policies(BackendAndQuery(view, query): BackendAndQuery) -> JsonResult {
    let known = ["policy", "search", "sort", "limit", "offset", "history"];
    let query = QueryParameters::parse(query.as_deref(), &known)?;
    let (limit, offset) = (
        query.get_number("limit", DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)?,
        query.get_number("offset", 0, MAX_OFFSET)?,
    );
    let with_history = query.get_bool("history", true)?;
    let order = PolicyOrder::parse(query.get_one("sort")?)?;
    let mut selection = PolicySelection {
        search: query.get_one("search")?.unwrap_or_default().to_owned(),
        names: query.get_all("policy"),
        ranks: HashMap::new(),
        offset,
        limit,
    };
    run_blocking(move || {
        selection.ranks = order.rank_policies(&view);
        let selected = view.state.select_policies(&selection);
        let labels = view.metrics.labels();
        let names = selected.policies.iter().map(|policy| &*policy.name);
        let (axis, timelines) = view.history.policy_timelines(names);
        let policies = selected
            .policies
            .iter()
            .zip(timelines)
            .map(|(policy, past)| {
                let mut summary = policy.description.clone();
                if let Some(tally) = &policy.counters {
                    let decisions = tally.requests_by_label(labels.policy_decisions);
                    add_fields(&mut summary, counts_to_json(decisions));
                    let outcomes = tally.requests_by_label(labels.degraded_outcomes);
                    let degraded_by = json!({ "degraded_by": counts_to_json(outcomes) });
                    add_fields(&mut summary, degraded_by);
                }
                if with_history {
                    let history = policy_history_json(&labels.policy_history, past.as_ref());
                    add_fields(&mut summary, history);
                }
                summary
            });
        let policies: Vec<Value> = policies.collect();
        let mut body = json!({
            "generation": view.state.read_status().config_generation,
            "total": selected.total,
            "offset": selection.offset,
            "policies": policies,
        });
        if with_history {
            let TimelineAxis { minutes, hours } = axis;
            add_fields(&mut body, json!({ "minutes": minutes, "hours": hours }));
        }
        JsonResponse(StatusCode::OK, body)
    })
    .await
}

/// Order of the policies in a response.
#[derive(Clone, Copy)]
enum PolicyOrder {
    /// The order in which they apply.
    Applied,
    /// By requests in the last hour, most first.
    Requests,
    /// By refusals in the last hour, most first. For a shadow policy, requests that it would
    /// refuse.
    Refused,
}

impl PolicyOrder {
    fn parse(text: Option<&str>) -> Result<Self, String> {
        match text {
            None | Some("order") => Ok(Self::Applied),
            Some("requests") => Ok(Self::Requests),
            Some("refused") => Ok(Self::Refused),
            Some(text) => Err(format!(
                "sort={text:?}: expected order, requests or refused"
            )),
        }
    }

    /// Returns the position of each policy with counts: most in the last hour first, then most in
    /// the last day.
    fn rank_policies(self, view: &AdminBackend) -> HashMap<Arc<str>, usize> {
        let labels = view.metrics.labels().policy_history;
        let is_counted = |series: usize| {
            let label = labels.get(series).map_or("", |(label, _)| *label);
            match self {
                Self::Applied => false,
                Self::Requests => label != "degraded_refused",
                Self::Refused => REFUSED_SERIES.contains(&label),
            }
        };
        if matches!(self, Self::Applied) {
            return HashMap::new();
        }
        let mut ranked = view.history.recent_sums(is_counted);
        ranked.retain(|(_, sums)| *sums != [0, 0]);
        ranked.sort_by(|(one, a), (other, b)| b.cmp(a).then_with(|| one.cmp(other)));
        ranked.into_iter().map(|(name, _)| name).zip(0..).collect()
    }
}

/// Returns one series of counts per decision that occurred. All policies of a response share one
/// time axis.
fn policy_history_json(
    labels: &[LabelledCounterIndices],
    timeline: Option<&PolicyTimeline>,
) -> Value {
    let series = |parts: &[DecisionCounts]| {
        let columns = labels.iter().enumerate().filter_map(|(at, (name, _))| {
            let column: Vec<u32> = parts
                .iter()
                .filter_map(|did| did.get(at).copied())
                .collect();
            column
                .iter()
                .any(|count| *count > 0)
                .then(|| ((*name).to_owned(), json!(column)))
        });
        Value::Object(columns.collect())
    };
    let (minutes, hours) = timeline.map_or((&[][..], &[][..]), |past| (&past.minutes, &past.hours));
    json!({ "last_hour": series(minutes), "last_day": series(hours) })
}

/// Returns the overview of the dashboard: status, store, traffic, latency and problems.
pub(super) async fn get_overview(BackendAndQuery(view, query): BackendAndQuery) -> JsonResult {
    let query = QueryParameters::parse(query.as_deref(), &["seconds"])?;
    let seconds = query.get_number("seconds", DEFAULT_HISTORY_SECONDS, SECONDS_KEPT)?;
    run_blocking(move || JsonResponse(StatusCode::OK, build_overview(&view, seconds))).await
}

fn build_overview(view: &AdminBackend, max_seconds: usize) -> Value {
    let observed = view.state.read_status();
    let (from_s, seconds) = view.history.last_seconds(max_seconds);
    let (window_s, times) = view.history.recent_durations();
    let untrusted = view.metrics.untrusted_forwarding_count();
    let problems = find_problems(view, &observed);
    let labels = &view.metrics.labels().request_decisions;
    let totals = labels
        .iter()
        .map(|(label, _)| *label)
        .zip(view.metrics.request_decision_counts());
    json!({
        "instance": {
            "id": view.instance.id,
            "host": view.instance.host,
            "version": env!("CARGO_PKG_VERSION"),
            "started_s": view.instance.started_s,
            "uptime_s": observed.uptime_s,
            "workers": view.instance.workers,
        },
        "status": phase_label(observed.phase),
        "policies": observed.policy_count,
        "generation": observed.config_generation,
        "last_reload": {
            "at_s": observed.last_load_at_s,
            "refused": observed.rejected_reloads,
            "errors": observed.reload_errors,
            "pending_restart": observed.pending_restart,
        },
        "warnings": observed.config_warnings,
        "store": store_json(view, &observed),
        "connections": {
            "open": observed.open_connections,
            "max": observed.max_connections,
            "full": observed.connection_limit_hits,
        },
        "requests": {
            "total": counts_to_json(totals),
            "seconds": traffic_history_json(labels, from_s, &seconds),
        },
        "http": {
            "codes": view.metrics.status_counts().into_iter()
                .map(|(code, count)| (code.to_string(), count)).collect::<Value>(),
            "upstream_errors": counts_to_json(view.metrics.upstream_error_counts()),
            "app_errors": view.metrics.app_error_count(),
        },
        "latency": latency_json(window_s, &times),
        "certificates": observed.certificates.iter()
            .map(|(file, at)| json!({ "file": file, "ends_s": at })).collect::<Vec<_>>(),
        "untrusted_forwarding": untrusted,
        "untrusted_peers": view.metrics.last_untrusted_peers(),
        "hints": problems.iter().map(Problem::to_hint).collect::<Vec<_>>(),
        "problems": problems,
    })
}

fn store_json(view: &AdminBackend, observed: &ProcessStatus) -> Value {
    json!({
        "kind": view.instance.store,
        "address": view.instance.store_address,
        "up": observed.store_up,
        "breaker_open": observed.breaker_open,
        "outage": observed.store_outage,
        "errors": counts_to_json(observed.store_errors.iter().copied()),
        "instances": observed.instance_count,
        "lease_units_lost": observed.lease_units_lost,
        "memory": observed.memory,
    })
}

/// Returns the traffic by second as columns for charts. The last second is incomplete.
fn traffic_history_json(
    labels: &[LabelledCounterIndices],
    from_s: u64,
    seconds: &[SecondCounts],
) -> Value {
    let at: Vec<u64> = (from_s..).zip(seconds).map(|(at, _)| at).collect();
    let mut columns = Map::new();
    columns.insert("at".to_owned(), json!(at));
    for (at, (label, _)) in labels.iter().enumerate() {
        let column = seconds.iter().filter_map(|second| second.decisions.get(at));
        columns.insert((*label).to_owned(), json!(column.collect::<Vec<_>>()));
    }
    for class in 0..STATUS_CLASS_COUNT {
        let column = seconds
            .iter()
            .filter_map(|second| second.status_classes.get(class));
        columns.insert(
            format!("{}xx", class + 1),
            json!(column.collect::<Vec<_>>()),
        );
    }
    Value::Object(columns)
}

fn latency_json(window_s: u64, times: &DurationHistograms) -> Value {
    let decisions = times
        .decisions
        .iter()
        .filter(|(_, buckets)| buckets.count() > 0);
    json!({
        "window_s": window_s,
        "decisions": decisions
            .map(|(source, buckets)| (*source, quantiles_json(buckets))).collect::<Value>(),
        "responses": quantiles_json(&times.responses),
    })
}

fn quantiles_json(buckets: &HistogramSnapshot) -> Value {
    let at = |share| {
        buckets
            .quantile_bound(share)
            .as_ref()
            .map(Duration::as_secs_f64)
    };
    json!({ "count": buckets.count(), "p50_s": at(0.5), "p90_s": at(0.9), "p99_s": at(0.99), "p999_s": at(0.999) })
}

/// Returns the most rejected keys and paths.
pub(super) async fn get_top_rejections(
    BackendAndQuery(view, query): BackendAndQuery,
) -> JsonResult {
    let query = QueryParameters::parse(query.as_deref(), &["n", "policy"])?;
    let limit = query.get_number("n", DEFAULT_RANKING_ENTRIES, MAX_RANKING_ENTRIES)?;
    let policy = query.get_one("policy")?.map(str::to_owned);
    run_blocking(move || {
        let rejections = view.metrics.top_rejections();
        let rank = |dimension| rejections.ranking(dimension, policy.as_deref(), limit);
        JsonResponse(
            StatusCode::OK,
            json!({
                "keys": rank(RejectionDimension::Keys),
                "paths": rank(RejectionDimension::Paths),
                "app_errors": rank(RejectionDimension::AppErrors),
            }),
        )
    })
    .await
}

fn counts_to_json<'n>(pairs: impl IntoIterator<Item = (&'n str, u64)>) -> Value {
    pairs.into_iter().collect()
}
