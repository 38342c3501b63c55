//! Handlers that act on one key or request, and handlers that change the state of the process.

use super::parameters::{self, BackendAndQuery, JsonObject, QueryParameters};
use super::responses::{JsonResult, ProblemDetails, json_response};
use super::{AdminBackend, AdminFuture, KeyQuery, LogLevelDocument};
use crate::telemetry::{self, LogLevel};
use axum::extract::{Path, State};
use axum::response::Response;
use http::{Method, StatusCode};
use serde::Serialize;

/// Responds with the document that the store lookup returns.
async fn respond_with<D: Serialize>(lookup: AdminFuture<D>) -> JsonResult {
    Ok(json_response(StatusCode::OK, &lookup.await?))
}

pub(super) async fn inspect_key(BackendAndQuery(view, query): BackendAndQuery) -> JsonResult {
    let query = parameters::parse_key_query(query.as_deref(), &[])?;
    respond_with(view.state.inspect_key(query)).await
}

pub(super) async fn reset_key(BackendAndQuery(view, query): BackendAndQuery) -> JsonResult {
    let query = parameters::parse_key_query(query.as_deref(), &["limit"])?;
    respond_with(view.state.reset_key(query)).await
}

/// Maximum number of overrides in a list.
const MAX_LISTED_OVERRIDES: usize = 10_000;

/// Without `key`, lists the overrides of the policy.
pub(super) async fn read_overrides(
    BackendAndQuery(view, query): BackendAndQuery,
    Path(policy): Path<String>,
) -> JsonResult {
    let query = QueryParameters::parse(query.as_deref(), &["key", "n"])?;
    let limit = query.get_number("n", 1000, MAX_LISTED_OVERRIDES)?;
    let key = KeyQuery {
        policy,
        values: query.get_all("key"),
        limit: None,
    };
    respond_with(if key.values.is_empty() {
        view.state.list_overrides(key.policy, limit)
    } else {
        view.state.find_override(key)
    })
    .await
}

/// Expects the override as JSON, with its key. `PATCH` keeps other limits of the key's override.
pub(super) async fn set_override(
    State(view): State<AdminBackend>,
    Path(policy): Path<String>,
    method: Method,
    JsonObject(fields): JsonObject,
) -> JsonResult {
    let keeps_other_limits = method == Method::PATCH;
    respond_with(view.state.set_override(policy, fields, keeps_other_limits)).await
}

pub(super) async fn remove_override(
    BackendAndQuery(view, query): BackendAndQuery,
    Path(policy): Path<String>,
) -> JsonResult {
    let query = QueryParameters::parse(query.as_deref(), &["key"])?;
    let key = KeyQuery {
        policy,
        values: query.get_all("key"),
        limit: None,
    };
    respond_with(view.state.remove_override(key)).await
}

pub(super) async fn explain_request(
    State(view): State<AdminBackend>,
    JsonObject(description): JsonObject,
) -> JsonResult {
    let request = parameters::parse_explain_request(&description)?;
    respond_with(view.state.explain_request(request)).await
}

pub(super) async fn examine_store(BackendAndQuery(view, query): BackendAndQuery) -> JsonResult {
    QueryParameters::parse(query.as_deref(), &[])?;
    respond_with(view.state.examine_store()).await
}

#[allow(clippy::unused_async, reason = "a handler is async")]
pub(super) async fn start_drain(BackendAndQuery(view, query): BackendAndQuery) -> JsonResult {
    QueryParameters::parse(query.as_deref(), &[])?;
    let schedule = view.state.start_drain();
    Ok(json_response(StatusCode::ACCEPTED, &schedule))
}

#[allow(clippy::unused_async, reason = "a handler is async")]
pub(super) async fn get_log_level() -> Response {
    let level = telemetry::log_level().map(|level| level.to_string());
    json_response(StatusCode::OK, &LogLevelDocument { level })
}

/// Expects the body `{"level": "info,tidegate::proxy=debug"}`, with a level as in the
/// configuration.
#[allow(clippy::unused_async, reason = "a handler is async")]
pub(super) async fn set_log_level(JsonObject(object): JsonObject) -> JsonResult {
    parameters::reject_unknown_fields(&object, "", &["level"])?;
    let text = parameters::get_string_field(&object, "level")?;
    let text = text.ok_or_else(|| "level is missing".to_owned())?;
    let level = LogLevel::parse(&text).map_err(|why| format!("level {text:?}: {why}"))?;
    if telemetry::set_log_level(level) {
        let level = Some(text);
        Ok(json_response(StatusCode::OK, &LogLevelDocument { level }))
    } else {
        Err(ProblemDetails::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "the log level cannot change: logging is not initialized",
        ))
    }
}
