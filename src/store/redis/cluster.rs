//! One worker's client of a Redis Cluster: a connection to each master, and the slot map.
//!
//! redis-rs' own `ClusterConnection` is not used: it retries and waits by its own rules although a
//! request has a deadline, it does not probe connections, and it has its own TLS setup. Only the
//! slot map, two redirections and one refresh task are needed beside [`SupervisedConnection`].
//!
//! Charges of several slots are reserved by one call per slot (`split_decision`). A refused request
//! returns its reservations. Until then, a limit is too strict, never too lax.

mod admission_hints;
mod router;
mod shard_search;
mod slot_charges;
mod slot_map;
mod slot_map_refresh;
mod split_decision;

use super::connection::LiveConnection;
use super::connector::AbortOnDropTask;
use super::context::RedisContext;
use super::error::RedisErrorKind;
use super::watched_value::WatchedValue;
use crate::limiter::Charge;
use admission_hints::AdmissionHints;
use futures_util::future::join_all;
use router::ClusterRouter;
use slot_charges::HashSlotCharges;
use slot_map::ClusterNode;
use slot_map_refresh::run_slot_map_refresh;
use split_decision::SplitResult;
use std::sync::Arc;
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

pub(super) use slot_map::{hash_slot_for_key, hash_slot_for_name};

#[derive(Debug)]
pub(super) struct ClusterClient {
    pub(super) router: Arc<ClusterRouter>,
    _refresh_task: AbortOnDropTask,
}

/// Whether charges are in several slots.
fn spans_several_hash_slots(charges: &[Charge<'_>]) -> bool {
    let mut keys = charges.iter().map(|charge| charge.key);
    keys.next().is_some_and(|first| {
        keys.any(|key| key.id() != first.id() && hash_slot_for_key(key) != hash_slot_for_key(first))
    })
}

impl ClusterClient {
    /// Fetches the slot map, connects to all masters, and stays connected as long as the value
    /// lives.
    pub(super) fn start(context: Arc<RedisContext>) -> Self {
        let router = Arc::new(ClusterRouter {
            context,
            slot_map: WatchedValue::default(),
            refresh_requested: Notify::new(),
            hints: AdmissionHints::default(),
        });
        let refresh_task = tokio::spawn(run_slot_map_refresh(Arc::clone(&router)));
        Self {
            router,
            _refresh_task: AbortOnDropTask(refresh_task),
        }
    }

    /// Waits for the first probed connection to every master.
    pub(super) async fn wait_until_ready(&self) {
        let map = self.router.slot_map.wait_for(|map| !map.nodes.is_empty());
        join_all(
            map.await
                .nodes
                .iter()
                .map(|node| node.connection.wait_until_ready()),
        )
        .await;
    }

    /// Decides charges in any slots.
    ///
    /// # Errors
    /// When a slot gave no reply, and no other slot refuses the request. The partial decision has
    /// the answers of the slots that replied.
    pub(super) async fn decide(&self, charges: &[Charge<'_>], deadline: Instant) -> SplitResult {
        match charges.iter().any(|charge| charge.shard_count > 1) {
            true => self.decide_across_shards(charges, deadline).await,
            false => self.decide_by_hash_slot(charges, deadline).await.0,
        }
    }

    /// Decides charges without a search among shards: charges of one hash slot share a script call. If the charges are refused, the returned
    /// task ends when all reservations are returned.
    async fn decide_by_hash_slot(
        &self,
        charges: &[Charge<'_>],
        deadline: Instant,
    ) -> (SplitResult, Option<JoinHandle<()>>) {
        let parts = match spans_several_hash_slots(charges) {
            true => HashSlotCharges::from_request(charges),
            false => {
                let hash_slot = charges
                    .first()
                    .map_or(0, |charge| hash_slot_for_key(charge.key));
                let decision = self.router.request_decision(hash_slot, charges, deadline);
                match decision.await {
                    Err(RedisErrorKind::TryAgain) => {
                        let parts = HashSlotCharges::from_request(charges).into_iter();
                        parts.flat_map(HashSlotCharges::split_by_charge).collect()
                    }
                    result => return (result.map_err(|failure| (failure, None)), None),
                }
            }
        };
        let (result_sender, result_receiver) = oneshot::channel();
        // A separate task, so that a client that disconnects does not leave reservations.
        let router = Arc::clone(&self.router);
        let task = tokio::spawn(router.decide_parts(parts, deadline, result_sender));
        // The sender is dropped only when the runtime shuts down.
        let connection_lost = Err((RedisErrorKind::Connection, None));
        (result_receiver.await.unwrap_or(connection_lost), Some(task))
    }

    /// Whether calls would be sent to all nodes of these charges; for a sharded key, to all nodes.
    pub(super) fn is_reachable_for(&self, charges: &[Charge<'_>]) -> bool {
        let map = self.router.slot_map.get();
        let is_available = |charge: &Charge<'_>| match charge.shard_count {
            0 | 1 => map
                .node_for_hash_slot(hash_slot_for_key(charge.key))
                .is_some_and(|node| node.is_available()),
            _ => map.nodes.iter().all(|node| node.is_available()),
        };
        charges.iter().all(is_available)
    }

    /// The slots that no call would be sent for.
    pub(super) fn unreachable_hash_slots(&self) -> Vec<u16> {
        self.router
            .slot_map
            .get()
            .hash_slots_not_served_by(|node| node.is_available())
    }

    /// The slots of masters that are connected but don't answer a PING; their connections are
    /// replaced. Without this check, only calls to a hung node detect that it hangs.
    pub(super) async fn find_unresponsive_hash_slots(&self) -> Vec<u16> {
        let map = self.router.slot_map.get();
        let ping = redis::cmd("PING");
        let call_timeout = self.router.context.settings.connect_timeout;
        let find_unresponsive = async |node: Arc<ClusterNode>| {
            let live = node.connection.live().ok()?;
            let elapsed = timeout(call_timeout, live.run_command(&ping)).await.err()?;
            live.request_replacement(self.router.count_failure(elapsed.into()));
            Some(node)
        };
        let unresponsive = join_all(map.nodes.iter().cloned().map(find_unresponsive)).await;
        let is_unresponsive = |node: &ClusterNode| {
            let mut silent_nodes = unresponsive.iter().flatten();
            silent_nodes.any(|silent| silent.address == node.address)
        };
        let current_map = self.router.slot_map.get();
        current_map.hash_slots_not_served_by(|node| !is_unresponsive(node))
    }

    /// The connections to all masters in the slot map, or why one is missing.
    pub(super) fn master_connections(&self) -> Vec<Result<Arc<LiveConnection>, RedisErrorKind>> {
        let map = self.router.slot_map.get();
        map.nodes
            .iter()
            .map(|node| node.connection.live())
            .collect()
    }
}
