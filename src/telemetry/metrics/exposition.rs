//! The text formats that Prometheus reads.

use super::histogram::CumulativeBuckets;
use std::fmt::Write as _;

/// The format of the metrics page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpositionFormat {
    /// Prometheus text format 0.0.4, which every scraper supports.
    PrometheusText,
    /// OpenMetrics 1.0.
    OpenMetrics,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MetricKind {
    Counter,
    Gauge,
    Histogram,
}

/// Writes a metrics page.
pub(super) struct ExpositionWriter {
    format: ExpositionFormat,
    text: String,
}

/// Writes the samples of one metric, which must be consecutive on the page.
pub(super) struct MetricFamily<'p> {
    text: &'p mut String,
    name: &'static str,
    kind: MetricKind,
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
        }
    }

    /// Begins a metric. The name of a counter is given without `_total`, and `help` is not escaped.
    pub(super) fn begin_family(
        &mut self,
        kind: MetricKind,
        name: &'static str,
        help: &str,
    ) -> MetricFamily<'_> {
        let (kind_word, name_suffix) = match kind {
            // The Prometheus format includes the suffix in the family name; OpenMetrics does not.
            MetricKind::Counter if self.format == ExpositionFormat::PrometheusText => {
                ("counter", "_total")
            }
            MetricKind::Counter => ("counter", ""),
            MetricKind::Gauge => ("gauge", ""),
            MetricKind::Histogram => ("histogram", ""),
        };
        append_fmt(
            &mut self.text,
            format_args!(
                "# HELP {name}{name_suffix} {help}\n# TYPE {name}{name_suffix} {kind_word}\n"
            ),
        );
        MetricFamily {
            text: &mut self.text,
            name,
            kind,
        }
    }

    pub(super) fn finish(mut self) -> String {
        if self.format == ExpositionFormat::OpenMetrics {
            self.text.push_str("# EOF\n");
        }
        self.text
    }
}

impl MetricFamily<'_> {
    pub(super) fn write_sample(&mut self, labels: &[(&str, &str)], value: u64) {
        let name_suffix = if self.kind == MetricKind::Counter {
            "_total"
        } else {
            ""
        };
        self.write_line(name_suffix, labels, format_args!("{value}"));
    }

    /// Writes one sample, given in microseconds, as seconds.
    pub(super) fn write_micros_as_seconds(&mut self, value_us: i64) {
        let (sign, micros) = (if value_us < 0 { "-" } else { "" }, value_us.unsigned_abs());
        self.write_line(
            "",
            &[],
            format_args!("{sign}{}.{:06}", micros / 1_000_000, micros % 1_000_000),
        );
    }

    pub(super) fn write_histogram(
        &mut self,
        labels: &[(&str, &str)],
        cumulative: &CumulativeBuckets,
    ) {
        let buckets = cumulative
            .buckets
            .iter()
            .copied()
            .chain([("+Inf", cumulative.count)]);
        for (end, count) in buckets {
            let labels: Vec<(&str, &str)> = labels.iter().copied().chain([("le", end)]).collect();
            self.write_line("_bucket", &labels, format_args!("{count}"));
        }
        self.write_line(
            "_sum",
            labels,
            format_args!("{}", cumulative.sum.as_secs_f64()),
        );
        self.write_line("_count", labels, format_args!("{}", cumulative.count));
    }

    fn write_line(
        &mut self,
        name_suffix: &str,
        labels: &[(&str, &str)],
        value: std::fmt::Arguments<'_>,
    ) {
        append_fmt(self.text, format_args!("{}{name_suffix}", self.name));
        for (index, (label, text)) in labels.iter().enumerate() {
            append_fmt(
                self.text,
                format_args!("{}{label}=\"", if index == 0 { '{' } else { ',' }),
            );
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
        append_fmt(
            self.text,
            format_args!("{} {value}\n", if labels.is_empty() { "" } else { "}" }),
        );
    }
}

fn append_fmt(text: &mut String, arguments: std::fmt::Arguments<'_>) {
    text.write_fmt(arguments)
        .expect("writing to a String cannot fail");
}
