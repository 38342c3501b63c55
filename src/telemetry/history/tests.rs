use super::*;
use crate::telemetry::metrics::{MetricLabels, WorkerMetrics};

/// The first second of an hour, two hours before the end of a day.
const START_S: u64 = 1_700_000_000 / 3600 * 3600;

const ALLOWED: usize = 0;
const REJECTED: usize = 1;

struct HistoryFixture {
    metrics: Arc<Metrics>,
    worker: Arc<WorkerMetrics>,
    history: TrafficHistory,
}

impl HistoryFixture {
    fn new() -> Self {
        let mut labels = MetricLabels {
            decision_sources: &["redis"],
            ..MetricLabels::default()
        };
        for table in [
            &mut labels.request_decisions[..],
            &mut labels.policy_history,
        ] {
            table[0] = ("allowed", &[ALLOWED]);
            table[2] = ("rejected", &[REJECTED]);
        }
        let metrics = Metrics::new(2, labels);
        Self {
            worker: metrics.worker_metrics(1),
            history: TrafficHistory::new(Arc::clone(&metrics)),
            metrics,
        }
    }

    fn policy_counters(&self, name: &str) -> Arc<PolicyCounters> {
        Arc::clone(
            &self
                .metrics
                .get_or_create_policy_counters(std::iter::once(name))[0],
        )
    }

    fn record_decisions(&self, name: &str, decision: usize, times: u32) {
        let counters = self.policy_counters(name);
        (0..times).for_each(|_| self.worker.record_policy_decision(&counters, decision));
    }

    fn sample(&self, now_s: u64, names: &[&str]) {
        let counters = self
            .metrics
            .get_or_create_policy_counters(names.iter().copied());
        self.history.sample(now_s, counters.iter());
    }

    /// The non-zero counts of allowed requests by minute and by hour, each with its start.
    fn allowed_counts(&self, name: &str) -> Option<[Vec<(u64, u32)>; 2]> {
        let (axis, timelines) = self.history.policy_timelines(std::iter::once(name));
        let timeline = timelines.into_iter().next()??;
        let nonzero_counts = |starts: &[u64], parts: &[DecisionCounts]| {
            assert_eq!(starts.len(), parts.len());
            let both = starts.iter().zip(parts).filter(|(_, counts)| counts[0] > 0);
            both.map(|(start, counts)| (*start - START_S, counts[0]))
                .collect()
        };
        Some([
            nonzero_counts(&axis.minutes, &timeline.minutes),
            nonzero_counts(&axis.hours, &timeline.hours),
        ])
    }
}

#[test]
fn counts_belong_to_the_minute_and_hour_of_their_sample() {
    let fixture = HistoryFixture::new();
    fixture.sample(START_S, &["p"]);
    assert_eq!(fixture.allowed_counts("p"), None);
    fixture.record_decisions("p", ALLOWED, 2);
    fixture.sample(START_S + 59, &["p"]);
    fixture.record_decisions("p", ALLOWED, 3);
    fixture.record_decisions("p", REJECTED, 7);
    fixture.sample(START_S + 60, &["p"]);
    assert_eq!(
        fixture.allowed_counts("p"),
        Some([vec![(0, 2), (60, 3)], vec![(0, 5)]])
    );
    fixture.record_decisions("p", ALLOWED, 1);
    fixture.sample(START_S + 3599, &["p"]);
    fixture.record_decisions("p", ALLOWED, 4);
    fixture.sample(START_S + 3600, &["p"]);
    // The first minute is an hour old, so its counts have expired.
    assert_eq!(
        fixture.allowed_counts("p"),
        Some([vec![(60, 3), (3540, 1), (3600, 4)], vec![(0, 6), (3600, 4)]])
    );
    let (_, timelines) = fixture.history.policy_timelines(std::iter::once("p"));
    let rejected: u32 = timelines[0]
        .as_ref()
        .unwrap()
        .hours
        .iter()
        .map(|counts| counts[2])
        .sum();
    assert_eq!(rejected, 7);
}

#[test]
fn old_counts_expire_after_a_pause_of_any_length() {
    for (pause, minutes, hours) in [
        (59 * 60, vec![(0, 1), (59 * 60, 1)], vec![(0, 2)]),
        (3600, vec![(3600, 1)], vec![(0, 1), (3600, 1)]),
        (
            23 * 3600,
            vec![(23 * 3600, 1)],
            vec![(0, 1), (23 * 3600, 1)],
        ),
        (24 * 3600, vec![(24 * 3600, 1)], vec![(24 * 3600, 1)]),
        (1000 * 3600, vec![(1000 * 3600, 1)], vec![(1000 * 3600, 1)]),
    ] {
        let fixture = HistoryFixture::new();
        fixture.record_decisions("p", ALLOWED, 1);
        fixture.sample(START_S, &["p"]);
        fixture.record_decisions("p", ALLOWED, 1);
        fixture.sample(START_S + pause, &["p"]);
        assert_eq!(
            fixture.allowed_counts("p"),
            Some([minutes, hours]),
            "{pause}"
        );
    }
}

