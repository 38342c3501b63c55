//! Reads and resets counters for operators, outside of the request path.

use super::connection::PROBE_POLICY_NAME;
use super::error::{RedisConnectionError, RedisErrorKind};
use super::live_connection::LiveConnection;
use super::member_list::{MAX_LISTED_MEMBERS, MEMBER_LIST_SCRIPT, MemberList};
use super::membership::MEMBER_TTL;
use super::scripts::ScriptLibrary;
use super::{RedisSettings, RedisStore, SharedRedisState};
use crate::limiter::{Charge, KeyBuilder, Limit, PolicyCharges};
use redis::{Cmd, Value, cmd, from_redis_value};
use std::time::Duration;
use tokio::time::{Instant, timeout};

/// Number of keys per step of a scan: few enough that Redis can serve requests between two steps.
const KEYS_PER_SCAN_STEP: u64 = 256;
/// Maximum number of counters read per call.
const MAX_COUNTERS_PER_CALL: usize = 64;
/// Timeout of a call: an operator can wait longer than a request.
const CALL_TIMEOUT: Duration = Duration::from_secs(2);

/// Reads and resets counters over its own connection.
#[derive(Debug)]
pub struct CounterInspector(pub(super) RedisStore);

/// One counter as stored in Redis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RedisCounter {
    /// The key in Redis.
    pub key: String,
    /// Policy and values as readable text; `None` if they were too long to be stored.
    pub readable_key: Option<String>,
    /// Algorithm and period as in the key. Its amount is the largest possible one.
    pub limit: Limit,
    pub used_units: u64,
    /// Time until some units are free again (µs from now); 0 if none are in use.
    pub next_release_in_us: u64,
}

impl CounterInspector {
    /// # Errors
    /// When Redis can't be reached within `connect_timeout`, or rejects the login.
    pub async fn connect(settings: RedisSettings) -> Result<Self, RedisConnectionError> {
        Self::connect_with(&SharedRedisState::new(settings)).await
    }

    /// [`Self::connect`] with the logins of a running store.
    ///
    /// # Errors
    /// As [`Self::connect`].
    pub async fn connect_with(shared: &SharedRedisState) -> Result<Self, RedisConnectionError> {
        let redis = RedisStore::start(&shared.for_inspection());
        redis.wait_for_first_attempts().await?;
        Ok(Self(redis))
    }

    /// Lists up to `max_counters` counters with the key prefix, in no order. With `policy`, only
    /// those of this policy with readable keys. The second value is true if there may be more.
    ///
    /// # Errors
    /// When Redis does not answer.
    pub async fn list_counters(
        &self,
        policy: Option<&str>,
        max_counters: usize,
    ) -> Result<(Vec<RedisCounter>, bool), RedisConnectionError> {
        let pattern = self.0.scripts.scan_pattern(policy);
        let (mut keys, mut has_more) = (Vec::new(), false);
        for live in self.0.master_connections() {
            has_more |= self
                .scan_server(&*live?, &pattern, policy, max_counters, &mut keys)
                .await?;
        }
        // A scan may return a key twice.
        keys.sort_unstable();
        keys.dedup();
        has_more |= keys.len() > max_counters;
        keys.truncate(max_counters);
        let mut counters = Vec::new();
        for keys in self.split_into_batches(&mut keys) {
            counters.extend(self.read_counters(keys).await?);
        }
        Ok((counters, has_more))
    }

    /// Lists the instances that share the limits.
    ///
    /// # Errors
    /// When Redis does not answer.
    pub async fn list_members(&self) -> Result<MemberList, RedisConnectionError> {
        let [heartbeats, _] = self.0.scripts.membership_keys();
        let keys = [heartbeats];
        let mut command = cmd("EVAL");
        command
            .arg(MEMBER_LIST_SCRIPT)
            .arg(keys.len())
            .arg(&keys)
            .arg(MEMBER_TTL.as_micros().to_string())
            .arg(MAX_LISTED_MEMBERS);
        let reply = self.run_command(&keys, &command).await?;
        let list = MemberList::from_reply(reply, MEMBER_TTL);
        Ok(list.ok_or(RedisErrorKind::InvalidReply)?)
    }

    /// Adds one server's keys until there are more than `max_counters`. Returns whether the scan
    /// was incomplete.
    async fn scan_server(
        &self,
        live: &LiveConnection,
        pattern: &str,
        policy: Option<&str>,
        max_counters: usize,
        keys: &mut Vec<String>,
    ) -> Result<bool, RedisConnectionError> {
        let mut cursor = 0_u64;
        loop {
            let found_keys;
            (cursor, found_keys) = run_scan_step(live, cursor, pattern).await?;
            keys.extend(found_keys.into_iter().filter(|key| {
                let parsed = self.0.scripts.parse_counter_key(key);
                let readable_key = parsed
                    .and_then(|(_, readable)| readable)
                    .unwrap_or_default();
                let policy_name = readable_key.split('/').next().unwrap_or_default();
                // The pattern also matches policies with a longer name.
                policy_name != PROBE_POLICY_NAME
                    && policy.is_none_or(|policy| policy_name == policy)
            }));
            if cursor == 0 || keys.len() > max_counters {
                return Ok(cursor != 0);
            }
        }
    }

