//! What is answered.

use super::access::{require_known_host, require_token};
use super::{AdminSettings, View};
use crate::telemetry::metrics::{Format, Observed, Phase};
use axum::Router;
use axum::extract::State;
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use http::header::{ACCEPT, CACHE_CONTROL, CONTENT_TYPE};
use http::{HeaderMap, HeaderName, StatusCode};
use serde_json::json;
use std::sync::Arc;

const JSON: [(HeaderName, &str); 2] = [(CONTENT_TYPE, "application/json"), (CACHE_CONTROL, "no-store")];

/// Everything there is.
pub(super) fn admin(settings: AdminSettings, view: View) -> Router {
    let mut inspection = Router::new().route("/config", get(config));
    if let Some(token) = settings.token.clone().filter(|_| !settings.address.ip().is_loopback()) {
        inspection = inspection.route_layer(from_fn_with_state(token, require_token));
    }
    health()
        .merge(inspection)
        .layer(from_fn_with_state(Arc::new(settings), require_known_host))
        .with_state(view)
}

/// Only what gives nothing away; whatever name it is called by, as Prometheus finds it under many.
pub(super) fn probes(view: View) -> Router {
    health().with_state(view)
}

fn health() -> Router<View> {
    Router::new()
        .route("/livez", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics))
}

/// Fails only while clients cannot, or soon can no longer, be served. What is merely wrong is said: taking
/// every replica out of service would not mend a store that is away.
async fn ready(State(view): State<View>) -> Response {
    let observed = (view.observe)();
    let status = match observed.phase {
        Phase::Serving => StatusCode::OK,
        Phase::Starting | Phase::Stopping => StatusCode::SERVICE_UNAVAILABLE,
    };
    let body = json!({
        "status": phase(observed.phase),
        "store": if observed.store_up { "up" } else { "degraded" },
        "generation": observed.generation,
        "reload_errors": observed.reload_errors,
        "untrusted_forwarding": view.metrics.untrusted_forwarding(),
        "hints": hints(&observed, view.metrics.untrusted_forwarding()),
    });
    (status, JSON, format!("{body}\n")).into_response()
}

fn phase(phase: Phase) -> &'static str {
    match phase {
        Phase::Starting => "starting",
        Phase::Serving => "ready",
        Phase::Stopping => "stopping",
    }
}

/// What somebody should look at, and what to do.
fn hints(observed: &Observed, untrusted_forwarding: u64) -> Vec<&'static str> {
    let all = [
        (!observed.store_up, "the store is away: policies decide by on_store_failure"),
        (
            !observed.reload_errors.is_empty(),
            "the newest configuration is wrong: the last good one is in effect",
        ),
        (
            untrusted_forwarding > 0,
            "a peer that isn't in client.trusted_proxies names clients: if it is your ingress, list its network \
             there, or everybody behind it shares one quota",
        ),
    ];
    all.into_iter().filter(|(holds, _)| *holds).map(|(_, hint)| hint).collect()
}

async fn metrics(State(view): State<View>, headers: HeaderMap) -> Response {
    let accept = headers.get(ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    let format = Format::accepted(accept);
    let page = view.metrics.page(&(view.observe)(), format);
    ([(CONTENT_TYPE, format.content_type())], page).into_response()
}

async fn config(State(view): State<View>) -> Response {
    let observed = (view.observe)();
    let errors = json!(observed.reload_errors);
    let body = format!(
        "{{\"generation\":{},\"reload_errors\":{errors},\"config\":{}}}\n",
        observed.generation,
        (view.config)()
    );
    (JSON, body).into_response()
}
