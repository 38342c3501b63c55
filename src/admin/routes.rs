//! What is answered where, and who may ask.

use super::access::{Guard, guard, require_known_host};
use super::answer::finish;
use super::asked::MAX_BODY_BYTES;
use super::{AdminSettings, View, acts, dashboard, health, looks};
use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::routing::{MethodRouter, get, post};
use std::sync::Arc;

/// Everything there is, each with who may ask for it. `openapi.json` tells the same to others; a test compares them.
fn all() -> Vec<(&'static str, MethodRouter<View>)> {
    let mut routes = health();
    routes.extend([
        ("/", get(dashboard::page)),
        ("/config", get(looks::config)),
        ("/drain", post(acts::drain)),
        ("/explain", post(acts::explain)),
        ("/keys", get(acts::key).delete(acts::reset)),
        ("/log-level", get(acts::log_level).put(acts::set_log_level)),
        ("/openapi.json", get(looks::openapi)),
        ("/overview", get(looks::overview)),
        ("/policies", get(looks::policies)),
        ("/top", get(looks::top)),
    ]);
    routes
}

fn health() -> Vec<(&'static str, MethodRouter<View>)> {
    vec![
        ("/livez", get(health::live)),
        ("/readyz", get(health::ready)),
        ("/metrics", get(health::metrics)),
    ]
}

pub(super) fn admin(settings: AdminSettings, view: View) -> Router {
    let guarded = Guard::new(&settings);
    // Behind the choice of the method: what can't be asked at all is not forbidden.
    let router = all()
        .into_iter()
        .fold(Router::new(), |router, (path, methods)| {
            router.route(
                path,
                methods.route_layer(from_fn_with_state(guarded.clone(), guard)),
            )
        });
    router
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
        .layer(from_fn_with_state(Arc::new(settings), require_known_host))
        .layer(from_fn(finish))
        .with_state(view)
}

/// Only what gives nothing away; whatever name it is called by, as Prometheus finds it under many.
pub(super) fn probes(view: View) -> Router {
    let router = health()
        .into_iter()
        .fold(Router::new(), |router, (path, methods)| {
            router.route(path, methods)
        });
    router.layer(from_fn(finish)).with_state(view)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    /// That each method is there, too, is seen over HTTP: see `asking` among the tests of the whole.
    #[test]
    fn the_document_tells_of_every_route_and_of_no_other() {
        let document: Value = serde_json::from_str(looks::OPENAPI).unwrap();
        let mut told: Vec<&str> = document["paths"]
            .as_object()
            .unwrap()
            .keys()
            .map(String::as_str)
            .collect();
        let mut routes: Vec<&str> = all().iter().map(|(path, _)| *path).collect();
        told.sort_unstable();
        routes.sort_unstable();
        assert_eq!(told, routes);
        assert!(document["openapi"].as_str().unwrap().starts_with("3.1."));
    }
}
