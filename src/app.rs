//! Assembles the proxy: this is the only module that knows all others. It starts and stops them in
//! order.

mod admin_view;
pub(crate) mod descriptor_limit;
pub(crate) mod doctor;
pub(crate) mod explanation;
pub(crate) mod key_status;
mod listener_set;
pub(crate) mod override_store;
pub(crate) mod overrides;
mod shutdown;
mod store_backend;

pub(crate) use store_backend::StoreBackend;

use crate::admin::{self, AdminBackend, ReloadableAdminToken};
use crate::clock::Clock;
use crate::config::{Config, ConfigSources, PolicyDescription, StoreSettings};
use crate::enforcer::{ActivePolicies, DecisionSource, Enforcer, PolicyDecision, RequestDecision};
use crate::jwks::KeyFetcher;
use crate::listen::ListenAddress;
use crate::proxy::{
    BLOCKING_THREAD_KEEP_ALIVE, ConnectionCloseReason, ProxyHeaderError, ProxyServer, ProxyService,
    RlsCallResult, ShutdownSignal, TlsHandshakeError, UPSTREAM_FAULTS, UpstreamClient,
    UpstreamErrorKind, UpstreamSharedState, UpstreamUrlError, start_blocking_thread,
};
use crate::reload::{ConfigPublisher, ConfigReloader, CredentialPublisher};
use crate::store::redis;
use crate::telemetry::history::TrafficHistory;
use crate::telemetry::metrics::{MetricLabels, Metrics, start_metric_export};
use crate::telemetry::otlp::{ExportHandle, read_resource};
use crate::telemetry::trace::Tracer;
use admin_view::{AdminViewState, StoreLookups};
use arc_swap::ArcSwap;
use futures_util::future::OptionFuture;
use listener_set::ListenerSet;
use shutdown::install_signal_handlers;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use strum::VariantNames;
use tokio::runtime::{Builder, LocalOptions};
use tokio::sync::watch;

/// Why the proxy could not start, or stopped with an error.
#[derive(Debug, thiserror::Error)]
enum AppError {
    #[error(
        "cannot listen on {address}: {cause}. Stop what uses the address, or choose another one: \
         listen.address, or --listen"
    )]
    Listen {
        address: ListenAddress,
        cause: io::Error,
    },
    #[error(
        "the admin endpoint cannot listen on {address}: {cause}. Set another {key}, or a free port by \
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

/// Addresses of a running proxy.
#[derive(Clone, Debug)]
pub struct ListeningAddresses {
    pub proxy: ListenAddress,
    pub admin: ListenAddress,
}

/// Runs the proxy until it is stopped. Calls `on_listening` with the addresses once clients can
/// connect.
pub fn main(
    config: Config,
    sources: ConfigSources,
    on_listening: impl FnOnce(ListeningAddresses),
) -> ExitCode {
    let result = Builder::new_current_thread()
        .enable_all()
        .thread_keep_alive(BLOCKING_THREAD_KEEP_ALIVE)
        .build_local(LocalOptions::default())
        .map_err(AppError::Io)
        .and_then(|runtime| {
            runtime.block_on(async {
                start_blocking_thread()?;
                run_proxy(config, sources, on_listening).await
            })
        });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(%error, "tidegate cannot run");
            ExitCode::FAILURE
        }
    }
}

