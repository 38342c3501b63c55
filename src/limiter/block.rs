//! `block`: keeps a policy closed for a time after it refused a request (`block_for`). A block is
//! not a limit.
//!
//! Rule: the block starts when a limit of its policy refuses, and lasts for `per`. Further refusals
//! do not prolong it. A decision checks the block like a limit of one unit. The block is charged
//! when the policy refuses, not when the request is admitted.
//! Memory: the time at which the block ends.

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct BlockState {
    pub(super) until_us: u64,
}

impl BlockState {
    /// 1 while the block is active, else 0.
    pub(super) fn used_units(self, now_us: u64) -> u64 {
        u64::from(now_us < self.until_us)
    }
}
