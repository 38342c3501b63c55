//! The upstream behind the proxy: responds, echoes, aborts, and can be killed and restarted.

use crate::ledger::SoakLedger;
use crate::support::find_free_port;
use bytes::Bytes;
use futures_util::stream::{self, StreamExt};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioExecutor, TokioIo};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Builder;
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};

/// Length of long bodies: more than all buffers between client and upstream.
pub(crate) const BIG_BYTES: usize = 1 << 20;
/// A WebSocket key and the matching accept value (RFC 6455, section 1.3).
pub(crate) const WEBSOCKET_KEY: &str = "dGhlIHNhbXBsZSBub25jZQ==";
const WEBSOCKET_ACCEPT: &str = "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=";

/// Time after which some HTTP/2 connections send GOAWAY, as if they were draining.
const GOAWAY_AFTER_MS: std::ops::Range<u64> = 50..3000;

/// Times for which `/held` holds a slot. The long ones exceed the `lease_ttl`.
const SHORT_HOLD_MS: std::ops::Range<u64> = 1..100;
const LONG_HOLD_MS: std::ops::Range<u64> = 1500..2500;

/// What the app received, for comparison with the charges in Redis.
#[derive(Debug, Default)]
pub(crate) struct AppCounters {
    /// Sum of the costs on `/metered`.
    pub(crate) metered_units: AtomicU64,
    pub(crate) flooded_requests: AtomicU64,
    /// Requests on `/held` in flight.
    pub(crate) held: AtomicU64,
}

/// A request on `/held`; counted until it is dropped.
struct HeldRequest<'a>(&'a AppCounters);

impl Drop for HeldRequest<'_> {
    fn drop(&mut self) {
        self.0.held.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Runs in its own thread and runtime, so that stopping them ends every connection.
#[derive(Debug)]
pub(crate) struct AppServer {
    pub(crate) counters: Arc<AppCounters>,
    ledger: Arc<SoakLedger>,
    server_thread: Option<(oneshot::Sender<()>, JoinHandle<()>)>,
    address: SocketAddr,
    protocol: AppProtocol,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AppProtocol {
    Http1,
    /// HTTP/2 in cleartext.
    H2c,
}

impl AppServer {
    pub(crate) fn start(speaks: AppProtocol, ledger: &Arc<SoakLedger>) -> Self {
        let mut upstream = Self {
            counters: Arc::default(),
            ledger: Arc::clone(ledger),
            server_thread: None,
            address: ([127, 0, 0, 1], find_free_port()).into(),
            protocol: speaks,
        };
        upstream.restart();
        upstream
    }

    pub(crate) fn url(&self) -> String {
        let scheme = if self.protocol == AppProtocol::H2c {
            "h2c"
        } else {
            "http"
        };
        format!("{scheme}://{}", self.address)
    }

    /// Kills the upstream. Its port refuses connections from then on.
    pub(crate) fn kill(&mut self) {
        if let Some((alive, thread)) = self.server_thread.take() {
            drop(alive);
            thread.join().unwrap();
        }
    }

    /// Restarts the upstream on the same port.
    pub(crate) fn restart(&mut self) {
        let listener = std::net::TcpListener::bind(self.address).unwrap();
        listener.set_nonblocking(true).unwrap();
        let ((alive, killed), speaks) = (oneshot::channel(), self.protocol);
        let app = AppHandler {
            counters: Arc::clone(&self.counters),
            ledger: Arc::clone(&self.ledger),
        };
        let thread = std::thread::spawn(move || {
            let runtime = Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                tokio::select! {
                    () = accept_connections(TcpListener::from_std(listener).unwrap(), speaks, app) => {}
                    _ = killed => {}
                }
            });
        });
        self.server_thread = Some((alive, thread));
    }
}

