//! Counters in Redis, shared by every replica.
//!
//! One script decides all limits of a request in one round trip, on the server's clock (`script`, `decide.lua`).
//! It needs Redis 6.2 (SET with PXAT). Each worker has a connection and a task that keeps it (`link`), opened by
//! `connect` at the address that is given, that the sentinels name (`sentinel`), or that a cluster's map of slots
//! does (`cluster`); the breaker is the process's (`health`).
//! One of the workers counts the instances, and writes back what was admitted while Redis was away (`fleet`).

mod batch;
mod batcher;
mod circuit_breaker;
mod cluster;
mod connection;
mod connector;
mod error;
mod inspector;
mod membership;
mod scripts;
mod sentinel;
mod server_info;

pub use batch::{BatchReply, CallerReply, DecisionBatch};
pub use connector::{RedisAddress, RedisCredentials};
pub use error::RedisErrorKind;
pub use inspector::{CounterInspector, InspectError, RedisCounter};
pub use membership::instance_id;
pub use scripts::ScriptLibrary;

use super::fallback::SINGLE_PARTITION;
use super::{FallbackStore, Settlement, SettlementError, StoreUnavailable};
use crate::clock::Clock;
use crate::limiter::{Algorithm, Amendment, Charge, Decision, Key};
use crate::telemetry::metrics::RedisServerMetrics;
use crate::tls::ClientTls;
use ::redis::Cmd;
use batcher::DecisionBatcher;
use circuit_breaker::RedisCircuitBreaker;
use cluster::ClusterClient;
use connection::{RedisConnectionState, RedisConnectionTarget, RedisContext, SupervisedConnection};
use connector::{AbortOnDropTask, RedisConnectOptions};
use futures_util::future::join_all;
use server_info::ServerInfoCache;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::time::{Instant, timeout};

/// Late amendments sent at a time: a few hundred microseconds of the server's time.
const MAX_SETTLEMENTS_PER_CALL: usize = 64;

/// Whether an amendment takes Redis as long as a dozen others: many charges change with it.
fn is_expensive(settlement: &Settlement<'_>) -> bool {
    settlement.limit.algorithm == Algorithm::SlidingLog
        && matches!(settlement.amendment, Amendment::Credit { .. })
}

/// Such calls under way on one connection, which keeps their order: one after the other, each would cost a round trip,
/// and more becomes known meanwhile than is told. Decisions of the same worker wait behind them, for some milliseconds at
/// most.
const MAX_PIPELINED_CALLS: usize = 16;

/// Amendments as they are sent together, in order.
fn split_into_calls<'l, 'a>(settlements: &'l [Settlement<'a>]) -> Vec<&'l [Settlement<'a>]> {
    let runs = settlements.chunk_by(|one, next| !is_expensive(one) && !is_expensive(next));
    runs.flat_map(|late| late.chunks(MAX_SETTLEMENTS_PER_CALL))
        .collect()
}

/// The places in the list of what was in each call that failed.
fn collect_failed_calls(
    calls: &[&[Settlement<'_>]],
    results: Vec<Result<(), RedisErrorKind>>,
) -> Vec<(Vec<usize>, RedisErrorKind)> {
    let (mut failed, mut next_position) = (Vec::new(), 0);
    for (late, told) in calls.iter().zip(results) {
        let positions = next_position..next_position + late.len();
        next_position = positions.end;
        failed.extend(told.err().map(|failure| (positions.collect(), failure)));
    }
    failed
}

/// Which Redis, and how long to wait for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RedisSettings {
    pub topology: RedisTopology,
    /// The server; the sentinels; some nodes of the cluster.
    pub servers: Vec<RedisAddress>,
    pub database: i64,
    /// For the servers that hold counters.
    pub credentials: RedisCredentials,
    /// `None`: in the clear.
    pub tls: Option<ClientTls>,
    /// Separates the counters of services that share a Redis.
    pub key_prefix: String,
    /// How many instances share the limits, at least 1, until they have been counted.
    pub initial_instances: u32,
    /// One decision, all in.
    pub timeout: Duration,
    pub connect_timeout: Duration,
    /// Consecutive failures after which Redis is not asked any more.
    pub breaker_failures: u32,
    /// How often a probe in the background then tries again.
    pub probe_interval: Duration,
}

/// What stands at the addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RedisTopology {
    /// One server, or whatever stands behind one address.
    Standalone,
    /// Sentinels that know the master of this name.
    Sentinel {
        master: String,
        credentials: RedisCredentials,
    },
    Cluster,
}

