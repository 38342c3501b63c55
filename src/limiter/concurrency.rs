//! `concurrency`: at most `requests` requests in flight at a time.
//!
//! Rule: a request takes a slot and gives it back when it ends; admit if slots in use + 1 ≤ requests. A slot is a
//! lease that ends by itself after `lease_ttl`, so that those of a crashed sidecar come back; whoever lives renews
//! his at a third of it. Renewing brings a slot back that has lapsed meanwhile: its request is still there.
//! Worst case: never more than `requests` in flight, as long as the store is there to be told: a sidecar that can't
//! reach it for a whole `lease_ttl` loses its slots, and its requests go on beside those that take them.
//! Retry: unknown, as nobody knows when a request ends.
//! Memory: an id and a time per request in flight, here 64 to 80 bytes, in Redis about 20 up to 128, then about 105.
//! Cost: in Redis O(log n) each for taking, renewing and giving back.

use indexmap::IndexMap;

#[derive(Clone, Debug, Default)]
pub(super) struct Slots {
    /// When each lease ends, by the slot's id.
    ends: IndexMap<u128, u64, foldhash::fast::RandomState>,
    /// None ends before this.
    first_us: u64,
    /// None ends after this.
    last_us: u64,
}

impl Slots {
    /// Slots in use at `now_us`. Mostly none has lapsed, and nothing needs to be counted.
    pub(super) fn used(&self, now_us: u64) -> u64 {
        let used = match self.first_us > now_us {
            true => self.ends.len(),
            false => self
                .ends
                .values()
                .filter(|ends_us| **ends_us > now_us)
                .count(),
        };
        u64::try_from(used).unwrap_or(u64::MAX)
    }

    /// Takes a slot, or keeps it, until `ends_us`.
    pub(super) fn hold(&mut self, slot: u128, ends_us: u64, now_us: u64) {
        if self.first_us <= now_us {
            self.ends.retain(|_, ends_us| *ends_us > now_us);
            self.first_us = self.ends.values().copied().min().unwrap_or(u64::MAX);
        }
        self.ends.insert(slot, ends_us);
        self.first_us = self.first_us.min(ends_us);
        self.last_us = self.last_us.max(ends_us);
    }

    pub(super) fn release(&mut self, slot: u128) {
        self.ends.swap_remove(&slot);
    }

    pub(super) fn expires_at_us(&self) -> u64 {
        if self.ends.is_empty() {
            0
        } else {
            self.last_us
        }
    }

    pub(super) fn heap_bytes(&self) -> usize {
        self.ends.capacity() * (size_of::<(u128, u64)>() + 3 * size_of::<usize>())
    }
}
