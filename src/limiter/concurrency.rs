//! `concurrency`: at most `requests` requests in flight at a time.
//!
//! Rule: a request takes a slot and releases it when it ends; admit if slots in use + 1 ≤ requests.
//! A slot expires after `lease_ttl`, so that the slots of a crashed instance become free. A live
//! instance renews its slots at a third of that time. A renewal takes an expired slot again, as its
//! request is still in flight.
//! Worst case: never more than `requests` in flight while the store is reachable. An instance that
//! can't reach it for two thirds of `lease_ttl` may lose its slots, and its requests run beside
//! those that take them. Its renewals count them again, so no request is admitted until fewer than
//! `requests` are in flight.
//! Retry: unknown, because the end of a request is unknown.
//! Memory: an id and a time per request in flight: here 64 to 80 bytes; in Redis about 20 up to 128
//! requests, then about 105.
//! Cost: in Redis O(log n) each to take, renew and release a slot.

use indexmap::IndexMap;

#[derive(Clone, Debug, Default)]
pub(super) struct ConcurrencyState {
    /// Expiry of each slot, by its id.
    expiries_us: IndexMap<u128, u64, foldhash::fast::RandomState>,
    /// No slot expires before this.
    earliest_expiry_us: u64,
    /// No slot expires after this.
    latest_expiry_us: u64,
}

impl ConcurrencyState {
    /// Slots in use at `now_us`. Usually none has expired, and the map need not be scanned.
    pub(super) fn used_slots(&self, now_us: u64) -> u64 {
        let used = if self.earliest_expiry_us > now_us {
            self.expiries_us.len()
        } else {
            self.expiries_us
                .values()
                .filter(|ends_us| **ends_us > now_us)
                .count()
        };
        u64::try_from(used).unwrap_or(u64::MAX)
    }

    /// Takes a slot, or renews it, until `expires_at_us`.
    pub(super) fn hold_slot(&mut self, slot: u128, expires_at_us: u64, now_us: u64) {
        if self.earliest_expiry_us <= now_us {
            self.expiries_us.retain(|_, ends_us| *ends_us > now_us);
            self.earliest_expiry_us = self.expiries_us.values().copied().min().unwrap_or(u64::MAX);
        }
        self.expiries_us.insert(slot, expires_at_us);
        self.earliest_expiry_us = self.earliest_expiry_us.min(expires_at_us);
        self.latest_expiry_us = self.latest_expiry_us.max(expires_at_us);
    }

    pub(super) fn release_slot(&mut self, slot: u128) {
        self.expiries_us.swap_remove(&slot);
    }

    pub(super) fn expires_at_us(&self) -> u64 {
        if self.expiries_us.is_empty() {
            0
        } else {
            self.latest_expiry_us
        }
    }

    pub(super) fn heap_bytes(&self) -> usize {
        self.expiries_us.capacity() * (size_of::<(u128, u64)>() + 3 * size_of::<usize>())
    }
}