async fn run_proxy(
    mut config: Config,
    sources: ConfigSources,
    on_listening: impl FnOnce(ListeningAddresses),
) -> Result<(), AppError> {
    let started_at = Instant::now();
    let (shutdown, stop) = install_signal_handlers()?;
    for warning in config.warning_lines() {
        tracing::warn!("{warning}");
    }
    descriptor_limit::fit_connections_to_descriptors(&mut config);
    let mut server = ProxyServer::with_worker_threads(config.listen.threads);
    let listeners = ListenerSet::open(&mut server, &config)?;
    let (config, address) = (Arc::new(config), server.first_listener_address()?);
    let tracing = config.trace.as_ref();
    let tracing =
        tracing.map(|settings| Tracer::start(settings, read_resource(redis::instance_id())));
    let (tracer, exporter) = tracing.transpose()?.unzip();
    let shared = Arc::new(SharedState::new(&config, tracer)?);
    if let Some(redis) = shared.store_backend.redis() {
        // The usage of an outage in which an earlier process stopped.
        redis.restore_usage();
    }
    shared.key_fetcher.attach_table(&config.policy_table);
    let publish = new_reload_publisher(&shared, &listeners);
    let publish_credentials = new_credential_publisher(&shared);
    let policies = shared.active_policies.clone();
    let reloader = ConfigReloader::new(sources, &config, policies, publish, publish_credentials);
    let is_listening = Arc::new(AtomicBool::new(false));
    let view_state = AdminViewState {
        shutdown,
        config: Arc::clone(&config),
        shared: Arc::clone(&shared),
        is_listening: Arc::clone(&is_listening),
        load: server.server_load(),
        reload_status: reloader.status(),
        listeners: listeners.clone(),
        started_at,
        lookups: StoreLookups::default(),
    };
    let history = Arc::new(TrafficHistory::new(Arc::clone(&shared.metrics)));
    // The admin endpoint starts before the proxy: it can show why the proxy does not start.
    let view = view_state.into_backend(Arc::clone(&history));
    let metric_exporter = start_metric_exporter(&config, &view);
    let admin = start_admin(&config, shared.admin_token.clone(), view)?;
    if let Some(redis) = shared.store_backend.redis() {
        redis.describe_member(admin_view::describe_member(&config.admin, &admin));
    }
    let reloader = reloader.start(new_history_sampler(history, Arc::clone(&shared)))?;
    shared.key_fetcher.wait_for_first_keys().await;

    let (worker_config, worker_state) = (Arc::clone(&config), Arc::clone(&shared));
    let worker_stop = stop.clone();
    let make_service = move |worker| {
        let (config, shared) = (Arc::clone(&worker_config), Arc::clone(&worker_state));
        build_service(config, shared, worker_stop.clone(), worker)
    };
    let shutdown = config.shutdown;
    let on_listening = move || {
        is_listening.store(true, Ordering::Relaxed);
        log_start(&config, &listeners, &address);
        on_listening(ListeningAddresses {
            proxy: address,
            admin,
        });
    };
    let served = server.run(make_service, shutdown, stop, on_listening).await;
    // The usage is complete here: all workers have ended, so no further request is admitted.
    if let Some(redis) = shared.store_backend.redis() {
        redis.store_usage();
    }
    let cut = served?;
    reloader.abort();
    // The last exports together take two seconds at most.
    let spans = OptionFuture::from(exporter.map(ExportHandle::finish));
    let metrics = OptionFuture::from(metric_exporter.map(ExportHandle::finish));
    tokio::join!(spans, metrics);
    tracing::info!(connections_cut = cut, "stopped");
    Ok(())
}

/// Starts the export of metrics by OTLP, if it is configured.
fn start_metric_exporter(config: &Config, view: &AdminBackend) -> Option<ExportHandle> {
    let settings = config.metric_export.clone()?;
    let (state, metrics) = (Arc::clone(&view.state), Arc::clone(&view.metrics));
    let read_status = Arc::new(move || state.read_status());
    let resource = read_resource(redis::instance_id());
    Some(start_metric_export(
        settings,
        resource,
        metrics,
        read_status,
    ))
}

/// State that all workers and the admin endpoint share.
struct SharedState {
    upstream: Arc<UpstreamSharedState>,
    store_backend: StoreBackend,
    metrics: Arc<Metrics>,
    tracer: Option<Tracer>,
    admin_token: ReloadableAdminToken,
    key_fetcher: KeyFetcher,
    active_policies: ActivePolicies,
    /// Descriptions of the policies that were loaded last.
    policy_descriptions: ArcSwap<Vec<PolicyDescription>>,
}

impl SharedState {
    fn new(config: &Config, tracer: Option<Tracer>) -> Result<Self, UpstreamUrlError> {
        let (metrics, workers) = (new_metrics(config), config.listen.threads);
        Ok(Self {
            upstream: UpstreamSharedState::new(config.upstream.clone(), workers)?,
            store_backend: StoreBackend::new(&config.store),
            active_policies: ActivePolicies::new(
                &config.policy_table,
                Arc::clone(&metrics),
                workers,
            ),
            policy_descriptions: ArcSwap::from_pointee(config.policy_descriptions.clone()),
            metrics,
            tracer,
            admin_token: ReloadableAdminToken::new(config.admin.token.clone()),
            key_fetcher: KeyFetcher::on_current_runtime(),
        })
    }
}

