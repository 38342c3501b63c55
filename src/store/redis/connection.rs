//! One worker's connection to Redis, and the task that supervises it.
//!
//! A request never waits for a connection: it finds one that was probed, or the reason why there is
//! none. redis-rs' own `ConnectionManager` is not used: it makes callers wait through its retries,
//! and it keeps connections to a hung server or a demoted master.

use super::connection_target::RedisConnectionTarget;
use super::connector::{self, AbortOnDropTask};
use super::context::RedisContext;
use super::error::{RedisConnectionError, RedisErrorKind};
use super::scripts::ScriptLibrary;
use super::sentinel::SentinelGroup;
use super::settings::{RedisAddress, RedisTopology};
use super::watched_value::WatchedValue;
use crate::limiter::{Algorithm, Charge, Limit, MAX_UNITS};
use crate::store::fallback::SINGLE_PARTITION;
use arc_swap::ArcSwap;
use redis::aio::MultiplexedConnection;
use redis::{Cmd, ErrorKind, RedisResult, ServerErrorKind, Value};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;
use tokio::sync::{OnceCell, mpsc};
use tokio::time::{Instant, sleep, timeout};

/// Bounds of the pause between connection attempts. The pause doubles up to the maximum, with
/// jitter down to half of it. The first pause after a stable connection has jitter down to 0.
const MIN_INITIAL_BACKOFF: Duration = Duration::from_millis(25);
const MAX_BACKOFF: Duration = Duration::from_millis(500);

/// The first pause grows with the instance count. If a server closes all connections at once, about
/// one instance per millisecond reconnects.
const INITIAL_BACKOFF_PER_INSTANCE: Duration = Duration::from_millis(1);

/// A connection that lasted less than this does not reset the backoff.
const STABLE_CONNECTION_AGE: Duration = Duration::from_secs(1);

/// Consecutive timeouts after which a connection is replaced: the server may hang, or the address
/// may lead to another server. Each caller of a call that times out counts.
const MAX_CONSECUTIVE_TIMEOUTS: u32 = 3;

/// A connection that is reopened when it is lost.
#[derive(Debug)]
pub(super) struct SupervisedConnection {
    supervision: Arc<ConnectionSupervision>,
    supervisor: AbortOnDropTask,
}

/// What a connection shares with its supervisor.
#[derive(Debug)]
struct ConnectionSupervision {
    context: Arc<RedisContext>,
    target: RedisConnectionTarget,
    /// The probed connection, or why there is none.
    state: ArcSwap<Result<Arc<LiveConnection>, RedisErrorKind>>,
    /// Whether there ever was a probed connection.
    ready: WatchedValue<bool>,
    /// Whether the circuit breaker counts this connection as lost.
    is_lost: AtomicBool,
}

/// A connection to a server that ran a script and accepted its writes.
#[derive(Debug)]
pub(super) struct LiveConnection {
    context: Arc<RedisContext>,
    connection: MultiplexedConnection,
    /// Timeouts since the last reply.
    consecutive_timeouts: AtomicU32,
    /// Takes the reason of the first request to replace the connection.
    replacement_sender: mpsc::Sender<RedisErrorKind>,
    /// The next load of the scripts, which all callers that find a script missing wait for.
    script_load: ArcSwap<OnceCell<()>>,
}

/// What the supervisor needs of a connection that it has opened.
pub(super) struct OpenedConnection {
    pub(super) live: LiveConnection,
    pub(super) driver: AbortOnDropTask,
    address: RedisAddress,
    replacement_receiver: mpsc::Receiver<RedisErrorKind>,
}

impl SupervisedConnection {
    /// Connects, and reconnects as long as the value lives.
    pub(super) fn start(context: Arc<RedisContext>, target: RedisConnectionTarget) -> Self {
        let supervision = Arc::new(ConnectionSupervision {
            context,
            target,
            state: ArcSwap::from_pointee(Err(RedisErrorKind::Connection)),
            ready: WatchedValue::default(),
            is_lost: AtomicBool::new(false),
        });
        let supervisor = tokio::spawn(Arc::clone(&supervision).supervise());
        Self {
            supervision,
            supervisor: AbortOnDropTask(supervisor),
        }
    }

    /// Whether there ever was a probed connection.
    pub(super) fn was_ready(&self) -> bool {
        self.supervision.ready.get()
    }

    /// Stops the supervisor. If the connection was lost, the circuit breaker stops counting it as
    /// lost.
    pub(super) fn stop(&self) {
        self.supervisor.0.abort();
        self.supervision.record_restored();
    }

