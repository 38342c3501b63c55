//! HTTP/2 floods: the connection is closed, other clients are unaffected, and a metric counts it.

use crate::support::h2_frames::*;
use crate::support::prelude::*;

/// The most that the process may grow by during an attack.
const MAX_GROWTH_KIB: u64 = 48 << 10;

/// Sends the frames of `round` repeatedly until the proxy closes. Meanwhile another client is
/// served. Returns the number of rounds sent, and the code of the GOAWAY if there was one.
async fn send_until_closed(
    proxy: &Proxy,
    opening: impl AsRef<[u8]>,
    most: u32,
    pause: Duration,
    round: impl Fn(u32) -> Vec<u8>,
) -> (u32, Option<u32>) {
    let mut attacker = FrameClient::connect(proxy.address, &[]).await;
    assert!(attacker.send(opening).await);
    let other = tokio::spawn(keep_requesting(proxy.address));
    let (deadline, mut sent) = (Instant::now() + 2 * TEST_TIMEOUT, 0);
    while sent < most && !attacker.is_closed() && attacker.send(round(sent)).await {
        assert!(
            Instant::now() < deadline,
            "after {sent} rounds the proxy still reads"
        );
        sent += 1;
        if !pause.is_zero() {
            sleep(pause).await;
        }
    }
    let (closed, code) = attacker.wait_for_close(TEST_TIMEOUT).await;
    assert!(closed, "after {sent} rounds the connection is still open");
    other.abort();
    if let Err(error) = other.await {
        assert!(error.is_cancelled(), "the other client: {error}");
    }
    (sent, code)
}

async fn keep_requesting(address: std::net::SocketAddr) {
    loop {
        let start = Instant::now();
        ClientRequest::new(address, "GET", "/")
            .expect_status(200)
            .await;
        assert_faster_than(TEST_TIMEOUT / 2, start);
        sleep(Duration::from_millis(5)).await;
    }
}

/// The count of this reason on the metrics page.
async fn closed_connections(proxy: &Proxy, reason: &str) -> u64 {
    let series = format!("tidegate_connections_closed_total{{reason=\"{reason}\"}}");
    proxy.read_present_metric(&series).await as u64
}

/// Waits for this count: the client may see the close before the proxy has counted it.
async fn wait_for_closed_connections(proxy: &Proxy, reason: &str, count: u64) {
    wait_until(
        format!("{count} closed connections: {reason}"),
        async || {
            let found = closed_connections(proxy, reason).await;
            assert!(found <= count, "{reason}: {found} instead of {count}");
            found == count
        },
    )
    .await;
}

/// Sends a flood, and checks that the proxy counts it and does not grow.
async fn assert_flood_is_stopped(
    name: &str,
    opening: impl AsRef<[u8]>,
    most: u32,
    round: impl Fn(u32) -> Vec<u8>,
) {
    assert_paced_flood_is_stopped(name, opening, most, Duration::ZERO, round).await;
}

async fn assert_paced_flood_is_stopped(
    name: &str,
    opening: impl AsRef<[u8]>,
    most: u32,
    pause: Duration,
    round: impl Fn(u32) -> Vec<u8>,
) {
    let upstream = Upstream::echo_or_slow().await;
    let proxy = Proxy::start("", upstream.address).await;
    assert_eq!(proxy.get("/").await.status, 200);
    let (before, mark) = (proxy.rss_kib(), proxy.log_mark());
    let (rounds, code) = send_until_closed(&proxy, opening, most, pause, round).await;
    assert!(
        code.is_none_or(|code| code == ENHANCE_YOUR_CALM),
        "{name}: {code:?} after {rounds}"
    );
    wait_for_closed_connections(&proxy, "flood", 1).await;
    let grown = proxy.rss_kib().saturating_sub(before);
    assert!(grown < MAX_GROWTH_KIB, "{name}: {grown} KiB more");
    let lines: Vec<_> = proxy
        .log_since(mark)
        .into_iter()
        .filter(|line| !line.is_level("INFO"))
        .collect();
    assert!(
        lines.is_empty(),
        "{name}: the flood caused log lines: {lines:?}"
    );
    assert_eq!(proxy.get("/").await.status, 200, "{name}");
}

