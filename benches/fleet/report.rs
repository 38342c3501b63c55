//! The report, as Markdown.

use crate::FleetContext;
use crate::charge_checks::ChargeTotals;
use crate::masters::MASTER_COUNT;
use crate::phases::PhaseResult;
use crate::policies::{FleetPolicy, LIMIT_PERIOD, POLICIES};
use crate::window_checks::{FullestWindow, WindowReport};
use std::collections::BTreeMap;
use std::process::Command;
use std::time::Duration;

/// Maximum stall time, in percent; beyond it, the run is not meaningful.
const MAX_STALL_PERCENT: u32 = 5;

/// Prints the report and returns whether all checks passed.
pub(crate) fn print_report(seed: u32, context: &FleetContext, results: &[PhaseResult]) -> bool {
    let FleetContext { ledger, keys, .. } = context;
    ledger.judge_requests(keys);
    let windows = ledger.judge_windows(keys);
    let assertions = if cfg!(debug_assertions) {
        "with"
    } else {
        "without"
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
        "Seed {seed}: tidegate {} ({assertions} debug assertions), Redis {redis}, {MASTER_COUNT} masters, {} cores, {:.0} s.\n",
        env!("CARGO_PKG_VERSION"),
        std::thread::available_parallelism().map_or(0, usize::from),
        results
            .last()
            .map_or(0.0, |last| ledger.seconds_since_start(last.ended)),
    );
    let (requests, failed) = print_phases(context, results);
    print_windows(&windows);
    print_charges(context, results);
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
    println!("\n{requests} requests, {failed} of them failed, ");
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

/// Prints a row for each phase. Returns the requests and the failed ones.
fn print_phases(context: &FleetContext, results: &[PhaseResult]) -> (u64, u64) {
    let ledger = &context.ledger;
    let names: Vec<_> = window_policies()
        .map(|policy| format!("`{}`", policy.name))
        .collect();
    println!(
        "| from, s | | nodes after it | requests | failed | decided without Redis | until all use Redis again, s | {} | lowest key |",
        names.join(" | ")
    );
    println!("|{}", "---|".repeat(8 + names.len()));
    let (mut requests, mut failed) = (0, 0);
    for one in results {
        let totals = ledger.totals_between(&context.keys, one.began, one.ended);
        println!(
            "| {:.0} | {} | {} | {} | {} | {} | {} | {} | {} |",
            ledger.seconds_since_start(one.began),
            one.phase.title(),
            one.nodes,
            totals.requests,
            totals.failed,
            one.degraded_decisions,
            one.recovery
                .map(|time| format!("{:.1}", time.as_secs_f64()))
                .unwrap_or_default(),
            window_policies()
                .map(|policy| context.check_used_percent(one, policy, &totals))
                .collect::<Vec<_>>()
                .join(" | "),
            context
                .check_keys_alone(one)
                .map(|percent| format!("{percent:.0}"))
                .unwrap_or_default(),
        );
        requests += totals.requests;
        failed += totals.failed;
    }
    println!(
        "\nPolicy columns: admitted requests in percent of the possible ones, which are bounded by demand and by the limit (the lower one if it changes). Lowest key: of the required minimum, on healthy masters and after the recovery. Response times: {}.\n",
        ["half of them", "99 %", "99.9 %", "all"]
            .iter()
            .zip(ledger.latency_quantiles(&[500, 990, 999, 1000]))
            .map(|(what, took)| format!("at most {:.1} ms ({what})", took.as_secs_f64() * 1000.0))
            .collect::<Vec<_>>()
            .join(", "),
    );
    (requests, failed)
}

fn print_windows(windows: &BTreeMap<&'static str, WindowReport>) {
    println!(
        "| policy | | windows of {} s judged | fullest | fullest where a fault permits more |",
        LIMIT_PERIOD.as_secs()
    );
    println!("|---|---|---|---|---|");
    for policy in window_policies() {
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
}

/// Prints charges, requests in flight and measurements.
fn print_charges(context: &FleetContext, results: &[PhaseResult]) {
    println!(
        "\n| phase | units forwarded | units charged | most charged in excess, and not charged, of one key |"
    );
    println!("|---|---|---|---|");
    for one in results {
        let ChargeTotals {
            forwarded,
            charged,
            max_surplus,
            max_deficit,
        } = one.charges;
        let title = one.phase.title();
        println!("| {title} | {forwarded} | {charged} | {max_surplus}, {max_deficit} |");
    }
    let most = context.judge_requests_in_flight();
    println!(
        "\n- Requests in flight at the apps: at most {} of {}; {} where a fault permits more",
        most.without_fault, most.requests, most.in_fault
    );
    for text in context.ledger.measurements() {
        println!("- {text}");
    }
}

fn window_policies() -> impl Iterator<Item = &'static FleetPolicy> {
    POLICIES.iter().filter(|policy| policy.is_window_limit())
}

fn describe_policy(policy: &FleetPolicy) -> String {
    let without = format!("{:?}", policy.on_store_failure).to_lowercase();
    let lease = if policy.settings.starts_with("lease") {
        ", leased"
    } else {
        ""
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
