//! Which limit would have touched few: how much each key has asked for within one period, at its busiest.
//!
//! It is counted by the limiter's own rules, under a limit that nobody reaches. A limit of n touches exactly the keys whose
//! peak is above n: until it refuses for the first time it has counted the same. Windows that slide are counted in
//! hundredths of their period, so a peak may be taken for a little larger than it was, and the suggestion with it. What other
//! policies refuse is counted all the same.

use super::tally::Sample;
use crate::clock::Clock;
use crate::enforcer::Claimed;
use crate::limiter::{Algorithm, Charge, Limit};
use crate::policy::{Action, NamedLimit, PolicyTable};
use crate::store::{Memory, MemorySettings};
use std::time::Instant;

/// Nobody's.
const UNREACHED: u64 = 1 << 40;

/// Keys whose peaks are kept, of each limit.
const SAMPLED: usize = 1 << 18;

/// Counts the peaks of all keys.
#[derive(Debug)]
pub(super) struct Peaks {
    memory: Memory,
    /// By a policy's place, and then by the limit's.
    policies: Vec<Vec<Peak>>,
}

#[derive(Debug)]
struct Peak {
    /// `None`: it can't be counted like this.
    limit: Option<Limit>,
    sample: Sample,
}

/// What is proposed for one limit.
#[derive(Clone, Debug)]
pub(super) struct Suggestion {
    pub(super) limit: NamedLimit,
    /// `None`: nobody asked, or it can't be told.
    pub(super) drawn: Option<Drawn>,
}

/// A proposal and what it is drawn from.
#[derive(Clone, Debug)]
pub(super) struct Drawn {
    /// What to write for `requests`.
    pub(super) requests: u64,
    /// Keys that it would touch, and that the present one does, of those looked at.
    pub(super) touched: u64,
    pub(super) touched_now: u64,
    pub(super) keys: u64,
    /// One key in so many was looked at.
    pub(super) one_in: u64,
    /// The share of the keys in 1/1000, and the peak that so many have at most.
    pub(super) quantiles: Vec<(u16, u64)>,
    /// Up to which peak, and how many keys have it, more than the one before.
    pub(super) histogram: Vec<(u64, u64)>,
}

const QUANTILES: [u16; 5] = [500, 900, 990, 999, 1000];

impl Peaks {
    pub(super) fn new(table: &PolicyTable, settings: MemorySettings, clock: Clock) -> Self {
        let of_policy = |action: &Action| match action {
            Action::Limit(quota) => quota.limits.iter().map(Peak::of).collect(),
            Action::Allow | Action::Deny => Vec::new(),
        };
        let policies = table
            .policies()
            .iter()
            .map(|policy| of_policy(&policy.action));
        Self {
            policies: policies.collect(),
            memory: Memory::new(settings, clock),
        }
    }

    /// Counts what a request asked of a policy's own limits; overrides are choices made already.
    pub(super) fn add(
        &mut self,
        at: usize,
        own: &[NamedLimit],
        claim: &Claimed<'_, '_>,
        asked: Instant,
    ) {
        let Some(peaks) = self
            .policies
            .get_mut(at)
            .filter(|_| std::ptr::eq(own, claim.limits))
        else {
            return;
        };
        for peak in peaks {
            let Some(limit) = &peak.limit else { continue };
            let used = self
                .memory
                .count_at(&Charge::new(limit, claim.key, claim.cost), asked);
            peak.sample.raise(claim.key.id(), used);
        }
    }

    /// For each limit of a policy the one that touches at most `percent` of the keys.
    pub(super) fn suggest(&self, at: usize, own: &[NamedLimit], percent: f64) -> Vec<Suggestion> {
        let peaks = self.policies.get(at).map(Vec::as_slice).unwrap_or_default();
        let each = own.iter().zip(peaks).map(|(limit, peak)| Suggestion {
            limit: limit.clone(),
            drawn: peak
                .limit
                .and_then(|_| draw(&peak.sample, limit.limit.requests, percent)),
        });
        each.collect()
    }

