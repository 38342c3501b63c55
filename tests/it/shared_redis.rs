//! Several proxies share one Redis: the limit holds for all of them together and is used up.
//!
//! `MONITOR` shows every charge that the script writes, with the decision's time and Redis's own
//! time. So delays between a decision and its response do not affect the result.

use crate::support::prelude::*;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::time::Instant;

const CLIENT_COUNT: usize = 64;
const LIMIT_UNITS: usize = 100;

/// The run lasts this many periods of the limit.
const PERIODS_PER_RUN: u64 = 6;

/// Each window of a log begins with the first request after the last one, a little late on a busy
/// machine. This is the total delay that the test accepts.
const ALLOWED_DRIFT: Duration = Duration::from_millis(700);

/// How long an impatient client waits before it retries. Other clients wait for the reported time.
const IMPATIENT_DELAY: Duration = Duration::from_millis(20);

/// One write of the script: Redis's time of execution and the arguments.
#[derive(Clone, Debug)]
struct ScriptWrite {
    at_us: u64,
    arguments: Vec<String>,
}

/// The result of a run.
struct SharedLimitRun {
    per_us: u64,
    /// Number of 200 responses.
    admitted: usize,
    /// One entry per charged unit, in order, with the write that charged it.
    charges: Vec<ScriptWrite>,
    /// The window and the units counted in it so far, after the write of each charge.
    totals: Vec<(u64, u64)>,
    /// Rejections by Redis and by the proxies' deny caches.
    refused: usize,
}

impl SharedLimitRun {
    /// The limit's period: a sixth of `TIDEGATE_TEST_SECONDS`, 6 by default.
    fn period() -> Duration {
        let seconds =
            std::env::var("TIDEGATE_TEST_SECONDS").map_or(6, |seconds| seconds.parse().unwrap());
        Duration::from_secs(seconds) / u32::try_from(PERIODS_PER_RUN).unwrap()
    }

    /// Runs for some periods. `total`
    /// extracts from a write its window and the units counted in it so far.
    async fn execute(
        algorithm: &str,
        writes: &'static [&'static str],
        mut total: impl FnMut(&ScriptWrite) -> (u64, u64),
    ) -> Self {
        let per = Self::period();
        let length = per * u32::try_from(PERIODS_PER_RUN).unwrap();
        let (server, upstream) = (RedisServer::start(), Upstream::echo().await);
        let config = format!(
            r#"
store = {{ kind = "redis", redis = {{ url = "redis://127.0.0.1:{}/0", key_prefix = "shop", timeout = "5s" }} }}
log = {{ access = "off" }}
[[policy]]
name = "hot"
limit = {{ requests = {LIMIT_UNITS}, per = "{}ms", algorithm = "{algorithm}" }}
on_store_failure = "closed"
"#,
            server.port(),
            per.as_millis(),
        );
        let proxies = [
            Proxy::start(&config, upstream.address).await,
            Proxy::start(&config, upstream.address).await,
        ];
        let monitor = MonitorRecorder::start(&server, writes).await;
        let until = Instant::now() + length + ALLOWED_DRIFT;
        let clients: Vec<_> = (0..CLIENT_COUNT)
            .map(|n| {
                let patient = n % 4 < 2;
                tokio::spawn(send_requests_until(proxies[n % 2].address, patient, until))
            })
            .collect();
        let (mut admitted, mut refused) = (0, 0);
        for client in clients {
            let (yes, no) = client.await.unwrap();
            admitted += yes;
            refused += no;
        }
        assert_eq!(
            upstream.requests().len(),
            admitted,
            "only admitted requests must reach the upstream"
        );
        let (mut charges, mut totals, mut before) = (Vec::new(), Vec::new(), (0, 0));
        for write in monitor.stop(&server).await {
            let now = total(&write);
            // Requests decided together are charged by one write.
            let units = now.1 - if now.0 == before.0 { before.1 } else { 0 };
            charges.extend((0..units).map(|_| write.clone()));
            totals.extend((0..units).map(|_| now));
            before = now;
        }
        assert_eq!(
            charges.len(),
            admitted,
            "every admitted request must be charged, and no other"
        );
        Self {
            per_us: u64::try_from(per.as_micros()).unwrap(),
            admitted,
            charges,
            totals,
            refused,
        }
    }

    fn assert_limit_was_reached(&self) {
        println!(
            "{} of {} requests admitted",
            self.admitted,
            self.admitted + self.refused
        );
        assert!(
            self.refused > CLIENT_COUNT,
            "the load was too low: {} rejections",
            self.refused
        );
    }
}

