//! The overrides of the store that a configuration names.

use super::key_status::ResolvedKey;
use super::overrides::{describe_override, describe_rule, format_time_ms, merge_amounts};
use super::store_backend::StoreBackend;
use crate::admin::AdminError;
use crate::limiter::Key;
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
    pub(crate) async fn set(&self, stored: &StoredOverride) -> Result<(), AdminError> {
        match self {
            Self::Memory(memory) => match memory.set_override(stored.clone()) {
                true => Ok(()),
                false => Err(override_table_full_error()),
            },
            Self::Redis(inspector) => Ok(inspector.set_override(stored).await?),
        }
    }

    /// Removes the override of a key. Returns whether there was one.
    ///
    /// # Errors
    /// If Redis does not answer.
    pub(crate) async fn remove(&self, key: &Key) -> Result<bool, AdminError> {
        match self {
            Self::Memory(memory) => Ok(memory.remove_override(key).is_some()),
            Self::Redis(inspector) => Ok(inspector.remove_override(key).await?),
        }
    }

    /// Sets the amounts that an operator entered. Returns the override before and after. Other
    /// limits of the key's override stay. Replaces the override only if it is unchanged since it
    /// was read, and retries otherwise.
    ///
    /// # Errors
    /// If that would change when the other limits end, or the store does not answer.
    pub(crate) async fn merge(
        &self,
        entered: &StoredOverride,
        now_us: u64,
    ) -> Result<(Option<StoredOverride>, StoredOverride), AdminError> {
        for _ in 0..MAX_ATTEMPTS {
            let previous = self.find(&entered.key).await?;
            let mut stored = entered.clone();
            if let Some(previous) = previous.as_ref().filter(|last| !last.is_expired(now_us)) {
                merge_amounts(previous, &mut stored).map_err(AdminError::InvalidRequest)?;
            }
            if self.replace(previous.as_ref(), &stored).await? {
                return Ok((previous, stored));
            }
        }
        Err(AdminError::Unavailable(
            "other commands change this override at the same time; try again".to_owned(),
        ))
    }

    async fn replace(
        &self,
        previous: Option<&StoredOverride>,
        stored: &StoredOverride,
    ) -> Result<bool, AdminError> {
        match self {
            Self::Memory(memory) => {
                let replaced = memory.replace_override(previous, stored.clone());
                replaced.ok_or_else(override_table_full_error)
            }
            Self::Redis(inspector) => Ok(inspector.replace_override(previous, stored).await?),
        }
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

const SET_MESSAGE: &str = "override set by an operator";

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
    pub(crate) fn new(
        key: &Key,
        old: Option<&StoredOverride>,
        new: Option<&StoredOverride>,
    ) -> Option<Self> {
        let rule = |stored: Option<&StoredOverride>| {
            stored.map_or_else(|| "none".to_owned(), |stored| describe_rule(&stored.rule))
        };
        let remarks = new.or(old)?;
        Some(Self {
            message: match new {
                Some(_) => SET_MESSAGE,
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
        let (author, note) = (self.author.as_deref(), self.note.as_deref());
        match self.message {
            SET_MESSAGE => tracing::info!(
                policy = self.policy,
                key = self.key,
                override_key = self.override_key,
                old = self.old,
                new = self.new,
                expires_at = self.expires_at,
                author,
                note,
                "override set by an operator"
            ),
            _ => tracing::info!(
                policy = self.policy,
                key = self.key,
                override_key = self.override_key,
                old = self.old,
                new = self.new,
                expires_at = self.expires_at,
                author,
                note,
                "override removed by an operator"
            ),
        }
    }
}

fn override_table_full_error() -> AdminError {
    AdminError::Unavailable(format!(
        "the memory store holds at most {MAX_MEMORY_OVERRIDES} overrides; remove some, or use store.kind = \"redis\""
    ))
}

/// Describes the key's override in the store, if it has one.
///
/// # Errors
/// If Redis does not answer.
pub(crate) async fn describe_key_override(
    stores: &StoreBackend,
    resolved: &ResolvedKey<'_>,
    now_us: u64,
) -> Result<Option<String>, AdminError> {
    if !resolved.quota.is_dynamic {
        return Ok(None);
    }
    let stored = OverrideStore::open(stores)
        .await?
        .find(&resolved.key)
        .await?;
    let current = stored.filter(|stored| !stored.is_expired(now_us));
    Ok(current.as_ref().map(describe_override))
}

/// Collects the overrides of all policies, or of one, up to a maximum.
pub(crate) struct OverrideListing<'p> {
    policy: Option<&'p str>,
    max_listed: usize,
    listed: Vec<StoredOverride>,
    has_more: bool,
}

impl<'p> OverrideListing<'p> {
    pub(crate) fn new(policy: Option<&'p str>, max_listed: usize) -> Self {
        Self {
            policy,
            max_listed,
            listed: Vec::new(),
            has_more: false,
        }
    }

    /// Adds an override. Returns false if there are more than can be listed.
    pub(crate) fn push(&mut self, stored: StoredOverride) -> bool {
        if self
            .policy
            .is_none_or(|policy| stored.key.policy_name() == policy)
        {
            self.has_more = self.listed.len() >= self.max_listed;
            if !self.has_more {
                self.listed.push(stored);
            }
        }
        !self.has_more
    }

    /// The overrides by key, and whether there are more.
    pub(crate) fn finish(mut self) -> (Vec<StoredOverride>, bool) {
        self.listed
            .sort_by_cached_key(|stored| stored.key.to_readable_string());
        (self.listed, self.has_more)
    }
}
