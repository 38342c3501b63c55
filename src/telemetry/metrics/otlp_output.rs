//! Metrics as OTLP messages, with cumulative temporality.
//!
//! The name of a metric is that of Prometheus with dots, and its unit is a field instead of a
//! suffix. Prometheus translates both back, so that dashboards and alerts fit either way of
//! collection.

use super::exposition::{MetricKind, MetricOutput, SampleValue};
use super::histogram::HistogramSnapshot;
use super::http_server::{HttpRequestAttributes, merge_request_durations, sum_active_requests};
use super::registry::Metrics;
use super::status::ProcessStatus;
use crate::telemetry::otlp::{
    bool_attribute, instrumentation_scope, int_attribute, string_attribute,
};
use bytes::Bytes;
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::metrics::v1::{
    AggregationTemporality, Gauge, Histogram, HistogramDataPoint, Metric, NumberDataPoint,
    ResourceMetrics, ScopeMetrics, Sum, number_data_point,
};
use opentelemetry_proto::tonic::resource::v1::Resource;
use prost::Message;

/// Maximum number of data points in one message, so that it stays below the 4 MiB that gRPC servers
/// accept by default.
const MAX_POINTS_PER_MESSAGE: usize = 4_000;

/// Suffixes of Prometheus names, and the units that they stand for (UCUM).
const UNIT_SUFFIXES: [(&str, &str); 2] = [("_seconds", "s"), ("_bytes", "By")];

/// Collects metrics for messages. Each full message is encoded and sent before the next one is
/// begun: the points of 10,000 policies take one message of memory at a time.
struct OtlpOutput<'r, S> {
    /// Times in nanoseconds since the Unix epoch.
    started_ns: u64,
    now_ns: u64,
    resource: &'r Resource,
    /// Sends an encoded message. Returns false if no further message is needed.
    send_message: S,
    is_stopped: bool,
    /// The metrics of the next message.
    metrics: Vec<Metric>,
    /// Number of data points in the next message.
    point_count: usize,
    /// The metric that was begun last, without its points.
    kind: MetricKind,
    current: Metric,
    numbers: Vec<NumberDataPoint>,
    histograms: Vec<HistogramDataPoint>,
}

impl Metrics {
    /// Encodes all metrics at the time `now_ns` as export requests, and passes each to
    /// `send_message` before it encodes the next one. Ends early if that returns false. Times are
    /// in nanoseconds since the Unix epoch.
    pub(super) fn send_otlp_messages(
        &self,
        status: &ProcessStatus,
        resource: &Resource,
        (started_ns, now_ns): (u64, u64),
        send_message: impl FnMut(Bytes) -> bool,
    ) {
        let mut output = OtlpOutput::new(resource, (started_ns, now_ns), send_message);
        self.write_http_server_metrics(&mut output);
        self.write_metrics(&mut output, status);
        output.finish_message();
    }

    fn write_http_server_metrics(&self, output: &mut OtlpOutput<'_, impl FnMut(Bytes) -> bool>) {
        output.begin_metric(
            MetricKind::Histogram,
            ("http.server.request.duration", "s"),
            "Duration of HTTP server requests.",
        );
        for (key, durations) in merge_request_durations(&self.http_server_metrics()) {
            let attributes = match key {
                Some((request, status)) => duration_attributes(request, status),
                None => vec![bool_attribute("otel.metric.overflow", true)],
            };
            output.push_histogram(attributes, &durations);
        }
        output.begin_metric(
            MetricKind::UpDownCounter,
            ("http.server.active_requests", "{request}"),
            "Number of active HTTP server requests.",
        );
        for (request, count) in sum_active_requests(&self.http_server_metrics()) {
            let value = number_data_point::Value::AsInt(count);
            output.push_number(request_attributes(request), value);
        }
    }
}

fn request_attributes(request: HttpRequestAttributes) -> Vec<KeyValue> {
    vec![
        string_attribute("http.request.method", request.method),
        string_attribute(
            "url.scheme",
            if request.is_https { "https" } else { "http" },
        ),
    ]
}

