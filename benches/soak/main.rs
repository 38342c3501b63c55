//! Soak test: half an hour of mixed traffic and faults around two proxies. One serves cleartext in
//! front of an HTTP/1.1 upstream, the other TLS in front of an HTTP/2 upstream. Memory and file
//! descriptors must stay stable, every failure must have a known cause, each proxy's counters must
//! match its clients' counts, and the charges in Redis must match what the app received.
//!
//! Run by `make soak`. `SOAK_MINUTES` (30) is the duration, and `SOAK_SEED` the random seed. The
//! same seed repeats each client's choices and the order of the faults, but not their timing.
//! Requires redis-server.
//!
//! [`ledger`] decides which fault explains a failure: from its start until shortly after its end.
//! [`traffic`] has the expected results of each path.

#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "what is measured goes to stdout, and it stops at any error of its own"
)]

mod accounted_clients;
mod charge_checks;
mod faults;
mod ledger;
mod proxy;
#[path = "../support/mod.rs"]
mod support;
mod tls;
mod traffic;
mod upstream;

use accounted_clients::spawn_accounted_clients;
use charge_checks::ChargeChecker;
use faults::FaultTarget;
use ledger::SoakLedger;
use proxy::ProxyProcess;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use support::RedisServer;
use support::client::{MetricsPage, PROMPT_TIMEOUT, read_env_number};
use tokio::time::sleep;
use upstream::{AppProtocol, AppServer};

/// Tolerated growth between the medians of the second and the last quarter, and the descriptors
/// that may be open at the end.
const RSS_TOLERANCE: GrowthTolerance = GrowthTolerance {
    percent: 5,
    absolute: 4096,
};
const FILES_TOLERANCE: GrowthTolerance = GrowthTolerance {
    percent: 10,
    absolute: 16,
};
const MAX_EXTRA_FILES_AT_REST: u64 = 8;
const PAUSE_CHECK_INTERVAL: Duration = Duration::from_millis(20);
const STALL_CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// A quarter of the Redis timeout.
const STALL_THRESHOLD: Duration = Duration::from_millis(375);

/// State shared by the traffic and the faults of one proxy.
struct SoakContext {
    name: &'static str,
    proxy: SocketAddr,
    tls: Option<tls::TlsConnectors>,
    admin: SocketAddr,
    deadline: Instant,
    ledger: Arc<SoakLedger>,
    /// The accounted clients wait.
    is_paused: AtomicBool,
}

/// One proxy, its environment, and its resource use at the start.
struct ProxyFixture {
    context: Arc<SoakContext>,
    proxy: ProxyProcess,
    upstream: AppServer,
    files_at_start: u64,
}

impl SoakContext {
    fn has_ended(&self) -> bool {
        Instant::now() >= self.deadline
    }

    async fn pause_accounted_clients(&self) {
        self.is_paused.store(true, Ordering::Relaxed);
        // A client may be about to send its next request.
        sleep(PAUSE_CHECK_INTERVAL).await;
        while self.ledger.accounted_in_flight() > 0 {
            sleep(PAUSE_CHECK_INTERVAL).await;
        }
    }

    fn resume_accounted_clients(&self) {
        self.is_paused.store(false, Ordering::Relaxed);
    }

    fn is_paused(&self) -> bool {
        self.is_paused.load(Ordering::Relaxed)
    }

