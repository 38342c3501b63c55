//! The figures of one server.

use crate::admin::{ExaminedReplica, ExaminedServer};
use crate::store::redis::ServerFacts;

#[allow(
    clippy::cast_precision_loss,
    reason = "latencies and clock differences are far below 2^53 µs"
)]
pub(super) fn describe_server(address: &str, facts: &ServerFacts) -> ExaminedServer {
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
