//! One worker's connection to Redis, and the task that supervises it.
//!
//! A request never waits for a connection: it finds one that was probed, or the reason why there is
//! none. redis-rs' own `ConnectionManager` is not used: it makes callers wait through its retries,
//! and it keeps connections to a hung server or a demoted master.

use super::access::RedisAccess;
use super::connector;
use super::error::{RedisConnectionError, RedisErrorKind, within};
use super::live_connection::{LiveConnection, is_proxy_refusal};
use super::scripts::{ScriptLibrary, ServerClock};
use super::sentinel;
use super::settings::{RedisAddress, RedisCredentials, RedisSettings, RedisTopology};
use super::shared_state::SharedRedisState;
use super::watched_value::WatchedValue;
use crate::limiter::{Algorithm, Key, KeyBuilder, Limit, MAX_UNITS, PolicyCharges};
use crate::store::fallback::SINGLE_PARTITION;
use arc_swap::ArcSwap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;
use tokio::sync::{OnceCell, mpsc};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::task::AbortOnDropHandle;

/// Bounds of the pause between connection attempts. The pause doubles up to the maximum, with
/// jitter down to half of it. The first pause after a stable connection has jitter down to 0.
const MIN_INITIAL_BACKOFF: Duration = Duration::from_millis(25);
const MAX_BACKOFF: Duration = Duration::from_millis(500);

/// The first pause grows with the instance count. If a server closes all connections at once, about
/// one instance per millisecond reconnects.
const INITIAL_BACKOFF_PER_INSTANCE: Duration = Duration::from_millis(1);

/// A connection that lasted less than this does not reset the backoff.
const STABLE_CONNECTION_AGE: Duration = Duration::from_secs(1);

/// Pause between two trials of credentials that Redis rejects.
const RELOGIN_INTERVAL: Duration = Duration::from_secs(1);

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
    async fn resolve_address(
        &self,
        shared: &SharedRedisState,
        access: &RedisAccess,
    ) -> Result<RedisAddress, RedisConnectionError> {
        match &self.address {
            Some(address) => Ok(address.clone()),
            None if access.settings.sentinel_master().is_some() => {
                sentinel::resolve_master(shared, access).await
            }
            None => Err(RedisConnectionError::new(
                RedisErrorKind::Dns,
                "no address is known",
            )),
        }
    }
}

/// A master, with this worker's connection to it, which is reopened when it is lost.
#[derive(Debug)]
pub(crate) struct RedisNode {
    supervision: Arc<ConnectionSupervision>,
    supervisor: AbortOnDropHandle<()>,
    /// Consecutive failures, after which the connection is replaced and probed: the circuit breaker
    /// of one node of a cluster.
    consecutive_failures: AtomicU32,
    /// Calls wait for the first connection until this time.
    connect_by: Instant,
}

/// What a connection shares with its supervisor.
#[derive(Debug)]
struct ConnectionSupervision {
    shared: Arc<SharedRedisState>,
    target: RedisConnectionTarget,
    state: WatchedValue<ConnectionState>,
}

/// The probed connection, or why there is none.
#[derive(Clone, Debug, Default)]
struct ConnectionState {
    /// Whether there ever was a probed connection.
    was_ready: bool,
    /// `None` until the first attempt has ended.
    live: Option<Result<Arc<LiveConnection>, Arc<RedisConnectionError>>>,
}

impl ConnectionState {
    /// Whether the circuit breaker counts this connection as lost.
    fn is_lost(&self) -> bool {
        matches!(self.live, Some(Err(_)))
    }
}

/// What the supervisor needs of a connection that it has opened.
pub(super) struct OpenedConnection {
    pub(super) live: LiveConnection,
    pub(super) driver: AbortOnDropHandle<()>,
    address: RedisAddress,
    /// The credentials that the probe succeeded with.
    login: RedisCredentials,
    replacement_receiver: mpsc::Receiver<RedisErrorKind>,
}

