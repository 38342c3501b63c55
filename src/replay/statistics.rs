//! Bounded request statistics over time and by key. Their memory does not grow with the log.

use super::serialize_seconds;
use crate::limiter::Key;
use foldhash::HashMap;
use serde::Serialize;
use std::cmp::Reverse;

/// Request counts in at most [`RequestSeries::MAX_BINS`] bins of equal width. The width doubles
/// whenever a request lies beyond the last bin.
#[derive(Clone, Debug)]
pub(super) struct RequestSeries {
    start_s: u64,
    /// Width of a bin in seconds.
    pub(super) bin_width_s: u64,
    bins: Vec<SeriesBin>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SeriesBin {
    pub(super) requests: u64,
    pub(super) refused: u64,
}

impl Default for RequestSeries {
    fn default() -> Self {
        Self {
            start_s: 0,
            bin_width_s: 1,
            bins: Vec::new(),
        }
    }
}

impl RequestSeries {
    const MAX_BINS: usize = 480;

    /// Counts a request. A request before the first one counts in the first bin.
    pub(super) fn record_request(&mut self, at_us: u64, refused: bool) {
        let at_s = at_us / 1_000_000;
        if self.bins.is_empty() {
            self.start_s = at_s;
        }
        let at = loop {
            let at = usize::try_from(at_s.saturating_sub(self.start_s) / self.bin_width_s)
                .unwrap_or(usize::MAX);
            if at < Self::MAX_BINS {
                break at;
            }
            let half = self.bins.len().div_ceil(2);
            self.bins = self.resample(self.start_s, self.bin_width_s * 2, half);
            self.bin_width_s *= 2;
        };
        if at >= self.bins.len() {
            self.bins.resize(at + 1, SeriesBin::default());
        }
        if let Some(bin) = self.bins.get_mut(at) {
            bin.requests += 1;
            bin.refused += u64::from(refused);
        }
    }

    /// Resamples the counts into `count` bins of `width_s` seconds, starting at `from_s`.
    pub(super) fn resample(&self, from_s: u64, width_s: u64, count: usize) -> Vec<SeriesBin> {
        let mut out = vec![SeriesBin::default(); count];
        for (at, bin) in (0u64..).zip(&self.bins) {
            let since_s = (self.start_s + at * self.bin_width_s).saturating_sub(from_s);
            let index = usize::try_from(since_s / width_s.max(1)).unwrap_or(usize::MAX);
            if let Some(sum) = out.get_mut(index.min(count.saturating_sub(1))) {
                sum.requests += bin.requests;
                sum.refused += bin.refused;
            }
        }
        out
    }
}

/// Statistics of the keys of one policy. Counts are exact up to `max_keys` keys. With more keys,
/// the table evicts the least refused keys, as a space-saving sketch does.
#[derive(Debug, Default)]
pub(super) struct ReplayKeyTable {
    max_keys: usize,
    stats_by_key: HashMap<u128, ReplayKeyStats>,
    /// Maximum number of refusals of any evicted key.
    error_floor: u64,
    evicted_keys: u64,
    /// Number of keys that were refused at least once.
    pub(super) refused_keys: u64,
}

/// Counts of one key.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct ReplayKeyStats {
    pub(super) requests: u64,
    pub(super) refused: u64,
    /// Maximum number of uncounted refusals from before an eviction of this key.
    pub(super) error: u64,
    /// Times of the first and the last refusal (µs).
    #[serde(rename = "first", serialize_with = "serialize_seconds")]
    pub(super) first_refused_us: u64,
    #[serde(rename = "last", serialize_with = "serialize_seconds")]
    pub(super) last_refused_us: u64,
    /// The key in readable form; empty until the first refusal.
    #[serde(skip)]
    pub(super) readable_key: Box<str>,
}

impl ReplayKeyTable {
    /// Creates a table for at most `bound` keys; the minimum is 2.
    pub(super) fn new(bound: usize) -> Self {
        Self {
            max_keys: bound.max(2),
            ..Self::default()
        }
    }

    pub(super) fn record_request(&mut self, key: &Key, at_us: u64, refused: bool) {
        if self.stats_by_key.len() >= self.max_keys && !self.stats_by_key.contains_key(&key.id()) {
            self.evict_least_refused_half();
        }
        let error_floor = self.error_floor;
        let stats = self
            .stats_by_key
            .entry(key.id())
            .or_insert_with(|| ReplayKeyStats {
                error: error_floor,
                ..ReplayKeyStats::default()
            });
        stats.requests += 1;
        if !refused {
            return;
        }
        if stats.refused == 0 {
            stats.first_refused_us = at_us;
            stats.readable_key = key.to_readable_string().into();
            self.refused_keys += 1;
        }
        stats.refused += 1;
        stats.last_refused_us = at_us;
    }

