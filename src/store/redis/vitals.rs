//! What Redis says of itself: its memory, whether it evicts, its clock. For people only: no decision depends on it.

use super::Redis;
use super::link::{Live, State};
use crate::clock::Clock;
use crate::telemetry::metrics::RedisVitals;
use parking_lot::Mutex;
use redis::{Value, cmd, from_redis_value};
use std::time::Duration;
use tokio::time::{sleep, timeout};

/// How often it is asked, more or less: `INFO memory` and `TIME` take a server some microseconds.
const PAUSE: Duration = Duration::from_secs(10);

/// What was last seen. Empty while there is nobody to ask.
#[derive(Debug, Default)]
pub(super) struct Vitals(Mutex<RedisVitals>);

/// What one server says; `None` where it doesn't, because an ACL forbids the question or no answer came.
#[derive(Debug, Default, PartialEq)]
struct Said {
    memory: Option<Memory>,
    clock_skew_us: Option<i64>,
}

#[derive(Debug, PartialEq)]
struct Memory {
    used: u64,
    /// 0: no limit.
    max: u64,
    eviction: String,
}

impl Vitals {
    pub(super) fn last(&self) -> RedisVitals {
        *self.0.lock()
    }
}

/// Asks now and then, for as long as it is polled.
pub(super) async fn attend(redis: Redis) {
    redis.first_ready().await;
    let mut told = None;
    loop {
        let mut said = Vec::new();
        for master in redis.masters() {
            said.push(match &*master {
                State::Up(live) => ask(live, redis.context.settings.connect_timeout).await,
                State::Down(_) => Said::default(),
            });
        }
        tell_of_eviction(&said, &mut told);
        *redis.context.vitals.0.lock() = together(&said);
        sleep(PAUSE.mul_f64(0.75 + fastrand::f64() / 2.0)).await;
    }
}

/// A server that gives no answer costs `within`, twice; whether it still lives is for others to find out.
async fn ask(live: &Live, within: Duration) -> Said {
    let mut info = cmd("INFO");
    info.arg("memory");
    let memory = timeout(within, live.answer(&info, false)).await;
    let clock = Clock::system();
    let asked_us = clock.now_us();
    let time = timeout(within, live.answer(&cmd("TIME"), false)).await;
    let answered_us = clock.now_us();
    Said {
        memory: memory.ok().and_then(Result::ok).and_then(memory_of),
        clock_skew_us: time
            .ok()
            .and_then(Result::ok)
            .and_then(time_us)
            .and_then(|theirs| {
                // It looked at its clock somewhere on the way: in the middle, if both ways take as long.
                asked_us.midpoint(answered_us).checked_signed_diff(theirs)
            }),
    }
}

fn memory_of(info: Value) -> Option<Memory> {
    let info: String = from_redis_value(info).ok()?;
    let field = |name: &str| {
        info.lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
    };
    let eviction = field("maxmemory_policy")?.to_owned();
    Some(Memory {
        used: field("used_memory")?.parse().ok()?,
        max: field("maxmemory")?.parse().ok()?,
        eviction,
    })
}

/// The reply to TIME: seconds, and microseconds.
fn time_us(reply: Value) -> Option<u64> {
    let (seconds, micros): (u64, u64) = from_redis_value(reply).ok()?;
    seconds.checked_mul(1_000_000)?.checked_add(micros)
}

/// Of several masters: memory is the sum, and known if all say it; the skew is the largest.
fn together(said: &[Said]) -> RedisVitals {
    let memory: Option<Vec<&Memory>> = said.iter().map(|said| said.memory.as_ref()).collect();
    let memory = memory.filter(|servers| !servers.is_empty());
    let sum = |part: fn(&Memory) -> u64| {
        memory
            .as_ref()
            .map(|all| all.iter().map(|one| part(one)).sum())
    };
    let is_bounded = memory
        .as_ref()
        .is_some_and(|all| all.iter().all(|one| one.max > 0));
    let skew = said
        .iter()
        .filter_map(|said| said.clock_skew_us)
        .max_by_key(|skew| skew.unsigned_abs());
    RedisVitals {
        calls: 0,
        memory_bytes: sum(|one| one.used),
        memory_max_bytes: sum(|one| one.max).filter(|_| is_bounded),
        may_evict: memory.map(|all| all.iter().any(|one| one.may_evict())),
        clock_skew_us: skew,
    }
}

/// Once per change: a Redis that evicts forgets who has used what.
fn tell_of_eviction(said: &[Said], told: &mut Option<String>) {
    let memories = || said.iter().filter_map(|said| said.memory.as_ref());
    let Some(policy) = memories()
        .find(|one| one.may_evict())
        .map(|one| &one.eviction)
    else {
        // Who says nothing may still evict.
        if memories().next().is_some() {
            *told = None;
        }
        return;
    };
    if told.as_ref() != Some(policy) {
        tracing::warn!(
            maxmemory_policy = policy,
            "Redis may evict counters, which admits more than the limits say: set maxmemory-policy noeviction"
        );
        *told = Some(policy.clone());
    }
}

impl Memory {
    fn may_evict(&self) -> bool {
        self.eviction != "noeviction"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(used: u64, max: u64, eviction: &str, skew: i64) -> Said {
        Said {
            memory: Some(Memory {
                used,
                max,
                eviction: eviction.to_owned(),
            }),
            clock_skew_us: Some(skew),
        }
    }

    #[test]
    fn what_redis_says_is_found_in_its_words() {
        let info = "# Memory\r\nused_memory:1048576\r\nused_memory_human:1.00M\r\nmaxmemory:2097152\r\n\
                    maxmemory_human:2.00M\r\nmaxmemory_policy:allkeys-lru\r\n";
        let seen = memory_of(Value::BulkString(info.into()));
        assert_eq!(
            seen,
            Some(Memory {
                used: 1 << 20,
                max: 2 << 20,
                eviction: "allkeys-lru".to_owned()
            })
        );
        assert_eq!(
            memory_of(Value::BulkString(b"used_memory:many\r\n".to_vec())),
            None
        );
        let reply = ["7", "000250"]
            .map(|text| Value::BulkString(text.into()))
            .to_vec();
        assert_eq!(time_us(Value::Array(reply)), Some(7_000_250));
        assert_eq!(time_us(Value::Nil), None);
    }

    #[test]
    fn of_several_servers_memory_is_summed_and_the_largest_skew_counts() {
        let seen = together(&[
            said(10, 100, "noeviction", 5),
            said(20, 200, "noeviction", -9),
        ]);
        assert_eq!(
            (seen.memory_bytes, seen.memory_max_bytes, seen.may_evict),
            (Some(30), Some(300), Some(false))
        );
        assert_eq!(seen.clock_skew_us, Some(-9));
        let seen = together(&[
            said(10, 0, "noeviction", 1),
            said(20, 200, "volatile-ttl", 0),
        ]);
        assert_eq!(
            (seen.memory_max_bytes, seen.may_evict),
            (None, Some(true)),
            "one has no limit, one evicts"
        );
        let silent = together(&[said(10, 100, "noeviction", 5), Said::default()]);
        assert_eq!(
            (silent.memory_bytes, silent.clock_skew_us),
            (None, Some(5)),
            "half a sum is none"
        );
        assert_eq!(together(&[]), RedisVitals::default());
    }
}