fn stream_id(round: u32) -> u32 {
    round * 2 + 1
}

#[tokio::test]
async fn requests_reset_before_they_are_forwarded() {
    assert_flood_is_stopped("rapid reset", "", 100_000, |n| {
        [get_frame(stream_id(n), "/"), rst_stream_frame(stream_id(n))].concat()
    })
    .await;
}

#[tokio::test]
async fn requests_reset_as_soon_as_they_are_forwarded() {
    let each = 10;
    let some = |round: u32, make: &dyn Fn(u32) -> Vec<u8>| -> Vec<u8> {
        (round * each..(round + 1) * each)
            .flat_map(|n| make(stream_id(n)))
            .collect()
    };
    // The requests of a round are forwarded during the pause, and reset at the start of the next
    // round.
    let round = |n: u32| {
        let given_up = n
            .checked_sub(1)
            .map_or_else(Vec::new, |last| some(last, &rst_stream_frame));
        [given_up, some(n, &|id| get_frame(id, "/never"))].concat()
    };
    assert_paced_flood_is_stopped(
        "rapid reset, slower",
        "",
        2_000,
        Duration::from_millis(10),
        round,
    )
    .await;
}

#[tokio::test]
async fn requests_that_provoke_a_reset_by_the_server() {
    // A window overflow is a stream error, so the proxy must reset the stream.
    let round = |n| {
        [
            get_frame(stream_id(n), "/never"),
            window_update_frame(stream_id(n), (1 << 31) - 1),
        ]
        .concat()
    };
    assert_flood_is_stopped("resets by the server", "", 100_000, round).await;
}

#[tokio::test]
async fn requests_beyond_the_concurrent_stream_limit() {
    assert_flood_is_stopped("refused streams", "", 100_000, |n| {
        get_frame(stream_id(n), "/never")
    })
    .await;
}

#[tokio::test]
async fn empty_header_blocks_end_the_connection() {
    assert_flood_is_stopped("empty HEADERS", "", 100_000, |n| {
        headers_frame(END_STREAM, stream_id(n), "")
    })
    .await;
}

/// Each is answered, with a reason, until the connection has too many.
#[tokio::test]
async fn malformed_heads_end_the_connection() {
    let fields = [&GET_FIELDS[..], &[("x y", "z")]].concat();
    let block = encode_header_block(&fields);
    assert_flood_is_stopped("malformed heads", "", 100_000, |n| {
        headers_frame(END_STREAM, stream_id(n), &block)
    })
    .await;
}

#[tokio::test]
async fn endless_continuation_frames_end_the_connection() {
    let junk = encode_header_block(&[("x-junk", &"j".repeat(1_000))]);
    let opening = encode_frame(HEADERS, END_STREAM, 1, encode_header_block(&GET_FIELDS));
    assert_flood_is_stopped("CONTINUATION", &opening, 1_000_000, |_| {
        encode_frame(CONTINUATION, 0, 1, &junk)
    })
    .await;
    assert_flood_is_stopped("empty CONTINUATION", &opening, 1_000_000, |_| {
        encode_frame(CONTINUATION, 0, 1, "")
    })
    .await;
}

