//! Counters in Redis, shared by all replicas.
//!
//! One script decides all limits of a request in one round trip, on the server's clock (`scripts`,
//! `decide.lua`). The script needs Redis 6.2 (SET with PXAT). Each worker has a connection and a
//! task that supervises it (`connection`). The server is configured directly, named by the
//! sentinels (`sentinel`), or found in a cluster's slot map (`cluster`). The circuit breaker
//! belongs to the process (`circuit_breaker`). One worker counts the instances, and writes back
//! usage that was admitted while Redis was unreachable (`membership`).
//!
//! Four states describe availability:
//!
//! | state | scope | true |
//! |---|---|---|
//! | [`SharedRedisState::is_up`] | process | once connected, no connection lost, breaker closed |
//! | [`RedisStore::is_breaker_open`] | process | after consecutive failures, until a probe works |
//! | [`RedisStore::is_reachable`] | worker | while the breaker is closed and its connection works |
//! | [`FallbackStore::is_in_outage`] | process | from the first failure until all is written back |
//!
//! In a cluster the breaker never opens: failures of its nodes are only counted.

mod batcher;
mod circuit_breaker;
mod cluster;
mod connection;
mod connection_target;
mod connector;
mod context;
mod error;
mod inspector;
mod membership;
mod script_batch;
mod scripts;
mod sentinel;
mod server_info;
mod settings;
mod settlement_calls;
mod stored_usage;
mod watched_value;

pub use error::RedisErrorKind;
pub use inspector::{CounterInspector, InspectError, RedisCounter};
pub use membership::instance_id;
pub use script_batch::{CallerReply, DecisionBatch};
pub use scripts::ScriptLibrary;
pub use settings::{
    RedisAddress, RedisCredentials, RedisDialer, RedisPassword, RedisSettings, RedisStream,
    RedisStreamFuture, RedisTopology, RedisTransport,
};

use super::fallback::SINGLE_PARTITION;
use super::fallback::usage_directory::UsageDirectory;
use super::{DecisionFailure, FallbackStore, Settlement, SettlementError, StoreUnavailable};
use crate::clock::Clock;
use crate::limiter::{Charge, Decision, Key};
use crate::telemetry::metrics::RedisServerMetrics;
use batcher::DecisionBatcher;
use circuit_breaker::RedisCircuitBreaker;
use cluster::ClusterClient;
use connection::{LiveConnection, SupervisedConnection};
use connection_target::RedisConnectionTarget;
use connector::AbortOnDropTask;
use context::RedisContext;
use futures_util::future::join_all;
use parking_lot::Mutex;
use settlement_calls::{MAX_PIPELINED_CALLS, results_by_settlement, split_into_calls};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::time::{Instant, timeout};

/// State that the workers of one process share: settings, circuit breaker, counters.
#[derive(Clone, Debug)]
pub struct SharedRedisState(Arc<RedisContext>);

/// One worker's handle of the Redis store. Cheap to clone. Use it on the runtime that started it.
#[derive(Clone, Debug)]
pub struct RedisStore {
    context: Arc<RedisContext>,
    backend: RedisBackend,
    /// The tasks that maintain the membership and poll the server info, in the worker that runs
    /// them for the process.
    membership_tasks: Option<Arc<[AbortOnDropTask; 2]>>,
}

/// How a worker reaches the server that holds a key.
#[derive(Clone, Debug)]
enum RedisBackend {
    /// One connection, with the queue that all requests pass.
    SingleServer(Arc<DecisionBatcher>),
    Cluster(Arc<ClusterClient>),
}

impl SharedRedisState {
    pub fn new(settings: RedisSettings) -> Self {
        Self::for_instance(settings, Clock::system(), instance_id())
    }

