//! The guarantees of each algorithm, checked only by the admitted requests, on both stores.
//! Schedules are random and adversarial: bursts at edges, waits of exactly `retry`, a clock that
//! steps back. Limits change midway.

use crate::support::prelude::*;
use tidegate::limiter::MAX_WARM_UP_US;

/// Schedules per algorithm: memory store, Redis. Redis runs fewer, since other tests compare it
/// with the memory store.
const SCHEDULES_PER_STORE: [usize; 2] = [1_000, 100];
const STEPS_PER_SCHEDULE: usize = 80;

/// One request that was admitted.
#[derive(Clone, Copy, Debug)]
struct Admission {
    /// The time of the store's clock, which does not step back.
    at_us: u64,
    cost: u64,
    delay_us: u64,
    /// The limit at that time.
    limit: Limit,
    /// The number of limit changes before.
    version: u32,
}

/// One client that uses one limit as much as possible.
struct ClientSchedule<'a> {
    tested_store: &'a mut StoreUnderTest,
    rng: &'a mut Rng,
    limit: Limit,
    version: u32,
    clock_us: u64,
    retry_at_us: Option<u64>,
    admitted: Vec<Admission>,
}

impl ClientSchedule<'_> {
    fn run_step(&mut self, key: &Key) {
        if self.rng.u8(..20) == 0 {
            self.limit = change_limit(self.limit, self.rng);
            self.version += 1;
        }
        self.clock_us = self.choose_next_us();
        // A burst: as much as fits, then a cost that does not fit.
        for _ in 0..self.rng.usize(1..=6) {
            let most = self.limit.capacity();
            let cost = if self.rng.bool() {
                1
            } else {
                self.rng.u64(1..=most)
            };
            self.decide(key, cost);
        }
    }

    fn choose_next_us(&mut self) -> u64 {
        let (now_us, per_us) = (self.clock_us, self.limit.per_us);
        let near = |at_us: u64, rng: &mut Rng| at_us + rng.u64(0..3) - 1;
        match self.rng.u8(..10) {
            0..3 => self.retry_at_us.unwrap_or(now_us),
            3 => near(self.retry_at_us.unwrap_or(now_us), self.rng),
            4 => near((now_us / per_us + 1) * per_us, self.rng),
            5 => near(
                (now_us / self.limit.sub_window_width_us() + 1) * self.limit.sub_window_width_us(),
                self.rng,
            ),
            6 => now_us + self.rng.u64(..=2 * (per_us / self.limit.requests)),
            7 => now_us + self.rng.u64(..per_us),
            8 => now_us.saturating_sub(self.rng.u64(..per_us)).max(START_US),
            _ => now_us,
        }
    }

    fn decide(&mut self, key: &Key, cost: u64) {
        let charge = PolicyCharges::new(&self.limit, key, cost);
        let decision = self
            .tested_store
            .decide(std::slice::from_ref(&charge), self.clock_us);
        self.retry_at_us =
            admissible_at_us(std::slice::from_ref(&charge), &decision).or(self.retry_at_us);
        if decision.admitted {
            let newest_us = self.admitted.last().map_or(0, |last| last.at_us);
            self.admitted.push(Admission {
                at_us: decision.now_us.max(newest_us),
                cost,
                delay_us: decision.delay_us,
                limit: self.limit,
                version: self.version,
            });
            assert!(guarantee_holds(&self.admitted), "{:?}", self.admitted);
        }
    }
}