#[test]
fn idle_policies_keep_no_history() {
    let fixture = HistoryFixture::new();
    fixture.record_decisions("p", ALLOWED, 1);
    for hour in 0..=23 {
        fixture.sample(START_S + hour * 3600, &["p", "idle"]);
        assert!(
            fixture.allowed_counts("p").is_some() && fixture.allowed_counts("idle").is_none(),
            "{hour}"
        );
    }
    fixture.sample(START_S + 24 * 3600, &["p", "idle"]);
    assert_eq!(fixture.allowed_counts("p"), None);
}

#[test]
fn a_reload_drops_removed_policies_and_counts_nothing_twice() {
    let fixture = HistoryFixture::new();
    fixture.record_decisions("stays", ALLOWED, 1);
    fixture.record_decisions("goes", ALLOWED, 5);
    fixture.sample(START_S, &["stays", "goes"]);
    fixture.sample(START_S + 1, &["stays", "comes"]);
    assert_eq!(fixture.allowed_counts("goes"), None);
    assert_eq!(
        fixture.allowed_counts("stays"),
        Some([vec![(0, 1)], vec![(0, 1)]])
    );
    fixture.record_decisions("comes", ALLOWED, 2);
    fixture.record_decisions("goes", ALLOWED, 1);
    fixture.sample(START_S + 2, &["goes", "stays", "comes"]);
    assert_eq!(
        fixture.allowed_counts("goes"),
        Some([vec![(0, 1)], vec![(0, 1)]])
    );
    assert_eq!(
        fixture.allowed_counts("comes"),
        Some([vec![(0, 2)], vec![(0, 2)]])
    );
}

#[test]
fn a_clock_that_goes_back_loses_no_counts() {
    let fixture = HistoryFixture::new();
    fixture.record_decisions("p", ALLOWED, 1);
    fixture.sample(START_S + 600, &["p"]);
    fixture.record_decisions("p", ALLOWED, 2);
    fixture.sample(START_S, &["p"]);
    assert_eq!(
        fixture.allowed_counts("p"),
        Some([vec![(600, 3)], vec![(0, 3)]])
    );
}

#[test]
fn keeps_the_last_minutes_by_second() {
    let fixture = HistoryFixture::new();
    fixture.worker.record_request_decision(ALLOWED);
    fixture.worker.record_status(204);
    fixture.sample(START_S, &[]);
    fixture.worker.record_request_decision(REJECTED);
    fixture.worker.record_status(429);
    fixture.worker.record_status(503);
    fixture.worker.record_status(999);
    fixture.sample(START_S + 2, &[]);
    let (from_s, seconds) = fixture.history.last_seconds(3);
    assert_eq!((from_s, seconds.len()), (START_S, 3));
    assert_eq!(seconds[0].decisions[0], 1);
    assert_eq!(seconds[0].status_classes, [0, 1, 0, 0, 0]);
    assert_eq!(seconds[1], SecondCounts::default());
    assert_eq!(seconds[2].decisions[2], 1);
    assert_eq!(seconds[2].status_classes, [0, 0, 0, 1, 1]);
    let (from_s, seconds) = fixture.history.last_seconds(usize::MAX);
    assert_eq!(
        (from_s, seconds.len()),
        (START_S + 3 - SECONDS_KEPT as u64, SECONDS_KEPT)
    );
    fixture.sample(START_S + 2 + SECONDS_KEPT as u64, &[]);
    assert!(
        fixture
            .history
            .last_seconds(SECONDS_KEPT)
            .1
            .iter()
            .all(|second| *second == SecondCounts::default())
    );
    assert!(fixture.history.last_seconds(0).1.is_empty());
}

#[test]
fn durations_cover_the_last_minute() {
    let fixture = HistoryFixture::new();
    let slow = std::time::Duration::from_millis(40);
    fixture.worker.record_decision_time(0, slow);
    fixture.sample(START_S, &[]);
    let decision_durations = |at: usize| {
        let (window_s, times) = fixture.history.recent_durations();
        let (source, buckets) = times.decisions[at].clone();
        (
            window_s,
            source,
            buckets.count(),
            buckets.quantile_bound(0.5).map(|time| time.as_micros()),
        )
    };
    assert_eq!(
        decision_durations(0),
        (0, "redis", 0, None),
        "durations before the first sample are not included"
    );
    for _ in 0..99 {
        fixture
            .worker
            .record_decision_time(0, std::time::Duration::from_micros(300));
    }
    fixture.worker.record_decision_time(0, slow);
    fixture.sample(START_S + 30, &[]);
    assert_eq!(decision_durations(0), (30, "redis", 100, Some(500)));
    let redis = fixture.history.recent_durations().1.decisions[0].1.clone();
    let us = |share| redis.quantile_bound(share).unwrap().as_micros();
    assert_eq!(
        (us(0.0), us(0.99), us(0.991), us(1.0)),
        (500, 500, 50_000, 50_000)
    );
    for step in 1..=8 {
        fixture.sample(START_S + 30 + step * 10, &[]);
    }
    assert_eq!(decision_durations(0), (60, "redis", 0, None));
    fixture
        .worker
        .record_decision_time(0, std::time::Duration::from_secs(5));
    assert_eq!(
        fixture.history.recent_durations().1.decisions[0]
            .1
            .quantile_bound(0.5),
        None,
        "longer than any bucket"
    );
}
