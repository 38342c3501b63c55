//! Facts about one server: INFO, its clock, and the latency of decisions.

use super::ServerCheck;
use super::key_sample::KeySample;
use super::permission_trial::DeniedCommand;
use crate::clock::{Clock, saturating_micros};
use crate::limiter::{Algorithm, Limit, LimitCharge, PolicyCharges, each_charge};
use crate::store::redis::error::{RedisConnectionError, RedisErrorKind};
use crate::store::redis::live_connection::LiveConnection;
use redis::{InfoDict, RedisResult, Value, cmd, from_redis_value};
use std::borrow::Cow;
use std::time::Duration;
use tokio::time::Instant;

/// Number of decisions whose latency is measured, and the maximum time for all.
const LATENCY_SAMPLES: usize = 200;
const MAX_MEASURING_TIME: Duration = Duration::from_millis(1500);

/// Maximum number of clock readings, and maximum time for all. The one with the shortest round trip
/// counts.
const CLOCK_READINGS: usize = 5;
const MAX_CLOCK_TIME: Duration = Duration::from_millis(500);

/// Period of the limits that the measured decisions charge. The counters are deleted afterwards,
/// and expire after about this time if the connection breaks before.
const PROBE_PERIOD_US: u64 = 10_000_000;

/// What one server reported. An error is the reason why a fact is missing.
#[derive(Debug)]
pub struct ServerFacts {
    /// Whether the address is that of a proxy that needs keys: only the latency is known.
    pub is_proxy: bool,
    pub info: Result<InfoFields, RedisConnectionError>,
    pub clock: Result<ClockReading, RedisConnectionError>,
    pub denied_commands: Result<Vec<DeniedCommand>, RedisConnectionError>,
    pub latency: Result<ScriptLatency, RedisConnectionError>,
    pub keys: Result<KeySample, RedisConnectionError>,
}

impl ServerFacts {
    pub(super) fn from_proxy(latency: ScriptLatency) -> Self {
        let unknown = RedisConnectionError::new(RedisErrorKind::Other, "a proxy answers");
        Self {
            is_proxy: true,
            info: Err(unknown.clone()),
            clock: Err(unknown.clone()),
            denied_commands: Err(unknown.clone()),
            latency: Ok(latency),
            keys: Err(unknown),
        }
    }
}

/// The fields of INFO.
#[derive(Debug)]
pub struct InfoFields(pub(crate) InfoDict);

/// The server's clock, compared with the clock of this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockReading {
    /// How far the server's clock is ahead.
    pub ahead_us: i64,
    /// Maximum error: half of the round trip.
    pub error_us: u64,
}

/// Latency of decisions, one after the other on one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScriptLatency {
    pub samples: usize,
    pub p50_us: u64,
    pub p99_us: u64,
}

impl InfoFields {
    pub fn text(&self, name: &str) -> Option<&str> {
        match self.0.find(&name)? {
            Value::SimpleString(text) => Some(text),
            _ => None,
        }
    }

    /// Whether Envoy answered, which names itself a cluster, and no role.
    pub(super) fn is_from_proxy(&self) -> bool {
        self.text("redis_mode") == Some("cluster") && self.text("role").is_none()
    }

    pub fn number(&self, name: &str) -> Option<u64> {
        self.0.get(name)
    }

    /// The replicas of this master: address, state, bytes behind the master, and seconds since the
    /// last acknowledgement.
    pub fn replicas(&self) -> impl Iterator<Item = ReplicaFacts<'_>> {
        let master_offset = self.number("master_repl_offset").unwrap_or(0);
        (0..).map_while(move |at: u32| {
            let text = self.text(&format!("slave{at}"))?;
            let field = |name: &str| {
                text.split(',')
                    .find_map(|part| part.strip_prefix(name)?.strip_prefix('='))
            };
            let offset: u64 = field("offset")
                .and_then(|text| text.parse().ok())
                .unwrap_or(0);
            Some(ReplicaFacts {
                address: format!(
                    "{}:{}",
                    field("ip").unwrap_or("?"),
                    field("port").unwrap_or("?")
                ),
                state: field("state").unwrap_or("unknown"),
                behind_bytes: master_offset.saturating_sub(offset),
                lag_s: field("lag").and_then(|text| text.parse().ok()),
            })
        })
    }
}

