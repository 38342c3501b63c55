//! The overrides of a memory store. They hold for this process, and end with it.

use super::MemoryStore;
use crate::limiter::Key;
use crate::store::StoredOverride;
use foldhash::HashMap;

/// Maximum number of overrides: some 300 MiB without notes. Only operators add them.
pub const MAX_MEMORY_OVERRIDES: usize = 1 << 20;

/// Overrides by [`Key::id`].
pub(super) type OverrideTable = HashMap<u128, StoredOverride>;

impl MemoryStore {
    /// Sets the override of a key. Returns whether there was room for it.
    pub fn set_override(&self, stored: StoredOverride) -> bool {
        insert_override(&mut self.overrides.write(), stored, self.clock.wall_us())
    }

    /// Sets the override of a key if it still is `previous`. Returns whether it was, or `None` if
    /// there is no room for it.
    pub fn replace_override(
        &self,
        previous: Option<&StoredOverride>,
        stored: StoredOverride,
    ) -> Option<bool> {
        let (mut overrides, now_us) = (self.overrides.write(), self.clock.wall_us());
        let current = overrides.get(&stored.key.id());
        if current.filter(|stored| !stored.is_expired(now_us)) != previous {
            return Some(false);
        }
        insert_override(&mut overrides, stored, now_us).then_some(true)
    }

    /// Removes the override of a key. Returns the removed one.
    pub fn remove_override(&self, key: &Key) -> Option<StoredOverride> {
        let removed = self.overrides.write().remove(&key.id())?;
        (!removed.is_expired(self.clock.wall_us())).then_some(removed)
    }

    /// The override of a key.
    pub fn find_override(&self, key: &Key) -> Option<StoredOverride> {
        let stored = self.overrides.read().get(&key.id()).cloned()?;
        (!stored.is_expired(self.clock.wall_us())).then_some(stored)
    }

    /// All overrides, in no order.
    pub fn list_overrides(&self) -> Vec<StoredOverride> {
        let (overrides, now_us) = (self.overrides.read(), self.clock.wall_us());
        let current = overrides.values();
        let current = current.filter(|stored| !stored.is_expired(now_us));
        current.cloned().collect()
    }
}

/// Inserts or replaces an override. Returns false if the table is full.
fn insert_override(overrides: &mut OverrideTable, stored: StoredOverride, now_us: u64) -> bool {
    if overrides.len() >= MAX_MEMORY_OVERRIDES && !overrides.contains_key(&stored.key.id()) {
        overrides.retain(|_, stored| !stored.is_expired(now_us));
        if overrides.len() >= MAX_MEMORY_OVERRIDES {
            return false;
        }
    }
    overrides.insert(stored.key.id(), stored);
    true
}