/// Changes the amount, or another setting that does not start a new counter.
fn change_limit(limit: Limit, rng: &mut Rng) -> Limit {
    let requests = match rng.bool() {
        true => limit.requests * rng.u64(1..=3),
        false => limit.requests.div_ceil(rng.u64(1..=3)),
    };
    match limit.algorithm {
        Algorithm::TokenBucket { warm_up_us, .. } => {
            let most = MAX_UNITS / limit.per_us;
            let burst = rng.u64(1..=3 * requests).min(most);
            // A reload may add or remove the warm-up.
            let warm_up_us = match rng.u8(..6) {
                0 => 0,
                1 => draw_duration_us(rng).min(MAX_WARM_UP_US),
                _ => warm_up_us,
            };
            let algorithm = Algorithm::TokenBucket { burst, warm_up_us };
            Limit {
                requests: requests.min(most),
                algorithm,
                ..limit
            }
        }
        Algorithm::LeakyBucket { max_delay_us } => {
            let max_delay_us = rng.u64(..=max_delay_us);
            let most = (MAX_UNITS - limit.per_us) / max_delay_us.max(1);
            Limit {
                requests: requests.min(most),
                algorithm: Algorithm::LeakyBucket { max_delay_us },
                ..limit
            }
        }
        _ => Limit { requests, ..limit },
    }
}

/// Whether the guarantee holds at the newest admission. `docs/ALGORITHMS.md` states it in the same
/// terms.
fn guarantee_holds(admitted: &[Admission]) -> bool {
    let Some((newest, before)) = admitted.split_last() else {
        return true;
    };
    let Limit {
        requests,
        per_us,
        algorithm,
    } = newest.limit;
    let units_while = |holds: &dyn Fn(u64) -> bool| -> u64 {
        admitted
            .iter()
            .rev()
            .take_while(|one| holds(one.at_us))
            .map(|one| one.cost)
            .sum()
    };
    match algorithm {
        Algorithm::SlidingLog | Algorithm::SlidingWindow { .. } => {
            units_while(&|at_us| at_us + per_us > newest.at_us) <= requests
        }
        Algorithm::FixedWindow { offset_us } => {
            let number = |at_us: u64| (at_us - offset_us) / per_us;
            units_while(&|at_us| number(at_us) == number(newest.at_us)) <= requests
        }
        Algorithm::CalendarWindow { calendar } => {
            let period = calendar.period_at(newest.at_us);
            units_while(&|at_us| period.contains(at_us)) <= requests
        }
        Algorithm::TokenBucket { burst, warm_up_us } => {
            is_within_refill(admitted, u128::from(burst) * u128::from(per_us))
                && (warm_up_us == 0 || is_within_warm_up(admitted))
        }
        Algorithm::LeakyBucket { max_delay_us } => {
            let waits = u128::from(max_delay_us) * u128::from(requests);
            newest.delay_us <= max_delay_us
                && is_within_refill(admitted, u128::from(per_us) + waits)
                && before
                    .last()
                    .is_none_or(|last| is_spaced_after(last, newest))
        }
        Algorithm::Concurrency { .. } | Algorithm::Block => {
            unreachable!("nothing comes back with time")
        }
    }
}

/// Whether every interval up to the newest admission has at most `most` units plus the refill, in
/// units of 1 / per. After a change, the refill uses the faster of the two rates.
fn is_within_refill(admitted: &[Admission], most: u128) -> bool {
    let newest = admitted.last().expect("the list is not empty");
    let (mut units, mut rate) = (0, 0);
    admitted.iter().rev().all(|one| {
        units += u128::from(one.cost);
        rate = rate.max(one.limit.requests);
        let flown = u128::from(rate) * u128::from(newest.at_us - one.at_us);
        units * u128::from(newest.limit.per_us) <= most + flown
    })
}

/// Whether the units since a cold start are at most a third of the burst plus the refill. The
/// refill rate grows evenly from a third. Checked until the limit changes.
fn is_within_warm_up(admitted: &[Admission]) -> bool {
    let newest = admitted.last().expect("the list is not empty");
    let Limit {
        requests, per_us, ..
    } = newest.limit;
    let Algorithm::TokenBucket { warm_up_us, .. } = newest.limit.algorithm else {
        unreachable!("it warms up")
    };
    let mut units = 0;
    for (n, one) in admitted.iter().enumerate().rev() {
        if one.version != newest.version {
            return true;
        }
        units += u128::from(one.cost);
        let before = n.checked_sub(1).map(|before| admitted[before].at_us);
        if before.is_none_or(|before_us| before_us + warm_up_us <= one.at_us) {
            let (since, all) = (u128::from(newest.at_us - one.at_us), u128::from(warm_up_us));
            // The integral of the rate, in microseconds at the full rate, rounded up.
            let warming = since.min(all);
            let worth = (warming * (all + warming)).div_ceil(3 * all) + (since - warming);
            let most = u128::from(newest.limit.cold_capacity()) * u128::from(per_us);
            return units * u128::from(per_us) <= most + worth * u128::from(requests);
        }
    }
    true
}

