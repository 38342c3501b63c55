//! After an upgrade: every byte, both ends, and the bounds.

use super::support::*;
use super::upstreams::{tls_settings, tls_upstream};
use crate::proxy::*;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{Notify, mpsc};
use tokio::time::{sleep, timeout};

const ASK: &[u8] =
    b"GET /chat HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: echo/1\r\n\r\n";
const SWITCH: &[u8] =
    b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: echo/1\r\n\r\n";

/// An upstream that grants every upgrade, and then does this.
async fn switching<F>(
    then: impl Fn(TcpStream) -> F + Send + Sync + 'static,
) -> (SocketAddr, Arc<AtomicUsize>)
where
    F: Future<Output = ()> + Send + 'static,
{
    let then = Arc::new(then);
    upstream(move |mut client, _| {
        let then = Arc::clone(&then);
        async move {
            if client.head().await.is_some() {
                client.send(SWITCH).await;
                then(client.0).await;
            }
        }
    })
    .await
}

/// Sends back what comes, until that ends.
async fn echo(mut socket: TcpStream) {
    let (mut reads, mut writes) = socket.split();
    tokio::io::copy(&mut reads, &mut writes)
        .await
        .unwrap_or_default();
    writes.shutdown().await.unwrap_or_default();
}

impl Running {
    /// A client whose upgrade was granted.
    async fn upgraded(&self) -> TcpStream {
        let mut client = self.connect().await;
        let answer = client.ask(ASK).await;
        assert!(
            answer.starts_with("HTTP/1.1 101 ") && answer.contains("upgrade: echo/1"),
            "{answer}"
        );
        client.0
    }
}

async fn read(socket: &mut TcpStream, bytes: usize) -> Vec<u8> {
    let mut got = vec![0; bytes];
    soon(socket.read_exact(&mut got)).await.unwrap();
    got
}

/// The end in good order, with nothing before it.
async fn ends(socket: &mut TcpStream) {
    assert_eq!(soon(socket.read(&mut [0; 10])).await.unwrap(), 0);
}

fn noise(bytes: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(7);
    std::iter::repeat_with(|| random.u8(..))
        .take(bytes)
        .collect()
}

/// Sends `bytes` and its end, and expects the same back.
async fn there_and_back(socket: TcpStream, bytes: Vec<u8>) {
    let (mut reads, mut writes) = socket.into_split();
    let sent = bytes.clone();
    let sending = tokio::spawn(async move {
        writes.write_all(&sent).await.unwrap();
        writes.shutdown().await.unwrap();
    });
    let mut got = Vec::new();
    timeout(Duration::from_secs(30), reads.read_to_end(&mut got))
        .await
        .expect("too slow")
        .unwrap();
    sending.await.unwrap();
    assert!(got == bytes, "{} of {} bytes", got.len(), bytes.len());
}

#[tokio::test]
async fn megabytes_pass_both_ways_at_once_unchanged() {
    let (addr, _) = switching(echo).await;
    let server = Running::forwarding(&listen(), upstream_at(addr));
    there_and_back(server.upgraded().await, noise(16 << 20)).await;
    eventually(|| server.load.connections() == 0).await;
}

#[tokio::test]
async fn megabytes_pass_through_tls_and_end_in_good_order() {
    let addr = tls_upstream(|mut stream| async move {
        assert!(stream.read(&mut [0; 4096]).await.unwrap() > 0);
        stream.write_all(SWITCH).await.unwrap();
        let (mut reads, mut writes) = tokio::io::split(stream);
        // An end without a goodbye would be an error here.
        tokio::io::copy(&mut reads, &mut writes).await.unwrap();
        writes.shutdown().await.unwrap();
    })
    .await;
    let server = Running::forwarding(&listen(), tls_settings(addr, Some("orders.internal")));
    there_and_back(server.upgraded().await, noise(4 << 20)).await;
}

