//! Duration histograms, written by one thread and read by any thread.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A counter with one writer and any number of readers. With a single writer, adding needs no
/// atomic read-modify-write.
#[derive(Debug, Default)]
pub(super) struct SingleWriterCounter(AtomicU64);

/// A histogram of durations.
#[derive(Debug)]
pub(super) struct DurationHistogram {
    bounds: &'static [BucketBound],
    /// Number of values in each bucket, not cumulative. The last bucket is for values above all
    /// bounds.
    counts: [SingleWriterCounter; BOUND_COUNT + 1],
    sum_ns: SingleWriterCounter,
}

/// The upper bound of a bucket, and its label.
pub(super) type BucketBound = (Duration, &'static str);

/// Maximum number of bucket bounds, the same for all histograms of Prometheus. Usual
/// objectives and timeouts, which are round numbers, each have a bound. No bound exceeds three
/// times the previous one, which keeps quantiles accurate.
pub(super) const BOUND_COUNT: usize = 18;

/// Bounds for decision times: from a memory access to the longest plausible timeout of a round
/// trip.
pub(super) static DECISION_TIME_BOUNDS: [BucketBound; BOUND_COUNT] = [
    (Duration::from_micros(2), "0.000002"),
    (Duration::from_micros(5), "0.000005"),
    (Duration::from_micros(10), "0.00001"),
    (Duration::from_micros(25), "0.000025"),
    (Duration::from_micros(50), "0.00005"),
    (Duration::from_micros(100), "0.0001"),
    (Duration::from_micros(250), "0.00025"),
    (Duration::from_micros(500), "0.0005"),
    (Duration::from_millis(1), "0.001"),
    (Duration::from_micros(2_500), "0.0025"),
    (Duration::from_millis(5), "0.005"),
    (Duration::from_millis(10), "0.01"),
    (Duration::from_millis(25), "0.025"),
    (Duration::from_millis(50), "0.05"),
    (Duration::from_millis(100), "0.1"),
    (Duration::from_millis(250), "0.25"),
    (Duration::from_millis(500), "0.5"),
    (Duration::from_secs(1), "1"),
];

/// Bounds for response times: from a local response to the default `upstream.response_timeout`.
pub(super) static RESPONSE_TIME_BOUNDS: [BucketBound; BOUND_COUNT] = [
    (Duration::from_micros(100), "0.0001"),
    (Duration::from_micros(250), "0.00025"),
    (Duration::from_micros(500), "0.0005"),
    (Duration::from_millis(1), "0.001"),
    (Duration::from_micros(2_500), "0.0025"),
    (Duration::from_millis(5), "0.005"),
    (Duration::from_millis(10), "0.01"),
    (Duration::from_millis(25), "0.025"),
    (Duration::from_millis(50), "0.05"),
    (Duration::from_millis(100), "0.1"),
    (Duration::from_millis(250), "0.25"),
    (Duration::from_millis(500), "0.5"),
    (Duration::from_secs(1), "1"),
    (Duration::from_millis(2_500), "2.5"),
    (Duration::from_secs(5), "5"),
    (Duration::from_secs(10), "10"),
    (Duration::from_secs(30), "30"),
    (Duration::from_secs(60), "60"),
];

/// Bounds of `http.server.request.duration`, which OpenTelemetry's semantic conventions recommend.
pub(super) static HTTP_SERVER_TIME_BOUNDS: [BucketBound; 14] = [
    (Duration::from_millis(5), "0.005"),
    (Duration::from_millis(10), "0.01"),
    (Duration::from_millis(25), "0.025"),
    (Duration::from_millis(50), "0.05"),
    (Duration::from_millis(75), "0.075"),
    (Duration::from_millis(100), "0.1"),
    (Duration::from_millis(250), "0.25"),
    (Duration::from_millis(500), "0.5"),
    (Duration::from_millis(750), "0.75"),
    (Duration::from_secs(1), "1"),
    (Duration::from_millis(2_500), "2.5"),
    (Duration::from_secs(5), "5"),
    (Duration::from_millis(7_500), "7.5"),
    (Duration::from_secs(10), "10"),
];

impl SingleWriterCounter {
    pub(super) fn add(&self, amount: u64) {
        self.0
            .store(self.get().wrapping_add(amount), Ordering::Relaxed);
    }

    pub(super) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl DurationHistogram {
    /// `bounds` has at most [`BOUND_COUNT`] bounds.
    pub(super) fn new(bounds: &'static [BucketBound]) -> Self {
        Self {
            bounds,
            counts: std::array::from_fn(|_| SingleWriterCounter::default()),
            sum_ns: SingleWriterCounter::default(),
        }
    }

    pub(super) fn observe(&self, time: Duration) {
        let bucket = self.bounds.partition_point(|(bound, _)| *bound < time);
        if let Some(count) = self.counts.get(bucket) {
            count.add(1);
        }
        self.sum_ns
            .add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    }
}

/// The sum of histograms with equal bounds at one time.
#[derive(Clone, Debug)]
pub struct HistogramSnapshot {
    bounds: &'static [BucketBound],
    /// Number of values in each bucket, not cumulative.
    counts: [u64; BOUND_COUNT + 1],
    sum_ns: u64,
}

impl HistogramSnapshot {
    pub(super) fn from_histograms<'a>(
        bounds: &'static [BucketBound],
        histograms: impl Iterator<Item = &'a DurationHistogram>,
    ) -> Self {
        let (mut counts, mut sum_ns) = ([0; BOUND_COUNT + 1], 0_u64);
        for histogram in histograms {
            for (sum, count) in counts.iter_mut().zip(&histogram.counts) {
                *sum += count.get();
            }
            sum_ns = sum_ns.saturating_add(histogram.sum_ns.get());
        }
        Self {
            bounds,
            counts,
            sum_ns,
        }
    }

    /// The increase since an earlier snapshot of the same histograms.
    #[must_use]
    pub fn delta_since(mut self, earlier: &Self) -> Self {
        for (count, earlier) in self.counts.iter_mut().zip(&earlier.counts) {
            *count = count.saturating_sub(*earlier);
        }
        self.sum_ns = self.sum_ns.saturating_sub(earlier.sum_ns);
        self
    }

    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    pub(super) fn sum(&self) -> Duration {
        Duration::from_nanos(self.sum_ns)
    }

    /// The label of each bound, and the number of values up to it.
    pub(super) fn cumulative_buckets(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let mut cumulative = 0;
        self.counts
            .iter()
            .zip(self.bounds)
            .map(move |(count, (_, label))| {
                cumulative += count;
                (*label, cumulative)
            })
    }

    /// The bounds in seconds.
    pub(super) fn bounds_s(&self) -> Vec<f64> {
        let bounds = self.bounds.iter();
        bounds.map(|(bound, _)| bound.as_secs_f64()).collect()
    }

    /// The number of values in each bucket, one more than bounds.
    pub(super) fn bucket_counts(&self) -> Vec<u64> {
        self.counts
            .iter()
            .take(self.bounds.len() + 1)
            .copied()
            .collect()
    }

    /// Upper bound of the bucket that contains the quantile `share` (0 to 1). `None` if the
    /// histogram is empty, or the quantile exceeds the last bound.
    pub fn quantile_bound(&self, share: f64) -> Option<Duration> {
        #[allow(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "the rank is at most 2^52"
        )]
        let rank = ((self.count() as f64 * share).ceil() as u64).max(1);
        let mut cumulative = 0;
        let reached = self.counts.iter().position(|count| {
            cumulative += count;
            cumulative >= rank
        });
        self.bounds.get(reached?).map(|(bound, _)| *bound)
    }
}
