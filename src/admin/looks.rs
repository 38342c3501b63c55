//! What is seen without changing anything.
//!
//! With ten thousand policies an answer takes milliseconds to write, so it is written aside: the thread that accepts
//! connections goes on.

use super::answer::{Json, Problem, harmless};
use super::asked::Query;
use super::health::{hints, phase};
use super::{Selection, View};
use crate::telemetry::history::{Axis, CLASSES, Past, SECONDS, Second, Times};
use crate::telemetry::metrics::{Answer, Buckets, DECISIONS, DEGRADED_REFUSED, Observed, PAST};
use crate::telemetry::top::{Ranked, Ranking};
use axum::extract::{RawQuery, State};
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use http::header::CONTENT_TYPE;
use serde_json::{Map, Value, json};
use std::time::Duration;

/// Policies in one answer, unless less are asked for, and at most.
const PAGE: usize = 100;
const MAX_PAGE: usize = 1000;
/// More policies than a file can hold.
const MAX_OFFSET: usize = 1_000_000;
/// Entries of a ranking, likewise.
const RANKS: usize = 20;
const MAX_RANKS: usize = 500;
/// Seconds of the past in an overview, unless more or less are asked for.
const SECONDS_SHOWN: usize = 120;

pub(super) const OPENAPI: &str = include_str!("openapi.json");

/// Runs what takes long on a thread of its own.
pub(super) async fn aside<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Problem> {
    tokio::task::spawn_blocking(work).await.map_err(|error| {
        Problem::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            format!("this is a bug: {error}"),
        )
    })
}

pub(super) async fn config(
    State(view): State<View>,
    RawQuery(query): RawQuery,
) -> Result<Response, Problem> {
    Query::parse(query.as_deref(), &[])?;
    aside(move || {
        let observed = (view.observe)();
        let errors = json!(observed.reload_errors);
        let (generation, config) = (observed.generation, (view.config)());
        let body = format!(
            "{{\"generation\":{generation},\"reload_errors\":{errors},\"config\":{config}}}\n"
        );
        ([(CONTENT_TYPE, "application/json")], harmless(&body)).into_response()
    })
    .await
}

#[allow(clippy::unused_async, reason = "a handler is async")]
pub(super) async fn openapi() -> Response {
    ([(CONTENT_TYPE, "application/json")], OPENAPI).into_response()
}

/// Each policy: what it is, what it did since the start, in the last hour by minute and in the last day by hour.
pub(super) async fn policies(
    State(view): State<View>,
    RawQuery(query): RawQuery,
) -> Result<Json, Problem> {
    let query = Query::parse(query.as_deref(), &["policy", "limit", "offset", "history"])?;
    let (most, offset) = (
        query.number("limit", PAGE, MAX_PAGE)?,
        query.number("offset", 0, MAX_OFFSET)?,
    );
    let with_history = query.flag("history", true)?;
    let selection = Selection {
        names: query.all("policy"),
        offset,
        most,
    };
    aside(move || {
        let selected = (view.policies)(&selection);
        let names = selected.policies.iter().map(|policy| &*policy.name);
        let (axis, pasts) = view.history.policies(names);
        let policies = selected.policies.iter().zip(pasts).map(|(policy, past)| {
            let mut told = policy.about.clone();
            if let Some(tally) = &policy.tally {
                told.extend(named(DECISIONS, tally.requests()));
                told.insert(
                    "degraded_by".to_owned(),
                    Value::Object(named_pairs(tally.degraded())),
                );
            }
            if with_history {
                told.extend(history(past.as_ref()));
            }
            Value::Object(told)
        });
        let policies: Vec<Value> = policies.collect();
        let mut body = json!({
            "generation": (view.observe)().generation,
            "total": selected.total,
            "offset": selection.offset,
            "policies": policies,
        });
        if let Some(body) = body.as_object_mut().filter(|_| with_history) {
            let Axis { minutes, hours } = axis;
            body.extend([
                ("minutes".to_owned(), json!(minutes)),
                ("hours".to_owned(), json!(hours)),
            ]);
        }
        Json(StatusCode::OK, body)
    })
    .await
}

