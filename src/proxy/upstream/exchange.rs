//! Shared code of HTTP/1.1 and HTTP/2 for one attempt to send a request and receive a response
//! head.

mod http1;
mod http2;

use http::Request;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Context, Poll};
use tokio::time::Instant;

use super::UpstreamClient;
use super::pool::UpstreamConnection;
use super::response::ResponseBody;
use super::response_body::{UpstreamBody, UpstreamBodySource};
use crate::proxy::body::request::{RequestBody, RequestBodyProgress, RequestBodyState};
use crate::proxy::connection_io::LazyTimer;
use crate::proxy::upstream_error::{UpstreamError, UpstreamErrorKind};

/// How far a request without a response got; decides whether it may be retried.
pub(crate) enum ExchangeFailure {
    /// Nothing of the request was written, so a retry is safe. Contains the request for HTTP/1.1;
    /// for HTTP/2 the retry uses a `RetryRequest`.
    NotSent(Option<Box<Request<RequestBody>>>),
    /// The upstream refused the stream without processing it (REFUSED_STREAM).
    RefusedStream,
    /// The upstream sent GOAWAY and did not process the request.
    GoAway,
    MaybeProcessed,
}

pub(crate) type ExchangeError = (ExchangeFailure, UpstreamError);

impl UpstreamClient {
    fn build_response_body(
        &self,
        source: UpstreamBodySource,
        connection: Box<UpstreamConnection>,
    ) -> ResponseBody {
        if source.is_end_stream() {
            self.pool.return_connection(connection);
            return ResponseBody::Empty;
        }
        ResponseBody::Upstream(UpstreamBody::new(source, Rc::clone(&self.pool), connection))
    }

    /// Waits for a response head. `poll_response` is ready with `None` if the upstream sends too
    /// many informational responses.
    ///
    /// `response_timeout` counts from the last body chunk handed over, at the earliest from
    /// `sent_at`. It does not run while the proxy waits for the client to send more of the body; a
    /// separate timeout limits that.
    ///
    /// # Errors
    /// Fails if there are too many informational responses, or `response_timeout` elapses.
    async fn await_response<T>(
        &self,
        timer: &mut LazyTimer,
        mut poll_response: impl FnMut(&mut Context<'_>) -> Poll<Option<T>>,
        progress: Option<&RequestBodyProgress>,
        sent_at: Instant,
    ) -> Result<T, ExchangeError> {
        let limit = self.pool.settings().response_timeout;
        let answer = poll_fn(|cx| {
            if let Poll::Ready(answer) = poll_response(cx) {
                return Poll::Ready(answer.ok_or_else(|| {
                    UpstreamErrorKind::Protocol
                        .with_detail("too many informational (1xx) responses")
                }));
            }
            let Some(limit) = limit else {
                return Poll::Pending;
            };
            let since = match progress
                .map(|progress| (progress.state.get(), progress.last_progress_at.get()))
            {
                Some((RequestBodyState::AwaitingClient, _)) => Instant::now(),
                // The body may have moved before, when it was read ahead.
                Some((_, moved)) => moved.max(sent_at),
                None => sent_at,
            };
            let elapsed = timer.poll(since + limit, cx);
            elapsed.map(|()| {
                Err(UpstreamErrorKind::ResponseTimeout
                    .with_detail("no response head within the response timeout"))
            })
        });
        let answer = answer.await;
        answer.map_err(|error| (ExchangeFailure::MaybeProcessed, error))
    }
}

/// Returns the error kind if the request failed because of the client's body; otherwise `None`.
pub(super) fn client_error_kind(
    progress: Option<&RequestBodyProgress>,
) -> Option<UpstreamErrorKind> {
    match progress?.state.get() {
        RequestBodyState::Failed(kind) => Some(kind),
        RequestBodyState::AwaitingClient
        | RequestBodyState::Transferring
        | RequestBodyState::Finished => None,
    }
}
