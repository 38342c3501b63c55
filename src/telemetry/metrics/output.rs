//! The writing of metrics, independent of the format: Prometheus' text formats, or OTLP.

use super::histogram::HistogramSnapshot;

/// The names are those of Prometheus.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display)]
#[strum(serialize_all = "lowercase")]
pub(super) enum MetricKind {
    Counter,
    Gauge,
    Histogram,
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

/// Writes metrics to a [`MetricOutput`]: each with one number, or `by` a label with pairs of a label
/// value and a number.
macro_rules! write_metrics {
    ($output:expr; $($kind:ident $name:literal $(by $label:literal)? = $value:expr, $help:literal;)*) => {
        $(
            $output.write_family(MetricKind::$kind, $name, $help);
            write_metrics!(@samples $output, $value $(, $label)?);
        )*
    };
    (@samples $output:expr, $value:expr) => {
        $output.write_sample(&[], SampleValue::Number($value));
    };
    (@samples $output:expr, $counts:expr, $label:literal) => {
        for (value, count) in $counts {
            $output.write_sample(&[($label, value)], SampleValue::Number(count));
        }
    };
}
pub(super) use write_metrics;
