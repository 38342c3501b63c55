//! Handlers that only read: health, metrics, configuration, policies, overview and rankings.
//!
//! Rendering ten thousand policies takes milliseconds, so responses are rendered on another thread.
//! The thread that runs the handlers must stay free to accept connections.

use super::documents::{
    ConfigDocument, DurationQuantiles, HttpCounts, LatencyDocument, NamedCounts, OverviewDocument,
    OverviewInstance, PoliciesDocument, Problem, REFUSED_SERIES, ReadinessDocument, RequestCounts,
    TopDocument,
};
use super::parameters::{BackendAndQuery, QueryParameters};
use super::problems::find_problems;
use super::responses::{JsonResult, json_response, respond_blocking, run_blocking};
use super::{AdminBackend, PolicySelection};
use crate::telemetry::history::{DecisionCounts, SECONDS_KEPT, STATUS_CLASS_COUNT, SecondCounts};
use crate::telemetry::metrics::{
    ExpositionFormat, HistogramSnapshot, LabelledCounterIndices, ProcessPhase, StoreStatus,
};
use crate::telemetry::top_rejections::RejectionDimension;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::header::{ACCEPT, CONTENT_TYPE};
use http::{HeaderMap, StatusCode};
use serde_json::json;
use std::collections::{BTreeMap, HashMap};
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

/// Readiness fails only while the process starts or stops. Other problems are reported without
/// failing it: taking every replica out of service would not bring the store back.
#[allow(clippy::unused_async, reason = "a handler is async")]
pub(super) async fn get_readiness(
    State(view): State<AdminBackend>,
    headers: HeaderMap,
) -> Response {
    let observed = view.state.read_status();
    let status = match observed.phase {
        ProcessPhase::Serving => StatusCode::OK,
        ProcessPhase::Starting | ProcessPhase::Stopping => StatusCode::SERVICE_UNAVAILABLE,
    };
    let store = observed.store.availability();
    let hints: Vec<String> = find_problems(&view, &observed)
        .iter()
        .map(Problem::to_hint)
        .collect();
    if accept_header(&headers).starts_with("text/plain") {
        let hints: String = hints.iter().map(|hint| format!("- {hint}\n")).collect();
        let text = format!("{}; store {store}\n{hints}", observed.phase);
        return (status, text).into_response();
    }
    let body = ReadinessDocument {
        status: observed.phase.to_string(),
        store: store.to_owned(),
        generation: observed.config_generation,
        reload_errors: observed.last_reload.errors,
        untrusted_forwarding: view.metrics.untrusted_forwarding_count(),
        hints,
    };
    json_response(status, &body)
}

fn accept_header(headers: &HeaderMap) -> &str {
    let accept = headers.get(ACCEPT).and_then(|accept| accept.to_str().ok());
    accept.unwrap_or_default()
}

pub(super) async fn get_metrics(State(view): State<AdminBackend>, headers: HeaderMap) -> Response {
    let format = ExpositionFormat::from_accept_header(accept_header(&headers));
    match run_blocking(move || view.metrics.render_page(&view.state.read_status(), format)).await {
        Ok(page) => ([(CONTENT_TYPE, format.content_type())], page).into_response(),
        Err(problem) => problem.into_response(),
    }
}