    /// The connection that calls are sent on.
    ///
    /// # Errors
    /// Why there is no connection.
    pub(super) fn live(&self) -> Result<Arc<LiveConnection>, RedisErrorKind> {
        Result::clone(&self.supervision.state.load())
    }

    /// Waits for the first probed connection.
    pub(super) async fn wait_until_ready(&self) {
        self.supervision.ready.wait_for(|ready| *ready).await;
    }
}

impl LiveConnection {
    /// Runs a command, as [`Self::send_command`] does. The caller sets the deadline.
    pub(super) async fn run_command(&self, command: &Cmd) -> Result<Value, RedisErrorKind> {
        self.send_command(command, false)
            .await
            .map_err(|error| RedisErrorKind::from(&error))
    }

    /// Runs a command, and returns the full error. If Redis has not cached its script, the scripts
    /// are loaded first, once for all callers. `is_asking`: the command goes to a node that is
    /// importing the key's slot.
    pub(super) async fn send_command(&self, command: &Cmd, is_asking: bool) -> RedisResult<Value> {
        loop {
            let script_load = self.script_load.load_full();
            self.context.call_count.fetch_add(1, Ordering::Relaxed);
            let mut connection = self.connection.clone();
            let answer = match is_asking {
                false => connection.send_packed_command(command).await,
                true => {
                    let mut pipeline = redis::pipe();
                    pipeline.cmd("ASKING").add_command(command.clone());
                    let replies = connection.send_packed_commands(&pipeline, 1, 1).await;
                    replies.map(|mut replies| replies.pop().unwrap_or(Value::Nil))
                }
            };
            match answer.and_then(check_reply) {
                Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) => {
                    script_load.get_or_try_init(|| self.load_scripts()).await?;
                }
                answer => {
                    if self.consecutive_timeouts.load(Ordering::Relaxed) != 0 {
                        self.consecutive_timeouts.store(0, Ordering::Relaxed);
                    }
                    return answer;
                }
            }
        }
    }

    /// Loads all scripts that were used. Later callers that find a script missing load them again.
    async fn load_scripts(&self) -> RedisResult<()> {
        let pipeline = self.context.scripts.load_commands_for_used_programs();
        let mut connection = self.connection.clone();
        let replies = connection.send_packed_commands(&pipeline, 0, pipeline.len());
        for reply in replies.await? {
            check_reply(reply)?;
        }
        self.script_load.store(Arc::default());
        Ok(())
    }

    /// Records a failed call. The connection is replaced if that may help.
    pub(super) fn record_failure(&self, kind: RedisErrorKind) {
        let is_hanging = kind == RedisErrorKind::Timeout
            && self.consecutive_timeouts.fetch_add(1, Ordering::Relaxed)
                >= MAX_CONSECUTIVE_TIMEOUTS - 1;
        if is_hanging || kind.requires_reconnect() {
            self.request_replacement(kind);
        }
    }

    /// Asks the supervisor to replace the connection.
    pub(super) fn request_replacement(&self, kind: RedisErrorKind) {
        // A full channel has an earlier request.
        self.replacement_sender.try_send(kind).ok();
    }
}

/// Returns the error that a reply consists of. An error inside an array is an invalid reply.
fn check_reply(reply: Value) -> RedisResult<Value> {
    match reply {
        Value::ServerError(error) => Err(error.into()),
        reply => Ok(reply),
    }
}

impl ConnectionSupervision {
    async fn supervise(self: Arc<Self>) {
        let context = &self.context;
        let mut backoff = MIN_INITIAL_BACKOFF;
        loop {
            let started = Instant::now();
            let connected = connect_and_probe(context, &self.target);
            let connected = timeout(context.settings.connect_timeout, connected).await;
            let error = match connected.unwrap_or_else(|elapsed| Err(elapsed.into())) {
                Ok(opened) => self.serve_until_replaced(opened).await,
                Err(error) => {
                    context.breaker.count_failure(error.kind);
                    // Before the first connection there is no outage, and a connection that is
                    // replaced at once is none either: servers close idle connections. For cluster
                    // nodes the slot map shows which slots are affected.
                    if self.ready.get() && context.settings.topology != RedisTopology::Cluster {
                        context
                            .fallback
                            .mark_partitions_unreachable([SINGLE_PARTITION]);
                    }
                    error
                }
            };
            self.state.store(Arc::new(Err(error.kind)));
            if !self.is_lost.swap(true, Ordering::Relaxed) {
                context.breaker.record_connection_down(&error);
            }
            let min_jitter;
            (backoff, min_jitter) = if started.elapsed() >= STABLE_CONNECTION_AGE {
                let backoff =
                    INITIAL_BACKOFF_PER_INSTANCE * context.fallback.share().instance_count();
                (backoff.clamp(MIN_INITIAL_BACKOFF, MAX_BACKOFF), 0.0)
            } else {
                ((backoff * 2).min(MAX_BACKOFF), 0.5)
            };
            sleep(backoff.mul_f64(min_jitter + (1.0 - min_jitter) * fastrand::f64())).await;
        }
    }

