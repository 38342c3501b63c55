//! Traces: forwarded trace headers and the spans that a collector receives.

use crate::support::prelude::*;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value};
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use tokio_rustls::TlsAcceptor;
use tonic::{Code, Status};

const TRACE_ID: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT_SPAN_ID: &str = "00f067aa0ba902b7";

const LIMITED_POLICY: &str =
    "[[policy]]\nname = 'p'\nmatch = { path = '/limited' }\nlimit = { requests = 1, per = '1h' }\n";

/// The export requests that a collector received.
#[derive(Clone, Default)]
struct ReceivedSpans {
    requests: Arc<Mutex<Vec<ExportTraceServiceRequest>>>,
    /// Requests without this value in `x-api-key` are rejected.
    required_api_key: Option<&'static str>,
}

/// A gRPC server. It stops on drop.
struct TraceCollector {
    address: SocketAddr,
    received: ReceivedSpans,
    server: JoinHandle<()>,
}

#[tonic::async_trait]
impl TraceService for ReceivedSpans {
    async fn export(
        &self,
        request: tonic::Request<ExportTraceServiceRequest>,
    ) -> Result<tonic::Response<ExportTraceServiceResponse>, Status> {
        assert_eq!(
            request
                .metadata()
                .get("user-agent")
                .unwrap()
                .to_str()
                .unwrap()[..9],
            *"tidegate/"
        );
        if request
            .metadata()
            .get("x-api-key")
            .map(|key| key.as_bytes())
            != self.required_api_key.map(str::as_bytes)
        {
            return Err(Status::new(
                Code::Unauthenticated,
                "missing or wrong x-api-key",
            ));
        }
        self.requests.lock().unwrap().push(request.into_inner());
        Ok(tonic::Response::new(ExportTraceServiceResponse::default()))
    }
}

/// A collector that rejects every request.
struct RefusingCollector;

#[tonic::async_trait]
impl TraceService for RefusingCollector {
    async fn export(
        &self,
        _request: tonic::Request<ExportTraceServiceRequest>,
    ) -> Result<tonic::Response<ExportTraceServiceResponse>, Status> {
        Err(Status::new(Code::ResourceExhausted, "too many"))
    }
}

impl TraceCollector {
    async fn start() -> Self {
        Self::start_on_port(0).await
    }

    async fn start_on_port(port: u16) -> Self {
        let received = ReceivedSpans::default();
        let service = TraceServiceServer::new(received.clone());
        Self::serve(port, service, received).await
    }

    async fn serve<S: TraceService>(
        port: u16,
        service: TraceServiceServer<S>,
        received: ReceivedSpans,
    ) -> Self {
        // A previous server on this port may still be shutting down.
        let bind = async || std::net::TcpListener::bind(("127.0.0.1", port)).ok();
        let listener = eventually("the port to be free", TEST_TIMEOUT, bind).await;
        listener.set_nonblocking(true).unwrap();
        let listener = TcpListener::from_std(listener).unwrap();
        let address = listener.local_addr().unwrap();
        let server = serve_grpc(listener, service, |socket| async { Some(socket) });
        Self {
            address,
            received,
            server,
        }
    }

    /// A server with TLS. It speaks gRPC if the client offers HTTP/2.
    async fn serve_tls(
        service: TraceServiceServer<impl TraceService>,
        tls: TlsAcceptor,
    ) -> (SocketAddr, JoinHandle<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let open = move |socket| {
            let tls = tls.clone();
            async move { tls.accept(socket).await.ok() }
        };
        (address, serve_grpc(listener, service, open))
    }

    fn trace_config(&self, sample: &str) -> String {
        format!(
            "[trace]\notlp = 'http://{}'\nsample = {sample}\n{LIMITED_POLICY}",
            self.address
        )
    }

    /// Waits until at least `number` spans have arrived and returns all of them.
    async fn wait_for_spans(&self, number: usize) -> Vec<Span> {
        eventually("spans", TEST_TIMEOUT, async || {
            let spans = self.received.all_spans();
            (spans.len() >= number).then_some(spans)
        })
        .await
    }
}

