//! A fleet on one machine: namespaces as nodes, each with a sidecar and an app, three Redis masters, clients behind a
//! balancer; and what befalls fleets. Every limit is held, as far as `docs/OPERATIONS.md` promises it, and each request
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

use books::Books;
use clients::Balancer;
use masters::Masters;
use policies::Key;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use story::Story;
use support::client::setting;
use tokio::time::sleep;
use upstream::{Speaks, Upstream};

const LOOK: Duration = Duration::from_millis(50);
/// A fourth of the time that Redis has to answer.
const STILL: Duration = Duration::from_millis(500);

/// What everybody knows.
struct World {
    keys: Vec<Key>,
    balancer: Balancer,
    books: Books,
    is_over: AtomicBool,
}

impl World {
    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    fn end(&self) {
        self.is_over.store(true, Ordering::Relaxed);
    }
}

fn main() -> ExitCode {
    if std::env::args().nth(1).as_deref() == Some("app") {
        app();
    }
    if !net::is_isolated() {
        return net::isolate();
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(run())
}

/// Runs on a node: says where it is, and ends with the node.
fn app() -> ! {
    let app = Upstream::start(Speaks::Http1);
    println!("{}", app.url());
    loop {
        std::thread::park();
    }
}

async fn run() -> ExitCode {
    let seed: u32 = setting("FLEET_SEED").unwrap_or_else(|| fastrand::u32(..));
    eprintln!("FLEET_SEED={seed}");
    net::lay();
    let masters = Masters::start().await;
    let keys = policies::keys(&masters);
    let (balancer, books) = (Balancer::default(), Books::new());
    let world = Arc::new(World {
        keys,
        balancer,
        books,
        is_over: AtomicBool::new(false),
    });
    let watch = tokio::spawn(stands_still(Arc::clone(&world)));
    let played = Story::new(&world, masters, seed.into())
        .play(seed.into())
        .await;
    watch.abort();
    if report::write(seed, &world, &played) {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Notes when nothing went on here: then others may not have gone on, either.
async fn stands_still(world: Arc<World>) {
    loop {
        let before = Instant::now();
        sleep(LOOK).await;
        if before.elapsed() > LOOK + STILL {
            world.books.stood_still(before);
        }
    }
}
