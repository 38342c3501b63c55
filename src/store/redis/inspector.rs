//! Reads and resets counters, and reads and changes the overrides of keys, outside of the request
//! path.

use super::connection::PROBE_POLICY_NAME;
use super::error::{RedisConnectionError, RedisErrorKind};
use super::live_connection::LiveConnection;
use super::member_list::{MAX_LISTED_MEMBERS, MEMBER_LIST_SCRIPT, MemberList};
use super::membership::MEMBER_TTL;
use super::scripts::ScriptLibrary;
use super::{RedisSettings, RedisStore, SharedRedisState};
use crate::limiter::{Charge, Key, KeyBuilder, Limit, PolicyCharges};
use crate::store::StoredOverride;
use futures_util::future::join_all;
use redis::{Cmd, FromRedisValue, cmd, from_redis_value};
use std::collections::{BTreeSet, HashSet};
use std::time::Duration;
use tokio::time::{Instant, timeout};

/// Maximum number of counters read per call.
const MAX_COUNTERS_PER_CALL: usize = 64;
/// Timeout of a call: an operator can wait longer than a request.
const CALL_TIMEOUT: Duration = Duration::from_secs(2);

/// Replaces the override only if it is still the one that the caller has read.
const REPLACE_SCRIPT: &str = "\
local text = redis.pcall('GET', KEYS[1])
if (type(text) == 'string' and text or '') ~= ARGV[1] then return 0 end
if ARGV[3] == '' then redis.call('SET', KEYS[1], ARGV[2])
else redis.call('SET', KEYS[1], ARGV[2], 'PXAT', ARGV[3]) end
return 1";

