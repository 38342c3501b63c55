//! HTTP/1 clients that send a request, end their sending direction and read the response.

use crate::support::prelude::*;

/// Longer than a half-closed client may be silent before the proxy probes it.
const SLOW: Duration = Duration::from_millis(1500);

/// Counts the requests that are in the upstream.
struct InUpstreamGuard(Arc<AtomicUsize>);

impl Drop for InUpstreamGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

async fn start_upstream(in_upstream: &Arc<AtomicUsize>) -> Upstream {
    let in_upstream = Arc::clone(in_upstream);
    Upstream::with_handler(move |request| {
        in_upstream.fetch_add(1, Ordering::SeqCst);
        let guard = InUpstreamGuard(Arc::clone(&in_upstream));
        async move {
            let _guard = guard;
            match request.uri().path() {
                "/slow" => sleep(SLOW).await,
                "/never" => std::future::pending().await,
                _ => {}
            }
            echo(request).await
        }
    })
    .await
}

/// Sends these bytes, half-closes and returns all output.
async fn exchange(address: SocketAddr, request: &str) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    stream.shutdown().await.unwrap();
    let mut output = Vec::new();
    let read = timeout(TEST_TIMEOUT, stream.read_to_end(&mut output)).await;
    read.expect("the proxy closes").unwrap_or_default();
    String::from_utf8_lossy(&output).into_owned()
}

#[tokio::test]
async fn a_half_closed_client_is_answered() {
    let upstream = start_upstream(&Arc::default()).await;
    let policy = "[[policy]]\nname = 'deny'\nmatch = { path = '/deny' }\naction = 'deny'";
    let proxy = Proxy::start(policy, upstream.address).await;
    for request in [
        "GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        "GET / HTTP/1.0\r\nHost: a\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc",
        "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        "GET /deny HTTP/1.1\r\nHost: a\r\n\r\n",
    ] {
        let output = exchange(proxy.address, request).await;
        let status = if request.contains("deny") {
            "403"
        } else {
            "200"
        };
        assert_eq!(output.get(9..12), Some(status), "{request:?}: {output:?}");
    }
    // Two requests in one packet.
    let two = "GET /1 HTTP/1.1\r\nHost: a\r\n\r\nGET /2 HTTP/1.1\r\nHost: a\r\n\r\n";
    let output = exchange(proxy.address, two).await;
    assert_eq!(output.matches("HTTP/1.1 200").count(), 2, "{output:?}");
    // A slow answer follows a probe.
    let output = exchange(proxy.address, "GET /slow HTTP/1.1\r\nHost: a\r\n\r\n").await;
    let head = "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n";
    assert!(output.starts_with(head), "{output:?}");
}

#[tokio::test]
async fn a_client_that_is_gone_ends_its_request() {
    let in_upstream = Arc::<AtomicUsize>::default();
    let upstream = start_upstream(&in_upstream).await;
    let proxy = Proxy::start("", upstream.address).await;
    for (version, ends_half_open) in [("1.1", false), ("1.0", false), ("1.0", true)] {
        let mut stream = TcpStream::connect(proxy.address).await.unwrap();
        let request = format!("GET /never HTTP/{version}\r\nHost: a\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        wait_until("the request arrives", async || {
            in_upstream.load(Ordering::SeqCst) == 1
        })
        .await;
        if ends_half_open {
            // A client of HTTP/1.0 understands no probe, so it counts as gone.
            stream.shutdown().await.unwrap();
        } else {
            drop(stream);
        }
        wait_until("the request ends", async || {
            in_upstream.load(Ordering::SeqCst) == 0
        })
        .await;
    }
}

#[tokio::test]
async fn a_truncated_body_is_not_forwarded_as_complete() {
    let upstream = start_upstream(&Arc::default()).await;
    let proxy = Proxy::start("", upstream.address).await;
    for request in [
        "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nabc",
        "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
    ] {
        let output = exchange(proxy.address, request).await;
        assert!(!output.contains(" 200 "), "{request:?}: {output:?}");
    }
}

/// What the proxy learned from one request does not affect the next one on the connection.
#[tokio::test]
async fn a_request_after_one_of_http_1_0_is_answered_after_a_half_close() {
    let upstream = start_upstream(&Arc::default()).await;
    let proxy = Proxy::start("", upstream.address).await;
    let slow = "GET /slow HTTP/1.1\r\nHost: a\r\n\r\n";
    let old = "GET / HTTP/1.0\r\nHost: a\r\nConnection: keep-alive\r\n\r\n";
    let mut stream = TcpStream::connect(proxy.address).await.unwrap();
    stream.write_all(old.as_bytes()).await.unwrap();
    let mut output = vec![0; 4096];
    let read = stream.read(&mut output).await.unwrap();
    let first = String::from_utf8_lossy(&output[..read]).to_lowercase();
    assert!(first.contains("connection: keep-alive"), "{first}");
    stream.write_all(slow.as_bytes()).await.unwrap();
    stream.shutdown().await.unwrap();
    output.clear();
    in_time(stream.read_to_end(&mut output)).await.unwrap();
    let second = String::from_utf8_lossy(&output);
    assert!(second.contains(" 200 OK"), "{second}");
}