/// At least 99 % of the possible requests were admitted.
fn assert_used_up(made: usize, possible: usize) {
    println!("{made} of {possible} admitted");
    assert!(made * 100 >= possible * 99, "only {made} of {possible}");
}

/// Checks that Redis's own clock decided.
fn assert_decided_by_redis_clock(decided_us: u64, write: &ScriptWrite) {
    assert!(
        decided_us.abs_diff(write.at_us) < 1_000_000,
        "decided at {decided_us}: {write:?}"
    );
}

#[tokio::test]
async fn a_sliding_log_shared_by_two_proxies_is_exact_and_used_up() {
    // A log that expires while the machine is busy starts with a new sum.
    let mut log = (0, 0);
    let run = SharedLimitRun::execute("sliding_log", &["ZADD"], |write| {
        let sum = write.arguments[3].split(':').next().unwrap();
        let sum: u64 = sum.parse().unwrap();
        log = (log.0 + u64::from(sum < log.1), sum);
        log
    })
    .await;
    let times_us: Vec<u64> = run
        .charges
        .iter()
        .map(|write| write.arguments[2].parse().unwrap())
        .collect();
    for (decided_us, write) in times_us.iter().zip(&run.charges) {
        assert_decided_by_redis_clock(*decided_us, write);
    }
    assert!(times_us.is_sorted());
    for (nth, first_us) in times_us.iter().enumerate() {
        if let Some(beyond_us) = times_us.get(nth + LIMIT_UNITS) {
            let span_us = beyond_us - first_us;
            assert!(
                span_us >= run.per_us,
                "{} requests within {span_us} µs",
                LIMIT_UNITS + 1
            );
        }
    }
    run.assert_limit_was_reached();
    // All windows have begun after all periods but one, and a window is used up at once.
    let by_us = times_us[0]
        + (PERIODS_PER_RUN - 1) * run.per_us
        + u64::try_from(ALLOWED_DRIFT.as_micros()).unwrap();
    let made = times_us.iter().filter(|at_us| **at_us < by_us).count();
    assert_used_up(
        made,
        LIMIT_UNITS * usize::try_from(PERIODS_PER_RUN).unwrap(),
    );
    let last = usize::try_from(PERIODS_PER_RUN - 1).unwrap() * LIMIT_UNITS;
    let late_us = times_us
        .get(last)
        .map(|at_us| at_us - times_us[0] - (PERIODS_PER_RUN - 1) * run.per_us);
    println!("the last window began {late_us:?} µs after the earliest moment");
}

#[tokio::test]
async fn a_fixed_window_shared_by_two_proxies_is_exact_and_used_up() {
    let per_us = SharedLimitRun::period().as_micros() as u64;
    let mut value = (0, 0);
    // A unit beyond the limit, and one of a window that has ended, is taken back or replaced by SET.
    let mut state = |write: &ScriptWrite| -> (u64, u64) {
        let number = write.arguments[2].as_str();
        let number = number.split_once(':').map_or_else(
            || number.parse::<u64>().unwrap(),
            |(start_us, used)| start_us.parse::<u64>().unwrap() + used.parse::<u64>().unwrap(),
        );
        let (start_us, used) = value;
        if write.arguments[0] == "SET" {
            value = (number - number % per_us, number % per_us);
        } else if used + number <= LIMIT_UNITS as u64 && write.at_us < start_us + per_us {
            value = (start_us, used + number);
        }
        value
    };
    let run = SharedLimitRun::execute("fixed_window", &["SET", "INCRBY"], &mut state).await;
    let mut windows: Vec<(u64, usize)> = Vec::new();
    for (write, (start_us, used)) in run.charges.iter().zip(&run.totals) {
        let (start_us, used) = (*start_us, *used);
        let used = usize::try_from(used).unwrap();
        assert_eq!(
            start_us % run.per_us,
            0,
            "windows begin at multiples of their length"
        );
        assert!(
            (start_us..start_us + run.per_us + 1000).contains(&write.at_us),
            "{write:?}"
        );
        match windows.last_mut() {
            Some((last_us, count)) if *last_us == start_us => {
                assert!(used >= *count, "the count must not decrease: {write:?}");
                *count = used;
            }
            _ => windows.push((start_us, used)),
        }
        assert!(used <= LIMIT_UNITS, "{write:?}");
    }
    assert!(windows.is_sorted(), "no window must come twice");
    run.assert_limit_was_reached();
    // Only complete windows: the run began within the first and ended within the last.
    let whole = windows
        .get(1..usize::try_from(PERIODS_PER_RUN).unwrap())
        .unwrap();
    assert_used_up(
        whole.iter().map(|(_, count)| count).sum(),
        LIMIT_UNITS * whole.len(),
    );
    let starts = whole
        .windows(2)
        .all(|pair| pair[1].0 - pair[0].0 == run.per_us);
    assert!(starts, "a window was left out: {windows:?}");
}

