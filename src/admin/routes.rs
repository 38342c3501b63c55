//! Routes of the admin endpoint and the access that each one needs.

use super::access_control::{AccessGuard, authorize_and_run_handler, require_known_host};
use super::fleet::{self, FleetReader};
use super::parameters::MAX_BODY_BYTES;
use super::responses::add_default_body_and_headers;
use super::{AdminBackend, AdminSettings, ReloadableAdminToken, commands, dashboard, queries};
use axum::extract::DefaultBodyLimit;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::routing::{MethodRouter, get, post};
use axum::{Extension, Router};
use http::header::CONTENT_TYPE;
use std::sync::Arc;

pub(super) const OPENAPI_JSON: &str = include_str!("openapi.json");

type Routes = Vec<(&'static str, MethodRouter<AdminBackend>)>;

/// All routes of the admin endpoint, with their handlers. `openapi.json` documents them; a test
/// compares both.
fn all_routes() -> Routes {
    let mut routes = health_routes();
    let json = [(CONTENT_TYPE, "application/json")];
    routes.extend([
        ("/", get(|| async { dashboard::dashboard_page() })),
        ("/config", get(queries::get_config)),
        ("/doctor", get(commands::examine_store)),
        ("/drain", post(commands::start_drain)),
        ("/explain", post(commands::explain_request)),
        ("/fleet", get(fleet::get_fleet)),
        ("/fleet/instance", get(fleet::get_instance_summary)),
        (
            "/keys",
            get(commands::inspect_key).delete(commands::reset_key),
        ),
        (
            "/log-level",
            get(commands::get_log_level).put(commands::set_log_level),
        ),
        ("/openapi.json", get((json, OPENAPI_JSON))),
        ("/overview", get(queries::get_overview)),
        (
            "/overrides/{policy}",
            get(commands::read_overrides)
                .put(commands::set_override)
                .patch(commands::set_override)
                .delete(commands::remove_override),
        ),
        ("/policies", get(queries::get_policies)),
        ("/top", get(queries::get_top_rejections)),
    ]);
    routes
}

fn health_routes() -> Routes {
    vec![
        ("/livez", get("ok\n")),
        ("/readyz", get(queries::get_readiness)),
        ("/metrics", get(queries::get_metrics)),
    ]
}

pub(super) fn admin_router(
    settings: AdminSettings,
    token: ReloadableAdminToken,
    view: AdminBackend,
) -> Router {
    let fleet_reader = Arc::new(FleetReader::new(token.clone()));
    let guard = AccessGuard::new(&settings, token, &view.instance.id);
    let guard = from_fn_with_state(guard, authorize_and_run_handler);
    let mut routes = all_routes();
    for (_, methods) in &mut routes {
        // The access check is inside the method router, so an unsupported method gets 405 and not
        // 403.
        *methods = std::mem::take(methods).route_layer(guard.clone());
    }
    new_router(routes)
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
        .layer(Extension(fleet_reader))
        .layer(from_fn_with_state(Arc::new(settings), require_known_host))
        .layer(from_fn(add_default_body_and_headers))
        .with_state(view)
}

fn new_router(routes: Routes) -> Router<AdminBackend> {
    let routes = routes.into_iter();
    routes.fold(Router::new(), |router, (path, methods)| {
        router.route(path, methods)
    })
}

/// Serves only routes that reveal no request data. Any `Host` is accepted, because Prometheus may
/// use any name.
pub(super) fn probes_router(view: AdminBackend) -> Router {
    new_router(health_routes())
        .layer(from_fn(add_default_body_and_headers))
        .with_state(view)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    /// Compares only the paths; `tests/it/admin_api.rs` tests the methods over HTTP.
    #[test]
    fn openapi_document_lists_exactly_the_routes() {
        let document: Value = serde_json::from_str(OPENAPI_JSON).unwrap();
        let mut documented: Vec<&str> = document["paths"]
            .as_object()
            .unwrap()
            .keys()
            .map(String::as_str)
            .collect();
        let mut routes: Vec<&str> = all_routes().iter().map(|(path, _)| *path).collect();
        documented.sort_unstable();
        routes.sort_unstable();
        assert_eq!(documented, routes);
        assert!(document["openapi"].as_str().unwrap().starts_with("3.1."));
    }
}
