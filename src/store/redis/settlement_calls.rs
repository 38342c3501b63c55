//! Divides settlements into calls of `settle.lua`.

use super::error::RedisErrorKind;
use crate::limiter::{Algorithm, Amendment};
use crate::store::Settlement;

/// Maximum settlements per call: a few hundred microseconds of the server's time.
const MAX_SETTLEMENTS_PER_CALL: usize = 64;

/// Maximum settlement calls in flight on one connection, which keeps their order. With one call per
/// round trip, settlements could arrive faster than they are sent. Decisions of the same worker
/// wait behind these calls, for some milliseconds at most.
pub(super) const MAX_PIPELINED_CALLS: usize = 16;

/// Splits settlements into calls, in order.
pub(super) fn split_into_calls<'l, 'a>(
    settlements: &'l [Settlement<'a>],
) -> Vec<&'l [Settlement<'a>]> {
    let runs = settlements.chunk_by(|one, next| match is_expensive(one) {
        true => is_expensive(next) && one.limit == next.limit && one.key.id() == next.key.id(),
        false => !is_expensive(next),
    });
    runs.flat_map(|run| run.chunks(MAX_SETTLEMENTS_PER_CALL))
        .collect()
}

/// Whether a settlement takes Redis as long as a dozen others: it changes many entries of a log.
/// Several of one counter change them once.
fn is_expensive(settlement: &Settlement<'_>) -> bool {
    settlement.limit.algorithm == Algorithm::SlidingLog
        && matches!(settlement.amendment, Amendment::Credit { .. })
}

/// The result of each settlement: that of its call.
pub(super) fn results_by_settlement(
    calls: &[&[Settlement<'_>]],
    call_results: Vec<Result<(), RedisErrorKind>>,
) -> impl Iterator<Item = Result<(), RedisErrorKind>> {
    let counted = calls.iter().zip(call_results);
    counted.flat_map(|(call, result)| std::iter::repeat_n(result, call.len()))
}