/// Reads and changes counters and overrides over its own connection.
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
        let is_wanted = |key: &String| {
            let parsed = self.0.scripts.parse_counter_key(key);
            let readable = parsed.and_then(|(_, readable)| readable);
            let readable = readable.unwrap_or_default();
            let policy_name = readable.split('/').next().unwrap_or_default();
            // The pattern also matches policies with a longer name.
            policy_name != PROBE_POLICY_NAME && policy.is_none_or(|policy| policy_name == policy)
        };
        // A scan may return a key twice.
        let mut keys = BTreeSet::new();
        for live in self.0.master_connections() {
            let (live, mut cursor) = (live?, Some(0));
            while let Some(at) = cursor {
                let found;
                (cursor, found) = scan_step(&live, at, &pattern).await?;
                keys.extend(found.into_iter().filter(is_wanted));
                // Each server answers at least one step: the first must not hide the others.
                cursor = cursor.filter(|_| keys.len() <= max_counters);
            }
        }
        let has_more = keys.len() > max_counters;
        let mut keys: Vec<String> = keys.into_iter().take(max_counters).collect();
        let mut counters = Vec::new();
        for keys in self.split_into_calls(&mut keys) {
            counters.extend(self.read_counters(keys).await?);
        }
        Ok((counters, has_more))
    }

    /// Lists the instances that share the limits.
    ///
    /// # Errors
    /// When Redis does not answer.
    pub async fn list_members(&self) -> Result<MemberList, RedisConnectionError> {
        let keys = self.0.scripts.membership_keys();
        let keys = keys.get(..1).unwrap_or_default();
        let mut command = cmd("EVAL");
        command.arg(MEMBER_LIST_SCRIPT).arg(keys.len()).arg(keys);
        command.arg(MEMBER_TTL.as_micros().to_string());
        command.arg(MAX_LISTED_MEMBERS);
        let reply = self.run_command(keys, &command).await?;
        let list = MemberList::from_reply(reply, MEMBER_TTL);
        Ok(list.ok_or(RedisErrorKind::InvalidReply)?)
    }

    /// Groups keys into calls. All keys of a call are in one slot.
    fn split_into_calls<'k>(&self, keys: &'k mut [String]) -> Vec<&'k [String]> {
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
        let keys = charges.flat_map(|charge| self.0.counter_keys(&charge));
        let (mut keys, mut deleted) = (keys.collect::<Vec<_>>(), 0);
        for keys in self.split_into_calls(&mut keys) {
            deleted += self.run_command::<u64>(keys, cmd("DEL").arg(keys)).await?;
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

    /// The override of a key. A foreign value is none, as for decisions.
    ///
    /// # Errors
    /// When Redis does not answer.
    pub async fn find_override(
        &self,
        key: &Key,
    ) -> Result<Option<StoredOverride>, RedisConnectionError> {
        let name = self.0.scripts.override_key(key);
        let text = self.read_text(&name).await?;
        Ok(text.and_then(|text| self.parse_override(&name, &text)))
    }

    /// Sets the override of a key, whatever it was before.
    ///
    /// # Errors
    /// When Redis does not answer.
    pub async fn set_override(&self, stored: &StoredOverride) -> Result<(), RedisConnectionError> {
        let name = self.0.scripts.override_key(&stored.key);
        let mut command = cmd("SET");
        command.arg(&name).arg(stored.to_text());
        if let Some(expires_at_ms) = stored.expires_at_ms {
            command.arg("PXAT").arg(expires_at_ms);
        }
        Ok(self.run_command(&[name], &command).await?)
    }

    /// Sets the override of a key if it still is `previous`; without one, replaces a foreign value.
    /// Returns whether it was.
    ///
    /// # Errors
    /// When Redis does not answer.
    pub async fn replace_override(
        &self,
        previous: Option<&StoredOverride>,
        stored: &StoredOverride,
    ) -> Result<bool, RedisConnectionError> {
        let name = self.0.scripts.override_key(&stored.key);
        let expires_at = stored.expires_at_ms.map(|at_ms| at_ms.to_string());
        let expected_text = match previous {
            Some(previous) => previous.to_text().into_bytes(),
            None => match self.read_text(&name).await? {
                Some(text) if self.parse_override(&name, &text).is_some() => return Ok(false),
                foreign => foreign.unwrap_or_default(),
            },
        };
        let mut command = cmd("EVAL");
        command
            .arg(REPLACE_SCRIPT)
            .arg(1)
            .arg(&name)
            .arg(expected_text)
            .arg(stored.to_text())
            .arg(expires_at.unwrap_or_default());
        Ok(self.run_command::<i64>(&[name], &command).await? == 1)
    }

    /// Removes the override of a key. Returns whether there was one.
    ///
    /// # Errors
    /// When Redis does not answer.
    pub async fn remove_override(&self, key: &Key) -> Result<bool, RedisConnectionError> {
        let keys = [self.0.scripts.override_key(key)];
        let deleted: i64 = self.run_command(&keys, cmd("DEL").arg(&keys)).await?;
        Ok(deleted == 1)
    }

    /// Passes all overrides to `visit`, in no order, until it returns false. Each one is visited
    /// once. Foreign values are left out.
    ///
    /// # Errors
    /// When Redis does not answer.
    pub async fn visit_overrides(
        &self,
        mut visit: impl FnMut(StoredOverride) -> bool,
    ) -> Result<(), RedisConnectionError> {
        let pattern = self.0.scripts.override_scan_pattern();
        let mut visited = HashSet::new();
        for live in self.0.master_connections() {
            let (live, mut cursor) = (live?, Some(0));
            while let Some(at) = cursor {
                let mut names;
                (cursor, names) = scan_step(&live, at, &pattern).await?;
                // A scan may return a key twice.
                names.retain(|name| {
                    let id = self.0.scripts.parse_override_key(name);
                    id.is_some_and(|id| visited.insert(id))
                });
                let texts = join_all(names.iter().map(|name| self.read_text(name))).await;
                for (name, text) in names.iter().zip(texts) {
                    let stored = text?.and_then(|text| self.parse_override(name, &text));
                    if stored.is_some_and(|stored| !visit(stored)) {
                        return Ok(());
                    }
                }
            }
        }
        Ok(())
    }

    /// The text at an override's key; `None` also for a value of another type.
    async fn read_text(&self, name: &str) -> Result<Option<Vec<u8>>, RedisErrorKind> {
        match self
            .run_command(&[name.to_owned()], cmd("GET").arg(name))
            .await
        {
            Err(RedisErrorKind::WrongType(_)) => Ok(None),
            text => text,
        }
    }

    /// The override that a text states; `None` if it is foreign.
    fn parse_override(&self, name: &str, text: &[u8]) -> Option<StoredOverride> {
        let stored = StoredOverride::from_text(std::str::from_utf8(text).ok()?)?;
        // The name has the hash of the key, so a text about another key is foreign.
        (self.0.scripts.override_key(&stored.key) == name).then_some(stored)
    }

    /// Runs a command about keys of one slot.
    async fn run_command<T: FromRedisValue>(
        &self,
        keys: &[String],
        command: &Cmd,
    ) -> Result<T, RedisErrorKind> {
        let deadline = Instant::now() + CALL_TIMEOUT;
        let first = keys.first().map_or("", String::as_str);
        let hash_slot = self.0.hash_slot_for_name(first);
        let reply = self.0.run_on_hash_slot(hash_slot, command, deadline);
        from_redis_value(reply.await?).map_err(|_other| RedisErrorKind::InvalidReply)
    }
}

async fn scan_step(
    live: &LiveConnection,
    cursor: u64,
    pattern: &str,
) -> Result<(Option<u64>, Vec<String>), RedisErrorKind> {
    let step = timeout(CALL_TIMEOUT, live.scan_step(cursor, pattern)).await?;
    step.map_err(|error| RedisErrorKind::from(&error))
}
