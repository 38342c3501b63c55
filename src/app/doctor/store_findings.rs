//! Judges what concerns all servers: the configuration, the topology and the clocks.

use super::{FindingLevel, FindingList};
use crate::config::format_duration;
use crate::store::redis::{RedisDiagnosis, RedisSettings, RedisTopology, ServerFacts};
use std::time::Duration;

/// Envoy's default timeout for a call of the rate limit service.
const ENVOY_DEFAULT_TIMEOUT: Duration = Duration::from_millis(20);

/// Clock differences from which on there is a warning, and a fault.
const CLOCK_WARNING_US: u64 = 1_000_000;
const CLOCK_FAULT_US: u64 = 10_000_000;

/// Judges settings that are legal, and depend on Redis or on the caller.
pub(super) fn judge_configuration(
    findings: &mut FindingList,
    settings: &RedisSettings,
    serves_rate_limit_service: bool,
) {
    if !serves_rate_limit_service {
        return;
    }
    let timeout = format_duration(settings.timeout);
    if settings.timeout >= ENVOY_DEFAULT_TIMEOUT {
        findings.add_warning(
            "rls",
            format!("store.redis.timeout is {timeout}, and Envoy waits 20 ms for the rate limit service by default: Envoy forwards later answers unmetered"),
            "set `timeout: 0.25s` in Envoy's rate limit filter, and watch Envoy's cluster.*.ratelimit.failure_mode_allowed: tidegate does not see all of these calls",
        );
    } else {
        findings.add_ok(
            "rls",
            format!("store.redis.timeout is {timeout}, below Envoy's default timeout of 20 ms"),
        );
    }
}

/// Judges the search for the masters, by sentinels or in a cluster.
pub(super) fn judge_topology(
    findings: &mut FindingList,
    settings: &RedisSettings,
    diagnosis: &RedisDiagnosis,
) {
    judge_sentinels(findings, diagnosis);
    if let Some(error) = &diagnosis.discovery_error {
        findings.add_error(
            "topology",
            "no node answers with the slots of the cluster",
            error,
        );
        if error.message.contains("cluster support disabled") {
            findings.add_fault(
                "topology",
                "topology is \"cluster\", and the server is not in a cluster".to_owned(),
                "set store.redis.topology to \"standalone\", and url instead of urls",
            );
        }
    }
    match diagnosis.unassigned_slots {
        Some(0) => findings.add_ok(
            "topology",
            format!(
                "cluster of {} masters; all hash slots have one",
                diagnosis.servers.len()
            ),
        ),
        Some(slots) => findings.add_fault(
            "topology",
            format!(
                "{slots} hash slots of the cluster have no master: decisions about their keys fail"
            ),
            "restore the missing masters, or assign the slots: redis-cli --cluster fix",
        ),
        None if settings.topology == RedisTopology::Standalone => {
            findings.add_ok("topology", "one server".to_owned());
        }
        None => {}
    }
    if diagnosis.omitted_servers > 0 {
        findings.add_warning(
            "topology",
            format!(
                "{} further masters were not examined",
                diagnosis.omitted_servers
            ),
            "examine them by a configuration with other urls",
        );
    }
}

fn judge_sentinels(findings: &mut FindingList, diagnosis: &RedisDiagnosis) {
    let answers = || diagnosis.sentinels.iter();
    let mut masters: Vec<&String> = answers()
        .filter_map(|one| one.master.as_ref().ok())
        .collect();
    masters.sort_unstable();
    masters.dedup();
    let is_master_known = !masters.is_empty();
    for answer in answers() {
        let Err(error) = &answer.master else { continue };
        let found = format!(
            "sentinel {} names no master ({}): {}",
            answer.sentinel,
            error.kind.into_str(),
            error.message
        );
        let level = if is_master_known {
            FindingLevel::Warning
        } else {
            FindingLevel::Fault
        };
        findings.add(level, "topology", found, Some(error.remedy().to_owned()));
    }
    match masters.as_slice() {
        [] => {}
        [master] => {
            let count = answers().filter(|one| one.master.is_ok()).count();
            findings.add_ok("topology", format!("{count} sentinels name the master {master}"));
        }
        several => findings.add_fault(
            "topology",
            format!("the sentinels name different masters: {several:?}"),
            "wait until a failover in progress has ended; else check that all sentinels monitor one group",
        ),
    }
}

/// Compares the clocks of the masters with each other: a slot that moves brings its times along.
pub(super) fn judge_clocks_between_servers(
    findings: &mut FindingList,
    servers: &[(String, Box<ServerFacts>)],
) {
    let ahead = || {
        let clocks = servers
            .iter()
            .filter_map(|(address, facts)| Some((facts.clock.as_ref().ok()?, address)));
        clocks.map(|(clock, address)| (clock.ahead_us, address))
    };
    if let (Some((low_us, slowest)), Some((high_us, fastest))) = (ahead().min(), ahead().max())
        && servers.len() > 1
    {
        let difference_us = high_us.abs_diff(low_us);
        let found = format!(
            "the clocks of the masters differ by {}: {fastest} is ahead of {slowest}",
            format_seconds(difference_us)
        );
        add_clock_finding(
            findings,
            difference_us,
            found,
            "synchronize the clocks of all masters (NTP): a counter that moves to another master keeps the times of the first",
        );
    }
}

/// Adds a finding about a clock difference. The level depends on the difference.
pub(super) fn add_clock_finding(
    findings: &mut FindingList,
    difference_us: u64,
    found: String,
    advice: &str,
) {
    let level = match difference_us {
        CLOCK_FAULT_US.. => FindingLevel::Fault,
        CLOCK_WARNING_US.. => FindingLevel::Warning,
        _ => FindingLevel::Ok,
    };
    findings.add_judged(level, "clock", found, advice);
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
