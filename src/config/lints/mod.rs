//! Lints: warnings about valid settings that are surely not meant. `check` and the log at start
//! print them.
//!
//! Users stop reading warnings after a false one, so each lint reports only certain cases. The
//! running proxy warns of problems that only traffic shows, such as an unlisted ingress.

mod path_regex;
mod policy_interactions;
mod settings;
mod single_policy;

use super::StoreSettings;
use super::policies::PolicyContext;
use super::table_reader::TableReader;
use crate::policy::{KeyPart, Policy, PolicyAction, Quota};
use crate::proxy::{ListenSettings, UpstreamScheme, UpstreamSettings, UpstreamUrl};

/// Requests that one HTTP/2 connection to the upstream carries at a time.
const STREAMS_PER_CONNECTION: u64 = 100;

/// A policy with the reader of its table, for diagnostics.
pub(super) struct SpannedPolicy<'a> {
    pub(super) policy: Policy,
    pub(super) reader: TableReader<'a>,
}

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

/// Runs all lints over the valid policies in file order. Policies with `mode = "off"` are left out.
pub(super) fn run_lints(policies: &[SpannedPolicy<'_>], context: &LintContext<'_>) {
    settings::check_settings(policies, context);
    for spanned in policies {
        single_policy::check_policy(spanned, context);
    }
    policy_interactions::check_policy_interactions(policies, context.policy_context);
}

impl SpannedPolicy<'_> {
    fn quota(&self) -> Option<&Quota> {
        match &self.policy.action {
            PolicyAction::Limit(quota) => Some(quota),
            PolicyAction::Allow | PolicyAction::Deny => None,
        }
    }

    fn key_parts(&self) -> &[KeyPart] {
        self.quota().map_or(&[], |quota| quota.key.parts())
    }

    /// The policy's name and position: `"login" (config.toml:12:8)`.
    fn quote_name(&self) -> String {
        let span = self
            .reader
            .get("name")
            .map_or_else(String::new, |item| format!(" ({})", item.source_span()));
        format!("\"{}\"{span}", self.policy.name)
    }
}

impl LintContext<'_> {
    /// Largest number of requests in flight to the upstreams of all instances. `None` if unknown.
    fn max_upstream_concurrency(&self) -> Option<u64> {
        let instances = match self.store {
            StoreSettings::Memory(_) => 1,
            // 1 is the default, so the number of instances is unknown.
            StoreSettings::Redis(redis) => {
                Some(u64::from(redis.initial_instances)).filter(|count| *count > 1)?
            }
        };
        let per_connection = match &self.upstream.url {
            UpstreamUrl::Unix(_)
            | UpstreamUrl::Net {
                scheme: UpstreamScheme::Http,
                ..
            } => 1,
            UpstreamUrl::Net {
                scheme: UpstreamScheme::Https | UpstreamScheme::H2c,
                ..
            } => STREAMS_PER_CONNECTION,
        };
        let connections = u64::try_from(self.upstream.max_connections).ok()?;
        connections
            .checked_mul(per_connection)?
            .checked_mul(instances)
    }
}