#[tokio::test]
async fn what_comes_together_with_the_heads_is_not_lost() {
    let (addr, _) = upstream(|mut client, _| async move {
        client.head().await;
        client.send(&[SWITCH, b"welcome"].concat()).await;
        echo(client.0).await;
    })
    .await;
    let server = Running::forwarding(&listen(), upstream_at(addr));
    let mut client = server.connect().await;
    client.send(&[ASK, b"early"].concat()).await;
    assert!(client.response().await.starts_with("HTTP/1.1 101 "));
    assert_eq!(read(&mut client.0, 12).await, b"welcomeearly");
}

#[tokio::test]
async fn either_side_may_end_first_and_still_listen() {
    let (addr, _) = switching(|mut socket| async move {
        let mut heard = String::new();
        socket.read_to_string(&mut heard).await.unwrap();
        socket
            .write_all(format!("heard {heard}").as_bytes())
            .await
            .unwrap();
    })
    .await;
    let server = Running::forwarding(&listen(), upstream_at(addr));
    let mut client = server.upgraded().await;
    client.write_all(b"all").await.unwrap();
    client.shutdown().await.unwrap();
    assert_eq!(read(&mut client, 9).await, b"heard all");
    ends(&mut client).await;
}

/// Ends its own side in the middle of what it gets, and counts all of that after a while.
async fn ends_first_and_counts(pause: Duration) -> (SocketAddr, mpsc::Receiver<usize>) {
    let (told, counted) = mpsc::channel(1);
    let (addr, _) = switching(move |mut socket| {
        let told = told.clone();
        async move {
            let mut rest = vec![0; 1 << 20];
            socket.read_exact(&mut rest).await.unwrap();
            socket.write_all(b"bye").await.unwrap();
            socket.shutdown().await.unwrap();
            sleep(pause).await;
            socket.read_to_end(&mut rest).await.unwrap();
            told.send(rest.len()).await.unwrap();
        }
    })
    .await;
    (addr, counted)
}

#[tokio::test]
async fn an_upstream_may_end_first_and_still_listen_to_every_byte() {
    let (addr, mut counted) = ends_first_and_counts(ms(0)).await;
    let server = Running::forwarding(&listen(), upstream_at(addr));
    let (mut reads, mut writes) = server.upgraded().await.into_split();
    // More than anybody's buffers hold, so that some is on its way when the end is passed on.
    writes.write_all(&vec![b'x'; 16 << 20]).await.unwrap();
    let mut got = String::new();
    soon(reads.read_to_string(&mut got)).await.unwrap();
    assert_eq!(got, "bye");
    writes.write_all(b"one more").await.unwrap();
    drop(writes);
    assert_eq!(soon(counted.recv()).await, Some((16 << 20) + 8));
    eventually(|| server.load.connections() == 0).await;
}

#[tokio::test]
async fn a_client_is_not_cut_for_a_slow_upstream() {
    let (addr, mut counted) = ends_first_and_counts(ms(400)).await;
    let settings = ListenSettings {
        body_idle_timeout: ms(100),
        ..listen()
    };
    let server = Running::forwarding(&settings, upstream_at(addr));
    let (_reads, mut writes) = server.upgraded().await.into_split();
    writes.write_all(&vec![b'x'; 16 << 20]).await.unwrap();
    drop(writes);
    assert_eq!(soon(counted.recv()).await, Some(16 << 20));
}

#[tokio::test]
async fn an_upstream_that_dies_ends_the_client_after_its_last_words() {
    let (addr, _) = switching(|mut socket| async move {
        socket.read_u8().await.unwrap();
        socket.write_all(b"last words").await.unwrap();
        // With bytes unread, the kernel resets.
        socket.readable().await.unwrap();
    })
    .await;
    let server = Running::forwarding(&listen(), upstream_at(addr));
    let mut client = server.upgraded().await;
    client.write_all(b"ab").await.unwrap();
    assert_eq!(read(&mut client, 10).await, b"last words");
    ends(&mut client).await;
    drop(client);
    eventually(|| server.load.connections() == 0).await;
}

