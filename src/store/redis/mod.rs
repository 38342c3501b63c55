//! Counters in Redis, shared by every replica.
//!
//! One script decides all limits of a request in one round trip, on the server's clock (`script`, `decide.lua`).
//! It needs Redis 6.2 (SET with PXAT). Each worker has a connection and a task that keeps it (`link`), opened by
//! `connect` at the address that is given, that the sentinels name (`sentinel`), or that a cluster's map of slots
//! does (`cluster`); the breaker is the process's (`health`).
//! One of the workers counts the instances, and writes back what was admitted while Redis was away (`fleet`).

mod batch;
mod cluster;
mod connect;
mod failure;
mod fleet;
mod health;
mod inspect;
mod link;
mod queue;
mod script;
mod sentinel;
mod vitals;

pub use batch::{Answer, Answers, Batch};
pub use connect::{Address, Login};
pub use failure::Failure;
pub use fleet::instance;
pub use inspect::{Counter, InspectError, Inspector};
pub use script::Script;

use super::local::ALL;
use super::{Late, Local, Unavailable, Untold};
use crate::clock::Clock;
use crate::limiter::{Algorithm, Amendment, Charge, Decision, Key};
use crate::telemetry::metrics::RedisVitals;
use crate::tls::ClientTls;
use ::redis::Cmd;
use cluster::Cluster;
use connect::{How, Task};
use futures_util::future::join_all;
use health::Health;
use link::{Context, Link, State, Target};
use queue::Queue;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::time::{Instant, timeout};
use vitals::Vitals;

/// Late amendments sent at a time: a few hundred microseconds of the server's time.
const LATE_PER_CALL: usize = 64;

/// Whether an amendment takes Redis as long as a dozen others: many charges change with it.
fn is_long(late: &Late<'_>) -> bool {
    late.limit.algorithm == Algorithm::SlidingLog
        && matches!(late.amendment, Amendment::Credit { .. })
}

/// Such calls under way on one connection, which keeps their order: one after the other, each would cost a round trip,
/// and more becomes known meanwhile than is told. Decisions of the same worker wait behind them, for some milliseconds at
/// most.
const LATE_CALLS: usize = 16;

/// Amendments as they are sent together, in order.
fn calls<'l, 'a>(late: &'l [Late<'a>]) -> Vec<&'l [Late<'a>]> {
    let alike = late.chunk_by(|one, next| !is_long(one) && !is_long(next));
    alike.flat_map(|late| late.chunks(LATE_PER_CALL)).collect()
}

