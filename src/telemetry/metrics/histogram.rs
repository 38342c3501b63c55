//! Duration histograms, written by one thread and read by any thread.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A counter with one writer and any number of readers. With a single writer, adding needs no
/// atomic read-modify-write.
#[derive(Debug, Default)]
pub struct SingleWriterCounter(AtomicU64);

/// A histogram of durations.
#[derive(Debug)]
pub(super) struct DurationHistogram {
    /// Upper bounds of the buckets in microseconds.
    bounds: &'static [u64],
    /// Number of values in each bucket, not cumulative. The last bucket is for values above all
    /// bounds.
    counts: [SingleWriterCounter; BOUND_COUNT + 1],
    sum_ns: SingleWriterCounter,
}

/// Maximum number of bucket bounds, the same for all histograms of Prometheus. Usual
/// objectives and timeouts, which are round numbers, each have a bound. No bound exceeds three
/// times the previous one, which keeps quantiles accurate.
pub(super) const BOUND_COUNT: usize = 18;

/// Bounds for decision times, in microseconds: from a memory access to the longest plausible
/// timeout of a round trip.
pub(super) static DECISION_TIME_BOUNDS: [u64; BOUND_COUNT] = [
    2, 5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000,
    500_000, 1_000_000,
];

/// Bounds for response times, in microseconds: from a local response to the default
/// `upstream.response_timeout`.
pub(super) static RESPONSE_TIME_BOUNDS: [u64; BOUND_COUNT] = [
    100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000,
    1_000_000, 2_500_000, 5_000_000, 10_000_000, 30_000_000, 60_000_000,
];

/// Bounds of `http.server.request.duration`, in microseconds, which OpenTelemetry's semantic
/// conventions recommend.
pub(super) static HTTP_SERVER_TIME_BOUNDS: [u64; 14] = [
    5_000, 10_000, 25_000, 50_000, 75_000, 100_000, 250_000, 500_000, 750_000, 1_000_000,
    2_500_000, 5_000_000, 7_500_000, 10_000_000,
];

impl SingleWriterCounter {
    pub fn add(&self, amount: u64) {
        self.0
            .store(self.get().wrapping_add(amount), Ordering::Relaxed);
    }

    pub(super) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl DurationHistogram {
    /// `bounds` has at most [`BOUND_COUNT`] bounds.
    pub(super) fn new(bounds: &'static [u64]) -> Self {
        Self {
            bounds,
            counts: std::array::from_fn(|_| SingleWriterCounter::default()),
            sum_ns: SingleWriterCounter::default(),
        }
    }

    pub(super) fn observe(&self, time: Duration) {
        let time_ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let bucket = self.bounds.partition_point(|bound| bound * 1000 < time_ns);
        if let Some(count) = self.counts.get(bucket) {
            count.add(1);
        }
        self.sum_ns.add(time_ns);
    }
}

/// The sum of histograms with equal bounds at one time.
#[derive(Clone, Debug)]
pub struct HistogramSnapshot {
    /// Upper bounds of the buckets in microseconds.
    bounds: &'static [u64],
    /// Number of values in each bucket, not cumulative.
    counts: [u64; BOUND_COUNT + 1],
    sum_ns: u64,
}

impl HistogramSnapshot {
    pub(super) fn from_histograms<'a>(
        bounds: &'static [u64],
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

    /// Each bound in seconds, and the number of values up to it.
    pub(super) fn cumulative_buckets(&self) -> impl Iterator<Item = (f64, u64)> {
        let mut cumulative = 0;
        let counts = self.counts.iter().zip(self.bounds_s());
        counts.map(move |(count, bound_s)| {
            cumulative += count;
            (bound_s, cumulative)
        })
    }

    /// The bounds in seconds.
    pub(super) fn bounds_s(&self) -> Vec<f64> {
        let bounds = self.bounds.iter();
        bounds
            .map(|bound| Duration::from_micros(*bound).as_secs_f64())
            .collect()
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
        self.bounds
            .get(reached?)
            .map(|bound| Duration::from_micros(*bound))
    }
}