#[tokio::test]
async fn who_talks_on_to_an_upstream_that_is_gone_is_cut() {
    let (addr, _) = switching(|_gone| async {}).await;
    let server = Running::forwarding(&listen(), upstream_at(addr));
    let mut client = server.upgraded().await;
    ends(&mut client).await;
    soon(async { while client.write_all(b"anybody?").await.is_ok() {} }).await;
    eventually(|| server.load.connections() == 0).await;
}

#[tokio::test]
async fn a_client_that_dies_is_told_to_the_upstream() {
    let gone = Arc::new(Notify::new());
    let notify = Arc::clone(&gone);
    let (addr, _) = switching(move |mut socket| {
        let notify = Arc::clone(&notify);
        async move {
            socket.write_all(b"unread").await.unwrap();
            while let Ok(1..) = socket.read(&mut [0; 100]).await {}
            notify.notify_one();
        }
    })
    .await;
    let server = Running::forwarding(&listen(), upstream_at(addr));
    let client = server.upgraded().await;
    client.readable().await.unwrap();
    client.set_zero_linger().unwrap();
    drop(client);
    soon(gone.notified()).await;
    eventually(|| server.load.connections() == 0).await;
}

#[tokio::test]
async fn a_client_that_does_not_read_holds_the_upstream_back_and_is_cut() {
    let written = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&written);
    let (addr, _) = switching(move |mut socket| {
        let counted = Arc::clone(&counted);
        async move {
            while let Ok(n) = socket.write(&[b'x'; 10_000]).await {
                counted.fetch_add(n, Ordering::SeqCst);
            }
        }
    })
    .await;
    let settings = ListenSettings {
        body_idle_timeout: ms(300),
        ..listen()
    };
    let server = Running::forwarding(&settings, upstream_at(addr));
    let client = server.upgraded().await;
    eventually(|| server.load.connections() == 0).await;
    let held = written.load(Ordering::SeqCst);
    // Two sockets' buffers in the kernel, each way, and a part of ours.
    assert!(
        held < 24 << 20,
        "{held} bytes were taken for a client that reads none"
    );
    drop(client);
}

#[tokio::test]
async fn a_client_may_be_silent_for_as_long_as_it_likes() {
    let (addr, _) = switching(echo).await;
    let settings = ListenSettings {
        idle_timeout: ms(50),
        header_timeout: ms(50),
        body_idle_timeout: ms(50),
        ..listen()
    };
    let server = Running::forwarding(
        &settings,
        UpstreamSettings {
            response_timeout: Some(ms(50)),
            pool_idle_timeout: ms(50),
            ..upstream_at(addr)
        },
    );
    let mut client = server.upgraded().await;
    sleep(ms(300)).await;
    client.write_all(b"still here").await.unwrap();
    assert_eq!(read(&mut client, 10).await, b"still here");
}

#[tokio::test]
async fn a_silent_tunnel_ends_if_that_is_wanted() {
    let (addr, _) = switching(echo).await;
    let settings = UpstreamSettings {
        body_idle_timeout: Some(ms(200)),
        ..upstream_at(addr)
    };
    let server = Running::forwarding(&listen(), settings);
    let mut client = server.upgraded().await;
    for _ in 0..6 {
        sleep(ms(50)).await;
        client.write_all(b"x").await.unwrap();
        assert_eq!(read(&mut client, 1).await, b"x");
    }
    ends(&mut client).await;
}

#[tokio::test]
async fn a_client_that_does_not_follow_its_upstream_is_cut() {
    let (addr, _) = switching(|mut socket| async move {
        socket.shutdown().await.unwrap();
        socket
            .read_to_end(&mut Vec::new())
            .await
            .unwrap_or_default();
    })
    .await;
    let settings = ListenSettings {
        body_idle_timeout: ms(100),
        ..listen()
    };
    let server = Running::forwarding(&settings, upstream_at(addr));
    let mut client = server.upgraded().await;
    ends(&mut client).await;
    eventually(|| server.load.connections() == 0).await;
}

