//! The clients: regular, slow, aborting and abusive ones.

use crate::SoakContext;
use crate::ledger::RouteExpectation;
use crate::support::client::{ByteStream, RequestOutcome, handshake_http1};
use crate::upstream::{BIG_BYTES, WEBSOCKET_KEY};
use bytes::Bytes;
use fastrand::Rng;
use http_body_util::Full;
use hyper::client::conn::http2;
use hyper::{Request, Version};
use hyper_util::rt::{TokioExecutor, TokioIo};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tokio_rustls::rustls::pki_types::ServerName;

/// Timeout longer than any operation that makes progress.
pub(crate) const RESPONSE_TIMEOUT: Duration = Duration::from_secs(20);
/// Users of a policy. There are few, so that some always exceed their limit and per-key state fills
/// up soon.
const USER_COUNT: u32 = 500;

const OK_OR_LIMITED: &[u16] = &[200, 429];
const ROUTES: [RouteExpectation; 12] = [
    make_route("/free", &[200]),
    make_route("/log", OK_OR_LIMITED),
    make_route("/bucket", OK_OR_LIMITED),
    make_route("/leased", OK_OR_LIMITED),
    make_route("/local", OK_OR_LIMITED),
    make_route("/slots", OK_OR_LIMITED),
    make_route("/line", OK_OR_LIMITED),
    make_route("/settled", OK_OR_LIMITED),
    RouteExpectation {
        without_redis: &[503],
        ..make_route("/closed", OK_OR_LIMITED)
    },
    RouteExpectation {
        without_redis: &[503],
        ..make_route("/held", OK_OR_LIMITED)
    },
    make_route("/denied", &[403]),
    make_route("/reset", &[502]),
];
const CUT_ROUTE: RouteExpectation = RouteExpectation {
    is_truncated: true,
    ..make_route("/cut", &[])
};
const BIG_ROUTE: RouteExpectation = make_route("/big", &[200]);
const SLOW_ROUTE: RouteExpectation = make_route("/slow", &[200]);
const SLOW_HEAD_ROUTE: RouteExpectation = make_route("a head that doesn't end", &[408]);
const UPLOAD_ROUTE: RouteExpectation = make_route("/upload", OK_OR_LIMITED);
const SOCKET_ROUTE: RouteExpectation = make_route("/socket", &[101]);
/// Statuses for an invalid request.
const BAD_REQUEST_STATUSES: &[u16] = &[400, 408, 413, 414, 431, 501, 505];

pub(crate) const fn make_route(path: &'static str, usual: &'static [u16]) -> RouteExpectation {
    RouteExpectation {
        path,
        expected: usual,
        without_redis: &[],
        is_truncated: false,
    }
}

#[derive(Clone, Copy)]
enum ClientKind {
    KeepAlive,
    Http2,
    Tunnel,
    Uploading,
    Slow,
    Disconnecting,
    Hostile,
}

const CLIENT_COUNTS: [(ClientKind, usize); 7] = [
    (ClientKind::KeepAlive, 8),
    (ClientKind::Http2, 3),
    (ClientKind::Tunnel, 2),
    (ClientKind::Uploading, 2),
    (ClientKind::Slow, 4),
    (ClientKind::Disconnecting, 3),
    (ClientKind::Hostile, 2),
];

/// Runs all clients until the time is over. The seed determines each client's choices.
pub(crate) fn spawn_clients(context: &Arc<SoakContext>, seed: u64) -> Vec<JoinHandle<()>> {
    let kinds = CLIENT_COUNTS
        .iter()
        .flat_map(|(client, count)| std::iter::repeat_n(*client, *count));
    (seed..)
        .zip(kinds)
        .map(|(seed, client)| {
            tokio::spawn(run_client(
                client,
                Arc::clone(context),
                Rng::with_seed(seed),
            ))
        })
        .collect()
}

/// Runs one client: one connection after another.
async fn run_client(client: ClientKind, context: Arc<SoakContext>, mut rng: Rng) {
    while !context.has_ended() {
        let began = Instant::now();
        let lived = match client {
            ClientKind::KeepAlive => run_keep_alive_client(&context, &mut rng).await,
            ClientKind::Http2 => run_http2_client(&context, &mut rng).await,
            ClientKind::Tunnel => run_websocket_client(&context, &mut rng).await,
            ClientKind::Uploading => run_upload_client(&context, &mut rng).await,
            ClientKind::Slow => run_slow_client(&context, &mut rng).await,
            ClientKind::Disconnecting => run_disconnecting_client(&context, &mut rng).await,
            ClientKind::Hostile => run_hostile_client(&context, &mut rng).await,
        };
        // Each operation records its own result.
        if let Err(error) = lived {
            context.ledger.judge_failed_connection(began, &error);
        }
        sleep_randomly(&mut rng, 50).await;
    }
}