fn duration_attributes(request: HttpRequestAttributes, status: Option<u16>) -> Vec<KeyValue> {
    let mut attributes = request_attributes(request);
    attributes
        .extend(status.map(|status| int_attribute("http.response.status_code", status.into())));
    let error = match status {
        None => Some("cancelled".to_owned()),
        Some(status) if status >= 500 => Some(status.to_string()),
        Some(_) => None,
    };
    attributes.extend(error.map(|error| string_attribute("error.type", &error)));
    attributes
}

/// Translates the name of a metric of Prometheus. The first two underscores become dots, as the
/// ends of its namespaces.
fn split_prometheus_name(name: &str) -> (String, &'static str) {
    let suffix = UNIT_SUFFIXES
        .iter()
        .find_map(|(suffix, unit)| Some((name.strip_suffix(suffix)?, *unit)));
    let (name, unit) = suffix.unwrap_or((name, ""));
    (name.replacen('_', ".", 2), unit)
}

impl<'r, S: FnMut(Bytes) -> bool> OtlpOutput<'r, S> {
    fn new(resource: &'r Resource, (started_ns, now_ns): (u64, u64), send_message: S) -> Self {
        Self {
            started_ns,
            now_ns,
            resource,
            send_message,
            is_stopped: false,
            metrics: Vec::new(),
            point_count: 0,
            kind: MetricKind::Gauge,
            current: Metric::default(),
            numbers: Vec::new(),
            histograms: Vec::new(),
        }
    }

    /// Encodes the metrics that have points as one message, and sends it.
    fn finish_message(&mut self) {
        self.end_metric();
        self.point_count = 0;
        let metrics = std::mem::take(&mut self.metrics);
        if self.is_stopped {
            return;
        }
        let scope_metrics = ScopeMetrics {
            scope: Some(instrumentation_scope()),
            metrics,
            ..ScopeMetrics::default()
        };
        let request = ExportMetricsServiceRequest {
            resource_metrics: vec![ResourceMetrics {
                resource: Some(self.resource.clone()),
                scope_metrics: vec![scope_metrics],
                ..ResourceMetrics::default()
            }],
        };
        let message = request.encode_to_vec().into();
        drop(request);
        self.is_stopped = !(self.send_message)(message);
    }

    fn begin_metric(&mut self, kind: MetricKind, (name, unit): (&str, &str), help: &str) {
        self.end_metric();
        self.kind = kind;
        self.current = Metric {
            name: name.to_owned(),
            description: help.to_owned(),
            unit: unit.to_owned(),
            ..Metric::default()
        };
    }

    /// Adds the current metric to the message, if it has points.
    fn end_metric(&mut self) {
        let data_points = std::mem::take(&mut self.numbers);
        let histograms = std::mem::take(&mut self.histograms);
        if data_points.is_empty() && histograms.is_empty() {
            return;
        }
        let aggregation_temporality = AggregationTemporality::Cumulative.into();
        let data = match self.kind {
            MetricKind::Counter | MetricKind::UpDownCounter => Data::Sum(Sum {
                data_points,
                aggregation_temporality,
                is_monotonic: self.kind == MetricKind::Counter,
            }),
            MetricKind::Gauge => Data::Gauge(Gauge { data_points }),
            MetricKind::Histogram => Data::Histogram(Histogram {
                data_points: histograms,
                aggregation_temporality,
            }),
        };
        self.metrics.push(Metric {
            data: Some(data),
            ..self.current.clone()
        });
    }

    /// Sends the message before the next point if it is full.
    fn make_room_for_point(&mut self) {
        if self.point_count == MAX_POINTS_PER_MESSAGE {
            self.finish_message();
        }
        self.point_count += 1;
    }

    fn push_number(&mut self, attributes: Vec<KeyValue>, value: number_data_point::Value) {
        self.make_room_for_point();
        self.numbers.push(NumberDataPoint {
            attributes,
            start_time_unix_nano: self.started_ns,
            time_unix_nano: self.now_ns,
            value: Some(value),
            ..NumberDataPoint::default()
        });
    }