    /// Groups keys into calls. All keys of a call are in one slot.
    fn split_into_batches<'k>(&self, keys: &'k mut [String]) -> Vec<&'k [String]> {
        let hash_slot = |key: &String| self.0.hash_slot_for_name(key);
        keys.sort_by_cached_key(hash_slot);
        keys.chunk_by(|one, next| hash_slot(one) == hash_slot(next))
            .flat_map(|keys| keys.chunks(MAX_COUNTERS_PER_CALL))
            .collect()
    }

    /// Deletes the counters of charges. Returns how many existed.
    ///
    /// # Errors
    /// When Redis does not answer.
    pub async fn reset_counters<'r, 'a: 'r>(
        &self,
        charges: impl Iterator<Item = Charge<'r, 'a>>,
    ) -> Result<u64, RedisConnectionError> {
        let mut keys: Vec<String> = charges
            .flat_map(|charge| self.0.counter_keys(&charge))
            .collect();
        let mut deleted = 0;
        for keys in self.split_into_batches(&mut keys) {
            let mut command = cmd("DEL");
            command.arg(keys);
            let reply = self.run_command(keys, &command).await?;
            deleted +=
                from_redis_value::<u64>(reply).map_err(|_other| RedisErrorKind::InvalidReply)?;
        }
        Ok(deleted)
    }

    /// Reads the usage of counters. Leaves out keys and values that are not counters.
    async fn read_counters(
        &self,
        keys: &[String],
    ) -> Result<Vec<RedisCounter>, RedisConnectionError> {
        let placeholder_key = KeyBuilder::new("").finish();
        let mut parsed_keys: Vec<(&String, Limit, Option<String>)> = keys
            .iter()
            .filter_map(|key| {
                let (limit, readable) = self.0.scripts.parse_counter_key(key)?;
                Some((key, limit, readable))
            })
            .collect();
        // All keys may hold something else, such as overrides.
        while !parsed_keys.is_empty() {
            let names = parsed_keys.iter().map(|(key, ..)| key.as_str());
            let limits = parsed_keys.iter().map(|(_, limit, _)| limit);
            let charges = limits.map(|limit| PolicyCharges::new(limit, &placeholder_key, 0));
            let charges: Vec<PolicyCharges<'_>> = charges.collect();
            let command = self.0.scripts.read_command(names, &charges);
            let reply = match self.run_command(keys, &command).await {
                Ok(reply) => reply,
                // Tries again without the key that holds a foreign value.
                Err(RedisErrorKind::WrongType(position))
                    if (1..=parsed_keys.len()).contains(&position) =>
                {
                    parsed_keys.remove(position - 1);
                    continue;
                }
                Err(failure) => return Err(failure.into()),
            };
            let decision = ScriptLibrary::parse_decision_reply(&reply, &charges)
                .ok_or(RedisErrorKind::InvalidReply)?;
            let counters = parsed_keys.into_iter().zip(decision.statuses());
            let counters = counters.map(|((key, limit, readable_key), status)| RedisCounter {
                key: key.clone(),
                readable_key,
                used_units: limit.requests - status.remaining,
                limit,
                next_release_in_us: status
                    .next_growth_us
                    .map_or(0, |at_us| at_us.saturating_sub(decision.now_us)),
            });
            return Ok(counters.collect());
        }
        Ok(Vec::new())
    }

    /// Runs a command about keys of one slot.
    pub(super) async fn run_command(
        &self,
        keys: &[String],
        command: &Cmd,
    ) -> Result<Value, RedisErrorKind> {
        let first = keys.first().map_or("", String::as_str);
        let hash_slot = self.0.hash_slot_for_name(first);
        let deadline = Instant::now() + CALL_TIMEOUT;
        let router = &self.0.router;
        router.run_on_hash_slot(hash_slot, command, deadline).await
    }
}

/// Runs one step of a scan. Returns the next cursor, 0 at the end, and keys that match `pattern`.
pub(super) async fn run_scan_step(
    live: &LiveConnection,
    cursor: u64,
    pattern: &str,
) -> Result<(u64, Vec<String>), RedisErrorKind> {
    let mut command = cmd("SCAN");
    command
        .arg(cursor)
        .arg("MATCH")
        .arg(pattern)
        .arg("COUNT")
        .arg(KEYS_PER_SCAN_STEP);
    let reply = timeout(CALL_TIMEOUT, live.run_command(&command)).await??;
    from_redis_value(reply).map_err(|_other| RedisErrorKind::InvalidReply)
}
