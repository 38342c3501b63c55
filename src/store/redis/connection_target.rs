//! The server that a connection leads to.

use super::access::RedisAccess;
use super::error::{RedisConnectionError, RedisErrorKind};
use super::sentinel::{SentinelDisagreements, SentinelGroup};
use super::settings::{RedisAddress, RedisSettings, RedisTopology};
use crate::limiter::{Key, KeyBuilder};

/// The policy name of the counter that proves that Redis accepts writes. No policy can have this
/// name.
pub(super) const PROBE_POLICY_NAME: &str = "-probe";

/// The server that a connection leads to.
#[derive(Debug)]
pub(super) struct RedisConnectionTarget {
    /// `None`: the master that the sentinels name.
    pub(super) address: Option<RedisAddress>,
    /// The counter that proves that the server accepts writes. In a cluster, it is in one of the
    /// node's slots.
    pub(super) probe_key: Key,
}

impl RedisConnectionTarget {
    /// The single server, or the master that the sentinels name.
    pub(super) fn from_settings(settings: &RedisSettings) -> Self {
        let is_known = settings.topology == RedisTopology::Standalone;
        Self {
            address: settings.servers.first().filter(|_| is_known).cloned(),
            probe_key: KeyBuilder::new(PROBE_POLICY_NAME).finish(),
        }
    }

    /// The address to connect to now.
    pub(super) async fn resolve_address(
        &self,
        access: &RedisAccess,
        disagreements: &SentinelDisagreements,
    ) -> Result<RedisAddress, RedisConnectionError> {
        match (&self.address, SentinelGroup::from_access(access)) {
            (Some(address), _) => Ok(address.clone()),
            (None, Some(sentinels)) => sentinels.resolve_master(disagreements).await,
            (None, None) => Err(RedisConnectionError::new(
                RedisErrorKind::Dns,
                "no address is known",
            )),
        }
    }
}
