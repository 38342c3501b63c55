//! SIGTERM under load: nothing that was sent in time is lost.

use crate::support::client::{Ask, ClientBody, RawClient, http2};
use crate::support::frames::*;
use crate::support::proxy::Proxy;
use crate::support::upstream::{RawUpstream, Upstream, echo};
use crate::support::{SOON, eventually};
use hyper::{Request, StatusCode};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;

const DELAY: Duration = Duration::from_millis(800);

/// What clients have seen.
#[derive(Clone, Default)]
struct Seen {
    answered: Arc<AtomicU64>,
    /// When each request was sent that got no whole answer.
    lost: Arc<std::sync::Mutex<Vec<(&'static str, Instant)>>>,
}

impl Seen {
    fn note(&self, who: &'static str, sent: Instant, whole: bool) {
        match whole {
            true => _ = self.answered.fetch_add(1, Ordering::Relaxed),
            false => self.lost.lock().unwrap().push((who, sent)),
        }
    }
}

/// Answers after some milliseconds, and echoes what follows an upgrade.
async fn upstream() -> RawUpstream {
    RawUpstream::scripted(|_, mut socket| async move {
        while let Some(request) = socket.request().await {
            if request
                .windows(8)
                .any(|part| part.eq_ignore_ascii_case(b"upgrade:"))
            {
                socket
                    .send(b"HTTP/1.1 101 S\r\nUpgrade: chat\r\nConnection: upgrade\r\n\r\n")
                    .await;
                let (mut reads, mut writes) = socket.stream().split();
                tokio::io::copy(&mut reads, &mut writes)
                    .await
                    .unwrap_or_default();
                return;
            }
            tokio::time::sleep(Duration::from_millis(3)).await;
            socket
                .send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")
                .await;
        }
    })
    .await
}

/// Connects until nobody listens any more, and says when it last could.
async fn probe(address: SocketAddr) -> Instant {
    let mut last = Instant::now();
    loop {
        let start = Instant::now();
        if TcpStream::connect(address).await.is_err() {
            return last;
        }
        last = start;
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// One request after the other; a connection that has said that it closes is replaced.
async fn keep_alive(address: SocketAddr, pause: Duration, seen: Seen) {
    while let Ok(socket) = TcpStream::connect(address).await {
        let mut client = RawClient::over(socket);
        loop {
            // A close between requests is no loss, if it is seen before the next one is sent.
            if client.closes(pause.max(Duration::from_micros(1))).await {
                break;
            }
            let sent = Instant::now();
            let reply = client
                .send("GET / HTTP/1.1\r\nHost: a\r\n\r\n")
                .await
                .reply_or_close()
                .await;
            seen.note(
                "h1",
                sent,
                reply
                    .as_ref()
                    .is_some_and(|reply| reply.status == 200 && reply.complete),
            );
            if reply.is_none_or(|reply| reply.header("connection") == Some("close")) {
                break;
            }
        }
    }
}

/// The same by HTTP/2. What GOAWAY keeps from being sent is not lost.
async fn multiplexed(address: SocketAddr, seen: Seen) {
    while TcpStream::connect(address).await.is_ok() {
        let mut sender = http2(address).await;
        while sender.ready().await.is_ok() {
            let sent = Instant::now();
            match sender
                .send_request(
                    Request::get("http://a/")
                        .body(ClientBody::default())
                        .unwrap(),
                )
                .await
            {
                Ok(answer) => seen.note("h2", sent, answer.status() == StatusCode::OK),
                Err(error) if error.is_canceled() => break,
                Err(_) => seen.note("h2", sent, false),
            }
        }
    }
}

/// Talks through a tunnel until it is told to end, in good order.
async fn chat(address: SocketAddr, mut end: watch::Receiver<bool>, seen: Seen) {
    let mut client = RawClient::connect(address).await;
    let upgrade = "GET /chat HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: chat\r\n\r\n";
    assert_eq!(
        client.send(upgrade).await.any_reply(false).await.status,
        101
    );
    while !*end.borrow_and_update() {
        let sent = Instant::now();
        client.send("hello?").await;
        seen.note(
            "tunnel",
            sent,
            client.read_past(b"hello?").await == b"hello?",
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn a_load_of_all_kinds_loses_nothing_that_was_sent_before_the_listener_closed() {
    let upstream = upstream().await;
    let config = format!(
        "[shutdown]\ndelay = '{}ms'\ngrace = '20s'",
        DELAY.as_millis()
    );
    let mut proxy = Proxy::start(&config, upstream.address).await;
    let (seen, (end, ended), address) = (Seen::default(), watch::channel(false), proxy.address);
    let mut clients = JoinSet::new();
    for n in 0..6 {
        // Some send at once, some think for a while.
        clients.spawn(keep_alive(
            address,
            Duration::from_millis(n * 3),
            seen.clone(),
        ));
    }
    for _ in 0..3 {
        clients.spawn(multiplexed(address, seen.clone()));
    }
    let mut chats = JoinSet::new();
    for _ in 0..3 {
        chats.spawn(chat(address, ended.clone(), seen.clone()));
    }
    let mut upload = RawClient::connect(address).await;
    upload
        .send("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\nhalf")
        .await;
    let answered = || seen.answered.load(Ordering::Relaxed);
    eventually("all to be under way", SOON, || {
        (answered() > 100).then_some(())
    })
    .await;

    let told = Instant::now();
    proxy.sigterm();
    let admin = proxy.admin();
    let not_ready = async {
        while Ask::new(admin, "GET", "/readyz")
            .header("host", "localhost")
            .status()
            .await
            != 503
        {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        told.elapsed()
    };
    let (closed, not_ready) = tokio::join!(probe(address), not_ready);
    assert!(
        not_ready < DELAY / 2,
        "readiness comes first, not after {not_ready:?}"
    );
    assert!(
        closed >= told + DELAY - Duration::from_millis(50),
        "it listens for the delay"
    );
    clients.join_all().await;
    let lost = seen.lost.lock().unwrap().clone();
    let in_time: Vec<_> = lost
        .iter()
        .filter(|(_, sent)| *sent < closed)
        .map(|(who, sent)| (who, closed - *sent))
        .collect();
    assert!(
        in_time.is_empty(),
        "lost, by client and time before the close: {in_time:?}"
    );
    assert!(proxy.is_running(), "tunnels and the upload are still open");
    let before = answered();
    upload.send("-done!").await;
    let reply = upload.reply().await;
    assert_eq!(
        (reply.status, reply.header("connection")),
        (200, Some("close"))
    );
    eventually("tunnels to go on", SOON, || {
        (answered() > before + 10).then_some(())
    })
    .await;
    end.send_replace(true);
    chats.join_all().await;
    assert_eq!(proxy.ended(SOON).await.status.code(), Some(0));
    let said = proxy.log();
    assert!(said.contains("\"connections_cut\":0"), "{said}");
}

#[tokio::test]
async fn http2_clients_are_told_before_they_are_left() {
    let gate = Arc::new(Semaphore::new(0));
    let opened = Arc::clone(&gate);
    let upstream = Upstream::serving(move |request| {
        let gate = Arc::clone(&gate);
        async move {
            gate.acquire().await.unwrap().forget();
            echo(request).await
        }
    })
    .await;
    let mut proxy = Proxy::start("", upstream.address).await;
    let mut client = Framed::connect(proxy.address, &[]).await;
    client.send(get(1, "/")).await;
    eventually("the request to arrive", SOON, || {
        (upstream.seen().len() == 1).then_some(())
    })
    .await;
    proxy.sigterm();
    let first = client.find("a warning", |frame| frame.kind == GOAWAY).await;
    assert_eq!(first.code(), Some(0));
    assert_eq!(
        first.payload[..4],
        [0x7f, 0xff, 0xff, 0xff],
        "no stream is refused yet"
    );
    let ping = client
        .find("a question", |frame| (frame.kind, frame.flags) == (PING, 0))
        .await;
    // Sent before the warning was seen.
    client.send(get(3, "/")).await;
    eventually("it to arrive too", SOON, || {
        (upstream.seen().len() == 2).then_some(())
    })
    .await;
    client.send(frame(PING, ACK, 0, &ping.payload)).await;
    let second = client
        .find("the last word", |frame| frame.kind == GOAWAY)
        .await;
    assert_eq!(
        (second.code(), &second.payload[..4]),
        (Some(0), &[0, 0, 0, 3][..])
    );
    opened.add_permits(2);
    let mut ended = Vec::new();
    while ended.len() < 2 {
        let end = client
            .find("both ends", |frame| {
                frame.kind == DATA && frame.flags & END_STREAM != 0
            })
            .await;
        ended.push(end.stream);
    }
    assert!(client.end(SOON).await.0);
    assert_eq!(proxy.ended(SOON).await.status.code(), Some(0));
}
