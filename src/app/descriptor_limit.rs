//! The limit on open file descriptors, of which every connection takes one.

use crate::config::Config;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Descriptors for everything but connections of clients and to the upstream: the admin endpoint and
/// probes (64 each), connections to Redis, DNS lookups, log, reloads.
const RESERVED_DESCRIPTORS: usize = 256;

/// Raises the soft limit of the process to the hard one, and lowers the connection limits of
/// `config` if they exceed what is left.
pub(super) fn fit_connections_to_descriptors(config: &mut Config) {
    let descriptors = raise_soft_limit();
    let available = descriptors.saturating_sub(RESERVED_DESCRIPTORS.min(descriptors / 4));
    let upstream = &mut config.upstream.max_connections;
    let services = config.service_listeners.iter_mut();
    let mut limits: Vec<&mut usize> = services
        .map(|service| &mut service.listen.max_connections)
        .collect();
    limits.push(&mut config.listen.max_connections);
    let wanted = limits.iter().map(|limit| **limit).sum::<usize>().max(1);
    if wanted.saturating_add(*upstream) <= available {
        return;
    }
    // Most connections of clients are idle and need no upstream connection.
    *upstream = (*upstream).min(available / 4).max(1);
    let for_clients = available.saturating_sub(*upstream).min(wanted);
    for limit in limits {
        *limit = (limit.saturating_mul(for_clients) / wanted).max(1);
    }
    tracing::warn!(
        descriptors,
        max_connections = config.listen.max_connections,
        upstream_max_connections = config.upstream.max_connections,
        "too few file descriptors for max_connections, which is lowered; raise the hard limit (ulimit -Hn)"
    );
}

/// Raises the soft limit as far as possible. Returns the limit in effect.
fn raise_soft_limit() -> usize {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    if limit.current != limit.maximum
        && let Err(error) = setrlimit(Resource::Nofile, raised)
    {
        tracing::warn!(%error, "failed to raise the limit on open file descriptors");
    }
    let in_effect = getrlimit(Resource::Nofile).current;
    in_effect.map_or(usize::MAX, |limit| {
        usize::try_from(limit).unwrap_or(usize::MAX)
    })
}
