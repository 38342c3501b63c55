//! The admin port's sockets, and the bounds of what comes over them.

use super::access::Peer;
use super::{AdminSettings, View, routes};
use axum::Router;
use http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};

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
    socket: TcpListener,
    router: Router,
}

impl Listener {
    /// Takes `admin.address`; a connection made from now on is answered as soon as [`Listener::run`] runs.
    ///
    /// # Errors
    /// When the address is taken, not ours, or not allowed.
    pub async fn admin(settings: AdminSettings, view: View) -> io::Result<Self> {
        let socket = TcpListener::bind(settings.address).await?;
        Ok(Self { socket, router: routes::admin(settings, view) })
    }

    /// Takes `admin.probes`.
    ///
    /// # Errors
    /// As [`Listener::admin`].
    pub async fn probes(address: SocketAddr, view: View) -> io::Result<Self> {
        Ok(Self { socket: TcpListener::bind(address).await?, router: routes::probes(view) })
    }

    /// Where it listens: the port that the system chose if none was asked for.
    ///
    /// # Errors
    /// When the socket has no address, which no system is known to say of a bound socket.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// Answers for ever. Trouble with the admin port never ends the process.
    pub async fn run(self) {
        let room = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        loop {
            let Ok(permit) = Arc::clone(&room).acquire_owned().await else { return };
            match self.socket.accept().await {
                Ok((socket, peer)) => {
                    let router = self.router.clone();
                    tokio::spawn(async move {
                        let _permit = permit;
                        serve(socket, Peer(peer.ip()), router).await;
                    });
                }
                Err(error) => {
                    tracing::debug!(%error, "an admin connection cannot be accepted");
                    sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }
}

async fn serve(socket: TcpStream, peer: Peer, router: Router) {
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
            timeout(LAST_ANSWER_TIME, connection).await.unwrap_or(Ok(()))
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "an admin connection ended");
    }
}
