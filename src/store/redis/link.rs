//! One worker's connection to Redis, and the task that keeps it.
//!
//! A request never waits for a connection: it finds one that is proven, or the reason why there is none.
//! redis-rs' own `ConnectionManager` was not taken: it makes callers wait through its retries, and stays on a
//! hung server and on a demoted master for ever.

use super::connect::{self, Address, Task};
use super::failure::{Failure, Trouble};
use super::health::Health;
use super::script::Script;
use super::sentinel::Sentinels;
use super::vitals::Vitals;
use super::{RedisSettings, Topology};
use crate::limiter::{Algorithm, Charge, Key, KeyBuilder, Limit, MAX_UNITS};
use crate::store::Local;
use crate::store::local::ALL;
use arc_swap::ArcSwap;
use redis::aio::MultiplexedConnection;
use redis::{Cmd, ErrorKind, RedisError, RedisResult, ServerErrorKind, Value};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, timeout};

/// Pause between attempts to connect: doubled up to the largest, and jittered down to half.
const FIRST_PAUSE: Duration = Duration::from_millis(25);
const LARGEST_PAUSE: Duration = Duration::from_millis(500);

/// A connection that lived shorter than this did not end the trouble: attempts stay paced.
const SETTLED: Duration = Duration::from_secs(1);

/// Consecutive timeouts after which a connection is given up: the server may hang, or be another by now.
const MAX_TIMEOUTS: u32 = 3;

/// Whose counter proves that Redis takes our writes. No policy can have this name.
pub(super) const PROBE: &str = "-probe";

/// What all links of the process share.
#[derive(Debug)]
pub(super) struct Context {
    pub(super) settings: RedisSettings,
    pub(super) script: Script,
    pub(super) health: Health,
    /// What was asked of Redis so far.
    pub(super) calls: Arc<AtomicU64>,
    pub(super) vitals: Vitals,
    pub(super) local: Local,
    /// Whether somebody speaks for the process.
    pub(super) is_counted: AtomicBool,
}

/// A worker's way to Redis.
#[derive(Debug)]
pub(super) struct Link {
    state: Arc<ArcSwap<State>>,
    ready: watch::Receiver<bool>,
    context: Arc<Context>,
    /// The health counts it as down.
    lost: Arc<AtomicBool>,
    supervisor: Task,
}

/// Whom a link leads to.
#[derive(Debug)]
pub(super) struct Target {
    /// `None`: the master of whom the sentinels know.
    address: Option<Address>,
    /// The counter that proves that the server takes our writes.
    probe: Key,
    /// Sentinels asked so far: each time another is the first.
    asked: AtomicUsize,
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
    calls: Arc<AtomicU64>,
    /// Consecutive.
    timeouts: AtomicU32,
    given_up: OnceLock<Failure>,
    gave_up: Notify,
    /// Times that the programs were loaded again, and how many somebody waits for.
    loads: watch::Sender<u64>,
    wanted: watch::Sender<u64>,
}

impl Target {
    /// The one server that writes go to.
    pub(super) fn of(settings: &RedisSettings) -> Self {
        let is_known = settings.topology == Topology::Standalone;
        let address = settings.servers.first().filter(|_| is_known).cloned();
        Self {
            address,
            probe: KeyBuilder::new(PROBE).finish(),
            asked: AtomicUsize::new(fastrand::usize(..1024)),
        }
    }

    /// A server of several, which proves itself on a counter that is its own.
    pub(super) fn node(address: Address, probe: Key) -> Self {
        Self {
            address: Some(address),
            probe,
            asked: AtomicUsize::new(0),
        }
    }

    /// Where to connect to now.
    async fn locate(&self, settings: &RedisSettings) -> Result<Address, Trouble> {
        match (&self.address, &settings.topology) {
            (Some(address), _) => Ok(address.clone()),
            (None, Topology::Sentinel { master, login }) => {
                let first = self.asked.fetch_add(1, Ordering::Relaxed);
                Sentinels {
                    settings,
                    master,
                    login,
                }
                .master(first)
                .await
            }
            (None, _) => Err(Trouble::new(Failure::Dns, "no address is known")),
        }
    }

