//! Counters in Redis, shared by all replicas.
//!
//! One script decides all limits of a request in one round trip, on the server's clock (`scripts`,
//! `decide.lua`). The script needs Redis 6.2 (SET with PXAT). Each worker has a connection and a
//! task that supervises it (`connection`). The server is configured directly, named by the
//! sentinels (`sentinel`), or found in a cluster's slot map (`routing`). The circuit breaker
//! belongs to the process (`circuit_breaker`). One worker counts the instances, and writes back
//! usage that was admitted while Redis was unreachable (`membership`).
//!
//! Four states describe availability:
//!
//! | state | scope | true |
//! |---|---|---|
//! | [`SharedRedisState::is_up`] | process | once connected, no connection lost, breaker closed |
//! | `SharedRedisState::is_breaker_open` | process | after failures in a row, until a probe works |
//! | [`RedisStore::is_reachable`] | worker | while the breaker is closed and its connection works |
//! | `FallbackStore::is_in_outage` | process | from the first failure until all is written back |
//!
//! In a cluster the breaker never opens: failures of its nodes are only counted.

mod access;
mod batcher;
mod circuit_breaker;
mod connection;
mod connector;
mod diagnostics;
mod error;
mod hash_slot;
mod inspector;
mod live_connection;
mod member_list;
mod membership;
mod routing;
mod script_batch;
mod scripts;
mod sentinel;
mod server_info;
mod settings;
mod shared_state;
mod watched_value;

pub use circuit_breaker::RedisOutage;
pub use diagnostics::{
    ClockReading, DenialReason, DeniedCommand, InfoFields, KeySample, PolicyKeySample,
    RedisDiagnosis, ScriptLatency, SentinelAnswer, ServerDiagnosis, ServerFacts, diagnose_redis,
};
pub use error::{PERMISSION_REMEDY, RedisConnectionError, RedisErrorKind};
pub use inspector::{CounterInspector, RedisCounter};
pub use member_list::{FleetMember, MemberDescription, MemberList};
pub use script_batch::{CallerReply, DecisionBatch};
pub use scripts::ScriptLibrary;
pub use settings::{
    RedisAddress, RedisCredentials, RedisDialer, RedisPassword, RedisSettings, RedisStreamFuture,
    RedisTopology, RedisTransport,
};
pub use shared_state::{SharedRedisState, instance_id};

use super::{DecisionFailure, Settlement, SettlementError};
use crate::limiter::{Decision, PolicyCharges};
use batcher::DecisionBatcher;
use connection::{RedisConnectionTarget, RedisNode};
use futures_util::future::join_all;
use live_connection::LiveConnection;
use routing::{AdmissionHints, ClusterSlotMap, run_slot_map_refresh};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout};
use tokio_util::task::AbortOnDropHandle;
use watched_value::WatchedValue;

/// How much longer than `connect_timeout` an inspection waits for the end of a connection attempt.
const ATTEMPT_MARGIN: Duration = Duration::from_millis(200);

/// One worker's handle of the Redis store. Cheap to clone. Use it on the runtime that started it.
#[derive(Clone, Debug)]
pub struct RedisStore {
    shared: Arc<SharedRedisState>,
    pub(super) worker: Arc<WorkerState>,
    /// The task that refreshes the slot map of a cluster.
    _refresh_task: Option<Arc<AbortOnDropHandle<()>>>,
    /// The number of the worker in its process, from 0.
    worker_number: u64,
    /// The tasks that maintain the membership and poll the server info, in the worker that runs
    /// them for the process.
    membership_tasks: Option<Arc<[AbortOnDropHandle<()>; 2]>>,
}

/// What all clones of a worker's handle use.
#[derive(Debug)]
pub(super) struct WorkerState {
    /// The connections to all masters, by slot.
    slot_map: WatchedValue<Arc<ClusterSlotMap>>,
    /// Sends the decisions of a single server. A cluster decides each request by calls of its own,
    /// because the keys of a call must be in one slot.
    batcher: Option<Arc<DecisionBatcher>>,
    /// Requests a refresh of the slot map after a call contradicted it.
    refresh_requested: Notify,
    pub(super) hints: AdmissionHints,
    /// Tasks of split decisions that may still return reservations.
    split_task_count: AtomicUsize,
    /// Notified when the last of these tasks ends.
    split_tasks_ended: Notify,
}

