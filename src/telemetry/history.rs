//! Recent traffic history for the dashboard: per policy by minute for the last hour and by hour for
//! the last day, and for all requests by second for the last ten minutes.
//!
//! The history adds no cost to requests. [`TrafficHistory::sample`] is called about once a second,
//! and adds the increase of the workers' counters to the current second. The history of a
//! policy takes 3 KiB, and is freed after a day without requests.

use super::metrics::{
    HistogramSnapshot, LabelledCounterIndices, Metrics, POLICY_HISTORY_SERIES_COUNT,
    PolicyCounters, REQUEST_DECISION_COUNT,
};
use foldhash::HashMap;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;

const MINUTES_KEPT: usize = 60;
const HOURS_KEPT: usize = 24;
/// Number of seconds kept: ten minutes, the range of the dashboard's chart.
pub const SECONDS_KEPT: usize = 600;

/// Duration samples cover the last minute: seven samples at intervals of ten seconds.
const DURATION_SAMPLES_KEPT: usize = 7;
const DURATION_SAMPLE_INTERVAL_S: u64 = 10;

/// Number of classes of status codes, from 1xx to 5xx.
pub const STATUS_CLASS_COUNT: usize = 5;

/// Counts of a policy's decisions in one period, one per series of `MetricLabels::policy_history`,
/// in its order. They saturate at `u32::MAX`.
pub type DecisionCounts = [u32; POLICY_HISTORY_SERIES_COUNT];

/// The traffic history of the process.
#[derive(Debug)]
pub struct TrafficHistory {
    metrics: Arc<Metrics>,
    state: Mutex<HistoryState>,
}

#[derive(Debug, Default)]
struct HistoryState {
    /// Time of the last sample in seconds since the Unix epoch. It never decreases.
    now_s: u64,
    policies: HashMap<Arc<str>, PolicyHistory>,
    seconds: TimeRing<SecondCounts, SECONDS_KEPT>,
    /// The counts of all requests at the last sample.
    last_counts: SecondCounts<u64>,
    /// Cumulative durations, each with its time in seconds since the Unix epoch.
    duration_samples: VecDeque<(u64, DurationHistograms)>,
}

/// The counters of a policy at the last sample, and its history if it had any requests.
#[derive(Debug, Default)]
struct PolicyHistory {
    last_counts: [u64; POLICY_HISTORY_SERIES_COUNT],
    rings: Option<Box<HistoryRings>>,
    /// Time of the policy's last sample.
    sampled_at_s: u64,
}

#[derive(Clone, Debug, Default)]
struct HistoryRings {
    minutes: TimeRing<DecisionCounts, MINUTES_KEPT>,
    hours: TimeRing<DecisionCounts, HOURS_KEPT>,
}

/// The counts of all requests, in one second unless `T` is larger.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SecondCounts<T = u32> {
    /// Requests by decision, in the order of `MetricLabels::request_decisions`.
    pub decisions: [T; REQUEST_DECISION_COUNT],
    /// Responses by status class, from 1xx to 5xx.
    pub status_classes: [T; STATUS_CLASS_COUNT],
    /// Requests without a response from the upstream by no fault of the client, and responses
    /// of the upstream with a status from 500 on.
    pub failures: [T; 2],
}

/// Distributions of decision times and response times.
#[derive(Clone, Debug)]
pub struct DurationHistograms {
    /// Time to a decision, by decision source.
    pub decisions: Vec<(&'static str, HistogramSnapshot)>,
    /// Time from a request's arrival to its response head.
    pub responses: HistogramSnapshot,
}

/// A value per minute and per hour, oldest first: the history of a policy, or the start of each
/// period in seconds since the Unix epoch. The last period of each list is incomplete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Timeline<T> {
    pub minutes: Vec<T>,
    pub hours: Vec<T>,
}

impl TrafficHistory {
    pub fn new(metrics: Arc<Metrics>) -> Self {
        Self {
            metrics,
            state: Mutex::default(),
        }
    }

