//! The health of Redis for this use, for `tidegate doctor` and `GET /doctor`.
//!
//! `store::redis` collects the facts. This module judges them and gives advice.

mod server_findings;
mod store_findings;

pub(crate) use server_findings::format_bytes;

use crate::admin::{
    DoctorFinding, DoctorReport, ExaminedReplica, ExaminedServer, ExaminedStore, FindingLevel,
    PolicyMemory,
};
use crate::clock;
use crate::limiter::Algorithm;
use crate::policy::{Policy, PolicyTable};
use crate::store::redis::{
    PERMISSION_REMEDY, PolicyKeySample, RedisConnectionError, RedisDiagnosis, RedisSettings,
    ServerFacts, diagnose_redis,
};
use std::collections::{BTreeMap, BTreeSet};

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

/// The level of a value: a warning and a fault each from a threshold on.
fn level_from(value: u64, warning_from: u64, fault_from: u64) -> FindingLevel {
    match value {
        value if value >= fault_from => FindingLevel::Fault,
        value if value >= warning_from => FindingLevel::Warning,
        _ => FindingLevel::Ok,
    }
}

/// A check without a result, and why.
fn unknown(check: &'static str, what: &str, error: &RedisConnectionError) -> DoctorFinding {
    let advice = "run `tidegate doctor` again; if this stays, compare the network and the load of Redis (SLOWLOG, LATENCY DOCTOR)";
    let advice = permission_advice(error).unwrap_or(advice);
    let found = quote_error(what, error);
    finding(FindingLevel::Unknown, check, found, advice)
}

/// A fault that quotes the error of the server or the system, with advice for its kind.
fn failure(check: &'static str, what: &str, error: &RedisConnectionError) -> DoctorFinding {
    let advice = permission_advice(error).unwrap_or(error.remedy());
    fault(check, quote_error(what, error), advice)
}

/// Advice for a check that failed because of a missing permission.
fn permission_advice(error: &RedisConnectionError) -> Option<&'static str> {
    let advice = "grant what the findings about permissions name";
    (error.remedy() == PERMISSION_REMEDY).then_some(advice)
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

/// The figures of one server.
#[allow(
    clippy::cast_precision_loss,
    reason = "latencies and clock differences are far below 2^53 µs"
)]
fn describe_server(address: &str, facts: &ServerFacts) -> ExaminedServer {
    let info = facts.info.as_ref().ok();
    let text = |name: &str| info.and_then(|info| info.text(name)).map(str::to_owned);
    let number = |name: &str| info.and_then(|info| info.number(name));
    let replicas = info.map(|info| {
        let replicas = info.replicas().map(|replica| ExaminedReplica {
            address: replica.address,
            state: replica.state.to_owned(),
            behind_bytes: replica.behind_bytes,
            lag_s: replica.lag_s,
        });
        replicas.collect()
    });
    let latency = facts.latency.as_ref().ok();
    let clock = facts.clock.as_ref().ok();
    let denied = facts.denied_commands.as_ref().ok();
    let denied = denied.map(|denied| denied.iter().map(|one| one.command.to_owned()).collect());
    let to_ms = |us: u64| us as f64 / 1000.0;
    ExaminedServer {
        address: address.to_owned(),
        version: text("redis_version"),
        valkey_version: text("valkey_version"),
        mode: text("redis_mode"),
        role: text("role"),
        uptime_s: number("uptime_in_seconds"),
        memory_bytes: number("used_memory"),
        memory_max_bytes: number("maxmemory").filter(|max| *max > 0),
        maxmemory_policy: text("maxmemory_policy"),
        append_only_file: text("aof_enabled").map(|enabled| enabled == "1"),
        replicas,
        clock_ahead_ms: clock.map(|clock| clock.ahead_us as f64 / 1000.0),
        clock_error_ms: clock.map(|clock| to_ms(clock.error_us)),
        latency_p50_ms: latency.map(|latency| to_ms(latency.p50_us)),
        latency_p99_ms: latency.map(|latency| to_ms(latency.p99_us)),
        denied_commands: denied,
        scanned_share: facts.keys.as_ref().ok().map(|keys| keys.scanned_share),
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
