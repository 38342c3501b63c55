//! Informational (1xx) responses reach only clients that can read them.

use crate::support::h2_frames::*;
use crate::support::prelude::*;
use h2::server::Builder;

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
    let proxy = Proxy::start("", &upstream.url()).await;
    let mut client = proxy.send_raw(GET_REQUEST).await;
    for link in ["</a>", "</b>"] {
        let early = read_response_head(&mut client).await;
        early.expect_status(103);
        early.expect_header("link", link);
        early.expect_header("via", "2 tidegate");
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
    let mut old = proxy.send_raw("GET / HTTP/1.0\r\nHost: a\r\n\r\n").await;
    assert_eq!(read_response_head(&mut old).await.status, 200);

    // The proxy answers an expectation itself, once. The upstream does not see it.
    let upstream = start_upstream_with_hints("HTTP/1.1 100 Continue\r\n\r\n", &release).await;
    let proxy = Proxy::start("", upstream.address).await;
    let mut client = proxy.send_raw(GET_REQUEST).await;
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
            assert_eq!(hints, most, "{length}");
            assert_eq!(reply.status, 200, "{length}");
            assert_eq!(reply.text().as_str(), "ok", "{length}");
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
    let mut client = proxy.send_raw(GET_REQUEST).await;
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
    let mut flooded = proxy
        .send_raw("GET /flood HTTP/1.1\r\nHost: a\r\n\r\n")
        .await;
    let start = Instant::now();
    assert_eq!(proxy.get("/").await.status, 200);
    println!("{:?} for another request", start.elapsed());
    assert_eq!(flooded.read_response().await.status, 502);
    assert_eq!(proxy.get("/").await.status, 200);
}

/// Frame of `100 Continue`: neither indexed nor the end of the stream.
fn continue_frame(stream: u32) -> RawFrame {
    RawFrame {
        kind: HEADERS,
        flags: END_HEADERS,
        stream,
        payload: b"\x08\x03100".to_vec(),
    }
}

/// Field block of a POST, followed by these bytes.
fn post_block(rest: &[u8]) -> Vec<u8> {
    let fields = request_fields("POST", "/");
    [&encode_header_block(&fields), rest].concat()
}

async fn next_head(client: &mut FrameClient, stream: u32) -> RawFrame {
    client
        .wait_for_frame("a head", |frame| {
            (frame.kind, frame.stream) == (HEADERS, stream)
        })
        .await
}

#[tokio::test]
async fn http2_clients_that_expect_100_continue_get_it() {
    let proxy = Proxy::with_echo("").await;
    let field = |value: &str| encode_header_block(&[("expect", value)]);
    let indexed = encode_indexed_literal("expect", "100-continue");
    let whole = |block: &[u8]| vec![(HEADERS, END_HEADERS, post_block(block))];
    let text = post_block(&field("100-continue"));
    let (front, back) = text.split_at(text.len() - 4);
    let cases = [
        ("plain", whole(&field("100-continue"))),
        ("upper case", whole(&field("100-Continue"))),
        (
            "Huffman",
            whole(b"\x00\x85\x2f\x9a\xca\x44\xff\x88\x08\x00\xb1\x0f\x52\x4d\x55\xa5"),
        ),
        (
            "a name of the static table",
            whole(b"\x0f\x14\x0c100-continue"),
        ),
        ("never indexed", whole(b"\x1f\x14\x0c100-continue")),
        (
            "padding",
            vec![(
                HEADERS,
                END_HEADERS | PADDED,
                [b"\x03", &text[..], b"\0\0\0"].concat(),
            )],
        ),
        (
            "priority",
            vec![(
                HEADERS,
                END_HEADERS | PRIORITY_FLAG,
                [b"\0\0\0\0\x0f", &text[..]].concat(),
            )],
        ),
        (
            "several frames",
            vec![
                (HEADERS, 0, front.to_vec()),
                (CONTINUATION, 0, back.to_vec()),
                (CONTINUATION, END_HEADERS, vec![]),
            ],
        ),
        ("for the dynamic table", whole(&indexed)),
        // The other cases add no entry.
        ("from the dynamic table", whole(&[0xbe])),
    ];
    for step in [1, 13, usize::MAX] {
        let mut client = FrameClient::connect(proxy.address, &[]).await;
        for (index, (name, frames)) in (0..).zip(&cases) {
            let stream = 1 + 2 * index;
            let head: Vec<u8> = frames
                .iter()
                .flat_map(|(kind, flags, payload)| encode_frame(*kind, *flags, stream, payload))
                .collect();
            for part in head.chunks(step.min(head.len())) {
                client.send(part).await;
                tokio::task::yield_now().await;
            }
            let answer = next_head(&mut client, stream).await;
            assert_eq!(answer, continue_frame(stream), "{name}");
            client.send(last_data_frame(stream, "body")).await;
            let status = next_head(&mut client, stream).await.status();
            assert_eq!(status, Some(200), "{name}");
            let request = proxy.echo().last_request();
            assert_eq!(
                request.header_values("expect"),
                [""; 0],
                "{name}: {request:?}"
            );
        }
        // A later upload that expects nothing gets nothing.
        let head = encode_frame(HEADERS, END_HEADERS, 101, post_block(&[]));
        client.send(head).await;
        client.send(last_data_frame(101, "body")).await;
        assert_eq!(next_head(&mut client, 101).await.status(), Some(200));
        assert_eq!(proxy.echo().last_request().header_values("expect"), [""; 0]);
    }
}