    async fn wait_while_paused(&self) {
        while self.is_paused() && !self.has_ended() {
            sleep(PAUSE_CHECK_INTERVAL).await;
        }
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let minutes: f64 = read_env_number("SOAK_MINUTES").unwrap_or(30.0);
    let seed: u32 = read_env_number("SOAK_SEED").unwrap_or_else(|| fastrand::u32(..));
    println!("SOAK_MINUTES={minutes} SOAK_SEED={seed}");
    let (seed, mut redis) = (u64::from(seed), RedisServer::start());
    let ends = Instant::now() + Duration::from_secs_f64(minutes * 60.0);
    // One proxy in cleartext to HTTP/1.1, one with TLS to HTTP/2. Both use one Redis, with separate
    // counters.
    let mut clear = ProxyFixture::start("clear", false, AppProtocol::Http1, &redis, ends).await;
    let mut tls = ProxyFixture::start("tls", true, AppProtocol::H2c, &redis, ends).await;

    let mut clients = traffic::spawn_clients(&clear.context, seed);
    clients.extend(traffic::spawn_clients(&tls.context, seed + 1000));
    for (context, seed) in [(&clear.context, seed + 2000), (&tls.context, seed + 3000)] {
        clients.extend(spawn_accounted_clients(context, seed));
    }
    let ledgers = [&clear.context, &tls.context].map(|context| Arc::clone(&context.ledger));
    let stall_watch = tokio::spawn(watch_for_stalls(ledgers));
    let (around_clear, samples_clear) = clear.split_for_run();
    let (around_tls, samples_tls) = tls.split_for_run();
    let mut targets = [around_clear, around_tls];
    let faults = faults::run_faults(&mut targets, &mut redis, seed);
    let (samples_clear, samples_tls, ()) = tokio::join!(samples_clear, samples_tls, faults);
    for client in clients {
        client.await.unwrap();
    }
    stall_watch.abort();
    let mut verdicts = Vec::new();
    for (target, samples) in [(clear, samples_clear), (tls, samples_tls)] {
        verdicts.push(target.finish(&samples).await);
    }
    if verdicts.contains(&false) {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    }
}

/// Records stalls of this process: other processes may have stalled at the same time.
async fn watch_for_stalls(ledgers: [Arc<SoakLedger>; 2]) {
    loop {
        let before = Instant::now();
        sleep(STALL_CHECK_INTERVAL).await;
        if before.elapsed() > STALL_CHECK_INTERVAL + STALL_THRESHOLD {
            for ledger in &ledgers {
                ledger.record_stall(before);
            }
        }
    }
}

impl ProxyFixture {
    async fn start(
        name: &'static str,
        by_tls: bool,
        speaks: AppProtocol,
        redis: &RedisServer,
        ends: Instant,
    ) -> Self {
        let ledger = Arc::<SoakLedger>::default();
        let upstream = AppServer::start(speaks, &ledger);
        let proxy = ProxyProcess::start(name, by_tls, &ledger, upstream.url(), redis.port()).await;
        // The first scrape ends before the open descriptors are counted.
        drop(MetricsPage::fetch(proxy.admin).await);
        sleep(Duration::from_secs(1)).await;
        let files_at_start = proxy.open_file_count();
        let (address, admin, tls) = (proxy.address, proxy.admin, proxy.tls.clone());
        let context = Arc::new(SoakContext {
            name,
            proxy: address,
            tls,
            admin,
            deadline: ends,
            ledger,
            is_paused: AtomicBool::new(false),
        });
        Self {
            context,
            proxy,
            upstream,
            files_at_start,
        }
    }

    /// Samples resource use until the time is over, and provides the state for the faults.
    fn split_for_run(&mut self) -> (FaultTarget<'_>, impl Future<Output = Vec<ResourceSample>>) {
        let Self {
            context,
            proxy,
            upstream,
            ..
        } = self;
        (
            FaultTarget {
                context,
                config: &proxy.config,
                proxy_pid: proxy.pid(),
                upstream,
                charge_checker: ChargeChecker::default(),
            },
            sample_resources(context, proxy),
        )
    }

