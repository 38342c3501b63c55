//! Which parts of the store something is true of: one, or each of the slots of a cluster.

use std::sync::atomic::{AtomicU64, Ordering};

/// For 16,384 slots.
const WORDS: usize = 256;

#[derive(Debug)]
pub(super) struct Parts([AtomicU64; WORDS]);

impl Default for Parts {
    fn default() -> Self {
        Self([const { AtomicU64::new(0) }; WORDS])
    }
}

impl Parts {
    pub(super) fn add(&self, part: u16) {
        // Read first: in an outage every request comes by.
        if let Some(word) = self.word(part)
            && !self.has(part)
        {
            word.fetch_or(1 << (part % 64), Ordering::Relaxed);
        }
    }

    pub(super) fn has(&self, part: u16) -> bool {
        self.word(part)
            .is_some_and(|word| word.load(Ordering::Relaxed) >> (part % 64) & 1 == 1)
    }

    pub(super) fn clear(&self) {
        self.0
            .iter()
            .for_each(|word| word.store(0, Ordering::Relaxed));
    }

    fn word(&self, part: u16) -> Option<&AtomicU64> {
        self.0.get(usize::from(part / 64))
    }
}
