//! The assembler: the only place that knows all rooms. Starts them, and ends them in order.

pub(crate) mod explain;
pub(crate) mod keys;
pub(crate) mod limits;
mod view;

use crate::admin::{self, View};
use crate::clock::Clock;
use crate::config::{Config, Sources, StoreSettings};
use crate::enforcer::{Enforcer, Live};
use crate::listen::ListenAddress;
use crate::proxy::{
    self, Door, ListenSettings, ProxyHeaderFault, Server, Service, SetupError, Stop, TlsFault,
    Upstream, UpstreamErrorKind,
};
use crate::reload::Reloader;
use crate::store::redis::{self, Redis};
use crate::store::{Leases, Memory, Store};
use crate::telemetry::history::History;
use crate::telemetry::metrics::{Kinds, Metrics, RedisVitals};
use crate::tls;
use crate::trace::Tracer;
use arc_swap::ArcSwap;
use std::io;
use std::process::ExitCode;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::runtime::{Builder, LocalOptions};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};
use view::Watched;

/// How often the past is noted.
const SAMPLING: Duration = Duration::from_secs(1);

/// Why the proxy could not run, or stopped running.
#[derive(Debug, thiserror::Error)]
enum AppError {
    #[error("cannot listen on {address}: {cause}")]
    Listen {
        address: ListenAddress,
        cause: io::Error,
    },
    #[error(
        "the admin port cannot listen on {address}: {cause}. Set another {key}, or a free port by \
         \"127.0.0.1:0\" (environment: TIDEGATE_ADMIN__ADDRESS)"
    )]
    Admin {
        key: &'static str,
        address: ListenAddress,
        cause: io::Error,
    },
    #[error("upstream: {0}")]
    Upstream(#[from] SetupError),
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// Where a running proxy is to be found.
#[derive(Clone, Debug)]
pub struct Addresses {
    pub proxy: ListenAddress,
    pub admin: ListenAddress,
}

/// Runs the proxy until it is told to stop. `on_listening` hears the addresses once clients can connect.
pub fn main(config: Config, sources: Sources, on_listening: impl FnOnce(Addresses)) -> ExitCode {
    let ran = Builder::new_current_thread()
        .enable_all()
        .build_local(LocalOptions::default())
        .map_err(AppError::Io)
        .and_then(|runtime| runtime.block_on(run(config, sources, on_listening)));
    match ran {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(%error, "tidegate cannot run");
            ExitCode::FAILURE
        }
    }
}