#[tokio::test]
async fn control_frames_without_effect() {
    let many = |bytes: Vec<u8>| move |_| bytes.repeat(100);
    assert_flood_is_stopped("PING", "", 100_000, many(encode_frame(PING, 0, 0, [7; 8]))).await;
    assert_flood_is_stopped(
        "unsolicited PING",
        "",
        100_000,
        many(encode_frame(PING, ACK, 0, [7; 8])),
    )
    .await;
    assert_flood_is_stopped(
        "SETTINGS",
        "",
        100_000,
        many(encode_frame(SETTINGS, 0, 0, "")),
    )
    .await;
    assert_flood_is_stopped(
        "PRIORITY",
        "",
        100_000,
        many(encode_frame(PRIORITY, 0, 9, [0, 0, 0, 0, 1])),
    )
    .await;
    assert_flood_is_stopped(
        "WINDOW_UPDATE",
        "",
        100_000,
        many(window_update_frame(0, 1)),
    )
    .await;
    assert_flood_is_stopped(
        "unknown frames",
        "",
        100_000,
        many(encode_frame(0xb7, 0, 0, "anything")),
    )
    .await;
    assert_flood_is_stopped(
        "resets of finished streams",
        [get_frame(1, "/"), rst_stream_frame(1)].concat(),
        100_000,
        many(rst_stream_frame(1)),
    )
    .await;
}

#[tokio::test]
async fn alternating_window_sizes_while_streams_wait() {
    let opening: Vec<u8> = (0..150)
        .flat_map(|n| get_frame(stream_id(n), "/big"))
        .collect();
    let swing = [setting_frame(4, 0), setting_frame(4, 1)].concat();
    assert_flood_is_stopped("alternating SETTINGS", opening, 100_000, |_| {
        swing.repeat(20)
    })
    .await;
}

/// SETTINGS and GOAWAY cost more, the more streams are open.
#[tokio::test]
async fn frames_for_which_h2_visits_every_stream() {
    let upstream = Upstream::echo_or_slow().await;
    let proxy = Proxy::start("", upstream.address).await;
    let goaway = &encode_frame(GOAWAY, 0, 0, [0x7f, 0xff, 0xff, 0xff, 0, 0, 0, 0]);
    let closed = &setting_frame(4, 0);
    let open = &setting_frame(4, 1);
    for frames in [[closed; 2], [open; 2], [open, closed], [goaway; 2]] {
        let mut attacker = FrameClient::connect(proxy.address, &encode_setting(4, 0)).await;
        let opening: Vec<u8> = (0..200)
            .flat_map(|n| get_frame(stream_id(n), "/big"))
            .collect();
        attacker.send(opening).await;
        for _ in 0..200 {
            attacker.wait_for_kind(HEADERS).await;
        }
        assert!(!attacker.is_closed());
        let mut sent = 0;
        while sent < 1_000 && attacker.send(frames[sent % 2]).await && !attacker.is_closed() {
            sent += 1;
            sleep(Duration::from_millis(1)).await;
        }
        assert!((40..200).contains(&sent), "{sent} frames");
        assert_eq!(proxy.get("/").await.status, 200);
    }
}

#[tokio::test]
async fn window_updates_of_one_byte() {
    let opening = [setting_frame(4, 0), get_frame(1, "/big")].concat();
    assert_flood_is_stopped("WINDOW_UPDATE of one byte", opening, 100_000, |_| {
        window_update_frame(1, 1).repeat(50)
    })
    .await;
}

#[tokio::test]
async fn data_frames_without_payload() {
    let opening = request_head_frame(
        1,
        &[
            &[(":method", "POST")],
            &GET_FIELDS[1..3],
            &[(":path", "/never")],
        ]
        .concat(),
    );
    assert_flood_is_stopped("empty DATA", &opening, 100_000, |_| data_frame(1, "")).await;
    assert_flood_is_stopped("padding", &opening, 100_000, |_| {
        encode_frame(DATA, PADDED, 1, [vec![255], vec![0; 255]].concat())
    })
    .await;
    assert_flood_is_stopped("unread DATA of one byte", &opening, 100_000, |_| {
        data_frame(1, "x")
    })
    .await;
}

