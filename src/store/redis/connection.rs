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
use super::settings::{RedisAddress, RedisTopology};
use super::watched_value::WatchedValue;
use crate::limiter::{Algorithm, Charge, Limit, MAX_UNITS};
use crate::store::fallback::SINGLE_PARTITION;
use arc_swap::ArcSwap;
use redis::aio::MultiplexedConnection;
use redis::{Cmd, ErrorKind, RedisError, RedisResult, ServerErrorKind, Value};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::Notify;
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
    state: Arc<ArcSwap<RedisConnectionState>>,
    ready: WatchedValue<bool>,
    context: Arc<RedisContext>,
    /// Whether the circuit breaker counts this connection as lost.
    is_lost: Arc<AtomicBool>,
    supervisor: AbortOnDropTask,
}

#[derive(Debug)]
pub(super) enum RedisConnectionState {
    Down(RedisErrorKind),
    Up(LiveConnection),
}

/// A connection to a server that ran a script and accepted its writes.
#[derive(Debug)]
pub(super) struct LiveConnection {
    connection: MultiplexedConnection,
    call_count: Arc<AtomicU64>,
    /// Timeouts since the last reply.
    consecutive_timeouts: AtomicU32,
    replacement_reason: OnceLock<RedisErrorKind>,
    replacement_requested: Notify,
    /// The number of script loads since the connection was opened. `requested_load` is the number
    /// that callers wait for.
    load_count: WatchedValue<u64>,
    requested_load: WatchedValue<u64>,
}

impl SupervisedConnection {
    /// Connects, and reconnects as long as the value lives.
    pub(super) fn start(context: Arc<RedisContext>, target: RedisConnectionTarget) -> Self {
        let state = Arc::new(ArcSwap::from_pointee(RedisConnectionState::Down(
            RedisErrorKind::Connection,
        )));
        let ready = WatchedValue::new(false);
        let is_lost = Arc::default();
        let supervisor = supervise_connection(
            Arc::clone(&context),
            target,
            Arc::clone(&state),
            Arc::clone(&is_lost),
            ready.clone(),
        );
        Self {
            state,
            ready,
            context,
            is_lost,
            supervisor: AbortOnDropTask(tokio::spawn(supervisor)),
        }
    }

    /// Whether there ever was a probed connection.
    pub(super) fn was_ready(&self) -> bool {
        self.ready.get()
    }

    /// Stops the supervisor. If the connection was lost, the circuit breaker stops counting it as
    /// lost.
    pub(super) fn stop(&self) {
        self.supervisor.0.abort();
        if self.is_lost.swap(false, Ordering::Relaxed) {
            self.context.breaker.record_connection_restored();
        }
    }

    pub(super) fn state(&self) -> Arc<RedisConnectionState> {
        self.state.load_full()
    }

    /// Waits for the first probed connection.
    pub(super) async fn wait_until_ready(&self) {
        self.ready.wait_for(|ready| *ready).await;
    }
}

impl LiveConnection {
    /// Runs a command. If Redis has not cached its script, all scripts are loaded again. The caller
    /// sets the deadline.
    pub(super) async fn run_command(&self, command: &Cmd) -> Result<Value, RedisErrorKind> {
        self.send_with_script_reload(command, false)
            .await
            .map_err(|error| RedisErrorKind::from(&error))
    }