/// A series per decision that was made at all, beside the times that the whole answer has in common.
fn history(past: Option<&Past>) -> [(String, Value); 2] {
    let series = |parts: &[[u32; PAST.len()]]| {
        let columns = PAST.iter().enumerate().filter_map(|(at, name)| {
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
    let (minutes, hours) = past.map_or((&[][..], &[][..]), |past| (&past.minutes, &past.hours));
    [
        ("last_hour".to_owned(), series(minutes)),
        ("last_day".to_owned(), series(hours)),
    ]
}

/// What a dashboard shows beside the policies, all at once.
pub(super) async fn overview(
    State(view): State<View>,
    RawQuery(query): RawQuery,
) -> Result<Json, Problem> {
    let query = Query::parse(query.as_deref(), &["seconds"])?;
    let seconds = query.number("seconds", SECONDS_SHOWN, SECONDS)?;
    aside(move || Json(StatusCode::OK, tell(&view, seconds))).await
}

fn tell(view: &View, most: usize) -> Value {
    let observed = (view.observe)();
    let (from_s, seconds) = view.history.seconds(most);
    let (window_s, times) = view.history.times();
    let untrusted = view.metrics.untrusted_forwarding();
    let answers = view.metrics.answers();
    let totals = Answer::ALL.map(|answer| {
        told(answer, |one| {
            answers.get(one as usize).copied().unwrap_or_default()
        })
    });
    json!({
        "instance": {
            "id": view.about.instance,
            "version": env!("CARGO_PKG_VERSION"),
            "started_s": view.about.started_s,
            "uptime_s": observed.uptime_s,
            "workers": view.about.workers,
        },
        "status": phase(observed.phase),
        "policies": observed.policies,
        "generation": observed.generation,
        "last_reload": {
            "at_s": observed.loaded_s,
            "refused": observed.reloads_refused,
            "errors": observed.reload_errors,
        },
        "store": store(view, &observed),
        "connections": {
            "open": observed.connections,
            "max": observed.connections_max,
            "full": observed.connections_full,
        },
        "requests": {
            "total": Value::Object(named_pairs(totals)),
            "seconds": by_second(from_s, &seconds),
        },
        "http": {
            "codes": Value::Object(
                view.metrics.codes().into_iter().map(|(code, count)| (code.to_string(), json!(count))).collect(),
            ),
            "upstream_errors": Value::Object(named_pairs(view.metrics.upstream_errors())),
        },
        "latency": latency(window_s, &times),
        "certificates": observed.certificates.iter()
            .map(|(file, at)| json!({ "file": file, "ends_s": at })).collect::<Vec<_>>(),
        "untrusted_forwarding": untrusted,
        "untrusted_peers": view.metrics.untrusted_peers(),
        "hints": hints(&observed, untrusted),
    })
}

fn store(view: &View, observed: &Observed) -> Value {
    json!({
        "kind": view.about.store,
        "address": view.about.store_address,
        "up": observed.store_up,
        "breaker_open": observed.breaker_open,
        "errors": Value::Object(named_pairs(observed.store_errors.iter().copied())),
        "instances": observed.instances,
        "lease_units_lost": observed.lease_units_lost,
        "memory": observed.memory.map(|memory| json!({
            "keys": memory.keys, "bytes": memory.bytes, "evictions": memory.evictions,
        })),
    })
}

/// Columns, as charts want them. The last second is not over yet.
fn by_second(from_s: u64, seconds: &[Second]) -> Value {
    let at: Vec<u64> = (from_s..).zip(seconds).map(|(at, _)| at).collect();
    let mut columns = Map::new();
    columns.insert("at".to_owned(), json!(at));
    for answer in Answer::ALL {
        let count = |second: &Second| {
            told(answer, |one| {
                second
                    .answers
                    .get(one as usize)
                    .copied()
                    .map_or(0, u64::from)
            })
            .1
        };
        let (name, _) = told(answer, |_| 0);
        columns.insert(
            name.to_owned(),
            json!(seconds.iter().map(count).collect::<Vec<_>>()),
        );
    }
    for class in 0..CLASSES {
        let column = seconds
            .iter()
            .filter_map(|second| second.classes.get(class));
        columns.insert(
            format!("{}xx", class + 1),
            json!(column.collect::<Vec<_>>()),
        );
    }
    Value::Object(columns)
}

/// How an answer is called, and how often it was given: `degraded` is all that was decided without the store, beside it
/// stands its part that was refused.
fn told(answer: Answer, count: impl Fn(Answer) -> u64) -> (&'static str, u64) {
    match answer {
        Answer::Degraded => (answer.word(), count(answer) + count(Answer::Unavailable)),
        Answer::Unavailable => (DEGRADED_REFUSED, count(answer)),
        _ => (answer.word(), count(answer)),
    }
}

fn latency(window_s: u64, times: &Times) -> Value {
    let decisions = times
        .decisions
        .iter()
        .filter(|(_, buckets)| buckets.count() > 0);
    json!({
        "window_s": window_s,
        "decisions": Value::Object(
            decisions.map(|(source, buckets)| ((*source).to_owned(), quantiles(buckets))).collect(),
        ),
        "responses": quantiles(&times.responses),
    })
}

fn quantiles(buckets: &Buckets) -> Value {
    let at = |share| buckets.quantile(share).as_ref().map(Duration::as_secs_f64);
    json!({ "count": buckets.count(), "p50_s": at(0.5), "p90_s": at(0.9), "p99_s": at(0.99), "p999_s": at(0.999) })
}

/// Who is refused most, by key and by path.
pub(super) async fn top(
    State(view): State<View>,
    RawQuery(query): RawQuery,
) -> Result<Json, Problem> {
    let query = Query::parse(query.as_deref(), &["n", "policy"])?;
    let most = query.number("n", RANKS, MAX_RANKS)?;
    let policy = query.one("policy")?.map(str::to_owned);
    aside(move || {
        let rank = |what| {
            ranking(
                &view.metrics.top().ranking(what, policy.as_deref(), most),
                what,
            )
        };
        Json(
            StatusCode::OK,
            json!({ "keys": rank(Ranked::Keys), "paths": rank(Ranked::Paths) }),
        )
    })
    .await
}

fn ranking(ranking: &Ranking, what: Ranked) -> Value {
    let name = match what {
        Ranked::Keys => "key",
        Ranked::Paths => "path",
    };
    let entries = ranking.entries.iter().map(|entry| {
        json!({
            "policy": &*entry.policy,
            name: &*entry.text,
            "count": entry.count,
            "error": entry.error,
        })
    });
    json!({
        "since_s": ranking.since_s,
        "refused": ranking.total,
        "unseen_at_most": ranking.unseen,
        "entries": entries.collect::<Vec<_>>(),
    })
}

fn named<const N: usize>(names: [&str; N], counts: [u64; N]) -> Map<String, Value> {
    named_pairs(names.into_iter().zip(counts))
}

fn named_pairs<'n>(pairs: impl IntoIterator<Item = (&'n str, u64)>) -> Map<String, Value> {
    pairs
        .into_iter()
        .map(|(name, count)| (name.to_owned(), json!(count)))
        .collect()
}