/// The places in the list of what was in each call that failed.
fn untold(calls: &[&[Late<'_>]], told: Vec<Result<(), Failure>>) -> Vec<(Vec<usize>, Failure)> {
    let (mut failed, mut next) = (Vec::new(), 0);
    for (late, told) in calls.iter().zip(told) {
        let places = next..next + late.len();
        next = places.end;
        failed.extend(told.err().map(|failure| (places.collect(), failure)));
    }
    failed
}

/// Which Redis, and how long to wait for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RedisSettings {
    pub topology: Topology,
    /// The server; the sentinels; some nodes of the cluster.
    pub servers: Vec<Address>,
    pub database: i64,
    /// For the servers that hold counters.
    pub login: Login,
    /// `None`: in the clear.
    pub tls: Option<ClientTls>,
    /// Separates the counters of services that share a Redis.
    pub key_prefix: String,
    /// How many instances share the limits, at least 1, until they have been counted.
    pub instances: u32,
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
pub enum Topology {
    /// One server, or whatever stands behind one address.
    Standalone,
    /// Sentinels that know the master of this name.
    Sentinel {
        master: String,
        login: Login,
    },
    Cluster,
}

/// What the workers of one process share: settings, breaker, counters.
#[derive(Clone, Debug)]
pub struct Shared(Arc<Context>);

/// One worker's handle: cheap to clone, to be used on the runtime that started it.
#[derive(Clone, Debug)]
pub struct Redis {
    context: Arc<Context>,
    way: Way,
    /// Of the one that speaks for the process: what keeps it in the count, and what looks after Redis.
    beating: Option<Arc<[Task; 2]>>,
}

/// How a worker reaches the server that holds a key.
#[derive(Clone, Debug)]
enum Way {
    /// All questions are in the queue for the link.
    One(Arc<Link>, Arc<Queue>),
    Cluster(Arc<Cluster>),
}

impl RedisSettings {
    fn how(&self) -> How<'_> {
        let Self {
            login,
            database,
            tls,
            connect_timeout,
            ..
        } = self;
        How {
            login,
            database: *database,
            tls: tls.as_ref(),
            connect_timeout: *connect_timeout,
        }
    }
}

/// A secret that never shows itself in logs.
#[derive(Clone, PartialEq, Eq)]
pub struct Password(String);

impl Shared {
    pub fn new(settings: RedisSettings) -> Self {
        Self(Arc::new(Context {
            script: Script::new(&settings.key_prefix),
            health: Health::new(settings.breaker_failures),
            calls: Arc::default(),
            vitals: Vitals::default(),
            local: Local::new(settings.instances, Clock::system()).over(match settings.topology {
                Topology::Cluster => cluster::slot_of,
                _ => |_| ALL,
            }),
            is_counted: AtomicBool::new(false),
            settings,
        }))
    }

    pub fn settings(&self) -> &RedisSettings {
        &self.0.settings
    }

    /// The names of the counters in which a charge is counted: several if it is spread.
    pub fn counters(&self, charge: &Charge<'_>) -> Vec<String> {
        let named = |key: &Key| self.0.script.key(&Charge { key, ..*charge });
        match self.0.settings.topology {
            Topology::Cluster if charge.shards > 1 => (0..charge.shards)
                .map(|number| named(&charge.key.shard(number)))
                .collect(),
            _ => vec![named(charge.key)],
        }
    }

    /// Whether Redis was reached, no worker has lost its connection and the breaker is closed.
    pub fn is_up(&self) -> bool {
        self.0.health.is_up()
    }

    /// Whether failures have stopped requests from asking Redis.
    pub fn breaker_open(&self) -> bool {
        self.0.health.is_open()
    }

    /// Instances that share the limits, as last seen.
    pub fn instances(&self) -> u32 {
        self.0.local.share().live()
    }

    /// What Redis was last seen to say of itself.
    pub fn vitals(&self) -> RedisVitals {
        RedisVitals {
            calls: self.0.calls.load(Ordering::Relaxed),
            ..self.0.vitals.last()
        }
    }

    /// Failures since the start, each kind by its stable word.
    pub fn errors(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.0.health.counts()
    }
}

impl Redis {
    /// Starts connecting, and stays connected until the last clone is dropped. Call it on the worker's runtime.
    pub fn start(shared: &Shared) -> Self {
        let context = Arc::clone(&shared.0);
        let way = match context.settings.topology {
            Topology::Cluster => Way::Cluster(Arc::new(Cluster::start(Arc::clone(&context)))),
            _ => {
                let target = Target::of(&context.settings);
                let link = Arc::new(Link::start(Arc::clone(&context), target));
                let queue = Queue::new(Arc::clone(&context), Arc::clone(&link));
                Way::One(link, Arc::new(queue))
            }
        };
        Self {
            way,
            context,
            beating: None,
        }
    }

    /// Makes the process known to the others that share its limits, and keeps it in their count until
    /// [`Redis::leave`]: the first handle does that for all.
    #[must_use]
    pub fn join(self) -> Self {
        let is_first = !self.context.is_counted.swap(true, Ordering::Relaxed);
        let beating = is_first.then(|| {
            let tasks = [
                tokio::spawn(fleet::attend(self.clone())),
                tokio::spawn(vitals::attend(self.clone())),
            ];
            Arc::new(tasks.map(Task))
        });
        Self { beating, ..self }
    }

    /// Takes the process out of the count, if this is the handle that keeps it there.
    pub async fn leave(&self) {
        if let Some(beating) = &self.beating {
            beating.iter().for_each(|task| task.0.abort());
            fleet::leave(self).await;
        }
    }

    /// What goes on while Redis is away.
    pub fn local(&self) -> &Local {
        &self.context.local
    }

    /// Whether a question would be sent at all.
    pub fn is_reachable(&self) -> bool {
        !self.breaker_open()
            && match &self.way {
                Way::One(link, _) => matches!(&*link.state(), State::Up(_)),
                Way::Cluster(cluster) => cluster.is_reachable(),
            }
    }

    /// Whether a question about these charges would be sent to all that keep them.
    pub fn reaches(&self, charges: &[Charge<'_>]) -> bool {
        match &self.way {
            Way::One(..) => self.is_reachable(),
            Way::Cluster(cluster) => cluster.reaches(charges),
        }
    }

    /// The parts, as [`Local`] counts them, that would not be asked.
    fn parts_away(&self) -> Vec<u16> {
        match &self.way {
            Way::One(..) if self.is_reachable() => Vec::new(),
            Way::One(..) => vec![ALL],
            Way::Cluster(cluster) => cluster.slots_away(),
        }
    }

    /// The parts that would be asked and don't answer.
    async fn parts_silent(&self) -> Vec<u16> {
        match &self.way {
            // Whoever counts the instances finds that out.
            Way::One(..) => Vec::new(),
            Way::Cluster(cluster) => cluster.slots_silent().await,
        }
    }

    /// The connections to all masters, or why one has none.
    fn masters(&self) -> Vec<Arc<State>> {
        match &self.way {
            Way::One(link, _) => vec![link.state()],
            Way::Cluster(cluster) => cluster
                .masters()
                .iter()
                .map(|master| master.state())
                .collect(),
        }
    }

    fn is_cluster(&self) -> bool {
        matches!(self.way, Way::Cluster(_))
    }

    /// Ends when this worker's first connection is ready, or `connect_timeout` has passed.
    pub async fn first_ready(&self) {
        let ready = async {
            match &self.way {
                Way::One(link, _) => link.ready().await,
                Way::Cluster(cluster) => cluster.ready().await,
            }
        };
        drop(timeout(self.context.settings.connect_timeout, ready).await);
    }

    /// Whether failures have stopped requests from asking Redis.
    pub fn breaker_open(&self) -> bool {
        self.context.health.is_open()
    }

    /// The longest that a decision takes.
    pub fn timeout(&self) -> Duration {
        self.context.settings.timeout
    }

    /// Asks Redis to decide, with an answer within `timeout` from `asked`. The charges name different counters.
    ///
    /// # Errors
    /// [`Unavailable`] with the failure's word. After a timeout or a lost connection the charges may have been
    /// made: too strict, never too lax.
    pub async fn decide(
        &self,
        charges: &[Charge<'_>],
        asked: Instant,
    ) -> Result<Decision, Unavailable> {
        let deadline = asked + self.context.settings.timeout;
        let queue = match &self.way {
            Way::One(_, queue) => queue,
            Way::Cluster(cluster) => {
                // Boxed, or every request would have room for it, whatever it asks.
                let answer = Box::pin(cluster.decide(charges, deadline)).await;
                return answer.map_err(|failure| self.unavailable(failure.word()));
            }
        };
        let health = &self.context.health;
        let failure = match queue.ask(charges, deadline).await {
            Ok(decision) => {
                health.answered();
                return Ok(decision);
            }
            Err(failure) => failure,
        };
        match failure {
            Failure::WrongType(position) => {
                health.foreign(|| self.context.script.counter_at(charges, position));
            }
            failure => health.failed(failure),
        }
        Err(self.unavailable(failure.word()))
    }

    /// Puts charges right, in calls that each take Redis no longer than decisions do, and have `timeout` for their
    /// answer. One that fails doesn't keep the others from being made.
    ///
    /// # Errors
    /// What was not put right, and why the last of it.
    pub async fn amend(&self, late: &[Late<'_>]) -> Result<(), Untold> {
        let failed = match &self.way {
            Way::One(link, _) => self.amend_one(link, late).await,
            Way::Cluster(cluster) => cluster.amend(late).await,
        };
        let Some((_, failure)) = failed.last() else {
            return Ok(());
        };
        let mut places: Vec<usize> = failed
            .iter()
            .flat_map(|(places, _)| places.iter().copied())
            .collect();
        places.sort_unstable();
        Err(Untold {
            why: self.unavailable(failure.word()),
            places,
        })
    }

    /// The same on one server: the places that each failed call had in the list.
    async fn amend_one(&self, link: &Link, late: &[Late<'_>]) -> Vec<(Vec<usize>, Failure)> {
        let (calls, mut told) = (calls(late), Vec::new());
        for calls in calls.chunks(LATE_CALLS) {
            let commands: Vec<Cmd> = calls
                .iter()
                .map(|late| self.context.script.amend(late, None))
                .collect();
            told.extend(self.tell(link, &commands).await);
        }
        untold(&calls, told)
    }

    /// Runs some programs that put charges right, in order. A slow server answers one after the other: each has the time
    /// of those in front of it, too.
    async fn tell(&self, link: &Link, commands: &[Cmd]) -> Vec<Result<(), Failure>> {
        let state = link.state();
        let live = match &*state {
            State::Up(live) => live,
            State::Down(failure) => return vec![Err(*failure); commands.len()],
        };
        let within = self.context.settings.timeout;
        let answers = (1..)
            .zip(commands)
            .map(|(turn, command)| timeout(within * turn, live.run(command)));
        let replies = join_all(answers).await;
        let told: Vec<_> = replies
            .into_iter()
            .map(|reply| reply.unwrap_or_else(|late| Err(late.into())).map(drop))
            .collect();
        // A server that hangs once has failed once.
        if let Some(failure) = told.iter().find_map(|told| told.err()) {
            self.context.health.failed(failure);
            live.failed(failure);
        }
        told
    }

    /// Whether the charges are asked of several servers, each of which knows its part only.
    pub fn is_split(&self, charges: &[Charge<'_>]) -> bool {
        matches!(self.way, Way::Cluster(_)) && cluster::is_split(charges)
    }

    /// The store's answer when Redis gives none: it is asked again after the next probe at the earliest.
    pub fn unavailable(&self, kind: &'static str) -> Unavailable {
        let probe_us = self.context.settings.probe_interval.as_micros();
        Unavailable {
            kind,
            retry_after_us: u64::try_from(probe_us).unwrap_or(u64::MAX),
        }
    }
}

/// Where, for people: the addresses, and what stands there if it isn't one server.
impl fmt::Display for RedisSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.topology {
            Topology::Standalone => {}
            Topology::Sentinel { master, .. } => write!(f, "{master} by sentinels ")?,
            Topology::Cluster => f.write_str("cluster ")?,
        }
        let addresses: Vec<String> = self.servers.iter().map(ToString::to_string).collect();
        f.write_str(&addresses.join(", "))
    }
}

impl Password {
    pub fn new(text: String) -> Self {
        Self(text)
    }

    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Password {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}