#[tokio::test]
async fn a_rejected_http2_request_gets_no_100_continue() {
    let config = "[listen.http]\nmax_body_bytes = '1000'\n[[policy]]\nname = 'p'\nkey = []\nlimit = { requests = 1, per = '1h' }\n";
    let proxy = Proxy::with_echo(config).await;
    let mut client = FrameClient::connect(proxy.address, &[]).await;
    let field = |name, value: &str| encode_header_block(&[(name, value)]);
    let expect = field("expect", "100-continue");
    for (stream, fields, answers) in [
        (1, [&expect[..], &field("content-length", "4")], 2),
        (3, [&expect, &field("content-length", "4")], 1),
        (5, [&expect, &field("content-length", "1001")], 1),
        (7, [&expect, &field("expect", "more")], 1),
        (9, [&expect, &field("x-a", " ")], 1),
    ] {
        client
            .send(encode_frame(
                HEADERS,
                END_HEADERS,
                stream,
                post_block(&fields.concat()),
            ))
            .await;
        if answers == 2 {
            assert_eq!(next_head(&mut client, stream).await, continue_frame(stream));
            client.send(last_data_frame(stream, "body")).await;
        }
        let head = next_head(&mut client, stream).await;
        assert_ne!(head, continue_frame(stream), "not the final response");
    }
    assert_eq!(proxy.echo().requests().len(), 1);
}

/// A client that lowers the size of its HPACK table must be told of the change by the next field
/// block (RFC 7541, 4.2).
#[tokio::test]
async fn http2_clients_with_small_header_tables_get_100_continue() {
    let proxy = Proxy::with_echo("").await;
    for (size, update) in [
        (0, &b"\x20"[..]),
        (100, b"\x3f\x45"),
        (4096, b""),
        (65_536, b""),
    ] {
        let mut client = FrameClient::connect(proxy.address, &encode_setting(1, size)).await;
        let expect = encode_header_block(&[("expect", "100-continue")]);
        client
            .send(encode_frame(HEADERS, END_HEADERS, 1, post_block(&expect)))
            .await;
        let block = next_head(&mut client, 1).await.payload;
        assert_eq!(block, [update, b"\x08\x03100"].concat(), "{size}");
        client.send(last_data_frame(1, "")).await;
        // h2 repeats the update.
        let block = next_head(&mut client, 1).await.payload;
        assert!(block.starts_with(update), "{size}: {block:?}");
        assert!(block.len() > 20, "{size}: {block:?}");
    }
}

/// The smallest of several table sizes is signalled before the last one (RFC 7541, 4.2), unless a
/// response has filled the table meanwhile.
#[tokio::test]
async fn every_change_of_a_header_table_is_signalled_with_100_continue() {
    let proxy = Proxy::with_echo("").await;
    let settings = |sizes: &[u32]| -> Vec<u8> {
        let sizes = sizes.iter().flat_map(|size| encode_setting(1, *size));
        sizes.collect()
    };
    let expect = encode_header_block(&[("expect", "100-continue")]);
    let upload = |stream| encode_frame(HEADERS, END_HEADERS, stream, post_block(&expect));
    for (sizes, updates) in [
        (&[0, 4096][..], &b"\x20\x3f\xe1\x1f"[..]),
        (&[100, 0, 31], b"\x20\x3f\0"),
        (&[65_536, 30, 5000], b"\x3e\x3f\xe1\x1f"),
        (&[4096, 65_536, 4096], b""),
        (&[200, 100], b"\x3f\x45"),
    ] {
        let mut client = FrameClient::connect(proxy.address, &settings(sizes)).await;
        client.send(upload(1)).await;
        let block = next_head(&mut client, 1).await.payload;
        assert_eq!(block, [updates, b"\x08\x03100"].concat(), "{sizes:?}");
        client.send(last_data_frame(1, "")).await;
        assert_eq!(next_head(&mut client, 1).await.kind, HEADERS);
        client
            .send(encode_frame(SETTINGS, 0, 0, settings(&[0, 4096])))
            .await;
        client.send(get_frame(3, "/")).await;
        assert_eq!(next_head(&mut client, 3).await.kind, HEADERS);
        client.send(upload(5)).await;
        assert_eq!(next_head(&mut client, 5).await, continue_frame(5));
    }
}

/// The response is written between two frames, also while downloads fill the socket.
#[tokio::test]
async fn http2_100_continue_never_divides_a_frame() {
    let upstream = Upstream::with_handler(|request| async move {
        match request.uri().path() {
            "/big" => Response::new(full_body(vec![b'x'; 2 << 20])),
            _ => echo(request).await,
        }
    })
    .await;
    let proxy = Proxy::start("", upstream.address).await;
    let windows = [encode_setting(4, 1 << 30), encode_setting(5, 1 << 20)].concat();
    let mut client = FrameClient::connect(proxy.address, &windows).await;
    client.send(window_update_frame(0, 1 << 30)).await;
    let expect = encode_header_block(&[("expect", "100-continue")]);
    for round in 0..20 {
        client.send(get_frame(4 * round + 1, "/big")).await;
        let stream = 4 * round + 3;
        client
            .send(encode_frame(
                HEADERS,
                END_HEADERS,
                stream,
                post_block(&expect),
            ))
            .await;
        let interim = client
            .wait_for_frame("a response", |frame| frame.stream == stream)
            .await;
        assert_eq!(interim, continue_frame(stream));
        client.send(last_data_frame(stream, "body")).await;
    }
    let last = 4 * 19 + 3;
    let end = client.wait_for_frame("the end", |frame| {
        assert!(frame.stream <= last, "{frame:?}");
        assert!(frame.kind <= CONTINUATION, "{frame:?}");
        frame.stream == last && frame.flags & END_STREAM > 0
    });
    end.await;
}
