//! Upstream connections: what one client can hold of them, and how slowly it may upload.

use crate::support::h2_frames::*;
use crate::support::prelude::*;

const FEW_CONNECTIONS: &str =
    "upstream.max_connections = 4\nclient.trusted_proxies = ['127.0.0.1']\n";

/// Answers `/hold` never, and other requests with a description of them.
async fn hold_or_echo(request: Request<Incoming>) -> UpstreamResponse {
    match request.uri().path() {
        "/hold" => std::future::pending().await,
        "/late" => {
            sleep(Duration::from_millis(50)).await;
            Response::new(full_body("late"))
        }
        _ => echo(request).await,
    }
}

/// Uploads of which only the first bytes arrive take no connections from other requests, even of
/// the same client.
#[tokio::test]
async fn uploads_that_trickle_leave_connections_to_others() {
    let upstream = Upstream::with_handler(hold_or_echo).await;
    let proxy = Proxy::start(FEW_CONNECTIONS, upstream.address).await;
    let mut client = FrameClient::connect(proxy.address, &[]).await;
    let mut lengths = [None, Some("100"), Some("100000000")].into_iter().cycle();
    for stream in (1..60).step_by(2) {
        let mut fields = GET_FIELDS.to_vec();
        fields.iter_mut().for_each(|(name, value)| {
            if *name == ":method" {
                *value = "POST";
            }
        });
        fields.extend(
            lengths
                .next()
                .unwrap()
                .map(|length| ("content-length", length)),
        );
        client.send(upload_head_frame(stream, &fields)).await;
        client.send(data_frame(stream, "x")).await;
    }
    let mut http1_clients = Vec::new();
    for _ in 0..10 {
        let http1 = proxy
            .send_raw("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\nx")
            .await;
        http1_clients.push(http1);
    }
    // Half of the connections, and after a second one more.
    wait_until("slow uploads", async || upstream.requests().len() == 3).await;
    for _ in 0..20 {
        assert_eq!(proxy.get("/").await.status, 200);
    }
    // An upload that goes on is complete at the upstream.
    let mut http1 = http1_clients.pop().unwrap();
    http1.send("y".repeat(99)).await;
    let reply = http1.read_response().await;
    assert_eq!(reply.status, 200);
    assert_eq!(reply.json()["body_len"].as_u64(), Some(100));
}

/// As [`request_frame`], but the body follows.
fn upload_head_frame(stream: u32, fields: &[(&str, &str)]) -> Vec<u8> {
    encode_frame(HEADERS, END_HEADERS, stream, encode_header_block(fields))
}

/// Long polls and slow downloads of one client leave connections to other clients.
#[tokio::test]
async fn one_client_leaves_connections_to_others() {
    let upstream = Upstream::with_handler(hold_or_echo).await;
    let config = FEW_CONNECTIONS.replace("= 4", "= 8");
    let proxy = Proxy::start(&config, upstream.address).await;
    let request = |client: &str, target: &str| {
        proxy
            .request("GET", target)
            .header("X-Forwarded-For", client)
    };
    let mut held: JoinSet<u16> = (0..30)
        .map(|_| request("192.0.2.1", "/hold").send_for_status())
        .collect();
    // Those above the share wait for `queue_timeout`.
    let refused = timeout(TEST_TIMEOUT / 2, held.join_next()).await;
    let refused = refused.expect("one client may hold all connections");
    assert_eq!(refused.unwrap().unwrap(), 503);
    assert_eq!(upstream.requests().len(), 6);
    for client in ["192.0.2.2", "192.0.2.3"] {
        for _ in 0..5 {
            assert_eq!(request(client, "/").send_for_status().await, 200);
        }
    }
}

/// A client above its share waits for its own requests.
#[tokio::test]
async fn a_client_above_its_share_is_served_in_turn() {
    let upstream = Upstream::with_handler(hold_or_echo).await;
    let config = FEW_CONNECTIONS.replace("= 4", "= 8");
    let proxy = Proxy::start(&config, upstream.address).await;
    let requests: Vec<_> = (0..40)
        .map(|_| {
            let request = proxy.request("GET", "/late");
            tokio::spawn(request.send_for_status())
        })
        .collect();
    for request in requests {
        assert_eq!(request.await.unwrap(), 200);
    }
}

#[tokio::test]
async fn an_upload_below_the_minimum_rate_ends_with_408() {
    for rate in ["1KiB", "0"] {
        let config =
            format!("[listen.http]\nbody_idle_timeout = '300ms'\nmin_upload_rate = '{rate}'");
        let proxy = Proxy::with_echo(&config).await;
        let stream = TcpStream::connect(proxy.address).await.unwrap();
        let (mut from, mut to) = stream.into_split();
        let head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 20\r\n\r\n";
        to.write_all(head).await.unwrap();
        let sender = tokio::spawn(async move {
            for _ in 0..20 {
                sleep(Duration::from_millis(50)).await;
                if to.write_all(b"x").await.is_err() {
                    break;
                }
            }
            to
        });
        let mut reply = [0; 12];
        let read = timeout(TEST_TIMEOUT, from.read_exact(&mut reply)).await;
        read.unwrap().unwrap();
        let expected = if rate == "0" {
            b"HTTP/1.1 200"
        } else {
            b"HTTP/1.1 408"
        };
        assert_eq!(&reply, expected, "{rate}");
        drop(sender.await);
    }
}

