//! The refusals of one key over time, in bounded memory.

use super::log_record::{LoggedRequest, UNENFORCED_DECISIONS};
use crate::limiter::OverrideInEffect;
use crate::text::{format_rfc3339, truncate_text};
use serde::{Serialize, Serializer};
use serde_json::json;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

/// Width of a period at the start, in seconds.
const MIN_PERIOD_S: u64 = 60;

/// Maximum number of periods over all series. If there are more, periods are merged.
const MAX_PERIODS: usize = 50_000;

/// Maximum number of series. Further ones are added to one or two series of their policy.
pub(super) const MAX_SERIES: usize = 256;

/// Stands for the decisions of further series.
pub(super) const OTHER_DECISION: &str = "other";

/// Maximum length of the example of a request.
const MAX_REQUEST_CHARS: usize = 101;

/// Refusals are one episode if the pause between them is at most this many periods.
const MAX_PAUSE_PERIODS: u64 = 5;

/// The refusals of a key, by series and period. Lines may come in any order.
#[derive(Debug)]
pub(super) struct RefusalHistory {
    pub(super) period_s: u64,
    series: BTreeMap<SeriesName, BTreeMap<u64, RefusalPeriod>>,
}

/// What refused the requests of a series.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub(super) struct SeriesName {
    pub(super) policy: Box<str>,
    pub(super) limit: Option<String>,
    /// The decision of the access log, such as `rejected`, or `shadow_rejected` or `marked`.
    pub(super) decision: String,
    /// What decided instead of the limit of the configuration.
    #[serde(rename = "override", serialize_with = "serialize_amounts")]
    pub(super) in_effect: Option<OverrideInEffect>,
}

/// The refusals of one series in one period, or in one episode.
#[derive(Clone, Debug, Serialize)]
pub(super) struct RefusalPeriod {
    pub(super) refused: u64,
    #[serde(rename = "from", serialize_with = "serialize_time")]
    pub(super) first_us: u64,
    #[serde(rename = "to", serialize_with = "serialize_time")]
    pub(super) last_us: u64,
    /// The shortest and the longest wait, if any line has one.
    pub(super) min_wait_ms: Option<u64>,
    pub(super) max_wait_ms: Option<u64>,
    /// Method and path of the last request.
    #[serde(skip)]
    pub(super) last_request: String,
}

impl RefusalHistory {
    pub(super) fn new() -> Self {
        Self {
            period_s: MIN_PERIOD_S,
            series: BTreeMap::new(),
        }
    }

    /// Adds one refused request.
    pub(super) fn add(&mut self, mut name: SeriesName, at_us: u64, request: &LoggedRequest) {
        if self.series.len() >= MAX_SERIES && !self.series.contains_key(&name) {
            (name.limit, name.in_effect) = (None, None);
            if name.is_enforced() {
                name.decision = OTHER_DECISION.to_owned();
            }
        }
        let last_request = format!("{} {}", request.method, request.path);
        let refusal = RefusalPeriod {
            refused: 1,
            first_us: at_us,
            last_us: at_us,
            min_wait_ms: request.retry_after_ms,
            max_wait_ms: request.retry_after_ms,
            last_request: truncate_text(&last_request, MAX_REQUEST_CHARS, '…'),
        };
        let periods = self.series.entry(name).or_default();
        match periods.entry(at_us / self.period_s.saturating_mul(1_000_000)) {
            Entry::Occupied(period) => return period.into_mut().merge(&refusal),
            Entry::Vacant(period) => drop(period.insert(refusal)),
        }
        while self.series.values().map(BTreeMap::len).sum::<usize>() > MAX_PERIODS {
            self.merge_neighbouring_periods();
        }
    }

    /// Doubles the width of the periods.
    fn merge_neighbouring_periods(&mut self) {
        self.period_s = self.period_s.saturating_mul(2);
        for periods in self.series.values_mut() {
            let mut merged: BTreeMap<u64, RefusalPeriod> = BTreeMap::new();
            for (number, period) in std::mem::take(periods) {
                merged
                    .entry(number / 2)
                    .and_modify(|wide| wide.merge(&period))
                    .or_insert(period);
            }
            *periods = merged;
        }
    }

    /// Number of refused requests, or of those that a policy would refuse if it were enforced.
    pub(super) fn total_refused(&self, is_enforced: bool) -> u64 {
        let series = self.series.iter();
        let selected = series.filter(|(name, _)| name.is_enforced() == is_enforced);
        selected
            .flat_map(|(_, periods)| periods.values())
            .map(|period| period.refused)
            .sum()
    }

