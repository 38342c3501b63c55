//! The assembler: the only place that knows all rooms. Starts them, and ends them in order.

use crate::clock::Clock;
use crate::config::{Config, Sources, StoreSettings};
use crate::enforcer::Enforcer;
use crate::proxy::{self, Server, Service, SetupError, Stop, Upstream};
use crate::reload::Reloader;
use crate::store::redis::{self, Redis};
use crate::store::{Memory, Store};
use arc_swap::ArcSwap;
use std::io;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::rc::Rc;
use std::sync::Arc;
use tokio::runtime::{Builder, LocalOptions};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

/// Why the proxy could not run, or stopped running.
#[derive(Debug, thiserror::Error)]
enum AppError {
    #[error("cannot listen on {address}: {cause}")]
    Listen { address: SocketAddr, cause: io::Error },
    #[error("upstream: {0}")]
    Upstream(#[from] SetupError),
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// Runs the proxy until it is told to stop. `on_listening` hears the address once clients can connect.
pub fn main(config: Config, sources: Sources, on_listening: impl FnOnce(SocketAddr)) -> ExitCode {
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
    on_listening: impl FnOnce(SocketAddr),
) -> Result<(), AppError> {
    let stop = stop_on_signals()?;
    for warning in &config.warnings {
        tracing::warn!("{}", warning.line());
    }
    let server = Server::bind(&config.listen)
        .map_err(|cause| AppError::Listen { address: config.listen.address, cause })?;
    let address = server.local_addr()?;
    let upstream = proxy::Shared::new(config.upstream.clone(), config.listen.threads)?;
    let stores = Stores::new(&config.store);
    let table = Arc::new(ArcSwap::from(Arc::clone(&config.table)));
    let reloader = tokio::task::spawn_local(Reloader::new(sources, &config, Arc::clone(&table)).run());

    let (shutdown, workers, policies) =
        (config.shutdown, config.listen.threads, config.table.policies().len());
    let upstream_url = config.upstream.url.to_string();
    let store = match &config.store {
        StoreSettings::Memory(_) => "memory".to_owned(),
        StoreSettings::Redis(redis) => format!("redis {}:{}", redis.host, redis.port),
    };
    let config = Arc::new(config);
    let make_service = move |_worker| {
        let (config, stores) = (Arc::clone(&config), stores.clone());
        let (table, upstream) = (Arc::clone(&table), Arc::clone(&upstream));
        async move {
            let enforcer = Enforcer::new(table, stores.for_worker().await);
            let service = Service::new(enforcer, Upstream::new(upstream), &config.listen, &config.log);
            Rc::new(service)
        }
    };
    let listening = move || {
        tracing::info!(%address, upstream = upstream_url, store, policies, workers, version = env!("CARGO_PKG_VERSION"), "listening");
        on_listening(address);
    };
    let cut = server.run(make_service, shutdown, stop, listening).await?;
    reloader.abort();
    tracing::info!(connections_cut = cut, "stopped");
    Ok(())
}

/// What the workers' stores have in common.
#[derive(Clone)]
enum Stores {
    Memory(Arc<Memory>),
    Redis(redis::Shared),
}

impl Stores {
    fn new(settings: &StoreSettings) -> Self {
        match settings {
            StoreSettings::Memory(settings) => {
                Self::Memory(Arc::new(Memory::new(*settings, Clock::system())))
            }
            StoreSettings::Redis(settings) => Self::Redis(redis::Shared::new(settings.clone())),
        }
    }

    /// One worker's store, on the worker's runtime. Redis gets `connect_timeout` to be there; without it
    /// the worker starts degraded.
    async fn for_worker(&self) -> Store {
        match self {
            Self::Memory(memory) => Store::Memory(Arc::clone(memory)),
            Self::Redis(shared) => {
                let redis = Redis::start(shared);
                redis.first_ready().await;
                Store::redis(redis)
            }
        }
    }
}

/// SIGTERM and Ctrl-C ask for an orderly end; a second one for an immediate end.
fn stop_on_signals() -> io::Result<watch::Receiver<Stop>> {
    let (tell, stop) = watch::channel(Stop::Run);
    let (mut term, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
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
    Ok(stop)
}
