//! The clients: those of every day, the slow, the impatient and the hostile.

use crate::World;
use crate::books::Route;
use crate::support::client::{Outcome, Wire, handshake1};
use crate::upstream::{BIG_BYTES, KEY};
use bytes::Bytes;
use fastrand::Rng;
use http_body_util::Full;
use hyper::client::conn::http2;
use hyper::{Request, Version};
use hyper_util::rt::{TokioExecutor, TokioIo};
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tokio_rustls::rustls::pki_types::ServerName;

/// Longer than anything takes that goes on at all.
const PATIENCE: Duration = Duration::from_secs(20);
/// A policy's users; few, so that some are always over their limit, and so that what is kept per key fills up soon.
const USERS: u32 = 500;

const NO_MORE: &[u16] = &[200, 429];
const ROUTES: [Route; 11] = [
    route("/free", &[200]),
    route("/log", NO_MORE),
    route("/bucket", NO_MORE),
    route("/leased", NO_MORE),
    route("/local", NO_MORE),
    route("/slots", NO_MORE),
    route("/line", NO_MORE),
    route("/settled", NO_MORE),
    Route {
        without_redis: &[503],
        ..route("/closed", NO_MORE)
    },
    route("/denied", &[403]),
    route("/reset", &[502]),
];
const CUT: Route = Route {
    cut: true,
    ..route("/cut", &[])
};
const BIG: Route = route("/big", &[200]);
const SLOW: Route = route("/slow", &[200]);
const SLOW_HEAD: Route = route("a head that doesn't end", &[408]);
const UPLOAD: Route = route("/upload", NO_MORE);
const SOCKET: Route = route("/socket", &[101]);
/// What a request that is none may get.
const NOT_UNDERSTOOD: &[u16] = &[400, 408, 413, 414, 431, 501, 505];

const fn route(path: &'static str, usual: &'static [u16]) -> Route {
    Route {
        path,
        usual,
        without_redis: &[],
        cut: false,
    }
}

#[derive(Clone, Copy)]
enum Client {
    KeepAlive,
    Http2,
    Tunnel,
    Uploading,
    Slow,
    Impatient,
    Hostile,
}

const CLIENTS: [(Client, usize); 7] = [
    (Client::KeepAlive, 8),
    (Client::Http2, 3),
    (Client::Tunnel, 2),
    (Client::Uploading, 2),
    (Client::Slow, 4),
    (Client::Impatient, 3),
    (Client::Hostile, 2),
];

/// All of them, until the time is over. What each one does is the seed's choice.
pub(crate) fn start(world: &Arc<World>, seed: u64) -> Vec<JoinHandle<()>> {
    let kinds = CLIENTS
        .iter()
        .flat_map(|(client, count)| std::iter::repeat_n(*client, *count));
    (seed..)
        .zip(kinds)
        .map(|(seed, client)| tokio::spawn(live(client, Arc::clone(world), Rng::with_seed(seed))))
        .collect()
}

/// One connection after the other.
async fn live(client: Client, world: Arc<World>, mut rng: Rng) {
    while !world.is_over() {
        let lived = match client {
            Client::KeepAlive => keep_alive(&world, &mut rng).await,
            Client::Http2 => multiplexed(&world, &mut rng).await,
            Client::Tunnel => tunnel(&world, &mut rng).await,
            Client::Uploading => upload(&world, &mut rng).await,
            Client::Slow => slow(&world, &mut rng).await,
            Client::Impatient => impatient(&world, &mut rng).await,
            Client::Hostile => hostile(&world, &mut rng).await,
        };
        // Everything that befalls a request is judged where it happens.
        if let Err(error) = lived {
            world
                .books
                .complain(format!("no connection to the proxy: {error}"));
        }
        pause(&mut rng, 50).await;
    }
}

async fn keep_alive(world: &World, rng: &mut Rng) -> io::Result<()> {
    let mut proxy = handshake1(connect(world, Version::HTTP_11).await?).await?;
    for _ in 0..rng.u32(1..200) {
        if world.is_over() || proxy.ready().await.is_err() {
            break;
        }
        let route = if rng.u8(..) == 0 { &CUT } else { draw(rng) };
        let number = rng.u32(..);
        let request = request("", route, rng, number, Bytes::new());
        let asked = world.books.ask();
        let outcome = Outcome::of(proxy.send_request(request), &number.to_string(), PATIENCE).await;
        asked.judge(route, &outcome);
        if !matches!(outcome, Outcome::Answered(_)) {
            break;
        }
        pause(rng, 20).await;
    }
    Ok(())
}

async fn multiplexed(world: &World, rng: &mut Rng) -> io::Result<()> {
    let proxy = handshake2(connect(world, Version::HTTP_2).await?).await?;
    for _ in 0..rng.u32(1..100) {
        if world.is_over() || proxy.is_closed() {
            break;
        }
        let together = (0..rng.u32(1..8)).map(|_| {
            let (route, number, mut proxy) = (draw(rng), rng.u32(..), proxy.clone());
            let request = request("http://soak.test", route, rng, number, Bytes::new());
            async move {
                let asked = world.books.ask();
                let outcome =
                    Outcome::of(proxy.send_request(request), &number.to_string(), PATIENCE).await;
                asked.judge(route, &outcome);
            }
        });
        futures_util::future::join_all(together).await;
        pause(rng, 50).await;
    }
    Ok(())
}

