//! What `rolling_upgrade` and `make upgrade` have in common: four instances are replaced one by
//! one, and all requests add up to each limit.

use super::prelude::*;

/// How many of the four instances run today's version, in each phase of the upgrade and rollback.
pub const PHASES: [usize; 9] = [0, 1, 2, 3, 4, 3, 2, 1, 0];
pub const INSTANCE_COUNT: usize = 4;

/// Requests that one instance sends per phase to a key that it must not exhaust early.
pub const REQUESTS_PER_PHASE: u64 = 5;

pub const TOTAL_UNITS: u64 = (PHASES.len() * INSTANCE_COUNT) as u64 * REQUESTS_PER_PHASE;

/// Policies for both versions, one per kind of counter.
const POLICIES: &str = include_str!("../../fixtures/upgrade/policies.toml");

pub fn upgrade_config(server: &RedisServer) -> String {
    let port = server.port();
    format!(
        "store = {{ kind = 'redis', redis = {{ url = 'redis://127.0.0.1:{port}/0', timeout = '5s', key_prefix = 'shop' }} }}\nclient = {{ trusted_proxies = ['127.0.0.1'] }}\n{POLICIES}"
    )
}

/// A request of the client with this address.
pub fn client_request(proxy: &Proxy, path: &str, client: &str) -> ClientRequest {
    proxy.request("GET", path).header("x-forwarded-for", client)
}
