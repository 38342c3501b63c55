//! The overrides of the store that a configuration names.

use super::key_status::{ResolvedKey, describe_limit_status};
use super::overrides::{describe_override, describe_rule, format_time_ms, merge_amounts};
use super::store_backend::StoreBackend;
use crate::admin::{AdminError, KeyDocument};
use crate::limiter::Key;
use crate::policy::{OverrideRule, PolicyMode};
use crate::store::redis::{CounterInspector, RedisConnectionError};
use crate::store::{MAX_MEMORY_OVERRIDES, MemoryStore, StoredOverride};
use serde::Serialize;
use std::sync::Arc;

/// Attempts to change an override that other commands change at the same time.
const MAX_ATTEMPTS: usize = 10;

/// The overrides of a memory store of this process, or in Redis.
pub(crate) enum OverrideStore {
    Memory(Arc<MemoryStore>),
    Redis(Box<CounterInspector>),
}

impl From<RedisConnectionError> for AdminError {
    fn from(error: RedisConnectionError) -> Self {
        Self::Unavailable(format!("{error}; {}", error.remedy()))
    }
}

impl OverrideStore {
    /// Opens the overrides of a running store.
    ///
    /// # Errors
    /// If Redis can't be reached.
    pub(crate) async fn open(backend: &StoreBackend) -> Result<Self, AdminError> {
        Ok(match backend {
            StoreBackend::Memory(memory) => Self::Memory(Arc::clone(memory)),
            StoreBackend::Redis(redis, _) => {
                Self::Redis(Box::new(backend.connect_inspector(redis).await?))
            }
        })
    }

    /// The override of a key.
    ///
    /// # Errors
    /// If Redis does not answer.
    pub(crate) async fn find(&self, key: &Key) -> Result<Option<StoredOverride>, AdminError> {
        match self {
            Self::Memory(memory) => Ok(memory.find_override(key)),
            Self::Redis(inspector) => Ok(inspector.find_override(key).await?),
        }
    }

    /// Sets the override of a key, whatever it was before.
    ///
    /// # Errors
    /// If Redis does not answer, or the memory store has no room.
    pub(crate) async fn set(
        &self,
        stored: &StoredOverride,
    ) -> Result<Option<OverrideChange>, AdminError> {
        let old = self.find(&stored.key).await.unwrap_or_default();
        match self {
            Self::Memory(memory) if memory.set_override(stored.clone()) => {}
            Self::Memory(_) => return Err(override_table_full_error()),
            Self::Redis(inspector) => inspector.set_override(stored).await?,
        }
        Ok(OverrideChange::new(&stored.key, old.as_ref(), Some(stored)))
    }

    /// Removes the override of a key. Returns whether there was one.
    ///
    /// # Errors
    /// If Redis does not answer.
    pub(crate) async fn remove(
        &self,
        key: &Key,
    ) -> Result<(bool, Option<OverrideChange>), AdminError> {
        let old = self.find(key).await.unwrap_or_default();
        let is_removed = match self {
            Self::Memory(memory) => memory.remove_override(key).is_some(),
            Self::Redis(inspector) => inspector.remove_override(key).await?,
        };
        let change = OverrideChange::new(key, old.as_ref().filter(|_| is_removed), None);
        Ok((is_removed, change))
    }

    /// Sets the amounts that an operator entered. Returns the override that results. Other limits
    /// of the key's override stay. Replaces the override only if it is unchanged since it was read,
    /// and retries otherwise.
    ///
    /// # Errors
    /// If that would change when the other limits end, or the store does not answer.
    pub(crate) async fn merge(
        &self,
        entered: &StoredOverride,
        now_us: u64,
    ) -> Result<(StoredOverride, Option<OverrideChange>), AdminError> {
        for _ in 0..MAX_ATTEMPTS {
            let previous = self.find(&entered.key).await?;
            let mut stored = entered.clone();
            if let Some(previous) = previous.as_ref().filter(|last| !last.is_expired(now_us)) {
                merge_amounts(previous, &mut stored).map_err(AdminError::InvalidRequest)?;
            }
            let is_replaced = match self {
                Self::Memory(memory) => memory
                    .replace_override(previous.as_ref(), stored.clone())
                    .ok_or_else(override_table_full_error)?,
                Self::Redis(inspector) => {
                    inspector
                        .replace_override(previous.as_ref(), &stored)
                        .await?
                }
            };
            if is_replaced {
                let change = OverrideChange::new(&stored.key, previous.as_ref(), Some(&stored));
                return Ok((stored, change));
            }
        }
        Err(AdminError::Unavailable(
            "other commands change this override at the same time; try again".to_owned(),
        ))
    }

