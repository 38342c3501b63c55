//! The admin port's sockets, and the bounds of what comes over them.

use super::access::Peer;
use super::{AdminSettings, View, routes};
use crate::listen::{Accepting, Bound, ListenAddress};
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
const SOCKET_MODE: u32 = 0o660;
/// Whom a client of a Unix socket is taken for.
const LOCAL_PEER: Peer = Peer(IpAddr::V4(Ipv4Addr::LOCALHOST));
/// Connections at a time, per address: people, probes and scrapers are few.
const MAX_CONNECTIONS: usize = 64;
/// For a request head, and between requests.
const HEADER_TIME: Duration = Duration::from_secs(5);
/// Of a head: none needs more. Bodies have a bound of their own.
const MAX_HEAD_BYTES: usize = 16 << 10;
/// After this a connection ends with its next answer: who reads slowly holds no place for ever.
const CONNECTION_TIME: Duration = Duration::from_secs(60);
/// For that answer.
const LAST_ANSWER_TIME: Duration = Duration::from_secs(10);
/// When the process has no file descriptors left, others have to close some first.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// An address of the admin port, taken but not yet answered on.
#[derive(Debug)]
pub struct Listener {
    address: ListenAddress,
    accepting: Accepting,
    router: Router,
}

impl Listener {
    /// Takes `admin.address`; a connection made from now on is answered as soon as [`Listener::run`] runs.
    ///
    /// # Errors
    /// When the address is taken, not ours, or not allowed.
    pub fn admin(settings: AdminSettings, view: View) -> io::Result<Self> {
        let address = settings.address.clone();
        Self::take(&address, routes::admin(settings, view))
    }

    /// Takes `admin.probes`.
    ///
    /// # Errors
    /// As [`Listener::admin`].
    pub fn probes(address: SocketAddr, view: View) -> io::Result<Self> {
        Self::take(&ListenAddress::Ip(address), routes::probes(view))
    }

    fn take(address: &ListenAddress, router: Router) -> io::Result<Self> {
        let bound = Bound::take(address, SOCKET_MODE)?;
        bound.listen(BACKLOG)?;
        let address = bound.address()?;
        Ok(Self {
            address,
            accepting: bound.into_accepting()?,
            router,
        })
    }

    /// Where it listens: the port that the system chose if none was asked for.
    pub fn address(&self) -> &ListenAddress {
        &self.address
    }

    /// Answers for ever. Trouble with the admin port never ends the process.
    pub async fn run(self) {
        let room = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        loop {
            let Ok(permit) = Arc::clone(&room).acquire_owned().await else {
                return;
            };
            let router = self.router.clone();
            let accepted = match &self.accepting {
                Accepting::Tcp(listener) => listener
                    .accept()
                    .await
                    .map(|(socket, peer)| begin(serve(socket, Peer(peer.ip()), router), permit)),
                Accepting::Unix { listener, .. } => listener
                    .accept()
                    .await
                    .map(|(socket, _nameless)| begin(serve(socket, LOCAL_PEER, router), permit)),
            };
            if let Err(error) = accepted {
                tracing::debug!(%error, "an admin connection cannot be accepted");
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Serves a connection in a task of its own.
fn begin(serving: impl Future<Output = ()> + Send + 'static, permit: OwnedSemaphorePermit) {
    tokio::spawn(async move {
        let _permit = permit;
        serving.await;
    });
}

async fn serve(socket: impl AsyncRead + AsyncWrite + Unpin, peer: Peer, router: Router) {
    let router = TowerToHyperService::new(router);
    let service = service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(peer);
        router.call(request)
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIME)
        .max_buf_size(MAX_HEAD_BYTES)
        .serve_connection(TokioIo::new(socket), service);
    let mut connection = pin!(connection);
    let ended = match timeout(CONNECTION_TIME, connection.as_mut()).await {
        Ok(ended) => ended,
        Err(_late) => {
            connection.as_mut().graceful_shutdown();
            // Cut if it takes longer.
            timeout(LAST_ANSWER_TIME, connection)
                .await
                .unwrap_or(Ok(()))
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "an admin connection ended");
    }
}
