//! Sends requests to the upstream and returns the response heads.
//!
//! Each worker has one [`UpstreamClient`] with its own connections, so a request never changes
//! threads. [`UpstreamSharedState`] holds the limits and counters that all workers share.

mod addresses;
mod connector;
mod http2;
mod http2_stream;
mod informational_responses;
mod pool;
mod retry;
mod shared_state;

use http::{HeaderValue, Method, Request, Response, StatusCode, Version, header};
use hyper::body::Incoming;
use hyper::client::conn::TrySendError;
use hyper_util::rt::TokioIo;
use smallvec::SmallVec;
use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;
use tokio::task::yield_now;
use tokio::time::Instant;

use super::UpstreamSettings;
use crate::proxy::http::body::{
    RequestBody, RequestBodyProgress, RequestBodyState, ResponseBody, UpstreamBody,
    UpstreamBodySource,
};
use crate::proxy::http::informational_responses::InformationalForwarder;
use crate::proxy::http::tunnel::{Tunnel, TunnelUpstream};
use crate::proxy::http::upgrade;
use http2_stream::BodyUpload;
use pool::{ConnectionProtocol, UpstreamConnection, UpstreamPool};
use retry::RetryRequest;

pub use connector::UpstreamUrlError;
pub(super) use http2_stream::{Http2ResponseBody, Http2TunnelIo};
pub(super) use pool::PooledConnection;
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

/// A request that received no response, with the cause.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{kind}: {detail}")]
pub struct UpstreamError {
    pub kind: UpstreamErrorKind,
    /// For logs only; never sent to clients.
    pub detail: String,
}

/// Cause of an [`UpstreamError`]. The upstream is at fault unless the variant says otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum UpstreamErrorKind {
    /// The upstream refused the TCP connection.
    ConnectRefused,
    /// Connecting failed for any other reason.
    ConnectFailed,
    /// No connection was established within `connect_timeout`.
    ConnectTimeout,
    /// The upstream's host name did not resolve.
    Dns,
    /// The TLS handshake failed, or the certificate is not trusted.
    Tls,
    /// Proxy limit: `max_requests_waiting` requests already wait for a connection.
    QueueFull,
    /// Proxy limit: no connection became free within `queue_timeout`.
    QueueTimeout,
    /// No response head arrived within `response_timeout`.
    ResponseTimeout,
    /// The connection ended before the response head.
    ConnectionTerminated,
    /// The response is not valid HTTP.
    Protocol,
    /// The upstream reset the HTTP/2 stream of the request.
    StreamReset,
    /// The upstream speaks HTTP/2 and does not support WebSockets over it (RFC 8441).
    UpgradeUnsupported,
    /// Client error: the client stopped sending the request body.
    RequestBodyTimeout,
    /// Client error: the request body exceeds `max_body_bytes`.
    RequestBodyTooLarge,
    /// Client error: the client disconnected during the request body.
    ClientDisconnected,
}

