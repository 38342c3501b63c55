//! The figures of one server as JSON.

use crate::store::redis::ServerFacts;
use serde_json::{Value, json};

#[allow(
    clippy::cast_precision_loss,
    reason = "latencies and clock differences are far below 2^53 µs"
)]
pub(super) fn server_to_json(address: &str, facts: &ServerFacts) -> Value {
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
        "address": address,
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
