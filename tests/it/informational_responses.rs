//! Informational (1xx) responses reach only clients that can read them.

use crate::support::client::{RawClient, RawResponse};
use crate::support::h2_upstream::H2Upstream;
use crate::support::proxy::Proxy;
use crate::support::upstream::RawUpstream;
use h2::server::Builder;
use hyper::Response;
use std::sync::Arc;
use tokio::sync::Semaphore;

const GET_REQUEST: &str = "GET / HTTP/1.1\r\nHost: a\r\n\r\n";
const OK_RESPONSE: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

/// Sends an informational response, and the final one once the test releases it.
async fn start_upstream_with_hints(
    hints: impl Into<String>,
    release: &Arc<Semaphore>,
) -> RawUpstream {
    let (hints, release) = (hints.into(), Arc::clone(release));
    RawUpstream::with_script(move |_, mut socket| {
        let (hints, release) = (hints.clone(), Arc::clone(&release));
        async move {
            while socket.read_request().await.is_some() {
                socket.send(hints.as_bytes()).await;
                release.acquire().await.unwrap().forget();
                socket.send(OK_RESPONSE.as_bytes()).await;
            }
        }
    })
    .await
}

async fn read_response_head(client: &mut RawClient) -> RawResponse {
    client.read_any_response(true).await
}

#[tokio::test]
async fn early_hints_are_forwarded_at_once_without_hop_by_hop_fields() {
    let release = Arc::new(Semaphore::new(0));
    let hints = "HTTP/1.1 102 Processing\r\n\r\n\
        HTTP/1.1 103 Early Hints\r\nLink: </a.css>; rel=preload\r\nLink: </b.js>\r\nConnection: x-hop, close\r\n\
        X-Hop: 1\r\nKeep-Alive: timeout=5\r\nContent-Length: 7\r\nVia: 1.1 inner\r\n\r\n";
    let upstream = start_upstream_with_hints(hints, &release).await;
    let proxy = Proxy::start("", upstream.address).await;
    let mut client = RawClient::connect(proxy.address).await;
    for _ in 0..3 {
        client.send(GET_REQUEST).await;
        assert_eq!(read_response_head(&mut client).await.status, 102);
        let early = read_response_head(&mut client).await;
        assert_eq!(early.status, 103);
        let mut fields: Vec<_> = early
            .headers
            .iter()
            .map(|(name, value)| (&name[..], &value[..]))
            .collect();
        fields.sort_unstable();
        let expected = [
            ("link", "</a.css>; rel=preload"),
            ("link", "</b.js>"),
            ("via", "1.1 inner, 1.1 tidegate"),
        ];
        assert_eq!(fields, expected);
        assert!(
            !client.has_buffered_bytes(),
            "the final response is not sent yet"
        );
        release.add_permits(1);
        let reply = client.read_response().await;
        assert_eq!((reply.status, reply.text().as_str()), (200, "ok"));
    }
    assert_eq!(upstream.connection_count(), 1);
}

#[tokio::test]
async fn early_hints_are_forwarded_from_http2_upstreams() {
    let release = Arc::new(Semaphore::new(0));
    let waiting = Arc::clone(&release);
    let upstream = H2Upstream::with_handler(Builder::new(), move |mut exchange| {
        let release = Arc::clone(&waiting);
        async move {
            for link in ["</a>", "</b>"] {
                let early = Response::builder()
                    .status(103)
                    .header("link", link)
                    .body(())
                    .unwrap();
                exchange.respond.send_informational(early).unwrap();
            }
            release.acquire().await.unwrap().forget();
            exchange.respond_with(200, "ok");
        }
    })
    .await;
    let proxy = Proxy::builder().upstream_url(&upstream.url()).start().await;
    let mut client = RawClient::connect(proxy.address).await;
    client.send(GET_REQUEST).await;
    for link in ["</a>", "</b>"] {
        let early = read_response_head(&mut client).await;
        assert_eq!(
            (early.status, early.header("link"), early.header("via")),
            (103, Some(link), Some("2 tidegate"))
        );
    }
    release.add_permits(1);
    assert_eq!(client.read_response().await.text(), "ok");
}

