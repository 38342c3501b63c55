//! What goes wrong around the proxy, one thing after the other, each until the proxy has got over it.

use crate::World;
use crate::books::Fault;
use crate::proxy::{Config, Metrics, SOON};
use crate::support::{Server, signal};
use crate::upstream::Upstream;
use fastrand::Rng;
use std::time::{Duration, Instant};
use tokio::time::sleep;

#[derive(Clone, Copy)]
enum Trouble {
    RedisHangs,
    RedisKilled,
    UpstreamKilled,
    NewConfig,
    BadConfig,
}

const ALL: [Trouble; 5] = [
    Trouble::RedisHangs,
    Trouble::RedisKilled,
    Trouble::UpstreamKilled,
    Trouble::NewConfig,
    Trouble::BadConfig,
];

/// Until the time is over: all of them in some order, then all in another one.
pub(crate) async fn run(
    world: &World,
    config: &Config,
    redis: &mut Server,
    upstream: &mut Upstream,
    seed: u64,
) {
    let (mut rng, mut version, mut reloads) = (Rng::with_seed(seed), 1, Reloads::default());
    while !world.is_over() {
        let mut round = ALL;
        rng.shuffle(&mut round);
        for trouble in round {
            some_time(&mut rng).await;
            if world.is_over() {
                break;
            }
            match trouble {
                Trouble::RedisHangs => {
                    world.books.begin(Fault::Redis);
                    signal(redis.pid(), "STOP");
                    some_time(&mut rng).await;
                    signal(redis.pid(), "CONT");
                    redis_is_back(world).await;
                }
                Trouble::RedisKilled => {
                    world.books.begin(Fault::Redis);
                    redis.kill();
                    some_time(&mut rng).await;
                    redis.restart();
                    redis_is_back(world).await;
                }
                Trouble::UpstreamKilled => {
                    world.books.begin(Fault::Upstream);
                    upstream.kill();
                    some_time(&mut rng).await;
                    upstream.restart();
                    world.books.end(Fault::Upstream);
                }
                Trouble::NewConfig => {
                    version += 1;
                    config.write(Some(version));
                    reloads.good += 1;
                    reloads.are_counted(world).await;
                }
                Trouble::BadConfig => {
                    world.books.begin(Fault::Config);
                    config.write(None);
                    reloads.bad += 1;
                    reloads.are_counted(world).await;
                    version += 1;
                    config.write(Some(version));
                    reloads.good += 1;
                    reloads.are_counted(world).await;
                    world.books.end(Fault::Config);
                }
            }
        }
    }
    println!("{} new configurations, {} bad ones", reloads.good, reloads.bad);
}

/// Ends the fault when the proxy asks Redis again.
async fn redis_is_back(world: &World) {
    let is_used = |metrics: &Metrics| {
        metrics.value("tidegate_store_up") == 1 && metrics.value("tidegate_breaker_open") == 0
    };
    if !becomes(world, is_used).await {
        world.books.complain(format!("Redis is there again, and after {SOON:?} not used"));
    }
    world.books.end(Fault::Redis);
}

#[derive(Default)]
struct Reloads {
    good: u64,
    bad: u64,
}

impl Reloads {
    async fn are_counted(&self, world: &World) {
        let are_counted = |metrics: &Metrics| {
            metrics.value("tidegate_config_reloads_total{result=\"success\"}") == self.good
                && metrics.value("tidegate_config_reloads_total{result=\"failure\"}") == self.bad
        };
        if !becomes(world, are_counted).await {
            world.books.complain(format!(
                "{} good and {} bad configurations were written, and after {SOON:?} not counted",
                self.good, self.bad
            ));
        }
    }
}

/// Whether this comes to be said by the metrics soon.
async fn becomes(world: &World, wanted: impl Fn(&Metrics) -> bool) -> bool {
    let deadline = Instant::now() + SOON;
    while !wanted(&Metrics::of(world.admin).await) {
        if Instant::now() >= deadline {
            return false;
        }
        sleep(Duration::from_millis(100)).await;
    }
    true
}

/// Long enough for the breaker to open, and for all that follows from a fault to be over.
async fn some_time(rng: &mut Rng) {
    sleep(Duration::from_millis(rng.u64(1000..4000))).await;
}
