//! Renewals and releases of slots reach Redis in time: behind settlements that saturate Redis, on a
//! slow network, with many slots, and after failed calls.

use crate::support::prelude::*;
use redis::aio::MultiplexedConnection;
use smallvec::smallvec;
use tidegate::clock::Clock;
use tidegate::policy::SlotRelease;
use tidegate::store::{ConcurrencySlotGuard, ConcurrencySlots, MemorySettings, MemoryStore};
use tokio::time::{Instant, MissedTickBehavior, interval};

/// The reply delay of a Redis server in another data center.
const ROUND_TRIP: Duration = Duration::from_millis(5);

const HASH_SLOT_COUNT: usize = 5;
const SLOT_TTL: Duration = Duration::from_secs(1);
/// Longer than a slot without renewal.
const JOB_TIME: Duration = Duration::from_millis(2_500);

/// Jobs with five slots, beside requests with settlements that rewrite a long log.
const JOBS_AND_SETTLEMENTS: &str = r#"
defaults = { algorithm = "sliding_log" }
[[policy]]
name = "jobs"
match = { path = "/jobs" }
limit = { requests = 5, algorithm = "concurrency", lease_ttl = "1s" }
[[policy]]
name = "spend"
match = { path = "/spend" }
limit = { requests = 100000000, per = "1m", unit = "tokens" }
cost = { estimate = 100, actual = "response_header:x-units" }
"#;

/// Jobs in flight at the app.
#[derive(Debug, Default)]
struct JobCounter {
    current: AtomicUsize,
    maximum: AtomicUsize,
}

/// Counts one job until dropped.
struct JobGuard(Arc<JobCounter>);

impl JobGuard {
    fn new(jobs: &Arc<JobCounter>) -> Self {
        let current = jobs.current.fetch_add(1, Ordering::Relaxed) + 1;
        jobs.maximum.fetch_max(current, Ordering::Relaxed);
        Self(Arc::clone(jobs))
    }
}

impl Drop for JobGuard {
    fn drop(&mut self) {
        self.0.current.fetch_sub(1, Ordering::Relaxed);
    }
}

async fn run_app(request: Request<Incoming>, jobs: Arc<JobCounter>) -> UpstreamResponse {
    let mut response = Response::new(full_body("done"));
    if request.uri().path() == "/jobs" {
        let _guard = JobGuard::new(&jobs);
        sleep(JOB_TIME).await;
    } else {
        set_header(&mut response, "x-units", "60");
    }
    response
}

/// Requests `path` over one connection until `end`, each `pause` after the one before. Returns the
/// number of requests that passed.
async fn request_until(
    address: SocketAddr,
    path: &'static str,
    pause: Duration,
    end: Instant,
) -> usize {
    let mut client = RawClient::connect(address).await;
    let mut ticks = interval(pause);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut passed = 0;
    while Instant::now() < end {
        ticks.tick().await;
        client
            .send(format!("GET {path} HTTP/1.1\r\nHost: a\r\n\r\n"))
            .await;
        passed += usize::from(client.read_response().await.status == 200);
    }
    passed
}

/// Renewals that wait behind settlements would let 12 jobs run.
#[tokio::test]
async fn five_slots_hold_at_the_app_beside_many_settlements() {
    let (server, jobs) = (RedisServer::start(), Arc::<JobCounter>::default());
    let relay = TcpRelay::start(server.port()).await;
    relay.delay_replies(ROUND_TRIP);
    let counter = Arc::clone(&jobs);
    let upstream = Upstream::with_handler(move |request| run_app(request, Arc::clone(&counter)));
    let upstream = upstream.await;
    let url = format!("redis://127.0.0.1:{}/0", relay.port);
    let store =
        format!("store = {{ kind = 'redis', redis = {{ url = '{url}', timeout = '2s' }} }}");
    let config = format!("admin.address = '127.0.0.1:0'\n{store}\n{JOBS_AND_SETTLEMENTS}");
    let proxy = Proxy::start_connected(&config, upstream.address).await;

    let end = Instant::now() + Duration::from_secs(8);
    let settled =
        (0..64).map(|_| request_until(proxy.address, "/spend", Duration::from_millis(40), end));
    let retries = (0..3 * HASH_SLOT_COUNT)
        .map(|_| request_until(proxy.address, "/jobs", Duration::from_millis(20), end));
    let (settled, passed) = tokio::join!(join_all(settled), join_all(retries));
    let (settled, passed) = (settled.iter().sum::<usize>(), passed.iter().sum::<usize>());

    let maximum = jobs.maximum.load(Ordering::Relaxed);
    assert_eq!(maximum, HASH_SLOT_COUNT, "jobs in flight at the app");
    // Eight seconds have time for four rounds of five jobs.
    assert!(
        passed > 2 * HASH_SLOT_COUNT,
        "{passed} jobs: slots return late"
    );
    assert!(settled > 2_000, "{settled} settlements are no load");
    let lost = "tidegate_settlements_lost_total";
    assert_eq!(proxy.read_metric(lost).await, 0.0, "settlements are lost");
}

