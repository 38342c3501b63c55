//! Suggests limits that affect few keys, from the peak demand of each key within one period.
//!
//! Peaks are counted by the limiter's algorithms under a limit that is never reached. A limit of n
//! affects exactly the keys whose peak is above n, because it counts as the unreachable limit does
//! until the first refusal. Sliding windows are counted in hundredths of the period, so a peak and
//! the suggestion may be slightly too high. Requests that other policies refuse count as well.

use super::serialize_seconds;
use super::statistics::KeyPeakSample;
use crate::clock::Clock;
use crate::config::format_period;
use crate::enforcer::QuotaUsage;
use crate::limiter::{Algorithm, CounterRef, Limit};
use crate::policy::{NamedLimit, Policy, PolicyTable};
use crate::store::{MemorySettings, MemoryStore};
use serde::Serialize;
use std::time::Instant;

/// Requests per period of the counting limit, which no key reaches.
const UNREACHABLE_LIMIT: u64 = 1 << 40;

/// Maximum number of sampled keys per limit.
const MAX_SAMPLED_KEYS: usize = 1 << 18;

/// Tracks the peak demand of the keys of every limit.
#[derive(Debug)]
pub(super) struct PeakDemandTracker<'t> {
    memory: MemoryStore,
    /// The peak samples of the limits of each policy, in the order of the policy table.
    policies: Vec<(&'t Policy, Vec<LimitPeakSample>)>,
}

#[derive(Debug)]
struct LimitPeakSample {
    /// The limit used for counting; `None` for algorithms without a peak per period.
    counting_limit: Option<Limit>,
    sample: KeyPeakSample,
}

/// Number of keys from which a limit is suggested: fewer say little about the next ones.
const MIN_KEYS: usize = 100;

/// Smallest suggested limit. A client that retries or opens two pages must not meet it.
const MIN_REQUESTS: u64 = 5;

/// Suggestion for one limit.
#[derive(Debug, Serialize)]
pub(super) struct LimitSuggestion {
    /// The name of the limit, with its policy if that differs.
    #[serde(skip)]
    pub(super) title: String,
    limit: String,
    /// Requests of the current limit.
    pub(super) now: u64,
    #[serde(rename = "per_seconds", serialize_with = "serialize_seconds")]
    per_us: u64,
    #[serde(skip)]
    pub(super) period: String,
    #[serde(rename = "drawn")]
    pub(super) proposal: Option<LimitProposal>,
    /// Why there is no proposal.
    pub(super) reason: Option<String>,
}

/// A proposed limit, and the distribution of peaks behind it.
#[derive(Clone, Debug, Serialize)]
pub(super) struct LimitProposal {
    /// The proposed value of `requests`: `peak` and half as much again, in a round number.
    pub(super) requests: u64,
    /// The highest peak of the keys, without those that the limit may affect.
    pub(super) peak: u64,
    /// Sampled keys that the proposed limit affects, and those that the current limit affects.
    pub(super) touched: u64,
    pub(super) touched_now: u64,
    /// Number of sampled keys.
    pub(super) keys: u64,
    /// n if one in n keys was sampled.
    pub(super) one_key_in: u64,
    /// Shares of the keys, each with the highest peak within that share.
    pub(super) quantiles: Vec<(f64, u64)>,
    /// Upper bounds of peaks, each with the number of keys from the previous bound up to it.
    pub(super) histogram: Vec<(u64, u64)>,
}

const QUANTILES_PER_MILLE: [u16; 5] = [500, 900, 990, 999, 1000];

impl<'t> PeakDemandTracker<'t> {
    pub(super) fn new(table: &'t PolicyTable, settings: MemorySettings, clock: Clock) -> Self {
        let policies = table.policies().iter().map(|policy| {
            let limits = policy.quota().into_iter().flat_map(|quota| &quota.limits);
            (policy, limits.map(LimitPeakSample::new).collect())
        });
        Self {
            policies: policies.collect(),
            memory: MemoryStore::new(settings, clock),
        }
    }