    /// Ends when the server at an address is no longer the one.
    async fn moved(&self, settings: &RedisSettings, from: &Address) {
        match &settings.topology {
            Topology::Sentinel { master, login } => {
                let first = self.asked.load(Ordering::Relaxed);
                Sentinels {
                    settings,
                    master,
                    login,
                }
                .moved(from, first)
                .await;
            }
            _ => std::future::pending().await,
        }
    }
}

impl Link {
    /// Connects, and stays connected as long as the link lives.
    pub(super) fn start(context: Arc<Context>, target: Target) -> Self {
        let state = Arc::new(ArcSwap::from_pointee(State::Down(Failure::Connection)));
        let (set_ready, ready) = watch::channel(false);
        let lost = Arc::default();
        let supervisor = supervise(
            Arc::clone(&context),
            target,
            Arc::clone(&state),
            Arc::clone(&lost),
            set_ready,
        );
        Self {
            state,
            ready,
            context,
            lost,
            supervisor: Task(tokio::spawn(supervisor)),
        }
    }

    /// Whether there was a proven connection at any time.
    pub(super) fn was_ready(&self) -> bool {
        *self.ready.borrow()
    }

    /// Ends: nobody is missing this server any more.
    pub(super) fn retire(&self) {
        self.supervisor.0.abort();
        if self.lost.swap(false, Ordering::Relaxed) {
            self.context.health.link_restored();
        }
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
        self.answer(command, false)
            .await
            .map_err(|error| Failure::from(&error))
    }

    /// The same, with the whole error. `asking`: a node that is just taking over the key's slot shall answer.
    pub(super) async fn answer(&self, command: &Cmd, asking: bool) -> RedisResult<Value> {
        loop {
            let loads = *self.loads.borrow();
            self.calls.fetch_add(1, Ordering::Relaxed);
            let answer = match asking {
                false => self.send(command).await,
                true => self.send_asking(command).await,
            };
            match answer {
                Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) => {
                    self.reloaded(loads).await;
                }
                answer => {
                    if self.timeouts.load(Ordering::Relaxed) != 0 {
                        self.timeouts.store(0, Ordering::Relaxed);
                    }
                    return answer;
                }
            }
        }
    }

    async fn send(&self, command: &Cmd) -> RedisResult<Value> {
        match self.connection.clone().send_packed_command(command).await? {
            Value::ServerError(error) => Err(error.into()),
            value => Ok(value),
        }
    }

    async fn send_asking(&self, command: &Cmd) -> RedisResult<Value> {
        let mut both = redis::pipe();
        both.cmd("ASKING").add_command(command.clone());
        let replies = self
            .connection
            .clone()
            .send_packed_commands(&both, 1, 1)
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

    /// Notes a failed call; the connection is replaced if that may help.
    pub(super) fn failed(&self, failure: Failure) {
        let hangs = failure == Failure::Timeout
            && self
                .timeouts
                .fetch_add(1, Ordering::Relaxed)
                .saturating_add(1)
                >= MAX_TIMEOUTS;
        if hangs || failure.ends_connection() {
            self.give_up(failure);
        }
    }

    /// Has the connection replaced.
    pub(super) fn give_up(&self, failure: Failure) {
        self.given_up.get_or_init(|| failure);
        self.gave_up.notify_one();
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
        wanted
            .wait_for(|wanted| *wanted > loads)
            .await
            .map_or(loads, |wanted| *wanted)
    }
}