    /// Publishes a connection until it must be replaced, and returns the reason.
    async fn serve_until_replaced(&self, opened: OpenedConnection) -> RedisConnectionError {
        let OpenedConnection {
            live,
            mut driver,
            address,
            mut replacement_receiver,
        } = opened;
        let live = Arc::new(live);
        self.state.store(Arc::new(Ok(Arc::clone(&live))));
        self.record_restored();
        self.context.breaker.record_probe_success();
        self.ready.set(true);
        tokio::select! {
            biased;
            _ = &mut driver.0 => RedisErrorKind::Connection.into(),
            kind = replacement_receiver.recv() => kind.unwrap_or(RedisErrorKind::Connection).into(),
            () = self.probe_while_breaker_is_open(&live) => RedisErrorKind::Connection.into(),
            () = self.wait_until_master_changes(&address) => {
                let message = format!("{address} is no longer the master");
                RedisConnectionError::new(RedisErrorKind::ReadOnly, message)
            }
        }
    }

    async fn probe_while_breaker_is_open(&self, live: &LiveConnection) {
        let context = &self.context;
        loop {
            sleep(context.settings.probe_interval).await;
            if !context.breaker.is_open() {
                continue;
            }
            match probe_writes(live, &self.target).await {
                Ok(()) => context.breaker.record_probe_success(),
                Err(error) => {
                    context.breaker.count_failure(error.kind);
                    live.record_failure(error.kind);
                }
            }
        }
    }

    /// Returns when the sentinels name another master than the server at an address.
    async fn wait_until_master_changes(&self, current_address: &RedisAddress) {
        match SentinelGroup::from_settings(&self.context.settings) {
            Some(sentinels) => sentinels.wait_for_master_change(current_address).await,
            None => std::future::pending().await,
        }
    }

    fn record_restored(&self) {
        if self.is_lost.swap(false, Ordering::Relaxed) {
            self.context.breaker.record_connection_restored();
        }
    }
}

/// Connects to a target and probes it. The caller sets the deadline.
pub(super) async fn connect_and_probe(
    context: &Arc<RedisContext>,
    target: &RedisConnectionTarget,
) -> Result<OpenedConnection, RedisConnectionError> {
    let settings = &context.settings;
    let address = target.resolve_address(settings).await?;
    let (connection, driver) =
        connector::open_connection(&address, settings, &settings.credentials, settings.database)
            .await?;
    let (replacement_sender, replacement_receiver) = mpsc::channel(1);
    let live = LiveConnection {
        context: Arc::clone(context),
        connection,
        consecutive_timeouts: AtomicU32::new(0),
        replacement_sender,
        script_load: ArcSwap::default(),
    };
    // First runs a command without keys. Redis accepts at most ten arguments and 16 KiB from a
    // client without login, and reports more as a protocol error: the missing password would not be
    // reported.
    let empty_command = context.scripts.decide_command(&[], None);
    live.send_command(&empty_command, false).await?;
    probe_writes(&live, target).await?;
    Ok(OpenedConnection {
        live,
        driver,
        address,
        replacement_receiver,
    })
}

/// Decides a charge of the probe counter, which expires after a millisecond, within the deadline of
/// a request. A server that answers has the script, a clock and memory, and accepts writes.
async fn probe_writes(
    live: &LiveConnection,
    target: &RedisConnectionTarget,
) -> Result<(), RedisConnectionError> {
    let RedisContext {
        settings, scripts, ..
    } = &*live.context;
    let limit = Limit {
        requests: MAX_UNITS,
        per_us: 1000,
        algorithm: Algorithm::FixedWindow { offset_us: 0 },
    };
    let charges = [Charge::new(&limit, &target.probe_key, 1)];
    let command = scripts.decide_command(&charges, None);
    let reply = match timeout(settings.timeout, live.send_command(&command, false)).await? {
        // The slot has moved: this node works, and the slot map is being refreshed.
        Err(error)
            if settings.topology == RedisTopology::Cluster && error.redirect_node().is_some() =>
        {
            return Ok(());
        }
        reply => reply?,
    };
    match ScriptLibrary::parse_decision_reply(&reply, &charges) {
        Some(decision) if decision.admitted => Ok(()),
        _ => Err(RedisConnectionError::new(
            RedisErrorKind::InvalidReply,
            "the reply of the probe is invalid",
        )),
    }
}
