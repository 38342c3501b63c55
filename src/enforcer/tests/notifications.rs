//! Thresholds are notified once per key, limit, threshold and period.

use super::*;
use crate::policy::Threshold;
use crate::store::Store;
use proptest::prelude::*;
use std::collections::BTreeSet;

const SECOND_US: u64 = 1_000_000;

fn make_notifying_policy(requests: u64, algorithm: Algorithm, notify: &[f64]) -> Policy {
    let mut policy = make_policy_by_user("p", requests);
    let quota = quota_mut(&mut policy);
    quota.limits[0].limit.algorithm = algorithm;
    let notify = notify.iter().map(|one| Threshold::from_fraction(*one));
    quota.notify = notify.collect::<Option<_>>().unwrap();
    policy
}

impl EnforcerFixture {
    /// Sends one request and returns the thresholds in its response.
    async fn notify(&self, user: &str) -> Vec<String> {
        let mut headers = HeaderMap::new();
        headers.insert("x-user", user.parse().unwrap());
        let paths = PathInterpretations::parse("/", &PATH_SETTINGS).unwrap();
        let facts = Facts {
            paths: &paths,
            headers: &headers,
            ..Facts::placeholder()
        };
        let policies = self.enforcer.policy_snapshot();
        let verdict = self
            .enforcer
            .decide_request(&policies, &facts, Instant::now());
        let verdict = verdict.await;
        let reached = verdict.reached_thresholds.iter();
        reached
            .map(|(named, threshold)| format!("{} {threshold}", named.name))
            .collect()
    }

    /// The thresholds in the responses to this many requests.
    async fn notify_times(&self, user: &str, times: usize) -> Vec<(usize, String)> {
        let mut notified = Vec::new();
        for nth in 1..=times {
            let reached = self.notify(user).await;
            notified.extend(reached.into_iter().map(|one| (nth, one)));
        }
        notified
    }

    async fn advance(&self, us: u64) {
        self.manual_clock.advance_us(us);
        tokio::time::advance(Duration::from_micros(us)).await;
    }

    fn count_notifications(&self, threshold: &str) -> u64 {
        let counts = self.enforcer.metrics.notifications.counts();
        counts
            .iter()
            .filter(|([policy, limit, own], _)| {
                (&**policy, &**limit, &**own) == ("p", "p", threshold)
            })
            .map(|(_, count)| *count)
            .sum()
    }
}

fn at(nth: usize, threshold: &str) -> (usize, String) {
    (nth, format!("p {threshold}"))
}

