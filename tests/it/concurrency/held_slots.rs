//! `release = "upstream"`: a slot stays taken until the app has answered, whatever the client does.

use super::wait_until_admitted;
use crate::support::prelude::*;
use std::future::poll_fn;

const HELD_SLOTS: &str = r#"
[[policy]]
name = "slots"
match = { path = "/jobs/**" }
limit = { requests = 2, algorithm = "concurrency", lease_ttl = "1s", release = "upstream", max_duration = "1h" }
"#;

/// Longer than a slot without renewal.
const OBSERVED_TIME: Duration = Duration::from_millis(1_500);

/// An app that finishes each job only when the test says so, even if its connection is closed.
#[derive(Clone, Debug)]
struct StubbornApp {
    at_work: Arc<AtomicUsize>,
    max_at_work: Arc<AtomicUsize>,
    /// One permit for each job that may end.
    finish: Arc<Semaphore>,
}

/// The app, and the server that keeps it reachable.
enum AppServer {
    Http1(Upstream),
    Http2(H2Upstream),
}

impl AppServer {
    fn url(&self) -> String {
        match self {
            Self::Http1(server) => format!("http://{}", server.address),
            Self::Http2(server) => server.url(),
        }
    }
}

impl StubbornApp {
    async fn start(is_http2: bool) -> (Self, AppServer) {
        let app = Self {
            at_work: Arc::default(),
            max_at_work: Arc::default(),
            finish: Arc::new(Semaphore::new(0)),
        };
        let served = app.clone();
        let server = match is_http2 {
            false => AppServer::Http1(
                Upstream::with_handler(move |request| {
                    // A task goes on when the server drops the future of a closed connection.
                    let job = tokio::spawn(served.clone().run_job(request.uri().path().to_owned()));
                    async {
                        job.await.unwrap();
                        Response::new(full_body("done"))
                    }
                })
                .await,
            ),
            true => AppServer::Http2(
                H2Upstream::with_handler(h2::server::Builder::new(), move |exchange| {
                    let app = served.clone();
                    async move {
                        app.run_job(exchange.request.uri().path().to_owned()).await;
                        exchange.respond_with(200, "done");
                    }
                })
                .await,
            ),
        };
        (app, server)
    }

    async fn run_job(self, path: String) {
        if path.ends_with("quick") {
            return;
        }
        let at_work = self.at_work.fetch_add(1, Ordering::SeqCst) + 1;
        self.max_at_work.fetch_max(at_work, Ordering::SeqCst);
        self.finish.acquire().await.unwrap().forget();
        self.at_work.fetch_sub(1, Ordering::SeqCst);
    }

    async fn wait_for_jobs(&self, wanted: usize) {
        let reached = async || self.at_work.load(Ordering::SeqCst) == wanted;
        wait_until(format!("{wanted} jobs"), reached).await;
    }
}

/// Sends a request and disconnects, or resets its stream, 30 ms later.
async fn request_and_leave(proxy: &Proxy, is_http2: bool) {
    if is_http2 {
        let mut sender = open_http2_connection(proxy.address).await;
        let request = Request::get("http://a/jobs/1").body(ClientBody::default());
        let response = sender.send_request(request.unwrap());
        drop(timeout(Duration::from_millis(30), response).await);
    } else {
        let _client = proxy
            .send_raw("GET /jobs/1 HTTP/1.1\r\nHost: a\r\n\r\n")
            .await;
        sleep(Duration::from_millis(30)).await;
    }
}

