use super::super::metrics::{Decision, Kinds, Shard};
use super::*;

/// An hour's first second, some minutes before a day's end.
const START_S: u64 = 1_700_000_000 / 3600 * 3600;

struct Bench {
    metrics: Arc<Metrics>,
    shard: Arc<Shard>,
    history: History,
}

impl Bench {
    fn new() -> Self {
        let metrics = Metrics::new(2, Kinds::default());
        Self {
            shard: metrics.shard(1),
            history: History::new(Arc::clone(&metrics)),
            metrics,
        }
    }

    fn tally(&self, name: &str) -> Arc<Tally> {
        Arc::clone(&self.metrics.tallies(std::iter::once(name))[0])
    }

    fn does(&self, name: &str, decision: Decision, times: u32) {
        let tally = self.tally(name);
        (0..times).for_each(|_| self.shard.policy(&tally, decision));
    }

    fn sample(&self, now_s: u64, names: &[&str]) {
        let tallies = self.metrics.tallies(names.iter().copied());
        self.history.sample(now_s, tallies.iter());
    }

    /// How often a policy admitted in each minute and hour in which it did, by when that began.
    fn allowed(&self, name: &str) -> Option<[Vec<(u64, u32)>; 2]> {
        let (axis, pasts) = self.history.policies(std::iter::once(name));
        let past = pasts.into_iter().next()??;
        let told = |starts: &[u64], parts: &[Did]| {
            assert_eq!(starts.len(), parts.len());
            let both = starts.iter().zip(parts).filter(|(_, did)| did[0] > 0);
            both.map(|(start, did)| (*start - START_S, did[0]))
                .collect()
        };
        Some([
            told(&axis.minutes, &past.minutes),
            told(&axis.hours, &past.hours),
        ])
    }
}

#[test]
fn counts_belong_to_the_minute_and_hour_in_which_they_were_seen() {
    let bench = Bench::new();
    bench.sample(START_S, &["p"]);
    assert_eq!(bench.allowed("p"), None);
    bench.does("p", Decision::Allowed, 2);
    bench.sample(START_S + 59, &["p"]);
    bench.does("p", Decision::Allowed, 3);
    bench.does("p", Decision::Rejected, 7);
    bench.sample(START_S + 60, &["p"]);
    assert_eq!(
        bench.allowed("p"),
        Some([vec![(0, 2), (60, 3)], vec![(0, 5)]])
    );
    bench.does("p", Decision::Allowed, 1);
    bench.sample(START_S + 3599, &["p"]);
    bench.does("p", Decision::Allowed, 4);
    bench.sample(START_S + 3600, &["p"]);
    // The first minute is an hour old.
    assert_eq!(
        bench.allowed("p"),
        Some([vec![(60, 3), (3540, 1), (3600, 4)], vec![(0, 6), (3600, 4)]])
    );
    let (_, pasts) = bench.history.policies(std::iter::once("p"));
    let rejected: u32 = pasts[0]
        .as_ref()
        .unwrap()
        .hours
        .iter()
        .map(|did| did[2])
        .sum();
    assert_eq!(rejected, 7);
}

#[test]
fn a_pause_of_any_length_leaves_nothing_of_what_is_too_old() {
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
        let bench = Bench::new();
        bench.does("p", Decision::Allowed, 1);
        bench.sample(START_S, &["p"]);
        bench.does("p", Decision::Allowed, 1);
        bench.sample(START_S + pause, &["p"]);
        assert_eq!(bench.allowed("p"), Some([minutes, hours]), "{pause}");
    }
}

#[test]
fn who_does_nothing_takes_no_room() {
    let bench = Bench::new();
    bench.does("p", Decision::Allowed, 1);
    for hour in 0..=23 {
        bench.sample(START_S + hour * 3600, &["p", "idle"]);
        assert!(
            bench.allowed("p").is_some() && bench.allowed("idle").is_none(),
            "{hour}"
        );
    }
    bench.sample(START_S + 24 * 3600, &["p", "idle"]);
    assert_eq!(bench.allowed("p"), None);
}

