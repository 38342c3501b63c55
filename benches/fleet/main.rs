//! A fleet on one machine: namespaces as nodes, each with a sidecar and an app, three Redis masters, clients behind a
//! balancer; and what befalls fleets. Every limit is held, as far as `docs/operations/redis.md` promises it, and each request
//! that fails has a fault to explain it.
//!
//! Run by `make fleet`, which prints a report as Markdown; `FLEET_SEED` draws the same again: the same choices of each
//! client, the same faults in the same order, but not at the same moments. Needs redis-server, iproute2 and util-linux.
//!
//! What happens is in [`story`], what may be admitted meanwhile and what explains what in [`books`].

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "the report goes to stdout, and it stops at any error of its own"
)]

mod books;
mod clients;
mod masters;
mod net;
mod node;
mod policies;
mod report;
mod story;
#[path = "../support/mod.rs"]
mod support;
#[path = "../soak/upstream.rs"]
#[allow(dead_code, reason = "here nobody kills it but with its node")]
mod upstream;

use books::RequestLedger;
use clients::LoadBalancer;
use masters::RedisMasters;
use policies::FleetKey;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use story::FleetScenario;
use support::client::read_env_number;
use tokio::time::sleep;
use upstream::{AppProtocol, AppServer};

const STALL_CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// A fourth of the time that Redis has to answer.
const STALL_THRESHOLD: Duration = Duration::from_millis(500);

/// What everybody knows.
struct FleetContext {
    keys: Vec<FleetKey>,
    balancer: LoadBalancer,
    ledger: RequestLedger,
    is_over: AtomicBool,
}

impl FleetContext {
    fn is_over(&self) -> bool {
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
        return net::run_isolated();
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(run_fleet())
}

/// Runs on a node: says where it is, and ends with the node.
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
    let (balancer, books) = (LoadBalancer::default(), RequestLedger::new());
    let world = Arc::new(FleetContext {
        keys,
        balancer,
        ledger: books,
        is_over: AtomicBool::new(false),
    });
    let watch = tokio::spawn(watch_for_stalls(Arc::clone(&world)));
    let played = FleetScenario::new(&world, masters, seed.into())
        .run(seed.into())
        .await;
    watch.abort();
    if report::write_report(seed, &world, &played) {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Notes when nothing went on here: then others may not have gone on, either.
async fn watch_for_stalls(world: Arc<FleetContext>) {
    loop {
        let before = Instant::now();
        sleep(STALL_CHECK_INTERVAL).await;
        if before.elapsed() > STALL_CHECK_INTERVAL + STALL_THRESHOLD {
            world.ledger.record_stall(before);
        }
    }
}