/// What the workers of one process share: settings, breaker, counters.
#[derive(Clone, Debug)]
pub struct SharedRedisState(Arc<RedisContext>);

/// One worker's handle: cheap to clone, to be used on the runtime that started it.
#[derive(Clone, Debug)]
pub struct RedisStore {
    context: Arc<RedisContext>,
    backend: RedisBackend,
    /// Of the one that speaks for the process: what keeps it in the count, and what looks after Redis.
    membership_tasks: Option<Arc<[AbortOnDropTask; 2]>>,
}

/// How a worker reaches the server that holds a key.
#[derive(Clone, Debug)]
enum RedisBackend {
    /// All questions are in the queue for the link.
    SingleServer(Arc<SupervisedConnection>, Arc<DecisionBatcher>),
    Cluster(Arc<ClusterClient>),
}

impl RedisSettings {
    fn connect_options(&self) -> RedisConnectOptions<'_> {
        let Self {
            credentials: login,
            database,
            tls,
            connect_timeout,
            ..
        } = self;
        RedisConnectOptions {
            credentials: login,
            database: *database,
            tls: tls.as_ref(),
            connect_timeout: *connect_timeout,
        }
    }
}

/// A secret that never shows itself in logs.
#[derive(Clone, PartialEq, Eq)]
pub struct RedisPassword(String);

impl SharedRedisState {
    pub fn new(settings: RedisSettings) -> Self {
        Self(Arc::new(RedisContext {
            scripts: ScriptLibrary::new(&settings.key_prefix),
            breaker: RedisCircuitBreaker::new(settings.breaker_failures),
            call_count: Arc::default(),
            server_info: ServerInfoCache::default(),
            fallback: FallbackStore::new(settings.initial_instances, Clock::system())
                .with_partitions(match settings.topology {
                    RedisTopology::Cluster => cluster::slot_for_key,
                    _ => |_| SINGLE_PARTITION,
                }),
            has_joined_membership: AtomicBool::new(false),
            settings,
        }))
    }

    pub fn settings(&self) -> &RedisSettings {
        &self.0.settings
    }

    /// The names of the counters in which a charge is counted: several if it is spread.
    pub fn counter_names(&self, charge: &Charge<'_>) -> Vec<String> {
        let counter_name = |key: &Key| self.0.scripts.counter_key(&Charge { key, ..*charge });
        match self.0.settings.topology {
            RedisTopology::Cluster if charge.shard_count > 1 => (0..charge.shard_count)
                .map(|number| counter_name(&charge.key.shard_key(number)))
                .collect(),
            _ => vec![counter_name(charge.key)],
        }
    }

    /// Whether Redis was reached, no worker has lost its connection and the breaker is closed.
    pub fn is_up(&self) -> bool {
        self.0.breaker.is_up()
    }

    /// Whether failures have stopped requests from asking Redis.
    pub fn is_breaker_open(&self) -> bool {
        self.0.breaker.is_open()
    }

    /// Instances that share the limits, as last seen.
    pub fn instance_count(&self) -> u32 {
        self.0.fallback.share().instances()
    }

    /// What Redis was last seen to say of itself.
    pub fn server_info(&self) -> RedisServerMetrics {
        RedisServerMetrics {
            calls: self.0.call_count.load(Ordering::Relaxed),
            ..self.0.server_info.latest()
        }
    }

    /// Failures since the start, each kind by its stable word.
    pub fn error_counts(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.0.breaker.failure_counts()
    }
}

impl RedisStore {
    /// Starts connecting, and stays connected until the last clone is dropped. Call it on the worker's runtime.
    pub fn start(shared: &SharedRedisState) -> Self {
        let context = Arc::clone(&shared.0);
        let backend = match context.settings.topology {
            RedisTopology::Cluster => {
                RedisBackend::Cluster(Arc::new(ClusterClient::start(Arc::clone(&context))))
            }
            _ => {
                let target = RedisConnectionTarget::from_settings(&context.settings);
                let connection =
                    Arc::new(SupervisedConnection::start(Arc::clone(&context), target));
                let queue = DecisionBatcher::new(Arc::clone(&context), Arc::clone(&connection));
                RedisBackend::SingleServer(connection, Arc::new(queue))
            }
        };
        Self {
            backend,
            context,
            membership_tasks: None,
        }
    }

