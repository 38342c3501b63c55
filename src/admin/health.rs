//! Liveness, readiness and metrics: the routes that reveal no request data.

use super::AdminBackend;
use super::responses::{JsonResponse, run_blocking};
use crate::telemetry::metrics::{ExpositionFormat, ProcessPhase, ProcessStatus};
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::header::{ACCEPT, CONTENT_TYPE};
use http::{HeaderMap, StatusCode};
use serde_json::json;

#[allow(clippy::unused_async, reason = "a handler is async")]
pub(super) async fn get_liveness() -> &'static str {
    "ok\n"
}

/// Readiness fails only while the process starts or stops. Other problems are reported without
/// failing it: taking every replica out of service would not bring the store back.
#[allow(clippy::unused_async, reason = "a handler is async")]
pub(super) async fn get_readiness(State(view): State<AdminBackend>) -> JsonResponse {
    let observed = (view.read_status)();
    let status = match observed.phase {
        ProcessPhase::Serving => StatusCode::OK,
        ProcessPhase::Starting | ProcessPhase::Stopping => StatusCode::SERVICE_UNAVAILABLE,
    };
    let body = json!({
        "status": phase_label(observed.phase),
        "store": if observed.store_up { "up" } else { "degraded" },
        "generation": observed.config_generation,
        "reload_errors": observed.reload_errors,
        "untrusted_forwarding": view.metrics.untrusted_forwarding_count(),
        "hints": collect_problem_hints(&observed, view.metrics.untrusted_forwarding_count()),
    });
    JsonResponse(status, body)
}

pub(super) fn phase_label(phase: ProcessPhase) -> &'static str {
    match phase {
        ProcessPhase::Starting => "starting",
        ProcessPhase::Serving => "ready",
        ProcessPhase::Stopping => "stopping",
    }
}

/// Returns the problems that need attention, and what to do about them. The dashboard detects each
/// problem by a field of the overview, not by the text of its hint.
pub(super) fn collect_problem_hints(
    observed: &ProcessStatus,
    untrusted_forwarding: u64,
) -> Vec<&'static str> {
    let all = [
        (
            !observed.store_up,
            "the store is unavailable: policies decide by on_store_failure",
        ),
        (
            !observed.reload_errors.is_empty(),
            "the newest configuration is invalid: the last valid one is in effect",
        ),
        (
            untrusted_forwarding > 0,
            "a peer that is not in client.trusted_proxies sends forwarding headers: if it is your ingress, all clients \
             behind it share one quota until you list it, e.g. [client] trusted_proxies = [\"10.0.0.0/8\"]; the log and the \
             dashboard say which peer",
        ),
    ];
    all.into_iter()
        .filter(|(holds, _)| *holds)
        .map(|(_, hint)| hint)
        .collect()
}

pub(super) async fn get_metrics(State(view): State<AdminBackend>, headers: HeaderMap) -> Response {
    let accept = headers
        .get(ACCEPT)
        .and_then(|accept| accept.to_str().ok())
        .unwrap_or_default();
    let format = ExpositionFormat::from_accept_header(accept);
    match run_blocking(move || view.metrics.render_page(&(view.read_status)(), format)).await {
        Ok(page) => ([(CONTENT_TYPE, format.content_type())], page).into_response(),
        Err(problem) => problem.into_response(),
    }
}