    /// Keys of which less is known than was asked.
    pub(super) fn evicted(&self) -> u64 {
        self.memory.evicted()
    }
}

impl Peak {
    fn of(named: &NamedLimit) -> Self {
        let Limit {
            per_us, algorithm, ..
        } = named.limit;
        let algorithm = match algorithm {
            Algorithm::FixedWindow { .. } => Some(algorithm),
            Algorithm::SlidingWindow { .. } | Algorithm::SlidingLog => {
                Some(Algorithm::SlidingWindow { buckets: 100 })
            }
            // A bucket of as much as was ever asked in one period refuses nobody.
            Algorithm::TokenBucket { .. } => Some(Algorithm::SlidingWindow { buckets: 100 }),
            Algorithm::LeakyBucket { .. } | Algorithm::Concurrency { .. } | Algorithm::Block => {
                None
            }
        };
        let limit = algorithm.map(|algorithm| Limit {
            requests: UNREACHED,
            per_us,
            algorithm,
        });
        Self {
            limit,
            sample: Sample::new(SAMPLED),
        }
    }
}

fn draw(sample: &Sample, requests_now: u64, percent: f64) -> Option<Drawn> {
    let sorted = sample.sorted();
    let count = sorted.len();
    let above = |requests: u64| (count - sorted.partition_point(|peak| *peak <= requests)) as u64;
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "a share of a count, rounded down"
    )]
    let may_touch = (count as f64 * percent / 100.0) as usize;
    let at = count.checked_sub(may_touch.min(count.saturating_sub(1)) + 1)?;
    let requests = (*sorted.get(at)?).max(1);
    let quantile = |share: u16| {
        let place = (usize::from(share) * count).div_ceil(1000).max(1) - 1;
        Some((share, *sorted.get(place)?))
    };
    Some(Drawn {
        requests,
        touched: above(requests),
        touched_now: above(requests_now),
        keys: count as u64,
        one_in: sample.one_in(),
        quantiles: QUANTILES.into_iter().filter_map(quantile).collect(),
        histogram: histogram(&sorted),
    })
}

/// By powers of two.
fn histogram(sorted: &[u64]) -> Vec<(u64, u64)> {
    let most = sorted.last().copied().unwrap_or_default();
    let (mut bars, mut below, mut upto) = (Vec::new(), 0, 1u64);
    loop {
        let place = sorted.partition_point(|peak| *peak <= upto);
        bars.push((upto, (place - below) as u64));
        below = place;
        if upto >= most {
            return bars;
        }
        upto = upto.saturating_mul(2);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_limit_that_touches_few_enough() {
        let mut sample = Sample::new(SAMPLED);
        (1..=200u64).for_each(|peak| sample.raise(u128::from(peak), peak));
        let drawn = |percent| draw(&sample, 150, percent).unwrap();
        assert_eq!(
            (
                drawn(1.0).requests,
                drawn(1.0).touched,
                drawn(1.0).touched_now
            ),
            (198, 2, 50)
        );
        assert_eq!((drawn(0.0).requests, drawn(0.0).touched), (200, 0));
        assert_eq!((drawn(0.6).requests, drawn(0.6).touched), (199, 1));
        assert_eq!(drawn(100.0).requests, 1);
        assert_eq!(
            drawn(1.0).quantiles,
            [(500, 100), (900, 180), (990, 198), (999, 200), (1000, 200)]
        );
        assert_eq!(
            drawn(1.0)
                .histogram
                .iter()
                .map(|(_, count)| count)
                .sum::<u64>(),
            200
        );
        assert_eq!(drawn(1.0).histogram.first(), Some(&(1, 1)));
        assert!(draw(&Sample::new(SAMPLED), 1, 1.0).is_none());
    }
}
