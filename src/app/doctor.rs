//! The health of Redis for this use, for `tidegate doctor` and `GET /doctor`.
//!
//! `store::redis` collects the facts. This module judges them and gives advice.

mod server_findings;
mod server_report;
mod store_findings;

pub(crate) use server_findings::format_bytes;
use server_report::describe_server;

use crate::admin::{DoctorFinding, DoctorReport, ExaminedStore, FindingLevel, PolicyMemory};
use crate::clock;
use crate::limiter::Algorithm;
use crate::policy::{Policy, PolicyTable};
use crate::store::redis::{
    PERMISSION_REMEDY, PolicyKeySample, RedisConnectionError, RedisDiagnosis, RedisSettings,
    diagnose_redis,
};
use std::collections::{BTreeMap, BTreeSet};

/// Advice for a check that failed because of a missing permission.
const PERMISSION_ADVICE: &str = "grant what the findings about permissions name";

/// Examines the servers of `redis`, or reports that the store is memory.
pub(crate) async fn examine_store(
    redis: Option<&RedisSettings>,
    table: &PolicyTable,
    serves_rate_limit_service: bool,
) -> DoctorReport {
    let Some(settings) = redis else {
        let found = "store.kind is \"memory\": each instance counts by itself, and there is no Redis to examine";
        return new_report(ExaminedStore::Memory, vec![ok("store", found)]);
    };
    let diagnosis = Box::pin(diagnose_redis(settings, &configured_algorithms(table))).await;
    let mut findings = Vec::new();
    findings
        .extend(serves_rate_limit_service.then(|| store_findings::judge_service_timeout(settings)));
    findings.extend(store_findings::judge_topology(settings, &diagnosis));
    let policies = estimate_policy_memory(&diagnosis);
    let mut examined = Vec::new();
    for server in diagnosis.servers {
        let of_server = match server.result {
            Ok(facts) => {
                let of_server = server_findings::judge_server(settings, &facts);
                examined.push((server.address.clone(), facts));
                of_server
            }
            Err(error) => vec![failure("connection", "no connection", &error)],
        };
        findings.extend(of_server.into_iter().map(|finding| DoctorFinding {
            server: Some(server.address.clone()),
            ..finding
        }));
    }
    findings.extend(store_findings::judge_clocks_between_servers(&examined));
    let servers = examined
        .iter()
        .map(|(address, facts)| describe_server(address, facts));
    let store = ExaminedStore::Redis {
        address: settings.to_string(),
        key_prefix: settings.key_prefix.clone(),
    };
    DoctorReport {
        servers: servers.collect(),
        policies,
        ..new_report(store, findings)
    }
}

fn new_report(store: ExaminedStore, findings: Vec<DoctorFinding>) -> DoctorReport {
    let count = |level| findings.iter().filter(|one| one.level == level).count();
    let (faults, unknown) = (count(FindingLevel::Fault), count(FindingLevel::Unknown));
    DoctorReport {
        ok: faults == 0 && unknown == 0,
        faults,
        warnings: count(FindingLevel::Warning),
        unknown,
        checked_at_s: clock::unix_time_s(),
        store,
        findings,
        servers: Vec::new(),
        policies: Vec::new(),
    }
}

fn ok(check: &'static str, found: impl Into<String>) -> DoctorFinding {
    finding(FindingLevel::Ok, check, found, "")
}

fn warning(check: &'static str, found: impl Into<String>, advice: &str) -> DoctorFinding {
    finding(FindingLevel::Warning, check, found, advice)
}

fn fault(check: &'static str, found: impl Into<String>, advice: &str) -> DoctorFinding {
    finding(FindingLevel::Fault, check, found, advice)
}

/// A check without a result, and why.
fn unknown(check: &'static str, what: &str, error: &RedisConnectionError) -> DoctorFinding {
    let advice = match error.remedy() {
        PERMISSION_REMEDY => PERMISSION_ADVICE,
        _ => {
            "run `tidegate doctor` again; if this stays, compare the network and the load of Redis (SLOWLOG, LATENCY DOCTOR)"
        }
    };
    finding(
        FindingLevel::Unknown,
        check,
        quote_error(what, error),
        advice,
    )
}

/// A fault that quotes the error of the server or the system, with advice for its kind.
fn failure(check: &'static str, what: &str, error: &RedisConnectionError) -> DoctorFinding {
    let advice = match error.remedy() {
        PERMISSION_REMEDY => PERMISSION_ADVICE,
        remedy => remedy,
    };
    fault(check, quote_error(what, error), advice)
}

fn quote_error(what: &str, error: &RedisConnectionError) -> String {
    format!("{what} ({}): {}", error.kind.into_str(), error.message)
}

/// The advice counts unless the level is `Ok`.
fn finding(
    level: FindingLevel,
    check: &'static str,
    found: impl Into<String>,
    advice: &str,
) -> DoctorFinding {
    DoctorFinding {
        level,
        check: check.into(),
        server: None,
        found: found.into(),
        advice: (level != FindingLevel::Ok).then(|| advice.to_owned()),
    }
}

/// One algorithm of each kind that the policies use.
fn configured_algorithms(table: &PolicyTable) -> Vec<Algorithm> {
    let mut algorithms: Vec<Algorithm> = Vec::new();
    for quota in table.policies().iter().filter_map(Policy::quota) {
        for named in &quota.limits {
            let algorithm = named.limit.algorithm;
            let is_same = |known: &Algorithm| {
                std::mem::discriminant(known) == std::mem::discriminant(&algorithm)
            };
            if !algorithms.iter().any(is_same) {
                algorithms.push(algorithm);
            }
        }
    }
    algorithms
}

/// Adds up the samples of all servers, and extrapolates them to the keys that were not scanned.
#[allow(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the results are estimates, far below 2^53"
)]
fn estimate_policy_memory(diagnosis: &RedisDiagnosis) -> Vec<PolicyMemory> {
    let mut estimates: BTreeMap<Option<String>, (f64, f64, u64)> = BTreeMap::new();
    let facts = diagnosis
        .servers
        .iter()
        .filter_map(|server| server.result.as_ref().ok());
    for sample in facts.filter_map(|facts| facts.keys.as_ref().ok()) {
        let share = sample.scanned_share.max(1e-6);
        let mut all = PolicyKeySample::default();
        sample
            .policies
            .values()
            .for_each(|policy| all.merge(policy));
        for (policy, counts) in &sample.policies {
            // A policy without a measured counter has the average of the server.
            let measured = if counts.measured_keys > 0 {
                counts
            } else {
                &all
            };
            let mean = measured.measured_bytes as f64 / measured.measured_keys.max(1) as f64;
            let counters = counts.keys as f64 / share;
            let sums = estimates.entry(policy.clone()).or_default();
            sums.0 += counters;
            sums.1 += counters * mean;
            sums.2 += counts.unexpiring_keys;
        }
    }
    let mut policies: Vec<PolicyMemory> = estimates
        .into_iter()
        .map(|(policy, (counters, bytes, without_expiry))| PolicyMemory {
            policy,
            counters: counters.round() as u64,
            bytes: bytes.round() as u64,
            without_expiry,
        })
        .collect();
    policies.sort_by_key(|policy| std::cmp::Reverse(policy.bytes));
    policies
}

/// Names as `a, b`, each once.
fn join_names<'n>(names: impl Iterator<Item = &'n str>) -> String {
    let names: BTreeSet<&str> = names.collect();
    names.into_iter().collect::<Vec<_>>().join(", ")
}
