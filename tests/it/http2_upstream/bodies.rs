//! Bodies in both directions: complete, truncated, refused and unread.

use super::{GOAWAY_NO_STREAMS, ONE_WORKER, SERVER_SETTINGS, read_request_head, start_proxy};
use crate::support::h2_upstream::full_body;
use crate::support::prelude::*;
use h2::Reason;
use h2::server::Builder;
use hyper::HeaderMap;
use tokio::sync::mpsc;

/// Reads frames until this many bytes of DATA have arrived.
async fn read_request_body(socket: &mut RawSocket, mut left: usize) {
    let stream = socket.stream();
    while left > 0 {
        let mut head = [0; 9];
        stream.read_exact(&mut head).await.unwrap();
        let length = usize::from(head[0]) << 16 | usize::from(head[1]) << 8 | usize::from(head[2]);
        stream.read_exact(&mut vec![0; length]).await.unwrap();
        if head[3] == 0 {
            left -= length;
        }
    }
}

#[tokio::test]
async fn an_upload_is_retried_on_another_connection_after_goaway() {
    // The first two connections take the start of the upload. Their GOAWAY says that no stream was
    // processed.
    let upstream = RawUpstream::with_script(|number, mut socket| async move {
        if number < 2 {
            socket.send(SERVER_SETTINGS).await;
            read_request_head(&mut socket).await;
            read_request_body(&mut socket, 5).await;
            socket.send(GOAWAY_NO_STREAMS).await;
            return socket.read_to_close().await;
        }
        let mut h2 = h2::server::handshake(socket.stream()).await.unwrap();
        while let Some(Ok((request, respond))) = h2.accept().await {
            tokio::spawn(async move {
                let mut exchange = H2Exchange {
                    connection_index: number,
                    request,
                    respond,
                };
                let body = exchange.read_body().await.unwrap();
                let trailers = exchange
                    .request
                    .body_mut()
                    .trailers()
                    .await
                    .unwrap()
                    .unwrap_or_default();
                let sum = trailers
                    .get("x-sum")
                    .map(|sum| sum.as_bytes().to_vec())
                    .unwrap_or_default();
                exchange.respond_with(200, [body, sum].concat());
            });
        }
    })
    .await;
    let url = format!("h2c://{}", upstream.address);
    let proxy = Proxy::start(ONE_WORKER, &url).await;
    let mut client = RawClient::connect(proxy.address).await;
    let head = "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTrailer: x-sum\r\n\r\n";
    client.send(format!("{head}5\r\nfirst\r\n")).await;
    wait_until("the third attempt", async || {
        upstream.connection_count() == 3
    })
    .await;
    client.send("6\r\nsecond\r\n0\r\nx-sum: 11\r\n\r\n").await;
    let reply = client.read_response().await;
    assert_eq!(reply.status, 200);
    assert_eq!(reply.text().as_str(), "firstsecond11");
    // With a content length, and available at once.
    let request = proxy.request("POST", "/").body(pseudo_random_bytes(30_000));
    let upload = request.send().await;
    assert!(upload.status == 200 && upload.body == pseudo_random_bytes(30_000));
}

#[tokio::test]
async fn a_reset_response_never_looks_complete() {
    let release = Arc::new(Semaphore::new(0));
    let waiting = Arc::clone(&release);
    let upstream = H2Upstream::with_handler(Builder::new(), move |mut exchange| {
        let release = Arc::clone(&waiting);
        async move {
            let reason = match exchange.request.uri().path() {
                "/none" => Reason::NO_ERROR,
                "/cancel" => Reason::CANCEL,
                _ => Reason::INTERNAL_ERROR,
            };
            if exchange.request.uri().query().is_none() {
                exchange.read_body().await.unwrap();
            }
            let mut stream = exchange
                .respond
                .send_response(Response::new(()), false)
                .unwrap();
            stream.send_data("some".into(), false).unwrap();
            release.acquire().await.unwrap().forget();
            stream.send_reset(reason);
        }
    })
    .await;
    let proxy = start_proxy(&upstream, "").await;
    for target in ["/none", "/cancel", "/error", "/none?upload"] {
        let mut client = RawClient::connect(proxy.address).await;
        let framing = if target.ends_with("upload") {
            "Content-Length: 10\r\n\r\nhalf"
        } else {
            "\r\n"
        };
        client
            .send(format!("POST {target} HTTP/1.1\r\nHost: a\r\n{framing}"))
            .await;
        client.read_past(b"\r\nsome\r\n").await;
        release.add_permits(1);
        let found = client.read_to_close().await;
        assert_eq!(found, b"", "{target}: a truncated response looks complete");
        let request = Request::post(format!("http://a{target}"))
            .body(ClientBody::default())
            .unwrap();
        let answer = await_response(
            open_http2_connection(proxy.address)
                .await
                .send_request(request),
        )
        .await;
        release.add_permits(1);
        let body = in_time(answer.into_body().collect()).await;
        assert!(body.is_err(), "{target} by HTTP/2");
    }
    let count = upstream.connection_count();
    assert_eq!(count, 1, "each reset ends only its own request");
}

