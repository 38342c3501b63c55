//! Tunnels after an upgrade: data integrity, closing and limits.

use super::support::*;
use super::upstreams::{start_tls_upstream, tls_upstream_settings};
use crate::proxy::*;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{Notify, mpsc};
use tokio::time::{sleep, timeout};

const UPGRADE_REQUEST: &[u8] =
    b"GET /chat HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: echo/1\r\n\r\n";
const SWITCHING_RESPONSE: &[u8] =
    b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: echo/1\r\n\r\n";

/// Starts an upstream that accepts every upgrade and then runs `then`.
async fn start_switching_upstream<F>(
    then: impl Fn(TcpStream) -> F + Send + Sync + 'static,
) -> (SocketAddr, Arc<AtomicUsize>)
where
    F: Future<Output = ()> + Send + 'static,
{
    let then = Arc::new(then);
    start_upstream(move |mut client, _| {
        let then = Arc::clone(&then);
        async move {
            if client.read_head().await.is_some() {
                client.send(SWITCHING_RESPONSE).await;
                then(client.0).await;
            }
        }
    })
    .await
}

/// Echoes all input until its end.
async fn echo(mut socket: TcpStream) {
    let (mut reads, mut writes) = socket.split();
    tokio::io::copy(&mut reads, &mut writes)
        .await
        .unwrap_or_default();
    writes.shutdown().await.unwrap_or_default();
}

impl RunningServer {
    /// Connects a client and completes its upgrade.
    async fn connect_upgraded(&self) -> TcpStream {
        let mut client = self.connect().await;
        let answer = client.request(UPGRADE_REQUEST).await;
        assert!(
            answer.starts_with("HTTP/1.1 101 ") && answer.contains("upgrade: echo/1"),
            "{answer}"
        );
        client.0
    }
}

async fn read_bytes(socket: &mut TcpStream, bytes: usize) -> Vec<u8> {
    let mut got = vec![0; bytes];
    with_timeout(socket.read_exact(&mut got)).await.unwrap();
    got
}

/// Expects a clean end of the stream and no further bytes.
async fn expect_eof(socket: &mut TcpStream) {
    assert_eq!(with_timeout(socket.read(&mut [0; 10])).await.unwrap(), 0);
}

fn random_bytes(bytes: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(7);
    std::iter::repeat_with(|| random.u8(..))
        .take(bytes)
        .collect()
}

/// Sends `bytes`, closes the write direction, and expects the same bytes back.
async fn expect_echo(socket: TcpStream, bytes: Vec<u8>) {
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
    let (addr, _) = start_switching_upstream(echo).await;
    let server = RunningServer::start_forwarding(&listen_settings(), upstream_settings(addr));
    expect_echo(server.connect_upgraded().await, random_bytes(16 << 20)).await;
    wait_until(|| server.load.open_connections() == 0).await;
}

#[tokio::test]
async fn megabytes_pass_through_tls_and_end_in_good_order() {
    let addr = start_tls_upstream(|mut stream| async move {
        assert!(stream.read(&mut [0; 4096]).await.unwrap() > 0);
        stream.write_all(SWITCHING_RESPONSE).await.unwrap();
        let (mut reads, mut writes) = tokio::io::split(stream);
        // An end without close_notify would be an error here.
        tokio::io::copy(&mut reads, &mut writes).await.unwrap();
        writes.shutdown().await.unwrap();
    })
    .await;
    let server = RunningServer::start_forwarding(
        &listen_settings(),
        tls_upstream_settings(addr, Some("orders.internal")),
    );
    expect_echo(server.connect_upgraded().await, random_bytes(4 << 20)).await;
}

#[tokio::test]
async fn bytes_sent_with_the_heads_are_not_lost() {
    let (addr, _) = start_upstream(|mut client, _| async move {
        client.read_head().await;
        client
            .send(&[SWITCHING_RESPONSE, b"welcome"].concat())
            .await;
        echo(client.0).await;
    })
    .await;
    let server = RunningServer::start_forwarding(&listen_settings(), upstream_settings(addr));
    let mut client = server.connect().await;
    client.send(&[UPGRADE_REQUEST, b"early"].concat()).await;
    assert!(client.read_response().await.starts_with("HTTP/1.1 101 "));
    assert_eq!(read_bytes(&mut client.0, 12).await, b"welcomeearly");
}