impl Deref for RedisStore {
    type Target = SharedRedisState;

    fn deref(&self) -> &SharedRedisState {
        &self.shared
    }
}

impl RedisStore {
    /// Starts connecting to all masters, and stays connected until the last clone is dropped. Call
    /// it on the worker's runtime.
    pub fn start(shared: &Arc<SharedRedisState>) -> Self {
        let is_cluster = shared.is_cluster();
        // The slots of a cluster are not known yet.
        let (mut slot_map, mut batcher) = (ClusterSlotMap::new(Vec::new(), Vec::new()), None);
        if !is_cluster {
            let target = RedisConnectionTarget::from_settings(&shared.settings);
            let node = Arc::new(RedisNode::start(shared, target, Instant::now()));
            batcher = Some(DecisionBatcher::new(Arc::clone(shared), Arc::clone(&node)));
            slot_map = ClusterSlotMap::from_single_node(node);
        }
        let mut store = Self {
            shared: Arc::clone(shared),
            worker: Arc::new(WorkerState {
                slot_map: WatchedValue::new(Arc::new(slot_map)),
                batcher: batcher.map(Arc::new),
                refresh_requested: Notify::new(),
                hints: AdmissionHints::default(),
                split_task_count: AtomicUsize::new(0),
                split_tasks_ended: Notify::new(),
            }),
            _refresh_task: None,
            worker_number: shared.worker_count.fetch_add(1, Ordering::Relaxed),
            membership_tasks: None,
        };
        if is_cluster {
            let task = tokio::spawn(run_slot_map_refresh(store.clone()));
            store._refresh_task = Some(Arc::new(AbortOnDropHandle::new(task)));
        }
        store
    }

    /// Registers the process with the instances that share its limits, until
    /// [`RedisStore::leave_membership`]. Only the first worker of the process does this.
    #[must_use]
    pub fn join_membership(mut self) -> Self {
        if self.worker_number == 0 {
            let tasks = [
                tokio::spawn(membership::run_membership(self.clone())),
                tokio::spawn(server_info::run_server_info_poller(self.clone())),
            ];
            self.membership_tasks = Some(Arc::new(tasks.map(AbortOnDropHandle::new)));
        }
        self
    }

    /// Writes back usage and removes the process from the instance count, if this handle maintains
    /// the membership.
    pub async fn leave_membership(&self) {
        if let Some(membership_tasks) = &self.membership_tasks {
            membership_tasks.iter().for_each(AbortOnDropHandle::abort);
            membership::write_back_and_remove_member(self).await;
        }
    }

    /// An id of the worker, unique among the workers of all processes.
    pub fn worker_id(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.instance_id.hash(&mut hasher);
        self.worker_number.hash(&mut hasher);
        hasher.finish()
    }

    /// Whether requests are sent to Redis at all: the breaker is closed and a master is connected.
    pub fn is_reachable(&self) -> bool {
        !self.is_breaker_open() && self.master_connections().iter().any(Result::is_ok)
    }

    /// Whether a request with this charge would be sent to the server that holds the counter; for a
    /// sharded key, to all servers.
    pub fn is_reachable_for(&self, policy: &PolicyCharges<'_>) -> bool {
        let map = self.worker.slot_map.get();
        let hash_slot = self.hash_slot_for_key(&policy.key);
        !self.is_breaker_open()
            && match policy.shard_count {
                0 | 1 => map
                    .node_for_hash_slot(hash_slot)
                    .is_some_and(|node| node.is_available()),
                _ => map.nodes.iter().all(|node| node.is_available()),
            }
    }

    /// The partitions, as `FallbackStore` counts them, that requests are not sent to, and those
    /// of the `silent` nodes.
    fn unreachable_partitions(&self, silent: &[Arc<RedisNode>]) -> Vec<u16> {
        let is_open = self.is_breaker_open();
        self.worker.slot_map.get().hash_slots_not_served_by(|node| {
            let is_silent = silent.iter().any(|silent| Arc::ptr_eq(silent, node));
            !is_open && !is_silent && node.is_available()
        })
    }

