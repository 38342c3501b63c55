//! The settings that lints compare with the policies.

use crate::config::loaded_config::StoreSettings;
use crate::config::policies::context::PolicyContext;
use crate::config::table_reader::TableReader;
use crate::proxy::{ListenSettings, UpstreamScheme, UpstreamSettings, UpstreamUrl};

/// Requests that one HTTP/2 connection to the upstream carries at a time.
const STREAMS_PER_CONNECTION: u64 = 100;

/// Valid settings that the lints compare with the policies.
pub(crate) struct LintContext<'a> {
    pub(crate) root: &'a TableReader<'a>,
    pub(crate) policy_context: &'a PolicyContext,
    pub(crate) listen: &'a ListenSettings,
    pub(crate) upstream: &'a UpstreamSettings,
    pub(crate) store: &'a StoreSettings,
    /// Whether `[rls]` is configured.
    pub(crate) has_rls: bool,
}

impl LintContext<'_> {
    /// Largest number of requests in flight to the upstreams of all instances. `None` if unknown.
    pub(super) fn max_upstream_concurrency(&self) -> Option<u64> {
        let instances = match self.store {
            StoreSettings::Memory(_) => 1,
            // 1 is the default, so the number of instances is unknown.
            StoreSettings::Redis(redis) => {
                Some(u64::from(redis.initial_instances)).filter(|count| *count > 1)?
            }
        };
        let per_connection = match &self.upstream.url {
            UpstreamUrl::Unix(_) => 1,
            UpstreamUrl::Net { scheme, .. } => match scheme {
                UpstreamScheme::Http => 1,
                UpstreamScheme::Https | UpstreamScheme::H2c => STREAMS_PER_CONNECTION,
            },
        };
        let connections = u64::try_from(self.upstream.max_connections).ok()?;
        let per_instance = connections.checked_mul(per_connection)?;
        per_instance.checked_mul(instances)
    }
}