/// One replica, as its master reports it.
#[derive(Debug, PartialEq, Eq)]
pub struct ReplicaFacts<'i> {
    pub address: String,
    pub state: &'i str,
    pub behind_bytes: u64,
    /// Seconds since the last acknowledgement.
    pub lag_s: Option<u64>,
}

/// Compares the server's clock with `clock` once.
pub(crate) async fn read_clock_once(
    live: &LiveConnection,
    clock: &Clock,
) -> RedisResult<Option<ClockReading>> {
    let sent_at_us = clock.wall_us();
    let time = live.send_command(&cmd("TIME"), false).await?;
    let received_at_us = clock.wall_us();
    // Redis read its clock at an unknown moment between: the midpoint assumes equal delays both
    // ways.
    let local_us = sent_at_us.midpoint(received_at_us);
    let ahead_us =
        parse_time_reply(time).and_then(|server_us| server_us.checked_signed_diff(local_us));
    Ok(ahead_us.map(|ahead_us| ClockReading {
        ahead_us,
        error_us: received_at_us.saturating_sub(sent_at_us).div_ceil(2),
    }))
}

/// Parses the reply to TIME: seconds and microseconds. Envoy's reply is no time.
fn parse_time_reply(reply: Value) -> Option<u64> {
    let (seconds, micros): (u64, u64) = from_redis_value(reply).ok()?;
    let seconds_us = seconds
        .checked_mul(1_000_000)
        .filter(|_| micros < 1_000_000)?;
    seconds_us.checked_add(micros)
}

impl ServerCheck<'_> {
    /// Reads the clock at least once.
    pub(super) async fn read_clock(&self) -> Result<ClockReading, RedisConnectionError> {
        let (clock, started_at) = (Clock::system(), Instant::now());
        let read_once = async || {
            let reading = read_clock_once(&self.opened.live, &clock);
            let reading = self.finish(reading).await?;
            reading.ok_or_else(|| RedisConnectionError::from(RedisErrorKind::InvalidReply))
        };
        let mut best = read_once().await?;
        for _ in 1..CLOCK_READINGS {
            if started_at.elapsed() >= MAX_CLOCK_TIME {
                break;
            }
            match read_once().await {
                Ok(reading) if reading.error_us < best.error_us => best = reading,
                Ok(_) => {}
                Err(_) => break,
            }
        }
        Ok(best)
    }

    /// Runs decisions about the probe key, and deletes its counters.
    pub(super) async fn measure_latency(
        &self,
        algorithms: &[Algorithm],
    ) -> Result<ScriptLatency, RedisConnectionError> {
        let limits = algorithms.iter().filter_map(|one| probe_limit(*one));
        let mut limits: Vec<Limit> = limits.collect();
        if limits.is_empty() {
            limits.extend(probe_limit(Algorithm::SlidingLog));
        }
        let charges = limits.iter().map(|limit| LimitCharge::new(limit, 1));
        let request = [PolicyCharges::with_limits(
            Cow::Borrowed(self.probe_key),
            charges.collect(),
        )];
        let result = self.run_decisions(&request).await;
        let counters = each_charge(&request).map(|charge| charge.counter());
        let keys = counters.map(|counter| self.scripts.counter_key(counter));
        let mut delete = cmd("DEL");
        delete.arg(keys.collect::<Vec<_>>());
        // Without the permission or the time, the counters expire.
        drop(self.run::<()>(&delete).await);
        result
    }

    async fn run_decisions(
        &self,
        request: &[PolicyCharges<'_>],
    ) -> Result<ScriptLatency, RedisConnectionError> {
        let decide = self.scripts.decide_command(request, None);
        // The first decision may have to load the script.
        self.run::<()>(&decide).await?;
        let started_at = Instant::now();
        let mut durations_us = Vec::with_capacity(LATENCY_SAMPLES);
        while durations_us.len() < LATENCY_SAMPLES && started_at.elapsed() < MAX_MEASURING_TIME {
            let sent_at = Instant::now();
            let reply = self.run::<()>(&decide).await;
            let is_late = reply
                .as_ref()
                .is_err_and(|error| error.kind == RedisErrorKind::Timeout);
            if durations_us.is_empty() || !is_late {
                reply?;
            }
            // A call without a reply counts with the time that it has taken so far.
            durations_us.push(saturating_micros(sent_at.elapsed()));
            if is_late {
                break;
            }
        }
        durations_us.sort_unstable();
        let percentile = |percent: usize| {
            let position = (durations_us.len() * percent)
                .div_ceil(100)
                .saturating_sub(1);
            durations_us.get(position).copied().unwrap_or(0)
        };
        Ok(ScriptLatency {
            samples: durations_us.len(),
            p50_us: percentile(50),
            p99_us: percentile(99),
        })
    }
}

