//! Sends requests to the upstream and returns the response heads.
//!
//! Each worker has one [`UpstreamClient`] with its own connections, so a request never changes
//! threads. [`UpstreamSharedState`] holds the limits and counters that all workers share.

mod addresses;
mod connector;
pub(in crate::proxy) mod error;
mod exchange;
mod http2;
mod informational_responses;
mod pool;
pub(in crate::proxy) mod response_body;
mod retry;
mod shared_state;
pub(in crate::proxy) mod tunnel_io;

use http::{HeaderValue, Request, Response, Version, header};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

use super::UpstreamSettings;
use crate::proxy::http::body::request::RequestBody;
use crate::proxy::http::body::response::ResponseBody;
use crate::proxy::http::informational_responses::InformationalForwarder;
use crate::proxy::http::upgrade;
use exchange::ExchangeFailure;
use pool::{ConnectionProtocol, UpstreamConnection, UpstreamPool};
use retry::RetryRequest;

pub use connector::UpstreamUrlError;
pub use error::{UpstreamError, UpstreamErrorKind, UpstreamErrorOrigin};
pub use shared_state::UpstreamSharedState;

/// A connection closed under load fails many requests at once, and each retry may meet another
/// closing connection.
const MAX_GOAWAY_RETRIES: u32 = 5;
/// Limit for a response head. A larger head is a protocol error.
const MAX_RESPONSE_HEAD_BYTES: u32 = 256 * 1024;

/// Sends requests to the upstream over one worker's connections. Cheap to clone.
#[derive(Clone, Debug)]
pub struct UpstreamClient {
    pool: Rc<UpstreamPool>,
}

impl UpstreamClient {
    /// Creates the client of one worker. Must run inside the worker's runtime: it spawns a task
    /// that closes idle connections for as long as the client exists.
    pub fn new(shared: Arc<UpstreamSharedState>) -> Self {
        Self {
            pool: UpstreamPool::new(shared),
        }
    }

    pub(super) fn settings(&self) -> &UpstreamSettings {
        self.pool.settings()
    }

    /// The upstream's authority, as used in a `Host` header.
    pub(super) fn authority(&self) -> &HeaderValue {
        self.pool.authority()
    }

    /// Logs why a request was not forwarded. Client errors go to the debug log; upstream and proxy
    /// errors produce a throttled warning.
    pub(super) fn log_error(&self, error: &UpstreamError) {
        let occurrences = match error.kind.origin() {
            UpstreamErrorOrigin::Client => None,
            UpstreamErrorOrigin::Upstream | UpstreamErrorOrigin::Proxy => self
                .pool
                .error_log_throttle()
                .record_occurrence(std::time::Instant::now()),
        };
        match occurrences {
            Some(requests) => tracing::warn!(%error, requests, "requests are not forwarded"),
            None => tracing::debug!(%error, "request not forwarded"),
        }
    }

    /// Waits until `delay` has passed since `since`, and returns the time at which the wait ended.
    ///
    /// The request counts against `max_requests_waiting` meanwhile.
    ///
    /// # Errors
    /// Immediately, if `max_requests_waiting` requests already wait.
    pub(super) async fn delay_request(
        &self,
        delay: Duration,
        since: Instant,
    ) -> Result<Instant, UpstreamError> {
        if delay.is_zero() {
            return Ok(since);
        }
        self.pool.delay_until(since + delay).await?;
        Ok(Instant::now())
    }

    /// Sends a request and waits for the response head. The body follows in the response.
    ///
    /// The request must have its URI in origin form and its final headers, `Host` included. `now`
    /// is the caller's latest clock reading. `interim` receives informational (1xx) responses.
    /// Dropping the future, or the response body before its end, closes the connection.
    ///
    /// # Errors
    /// If no response head arrived; see [`UpstreamErrorKind`].
    pub async fn send(
        &self,
        mut request: Request<RequestBody>,
        now: Instant,
        interim: &mut InformationalForwarder,
    ) -> Result<Response<ResponseBody>, UpstreamError> {
        *request.version_mut() = Version::HTTP_11;
        let mut budget = RetryBudget::new(self.settings(), &request);
        let (mut connection, mut sent_at) = match self.pool.take_idle(now) {
            Some(connection) => (connection, now),
            None => (
                self.pool.acquire(&mut budget.connects).await?,
                Instant::now(),
            ),
        };
        loop {
            if request.headers().contains_key(header::UPGRADE) {
                connection = self
                    .ensure_upgrade_support(connection, &request, &mut budget.connects)
                    .await?;
            }
            let is_reused = connection.is_reused();
            let is_http2 = matches!(connection.protocol, ConnectionProtocol::Http2(_));
            let retry = (is_http2 || is_reused && budget.may_retry_idempotent)
                .then(|| RetryRequest::from_request(&request));
            match is_http2 {
                // The upstream may refuse the request unprocessed, even after the whole body was
                // sent.
                true => request.body().enable_replay(),
                false => request.body().disable_replay(),
            }
            let yield_first = is_reused && !budget.may_retry_idempotent;
            match self
                .exchange(connection, request, sent_at, interim, yield_first)
                .await
            {
                Ok(response) => {
                    retry.inspect(|copy| copy.body.disable_replay());
                    return Ok(response);
                }
                // Boxed because failures are rare: unboxed it would enlarge every request's future.
                Err(failed) => {
                    (request, connection) =
                        Box::pin(self.prepare_retry(failed, retry, is_reused, &mut budget)).await?;
                }
            }
            sent_at = Instant::now();
        }
    }

