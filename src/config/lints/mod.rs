//! What is legal, works, and is surely not meant. `check` tells it, and so does the log at the start.
//!
//! A warning that is wrong once is not read the next time: each of these is certain, or isn't given. What can only be
//! known from traffic (an ingress that nobody has listed, for instance) is told by the running proxy.

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

/// A policy, and where it was written.
pub(super) struct SpannedPolicy<'a> {
    pub(super) policy: Policy,
    pub(super) reader: TableReader<'a>,
}

/// The settings that policies are looked at beside. All of them are right.
pub(super) struct LintContext<'a> {
    pub(super) root: &'a TableReader<'a>,
    pub(super) policy_context: &'a PolicyContext,
    pub(super) listen: &'a ListenSettings,
    pub(super) upstream: &'a UpstreamSettings,
    pub(super) store: &'a StoreSettings,
    /// There is a rate-limit service.
    pub(super) has_rls: bool,
}

/// Warns of everything that is doubtful about policies that are right (those that are off are left out), in file order.
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

    /// `"login" (config.toml:12:8)`.
    fn quote_name(&self) -> String {
        let place = self
            .reader
            .get("name")
            .map_or_else(String::new, |item| format!(" ({})", item.source_span()));
        format!("\"{}\"{place}", self.policy.name)
    }
}

impl LintContext<'_> {
    /// How many requests the upstreams of all instances are sent at a time, if that is known.
    fn max_upstream_concurrency(&self) -> Option<u64> {
        let instances = match self.store {
            StoreSettings::Memory(_) => 1,
            // 1 is what stands there when nobody has said how many there are.
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