    /// Records the increase of all counters since the last sample. The history of policies that are
    /// not in `active_policies` is dropped.
    pub fn sample<'t>(
        &self,
        now_s: u64,
        active_policies: impl Iterator<Item = &'t Arc<PolicyCounters>>,
    ) {
        let mut state = self.state.lock();
        let before_s = state.now_s;
        let now_s = now_s.max(before_s);
        state.now_s = now_s;
        let series = &self.metrics.labels.policy_history;
        state.sample_policies(before_s, active_policies, series);
        state.record_second(before_s, &self.metrics);
        if state
            .duration_samples
            .back()
            .is_none_or(|(at_s, _)| now_s >= at_s.saturating_add(DURATION_SAMPLE_INTERVAL_S))
        {
            let sample = (now_s, read_duration_histograms(&self.metrics));
            state.duration_samples.push_back(sample);
            if state.duration_samples.len() > DURATION_SAMPLES_KEPT {
                state.duration_samples.pop_front();
            }
        }
    }

    /// Returns the history of each named policy, or `None` if it had no requests.
    pub fn policy_timelines<'n>(
        &self,
        names: impl Iterator<Item = &'n str>,
    ) -> (Timeline<u64>, Vec<Option<Timeline<DecisionCounts>>>) {
        let state = self.state.lock();
        let axis = Timeline {
            minutes: period_starts(state.now_s, 60, MINUTES_KEPT),
            hours: period_starts(state.now_s, 3600, HOURS_KEPT),
        };
        let timeline = |name| {
            let rings = state.policies.get(name)?.rings.as_ref()?;
            Some(Timeline {
                minutes: rings.minutes.last_periods(MINUTES_KEPT, state.now_s / 60),
                hours: rings.hours.last_periods(HOURS_KEPT, state.now_s / 3600),
            })
        };
        let timelines = names.map(timeline).collect();
        (axis, timelines)
    }

    /// Returns the sums of the last hour and of the last day over the series for which
    /// `is_counted` holds, for each policy that had requests.
    pub fn recent_sums(&self, is_counted: impl Fn(usize) -> bool) -> Vec<(Arc<str>, [u64; 2])> {
        let sum = |parts: &[DecisionCounts]| -> u64 {
            let counts = parts.iter().flat_map(|counts| counts.iter().enumerate());
            let counted = counts.filter(|(series, _)| is_counted(*series));
            counted.map(|(_, count)| u64::from(*count)).sum()
        };
        let state = self.state.lock();
        let policies = state.policies.iter();
        let sums = policies.filter_map(|(name, history)| {
            let rings = history.rings.as_ref()?;
            Some((
                Arc::clone(name),
                [sum(&rings.minutes.0), sum(&rings.hours.0)],
            ))
        });
        sums.collect()
    }

    /// Returns the start of the first second and the counts of the last `limit` seconds, oldest
    /// first.
    pub fn last_seconds(&self, limit: usize) -> (u64, Vec<SecondCounts>) {
        let state = self.state.lock();
        let seconds = state.seconds.last_periods(limit, state.now_s);
        let before = seconds.len().saturating_sub(1) as u64;
        (state.now_s.saturating_sub(before), seconds)
    }

    /// Returns a number of seconds and the durations in that time: the last minute, or the time
    /// since the start if that is shorter.
    pub fn recent_durations(&self) -> (u64, DurationHistograms) {
        let mut now = read_duration_histograms(&self.metrics);
        let state = self.state.lock();
        let Some((oldest_s, oldest)) = state.duration_samples.front() else {
            return (0, now);
        };
        for ((_, decisions), (_, earlier)) in now.decisions.iter_mut().zip(&oldest.decisions) {
            *decisions = decisions.clone().delta_since(earlier);
        }
        now.responses = now.responses.delta_since(&oldest.responses);
        (state.now_s.saturating_sub(*oldest_s), now)
    }
}

fn read_duration_histograms(metrics: &Metrics) -> DurationHistograms {
    DurationHistograms {
        decisions: metrics.decision_durations(),
        responses: metrics.response_durations(),
    }
}

/// The start times of the last `count` periods, oldest first.
fn period_starts(now_s: u64, step_s: u64, count: usize) -> Vec<u64> {
    let newest = now_s / step_s;
    (0..count as u64)
        .rev()
        .map(|back| newest.saturating_sub(back) * step_s)
        .collect()
}