#[tokio::test]
async fn a_header_block_that_decompresses_to_megabytes_is_a_431() {
    let upstream = Upstream::echo_or_slow().await;
    let proxy = Proxy::start("", upstream.address).await;
    assert_eq!(proxy.get("/").await.status, 200);
    let before = proxy.rss_kib();
    for references in [1_000, 16_000] {
        let mut client = FrameClient::connect(proxy.address, &encode_setting(1, u32::MAX)).await;
        // Each byte refers to an indexed field of 4,000 bytes.
        let bomb = [
            encode_header_block(&GET_FIELDS),
            encode_indexed_literal("x-bomb", &"b".repeat(4_000)),
            vec![0xbe; references],
        ]
        .concat();
        let (first, rest) = bomb.split_at(bomb.len().min(16_000));
        client
            .send(encode_frame(HEADERS, END_STREAM, 1, first))
            .await;
        client
            .send(encode_frame(CONTINUATION, END_HEADERS, 1, rest))
            .await;
        let answer = client
            .wait_for_frame("a response", |frame| matches!(frame.kind, HEADERS | GOAWAY))
            .await;
        assert!(
            answer.kind == GOAWAY || answer.status().is_none(),
            "{answer:?}"
        );
    }
    let count = upstream.requests().len();
    assert_eq!(count, 1, "the request reached the upstream");
    assert!(proxy.rss_kib() < before + MAX_GROWTH_KIB);
}

#[tokio::test]
async fn streams_without_a_window_are_reset_and_others_are_served() {
    let upstream = Upstream::echo_or_slow().await;
    let config = "[listen.http]\nbody_idle_timeout = '500ms'";
    let proxy = Proxy::start(config, upstream.address).await;
    assert_eq!(proxy.get("/").await.status, 200);
    let before = proxy.rss_kib();
    let mut client = FrameClient::connect(proxy.address, &encode_setting(4, 0)).await;
    let streams = 100;
    client
        .send(
            (0..streams)
                .flat_map(|n| get_frame(stream_id(n), "/big"))
                .collect::<Vec<u8>>(),
        )
        .await;
    assert_eq!(proxy.get("/").await.status, 200);
    for _ in 0..streams {
        client.wait_for_kind(RST_STREAM).await;
    }
    let grown = proxy.rss_kib().saturating_sub(before);
    assert!(grown < MAX_GROWTH_KIB, "{grown} KiB more");
    wait_for_closed_connections(&proxy, "slow_read", u64::from(streams)).await;
    client
        .send([setting_frame(4, 65_535), get_frame(stream_id(streams), "/")].concat())
        .await;
    let answer = client
        .wait_for_frame("a response", |frame| {
            frame.kind == HEADERS && frame.stream == stream_id(streams)
        })
        .await;
    assert_eq!(answer.status(), Some(200), "the connection still works");
}

/// Traffic that resembles a flood but is legitimate.
#[tokio::test]
async fn busy_clients_are_not_disconnected() {
    let upstream = Upstream::echo_or_slow().await;
    let policy = "[[policy]]\nname = 'p'\nmatch = { path = '/limited' }\nlimit = { requests = 1, per = '1h' }";
    let proxy = Proxy::start(policy, upstream.address).await;
    let mut client = FrameClient::connect(proxy.address, &encode_setting(4, 1 << 24)).await;
    client.send(window_update_frame(0, 1 << 30)).await;
    let mut next = 0;
    let mut stream = || {
        next += 1;
        stream_id(next - 1)
    };
    // Small responses, each acknowledged as the most talkative clients do, denials, and HEAD
    // requests.
    for path in ["/", "/limited"] {
        for method in ["GET", "HEAD"] {
            for _ in 0..1_500 {
                let id = stream();
                let fields = [&[(":method", method), (":path", path)], &GET_FIELDS[1..3]].concat();
                client.send(request_frame(id, &fields)).await;
                client
                    .wait_for_frame("END_STREAM", |frame| {
                        frame.stream == id && frame.flags & END_STREAM != 0
                    })
                    .await;
                client
                    .send(
                        [
                            window_update_frame(0, 100),
                            encode_frame(PING, 0, 0, [1; 8]),
                        ]
                        .concat(),
                    )
                    .await;
            }
        }
    }
    // Many requests reset at once, as when a user leaves a page.
    let given_up: Vec<u32> = (0..150).map(|_| stream()).collect();
    client
        .send(
            given_up
                .iter()
                .flat_map(|id| get_frame(*id, "/never"))
                .collect::<Vec<u8>>(),
        )
        .await;
    sleep(Duration::from_millis(300)).await;
    client
        .send(
            given_up
                .iter()
                .flat_map(|id| rst_stream_frame(*id))
                .collect::<Vec<u8>>(),
        )
        .await;
    let last = stream();
    client.send(get_frame(last, "/")).await;
    client
        .wait_for_frame("a response", |frame| {
            frame.stream == last && frame.kind == HEADERS
        })
        .await;
    assert_eq!(closed_connections(&proxy, "flood").await, 0);
}