impl Drop for AppServer {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Responds to the requests of all connections.
#[derive(Clone)]
struct AppHandler {
    counters: Arc<AppCounters>,
    ledger: Arc<SoakLedger>,
}

async fn accept_connections(listener: TcpListener, speaks: AppProtocol, app: AppHandler) {
    while let Ok((stream, _)) = listener.accept().await {
        match speaks {
            AppProtocol::Http1 => drop(tokio::spawn(serve_http1(stream, app.clone()))),
            AppProtocol::H2c => drop(tokio::spawn(serve_h2c(stream, app.clone()))),
        }
    }
}

async fn serve_h2c(stream: TcpStream, app: AppHandler) {
    // hyper closes the connection after the last response. Unread bytes would turn the close into a
    // reset, which discards that response. A second handle keeps the socket open for a while.
    let stream = stream.into_std().unwrap();
    let mut rest = TcpStream::from_std(stream.try_clone().unwrap()).unwrap();
    serve_h2c_until_goaway(TcpStream::from_std(stream).unwrap(), app).await;
    let reading = async { while let Ok(1..) = rest.read(&mut [0; 1024]).await {} };
    timeout(Duration::from_secs(1), reading)
        .await
        .unwrap_or_default();
}

async fn serve_h2c_until_goaway(stream: TcpStream, app: AppHandler) {
    let mut http2 = http2::Builder::new(TokioExecutor::new());
    let service = service_fn(move |request| respond(request, app.clone()));
    let connection = http2
        .enable_connect_protocol()
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = std::pin::pin!(connection);
    let goodbye = sleep(Duration::from_millis(fastrand::u64(GOAWAY_AFTER_MS)));
    tokio::select! {
        // Some clients disconnect deliberately.
        end = connection.as_mut() => return end.unwrap_or_default(),
        () = goodbye => {}
    }
    connection.as_mut().graceful_shutdown();
    connection.await.unwrap_or_default();
}

async fn serve_http1(stream: TcpStream, app: AppHandler) {
    // Half of the connections end with a reset when the upstream stops.
    if fastrand::bool() {
        socket2::SockRef::from(&stream)
            .set_linger(Some(Duration::ZERO))
            .unwrap();
    }
    let service = service_fn(move |request| respond(request, app.clone()));
    let connection = http1::Builder::new().serve_connection(TokioIo::new(stream), service);
    // Some clients disconnect deliberately.
    connection.with_upgrades().await.unwrap_or_default();
}

impl AppHandler {
    /// Counts what is compared with charges, and holds slots.
    async fn count_request(&self, path: &str, cost: u32) {
        let counters = &self.counters;
        match path {
            "/held" => self.hold_slot().await,
            "/metered" => {
                counters
                    .metered_units
                    .fetch_add(cost.into(), Ordering::Relaxed);
            }
            "/flooded" => {
                counters.flooded_requests.fetch_add(1, Ordering::Relaxed);
            }
            _ => {}
        }
    }

    /// Holds a slot of a concurrency limit, sometimes for longer than its `lease_ttl`.
    async fn hold_slot(&self) {
        let before = self.counters.held.fetch_add(1, Ordering::Relaxed);
        let _held = HeldRequest(&self.counters);
        self.ledger.judge_held_requests(before + 1);
        let millis = if fastrand::u8(..20) == 0 {
            LONG_HOLD_MS
        } else {
            SHORT_HOLD_MS
        };
        sleep(Duration::from_millis(fastrand::u64(millis))).await;
    }
}

type AppResponse = Response<BoxBody<Bytes, io::Error>>;

/// Each body starts with the request's number, so that a swapped response is detected.
async fn respond(mut request: Request<Incoming>, app: AppHandler) -> io::Result<AppResponse> {
    let number = request.headers().get("x-number").cloned();
    let number = Bytes::from(
        number
            .map(|number| number.as_bytes().to_vec())
            .unwrap_or_default(),
    );
    let path = request.uri().path().to_owned();
    match path.as_str() {
        "/reset" => Err(io::Error::other("on purpose")),
        "/cut" => {
            let begin = stream::iter([Ok(Frame::data(number))]);
            let end = stream::once(async {
                // Aborting immediately would discard the response head.
                sleep(Duration::from_millis(10)).await;
                Err(io::Error::other("on purpose"))
            });
            let body = BodyExt::boxed(StreamBody::new(begin.chain(end)));
            Ok(Response::builder()
                .header("content-length", BIG_BYTES)
                .body(body)
                .unwrap())
        }
        "/big" => {
            let mut body = number.to_vec();
            body.resize(BIG_BYTES, b'x');
            Ok(Response::new(make_full_body(body)))
        }
        "/upload" => {
            let body = request
                .into_body()
                .collect()
                .await
                .map_err(io::Error::other)?
                .to_bytes();
            Ok(Response::new(make_full_body(
                [&number[..], b" ", body.len().to_string().as_bytes()].concat(),
            )))
        }
        "/socket" => {
            let upgrade = hyper::upgrade::on(&mut request);
            tokio::spawn(async move {
                let Ok(upgraded) = upgrade.await else { return };
                let (mut reads, mut writes) = tokio::io::split(TokioIo::new(upgraded));
                tokio::io::copy(&mut reads, &mut writes)
                    .await
                    .unwrap_or_default();
            });
            // In HTTP/2, extended CONNECT (RFC 8441), any 2xx status opens the tunnel.
            if request.method() == Method::CONNECT {
                return Ok(Response::new(make_full_body(Bytes::new())));
            }
            let switch = Response::builder()
                .status(StatusCode::SWITCHING_PROTOCOLS)
                .header("connection", "upgrade")
                .header("upgrade", "websocket")
                .header("sec-websocket-accept", WEBSOCKET_ACCEPT);
            Ok(switch.body(make_full_body(Bytes::new())).unwrap())
        }
        _ => {
            if path == "/slots" || path == "/slow" {
                sleep(Duration::from_millis(fastrand::u64(1..100))).await;
            }
            let cost = fastrand::u32(1..5);
            app.count_request(&path, cost).await;
            Ok(Response::builder()
                .header("x-cost", cost)
                .body(make_full_body(number))
                .unwrap())
        }
    }
}

fn make_full_body(body: impl Into<Bytes>) -> BoxBody<Bytes, io::Error> {
    Full::new(body.into())
        .map_err(|never| match never {})
        .boxed()
}
