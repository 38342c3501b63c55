//! One attempt to send a request on a connection: the parts that HTTP/1.1 and HTTP/2 share.

mod http1;
mod http2;

use http::Request;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;
use tokio::time::Instant;

use super::UpstreamClient;
use super::error::UpstreamErrorKind;
use super::pool::{PooledConnection, UpstreamConnection};
use super::response_body::{UpstreamBody, UpstreamBodySource};
use crate::proxy::http::body::request::{RequestBody, RequestBodyProgress, RequestBodyState};
use crate::proxy::http::body::response::ResponseBody;

/// State of a request that received no response; decides whether it may be retried.
pub(super) enum ExchangeFailure {
    /// Nothing was written, so a retry is safe. Holds the request unless a [`RetryRequest`] has a
    /// copy.
    NotSent(Option<Box<Request<RequestBody>>>),
    /// The upstream refused the stream without processing it (REFUSED_STREAM).
    RefusedStream,
    /// The upstream sent GOAWAY and did not process the request.
    GoAway,
    MaybeProcessed,
}

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

    /// Waits for `response_future`, at most `response_timeout`; returns `None` after that.
    ///
    /// The timeout counts from the last body chunk handed over, or from `sent_at` without a body.
    /// It does not run while the upstream waits for the client's body, which has its own timeout.
    async fn await_within_response_timeout<T>(
        &self,
        connection: &mut UpstreamConnection,
        response_future: impl Future<Output = T>,
        progress: Option<&RequestBodyProgress>,
        sent_at: Instant,
    ) -> Option<T> {
        let mut answer = pin!(response_future);
        let Some(limit) = self.pool.settings().response_timeout else {
            return Some(answer.await);
        };
        poll_fn(|cx| {
            if let Poll::Ready(answer) = answer.as_mut().poll(cx) {
                return Poll::Ready(Some(answer));
            }
            let since =
                match progress.map(|progress| (progress.state(), progress.last_progress_at())) {
                    Some((RequestBodyState::AwaitingClient, _)) => Instant::now(),
                    Some((_, moved)) => moved,
                    None => sent_at,
                };
            connection.timer.poll(since + limit, cx).map(|()| None)
        })
        .await
    }
}

/// Returns the error kind if the client caused the request to fail.
fn client_error_kind(progress: Option<&RequestBodyProgress>) -> Option<UpstreamErrorKind> {
    match progress?.state() {
        RequestBodyState::ClientTimeout => Some(UpstreamErrorKind::RequestBodyTimeout),
        RequestBodyState::TooLarge => Some(UpstreamErrorKind::RequestBodyTooLarge),
        RequestBodyState::ClientAborted => Some(UpstreamErrorKind::ClientDisconnected),
        RequestBodyState::AwaitingClient
        | RequestBodyState::Transferring
        | RequestBodyState::Finished => None,
    }
}