/// The party responsible for an [`UpstreamError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpstreamErrorOrigin {
    Client,
    Upstream,
    /// A limit of the proxy was reached.
    Proxy,
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
        let settings = self.pool.settings();
        *request.version_mut() = Version::HTTP_11;
        let mut may_retry_idempotent = settings.retry_idempotent && is_retryable(&request);
        let (mut may_retry_refused, mut goaway_retries_left) = (true, MAX_GOAWAY_RETRIES);
        let mut connects_left = settings.retry_connect;
        let (mut connection, mut sent_at) = match self.pool.take_idle(now) {
            Some(connection) => (connection, now),
            None => (self.pool.acquire(&mut connects_left).await?, Instant::now()),
        };
        loop {
            if request.headers().contains_key(header::UPGRADE) {
                connection = self
                    .ensure_upgrade_support(connection, &request, &mut connects_left)
                    .await?;
            }
            let reused = connection.is_reused();
            let is_http2 = matches!(connection.protocol, ConnectionProtocol::Http2(_));
            let retry = (is_http2 || reused && may_retry_idempotent)
                .then(|| RetryRequest::from_request(&request));
            match is_http2 {
                // The upstream may refuse the request unprocessed, even after the whole body was
                // sent.
                true => request.body().enable_replay(),
                false => request.body().disable_replay(),
            }
            let (failure, error) = match self
                .exchange(
                    connection,
                    request,
                    sent_at,
                    interim,
                    reused && !may_retry_idempotent,
                )
                .await
            {
                Ok(response) => {
                    retry.inspect(|copy| copy.body.disable_replay());
                    return Ok(response);
                }
                Err(failed) => failed,
            };
            (request, connection) = match (failure, retry) {
                (ExchangeFailure::NotSent(unsent), copy) if reused || connects_left > 0 => {
                    connects_left -= u32::from(!reused);
                    let rebuild = || copy.map(RetryRequest::into_request);
                    let Some(request) = unsent.map(|unsent| *unsent).or_else(rebuild) else {
                        return Err(error);
                    };
                    (request, self.pool.acquire(&mut connects_left).await?)
                }
                (ExchangeFailure::RefusedStream, Some(copy))
                    if may_retry_refused && copy.body.rewind() =>
                {
                    tracing::debug!(%error, "retrying request that the upstream refused unprocessed");
                    may_retry_refused = false;
                    let next = self.pool.acquire_new(&mut connects_left).await;
                    (copy.into_request(), next.map_err(|_other| error)?)
                }
                (ExchangeFailure::GoAway, Some(copy))
                    if goaway_retries_left > 0 && copy.body.rewind() =>
                {
                    tracing::debug!(%error, "retrying request on a new connection after GOAWAY");
                    goaway_retries_left -= 1;
                    let next = self.pool.acquire_new(&mut connects_left).await;
                    (copy.into_request(), next.map_err(|_other| error)?)
                }
                (_, Some(copy))
                    if may_retry_idempotent
                        && reused
                        && error.kind == UpstreamErrorKind::ConnectionTerminated =>
                {
                    tracing::debug!(%error, "retrying idempotent request on a new connection");
                    may_retry_idempotent = false;
                    // The first connection may have delivered the request, so its error says more
                    // than a failure to reconnect.
                    let next = self.pool.acquire_new(&mut connects_left).await;
                    (copy.into_request(), next.map_err(|_other| error)?)
                }
                _ => return Err(error),
            };
            sent_at = Instant::now();
        }
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
        if is_websocket && slot.allows_tunnels() {
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

    /// Sends the request once, on `connection`.
    ///
    /// `yield_first` lets the runtime poll the socket first. A request that cannot be retried is
    /// then not written to a connection that the upstream has already closed.
    async fn exchange(
        &self,
        mut connection: Box<UpstreamConnection>,
        mut request: Request<RequestBody>,
        sent_at: Instant,
        interim: &mut InformationalForwarder,
        yield_first: bool,
    ) -> Result<Response<ResponseBody>, (ExchangeFailure, UpstreamError)> {
        let ConnectionProtocol::Http1(http1) = &mut connection.protocol else {
            return Box::pin(self.exchange_http2(connection, request, sent_at, interim)).await;
        };
        if yield_first {
            yield_now().await;
        }
        let informational = Arc::clone(&http1.informational);
        informational.attach_to_request(&mut request);
        let progress = request.body().progress();
        let requested_protocols: SmallVec<[_; 1]> = request
            .headers()
            .get_all(header::UPGRADE)
            .iter()
            .cloned()
            .collect();
        let mut response_future = pin!(http1.sender.try_send_request(request));
        let response_future = poll_fn(|cx| {
            let answer = response_future.as_mut().poll(cx);
            informational.forward_responses(interim, answer.is_pending().then(|| cx.waker()));
            answer
        });
        let response = match self
            .await_within_response_timeout(
                &mut connection,
                response_future,
                progress.as_deref(),
                sent_at,
            )
            .await
        {
            Some(Ok(response)) => response,
            Some(Err(failed)) => {
                return Err(exchange_failure_from_hyper(failed, progress.as_deref()));
            }
            None => {
                return Err((
                    ExchangeFailure::MaybeProcessed,
                    UpstreamError::response_timeout(),
                ));
            }
        };
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            let switched =
                Box::pin(self.switch_protocols(response, connection, &requested_protocols)).await;
            return switched.map_err(|error| (ExchangeFailure::MaybeProcessed, error));
        }
        Ok(response.map(|incoming| {
            self.build_response_body(UpstreamBodySource::Http1(incoming), connection)
        }))
    }

    /// Sends the request as one stream of a shared HTTP/2 connection.
    async fn exchange_http2(
        &self,
        mut connection: Box<UpstreamConnection>,
        request: Request<RequestBody>,
        sent_at: Instant,
        interim: &mut InformationalForwarder,
    ) -> Result<Response<ResponseBody>, (ExchangeFailure, UpstreamError)> {
        let (mut head, body) = request.into_parts();
        let invalid = |what: &str| {
            let detail = what.to_owned();
            (
                ExchangeFailure::MaybeProcessed,
                UpstreamError {
                    kind: UpstreamErrorKind::Protocol,
                    detail,
                },
            )
        };
        let ConnectionProtocol::Http2(slot) = &mut connection.protocol else {
            return Err(invalid("the connection does not speak HTTP/2"));
        };
        let websocket_key = match upgrade::is_websocket(&head.headers) && slot.allows_tunnels() {
            true => http2_stream::convert_to_extended_connect(&mut head),
            false => None,
        };
        if http2_stream::convert_head_to_http2(&mut head, self.pool.settings().tls.is_some())
            .is_none()
        {
            return Err(invalid("the request's Host is not a valid authority"));
        }
        let declared_trailers = head
            .headers
            .get_all(header::TRAILER)
            .iter()
            .cloned()
            .collect();
        let keeps_stream_open = websocket_key.is_some() || !body.is_empty();
        let (mut response_future, send_stream) =
            match slot.send_request_head(Request::from_parts(head, ()), keeps_stream_open) {
                Ok(begun) => begun,
                Err(error) => {
                    let failure = if error.is_connection_closed {
                        ExchangeFailure::NotSent(None)
                    } else {
                        ExchangeFailure::MaybeProcessed
                    };
                    return Err((failure, upstream_error_from_h2(&error.error, None)));
                }
            };
        let progress = body.progress();
        let mut tunnel = None;
        if websocket_key.is_some() {
            tunnel = Some(send_stream);
        } else if keeps_stream_open
            && let Some(upload) = BodyUpload::start(body, send_stream, declared_trailers).await
        {
            slot.attach_upload(upload);
        }
        let response_future = poll_fn(|cx| {
            while let Poll::Ready(Some(Ok(informational))) = response_future.poll_informational(cx)
            {
                interim.forward(
                    informational.status(),
                    informational.headers(),
                    Version::HTTP_2,
                );
            }
            Pin::new(&mut response_future).poll(cx)
        });
        let response = match self
            .await_within_response_timeout(
                &mut connection,
                response_future,
                progress.as_deref(),
                sent_at,
            )
            .await
        {
            Some(Ok(response)) => response,
            Some(Err(error)) => {
                let failure = http2::classify_failure(&error);
                return Err((failure, upstream_error_from_h2(&error, progress.as_deref())));
            }
            None => {
                if let ConnectionProtocol::Http2(slot) = &connection.protocol {
                    slot.mark_suspect();
                }
                return Err((
                    ExchangeFailure::MaybeProcessed,
                    UpstreamError::response_timeout(),
                ));
            }
        };
        let (head, recv_stream) = response.into_parts();
        let mut response = Response::from_parts(head, ResponseBody::Empty);
        if let (Some(key), Some(sending), true) =
            (websocket_key, tunnel, response.status().is_success())
        {
            http2_stream::convert_to_switching_protocols(&mut response, &key);
            let far = TunnelUpstream::Http2(Http2TunnelIo::new(sending, recv_stream, connection));
            let tunnel = Tunnel::new(far, self.pool.settings().body_idle_timeout);
            *response.body_mut() = ResponseBody::Tunnel(Box::new(tunnel));
            return Ok(response);
        }
        let incoming_body = Http2ResponseBody::new(recv_stream, response.headers());
        *response.body_mut() =
            self.build_response_body(UpstreamBodySource::Http2(incoming_body), connection);
        Ok(response)
    }

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

    /// Turns the connection into a tunnel for the protocol that the upstream switched to. The
    /// connection keeps its `max_connections` permit until it is closed.
    async fn switch_protocols(
        &self,
        mut response: Response<Incoming>,
        connection: Box<UpstreamConnection>,
        requested_protocols: &[HeaderValue],
    ) -> Result<Response<ResponseBody>, UpstreamError> {
        if !upgrade::selects_offered_protocol(requested_protocols, response.headers()) {
            let detail =
                "the upstream switched to a protocol that the client did not offer".to_owned();
            return Err(UpstreamError {
                kind: UpstreamErrorKind::Protocol,
                detail,
            });
        }
        let upgraded = hyper::upgrade::on(&mut response)
            .await
            .map_err(|error| UpstreamError {
                kind: UpstreamErrorKind::ConnectionTerminated,
                detail: format_error_chain(&error),
            })?;
        // Dropping the connection earlier would abort the task that hands over the socket.
        drop(connection);
        let tunnel = Tunnel::new(
            TunnelUpstream::Http1(TokioIo::new(upgraded)),
            self.pool.settings().body_idle_timeout,
        );
        Ok(response.map(|_empty| ResponseBody::Tunnel(Box::new(tunnel))))
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

/// State of a request that received no response; decides whether it may be retried.
enum ExchangeFailure {
    /// Nothing was written, so a retry is safe. Holds the request unless a [`RetryRequest`] has a
    /// copy.
    NotSent(Option<Box<Request<RequestBody>>>),
    /// The upstream refused the stream without processing it (REFUSED_STREAM).
    RefusedStream,
    /// The upstream sent GOAWAY and did not process the request.
    GoAway,
    MaybeProcessed,
}

fn exchange_failure_from_hyper(
    mut failed: TrySendError<Request<RequestBody>>,
    progress: Option<&RequestBodyProgress>,
) -> (ExchangeFailure, UpstreamError) {
    let unsent = failed.take_message();
    let error = failed.into_error();
    let kind = if error.is_parse() {
        UpstreamErrorKind::Protocol
    } else {
        UpstreamErrorKind::ConnectionTerminated
    };
    let error = UpstreamError {
        kind: client_error_kind(progress).unwrap_or(kind),
        detail: format_error_chain(&error),
    };
    (
        unsent.map_or(ExchangeFailure::MaybeProcessed, |request| {
            ExchangeFailure::NotSent(Some(Box::new(request)))
        }),
        error,
    )
}

fn upstream_error_from_h2(
    error: &h2::Error,
    progress: Option<&RequestBodyProgress>,
) -> UpstreamError {
    let kind = client_error_kind(progress).unwrap_or_else(|| http2::error_kind(error));
    UpstreamError {
        kind,
        detail: format_error_chain(error),
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

/// Whether a request may be sent twice: its method is idempotent (RFC 9110, 9.2.2) and it has no
/// body.
fn is_retryable(request: &Request<RequestBody>) -> bool {
    let method = request.method();
    request.body().is_empty()
        && (method.is_safe() || [Method::PUT, Method::DELETE].contains(method))
}

/// Formats an error and its sources on one line.
pub(super) fn format_error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        next = cause.source();
    }
    text
}

impl UpstreamErrorKind {
    pub fn origin(self) -> UpstreamErrorOrigin {
        match self {
            Self::QueueFull | Self::QueueTimeout => UpstreamErrorOrigin::Proxy,
            Self::RequestBodyTimeout | Self::RequestBodyTooLarge | Self::ClientDisconnected => {
                UpstreamErrorOrigin::Client
            }
            _ => UpstreamErrorOrigin::Upstream,
        }
    }

    /// Whether the upstream received nothing of the request, because there was no connection for
    /// it.
    pub fn is_unsent(self) -> bool {
        match self {
            Self::ConnectRefused
            | Self::ConnectFailed
            | Self::ConnectTimeout
            | Self::Dns
            | Self::Tls => true,
            Self::QueueFull | Self::QueueTimeout => true,
            Self::UpgradeUnsupported => true,
            Self::ResponseTimeout
            | Self::ConnectionTerminated
            | Self::Protocol
            | Self::StreamReset => false,
            Self::RequestBodyTimeout | Self::RequestBodyTooLarge | Self::ClientDisconnected => {
                false
            }
        }
    }

    /// Every [`UpstreamErrorKind::name`], in declaration order.
    pub const NAMES: &[&str] = &[
        Self::ConnectRefused.name(),
        Self::ConnectFailed.name(),
        Self::ConnectTimeout.name(),
        Self::Dns.name(),
        Self::Tls.name(),
        Self::QueueFull.name(),
        Self::QueueTimeout.name(),
        Self::ResponseTimeout.name(),
        Self::ConnectionTerminated.name(),
        Self::Protocol.name(),
        Self::StreamReset.name(),
        Self::UpgradeUnsupported.name(),
        Self::RequestBodyTimeout.name(),
        Self::RequestBodyTooLarge.name(),
        Self::ClientDisconnected.name(),
    ];

    /// The name used in metrics and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::ConnectRefused => "connect_refused",
            Self::ConnectFailed => "connect_failed",
            Self::ConnectTimeout => "connect_timeout",
            Self::Dns => "dns",
            Self::Tls => "tls",
            Self::QueueFull => "queue_full",
            Self::QueueTimeout => "queue_timeout",
            Self::ResponseTimeout => "response_timeout",
            Self::ConnectionTerminated => "terminated",
            Self::Protocol => "protocol",
            Self::StreamReset => "reset",
            Self::UpgradeUnsupported => "upgrade",
            Self::RequestBodyTimeout => "request_body_timeout",
            Self::RequestBodyTooLarge => "request_body_too_large",
            Self::ClientDisconnected => "client_gone",
        }
    }
}