async fn run_keep_alive_client(context: &SoakContext, rng: &mut Rng) -> io::Result<()> {
    let mut proxy = handshake_http1(connect_to_proxy(context, Version::HTTP_11).await?).await?;
    for _ in 0..rng.u32(1..200) {
        if context.has_ended() || proxy.ready().await.is_err() {
            break;
        }
        let route = if rng.u8(..) == 0 {
            &CUT_ROUTE
        } else {
            choose_route(rng)
        };
        let number = rng.u32(..);
        let request = make_request("", route, rng, number, Bytes::new());
        let pending = context.ledger.begin_request();
        let outcome = RequestOutcome::from_response(
            proxy.send_request(request),
            &number.to_string(),
            RESPONSE_TIMEOUT,
        )
        .await;
        pending.judge_outcome(route, &outcome);
        if !matches!(outcome, RequestOutcome::Answered(_)) {
            break;
        }
        sleep_randomly(rng, 20).await;
    }
    Ok(())
}

async fn run_http2_client(context: &SoakContext, rng: &mut Rng) -> io::Result<()> {
    let proxy = handshake_http2(connect_to_proxy(context, Version::HTTP_2).await?).await?;
    for _ in 0..rng.u32(1..100) {
        if context.has_ended() || proxy.is_closed() {
            break;
        }
        let together = (0..rng.u32(1..8)).map(|_| {
            let (route, number, mut proxy) = (choose_route(rng), rng.u32(..), proxy.clone());
            let request = make_request("http://soak.test", route, rng, number, Bytes::new());
            async move {
                let pending = context.ledger.begin_request();
                let outcome = RequestOutcome::from_response(
                    proxy.send_request(request),
                    &number.to_string(),
                    RESPONSE_TIMEOUT,
                )
                .await;
                pending.judge_outcome(route, &outcome);
            }
        });
        futures_util::future::join_all(together).await;
        sleep_randomly(rng, 50).await;
    }
    Ok(())
}

async fn run_websocket_client(context: &SoakContext, rng: &mut Rng) -> io::Result<()> {
    let mut proxy = connect_to_proxy(context, Version::HTTP_11).await?;
    let pending = context.ledger.begin_request();
    let handshake = format!(
        "GET /socket HTTP/1.1\r\nHost: soak.test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {WEBSOCKET_KEY}\r\n\r\n"
    );
    let outcome = match send_and_read_head(&mut proxy, handshake.as_bytes(), false).await {
        RequestOutcome::Answered(101) => check_echo(context, &mut proxy, rng).await,
        refused => refused,
    };
    pending.judge_outcome(&SOCKET_ROUTE, &outcome);
    Ok(())
}

/// Sends bytes through a tunnel and expects them back.
async fn check_echo(
    context: &SoakContext,
    proxy: &mut ClientStream,
    rng: &mut Rng,
) -> RequestOutcome {
    for _ in 0..rng.u32(1..50) {
        if context.has_ended() {
            break;
        }
        let sent = random_bytes(rng.usize(1..32_000), rng);
        let mut back = vec![0; sent.len()];
        let there_and_back = async {
            proxy.write_all(&sent).await?;
            proxy.read_exact(&mut back).await
        };
        match timeout(RESPONSE_TIMEOUT, there_and_back).await {
            Ok(Ok(_)) if back == sent => sleep_randomly(rng, 50).await,
            Ok(Ok(_)) => return RequestOutcome::Mismatched(101),
            Ok(Err(_)) => return RequestOutcome::Truncated(101),
            Err(_) => return RequestOutcome::TimedOut,
        }
    }
    RequestOutcome::Answered(101)
}

async fn run_upload_client(context: &SoakContext, rng: &mut Rng) -> io::Result<()> {
    let mut proxy = handshake_http1(connect_to_proxy(context, Version::HTTP_11).await?).await?;
    for _ in 0..rng.u32(1..20) {
        if context.has_ended() || proxy.ready().await.is_err() {
            break;
        }
        let (number, body) = (
            rng.u32(..),
            Bytes::from(vec![b'u'; rng.usize(1..BIG_BYTES)]),
        );
        let wanted = format!("{number} {}", body.len());
        let request = make_request("", &UPLOAD_ROUTE, rng, number, body);
        let pending = context.ledger.begin_request();
        let outcome =
            RequestOutcome::from_response(proxy.send_request(request), &wanted, RESPONSE_TIMEOUT)
                .await;
        pending.judge_outcome(&UPLOAD_ROUTE, &outcome);
        if !matches!(outcome, RequestOutcome::Answered(_)) {
            break;
        }
        sleep_randomly(rng, 200).await;
    }
    Ok(())
}