    /// Passes all overrides to `visit`, in no order, until it returns false.
    ///
    /// # Errors
    /// If Redis does not answer.
    pub(crate) async fn visit(
        &self,
        mut visit: impl FnMut(StoredOverride) -> bool,
    ) -> Result<(), AdminError> {
        match self {
            Self::Memory(memory) => {
                memory.list_overrides().into_iter().all(visit);
                Ok(())
            }
            Self::Redis(inspector) => Ok(inspector.visit_overrides(&mut visit).await?),
        }
    }
}

/// A change of one override, as an audit line states it.
#[derive(Debug, Serialize)]
pub(crate) struct OverrideChange {
    message: &'static str,
    policy: String,
    /// The hash of the key, as in the access log.
    key: String,
    /// The key as text; the digest of a value that the policy hashes.
    override_key: String,
    /// The rule before, or `none`.
    old: String,
    /// The rule after, or `none`.
    new: String,
    expires_at: Option<String>,
    author: Option<Box<str>>,
    note: Option<Box<str>>,
}

impl OverrideChange {
    /// The change from the override `old` of a key to `new`. `None` if there was and is none.
    fn new(key: &Key, old: Option<&StoredOverride>, new: Option<&StoredOverride>) -> Option<Self> {
        let rule = |stored: Option<&StoredOverride>| {
            stored.map_or_else(|| "none".to_owned(), |stored| describe_rule(&stored.rule))
        };
        let remarks = new.or(old)?;
        Some(Self {
            message: match new {
                Some(_) => "override set by an operator",
                None => "override removed by an operator",
            },
            policy: key.policy_name().to_owned(),
            key: format!("{:032x}", key.id()),
            override_key: key.to_readable_string(),
            old: rule(old),
            new: rule(new),
            expires_at: remarks.expires_at_ms.and_then(format_time_ms),
            author: remarks.author.clone(),
            note: remarks.note.clone(),
        })
    }

    /// Writes the audit line to the log of this process.
    pub(crate) fn log(&self) {
        tracing::info!(
            policy = self.policy,
            key = self.key,
            override_key = self.override_key,
            old = self.old,
            new = self.new,
            expires_at = self.expires_at,
            author = self.author.as_deref(),
            note = self.note.as_deref(),
            "{}",
            self.message
        );
    }
}

fn override_table_full_error() -> AdminError {
    AdminError::Unavailable(format!(
        "the memory store holds at most {MAX_MEMORY_OVERRIDES} overrides; remove some, or use store.kind = \"redis\""
    ))
}

impl ResolvedKey<'_> {
    /// Reads and describes the status of the key, and its override in the store.
    ///
    /// # Errors
    /// If Redis does not answer.
    pub(crate) async fn inspect(&self, stores: &StoreBackend) -> Result<KeyDocument, AdminError> {
        let status = self.read_status(stores).await?;
        let stored = if self.quota.is_dynamic {
            OverrideStore::open(stores).await?.find(&self.key).await?
        } else {
            None
        };
        let current = stored.filter(|stored| !stored.is_expired(status.now_us));
        let limits = self.limits.iter().zip(&status.limit_statuses);
        let limits = limits
            .map(|(named, limit_status)| describe_limit_status(named, limit_status, status.now_us));
        let least_cost = self.quota.cost.min_units();
        let mut statuses = status.limit_statuses.iter();
        let is_exhausted = status.blocked_until_us.is_some()
            || statuses.any(|status| status.remaining < least_cost);
        let (admitted, override_rule) = match self.rule {
            OverrideRule::Limit(_) => (!is_exhausted, None),
            OverrideRule::Allow => (true, Some("allow")),
            OverrideRule::Deny => (false, Some("deny")),
            OverrideRule::Off => (true, Some("off")),
        };
        Ok(KeyDocument {
            policy: self.policy.name.to_string(),
            key: self.key.to_readable_string(),
            key_hash: Some(format!("{:032x}", self.key.id())),
            admitted,
            mode: self.mode.name().to_owned(),
            scope: self.key.scope().name().to_owned(),
            shadow: self.mode == PolicyMode::Shadow,
            least_cost,
            blocked_s: status.blocked_s(),
            limits: limits.collect(),
            override_words: current.as_ref().map(describe_override),
            override_rule: override_rule.map(str::to_owned),
            counters: None,
        })
    }
}

/// Up to `max_listed` of the overrides that were found, by key, and whether there are more.
pub(crate) fn sort_listing(
    mut found: Vec<StoredOverride>,
    max_listed: usize,
) -> (Vec<StoredOverride>, bool) {
    let has_more = found.len() > max_listed;
    found.truncate(max_listed);
    found.sort_by_cached_key(|stored| stored.key.to_readable_string());
    (found, has_more)
}