/// Slots in Redis behind a relay, seen by a direct connection.
struct SlotFixture {
    _server: RedisServer,
    relay: TcpRelay,
    store: Store,
    slots: Arc<ConcurrencySlots>,
    direct: MultiplexedConnection,
    limit: Limit,
    key: Key,
}

impl SlotFixture {
    async fn start(requests: u64, ttl: Duration) -> Self {
        let server = RedisServer::start();
        let relay = TcpRelay::start(server.port()).await;
        let (_shared, redis) = connect_redis(RedisSettings {
            timeout: 2 * SLOT_TTL,
            ..redis_settings(relay.port)
        })
        .await;
        let store = Store::from_redis(redis);
        let limit = make_limit(
            requests,
            u64::try_from(ttl.as_micros()).unwrap(),
            Algorithm::Concurrency { max_duration_us: 0 },
        );
        Self {
            direct: server.connection().await,
            _server: server,
            relay,
            slots: ConcurrencySlots::new(store.clone()),
            store,
            limit,
            key: KeyBuilder::new("jobs").finish(),
        }
    }

    async fn take_slot(&self) -> Option<ConcurrencySlotGuard> {
        let counter = (self.limit, self.key.clone());
        let guard = self.slots.create_slot_guard(smallvec![counter]);
        let charge = PolicyCharges {
            slot_id: guard.slot_id,
            ..PolicyCharges::new(&self.limit, &self.key, 1)
        };
        let decision = self.store.decide(&[charge]).await.unwrap();
        decision.admitted.then_some(guard)
    }

