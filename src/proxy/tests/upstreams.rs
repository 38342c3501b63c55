//! Upstream-side behaviour: reuse, retries, limits, timeouts and truncated responses.

use super::support::*;
use crate::proxy::*;
use crate::tls::{ClientTls, TrustedCertificates};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{Notify, mpsc};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::server::TlsStream;

pub(super) const OK_RESPONSE: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";

pub(super) fn post_request(framing: &str) -> Vec<u8> {
    format!("POST / HTTP/1.1\r\nhost: a\r\n{framing}\r\n\r\n").into_bytes()
}

#[tokio::test]
async fn upstream_connections_are_reused() {
    let (addr, connections) = start_upstream(|mut client, _| async move {
        let chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n";
        for answer in [
            OK_RESPONSE,
            b"HTTP/1.1 204 No Content\r\n\r\n",
            chunked,
            OK_RESPONSE,
            OK_RESPONSE,
        ] {
            client.read_head().await;
            client.send(answer).await;
        }
        client.read_to_end().await;
    })
    .await;
    let server = RunningServer::start_forwarding(&listen_settings(), upstream_settings(addr));
    let mut client = server.connect().await;
    assert!(client.request(GET).await.ends_with("ok"));
    assert!(client.request(GET).await.starts_with("HTTP/1.1 204"));
    client.send(GET).await;
    let mut all = String::new();
    while !all.ends_with("0\r\n\r\n") {
        all.push(with_timeout(client.0.read_u8()).await.unwrap().into());
    }
    assert!(client.request(GET).await.ends_with("ok"));
    assert!(server.connect().await.request(GET).await.ends_with("ok"));
    assert_eq!(connections.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn idle_upstream_connections_are_closed() {
    let (addr, connections) =
        start_upstream(|mut client, _| async move { client.serve_response(OK_RESPONSE).await })
            .await;
    let server = RunningServer::start_forwarding(
        &listen_settings(),
        UpstreamSettings {
            pool_idle_timeout: ms(50),
            ..upstream_settings(addr)
        },
    );
    let mut client = server.connect().await;
    client.request(GET).await;
    tokio::time::sleep(ms(100)).await;
    client.request(GET).await;
    assert_eq!(connections.load(Ordering::SeqCst), 2);
}

/// Starts an upstream that responds once and closes when the next request arrives.
async fn start_upstream_closing_at_second_request() -> std::net::SocketAddr {
    start_upstream(|mut client, _| async move {
        client.read_head().await;
        client.send(OK_RESPONSE).await;
        client.read_head().await;
    })
    .await
    .0
}

#[tokio::test]
async fn retries_idempotent_requests_on_a_dead_reused_connection() {
    let server = RunningServer::start_forwarding(
        &listen_settings(),
        upstream_settings(start_upstream_closing_at_second_request().await),
    );
    let mut client = server.connect().await;
    for _ in 0..4 {
        assert!(client.request(GET).await.ends_with("ok"));
    }
    let settings = UpstreamSettings {
        retry_idempotent: false,
        ..upstream_settings(start_upstream_closing_at_second_request().await)
    };
    let server = RunningServer::start_forwarding(&listen_settings(), settings);
    let mut client = server.connect().await;
    assert!(client.request(GET).await.ends_with("ok"));
    assert!(client.request(GET).await.ends_with("terminated"));
}

#[tokio::test]
async fn a_post_is_not_sent_twice() {
    let server = RunningServer::start_forwarding(
        &listen_settings(),
        upstream_settings(start_upstream_closing_at_second_request().await),
    );
    let mut client = server.connect().await;
    assert!(
        client
            .request(&post_request("content-length: 0"))
            .await
            .ends_with("ok")
    );
    assert!(
        client
            .request(&post_request("content-length: 0"))
            .await
            .ends_with("terminated")
    );
    // An idempotent request with a body is not retried: its body is already consumed.
    assert!(client.request(GET).await.ends_with("ok"));
    let put =
        b"PUT / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n";
    assert!(client.request(put).await.ends_with("terminated"));
}

#[tokio::test]
async fn a_request_on_a_new_connection_that_dies_is_not_retried() {
    let (addr, connections) =
        start_upstream(|mut client, _| async move { drop(client.read_head().await) }).await;
    let server = RunningServer::start_forwarding(&listen_settings(), upstream_settings(addr));
    assert!(
        server
            .connect()
            .await
            .request(GET)
            .await
            .ends_with("terminated")
    );
    assert_eq!(connections.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn distinguishes_refused_connections_from_unknown_names() {
    let free = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let server = RunningServer::start_forwarding(
        &listen_settings(),
        UpstreamSettings {
            retry_connect: 2,
            ..upstream_settings(free)
        },
    );
    assert!(
        server
            .connect()
            .await
            .request(GET)
            .await
            .ends_with("connect_refused")
    );
    let url = UpstreamUrl::Net {
        scheme: UpstreamScheme::Http,
        host: "no such host".to_owned(),
        port: 80,
    };
    let server = RunningServer::start_forwarding(
        &listen_settings(),
        UpstreamSettings {
            url,
            ..upstream_settings(free)
        },
    );
    assert!(server.connect().await.request(GET).await.ends_with("dns"));
}

#[tokio::test]
async fn an_answer_that_is_not_http_is_a_protocol_error() {
    for answer in [
        &b"220 smtp.example.com\r\n\r\n"[..],
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",
    ] {
        let (addr, _) =
            start_upstream(move |mut client, _| async move { client.serve_response(answer).await })
                .await;
        let server = RunningServer::start_forwarding(&listen_settings(), upstream_settings(addr));
        assert!(
            server
                .connect()
                .await
                .request(GET)
                .await
                .ends_with("protocol")
        );
    }
}

#[tokio::test]
async fn an_early_answer_ends_the_upload() {
    let closed = Arc::new(Notify::new());
    let notify = Arc::clone(&closed);
    let (addr, _) = start_upstream(move |mut client, _| {
        let notify = Arc::clone(&notify);
        async move {
            client.read_head().await;
            client
                .send(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 2\r\n\r\nno")
                .await;
            client.read_to_end().await;
            notify.notify_one();
        }
    })
    .await;
    let server = RunningServer::start_forwarding(&listen_settings(), upstream_settings(addr));
    let mut client = server.connect().await;
    client.send(&post_request("content-length: 10000000")).await;
    client.send(b"only a part").await;
    assert!(client.read_response().await.starts_with("HTTP/1.1 401"));
    with_timeout(closed.notified()).await;
    drop(client);
    wait_until(|| server.load.open_connections() == 0).await;
}

#[tokio::test]
async fn a_truncated_answer_never_looks_complete() {
    let cut: [&[u8]; 3] = [
        b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\npart",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\npart\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n10\r\npart",
    ];
    for answer in cut {
        let (addr, _) = start_upstream(move |mut client, _| async move {
            client.read_head().await;
            client.send(answer).await;
        })
        .await;
        let server = RunningServer::start_forwarding(&listen_settings(), upstream_settings(addr));
        let mut client = server.connect().await;
        client.send(GET).await;
        let got = client.read_to_end().await;
        assert!(!got.ends_with("0\r\n\r\n") && got.len() < 150, "{got}");
        // For HTTP/1.0, a clean end of the connection would be the end of the body.
        let mut old = server.connect().await;
        old.send(b"GET / HTTP/1.0\r\nhost: a\r\n\r\n").await;
        with_timeout(old.0.read_to_end(&mut Vec::new()))
            .await
            .expect_err("must have been reset");
    }
}

#[tokio::test]
async fn a_stalled_response_is_cut() {
    let (addr, _) = start_upstream(move |mut client, _| async move {
        client
            .serve_response(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\npart")
            .await;
    })
    .await;
    let settings = UpstreamSettings {
        body_idle_timeout: Some(ms(100)),
        ..upstream_settings(addr)
    };
    let server = RunningServer::start_forwarding(&listen_settings(), settings);
    let mut client = server.connect().await;
    client.send(GET).await;
    assert!(client.read_to_end().await.ends_with("part"));
}

#[tokio::test]
async fn a_slow_upload_does_not_count_as_response_time() {
    let (addr, _) = start_upstream(|mut client, _| async move {
        client.read_head().await;
        client.0.read_exact(&mut [0; 3]).await.unwrap();
        if client.0.read_u8().await.unwrap() == b'!' {
            client.send(OK_RESPONSE).await;
        }
        client.read_to_end().await;
    })
    .await;
    let server = RunningServer::start_forwarding(
        &listen_settings(),
        UpstreamSettings {
            response_timeout: Some(ms(100)),
            ..upstream_settings(addr)
        },
    );
    for (last, answer) in [(b"!", "ok"), (b"?", "response_timeout")] {
        let mut client = server.connect().await;
        client.send(&post_request("content-length: 4")).await;
        for _ in 0..3 {
            tokio::time::sleep(ms(60)).await;
            client.send(b"x").await;
        }
        assert!(client.request(last).await.ends_with(answer));
    }
}

#[tokio::test]
async fn an_upstream_that_does_not_read_times_out() {
    let (addr, _) = start_upstream(|client, _| async move {
        let _unread = client;
        std::future::pending::<()>().await;
    })
    .await;
    let server = RunningServer::start_forwarding(
        &listen_settings(),
        UpstreamSettings {
            response_timeout: Some(ms(100)),
            ..upstream_settings(addr)
        },
    );
    let client = server.connect().await;
    let (mut reads, mut writes) = client.0.into_split();
    tokio::spawn(async move {
        writes
            .write_all(&post_request("content-length: 50000000"))
            .await
            .unwrap();
        while writes.write_all(&[b'x'; 65536]).await.is_ok() {}
    });
    let mut head = [0; 12];
    with_timeout(reads.read_exact(&mut head)).await.unwrap();
    assert_eq!(&head, b"HTTP/1.1 502");
}

/// Sends a chunked request in `parts`, without its end. The receiver yields the bytes that the
/// upstream received.
async fn start_chunked_upload(
    listen: ListenSettings,
    parts: &[&[u8]],
) -> (RunningServer, RawTestClient, mpsc::Receiver<String>) {
    let (received_tx, received_rx) = mpsc::channel(1);
    let (addr, _) = start_upstream(move |mut client, _| {
        let received_tx = received_tx.clone();
        async move {
            client.read_head().await;
            received_tx.send(client.read_to_end().await).await.unwrap();
        }
    })
    .await;
    let server = RunningServer::start_forwarding(&listen, upstream_settings(addr));
    let mut client = server.connect().await;
    client
        .send(&post_request("transfer-encoding: chunked"))
        .await;
    for part in parts {
        client.send(part).await;
        tokio::time::sleep(ms(5)).await;
    }
    (server, client, received_rx)
}

#[tokio::test]
async fn a_body_that_is_too_large_is_not_completed() {
    let settings = ListenSettings {
        max_body_bytes: Some(6),
        ..listen_settings()
    };
    let (_server, mut client, mut upstream) =
        start_chunked_upload(settings, &[b"4\r\nabcd\r\n", b"4\r\nefgh\r\n0\r\n\r\n"]).await;
    assert!(
        client
            .read_response()
            .await
            .ends_with("request_body_too_large")
    );
    assert_eq!(
        with_timeout(upstream.recv()).await.unwrap(),
        "4\r\nabcd\r\n"
    );
}

#[tokio::test]
async fn a_body_that_stops_is_not_completed() {
    let settings = ListenSettings {
        body_idle_timeout: ms(100),
        ..listen_settings()
    };
    let (_server, mut client, mut upstream) =
        start_chunked_upload(settings, &[b"4\r\nabcd\r\n"]).await;
    assert!(
        client
            .read_response()
            .await
            .ends_with("request_body_timeout")
    );
    assert_eq!(
        with_timeout(upstream.recv()).await.unwrap(),
        "4\r\nabcd\r\n"
    );
}

#[tokio::test]
async fn the_body_of_a_disconnected_client_is_not_completed() {
    let (_server, client, mut upstream) =
        start_chunked_upload(listen_settings(), &[b"4\r\nabcd\r\n"]).await;
    drop(client);
    assert_eq!(
        with_timeout(upstream.recv()).await.unwrap(),
        "4\r\nabcd\r\n"
    );
}

#[tokio::test]
async fn a_client_disconnect_cancels_its_upstream_request() {
    let (received_tx, mut received_rx) = mpsc::channel(2);
    let (addr, _) = start_upstream(move |mut client, n| {
        let received_tx = received_tx.clone();
        async move {
            received_tx
                .send(client.read_head().await.unwrap())
                .await
                .unwrap();
            if n == 1 {
                client
                    .send(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\npart")
                    .await;
            }
            received_tx.send(client.read_to_end().await).await.unwrap();
        }
    })
    .await;
    let server = RunningServer::start_forwarding(&listen_settings(), upstream_settings(addr));
    for _ in 0..2 {
        let mut client = server.connect().await;
        client.send(GET).await;
        with_timeout(received_rx.recv()).await.unwrap();
        drop(client);
        assert_eq!(with_timeout(received_rx.recv()).await.unwrap(), "");
    }
}

/// Starts an upstream that answers one request per permit and counts its connections.
async fn start_gated_upstream(
    permits: &Arc<tokio::sync::Semaphore>,
) -> (std::net::SocketAddr, Arc<std::sync::atomic::AtomicUsize>) {
    let permits = Arc::clone(permits);
    start_upstream(move |mut client, _| {
        let permits = Arc::clone(&permits);
        async move {
            while client.read_head().await.is_some() {
                permits.acquire().await.unwrap().forget();
                client.send(OK_RESPONSE).await;
            }
        }
    })
    .await
}

#[tokio::test]
async fn waiting_for_a_connection_is_bounded_in_time_and_number() {
    let permits = Arc::new(tokio::sync::Semaphore::new(0));
    let (addr, connections) = start_gated_upstream(&permits).await;
    let server = RunningServer::start_forwarding(
        &listen_settings(),
        UpstreamSettings {
            max_connections: 1,
            max_requests_waiting: 1,
            queue_timeout: ms(400),
            ..upstream_settings(addr)
        },
    );
    let (mut first, mut second, mut third) = (
        server.connect().await,
        server.connect().await,
        server.connect().await,
    );
    first.send(GET).await;
    wait_until(|| connections.load(Ordering::SeqCst) == 1).await;
    second.send(GET).await;
    tokio::time::sleep(ms(30)).await;
    assert!(third.request(GET).await.ends_with("queue_full"));
    assert!(second.read_response().await.ends_with("queue_timeout"));
    second.send(GET).await;
    tokio::time::sleep(ms(30)).await;
    permits.add_permits(2);
    assert!(first.read_response().await.ends_with("ok"));
    assert!(second.read_response().await.ends_with("ok"));
    assert_eq!(
        connections.load(Ordering::SeqCst),
        1,
        "handed over, not opened anew"
    );
}

#[tokio::test]
async fn a_disconnected_client_frees_its_queue_slot() {
    let permits = Arc::new(tokio::sync::Semaphore::new(0));
    let (addr, connections) = start_gated_upstream(&permits).await;
    let settings = UpstreamSettings {
        max_connections: 1,
        max_requests_waiting: 1,
        queue_timeout: Duration::from_secs(5),
        ..upstream_settings(addr)
    };
    let server = RunningServer::start_forwarding(&listen_settings(), settings);
    let mut first = server.connect().await;
    first.send(GET).await;
    wait_until(|| connections.load(Ordering::SeqCst) == 1).await;
    for _ in 0..3 {
        let mut second = server.connect().await;
        second.send(GET).await;
        // The queue has space for only one of them.
        let mut third = server.connect().await;
        third.send(GET).await;
        let full = tokio::select! {
            answer = second.read_response() => answer,
            answer = third.read_response() => answer,
        };
        assert!(full.ends_with("queue_full"));
        drop((second, third));
        wait_until(|| server.load.open_connections() == 1).await;
    }
    permits.add_permits(2);
    assert!(first.read_response().await.ends_with("ok"));
    assert!(
        first.request(GET).await.ends_with("ok"),
        "no other request is queued"
    );
    assert_eq!(connections.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn an_early_response_frees_its_connection_slot() {
    let (addr, connections) = start_upstream(|mut client, _| async move {
        while let Some(head) = client.read_head().await {
            let early = head.starts_with("POST");
            client
                .send(if early {
                    b"HTTP/1.1 401 No\r\ncontent-length: 2\r\n\r\nno"
                } else {
                    OK_RESPONSE
                })
                .await;
        }
    })
    .await;
    let settings = UpstreamSettings {
        max_connections: 1,
        ..upstream_settings(addr)
    };
    let server = RunningServer::start_forwarding(&listen_settings(), settings);
    for _ in 0..3 {
        let mut client = server.connect().await;
        client.send(&post_request("content-length: 10000000")).await;
        client.send(b"only a part").await;
        assert!(client.read_response().await.starts_with("HTTP/1.1 401"));
        // This upload is still open and may continue for long.
        assert!(server.connect().await.request(GET).await.ends_with("ok"));
    }
    assert!(
        connections.load(Ordering::SeqCst) > 1,
        "a connection with an incomplete request must not be reused"
    );
}

#[tokio::test]
async fn an_idle_connection_of_one_worker_yields_its_slot_to_another() {
    let (addr, connections) =
        start_upstream(|mut client, _| async move { client.serve_response(OK_RESPONSE).await })
            .await;
    let server = RunningServer::start_forwarding(
        &ListenSettings {
            threads: 2,
            ..listen_settings()
        },
        UpstreamSettings {
            max_connections: 1,
            queue_timeout: ms(2000),
            ..upstream_settings(addr)
        },
    );
    let (mut one, mut two) = (server.connect().await, server.connect().await);
    for _ in 0..3 {
        assert!(one.request(GET).await.ends_with("ok"));
        assert!(two.request(GET).await.ends_with("ok"));
    }
    assert_eq!(connections.load(Ordering::SeqCst), 6);
}

#[tokio::test]
async fn no_worker_starves_while_others_are_busy() {
    let (addr, _) =
        start_upstream(|mut client, _| async move { client.serve_response(OK_RESPONSE).await })
            .await;
    let server = RunningServer::start_forwarding(
        &ListenSettings {
            threads: 2,
            ..listen_settings()
        },
        UpstreamSettings {
            max_connections: 2,
            queue_timeout: ms(3000),
            ..upstream_settings(addr)
        },
    );
    let mut clients = Vec::new();
    for _ in 0..16 {
        clients.push(server.connect().await);
    }
    // Odd connections belong to worker 1. One of them competes with eight busy connections of
    // worker 0.
    let served = Arc::new(AtomicBool::new(false));
    let mut clients = clients
        .into_iter()
        .enumerate()
        .filter(|(n, _)| n % 2 == 0 || *n == 1);
    let (busy, mut lonely): (Vec<_>, _) = {
        let (first, second) = (clients.next().unwrap().1, clients.next().unwrap().1);
        (
            clients.map(|(_, client)| client).chain([first]).collect(),
            second,
        )
    };
    let busy = busy.into_iter().map(|mut client| {
        let served = Arc::clone(&served);
        tokio::spawn(async move {
            while !served.load(Ordering::SeqCst) {
                assert!(client.request(GET).await.ends_with("ok"));
            }
        })
    });
    let busy: Vec<_> = busy.collect();
    for _ in 0..5 {
        assert!(lonely.request(GET).await.ends_with("ok"));
    }
    served.store(true, Ordering::SeqCst);
    for task in busy {
        with_timeout(task).await.unwrap();
    }
}

/// Starts a TLS upstream with a certificate for `orders.internal`.
pub(super) async fn start_tls_upstream<F>(
    serve: impl Fn(TlsStream<TcpStream>) -> F + Send + Sync + 'static,
) -> std::net::SocketAddr
where
    F: Future<Output = ()> + Send + 'static,
{
    use tokio_rustls::rustls::{ServerConfig, crypto::aws_lc_rs, pki_types::*};
    let certificate = CertificateDer::from_pem_slice(include_bytes!("tls/cert.pem")).unwrap();
    let key = PrivateKeyDer::from_pem_slice(include_bytes!("tls/key.pem")).unwrap();
    let config = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)
        .unwrap();
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
    let serve = Arc::new(serve);
    start_upstream(move |client, _| {
        let (acceptor, serve) = (acceptor.clone(), Arc::clone(&serve));
        async move {
            if let Ok(stream) = acceptor.accept(client.0).await {
                serve(stream).await;
            }
        }
    })
    .await
    .0
}

pub(super) fn tls_upstream_settings(
    addr: std::net::SocketAddr,
    name: Option<&str>,
) -> UpstreamSettings {
    let trusted = TrustedCertificates::from_pem(include_bytes!("tls/ca.pem")).unwrap();
    let name = name.map(|name| name.to_owned().try_into().unwrap());
    UpstreamSettings {
        url: UpstreamUrl::Net {
            scheme: UpstreamScheme::Https,
            host: "127.0.0.1".to_owned(),
            port: addr.port(),
        },
        tls: Some(ClientTls::new(trusted, None, name, [0; 32]).unwrap()),
        ..upstream_settings(addr)
    }
}

#[tokio::test]
async fn https_upstreams_are_verified() {
    let addr = start_tls_upstream(|mut stream| async move {
        while let Ok(1..) = stream.read(&mut [0; 4096]).await {
            stream.write_all(OK_RESPONSE).await.unwrap();
        }
    })
    .await;
    for (name, answer) in [
        (Some("orders.internal"), "ok"),
        (Some("other.internal"), "tls"),
        (None, "tls"),
    ] {
        let server =
            RunningServer::start_forwarding(&listen_settings(), tls_upstream_settings(addr, name));
        let mut client = server.connect().await;
        for _ in 0..2 {
            assert!(client.request(GET).await.ends_with(answer), "{name:?}");
        }
    }
}

#[tokio::test]
async fn bytes_after_a_response_are_not_used_as_a_response() {
    let (addr, connections) = start_upstream(|mut client, n| async move {
        client.read_head().await;
        client.send(OK_RESPONSE).await;
        if n == 0 {
            client
                .send(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil")
                .await;
        }
        client.read_to_end().await;
    })
    .await;
    let server = RunningServer::start_forwarding(&listen_settings(), upstream_settings(addr));
    let mut client = server.connect().await;
    assert!(client.request(GET).await.ends_with("ok"));
    tokio::time::sleep(ms(20)).await;
    assert!(client.request(GET).await.ends_with("ok"));
    assert_eq!(connections.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn an_early_response_is_forwarded_although_the_upload_breaks() {
    let (addr, _) = start_upstream(|mut client, _| async move {
        client.read_head().await;
        client
            .send(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno")
            .await;
    })
    .await;
    let server = RunningServer::start_forwarding(&listen_settings(), upstream_settings(addr));
    let upload = [
        post_request("content-length: 3000000"),
        vec![b'x'; 3_000_000],
    ]
    .concat();
    // The proxy may see the response or the broken upload first, so the test repeats.
    for _ in 0..30 {
        let (mut reading, mut writing) = server.connect().await.0.into_split();
        let upload = upload.clone();
        // Returned by the task: dropping it would close the client's connection.
        let sent = tokio::spawn(async move { (writing.write_all(&upload).await.is_ok(), writing) });
        let mut answer = [0; 12];
        with_timeout(reading.read_exact(&mut answer)).await.unwrap();
        assert_eq!(&answer, b"HTTP/1.1 413");
        sent.abort();
    }
}