    /// Makes the process known to the others that share its limits, and keeps it in their count until
    /// [`RedisStore::leave`]: the first handle does that for all.
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

    /// Takes the process out of the count, if this is the handle that keeps it there.
    pub async fn leave_membership(&self) {
        if let Some(membership_tasks) = &self.membership_tasks {
            membership_tasks.iter().for_each(|task| task.0.abort());
            membership::remove_member(self).await;
        }
    }

    /// What goes on while Redis is away.
    pub fn fallback(&self) -> &FallbackStore {
        &self.context.fallback
    }

    /// Whether a question would be sent at all.
    pub fn is_reachable(&self) -> bool {
        !self.is_breaker_open()
            && match &self.backend {
                RedisBackend::SingleServer(connection, _) => {
                    matches!(&*connection.state(), RedisConnectionState::Up(_))
                }
                RedisBackend::Cluster(cluster) => cluster.is_any_master_reachable(),
            }
    }

    /// Whether a question about these charges would be sent to all that keep them.
    pub fn is_reachable_for(&self, charges: &[Charge<'_>]) -> bool {
        match &self.backend {
            RedisBackend::SingleServer(..) => self.is_reachable(),
            RedisBackend::Cluster(cluster) => cluster.is_reachable_for(charges),
        }
    }

    /// The parts, as [`Local`] counts them, that would not be asked.
    fn unreachable_partitions(&self) -> Vec<u16> {
        match &self.backend {
            RedisBackend::SingleServer(..) if self.is_reachable() => Vec::new(),
            RedisBackend::SingleServer(..) => vec![SINGLE_PARTITION],
            RedisBackend::Cluster(cluster) => cluster.unreachable_slots(),
        }
    }

    /// The parts that would be asked and don't answer.
    async fn find_unresponsive_partitions(&self) -> Vec<u16> {
        match &self.backend {
            // Whoever counts the instances finds that out.
            RedisBackend::SingleServer(..) => Vec::new(),
            RedisBackend::Cluster(cluster) => cluster.find_unresponsive_slots().await,
        }
    }

    /// The connections to all masters, or why one has none.
    fn master_states(&self) -> Vec<Arc<RedisConnectionState>> {
        match &self.backend {
            RedisBackend::SingleServer(connection, _) => vec![connection.state()],
            RedisBackend::Cluster(cluster) => cluster
                .master_connections()
                .iter()
                .map(|master| master.state())
                .collect(),
        }
    }

    fn is_cluster(&self) -> bool {
        matches!(self.backend, RedisBackend::Cluster(_))
    }

    /// Ends when this worker's first connection is ready, or `connect_timeout` has passed.
    pub async fn wait_until_ready(&self) {
        let ready = async {
            match &self.backend {
                RedisBackend::SingleServer(connection, _) => connection.wait_until_ready().await,
                RedisBackend::Cluster(cluster) => cluster.wait_until_ready().await,
            }
        };
        drop(timeout(self.context.settings.connect_timeout, ready).await);
    }

    /// Whether failures have stopped requests from asking Redis.
    pub fn is_breaker_open(&self) -> bool {
        self.context.breaker.is_open()
    }

    /// The longest that a decision takes.
    pub fn timeout(&self) -> Duration {
        self.context.settings.timeout
    }

    /// Asks Redis to decide, with an answer within `timeout` from `asked`. The charges name different counters.
    ///
    /// # Errors
    /// [`StoreUnavailable`] with the failure's word. After a timeout or a lost connection the charges may have been
    /// made: too strict, never too lax.
    pub async fn decide(
        &self,
        charges: &[Charge<'_>],
        requested_at: Instant,
    ) -> Result<Decision, StoreUnavailable> {
        let deadline = requested_at + self.context.settings.timeout;
        let queue = match &self.backend {
            RedisBackend::SingleServer(_, queue) => queue,
            RedisBackend::Cluster(cluster) => {
                // Boxed, or every request would have room for it, whatever it asks.
                let answer = Box::pin(cluster.decide(charges, deadline)).await;
                return answer.map_err(|failure| self.unavailable_error(failure.as_str()));
            }
        };
        let breaker = &self.context.breaker;
        let failure = match queue.request_decision(charges, deadline).await {
            Ok(decision) => {
                breaker.record_success();
                return Ok(decision);
            }
            Err(failure) => failure,
        };
        match failure {
            RedisErrorKind::WrongType(position) => {
                breaker.record_foreign_value(|| {
                    self.context.scripts.counter_name_at(charges, position)
                });
            }
            failure => breaker.record_failure(failure),
        }
        Err(self.unavailable_error(failure.as_str()))
    }

    /// Puts charges right, in calls that each take Redis no longer than decisions do, and have `timeout` for their
    /// answer. One that fails doesn't keep the others from being made.
    ///
    /// # Errors
    /// What was not put right, and why the last of it.
    pub async fn amend(&self, settlements: &[Settlement<'_>]) -> Result<(), SettlementError> {
        let failed = match &self.backend {
            RedisBackend::SingleServer(connection, _) => {
                self.amend_single_server(connection, settlements).await
            }
            RedisBackend::Cluster(cluster) => cluster.amend(settlements).await,
        };
        let Some((_, failure)) = failed.last() else {
            return Ok(());
        };
        let mut positions: Vec<usize> = failed
            .iter()
            .flat_map(|(places, _)| places.iter().copied())
            .collect();
        positions.sort_unstable();
        Err(SettlementError {
            cause: self.unavailable_error(failure.as_str()),
            unsent_indices: positions,
        })
    }

    /// The same on one server: the places that each failed call had in the list.
    async fn amend_single_server(
        &self,
        connection: &SupervisedConnection,
        settlements: &[Settlement<'_>],
    ) -> Vec<(Vec<usize>, RedisErrorKind)> {
        let (calls, mut results) = (split_into_calls(settlements), Vec::new());
        for calls in calls.chunks(MAX_PIPELINED_CALLS) {
            let commands: Vec<Cmd> = calls
                .iter()
                .map(|late| self.context.scripts.amend_command(late, None))
                .collect();
            results.extend(self.send_amendments(connection, &commands).await);
        }
        collect_failed_calls(&calls, results)
    }

    /// Runs some programs that put charges right, in order. A slow server answers one after the other: each has the time
    /// of those in front of it, too.
    async fn send_amendments(
        &self,
        connection: &SupervisedConnection,
        commands: &[Cmd],
    ) -> Vec<Result<(), RedisErrorKind>> {
        let state = connection.state();
        let live = match &*state {
            RedisConnectionState::Up(live) => live,
            RedisConnectionState::Down(failure) => return vec![Err(*failure); commands.len()],
        };
        let call_timeout = self.context.settings.timeout;
        let answers = (1..)
            .zip(commands)
            .map(|(turn, command)| timeout(call_timeout * turn, live.run_command(command)));
        let replies = join_all(answers).await;
        let results: Vec<_> = replies
            .into_iter()
            .map(|reply| reply.unwrap_or_else(|late| Err(late.into())).map(drop))
            .collect();
        // A server that hangs once has failed once.
        if let Some(failure) = results.iter().find_map(|told| told.err()) {
            self.context.breaker.record_failure(failure);
            live.record_failure(failure);
        }
        results
    }

    /// Whether the charges are asked of several servers, each of which knows its part only.
    pub fn is_split(&self, charges: &[Charge<'_>]) -> bool {
        matches!(self.backend, RedisBackend::Cluster(_)) && cluster::is_split(charges)
    }

    /// The store's answer when Redis gives none: it is asked again after the next probe at the earliest.
    pub fn unavailable_error(&self, kind: &'static str) -> StoreUnavailable {
        let probe_us = self.context.settings.probe_interval.as_micros();
        StoreUnavailable {
            kind,
            retry_after_us: u64::try_from(probe_us).unwrap_or(u64::MAX),
        }
    }
}

/// Where, for people: the addresses, and what stands there if it isn't one server.
impl fmt::Display for RedisSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.topology {
            RedisTopology::Standalone => {}
            RedisTopology::Sentinel { master, .. } => write!(f, "{master} by sentinels ")?,
            RedisTopology::Cluster => f.write_str("cluster ")?,
        }
        let addresses: Vec<String> = self.servers.iter().map(ToString::to_string).collect();
        f.write_str(&addresses.join(", "))
    }
}

impl RedisPassword {
    pub fn new(text: String) -> Self {
        Self(text)
    }

    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for RedisPassword {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}