async fn tunnel(world: &World, rng: &mut Rng) -> io::Result<()> {
    let mut proxy = connect(world, Version::HTTP_11).await?;
    let asked = world.books.ask();
    let handshake = format!(
        "GET /socket HTTP/1.1\r\nHost: soak.test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {KEY}\r\n\r\n"
    );
    let outcome = match raw(&mut proxy, handshake.as_bytes(), false).await {
        Outcome::Answered(101) => echoed(world, &mut proxy, rng).await,
        refused => refused,
    };
    asked.judge(&SOCKET, &outcome);
    Ok(())
}

/// What is sent into a tunnel comes back.
async fn echoed(world: &World, proxy: &mut Socket, rng: &mut Rng) -> Outcome {
    for _ in 0..rng.u32(1..50) {
        if world.is_over() {
            break;
        }
        let sent = noise(rng.usize(1..32_000), rng);
        let mut back = vec![0; sent.len()];
        let there_and_back = async {
            proxy.write_all(&sent).await?;
            proxy.read_exact(&mut back).await
        };
        match timeout(PATIENCE, there_and_back).await {
            Ok(Ok(_)) if back == sent => pause(rng, 50).await,
            Ok(Ok(_)) => return Outcome::Mixed(101),
            Ok(Err(_)) => return Outcome::Cut(101),
            Err(_) => return Outcome::Hung,
        }
    }
    Outcome::Answered(101)
}

async fn upload(world: &World, rng: &mut Rng) -> io::Result<()> {
    let mut proxy = handshake1(connect(world, Version::HTTP_11).await?).await?;
    for _ in 0..rng.u32(1..20) {
        if world.is_over() || proxy.ready().await.is_err() {
            break;
        }
        let (number, body) = (
            rng.u32(..),
            Bytes::from(vec![b'u'; rng.usize(1..BIG_BYTES)]),
        );
        let wanted = format!("{number} {}", body.len());
        let request = request("", &UPLOAD, rng, number, body);
        let asked = world.books.ask();
        let outcome = Outcome::of(proxy.send_request(request), &wanted, PATIENCE).await;
        asked.judge(&UPLOAD, &outcome);
        if !matches!(outcome, Outcome::Answered(_)) {
            break;
        }
        pause(rng, 200).await;
    }
    Ok(())
}

/// In time, if only just; or not.
async fn slow(world: &World, rng: &mut Rng) -> io::Result<()> {
    let mut proxy = connect(world, Version::HTTP_11).await?;
    let asked = world.books.ask();
    match rng.u8(..4) {
        0 => {
            let outcome = raw(&mut proxy, b"GET /slow HTTP/1.1\r\nHost: soak", true).await;
            asked.judge(&SLOW_HEAD, &outcome);
        }
        1 => {
            let head = b"GET /slow HTTP/1.1\r\nHost: soak.test\r\nConnection: close\r\n\r\n";
            asked.judge(&SLOW, &in_parts(&mut proxy, head, 10, rng).await);
        }
        2 => {
            let mut whole = b"POST /upload HTTP/1.1\r\nHost: soak.test\r\nConnection: close\r\n\
                Content-Length: 20000\r\n\r\n"
                .to_vec();
            whole.resize(whole.len() + 20_000, b's');
            asked.judge(&UPLOAD, &in_parts(&mut proxy, &whole, 4000, rng).await);
        }
        _ => {
            let head = b"GET /big HTTP/1.1\r\nHost: soak.test\r\nConnection: close\r\n\r\n";
            let outcome = match raw(&mut proxy, head, false).await {
                Outcome::Answered(200) => read_slowly(&mut proxy, rng).await,
                other => other,
            };
            asked.judge(&BIG, &outcome);
        }
    }
    Ok(())
}

async fn in_parts(proxy: &mut Socket, bytes: &[u8], part: usize, rng: &mut Rng) -> Outcome {
    for part in bytes.chunks(part) {
        // A proxy that has answered before the end may close.
        if proxy.write_all(part).await.is_err() {
            break;
        }
        pause(rng, 150).await;
    }
    raw(proxy, b"", true).await
}

async fn read_slowly(proxy: &mut Socket, rng: &mut Rng) -> Outcome {
    let (mut left, mut some) = (BIG_BYTES, vec![0; 64 << 10]);
    while left > 0 {
        match timeout(PATIENCE, proxy.read(&mut some)).await {
            Ok(Ok(read @ 1..)) => left = left.saturating_sub(read),
            Ok(_) => return Outcome::Cut(200),
            Err(_) => return Outcome::Hung,
        }
        pause(rng, 50).await;
    }
    Outcome::Answered(200)
}

