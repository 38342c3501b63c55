//! Why an admitted request gets no response, and the deadline that ends one.

use crate::proxy::UpstreamError;
use std::pin::Pin;
use tokio::time::{Instant, timeout_at};

/// Why an admitted request got no response from the upstream.
pub(super) enum ForwardError {
    Upstream(UpstreamError),
    /// The request exceeded the `max_duration` of a concurrency limit.
    MaxDurationExceeded,
}

/// Awaits `future` until `deadline` at most.
///
/// The caller pins the future: passed by value, it would be stored three times, once per branch.
pub(super) async fn await_until_deadline<T>(
    deadline: Option<Instant>,
    future: Pin<&mut impl Future<Output = Result<T, UpstreamError>>>,
) -> Result<T, ForwardError> {
    let result = match deadline {
        None => future.await,
        // A future is not started at or after its deadline.
        Some(at) if at <= Instant::now() => return Err(ForwardError::MaxDurationExceeded),
        Some(at) => match timeout_at(at, future).await {
            Ok(result) => result,
            Err(_elapsed) => return Err(ForwardError::MaxDurationExceeded),
        },
    };
    result.map_err(ForwardError::Upstream)
}