    /// Records the demand of a request on the policy's own limits. Keys with an override are
    /// skipped.
    pub(super) fn record_demand(
        &mut self,
        policy_index: usize,
        claim: &QuotaUsage<'_, '_>,
        instant: Instant,
    ) {
        let Some((policy, peaks)) = self.policies.get_mut(policy_index) else {
            return;
        };
        let mut own_limits = policy.quota().into_iter().map(|quota| &*quota.limits);
        if !own_limits.any(|limits| std::ptr::eq(limits, claim.limits)) {
            return;
        }
        for peak in peaks {
            let Some(limit) = &peak.counting_limit else {
                continue;
            };
            let counter = CounterRef {
                limit,
                key: claim.key,
            };
            let used = self
                .memory
                .charge_unconditionally_at(counter, claim.cost, instant);
            peak.sample.record_max(claim.key.id(), used);
        }
    }

    /// Suggests, for each limit of a policy, the smallest limit that affects at most `percent` of
    /// the keys.
    pub(super) fn suggest_limits(&self, policy_index: usize, percent: f64) -> Vec<LimitSuggestion> {
        let Some((policy, peaks)) = self.policies.get(policy_index) else {
            return Vec::new();
        };
        let limits = policy.quota().into_iter().flat_map(|quota| &quota.limits);
        let suggestions = limits.zip(peaks).map(|(named, peak)| {
            let limit = &named.limit;
            let proposal = match peak.counting_limit {
                Some(_) => propose_limit(&peak.sample, limit.requests, percent),
                None => Err("this algorithm has no peak per period".to_owned()),
            };
            LimitSuggestion {
                title: match &*named.name {
                    name if *name == *policy.name => name.to_owned(),
                    name => format!("{} / {name}", policy.name),
                },
                limit: named.name.to_string(),
                now: limit.requests,
                per_us: limit.per_us,
                period: format_period(limit),
                reason: proposal.as_ref().err().cloned(),
                proposal: proposal.ok(),
            }
        });
        suggestions.collect()
    }

    /// Returns the number of counters that the store evicted; the peaks of their keys may be too
    /// low.
    pub(super) fn evicted_counters(&self) -> u64 {
        self.memory.eviction_count()
    }
}

impl LimitPeakSample {
    fn new(named: &NamedLimit) -> Self {
        let Limit {
            per_us, algorithm, ..
        } = named.limit;
        let algorithm = match algorithm {
            Algorithm::FixedWindow { .. } | Algorithm::CalendarWindow { .. } => Some(algorithm),
            Algorithm::SlidingWindow { .. } | Algorithm::SlidingLog => {
                Some(Algorithm::SlidingWindow { buckets: 100 })
            }
            // A token bucket as large as the peak demand of one period never refuses.
            Algorithm::TokenBucket { .. } => Some(Algorithm::SlidingWindow { buckets: 100 }),
            Algorithm::LeakyBucket { .. } | Algorithm::Concurrency { .. } | Algorithm::Block => {
                None
            }
        };
        // The request states the amount, so no number is suggested.
        let algorithm = algorithm.filter(|_| named.amount.is_none());
        let limit = algorithm.map(|algorithm| Limit {
            requests: UNREACHABLE_LIMIT,
            per_us,
            algorithm,
        });
        Self {
            counting_limit: limit,
            sample: KeyPeakSample::new(MAX_SAMPLED_KEYS),
        }
    }
}

