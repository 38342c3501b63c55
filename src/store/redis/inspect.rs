//! Looking at counters from outside of the request path, for people on call.

use super::cluster::{self, Cluster};
use super::connect;
use super::failure::{Failure, Trouble};
use super::link::{self, Context, Live, State, Target};
use super::script::Script;
use super::{RedisSettings, Shared, Topology};
use crate::limiter::{Algorithm, Charge, Limit, MAX_UNITS};
use redis::{Cmd, Value, from_redis_value};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, timeout};

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
    way: Way,
}

#[derive(Debug)]
enum Way {
    One { live: Live, _driver: connect::Task },
    Cluster(Cluster),
}

/// Why nothing was found out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("Redis gave no answer {0}")]
pub struct InspectError(String);

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
        let way = if context.settings.topology == Topology::Cluster {
            let cluster = Cluster::start(Arc::clone(&context));
            timeout(limit, cluster.ready())
                .await
                .map_err(Trouble::from)?;
            Way::Cluster(cluster)
        } else {
            let target = Target::of(&context.settings);
            let connected = timeout(limit, link::connect(&context, &target))
                .await
                .map_err(Trouble::from)?;
            let (live, _, driver) = connected?;
            Way::One {
                live,
                _driver: driver,
            }
        };
        Ok(Self { context, way })
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
        let pattern = self.context.script.pattern(policy);
        let (mut keys, mut more) = (Vec::new(), false);
        match &self.way {
            Way::One { live, .. } => {
                more = self.scan(live, &pattern, policy, most, &mut keys).await?
            }
            Way::Cluster(cluster) => {
                for master in cluster.masters() {
                    match &*master.state() {
                        State::Up(live) => {
                            more |= self.scan(live, &pattern, policy, most, &mut keys).await?
                        }
                        State::Down(failure) => return Err((*failure).into()),
                    }
                }
            }
        }
        // A scan may show a key twice.
        keys.sort_unstable();
        keys.dedup();
        more |= keys.len() > most;
        keys.truncate(most);
        let mut counters = Vec::new();
        for keys in self.batches(&mut keys) {
            counters.extend(self.look_at(keys).await?);
        }
        Ok((counters, more))
    }

    /// Adds one server's keys until there are more than `most`. Returns whether some were left.
    async fn scan(
        &self,
        live: &Live,
        pattern: &str,
        policy: Option<&str>,
        most: usize,
        keys: &mut Vec<String>,
    ) -> Result<bool, InspectError> {
        let mut cursor = 0_u64;
        loop {
            let mut command = Cmd::new();
            command
                .arg("SCAN")
                .arg(cursor)
                .arg("MATCH")
                .arg(pattern)
                .arg("COUNT")
                .arg(SCAN_STEP);
            let reply = timeout(CALL_TIME, live.run(&command))
                .await
                .map_err(Failure::from)??;
            let found: Vec<String>;
            (cursor, found) = from_redis_value(reply).map_err(|_other| Failure::Reply)?;
            keys.extend(found.into_iter().filter(|key| {
                let named = self
                    .context
                    .script
                    .parse(key)
                    .and_then(|(_, _, readable)| readable);
                let readable = named.unwrap_or_default();
                let owner = readable.split('/').next().unwrap_or_default();
                // The pattern lets other policies through whose names only begin alike.
                owner != link::PROBE && policy.is_none_or(|policy| owner == policy)
            }));
            if cursor == 0 || keys.len() > most {
                return Ok(cursor != 0);
            }
        }
    }

    /// Keys that one call can look at.
    fn batches<'k>(&self, keys: &'k mut [String]) -> Vec<&'k [String]> {
        match self.way {
            Way::One { .. } => keys.chunks(LOOKS_PER_CALL).collect(),
            Way::Cluster(_) => {
                keys.sort_by_cached_key(|key| cluster::slot_of_name(key));
                let one_slot =
                    keys.chunk_by(|a, b| cluster::slot_of_name(a) == cluster::slot_of_name(b));
                one_slot
                    .flat_map(|keys| keys.chunks(LOOKS_PER_CALL))
                    .collect()
            }
        }
    }

    /// Forgets the counters of charges. Returns how many there were.
    ///
    /// # Errors
    /// When Redis does not answer.
    pub async fn reset(&self, charges: &[Charge<'_>]) -> Result<u64, InspectError> {
        let shared = Shared(Arc::clone(&self.context));
        let mut keys: Vec<String> = charges
            .iter()
            .flat_map(|charge| shared.counters(charge))
            .collect();
        let mut count = 0;
        for keys in self.batches(&mut keys) {
            let mut command = Cmd::new();
            command.arg("DEL").arg(keys);
            let reply = self.call(keys, &command).await?;
            count += from_redis_value::<u64>(reply).map_err(|_other| Failure::Reply)?;
        }
        Ok(count)
    }

    /// Where counters stand. Names and values that are not ours are left out.
    async fn look_at(&self, keys: &[String]) -> Result<Vec<Counter>, InspectError> {
        let mut named: Vec<(&String, Limit, Option<String>)> = keys
            .iter()
            .filter_map(|key| {
                let (algorithm, per_us, readable) = self.context.script.parse(key)?;
                Some((
                    key,
                    Limit {
                        requests: MAX_UNITS,
                        per_us,
                        algorithm,
                    },
                    readable,
                ))
            })
            .collect();
        loop {
            let looks: Vec<(&str, &Limit)> = named
                .iter()
                .map(|(key, limit, _)| (key.as_str(), limit))
                .collect();
            let reply = match self.call(keys, &self.context.script.look(&looks)).await {
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
                named
                    .into_iter()
                    .zip(standings)
                    .map(|((key, limit, readable), standing)| Counter {
                        key: key.clone(),
                        readable,
                        algorithm: limit.algorithm,
                        per_us: limit.per_us,
                        used: limit.requests - standing.remaining,
                        frees_in_us: standing
                            .grows_at_us
                            .map_or(0, |at_us| at_us.saturating_sub(now_us)),
                    });
            return Ok(counters.collect());
        }
    }

    /// Runs what is about some keys of one slot.
    async fn call(&self, keys: &[String], command: &Cmd) -> Result<Value, Failure> {
        match &self.way {
            // Nobody attends to this connection: what is missing is loaded here.
            Way::One { live, .. } => {
                let reply = timeout(CALL_TIME, link::loaded(&self.context, live, command)).await?;
                reply.map_err(|error| Failure::from(&error))
            }
            Way::Cluster(cluster) => {
                let slot = keys.first().map_or(0, |key| cluster::slot_of_name(key));
                cluster
                    .call(slot, command, Instant::now() + CALL_TIME)
                    .await
            }
        }
    }
}

impl From<Failure> for InspectError {
    fn from(failure: Failure) -> Self {
        Self(format!("({})", failure.word()))
    }
}

impl From<Trouble> for InspectError {
    fn from(trouble: Trouble) -> Self {
        Self(format!("({}): {}", trouble.failure.word(), trouble.why))
    }
}