/// Sends requests on one connection and waits after a rejection. A patient client waits for the
/// reported time. Returns the numbers of admitted and rejected requests.
async fn send_requests_until(address: SocketAddr, patient: bool, until: Instant) -> (usize, usize) {
    let (mut client, mut admitted, mut refused) = (RawClient::connect(address).await, 0, 0);
    while Instant::now() < until {
        let request = client.request("GET / HTTP/1.1\r\nHost: shop.example\r\n\r\n");
        let reply = request.await;
        match reply.status {
            200 => admitted += 1,
            429 => {
                refused += 1;
                let retry_after = Duration::from_micros(reply.retry_after_us());
                sleep(if patient {
                    retry_after
                } else {
                    IMPATIENT_DELAY.min(retry_after)
                })
                .await;
            }
            other => panic!("{other}: {}", reply.text()),
        }
    }
    (admitted, refused)
}

/// Records the writes of scripts with one command.
struct MonitorRecorder(JoinHandle<Vec<ScriptWrite>>);

impl MonitorRecorder {
    const END_MARKER: &str = "monitor-ends";

    async fn start(server: &RedisServer, writes: &'static [&'static str]) -> Self {
        let stream = TcpStream::connect(("127.0.0.1", server.port()))
            .await
            .unwrap();
        let mut stream = BufReader::new(stream);
        stream.write_all(b"MONITOR\r\n").await.unwrap();
        let mut line = String::new();
        in_time(stream.read_line(&mut line)).await.unwrap();
        assert_eq!(line, "+OK\r\n");
        Self(tokio::spawn(async move {
            let (mut kept, mut lines) = (Vec::new(), stream.lines());
            while let Some(line) = lines.next_line().await.unwrap() {
                if line.contains(Self::END_MARKER) {
                    return kept;
                }
                // `+1700000000.123456 [0 lua] "ZADD" "key" …`; writes of probes and instance
                // heartbeats are skipped.
                let Some((stamp, command)) = line[1..].split_once(" [0 lua] ") else {
                    continue;
                };
                let words: Vec<String> = command
                    .split(' ')
                    .map(|word| word.trim_matches('"').to_owned())
                    .collect();
                let is_ours =
                    |key: &String| !key.ends_with("-probe") && !key.contains(":v1:instances");
                if writes.contains(&words[0].as_str()) && words.get(1).is_some_and(is_ours) {
                    kept.push(ScriptWrite {
                        at_us: stamp.replace('.', "").parse().unwrap(),
                        arguments: words,
                    });
                }
            }
            panic!("MONITOR ended early");
        }))
    }

    /// The writes that Redis made before this call.
    async fn stop(self, server: &RedisServer) -> Vec<ScriptWrite> {
        let _: String = server.command(&format!("ECHO {}", Self::END_MARKER)).await;
        timeout(TEST_TIMEOUT, self.0)
            .await
            .expect("MONITOR must show the end marker")
            .unwrap()
    }
}

/// Another instance has charged the second limit since the refusal was cached.
#[tokio::test]
async fn a_cached_refusal_reports_no_more_remaining_units_than_an_earlier_answer() {
    let (redis, upstream) = (RedisServer::start(), Upstream::echo().await);
    let config = format!(
        "{}\nlisten.threads = 1\n[[policy]]\nname = 'narrow'\nmatch = {{ path = '/narrow' }}\nlimit = {{ requests = 1, per = '1h' }}\n[[policy]]\nname = 'wide'\nlimit = {{ requests = 1000, per = '1h' }}\n",
        redis.store_config()
    );
    let here = Proxy::start(&config, upstream.address).await;
    let elsewhere = Proxy::start(&config, upstream.address).await;
    here.wait_for_store().await;
    elsewhere.wait_for_store().await;
    assert_eq!(here.get_statuses("/narrow", 2).await, [200, 429]);
    assert_eq!(elsewhere.get_statuses("/", 5).await, [200; 5]);
    let refused = here.get("/narrow").await;
    assert_eq!(refused.status, 429);
    let series = "tidegate_decision_seconds_count{source=\"deny_cache\"}";
    assert_eq!(here.read_metric(series).await, 1.0, "{}", here.log_text());
    let fields = refused.header("ratelimit").unwrap();
    assert_contains(fields, &["\"narrow\";r=0"]);
    assert_lacks(fields, &["\"wide\";r=999"]);
}
