//! A bounded sample of the counters: how many each policy has, their memory, and their expiry.

use super::ServerCheck;
use crate::store::redis::connection::PROBE_POLICY_NAME;
use crate::store::redis::error::RedisConnectionError;
use crate::store::redis::live_connection::KEYS_PER_SCAN_STEP;
use redis::{Value, cmd, from_redis_value};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::Instant;

/// Maximum number of steps, and maximum time of all.
const MAX_STEPS: u64 = 200;
const MAX_SCAN_TIME: Duration = Duration::from_secs(1);

/// Counters per step whose memory is measured.
const MEASURED_PER_STEP: usize = 16;

/// Maximum number of policies with separate counts. Keys of further policies count for the last
/// one.
const MAX_POLICIES: usize = 1000;

/// Maximum number of names of counters without an expiry.
const MAX_EXAMPLES: usize = 3;

/// The counters of one server, as far as they were scanned.
#[derive(Debug, Default)]
pub struct KeySample {
    /// Share of the keyspace that was scanned, 0.0 to 1.0.
    pub scanned_share: f64,
    /// By policy; `None` for counters without a readable key.
    pub policies: BTreeMap<Option<String>, PolicyKeySample>,
    /// Names of some counters without an expiry.
    pub unexpiring: Vec<String>,
    /// Why the scan ended early, if it did not end at its own bounds.
    pub interruption: Option<RedisConnectionError>,
}

/// The scanned counters of one policy.
#[derive(Clone, Copy, Debug, Default)]
pub struct PolicyKeySample {
    pub keys: u64,
    /// Counters without an expiry.
    pub unexpiring_keys: u64,
    /// Counters whose memory was measured, and its sum.
    pub measured_keys: u64,
    pub measured_bytes: u64,
}

impl PolicyKeySample {
    pub fn merge(&mut self, other: &Self) {
        self.keys += other.keys;
        self.unexpiring_keys += other.unexpiring_keys;
        self.measured_keys += other.measured_keys;
        self.measured_bytes += other.measured_bytes;
    }
}

impl ServerCheck<'_> {
    /// Scans the counters with the prefix. If a later step fails, the sample has the counters of
    /// the earlier ones.
    pub(super) async fn sample_keys(&self) -> Result<KeySample, RedisConnectionError> {
        let pattern = self.scripts.scan_pattern(None);
        let mut sample = KeySample::default();
        let mut size = None;
        let started_at = Instant::now();
        let mut cursor = 0;
        for step in 1..=MAX_STEPS {
            match self.sample_step(&pattern, cursor, &mut sample).await {
                Ok(Some(next)) => cursor = next,
                Ok(None) => {
                    sample.scanned_share = 1.0;
                    break;
                }
                Err(error) if step == 1 => return Err(error),
                Err(error) => {
                    sample.interruption = Some(error);
                    break;
                }
            }
            if size.is_none() {
                size = Some(self.run::<u64>(&cmd("DBSIZE")).await.unwrap_or(0));
            }
            #[allow(clippy::cast_precision_loss, reason = "the share is an estimate")]
            let share = (step * KEYS_PER_SCAN_STEP) as f64 / size.unwrap_or(0).max(1) as f64;
            sample.scanned_share = share.min(1.0);
            if started_at.elapsed() >= MAX_SCAN_TIME {
                break;
            }
        }
        Ok(sample)
    }

    /// Reads the keys at a cursor, the expiry of all counters among them, and the memory of some.
    /// Returns the next cursor.
    async fn sample_step(
        &self,
        pattern: &str,
        cursor: u64,
        sample: &mut KeySample,
    ) -> Result<Option<u64>, RedisConnectionError> {
        let step = self.opened.live.scan_step(cursor, pattern);
        let (cursor, keys) = self.finish(step).await?;
        let counters = keys.into_iter().filter_map(|key| self.parse_counter(key));
        let counters: Vec<(String, Option<String>)> = counters.collect();
        if counters.is_empty() {
            return Ok(cursor);
        }
        let mut pipeline = redis::pipe();
        for (key, _) in &counters {
            pipeline.cmd("PTTL").arg(key);
        }
        let measured = counters.iter().take(MEASURED_PER_STEP);
        for (key, _) in measured.clone() {
            pipeline.cmd("MEMORY").arg("USAGE").arg(key);
        }
        // A reply may be an error: a key that has moved, or a missing permission.
        let replies = self.run_pipeline(&pipeline).await?.into_iter();
        let mut numbers = replies.map(|reply| match reply {
            Value::ServerError(_) => None,
            reply => from_redis_value::<Option<i64>>(reply).ok().flatten(),
        });
        for (key, policy) in &counters {
            let is_unexpiring = numbers.next().flatten() == Some(-1);
            let counts = sample.counts_of(policy);
            counts.keys += 1;
            counts.unexpiring_keys += u64::from(is_unexpiring);
            if is_unexpiring && sample.unexpiring.len() < MAX_EXAMPLES {
                sample.unexpiring.push(key.clone());
            }
        }
        for ((_, policy), bytes) in measured.zip(numbers) {
            if let Some(bytes) = bytes.and_then(|bytes| u64::try_from(bytes).ok()) {
                let counts = sample.counts_of(policy);
                counts.measured_keys += 1;
                counts.measured_bytes += bytes;
            }
        }
        Ok(cursor)
    }

    /// The name of a counter and of its policy. `None` for a foreign key or a probe.
    fn parse_counter(&self, key: String) -> Option<(String, Option<String>)> {
        let (_, readable) = self.scripts.parse_counter_key(&key)?;
        let policy = readable.and_then(|text| text.split('/').next().map(str::to_owned));
        (policy.as_deref() != Some(PROBE_POLICY_NAME)).then_some((key, policy))
    }
}

impl KeySample {
    fn counts_of(&mut self, policy: &Option<String>) -> &mut PolicyKeySample {
        let is_known = self.policies.contains_key(policy) || self.policies.len() < MAX_POLICIES;
        let policy = if is_known { policy.clone() } else { None };
        self.policies.entry(policy).or_default()
    }
}
