//! What is counted of requests: by time, and by key. All of it is bounded, however long the log is.

use crate::limiter::Key;
use foldhash::HashMap;

/// Counts over time: at most [`Series::BINS`] bins of equal width, which doubles as the time grows.
#[derive(Clone, Debug)]
pub(super) struct Series {
    start_s: u64,
    width_s: u64,
    bins: Vec<Bin>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Bin {
    pub(super) all: u64,
    pub(super) refused: u64,
}

impl Series {
    const BINS: usize = 480;

    pub(super) fn new() -> Self {
        Self {
            start_s: 0,
            width_s: 1,
            bins: Vec::new(),
        }
    }

    /// Counts a request. One before the first counts with that.
    pub(super) fn add(&mut self, at_us: u64, refused: bool) {
        let at_s = at_us / 1_000_000;
        if self.bins.is_empty() {
            self.start_s = at_s;
        }
        let at = loop {
            let at = usize::try_from(at_s.saturating_sub(self.start_s) / self.width_s)
                .unwrap_or(usize::MAX);
            if at < Self::BINS {
                break at;
            }
            self.coarsen();
        };
        if at >= self.bins.len() {
            self.bins.resize(at + 1, Bin::default());
        }
        if let Some(bin) = self.bins.get_mut(at) {
            bin.all += 1;
            bin.refused += u64::from(refused);
        }
    }

    fn coarsen(&mut self) {
        self.width_s *= 2;
        let pairs = self.bins.chunks(2).map(|pair| {
            pair.iter().fold(Bin::default(), |sum, bin| Bin {
                all: sum.all + bin.all,
                refused: sum.refused + bin.refused,
            })
        });
        self.bins = pairs.collect();
    }

    /// The same in `count` bins of a width from a time on.
    pub(super) fn over(&self, from_s: u64, width_s: u64, count: usize) -> Vec<Bin> {
        let mut out = vec![Bin::default(); count];
        for (at, bin) in (0u64..).zip(&self.bins) {
            let since_s = (self.start_s + at * self.width_s).saturating_sub(from_s);
            let place = usize::try_from(since_s / width_s.max(1)).unwrap_or(usize::MAX);
            if let Some(sum) = out.get_mut(place.min(count.saturating_sub(1))) {
                sum.all += bin.all;
                sum.refused += bin.refused;
            }
        }
        out
    }

    /// How wide a bin is, in seconds.
    pub(super) fn width_s(&self) -> u64 {
        self.width_s
    }
}

/// What the keys of one policy did. Exact up to a bound; beyond it the keys that were refused least are forgotten, as a
/// space-saving sketch does.
#[derive(Debug)]
pub(super) struct Keys {
    bound: usize,
    map: HashMap<u128, Seen>,
    /// Nobody who was forgotten had more refusals than that.
    floor: u64,
    forgotten: u64,
    touched: u64,
}

/// What one key did.
#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
    pub(super) requests: u64,
    pub(super) refused: u64,
    /// It may have had so many refusals more, before it was forgotten and came again.
    pub(super) error: u64,
    /// When it was refused (µs).
    pub(super) first_us: u64,
    pub(super) last_us: u64,
    /// For people, once it was refused.
    pub(super) name: Box<str>,
}

impl Keys {
    /// Of at most `bound` keys, at least 2.
    pub(super) fn new(bound: usize) -> Self {
        Self {
            bound: bound.max(2),
            map: HashMap::default(),
            floor: 0,
            forgotten: 0,
            touched: 0,
        }
    }

    pub(super) fn add(&mut self, key: &Key, at_us: u64, refused: bool) {
        if self.map.len() >= self.bound && !self.map.contains_key(&key.id()) {
            self.forget();
        }
        let floor = self.floor;
        let seen = self.map.entry(key.id()).or_insert_with(|| Seen {
            error: floor,
            ..Seen::default()
        });
        seen.requests += 1;
        if !refused {
            return;
        }
        if seen.refused == 0 {
            seen.first_us = at_us;
            seen.name = key.readable().into();
            self.touched += 1;
        }
        seen.refused += 1;
        seen.last_us = at_us;
    }

    /// Forgets half of the keys: those refused least, and of these those that asked least.
    fn forget(&mut self) {
        let ranked = self
            .map
            .iter()
            .map(|(id, seen)| (seen.refused + seen.error, seen.requests, *id));
        let mut ranked: Vec<_> = ranked.collect();
        let half = ranked.len() / 2;
        ranked.select_nth_unstable(half);
        for (refused, _, id) in ranked.iter().take(half) {
            self.map.remove(id);
            self.floor = self.floor.max(*refused);
        }
        self.forgotten += half as u64;
    }