/// Reasons for closed connections other than floods.
#[tokio::test]
async fn slow_and_malformed_clients_are_counted_by_reason() {
    let upstream = Upstream::echo_or_slow().await;
    let config = "[listen.http]\nheader_timeout = '200ms'\nidle_timeout = '300ms'\nbody_idle_timeout = '200ms'";
    let proxy = Proxy::start(config, upstream.address).await;
    let mut slow = proxy.send_raw("GET / HTTP/1.1\r\nHo").await;
    assert_eq!(slow.read_response().await.status, 408);
    let line = proxy.wait_for_field("status", "408", 0).await;
    line.expect_fields(&[("decision", "malformed"), ("client_ip", "127.0.0.1")]);
    let mut idle = RawClient::connect(proxy.address).await;
    assert!(idle.closes_within(TEST_TIMEOUT).await);
    let mut body = proxy
        .send_raw("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\nshort")
        .await;
    assert_eq!(body.read_response().await.status, 408);
    let long = "x".repeat(70_000);
    for (odd, status) in [
        ("\0\r\n\r\n".to_owned(), 400),
        (
            format!("GET / HTTP/1.1\r\nHost: a\r\nX: {long}\r\n\r\n"),
            431,
        ),
        (
            "GET / HTTP/1.1\r\nHost: a\r\nX: y\r\n z\r\n\r\n".to_owned(),
            400,
        ),
    ] {
        let mark = proxy.log_mark();
        let answered = proxy.send_raw(odd).await.read_response().await.status;
        assert_eq!(answered, status);
        let status = status.to_string();
        proxy.wait_for_field("status", &status, mark).await;
    }
    let page = proxy.read_metrics_page().await;
    for line in ["{code=\"400\"} 2", "{code=\"408\"} 2", "{code=\"431\"} 1"] {
        let line = format!("tidegate_http_requests_total{line}");
        assert!(
            page.lines().any(|known| known == line),
            "{line} is not in {page}"
        );
    }
    for (reason, count) in [("header_timeout", 1), ("body_timeout", 1), ("protocol", 3)] {
        wait_for_closed_connections(&proxy, reason, count).await;
    }
    assert!(closed_connections(&proxy, "idle_timeout").await >= 1);
}

#[tokio::test]
async fn reaching_the_connection_limit_is_counted() {
    let upstream = Upstream::echo_or_slow().await;
    let proxy = Proxy::start("[listen]\nmax_connections = 2", upstream.address).await;
    let mut held = Vec::new();
    for _ in 0..3 {
        held.push(RawClient::connect(proxy.address).await);
    }
    wait_until("the full table to be counted", async || {
        let page = proxy.read_metrics_page().await;
        assert!(page.contains("\ntidegate_connections_max 2\n"), "{page}");
        page.contains("\ntidegate_connections_full_total 1\n")
    })
    .await;
    drop(held);
}