async fn run(
    config: Config,
    sources: Sources,
    on_listening: impl FnOnce(Addresses),
) -> Result<(), AppError> {
    let started = Instant::now();
    let (stopper, stop) = stop_on_signals()?;
    for warning in &config.warnings {
        tracing::warn!("{}", warning.line());
    }
    let tls = tls::Current::new(config.tls.clone().into());
    let mut server = Server::of(config.listen.threads);
    let mut open = |door, listen: &ListenSettings, tls: &tls::Current| {
        let opened = server.open(door, listen, Arc::clone(tls));
        opened.map_err(|cause| AppError::Listen {
            address: listen.address.clone(),
            cause,
        })
    };
    let mut doors = Doors::default();
    if config.forwards {
        doors.push(Door::Proxy, open(Door::Proxy, &config.listen, &tls)?, &tls);
    }
    for settings in &config.doors {
        let tls = tls::Current::new(settings.tls.clone().into());
        doors.push(
            settings.door,
            open(settings.door, &settings.listen, &tls)?,
            &tls,
        );
    }
    let address = server.address()?;
    let upstream = proxy::Shared::new(config.upstream.clone(), config.listen.threads)?;
    let stores = Stores::new(&config.store);
    let tracing = config
        .trace
        .as_ref()
        .map(|settings| Tracer::start(settings, redis::instance()))
        .transpose()?;
    let (tracer, exporter) = tracing.unzip();
    let kinds = Kinds {
        upstream_errors: UpstreamErrorKind::NAMES,
        tls_faults: TlsFault::NAMES,
        proxy_header_faults: ProxyHeaderFault::NAMES,
    };
    let metrics = Metrics::new(config.listen.threads, kinds);
    let live = Live::new(Arc::clone(&config.table), Arc::clone(&metrics));
    let (tls_of, renewed) = (doors.clone(), Arc::clone(&upstream));
    let words = Arc::new(ArcSwap::from_pointee(config.words.clone()));
    let said = Arc::clone(&words);
    let publish = Box::new(move |config: &Config| {
        said.store(Arc::new(config.words.clone()));
        tls_of.publish_tls(config);
        renewed.renew(config.upstream.tls.as_ref());
    });
    let reloader = Reloader::new(sources, &config, live.clone(), publish);
    let listening = Arc::new(AtomicBool::new(false));
    let watched = Watched {
        stop: stop.clone(),
        stopper,
        shutdown: config.shutdown,
        listening: Arc::clone(&listening),
        load: server.load(),
        max_connections: config.listen.max_connections,
        workers: config.listen.threads,
        stores: stores.clone(),
        reload: reloader.status(),
        live: live.clone(),
        words,
        doors: doors.clone(),
        tracer: tracer.clone(),
        started,
    };
    let history = Arc::new(History::new(Arc::clone(&metrics)));
    tokio::task::spawn_local(sample(
        Arc::clone(&history),
        Arc::clone(&metrics),
        live.clone(),
    ));
    // Before the proxy: who asks why it does not start gets an answer.
    let admin = start_admin(&config, watched.into_view(Arc::clone(&metrics), history))?;
    let reloader = tokio::task::spawn_local(reloader.run());

    let (shutdown, workers, policies) = (
        config.shutdown,
        config.listen.threads,
        config.table.policies().len(),
    );
    let upstream_url = config.forwards.then(|| config.upstream.url.to_string());
    let store = match &config.store {
        StoreSettings::Memory(_) => "memory".to_owned(),
        StoreSettings::Redis(redis) => format!("redis {redis}"),
    };
    let is_tls = doors
        .0
        .first()
        .is_some_and(|(_, _, tls)| tls.load().is_some());
    let config = Arc::new(config);
    let told = stop.clone();
    let make_service = move |worker| {
        let (config, stores) = (Arc::clone(&config), stores.clone());
        let (live, upstream, tracer) = (live.clone(), Arc::clone(&upstream), tracer.clone());
        let stop = told.clone();
        let shard = metrics.shard(worker);
        async move {
            let enforcer = Enforcer::new(live, stores.for_worker().await, Arc::clone(&shard));
            let upstream = Upstream::new(upstream);
            let service =
                Service::new(enforcer, upstream, &config.listen, &config.log, shard).traced(tracer);
            Rc::new(
                service
                    .refusing_with(config.refused_status)
                    .stopped_by(stop),
            )
        }
    };
    let on_listening = move || {
        listening.store(true, Ordering::Relaxed);
        for (door, address, _) in &doors.0 {
            match door {
                Door::Proxy => {}
                Door::Rls => tracing::info!(%address, "rate-limit service listening"),
                Door::Check => tracing::info!(%address, "check listening"),
            }
        }
        let tls = is_tls;
        tracing::info!(%address, tls, upstream = upstream_url, store, policies, workers, version = env!("CARGO_PKG_VERSION"), "listening");
        on_listening(Addresses {
            proxy: address,
            admin,
        });
    };
    let cut = server
        .run(make_service, shutdown, stop, on_listening)
        .await?;
    reloader.abort();
    if let Some(exporter) = exporter {
        exporter.finish().await;
    }
    tracing::info!(connections_cut = cut, "stopped");
    Ok(())
}

/// What is served where, and how TLS is spoken there.
#[derive(Clone, Debug, Default)]
struct Doors(Vec<(Door, ListenAddress, tls::Current)>);

impl Doors {
    fn push(&mut self, door: Door, address: ListenAddress, tls: &tls::Current) {
        self.0.push((door, address, Arc::clone(tls)));
    }

    /// Sessions live as long as what they were made under: only a change ends them.
    fn publish_tls(&self, config: &Config) {
        for (door, address, current) in &self.0 {
            let (table, new) = match door {
                Door::Proxy => ("listen", Some(config.tls.as_ref())),
                Door::Rls => ("rls", config.tls_of(*door)),
                Door::Check => ("check", config.tls_of(*door)),
            };
            // A door that is gone stays open until a restart, as it was.
            let Some(new) = new.filter(|new| current.load().as_ref() != *new) else {
                continue;
            };
            current.store(new.cloned());
            match new {
                Some(_) => tracing::info!(%address, "new certificates: new connections see them"),
                None => {
                    tracing::warn!(%address, "no {table}.tls any more: new connections are in cleartext");
                }
            }
        }
    }

    /// When the certificates end that are shown.
    fn expiries(&self) -> Vec<(String, u64)> {
        let shown = self.0.iter().flat_map(|(_, _, tls)| {
            tls.load()
                .as_ref()
                .map(|tls| tls.expiries().to_vec())
                .unwrap_or_default()
        });
        let mut expiries: Vec<_> = shown.collect();
        expiries.sort_unstable();
        expiries.dedup();
        expiries
    }
}