    /// How many keys are known, and whether that is all there were: some may have been forgotten.
    pub(super) fn count(&self) -> (u64, bool) {
        (self.map.len() as u64, self.forgotten == 0)
    }

    /// How many of them were ever refused.
    pub(super) fn touched(&self) -> u64 {
        self.touched
    }

    /// Those refused most, at most `most`.
    pub(super) fn top(&self, most: usize) -> Vec<&Seen> {
        let mut refused: Vec<&Seen> = self.map.values().filter(|seen| seen.refused > 0).collect();
        refused.sort_by(|a, b| b.refused.cmp(&a.refused).then_with(|| a.name.cmp(&b.name)));
        refused.truncate(most);
        refused
    }
}

/// A number for each key, of at most `bound` keys: beyond, of every second, every fourth, … A key's id is a hash,
/// so which ones these are is chance, and the distribution stays what it is.
#[derive(Debug)]
pub(super) struct Sample {
    bound: usize,
    values: HashMap<u128, u64>,
    /// Ids end in so many zeros.
    level: u32,
}

impl Sample {
    pub(super) fn new(bound: usize) -> Self {
        Self {
            bound,
            values: HashMap::default(),
            level: 0,
        }
    }

    /// Keeps the larger one.
    pub(super) fn raise(&mut self, id: u128, value: u64) {
        if id.trailing_zeros() < self.level {
            return;
        }
        let kept = self.values.entry(id).or_default();
        *kept = value.max(*kept);
        while self.values.len() > self.bound {
            self.level += 1;
            self.values
                .retain(|id, _| id.trailing_zeros() >= self.level);
        }
    }

    /// One key in so many is in it.
    pub(super) fn one_in(&self) -> u64 {
        1u64.checked_shl(self.level).unwrap_or(u64::MAX)
    }

    /// In ascending order.
    pub(super) fn sorted(&self) -> Vec<u64> {
        let mut values: Vec<u64> = self.values.values().copied().collect();
        values.sort_unstable();
        values
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limiter::KeyBuilder;

    fn key(name: u64) -> Key {
        let mut builder = KeyBuilder::new("p");
        builder.part(Some(name.to_string().as_bytes()));
        builder.finish()
    }

    #[test]
    fn a_series_keeps_its_sums_whatever_its_width() {
        let mut series = Series::new();
        for second in 0..10_000 {
            series.add(5_000_000_000 + second * 1_000_000, second % 10 == 0);
        }
        assert!(series.bins.len() <= Series::BINS, "{}", series.bins.len());
        assert_eq!(series.width_s, 32);
        for (width_s, count) in [(10_000, 1), (1440, 7), (192, 53), (1, 3)] {
            let bins = series.over(5000, width_s, count);
            assert_eq!(bins.iter().map(|bin| bin.all).sum::<u64>(), 10_000);
            assert_eq!(bins.iter().map(|bin| bin.refused).sum::<u64>(), 1000);
        }
    }

    #[test]
    fn the_keys_refused_most_are_found_among_many_more_than_are_kept() {
        let mut keys = Keys::new(100);
        for round in 0..50 {
            for heavy in 0..5 {
                (0..=heavy).for_each(|_| keys.add(&key(heavy), round, true));
            }
            for light in 0..100 {
                keys.add(&key(1000 + round * 100 + light), round, false);
            }
        }
        assert!(keys.map.len() <= 100 && !keys.count().1);
        let top: Vec<_> = keys
            .top(3)
            .iter()
            .map(|seen| (seen.name.to_string(), seen.refused, seen.error))
            .collect();
        assert_eq!(
            top,
            [
                ("p/4".into(), 250, 0),
                ("p/3".into(), 200, 0),
                ("p/2".into(), 150, 0)
            ]
        );
        assert_eq!(keys.touched(), 5);
    }

    #[test]
    fn a_sample_keeps_the_distribution() {
        let mut sample = Sample::new(1 << 12);
        let count = 5 << 12;
        for id in 0..count {
            sample.raise(key(id).id(), id * 100 / count);
        }
        assert_eq!(sample.one_in(), 8);
        let sorted = sample.sorted();
        let median = sorted[sorted.len() / 2];
        assert!((47..=53).contains(&median), "{median}");
    }
}