async fn supervise(
    context: Arc<Context>,
    target: Target,
    state: Arc<ArcSwap<State>>,
    lost: Arc<AtomicBool>,
    ready: watch::Sender<bool>,
) {
    let health = &context.health;
    let mut pause = FIRST_PAUSE;
    loop {
        let started = Instant::now();
        let connected = timeout(context.settings.connect_timeout, connect(&context, &target)).await;
        let trouble = match connected.unwrap_or_else(|late| Err(late.into())) {
            Ok((live, address, mut driver)) => {
                let up = Arc::new(State::Up(live));
                state.store(Arc::clone(&up));
                if lost.swap(false, Ordering::Relaxed) {
                    health.link_restored();
                }
                health.probed();
                ready.send_replace(true);
                tokio::select! {
                    failure = attend(&context, &target, &up, &mut driver) => failure.into(),
                    () = target.moved(&context.settings, &address) => {
                        Trouble::new(Failure::ReadOnly, format!("{address} is no longer the master"))
                    }
                }
            }
            Err(trouble) => {
                health.count(trouble.failure);
                // That no connection is there yet is no outage, nor is one that is replaced at once: servers close those
                // that idle. Of a cluster's nodes only the map says what they keep.
                if *ready.borrow() && context.settings.topology != Topology::Cluster {
                    context.local.fail([ALL]);
                }
                trouble
            }
        };
        state.store(Arc::new(State::Down(trouble.failure)));
        if !lost.swap(true, Ordering::Relaxed) {
            health.link_lost(&trouble);
        }
        pause = if started.elapsed() >= SETTLED {
            FIRST_PAUSE
        } else {
            (pause * 2).min(LARGEST_PAUSE)
        };
        sleep(pause.mul_f64(0.5 + fastrand::f64() / 2.0)).await;
    }
}

/// Serves a live connection until it has to be replaced, and says why.
async fn attend(context: &Context, target: &Target, state: &State, driver: &mut Task) -> Failure {
    let State::Up(live) = state else {
        return Failure::Connection;
    };
    loop {
        tokio::select! {
            _ = &mut driver.0 => return Failure::Connection,
            () = live.gave_up.notified() => {
                return live.given_up.get().copied().unwrap_or(Failure::Connection);
            }
            number = live.load_wanted() => {
                let loaded = timeout(context.settings.timeout, load(context, live)).await;
                match loaded.map_err(Failure::from).and_then(|done| done.map_err(|error| Failure::from(&error))) {
                    Ok(()) => drop(live.loads.send_replace(number)),
                    Err(failure) => return failure,
                }
            }
            () = sleep(context.settings.probe_interval) => {
                if !context.health.is_open() {
                    continue;
                }
                match prove(context, target, live).await {
                    Ok(()) => context.health.probed(),
                    Err(trouble) => {
                        context.health.count(trouble.failure);
                        live.failed(trouble.failure);
                    }
                }
            }
        }
    }
}

/// Connects to a target and has it prove itself. The caller sets the deadline.
pub(super) async fn connect(
    context: &Context,
    target: &Target,
) -> Result<(Live, Address, Task), Trouble> {
    let address = target.locate(&context.settings).await?;
    let (connection, driver) = connect::open(&address, context.settings.how()).await?;
    let live = Live {
        connection,
        calls: Arc::clone(&context.calls),
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
    prove(context, target, &live).await?;
    Ok((live, address, driver))
}

/// Runs a program without the supervisor's help: it is the supervisor who asks, or there is none.
pub(super) async fn loaded(context: &Context, live: &Live, command: &Cmd) -> RedisResult<Value> {
    match live.send(command).await {
        Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) => {
            load(context, live).await?;
            live.send(command).await
        }
        answer => answer,
    }
}

async fn load(context: &Context, live: &Live) -> RedisResult<()> {
    let loads = context.script.load();
    for reply in live
        .connection
        .clone()
        .send_packed_commands(&loads, 0, loads.len())
        .await?
    {
        if let Value::ServerError(error) = reply {
            return Err(error.into());
        }
    }
    Ok(())
}

/// Asks for a decision as requests do, within their deadline, on a counter of our own that lives a millisecond:
/// whoever answers has the script, a clock and memory, and takes our writes.
async fn prove(context: &Context, target: &Target, live: &Live) -> Result<(), Trouble> {
    let limit = Limit {
        requests: MAX_UNITS,
        per_us: 1000,
        algorithm: Algorithm::FixedWindow { offset_us: 0 },
    };
    let charges = [Charge::new(&limit, &target.probe, 1)];
    let command = context.script.decide(&charges, None);
    let reply = match timeout(context.settings.timeout, loaded(context, live, &command)).await? {
        // The slot has moved since: this node knows its place, and the map of slots is being renewed.
        Err(error)
            if context.settings.topology == Topology::Cluster
                && error.redirect_node().is_some() =>
        {
            return Ok(());
        }
        reply => reply?,
    };
    match Script::decision(&reply, &charges) {
        Some(decision) if decision.admitted => Ok(()),
        _ => Err(Trouble::new(Failure::Reply, "the answer makes no sense")),
    }
}