/// Sends a request slowly: just within the timeout, or too slowly.
async fn run_slow_client(context: &SoakContext, rng: &mut Rng) -> io::Result<()> {
    let mut proxy = connect_to_proxy(context, Version::HTTP_11).await?;
    let pending = context.ledger.begin_request();
    match rng.u8(..4) {
        0 => {
            let outcome =
                send_and_read_head(&mut proxy, b"GET /slow HTTP/1.1\r\nHost: soak", true).await;
            pending.judge_outcome(&SLOW_HEAD_ROUTE, &outcome);
        }
        1 => {
            let head = b"GET /slow HTTP/1.1\r\nHost: soak.test\r\nConnection: close\r\n\r\n";
            pending.judge_outcome(&SLOW_ROUTE, &send_in_parts(&mut proxy, head, 10, rng).await);
        }
        2 => {
            let mut whole = b"POST /upload HTTP/1.1\r\nHost: soak.test\r\nConnection: close\r\n\
                Content-Length: 20000\r\n\r\n"
                .to_vec();
            whole.resize(whole.len() + 20_000, b's');
            pending.judge_outcome(
                &UPLOAD_ROUTE,
                &send_in_parts(&mut proxy, &whole, 4000, rng).await,
            );
        }
        _ => {
            let head = b"GET /big HTTP/1.1\r\nHost: soak.test\r\nConnection: close\r\n\r\n";
            let outcome = match send_and_read_head(&mut proxy, head, false).await {
                RequestOutcome::Answered(200) => read_body_slowly(&mut proxy, rng).await,
                other => other,
            };
            pending.judge_outcome(&BIG_ROUTE, &outcome);
        }
    }
    Ok(())
}

async fn send_in_parts(
    proxy: &mut ClientStream,
    bytes: &[u8],
    part: usize,
    rng: &mut Rng,
) -> RequestOutcome {
    for part in bytes.chunks(part) {
        // A proxy that responded before the end of the request may close the connection.
        if proxy.write_all(part).await.is_err() {
            break;
        }
        sleep_randomly(rng, 150).await;
    }
    send_and_read_head(proxy, b"", true).await
}

async fn read_body_slowly(proxy: &mut ClientStream, rng: &mut Rng) -> RequestOutcome {
    let (mut left, mut some) = (BIG_BYTES, vec![0; 64 << 10]);
    while left > 0 {
        match timeout(RESPONSE_TIMEOUT, proxy.read(&mut some)).await {
            Ok(Ok(read @ 1..)) => left = left.saturating_sub(read),
            Ok(_) => return RequestOutcome::Truncated(200),
            Err(_) => return RequestOutcome::TimedOut,
        }
        sleep_randomly(rng, 50).await;
    }
    RequestOutcome::Answered(200)
}

/// Disconnects during an operation.
async fn run_disconnecting_client(context: &SoakContext, rng: &mut Rng) -> io::Result<()> {
    if rng.bool() {
        return reset_streams(context, rng.u32(1..20), rng).await;
    }
    let mut proxy = connect_to_proxy(context, Version::HTTP_11).await?;
    let pending = context.ledger.begin_request();
    let begun: &[u8] = match rng.u8(..4) {
        0 => b"GET /slow HTTP/1.1\r\nHost: so",
        1 => b"GET /slots HTTP/1.1\r\nHost: soak.test\r\n\r\n",
        2 => b"POST /upload HTTP/1.1\r\nHost: soak.test\r\nContent-Length: 1000\r\n\r\nhalf",
        _ => b"GET /big HTTP/1.1\r\nHost: soak.test\r\n\r\n",
    };
    proxy.write_all(begun).await?;
    sleep_randomly(rng, 100).await;
    // Unread bytes turn the close into a reset.
    drop(proxy);
    pending.record_abort();
    Ok(())
}

/// Sends HTTP/2 requests and resets them immediately or shortly after.
async fn reset_streams(context: &SoakContext, count: u32, rng: &mut Rng) -> io::Result<()> {
    let mut proxy = handshake_http2(connect_to_proxy(context, Version::HTTP_2).await?).await?;
    for number in 0..count {
        // Too many resets close the connection.
        if proxy.is_closed() {
            break;
        }
        let request = make_request("http://soak.test", &SLOW_ROUTE, rng, number, Bytes::new());
        let pending = context.ledger.begin_request();
        let soon = Duration::from_millis(rng.u64(..3));
        drop(timeout(soon, proxy.send_request(request)).await);
        pending.record_abort();
    }
    Ok(())
}