/// Whether a request is spaced behind the one before by its cost. Delays are whole microseconds, so
/// one may round up and the next not. After a change, queued requests keep their turns.
fn is_spaced_after(last: &Admission, next: &Admission) -> bool {
    let apart_us = next.cost * next.limit.per_us / next.limit.requests;
    last.version != next.version
        || next.at_us + next.delay_us >= last.at_us + last.delay_us + apart_us
}

fn check_guarantee(algorithm: &str) {
    let seed = test_seed();
    for (mut tested_store, schedules) in StoreUnderTest::both_stores()
        .into_iter()
        .zip(SCHEDULES_PER_STORE)
    {
        let mut rng = Rng::with_seed(seed);
        for number in 0..schedules {
            tested_store.reset();
            let (limit, key) = (
                draw_limit_for(algorithm, &mut rng),
                KeyBuilder::new("p").finish(),
            );
            let clock_us = START_US + rng.u64(..limit.per_us);
            let run = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                let (tested_store, rng) = (&mut tested_store, &mut rng);
                let mut schedule = ClientSchedule {
                    tested_store,
                    rng,
                    limit,
                    version: 0,
                    clock_us,
                    retry_at_us: None,
                    admitted: Vec::new(),
                };
                (0..STEPS_PER_SCHEDULE).for_each(|_| schedule.run_step(&key));
                schedule.admitted.len()
            }));
            let admitted = run.unwrap_or(0);
            assert!(
                admitted > 0,
                "TIDEGATE_TEST_SEED={seed}, schedule {number} in {tested_store:?}: {limit:?}"
            );
        }
    }
}

macro_rules! guarantee_tests {
    ($($name:ident: $algorithm:literal)*) => { $(
        #[test]
        fn $name() {
            check_guarantee($algorithm);
        }
    )* };
}

guarantee_tests! {
    sliding_log_never_exceeds_the_limit_in_any_window: "sliding_log"
    trap_9_sliding_window_never_exceeds_the_limit_in_any_window: "sliding_window"
    fixed_window_never_exceeds_the_limit_in_a_clock_window: "fixed_window"
    token_bucket_never_exceeds_its_burst_plus_refill: "token_bucket"
    a_cold_token_bucket_admits_a_third_of_its_burst_plus_warm_up_refill: "warm_up"
    leaky_bucket_releases_requests_evenly: "leaky_bucket"
}

