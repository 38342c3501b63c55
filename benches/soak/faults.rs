//! Injects faults around the proxy, one at a time, and waits until the proxy recovers from each.

use crate::SoakContext;
use crate::charge_checks::ChargeChecker;
use crate::ledger::SoakFault;
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
    ProxyFrozen,
    NewConfig,
    BadConfig,
}

const ALL_FAULTS: [FaultKind; 6] = [
    FaultKind::RedisHangs,
    FaultKind::RedisKilled,
    FaultKind::UpstreamKilled,
    FaultKind::ProxyFrozen,
    FaultKind::NewConfig,
    FaultKind::BadConfig,
];

/// A proxy with its own upstream and configuration.
pub(crate) struct FaultTarget<'a> {
    pub(crate) context: &'a SoakContext,
    pub(crate) config: &'a ProxyConfigFile,
    pub(crate) proxy_pid: u32,
    pub(crate) upstream: &'a mut AppServer,
    pub(crate) charge_checker: ChargeChecker,
}

/// Injects all faults in random order, repeatedly, until the time is over. Each fault affects all
/// proxies at once.
pub(crate) async fn run_faults(
    targets: &mut [FaultTarget<'_>],
    redis: &mut RedisServer,
    seed: u64,
) {
    let (mut rng, mut version, mut reloads) = (Rng::with_seed(seed), 1, ReloadCounts::default());
    while !has_ended(targets) {
        let mut round = ALL_FAULTS;
        rng.shuffle(&mut round);
        for trouble in round {
            sleep_randomly(&mut rng).await;
            if has_ended(targets) {
                break;
            }
            match trouble {
                FaultKind::RedisHangs => {
                    begin_fault(targets, SoakFault::Redis);
                    send_signal(redis.pid(), "STOP");
                    sleep_randomly(&mut rng).await;
                    send_signal(redis.pid(), "CONT");
                    end_fault_after_recovery(targets, SoakFault::Redis).await;
                }
                FaultKind::RedisKilled => {
                    begin_fault(targets, SoakFault::Redis);
                    redis.kill();
                    sleep_randomly(&mut rng).await;
                    redis.restart();
                    end_fault_after_recovery(targets, SoakFault::Redis).await;
                }
                FaultKind::UpstreamKilled => {
                    begin_fault(targets, SoakFault::AppServer);
                    targets.iter_mut().for_each(|target| target.upstream.kill());
                    sleep_randomly(&mut rng).await;
                    targets
                        .iter_mut()
                        .for_each(|target| target.upstream.restart());
                    end_fault(targets, SoakFault::AppServer);
                }
                FaultKind::ProxyFrozen => {
                    begin_fault(targets, SoakFault::ProxyFrozen);
                    for target in targets.iter() {
                        send_signal(target.proxy_pid, "STOP");
                    }
                    sleep_randomly(&mut rng).await;
                    for target in targets.iter() {
                        send_signal(target.proxy_pid, "CONT");
                    }
                    end_fault_after_recovery(targets, SoakFault::ProxyFrozen).await;
                }
                FaultKind::NewConfig => {
                    version += 1;
                    reloads.reload_and_wait(targets, Some(version)).await;
                }
                FaultKind::BadConfig => {
                    begin_fault(targets, SoakFault::Config);
                    reloads.reload_and_wait(targets, None).await;
                    version += 1;
                    reloads.reload_and_wait(targets, Some(version)).await;
                    end_fault(targets, SoakFault::Config);
                }
            }
            let is_data_lost = matches!(trouble, FaultKind::RedisKilled);
            check_charges(targets, redis, is_data_lost).await;
        }
    }
    println!(
        "{} new configurations, {} bad ones",
        reloads.good, reloads.bad
    );
    for target in targets {
        println!(
            "{}: {} comparisons of charges, {} metered units; at most {} requests held",
            target.context.name,
            target.charge_checker.checks,
            target.charge_checker.units,
            target.context.ledger.most_held()
        );
    }
}

async fn check_charges(targets: &mut [FaultTarget<'_>], redis: &RedisServer, is_data_lost: bool) {
    for target in targets {
        target
            .charge_checker
            .check_charges(
                target.context,
                &target.upstream.counters,
                redis.port(),
                is_data_lost,
            )
            .await;
    }
}

fn has_ended(targets: &[FaultTarget<'_>]) -> bool {
    targets.iter().any(|target| target.context.has_ended())
}

fn begin_fault(targets: &[FaultTarget<'_>], fault: SoakFault) {
    targets
        .iter()
        .for_each(|target| target.context.ledger.begin_fault(fault));
}

fn end_fault(targets: &[FaultTarget<'_>], fault: SoakFault) {
    targets
        .iter()
        .for_each(|target| target.context.ledger.end_fault(fault));
}

/// Ends the fault when the proxies use Redis again.
async fn end_fault_after_recovery(targets: &[FaultTarget<'_>], fault: SoakFault) {
    let is_used = |metrics: &MetricsPage| {
        metrics.value("tidegate_store_up") == 1 && metrics.value("tidegate_breaker_open") == 0
    };
    for FaultTarget { context, .. } in targets {
        if !wait_for_metrics(context, is_used).await {
            context.ledger.record_unexplained(format!(
                "Redis is there again, and after {PROMPT_TIMEOUT:?} not used"
            ));
        }
        context.ledger.end_fault(fault);
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
    async fn reload_and_wait(&mut self, targets: &[FaultTarget<'_>], version: Option<u64>) {
        match version {
            Some(_) => self.good += 1,
            None => self.bad += 1,
        }
        for target in targets {
            target.config.write_version(version);
        }
        let are_counted = |metrics: &MetricsPage| {
            metrics.value("tidegate_config_reloads_total{result=\"success\"}") == self.good
                && metrics.value("tidegate_config_reloads_total{result=\"failure\"}") == self.bad
        };
        for FaultTarget { context, .. } in targets {
            if !wait_for_metrics(context, are_counted).await {
                context.ledger.record_unexplained(format!(
                    "{} good and {} bad configurations were written, and after {PROMPT_TIMEOUT:?} not counted",
                    self.good, self.bad
                ));
            }
        }
    }
}

/// Waits for a condition on the metrics; returns whether it became true in time.
async fn wait_for_metrics(context: &SoakContext, wanted: impl Fn(&MetricsPage) -> bool) -> bool {
    let deadline = Instant::now() + PROMPT_TIMEOUT;
    while !wanted(&MetricsPage::fetch(context.admin).await) {
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