#[tokio::test]
async fn an_upstream_that_reads_slowly_is_not_the_fault_of_the_client() {
    let upstream = RawUpstream::with_script(|_, mut socket| async move {
        sleep(Duration::from_secs(1)).await;
        let mut body = vec![0; 8_000_000];
        socket.stream().read_exact(&mut body).await.unwrap();
        socket
            .send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            .await;
        socket.read_to_close().await;
    })
    .await;
    let config = "[listen.http]\nbody_idle_timeout = '300ms'\nmin_upload_rate = '1GiB'";
    let proxy = Proxy::start(config, upstream.address).await;
    let upload = proxy.request("POST", "/").body(vec![b'x'; 8_000_000]);
    assert_eq!(upload.send().await.status, 200);
}

/// While connections are scarce, an upload is read ahead, but not for as long as it may take.
#[tokio::test]
async fn an_upstream_may_answer_before_the_upload_ends() {
    let upstream = RawUpstream::with_script(|_, mut socket| async move {
        let mut method = [0; 4];
        socket.stream().read_exact(&mut method).await.unwrap();
        if &method == b"POST" {
            let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello";
            socket.send(answer).await;
        }
        socket.read_to_close().await;
    })
    .await;
    let proxy = Proxy::start(FEW_CONNECTIONS, upstream.address).await;
    let mut held = JoinSet::new();
    for _ in 0..2 {
        held.spawn(proxy.request("GET", "/hold").send_for_status());
    }
    wait_until("held connections", async || {
        upstream.connection_count() == 2
    })
    .await;
    let mut client = RawClient::connect(proxy.address).await;
    let head = "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n";
    client.send(head).await;
    let reply = client.read_response().await;
    assert_eq!((reply.status, reply.text()), (200, "hello".to_owned()));
}

/// The connections of requests that are sent again count as the client's like all others.
#[tokio::test]
async fn a_retried_request_keeps_its_share() {
    let upstream = RawUpstream::with_script(|_, mut socket| async move {
        for request in 0.. {
            let Some(head) = socket.read_request().await else {
                return;
            };
            if head.starts_with(b"GET /hold") {
                if request == 0 {
                    socket.read_to_close().await;
                }
                return;
            }
            sleep(Duration::from_millis(100)).await;
            socket
                .send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
                .await;
        }
    })
    .await;
    let config = FEW_CONNECTIONS.replace("= 4", "= 8");
    let proxy = Proxy::start(&config, upstream.address).await;
    let request = |client: &str, target: &str| {
        proxy
            .request("GET", target)
            .header("X-Forwarded-For", client)
            .send_for_status()
    };
    let first: JoinSet<u16> = (0..6).map(|_| request("192.0.2.1", "/")).collect();
    assert_eq!(first.join_all().await, [200; 6]);
    let mut held: JoinSet<u16> = (0..6).map(|_| request("192.0.2.1", "/hold")).collect();
    // Six connections were closed by the upstream instead of an answer, and six opened.
    wait_until("retries", async || upstream.connection_count() == 12).await;
    for _ in 0..4 {
        held.spawn(request("192.0.2.1", "/hold"));
    }
    let refused = timeout(TEST_TIMEOUT / 2, held.join_next()).await;
    assert_eq!(refused.unwrap().unwrap().unwrap(), 503);
    assert_eq!(upstream.connection_count(), 12);
    assert_eq!(request("192.0.2.2", "/").await, 200);
}

/// The response timeout begins when the request is sent, also if its body was read before.
#[tokio::test]
async fn the_wait_for_a_share_is_no_part_of_the_response_timeout() {
    let upstream = Upstream::with_handler(|request| async move {
        if request.uri().path() != "/stream" {
            return echo(request).await;
        }
        let (sender, body) = channel_body();
        tokio::spawn(async move {
            sender.send("begin").await;
            sleep(Duration::from_millis(1_500)).await;
            drop(sender);
        });
        Response::new(body)
    })
    .await;
    let config = format!(
        "{FEW_CONNECTIONS}upstream.response_timeout = '1s'\nupstream.queue_timeout = '10s'"
    );
    let proxy = Proxy::start(&config, upstream.address).await;
    let mut streams: JoinSet<u16> = (0..3)
        .map(|_| proxy.request("GET", "/stream").send_for_status())
        .collect();
    wait_until("streams", async || upstream.requests().len() == 3).await;
    let upload = proxy.request("POST", "/").body("x");
    assert_eq!(upload.send_for_status().await, 200);
    assert_eq!(streams.join_next().await.unwrap().unwrap(), 200);
}