#[tokio::test]
async fn a_response_may_arrive_before_the_end_of_an_upload() {
    let (events, mut given_up) = mpsc::channel(8);
    let upstream = H2Upstream::with_handler(Builder::new(), move |mut exchange| {
        let events = events.clone();
        async move {
            if exchange.request.uri().path() == "/" {
                return exchange.respond_with(200, "ok");
            }
            let mut stream = exchange
                .respond
                .send_response(Response::builder().status(413).body(()).unwrap(), false)
                .unwrap();
            stream.send_data("too much".into(), true).unwrap();
            // The rest is neither read nor reset.
            let cut = loop {
                match exchange.request.body_mut().data().await {
                    Some(Ok(_)) => {}
                    other => break other.is_some(),
                }
            };
            events.send(cut).await.unwrap();
        }
    })
    .await;
    let proxy = start_proxy(&upstream, "").await;
    let mut client = proxy
        .send_raw("POST /up HTTP/1.1\r\nHost: a\r\nContent-Length: 100000000\r\n\r\n")
        .await;
    client.send(vec![b'x'; 100_000]).await;
    let reply = client.read_response().await;
    assert_eq!(reply.status, 413);
    assert_eq!(reply.text().as_str(), "too much");
    assert!(reply.complete);
    let answer = in_time(given_up.recv()).await;
    assert_eq!(answer, Some(true), "the upload must be reset, not ended");
    assert!(
        client.closes_within(TEST_TIMEOUT).await,
        "the rest of the upload is not read"
    );
    assert_eq!(proxy.get("/").await.status, 200);
    assert_eq!(upstream.connection_count(), 1);
}

#[tokio::test]
async fn a_truncated_upload_never_looks_complete() {
    let (events, mut ends) = mpsc::channel(8);
    let upstream = H2Upstream::with_handler(Builder::new(), move |mut exchange| {
        let events = events.clone();
        async move {
            let end = exchange.read_body().await;
            events
                .send(end.map_err(|error| error.reason()))
                .await
                .unwrap();
            exchange.respond_with(200, "ok");
        }
    })
    .await;
    let text = "[listen.http]\nbody_idle_timeout = '300ms'\nmax_body_bytes = '8'";
    let proxy = start_proxy(&upstream, text).await;
    for (framing, status) in [
        ("Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n", 408),
        (
            "Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n5\r\n12345\r\n0\r\n\r\n",
            413,
        ),
        ("Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\nzz\r\n", 400),
    ] {
        let mut client = proxy
            .send_raw(format!("POST / HTTP/1.1\r\nHost: a\r\n{framing}"))
            .await;
        assert_eq!(client.read_response().await.status, status);
        let answer = in_time(ends.recv()).await;
        assert_eq!(answer, Some(Err(Some(Reason::CANCEL))), "{framing}");
    }
}

#[tokio::test]
async fn trailers_are_forwarded_both_ways() {
    let upstream = H2Upstream::with_handler(Builder::new(), |mut exchange| async move {
        let body = exchange.read_body().await.unwrap();
        let trailers = exchange
            .request
            .body_mut()
            .trailers()
            .await
            .unwrap()
            .unwrap_or_default();
        let mut names: Vec<_> = trailers.keys().map(|name| name.as_str()).collect();
        names.sort_unstable();
        let text = format!("{} {}", String::from_utf8(body).unwrap(), names.join(","));
        let head = Response::builder()
            .header("trailer", "x-sum")
            .body(())
            .unwrap();
        let mut stream = exchange.respond.send_response(head, false).unwrap();
        stream.send_data(text.into(), false).unwrap();
        let mut trailers = HeaderMap::new();
        trailers.insert("x-sum", "42".parse().unwrap());
        stream.send_trailers(trailers).unwrap();
    })
    .await;
    let proxy = start_proxy(&upstream, "").await;
    let mut client = RawClient::connect(proxy.address).await;
    let request = "POST / HTTP/1.1\r\nHost: a\r\nTE: trailers\r\nConnection: TE\r\nTransfer-Encoding: chunked\r\n\
                   Trailer: x-a\r\n\r\n4\r\nbody\r\n0\r\nx-a: 1\r\nx-b: 2\r\n\r\n";
    client.send(request).await;
    client.read_past(b"body x-a\r\n0\r\n").await;
    assert_eq!(client.read_past(b"\r\n\r\n").await, b"x-sum: 42\r\n\r\n");

    // An unannounced trailer was not validated, so it is not forwarded.
    let mut trailers = HeaderMap::new();
    trailers.insert("x-user-id", "ann".parse().unwrap());
    let body = full_body("body")
        .with_trailers(async move { Some(Ok(trailers)) })
        .boxed();
    let request = Request::post("http://a/").body(body).unwrap();
    let answer = await_response(
        open_http2_connection(proxy.address)
            .await
            .send_request(request),
    )
    .await;
    let body = answer.into_body().collect().await.unwrap();
    assert_eq!(body.trailers().unwrap()["x-sum"], "42");
    assert_eq!(body.to_bytes(), "body ");
}