pub(super) async fn get_config(BackendAndQuery(view, query): BackendAndQuery) -> JsonResult {
    QueryParameters::parse(query.as_deref(), &[])?;
    respond_blocking(move || {
        let observed = view.state.read_status();
        ConfigDocument {
            generation: observed.config_generation,
            reload_errors: observed.last_reload.errors,
            config: serde_json::from_str(&observed.config_json).unwrap_or_default(),
        }
    })
    .await
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
    let with_history =
        query.get_parsed("history", true, "true or false", |text| text.parse().ok())?;
    let orders = "order, requests or refused";
    let order = query.get_parsed("sort", PolicyOrder::Order, orders, |text| text.parse().ok())?;
    let mut selection = PolicySelection {
        search: query.get_one("search")?.unwrap_or_default().to_owned(),
        names: query.get_all("policy"),
        ranks: HashMap::new(),
        offset,
        limit,
    };
    respond_blocking(move || {
        selection.ranks = order.rank_policies(&view);
        let page = view.state.select_policies(&selection);
        let labels = &view.metrics.labels;
        let names = page.policies.iter().map(|(policy, _)| policy.name.as_str());
        let (axis, timelines) = view.history.policy_timelines(names);
        let policies = page.policies.into_iter().zip(timelines);
        let policies = policies.map(|((mut policy, counters), past)| {
            if let Some(tally) = counters {
                let decisions = tally.requests_by_label(labels.policy_decisions);
                policy.decisions = decisions
                    .map(|(label, count)| (label.to_owned(), json!(count)))
                    .collect();
                let outcomes = tally.requests_by_label(labels.degraded_outcomes);
                policy.degraded_by = Some(to_counts(outcomes));
            }
            if with_history {
                let series = |parts| decision_series(&labels.policy_history, parts);
                let (minutes, hours) = past
                    .as_ref()
                    .map_or((&[][..], &[][..]), |past| (&past.minutes, &past.hours));
                policy.last_hour = Some(series(minutes));
                policy.last_day = Some(series(hours));
            }
            policy
        });
        PoliciesDocument {
            generation: view.state.read_status().config_generation,
            total: page.total,
            offset: selection.offset,
            policies: policies.collect(),
            minutes: with_history.then_some(axis.minutes),
            hours: with_history.then_some(axis.hours),
        }
    })
    .await
}

/// Order of the policies in a response.
#[derive(Clone, Copy, PartialEq, Eq, strum::EnumString)]
#[strum(serialize_all = "lowercase")]
enum PolicyOrder {
    /// The order in which they apply.
    Order,
    /// By requests in the last hour, most first.
    Requests,
    /// By refusals in the last hour, most first. For a shadow policy, requests that it would
    /// refuse.
    Refused,
}

impl PolicyOrder {
    /// Returns the position of each policy with counts: most in the last hour first, then most in
    /// the last day.
    fn rank_policies(self, view: &AdminBackend) -> HashMap<Arc<str>, usize> {
        let labels = view.metrics.labels.policy_history;
        let is_counted = |series: usize| {
            let label = labels.get(series).map_or("", |(label, _)| *label);
            match self {
                Self::Refused => REFUSED_SERIES.contains(&label),
                _ => label != "degraded_refused",
            }
        };
        if self == Self::Order {
            return HashMap::new();
        }
        let mut ranked = view.history.recent_sums(is_counted);
        ranked.retain(|(_, sums)| *sums != [0, 0]);
        ranked.sort_by(|(one, a), (other, b)| b.cmp(a).then_with(|| one.cmp(other)));
        ranked.into_iter().map(|(name, _)| name).zip(0..).collect()
    }
}

/// Returns one series of counts per decision that occurred.
fn decision_series(
    labels: &[LabelledCounterIndices],
    parts: &[DecisionCounts],
) -> BTreeMap<String, Vec<u32>> {
    let columns = labels.iter().enumerate().map(|(at, (name, _))| {
        let column = parts.iter().filter_map(|did| did.get(at).copied());
        ((*name).to_owned(), column.collect::<Vec<u32>>())
    });
    columns
        .filter(|(_, column)| column.iter().any(|count| *count > 0))
        .collect()
}

/// Returns the overview of the dashboard: status, store, traffic, latency and problems.
pub(super) async fn get_overview(BackendAndQuery(view, query): BackendAndQuery) -> JsonResult {
    let query = QueryParameters::parse(query.as_deref(), &["seconds"])?;
    let seconds = query.get_number("seconds", DEFAULT_HISTORY_SECONDS, SECONDS_KEPT)?;
    respond_blocking(move || build_overview(&view, seconds)).await
}