impl RedisNode {
    /// Connects, and reconnects as long as the value lives.
    pub(super) fn start(
        shared: &Arc<SharedRedisState>,
        target: RedisConnectionTarget,
        connect_by: Instant,
    ) -> Self {
        let supervision = Arc::new(ConnectionSupervision {
            shared: Arc::clone(shared),
            target,
            state: WatchedValue::default(),
        });
        let supervisor = tokio::spawn(Arc::clone(&supervision).supervise());
        Self {
            supervision,
            supervisor: AbortOnDropHandle::new(supervisor),
            consecutive_failures: AtomicU32::new(0),
            connect_by,
        }
    }

    /// The configured address; `None` if sentinels name the server.
    pub(super) fn address(&self) -> Option<&RedisAddress> {
        self.supervision.target.address.as_ref()
    }

    /// Whether the node is new and not connected yet. Calls wait for a connecting node of a
    /// cluster, so that no call fails because of a slot migration.
    pub(super) fn is_connecting(&self) -> bool {
        !self.supervision.state.get().was_ready && Instant::now() < self.connect_by
    }

    /// Whether calls would be sent to the node, or wait for it.
    pub(super) fn is_available(&self) -> bool {
        self.live().is_ok() || self.is_connecting()
    }

    /// The connection that calls are sent on.
    ///
    /// # Errors
    /// Why there is no connection.
    pub(super) fn live(&self) -> Result<Arc<LiveConnection>, RedisErrorKind> {
        match self.supervision.state.get().live {
            Some(live) => live.map_err(|error| error.kind),
            None => Err(RedisErrorKind::Connection),
        }
    }

    /// Waits until the first attempt to connect has ended.
    ///
    /// # Errors
    /// Why there is no connection.
    pub(super) async fn wait_for_first_attempt(&self) -> Result<(), Arc<RedisConnectionError>> {
        let state = &self.supervision.state;
        let ended = state.wait_for(|state| state.live.is_some()).await;
        ended.live.map_or(Ok(()), |live| live.map(drop))
    }

    /// Waits for the first probed connection.
    pub(super) async fn wait_until_ready(&self) {
        let state = &self.supervision.state;
        state.wait_for(|state| state.was_ready).await;
    }

    /// Returns the number of consecutive failures.
    pub(super) fn record_failure(&self) -> u32 {
        let failures = self.consecutive_failures.fetch_add(1, Ordering::Relaxed);
        failures.saturating_add(1)
    }

    pub(super) fn reset_failures(&self) {
        if self.consecutive_failures.load(Ordering::Relaxed) != 0 {
            self.consecutive_failures.store(0, Ordering::Relaxed);
        }
    }

    /// Stops the supervisor. If the connection was lost, the circuit breaker stops counting it as
    /// lost.
    pub(super) fn stop(&self) {
        self.supervisor.abort();
        if self.supervision.state.get().is_lost() {
            self.supervision.shared.breaker.record_connection_restored();
        }
    }
}

impl ConnectionSupervision {
    async fn supervise(self: Arc<Self>) {
        let shared = &self.shared;
        let mut backoff = MIN_INITIAL_BACKOFF;
        loop {
            let started = Instant::now();
            let connected = connect_and_probe(shared, &self.target);
            let error = match within(shared.settings.connect_timeout, connected).await {
                Ok(opened) => self.serve_until_replaced(opened).await,
                Err(error) => {
                    shared.breaker.count_failure(error.kind);
                    // Before the first connection there is no outage, and a connection that is
                    // replaced at once is none either: servers close idle connections. For cluster
                    // nodes the slot map shows which slots are affected.
                    if self.state.get().was_ready && !shared.is_cluster() {
                        shared
                            .fallback
                            .mark_partitions_unreachable([SINGLE_PARTITION]);
                    }
                    error
                }
            };
            let error = Arc::new(error);
            let previous = self.state.set(ConnectionState {
                was_ready: self.state.get().was_ready,
                live: Some(Err(Arc::clone(&error))),
            });
            if previous.is_lost() {
                shared.breaker.record_connection_still_down(&error)
            } else {
                shared.breaker.record_connection_down(&error)
            }
            let min_jitter;
            (backoff, min_jitter) = if started.elapsed() >= STABLE_CONNECTION_AGE {
                let backoff =
                    INITIAL_BACKOFF_PER_INSTANCE * shared.fallback.share().instance_count();
                (backoff.clamp(MIN_INITIAL_BACKOFF, MAX_BACKOFF), 0.0)
            } else {
                ((backoff * 2).min(MAX_BACKOFF), 0.5)
            };
            sleep(backoff.mul_f64(min_jitter + (1.0 - min_jitter) * fastrand::f64())).await;
        }
    }

