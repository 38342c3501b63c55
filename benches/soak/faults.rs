//! Injects faults around the proxy, one at a time, and waits until the proxy recovers from each.

use crate::SoakContext;
use crate::books::SoakFault;
use crate::proxy::ProxyConfigFile;
use crate::support::client::{MetricsPage, PROMPT_TIMEOUT};
use crate::support::{RedisServer, send_signal};
use crate::upstream::AppServer;
use fastrand::Rng;
use std::time::{Duration, Instant};
use tokio::time::sleep;

#[derive(Clone, Copy)]
enum FaultKind {
    RedisHangs,
    RedisKilled,
    UpstreamKilled,
    NewConfig,
    BadConfig,
}

const ALL_FAULTS: [FaultKind; 5] = [
    FaultKind::RedisHangs,
    FaultKind::RedisKilled,
    FaultKind::UpstreamKilled,
    FaultKind::NewConfig,
    FaultKind::BadConfig,
];

/// A proxy with its own upstream and configuration.
pub(crate) struct FaultTarget<'a> {
    pub(crate) context: &'a SoakContext,
    pub(crate) config: &'a ProxyConfigFile,
    pub(crate) upstream: &'a mut AppServer,
}

/// Injects all faults in random order, repeatedly, until the time is over. Each fault affects all
/// proxies at once.
pub(crate) async fn run_faults(scenes: &mut [FaultTarget<'_>], redis: &mut RedisServer, seed: u64) {
    let (mut rng, mut version, mut reloads) = (Rng::with_seed(seed), 1, ReloadCounts::default());
    while !has_ended(scenes) {
        let mut round = ALL_FAULTS;
        rng.shuffle(&mut round);
        for trouble in round {
            sleep_randomly(&mut rng).await;
            if has_ended(scenes) {
                break;
            }
            match trouble {
                FaultKind::RedisHangs => {
                    begin_fault(scenes, SoakFault::Redis);
                    send_signal(redis.pid(), "STOP");
                    sleep_randomly(&mut rng).await;
                    send_signal(redis.pid(), "CONT");
                    wait_for_redis_in_use(scenes).await;
                }
                FaultKind::RedisKilled => {
                    begin_fault(scenes, SoakFault::Redis);
                    redis.kill();
                    sleep_randomly(&mut rng).await;
                    redis.restart();
                    wait_for_redis_in_use(scenes).await;
                }
                FaultKind::UpstreamKilled => {
                    begin_fault(scenes, SoakFault::AppServer);
                    scenes.iter_mut().for_each(|scene| scene.upstream.kill());
                    sleep_randomly(&mut rng).await;
                    scenes.iter_mut().for_each(|scene| scene.upstream.restart());
                    end_fault(scenes, SoakFault::AppServer);
                }
                FaultKind::NewConfig => {
                    version += 1;
                    reloads.write_and_wait(scenes, Some(version)).await;
                }
                FaultKind::BadConfig => {
                    begin_fault(scenes, SoakFault::Config);
                    reloads.write_and_wait(scenes, None).await;
                    version += 1;
                    reloads.write_and_wait(scenes, Some(version)).await;
                    end_fault(scenes, SoakFault::Config);
                }
            }
        }
    }
    println!(
        "{} new configurations, {} bad ones",
        reloads.good, reloads.bad
    );
}

fn has_ended(scenes: &[FaultTarget<'_>]) -> bool {
    scenes.iter().any(|scene| scene.context.has_ended())
}

fn begin_fault(scenes: &[FaultTarget<'_>], fault: SoakFault) {
    scenes
        .iter()
        .for_each(|scene| scene.context.ledger.begin_fault(fault));
}

fn end_fault(scenes: &[FaultTarget<'_>], fault: SoakFault) {
    scenes
        .iter()
        .for_each(|scene| scene.context.ledger.end_fault(fault));
}

/// Ends the fault when the proxies use Redis again.
async fn wait_for_redis_in_use(scenes: &[FaultTarget<'_>]) {
    let is_used = |metrics: &MetricsPage| {
        metrics.value("tidegate_store_up") == 1 && metrics.value("tidegate_breaker_open") == 0
    };
    for FaultTarget { context: world, .. } in scenes {
        if !wait_for_metrics(world, is_used).await {
            world.ledger.record_unexplained(format!(
                "Redis is there again, and after {PROMPT_TIMEOUT:?} not used"
            ));
        }
        world.ledger.end_fault(SoakFault::Redis);
    }
}

#[derive(Default)]
struct ReloadCounts {
    good: u64,
    bad: u64,
}

impl ReloadCounts {
    /// Writes a valid or an invalid configuration and waits until the proxies have counted the
    /// reload.
    async fn write_and_wait(&mut self, scenes: &[FaultTarget<'_>], version: Option<u64>) {
        match version {
            Some(_) => self.good += 1,
            None => self.bad += 1,
        }
        for scene in scenes {
            scene.config.write_version(version);
        }
        let are_counted = |metrics: &MetricsPage| {
            metrics.value("tidegate_config_reloads_total{result=\"success\"}") == self.good
                && metrics.value("tidegate_config_reloads_total{result=\"failure\"}") == self.bad
        };
        for FaultTarget { context: world, .. } in scenes {
            if !wait_for_metrics(world, are_counted).await {
                world.ledger.record_unexplained(format!(
                    "{} good and {} bad configurations were written, and after {PROMPT_TIMEOUT:?} not counted",
                    self.good, self.bad
                ));
            }
        }
    }
}

/// Waits for a condition on the metrics; returns whether it became true in time.
async fn wait_for_metrics(world: &SoakContext, wanted: impl Fn(&MetricsPage) -> bool) -> bool {
    let deadline = Instant::now() + PROMPT_TIMEOUT;
    while !wanted(&MetricsPage::fetch(world.admin).await) {
        if Instant::now() >= deadline {
            return false;
        }
        sleep(Duration::from_millis(100)).await;
    }
    true
}

/// Long enough for the circuit breaker to open and for all effects of a fault to end.
async fn sleep_randomly(rng: &mut Rng) {
    sleep(Duration::from_millis(rng.u64(1000..4000))).await;
}