fn new_metrics(config: &Config) -> Arc<Metrics> {
    let labels = MetricLabels {
        decision_sources: DecisionSource::VARIANTS,
        request_decisions: RequestDecision::LABELS,
        policy_decisions: &PolicyDecision::LABELS,
        degraded_outcomes: &PolicyDecision::DEGRADED_OUTCOMES,
        policy_history: PolicyDecision::HISTORY_SERIES,
        upstream_errors: UpstreamErrorKind::VARIANTS,
        upstream_faults: &UPSTREAM_FAULTS,
        tls_errors: TlsHandshakeError::VARIANTS,
        proxy_header_errors: ProxyHeaderError::VARIANTS,
        close_reasons: ConnectionCloseReason::VARIANTS,
        rls_call_results: RlsCallResult::VARIANTS,
    };
    Metrics::with_export(
        config.listen.threads,
        labels,
        config.metric_export.is_some(),
    )
}

/// Returns a function that applies the settings of a reloaded configuration that are not policies.
fn new_reload_publisher(shared: &Arc<SharedState>, listeners: &ListenerSet) -> ConfigPublisher {
    let (listeners, shared) = (listeners.clone(), Arc::clone(shared));
    Box::new(move |config: &Config| {
        shared.key_fetcher.attach_table(&config.policy_table);
        let descriptions = config.policy_descriptions.clone();
        shared.policy_descriptions.store(Arc::new(descriptions));
        listeners.update_tls(config);
        shared.upstream.update_tls(config.upstream.tls.as_ref());
    })
}

/// Returns a function that applies credentials whose files have changed.
fn new_credential_publisher(shared: &Arc<SharedState>) -> CredentialPublisher {
    let shared = Arc::clone(shared);
    Box::new(move |credentials| {
        shared.admin_token.replace(credentials.admin_token.clone());
        if let (Some(redis), Some(newer)) = (shared.store_backend.redis(), &credentials.redis) {
            redis.update_logins(newer);
        }
    })
}

/// Builds the service of one worker, on that worker's runtime.
async fn build_service(
    config: Arc<Config>,
    shared: Arc<SharedState>,
    stop: watch::Receiver<ShutdownSignal>,
    worker: usize,
) -> Rc<ProxyService> {
    let metrics = shared.metrics.worker_metrics(worker);
    let enforcer = Enforcer::new(
        shared.active_policies.for_worker(worker),
        shared.store_backend.open_for_worker().await,
        Arc::clone(&metrics),
    );
    let upstream = UpstreamClient::new(Arc::clone(&shared.upstream));
    let service = ProxyService::new(
        enforcer,
        upstream,
        (&config.listen, config.ext_authz),
        &config.log,
        (metrics, shared.tracer.clone()),
        stop,
    );
    Rc::new(service)
}

fn log_start(config: &Config, listeners: &ListenerSet, address: &ListenAddress) {
    let (workers, policies) = (config.listen.threads, config.policy_table.policies().len());
    let upstream = config.has_upstream.then(|| config.upstream.url.to_string());
    let store = match &config.store {
        StoreSettings::Memory(_) => "memory".to_owned(),
        StoreSettings::Redis(redis) => format!("redis {redis}"),
    };
    let tls = listeners.first_listener_has_tls();
    listeners.log_service_addresses();
    tracing::info!(%address, tls, upstream, store, policies, workers, version = env!("CARGO_PKG_VERSION"), "listening");
}

/// Returns a function that samples the traffic history and rotates the rejection counters, once in
/// each second. With ten thousand policies it takes milliseconds.
fn new_history_sampler(
    history: Arc<TrafficHistory>,
    shared: Arc<SharedState>,
) -> impl FnMut() + Send + 'static {
    let clock = Clock::system();
    let mut sampled_at_s = 0;
    move || {
        let now_s = clock.now_us() / 1_000_000;
        if std::mem::replace(&mut sampled_at_s, now_s) == now_s {
            return;
        }
        let sample = AssertUnwindSafe(|| {
            let snapshot = shared.active_policies.load_snapshot();
            history.sample(now_s, snapshot.counters().iter());
            let rejections = &shared.metrics.top_rejections;
            rejections.rotate_generations_if_due(now_s);
        });
        if catch_unwind(sample).is_err() {
            tracing::error!("failed to sample the traffic history");
        }
    }
}

/// Binds the addresses of the admin endpoint and serves them until the process ends. Returns the
/// main address.
fn start_admin(
    config: &Config,
    token: ReloadableAdminToken,
    view: AdminBackend,
) -> Result<ListenAddress, AppError> {
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
        tracing::info!(address = %probes.address, "probes listening");
        tokio::task::spawn_local(probes.run());
    }
    let address = settings.address.clone();
    let admin = admin::AdminListener::bind_admin(settings, token, view)
        .map_err(listen_error("admin.address", address))?;
    let address = admin.address.clone();
    tracing::info!(%address, "admin listening");
    tokio::task::spawn_local(admin.run());
    Ok(address)
}