    /// Returns the request and another connection for a retry.
    ///
    /// # Errors
    /// With the failure, if the request must not be sent again; or if there is no connection.
    async fn prepare_retry(
        &self,
        (failure, error): (ExchangeFailure, UpstreamError),
        copy: Option<RetryRequest>,
        is_reused: bool,
        budget: &mut RetryBudget,
    ) -> Result<(Request<RequestBody>, Box<UpstreamConnection>), UpstreamError> {
        let copy = match (failure, copy) {
            (ExchangeFailure::NotSent(unsent), copy) if is_reused || budget.connects > 0 => {
                budget.connects -= u32::from(!is_reused);
                let rebuild = || copy.map(RetryRequest::into_request);
                let Some(request) = unsent.map(|unsent| *unsent).or_else(rebuild) else {
                    return Err(error);
                };
                return Ok((request, self.pool.acquire(&mut budget.connects).await?));
            }
            (ExchangeFailure::RefusedStream, Some(copy))
                if budget.may_retry_refused && copy.body.rewind() =>
            {
                tracing::debug!(%error, "retrying request that the upstream refused unprocessed");
                budget.may_retry_refused = false;
                copy
            }
            (ExchangeFailure::GoAway, Some(copy)) if budget.goaways > 0 && copy.body.rewind() => {
                tracing::debug!(%error, "retrying request on a new connection after GOAWAY");
                budget.goaways -= 1;
                copy
            }
            (_, Some(copy))
                if budget.may_retry_idempotent
                    && is_reused
                    && error.kind == UpstreamErrorKind::ConnectionTerminated =>
            {
                tracing::debug!(%error, "retrying idempotent request on a new connection");
                budget.may_retry_idempotent = false;
                copy
            }
            _ => return Err(error),
        };
        // The first connection may have delivered the request, so its error says more than a
        // failure to reconnect.
        let next = self.pool.acquire_new(&mut budget.connects).await;
        Ok((copy.into_request(), next.map_err(|_other| error)?))
    }

    /// Returns a connection that supports the upgrade that the request asks for, if possible.
    ///
    /// HTTP/2 supports only WebSockets, and only if the upstream announced it (RFC 8441). Any other
    /// upgrade over cleartext HTTP/2 is forwarded as a plain request.
    async fn ensure_upgrade_support(
        &self,
        connection: Box<UpstreamConnection>,
        request: &Request<RequestBody>,
        retries: &mut u32,
    ) -> Result<Box<UpstreamConnection>, UpstreamError> {
        let ConnectionProtocol::Http2(slot) = &connection.protocol else {
            return Ok(connection);
        };
        let is_websocket = upgrade::is_websocket(request.headers());
        if is_websocket && slot.connection().allows_tunnels() {
            return Ok(connection);
        }
        if self.pool.settings().tls.is_some() {
            drop(connection);
            return self.pool.acquire_http1(retries).await;
        }
        if is_websocket {
            let detail =
                "the upstream did not announce WebSockets over HTTP/2 (RFC 8441)".to_owned();
            return Err(UpstreamError {
                kind: UpstreamErrorKind::UpgradeUnsupported,
                detail,
            });
        }
        Ok(connection)
    }
}

/// The retries that remain for one request.
struct RetryBudget {
    /// Further connection attempts.
    connects: u32,
    /// Retries after a GOAWAY.
    goaways: u32,
    may_retry_refused: bool,
    may_retry_idempotent: bool,
}

impl RetryBudget {
    fn new(settings: &UpstreamSettings, request: &Request<RequestBody>) -> Self {
        Self {
            connects: settings.retry_connect,
            goaways: MAX_GOAWAY_RETRIES,
            may_retry_refused: true,
            may_retry_idempotent: settings.retry_idempotent && retry::is_retryable(request),
        }
    }
}