    /// Stops the proxy after all clients have ended. Returns whether all checks passed.
    async fn finish(self, samples: &[ResourceSample]) -> bool {
        let Self {
            context,
            proxy,
            files_at_start,
            ..
        } = self;
        println!("\n{}:", context.name);
        check_open_files_at_rest(&context, &proxy, files_at_start).await;
        check_counted_answers(&context.ledger, &MetricsPage::fetch(proxy.admin).await);
        check_growth(&context.ledger, samples);
        let status = proxy.stop().await;
        if !status.success() {
            context
                .ledger
                .record_unexplained(format!("the proxy ended with {status}"));
        }
        print_verdict(&context.ledger)
    }
}

/// Resource use of the proxy at one time.
#[derive(Clone, Copy)]
struct ResourceSample {
    rss_kib: u64,
    files: u64,
}

/// Samples twice a second and prints a line once a minute.
async fn sample_resources(context: &SoakContext, proxy: &ProxyProcess) -> Vec<ResourceSample> {
    let mut samples = Vec::new();
    while !context.has_ended() {
        let sample = ResourceSample {
            rss_kib: proxy.rss_kib(),
            files: proxy.open_file_count(),
        };
        if samples.len() % 120 == 0 {
            let (left_s, sent) = (
                context.deadline.duration_since(Instant::now()).as_secs(),
                context.ledger.sent_count(),
            );
            let ResourceSample { rss_kib, files } = sample;
            let name = context.name;
            println!(
                "{left_s:>5} s left, {name:>5}: {sent:>9} requests, RSS {rss_kib:>6} KiB, {files:>4} files"
            );
        }
        samples.push(sample);
        sleep(Duration::from_millis(500)).await;
    }
    samples
}

#[derive(Clone, Copy)]
struct GrowthTolerance {
    percent: u64,
    absolute: u64,
}

/// Compares the last quarter with the second one; the first is warm-up.
fn check_growth(ledger: &SoakLedger, samples: &[ResourceSample]) {
    let quarters: Vec<&[ResourceSample]> =
        samples.chunks(samples.len().div_ceil(4).max(1)).collect();
    let [_, second, _, last] = quarters[..] else {
        return ledger.record_unexplained(format!("{} samples are not enough", samples.len()));
    };
    let rss = |samples: &[ResourceSample]| median(samples.iter().map(|sample| sample.rss_kib));
    let files = |samples: &[ResourceSample]| median(samples.iter().map(|sample| sample.files));
    for (what, before, after, tolerance) in [
        ("RSS in KiB", rss(second), rss(last), RSS_TOLERANCE),
        ("files", files(second), files(last), FILES_TOLERANCE),
    ] {
        println!("{what}: median {before} in the second quarter, {after} in the last");
        if after > before + before * tolerance.percent / 100 + tolerance.absolute {
            ledger.record_unexplained(format!("{what} grew from {before} to {after}"));
        }
    }
}

fn median(values: impl Iterator<Item = u64>) -> u64 {
    let mut values: Vec<u64> = values.collect();
    values.sort_unstable();
    values.get(values.len() / 2).copied().unwrap_or_default()
}

/// Without clients, only the descriptors from the start and a few Redis connections may be open.
async fn check_open_files_at_rest(
    context: &SoakContext,
    proxy: &ProxyProcess,
    files_at_start: u64,
) {
    let (deadline, most) = (
        Instant::now() + 2 * PROMPT_TIMEOUT,
        files_at_start + MAX_EXTRA_FILES_AT_REST,
    );
    loop {
        let active = MetricsPage::fetch(context.admin)
            .await
            .value("tidegate_connections_active");
        let files = proxy.open_file_count();
        if active == 0 && files <= most {
            return println!("at rest: {files} files, {files_at_start} at the start");
        }
        if Instant::now() >= deadline {
            return context.ledger.record_unexplained(format!(
                "all clients have disconnected, but {active} connections are counted and {files} files open ({files_at_start} at the start)"
            ));
        }
        sleep(Duration::from_millis(200)).await;
    }
}

/// The proxy must have counted each response that a client received. It may count one more for each
/// request without a received response.
fn check_counted_answers(ledger: &SoakLedger, metrics: &MetricsPage) {
    let (seen, counted) = (
        ledger.answers_by_status(),
        metrics.responses_by_status().collect::<BTreeMap<_, _>>(),
    );
    let total = |codes: &BTreeMap<u16, u64>| codes.values().sum::<u64>();
    println!("{:>6} {:>10} {:>10}", "code", "seen", "counted");
    for code in seen
        .keys()
        .chain(counted.keys().filter(|code| !seen.contains_key(code)))
    {
        let of = |codes: &BTreeMap<u16, u64>| codes.get(code).copied().unwrap_or_default();
        let (seen, counted) = (of(&seen), of(&counted));
        println!("{code:>6} {seen:>10} {counted:>10}");
        if seen > counted {
            ledger.record_unexplained(format!(
                "{code} was seen {seen} times and counted {counted} times"
            ));
        }
    }
    let (sent, seen, counted) = (ledger.sent_count(), total(&seen), total(&counted));
    println!(
        "{sent} requests, {} aborted; {seen} responses received, {counted} counted",
        ledger.given_up_count()
    );
    if counted > sent {
        ledger.record_unexplained(format!(
            "{counted} responses were counted for {sent} requests"
        ));
    }
}

fn print_verdict(ledger: &SoakLedger) -> bool {
    println!("\nwhat faults explain:");
    for (what, times) in ledger.explained_events() {
        println!("{times:>8} {what}");
    }
    let problems = ledger.unexplained_events();
    if problems.is_empty() {
        println!("\nnothing else happened");
        return true;
    }
    println!("\nunexplained problems:");
    for (what, times) in problems {
        println!("{times:>8} {what}");
    }
    false
}