    /// Evicts half of the keys: the least refused, and among equals those with the fewest requests.
    fn evict_least_refused_half(&mut self) {
        let ranked = self
            .stats_by_key
            .iter()
            .map(|(id, stats)| (stats.refused + stats.error, stats.requests, *id));
        let mut ranked: Vec<_> = ranked.collect();
        let half = ranked.len() / 2;
        ranked.select_nth_unstable(half);
        for (refused, _, id) in ranked.iter().take(half) {
            self.stats_by_key.remove(id);
            self.error_floor = self.error_floor.max(*refused);
        }
        self.evicted_keys += half as u64;
    }

    /// Returns the number of keys in the table, and whether that number is exact (no key was
    /// evicted).
    pub(super) fn key_count(&self) -> (u64, bool) {
        (self.stats_by_key.len() as u64, self.evicted_keys == 0)
    }

    /// Returns up to `max_keys` refused keys, the most refused first.
    pub(super) fn most_refused_keys(&self, max_keys: usize) -> Vec<&ReplayKeyStats> {
        let stats = self.stats_by_key.values();
        let mut refused: Vec<_> = stats.filter(|stats| stats.refused > 0).collect();
        refused.sort_by_key(|stats| (Reverse(stats.refused), &stats.readable_key));
        refused.truncate(max_keys);
        refused
    }
}

/// Samples one value per key, of at most `max_keys` keys. At the limit, the sample keeps every
/// second key, then every fourth, and so on. Key ids are hashes, so the selection is random and the
/// distribution is preserved.
#[derive(Debug)]
pub(super) struct KeyPeakSample {
    max_keys: usize,
    values: HashMap<u128, u64>,
    /// Minimum number of trailing zero bits in the ids of sampled keys.
    min_trailing_zeros: u32,
}

impl KeyPeakSample {
    pub(super) fn new(max_keys: usize) -> Self {
        Self {
            max_keys,
            values: HashMap::default(),
            min_trailing_zeros: 0,
        }
    }

    /// Sets the sampled value of a key to `value` if that is larger.
    pub(super) fn record_max(&mut self, id: u128, value: u64) {
        if id.trailing_zeros() < self.min_trailing_zeros {
            return;
        }
        let max_value = self.values.entry(id).or_default();
        *max_value = value.max(*max_value);
        while self.values.len() > self.max_keys {
            self.min_trailing_zeros += 1;
            self.values
                .retain(|id, _| id.trailing_zeros() >= self.min_trailing_zeros);
        }
    }

    /// Returns n if the sample holds one in n keys.
    pub(super) fn keys_per_sample(&self) -> u64 {
        1u64.checked_shl(self.min_trailing_zeros)
            .unwrap_or(u64::MAX)
    }

    /// Returns the values in ascending order.
    pub(super) fn sorted_values(&self) -> Vec<u64> {
        let mut values: Vec<u64> = self.values.values().copied().collect();
        values.sort_unstable();
        values
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limiter::KeyBuilder;

    fn numbered_key(name: u64) -> Key {
        let mut builder = KeyBuilder::new("p");
        builder.push_key_value(Some(name.to_string().as_bytes()));
        builder.finish()
    }

    #[test]
    fn a_series_keeps_its_sums_whatever_its_width() {
        let mut series = RequestSeries::default();
        for second in 0..10_000 {
            series.record_request(5_000_000_000 + second * 1_000_000, second % 10 == 0);
        }
        assert!(
            series.bins.len() <= RequestSeries::MAX_BINS,
            "{}",
            series.bins.len()
        );
        assert_eq!(series.bin_width_s, 32);
        for (width_s, count) in [(10_000, 1), (1440, 7), (192, 53), (1, 3)] {
            let bins = series.resample(5000, width_s, count);
            assert_eq!(bins.iter().map(|bin| bin.requests).sum::<u64>(), 10_000);
            assert_eq!(bins.iter().map(|bin| bin.refused).sum::<u64>(), 1000);
        }
    }

    #[test]
    fn the_keys_refused_most_are_found_among_many_more_than_are_kept() {
        let mut keys = ReplayKeyTable::new(100);
        for round in 0..50 {
            for heavy in 0..5 {
                (0..=heavy).for_each(|_| keys.record_request(&numbered_key(heavy), round, true));
            }
            for light in 0..100 {
                keys.record_request(&numbered_key(1000 + round * 100 + light), round, false);
            }
        }
        assert!(keys.stats_by_key.len() <= 100 && !keys.key_count().1);
        let top: Vec<_> = keys
            .most_refused_keys(3)
            .iter()
            .map(|stats| (stats.readable_key.to_string(), stats.refused, stats.error))
            .collect();
        assert_eq!(
            top,
            [
                ("p/4".into(), 250, 0),
                ("p/3".into(), 200, 0),
                ("p/2".into(), 150, 0)
            ]
        );
        assert_eq!(keys.refused_keys, 5);
    }

    #[test]
    fn a_sample_keeps_the_distribution() {
        let mut sample = KeyPeakSample::new(1 << 12);
        let count = 5 << 12;
        for id in 0..count {
            sample.record_max(numbered_key(id).id(), id * 100 / count);
        }
        assert_eq!(sample.keys_per_sample(), 8);
        let sorted = sample.sorted_values();
        let median = sorted[sorted.len() / 2];
        assert!((47..=53).contains(&median), "{median}");
    }
}
