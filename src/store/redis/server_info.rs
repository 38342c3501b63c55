//! Polls memory, eviction policy and clock of Redis. For operators only: no decision depends on it.

use super::RedisStore;
use super::diagnostics::{InfoFields, read_clock_once};
use super::live_connection::LiveConnection;
use crate::clock::Clock;
use crate::telemetry::metrics::RedisServerMetrics;
use redis::{cmd, from_redis_value};
use std::time::Duration;
use tokio::time::{sleep, timeout};

/// Approximate poll interval: `INFO memory` and `TIME` take a server some microseconds.
const POLL_INTERVAL: Duration = Duration::from_secs(10);

/// The values of one server; `None` where an ACL forbids the command or no reply came.
#[derive(Default)]
struct ServerInfoReply {
    memory: Option<InfoFields>,
    clock_skew_us: Option<i64>,
}

/// Polls all masters until the task is aborted.
pub(super) async fn run_server_info_poller(redis: RedisStore) {
    redis.wait_until_ready().await;
    let mut warned_policy = None;
    loop {
        let mut server_infos = Vec::new();
        // A proxy has no memory and no clock of its own, and may close the connection.
        let masters = if redis.is_behind_proxy() {
            Vec::new()
        } else {
            redis.master_connections()
        };
        for master in masters {
            server_infos.push(match master {
                Ok(live) => {
                    let clock = &redis.clock;
                    query_server_info(&live, clock, redis.settings.connect_timeout).await
                }
                Err(_) => ServerInfoReply::default(),
            });
        }
        warn_about_eviction(&server_infos, &mut warned_policy);
        *redis.server_info.lock() = aggregate_server_info(&server_infos);
        sleep(POLL_INTERVAL.mul_f64(0.75 + fastrand::f64() / 2.0)).await;
    }
}

/// Queries memory and clock of one server. A server that does not answer takes twice
/// `call_timeout`; its failure is detected elsewhere.
async fn query_server_info(
    live: &LiveConnection,
    clock: &Clock,
    call_timeout: Duration,
) -> ServerInfoReply {
    let mut command = cmd("INFO");
    let memory = timeout(call_timeout, live.run_command(command.arg("memory"))).await;
    let memory = memory.ok().and_then(Result::ok);
    let reading = timeout(call_timeout, read_clock_once(live, clock)).await;
    let reading = reading.ok().and_then(Result::ok).flatten();
    ServerInfoReply {
        memory: memory.and_then(|reply| Some(InfoFields(from_redis_value(reply).ok()?))),
        clock_skew_us: reading.and_then(|reading| reading.ahead_us.checked_neg()),
    }
}

/// Aggregates several masters: memory is the sum, and known if all report it; the clock skew is the
/// largest.
fn aggregate_server_info(server_infos: &[ServerInfoReply]) -> RedisServerMetrics {
    let memory = server_infos.iter().map(|info| info.memory.as_ref());
    let memory: Option<Vec<&InfoFields>> = memory.collect();
    let memory = memory.filter(|servers| !servers.is_empty());
    let sum = |number: fn(&InfoFields) -> Option<u64>| -> Option<u64> {
        memory.as_ref()?.iter().map(|info| number(info)).sum()
    };
    let skews = server_infos.iter().filter_map(|info| info.clock_skew_us);
    RedisServerMetrics {
        memory_bytes: sum(|info| info.number("used_memory")),
        // 0: no limit.
        memory_max_bytes: sum(|info| info.number("maxmemory").filter(|bytes| *bytes > 0)),
        clock_skew_us: skews.max_by_key(|skew| skew.unsigned_abs()),
        may_evict: memory.map(|infos| infos.iter().any(|info| evicting_policy(info).is_some())),
        ..RedisServerMetrics::default()
    }
}

/// Warns once per change of the policy: a Redis that evicts keys loses usage.
fn warn_about_eviction(server_infos: &[ServerInfoReply], warned_policy: &mut Option<String>) {
    let memories = || server_infos.iter().filter_map(|info| info.memory.as_ref());
    let Some(policy) = memories().find_map(evicting_policy) else {
        // A server without a reply may still evict keys.
        if memories().next().is_some() {
            *warned_policy = None;
        }
        return;
    };
    if warned_policy.as_deref() != Some(policy) {
        tracing::warn!(
            maxmemory_policy = policy,
            "redis may evict counters and so admit more than the limits; set maxmemory-policy noeviction"
        );
        *warned_policy = Some(policy.to_owned());
    }
}

/// The eviction policy of a server that may evict keys.
fn evicting_policy(info: &InfoFields) -> Option<&str> {
    let policy = info.text("maxmemory_policy");
    policy.filter(|policy| *policy != "noeviction")
}

#[cfg(test)]
mod tests {
    use super::*;
    use redis::InfoDict;

    fn server_info(used: u64, max: u64, eviction_policy: &str, skew: i64) -> ServerInfoReply {
        let memory = format!(
            "# Memory\r\nused_memory:{used}\r\nused_memory_human:1.00M\r\nmaxmemory:{max}\r\n\
             maxmemory_human:2.00M\r\nmaxmemory_policy:{eviction_policy}\r\n"
        );
        ServerInfoReply {
            memory: Some(InfoFields(InfoDict::new(&memory))),
            clock_skew_us: Some(skew),
        }
    }

    #[test]
    fn unreadable_memory_is_not_reported() {
        let unreadable = ServerInfoReply {
            memory: Some(InfoFields(InfoDict::new("used_memory:many\r\n"))),
            clock_skew_us: None,
        };
        assert_eq!(aggregate_server_info(&[unreadable]).memory_bytes, None);
    }

    #[test]
    fn aggregates_the_memory_sum_and_the_largest_clock_skew_of_all_servers() {
        let aggregated = aggregate_server_info(&[
            server_info(10, 100, "noeviction", 5),
            server_info(20, 200, "noeviction", -9),
        ]);
        assert_eq!(
            (
                aggregated.memory_bytes,
                aggregated.memory_max_bytes,
                aggregated.may_evict
            ),
            (Some(30), Some(300), Some(false))
        );
        assert_eq!(aggregated.clock_skew_us, Some(-9));
        let aggregated = aggregate_server_info(&[
            server_info(10, 0, "noeviction", 1),
            server_info(20, 200, "volatile-ttl", 0),
        ]);
        assert_eq!(
            (aggregated.memory_max_bytes, aggregated.may_evict),
            (None, Some(true)),
            "one server has no limit, one evicts"
        );
        let partly_unanswered = aggregate_server_info(&[
            server_info(10, 100, "noeviction", 5),
            ServerInfoReply::default(),
        ]);
        assert_eq!(
            (
                partly_unanswered.memory_bytes,
                partly_unanswered.clock_skew_us
            ),
            (None, Some(5)),
            "a partial sum is not reported"
        );
        assert_eq!(aggregate_server_info(&[]), RedisServerMetrics::default());
    }
}