fn propose_limit(
    sample: &KeyPeakSample,
    current_requests: u64,
    percent: f64,
) -> Result<LimitProposal, String> {
    let sorted = sample.sorted_values();
    let count = sorted.len();
    if count < MIN_KEYS {
        return Err(format!(
            "the log has {count} keys, and at least {MIN_KEYS} are needed"
        ));
    }
    let keys_above =
        |requests: u64| (count - sorted.partition_point(|peak| *peak <= requests)) as u64;
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "a share of a count, rounded down"
    )]
    let may_touch = (count as f64 * percent / 100.0) as usize;
    let at = count.saturating_sub(may_touch.min(count - 1) + 1);
    let peak = sorted.get(at).copied().unwrap_or_default();
    let requests = add_headroom(peak);
    let quantile = |share: u16| {
        let index = (usize::from(share) * count).div_ceil(1000).max(1) - 1;
        Some((f64::from(share) / 1000.0, *sorted.get(index)?))
    };
    Ok(LimitProposal {
        requests,
        peak,
        touched: keys_above(requests),
        touched_now: keys_above(current_requests),
        keys: count as u64,
        one_key_in: sample.keys_per_sample(),
        quantiles: QUANTILES_PER_MILLE
            .into_iter()
            .filter_map(quantile)
            .collect(),
        histogram: count_keys_by_peak(&sorted),
    })
}

/// Returns one and a half times the peak, rounded up to two significant digits.
fn add_headroom(peak: u64) -> u64 {
    let requests = peak.saturating_add(peak.div_ceil(2)).max(MIN_REQUESTS);
    let mut step = 1;
    while requests / step >= 100 {
        step *= 10;
    }
    requests.div_ceil(step).saturating_mul(step)
}

/// Counts the keys in ranges of the peak that double in width.
fn count_keys_by_peak(sorted: &[u64]) -> Vec<(u64, u64)> {
    let most = sorted.last().copied().unwrap_or_default();
    let (mut bars, mut below, mut upto) = (Vec::new(), 0, 1u64);
    loop {
        let index = sorted.partition_point(|peak| *peak <= upto);
        bars.push((upto, (index - below) as u64));
        below = index;
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
    fn proposes_a_limit_above_the_peak_of_enough_keys() {
        let mut sample = KeyPeakSample::new(MAX_SAMPLED_KEYS);
        (1..=200u64).for_each(|peak| sample.record_max(u128::from(peak), peak));
        let proposal = |percent| propose_limit(&sample, 150, percent).unwrap();
        let peak_and_requests = |percent| (proposal(percent).peak, proposal(percent).requests);
        assert_eq!(peak_and_requests(1.0), (198, 300));
        assert_eq!(peak_and_requests(0.0), (200, 300));
        assert_eq!(peak_and_requests(0.6), (199, 300));
        assert_eq!(peak_and_requests(50.0), (100, 150));
        assert_eq!(peak_and_requests(100.0), (1, 5));
        assert_eq!(
            (proposal(50.0).touched, proposal(50.0).touched_now),
            (50, 50)
        );
        assert_eq!(
            proposal(1.0).quantiles,
            [
                (0.5, 100),
                (0.9, 180),
                (0.99, 198),
                (0.999, 200),
                (1.0, 200)
            ]
        );
        assert_eq!(
            proposal(1.0)
                .histogram
                .iter()
                .map(|(_, count)| count)
                .sum::<u64>(),
            200
        );
        assert_eq!(proposal(1.0).histogram.first(), Some(&(1, 1)));
        let mut few = KeyPeakSample::new(MAX_SAMPLED_KEYS);
        (1..=30u64).for_each(|key| few.record_max(u128::from(key), 1));
        assert_eq!(
            propose_limit(&few, 1, 1.0).unwrap_err(),
            "the log has 30 keys, and at least 100 are needed"
        );
    }

    #[test]
    fn headroom_is_half_of_the_peak_in_a_round_number() {
        for (peak, requests) in [(0, 5), (1, 5), (4, 6), (60, 90), (95, 150), (1234, 1900)] {
            assert_eq!(add_headroom(peak), requests, "{peak}");
        }
        assert_eq!(add_headroom(u64::MAX), u64::MAX);
    }
}