/// A limit of the algorithm that admits all measured decisions. A concurrency slot and a block are
/// no limits that a decision can take alone.
fn probe_limit(algorithm: Algorithm) -> Option<Limit> {
    let algorithm = match algorithm {
        Algorithm::Concurrency { .. } | Algorithm::Block => return None,
        // A period of a calendar costs the same, and would stay longer if it could not be deleted.
        Algorithm::FixedWindow { .. } | Algorithm::CalendarWindow { .. } => {
            Algorithm::FixedWindow { offset_us: 0 }
        }
        Algorithm::TokenBucket { .. } => Algorithm::TokenBucket {
            burst: 1_000_000,
            warm_up_us: 0,
        },
        Algorithm::LeakyBucket { .. } => Algorithm::LeakyBucket {
            max_delay_us: PROBE_PERIOD_US,
        },
        algorithm => algorithm,
    };
    Some(Limit {
        requests: 1_000_000,
        per_us: PROBE_PERIOD_US,
        algorithm,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_time_replies() {
        let reply = ["7", "000250"]
            .map(|text| Value::BulkString(text.into()))
            .to_vec();
        assert_eq!(parse_time_reply(Value::Array(reply)), Some(7_000_250));
        assert_eq!(parse_time_reply(Value::Nil), None);
        let reply = [7, 7_000_250].map(Value::Int).to_vec();
        assert_eq!(parse_time_reply(Value::Array(reply)), None, "Envoy's reply");
    }

    #[test]
    fn parses_the_replicas_of_info() {
        let info = InfoFields(InfoDict::new(
            "# Replication\r\nrole:master\r\nconnected_slaves:2\r\n\
             slave0:ip=10.0.0.1,port=6379,state=online,offset=900,lag=1\r\n\
             slave1:ip=10.0.0.2,port=6379,state=wait_bgsave,offset=0,lag=0\r\n\
             master_repl_offset:1000\r\n",
        ));
        assert_eq!(info.text("role"), Some("master"));
        assert!(!info.is_from_proxy());
        let info_of_envoy = "redis_version:7.0.15\r\nredis_mode:cluster\r\ncluster_enabled:1\r\n";
        assert!(InfoFields(InfoDict::new(info_of_envoy)).is_from_proxy());
        let replicas: Vec<_> = info.replicas().collect();
        assert_eq!(
            replicas,
            [
                ReplicaFacts {
                    address: "10.0.0.1:6379".to_owned(),
                    state: "online",
                    behind_bytes: 100,
                    lag_s: Some(1),
                },
                ReplicaFacts {
                    address: "10.0.0.2:6379".to_owned(),
                    state: "wait_bgsave",
                    behind_bytes: 1000,
                    lag_s: Some(0),
                },
            ]
        );
    }
}