    /// The masters that are connected but don't answer a PING. Without this check, only calls to a
    /// hung server detect that it hangs, and it would run each of them later.
    async fn find_silent_nodes(&self) -> Vec<Arc<RedisNode>> {
        let map = self.worker.slot_map.get();
        let (ping, call_timeout) = (redis::cmd("PING"), self.settings.connect_timeout);
        let check = async |node: &Arc<RedisNode>| {
            let live = node.live().ok()?;
            let elapsed = timeout(call_timeout, live.run_command(&ping)).await.err()?;
            let kind = RedisErrorKind::from(elapsed);
            self.breaker.count_failure(kind);
            live.record_failure(kind);
            Some(Arc::clone(node))
        };
        let silent = join_all(map.nodes.iter().map(check)).await;
        silent.into_iter().flatten().collect()
    }

    /// The connections to all masters, or why one is missing.
    fn master_connections(&self) -> Vec<Result<Arc<LiveConnection>, RedisErrorKind>> {
        let map = self.worker.slot_map.get();
        let nodes = map.nodes.iter();
        nodes.map(|node| node.live()).collect()
    }

    /// The partition that holds the sets of the membership.
    fn membership_partition(&self) -> u16 {
        let [instances, _] = self.scripts.membership_keys();
        self.hash_slot_for_name(&instances)
    }

    /// Returns when this worker's first connection to each master is ready, or `connect_timeout`
    /// has passed.
    pub async fn wait_until_ready(&self) {
        let ready = async {
            for node in &self.wait_for_slot_map().await.nodes {
                node.wait_until_ready().await;
            }
        };
        drop(timeout(self.settings.connect_timeout, ready).await);
    }

    /// Waits for the end of the first attempt to connect to each master: for `connect_timeout`, and
    /// a margin in which the attempts end by it.
    ///
    /// # Errors
    /// Why one of them is not connected.
    pub async fn wait_for_first_attempts(&self) -> Result<(), RedisConnectionError> {
        let all_attempts = async {
            let map = self.wait_for_slot_map().await;
            let attempts = map.nodes.iter();
            let attempts = attempts.map(|node| node.wait_for_first_attempt());
            join_all(attempts).await.into_iter().collect()
        };
        let max_wait = self.settings.connect_timeout + ATTEMPT_MARGIN;
        let connected: Result<(), Arc<_>> = timeout(max_wait, all_attempts).await?;
        connected.map_err(|error| (*error).clone())
    }

    async fn wait_for_slot_map(&self) -> Arc<ClusterSlotMap> {
        let slot_map = &self.worker.slot_map;
        slot_map.wait_for(|map| !map.nodes.is_empty()).await
    }

    /// Decides charges in Redis, within `timeout` from `requested_at`. No two charges may name the
    /// same counter. The servers of charges that are held back count as unreachable.
    ///
    /// # Errors
    /// [`DecisionFailure`] with the kind of the failure. Redis may hold a charge for a request that
    /// was rejected or charged again; it never misses one that it admitted.
    pub async fn decide(
        &self,
        request: &[PolicyCharges<'_>],
        requested_at: Instant,
    ) -> Result<Decision, DecisionFailure> {
        let deadline = requested_at + self.settings.timeout;
        if self.is_breaker_open() {
            return Err(self.unavailable_error("breaker_open").into());
        }
        // Boxed, because every request's future would include its size otherwise.
        if self.is_cluster() && request.iter().any(|policy| policy.shard_count > 1) {
            Box::pin(self.decide_across_shards(request, deadline)).await
        } else {
            Box::pin(self.decide_by_hash_slot(request, deadline))
                .await
                .0
        }
    }

    /// Settles charges, in calls that each take Redis no longer than a decision does and have
    /// `timeout` for their reply. A failed call does not affect further calls.
    ///
    /// # Errors
    /// [`SettlementError`] with the settlements that were not confirmed, and the last failure.
    pub async fn apply_settlements<'a>(
        &self,
        settlements: &[Settlement<'a>],
    ) -> Result<(), SettlementError<'a>> {
        if self.is_breaker_open() {
            return Err(SettlementError {
                cause: self.unavailable_error("breaker_open"),
                unconfirmed: settlements.to_vec(),
            });
        }
        let failures = self.send_settlements(settlements).await;
        failures.last().map_or(Ok(()), |(_, failure)| {
            Err(SettlementError {
                cause: self.unavailable_error(failure.into_str()),
                unconfirmed: failures.iter().map(|(settlement, _)| *settlement).collect(),
            })
        })
    }
}