#[tokio::test(start_paused = true)]
async fn each_threshold_is_notified_once_per_key_and_period() {
    let bucket = Algorithm::TokenBucket {
        burst: 10,
        warm_up_us: 0,
    };
    for algorithm in [
        Algorithm::SlidingLog,
        Algorithm::SlidingWindow { buckets: 10 },
        Algorithm::FixedWindow { offset_us: 0 },
        bucket,
    ] {
        let policy = make_notifying_policy(10, algorithm, &[0.8, 1.0]);
        let fixture = EnforcerFixture::new(vec![policy]);
        for round in 1..=2 {
            for user in ["ann", "bob"] {
                let expected = [at(8, "0.8"), at(10, "1.0")];
                let notified = fixture.notify_times(user, 13).await;
                assert_eq!(notified, expected, "{algorithm:?} {round} {user}");
            }
            for threshold in ["0.8", "1.0"] {
                assert_eq!(fixture.count_notifications(threshold), 2 * round);
            }
            // The sliding window frees units up to a sub-window late.
            fixture.advance(11 * SECOND_US).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_level_that_stays_above_a_threshold_is_notified_once_per_period() {
    let policy = make_notifying_policy(10, Algorithm::SlidingLog, &[0.8]);
    let fixture = EnforcerFixture::new(vec![policy]);
    let mut notified = 0;
    for _ in 0..40 {
        notified += fixture.notify("ann").await.len();
        fixture.advance(SECOND_US).await;
    }
    assert_eq!(notified, 4, "at 7, 17, 27 and 37 s");
}

#[tokio::test(start_paused = true)]
async fn a_refusal_reaches_every_threshold_unless_the_cost_never_fits() {
    let with_cost = |cost| {
        let algorithm = Algorithm::FixedWindow { offset_us: 0 };
        let mut policy = make_notifying_policy(10, algorithm, &[0.9, 1.0]);
        quota_mut(&mut policy).cost = CostSource::Fixed(cost);
        EnforcerFixture::new(vec![policy])
    };
    let notified = with_cost(4).notify_times("ann", 4).await;
    assert_eq!(notified, [at(3, "0.9"), at(3, "1.0")]);
    assert_eq!(with_cost(11).notify_times("ann", 4).await, []);
}

#[tokio::test(start_paused = true)]
async fn hidden_and_shadow_policies_are_counted_and_not_reported() {
    let visible = make_notifying_policy(2, Algorithm::SlidingLog, &[1.0]);
    let mut hidden = visible.clone();
    quota_mut(&mut hidden).hide_limits();
    let in_mode = |mode| Policy {
        mode,
        ..visible.clone()
    };
    for (policy, is_reported) in [
        (visible.clone(), true),
        (in_mode(PolicyMode::Mark), true),
        (in_mode(PolicyMode::Shadow), false),
        (hidden, false),
    ] {
        let fixture = EnforcerFixture::new(vec![policy]);
        assert_eq!(fixture.count_notifications("1.0"), 0, "declared");
        let notified = fixture.notify_times("ann", 4).await;
        assert_eq!(notified.len(), usize::from(is_reported));
        assert_eq!(fixture.count_notifications("1.0"), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn nothing_is_notified_without_the_store_or_for_a_key_without_units() {
    let policy = make_notifying_policy(1, Algorithm::SlidingLog, &[0.5, 1.0]);
    let mut local = policy.clone();
    local.on_store_failure = OnStoreFailure::Local;
    let mut fixture = EnforcerFixture::new(vec![local]);
    fixture.enforcer.store =
        Store::from_redis(RedisStore::start(&SharedRedisState::new(UNREACHABLE_REDIS)));
    assert_eq!(fixture.notify_times("ann", 3).await, []);
    let zero = make_notifying_policy(0, Algorithm::SlidingLog, &[0.5]);
    let fixture = EnforcerFixture::new(vec![zero]);
    assert_eq!(fixture.notify_times("ann", 3).await, []);
    let mut dynamic = policy;
    quota_mut(&mut dynamic).is_dynamic = true;
    let mut key = quota_mut(&mut dynamic).key.start_key("p");
    key.push_key_value(Some(b"ann"));
    let fixture = EnforcerFixture::new(vec![dynamic]);
    let Store::Memory(memory) = &fixture.enforcer.store else {
        panic!("no memory store");
    };
    memory.set_override(StoredOverride {
        key: key.finish(),
        rule: KeyOverride::Unlimited,
        expires_at_ms: None,
        author: None,
        note: None,
    });
    assert_eq!(fixture.notify_times("ann", 3).await, []);
    assert_eq!(fixture.notify_times("bob", 3).await.len(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_leaves_does_not_take_the_notification_with_it() {
    let policy = make_notifying_policy(1, Algorithm::SlidingLog, &[1.0]);
    let fixture = EnforcerFixture::new(vec![policy]);
    {
        let request = fixture.notify("ann");
        tokio::pin!(request);
        assert!(futures_util::poll!(&mut request).is_pending());
    }
    tokio::task::yield_now().await;
    assert_eq!(fixture.count_notifications("1.0"), 1);
}

/// The window ends between the decision about a request and the question whether it is the first.
#[tokio::test(start_paused = true)]
async fn a_question_after_the_end_of_a_window_is_about_that_window() {
    let policy = make_notifying_policy(1, Algorithm::FixedWindow { offset_us: 0 }, &[1.0]);
    let one = EnforcerFixture::new(vec![policy.clone()]);
    let mut other = EnforcerFixture::new(vec![policy]);
    other.enforcer.store = one.enforcer.store.clone();
    // At the very start of a window.
    assert_eq!(one.notify_times("ann", 1).await, [at(1, "1.0")]);
    for user in ["ann", "bob"] {
        let late = other.notify(user);
        tokio::pin!(late);
        assert!(futures_util::poll!(&mut late).is_pending());
        one.advance(10 * SECOND_US).await;
        let is_first = user == "bob";
        assert_eq!(late.await.len(), usize::from(is_first), "{user}");
        assert_eq!(one.notify_times(user, 2).await, [at(1, "1.0")], "{user}");
        assert_eq!(other.notify_times(user, 2).await, [], "{user}");
    }
}

#[tokio::test(start_paused = true)]
async fn more_thresholds_than_a_worker_remembers_are_notified_once_each() {
    let policy = make_notifying_policy(1, Algorithm::FixedWindow { offset_us: 0 }, &[0.5, 1.0]);
    let mut fixture = EnforcerFixture::new(vec![policy]);
    let bounds = MemorySettings {
        max_keys: 100_000,
        max_bytes: 1 << 30,
    };
    let (clock, _) = Clock::manual(1_700_000_000_000_000);
    fixture.enforcer.store = Store::Memory(Arc::new(MemoryStore::new(bounds, clock)));
    for _ in 0..2 {
        for number in 0..5000 {
            fixture.notify(&number.to_string()).await;
        }
    }
    assert_eq!(fixture.count_notifications("0.5"), 5000);
    assert_eq!(fixture.count_notifications("1.0"), 5000);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// One notification for each key, window and threshold that is reached.
    #[test]
    fn notifications_of_windows_equal_those_of_a_naive_model(
        capacity in 1..12_u64,
        costs in 1..4_u64,
        thresholds in prop::collection::btree_set(1..=1000_u32, 1..=4),
        requests in prop::collection::vec((0..3_usize, 0..4_000_000_u64), 1..80),
    ) {
        let fractions: Vec<f64> = thresholds.iter().map(|one| f64::from(*one) / 1000.0).collect();
        let algorithm = Algorithm::FixedWindow { offset_us: 3_000_000 };
        let mut policy = make_notifying_policy(capacity, algorithm, &fractions);
        quota_mut(&mut policy).cost = CostSource::Fixed(costs);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .start_paused(true)
            .build()
            .unwrap();
        runtime.block_on(async {
            let fixture = EnforcerFixture::new(vec![policy]);
            let mut now_us = 1_700_000_000_000_000;
            let mut used: std::collections::BTreeMap<(usize, u64), u64> = Default::default();
            let mut sent = BTreeSet::new();
            for (user, wait_us) in requests {
                let window = (now_us - 3_000_000) / (10 * SECOND_US);
                let used = used.entry((user, window)).or_default();
                let is_refused = *used + costs > capacity;
                if !is_refused {
                    *used += costs;
                }
                let full = is_refused && costs <= capacity;
                let reached = if full { capacity } else { *used };
                let expected: Vec<String> = thresholds
                    .iter()
                    .filter(|one| reached * 1000 >= u64::from(**one) * capacity)
                    .filter(|one| sent.insert((user, window, **one)))
                    .map(|one| format!("p {:?}", f64::from(*one) / 1000.0))
                    .collect();
                assert_eq!(fixture.notify(&user.to_string()).await, expected);
                fixture.advance(wait_us).await;
                now_us += wait_us;
            }
        });
    }
}
