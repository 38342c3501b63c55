//! Fleet test on one machine: network namespaces as nodes, each with a sidecar and an app; three
//! Redis masters; clients behind a load balancer; and the faults of fleets. Every limit must hold
//! as far as `docs/GUARANTEE.md` promises, and a fault must explain each failed request.
//!
//! Run by `make fleet`, which prints a Markdown report. `FLEET_SEED` repeats the choices of each
//! client and the order of the faults, but not their timing. Requires redis-server, iproute2 and
//! util-linux.
//!
//! [`phases`] lists the phases of the test, and [`fault_actions`] and [`load_phases`] run them. The
//! checks: [`window_checks`] permitted admissions, [`charge_checks`] charges in Redis,
//! [`concurrency_checks`] requests in flight, [`throughput_checks`] used quotas, and
//! [`request_checks`] the faults that explain failures.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "the report goes to stdout, and it stops at any error of its own"
)]

mod app;
mod charge_checks;
mod clients;
mod concurrency_checks;
mod fault_actions;
mod faults;
mod ledger;
mod load_phases;
mod masters;
mod net;
mod node;
mod phases;
mod policies;
mod report;
mod request_checks;
mod scenario;
mod slot_moves;
#[path = "../support/mod.rs"]
mod support;
mod throughput_checks;
mod window_checks;

use app::ForwardedRequests;
use clients::LoadBalancer;
use ledger::FleetLedger;
use masters::RedisMasters;
use policies::FleetKey;
use scenario::FleetScenario;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use support::client::read_env_number;
use tokio::time::sleep;

const PAUSE_CHECK_INTERVAL: Duration = Duration::from_millis(20);
const STALL_CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// A quarter of the Redis timeout.
const STALL_THRESHOLD: Duration = Duration::from_millis(500);

/// State shared by all tasks of the test.
struct FleetContext {
    keys: Vec<FleetKey>,
    balancer: LoadBalancer,
    ledger: FleetLedger,
    forwarded: ForwardedRequests,
    /// The ordinary clients wait.
    is_paused: AtomicBool,
    is_over: AtomicBool,
}

impl FleetContext {
    /// Stops the ordinary clients until [`Self::resume_clients`]; waits for their requests.
    async fn pause_clients(&self) {
        self.is_paused.store(true, Ordering::Relaxed);
        self.ledger.begin_pause();
        // A client may be about to send its next request.
        sleep(PAUSE_CHECK_INTERVAL).await;
        while self.ledger.in_flight_count() > 0 {
            sleep(PAUSE_CHECK_INTERVAL).await;
        }
    }

    fn resume_clients(&self) {
        self.ledger.end_pause();
        self.is_paused.store(false, Ordering::Relaxed);
    }

    async fn wait_while_paused(&self) {
        while self.is_paused.load(Ordering::Relaxed) {
            sleep(PAUSE_CHECK_INTERVAL).await;
        }
    }

    fn has_ended(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    fn finish(&self) {
        self.is_over.store(true, Ordering::Relaxed);
    }
}

fn main() -> ExitCode {
    let is_app = std::env::args().nth(1).as_deref() == Some("app");
    if !is_app && !net::is_isolated() {
        return net::restart_in_namespaces();
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    if is_app {
        runtime.block_on(app::run_app());
        return ExitCode::SUCCESS;
    }
    runtime.block_on(run_fleet())
}

async fn run_fleet() -> ExitCode {
    let seed: u32 = read_env_number("FLEET_SEED").unwrap_or_else(|| fastrand::u32(..));
    eprintln!("FLEET_SEED={seed}");
    net::create_bridges();
    let masters = RedisMasters::start().await;
    let keys = policies::make_keys(&masters);
    let (balancer, ledger) = (LoadBalancer::default(), FleetLedger::new());
    let context = Arc::new(FleetContext {
        keys,
        balancer,
        ledger,
        forwarded: ForwardedRequests::default(),
        is_paused: AtomicBool::new(false),
        is_over: AtomicBool::new(false),
    });
    let watch = tokio::spawn(watch_for_stalls(Arc::clone(&context)));
    let results = FleetScenario::new(&context, masters, seed.into())
        .run(seed.into())
        .await;
    watch.abort();
    if report::print_report(seed, &context, &results) {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Records stalls of this process: other processes may have stalled at the same time.
async fn watch_for_stalls(context: Arc<FleetContext>) {
    loop {
        let before = Instant::now();
        sleep(STALL_CHECK_INTERVAL).await;
        if before.elapsed() > STALL_CHECK_INTERVAL + STALL_THRESHOLD {
            context.ledger.record_stall(before);
        }
    }
}
