//! One worker's connection to Redis, and the task that keeps it.
//!
//! A request never waits for a connection: it finds one that is proven, or the reason why there is none.
//! redis-rs' own `ConnectionManager` was not taken: it makes callers wait through its retries, and stays on a
//! hung server and on a demoted master for ever.

use super::RedisSettings;
use super::failure::Failure;
use super::health::Health;
use super::script::Script;
use crate::limiter::{Algorithm, Charge, Key, KeyBuilder, Limit, MAX_UNITS};
use crate::store::Local;
use arc_swap::ArcSwap;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Cmd, RedisConnectionInfo, RedisResult, Value};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

/// Pause between attempts to connect: doubled up to the largest, and jittered down to half.
const FIRST_PAUSE: Duration = Duration::from_millis(25);
const LARGEST_PAUSE: Duration = Duration::from_millis(500);

/// A connection that lived shorter than this did not end the trouble: attempts stay paced.
const SETTLED: Duration = Duration::from_secs(1);

/// Consecutive timeouts after which a connection is given up: the server may hang, or be another by now.
const MAX_TIMEOUTS: u32 = 3;

/// Commands that wait to be written.
const QUEUE: usize = 1024;

/// A dead peer is noticed by these when no request is there to notice it.
const KEEPALIVE: Duration = Duration::from_secs(15);

/// Whose counter proves that Redis takes our writes. No policy can have this name.
pub(super) const PROBE: &str = "-probe";

/// What all links of the process share.
#[derive(Debug)]
pub(super) struct Context {
    pub(super) settings: RedisSettings,
    pub(super) script: Script,
    pub(super) health: Health,
    /// Whether the eviction policy has been looked at.
    pub(super) eviction_checked: AtomicBool,
    pub(super) local: Local,
    /// Whether somebody speaks for the process.
    pub(super) is_counted: AtomicBool,
}

/// A worker's way to Redis.
#[derive(Debug)]
pub(super) struct Link {
    state: Arc<ArcSwap<State>>,
    ready: watch::Receiver<bool>,
    _supervisor: Task,
}

#[derive(Debug)]
pub(super) enum State {
    Down(Failure),
    Up(Live),
}

/// A connection to a server that ran a program and let it write.
#[derive(Debug)]
pub(super) struct Live {
    connection: MultiplexedConnection,
    /// Consecutive.
    timeouts: AtomicU32,
    given_up: OnceLock<Failure>,
    gave_up: Notify,
    /// Times that the programs were loaded again, and how many somebody waits for.
    loads: watch::Sender<u64>,
    wanted: watch::Sender<u64>,
}

/// Ends with its owner.
#[derive(Debug)]
pub(super) struct Task(pub(super) JoinHandle<()>);

impl Link {
    /// Connects, and stays connected as long as the link lives.
    pub(super) fn start(context: Arc<Context>) -> Self {
        let state = Arc::new(ArcSwap::from_pointee(State::Down(Failure::Connection)));
        let (set_ready, ready) = watch::channel(false);
        let supervisor = supervise(context, Arc::clone(&state), set_ready);
        Self { state, ready, _supervisor: Task(tokio::spawn(supervisor)) }
    }

    pub(super) fn state(&self) -> Arc<State> {
        self.state.load_full()
    }

    /// Waits for the first proven connection.
    pub(super) async fn ready(&self) {
        // An error means that the supervisor is gone, and with it the runtime: nothing to wait for.
        drop(self.ready.clone().wait_for(|ready| *ready).await);
    }
}

impl Live {
    /// Runs a program, and loads all again if Redis does not have it. The caller sets the deadline.
    pub(super) async fn run(&self, command: &Cmd) -> Result<Value, Failure> {
        loop {
            let loads = *self.loads.borrow();
            match failure_of(self.connection.clone().send_packed_command(command).await) {
                Err(Failure::NoScript) => self.reloaded(loads).await,
                answer => {
                    if self.timeouts.load(Ordering::Relaxed) != 0 {
                        self.timeouts.store(0, Ordering::Relaxed);
                    }
                    return answer;
                }
            }
        }
    }