#[tokio::test]
async fn clients_that_cannot_read_hints_get_none() {
    let release = Arc::new(Semaphore::new(100));
    let upstream =
        start_upstream_with_hints("HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n", &release).await;
    let proxy = Proxy::start("", upstream.address).await;
    let mut old = RawClient::connect(proxy.address).await;
    old.send("GET / HTTP/1.0\r\nHost: a\r\n\r\n").await;
    assert_eq!(read_response_head(&mut old).await.status, 200);

    // The proxy answers an expectation itself, once. The upstream does not see it.
    let upstream = start_upstream_with_hints("HTTP/1.1 100 Continue\r\n\r\n", &release).await;
    let proxy = Proxy::start("", upstream.address).await;
    let mut client = RawClient::connect(proxy.address).await;
    client.send(GET_REQUEST).await;
    assert_eq!(client.read_response().await.status, 200);
    client
        .send("POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
        .await;
    assert_eq!(read_response_head(&mut client).await.status, 100);
    client.send("hi").await;
    assert_eq!(read_response_head(&mut client).await.status, 200);
}

#[tokio::test]
async fn hints_are_bounded_and_precede_the_final_response() {
    let release = Arc::new(Semaphore::new(100));
    for (length, most) in [(10, 16), (6000, 2), (20_000, 0)] {
        let hint = format!(
            "HTTP/1.1 103 Early Hints\r\nLink: {}\r\n\r\n",
            "x".repeat(length)
        );
        let upstream = start_upstream_with_hints(hint.repeat(200), &release).await;
        let proxy = Proxy::start("", upstream.address).await;
        let mut client = RawClient::connect(proxy.address).await;
        for _ in 0..2 {
            client.send(GET_REQUEST).await;
            let mut hints = 0;
            let reply = loop {
                // Each of them is complete, otherwise it could not be parsed.
                let reply = client.read_any_response(false).await;
                if reply.status != 103 {
                    break reply;
                }
                hints += 1;
            };
            assert_eq!(
                (hints, reply.status, reply.text().as_str()),
                (most, 200, "ok"),
                "{length}"
            );
        }
    }
}

/// Hints that arrive one by one count too.
#[tokio::test]
async fn at_most_16_hints_of_a_request_are_forwarded() {
    let release = Arc::new(Semaphore::new(0));
    let waiting = Arc::clone(&release);
    let upstream = RawUpstream::with_script(move |_, mut socket| {
        let release = Arc::clone(&waiting);
        async move {
            socket.read_request().await;
            for _ in 0..40 {
                release.acquire().await.unwrap().forget();
                socket
                    .send(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n")
                    .await;
            }
            socket.send(OK_RESPONSE.as_bytes()).await;
        }
    })
    .await;
    let proxy = Proxy::start("", upstream.address).await;
    let mut client = RawClient::connect(proxy.address).await;
    client.send(GET_REQUEST).await;
    for _ in 0..16 {
        release.add_permits(1);
        assert_eq!(read_response_head(&mut client).await.status, 103);
    }
    release.add_permits(24);
    assert_eq!(read_response_head(&mut client).await.status, 200);
}

#[tokio::test]
async fn hints_are_never_sent_inside_a_response() {
    let release = Arc::new(Semaphore::new(0));
    let waiting = Arc::clone(&release);
    let big = format!(
        "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{}",
        8 << 20,
        "x".repeat(8 << 20)
    );
    let upstream = RawUpstream::with_script(move |_, mut socket| {
        let (big, release) = (big.clone(), Arc::clone(&waiting));
        async move {
            while let Some(request) = socket.read_request().await {
                if request.starts_with(b"GET /big") {
                    socket.send(big.as_bytes()).await;
                    continue;
                }
                socket
                    .send(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n")
                    .await;
                release.acquire().await.unwrap().forget();
                socket.send(OK_RESPONSE.as_bytes()).await;
            }
        }
    })
    .await;
    let proxy = Proxy::start("", upstream.address).await;
    let mut client = RawClient::connect(proxy.address).await;
    // Pipelined: the second request is sent during the first response.
    client
        .send("GET /big HTTP/1.1\r\nHost: a\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n")
        .await;
    client.read_past(b"\r\n\r\n").await;
    release.add_permits(1);
    let body = client.read_past(b"xHTTP/1.1").await;
    assert_eq!(body.len(), (8 << 20) + 8);
    assert!(body[..8 << 20].iter().all(|byte| *byte == b'x'));
}

/// The worker of the flood serves other requests meanwhile.
#[tokio::test]
async fn an_upstream_that_floods_informational_responses_is_a_502() {
    let upstream = RawUpstream::with_script(|_, mut socket| async move {
        while let Some(request) = socket.read_request().await {
            if request.starts_with(b"GET /flood") {
                let flood = "HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n".repeat(1_000);
                while tokio::io::AsyncWriteExt::write_all(socket.stream(), flood.as_bytes())
                    .await
                    .is_ok()
                {}
                return;
            }
            socket.send(OK_RESPONSE.as_bytes()).await;
        }
    })
    .await;
    let proxy = Proxy::start("[listen]\nthreads = 1", upstream.address).await;
    let mut flooded = RawClient::connect(proxy.address).await;
    flooded.send("GET /flood HTTP/1.1\r\nHost: a\r\n\r\n").await;
    let start = std::time::Instant::now();
    assert_eq!(proxy.get("/").await.status, 200);
    println!("{:?} for another request", start.elapsed());
    assert_eq!(flooded.read_response().await.status, 502);
    assert_eq!(proxy.get("/").await.status, 200);
}