#[tokio::test]
async fn either_side_may_half_close() {
    let (addr, _) = start_switching_upstream(|mut socket| async move {
        let mut heard = String::new();
        socket.read_to_string(&mut heard).await.unwrap();
        socket
            .write_all(format!("heard {heard}").as_bytes())
            .await
            .unwrap();
    })
    .await;
    let server = RunningServer::start_forwarding(&listen_settings(), upstream_settings(addr));
    let mut client = server.connect_upgraded().await;
    client.write_all(b"all").await.unwrap();
    client.shutdown().await.unwrap();
    assert_eq!(read_bytes(&mut client, 9).await, b"heard all");
    expect_eof(&mut client).await;
}

/// Starts an upstream that closes its write direction while it receives. After `pause`, it reports
/// the number of bytes received.
async fn start_half_closing_upstream(pause: Duration) -> (SocketAddr, mpsc::Receiver<usize>) {
    let (count_tx, counted) = mpsc::channel(1);
    let (addr, _) = start_switching_upstream(move |mut socket| {
        let count_tx = count_tx.clone();
        async move {
            let mut rest = vec![0; 1 << 20];
            socket.read_exact(&mut rest).await.unwrap();
            socket.write_all(b"bye").await.unwrap();
            socket.shutdown().await.unwrap();
            sleep(pause).await;
            socket.read_to_end(&mut rest).await.unwrap();
            count_tx.send(rest.len()).await.unwrap();
        }
    })
    .await;
    (addr, counted)
}

#[tokio::test]
async fn an_upstream_that_half_closes_still_receives_every_byte() {
    let (addr, mut counted) = start_half_closing_upstream(ms(0)).await;
    let server = RunningServer::start_forwarding(&listen_settings(), upstream_settings(addr));
    let (mut reads, mut writes) = server.connect_upgraded().await.into_split();
    // More than all buffers hold, so that data is in transit when the close is forwarded.
    writes.write_all(&vec![b'x'; 16 << 20]).await.unwrap();
    let mut got = String::new();
    with_timeout(reads.read_to_string(&mut got)).await.unwrap();
    assert_eq!(got, "bye");
    writes.write_all(b"one more").await.unwrap();
    drop(writes);
    assert_eq!(with_timeout(counted.recv()).await, Some((16 << 20) + 8));
    wait_until(|| server.load.open_connections() == 0).await;
}

#[tokio::test]
async fn a_client_is_not_cut_for_a_slow_upstream() {
    let (addr, mut counted) = start_half_closing_upstream(ms(400)).await;
    let settings = ListenSettings {
        body_idle_timeout: ms(100),
        ..listen_settings()
    };
    let server = RunningServer::start_forwarding(&settings, upstream_settings(addr));
    let (_reads, mut writes) = server.connect_upgraded().await.into_split();
    writes.write_all(&vec![b'x'; 16 << 20]).await.unwrap();
    drop(writes);
    assert_eq!(with_timeout(counted.recv()).await, Some(16 << 20));
}

#[tokio::test]
async fn an_upstream_reset_closes_the_client_after_the_last_bytes() {
    let (addr, _) = start_switching_upstream(|mut socket| async move {
        socket.read_u8().await.unwrap();
        socket.write_all(b"last words").await.unwrap();
        // With unread bytes, closing sends a reset.
        socket.readable().await.unwrap();
    })
    .await;
    let server = RunningServer::start_forwarding(&listen_settings(), upstream_settings(addr));
    let mut client = server.connect_upgraded().await;
    client.write_all(b"ab").await.unwrap();
    assert_eq!(read_bytes(&mut client, 10).await, b"last words");
    expect_eof(&mut client).await;
    drop(client);
    wait_until(|| server.load.open_connections() == 0).await;
}

