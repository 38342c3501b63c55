//! Checks that Redis charged each forwarded request once, and nothing else.

use crate::SoakContext;
use crate::proxy::FLOODED_LIMIT;
use crate::support::client::MetricsPage;
use crate::support::standalone_settings;
use crate::upstream::AppCounters;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tidegate::store::redis::CounterInspector;
use tokio::time::sleep;

/// Timeout for settlements.
const CHARGE_TIMEOUT: Duration = Duration::from_secs(10);
const SETTLEMENT_TIME: Duration = Duration::from_secs(2);
const MAX_COUNTERS: usize = 10;
/// The largest difference of one request without a known response or with a lost settlement: its
/// estimate, or its cost.
const UNITS_PER_UNKNOWN_REQUEST: u64 = 4;

/// Units that the app received and Redis charged, when they were last compared.
#[derive(Clone, Copy, Debug, Default)]
struct ChargeBalance {
    metered: u64,
    metered_charged: u64,
    flooded: u64,
    flooded_charged: u64,
    failed: u64,
    lost_settlements: u64,
}

/// Compares the charges of one proxy with what its app received.
#[derive(Debug, Default)]
pub(crate) struct ChargeChecker {
    last: ChargeBalance,
    pub(crate) checks: u64,
    pub(crate) units: u64,
}

impl ChargeChecker {
    /// Stops the accounted clients and compares their charges since the last call. `is_data_lost`:
    /// Redis restarted empty.
    pub(crate) async fn check_charges(
        &mut self,
        context: &SoakContext,
        app: &AppCounters,
        redis_port: u16,
        is_data_lost: bool,
    ) {
        context.pause_accounted_clients().await;
        if is_data_lost {
            // Settlements of earlier requests must not count as charges of later ones.
            sleep(SETTLEMENT_TIME).await;
        }
        let deadline = Instant::now() + CHARGE_TIMEOUT;
        loop {
            let now = read_balance(context, app, redis_port).await;
            let problem = self.find_problem(&now);
            let is_late = Instant::now() > deadline;
            if problem.is_none() || is_data_lost || is_late {
                if let Some(problem) = problem.filter(|_| !is_data_lost) {
                    context.ledger.record_unexplained(problem);
                }
                self.checks += u64::from(!is_data_lost);
                self.units += now.metered - self.last.metered;
                self.last = now;
                break;
            }
            sleep(Duration::from_millis(200)).await;
        }
        context.resume_accounted_clients();
    }

    fn find_problem(&self, now: &ChargeBalance) -> Option<String> {
        let last = &self.last;
        let lost_settlements = now.lost_settlements - last.lost_settlements;
        let unknown = now.failed - last.failed + lost_settlements;
        let tolerance = unknown * UNITS_PER_UNKNOWN_REQUEST;
        let compare = |path: &str, forwarded: u64, charged: u64| {
            (forwarded.abs_diff(charged) > tolerance).then(|| {
                format!("{path}: {forwarded} units forwarded, {charged} charged; failed requests and lost settlements permit {tolerance} more or fewer")
            })
        };
        let metered_charged = now.metered_charged.saturating_sub(last.metered_charged);
        let flooded_charged = now.flooded_charged.saturating_sub(last.flooded_charged);
        let flooded = now.flooded - last.flooded;
        if flooded > FLOODED_LIMIT {
            return Some(format!("/flooded: {flooded} requests forwarded"));
        }
        compare("/metered", now.metered - last.metered, metered_charged)
            .or_else(|| compare("/flooded", flooded, flooded_charged))
    }
}

async fn read_balance(context: &SoakContext, app: &AppCounters, redis_port: u16) -> ChargeBalance {
    let metrics = MetricsPage::fetch(context.admin).await;
    ChargeBalance {
        metered: app.metered_units.load(Ordering::Relaxed),
        metered_charged: read_charged_units("metered", context, redis_port).await,
        flooded: app.flooded_requests.load(Ordering::Relaxed),
        flooded_charged: read_charged_units("flooded_total", context, redis_port).await,
        failed: context.ledger.accounted_failed(),
        lost_settlements: metrics.value("tidegate_settlements_lost_total"),
    }
}

async fn read_charged_units(policy: &str, context: &SoakContext, redis_port: u16) -> u64 {
    let read = async || {
        let settings = standalone_settings(redis_port, context.name);
        let inspector = CounterInspector::connect(settings).await?;
        inspector.list_counters(Some(policy), MAX_COUNTERS).await
    };
    let deadline = Instant::now() + CHARGE_TIMEOUT;
    loop {
        match read().await {
            Ok((counters, _)) => return counters.iter().map(|counter| counter.used_units).sum(),
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
        sleep(Duration::from_millis(200)).await;
    }
}
