//! Judges what concerns all servers: the configuration, the topology and the clocks.

use super::{
    DoctorFinding, FindingLevel, failure, fault, finding, level_from, ok, quote_error, warning,
};
use crate::config::format_duration;
use crate::store::redis::{RedisDiagnosis, RedisSettings, RedisTopology, ServerFacts};
use std::collections::BTreeSet;
use std::time::Duration;

/// Envoy's default timeout for a call of the rate limit service.
const ENVOY_DEFAULT_TIMEOUT: Duration = Duration::from_millis(20);

/// Clock differences from which on there is a warning, and a fault.
pub(super) const CLOCK_WARNING_US: u64 = 1_000_000;
pub(super) const CLOCK_FAULT_US: u64 = 10_000_000;

/// Judges the timeout of decisions for the rate limit service, which depends on the caller.
pub(super) fn judge_service_timeout(settings: &RedisSettings) -> DoctorFinding {
    let timeout = format_duration(settings.timeout);
    if settings.timeout >= ENVOY_DEFAULT_TIMEOUT {
        warning(
            "rls",
            format!(
                "store.redis.timeout is {timeout}, and Envoy waits 20 ms for the rate limit service by default: Envoy forwards later answers unmetered"
            ),
            "set `timeout: 0.25s` in Envoy's rate limit filter, and watch Envoy's cluster.*.ratelimit.failure_mode_allowed: tidegate does not see all of these calls",
        )
    } else {
        ok(
            "rls",
            format!("store.redis.timeout is {timeout}, below Envoy's default timeout of 20 ms"),
        )
    }
}

/// Judges the search for the masters, by sentinels or in a cluster.
pub(super) fn judge_topology(
    settings: &RedisSettings,
    diagnosis: &RedisDiagnosis,
) -> Vec<DoctorFinding> {
    let mut findings = judge_sentinels(diagnosis);
    if let Some(error) = &diagnosis.discovery_error {
        let what = "no node answers with the slots of the cluster";
        findings.push(failure("topology", what, error));
        if error.message.contains("cluster support disabled") {
            findings.push(fault(
                "topology",
                "topology is \"cluster\", and the server is not in a cluster",
                "set store.redis.topology to \"standalone\", and url instead of urls",
            ));
        }
    }
    findings.extend(match diagnosis.unassigned_slots {
        Some(0) => {
            let masters = diagnosis.servers.len();
            let found = format!("cluster of {masters} masters; all hash slots have one");
            Some(ok("topology", found))
        }
        Some(slots) => Some(fault(
            "topology",
            format!(
                "{slots} hash slots of the cluster have no master: decisions about their keys fail"
            ),
            "restore the missing masters, or assign the slots: redis-cli --cluster fix",
        )),
        None => {
            let is_standalone = settings.topology == RedisTopology::Standalone;
            is_standalone.then(|| ok("topology", "one server"))
        }
    });
    let omitted = diagnosis.omitted_servers;
    if omitted > 0 {
        let found = format!("{omitted} further masters were not examined");
        let advice = "examine them by a configuration with other urls";
        findings.push(warning("topology", found, advice));
    }
    findings
}

fn judge_sentinels(diagnosis: &RedisDiagnosis) -> Vec<DoctorFinding> {
    let masters = diagnosis.sentinels.iter();
    let named: Vec<&String> = masters.filter_map(|one| one.master.as_ref().ok()).collect();
    let level = if named.is_empty() {
        FindingLevel::Fault
    } else {
        FindingLevel::Warning
    };
    let failed = diagnosis.sentinels.iter().filter_map(|answer| {
        let error = answer.master.as_ref().err()?;
        let what = format!("sentinel {} names no master", answer.sentinel);
        let found = quote_error(&what, error);
        Some(finding(level, "topology", found, error.remedy()))
    });
    let mut findings: Vec<DoctorFinding> = failed.collect();
    let masters: BTreeSet<&String> = named.iter().copied().collect();
    findings.extend(match masters.first() {
        None => None,
        Some(master) if masters.len() == 1 => {
            let found = format!("{} sentinels name the master {master}", named.len());
            Some(ok("topology", found))
        }
        Some(_) => Some(fault(
            "topology",
            format!("the sentinels name different masters: {:?}", masters.iter().collect::<Vec<_>>()),
            "wait until a failover in progress has ended; else check that all sentinels monitor one group",
        )),
    });
    findings
}

/// Compares the clocks of the masters with each other: a slot that moves brings its times along.
pub(super) fn judge_clocks_between_servers(
    servers: &[(String, Box<ServerFacts>)],
) -> Option<DoctorFinding> {
    let clocks = servers
        .iter()
        .filter_map(|(address, facts)| Some((facts.clock.as_ref().ok()?.ahead_us, address)));
    let (low_us, slowest) = clocks.clone().min()?;
    let (high_us, fastest) = clocks.max().filter(|_| servers.len() > 1)?;
    let difference_us = high_us.abs_diff(low_us);
    let found = format!(
        "the clocks of the masters differ by {}: {fastest} is ahead of {slowest}",
        format_seconds(difference_us)
    );
    let advice = "synchronize the clocks of all masters (NTP): a counter that moves to another master keeps the times of the first";
    let level = level_from(difference_us, CLOCK_WARNING_US, CLOCK_FAULT_US);
    Some(finding(level, "clock", found, advice))
}

#[allow(
    clippy::cast_precision_loss,
    reason = "a difference of clocks is shown to people"
)]
pub(super) fn format_seconds(micros: u64) -> String {
    match micros {
        0..1000 => format!("{micros} µs"),
        1000..1_000_000 => format!("{:.1} ms", micros as f64 / 1e3),
        _ => format!("{:.1} s", micros as f64 / 1e6),
    }
}
