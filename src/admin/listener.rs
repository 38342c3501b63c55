//! Listeners of the admin endpoint, and limits on their connections.

use super::access_control::AdminPeer;
use super::{AdminBackend, AdminSettings, ReloadableAdminToken, routes};
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
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

/// Listen backlog of the admin sockets.
const BACKLOG: i32 = 1024;
/// Mode of the Unix socket's file: owner and group may connect, and thereby read everything and
/// stop the proxy.
const UNIX_SOCKET_MODE: u32 = 0o660;
/// Peer address assumed for clients of a Unix socket.
const LOCAL_PEER: AdminPeer = AdminPeer(IpAddr::V4(Ipv4Addr::LOCALHOST));
/// Maximum number of connections per listening address: users, probes and scrapers are few. At the
/// limit a new connection replaces another one.
const MAX_CONNECTIONS: usize = 64;
/// Deadline of a request head, and of the idle time between requests.
const HEADER_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum size of a request head; `MAX_BODY_BYTES` limits the body.
const MAX_HEAD_BYTES: usize = 16 << 10;
/// After this age a connection closes with its next response, so that slow readers do not hold
/// their slots forever.
const MAX_CONNECTION_AGE: Duration = Duration::from_secs(60);
/// Deadline of the last response on a connection that has reached [`MAX_CONNECTION_AGE`].
const FINAL_RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause after a failed accept. If file descriptors are exhausted, other connections must close
/// first.
const ACCEPT_ERROR_BACKOFF: Duration = Duration::from_millis(50);

/// A bound listener of the admin endpoint. It serves requests while [`AdminListener::run`] runs.
#[derive(Debug)]
pub struct AdminListener {
    /// The bound address, with the port that the system chose for port 0.
    pub address: ListenAddress,
    acceptor: SocketListener,
    router: Router,
}

impl AdminListener {
    /// Binds `admin.address`. `token` replaces the one in `settings`. Connections
    /// are served once [`AdminListener::run`] runs.
    ///
    /// # Errors
    /// If the address is in use, not local, or not permitted.
    pub(crate) fn bind_admin(
        settings: AdminSettings,
        token: ReloadableAdminToken,
        view: AdminBackend,
    ) -> io::Result<Self> {
        let address = settings.address.clone();
        Self::bind(&address, routes::admin_router(settings, token, view))
    }

    /// Binds `admin.probes`, which serves only health and metrics.
    ///
    /// # Errors
    /// If the address is in use or not permitted.
    pub(crate) fn bind_probes(address: SocketAddr, view: AdminBackend) -> io::Result<Self> {
        Self::bind(&ListenAddress::Ip(address), routes::probes_router(view))
    }

    fn bind(address: &ListenAddress, router: Router) -> io::Result<Self> {
        let bound = BoundSocket::bind(address, UNIX_SOCKET_MODE)?;
        bound.socket.listen(BACKLOG)?;
        let address = bound.address()?;
        Ok(Self {
            address,
            acceptor: bound.into_listener()?,
            router,
        })
    }

    /// Accepts and serves connections forever. Errors of the admin endpoint never stop the process.
    pub async fn run(self) {
        let mut connections = OpenConnections::default();
        loop {
            let router = self.router.clone();
            let accepted = match &self.acceptor {
                SocketListener::Tcp(listener) => listener.accept().await.map(|(socket, peer)| {
                    let peer = AdminPeer(peer.ip().to_canonical());
                    connections.open(peer, serve_connection(socket, peer, router));
                }),
                SocketListener::Unix { listener, .. } => {
                    listener.accept().await.map(|(socket, _)| {
                        connections.open(LOCAL_PEER, serve_connection(socket, LOCAL_PEER, router));
                    })
                }
            };
            if let Err(error) = accepted {
                tracing::debug!(%error, "failed to accept an admin connection");
                sleep(ACCEPT_ERROR_BACKOFF).await;
            }
        }
    }
}

/// Open connections of one listener, oldest first. A new connection is always served: at
/// [`MAX_CONNECTIONS`] another one is closed for it, so that probes need no free slot.
#[derive(Default)]
struct OpenConnections(Vec<(AdminPeer, JoinHandle<()>)>);

impl OpenConnections {
    /// Serves a connection in its own task.
    fn open(&mut self, peer: AdminPeer, serving: impl Future<Output = ()> + Send + 'static) {
        self.make_room();
        self.0.push((peer, tokio::spawn(serving)));
    }

    /// Closes the oldest connection of the peer with the most, if the limit is reached.
    fn make_room(&mut self) {
        self.0.retain(|(_, serving)| !serving.is_finished());
        if self.0.len() < MAX_CONNECTIONS {
            return;
        }
        let peers: Vec<_> = self.0.iter().map(|(peer, _)| *peer).collect();
        let count_of = |peer: &AdminPeer| peers.iter().filter(|other| *other == peer).count();
        // `max_by_key` returns the last maximum, here the oldest connection.
        let victim = peers.iter().enumerate().rev();
        if let Some((index, peer)) = victim.max_by_key(|(_, peer)| count_of(peer)) {
            tracing::debug!(peer = %peer.0, "too many admin connections; oldest one closed");
            self.0.remove(index).1.abort();
        }
    }
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
            // After this timeout the connection closes, even if its last response is incomplete.
            timeout(FINAL_RESPONSE_TIMEOUT, connection)
                .await
                .unwrap_or(Ok(()))
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "admin connection failed");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::pending;

    #[tokio::test]
    async fn the_peer_with_the_most_connections_loses_its_oldest() {
        let mut connections = OpenConnections::default();
        let peer = |last| AdminPeer(Ipv4Addr::new(10, 0, 0, last).into());
        connections.open(peer(1), pending());
        for _ in 2..MAX_CONNECTIONS {
            connections.open(peer(2), pending());
        }
        connections.open(peer(1), pending());
        assert_eq!(connections.0.len(), MAX_CONNECTIONS);
        let oldest_of_most = connections.0[1].1.abort_handle();
        connections.make_room();
        assert_eq!(connections.0.len(), MAX_CONNECTIONS - 1);
        tokio::task::yield_now().await;
        assert!(oldest_of_most.is_finished());
        assert!(
            connections
                .0
                .iter()
                .all(|(_, serving)| !serving.is_finished())
        );
    }
}
