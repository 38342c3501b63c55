//! The overrides of the store that a configuration names.

use super::store_backend::StoreBackend;
use crate::limiter::Key;
use crate::store::redis::CounterInspector;
use crate::store::{MemoryStore, StoredOverride};
use std::sync::Arc;

/// The overrides of a memory store of this process, or in Redis.
pub(crate) enum OverrideStore {
    Memory(Arc<MemoryStore>),
    Redis(Box<CounterInspector>),
}

impl OverrideStore {
    /// Opens the overrides of a running store.
    ///
    /// # Errors
    /// If Redis can't be reached.
    pub(crate) async fn open(backend: &StoreBackend) -> Result<Self, String> {
        Ok(match backend {
            StoreBackend::Memory(memory) => Self::Memory(Arc::clone(memory)),
            StoreBackend::Redis(redis, _) => {
                let inspector = CounterInspector::connect_with(redis.for_inspection()).await;
                Self::Redis(Box::new(inspector.map_err(|error| error.to_string())?))
            }
        })
    }

    /// The override of a key.
    ///
    /// # Errors
    /// If Redis does not answer.
    pub(crate) async fn find(&self, key: &Key) -> Result<Option<StoredOverride>, String> {
        match self {
            Self::Memory(memory) => Ok(memory.find_override(key)),
            Self::Redis(inspector) => {
                let found = inspector.find_override(key).await;
                found.map_err(|error| error.to_string())
            }
        }
    }

    /// Sets the override of a key, whatever it was before.
    ///
    /// # Errors
    /// If Redis does not answer, or the memory store has no room.
    pub(crate) async fn set(&self, stored: &StoredOverride) -> Result<(), String> {
        match self {
            Self::Memory(memory) => match memory.set_override(stored.clone()) {
                true => Ok(()),
                false => Err("the memory store has no room for more overrides".to_owned()),
            },
            Self::Redis(inspector) => {
                let set = inspector.set_override(stored).await;
                set.map_err(|error| error.to_string())
            }
        }
    }

    /// Removes the override of a key. Returns whether there was one.
    ///
    /// # Errors
    /// If Redis does not answer.
    pub(crate) async fn remove(&self, key: &Key) -> Result<bool, String> {
        match self {
            Self::Memory(memory) => Ok(memory.remove_override(key).is_some()),
            Self::Redis(inspector) => {
                let removed = inspector.remove_override(key).await;
                removed.map_err(|error| error.to_string())
            }
        }
    }

    /// Lists up to `max_listed` overrides, of all policies or of one, by key. The second value is
    /// true if there are more.
    ///
    /// # Errors
    /// If Redis does not answer.
    pub(crate) async fn list(
        &self,
        policy: Option<&str>,
        max_listed: usize,
    ) -> Result<(Vec<StoredOverride>, bool), String> {
        let (mut listed, mut has_more) = (Vec::new(), false);
        let mut visit = |stored: StoredOverride| {
            if policy.is_none_or(|policy| stored.key.policy_name() == policy) {
                has_more = listed.len() >= max_listed;
                if !has_more {
                    listed.push(stored);
                }
            }
            !has_more
        };
        match self {
            Self::Memory(memory) => _ = memory.list_overrides().into_iter().all(visit),
            Self::Redis(inspector) => {
                let visited = inspector.visit_overrides(&mut visit).await;
                visited.map_err(|error| error.to_string())?;
            }
        }
        listed.sort_by_cached_key(|stored| stored.key.to_readable_string());
        Ok((listed, has_more))
    }
}