#[tokio::test]
async fn responses_without_a_body_have_none() {
    let upstream = H2Upstream::with_handler(Builder::new(), |mut exchange| async move {
        let status: u16 = exchange
            .request
            .uri()
            .path()
            .trim_start_matches('/')
            .parse()
            .unwrap();
        let mut head = Response::builder().status(status);
        if exchange.request.method() == "HEAD" || status == 304 {
            head = head.header("content-length", "12345");
        }
        // An informational response has no body either.
        let early = Response::builder()
            .status(103)
            .header("link", "</a>")
            .body(())
            .unwrap();
        exchange.respond.send_informational(early).unwrap();
        exchange
            .respond
            .send_response(head.body(()).unwrap(), true)
            .unwrap();
    })
    .await;
    let proxy = start_proxy(&upstream, "").await;
    let mut client = RawClient::connect(proxy.address).await;
    for (method, status, length) in [
        ("HEAD", 200, Some("12345")),
        ("GET", 204, None),
        ("GET", 304, Some("12345")),
        ("GET", 200, Some("0")),
    ] {
        client
            .send(format!("{method} /{status} HTTP/1.1\r\nHost: a\r\n\r\n"))
            .await;
        assert_eq!(client.read_any_response(false).await.status, 103);
        let reply = client
            .read_any_response(method == "HEAD" || status == 304)
            .await;
        assert_eq!(reply.status, status, "{method}");
        assert_eq!(reply.header("content-length"), length, "{method}");
        assert!(reply.complete && reply.header("transfer-encoding").is_none());
    }
    assert_eq!(upstream.connection_count(), 1);
}

#[tokio::test]
async fn a_stalled_response_body_is_reset_after_the_idle_timeout() {
    let (events, mut given_up) = mpsc::channel(8);
    let upstream = H2Upstream::with_handler(Builder::new(), move |mut exchange| {
        let events = events.clone();
        async move {
            let mut stream = exchange
                .respond
                .send_response(Response::new(()), false)
                .unwrap();
            stream.send_data("some".into(), false).unwrap();
            events
                .send(std::future::poll_fn(|cx| stream.poll_reset(cx)).await.ok())
                .await
                .unwrap();
        }
    })
    .await;
    let proxy = start_proxy(&upstream, "upstream.body_idle_timeout = '200ms'").await;
    let reply = proxy.get("/").await;
    assert_eq!((reply.text().as_str(), reply.complete), ("some", false));
    assert_eq!(in_time(given_up.recv()).await, Some(Some(Reason::CANCEL)));
}

#[tokio::test]
async fn clients_that_do_not_read_do_not_stall_other_clients() {
    let content = Bytes::from(pseudo_random_bytes(4 << 20));
    let served = content.clone();
    let upstream = H2Upstream::with_handler(Builder::new(), move |mut exchange| {
        let mut left = served.clone();
        async move {
            let mut stream = exchange
                .respond
                .send_response(Response::new(()), false)
                .unwrap();
            while !left.is_empty() {
                stream.reserve_capacity(left.len());
                let Some(Ok(room)) = std::future::poll_fn(|cx| stream.poll_capacity(cx)).await
                else {
                    return;
                };
                let part = left.split_to(room.min(left.len()));
                stream.send_data(part, left.is_empty()).unwrap();
            }
        }
    })
    .await;
    let proxy = start_proxy(&upstream, "").await;
    let mut sleepers = Vec::new();
    for _ in 0..60 {
        let mut client = proxy.send_raw("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
        client.read_past(b"\r\n\r\n").await;
        sleepers.push(client);
    }
    let reply = timeout(TEST_TIMEOUT, proxy.get("/"))
        .await
        .expect("a stalled client blocks the others");
    assert_eq!(sha256(&reply.body), sha256(&content));
    assert_eq!(upstream.connection_count(), 1);
}

#[tokio::test]
async fn large_bodies_pass_unchanged_both_ways_over_http2() {
    let upstream = H2Upstream::with_handler(Builder::new(), |mut exchange| async move {
        let body = exchange.read_body().await.unwrap();
        exchange.respond_with(200, body);
    })
    .await;
    let proxy = start_proxy(&upstream, "").await;
    let content = pseudo_random_bytes(8 << 20);
    let request = proxy.request("POST", "/").body(content.clone());
    let reply = request.send().await;
    assert!(reply.complete && reply.body == content);
}
