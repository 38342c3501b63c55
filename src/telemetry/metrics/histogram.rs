//! How often something took how long, counted by one thread and read by any.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A count that one thread writes and any may read: without a second writer, adding needs no locked instruction.
#[derive(Debug, Default)]
pub(super) struct SingleWriterCounter(AtomicU64);

/// How often something took how long.
#[derive(Debug)]
pub(super) struct DurationHistogram {
    bounds: &'static [BucketBound],
    /// One more than bounds: what is above all of them. Not cumulative.
    counts: [SingleWriterCounter; BUCKET_COUNT + 1],
    sum_ns: SingleWriterCounter,
}

/// A bucket's upper end, and how it is written.
pub(super) type BucketBound = (Duration, &'static str);

/// As many for every histogram. Objectives are set in round numbers and timeouts too: each has its bound, and none is
/// more than three times the one before, or a quantile would be a guess.
pub(super) const BUCKET_COUNT: usize = 18;

/// From a look into memory to the longest that anybody configures for a round trip.
pub(super) static DECISION_BOUNDS: [BucketBound; BUCKET_COUNT] = [
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

/// From an answer of our own to the default `upstream.response_timeout`.
pub(super) static REQUEST_BOUNDS: [BucketBound; BUCKET_COUNT] = [
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
    pub(super) fn new(bounds: &'static [BucketBound; BUCKET_COUNT]) -> Self {
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

/// Histograms of the same bounds, added up at one moment.
#[derive(Clone, Debug)]
pub struct HistogramSnapshot {
    bounds: &'static [BucketBound; BUCKET_COUNT],
    /// Not cumulative.
    counts: [u64; BUCKET_COUNT + 1],
    sum_ns: u64,
}

impl HistogramSnapshot {
    pub(super) fn from_histograms<'a>(
        bounds: &'static [BucketBound; BUCKET_COUNT],
        histograms: impl Iterator<Item = &'a DurationHistogram>,
    ) -> Self {
        let (mut counts, mut sum_ns) = ([0; BUCKET_COUNT + 1], 0_u64);
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

    /// What came since an earlier look at the same histograms.
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

    /// The end of the bucket in which a share (0 to 1) of all is reached: it took that long at most. `None` if
    /// there is nothing, or it took longer than the last bucket tells.
    pub fn quantile(&self, share: f64) -> Option<Duration> {
        #[allow(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a rank among at most 2^52 that were counted"
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

/// The same, as Prometheus wants it.
pub(super) struct CumulativeBuckets {
    /// Each bucket's upper end and all that was at most that.
    pub(super) buckets: Vec<(&'static str, u64)>,
    /// The last bucket's, which has no end.
    pub(super) count: u64,
    pub(super) sum: Duration,
}

impl CumulativeBuckets {
    pub(super) fn from_histograms<'a>(
        bounds: &'static [BucketBound; BUCKET_COUNT],
        histograms: impl Iterator<Item = &'a DurationHistogram>,
    ) -> Self {
        let HistogramSnapshot { counts, sum_ns, .. } =
            HistogramSnapshot::from_histograms(bounds, histograms);
        let mut count = 0;
        let mut accumulate = |(own, (_, text)): (&u64, &BucketBound)| {
            count += own;
            (*text, count)
        };
        let buckets = counts.iter().zip(bounds).map(&mut accumulate).collect();
        let count = counts.iter().sum();
        Self {
            buckets,
            count,
            sum: Duration::from_nanos(sum_ns),
        }
    }
}
