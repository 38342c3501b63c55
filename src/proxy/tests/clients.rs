//! The side of the client: protocols, deadlines, limits, workers.

use super::support::*;
use crate::proxy::*;
use bytes::Bytes;
use http::{Request, StatusCode};
use http_body_util::{BodyExt, Empty, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::sync::mpsc;

fn hello(listen: &ListenSettings) -> Running {
    Running::answering(listen, |_, worker| async move {
        text(StatusCode::OK, worker.to_string())
    })
}

fn rejecting(listen: &ListenSettings) -> Running {
    Running::answering(listen, |request, _| async move {
        request.into_body().discard();
        text(StatusCode::TOO_MANY_REQUESTS, "no")
    })
}

#[tokio::test]
async fn pipelined_requests_are_answered_in_order() {
    let server = hello(&listen());
    let mut client = server.connect().await;
    client.send(&[GET, GET, GET].concat()).await;
    for _ in 0..3 {
        assert!(client.response().await.starts_with("HTTP/1.1 200"));
    }
}

#[tokio::test]
async fn half_a_preface_is_no_http2() {
    let server = hello(&listen());
    let mut client = server.connect().await;
    client.send(b"PRI").await;
    tokio::time::sleep(ms(5)).await;
    assert!(
        client
            .ask(b"NT / HTTP/1.1\r\nhost: a\r\n\r\n")
            .await
            .starts_with("HTTP/1.1 200")
    );
}

#[tokio::test]
async fn http2_by_prior_knowledge() {
    let server = rejecting(&listen());
    let io = TokioIo::new(server.connect().await.0);
    let (mut sender, connection) = hyper::client::conn::http2::handshake(TokioExecutor::new(), io)
        .await
        .unwrap();
    tokio::spawn(connection);
    for _ in 0..2 {
        let body = Full::new(Bytes::from(vec![b'x'; 1_000_000]));
        let request = Request::post("http://a/").body(body).unwrap();
        let response = soon(sender.send_request(request)).await.unwrap();
        assert_eq!(response.status(), 429);
        assert_eq!(
            soon(response.into_body().collect())
                .await
                .unwrap()
                .to_bytes(),
            "no"
        );
    }
}

#[tokio::test]
async fn idle_connections_are_closed() {
    let server = hello(&ListenSettings {
        idle_timeout: ms(100),
        ..listen()
    });
    let mut silent = server.connect().await;
    let mut used = server.connect().await;
    assert!(used.ask(GET).await.starts_with("HTTP/1.1 200"));
    assert_eq!(silent.rest().await, "");
    assert_eq!(used.rest().await, "");
    let io = TokioIo::new(server.connect().await.0);
    let (_sender, connection) =
        hyper::client::conn::http2::handshake::<_, _, Full<Bytes>>(TokioExecutor::new(), io)
            .await
            .unwrap();
    soon(connection).await.unwrap();
    eventually(|| server.load.connections() == 0).await;
}

#[tokio::test]
async fn a_slow_head_gets_408_however_steadily_it_drips() {
    let server = hello(&ListenSettings {
        header_timeout: ms(150),
        ..listen()
    });
    let mut client = server.connect().await;
    assert!(client.ask(GET).await.starts_with("HTTP/1.1 200"));
    let started = std::time::Instant::now();
    while started.elapsed() < ms(120) {
        client.send(b"G").await;
        tokio::time::sleep(ms(10)).await;
    }
    assert!(client.rest().await.starts_with("HTTP/1.1 408 "));
}

#[tokio::test]
async fn a_connection_that_has_rested_goes_on() {
    let server = hello(&ListenSettings {
        header_timeout: ms(400),
        ..listen()
    });
    let (mut client, mut slow) = (server.connect().await, server.connect().await);
    for rest in [0, 250, 250] {
        tokio::time::sleep(ms(rest)).await;
        assert!(client.ask(GET).await.starts_with("HTTP/1.1 200"));
    }
    // What came too early is not lost in the rest.
    let (begin, end) = GET.split_at(7);
    assert!(
        client
            .ask(&[GET, begin].concat())
            .await
            .starts_with("HTTP/1.1 200")
    );
    tokio::time::sleep(ms(250)).await;
    assert!(client.ask(end).await.starts_with("HTTP/1.1 200"));
    assert!(slow.ask(GET).await.starts_with("HTTP/1.1 200"));
    tokio::time::sleep(ms(250)).await;
    slow.send(begin).await;
    assert!(
        slow.rest().await.starts_with("HTTP/1.1 408 "),
        "a head has its time, whenever it begins"
    );
    drop(client);
    eventually(|| server.load.connections() == 0).await;
}

#[tokio::test]
async fn a_large_head_gets_431() {
    let server = hello(&ListenSettings {
        max_header_bytes: 10_000,
        ..listen()
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
    assert!(client.rest().await.starts_with("HTTP/1.1 431 "));
}

#[tokio::test]
async fn a_client_that_does_not_read_is_cut() {
    let settings = ListenSettings {
        body_idle_timeout: ms(150),
        ..listen()
    };
    let server = Running::answering(&settings, |_, _| async {
        text(StatusCode::OK, vec![b'x'; 50_000_000])
    });
    let mut client = server.connect().await;
    client.send(GET).await;
    eventually(|| server.load.connections() == 1).await;
    eventually(|| server.load.connections() == 0).await;
}

#[tokio::test]
async fn an_http2_stream_without_window_is_reset() {
    let (addr, _) = upstream(|mut client, n| async move {
        client.head().await;
        let length = if n == 0 { 10_000_000 } else { 2 };
        client
            .send(format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n").as_bytes())
            .await;
        while n == 0 && client.0.write_all(&[b'x'; 10_000]).await.is_ok() {}
        client.send(b"ok").await;
        client.rest().await;
    })
    .await;
    let settings = ListenSettings {
        body_idle_timeout: ms(150),
        ..listen()
    };
    let server = Running::forwarding(&settings, upstream_at(addr));
    let io = TokioIo::new(server.connect().await.0);
    let mut client = hyper::client::conn::http2::Builder::new(TokioExecutor::new());
    let (mut sender, connection) = client
        .initial_stream_window_size(1000)
        .handshake::<_, Full<Bytes>>(io)
        .await
        .unwrap();
    tokio::spawn(connection);
    let request = || Request::get("http://a/").body(Full::default()).unwrap();
    let unread = soon(sender.send_request(request())).await.unwrap();
    tokio::time::sleep(ms(400)).await;
    assert!(
        soon(unread.into_body().collect()).await.is_err(),
        "must have been reset"
    );
    let other = soon(sender.send_request(request())).await.unwrap();
    assert_eq!(
        soon(other.into_body().collect()).await.unwrap().to_bytes(),
        "ok",
        "the others go on"
    );
}

#[tokio::test]
async fn a_rejected_upload_of_10_mb_receives_its_response() {
    let server = rejecting(&listen());
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
    soon(tokio::io::AsyncReadExt::read_exact(&mut reads, &mut head))
        .await
        .unwrap();
    assert_eq!(&head, b"HTTP/1.1 429");
    drop(soon(upload).await.unwrap());
}

#[tokio::test]
async fn what_a_rejected_upload_goes_on_with_is_no_request() {
    let asked = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&asked);
    let server = Running::answering(&listen(), move |request, _| {
        counted.fetch_add(1, Ordering::SeqCst);
        async move {
            request.into_body().discard();
            text(StatusCode::TOO_MANY_REQUESTS, "no")
        }
    });
    let mut client = server.connect().await;
    client
        .send(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 10000000\r\n\r\n")
        .await;
    client.send(&[b'x'; 400_000]).await;
    assert!(client.rest().await.starts_with("HTTP/1.1 429"));
    // Longer than it takes a connection to be found at rest.
    tokio::time::sleep(ms(400)).await;
    client.send(GET).await;
    eventually(|| server.load.connections() == 0).await;
    assert_eq!(
        asked.load(Ordering::SeqCst),
        1,
        "part of a body was taken for a request"
    );
}

#[tokio::test]
async fn a_small_rejected_upload_keeps_its_connection() {
    let server = rejecting(&listen());
    let mut client = server.connect().await;
    let head = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 100000\r\n\r\n";
    client.send(head).await;
    assert!(client.response().await.starts_with("HTTP/1.1 429"));
    client.send(&[b'x'; 100_000]).await;
    assert!(client.ask(GET).await.starts_with("HTTP/1.1 429"));
}

#[tokio::test]
async fn a_client_is_told_that_nobody_reads_the_rest_of_its_upload() {
    let server = rejecting(&listen());
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
        let answer = client.response().await;
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
async fn a_rejected_client_is_not_asked_to_continue() {
    let server = rejecting(&listen());
    let mut client = server.connect().await;
    client
        .send(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\nexpect: 100-continue\r\n\r\n")
        .await;
    assert!(client.response().await.starts_with("HTTP/1.1 429"));
}

#[tokio::test]
async fn connections_go_to_the_worker_that_has_fewest() {
    let server = hello(&ListenSettings {
        threads: 2,
        ..listen()
    });
    let mut clients = Vec::new();
    let mut seen = Vec::new();
    for _ in 0..4 {
        let mut client = server.connect().await;
        seen.push(client.ask(GET).await.chars().last().unwrap());
        clients.push(client);
    }
    assert_eq!(seen, ['0', '1', '0', '1']);
    clients.remove(1);
    eventually(|| server.load.connections() == 3).await;
    assert!(server.connect().await.ask(GET).await.ends_with('1'));
}

#[tokio::test]
async fn connections_above_the_limit_wait_for_room() {
    let server = hello(&ListenSettings {
        max_connections: 1,
        ..listen()
    });
    let mut first = server.connect().await;
    first.ask(GET).await;
    let mut second = server.connect().await;
    second.send(GET).await;
    tokio::time::sleep(ms(50)).await;
    assert_eq!(server.load.connections(), 1);
    drop(first);
    assert!(second.response().await.starts_with("HTTP/1.1 200"));
}

#[tokio::test]
async fn a_panic_ends_one_connection() {
    let server = Running::answering(&listen(), |request, _| async move {
        assert_ne!(
            request.uri().path(),
            "/panic",
            "this panic is part of a test"
        );
        text(StatusCode::OK, "")
    });
    let mut other = server.connect().await;
    other.ask(GET).await;
    let mut client = server.connect().await;
    client.send(b"GET /panic HTTP/1.1\r\nhost: a\r\n\r\n").await;
    assert_eq!(client.rest().await, "");
    assert!(other.ask(GET).await.starts_with("HTTP/1.1 200"));
    eventually(|| server.load.panics() == 1 && server.load.connections() == 1).await;
}

#[tokio::test]
async fn an_ipv4_peer_of_an_ipv6_socket_is_known_by_its_ipv4_address() {
    let settings = ListenSettings {
        address: ListenAddress::Ip("[::]:0".parse().unwrap()),
        proxy_protocol_from: Some(vec!["127.0.0.1/32".parse().unwrap()]),
        ..listen()
    };
    let server = Running::answering(&settings, |_, _| async { text(StatusCode::OK, "") });
    let mut client = Client(
        soon(TcpStream::connect(("127.0.0.1", server.addr.port())))
            .await
            .unwrap(),
    );
    client
        .send(b"PROXY TCP4 192.0.2.1 198.51.100.1 1 2\r\n")
        .await;
    assert!(client.ask(GET).await.starts_with("HTTP/1.1 200"));
}

#[tokio::test]
async fn a_panic_in_a_stream_is_counted_and_ends_nothing_else() {
    let server = Running::answering(&listen(), |request, _| async move {
        assert_ne!(
            request.uri().path(),
            "/panic",
            "this panic is part of a test"
        );
        text(StatusCode::OK, "")
    });
    let io = TokioIo::new(server.connect().await.0);
    let (mut sender, connection) = hyper::client::conn::http2::handshake(TokioExecutor::new(), io)
        .await
        .unwrap();
    let connection = tokio::spawn(connection);
    let mut ask = async |path: &str| {
        let request = Request::get(format!("http://a{path}"))
            .body(Empty::<Bytes>::new())
            .unwrap();
        soon(sender.send_request(request)).await
    };
    ask("/panic").await.expect_err("it has no answer");
    assert_eq!(ask("/").await.unwrap().status(), 200);
    eventually(|| server.load.panics() == 1).await;
    connection.abort();
}

/// An HTTP/2 client that takes a long response in small bites.
#[tokio::test]
async fn a_body_whose_stream_is_reset_is_broken_off_whatever_the_reason() {
    let (tell, mut told) = mpsc::channel(1);
    let server = Running::answering(&listen(), move |request, _| {
        let tell = tell.clone();
        // Read by somebody who outlives the request.
        tokio::task::spawn_local(async move {
            tell.send(Ok(Bytes::new())).await.unwrap();
            let all = request.into_body().collect().await;
            let all = all
                .map(|all| all.to_bytes())
                .map_err(|error| error.to_string());
            tell.send(all).await.unwrap();
        });
        std::future::pending()
    });
    let (sender, connection) = h2::client::handshake(server.connect().await.0)
        .await
        .unwrap();
    tokio::spawn(connection);
    for reason in [h2::Reason::NO_ERROR, h2::Reason::CANCEL] {
        let mut sender = soon(sender.clone().ready()).await.unwrap();
        let request = Request::post("http://a/").body(()).unwrap();
        let (_answer, mut sending) = sender.send_request(request, false).unwrap();
        sending.send_data("half".into(), false).unwrap();
        soon(told.recv()).await.unwrap().unwrap();
        sending.send_reset(reason);
        let read = soon(told.recv()).await.unwrap();
        assert!(read.is_err(), "{reason:?} made a whole of {read:?}");
    }
}

#[tokio::test]
async fn an_http2_client_that_reads_slowly_is_not_cut() {
    const LENGTH: usize = 600_000;
    let (addr, _) = upstream(|mut client, _| async move {
        client.head().await;
        client
            .send(format!("HTTP/1.1 200 OK\r\ncontent-length: {LENGTH}\r\n\r\n").as_bytes())
            .await;
        client.0.write_all(&vec![b'x'; LENGTH]).await.unwrap();
        client.rest().await;
    })
    .await;
    let settings = ListenSettings {
        body_idle_timeout: ms(150),
        ..listen()
    };
    let server = Running::forwarding(&settings, upstream_at(addr));
    let io = TokioIo::new(server.connect().await.0);
    let mut client = hyper::client::conn::http2::Builder::new(TokioExecutor::new());
    let (mut sender, connection) = client
        .initial_stream_window_size(16_384)
        .handshake::<_, Full<Bytes>>(io)
        .await
        .unwrap();
    tokio::spawn(connection);
    let request = Request::get("http://a/").body(Full::default()).unwrap();
    let mut body = soon(sender.send_request(request))
        .await
        .unwrap()
        .into_body();
    let mut read = 0;
    while let Some(frame) = soon(body.frame()).await {
        read += frame.unwrap().into_data().unwrap().len();
        tokio::time::sleep(ms(20)).await;
    }
    assert_eq!(read, LENGTH);
}