    /// The episodes of all series, by time: refusals without a long pause between them.
    pub(super) fn episodes(&self) -> Vec<(&SeriesName, RefusalPeriod)> {
        let max_pause_us = self.period_s.saturating_mul(MAX_PAUSE_PERIODS * 1_000_000);
        let mut episodes: Vec<(&SeriesName, RefusalPeriod)> = Vec::new();
        for (name, periods) in &self.series {
            for period in periods.values() {
                match episodes.last_mut() {
                    Some((last_name, episode))
                        if *last_name == name
                            && period.first_us.saturating_sub(episode.last_us) <= max_pause_us =>
                    {
                        episode.merge(period);
                    }
                    _ => episodes.push((name, period.clone())),
                }
            }
        }
        episodes.sort_by_key(|(_, episode)| episode.first_us);
        episodes
    }

    /// The periods with refusals, by time: their start in seconds, and the refusals of each series.
    pub(super) fn periods(&self) -> BTreeMap<u64, Vec<(&SeriesName, &RefusalPeriod)>> {
        let mut by_time: BTreeMap<u64, Vec<_>> = BTreeMap::new();
        for (name, periods) in &self.series {
            for (number, period) in periods {
                let start_s = number * self.period_s;
                by_time.entry(start_s).or_default().push((name, period));
            }
        }
        by_time
    }
}

impl SeriesName {
    /// Whether the requests were refused. If not, their policy has mode `mark` or `shadow`.
    pub(super) fn is_enforced(&self) -> bool {
        !UNENFORCED_DECISIONS.contains(&&*self.decision)
    }

    /// Whether a block of the key refused, whichever limit caused it.
    pub(super) fn is_block(&self) -> bool {
        self.decision == "blocked" || self.in_effect == Some(OverrideInEffect::Blocked)
    }
}

impl RefusalPeriod {
    fn merge(&mut self, other: &Self) {
        self.refused += other.refused;
        self.first_us = self.first_us.min(other.first_us);
        if other.last_us >= self.last_us {
            self.last_us = other.last_us;
            self.last_request.clone_from(&other.last_request);
        }
        let waits = self.min_wait_ms.into_iter().chain(other.min_wait_ms);
        self.min_wait_ms = waits.min();
        self.max_wait_ms = self.max_wait_ms.max(other.max_wait_ms);
    }
}

/// What decided instead of the limit of the configuration.
fn serialize_amounts<S: Serializer>(
    in_effect: &Option<OverrideInEffect>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    let described = in_effect.map(|in_effect| match in_effect {
        OverrideInEffect::Unlimited => json!("unlimited"),
        OverrideInEffect::Blocked => json!("blocked"),
        OverrideInEffect::Amounts { requests, burst } => {
            json!({ "requests": requests, "burst": burst })
        }
        OverrideInEffect::StatedAmounts { requests, burst } => {
            json!({ "requests": requests, "burst": burst, "stated": true })
        }
    });
    described.serialize(serializer)
}

fn serialize_time<S: Serializer>(at_us: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&format_rfc3339(*at_us))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series_name(limit: &str) -> SeriesName {
        SeriesName {
            policy: "api".into(),
            limit: Some(limit.to_owned()),
            decision: "rejected".to_owned(),
            in_effect: None,
        }
    }

    #[test]
    fn a_long_log_is_kept_in_bounded_memory_without_losing_a_count() {
        let mut history = RefusalHistory::new();
        for minute in 0..200_000_u64 {
            let request = LoggedRequest {
                retry_after_ms: Some(minute),
                ..LoggedRequest::default()
            };
            history.add(series_name("a"), minute * 60_000_000, &request);
        }
        assert_eq!(history.period_s, 240);
        let periods: usize = history.series.values().map(BTreeMap::len).sum();
        assert!(periods <= MAX_PERIODS);
        assert_eq!(history.total_refused(true), 200_000);
        let episodes = history.episodes();
        assert_eq!(episodes.len(), 1, "no pause");
        let episode = &episodes[0].1;
        assert_eq!(
            (episode.min_wait_ms, episode.max_wait_ms),
            (Some(0), Some(199_999))
        );
    }

    #[test]
    fn many_series_are_bounded() {
        let mut history = RefusalHistory::new();
        for at in 0..1000 {
            let request = LoggedRequest::default();
            history.add(series_name(&at.to_string()), 0, &request);
            let decision = format!("decision {at}");
            let name = SeriesName {
                decision,
                ..series_name("a")
            };
            history.add(name, u64::MAX, &request);
        }
        assert!(history.series.len() <= MAX_SERIES + 1);
        assert_eq!(history.total_refused(true), 2000);
    }

    #[test]
    fn a_pause_ends_an_episode() {
        let mut history = RefusalHistory::new();
        for minute in [20, 3, 1, 2, 12] {
            let request = LoggedRequest::default();
            history.add(series_name("a"), minute * 60_000_000, &request);
        }
        let counts = history
            .episodes()
            .iter()
            .map(|(_, episode)| episode.refused)
            .collect::<Vec<_>>();
        assert_eq!(counts, [3, 1, 1]);
    }
}