#[tokio::test]
async fn a_client_that_writes_after_the_upstream_closed_is_cut() {
    let (addr, _) = start_switching_upstream(|_gone| async {}).await;
    let server = RunningServer::start_forwarding(&listen_settings(), upstream_settings(addr));
    let mut client = server.connect_upgraded().await;
    expect_eof(&mut client).await;
    with_timeout(async { while client.write_all(b"more").await.is_ok() {} }).await;
    wait_until(|| server.load.open_connections() == 0).await;
}

#[tokio::test]
async fn a_client_reset_closes_the_upstream_connection() {
    let gone = Arc::new(Notify::new());
    let notify = Arc::clone(&gone);
    let (addr, _) = start_switching_upstream(move |mut socket| {
        let notify = Arc::clone(&notify);
        async move {
            socket.write_all(b"unread").await.unwrap();
            while let Ok(1..) = socket.read(&mut [0; 100]).await {}
            notify.notify_one();
        }
    })
    .await;
    let server = RunningServer::start_forwarding(&listen_settings(), upstream_settings(addr));
    let client = server.connect_upgraded().await;
    client.readable().await.unwrap();
    client.set_zero_linger().unwrap();
    drop(client);
    with_timeout(gone.notified()).await;
    wait_until(|| server.load.open_connections() == 0).await;
}

#[tokio::test]
async fn a_client_that_does_not_read_holds_the_upstream_back_and_is_cut() {
    let written = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&written);
    let (addr, _) = start_switching_upstream(move |mut socket| {
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
        ..listen_settings()
    };
    let server = RunningServer::start_forwarding(&settings, upstream_settings(addr));
    let client = server.connect_upgraded().await;
    wait_until(|| server.load.open_connections() == 0).await;
    let held = written.load(Ordering::SeqCst);
    // The kernel's buffers of two sockets, in both directions, and the proxy's own.
    assert!(
        held < 24 << 20,
        "{held} bytes were accepted for a client that does not read"
    );
    drop(client);
}

#[tokio::test]
async fn a_tunnel_without_an_idle_timeout_may_be_silent() {
    let (addr, _) = start_switching_upstream(echo).await;
    let settings = ListenSettings {
        idle_timeout: ms(50),
        header_timeout: ms(50),
        body_idle_timeout: ms(50),
        ..listen_settings()
    };
    let server = RunningServer::start_forwarding(
        &settings,
        UpstreamSettings {
            response_timeout: Some(ms(50)),
            pool_idle_timeout: ms(50),
            ..upstream_settings(addr)
        },
    );
    let mut client = server.connect_upgraded().await;
    sleep(ms(300)).await;
    client.write_all(b"still here").await.unwrap();
    assert_eq!(read_bytes(&mut client, 10).await, b"still here");
}

#[tokio::test]
async fn an_idle_tunnel_ends_after_its_configured_timeout() {
    let (addr, _) = start_switching_upstream(echo).await;
    let settings = UpstreamSettings {
        body_idle_timeout: Some(ms(200)),
        ..upstream_settings(addr)
    };
    let server = RunningServer::start_forwarding(&listen_settings(), settings);
    let mut client = server.connect_upgraded().await;
    for _ in 0..6 {
        sleep(ms(50)).await;
        client.write_all(b"x").await.unwrap();
        assert_eq!(read_bytes(&mut client, 1).await, b"x");
    }
    expect_eof(&mut client).await;
}

#[tokio::test]
async fn a_client_that_stays_open_after_the_upstream_closed_is_cut() {
    let (addr, _) = start_switching_upstream(|mut socket| async move {
        socket.shutdown().await.unwrap();
        socket
            .read_to_end(&mut Vec::new())
            .await
            .unwrap_or_default();
    })
    .await;
    let settings = ListenSettings {
        body_idle_timeout: ms(100),
        ..listen_settings()
    };
    let server = RunningServer::start_forwarding(&settings, upstream_settings(addr));
    let mut client = server.connect_upgraded().await;
    expect_eof(&mut client).await;
    wait_until(|| server.load.open_connections() == 0).await;
}

