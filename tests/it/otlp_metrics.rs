//! Metrics by OTLP: names, units, attributes and resource that a collector receives.

use crate::support::prelude::*;
use opentelemetry_proto::tonic::collector::metrics::v1::metrics_service_server::{
    MetricsService, MetricsServiceServer,
};
use opentelemetry_proto::tonic::collector::metrics::v1::{
    ExportMetricsServiceRequest, ExportMetricsServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value};
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::metrics::v1::{
    AggregationTemporality, HistogramDataPoint, Metric, NumberDataPoint, number_data_point,
};
use prost::Message;
use tonic::Status;

const POLICIES: &str =
    "[[policy]]\nname = 'few'\nmatch = { path = '/few' }\nlimit = { requests = 1, per = '1h' }\n";

/// The export requests that a collector received.
#[derive(Clone, Default)]
struct ReceivedMetrics(Arc<Mutex<Vec<ExportMetricsServiceRequest>>>);

/// A collector like otelcol. It stops on drop.
struct MetricCollector {
    address: SocketAddr,
    received: ReceivedMetrics,
    server: JoinHandle<()>,
}

#[tonic::async_trait]
impl MetricsService for ReceivedMetrics {
    async fn export(
        &self,
        request: tonic::Request<ExportMetricsServiceRequest>,
    ) -> Result<tonic::Response<ExportMetricsServiceResponse>, Status> {
        self.0.lock().unwrap().push(request.into_inner());
        Ok(tonic::Response::new(ExportMetricsServiceResponse::default()))
    }
}

impl MetricCollector {
    async fn start_grpc() -> Self {
        let received = ReceivedMetrics::default();
        let service = MetricsServiceServer::new(received.clone());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = serve_grpc(listener, service, |socket| async { Some(socket) });
        Self {
            address,
            received,
            server,
        }
    }

    fn config(&self) -> String {
        format!(
            "[metrics]\notlp = 'http://{}'\ninterval = '1s'\n{POLICIES}",
            self.address
        )
    }
}

impl ReceivedMetrics {
    /// Waits for an export that `find` accepts.
    async fn wait_for<T>(
        &self,
        what: &str,
        find: impl Fn(&ExportMetricsServiceRequest) -> Option<T>,
    ) -> T {
        eventually(what, TEST_TIMEOUT, async || {
            self.0.lock().unwrap().iter().rev().find_map(&find)
        })
        .await
    }
}

impl Drop for MetricCollector {
    fn drop(&mut self) {
        self.server.abort();
    }
}

fn metrics_by_name(request: &ExportMetricsServiceRequest) -> BTreeMap<&str, &Metric> {
    let resources = request.resource_metrics.iter();
    let scopes = resources.flat_map(|resource| &resource.scope_metrics);
    scopes
        .flat_map(|scope| &scope.metrics)
        .map(|metric| (metric.name.as_str(), metric))
        .collect()
}

/// Attributes as `name=value`, sorted.
fn attribute_texts(attributes: &[KeyValue]) -> BTreeSet<String> {
    let text = |one: &KeyValue| match one.value.as_ref().unwrap().value.as_ref().unwrap() {
        any_value::Value::StringValue(text) => format!("{}={text}", one.key),
        any_value::Value::IntValue(number) => format!("{}={number}", one.key),
        other => panic!("{other:?}"),
    };
    attributes.iter().map(text).collect()
}

fn has_attributes(attributes: &[KeyValue], expected: &[&str]) -> bool {
    attribute_texts(attributes) == expected.iter().map(|text| (*text).to_owned()).collect()
}

fn histogram_point<'m>(metric: &'m Metric, attributes: &[&str]) -> Option<&'m HistogramDataPoint> {
    let Some(Data::Histogram(histogram)) = &metric.data else {
        panic!("{metric:?} is no histogram");
    };
    assert_eq!(
        histogram.aggregation_temporality(),
        AggregationTemporality::Cumulative
    );
    let points = &histogram.data_points;
    points
        .iter()
        .find(|point| has_attributes(&point.attributes, attributes))
}

/// The points of a sum. Checks its kind.
fn sum_points(metric: &Metric, is_monotonic: bool) -> &[NumberDataPoint] {
    let Some(Data::Sum(sum)) = &metric.data else {
        panic!("{metric:?} is no sum");
    };
    assert_eq!(
        (sum.is_monotonic, sum.aggregation_temporality()),
        (is_monotonic, AggregationTemporality::Cumulative)
    );
    &sum.data_points
}

