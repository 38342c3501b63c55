//! What is legal, works, and is surely not meant. `check` tells it, and so does the log at the start.
//!
//! A warning that is wrong once is not read the next time: each of these is certain, or isn't given. What can only be
//! known from traffic (an ingress that nobody has listed, for instance) is told by the running proxy.

mod policies;
mod policy;
mod regexes;
mod settings;

use super::StoreSettings;
use super::cursor::Cursor;
use super::policies::Scope;
use crate::policy::{Action, KeyPart, Policy, Quota};
use crate::proxy::{ListenSettings, Scheme, UpstreamSettings, UpstreamUrl};

/// Requests that one HTTP/2 connection to the upstream carries at a time.
const STREAMS: u64 = 100;

/// A policy, and where it was written.
pub(super) struct Placed<'a> {
    pub(super) policy: Policy,
    pub(super) at: Cursor<'a>,
}

/// The settings that policies are looked at beside. All of them are right.
pub(super) struct Around<'a> {
    pub(super) top: &'a Cursor<'a>,
    pub(super) scope: &'a Scope,
    pub(super) listen: &'a ListenSettings,
    pub(super) upstream: &'a UpstreamSettings,
    pub(super) store: &'a StoreSettings,
    /// There is a rate-limit service.
    pub(super) is_called: bool,
}

/// Warns of everything that is doubtful about policies that are right (those that are off are left out), in file order.
pub(super) fn tell(placed: &[Placed<'_>], around: &Around<'_>) {
    settings::look(placed, around);
    for one in placed {
        policy::look(one, around);
    }
    policies::look(placed, around.scope);
}

impl Placed<'_> {
    fn quota(&self) -> Option<&Quota> {
        match &self.policy.action {
            Action::Limit(quota) => Some(quota),
            Action::Allow | Action::Deny => None,
        }
    }

    fn key_parts(&self) -> &[KeyPart] {
        self.quota().map_or(&[], |quota| quota.key.parts())
    }

    /// `"login" (config.toml:12:8)`.
    fn called(&self) -> String {
        let place = self
            .at
            .item("name")
            .map_or_else(String::new, |item| format!(" ({})", item.place()));
        format!("\"{}\"{place}", self.policy.name)
    }
}

impl Around<'_> {
    /// How many requests the upstreams of all instances are sent at a time, if that is known.
    fn most_at_a_time(&self) -> Option<u64> {
        let instances = match self.store {
            StoreSettings::Memory(_) => 1,
            // 1 is what stands there when nobody has said how many there are.
            StoreSettings::Redis(redis) => {
                Some(u64::from(redis.instances)).filter(|count| *count > 1)?
            }
        };
        let per_connection = match &self.upstream.url {
            UpstreamUrl::Unix(_)
            | UpstreamUrl::Net {
                scheme: Scheme::Http,
                ..
            } => 1,
            UpstreamUrl::Net {
                scheme: Scheme::Https | Scheme::H2c,
                ..
            } => STREAMS,
        };
        let connections = u64::try_from(self.upstream.max_connections).ok()?;
        connections
            .checked_mul(per_connection)?
            .checked_mul(instances)
    }
}
