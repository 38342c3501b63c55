//! The server that a connection leads to.

use super::error::{RedisConnectionError, RedisErrorKind};
use super::sentinel::SentinelGroup;
use super::settings::{RedisAddress, RedisSettings, RedisTopology};
use crate::limiter::{Key, KeyBuilder};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The policy name of the counter that proves that Redis accepts writes. No policy can have this
/// name.
pub(super) const PROBE_POLICY_NAME: &str = "-probe";

/// The server that a connection leads to.
#[derive(Debug)]
pub(super) struct RedisConnectionTarget {
    /// `None`: the master that the sentinels name.
    address: Option<RedisAddress>,
    /// The counter that proves that the server accepts writes.
    pub(super) probe_key: Key,
    /// Index of the sentinel that the next attempt starts with.
    next_sentinel: AtomicUsize,
}

impl RedisConnectionTarget {
    /// The single server, or the master that the sentinels name.
    pub(super) fn from_settings(settings: &RedisSettings) -> Self {
        let is_known = settings.topology == RedisTopology::Standalone;
        let address = settings.servers.first().filter(|_| is_known).cloned();
        Self {
            address,
            probe_key: KeyBuilder::new(PROBE_POLICY_NAME).finish(),
            next_sentinel: AtomicUsize::new(fastrand::usize(..1024)),
        }
    }

    /// A node of a cluster, with a probe key in one of its slots.
    pub(super) fn from_node(address: RedisAddress, probe: Key) -> Self {
        Self {
            address: Some(address),
            probe_key: probe,
            next_sentinel: AtomicUsize::new(0),
        }
    }

    /// The address to connect to now.
    pub(super) async fn resolve_address(
        &self,
        settings: &RedisSettings,
    ) -> Result<RedisAddress, RedisConnectionError> {
        match (&self.address, &settings.topology) {
            (Some(address), _) => Ok(address.clone()),
            (
                None,
                RedisTopology::Sentinel {
                    master,
                    credentials,
                },
            ) => {
                let first_sentinel = self.next_sentinel.fetch_add(1, Ordering::Relaxed);
                SentinelGroup {
                    settings,
                    master_name: master,
                    credentials,
                }
                .resolve_master(first_sentinel)
                .await
            }
            (None, _) => Err(RedisConnectionError::new(
                RedisErrorKind::Dns,
                "no address is known",
            )),
        }
    }

    /// Returns when the server at an address is no longer the master.
    pub(super) async fn wait_until_master_changes(
        &self,
        settings: &RedisSettings,
        current_address: &RedisAddress,
    ) {
        match &settings.topology {
            RedisTopology::Sentinel {
                master,
                credentials,
            } => {
                let first_sentinel = self.next_sentinel.load(Ordering::Relaxed);
                SentinelGroup {
                    settings,
                    master_name: master,
                    credentials,
                }
                .wait_for_master_change(current_address, first_sentinel)
                .await;
            }
            _ => std::future::pending().await,
        }
    }
}