/// Notes the past, for ever.
async fn sample(history: Arc<History>, metrics: Arc<Metrics>, live: Live) {
    let clock = Clock::system();
    let mut ticks = interval(SAMPLING);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let now_s = clock.now_us() / 1_000_000;
        let (history, metrics, live) = (Arc::clone(&history), Arc::clone(&metrics), live.clone());
        // Aside: of ten thousand policies it takes milliseconds, and this thread accepts connections.
        let noted = tokio::task::spawn_blocking(move || {
            history.sample(now_s, live.rules().tallies().iter());
            metrics.top().tick(now_s);
        });
        if let Err(error) = noted.await {
            tracing::error!(%error, "the past can't be noted");
        }
    }
}

/// Takes the admin port's addresses and answers there until the process ends. Returns the first.
fn start_admin(config: &Config, view: View) -> Result<ListenAddress, AppError> {
    let settings = config.admin.clone();
    let failed = |key, address| {
        move |cause| AppError::Admin {
            key,
            address,
            cause,
        }
    };
    if let Some(address) = settings.probes {
        let probes = admin::Listener::probes(address, view.clone());
        let probes = probes.map_err(failed("admin.probes", ListenAddress::Ip(address)))?;
        tracing::info!(address = %probes.address(), "probes listening");
        tokio::task::spawn_local(probes.run());
    }
    let address = settings.address.clone();
    let admin = admin::Listener::admin(settings, view).map_err(failed("admin.address", address))?;
    let address = admin.address().clone();
    tracing::info!(%address, "admin listening");
    tokio::task::spawn_local(admin.run());
    Ok(address)
}

/// What the workers' stores have in common.
#[derive(Clone)]
pub(crate) enum Stores {
    Memory(Arc<Memory>),
    Redis(redis::Shared, Arc<Leases>),
}

impl Stores {
    pub(crate) fn new(settings: &StoreSettings) -> Self {
        match settings {
            StoreSettings::Memory(settings) => {
                Self::Memory(Arc::new(Memory::new(*settings, Clock::system())))
            }
            StoreSettings::Redis(settings) => {
                Self::Redis(redis::Shared::new((**settings).clone()), Arc::default())
            }
        }
    }

    /// A store for a look from beside: over connections of its own, and no instance among those that share limits.
    pub(crate) async fn for_looking(&self) -> Store {
        match self {
            Self::Memory(memory) => Store::Memory(Arc::clone(memory)),
            Self::Redis(shared, _) => {
                let redis = Redis::start(&redis::Shared::new(shared.settings().clone()));
                redis.first_ready().await;
                Store::redis(redis)
            }
        }
    }

    /// What Redis was last seen to say of itself, if it is the store.
    fn vitals(&self) -> Option<RedisVitals> {
        match self {
            Self::Memory(_) => None,
            Self::Redis(redis, _) => Some(redis.vitals()),
        }
    }

    /// One worker's store, on the worker's runtime. Redis gets `connect_timeout` to be there; without it
    /// the worker starts degraded.
    pub(crate) async fn for_worker(&self) -> Store {
        match self {
            Self::Memory(memory) => Store::Memory(Arc::clone(memory)),
            Self::Redis(shared, leases) => {
                let redis = Redis::start(shared).join();
                redis.first_ready().await;
                Store::redis(redis).sharing(leases)
            }
        }
    }
}

/// Asks for an orderly end.
#[derive(Clone, Debug)]
struct Stopper(watch::Sender<Stop>);

impl Stopper {
    /// Does nothing if the end has begun already.
    fn drain(&self, asked_by: &str) {
        let begins = self.0.send_if_modified(|asked| {
            let begins = *asked < Stop::Drain;
            if begins {
                *asked = Stop::Drain;
            }
            begins
        });
        if begins {
            tracing::info!(asked_by, "stopping; requests in flight may finish");
        }
    }
}

/// SIGTERM and Ctrl-C ask for an orderly end; a second one for an immediate end.
fn stop_on_signals() -> io::Result<(Stopper, watch::Receiver<Stop>)> {
    let (tell, stop) = watch::channel(Stop::Run);
    let stopper = Stopper(tell.clone());
    let (mut term, mut interrupt) = (
        signal(SignalKind::terminate())?,
        signal(SignalKind::interrupt())?,
    );
    tokio::task::spawn_local(async move {
        for ask in [Stop::Drain, Stop::Now] {
            let name = tokio::select! {
                _ = term.recv() => "SIGTERM",
                _ = interrupt.recv() => "SIGINT",
            };
            match ask {
                Stop::Now => tracing::info!(signal = name, "stopping at once"),
                _ => tracing::info!(signal = name, "stopping; requests in flight may finish"),
            }
            tell.send_replace(ask);
        }
        // The sender stays: its end would ask for a drain.
        std::future::pending::<()>().await;
    });
    Ok((stopper, stop))
}
