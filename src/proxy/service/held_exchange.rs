//! Exchanges with the upstream that go on without their client, because their concurrency slot is
//! held until the upstream's response ends (`release = "upstream"`).

use http::{Response, request};
use std::cell::Cell;
use std::net::IpAddr;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll};
use tokio::task::spawn_local;
use tokio::time::{Instant, timeout_at};

use crate::enforcer::ConcurrencySlotGuard;
use crate::proxy::body::informational_responses::InformationalForwarder;
use crate::proxy::upstream::UpstreamClient;
use crate::proxy::{RequestBody, ResponseBody, UpstreamError, UpstreamErrorKind};

/// The result of an exchange, and whether the upstream may have received a part of the request.
type ExchangeResult = (Result<Response<ResponseBody>, UpstreamError>, bool);

/// An exchange that goes on in a task of its own if it is dropped after the upstream may have
/// received a part of the request. The task discards the response.
pub(crate) struct HeldExchange {
    /// `None` after its end.
    exchange: Option<Pin<Box<dyn Future<Output = ExchangeResult>>>>,
    was_sent: Rc<Cell<bool>>,
}

impl HeldExchange {
    /// The arguments are those of [`UpstreamClient::send`]. The response body takes the guard. If
    /// there is no response although the upstream may still work on the request, the guard is kept
    /// until the end of its time.
    pub(crate) fn new(
        upstream: Rc<UpstreamClient>,
        (mut head, mut body, is_upgrade): (request::Parts, RequestBody, bool),
        client: IpAddr,
        now: Instant,
        mut interim: InformationalForwarder,
        guard: ConcurrencySlotGuard,
    ) -> Self {
        let was_sent = Rc::new(Cell::new(false));
        let sent = Rc::clone(&was_sent);
        let exchange = async move {
            let deadline = guard.held_until();
            let request = (&mut head, &mut body, is_upgrade);
            let send = upstream.send(request, || client, now, &mut interim, &sent);
            let mut result = await_until_deadline(deadline, pin!(send)).await;
            match &mut result {
                Ok(response) => response.body_mut().attach_guards(Some(guard), None),
                Err(error) if sent.get() && !is_slot_free_after(error) => {
                    guard.keep_without_exchange();
                }
                Err(_) => {}
            }
            (result, sent.get())
        };
        Self {
            exchange: Some(Box::pin(exchange)),
            was_sent,
        }
    }
}

/// Whether the upstream has ended the request, or the time of its slot is over.
fn is_slot_free_after(error: &UpstreamError) -> bool {
    use UpstreamErrorKind as Kind;
    matches!(
        error.kind,
        Kind::ConnectionTerminated | Kind::StreamReset | Kind::MaxDurationExceeded
    )
}

impl Future for HeldExchange {
    type Output = ExchangeResult;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<ExchangeResult> {
        let Some(exchange) = &mut self.exchange else {
            return Poll::Pending;
        };
        let result = exchange.as_mut().poll(cx);
        if result.is_ready() {
            self.exchange = None;
        }
        result
    }
}

impl Drop for HeldExchange {
    fn drop(&mut self) {
        if let Some(exchange) = self.exchange.take()
            && self.was_sent.get()
        {
            // The response body reads itself to its end when it is dropped.
            spawn_local(async move { drop(exchange.await) });
        }
    }
}

/// Awaits `future` until `deadline` at most.
///
/// The caller pins the future: passed by value, it would be stored three times, once per branch.
pub(crate) async fn await_until_deadline<T>(
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