impl fmt::Display for UpstreamErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl UpstreamError {
    fn response_timeout() -> Self {
        let detail = "no response head within the response timeout".to_owned();
        Self {
            kind: UpstreamErrorKind::ResponseTimeout,
            detail,
        }
    }

    fn queue_timeout(limit: Duration) -> Self {
        let detail = format!("no upstream connection became free within {limit:?}");
        Self {
            kind: UpstreamErrorKind::QueueTimeout,
            detail,
        }
    }

    fn queue_full(limit: usize) -> Self {
        let detail = format!("{limit} requests already wait for an upstream connection");
        Self {
            kind: UpstreamErrorKind::QueueFull,
            detail,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{RequestBody, UpstreamErrorKind, is_retryable};
    use http::Request;

    #[test]
    fn error_kind_names_are_in_declaration_order() {
        let last = UpstreamErrorKind::ClientDisconnected;
        assert_eq!(UpstreamErrorKind::NAMES.len(), last as usize + 1);
        for kind in [
            UpstreamErrorKind::ConnectRefused,
            UpstreamErrorKind::ResponseTimeout,
            last,
        ] {
            assert_eq!(UpstreamErrorKind::NAMES[kind as usize], kind.name());
        }
    }

    #[test]
    fn only_idempotent_requests_are_retryable() {
        let repeatable = |method| {
            let request = Request::builder()
                .method(method)
                .body(RequestBody::default())
                .unwrap();
            is_retryable(&request)
        };
        for method in ["GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"] {
            assert!(repeatable(method), "{method}");
        }
        for method in ["POST", "PATCH", "CONNECT", "PURGE", "get"] {
            assert!(!repeatable(method), "{method}");
        }
    }
}