    /// Publishes a connection until it must be replaced, and returns the reason.
    async fn serve_until_replaced(&self, mut opened: OpenedConnection) -> RedisConnectionError {
        let (live, address) = (Arc::new(opened.live), &opened.address);
        self.shared.breaker.record_probe_success();
        let state = ConnectionState {
            was_ready: true,
            live: Some(Ok(Arc::clone(&live))),
        };
        if self.state.set(state).is_lost() {
            self.shared.breaker.record_connection_restored();
        }
        tokio::select! {
            biased;
            _ = &mut opened.driver => RedisErrorKind::Connection.into(),
            kind = opened.replacement_receiver.recv() => kind.unwrap_or(RedisErrorKind::Connection).into(),
            () = self.probe_while_breaker_is_open(&live) => RedisErrorKind::Connection.into(),
            () = self.renew_logins(&live, address, opened.login) => RedisErrorKind::NoAuth.into(),
            () = self.wait_until_master_changes(address) => {
                let message = format!("{address} is no longer the master");
                RedisConnectionError::new(RedisErrorKind::ReadOnly, message)
            }
        }
    }

    async fn probe_while_breaker_is_open(&self, live: &LiveConnection) {
        let shared = &self.shared;
        loop {
            sleep(shared.settings.probe_interval).await;
            if !shared.breaker.is_open() {
                continue;
            }
            match probe_writes(shared, live, &self.target).await {
                Ok(()) => shared.breaker.record_probe_success(),
                Err(error) => {
                    shared.breaker.count_failure(error.kind);
                    live.record_failure(error.kind);
                }
            }
        }
    }

    /// Logs in again on a live connection whenever the credentials change. A new connection tries
    /// them first: a user that lacks a permission would fail the requests of the live one. Until
    /// they work, the connection keeps those that it was authenticated with. Never returns.
    async fn renew_logins(
        &self,
        live: &LiveConnection,
        address: &RedisAddress,
        mut login_in_use: RedisCredentials,
    ) {
        let shared = &self.shared;
        loop {
            let is_newer = |access: &Arc<RedisAccess>| access.settings.credentials != login_in_use;
            let access = shared.access.wait_for(is_newer).await;
            // An error means that the semaphore is closed, which never happens.
            let _permit = access.trial_permit.acquire().await;
            if !Arc::ptr_eq(&access, &shared.access.get()) {
                continue;
            }
            let login = &access.settings.credentials;
            let renewal = async {
                open_and_probe(shared, &self.target, &access.settings, address, login).await?;
                // If Redis rejects them, the connection keeps its user.
                connector::log_in(&mut live.connection.clone(), login).await
            };
            match within(shared.settings.connect_timeout, renewal).await {
                Ok(()) => {
                    login_in_use = login.clone();
                    access.server_login.record_accepted(login);
                }
                Err(error) => {
                    if error.kind == RedisErrorKind::NoAuth {
                        access.server_login.log_rejection(&error);
                    }
                    sleep(RELOGIN_INTERVAL).await;
                }
            }
        }
    }

    /// Returns when the sentinels name another master than the server at an address.
    async fn wait_until_master_changes(&self, current_address: &RedisAddress) {
        loop {
            let access = self.shared.access.get();
            if access.settings.sentinel_master().is_none() {
                return std::future::pending().await;
            }
            let is_newer = |newer: &Arc<RedisAccess>| !Arc::ptr_eq(newer, &access);
            tokio::select! {
                () = sentinel::wait_for_master_change(&self.shared, &access, current_address) => return,
                _newer = self.shared.access.wait_for(is_newer) => {}
            }
        }
    }
}