fn int_value(points: &[NumberDataPoint], attributes: &[&str]) -> Option<i64> {
    let point = points
        .iter()
        .find(|point| has_attributes(&point.attributes, attributes))?;
    match point.value? {
        number_data_point::Value::AsInt(value) => Some(value),
        number_data_point::Value::AsDouble(value) => panic!("{value}"),
    }
}

#[tokio::test]
async fn http_server_metrics_follow_the_semantic_conventions() {
    let (upstream, collector) = (Upstream::echo().await, MetricCollector::start_grpc().await);
    let proxy = Proxy::start(&collector.config(), upstream.address).await;
    assert_eq!(proxy.get_statuses("/few", 3).await, [200, 429, 429]);
    let status = proxy.request("BREW", "/").send_for_status().await;
    let finished = |request: &ExportMetricsServiceRequest| {
        let metrics = metrics_by_name(request);
        let metric = (*metrics.get("http.server.request.duration")?).clone();
        let rejected = [
            "http.request.method=GET",
            "http.response.status_code=429",
            "url.scheme=http",
        ];
        (histogram_point(&metric, &rejected)?.count == 2).then_some(metric)
    };
    let metric = collector
        .received
        .wait_for("both rejections", finished)
        .await;
    assert_eq!(metric.unit, "s");
    let point = histogram_point(
        &metric,
        &[
            "http.request.method=GET",
            "http.response.status_code=200",
            "url.scheme=http",
        ],
    )
    .unwrap();
    assert_eq!(point.count, 1);
    assert_eq!(
        point.explicit_bounds,
        [
            0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0
        ]
    );
    assert_eq!(point.bucket_counts.len(), point.explicit_bounds.len() + 1);
    assert_eq!(point.bucket_counts.iter().sum::<u64>(), point.count);
    assert!(point.start_time_unix_nano < point.time_unix_nano);
    let status = format!("http.response.status_code={status}");
    let invented = ["http.request.method=_OTHER", "url.scheme=http", &status];
    assert_eq!(histogram_point(&metric, &invented).unwrap().count, 1);
}

#[tokio::test]
async fn a_request_is_active_until_its_body_ends() {
    let (sender, upstream) = Upstream::streaming().await;
    let collector = MetricCollector::start_grpc().await;
    let proxy = Proxy::start(&collector.config(), upstream.address).await;
    let _client = proxy
        .send_raw(b"GET / HTTP/1.1\r\nHost: shop.example\r\n\r\n")
        .await;
    let active = |request: &ExportMetricsServiceRequest| {
        let metrics = metrics_by_name(request);
        let metric = metrics.get("http.server.active_requests")?;
        assert_eq!(metric.unit, "{request}");
        int_value(
            sum_points(metric, false),
            &["http.request.method=GET", "url.scheme=http"],
        )
    };
    collector
        .received
        .wait_for("an active request", |request| {
            (active(request)? == 1).then_some(())
        })
        .await;
    drop(sender);
    collector
        .received
        .wait_for("no active request", |request| {
            (active(request)? == 0).then_some(())
        })
        .await;
}

/// Prometheus translates dots to underscores and appends the unit and, for a counter, `_total`.
fn prometheus_name(metric: &Metric) -> String {
    let unit = match metric.unit.as_str() {
        "" => "",
        "s" => "_seconds",
        "By" => "_bytes",
        unit => panic!("{unit} of {}", metric.name),
    };
    let total = match &metric.data {
        Some(Data::Sum(sum)) if sum.is_monotonic => "_total",
        _ => "",
    };
    format!("{}{unit}{total}", metric.name.replace('.', "_"))
}

