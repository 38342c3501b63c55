//! Client-side behaviour: protocols, timeouts, limits and workers.

use super::support::*;
use crate::listen::ListenAddress;
use crate::proxy::*;
use ::http::{Request, StatusCode};
use bytes::Bytes;
use http_body_util::{BodyExt, Empty, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::sync::mpsc;

fn start_worker_index_server(listen: &ListenSettings) -> RunningServer {
    RunningServer::start_with_fn(listen, |_, worker| async move {
        text_response(StatusCode::OK, worker.to_string())
    })
}

fn start_rejecting_server(listen: &ListenSettings) -> RunningServer {
    RunningServer::start_with_fn(listen, |request, _| async move {
        request.into_body().discard();
        text_response(StatusCode::TOO_MANY_REQUESTS, "no")
    })
}

#[tokio::test]
async fn pipelined_requests_are_answered_in_order() {
    let server = start_worker_index_server(&listen_settings());
    let mut client = server.connect().await;
    client.send(&[GET, GET, GET].concat()).await;
    for _ in 0..3 {
        assert!(client.read_response().await.starts_with("HTTP/1.1 200"));
    }
}

#[tokio::test]
async fn a_partial_preface_is_served_as_http1() {
    let server = start_worker_index_server(&listen_settings());
    let mut client = server.connect().await;
    client.send(b"PRI").await;
    tokio::time::sleep(ms(5)).await;
    assert!(
        client
            .request(b"NT / HTTP/1.1\r\nhost: a\r\n\r\n")
            .await
            .starts_with("HTTP/1.1 200")
    );
}

#[tokio::test]
async fn serves_http2_by_prior_knowledge() {
    let server = start_rejecting_server(&listen_settings());
    let io = TokioIo::new(server.connect().await.0);
    let (mut sender, connection) = hyper::client::conn::http2::handshake(TokioExecutor::new(), io)
        .await
        .unwrap();
    tokio::spawn(connection);
    for _ in 0..2 {
        let body = Full::new(Bytes::from(vec![b'x'; 1_000_000]));
        let request = Request::post("http://a/").body(body).unwrap();
        let response = with_timeout(sender.send_request(request)).await.unwrap();
        assert_eq!(response.status(), 429);
        assert_eq!(
            with_timeout(response.into_body().collect())
                .await
                .unwrap()
                .to_bytes(),
            "no"
        );
    }
}

#[tokio::test]
async fn idle_connections_are_closed() {
    let server = start_worker_index_server(&ListenSettings {
        idle_timeout: ms(100),
        ..listen_settings()
    });
    let mut silent = server.connect().await;
    let mut used = server.connect().await;
    assert!(used.request(GET).await.starts_with("HTTP/1.1 200"));
    assert_eq!(silent.read_to_end().await, "");
    assert_eq!(used.read_to_end().await, "");
    let io = TokioIo::new(server.connect().await.0);
    let (_sender, connection) =
        hyper::client::conn::http2::handshake::<_, _, Full<Bytes>>(TokioExecutor::new(), io)
            .await
            .unwrap();
    with_timeout(connection).await.unwrap();
    wait_until(|| server.load.open_connections() == 0).await;
}

#[tokio::test]
async fn a_slow_request_head_gets_408() {
    let server = start_worker_index_server(&ListenSettings {
        header_timeout: ms(150),
        ..listen_settings()
    });
    let mut client = server.connect().await;
    assert!(client.request(GET).await.starts_with("HTTP/1.1 200"));
    let started = std::time::Instant::now();
    while started.elapsed() < ms(120) {
        client.send(b"G").await;
        tokio::time::sleep(ms(10)).await;
    }
    assert!(client.read_to_end().await.starts_with("HTTP/1.1 408 "));
}

#[tokio::test]
async fn a_connection_is_usable_after_its_buffers_were_released() {
    let server = start_worker_index_server(&ListenSettings {
        header_timeout: ms(400),
        ..listen_settings()
    });
    let (mut client, mut slow) = (server.connect().await, server.connect().await);
    for rest in [0, 250, 250] {
        tokio::time::sleep(ms(rest)).await;
        assert!(client.request(GET).await.starts_with("HTTP/1.1 200"));
    }
    // Bytes that arrive before the buffers are released are not lost.
    let (begin, end) = GET.split_at(7);
    assert!(
        client
            .request(&[GET, begin].concat())
            .await
            .starts_with("HTTP/1.1 200")
    );
    tokio::time::sleep(ms(250)).await;
    assert!(client.request(end).await.starts_with("HTTP/1.1 200"));
    assert!(slow.request(GET).await.starts_with("HTTP/1.1 200"));
    tokio::time::sleep(ms(250)).await;
    slow.send(begin).await;
    assert!(
        slow.read_to_end().await.starts_with("HTTP/1.1 408 "),
        "the head timeout also applies after an idle time"
    );
    drop(client);
    wait_until(|| server.load.open_connections() == 0).await;
}

#[tokio::test]
async fn a_large_head_gets_431() {
    let server = start_worker_index_server(&ListenSettings {
        max_header_bytes: 10_000,
        ..listen_settings()
    });
    let mut client = server.connect().await;
    client
        .send(
            format!(
                "GET / HTTP/1.1\r\nhost: a\r\nx: {}\r\n\r\n",
                "y".repeat(20_000)
            )
            .as_bytes(),
        )
        .await;
    assert!(client.read_to_end().await.starts_with("HTTP/1.1 431 "));
}

#[tokio::test]
async fn a_client_that_does_not_read_is_cut() {
    let settings = ListenSettings {
        body_idle_timeout: ms(150),
        ..listen_settings()
    };
    let server = RunningServer::start_with_fn(&settings, |_, _| async {
        text_response(StatusCode::OK, vec![b'x'; 50_000_000])
    });
    let mut client = server.connect().await;
    client.send(GET).await;
    wait_until(|| server.load.open_connections() == 1).await;
    wait_until(|| server.load.open_connections() == 0).await;
}

#[tokio::test]
async fn an_http2_stream_without_window_is_reset() {
    let (addr, _) = start_upstream(|mut client, n| async move {
        client.read_head().await;
        let length = if n == 0 { 10_000_000 } else { 2 };
        client
            .send(format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n").as_bytes())
            .await;
        while n == 0 && client.0.write_all(&[b'x'; 10_000]).await.is_ok() {}
        client.send(b"ok").await;
        client.read_to_end().await;
    })
    .await;
    let settings = ListenSettings {
        body_idle_timeout: ms(150),
        ..listen_settings()
    };
    let server = RunningServer::start_forwarding(&settings, upstream_settings(addr));
    let io = TokioIo::new(server.connect().await.0);
    let mut client = hyper::client::conn::http2::Builder::new(TokioExecutor::new());
    let (mut sender, connection) = client
        .initial_stream_window_size(1000)
        .handshake::<_, Full<Bytes>>(io)
        .await
        .unwrap();
    tokio::spawn(connection);
    let request = || Request::get("http://a/").body(Full::default()).unwrap();
    let unread = with_timeout(sender.send_request(request())).await.unwrap();
    tokio::time::sleep(ms(400)).await;
    assert!(
        with_timeout(unread.into_body().collect()).await.is_err(),
        "must have been reset"
    );
    let other = with_timeout(sender.send_request(request())).await.unwrap();
    assert_eq!(
        with_timeout(other.into_body().collect())
            .await
            .unwrap()
            .to_bytes(),
        "ok",
        "other streams continue"
    );
}

#[tokio::test]
async fn a_rejected_upload_of_10_mb_receives_its_response() {
    let server = start_rejecting_server(&listen_settings());
    let mut client = server.connect().await;
    client
        .send(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 10000000\r\n\r\n")
        .await;
    let (mut reads, mut writes) = client.0.into_split();
    let upload = tokio::spawn(async move {
        for _ in 0..1000 {
            if writes.write_all(&[b'x'; 10_000]).await.is_err() {
                break;
            }
        }
        writes
    });
    let mut head = [0; 12];
    with_timeout(tokio::io::AsyncReadExt::read_exact(&mut reads, &mut head))
        .await
        .unwrap();
    assert_eq!(&head, b"HTTP/1.1 429");
    drop(with_timeout(upload).await.unwrap());
}

#[tokio::test]
async fn the_rest_of_a_rejected_upload_is_not_parsed_as_a_request() {
    let requests = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&requests);
    let server = RunningServer::start_with_fn(&listen_settings(), move |request, _| {
        counted.fetch_add(1, Ordering::SeqCst);
        async move {
            request.into_body().discard();
            text_response(StatusCode::TOO_MANY_REQUESTS, "no")
        }
    });
    let mut client = server.connect().await;
    client
        .send(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 10000000\r\n\r\n")
        .await;
    client.send(&[b'x'; 400_000]).await;
    assert!(client.read_to_end().await.starts_with("HTTP/1.1 429"));
    // Longer than the delay after which an idle connection releases its buffers.
    tokio::time::sleep(ms(400)).await;
    client.send(GET).await;
    wait_until(|| server.load.open_connections() == 0).await;
    assert_eq!(
        requests.load(Ordering::SeqCst),
        1,
        "part of a body was parsed as a request"
    );
}

#[tokio::test]
async fn a_small_rejected_upload_keeps_its_connection() {
    let server = start_rejecting_server(&listen_settings());
    let mut client = server.connect().await;
    let head = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 100000\r\n\r\n";
    client.send(head).await;
    assert!(client.read_response().await.starts_with("HTTP/1.1 429"));
    client.send(&[b'x'; 100_000]).await;
    assert!(client.request(GET).await.starts_with("HTTP/1.1 429"));
}

#[tokio::test]
async fn a_rejection_with_an_unread_upload_sends_connection_close() {
    let server = start_rejecting_server(&listen_settings());
    for (head, is_last) in [
        (&b"content-length: 100000"[..], false),
        (b"content-length: 1000000", true),
        (b"transfer-encoding: chunked", true),
        (b"content-length: 9\r\nexpect: 100-continue", true),
    ] {
        let mut client = server.connect().await;
        client
            .send(&[b"POST / HTTP/1.1\r\nhost: a\r\n", head, b"\r\n\r\n"].concat())
            .await;
        let answer = client.read_response().await;
        assert!(answer.starts_with("HTTP/1.1 429"), "{answer}");
        assert_eq!(
            answer.contains("connection: close"),
            is_last,
            "{}: {answer}",
            head.escape_ascii()
        );
    }
}

#[tokio::test]
async fn a_rejected_client_gets_no_100_continue() {
    let server = start_rejecting_server(&listen_settings());
    let mut client = server.connect().await;
    client
        .send(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\nexpect: 100-continue\r\n\r\n")
        .await;
    assert!(client.read_response().await.starts_with("HTTP/1.1 429"));
}

#[tokio::test]
async fn new_connections_go_to_the_worker_with_the_fewest() {
    let server = start_worker_index_server(&ListenSettings {
        threads: 2,
        ..listen_settings()
    });
    let mut clients = Vec::new();
    let mut seen = Vec::new();
    for _ in 0..4 {
        let mut client = server.connect().await;
        seen.push(client.request(GET).await.chars().last().unwrap());
        clients.push(client);
    }
    assert_eq!(seen, ['0', '1', '0', '1']);
    clients.remove(1);
    wait_until(|| server.load.open_connections() == 3).await;
    assert!(server.connect().await.request(GET).await.ends_with('1'));
}

#[tokio::test]
async fn connections_above_the_limit_wait_for_a_free_slot() {
    let server = start_worker_index_server(&ListenSettings {
        max_connections: 1,
        ..listen_settings()
    });
    let mut first = server.connect().await;
    first.request(GET).await;
    let mut second = server.connect().await;
    second.send(GET).await;
    tokio::time::sleep(ms(50)).await;
    assert_eq!(server.load.open_connections(), 1);
    drop(first);
    assert!(second.read_response().await.starts_with("HTTP/1.1 200"));
}

#[tokio::test]
async fn a_panic_ends_only_its_own_connection() {
    let server = RunningServer::start_with_fn(&listen_settings(), |request, _| async move {
        assert_ne!(
            request.uri().path(),
            "/panic",
            "this panic is part of a test"
        );
        text_response(StatusCode::OK, "")
    });
    let mut other = server.connect().await;
    other.request(GET).await;
    let mut client = server.connect().await;
    client.send(b"GET /panic HTTP/1.1\r\nhost: a\r\n\r\n").await;
    assert_eq!(client.read_to_end().await, "");
    assert!(other.request(GET).await.starts_with("HTTP/1.1 200"));
    wait_until(|| server.load.panic_count() == 1 && server.load.open_connections() == 1).await;
}

#[tokio::test]
async fn an_ipv4_peer_of_an_ipv6_socket_is_known_by_its_ipv4_address() {
    let settings = ListenSettings {
        address: ListenAddress::Ip("[::]:0".parse().unwrap()),
        proxy_protocol_from: Some(vec!["127.0.0.1/32".parse().unwrap()]),
        ..listen_settings()
    };
    let server = RunningServer::start_with_fn(&settings, |_, _| async {
        text_response(StatusCode::OK, "")
    });
    let mut client = RawTestClient(
        with_timeout(TcpStream::connect(("127.0.0.1", server.addr.port())))
            .await
            .unwrap(),
    );
    client
        .send(b"PROXY TCP4 192.0.2.1 198.51.100.1 1 2\r\n")
        .await;
    assert!(client.request(GET).await.starts_with("HTTP/1.1 200"));
}

#[tokio::test]
async fn a_panic_in_a_stream_is_counted_and_ends_nothing_else() {
    let server = RunningServer::start_with_fn(&listen_settings(), |request, _| async move {
        assert_ne!(
            request.uri().path(),
            "/panic",
            "this panic is part of a test"
        );
        text_response(StatusCode::OK, "")
    });
    let io = TokioIo::new(server.connect().await.0);
    let (mut sender, connection) = hyper::client::conn::http2::handshake(TokioExecutor::new(), io)
        .await
        .unwrap();
    let connection = tokio::spawn(connection);
    let mut send_request = async |path: &str| {
        let request = Request::get(format!("http://a{path}"))
            .body(Empty::<Bytes>::new())
            .unwrap();
        with_timeout(sender.send_request(request)).await
    };
    send_request("/panic")
        .await
        .expect_err("a request that panics has no response");
    assert_eq!(send_request("/").await.unwrap().status(), 200);
    wait_until(|| server.load.panic_count() == 1).await;
    connection.abort();
}

#[tokio::test]
async fn a_request_body_fails_when_its_stream_is_reset() {
    let (body_tx, mut body_rx) = mpsc::channel(1);
    let server = RunningServer::start_with_fn(&listen_settings(), move |request, _| {
        let body_tx = body_tx.clone();
        // Read by a task that outlives the request.
        tokio::task::spawn_local(async move {
            body_tx.send(Ok(Bytes::new())).await.unwrap();
            let all = request.into_body().collect().await;
            let all = all
                .map(|all| all.to_bytes())
                .map_err(|error| error.to_string());
            body_tx.send(all).await.unwrap();
        });
        std::future::pending()
    });
    let (sender, connection) = h2::client::handshake(server.connect().await.0)
        .await
        .unwrap();
    tokio::spawn(connection);
    for reason in [h2::Reason::NO_ERROR, h2::Reason::CANCEL] {
        let mut sender = with_timeout(sender.clone().ready()).await.unwrap();
        let request = Request::post("http://a/").body(()).unwrap();
        let (_answer, mut sending) = sender.send_request(request, false).unwrap();
        sending.send_data("half".into(), false).unwrap();
        with_timeout(body_rx.recv()).await.unwrap().unwrap();
        sending.send_reset(reason);
        let read = with_timeout(body_rx.recv()).await.unwrap();
        assert!(
            read.is_err(),
            "after {reason:?}, the body looked complete: {read:?}"
        );
    }
}

#[tokio::test]
async fn an_http2_client_that_reads_slowly_is_not_cut() {
    const LENGTH: usize = 600_000;
    let (addr, _) = start_upstream(|mut client, _| async move {
        client.read_head().await;
        client
            .send(format!("HTTP/1.1 200 OK\r\ncontent-length: {LENGTH}\r\n\r\n").as_bytes())
            .await;
        client.0.write_all(&vec![b'x'; LENGTH]).await.unwrap();
        client.read_to_end().await;
    })
    .await;
    let settings = ListenSettings {
        body_idle_timeout: ms(150),
        ..listen_settings()
    };
    let server = RunningServer::start_forwarding(&settings, upstream_settings(addr));
    let io = TokioIo::new(server.connect().await.0);
    let mut client = hyper::client::conn::http2::Builder::new(TokioExecutor::new());
    let (mut sender, connection) = client
        .initial_stream_window_size(16_384)
        .handshake::<_, Full<Bytes>>(io)
        .await
        .unwrap();
    tokio::spawn(connection);
    let request = Request::get("http://a/").body(Full::default()).unwrap();
    let mut body = with_timeout(sender.send_request(request))
        .await
        .unwrap()
        .into_body();
    let mut read = 0;
    while let Some(frame) = with_timeout(body.frame()).await {
        let before = read;
        read += frame.unwrap().into_data().unwrap().len();
        // The rate does not depend on the size of the frames.
        if read / 16_384 > before / 16_384 {
            tokio::time::sleep(ms(20)).await;
        }
    }
    assert_eq!(read, LENGTH);
}
