//! A block: not a limit, but what `block_for` keeps of a policy's refusal.
//!
//! Rule: closed from the moment at which a limit of its own policy refuses, for `per`; what is refused meanwhile
//! doesn't prolong it. It is asked like a limit of one unit, and charged when the policy refuses instead of when the
//! request is admitted.
//! Memory: one time.

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct BlockState {
    pub(super) until_us: u64,
}

impl BlockState {
    /// 1 while it holds.
    pub(super) fn used(self, now_us: u64) -> u64 {
        u64::from(now_us < self.until_us)
    }
}
