//! Lints: warnings about valid settings that are surely not meant. `check` and the log at start
//! print them.
//!
//! Users stop reading warnings after a false one, so each lint reports only certain cases. The
//! running proxy warns of problems that only traffic shows, such as an unlisted ingress.

mod forged_headers;
mod path_regex;
mod policy_interactions;
mod settings;
mod single_policy;

use super::loaded_config::StoreSettings;
use super::policies::{PolicyContext, PolicyWithReader};
use super::table_reader::TableReader;
use crate::proxy::{ListenSettings, UpstreamScheme, UpstreamSettings, UpstreamUrl};
use policy_interactions::{ComparisonBudget, check_policy_interactions};

const INCOMPLETE_COMPARISON_WARNING: &str = "too many policies may match the same requests to compare each with each, so warnings may be missing: of policies that are never reached, have a name in the rate-limit fields twice, charge a descriptor twice, or are avoided by a header or key that the client chooses; expected a path, host or header value in match that fewer policies share";

/// Runs all lints over the valid policies in file order. Policies with `mode = "off"` are left out.
pub(super) fn run_lints(policies: &[PolicyWithReader<'_>], context: &LintContext<'_>) {
    settings::check_settings(policies, context);
    for spanned in policies {
        single_policy::check_policy(spanned, context);
    }
    let mut budget = ComparisonBudget::default();
    check_policy_interactions(policies, context.policy_context, &mut budget);
    forged_headers::check_forged_headers(policies, context, &mut budget);
    if budget.is_exhausted() {
        context
            .root
            .report_warning("policy", INCOMPLETE_COMPARISON_WARNING);
    }
}

/// Requests that one HTTP/2 connection to the upstream carries at a time.
const STREAMS_PER_CONNECTION: u64 = 100;

/// Valid settings that the lints compare with the policies.
pub(super) struct LintContext<'a> {
    pub(super) root: &'a TableReader<'a>,
    pub(super) policy_context: &'a PolicyContext,
    pub(super) listen: &'a ListenSettings,
    pub(super) upstream: &'a UpstreamSettings,
    pub(super) store: &'a StoreSettings,
    /// Whether `[rls]` is configured.
    pub(super) has_rls: bool,
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
