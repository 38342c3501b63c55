//! Shared code of HTTP/1.1 and HTTP/2 for one attempt to send a request and receive a response
//! head.

mod http1;
mod http2;

use http::Request;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;
use tokio::time::Instant;

use super::UpstreamClient;
use super::error::{UpstreamError, UpstreamErrorKind};
use super::pool::{PooledConnection, UpstreamConnection};
use super::response_body::{UpstreamBody, UpstreamBodySource};
use crate::proxy::http::body::request::{RequestBody, RequestBodyProgress, RequestBodyState};
use crate::proxy::http::body::response::ResponseBody;

/// How far a request without a response got; decides whether it may be retried.
pub(super) enum ExchangeFailure {
    /// Nothing of the request was written, so a retry is safe. Contains the request for HTTP/1.1;
    /// for HTTP/2 the retry uses a `RetryRequest`.
    NotSent(Option<Box<Request<RequestBody>>>),
    /// The upstream refused the stream without processing it (REFUSED_STREAM).
    RefusedStream,
    /// The upstream sent GOAWAY and did not process the request.
    GoAway,
    MaybeProcessed,
}

pub(super) type ExchangeError = (ExchangeFailure, UpstreamError);

impl UpstreamClient {
    fn build_response_body(
        &self,
        source: UpstreamBodySource,
        connection: Box<UpstreamConnection>,
    ) -> ResponseBody {
        let lease = PooledConnection::new(Rc::clone(&self.pool), connection);
        if source.is_end_stream() {
            lease.return_to_pool();
            return ResponseBody::Empty;
        }
        ResponseBody::Upstream(UpstreamBody::new(
            source,
            lease,
            self.pool.settings().body_idle_timeout,
        ))
    }

    /// Waits for `response_future`, which returns `None` after too many informational responses.
    ///
    /// # Errors
    /// If it returns `None`, or `response_timeout` elapses first.
    ///
    /// `response_timeout` counts from the last body chunk handed over, or from `sent_at` without a
    /// body. It does not run while the proxy waits for the client to send more of the body; a
    /// separate timeout limits that.
    async fn await_within_response_timeout<T>(
        &self,
        connection: &mut UpstreamConnection,
        response_future: impl Future<Output = Option<T>>,
        progress: Option<&RequestBodyProgress>,
        sent_at: Instant,
    ) -> Result<T, ExchangeError> {
        let fail = |error| (ExchangeFailure::MaybeProcessed, error);
        let flood = || fail(UpstreamError::informational_flood());
        let mut answer = pin!(response_future);
        let Some(limit) = self.pool.settings().response_timeout else {
            return answer.await.ok_or_else(flood);
        };
        poll_fn(|cx| {
            if let Poll::Ready(answer) = answer.as_mut().poll(cx) {
                return Poll::Ready(answer.ok_or_else(flood));
            }
            let since =
                match progress.map(|progress| (progress.state(), progress.last_progress_at())) {
                    Some((RequestBodyState::AwaitingClient, _)) => Instant::now(),
                    Some((_, moved)) => moved,
                    None => sent_at,
                };
            let expired = connection.timer.poll(since + limit, cx);
            expired.map(|()| Err(fail(UpstreamError::response_timeout())))
        })
        .await
    }
}

/// Returns the error kind if the request failed because of the client's body; otherwise `None`.
pub(super) fn client_error_kind(
    progress: Option<&RequestBodyProgress>,
) -> Option<UpstreamErrorKind> {
    match progress?.state() {
        RequestBodyState::ClientTimeout => Some(UpstreamErrorKind::RequestBodyTimeout),
        RequestBodyState::TooLarge => Some(UpstreamErrorKind::RequestBodyTooLarge),
        RequestBodyState::ClientAborted => Some(UpstreamErrorKind::ClientDisconnected),
        RequestBodyState::AwaitingClient
        | RequestBodyState::Transferring
        | RequestBodyState::Finished => None,
    }
}
