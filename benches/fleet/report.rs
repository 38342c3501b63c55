//! The report, as Markdown.

use crate::FleetContext;
use crate::ledger::RequestTotals;
use crate::masters::MASTER_COUNT;
use crate::policies::{FleetPolicy, LIMIT_PERIOD, POLICIES, StoreFailureMode};
use crate::scenario::PhaseResult;
use crate::window_checks::{FullestWindow, WindowReport};
use std::collections::BTreeMap;
use std::process::Command;
use std::time::Duration;

/// Minimum share of admissions in an outage, in percent, for policies with local fallback.
const MIN_USED_PERCENT_IN_OUTAGE: u64 = 30;

/// Maximum stall time, in percent; beyond it, the run is not meaningful.
const MAX_STALL_PERCENT: u32 = 5;

/// Prints the report and returns whether all checks passed.
#[allow(
    clippy::too_many_lines,
    reason = "prints the report from top to bottom"
)]
pub(crate) fn print_report(seed: u32, context: &FleetContext, results: &[PhaseResult]) -> bool {
    let FleetContext { ledger, keys, .. } = context;
    ledger.judge_requests(keys);
    let windows = ledger.judge_windows(keys);
    let build = if cfg!(debug_assertions) {
        "debug"
    } else {
        "release"
    };
    let redis = Command::new("redis-server")
        .arg("--version")
        .output()
        .unwrap();
    let redis = String::from_utf8(redis.stdout).unwrap();
    let redis = redis
        .split(' ')
        .find_map(|word| word.strip_prefix("v="))
        .unwrap_or("?")
        .to_owned();
    println!(
        "Seed {seed}: tidegate {} ({build} build), Redis {redis}, {MASTER_COUNT} masters, {} cores, {:.0} s.\n",
        env!("CARGO_PKG_VERSION"),
        std::thread::available_parallelism().map_or(0, usize::from),
        results
            .last()
            .map_or(0.0, |last| ledger.seconds_since_start(last.ended)),
    );
    let names: Vec<_> = POLICIES
        .iter()
        .map(|policy| format!("`{}`", policy.name))
        .collect();
    println!(
        "| from, s | | nodes after it | requests | failed | decided without Redis | until all use Redis again, s | {} |",
        names.join(" | ")
    );
    println!("|{}", "---|".repeat(7 + POLICIES.len()));
    let mut all = RequestTotals::default();
    for one in results {
        let share = ledger.totals_between(keys, one.began, one.ended);
        println!(
            "| {:.0} | {} | {} | {} | {} | {} | {} | {} |",
            ledger.seconds_since_start(one.began),
            one.phase.title(),
            one.nodes,
            share.requests,
            share.failed,
            one.degraded_decisions,
            one.recovery
                .map(|time| format!("{:.1}", time.as_secs_f64()))
                .unwrap_or_default(),
            POLICIES
                .iter()
                .map(|policy| check_used_percent(context, one, policy, &share))
                .collect::<Vec<_>>()
                .join(" | "),
        );
        all.requests += share.requests;
        all.failed += share.failed;
    }
    println!(
        "\nPolicy columns: admitted requests in percent of the possible ones, which are bounded by demand and by the limit (the lower one if it changes). Response times: {}.\n",
        ["half of them", "99 %", "99.9 %", "all"]
            .iter()
            .zip(ledger.latency_quantiles(&[500, 990, 999, 1000]))
            .map(|(what, took)| format!("at most {:.1} ms ({what})", took.as_secs_f64() * 1000.0))
            .collect::<Vec<_>>()
            .join(", "),
    );
    println!(
        "| policy | | windows of {} s judged | fullest | fullest where a fault permits more |",
        LIMIT_PERIOD.as_secs()
    );
    println!("|---|---|---|---|---|");
    for policy in &POLICIES {
        let WindowReport {
            count,
            without_fault: plain,
            in_fault,
            unbounded,
        } = windows.get(policy.name).copied().unwrap_or_default();
        let open = if unbounded == 0 {
            String::new()
        } else {
            format!("; {unbounded} without a bound")
        };
        println!(
            "| `{}` | {} | {count} | {plain} | {in_fault}{open} |",
            policy.name,
            describe_policy(policy)
        );
    }
    println!("\nWhat faults explain:\n");
    ledger
        .explained_count_by_cause()
        .iter()
        .for_each(|(what, times)| println!("- {times} × {what}"));
    let (from, to) = (
        ledger.start,
        results.last().map_or(ledger.start, |last| last.ended),
    );
    let still = ledger.total_stall_time(from, to);
    if still > Duration::ZERO {
        println!(
            "- {:.1} s in which this machine was too busy for anything",
            still.as_secs_f64()
        );
    }
    if still * 100 > (to - from) * MAX_STALL_PERCENT {
        ledger.record_unexplained_problem(format!(
            "this machine stalled for {still:?}: too long for a meaningful result"
        ));
    }
    let problems = ledger.unexplained_events();
    println!(
        "\n{} requests, {} of them failed, ",
        all.requests, all.failed
    );
    if problems.is_empty() {
        println!("and no unexplained problems.");
    } else {
        println!("and these unexplained problems:\n");
        problems
            .iter()
            .for_each(|(what, times)| println!("- {times} × {what}"));
    }
    problems.is_empty()
}

/// Returns the share of the possible units that a policy admitted; records a problem if it is too
/// low.
fn check_used_percent(
    context: &FleetContext,
    result: &PhaseResult,
    policy: &FleetPolicy,
    share: &RequestTotals,
) -> String {
    let ledger = &context.ledger;
    let of = |counts: &BTreeMap<&str, u64>| counts.get(policy.name).copied().unwrap_or(0) as f64;
    let possible = ledger.possible_units(policy, MASTER_COUNT as u64, result.began, result.ended);
    let percent = 100.0 * of(&share.admitted) / possible.min(of(&share.requested)).max(1.0);
    let is_still = !ledger
        .total_stall_time(result.began, result.ended)
        .is_zero();
    let least = match (
        result.phase.is_outage() || is_still,
        policy.on_store_failure,
    ) {
        (false, _) => policy.min_used_percent,
        (true, StoreFailureMode::Closed) => 0,
        (true, StoreFailureMode::Open | StoreFailureMode::Local) => MIN_USED_PERCENT_IN_OUTAGE,
    };
    if percent < least as f64 {
        let (title, name) = (result.phase.title(), policy.name);
        ledger.record_unexplained_problem(format!(
            "{title}: {name} admitted {percent:.0} % of what it could, not {least} %"
        ));
    }
    format!("{percent:.0}")
}

fn describe_policy(policy: &FleetPolicy) -> String {
    let without = format!("{:?}", policy.on_store_failure).to_lowercase();
    let lease = if policy.lease.is_empty() {
        ""
    } else {
        ", leased"
    };
    format!(
        "{} in {} s by `{}`{lease}, {without}",
        policy.requests,
        LIMIT_PERIOD.as_secs(),
        policy.algorithm_name
    )
}

impl std::fmt::Display for FullestWindow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.bound {
            0 => f.write_str("none"),
            allowed => write!(f, "{} of {allowed}", self.admitted),
        }
    }
}