    /// Notes a failed call; the connection is replaced if that may help.
    pub(super) fn failed(&self, failure: Failure) {
        let hangs = failure == Failure::Timeout
            && self.timeouts.fetch_add(1, Ordering::Relaxed).saturating_add(1) >= MAX_TIMEOUTS;
        if hangs || failure.ends_connection() {
            self.given_up.get_or_init(|| failure);
            self.gave_up.notify_one();
        }
    }

    /// Waits until the programs were loaded more often than `loads` times. The supervisor loads them once for
    /// everybody who found one missing since.
    async fn reloaded(&self, loads: u64) {
        self.wanted.send_if_modified(|wanted| {
            let more = *wanted <= loads;
            *wanted = (*wanted).max(loads + 1);
            more
        });
        let mut seen = self.loads.subscribe();
        // The sender is ours, so it is there.
        drop(seen.wait_for(|now| *now > loads).await);
    }

    /// The number of a load that somebody waits for.
    async fn load_wanted(&self) -> u64 {
        let loads = *self.loads.borrow();
        let mut wanted = self.wanted.subscribe();
        wanted.wait_for(|wanted| *wanted > loads).await.map_or(loads, |wanted| *wanted)
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn supervise(context: Arc<Context>, state: Arc<ArcSwap<State>>, ready: watch::Sender<bool>) {
    let health = &context.health;
    let (mut lost, mut pause) = (false, FIRST_PAUSE);
    loop {
        let started = Instant::now();
        let connected = timeout(context.settings.connect_timeout, connect(&context)).await;
        let failure = match connected.unwrap_or_else(|late| Err(late.into())) {
            Ok((live, mut driver)) => {
                let up = Arc::new(State::Up(live));
                state.store(Arc::clone(&up));
                if std::mem::take(&mut lost) {
                    health.link_restored();
                }
                health.probed();
                ready.send_replace(true);
                attend(&context, &up, &mut driver).await
            }
            Err(failure) => {
                health.count(failure);
                failure
            }
        };
        state.store(Arc::new(State::Down(failure)));
        if !std::mem::replace(&mut lost, true) {
            health.link_lost(failure);
        }
        pause = if started.elapsed() >= SETTLED { FIRST_PAUSE } else { (pause * 2).min(LARGEST_PAUSE) };
        sleep(pause.mul_f64(0.5 + fastrand::f64() / 2.0)).await;
    }
}

/// Serves a live connection until it has to be replaced, and says why.
async fn attend(context: &Context, state: &State, driver: &mut Task) -> Failure {
    let State::Up(live) = state else { return Failure::Connection };
    loop {
        tokio::select! {
            _ = &mut driver.0 => return Failure::Connection,
            () = live.gave_up.notified() => {
                return live.given_up.get().copied().unwrap_or(Failure::Connection);
            }
            number = live.load_wanted() => {
                let loaded = timeout(context.settings.timeout, load(context, live)).await;
                match loaded.unwrap_or_else(|late| Err(late.into())) {
                    Ok(()) => drop(live.loads.send_replace(number)),
                    Err(failure) => return failure,
                }
            }
            () = sleep(context.settings.probe_interval) => {
                if !context.health.is_open() {
                    continue;
                }
                match prove(context, live).await {
                    Ok(()) => context.health.probed(),
                    Err(failure) => {
                        context.health.count(failure);
                        live.failed(failure);
                    }
                }
            }
        }
    }
}

pub(super) async fn connect(context: &Context) -> Result<(Live, Task), Failure> {
    let settings = &context.settings;
    let Ok(addresses) = tokio::net::lookup_host((settings.host.as_str(), settings.port)).await else {
        return Err(Failure::Dns);
    };
    let addresses: Vec<_> = addresses.collect();
    let stream = TcpStream::connect(addresses.as_slice()).await?;
    tune(&stream, settings)?;
    // Deadlines are ours: per decision and all in.
    let config = AsyncConnectionConfig::new().set_response_timeout(None).set_pipeline_buffer_size(QUEUE);
    let (connection, driver) = MultiplexedConnection::new_with_config(&identity(settings), stream, config)
        .await
        .map_err(|error| Failure::from(&error))?;
    let driver = Task(tokio::spawn(driver));
    let live = Live {
        connection,
        timeouts: AtomicU32::new(0),
        given_up: OnceLock::new(),
        gave_up: Notify::new(),
        loads: watch::Sender::new(0),
        wanted: watch::Sender::new(0),
    };
    // First a question about nothing. From those who have not logged in Redis reads ten arguments and 16 KiB at
    // most, and says of more that the protocol is broken: nobody would learn that a password is missing.
    let nothing = context.script.decide(&[], None);
    loaded(context, &live, &nothing).await?;
    prove(context, &live).await?;
    check_eviction(context, &live).await;
    Ok((live, driver))
}

/// Runs a program without the supervisor's help: it is the supervisor who asks.
async fn loaded(context: &Context, live: &Live, command: &Cmd) -> Result<Value, Failure> {
    let run = async || failure_of(live.connection.clone().send_packed_command(command).await);
    match run().await {
        Err(Failure::NoScript) => {
            load(context, live).await?;
            run().await
        }
        answer => answer,
    }
}

async fn load(context: &Context, live: &Live) -> Result<(), Failure> {
    let loads = context.script.load();
    let replies = live.connection.clone().send_packed_commands(&loads, 0, loads.len()).await;
    for reply in replies.map_err(|error| Failure::from(&error))? {
        failure_of(Ok(reply))?;
    }
    Ok(())
}

fn tune(stream: &TcpStream, settings: &RedisSettings) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let socket = socket2::SockRef::from(stream);
    let keepalive = socket2::TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE / 3);
    socket.set_tcp_keepalive(&keepalive)?;
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(Some(settings.connect_timeout.max(SETTLED)))?;
    Ok(())
}

