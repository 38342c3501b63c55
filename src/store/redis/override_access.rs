//! Reads and changes the overrides of keys, outside of the request path.

use super::error::{RedisConnectionError, RedisErrorKind};
use super::inspector::{CounterInspector, run_scan_step};
use crate::limiter::Key;
use crate::store::StoredOverride;
use futures_util::future::join_all;
use redis::{Value, cmd};
use std::collections::HashSet;

/// Replaces the override only if it is still the one that the caller has read.
const REPLACE_SCRIPT: &str = "\
local text = redis.pcall('GET', KEYS[1])
if (type(text) == 'string' and text or '') ~= ARGV[1] then return 0 end
if ARGV[3] == '' then redis.call('SET', KEYS[1], ARGV[2])
else redis.call('SET', KEYS[1], ARGV[2], 'PXAT', ARGV[3]) end
return 1";

impl CounterInspector {
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
        self.run_command(&[name], &command).await?;
        Ok(())
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
        let reply = self.run_command(&[name], &command).await?;
        Ok(reply == Value::Int(1))
    }

    /// Removes the override of a key. Returns whether there was one.
    ///
    /// # Errors
    /// When Redis does not answer.
    pub async fn remove_override(&self, key: &Key) -> Result<bool, RedisConnectionError> {
        let name = self.0.scripts.override_key(key);
        let mut command = cmd("DEL");
        command.arg(&name);
        let reply = self.run_command(&[name], &command).await?;
        Ok(reply == Value::Int(1))
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
            let live = live?;
            let mut cursor = 0_u64;
            loop {
                let mut names;
                (cursor, names) = run_scan_step(&live, cursor, &pattern).await?;
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
                if cursor == 0 {
                    break;
                }
            }
        }
        Ok(())
    }

    /// The text at an override's key; `None` also for a value of another type.
    async fn read_text(&self, name: &str) -> Result<Option<Vec<u8>>, RedisErrorKind> {
        let mut command = cmd("GET");
        command.arg(name);
        match self.run_command(&[name.to_owned()], &command).await {
            Ok(Value::BulkString(text)) => Ok(Some(text)),
            Ok(Value::Nil) | Err(RedisErrorKind::WrongType(_)) => Ok(None),
            Ok(_) => Err(RedisErrorKind::InvalidReply),
            Err(failure) => Err(failure),
        }
    }

    /// The override that a text states; `None` if it is foreign.
    fn parse_override(&self, name: &str, text: &[u8]) -> Option<StoredOverride> {
        let stored = StoredOverride::from_text(std::str::from_utf8(text).ok()?)?;
        // The name has the hash of the key, so a text about another key is foreign.
        (self.0.scripts.override_key(&stored.key) == name).then_some(stored)
    }
}