fn build_overview(view: &AdminBackend, max_seconds: usize) -> OverviewDocument {
    let observed = view.state.read_status();
    let problems = find_problems(view, &observed);
    let (from_s, seconds) = view.history.last_seconds(max_seconds);
    let labels = &view.metrics.labels.request_decisions;
    let totals = labels.iter().map(|(label, _)| *label);
    let codes = view.metrics.status_counts().into_iter();
    OverviewDocument {
        instance: OverviewInstance {
            uptime_s: observed.uptime_s,
            ..view.instance.clone()
        },
        status: observed.phase.to_string(),
        policies: observed.policy_count,
        generation: observed.config_generation,
        last_reload: observed.last_reload,
        warnings: observed.config_warnings,
        store: StoreStatus {
            errors: to_counts(observed.store_errors),
            ..observed.store
        },
        connections: observed.connections,
        requests: RequestCounts {
            total: to_counts(totals.zip(view.metrics.request_decision_counts())),
            seconds: traffic_columns(labels, from_s, &seconds),
        },
        http: HttpCounts {
            codes: codes
                .map(|(code, count)| (code.to_string(), count))
                .collect(),
            upstream_errors: to_counts(view.metrics.upstream_error_counts()),
            app_errors: view.metrics.app_error_count(),
        },
        latency: read_latency(view),
        certificates: observed.certificates,
        untrusted_forwarding: view.metrics.untrusted_forwarding_count(),
        untrusted_peers: view.metrics.last_untrusted_peers(),
        hints: problems.iter().map(Problem::to_hint).collect(),
        problems,
    }
}

/// Returns the traffic by second as columns for charts. The last second is incomplete.
fn traffic_columns(
    labels: &[LabelledCounterIndices],
    from_s: u64,
    seconds: &[SecondCounts],
) -> BTreeMap<String, Vec<u64>> {
    let times = (from_s..).zip(seconds).map(|(at, _)| at).collect();
    let column = |count: &dyn Fn(&SecondCounts) -> Option<u32>| {
        let counts = seconds.iter().filter_map(count);
        counts.map(u64::from).collect()
    };
    let decisions = labels.iter().enumerate().map(|(at, (label, _))| {
        let column = column(&|second| second.decisions.get(at).copied());
        ((*label).to_owned(), column)
    });
    let classes = (0..STATUS_CLASS_COUNT).map(|at| {
        let column = column(&|second| second.status_classes.get(at).copied());
        (format!("{}xx", at + 1), column)
    });
    std::iter::once(("at".to_owned(), times))
        .chain(decisions)
        .chain(classes)
        .collect()
}

fn read_latency(view: &AdminBackend) -> LatencyDocument {
    let (window_s, times) = view.history.recent_durations();
    let decisions = times.decisions.iter();
    let decisions = decisions.filter(|(_, buckets)| buckets.count() > 0);
    LatencyDocument {
        window_s,
        decisions: decisions
            .map(|(source, buckets)| ((*source).to_owned(), read_quantiles(buckets)))
            .collect(),
        responses: read_quantiles(&times.responses),
    }
}

fn read_quantiles(buckets: &HistogramSnapshot) -> DurationQuantiles {
    let at = |share| {
        let bound = buckets.quantile_bound(share);
        bound.as_ref().map(Duration::as_secs_f64)
    };
    DurationQuantiles {
        count: buckets.count(),
        p50_s: at(0.5),
        p90_s: at(0.9),
        p99_s: at(0.99),
        p999_s: at(0.999),
    }
}

/// Returns the most rejected keys and paths.
pub(super) async fn get_top_rejections(
    BackendAndQuery(view, query): BackendAndQuery,
) -> JsonResult {
    let query = QueryParameters::parse(query.as_deref(), &["n", "policy"])?;
    let limit = query.get_number("n", DEFAULT_RANKING_ENTRIES, MAX_RANKING_ENTRIES)?;
    let policy = query.get_one("policy")?.map(str::to_owned);
    respond_blocking(move || {
        let rejections = &view.metrics.top_rejections;
        let rank = |dimension| rejections.ranking(dimension, policy.as_deref(), limit);
        TopDocument {
            keys: rank(RejectionDimension::Keys),
            paths: rank(RejectionDimension::Paths),
            app_errors: rank(RejectionDimension::AppErrors),
        }
    })
    .await
}

fn to_counts<'n>(pairs: impl IntoIterator<Item = (&'n str, u64)>) -> NamedCounts {
    let pairs = pairs.into_iter();
    pairs
        .map(|(name, count)| (name.to_owned(), count))
        .collect()
}
