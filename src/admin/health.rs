//! Liveness, readiness and metrics: the routes that reveal no request data.

use super::AdminBackend;
use super::documents::ReadinessDocument;
use super::problems::{Problem, find_problems};
use super::responses::{json_response, run_blocking};
use crate::telemetry::metrics::{ExpositionFormat, ProcessPhase};
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::header::{ACCEPT, CONTENT_TYPE};
use http::{HeaderMap, StatusCode};

#[allow(clippy::unused_async, reason = "a handler is async")]
pub(super) async fn get_liveness() -> &'static str {
    "ok\n"
}

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