/// Leaves in the middle of something.
async fn impatient(world: &World, rng: &mut Rng) -> io::Result<()> {
    if rng.bool() {
        return give_up_streams(world, rng.u32(1..20), rng).await;
    }
    let mut proxy = connect(world, Version::HTTP_11).await?;
    let asked = world.books.ask();
    let begun: &[u8] = match rng.u8(..4) {
        0 => b"GET /slow HTTP/1.1\r\nHost: so",
        1 => b"GET /slots HTTP/1.1\r\nHost: soak.test\r\n\r\n",
        2 => b"POST /upload HTTP/1.1\r\nHost: soak.test\r\nContent-Length: 1000\r\n\r\nhalf",
        _ => b"GET /big HTTP/1.1\r\nHost: soak.test\r\n\r\n",
    };
    proxy.write_all(begun).await?;
    pause(rng, 100).await;
    // What has not been read makes this a reset.
    drop(proxy);
    asked.give_up();
    Ok(())
}

/// Requests on HTTP/2 that are reset soon, or at once.
async fn give_up_streams(world: &World, count: u32, rng: &mut Rng) -> io::Result<()> {
    let mut proxy = handshake2(connect(world, Version::HTTP_2).await?).await?;
    for number in 0..count {
        // Too many of them, and it is.
        if proxy.is_closed() {
            break;
        }
        let request = request("http://soak.test", &SLOW, rng, number, Bytes::new());
        let asked = world.books.ask();
        let soon = Duration::from_millis(rng.u64(..3));
        drop(timeout(soon, proxy.send_request(request)).await);
        asked.give_up();
    }
    Ok(())
}

/// What is no request, or wants to keep the proxy busy.
async fn hostile(world: &World, rng: &mut Rng) -> io::Result<()> {
    if world.tls.is_some() && rng.u8(..4) == 0 {
        return no_handshake(world, rng).await;
    }
    let hostile: Vec<u8> = match rng.u8(..6) {
        0 => [&noise(2000, rng)[..], b"\r\n\r\n"].concat(),
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
            &noise(500, rng)[..],
        ]
        .concat(),
        _ => return give_up_streams(world, 600, rng).await,
    };
    let mut proxy = connect(world, Version::HTTP_11).await?;
    let asked = world.books.ask();
    let outcome = raw(&mut proxy, &hostile, false).await;
    asked.refused(NOT_UNDERSTOOD, &outcome);
    Ok(())
}

/// Begins as TLS, or doesn't, and never gets to a request.
async fn no_handshake(world: &World, rng: &mut Rng) -> io::Result<()> {
    let mut proxy = TcpStream::connect(world.proxy).await?;
    let begun = [&b"\x16\x03\x01\x02\0\x01"[..], &noise(300, rng)].concat();
    proxy
        .write_all(if rng.bool() {
            &begun
        } else {
            b"GET /free HTTP/1.1\r\nHost: a\r\n\r\n"
        })
        .await?;
    pause(rng, 200).await;
    Ok(())
}

fn draw(rng: &mut Rng) -> &'static Route {
    rng.choice(&ROUTES).unwrap()
}

/// By some user, with a number that the answer has to repeat.
fn request(
    origin: &str,
    route: &Route,
    rng: &mut Rng,
    number: u32,
    body: Bytes,
) -> Request<Full<Bytes>> {
    // Half of all requests are a few users'.
    let user = if rng.bool() {
        rng.u32(..5)
    } else {
        rng.u32(..USERS)
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

/// Sends bytes and reads the head of an answer; with `to_end` until the proxy closes.
async fn raw(proxy: &mut Socket, bytes: &[u8], to_end: bool) -> Outcome {
    let mut head = Vec::new();
    let there_and_back = async {
        // Who is refused early may find the connection closed, and the answer there.
        let sent = proxy.write_all(bytes).await;
        while to_end || !head.ends_with(b"\r\n\r\n") {
            match proxy.read_u8().await {
                Ok(byte) => head.push(byte),
                Err(error) => return sent.err().unwrap_or(error).to_string(),
            }
        }
        String::new()
    };
    let Ok(error) = timeout(PATIENCE, there_and_back).await else {
        return Outcome::Hung;
    };
    let status = head
        .get(9..12)
        .and_then(|status| std::str::from_utf8(status).ok()?.parse().ok());
    status.map_or(Outcome::Nothing(error), Outcome::Answered)
}

fn noise(len: usize, rng: &mut Rng) -> Vec<u8> {
    let mut noise = vec![0; len];
    rng.fill(&mut noise);
    noise
}

async fn pause(rng: &mut Rng, most_ms: u64) {
    sleep(Duration::from_millis(rng.u64(..most_ms))).await;
}

type Socket = Box<dyn Wire>;

/// A connection to the proxy, by TLS if it wants that.
async fn connect(world: &World, version: Version) -> io::Result<Socket> {
    let stream = TcpStream::connect(world.proxy).await?;
    let Some(tls) = &world.tls else {
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

async fn handshake2(socket: Socket) -> io::Result<http2::SendRequest<Full<Bytes>>> {
    let handshake = http2::handshake(TokioExecutor::new(), TokioIo::new(socket)).await;
    let (sender, connection) = handshake.map_err(io::Error::other)?;
    tokio::spawn(async move { connection.await.unwrap_or_default() });
    Ok(sender)
}
