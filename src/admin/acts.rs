//! Questions about one key or request, and the little that can be changed.

use super::answer::{Json, Problem};
use super::asked::{self, Query};
use super::{Draining, View};
use crate::telemetry::{self, Level};
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{RawQuery, State};
use http::{HeaderMap, StatusCode};
use serde_json::json;

pub(super) async fn key(
    State(view): State<View>,
    RawQuery(query): RawQuery,
) -> Result<Json, Problem> {
    let asked = asked::key(query.as_deref())?;
    Ok(Json(StatusCode::OK, (view.key)(asked).await?))
}

pub(super) async fn reset(
    State(view): State<View>,
    RawQuery(query): RawQuery,
) -> Result<Json, Problem> {
    let asked = asked::key(query.as_deref())?;
    Ok(Json(StatusCode::OK, (view.reset)(asked).await?))
}

pub(super) async fn explain(
    State(view): State<View>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json, Problem> {
    let told = asked::told(&asked::object(&headers, body)?)?;
    Ok(Json(StatusCode::OK, (view.explain)(told).await?))
}

#[allow(clippy::unused_async, reason = "a handler is async")]
pub(super) async fn drain(
    State(view): State<View>,
    RawQuery(query): RawQuery,
) -> Result<Json, Problem> {
    Query::parse(query.as_deref(), &[])?;
    let Draining { delay, grace } = (view.drain)();
    let body = json!({ "status": "stopping", "delay_s": delay.as_secs_f64(), "grace_s": grace.as_secs_f64() });
    Ok(Json(StatusCode::ACCEPTED, body))
}

#[allow(clippy::unused_async, reason = "a handler is async")]
pub(super) async fn log_level() -> Json {
    Json(
        StatusCode::OK,
        json!({ "level": telemetry::level().map(|level| level.to_string()) }),
    )
}

/// `{"level": "info,tidegate::proxy=debug"}`, as in the configuration.
#[allow(clippy::unused_async, reason = "a handler is async")]
pub(super) async fn set_log_level(
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json, Problem> {
    let object = asked::object(&headers, body)?;
    asked::only(&object, "", &["level"])?;
    let Some(text) = asked::text(&object, "level")? else {
        return Err(Problem::wrong("level is missing"));
    };
    let level =
        Level::parse(&text).map_err(|why| Problem::wrong(format!("level {text:?}: {why}")))?;
    match telemetry::set_level(level) {
        true => Ok(Json(StatusCode::OK, json!({ "level": text }))),
        false => Err(Problem::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "there is no log whose level could change",
        )),
    }
}