impl Drop for TraceCollector {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl ReceivedSpans {
    fn all_spans(&self) -> Vec<Span> {
        let requests = self.requests.lock().unwrap().clone();
        let items = requests.into_iter();
        let resources = items.flat_map(|request| request.resource_spans);
        resources
            .flat_map(|resource| resource.scope_spans)
            .flat_map(|scope| scope.spans)
            .collect()
    }
}

fn encode_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn attribute_map(attributes: &[KeyValue]) -> BTreeMap<&str, String> {
    let text = |value: &any_value::Value| match value {
        any_value::Value::StringValue(text) => text.clone(),
        any_value::Value::IntValue(number) => number.to_string(),
        other => panic!("{other:?}"),
    };
    let value = |one: &KeyValue| text(one.value.as_ref().unwrap().value.as_ref().unwrap());
    attributes
        .iter()
        .map(|one| (one.key.as_str(), value(one)))
        .collect()
}

fn find_single_span(spans: &[Span], kind: SpanKind, name: &str) -> Span {
    let mut found = spans
        .iter()
        .filter(|span| span.kind() == kind && span.name == name);
    let one = found
        .next()
        .unwrap_or_else(|| panic!("no {kind:?} {name} in {spans:#?}"))
        .clone();
    assert!(found.next().is_none(), "one {kind:?} {name} in {spans:#?}");
    one
}

fn make_traceparent(flags: &str) -> String {
    format!("00-{TRACE_ID}-{PARENT_SPAN_ID}-{flags}")
}

async fn send_traced_request(proxy: &Proxy, path: &str, flags: &str) -> u16 {
    let ask = proxy
        .request("GET", path)
        .header("traceparent", &make_traceparent(flags))
        .header("tracestate", "a=1,b=2");
    ask.send_for_status().await
}

#[tokio::test]
async fn without_a_collector_trace_headers_are_forwarded_unchanged() {
    let upstream = Upstream::echo().await;
    let proxy = Proxy::start("", upstream.address).await;
    assert_eq!(send_traced_request(&proxy, "/", "01").await, 200);
    let seen = upstream.last_request();
    seen.expect_header("traceparent", make_traceparent("01").as_str());
    seen.expect_header("tracestate", "a=1,b=2");
    assert_eq!(proxy.get("/").await.status, 200);
    assert!(
        upstream
            .last_request()
            .header_values("traceparent")
            .is_empty(),
        "the proxy must not create a trace without a collector"
    );
}

#[tokio::test]
async fn a_sampled_request_exports_connected_spans() {
    let (upstream, collector) = (Upstream::echo().await, TraceCollector::start().await);
    let proxy = Proxy::start(&collector.trace_config("0"), upstream.address).await;
    let answer = send_traced_request(&proxy, "/limited?secret=1", "01").await;
    assert_eq!(answer, 200);
    let spans = collector.wait_for_spans(3).await;
    let server = find_single_span(&spans, SpanKind::Server, "GET");
    let decide = find_single_span(&spans, SpanKind::Internal, "decide");
    let client = find_single_span(&spans, SpanKind::Client, "GET");
    assert!(
        spans
            .iter()
            .all(|span| encode_hex(&span.trace_id) == TRACE_ID && span.trace_state == "a=1,b=2")
    );
    assert_eq!(encode_hex(&server.parent_span_id), PARENT_SPAN_ID);
    assert_eq!(&decide.parent_span_id, &server.span_id);
    assert_eq!(&client.parent_span_id, &server.span_id);
    let seen = upstream.last_request();
    seen.expect_header(
        "traceparent",
        format!("00-{TRACE_ID}-{}-01", encode_hex(&client.span_id)),
    );
    assert_eq!(seen.single_header("tracestate"), "a=1,b=2");
    let times = [&server, &decide, &client]
        .map(|span| (span.start_time_unix_nano, span.end_time_unix_nano));
    assert!(
        times
            .iter()
            .all(|(start, end)| times[0].0 <= *start && start <= end && *end <= times[0].1),
        "{times:?}"
    );
    assert!(
        times[0]
            .0
            .abs_diff(crate::support::unix_s() * 1_000_000_000)
            < 60_000_000_000,
        "{times:?}"
    );
    let attributes = attribute_map(&server.attributes);
    for (key, value) in [
        ("http.request.method", "GET"),
        ("http.response.status_code", "200"),
        ("url.path", "/limited"),
        ("url.scheme", "http"),
        ("server.address", "shop.example"),
        ("client.address", "127.0.0.1"),
        ("tidegate.decision", "allowed"),
        ("tidegate.limit", "p"),
        ("tidegate.remaining", "0"),
    ] {
        let found = attributes.get(key).map(String::as_str);
        assert_eq!(found, Some(value), "{key} in {attributes:?}");
    }
    assert_eq!(
        attribute_map(&decide.attributes)["tidegate.source"],
        "memory"
    );
    assert_eq!(
        attribute_map(&client.attributes)["server.address"],
        upstream.address.to_string()
    );
    let resource = collector.received.requests.lock().unwrap()[0].resource_spans[0]
        .resource
        .clone()
        .unwrap();
    assert_eq!(
        attribute_map(&resource.attributes)["service.name"],
        "tidegate"
    );
}

#[tokio::test]
async fn a_refused_request_has_its_policy_and_no_upstream_span() {
    let (upstream, collector) = (Upstream::echo().await, TraceCollector::start().await);
    let proxy = Proxy::start(&collector.trace_config("0"), upstream.address).await;
    assert_eq!(proxy.get("/limited").await.status, 200);
    assert_eq!(send_traced_request(&proxy, "/limited", "01").await, 429);
    let spans = collector.wait_for_spans(2).await;
    assert_eq!(spans.len(), 2, "{spans:#?}");
    let attributes = find_single_span(&spans, SpanKind::Server, "GET");
    let attributes = attribute_map(&attributes.attributes);
    assert_eq!(attributes["tidegate.decision"].as_str(), "rejected");
    assert_eq!(attributes["tidegate.policy"].as_str(), "p");
    let line = proxy.wait_for_field("trace_id", TRACE_ID, 0).await;
    assert_eq!(line.field("decision"), "rejected");
}

#[tokio::test]
async fn unsampled_requests_export_nothing_and_invalid_traceparents_are_replaced() {
    let (upstream, collector) = (Upstream::echo().await, TraceCollector::start().await);
    let all = Proxy::start(&collector.trace_config("1"), upstream.address).await;
    let none = Proxy::start(&collector.trace_config("0"), upstream.address).await;
    // The caller's sampling decision overrides the configured ratio.
    assert_eq!(send_traced_request(&all, "/", "00").await, 200);
    upstream
        .last_request()
        .expect_header("traceparent", make_traceparent("00"));
    assert_eq!(none.get("/").await.status, 200);
    assert!(
        upstream
            .last_request()
            .header_values("traceparent")
            .is_empty()
    );
    for wrong in [
        make_traceparent("01").to_uppercase(),
        format!("{}-x", make_traceparent("01")),
        make_traceparent("01").replace(PARENT_SPAN_ID, &"0".repeat(16)),
    ] {
        let request = all.request("GET", "/").header("traceparent", &wrong);
        let ask = request.header("tracestate", "a=1");
        assert_eq!(ask.send_for_status().await, 200);
        let seen = upstream.last_request();
        let traceparent = seen.single_header("traceparent").to_owned();
        assert!(traceparent.len() == 55, "{traceparent}");
        assert!(!traceparent.contains(TRACE_ID), "{traceparent}");
        assert!(traceparent.ends_with("-03"), "{traceparent}");
        assert!(
            seen.header_values("tracestate").is_empty(),
            "the state of the invalid trace must be dropped"
        );
    }
    let twice = all
        .request("GET", "/")
        .header("traceparent", &make_traceparent("01"))
        .header("traceparent", &make_traceparent("01"));
    assert_eq!(twice.send_for_status().await, 200);
    assert_lacks(
        upstream.last_request().single_header("traceparent"),
        &[TRACE_ID],
    );
    let spans = collector.wait_for_spans(8).await;
    assert!(
        spans
            .iter()
            .all(|span| encode_hex(&span.trace_id) != TRACE_ID)
    );
}

#[tokio::test]
async fn upstream_errors_and_long_text_are_recorded_within_bounds() {
    let collector = TraceCollector::start().await;
    let proxy = Proxy::setup(&collector.trace_config("1")).start().await;
    let long = format!("/{}", "a".repeat(9000));
    let request = proxy.request("BREW", &long).header("Host", "h");
    request.expect_status(502).await;
    let spans = collector.wait_for_spans(2).await;
    let server = find_single_span(&spans, SpanKind::Server, "HTTP");
    let attributes = attribute_map(&server.attributes);
    assert_eq!(attributes["http.request.method"].as_str(), "_OTHER");
    assert_eq!(attributes["url.path"].len(), 256);
    assert_eq!(attributes["error.type"], "502");
    let client = find_single_span(&spans, SpanKind::Client, "HTTP");
    assert_eq!(
        attribute_map(&client.attributes)["error.type"],
        "connect_refused"
    );
    assert_eq!(server.status.unwrap().code, 2);
    assert_eq!(client.status.unwrap().code, 2);
}

#[tokio::test]
async fn the_last_spans_are_exported_before_exit() {
    let (upstream, collector) = (Upstream::echo().await, TraceCollector::start().await);
    let mut proxy = Proxy::start(&collector.trace_config("1"), upstream.address).await;
    assert_eq!(proxy.get_statuses("/", 5).await, [200; 5]);
    proxy.send_sigterm();
    assert!(proxy.wait_for_exit(TEST_TIMEOUT).await.status.success());
    assert_eq!(collector.received.all_spans().len(), 10);
}

#[tokio::test]
async fn an_unavailable_collector_does_not_affect_clients_and_is_logged_once() {
    let port = free_port();
    let lines = format!("[trace]\notlp = 'http://127.0.0.1:{port}'\nsample = 1\n");
    let proxy = Proxy::with_echo(&lines).await;
    let failed = async |number: f64| {
        wait_until(format!("{number} failed spans"), async || {
            proxy
                .read_metric("tidegate_trace_spans_total{result=\"failed\"}")
                .await
                >= number
        })
        .await;
    };
    assert_eq!(proxy.get("/").await.status, 200);
    failed(2.0).await;
    {
        let refusing = TraceServiceServer::new(RefusingCollector);
        let _collector = TraceCollector::serve(port, refusing, ReceivedSpans::default()).await;
        assert_eq!(proxy.get("/").await.status, 200);
        failed(4.0).await;
    }
    let failures = || proxy.log_text().matches("span export failed").count();
    assert_eq!(failures(), 1, "{}", proxy.log_text());
    let collector = TraceCollector::start_on_port(port).await;
    assert_eq!(proxy.get("/").await.status, 200);
    collector.wait_for_spans(2).await;
    proxy.wait_for_message("span export recovered", 0).await;
    proxy
        .assert_metric("tidegate_trace_spans_total{result=\"exported\"}", 2.0)
        .await;
    assert_eq!(failures(), 1);
}

/// A remote collector: TLS, a certificate signed by the configured CA file, and a key in a header.
#[tokio::test]
async fn spans_are_exported_over_tls_with_a_header_from_a_file() {
    let authority = CertificateAuthority::new();
    authority.sign("collector", "localhost");
    let received = ReceivedSpans {
        required_api_key: Some("s3cret k3y"),
        ..ReceivedSpans::default()
    };
    let tls = authority.tls_acceptor("collector", &["h2"], None);
    let (address, server) =
        TraceCollector::serve_tls(TraceServiceServer::new(received.clone()), tls).await;
    let headers = authority.path("headers");
    fs::write(
        &headers,
        "# of the team\n\nX-Api-Key:  s3cret k3y \nx-dataset: shop\n",
    )
    .unwrap();
    let upstream = Upstream::echo().await;
    let lines = |ca: &str| {
        let url = format!("https://localhost:{}", address.port());
        format!("[trace]\notlp = '{url}'\nsample = 1\nheaders_file = {headers:?}\n{ca}")
    };
    let proxy = Proxy::start(
        &lines(&format!("tls.ca = {:?}\n", authority.path_string("ca.pem"))),
        upstream.address,
    )
    .await;
    assert_eq!(proxy.get("/").await.status, 200);
    let spans = eventually("spans", TEST_TIMEOUT, async || {
        let spans = received.all_spans();
        (spans.len() == 2).then_some(spans)
    })
    .await;
    find_single_span(&spans, SpanKind::Server, "GET");
    let shown = proxy.admin_request("GET", "/config").send().await.text();
    assert_contains(&shown, &["headers_file"]);
    assert_lacks(&shown, &["k3y"]);
    // Nothing is sent to a collector with an untrusted certificate.
    let stranger = CertificateAuthority::new();
    let other = format!("tls.ca = {:?}\n", stranger.path_string("ca.pem"));
    let trusting = Proxy::start(&lines(&other), upstream.address).await;
    assert_eq!(trusting.get("/").await.status, 200);
    trusting.wait_for_message("span export failed", 0).await;
    assert_eq!(received.all_spans().len(), 2);
    assert!(!trusting.log_text().contains("k3y"));
    server.abort();
}

/// The collector accepts connections and never answers. Spans are queued, then dropped and counted.
/// Neither clients nor shutdown wait for it.
#[tokio::test]
async fn a_hanging_collector_fills_the_queue_and_delays_neither_clients_nor_exit() {
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = silent.local_addr().unwrap();
    let config = format!(
        "log.access = 'off'\n[trace]\notlp = 'http://{address}'\nsample = 1\n\
         [[policy]]\nname = 'no'\naction = 'deny'\n"
    );
    let mut proxy = Proxy::with_echo(&config).await;
    // Rejected requests have one span each and are fast. The queue holds 2048 spans; 256 leave it
    // every 5 s.
    let mut clients = JoinSet::new();
    for _ in 0..4 {
        let address = proxy.address;
        clients.spawn(async move {
            let mut client = RawClient::connect(address).await;
            for _ in 0..100_000 {
                client.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
                assert_eq!(client.read_response().await.status, 403);
            }
        });
    }
    wait_until_within(
        "a dropped span: the queue is bounded",
        6 * TEST_TIMEOUT,
        async || {
            proxy
                .read_metric("tidegate_trace_spans_total{result=\"dropped\"}")
                .await
                > 0.0
        },
    )
    .await;
    clients.shutdown().await;
    proxy.send_sigterm();
    // Shutdown must not wait for all queued spans, which would take most of a minute.
    assert!(proxy.wait_for_exit(TEST_TIMEOUT).await.status.success());
    assert_contains(&proxy.log_text(), &["span export incomplete at shutdown"]);
    drop(silent);
}

/// Three responses: one ends, one is cancelled by its client, one is cut off by the upstream.
#[tokio::test]
async fn a_span_ends_with_the_body() {
    let collector = TraceCollector::start().await;
    let feeders = Arc::<Mutex<Vec<BodySender>>>::default();
    let started = Arc::clone(&feeders);
    let upstream = Upstream::with_handler(move |_request| {
        let (feeder, body) = channel_body();
        started.lock().unwrap().push(feeder);
        async { UpstreamResponse::from(Response::new(body)) }
    })
    .await;
    let proxy = Proxy::start(&collector.trace_config("1"), upstream.address).await;
    let start_request = async |client: &mut RawClient| {
        client.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
        let feeder = eventually("the request", TEST_TIMEOUT, async || {
            feeders.lock().unwrap().pop()
        })
        .await;
        assert!(feeder.send("part").await);
        client.read_past(b"part").await;
        feeder
    };
    let mut client = RawClient::connect(proxy.address).await;
    let feeder = start_request(&mut client).await;
    sleep(Duration::from_millis(300)).await;
    drop(feeder);
    let spans = collector.wait_for_spans(2).await;
    let (server_span, client_span) = (
        find_single_span(&spans, SpanKind::Server, "GET"),
        find_single_span(&spans, SpanKind::Client, "GET"),
    );
    let took_ms = |span: &Span| (span.end_time_unix_nano - span.start_time_unix_nano) / 1_000_000;
    assert!(
        took_ms(&server_span) >= 300 && took_ms(&server_span) > took_ms(&client_span),
        "{server_span:?} {client_span:?}"
    );
    assert!(
        server_span.status.is_none()
            && !attribute_map(&server_span.attributes).contains_key("error.type")
    );

    let mut leaver = RawClient::connect(proxy.address).await;
    let feeder = start_request(&mut leaver).await;
    drop(leaver);
    feeder.wait_until_dropped().await;
    let cut = async |number: usize| {
        let spans = collector.wait_for_spans(number).await.split_off(number - 2);
        let server = find_single_span(&spans, SpanKind::Server, "GET");
        assert_eq!(server.status.unwrap().code, 2);
        attribute_map(&server.attributes)["error.type"].clone()
    };
    assert_eq!(cut(4).await, "cancelled");

    let mut client = RawClient::connect(proxy.address).await;
    start_request(&mut client).await.send_error().await;
    client.read_to_close().await;
    assert_eq!(cut(6).await, "upstream_broken");
}

/// HTTP/2 servers may send END_STREAM after the last byte, when the receiver no longer reads.
#[tokio::test]
async fn a_complete_body_without_end_of_stream_is_no_error() {
    let collector = TraceCollector::start().await;
    let upstream =
        H2Upstream::with_handler(h2::server::Builder::new(), |mut exchange| async move {
            let head = Response::builder()
                .header("content-length", "4")
                .body(())
                .unwrap();
            let mut stream = exchange.respond.send_response(head, false).unwrap();
            stream.send_data("part".into(), false).unwrap();
            // The proxy resets the stream instead of waiting for END_STREAM.
            assert!(
                std::future::poll_fn(|cx| stream.poll_reset(cx))
                    .await
                    .is_ok()
            );
        })
        .await;
    let proxy = Proxy::start(&collector.trace_config("1"), &upstream.url()).await;
    assert_eq!(proxy.get("/").await.text(), "part");
    let spans = collector.wait_for_spans(2).await;
    let server = find_single_span(&spans, SpanKind::Server, "GET");
    assert!(server.status.is_none(), "{server:?}");
}

#[tokio::test]
async fn spans_are_exported_over_http() {
    let received = ReceivedSpans::default();
    let kept = received.clone();
    let collector = Upstream::with_handler(move |request| {
        let kept = kept.clone();
        async move {
            assert_eq!(request.uri().path(), "/v1/traces");
            assert_eq!(request.headers()["content-type"], "application/x-protobuf");
            let body = request.into_body().collect().await.unwrap().to_bytes();
            let message = prost::Message::decode(body).unwrap();
            kept.requests.lock().unwrap().push(message);
            Response::new(full_body(""))
        }
    })
    .await;
    let address = collector.address;
    let lines = format!("[trace]\notlp = 'http://{address}/v1/traces'\nsample = 1\n");
    let proxy = Proxy::with_echo(&lines).await;
    assert_eq!(proxy.request("GET", "/").send_for_status().await, 200);
    let spans = eventually("spans", TEST_TIMEOUT, async || {
        let spans = received.all_spans();
        (spans.len() == 2).then_some(spans)
    })
    .await;
    find_single_span(&spans, SpanKind::Server, "GET");
}
