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
        // A response at or after the deadline would be cut off after its head.
        Some(at) => match timeout_at(at, future).await {
            Ok(Ok(_)) if at <= Instant::now() => return Err(ForwardError::MaxDurationExceeded),
            Ok(result) => result,
            Err(_elapsed) => return Err(ForwardError::MaxDurationExceeded),
        },
    };
    result.map_err(ForwardError::Upstream)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;
    use tokio::time::{Duration, sleep_until};

    #[tokio::test(start_paused = true)]
    async fn a_response_at_the_deadline_is_too_late() {
        let deadline = Instant::now() + Duration::from_secs(1);
        for (wait_ms, is_late) in [(999, false), (1000, true)] {
            let at = deadline - Duration::from_secs(1) + Duration::from_millis(wait_ms);
            let response = pin!(async move {
                sleep_until(at).await;
                Ok::<_, UpstreamError>(())
            });
            let result = await_until_deadline(Some(deadline), response).await;
            assert_eq!(
                matches!(result, Err(ForwardError::MaxDurationExceeded)),
                is_late,
                "{wait_ms} ms"
            );
        }
    }
}