/// Connects to a target and probes it: with the newest login, or while that does not work with the
/// previous one. The caller sets the deadline.
async fn connect_and_probe(
    shared: &Arc<SharedRedisState>,
    target: &RedisConnectionTarget,
) -> Result<OpenedConnection, RedisConnectionError> {
    let access = shared.access.get();
    let address = target.resolve_address(shared, &access).await?;
    let attempt = |login| open_and_probe(shared, target, &access.settings, &address, login);
    match access.server_login.try_logins(attempt).await {
        Ok((opened, login)) => {
            access.server_login.record_accepted(login);
            Ok(opened)
        }
        Err(error) => Err(connector::find_refusal(&address, &access.settings, error).await),
    }
}

/// Connects to an address with a login and probes the connection.
async fn open_and_probe(
    shared: &Arc<SharedRedisState>,
    target: &RedisConnectionTarget,
    settings: &RedisSettings,
    address: &RedisAddress,
    login: &RedisCredentials,
) -> Result<OpenedConnection, RedisConnectionError> {
    // First runs a command without keys. Redis accepts at most ten arguments and 16 KiB from a
    // client without login, and reports more as a protocol error: the missing password would not be
    // reported.
    let empty_command = shared.scripts.decide_command(&[], None);
    // A server may close one connection for other reasons than a proxy.
    let mut is_refusal_expected = shared.is_behind_proxy();
    loop {
        let opened = open(shared, settings, address, login, false).await?;
        match opened.live.send_command(&empty_command, false).await {
            Err(error) if !shared.is_cluster() && is_proxy_refusal(&error) => {
                if !is_refusal_expected {
                    is_refusal_expected = true;
                    continue;
                }
                let opened = open(shared, settings, address, login, true).await?;
                let probed = probe_writes(shared, &opened.live, target).await;
                probed.map_err(|_further| error)?;
                shared.set_behind_proxy(true);
                return Ok(opened);
            }
            reply => opened.live.server_clock.date_reply(reply?),
        };
        shared.set_behind_proxy(false);
        probe_writes(shared, &opened.live, target).await?;
        return Ok(opened);
    }
}

/// Opens a connection to an address, without a probe. `is_proxy`: no SCRIPT is sent.
pub(super) async fn open(
    shared: &Arc<SharedRedisState>,
    settings: &RedisSettings,
    address: &RedisAddress,
    login: &RedisCredentials,
    is_proxy: bool,
) -> Result<OpenedConnection, RedisConnectionError> {
    let (connection, driver) =
        connector::open_connection(address, settings, login, settings.database).await?;
    let (replacement_sender, replacement_receiver) = mpsc::channel(1);
    let live = LiveConnection {
        shared: Arc::clone(shared),
        connection,
        consecutive_timeouts: AtomicU32::new(0),
        replacement_sender,
        // A proxy may close the connection at SCRIPT.
        script_load: ArcSwap::from_pointee(OnceCell::new_with(is_proxy.then_some(false))),
        lacks_evalsha: AtomicBool::new(false),
        server_clock: ServerClock::default(),
    };
    Ok(OpenedConnection {
        live,
        driver,
        address: address.clone(),
        login: login.clone(),
        replacement_receiver,
    })
}

/// Decides a charge of the probe counter, which expires after a millisecond, within the deadline of
/// a request. A server that answers has the script, a clock and memory, and accepts writes.
async fn probe_writes(
    shared: &SharedRedisState,
    live: &LiveConnection,
    target: &RedisConnectionTarget,
) -> Result<(), RedisConnectionError> {
    let SharedRedisState {
        settings, scripts, ..
    } = shared;
    let limit = Limit {
        requests: MAX_UNITS,
        per_us: 1000,
        algorithm: Algorithm::FixedWindow { offset_us: 0 },
    };
    let request = [PolicyCharges::new(&limit, &target.probe_key, 1)];
    let command = scripts.decide_command(&request, None);
    let reply = match timeout(settings.timeout, live.send_command(&command, false)).await? {
        // The slot has moved: this node works, and the slot map is being refreshed.
        Err(error) if shared.is_cluster() && error.redirect_node().is_some() => {
            return Ok(());
        }
        reply => reply?,
    };
    let reply = live.server_clock.date_reply(reply);
    match ScriptLibrary::parse_decision_reply(&reply, &request) {
        Some(decision) if decision.admitted => Ok(()),
        _ => Err(RedisConnectionError::new(
            RedisErrorKind::InvalidReply,
            "the reply of the probe is invalid",
        )),
    }
}
