//! Finds the server that holds a key: one worker's connections to all masters, and the slot map.
//!
//! A single server, also one that sentinels name, is a map of one node and one slot. It never
//! redirects, and the map is never refreshed.
//!
//! redis-rs' own `ClusterConnection` is not used: it retries and waits by its own rules although a
//! request has a deadline, it does not probe connections, and it has its own TLS setup. Only the
//! slot map, two redirections and one refresh task are needed beside [`SupervisedConnection`].
//!
//! Charges of several slots are reserved by one call per slot (`split_decision`). A refused request
//! returns its reservations. Until then, a limit is too strict, never too lax.

mod admission_hints;
mod moving_override;
mod router;
mod shard_search;
mod slot_charges;
mod slot_map;
mod slot_map_refresh;
mod split_decision;

use super::batcher::DecisionBatcher;
use super::connection::RedisConnectionTarget;
use super::connection::SupervisedConnection;
use super::connector::AbortOnDropTask;
use super::error::RedisErrorKind;
use super::node::RedisNode;
use super::shared_state::SharedRedisState;
use super::watched_value::WatchedValue;
use crate::limiter::{Decision, PolicyCharges};
use crate::store::{DecisionFailure, PendingSettlement, Settlement, wait_until_drained};
use admission_hints::AdmissionHints;
use slot_charges::{HashSlotPart, to_creditable_charges};
use slot_map_refresh::run_slot_map_refresh;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinHandle;
use tokio::time::Instant;

pub(crate) use router::RedisRouter;
pub(super) use slot_map::{ClusterSlotMap, find_probe_key};
pub(super) use slot_map_refresh::query_configured_server;

impl RedisRouter {
    /// Connects to all masters, and stays connected as long as the router lives. Also returns the
    /// task that refreshes the slot map of a cluster.
    pub(super) fn start(shared: Arc<SharedRedisState>) -> (Arc<Self>, Option<AbortOnDropTask>) {
        let is_cluster = shared.is_cluster();
        // The slots of a cluster are not known yet.
        let (mut slot_map, mut batcher) = (ClusterSlotMap::new(Vec::new(), Vec::new()), None);
        if !is_cluster {
            let target = RedisConnectionTarget::from_settings(&shared.settings);
            let connection = SupervisedConnection::start(Arc::clone(&shared), target);
            let node = Arc::new(RedisNode::new(connection, Instant::now()));
            batcher = Some(DecisionBatcher::new(Arc::clone(&shared), Arc::clone(&node)));
            slot_map = ClusterSlotMap::from_single_node(node);
        }
        let router = Arc::new(Self {
            shared,
            slot_map: WatchedValue::new(Arc::new(slot_map)),
            batcher: batcher.map(Arc::new),
            refresh_requested: Notify::new(),
            hints: AdmissionHints::default(),
            split_task_count: AtomicUsize::new(0),
            split_tasks_ended: Notify::new(),
        });
        let refresh_task = is_cluster.then(|| {
            let task = tokio::spawn(run_slot_map_refresh(Arc::clone(&router)));
            AbortOnDropTask(task)
        });
        (router, refresh_task)
    }

    /// Decides charges in any slots. The slots of charges that are held back count as unreachable.
    ///
    /// # Errors
    /// When a slot gave no reply, and no other slot refuses the request. The partial decision has
    /// the answers of the slots that replied.
    pub(super) async fn decide(
        self: &Arc<Self>,
        request: &[PolicyCharges<'_>],
        deadline: Instant,
    ) -> Result<Decision, DecisionFailure> {
        let is_sharded = |policy: &PolicyCharges<'_>| policy.shard_count > 1;
        if self.shared.is_cluster() && request.iter().any(is_sharded) {
            self.decide_across_shards(request, deadline).await
        } else {
            self.decide_by_hash_slot(request, deadline).await.0
        }
    }

    /// Waits until all reservations of requests that are not forwarded are returned, for a bounded
    /// time.
    pub(crate) async fn wait_until_reservations_returned(&self) {
        let is_drained = || self.split_task_count.load(Ordering::Relaxed) == 0;
        wait_until_drained(&self.split_tasks_ended, is_drained).await;
    }

    /// Decides charges without a search among shards: charges of one hash slot share a script
    /// call. If the charges are refused, the returned task ends when all reservations are returned.
    async fn decide_by_hash_slot(
        self: &Arc<Self>,
        request: &[PolicyCharges<'_>],
        deadline: Instant,
    ) -> (Result<Decision, DecisionFailure>, Option<JoinHandle<()>>) {
        let common_hash_slot = self.find_common_hash_slot(request);
        if let Some(hash_slot) = common_hash_slot {
            let decision = if request.iter().any(|policy| policy.is_held_back) {
                Err(self.refuse_held_back(hash_slot))
            } else {
                self.request_decision(hash_slot, request, deadline).await
            };
            match decision {
                // The slot moves.
                Err(RedisErrorKind::TryAgain) if self.shared.is_cluster() => {}
                result => return (result.map_err(|kind| self.decision_failure(kind)), None),
            }
        }
        let request = to_creditable_charges(request);
        let mut parts = HashSlotPart::from_request(&request);
        if common_hash_slot.is_some() {
            let moving = parts.iter().flat_map(|part| part.split_by_charge(&request));
            parts = moving.collect();
        }
        let (result_sender, result_receiver) = oneshot::channel();
        // A separate task, so that a client that disconnects does not leave reservations.
        let decided = Arc::clone(self).decide_parts(request, parts, deadline, result_sender);
        let task = self.spawn_split_task(decided);
        // The sender is dropped only when the runtime shuts down.
        let connection_lost = Err(self.decision_failure(RedisErrorKind::Connection));
        (result_receiver.await.unwrap_or(connection_lost), Some(task))
    }

    /// The slot of all charges; `None` if they are in several.
    fn find_common_hash_slot(&self, request: &[PolicyCharges<'_>]) -> Option<u16> {
        let mut slots = request
            .iter()
            .map(|policy| self.shared.hash_slot_for_key(&policy.key));
        let first = slots.next().unwrap_or(0);
        slots.all(|hash_slot| hash_slot == first).then_some(first)
    }

    fn decision_failure(&self, kind: RedisErrorKind) -> DecisionFailure {
        self.shared.unavailable_error(kind.into_str()).into()
    }

    /// Sends the settlements that return the charges of a request that is not forwarded.
    pub(crate) fn return_charges(self: &Arc<Self>, returns: Vec<PendingSettlement>) {
        let router = Arc::clone(self);
        self.spawn_split_task(async move {
            let returns: Vec<_> = returns.iter().map(Settlement::from_pending).collect();
            drop(router.apply_settlements(&returns).await);
        });
    }

    fn spawn_split_task(
        self: &Arc<Self>,
        work: impl Future<Output = ()> + Send + 'static,
    ) -> JoinHandle<()> {
        let router = Arc::clone(self);
        self.split_task_count.fetch_add(1, Ordering::Relaxed);
        tokio::spawn(async move {
            work.await;
            if router.split_task_count.fetch_sub(1, Ordering::Relaxed) == 1 {
                router.split_tasks_ended.notify_waiters();
            }
        })
    }
}