/// Sends invalid requests, or requests that aim to exhaust the proxy.
async fn run_hostile_client(context: &SoakContext, rng: &mut Rng) -> io::Result<()> {
    if context.tls.is_some() && rng.u8(..4) == 0 {
        return send_broken_handshake(context, rng).await;
    }
    let hostile: Vec<u8> = match rng.u8(..6) {
        0 => [&random_bytes(2000, rng)[..], b"\r\n\r\n"].concat(),
        1 => {
            b"POST /free HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd"
                .to_vec()
        }
        2 => b"GET /free HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n".to_vec(),
        3 => format!(
            "GET /free HTTP/1.1\r\nHost: a\r\nX-Long: {}\r\n\r\n",
            "x".repeat(100_000)
        )
        .into_bytes(),
        4 => [
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0",
            &random_bytes(500, rng)[..],
        ]
        .concat(),
        _ => return reset_streams(context, 600, rng).await,
    };
    let mut proxy = connect_to_proxy(context, Version::HTTP_11).await?;
    let pending = context.ledger.begin_request();
    let outcome = send_and_read_head(&mut proxy, &hostile, false).await;
    pending.judge_hostile_request(BAD_REQUEST_STATUSES, &outcome);
    Ok(())
}

/// Starts a TLS handshake or sends other bytes, and never sends a request.
async fn send_broken_handshake(context: &SoakContext, rng: &mut Rng) -> io::Result<()> {
    let mut proxy = TcpStream::connect(context.proxy).await?;
    let begun = [&b"\x16\x03\x01\x02\0\x01"[..], &random_bytes(300, rng)].concat();
    proxy
        .write_all(if rng.bool() {
            &begun
        } else {
            b"GET /free HTTP/1.1\r\nHost: a\r\n\r\n"
        })
        .await?;
    sleep_randomly(rng, 200).await;
    Ok(())
}

fn choose_route(rng: &mut Rng) -> &'static RouteExpectation {
    rng.choice(&ROUTES).unwrap()
}

/// Builds a request for a random user, with a number that the response must repeat.
pub(crate) fn make_request(
    origin: &str,
    route: &RouteExpectation,
    rng: &mut Rng,
    number: u32,
    body: Bytes,
) -> Request<Full<Bytes>> {
    // Half of all requests come from a few users.
    let user = if rng.bool() {
        rng.u32(..5)
    } else {
        rng.u32(..USER_COUNT)
    };
    let method = if body.is_empty() { "GET" } else { "POST" };
    let request = Request::builder()
        .method(method)
        .uri(format!("{origin}{}", route.path));
    let request = if origin.is_empty() {
        request.header("host", "soak.test")
    } else {
        request
    };
    request
        .header("x-user", user)
        .header("x-number", number)
        .body(Full::new(body))
        .unwrap()
}

/// Sends bytes and reads the response head; with `to_end`, reads until the proxy closes.
async fn send_and_read_head(
    proxy: &mut ClientStream,
    bytes: &[u8],
    to_end: bool,
) -> RequestOutcome {
    let mut head = Vec::new();
    let there_and_back = async {
        // After an early rejection the connection may already be closed, with the response
        // readable.
        let sent = proxy.write_all(bytes).await;
        while to_end || !head.ends_with(b"\r\n\r\n") {
            match proxy.read_u8().await {
                Ok(byte) => head.push(byte),
                Err(error) => return sent.err().unwrap_or(error).to_string(),
            }
        }
        String::new()
    };
    let Ok(error) = timeout(RESPONSE_TIMEOUT, there_and_back).await else {
        return RequestOutcome::TimedOut;
    };
    let status = head
        .get(9..12)
        .and_then(|status| std::str::from_utf8(status).ok()?.parse().ok());
    status.map_or(RequestOutcome::NoAnswer(error), RequestOutcome::Answered)
}

fn random_bytes(len: usize, rng: &mut Rng) -> Vec<u8> {
    let mut noise = vec![0; len];
    rng.fill(&mut noise);
    noise
}

async fn sleep_randomly(rng: &mut Rng, most_ms: u64) {
    sleep(Duration::from_millis(rng.u64(..most_ms))).await;
}

pub(crate) type ClientStream = Box<dyn ByteStream>;

/// Connects to the proxy, with TLS if configured.
pub(crate) async fn connect_to_proxy(
    context: &SoakContext,
    version: Version,
) -> io::Result<ClientStream> {
    let stream = TcpStream::connect(context.proxy).await?;
    let Some(tls) = &context.tls else {
        return Ok(Box::new(stream));
    };
    let tls = if version == Version::HTTP_2 {
        &tls.http2
    } else {
        &tls.http1
    };
    let name = ServerName::try_from("soak.test").expect("a name");
    Ok(Box::new(tls.connect(name, stream).await?))
}

async fn handshake_http2(socket: ClientStream) -> io::Result<http2::SendRequest<Full<Bytes>>> {
    let handshake = http2::handshake(TokioExecutor::new(), TokioIo::new(socket)).await;
    let (sender, connection) = handshake.map_err(io::Error::other)?;
    tokio::spawn(async move { connection.await.unwrap_or_default() });
    Ok(sender)
}
