//! Fleet test on one machine: network namespaces as nodes, each with a sidecar and an app; three
//! Redis masters; clients behind a load balancer; and the faults of fleets. Every limit must hold
//! as far as `docs/GUARANTEE.md` promises, and a fault must explain each failed request.
//!
//! Run by `make fleet`, which prints a Markdown report. `FLEET_SEED` repeats the choices of each
//! client and the order of the faults, but not their timing. Requires redis-server, iproute2 and
//! util-linux.
//!
//! [`scenario`] has the phases of the test, [`window_checks`] the permitted admissions, and
//! [`request_checks`] the faults that explain failures.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "the report goes to stdout, and it stops at any error of its own"
)]

mod clients;
mod faults;
mod ledger;
mod masters;
mod net;
mod node;
mod policies;
mod report;
mod request_checks;
mod scenario;
#[path = "../support/mod.rs"]
mod support;
#[path = "../soak/upstream.rs"]
#[allow(dead_code, reason = "the app is killed only with its node")]
mod upstream;
mod window_checks;

use clients::LoadBalancer;
use ledger::RequestLedger;
use masters::RedisMasters;
use policies::FleetKey;
use scenario::FleetScenario;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use support::client::read_env_number;
use tokio::time::sleep;
use upstream::{AppProtocol, AppServer};

const STALL_CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// A quarter of the Redis timeout.
const STALL_THRESHOLD: Duration = Duration::from_millis(500);

/// State shared by all tasks of the test.
struct FleetContext {
    keys: Vec<FleetKey>,
    balancer: LoadBalancer,
    ledger: RequestLedger,
    is_over: AtomicBool,
}

impl FleetContext {
    fn has_ended(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    fn finish(&self) {
        self.is_over.store(true, Ordering::Relaxed);
    }
}

fn main() -> ExitCode {
    if std::env::args().nth(1).as_deref() == Some("app") {
        run_app();
    }
    if !net::is_isolated() {
        return net::restart_in_namespaces();
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(run_fleet())
}

/// Runs the app of a node. It prints its URL and runs until the node ends.
fn run_app() -> ! {
    let app = AppServer::start(AppProtocol::Http1);
    println!("{}", app.url());
    loop {
        std::thread::park();
    }
}

async fn run_fleet() -> ExitCode {
    let seed: u32 = read_env_number("FLEET_SEED").unwrap_or_else(|| fastrand::u32(..));
    eprintln!("FLEET_SEED={seed}");
    net::create_bridges();
    let masters = RedisMasters::start().await;
    let keys = policies::make_keys(&masters);
    let (balancer, ledger) = (LoadBalancer::default(), RequestLedger::new());
    let context = Arc::new(FleetContext {
        keys,
        balancer,
        ledger,
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