#[tokio::test]
async fn exported_metrics_translate_to_the_names_of_the_prometheus_page() {
    let (upstream, collector) = (Upstream::echo().await, MetricCollector::start_grpc().await);
    let proxy = Proxy::start(&collector.config(), upstream.address).await;
    assert_eq!(proxy.get_statuses("/few", 2).await, [200, 429]);
    let request = collector
        .received
        .wait_for("the rejection", |request| {
            let metrics = metrics_by_name(request);
            let points = sum_points(metrics.get("tidegate.requests")?, true);
            let rejected = int_value(points, &["decision=rejected", "policy=few"])?;
            (rejected == 1).then(|| request.clone())
        })
        .await;
    let exported: BTreeSet<String> = metrics_by_name(&request)
        .values()
        .filter(|metric| metric.name.starts_with("tidegate."))
        .map(|metric| prometheus_name(metric))
        .collect();
    let page = proxy.read_metrics_page().await;
    let named = page.lines().filter_map(|line| {
        let name = line.split(['{', ' ']).next()?;
        (!line.starts_with('#')).then(|| {
            let name = ["_bucket", "_sum", "_count"]
                .iter()
                .find_map(|suffix| name.strip_suffix(suffix))
                .unwrap_or(name);
            name.to_owned()
        })
    });
    assert_eq!(exported, named.collect());
    assert!(metrics_by_name(&request).values().all(|metric| {
        metric.name.starts_with("tidegate.") || metric.name.starts_with("http.server.")
    }));
}

#[tokio::test]
async fn the_resource_names_pod_and_instance() {
    let (upstream, collector) = (Upstream::echo().await, MetricCollector::start_grpc().await);
    let mut proxy = Proxy::setup(&collector.config().replace("'1s'", "'1h'"))
        .upstream(upstream.address)
        .env("POD_NAME", "orders-1")
        .env("NAMESPACE", "shop")
        .env("NODE_NAME", "node-a")
        .env("OTEL_RESOURCE_ATTRIBUTES", "k8s.cluster.name=eu%201")
        .start()
        .await;
    proxy.send_sigterm();
    proxy.wait_for_exit(TEST_TIMEOUT).await;
    // The interval is long: this is the export at shutdown.
    let request = collector
        .received
        .wait_for("the last export", |request| Some(request.clone()))
        .await;
    let resource = request.resource_metrics[0].resource.as_ref().unwrap();
    let mut attributes = attribute_texts(&resource.attributes);
    let instance = attributes
        .iter()
        .find(|text| text.starts_with("service.instance.id="))
        .cloned()
        .unwrap();
    assert_eq!(instance.len(), "service.instance.id=".len() + 32);
    attributes.remove(&instance);
    let version = format!("service.version={}", env!("CARGO_PKG_VERSION"));
    let expected = [
        "k8s.cluster.name=eu 1",
        "k8s.namespace.name=shop",
        "k8s.node.name=node-a",
        "k8s.pod.name=orders-1",
        "service.name=tidegate",
        &version,
    ];
    assert_eq!(
        attributes.iter().map(String::as_str).collect::<Vec<_>>(),
        expected
    );
}

#[tokio::test]
async fn metrics_are_also_sent_by_http() {
    let received = ReceivedMetrics::default();
    let kept = received.clone();
    let collector = Upstream::with_handler(move |request| {
        let kept = kept.clone();
        async move {
            let body = request.into_body().collect().await.unwrap().to_bytes();
            let message = ExportMetricsServiceRequest::decode(body).unwrap();
            kept.0.lock().unwrap().push(message);
            Response::new(full_body(""))
        }
    })
    .await;
    let address = collector.address;
    let config = format!("[metrics]\notlp = 'http://{address}/v1/metrics'\ninterval = '1s'\n");
    let proxy = Proxy::with_echo(&config).await;
    let has_store = |request: &ExportMetricsServiceRequest| {
        let metrics = metrics_by_name(request);
        metrics.contains_key("tidegate.store.up").then_some(())
    };
    received.wait_for("an export", has_store).await;
    let mut paths = collector.requests().into_iter().map(|seen| seen.target);
    assert!(paths.all(|path| path == "/v1/metrics"));
    let failures = "tidegate_metric_exports_total{result=\"failure\"}";
    assert!(proxy.read_metric(failures).await < 1.0);
}

#[tokio::test]
async fn a_failing_collector_is_logged_once_and_counted() {
    let config = "[metrics]\notlp = 'http://127.0.0.1:9'\ninterval = '1s'\n";
    let proxy = Proxy::setup(config).start().await;
    let failures = "tidegate_metric_exports_total{result=\"failure\"}";
    wait_until("two failures", async || {
        proxy.read_metric(failures).await >= 2.0
    })
    .await;
    let is_failure = |line: &&LogLine| line.message_starts_with("metric export failed");
    assert_eq!(proxy.log_since(0).iter().filter(is_failure).count(), 1);
}