#[test]
fn a_reload_drops_the_past_of_those_that_are_gone_and_counts_nothing_twice() {
    let bench = Bench::new();
    bench.does("stays", Decision::Allowed, 1);
    bench.does("goes", Decision::Allowed, 5);
    bench.sample(START_S, &["stays", "goes"]);
    bench.sample(START_S + 1, &["stays", "comes"]);
    assert_eq!(bench.allowed("goes"), None);
    assert_eq!(bench.allowed("stays"), Some([vec![(0, 1)], vec![(0, 1)]]));
    bench.does("comes", Decision::Allowed, 2);
    bench.does("goes", Decision::Allowed, 1);
    bench.sample(START_S + 2, &["goes", "stays", "comes"]);
    assert_eq!(bench.allowed("goes"), Some([vec![(0, 1)], vec![(0, 1)]]));
    assert_eq!(bench.allowed("comes"), Some([vec![(0, 2)], vec![(0, 2)]]));
}

#[test]
fn a_clock_that_goes_back_loses_nothing() {
    let bench = Bench::new();
    bench.does("p", Decision::Allowed, 1);
    bench.sample(START_S + 600, &["p"]);
    bench.does("p", Decision::Allowed, 2);
    bench.sample(START_S, &["p"]);
    assert_eq!(bench.allowed("p"), Some([vec![(600, 3)], vec![(0, 3)]]));
}

#[test]
fn the_last_minutes_are_told_by_second() {
    let bench = Bench::new();
    bench.shard.answer(Answer::Allowed);
    bench.shard.answered(204);
    bench.sample(START_S, &[]);
    bench.shard.answer(Answer::Rejected);
    bench.shard.answered(429);
    bench.shard.answered(503);
    bench.shard.answered(999);
    bench.sample(START_S + 2, &[]);
    let (from_s, seconds) = bench.history.seconds(3);
    assert_eq!((from_s, seconds.len()), (START_S, 3));
    assert_eq!(seconds[0].answers[Answer::Allowed as usize], 1);
    assert_eq!(seconds[0].classes, [0, 1, 0, 0, 0]);
    assert_eq!(seconds[1], Second::default());
    assert_eq!(seconds[2].answers[Answer::Rejected as usize], 1);
    assert_eq!(seconds[2].classes, [0, 0, 0, 1, 1]);
    let (from_s, seconds) = bench.history.seconds(usize::MAX);
    assert_eq!(
        (from_s, seconds.len()),
        (START_S + 3 - SECONDS as u64, SECONDS)
    );
    bench.sample(START_S + 2 + SECONDS as u64, &[]);
    assert!(
        bench
            .history
            .seconds(SECONDS)
            .1
            .iter()
            .all(|second| *second == Second::default())
    );
    assert!(bench.history.seconds(0).1.is_empty());
}

#[test]
fn durations_are_those_of_the_last_minute() {
    use super::super::metrics::Source;
    let bench = Bench::new();
    let slow = std::time::Duration::from_millis(40);
    bench.shard.decided(Source::Redis, slow);
    bench.sample(START_S, &[]);
    let told = |at: usize| {
        let (window_s, times) = bench.history.times();
        let (source, buckets) = times.decisions[at].clone();
        (
            window_s,
            source,
            buckets.count(),
            buckets.quantile(0.5).map(|time| time.as_micros()),
        )
    };
    assert_eq!(
        told(0),
        (0, "redis", 0, None),
        "what was before the first look is not told"
    );
    for _ in 0..99 {
        bench
            .shard
            .decided(Source::Redis, std::time::Duration::from_micros(300));
    }
    bench.shard.decided(Source::Redis, slow);
    bench.sample(START_S + 30, &[]);
    assert_eq!(told(0), (30, "redis", 100, Some(500)));
    let redis = bench.history.times().1.decisions[0].1.clone();
    let us = |share| redis.quantile(share).unwrap().as_micros();
    assert_eq!(
        (us(0.0), us(0.99), us(0.991), us(1.0)),
        (500, 500, 50_000, 50_000)
    );
    for step in 1..=8 {
        bench.sample(START_S + 30 + step * 10, &[]);
    }
    assert_eq!(told(0), (60, "redis", 0, None));
    bench
        .shard
        .decided(Source::Redis, std::time::Duration::from_secs(5));
    assert_eq!(
        bench.history.times().1.decisions[0].1.quantile(0.5),
        None,
        "longer than any bucket"
    );
}
