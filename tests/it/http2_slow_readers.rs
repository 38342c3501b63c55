//! HTTP/2 clients that grant a stream no window, or too small a one: `body_idle_timeout` ends it,
//! whatever the source of the response.

use crate::support::h2_frames::*;
use crate::support::prelude::*;
use h2::server::Builder;

const CONFIG: &str = "[listen.http]\nbody_idle_timeout = '500ms'\n\
    [[policy]]\nname = 'deny'\nmatch = { path = '/deny' }\naction = 'deny'";

async fn start_h2c_upstream() -> H2Upstream {
    H2Upstream::with_handler(Builder::new(), |exchange| async move {
        let size = match exchange.request.uri().path() {
            "/big" => 4 << 20,
            _ => 100,
        };
        exchange.respond_with(200, vec![b'x'; size]);
    })
    .await
}

/// Requests this path with an initial window of this size, and reads no more than that. Returns the
/// time until the proxy resets the stream or closes the connection.
async fn time_to_end(address: SocketAddr, path: &str, window: u32) -> Duration {
    let mut client = FrameClient::connect(address, &encode_setting(4, window)).await;
    client.send(get_frame(1, path)).await;
    client.wait_for_kind(HEADERS).await;
    let started_at = Instant::now();
    while started_at.elapsed() < Duration::from_secs(8) && !client.is_closed() {
        if client.take_frame(|frame| frame.kind == RST_STREAM) {
            break;
        }
        sleep(Duration::from_millis(10)).await;
    }
    started_at.elapsed()
}

#[tokio::test]
async fn a_stream_whose_client_grants_no_window_ends_after_the_timeout() {
    let (http1, http2) = (Upstream::echo_or_slow().await, start_h2c_upstream().await);
    let mut wrong = Vec::new();
    for (upstream, url) in [
        ("http", format!("http://{}", http1.address)),
        ("h2c", http2.url()),
    ] {
        let proxy = Proxy::start(CONFIG, &url).await;
        for path in ["/deny", "/small", "/big"] {
            for window in [0, 10] {
                let elapsed = time_to_end(proxy.address, path, window).await;
                if !(Duration::from_millis(400)..Duration::from_secs(5)).contains(&elapsed) {
                    wrong.push(format!(
                        "{path} of {upstream}, window {window}: {elapsed:?}"
                    ));
                }
            }
        }
        let closed = "tidegate_connections_closed_total{reason=\"slow_read\"}";
        assert_eq!(proxy.read_metric(closed).await, 6.0);
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Other requests do not extend the time of a stream whose last chunk is not read.
#[tokio::test]
async fn a_busy_connection_with_an_unread_response_is_closed() {
    let upstream = Upstream::echo_or_slow().await;
    let proxy = Proxy::start(CONFIG, upstream.address).await;
    let mut client = FrameClient::connect(proxy.address, &encode_setting(4, 10)).await;
    client.send(get_frame(1, "/deny")).await;
    let (started_at, mut stream) = (Instant::now(), 3);
    while !client.is_closed() && started_at.elapsed() < Duration::from_secs(8) {
        let frames = [
            get_frame(stream, "/other"),
            window_update_frame(stream, 60_000),
        ];
        client.send(frames.concat()).await;
        stream += 2;
        sleep(Duration::from_millis(50)).await;
    }
    assert!(started_at.elapsed() < Duration::from_secs(5));
}

/// A response that the upstream has not finished does not wait for the client.
#[tokio::test]
async fn a_slow_upstream_is_not_taken_for_a_slow_reader() {
    let upstream = H2Upstream::with_handler(Builder::new(), |mut exchange| async move {
        let head = http::Response::new(());
        let mut body = exchange.respond.send_response(head, false).unwrap();
        for part in ["first", "second"] {
            body.send_data(part.into(), part == "second").unwrap();
            sleep(Duration::from_millis(1_500)).await;
        }
    })
    .await;
    let proxy = Proxy::start(CONFIG, &upstream.url()).await;
    let mut client = FrameClient::connect(proxy.address, &[]).await;
    client.send(get_frame(1, "/")).await;
    let second = client.wait_for_frame("the end", |frame| {
        frame.kind == RST_STREAM || frame.kind == DATA && frame.flags & END_STREAM != 0
    });
    assert_eq!(second.await.kind, DATA);
}