impl HistoryState {
    fn sample_policies<'t>(
        &mut self,
        before_s: u64,
        active_policies: impl Iterator<Item = &'t Arc<PolicyCounters>>,
        series: &[LabelledCounterIndices; POLICY_HISTORY_SERIES_COUNT],
    ) {
        let now_s = self.now_s;
        let mut count = 0;
        for counters in active_policies {
            count += 1;
            let name = Arc::clone(&counters.policy_name);
            let history = self.policies.entry(name).or_default();
            let mut requests = counters.requests_by_label(series);
            let counts = [(); POLICY_HISTORY_SERIES_COUNT];
            let counts = counts.map(|()| requests.next().map_or(0, |(_, count)| count));
            history.sample(before_s, now_s, counts);
        }
        let hour_began = before_s / 3600 != now_s / 3600;
        if count == self.policies.len() && !hour_began {
            return;
        }
        // Frees the history of policies that a reload has removed, and of policies without requests
        // for a day. Their last counts are kept, so that the history of a returning policy
        // continues correctly.
        for history in self.policies.values_mut() {
            let is_gone = history.sampled_at_s != now_s;
            history
                .rings
                .take_if(|rings| is_gone || (hour_began && rings.is_empty()));
        }
    }

    fn record_second(&mut self, before_s: u64, metrics: &Metrics) {
        let mut now = SecondCounts {
            decisions: metrics.request_decision_counts(),
            status_classes: [0; STATUS_CLASS_COUNT],
            failures: [metrics.upstream_fault_count(), metrics.app_error_count()],
        };
        for (code, count) in metrics.status_counts() {
            let class = usize::from(code / 100).saturating_sub(1);
            if let Some(sum) = now.status_classes.get_mut(class) {
                *sum += count;
            }
        }
        self.seconds.advance(before_s, self.now_s);
        let last = std::mem::replace(&mut self.last_counts, now);
        if let Some(second) = self.seconds.slot_mut(self.now_s) {
            add_increase(&mut second.decisions, &now.decisions, &last.decisions);
            let classes = &mut second.status_classes;
            add_increase(classes, &now.status_classes, &last.status_classes);
            add_increase(&mut second.failures, &now.failures, &last.failures);
        }
    }
}

impl PolicyHistory {
    fn sample(&mut self, before_s: u64, now_s: u64, counts: [u64; POLICY_HISTORY_SERIES_COUNT]) {
        self.sampled_at_s = now_s;
        if let Some(rings) = &mut self.rings {
            rings.minutes.advance(before_s / 60, now_s / 60);
            rings.hours.advance(before_s / 3600, now_s / 3600);
        }
        if counts == self.last_counts {
            return;
        }
        let rings = self.rings.get_or_insert_default();
        let minute = rings.minutes.slot_mut(now_s / 60);
        for slot in minute.into_iter().chain(rings.hours.slot_mut(now_s / 3600)) {
            add_increase(slot, &counts, &self.last_counts);
        }
        self.last_counts = counts;
    }
}

impl HistoryRings {
    fn is_empty(&self) -> bool {
        let mut periods = self.hours.0.iter().chain(&self.minutes.0);
        periods.all(|counts| *counts == DecisionCounts::default())
    }
}

/// Adds to `sums` the increase of each counter from `before` to `now`.
fn add_increase<const N: usize>(sums: &mut [u32; N], now: &[u64; N], before: &[u64; N]) {
    for ((sum, now), before) in sums.iter_mut().zip(now).zip(before) {
        let increase = u32::try_from(now.saturating_sub(*before)).unwrap_or(u32::MAX);
        *sum = sum.saturating_add(increase);
    }
}

/// The values of the last `N` periods, each at the index of its period number modulo `N`.
#[derive(Clone, Debug)]
struct TimeRing<T, const N: usize>([T; N]);

impl<T: Copy + Default, const N: usize> Default for TimeRing<T, N> {
    fn default() -> Self {
        Self([T::default(); N])
    }
}

impl<T: Copy + Default, const N: usize> TimeRing<T, N> {
    /// Clears the slots of the periods after `before`, up to `now`.
    fn advance(&mut self, before: u64, now: u64) {
        for step in (before + 1..=now).rev().take(N) {
            if let Some(part) = self.slot_mut(step) {
                *part = T::default();
            }
        }
    }

    fn slot_mut(&mut self, step: u64) -> Option<&mut T> {
        self.0.get_mut(ring_index::<N>(step))
    }

    /// The last `limit` periods up to `now`, oldest first.
    fn last_periods(&self, limit: usize, now: u64) -> Vec<T> {
        let steps = (0..limit.min(N) as u64)
            .rev()
            .filter_map(|back| now.checked_sub(back));
        steps
            .filter_map(|step| self.0.get(ring_index::<N>(step)).copied())
            .collect()
    }
}

fn ring_index<const N: usize>(step: u64) -> usize {
    usize::try_from(step % N as u64).unwrap_or_default()
}

#[cfg(test)]
mod tests;