fn identity(settings: &RedisSettings) -> RedisConnectionInfo {
    let mut identity = RedisConnectionInfo::default().set_db(settings.database);
    if let Some(username) = &settings.username {
        identity = identity.set_username(username);
    }
    if let Some(password) = &settings.password {
        identity = identity.set_password(password.expose());
    }
    identity
}

/// Asks for a decision as requests do, within their deadline, on a counter of our own that lives a millisecond:
/// whoever answers has the script, a clock and memory, and takes our writes.
async fn prove(context: &Context, live: &Live) -> Result<(), Failure> {
    let limit =
        Limit { requests: MAX_UNITS, per_us: 1000, algorithm: Algorithm::FixedWindow { offset_us: 0 } };
    let key = probe_key();
    let charges = [Charge::new(&limit, &key, 1)];
    let command = context.script.decide(&charges, None);
    let reply = timeout(context.settings.timeout, loaded(context, live, &command)).await??;
    match Script::decision(&reply, &charges) {
        Some(decision) if decision.admitted => Ok(()),
        _ => Err(Failure::Reply),
    }
}

fn probe_key() -> Key {
    KeyBuilder::new(PROBE).finish()
}

/// Once per process, and of a proven server only: a Redis that evicts forgets who has used what.
async fn check_eviction(context: &Context, live: &Live) {
    if context.eviction_checked.load(Ordering::Relaxed) {
        return;
    }
    let mut command = Cmd::new();
    command.arg("CONFIG").arg("GET").arg("maxmemory-policy");
    // An ACL may forbid the question.
    let Ok(reply) = failure_of(live.connection.clone().send_packed_command(&command).await) else { return };
    let Ok((_, policy)) = redis::from_redis_value::<(String, String)>(reply) else { return };
    if !context.eviction_checked.swap(true, Ordering::Relaxed) && policy != "noeviction" {
        tracing::warn!(
            maxmemory_policy = policy,
            "Redis may evict counters, which admits more than the limits say: set maxmemory-policy noeviction"
        );
    }
}

fn failure_of(reply: RedisResult<Value>) -> Result<Value, Failure> {
    match reply {
        Ok(Value::ServerError(error)) => Err(Failure::from(&error.into())),
        Ok(value) => Ok(value),
        Err(error) => Err(Failure::from(&error)),
    }
}
