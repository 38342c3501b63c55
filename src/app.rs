//! The assembler: the only place that knows all rooms. Starts them, and ends them in order.

mod admin_view;
pub(crate) mod explanation;
pub(crate) mod key_status;
pub(crate) mod limit_json;

use crate::admin::{self, AdminBackend};
use crate::clock::Clock;
use crate::config::{Config, ConfigSources, StoreSettings};
use crate::enforcer::{ActivePolicies, Enforcer};
use crate::listen::ListenAddress;
use crate::proxy::{
    self, ListenSettings, ListenerKind, ProxyHeaderError, ProxyServer, ProxyService,
    ShutdownSignal, TlsHandshakeError, UpstreamClient, UpstreamErrorKind, UpstreamUrlError,
};
use crate::reload::ConfigReloader;
use crate::store::redis::{self, RedisStore};
use crate::store::{LeasePool, MemoryStore, Store};
use crate::telemetry::history::TrafficHistory;
use crate::telemetry::metrics::{ErrorKindLabels, Metrics, RedisServerMetrics};
use crate::telemetry::trace::Tracer;
use crate::tls;
use admin_view::AdminViewState;
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

/// How often the past is noted.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(1);

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
    Upstream(#[from] UpstreamUrlError),
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// Where a running proxy is to be found.
#[derive(Clone, Debug)]
pub struct ListeningAddresses {
    pub proxy: ListenAddress,
    pub admin: ListenAddress,
}

/// Runs the proxy until it is told to stop. `on_listening` hears the addresses once clients can connect.
pub fn main(
    config: Config,
    sources: ConfigSources,
    on_listening: impl FnOnce(ListeningAddresses),
) -> ExitCode {
    let result = Builder::new_current_thread()
        .enable_all()
        .build_local(LocalOptions::default())
        .map_err(AppError::Io)
        .and_then(|runtime| runtime.block_on(run_proxy(config, sources, on_listening)));
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(%error, "tidegate cannot run");
            ExitCode::FAILURE
        }
    }
}

