//! The deadline that a concurrency limit sets for a request.

use std::pin::Pin;
use tokio::time::{Instant, timeout_at};

use crate::proxy::{UpstreamError, UpstreamErrorKind};

/// Awaits `future` until `deadline` at most.
///
/// The caller pins the future: passed by value, it would be stored three times, once per branch.
pub(super) async fn await_until_deadline<T>(
    deadline: Option<Instant>,
    future: Pin<&mut impl Future<Output = Result<T, UpstreamError>>>,
) -> Result<T, UpstreamError> {
    let Some(deadline) = deadline else {
        return future.await;
    };
    // A future is not started at or after its deadline.
    if deadline > Instant::now() {
        match timeout_at(deadline, future).await {
            // A response at or after the deadline would be cut off after its head.
            Ok(Ok(_)) if deadline <= Instant::now() => {}
            Ok(result) => return result,
            Err(_elapsed) => {}
        }
    }
    Err(UpstreamErrorKind::MaxDurationExceeded.with_detail("no response within max_duration"))
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
                matches!(result, Err(error) if error.kind == UpstreamErrorKind::MaxDurationExceeded),
                is_late,
                "{wait_ms} ms"
            );
        }
    }
}
