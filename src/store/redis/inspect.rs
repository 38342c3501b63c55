//! Looking at counters from outside of the request path, for people on call.

use super::failure::Failure;
use super::link::{self, Context, Live};
use super::script::Script;
use super::{RedisSettings, Shared};
use crate::limiter::{Algorithm, Charge, Limit, MAX_UNITS};
use redis::{Cmd, Value, from_redis_value};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

/// Keys that one step of a scan looks at: few enough that Redis has time for requests between two steps.
const SCAN_STEP: u64 = 256;
/// Counters asked for in one call.
const LOOKS_PER_CALL: usize = 64;
/// Whoever asks by hand can wait longer than a request.
const CALL_TIME: Duration = Duration::from_secs(2);

/// A connection of its own for looking at counters and resetting them.
#[derive(Debug)]
pub struct Inspector {
    context: Arc<Context>,
    live: Live,
    _driver: link::Task,
}

/// Why nothing was found out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("Redis gave no answer ({0})")]
pub struct InspectError(&'static str);

/// One counter as it is found in Redis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counter {
    /// Its name in Redis.
    pub key: String,
    /// Policy and values, for people; `None` if they were too long to be kept.
    pub readable: Option<String>,
    pub algorithm: Algorithm,
    pub per_us: u64,
    pub used: u64,
    /// Until some units come back (µs from now); 0 if none are in use.
    pub frees_in_us: u64,
}

impl Inspector {
    /// # Errors
    /// When Redis can't be reached within `connect_timeout`, or does not let us in.
    pub async fn connect(settings: RedisSettings) -> Result<Self, InspectError> {
        let limit = settings.connect_timeout;
        let Shared(context) = Shared::new(settings);
        let (live, driver) = timeout(limit, link::connect(&context)).await.map_err(Failure::from)??;
        Ok(Self { context, live, _driver: driver })
    }

    /// Up to `most` counters of our prefix, in no order; with `policy` only that policy's, as far as their
    /// names are readable. The second value says whether there may be more.
    ///
    /// # Errors
    /// When Redis does not answer.
    pub async fn list(
        &self,
        policy: Option<&str>,
        most: usize,
    ) -> Result<(Vec<Counter>, bool), InspectError> {
        let script = &self.context.script;
        let pattern = script.pattern(policy);
        let (mut keys, mut cursor) = (Vec::new(), 0_u64);
        loop {
            let mut command = Cmd::new();
            command.arg("SCAN").arg(cursor).arg("MATCH").arg(&pattern).arg("COUNT").arg(SCAN_STEP);
            let reply = self.call(&command).await?;
            let found: Vec<String>;
            (cursor, found) = from_redis_value(reply).map_err(|_other| Failure::Reply)?;
            keys.extend(found.into_iter().filter(|key| {
                let readable = script.parse(key).and_then(|(_, _, readable)| readable).unwrap_or_default();
                let owner = readable.split('/').next().unwrap_or_default();
                // The pattern lets other policies through whose names only begin alike.
                owner != link::PROBE && policy.is_none_or(|policy| owner == policy)
            }));
            if cursor == 0 || keys.len() > most {
                break;
            }
        }
        // A scan may show a key twice.
        keys.sort_unstable();
        keys.dedup();
        let more = cursor != 0 || keys.len() > most;
        keys.truncate(most);
        let mut counters = Vec::new();
        for keys in keys.chunks(LOOKS_PER_CALL) {
            counters.extend(self.look_at(keys).await?);
        }
        Ok((counters, more))
    }

    /// Forgets the counters of charges. Returns how many there were.
    ///
    /// # Errors
    /// When Redis does not answer.
    pub async fn reset(&self, charges: &[Charge<'_>]) -> Result<u64, InspectError> {
        let mut command = Cmd::new();
        command.arg("DEL");
        for charge in charges {
            command.arg(self.context.script.key(charge));
        }
        let reply = self.call(&command).await?;
        Ok(from_redis_value(reply).map_err(|_other| Failure::Reply)?)
    }

    /// Where counters stand. Names and values that are not ours are left out.
    async fn look_at(&self, keys: &[String]) -> Result<Vec<Counter>, InspectError> {
        let mut named: Vec<(&String, Limit, Option<String>)> = keys
            .iter()
            .filter_map(|key| {
                let (algorithm, per_us, readable) = self.context.script.parse(key)?;
                Some((key, Limit { requests: MAX_UNITS, per_us, algorithm }, readable))
            })
            .collect();
        loop {
            let looks: Vec<(&str, &Limit)> =
                named.iter().map(|(key, limit, _)| (key.as_str(), limit)).collect();
            let reply = match self.call(&self.context.script.look(&looks)).await {
                Ok(reply) => reply,
                // Each turn leaves fewer.
                Err(Failure::WrongType(position)) if (1..=named.len()).contains(&position) => {
                    named.remove(position - 1);
                    continue;
                }
                Err(failure) => return Err(failure.into()),
            };
            let (now_us, standings) = Script::seen(&reply, &looks).ok_or(Failure::Reply)?;
            let counters =
                named.into_iter().zip(standings).map(|((key, limit, readable), standing)| Counter {
                    key: key.clone(),
                    readable,
                    algorithm: limit.algorithm,
                    per_us: limit.per_us,
                    used: limit.requests - standing.remaining,
                    frees_in_us: standing.grows_at_us.map_or(0, |at_us| at_us.saturating_sub(now_us)),
                });
            return Ok(counters.collect());
        }
    }

    async fn call(&self, command: &Cmd) -> Result<Value, Failure> {
        timeout(CALL_TIME, self.live.run(command)).await.map_err(Failure::from)?
    }
}

impl From<Failure> for InspectError {
    fn from(failure: Failure) -> Self {
        Self(failure.word())
    }
}
