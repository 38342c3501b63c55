//! What goes wrong around the proxy, one thing after the other, each until the proxy has got over it.

use crate::World;
use crate::books::Fault;
use crate::proxy::Config;
use crate::support::client::{Metrics, SOON};
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

/// A proxy and what belongs to it alone.
pub(crate) struct Around<'a> {
    pub(crate) world: &'a World,
    pub(crate) config: &'a Config,
    pub(crate) upstream: &'a mut Upstream,
}

/// Until the time is over: all of them in some order, then all in another one. Each befalls all proxies at once.
pub(crate) async fn run(scenes: &mut [Around<'_>], redis: &mut Server, seed: u64) {
    let (mut rng, mut version, mut reloads) = (Rng::with_seed(seed), 1, Reloads::default());
    while !is_over(scenes) {
        let mut round = ALL;
        rng.shuffle(&mut round);
        for trouble in round {
            some_time(&mut rng).await;
            if is_over(scenes) {
                break;
            }
            match trouble {
                Trouble::RedisHangs => {
                    begin(scenes, Fault::Redis);
                    signal(redis.pid(), "STOP");
                    some_time(&mut rng).await;
                    signal(redis.pid(), "CONT");
                    redis_is_back(scenes).await;
                }
                Trouble::RedisKilled => {
                    begin(scenes, Fault::Redis);
                    redis.kill();
                    some_time(&mut rng).await;
                    redis.restart();
                    redis_is_back(scenes).await;
                }
                Trouble::UpstreamKilled => {
                    begin(scenes, Fault::Upstream);
                    scenes.iter_mut().for_each(|scene| scene.upstream.kill());
                    some_time(&mut rng).await;
                    scenes.iter_mut().for_each(|scene| scene.upstream.restart());
                    end(scenes, Fault::Upstream);
                }
                Trouble::NewConfig => {
                    version += 1;
                    reloads.write(scenes, Some(version)).await;
                }
                Trouble::BadConfig => {
                    begin(scenes, Fault::Config);
                    reloads.write(scenes, None).await;
                    version += 1;
                    reloads.write(scenes, Some(version)).await;
                    end(scenes, Fault::Config);
                }
            }
        }
    }
    println!(
        "{} new configurations, {} bad ones",
        reloads.good, reloads.bad
    );
}

fn is_over(scenes: &[Around<'_>]) -> bool {
    scenes.iter().any(|scene| scene.world.is_over())
}

fn begin(scenes: &[Around<'_>], fault: Fault) {
    scenes
        .iter()
        .for_each(|scene| scene.world.books.begin(fault));
}

fn end(scenes: &[Around<'_>], fault: Fault) {
    scenes.iter().for_each(|scene| scene.world.books.end(fault));
}

/// Ends the fault when the proxies ask Redis again.
async fn redis_is_back(scenes: &[Around<'_>]) {
    let is_used = |metrics: &Metrics| {
        metrics.value("tidegate_store_up") == 1 && metrics.value("tidegate_breaker_open") == 0
    };
    for Around { world, .. } in scenes {
        if !becomes(world, is_used).await {
            world
                .books
                .complain(format!("Redis is there again, and after {SOON:?} not used"));
        }
        world.books.end(Fault::Redis);
    }
}

#[derive(Default)]
struct Reloads {
    good: u64,
    bad: u64,
}

impl Reloads {
    /// Writes a configuration, or a bad one, and waits until the proxies have counted it.
    async fn write(&mut self, scenes: &[Around<'_>], version: Option<u64>) {
        match version {
            Some(_) => self.good += 1,
            None => self.bad += 1,
        }
        for scene in scenes {
            scene.config.write(version);
        }
        let are_counted = |metrics: &Metrics| {
            metrics.value("tidegate_config_reloads_total{result=\"success\"}") == self.good
                && metrics.value("tidegate_config_reloads_total{result=\"failure\"}") == self.bad
        };
        for Around { world, .. } in scenes {
            if !becomes(world, are_counted).await {
                world.books.complain(format!(
                    "{} good and {} bad configurations were written, and after {SOON:?} not counted",
                    self.good, self.bad
                ));
            }
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
