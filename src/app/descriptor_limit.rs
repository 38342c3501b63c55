//! The limit on open file descriptors, of which every connection takes one.

use crate::config::Config;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Descriptors for everything but connections of clients and to the upstream: the admin endpoint
/// and probes (64 each), DNS lookups, log, reloads; and for each worker its runtime and connections
/// to Redis.
const RESERVED_DESCRIPTORS: usize = 256;
const DESCRIPTORS_PER_WORKER: usize = 8;

/// Connection limits that fit the descriptors.
struct FittedLimits {
    /// Connections of clients, over all listeners: what fits, and what the configuration allows.
    for_clients: usize,
    wanted: usize,
    upstream: usize,
}

/// Raises the soft limit of the process to the hard one, and lowers the connection limits of
/// `config` if they exceed what is left.
pub(super) fn fit_connections_to_descriptors(config: &mut Config) {
    let descriptors = raise_soft_limit();
    let Some(fitted) = FittedLimits::new(config, descriptors) else {
        return;
    };
    config.upstream.max_connections = fitted.upstream;
    let services = config.service_listeners.iter_mut();
    let listeners = services.map(|service| &mut service.listen);
    for listen in listeners.chain([&mut config.listen]) {
        listen.max_connections = fitted.scale(listen.max_connections);
    }
    tracing::warn!(
        descriptors,
        max_connections = config.listen.max_connections,
        upstream_max_connections = config.upstream.max_connections,
        "too few file descriptors for max_connections, which is lowered; raise the hard limit (ulimit -Hn)"
    );
}

/// States the connection limits that a process with this process's hard limit would lower.
pub(crate) fn describe_lowered_connections(config: &Config) -> Option<String> {
    let descriptors = to_count(getrlimit(Resource::Nofile).maximum);
    let fitted = FittedLimits::new(config, descriptors)?;
    Some(format!(
        "max_connections needs more file descriptors than the hard limit here, {descriptors}: it would be lowered to {} (listen) and {} (upstream); expected a higher limit (ulimit -Hn)",
        fitted.scale(config.listen.max_connections),
        fitted.upstream
    ))
}

impl FittedLimits {
    /// Returns `None` if the configured limits fit.
    fn new(config: &Config, descriptors: usize) -> Option<Self> {
        let workers = DESCRIPTORS_PER_WORKER.saturating_mul(config.listen.threads);
        let reserved = RESERVED_DESCRIPTORS.saturating_add(workers);
        let available = descriptors.saturating_sub(reserved.min(descriptors / 4));
        let services = config.service_listeners.iter().map(|one| &one.listen);
        let listeners = services.chain([&config.listen]);
        let wanted = listeners
            .map(|listen| listen.max_connections)
            .sum::<usize>();
        let upstream = config.upstream.max_connections;
        if wanted.saturating_add(upstream) <= available {
            return None;
        }
        // Most connections of clients are idle and need no upstream connection.
        let upstream = upstream.min(available / 4).max(1);
        Some(Self {
            for_clients: available.saturating_sub(upstream).min(wanted),
            wanted: wanted.max(1),
            upstream,
        })
    }

    /// The share of a listener with this limit.
    fn scale(&self, limit: usize) -> usize {
        (limit.saturating_mul(self.for_clients) / self.wanted).max(1)
    }
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
    to_count(getrlimit(Resource::Nofile).current)
}

/// `None` stands for no limit.
fn to_count(limit: Option<u64>) -> usize {
    limit.map_or(usize::MAX, |limit| {
        usize::try_from(limit).unwrap_or(usize::MAX)
    })
}