    /// Slots that have not expired, and the time until the first of them does.
    async fn find_slots(&self) -> (usize, Duration) {
        let script = r"
            local now, key = redis.call('TIME'), redis.call('KEYS', '*:concurrency:*')[1]
            now = now[1] * 1000000 + now[2]
            if not key then return { 0, 0 } end
            local live = string.format('(%d', now)
            local first = redis.call('ZRANGEBYSCORE', key, live, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
            return { redis.call('ZCOUNT', key, live, '+inf'), first[2] and first[2] - now or 0 }";
        let (count, left_us): (usize, u64) = redis::cmd("EVAL")
            .arg(script)
            .arg(0)
            .query_async(&mut self.direct.clone())
            .await
            .unwrap();
        (count, Duration::from_micros(left_us))
    }

    /// Returns the time until this many slots are in use.
    async fn wait_for_count(&self, wanted: usize) -> Duration {
        let start = Instant::now();
        let reached = timeout(2 * TEST_TIMEOUT, async {
            while self.find_slots().await.0 != wanted {
                sleep(Duration::from_millis(1)).await;
            }
        });
        reached.await.expect("the slots are released");
        start.elapsed()
    }

    /// Breaks the connection to Redis for a time.
    async fn disconnect_for(&self, time: Duration) {
        self.relay.refuse_connections();
        let kill: redis::RedisResult<i64> = redis::cmd("CLIENT")
            .arg(&["KILL", "TYPE", "normal", "SKIPME", "yes"])
            .query_async(&mut self.direct.clone())
            .await;
        kill.unwrap();
        sleep(time).await;
        self.relay.forward_at_once();
    }

    /// Settles charges of long logs until the future is dropped: Redis is always busy.
    async fn saturate_redis(&self) {
        let limit = sliding_log(100_000_000, 3_600_000_000);
        let key = KeyBuilder::new("spend").finish();
        let mut at_us = 0;
        for _ in 0..300 {
            let decision = self
                .store
                .decide(&[PolicyCharges::new(&limit, &key, 100)])
                .await;
            at_us = decision.unwrap().now_us;
        }
        let credit = Settlement {
            limit: &limit,
            key: &key,
            amendment: Amendment::Credit { units: 1, at_us },
        };
        loop {
            drop(self.store.apply_settlements(&[credit; 1_600]).await);
        }
    }
}

#[tokio::test]
async fn slots_are_renewed_and_released_in_time_behind_settlements_that_saturate_redis() {
    let slots = SlotFixture::start(5, SLOT_TTL).await;
    slots.relay.delay_replies(ROUND_TRIP);
    let observe = async {
        let mut held = Vec::new();
        for _ in 0..5 {
            held.push(slots.take_slot().await.unwrap());
        }
        let end = Instant::now() + 4 * SLOT_TTL;
        let (mut latest, mut releases) = (SLOT_TTL, Vec::new());
        while Instant::now() < end {
            let (count, left) = slots.find_slots().await;
            assert_eq!(count, 5, "no slot expires");
            latest = latest.min(left);
            drop(held.remove(0));
            let released_at = Instant::now();
            let next = timeout(SLOT_TTL, async {
                loop {
                    if let Some(guard) = slots.take_slot().await {
                        return guard;
                    }
                }
            });
            held.push(next.await.expect("a released slot is usable again"));
            releases.push(released_at.elapsed());
            sleep(Duration::from_millis(50)).await;
        }
        releases.sort_unstable();
        let median = releases[releases.len() / 2];
        assert!(latest > SLOT_TTL / 3, "renewed {latest:?} before the end");
        assert!(median < 20 * ROUND_TRIP, "reused after {median:?}");
    };
    tokio::select! {
        () = observe => {}
        () = slots.saturate_redis() => {}
    }
}

/// The renewals take several batches. A release does not wait for all of them.
#[tokio::test]
async fn a_slot_is_released_and_ten_thousand_are_renewed_in_time() {
    const HELD: usize = 10_000;
    let slots = SlotFixture::start(20_000, 3 * SLOT_TTL).await;
    let mut held = Vec::new();
    while held.len() < HELD {
        let taken = join_all((0..500).map(|_| slots.take_slot())).await;
        held.extend(taken.into_iter().flatten());
    }
    slots.relay.delay_replies(ROUND_TRIP);
    let end = Instant::now() + 5 * SLOT_TTL;
    let (mut earliest, mut slowest) = (3 * SLOT_TTL, Duration::ZERO);
    while Instant::now() < end {
        let (count, left) = slots.find_slots().await;
        assert_eq!(count, held.len(), "no slot expires");
        earliest = earliest.min(left);
        drop(held.pop());
        slowest = slowest.max(slots.wait_for_count(held.len()).await);
        sleep(Duration::from_millis(20)).await;
    }
    assert!(
        earliest > SLOT_TTL / 2,
        "renewed {earliest:?} before the end"
    );
    assert!(slowest < 60 * ROUND_TRIP, "released after {slowest:?}");
}

#[tokio::test]
async fn failed_renewals_are_repeated_long_before_a_slot_expires() {
    let ttl = 3 * SLOT_TTL;
    let slots = SlotFixture::start(5, ttl).await;
    let taken_at = Instant::now();
    let held = slots.take_slot().await.unwrap();
    // Both regular renewals of the first TTL fail.
    for third in [1, 2] {
        let renewal_at = taken_at + ttl * third / 3;
        tokio::time::sleep_until(renewal_at - Duration::from_millis(100)).await;
        slots.disconnect_for(Duration::from_millis(200)).await;
    }
    tokio::time::sleep_until(taken_at + ttl * 9 / 10).await;
    let (count, left) = slots.find_slots().await;
    assert_eq!(count, 1);
    assert!(left > ttl / 2, "only {left:?} left");
    drop(held);
}

#[tokio::test]
async fn a_failed_release_is_repeated() {
    let slots = SlotFixture::start(5, TEST_TIMEOUT).await;
    let held = slots.take_slot().await.unwrap();
    let release = async {
        sleep(Duration::from_millis(50)).await;
        drop(held);
        slots.wait_for_count(0).await
    };
    let ((), took) = tokio::join!(slots.disconnect_for(Duration::from_millis(200)), release);
    assert!(took < TEST_TIMEOUT / 4, "released after {took:?}");
}

/// Broken uploads to many keys hold a bounded number of slots, although each key has its own limit.
#[tokio::test(start_paused = true)]
async fn at_most_ten_thousand_slots_outlive_their_exchange() {
    let bounds = MemorySettings {
        max_keys: 100,
        max_bytes: 64 << 20,
    };
    let store = Store::Memory(Arc::new(MemoryStore::new(bounds, Clock::system())));
    let slots = ConcurrencySlots::new(store.clone());
    let limit = make_limit(
        20_000,
        3_600_000_000,
        Algorithm::Concurrency { max_duration_us: 0 },
    );
    let key = KeyBuilder::new("jobs").finish();
    let count_taken = async || {
        let read = store
            .decide(&[PolicyCharges::new(&limit, &key, 0)])
            .await
            .unwrap();
        limit.requests - read.statuses().next().unwrap().remaining
    };
    // A slot without an exchange has ended before the second round.
    for round in 0..2 {
        for _ in 0..10_005 {
            let mut guard = slots.create_slot_guard(smallvec![(limit, key.clone())]);
            let charge = PolicyCharges {
                slot_id: guard.slot_id,
                ..PolicyCharges::new(&limit, &key, 1)
            };
            assert!(store.decide(&[charge]).await.unwrap().admitted);
            let ends_at = Instant::now() + Duration::from_secs(60);
            (guard.request_ends_at, guard.release) = (Some(ends_at), SlotRelease::Upstream);
            guard.keep_without_exchange();
        }
        assert_eq!(count_taken().await, 10_000, "round {round}");
        sleep(Duration::from_secs(61)).await;
        assert_eq!(count_taken().await, 0, "round {round}");
    }
}
