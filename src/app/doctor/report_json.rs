//! The report as JSON, for scripts and the admin endpoint.

use super::{DoctorFinding, DoctorReport, FindingLevel, ServerSummary};
use serde_json::{Value, json};

impl DoctorReport {
    pub(crate) fn to_json(&self, checked_at_s: u64) -> Value {
        let (faults, warnings, unknown) = (
            self.count(FindingLevel::Fault),
            self.count(FindingLevel::Warning),
            self.count(FindingLevel::Unknown),
        );
        let store = match &self.store {
            None => json!({ "kind": "memory" }),
            Some(redis) => json!({
                "kind": "redis",
                "address": redis.address,
                "key_prefix": redis.key_prefix,
            }),
        };
        let policies = self.policies.iter().map(|memory| {
            json!({
                "policy": memory.policy,
                "counters": memory.counters,
                "bytes": memory.bytes,
                "without_expiry": memory.unexpiring,
            })
        });
        json!({
            "ok": faults == 0 && unknown == 0,
            "faults": faults,
            "warnings": warnings,
            "unknown": unknown,
            "checked_at_s": checked_at_s,
            "store": store,
            "findings": self.findings.iter().map(finding_to_json).collect::<Vec<_>>(),
            "servers": self.servers.iter().map(server_to_json).collect::<Vec<_>>(),
            "policies": policies.collect::<Vec<_>>(),
        })
    }
}

fn finding_to_json(finding: &DoctorFinding) -> Value {
    json!({
        "level": finding.level.into_str(),
        "check": finding.check,
        "server": finding.server,
        "found": finding.found,
        "advice": finding.advice,
    })
}

#[allow(
    clippy::cast_precision_loss,
    reason = "latencies and clock differences are far below 2^53 µs"
)]
fn server_to_json(server: &ServerSummary) -> Value {
    let facts = &server.facts;
    let info = facts.info.as_ref().ok();
    let text = |name: &str| info.and_then(|info| info.text(name));
    let number = |name: &str| info.and_then(|info| info.number(name));
    let replicas = info.map(|info| {
        let replicas = info.replicas().map(|replica| {
            json!({
                "address": replica.address,
                "state": replica.state,
                "behind_bytes": replica.behind_bytes,
                "lag_s": replica.lag_s,
            })
        });
        replicas.collect::<Vec<_>>()
    });
    let latency = facts.latency.as_ref().ok();
    let clock = facts.clock.as_ref().ok();
    let denied = facts.denied_commands.as_ref().ok();
    let denied = denied.map(|denied| denied.iter().map(|one| one.command).collect::<Vec<_>>());
    let to_ms = |us: u64| us as f64 / 1000.0;
    json!({
        "address": server.address,
        "version": text("redis_version"),
        "valkey_version": text("valkey_version"),
        "mode": text("redis_mode"),
        "role": text("role"),
        "uptime_s": number("uptime_in_seconds"),
        "memory_bytes": number("used_memory"),
        "memory_max_bytes": number("maxmemory").filter(|max| *max > 0),
        "maxmemory_policy": text("maxmemory_policy"),
        "append_only_file": text("aof_enabled").map(|enabled| enabled == "1"),
        "replicas": replicas,
        "clock_ahead_ms": clock.map(|clock| clock.ahead_us as f64 / 1000.0),
        "clock_error_ms": clock.map(|clock| to_ms(clock.error_us)),
        "latency_p50_ms": latency.map(|latency| to_ms(latency.p50_us)),
        "latency_p99_ms": latency.map(|latency| to_ms(latency.p99_us)),
        "denied_commands": denied,
        "scanned_share": facts.keys.as_ref().ok().map(|keys| keys.scanned_share),
    })
}
