//! The overrides of a memory store. They hold for this process, and end with it.

use crate::store::StoredOverride;
use foldhash::HashMap;
use parking_lot::{RwLock, RwLockReadGuard};

/// Maximum number of overrides: some 300 MiB without notes. Only operators add them.
const MAX_OVERRIDES: usize = 1 << 20;

/// Overrides by [`Key::id`](crate::limiter::Key::id).
#[derive(Debug, Default)]
pub(super) struct OverrideTable(RwLock<HashMap<u128, StoredOverride>>);

impl OverrideTable {
    pub(super) fn read(&self) -> RwLockReadGuard<'_, HashMap<u128, StoredOverride>> {
        self.0.read()
    }

    /// Inserts or replaces an override. Returns false if the table is full.
    pub(super) fn insert(&self, stored: StoredOverride, now_us: u64) -> bool {
        let mut overrides = self.0.write();
        if overrides.len() >= MAX_OVERRIDES && !overrides.contains_key(&stored.key.id()) {
            overrides.retain(|_, stored| !stored.is_expired(now_us));
            if overrides.len() >= MAX_OVERRIDES {
                return false;
            }
        }
        overrides.insert(stored.key.id(), stored);
        true
    }

    /// Removes an override, and returns it unless it has expired.
    pub(super) fn remove(&self, key_id: u128, now_us: u64) -> Option<StoredOverride> {
        let removed = self.0.write().remove(&key_id)?;
        (!removed.is_expired(now_us)).then_some(removed)
    }
}