#[tokio::test]
async fn a_tunnel_is_one_of_the_upstreams_connections_until_it_ends() {
    let (addr, connections) = switching(echo).await;
    let settings = UpstreamSettings {
        max_connections: 1,
        queue_timeout: ms(100),
        ..upstream_at(addr)
    };
    let server = Running::forwarding(&listen(), settings);
    let client = server.upgraded().await;
    assert!(
        server
            .connect()
            .await
            .ask(ASK)
            .await
            .ends_with("queue_timeout")
    );
    drop(client);
    server.upgraded().await;
    assert_eq!(connections.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn nobody_is_switched_to_what_he_did_not_ask_for() {
    let asks = [
        GET,
        b"GET / HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: other\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: echo/2, echo\r\n\r\n",
    ];
    let (addr, _) = switching(echo).await;
    let server = Running::forwarding(&listen(), upstream_at(addr));
    for ask in asks {
        assert!(server.connect().await.ask(ask).await.ends_with("protocol"));
    }
}

#[tokio::test]
async fn until_it_is_granted_an_upgrade_is_a_request_like_any_other() {
    let refused =
        b"HTTP/1.1 426 Upgrade Required\r\nupgrade: echo/2\r\ncontent-length: 2\r\n\r\nno";
    let (addr, connections) = upstream(move |mut client, _| async move {
        client.head().await;
        client.send(refused).await;
        assert_eq!(
            client.head().await.unwrap().lines().next(),
            Some("GET / HTTP/1.1")
        );
        client
            .send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
            .await;
        client.rest().await;
    })
    .await;
    let server = Running::forwarding(&listen(), upstream_at(addr));
    let mut client = server.connect().await;
    // Whoever believes in the upgrade would send these bytes on as they are.
    client.send(&[ASK, GET].concat()).await;
    assert!(client.response().await.ends_with("no"));
    assert!(client.response().await.ends_with("ok"));
    assert_eq!(connections.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_rejected_upload_receives_its_response_though_it_spoke_of_an_upgrade() {
    let server = Running::answering(&listen(), |request, _| async move {
        request.into_body().discard();
        let mut response = text(http::StatusCode::TOO_MANY_REQUESTS, "no");
        response
            .headers_mut()
            .insert("connection", "close".parse().unwrap());
        response
    });
    let mut client = server.connect().await;
    client
        .send(b"POST / HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: x\r\n")
        .await;
    client.send(b"content-length: 1000000\r\n\r\n").await;
    client.send(&[b'x'; 1000]).await;
    soon(client.0.readable()).await.unwrap();
    // What arrives at a closed socket is answered with a reset.
    client.send(&vec![b'x'; 500_000]).await;
    assert!(client.response().await.ends_with("no"));
    client.0.shutdown().await.unwrap();
    ends(&mut client.0).await;
}

#[tokio::test]
async fn draining_waits_for_tunnels() {
    let (addr, _) = switching(echo).await;
    let shutdown = ShutdownSettings {
        delay: ms(0),
        grace: ms(4000),
    };
    let mut server = Running::forwarding_until(&listen(), upstream_at(addr), shutdown);
    let mut client = server.upgraded().await;
    let mut idle = server.connect().await;
    server.stop.send_replace(Stop::Drain);
    assert_eq!(idle.rest().await, "");
    client.write_all(b"still").await.unwrap();
    assert_eq!(read(&mut client, 5).await, b"still");
    assert!(!server.ended.is_finished());
    drop(client);
    assert_eq!(soon(&mut server.ended).await.unwrap().unwrap(), 0);
}

#[tokio::test]
async fn a_tunnel_that_outlasts_the_grace_is_cut_and_counted() {
    let (addr, _) = switching(echo).await;
    let shutdown = ShutdownSettings {
        delay: ms(0),
        grace: ms(50),
    };
    let mut server = Running::forwarding_until(&listen(), upstream_at(addr), shutdown);
    let mut client = server.upgraded().await;
    server.stop.send_replace(Stop::Drain);
    assert_eq!(soon(&mut server.ended).await.unwrap().unwrap(), 1);
    assert!(!matches!(soon(client.read(&mut [0; 10])).await, Ok(1..)));
}