    /// [`Self::new`] with a chosen clock and a chosen id of the process: for simulations.
    pub fn for_instance(settings: RedisSettings, clock: Clock, instance_id: &str) -> Self {
        Self(Arc::new(RedisContext {
            scripts: ScriptLibrary::new(&settings.key_prefix),
            breaker: RedisCircuitBreaker::new(settings.breaker_failures),
            call_count: AtomicU64::new(0),
            server_info: Mutex::default(),
            fallback: new_fallback(&settings, clock.clone()),
            usage_directory: settings.state_dir.as_ref().map(|path| {
                let is_cluster = settings.topology == RedisTopology::Cluster;
                let service = format!("{} {is_cluster}", settings.key_prefix);
                UsageDirectory::new(path, &service, instance_id, clock.clone())
            }),
            has_joined_membership: AtomicBool::new(false),
            clock,
            instance_id: instance_id.into(),
            worker_count: AtomicU64::new(0),
            settings,
        }))
    }

    pub fn settings(&self) -> &RedisSettings {
        &self.0.settings
    }

    /// The keys of the counters of a charge: several keys if the charge is spread over shards.
    pub fn counter_keys(&self, charge: &Charge<'_>) -> Vec<String> {
        let counter_name = |key: &Key| self.0.scripts.counter_key(&Charge { key, ..*charge });
        match self.0.settings.topology {
            RedisTopology::Cluster if charge.shard_count > 1 => (0..charge.shard_count)
                .map(|number| counter_name(&charge.key.shard_key(number)))
                .collect(),
            _ => vec![counter_name(charge.key)],
        }
    }

    /// Whether Redis was reached, no worker has lost its connection, and the circuit breaker is
    /// closed.
    pub fn is_up(&self) -> bool {
        self.0.breaker.is_up()
    }

    /// Whether the circuit breaker is open: requests are not sent to Redis.
    pub fn is_breaker_open(&self) -> bool {
        self.0.breaker.is_open()
    }

    /// Instances that share the limits, as last counted.
    pub fn instance_count(&self) -> u32 {
        self.0.fallback.share().instance_count()
    }

    /// The last polled server info.
    pub fn server_info(&self) -> RedisServerMetrics {
        RedisServerMetrics {
            calls: self.0.call_count.load(Ordering::Relaxed),
            ..*self.0.server_info.lock()
        }
    }

    /// Failures since the start, by the stable name of their kind.
    pub fn error_counts(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.0.breaker.failure_counts()
    }
}

/// An empty fallback store with the partitions of the topology.
fn new_fallback(settings: &RedisSettings, clock: Clock) -> FallbackStore {
    let fallback = FallbackStore::new(settings.initial_instances, clock);
    fallback.with_partitions(match settings.topology {
        RedisTopology::Cluster => cluster::hash_slot_for_key,
        _ => |_| SINGLE_PARTITION,
    })
}

impl RedisStore {
    /// Starts connecting, and stays connected until the last clone is dropped. Call it on the
    /// worker's runtime.
    pub fn start(shared: &SharedRedisState) -> Self {
        let context = Arc::clone(&shared.0);
        let backend = match context.settings.topology {
            RedisTopology::Cluster => {
                RedisBackend::Cluster(Arc::new(ClusterClient::start(Arc::clone(&context))))
            }
            _ => {
                let target = RedisConnectionTarget::from_settings(&context.settings);
                let connection = SupervisedConnection::start(Arc::clone(&context), target);
                let queue = DecisionBatcher::new(Arc::clone(&context), connection);
                RedisBackend::SingleServer(Arc::new(queue))
            }
        };
        Self {
            backend,
            context,
            membership_tasks: None,
        }
    }

    /// Registers the process with the instances that share its limits, until
    /// [`RedisStore::leave_membership`]. Only the first handle of the process does this.
    #[must_use]
    pub fn join_membership(self) -> Self {
        let is_first = !self
            .context
            .has_joined_membership
            .swap(true, Ordering::Relaxed);
        let membership_tasks = is_first.then(|| {
            let tasks = [
                tokio::spawn(membership::run_membership(self.clone())),
                tokio::spawn(server_info::run_server_info_poller(self.clone())),
            ];
            Arc::new(tasks.map(AbortOnDropTask))
        });
        Self {
            membership_tasks,
            ..self
        }
    }