/// Requests start, end, and disappear with their crashed sidecar. Live sidecars renew in time, and
/// the limit changes meanwhile.
#[test]
fn concurrency_never_exceeds_the_limit_and_loses_no_slot() {
    let seed = test_seed();
    for (mut tested_store, schedules) in StoreUnderTest::both_stores().into_iter().zip([200, 20]) {
        let mut rng = Rng::with_seed(seed);
        for number in 0..schedules {
            tested_store.reset();
            let key = KeyBuilder::new("p").finish();
            let algorithm = Algorithm::Concurrency { max_duration_us: 0 };
            let mut limit = make_limit(rng.u64(1..=8), rng.u64(1_000..100_000), algorithm);
            let (mut now_us, mut slot) = (START_US, 0);
            // Each slot with the end of its lease: slots of live sidecars, and slots of crashed
            // ones.
            let (mut alive, mut lost) = (Vec::<(u128, u64)>::new(), Vec::<u64>::new());
            for step in 0..200 {
                now_us += rng.u64(..limit.per_us / 3);
                for (slot, ends_us) in &mut alive {
                    tested_store.apply_amendment(
                        &limit,
                        &key,
                        Amendment::Renew { slot: *slot },
                        now_us,
                    );
                    *ends_us = now_us + limit.per_us;
                }
                lost.retain(|ends_us| *ends_us > now_us);
                match rng.u8(..8) {
                    0 if !alive.is_empty() => {
                        lost.push(alive.swap_remove(rng.usize(..alive.len())).1);
                    }
                    1..3 if !alive.is_empty() => {
                        let (slot, _) = alive.swap_remove(rng.usize(..alive.len()));
                        tested_store.apply_amendment(
                            &limit,
                            &key,
                            Amendment::Release { slot },
                            now_us,
                        );
                    }
                    3 => limit.requests = rng.u64(1..=8),
                    _ => {}
                }
                slot += 1;
                let charge = PolicyCharges {
                    slot_id: slot,
                    ..PolicyCharges::new(&limit, &key, 1)
                };
                let free = ((alive.len() + lost.len()) as u64) < limit.requests;
                let admitted = tested_store
                    .decide(std::slice::from_ref(&charge), now_us)
                    .admitted;
                assert_eq!(
                    admitted,
                    free,
                    "TIDEGATE_TEST_SEED={seed}, schedule {number}, step {step} in {tested_store:?}: \
                     {} in flight, {} lost, of {}",
                    alive.len(),
                    lost.len(),
                    limit.requests
                );
                if admitted {
                    alive.push((slot, now_us + limit.per_us));
                }
            }
        }
    }
}

/// A client that takes every available unit gets the whole limit in any interval of a period plus
/// one sub-window. In the long run it gets at least `buckets` / (`buckets` + 1) of the limit,
/// wherever in a sub-window its first requests fell.
#[test]
fn a_sliding_window_delays_units_by_at_most_one_sub_window() {
    let seed = test_seed();
    let mut rng = Rng::with_seed(seed);
    let mut tested_store = StoreUnderTest::memory();
    for number in 0..200 {
        tested_store.reset();
        let (limit, key) = (
            draw_limit_for("sliding_window", &mut rng),
            KeyBuilder::new("p").finish(),
        );
        let Algorithm::SlidingWindow { buckets } = limit.algorithm else {
            panic!("{limit:?}")
        };
        let limit = Limit {
            requests: limit.requests.min(300),
            ..limit
        };
        let charge = PolicyCharges::new(&limit, &key, 1);
        let begin_us = START_US + rng.u64(..limit.per_us);
        let (mut now_us, mut times) = (begin_us, Vec::new());
        // The client uses the first period unevenly, and the others as early as possible.
        while now_us < begin_us + 12 * limit.per_us {
            let decision = tested_store.decide(std::slice::from_ref(&charge), now_us);
            match admissible_at_us(std::slice::from_ref(&charge), &decision) {
                Some(until_us) => now_us = until_us,
                None => times.push(now_us),
            }
            if now_us < begin_us + limit.per_us {
                now_us += rng.u64(..=2 * limit.per_us / limit.requests);
            }
        }
        let items = times.into_iter();
        let saturated: Vec<u64> = items.filter(|at| *at >= begin_us + limit.per_us).collect();
        let stretch_us = limit.per_us + limit.sub_window_width_us() - 1;
        let many = usize::try_from(limit.requests).unwrap();
        let what = format!("TIDEGATE_TEST_SEED={seed}, run {number}: {limit:?}");
        for (first, beyond) in saturated
            .iter()
            .zip(&saturated[many.min(saturated.len())..])
        {
            assert!(
                beyond - first <= stretch_us,
                "{what}: the same unit returned after {}",
                beyond - first
            );
        }
        let got = saturated.len() as u64 * (buckets + 1);
        assert!(got >= limit.requests * 10 * buckets, "{what}: {got}");
    }
}