async fn run_proxy(
    config: Config,
    sources: ConfigSources,
    on_listening: impl FnOnce(ListeningAddresses),
) -> Result<(), AppError> {
    let started_at = Instant::now();
    let (shutdown_handle, stop) = install_signal_handlers()?;
    for warning in &config.warnings {
        tracing::warn!("{}", warning.to_line());
    }
    let tls = tls::ReloadableServerTls::new(config.tls.clone().into());
    let mut server = ProxyServer::with_threads(config.listen.threads);
    let mut open_listener = |kind, listen: &ListenSettings, tls: &tls::ReloadableServerTls| {
        let listener = server.add_listener(kind, listen, Arc::clone(tls));
        listener.map_err(|cause| AppError::Listen {
            address: listen.address.clone(),
            cause,
        })
    };
    let mut listeners = ListenerSet::default();
    if config.has_upstream {
        listeners.push(
            ListenerKind::Proxy,
            open_listener(ListenerKind::Proxy, &config.listen, &tls)?,
            &tls,
        );
    }
    for settings in &config.service_listeners {
        let tls = tls::ReloadableServerTls::new(settings.tls.clone().into());
        listeners.push(
            settings.kind,
            open_listener(settings.kind, &settings.listen, &tls)?,
            &tls,
        );
    }
    let address = server.address()?;
    let upstream = proxy::UpstreamSharedState::new(config.upstream.clone(), config.listen.threads)?;
    let store_backend = StoreBackend::new(&config.store);
    let tracing = config
        .trace
        .as_ref()
        .map(|settings| Tracer::start(settings, redis::instance_id()))
        .transpose()?;
    let (tracer, exporter) = tracing.unzip();
    let kinds = ErrorKindLabels {
        upstream_errors: UpstreamErrorKind::NAMES,
        tls_errors: TlsHandshakeError::NAMES,
        proxy_header_errors: ProxyHeaderError::NAMES,
    };
    let metrics = Metrics::new(config.listen.threads, kinds);
    let active_policies =
        ActivePolicies::new(Arc::clone(&config.policy_table), Arc::clone(&metrics));
    let (tls_listeners, reloadable_upstream) = (listeners.clone(), Arc::clone(&upstream));
    let policy_descriptions = Arc::new(ArcSwap::from_pointee(config.policy_descriptions.clone()));
    let published_descriptions = Arc::clone(&policy_descriptions);
    let publish = Box::new(move |config: &Config| {
        published_descriptions.store(Arc::new(config.policy_descriptions.clone()));
        tls_listeners.publish_tls(config);
        reloadable_upstream.update_tls(config.upstream.tls.as_ref());
    });
    let reloader = ConfigReloader::new(sources, &config, active_policies.clone(), publish);
    let listening = Arc::new(AtomicBool::new(false));
    let view_state = AdminViewState {
        stop: stop.clone(),
        shutdown_handle,
        shutdown: config.shutdown,
        is_listening: Arc::clone(&listening),
        load: server.load(),
        max_connections: config.listen.max_connections,
        workers: config.listen.threads,
        store_backend: store_backend.clone(),
        reload_status: reloader.status(),
        active_policies: active_policies.clone(),
        policy_descriptions,
        listeners: listeners.clone(),
        tracer: tracer.clone(),
        started_at,
    };
    let history = Arc::new(TrafficHistory::new(Arc::clone(&metrics)));
    tokio::task::spawn_local(sample_history(
        Arc::clone(&history),
        Arc::clone(&metrics),
        active_policies.clone(),
    ));
    // Before the proxy: who asks why it does not start gets an answer.
    let admin = start_admin(&config, view_state.into_view(Arc::clone(&metrics), history))?;
    let reloader = tokio::task::spawn_local(reloader.run());

    let (shutdown, workers, policies) = (
        config.shutdown,
        config.listen.threads,
        config.policy_table.policies().len(),
    );
    let upstream_url = config.has_upstream.then(|| config.upstream.url.to_string());
    let store = match &config.store {
        StoreSettings::Memory(_) => "memory".to_owned(),
        StoreSettings::Redis(redis) => format!("redis {redis}"),
    };
    let is_tls = listeners
        .0
        .first()
        .is_some_and(|(_, _, tls)| tls.load().is_some());
    let config = Arc::new(config);
    let stop_receiver = stop.clone();
    let make_service = move |worker| {
        let (config, store_backend) = (Arc::clone(&config), store_backend.clone());
        let (active_policies, upstream, tracer) = (
            active_policies.clone(),
            Arc::clone(&upstream),
            tracer.clone(),
        );
        let stop = stop_receiver.clone();
        let shard = metrics.worker_metrics(worker);
        async move {
            let enforcer = Enforcer::new(
                active_policies,
                store_backend.open_for_worker().await,
                Arc::clone(&shard),
            );
            let upstream = UpstreamClient::new(upstream);
            let service = ProxyService::new(enforcer, upstream, &config.listen, &config.log, shard)
                .with_tracer(tracer);
            Rc::new(
                service
                    .with_denied_status(config.ext_authz_denied_status)
                    .with_shutdown_signal(stop),
            )
        }
    };
    let on_listening = move || {
        listening.store(true, Ordering::Relaxed);
        for (door, address, _) in &listeners.0 {
            match door {
                ListenerKind::Proxy => {}
                ListenerKind::RateLimitService => {
                    tracing::info!(%address, "rate-limit service listening")
                }
                ListenerKind::ExtAuthz => tracing::info!(%address, "check listening"),
            }
        }
        let tls = is_tls;
        tracing::info!(%address, tls, upstream = upstream_url, store, policies, workers, version = env!("CARGO_PKG_VERSION"), "listening");
        on_listening(ListeningAddresses {
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
struct ListenerSet(Vec<(ListenerKind, ListenAddress, tls::ReloadableServerTls)>);

impl ListenerSet {
    fn push(&mut self, door: ListenerKind, address: ListenAddress, tls: &tls::ReloadableServerTls) {
        self.0.push((door, address, Arc::clone(tls)));
    }

    /// Sessions live as long as what they were made under: only a change ends them.
    fn publish_tls(&self, config: &Config) {
        for (door, address, current) in &self.0 {
            let (table, new) = match door {
                ListenerKind::Proxy => ("listen", Some(config.tls.as_ref())),
                ListenerKind::RateLimitService => ("rls", config.listener_tls(*door)),
                ListenerKind::ExtAuthz => ("check", config.listener_tls(*door)),
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
    fn certificate_expiries(&self) -> Vec<(String, u64)> {
        let all_expiries = self.0.iter().flat_map(|(_, _, tls)| {
            tls.load()
                .as_ref()
                .map(|tls| tls.certificate_expiries().to_vec())
                .unwrap_or_default()
        });
        let mut expiries: Vec<_> = all_expiries.collect();
        expiries.sort_unstable();
        expiries.dedup();
        expiries
    }
}

/// Notes the past, for ever.
async fn sample_history(
    history: Arc<TrafficHistory>,
    metrics: Arc<Metrics>,
    active_policies: ActivePolicies,
) {
    let clock = Clock::system();
    let mut ticks = interval(SAMPLE_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let now_s = clock.now_us() / 1_000_000;
        let (history, metrics, live) = (
            Arc::clone(&history),
            Arc::clone(&metrics),
            active_policies.clone(),
        );
        // Aside: of ten thousand policies it takes milliseconds, and this thread accepts connections.
        let sample_task = tokio::task::spawn_blocking(move || {
            history.sample(now_s, live.load_snapshot().tallies().iter());
            metrics.top_refusals().rotate_generations(now_s);
        });
        if let Err(error) = sample_task.await {
            tracing::error!(%error, "the past can't be noted");
        }
    }
}

/// Takes the admin port's addresses and answers there until the process ends. Returns the first.
fn start_admin(config: &Config, view: AdminBackend) -> Result<ListenAddress, AppError> {
    let settings = config.admin.clone();
    let listen_error = |key, address| {
        move |cause| AppError::Admin {
            key,
            address,
            cause,
        }
    };
    if let Some(address) = settings.probes {
        let probes = admin::AdminListener::bind_probes(address, view.clone());
        let probes = probes.map_err(listen_error("admin.probes", ListenAddress::Ip(address)))?;
        tracing::info!(address = %probes.address(), "probes listening");
        tokio::task::spawn_local(probes.run());
    }
    let address = settings.address.clone();
    let admin = admin::AdminListener::bind_admin(settings, view)
        .map_err(listen_error("admin.address", address))?;
    let address = admin.address().clone();
    tracing::info!(%address, "admin listening");
    tokio::task::spawn_local(admin.run());
    Ok(address)
}

/// What the workers' stores have in common.
#[derive(Clone)]
pub(crate) enum StoreBackend {
    Memory(Arc<MemoryStore>),
    Redis(redis::SharedRedisState, Arc<LeasePool>),
}

impl StoreBackend {
    pub(crate) fn new(settings: &StoreSettings) -> Self {
        match settings {
            StoreSettings::Memory(settings) => {
                Self::Memory(Arc::new(MemoryStore::new(*settings, Clock::system())))
            }
            StoreSettings::Redis(settings) => Self::Redis(
                redis::SharedRedisState::new((**settings).clone()),
                Arc::default(),
            ),
        }
    }

    /// A store for a look from beside: over connections of its own, and no instance among those that share limits.
    pub(crate) async fn open_for_inspection(&self) -> Store {
        match self {
            Self::Memory(memory) => Store::Memory(Arc::clone(memory)),
            Self::Redis(shared, _) => {
                let redis =
                    RedisStore::start(&redis::SharedRedisState::new(shared.settings().clone()));
                redis.wait_until_ready().await;
                Store::redis(redis)
            }
        }
    }

    /// What Redis was last seen to say of itself, if it is the store.
    fn redis_server_info(&self) -> Option<RedisServerMetrics> {
        match self {
            Self::Memory(_) => None,
            Self::Redis(redis, _) => Some(redis.server_info()),
        }
    }

    /// One worker's store, on the worker's runtime. Redis gets `connect_timeout` to be there; without it
    /// the worker starts degraded.
    pub(crate) async fn open_for_worker(&self) -> Store {
        match self {
            Self::Memory(memory) => Store::Memory(Arc::clone(memory)),
            Self::Redis(shared, leases) => {
                let redis = RedisStore::start(shared).join_membership();
                redis.wait_until_ready().await;
                Store::redis(redis).with_leases(leases)
            }
        }
    }
}

/// Asks for an orderly end.
#[derive(Clone, Debug)]
struct ShutdownHandle(watch::Sender<ShutdownSignal>);

impl ShutdownHandle {
    /// Does nothing if the end has begun already.
    fn begin_drain(&self, asked_by: &str) {
        let is_first_request = self.0.send_if_modified(|state| {
            let is_first_request = *state < ShutdownSignal::Drain;
            if is_first_request {
                *state = ShutdownSignal::Drain;
            }
            is_first_request
        });
        if is_first_request {
            tracing::info!(asked_by, "stopping; requests in flight may finish");
        }
    }
}

/// SIGTERM and Ctrl-C ask for an orderly end; a second one for an immediate end.
fn install_signal_handlers() -> io::Result<(ShutdownHandle, watch::Receiver<ShutdownSignal>)> {
    let (sender, stop) = watch::channel(ShutdownSignal::Run);
    let shutdown_handle = ShutdownHandle(sender.clone());
    let (mut term, mut interrupt) = (
        signal(SignalKind::terminate())?,
        signal(SignalKind::interrupt())?,
    );
    tokio::task::spawn_local(async move {
        for stop_mode in [ShutdownSignal::Drain, ShutdownSignal::Immediate] {
            let name = tokio::select! {
                _ = term.recv() => "SIGTERM",
                _ = interrupt.recv() => "SIGINT",
            };
            match stop_mode {
                ShutdownSignal::Immediate => tracing::info!(signal = name, "stopping at once"),
                _ => tracing::info!(signal = name, "stopping; requests in flight may finish"),
            }
            sender.send_replace(stop_mode);
        }
        // The sender stays: its end would ask for a drain.
        std::future::pending::<()>().await;
    });
    Ok((shutdown_handle, stop))
}
