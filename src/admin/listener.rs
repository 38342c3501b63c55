//! The admin port's sockets, and the bounds of what comes over them.

use super::access_control::AdminPeer;
use super::{AdminBackend, AdminSettings, routes};
use crate::listen::{BoundSocket, ListenAddress, SocketListener};
use axum::Router;
use http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{sleep, timeout};

/// Connections that the kernel completes before they are accepted.
const BACKLOG: i32 = 1024;
/// Of a Unix socket's file: its owner and group may connect. Who can, can look and end the proxy.
const UNIX_SOCKET_MODE: u32 = 0o660;
/// Whom a client of a Unix socket is taken for.
const LOCAL_PEER: AdminPeer = AdminPeer(IpAddr::V4(Ipv4Addr::LOCALHOST));
/// Connections at a time, per address: people, probes and scrapers are few.
const MAX_CONNECTIONS: usize = 64;
/// For a request head, and between requests.
const HEADER_TIMEOUT: Duration = Duration::from_secs(5);
/// Of a head: none needs more. Bodies have a bound of their own.
const MAX_HEAD_BYTES: usize = 16 << 10;
/// After this a connection ends with its next answer: who reads slowly holds no place for ever.
const MAX_CONNECTION_AGE: Duration = Duration::from_secs(60);
/// For that answer.
const FINAL_RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);
/// When the process has no file descriptors left, others have to close some first.
const ACCEPT_ERROR_BACKOFF: Duration = Duration::from_millis(50);

/// An address of the admin port, taken but not yet answered on.
#[derive(Debug)]
pub struct AdminListener {
    address: ListenAddress,
    acceptor: SocketListener,
    router: Router,
}

impl AdminListener {
    /// Takes `admin.address`; a connection made from now on is answered as soon as [`AdminListener::run`] runs.
    ///
    /// # Errors
    /// When the address is taken, not ours, or not allowed.
    pub fn bind_admin(settings: AdminSettings, view: AdminBackend) -> io::Result<Self> {
        let address = settings.address.clone();
        Self::bind(&address, routes::admin_router(settings, view))
    }

    /// Takes `admin.probes`.
    ///
    /// # Errors
    /// As [`AdminListener::admin`].
    pub fn bind_probes(address: SocketAddr, view: AdminBackend) -> io::Result<Self> {
        Self::bind(&ListenAddress::Ip(address), routes::probes_router(view))
    }

    fn bind(address: &ListenAddress, router: Router) -> io::Result<Self> {
        let bound = BoundSocket::bind(address, UNIX_SOCKET_MODE)?;
        bound.listen(BACKLOG)?;
        let address = bound.address()?;
        Ok(Self {
            address,
            acceptor: bound.into_listener()?,
            router,
        })
    }

    /// Where it listens: the port that the system chose if none was asked for.
    pub fn address(&self) -> &ListenAddress {
        &self.address
    }

    /// Answers for ever. Trouble with the admin port never ends the process.
    pub async fn run(self) {
        let connection_permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        loop {
            let Ok(permit) = Arc::clone(&connection_permits).acquire_owned().await else {
                return;
            };
            let router = self.router.clone();
            let accepted = match &self.acceptor {
                SocketListener::Tcp(listener) => listener.accept().await.map(|(socket, peer)| {
                    spawn_connection(
                        serve_connection(socket, AdminPeer(peer.ip()), router),
                        permit,
                    )
                }),
                SocketListener::Unix { listener, .. } => {
                    listener.accept().await.map(|(socket, _nameless)| {
                        spawn_connection(serve_connection(socket, LOCAL_PEER, router), permit)
                    })
                }
            };
            if let Err(error) = accepted {
                tracing::debug!(%error, "an admin connection cannot be accepted");
                sleep(ACCEPT_ERROR_BACKOFF).await;
            }
        }
    }
}

/// Serves a connection in a task of its own.
fn spawn_connection(
    serving: impl Future<Output = ()> + Send + 'static,
    permit: OwnedSemaphorePermit,
) {
    tokio::spawn(async move {
        let _permit = permit;
        serving.await;
    });
}

async fn serve_connection(
    socket: impl AsyncRead + AsyncWrite + Unpin,
    peer: AdminPeer,
    router: Router,
) {
    let router = TowerToHyperService::new(router);
    let service = service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(peer);
        router.call(request)
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .max_buf_size(MAX_HEAD_BYTES)
        .serve_connection(TokioIo::new(socket), service);
    let mut connection = pin!(connection);
    let ended = match timeout(MAX_CONNECTION_AGE, connection.as_mut()).await {
        Ok(ended) => ended,
        Err(_late) => {
            connection.as_mut().graceful_shutdown();
            // Cut if it takes longer.
            timeout(FINAL_RESPONSE_TIMEOUT, connection)
                .await
                .unwrap_or(Ok(()))
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "an admin connection ended");
    }
}