    /// Like [`Self::run_command`], but returns the full error. `is_asking`: the command goes to a
    /// node that is importing the key's slot.
    pub(super) async fn send_with_script_reload(
        &self,
        command: &Cmd,
        is_asking: bool,
    ) -> RedisResult<Value> {
        loop {
            let load_count = self.load_count.get();
            self.call_count.fetch_add(1, Ordering::Relaxed);
            let answer = match is_asking {
                false => self.send_command(command).await,
                true => self.send_with_asking(command).await,
            };
            match answer {
                Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) => {
                    self.request_reload_and_wait(load_count).await;
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

    async fn send_command(&self, command: &Cmd) -> RedisResult<Value> {
        match self.connection.clone().send_packed_command(command).await? {
            Value::ServerError(error) => Err(error.into()),
            value => Ok(value),
        }
    }

    async fn send_with_asking(&self, command: &Cmd) -> RedisResult<Value> {
        let mut pipeline = redis::pipe();
        pipeline.cmd("ASKING").add_command(command.clone());
        let replies = self
            .connection
            .clone()
            .send_packed_commands(&pipeline, 1, 1)
            .await?;
        match replies.into_iter().next() {
            Some(Value::ServerError(error)) => Err(error.into()),
            Some(value) => Ok(value),
            None => Err(RedisError::from((
                ErrorKind::UnexpectedReturnType,
                "no reply",
            ))),
        }
    }

    /// Records a failed call. The connection is replaced if that may help.
    pub(super) fn record_failure(&self, kind: RedisErrorKind) {
        let is_hanging = kind == RedisErrorKind::Timeout
            && self
                .consecutive_timeouts
                .fetch_add(1, Ordering::Relaxed)
                .saturating_add(1)
                >= MAX_CONSECUTIVE_TIMEOUTS;
        if is_hanging || kind.requires_reconnect() {
            self.request_replacement(kind);
        }
    }

    /// Asks the supervisor to replace the connection.
    pub(super) fn request_replacement(&self, kind: RedisErrorKind) {
        self.replacement_reason.get_or_init(|| kind);
        self.replacement_requested.notify_one();
    }

    /// Requests a script load after the `seen_load_count`-th load, and waits for it. The supervisor
    /// loads the scripts once for all callers that found one missing since that load.
    async fn request_reload_and_wait(&self, seen_load_count: u64) {
        if self.requested_load.get() <= seen_load_count {
            self.requested_load.set(seen_load_count + 1);
        }
        self.load_count.wait_for(|now| *now > seen_load_count).await;
    }

    /// Waits until a caller requests a script load. Returns the number of that load.
    async fn wait_for_load_request(&self) -> u64 {
        let load_count = self.load_count.get();
        self.requested_load
            .wait_for(|wanted| *wanted > load_count)
            .await
    }
}

async fn supervise_connection(
    context: Arc<RedisContext>,
    target: RedisConnectionTarget,
    state: Arc<ArcSwap<RedisConnectionState>>,
    is_lost: Arc<AtomicBool>,
    ready: WatchedValue<bool>,
) {
    let breaker = &context.breaker;
    let mut backoff = MIN_INITIAL_BACKOFF;
    loop {
        let started = Instant::now();
        let connected = timeout(
            context.settings.connect_timeout,
            connect_and_probe(&context, &target),
        )
        .await;
        let error = match connected.unwrap_or_else(|elapsed| Err(elapsed.into())) {
            Ok((live, address, mut driver)) => {
                let up_state = Arc::new(RedisConnectionState::Up(live));
                state.store(Arc::clone(&up_state));
                if is_lost.swap(false, Ordering::Relaxed) {
                    breaker.record_connection_restored();
                }
                breaker.record_probe_success();
                ready.set(true);
                tokio::select! {
                    biased;
                    failure = serve_connection_until_replaced(&context, &target, &up_state, &mut driver) => failure.into(),
                    () = target.wait_until_master_changes(&context.settings, &address) => {
                        RedisConnectionError::new(RedisErrorKind::ReadOnly, format!("{address} is no longer the master"))
                    }
                }
            }
            Err(error) => {
                breaker.count_failure(error.kind);
                // Before the first connection there is no outage, and a connection that is replaced
                // at once is none either: servers close idle connections. For cluster nodes the
                // slot map shows which slots are affected.
                if ready.get() && context.settings.topology != RedisTopology::Cluster {
                    context
                        .fallback
                        .mark_partitions_unreachable([SINGLE_PARTITION]);
                }
                error
            }
        };
        state.store(Arc::new(RedisConnectionState::Down(error.kind)));
        if !is_lost.swap(true, Ordering::Relaxed) {
            breaker.record_connection_down(&error);
        }
        let min_jitter;
        (backoff, min_jitter) = if started.elapsed() >= STABLE_CONNECTION_AGE {
            let backoff = INITIAL_BACKOFF_PER_INSTANCE * context.fallback.share().instance_count();
            (backoff.clamp(MIN_INITIAL_BACKOFF, MAX_BACKOFF), 0.0)
        } else {
            ((backoff * 2).min(MAX_BACKOFF), 0.5)
        };
        sleep(backoff.mul_f64(min_jitter + (1.0 - min_jitter) * fastrand::f64())).await;
    }
}

/// Serves a live connection until it must be replaced, and returns the reason.
async fn serve_connection_until_replaced(
    context: &RedisContext,
    target: &RedisConnectionTarget,
    state: &RedisConnectionState,
    driver: &mut AbortOnDropTask,
) -> RedisErrorKind {
    let RedisConnectionState::Up(live) = state else {
        return RedisErrorKind::Connection;
    };
    loop {
        tokio::select! {
            biased;
            _ = &mut driver.0 => return RedisErrorKind::Connection,
            () = live.replacement_requested.notified() => {
                return live.replacement_reason.get().copied().unwrap_or(RedisErrorKind::Connection);
            }
            number = live.wait_for_load_request() => {
                let loaded = timeout(context.settings.timeout, load_scripts(context, live)).await;
                match loaded.map_err(RedisErrorKind::from).and_then(|done| done.map_err(|error| RedisErrorKind::from(&error))) {
                    Ok(()) => live.load_count.set(number),
                    Err(failure) => return failure,
                }
            }
            () = sleep(context.settings.probe_interval) => {
                if !context.breaker.is_open() {
                    continue;
                }
                match probe_writes(context, target, live).await {
                    Ok(()) => context.breaker.record_probe_success(),
                    Err(error) => {
                        context.breaker.count_failure(error.kind);
                        live.record_failure(error.kind);
                    }
                }
            }
        }
    }
}

/// Connects to a target and probes it. The caller sets the deadline.
pub(super) async fn connect_and_probe(
    context: &RedisContext,
    target: &RedisConnectionTarget,
) -> Result<(LiveConnection, RedisAddress, AbortOnDropTask), RedisConnectionError> {
    let address = target.resolve_address(&context.settings).await?;
    let (connection, driver) =
        connector::open_connection(&address, context.settings.connect_options()).await?;
    let live = LiveConnection {
        connection,
        call_count: Arc::clone(&context.call_count),
        consecutive_timeouts: AtomicU32::new(0),
        replacement_reason: OnceLock::new(),
        replacement_requested: Notify::new(),
        load_count: WatchedValue::new(0),
        requested_load: WatchedValue::new(0),
    };
    // First runs a command without keys. Redis accepts at most ten arguments and 16 KiB from a
    // client without login, and reports more as a protocol error: the missing password would not be
    // reported.
    let empty_command = context.scripts.decide_command(&[], None);
    run_command_loading_scripts(context, &live, &empty_command).await?;
    probe_writes(context, target, &live).await?;
    Ok((live, address, driver))
}

/// Runs a command and loads missing scripts itself: for the supervisor, or for a connection without
/// a supervisor.
pub(super) async fn run_command_loading_scripts(
    context: &RedisContext,
    live: &LiveConnection,
    command: &Cmd,
) -> RedisResult<Value> {
    match live.send_command(command).await {
        Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) => {
            load_scripts(context, live).await?;
            live.send_command(command).await
        }
        answer => answer,
    }
}

async fn load_scripts(context: &RedisContext, live: &LiveConnection) -> RedisResult<()> {
    let pipeline = context.scripts.load_commands_for_used_programs();
    for reply in live
        .connection
        .clone()
        .send_packed_commands(&pipeline, 0, pipeline.len())
        .await?
    {
        if let Value::ServerError(error) = reply {
            return Err(error.into());
        }
    }
    Ok(())
}

/// Decides a charge of the probe counter, which expires after a millisecond, within the deadline of
/// a request. A server that answers has the script, a clock and memory, and accepts writes.
async fn probe_writes(
    context: &RedisContext,
    target: &RedisConnectionTarget,
    live: &LiveConnection,
) -> Result<(), RedisConnectionError> {
    let limit = Limit {
        requests: MAX_UNITS,
        per_us: 1000,
        algorithm: Algorithm::FixedWindow { offset_us: 0 },
    };
    let charges = [Charge::new(&limit, &target.probe_key, 1)];
    let command = context.scripts.decide_command(&charges, None);
    let reply = match timeout(
        context.settings.timeout,
        run_command_loading_scripts(context, live, &command),
    )
    .await?
    {
        // The slot has moved: this node works, and the slot map is being refreshed.
        Err(error)
            if context.settings.topology == RedisTopology::Cluster
                && error.redirect_node().is_some() =>
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
