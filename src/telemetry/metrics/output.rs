//! The writing of metrics, independent of the format: Prometheus' text formats, or OTLP.

use super::histogram::HistogramSnapshot;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

/// Writes the samples of one metric, which must be consecutive.
pub(super) struct MetricFamily<'o>(&'o mut dyn MetricOutput);

impl dyn MetricOutput + '_ {
    pub(super) fn counter(&mut self, name: &'static str, help: &str) -> MetricFamily<'_> {
        self.write_family(MetricKind::Counter, name, help);
        MetricFamily(self)
    }

    pub(super) fn gauge(&mut self, name: &'static str, help: &str) -> MetricFamily<'_> {
        self.write_family(MetricKind::Gauge, name, help);
        MetricFamily(self)
    }

    pub(super) fn histogram(&mut self, name: &'static str, help: &str) -> MetricFamily<'_> {
        self.write_family(MetricKind::Histogram, name, help);
        MetricFamily(self)
    }
}

impl MetricFamily<'_> {
    pub(super) fn write_sample(&mut self, labels: &[(&str, &str)], value: u64) {
        self.0.write_sample(labels, SampleValue::Number(value));
    }

    /// Writes a sample for each value of a label.
    pub(super) fn write_counts<'v>(
        &mut self,
        label: &str,
        counts: impl IntoIterator<Item = (&'v str, u64)>,
    ) {
        for (value, count) in counts {
            self.write_sample(&[(label, value)], count);
        }
    }

    /// Writes one sample, given in microseconds, as seconds.
    pub(super) fn write_micros_as_seconds(&mut self, value_us: i64) {
        self.0.write_sample(&[], SampleValue::Micros(value_us));
    }

    pub(super) fn write_histogram(
        &mut self,
        labels: &[(&str, &str)],
        histogram: &HistogramSnapshot,
    ) {
        self.0
            .write_sample(labels, SampleValue::Histogram(histogram));
    }
}