    /// Writes back usage and removes the process from the instance count, if this handle maintains
    /// the membership.
    pub async fn leave_membership(&self) {
        if let Some(membership_tasks) = &self.membership_tasks {
            membership_tasks.iter().for_each(|task| task.0.abort());
            membership::write_back_and_remove_member(self).await;
        }
    }

    /// Draws an id for a worker, unique among the workers of all processes.
    pub fn draw_worker_id(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.context.instance_id.hash(&mut hasher);
        let nth = self.context.worker_count.fetch_add(1, Ordering::Relaxed);
        nth.hash(&mut hasher);
        hasher.finish()
    }

    /// The store that decides while Redis is unreachable.
    pub fn fallback(&self) -> &FallbackStore {
        &self.context.fallback
    }

    /// Whether requests are sent to Redis at all: the breaker is closed and a master is connected.
    pub fn is_reachable(&self) -> bool {
        !self.is_breaker_open() && self.master_connections().iter().any(Result::is_ok)
    }

    /// Whether a request with these charges would be sent to all servers that hold their counters.
    pub fn is_reachable_for(&self, charges: &[Charge<'_>]) -> bool {
        match &self.backend {
            RedisBackend::SingleServer(..) => self.is_reachable(),
            RedisBackend::Cluster(cluster) => cluster.is_reachable_for(charges),
        }
    }

    /// The partitions, as [`FallbackStore`] counts them, that requests are not sent to.
    fn unreachable_partitions(&self) -> Vec<u16> {
        match &self.backend {
            RedisBackend::SingleServer(..) if self.is_reachable() => Vec::new(),
            RedisBackend::SingleServer(..) => vec![SINGLE_PARTITION],
            RedisBackend::Cluster(cluster) => cluster.unreachable_hash_slots(),
        }
    }

    /// The partitions that requests are sent to and that don't answer.
    async fn find_unresponsive_partitions(&self) -> Vec<u16> {
        match &self.backend {
            // The membership task detects a single server that does not answer.
            RedisBackend::SingleServer(..) => Vec::new(),
            RedisBackend::Cluster(cluster) => cluster.find_unresponsive_hash_slots().await,
        }
    }

    /// The connections to all masters, or why one is missing.
    fn master_connections(&self) -> Vec<Result<Arc<LiveConnection>, RedisErrorKind>> {
        match &self.backend {
            RedisBackend::SingleServer(queue) => vec![queue.connection.live()],
            RedisBackend::Cluster(cluster) => cluster.master_connections(),
        }
    }

    /// The partition that holds the sets of the membership.
    fn membership_partition(&self) -> u16 {
        let [instances, _] = self.context.scripts.membership_keys();
        match self.backend {
            RedisBackend::SingleServer(..) => SINGLE_PARTITION,
            RedisBackend::Cluster(_) => cluster::hash_slot_for_name(&instances),
        }
    }

    pub fn is_cluster(&self) -> bool {
        matches!(self.backend, RedisBackend::Cluster(_))
    }

    /// Returns when this worker's first connection is ready, or `connect_timeout` has passed.
    pub async fn wait_until_ready(&self) {
        let ready = async {
            match &self.backend {
                RedisBackend::SingleServer(queue) => queue.connection.wait_until_ready().await,
                RedisBackend::Cluster(cluster) => cluster.wait_until_ready().await,
            }
        };
        drop(timeout(self.context.settings.connect_timeout, ready).await);
    }

    /// Whether the circuit breaker is open: requests are not sent to Redis.
    pub fn is_breaker_open(&self) -> bool {
        self.context.breaker.is_open()
    }

    /// Maximum duration of a decision.
    pub fn decision_timeout(&self) -> Duration {
        self.context.settings.timeout
    }

    /// Decides charges in Redis, within `timeout` from `requested_at`. No two charges may name the
    /// same counter.
    ///
    /// # Errors
    /// [`DecisionFailure`] with the kind of the failure. Redis may hold a charge for a request that
    /// was rejected or charged again; it never misses one that it admitted.
    pub async fn decide(
        &self,
        charges: &[Charge<'_>],
        requested_at: Instant,
    ) -> Result<Decision, DecisionFailure> {
        let deadline = requested_at + self.context.settings.timeout;
        let queue = match &self.backend {
            RedisBackend::SingleServer(queue) => queue,
            RedisBackend::Cluster(cluster) => {
                // Boxed, because every request's future would include its size otherwise.
                let answer = Box::pin(cluster.decide(charges, deadline)).await;
                return answer.map_err(|(failure, partial)| DecisionFailure {
                    unavailable: self.unavailable_error(failure.as_str()),
                    partial,
                });
            }
        };
        let result = queue.request_decision(charges, deadline).await;
        match result {
            Ok(_) => self.context.breaker.record_success(),
            Err(RedisErrorKind::WrongType(position)) => {
                self.context.record_foreign_value(charges, position);
            }
            Err(failure) => self.context.breaker.record_failure(failure),
        }
        result.map_err(|failure| self.unavailable_error(failure.as_str()).into())
    }

    /// Settles charges, in calls that each take Redis no longer than a decision does and have
    /// `timeout` for their reply. A failed call does not affect further calls.
    ///
    /// # Errors
    /// [`SettlementError`] with the settlements that were not confirmed, and the last failure.
    pub async fn apply_settlements(
        &self,
        settlements: &[Settlement<'_>],
    ) -> Result<(), SettlementError> {
        let results = match &self.backend {
            RedisBackend::SingleServer(queue) => {
                let mut results = Vec::with_capacity(settlements.len());
                for calls in split_into_calls(settlements).chunks(MAX_PIPELINED_CALLS) {
                    let call_results = self.send_settlements(queue, calls).await;
                    results.extend(results_by_settlement(calls, call_results));
                }
                results
            }
            RedisBackend::Cluster(cluster) => cluster.router.apply_settlements(settlements).await,
        };
        let failures = || {
            let numbered = results.iter().enumerate();
            numbered.filter_map(|(index, result)| Some((index, result.err()?)))
        };
        match failures().next_back() {
            None => Ok(()),
            Some((_, failure)) => Err(SettlementError {
                cause: self.unavailable_error(failure.as_str()),
                unconfirmed_indices: failures().map(|(index, _)| index).collect(),
            }),
        }
    }

    /// Runs settlement calls in order. A slow server answers one after the other, so each call also
    /// has the time of the calls before it.
    async fn send_settlements(
        &self,
        queue: &DecisionBatcher,
        calls: &[&[Settlement<'_>]],
    ) -> Vec<Result<(), RedisErrorKind>> {
        let live = match queue.connection.live() {
            Ok(live) => live,
            Err(failure) => return vec![Err(failure); calls.len()],
        };
        let RedisContext {
            settings,
            scripts,
            breaker,
            ..
        } = &*self.context;
        let answers = (1..).zip(calls).map(|(turn, call)| {
            let (command, live) = (scripts.settle_command(call, None), &live);
            let call_timeout = settings.timeout * turn;
            async move { timeout(call_timeout, live.run_command(&command)).await? }
        });
        let results: Vec<_> = join_all(answers).await;
        // Calls that fail together, because the server hangs, count as one failure.
        if let Some(failure) = results.iter().find_map(|result| result.as_ref().err()) {
            breaker.record_failure(*failure);
            live.record_failure(*failure);
        }
        results.into_iter().map(|result| result.map(drop)).collect()
    }

    /// The error when Redis gave no reply. The next attempt is useful after the next probe at the
    /// earliest.
    pub fn unavailable_error(&self, kind: &'static str) -> StoreUnavailable {
        let probe_us = self.context.settings.probe_interval.as_micros();
        StoreUnavailable {
            kind,
            retry_after_us: u64::try_from(probe_us).unwrap_or(u64::MAX),
        }
    }
}