/// Requests are refused for some time.
async fn assert_slots_stay_taken(proxy: &Proxy, time: Duration, case: &str) {
    let start = Instant::now();
    while start.elapsed() < time {
        assert_eq!(proxy.get("/jobs/quick").await.status, 429, "{case}");
        sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn clients_that_leave_do_not_put_more_work_on_the_app_than_the_limit() {
    for (upstream_is_http2, client_is_http2, in_redis) in [
        (false, false, false),
        (false, true, true),
        (true, false, true),
        (true, true, false),
    ] {
        let case = format!("h2c: {upstream_is_http2}, client: {client_is_http2}, {in_redis}");
        let (app, server) = StubbornApp::start(upstream_is_http2).await;
        let redis = in_redis.then(RedisServer::start);
        let store = redis
            .as_ref()
            .map_or(String::new(), RedisServer::store_config);
        let proxy = Proxy::setup(&format!("{store}\n{HELD_SLOTS}")).upstream(&server.url());
        let proxy = proxy.start().await;
        proxy.wait_for_store().await;
        for _ in 0..12 {
            request_and_leave(&proxy, client_is_http2).await;
        }
        app.wait_for_jobs(2).await;
        assert_slots_stay_taken(&proxy, OBSERVED_TIME, &case).await;
        assert_eq!(app.max_at_work.load(Ordering::SeqCst), 2, "{case}");
        // Each slot is free as soon as its job has ended.
        app.finish.add_permits(1);
        wait_until_admitted(&proxy).await;
        app.wait_for_jobs(1).await;
        // The slot of the request just before may be free a moment later.
        while app.at_work.load(Ordering::SeqCst) < 2 {
            request_and_leave(&proxy, client_is_http2).await;
        }
        app.finish.add_permits(2);
        wait_until_admitted(&proxy).await;
    }
}

#[tokio::test]
async fn the_rest_of_a_response_is_read_without_its_client() {
    let (senders, mut bodies) = tokio::sync::mpsc::channel(64);
    let upstream = Upstream::with_handler(move |_request| {
        let (sender, body) = channel_body();
        senders.try_send(sender).unwrap();
        async { Response::new(body) }
    })
    .await;
    let policies = HELD_SLOTS.replace("requests = 2", "requests = 1");
    let proxy = Proxy::start(&policies, upstream.address).await;
    for _ in 0..2 {
        let mut client = proxy
            .send_raw("GET /jobs/1 HTTP/1.1\r\nHost: a\r\n\r\n")
            .await;
        let head = client.read_past(b"\r\n\r\n").await;
        assert!(head.starts_with(b"HTTP/1.1 200"), "{head:?}");
        let body = bodies.recv().await.unwrap();
        assert!(body.send("begun").await);
        client.read_past(b"begun").await;
        drop(client);
        for _ in 0..64 {
            let sent = timeout(TEST_TIMEOUT, body.send(vec![b'x'; 64 << 10])).await;
            assert_eq!(sent, Ok(true), "the proxy reads on");
        }
        let refused = proxy.get("/jobs/quick").await;
        assert_eq!(refused.status, 429);
        drop(body);
        // The next request is admitted, and its response ends at once.
        let next = tokio::spawn(async move {
            let body = bodies.recv().await.unwrap();
            drop(body);
            bodies
        });
        wait_until_admitted(&proxy).await;
        bodies = next.await.unwrap();
    }
}

#[tokio::test]
async fn the_rest_of_an_http2_response_is_read_without_its_client() {
    let upstream = H2Upstream::with_handler(h2::server::Builder::new(), |exchange| async move {
        if exchange.request.uri().path().ends_with("quick") {
            return exchange.respond_with(200, "");
        }
        let mut respond = exchange.respond;
        let mut stream = respond.send_response(Response::new(()), false).unwrap();
        // Three of them exceed the flow-control window of the connection.
        for _ in 0..64 {
            stream.reserve_capacity(64 << 10);
            let capacity = poll_fn(|cx| stream.poll_capacity(cx)).await;
            let bytes = vec![b'x'; capacity.unwrap().unwrap()];
            stream.send_data(Bytes::from(bytes), false).unwrap();
        }
        stream.send_data(Bytes::new(), true).unwrap();
    });
    let upstream = upstream.await;
    let policies = HELD_SLOTS.replace("requests = 2", "requests = 1");
    let proxy = Proxy::setup(&policies).upstream(&upstream.url());
    let proxy = proxy.start().await;
    for _ in 0..3 {
        let mut client = super::begin_when_free(&proxy).await;
        client.read_first_bytes().await;
    }
    // The response without a client has ended.
    wait_until_admitted(&proxy).await;
}

#[tokio::test]
async fn max_duration_ends_a_slot_without_a_client() {
    let (app, server) = StubbornApp::start(false).await;
    let policies = HELD_SLOTS.replace("\"1h\"", "\"1s\"");
    let proxy = Proxy::setup(&policies).upstream(&server.url());
    let proxy = proxy.start().await;
    let begun = Instant::now();
    for _ in 0..2 {
        request_and_leave(&proxy, false).await;
    }
    app.wait_for_jobs(2).await;
    wait_until_admitted(&proxy).await;
    assert!(
        begun.elapsed() >= Duration::from_secs(1),
        "{:?}",
        begun.elapsed()
    );
}

/// The proxy ends these exchanges, so it does not learn when the app has finished.
#[tokio::test]
async fn a_slot_is_held_until_max_duration_if_the_proxy_ends_the_exchange() {
    const SHORT: &str =
        "upstream.response_timeout = \"100ms\"\nupstream.body_idle_timeout = \"100ms\"\n";
    let upload = "POST /jobs/1 HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\nhalf";
    let get = "GET /jobs/1 HTTP/1.1\r\nHost: a\r\n\r\n";
    let head = "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf";
    for (case, settings, request, answer, leaves) in [
        ("broken upload", "", upload, "", true),
        ("response_timeout", SHORT, get, "", false),
        ("body_idle_timeout", SHORT, get, head, false),
        ("body_idle_timeout without a client", SHORT, get, head, true),
    ] {
        let upstream = RawUpstream::with_script(move |_, mut socket| async move {
            let is_quick = |bytes: &[u8]| bytes.starts_with(b"GET /jobs/quick");
            let mut request = vec![0; 4 << 10];
            let length = tokio::io::AsyncReadExt::read(socket.stream(), &mut request).await;
            request.truncate(length.unwrap_or(0));
            if is_quick(&request) {
                let done = "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
                return socket.send(done.as_bytes()).await;
            }
            socket.send(answer.as_bytes()).await;
            socket.read_to_close().await;
        })
        .await;
        let policies = HELD_SLOTS.replace("requests = 2", "requests = 1");
        let policies = policies.replace("\"1h\"", "\"2s\"");
        let proxy = Proxy::start(&format!("{settings}{policies}"), upstream.address).await;
        let begun = Instant::now();
        let mut client = proxy.send_raw(request).await;
        if leaves {
            wait_until("the request", async || upstream.connection_count() == 1).await;
            sleep(Duration::from_millis(30)).await;
            drop(client);
        } else {
            client.read_response().await;
        }
        assert_slots_stay_taken(&proxy, Duration::from_secs(1), case).await;
        wait_until_admitted(&proxy).await;
        assert!(
            begun.elapsed() >= Duration::from_secs(2),
            "{case}: {:?}",
            begun.elapsed()
        );
    }
}

#[tokio::test]
async fn a_request_that_the_upstream_has_not_received_holds_no_slot() {
    let policies = HELD_SLOTS.replace("requests = 2", "requests = 1");
    // Nothing listens there.
    let proxy = Proxy::setup(&policies).start().await;
    assert_eq!(proxy.get_statuses("/jobs/1", 3).await, [502; 3]);
    // An upstream that ends a request without a response has finished it.
    let upstream = RawUpstream::with_script(|_, mut socket| async move {
        socket.read_request().await;
    })
    .await;
    let proxy = Proxy::start(&policies, upstream.address).await;
    assert_eq!(proxy.get_statuses("/jobs/1", 3).await, [502; 3]);
}

#[tokio::test]
async fn a_proxy_stops_while_exchanges_have_no_client() {
    let (app, server) = StubbornApp::start(false).await;
    let settings = format!("shutdown.grace = '200ms'\n{HELD_SLOTS}");
    let proxy = Proxy::setup(&settings).upstream(&server.url());
    let mut proxy = proxy.start().await;
    request_and_leave(&proxy, false).await;
    let _waiting = proxy
        .send_raw("GET /jobs/1 HTTP/1.1\r\nHost: a\r\n\r\n")
        .await;
    app.wait_for_jobs(2).await;
    proxy.send_sigterm();
    proxy.wait_for_exit(TEST_TIMEOUT).await;
    assert!(!proxy.log_text().contains("panic"));
}

#[tokio::test]
async fn release_is_checked() {
    let policy =
        |limit: &str| format!("[[policy]]\nname = 'p'\nlimit = {{ requests = 2, {limit} }}\n");
    for (limit, expected) in [
        (
            "algorithm = 'concurrency', release = 'upstream'",
            "expected max_duration",
        ),
        (
            "algorithm = 'concurrency', release = 'upstream', max_duration = '0s'",
            "expected max_duration",
        ),
        (
            "algorithm = 'concurrency', release = 'app', max_duration = '1m'",
            "expected \"response\" or \"upstream\"",
        ),
        (
            "per = '1m', release = 'upstream'",
            "only for algorithm = \"concurrency\"",
        ),
    ] {
        let output = run_check(&policy(limit)).await;
        assert_eq!(output.status.code(), Some(1), "{limit}: {output:?}");
        assert!(
            output.stderr.contains(expected),
            "{limit}: {}",
            output.stderr
        );
        assert!(
            output.stderr.contains("release"),
            "{limit}: {}",
            output.stderr
        );
    }
    let held = "algorithm = 'concurrency', release = 'upstream', max_duration = '10m'";
    let output = run_check(&policy(held)).await;
    let sentence =
        "at most 2 requests at a time, each for at most 10m, until the upstream's response ends";
    assert!(output.stdout.contains(sentence), "{output:?}");
}
