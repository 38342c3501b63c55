//! The writing of metrics: the interface of all formats, and the text formats that Prometheus
//! reads.

use super::histogram::HistogramSnapshot;
use std::fmt::{Display, Write as _};

/// The names are those of Prometheus.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display)]
#[strum(serialize_all = "lowercase")]
pub(super) enum MetricKind {
    Counter,
    Gauge,
    Histogram,
    /// A sum that can fall. Only OTLP has one.
    UpDownCounter,
}

/// The value of one sample.
#[derive(Clone, Copy, Debug)]
pub(super) enum SampleValue<'v> {
    Number(u64),
    /// Microseconds, exported as seconds.
    Micros(i64),
    Histogram(&'v HistogramSnapshot),
}

/// A format of metrics.
pub(super) trait MetricOutput {
    /// Begins a metric. The name is that of Prometheus, for a counter without `_total`; `help` is
    /// not escaped.
    fn write_family(&mut self, kind: MetricKind, name: &'static str, help: &str);

    /// Writes a sample of the metric that was begun last.
    fn write_sample(&mut self, labels: &[(&str, &str)], value: SampleValue<'_>);
}

/// Writes metrics to a [`MetricOutput`]: each with one number, with a number `if` it is known, or
/// `by` a label with pairs of a label value and a number.
macro_rules! write_metrics {
    ($output:expr;) => {};
    ($output:expr; $kind:ident $name:literal = $value:expr, $help:literal; $($more:tt)*) => {
        $output.write_family(MetricKind::$kind, $name, $help);
        $output.write_sample(&[], SampleValue::Number($value));
        write_metrics! { $output; $($more)* }
    };
    ($output:expr; $kind:ident $name:literal if $value:expr, $help:literal; $($more:tt)*) => {
        if let Some(value) = $value {
            write_metrics! { $output; $kind $name = value, $help; }
        }
        write_metrics! { $output; $($more)* }
    };
    ($output:expr; $kind:ident $name:literal by $label:literal = $counts:expr, $help:literal; $($more:tt)*) => {
        $output.write_family(MetricKind::$kind, $name, $help);
        for (value, count) in $counts {
            $output.write_sample(&[($label, value)], SampleValue::Number(count));
        }
        write_metrics! { $output; $($more)* }
    };
}
pub(super) use write_metrics;

/// The format of the metrics page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpositionFormat {
    /// Prometheus text format 0.0.4, which every scraper supports.
    PrometheusText,
    /// OpenMetrics 1.0.
    OpenMetrics,
}

/// Writes a metrics page.
pub(super) struct ExpositionWriter {
    format: ExpositionFormat,
    text: String,
    /// Name and kind of the metric that was begun last.
    family: (&'static str, MetricKind),
}

impl ExpositionFormat {
    /// Chooses OpenMetrics if the `Accept` header names it.
    pub fn from_accept_header(accept: &str) -> Self {
        if accept.contains("application/openmetrics-text") {
            Self::OpenMetrics
        } else {
            Self::PrometheusText
        }
    }

    /// The value of the `Content-Type` header for this format.
    pub fn content_type(self) -> &'static str {
        match self {
            Self::PrometheusText => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

impl ExpositionWriter {
    pub(super) fn new(format: ExpositionFormat) -> Self {
        Self {
            format,
            text: String::with_capacity(16 << 10),
            family: ("", MetricKind::Gauge),
        }
    }

    pub(super) fn finish(mut self) -> String {
        if self.format == ExpositionFormat::OpenMetrics {
            self.text.push_str("# EOF\n");
        }
        self.text
    }

    fn write_histogram(&mut self, labels: &[(&str, &str)], histogram: &HistogramSnapshot) {
        let buckets = histogram.cumulative_buckets();
        let buckets = buckets.map(|(end_s, count)| (end_s.to_string(), count));
        for (end, count) in buckets.chain([("+Inf".to_owned(), histogram.count())]) {
            let labels: Vec<_> = labels.iter().copied().chain([("le", &*end)]).collect();
            self.write_line("_bucket", &labels, count);
        }
        let sum_s = histogram.sum().as_secs_f64();
        self.write_line("_sum", labels, sum_s);
        self.write_line("_count", labels, histogram.count());
    }

    fn write_line(&mut self, name_suffix: &str, labels: &[(&str, &str)], value: impl Display) {
        // Writing to a string never fails.
        self.text.push_str(self.family.0);
        self.text.push_str(name_suffix);
        for (index, (label, text)) in labels.iter().enumerate() {
            let start = if index == 0 { '{' } else { ',' };
            write!(self.text, "{start}{label}=\"").ok();
            for character in text.chars() {
                match character {
                    '\\' => self.text.push_str("\\\\"),
                    '"' => self.text.push_str("\\\""),
                    '\n' => self.text.push_str("\\n"),
                    character => self.text.push(character),
                }
            }
            self.text.push('"');
        }
        let end = if labels.is_empty() { "" } else { "}" };
        writeln!(self.text, "{end} {value}").ok();
    }
}

impl MetricOutput for ExpositionWriter {
    fn write_family(&mut self, kind: MetricKind, name: &'static str, help: &str) {
        // The Prometheus format includes the suffix in the family name; OpenMetrics does not.
        let name_suffix = match (kind, self.format) {
            (MetricKind::Counter, ExpositionFormat::PrometheusText) => "_total",
            _ => "",
        };
        let page_name = format!("{name}{name_suffix}");
        let lines = format!("# HELP {page_name} {help}\n# TYPE {page_name} {kind}\n");
        self.text.push_str(&lines);
        self.family = (name, kind);
    }

    fn write_sample(&mut self, labels: &[(&str, &str)], value: SampleValue<'_>) {
        match value {
            SampleValue::Number(value) => {
                let is_counter = self.family.1 == MetricKind::Counter;
                let name_suffix = if is_counter { "_total" } else { "" };
                self.write_line(name_suffix, labels, value);
            }
            SampleValue::Micros(value_us) => {
                let (sign, micros) = (if value_us < 0 { "-" } else { "" }, value_us.unsigned_abs());
                let seconds = format!("{sign}{}.{:06}", micros / 1_000_000, micros % 1_000_000);
                self.write_line("", labels, seconds);
            }
            SampleValue::Histogram(histogram) => self.write_histogram(labels, histogram),
        }
    }
}
