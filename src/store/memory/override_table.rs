//! The overrides of a memory store. They hold for this process, and end with it.

use crate::store::StoredOverride;
use foldhash::HashMap;
use parking_lot::{RwLock, RwLockReadGuard};

/// Maximum number of overrides: some 300 MiB without notes. Only operators add them.
pub const MAX_MEMORY_OVERRIDES: usize = 1 << 20;

/// Overrides by [`Key::id`](crate::limiter::Key::id).
#[derive(Debug, Default)]
pub(super) struct OverrideTable(RwLock<HashMap<u128, StoredOverride>>);

impl OverrideTable {
    pub(super) fn read(&self) -> RwLockReadGuard<'_, HashMap<u128, StoredOverride>> {
        self.0.read()
    }

    /// Inserts or replaces an override. Returns false if the table is full.
    pub(super) fn insert(&self, stored: StoredOverride, now_us: u64) -> bool {
        insert_into(&mut self.0.write(), stored, now_us)
    }

    /// Replaces an override if it still is `previous`. Returns whether it was, or `None` if the
    /// table is full.
    pub(super) fn replace(
        &self,
        previous: Option<&StoredOverride>,
        stored: StoredOverride,
        now_us: u64,
    ) -> Option<bool> {
        let mut overrides = self.0.write();
        let current = overrides.get(&stored.key.id());
        if current.filter(|stored| !stored.is_expired(now_us)) != previous {
            return Some(false);
        }
        insert_into(&mut overrides, stored, now_us).then_some(true)
    }

    /// Removes an override, and returns it unless it has expired.
    pub(super) fn remove(&self, key_id: u128, now_us: u64) -> Option<StoredOverride> {
        let removed = self.0.write().remove(&key_id)?;
        (!removed.is_expired(now_us)).then_some(removed)
    }
}

fn insert_into(
    overrides: &mut HashMap<u128, StoredOverride>,
    stored: StoredOverride,
    now_us: u64,
) -> bool {
    if overrides.len() >= MAX_MEMORY_OVERRIDES && !overrides.contains_key(&stored.key.id()) {
        overrides.retain(|_, stored| !stored.is_expired(now_us));
        if overrides.len() >= MAX_MEMORY_OVERRIDES {
            return false;
        }
    }
    overrides.insert(stored.key.id(), stored);
    true
}