#[tokio::test]
async fn a_tunnel_counts_as_an_upstream_connection_until_it_ends() {
    let (addr, connections) = start_switching_upstream(echo).await;
    let settings = UpstreamSettings {
        max_connections: 1,
        queue_timeout: ms(100),
        ..upstream_settings(addr)
    };
    let server = RunningServer::start_forwarding(&listen_settings(), settings);
    let client = server.connect_upgraded().await;
    assert!(
        server
            .connect()
            .await
            .request(UPGRADE_REQUEST)
            .await
            .ends_with("queue_timeout")
    );
    drop(client);
    server.connect_upgraded().await;
    assert_eq!(connections.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn an_unrequested_protocol_switch_is_an_error() {
    let requests = [
        GET,
        b"GET / HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: other\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: echo/2, echo\r\n\r\n",
    ];
    let (addr, _) = start_switching_upstream(echo).await;
    let server = RunningServer::start_forwarding(&listen_settings(), upstream_settings(addr));
    for request in requests {
        assert!(
            server
                .connect()
                .await
                .request(request)
                .await
                .ends_with("protocol")
        );
    }
}

#[tokio::test]
async fn a_refused_upgrade_is_handled_as_a_plain_request() {
    let refused =
        b"HTTP/1.1 426 Upgrade Required\r\nupgrade: echo/2\r\ncontent-length: 2\r\n\r\nno";
    let (addr, connections) = start_upstream(move |mut client, _| async move {
        client.read_head().await;
        client.send(refused).await;
        assert_eq!(
            client.read_head().await.unwrap().lines().next(),
            Some("GET / HTTP/1.1")
        );
        client
            .send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
            .await;
        client.read_to_end().await;
    })
    .await;
    let server = RunningServer::start_forwarding(&listen_settings(), upstream_settings(addr));
    let mut client = server.connect().await;
    // A proxy that assumed an upgrade would forward these bytes unparsed.
    client.send(&[UPGRADE_REQUEST, GET].concat()).await;
    assert!(client.read_response().await.ends_with("no"));
    assert!(client.read_response().await.ends_with("ok"));
    assert_eq!(connections.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_rejected_upload_with_an_upgrade_header_receives_its_response() {
    let server = RunningServer::start_with_fn(&listen_settings(), |request, _| async move {
        request.into_body().discard();
        let mut response = text_response(::http::StatusCode::TOO_MANY_REQUESTS, "no");
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
    with_timeout(client.0.readable()).await.unwrap();
    // The kernel answers input to a closed socket with a reset.
    client.send(&vec![b'x'; 500_000]).await;
    assert!(client.read_response().await.ends_with("no"));
    client.0.shutdown().await.unwrap();
    expect_eof(&mut client.0).await;
}

#[tokio::test]
async fn draining_waits_for_tunnels() {
    let (addr, _) = start_switching_upstream(echo).await;
    let shutdown = ShutdownSettings {
        delay: ms(0),
        grace: ms(4000),
    };
    let mut server = RunningServer::start_forwarding_with_shutdown(
        &listen_settings(),
        upstream_settings(addr),
        shutdown,
    );
    let mut client = server.connect_upgraded().await;
    let mut idle = server.connect().await;
    server.shutdown_signal.send_replace(ShutdownSignal::Drain);
    assert_eq!(idle.read_to_end().await, "");
    client.write_all(b"still").await.unwrap();
    assert_eq!(read_bytes(&mut client, 5).await, b"still");
    assert!(!server.task.is_finished());
    drop(client);
    assert_eq!(with_timeout(&mut server.task).await.unwrap().unwrap(), 0);
}

#[tokio::test]
async fn a_tunnel_that_outlasts_the_grace_is_cut_and_counted() {
    let (addr, _) = start_switching_upstream(echo).await;
    let shutdown = ShutdownSettings {
        delay: ms(0),
        grace: ms(50),
    };
    let mut server = RunningServer::start_forwarding_with_shutdown(
        &listen_settings(),
        upstream_settings(addr),
        shutdown,
    );
    let mut client = server.connect_upgraded().await;
    server.shutdown_signal.send_replace(ShutdownSignal::Drain);
    assert_eq!(with_timeout(&mut server.task).await.unwrap().unwrap(), 1);
    assert!(!matches!(
        with_timeout(client.read(&mut [0; 10])).await,
        Ok(1..)
    ));
}