    fn push_histogram(&mut self, attributes: Vec<KeyValue>, histogram: &HistogramSnapshot) {
        self.make_room_for_point();
        self.histograms.push(HistogramDataPoint {
            attributes,
            start_time_unix_nano: self.started_ns,
            time_unix_nano: self.now_ns,
            count: histogram.count(),
            sum: Some(histogram.sum().as_secs_f64()),
            bucket_counts: histogram.bucket_counts(),
            explicit_bounds: histogram.bounds_s(),
            ..HistogramDataPoint::default()
        });
    }
}

impl<S: FnMut(Bytes) -> bool> MetricOutput for OtlpOutput<'_, S> {
    fn write_family(&mut self, kind: MetricKind, name: &'static str, help: &str) {
        let (name, unit) = split_prometheus_name(name);
        self.begin_metric(kind, (&name, unit), help);
    }

    fn write_sample(&mut self, labels: &[(&str, &str)], value: SampleValue<'_>) {
        let attributes = labels
            .iter()
            .map(|(name, value)| string_attribute(name, value))
            .collect();
        let number = match value {
            SampleValue::Number(value) => {
                number_data_point::Value::AsInt(i64::try_from(value).unwrap_or(i64::MAX))
            }
            #[allow(
                clippy::cast_precision_loss,
                reason = "clocks differ by less than 2^53 us"
            )]
            SampleValue::Micros(value_us) => {
                number_data_point::Value::AsDouble(value_us as f64 / 1e6)
            }
            SampleValue::Histogram(histogram) => return self.push_histogram(attributes, histogram),
        };
        self.push_number(attributes, number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    fn names_have_namespaces_and_units_are_separate() {
        for (prometheus, name, unit) in [
            ("tidegate_requests", "tidegate.requests", ""),
            ("tidegate_decision_seconds", "tidegate.decision", "s"),
            (
                "tidegate_redis_memory_max_bytes",
                "tidegate.redis.memory_max",
                "By",
            ),
            (
                "tidegate_config_last_reload_successful",
                "tidegate.config.last_reload_successful",
                "",
            ),
        ] {
            assert_eq!(split_prometheus_name(prometheus), (name.to_owned(), unit));
        }
    }

    /// Writes a metric with so many points. Returns the messages that were sent, each with its
    /// number of points and the number of points that were written by then.
    fn send_points(count: usize, max_messages: usize) -> Vec<(Bytes, usize)> {
        let (resource, written) = (Resource::default(), Cell::new(0));
        let mut messages = Vec::new();
        let mut output = OtlpOutput::new(&resource, (1, 2), |message| {
            messages.push((message, written.get()));
            messages.len() < max_messages
        });
        output.write_family(MetricKind::Counter, "tidegate_requests", "Help.");
        for value in 0..count as u64 {
            output.write_sample(&[("policy", "p")], SampleValue::Number(value));
            written.set(written.get() + 1);
        }
        output.finish_message();
        assert!(output.metrics.is_empty());
        messages
    }

    #[test]
    fn a_metric_with_many_points_continues_in_the_next_message() {
        let metrics: Vec<(String, usize, usize)> = send_points(MAX_POINTS_PER_MESSAGE + 1, 9)
            .into_iter()
            .map(|(message, written)| {
                let request = ExportMetricsServiceRequest::decode(message).unwrap();
                let [metric] = &*request.resource_metrics[0].scope_metrics[0].metrics else {
                    panic!("{request:?}");
                };
                match metric.data.as_ref().unwrap() {
                    Data::Sum(sum) if sum.is_monotonic => {
                        (metric.name.clone(), sum.data_points.len(), written)
                    }
                    other => panic!("{other:?}"),
                }
            })
            .collect();
        let name = "tidegate.requests".to_owned();
        // A full message is sent before the next point is added.
        assert_eq!(
            metrics,
            [
                (name.clone(), MAX_POINTS_PER_MESSAGE, MAX_POINTS_PER_MESSAGE),
                (name, 1, MAX_POINTS_PER_MESSAGE + 1)
            ]
        );
    }

    #[test]
    fn after_a_failed_message_no_other_is_encoded() {
        assert_eq!(send_points(3 * MAX_POINTS_PER_MESSAGE, 1).len(), 1);
    }
}
