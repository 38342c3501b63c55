//! Sends requests to the upstream and returns the response heads.
//!
//! Each worker has one [`UpstreamClient`] with its own connections, so a request never changes
//! threads. [`UpstreamSharedState`] holds the limits and counters that all workers share.

mod connector;
mod exchange;
mod http1;
mod http2;
mod pool;
pub(crate) mod response_body;

pub use pool::UpstreamClient;

use arc_swap::ArcSwap;
use http::{HeaderName, HeaderValue, Method, Request, Response, Uri, Version, request};
use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::net::IpAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;
use tokio::sync::{Notify, Semaphore, watch};
use tokio::time::{Instant, sleep};

use super::UpstreamSettings;
use super::body::informational_responses::InformationalForwarder;
use super::body::request::RequestBody;
use super::client_counts::{ClientCountGuard, ClientCounts};
use super::http::upgrade;
use super::upstream::exchange::ExchangeFailure;
use super::upstream::pool::{ConnectionProtocol, ConnectionShare, UpstreamConnection};
use super::upstream::response_body::ResponseBody;
use super::upstream_error::{UpstreamError, UpstreamErrorKind};
use crate::telemetry::LogThrottle;
use crate::tls::ClientTls;

/// Maximum retries of a request after GOAWAY. A connection closed under load fails many requests at
/// once, and each retry may meet another closing connection.
const MAX_GOAWAY_RETRIES: u32 = 5;
/// Time for the start of an upload to arrive. Afterwards the upload may take a connection without
/// it: the upstream may have to answer first.
const READ_AHEAD_TIME: Duration = Duration::from_secs(1);
/// Maximum size of a response head. A larger response head is a protocol error.
const MAX_RESPONSE_HEAD_BYTES: u32 = 256 * 1024;

impl UpstreamClient {
    /// The upstream's authority, as used in a `Host` header.
    pub(crate) fn authority(&self) -> &HeaderValue {
        &self.shared.authority
    }

    /// Logs why a request was not forwarded. Expected errors go to the debug log; upstream and
    /// proxy errors produce a throttled warning.
    pub(crate) fn log_error(&self, error: &UpstreamError) {
        let throttle = &self.shared.error_log_throttle;
        let record = || throttle.record_occurrence(std::time::Instant::now());
        match (!error.kind.is_expected()).then(record).flatten() {
            Some(requests) => {
                let upstream = self.authority().to_str().unwrap_or_default();
                tracing::warn!(%error, upstream, requests, "requests are not forwarded");
            }
            None => tracing::debug!(%error, "request not forwarded"),
        }
    }

    /// Counts a tunnel for its client. Returns `None` without `max_tunnels_per_client`.
    ///
    /// # Errors
    /// Fails if the client has as many tunnels already.
    pub(crate) fn count_tunnel(
        &self,
        client: IpAddr,
    ) -> Result<Option<ClientCountGuard>, UpstreamError> {
        let limit = self.settings().max_tunnels_per_client;
        if limit == 0 {
            return Ok(None);
        }
        let counted = self.shared.client_tunnels.try_acquire(client, limit);
        counted.map(Some).ok_or_else(|| {
            UpstreamErrorKind::TunnelLimit
                .with_detail(format!("the client has {limit} tunnels already"))
        })
    }

    /// Sends a request, with retries, and waits for the response head. The returned response
    /// streams the body.
    ///
    /// The head must have its URI in origin form and its final headers, `Host` included. With
    /// `is_upgrade`, it has `Upgrade`. Head and body may be left empty. `now` is the caller's latest clock reading, `client` returns
    /// the address prefix that sent the request. `interim` receives informational (1xx) responses.
    /// `was_sent` is set while the upstream may have received a part of the request.
    /// Dropping the future, or the response body before its end, closes the HTTP/1.1 connection or
    /// cancels the HTTP/2 stream.
    ///
    /// # Errors
    /// Fails if no response head arrived; see [`UpstreamErrorKind`].
    #[allow(
        clippy::manual_async_fn,
        reason = "an async fn stores and copies its arguments twice"
    )]
    pub fn send(
        self: &Rc<Self>,
        (head, body, is_upgrade): (&mut request::Parts, &mut RequestBody, bool),
        client: impl Fn() -> IpAddr,
        mut now: Instant,
        interim: &mut InformationalForwarder,
        was_sent: &Cell<bool>,
    ) -> impl Future<Output = Result<Response<ResponseBody>, UpstreamError>> {
        async move {
            head.version = Version::HTTP_11;
            let mut budget = RetryBudget::new(self.settings(), &head.method, body);
            let upload = Some(&*body).filter(|body| body.may_be_read_ahead() && self.is_scarce());
            let taken = upload.is_none().then(|| self.try_take_share(&client));
            let share = match taken.flatten() {
                Some(share) => share,
                None => {
                    let share = Box::pin(self.read_ahead_and_wait(client(), upload)).await?;
                    now = Instant::now();
                    share
                }
            };
            let (mut connection, mut sent_at) = match self.take_available_connection(now) {
                Some(connection) => (connection, now),
                None => (self.acquire(&mut budget.connects).await?, Instant::now()),
            };
            loop {
                if is_upgrade {
                    connection = self
                        .select_connection_for_upgrade(connection, head, &mut budget.connects)
                        .await?;
                }
                let is_reused = connection.is_reused();
                let is_http2 = matches!(connection.protocol, ConnectionProtocol::Http2(_));
                let may_retry = is_http2 || is_reused && budget.may_retry_idempotent;
                let copy = may_retry.then(|| HeadCopy::new(head));
                // An HTTP/2 upstream may refuse a request unprocessed even after the whole body was
                // sent, so the body is kept for a retry.
                body.set_replay(is_http2);
                let yield_first = is_reused && !budget.may_retry_idempotent;
                let was_sent_before = was_sent.replace(true);
                let order = (is_upgrade, yield_first);
                let request = (&mut *head, &mut *body);
                let exchange = self.exchange_request(connection, request, sent_at, interim, order);
                match exchange.await {
                    Ok(mut response) => {
                        if copy.is_some() {
                            body.set_replay(false);
                        }
                        match response.body_mut() {
                            ResponseBody::Upstream(body) => {
                                if let Some(connection) = &mut body.connection {
                                    connection.share = Some(share);
                                }
                                if !poll_fn(|cx| body.poll_first_frame(cx)).await? {
                                    *response.body_mut() = ResponseBody::Empty;
                                }
                            }
                            ResponseBody::Tunnel(tunnel) => tunnel.keep(share),
                            _ => {}
                        }
                        return Ok(response);
                    }
                    // The retry is boxed because failures are rare: unboxed it would enlarge every
                    // request's future.
                    Err(failed) => {
                        if let ExchangeFailure::NotSent(_) = failed.0 {
                            was_sent.set(was_sent_before);
                        }
                        let retry = self.prepare_retry(failed, copy, body, is_reused, &mut budget);
                        (*head, connection) = Box::pin(retry).await?;
                    }
                }
                sent_at = Instant::now();
            }
        }
    }

    /// Reads the start of `upload`, if any, and waits for a share of the connections.
    async fn read_ahead_and_wait(
        self: &Rc<Self>,
        client: IpAddr,
        upload: Option<&RequestBody>,
    ) -> Result<ConnectionShare, UpstreamError> {
        if let Some(body) = upload
            && let Some(share) = self.read_ahead(body).await?
        {
            return Ok(share);
        }
        self.wait_for_share(client).await
    }

    /// Reads the start of the body. Returns a share if that takes longer than [`READ_AHEAD_TIME`]
    /// and few uploads do. Otherwise waits for the start, as long as the client may take for it.
    async fn read_ahead(
        self: &Rc<Self>,
        body: &RequestBody,
    ) -> Result<Option<ConnectionShare>, UpstreamError> {
        let share = async {
            loop {
                sleep(READ_AHEAD_TIME).await;
                if let Some(share) = self.try_take_slow_upload_share() {
                    return share;
                }
            }
        };
        tokio::select! {
            biased;
            read = body.read_ahead() => {
                read.map(|()| None).map_err(|error| body.client_error(&error))
            }
            share = share => Ok(Some(share)),
        }
    }

    /// Returns the head and another connection for a retry.
    ///
    /// # Errors
    /// Returns the failure if the request must not be sent again. Fails if there is no connection.
    async fn prepare_retry(
        self: &Rc<Self>,
        (failure, error): (ExchangeFailure, UpstreamError),
        copy: Option<HeadCopy>,
        body: &mut RequestBody,
        is_reused: bool,
        budget: &mut RetryBudget,
    ) -> Result<(request::Parts, Box<UpstreamConnection>), UpstreamError> {
        let copy = match (failure, copy) {
            (ExchangeFailure::NotSent(unsent), copy) if is_reused || budget.connects > 0 => {
                budget.connects -= u32::from(!is_reused);
                let head = match unsent.map(|unsent| unsent.into_parts()) {
                    Some((head, unsent_body)) => {
                        *body = unsent_body;
                        head
                    }
                    None => copy.map(HeadCopy::into_head).ok_or(error)?,
                };
                return Ok((head, self.acquire(&mut budget.connects).await?));
            }
            (ExchangeFailure::RefusedStream, Some(copy))
                if budget.may_retry_refused && body.rewind() =>
            {
                tracing::debug!(%error, "retrying request that the upstream refused unprocessed");
                budget.may_retry_refused = false;
                copy
            }
            (ExchangeFailure::GoAway, Some(copy)) if budget.goaways > 0 && body.rewind() => {
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
        // If reconnecting fails, the first connection's error is returned: that connection may have
        // delivered the request.
        let next = self.acquire_new_or_http2(&mut budget.connects).await;
        Ok((copy.into_head(), next.map_err(|_other| error)?))
    }

    /// Returns a connection for a request with `Upgrade`, replacing an HTTP/2 connection by an
    /// HTTP/1.1 connection if necessary.
    ///
    /// Over HTTP/2, only WebSockets are possible, and only if the upstream announced support for
    /// them (RFC 8441). Over cleartext HTTP/2, a request for any other upgrade is forwarded without
    /// it.
    async fn select_connection_for_upgrade(
        self: &Rc<Self>,
        connection: Box<UpstreamConnection>,
        head: &request::Parts,
        retries: &mut u32,
    ) -> Result<Box<UpstreamConnection>, UpstreamError> {
        let ConnectionProtocol::Http2(slot) = &connection.protocol else {
            return Ok(connection);
        };
        let is_websocket = upgrade::upgrade_names_websocket(&head.headers);
        if is_websocket && slot.connection.supports_extended_connect() {
            return Ok(connection);
        }
        if self.settings().tls.is_some() {
            drop(connection);
            return self.acquire_http1(retries).await;
        }
        if is_websocket {
            return Err(UpstreamErrorKind::UpgradeUnsupported
                .with_detail("the upstream did not announce WebSockets over HTTP/2 (RFC 8441)"));
        }
        Ok(connection)
    }
}

/// The retries that remain for one request.
struct RetryBudget {
    /// Remaining additional connection attempts.
    connects: u32,
    /// Remaining retries after a GOAWAY.
    goaways: u32,
    may_retry_refused: bool,
    may_retry_idempotent: bool,
}

impl RetryBudget {
    fn new(settings: &UpstreamSettings, method: &Method, body: &RequestBody) -> Self {
        Self {
            connects: settings.retry_connect,
            goaways: MAX_GOAWAY_RETRIES,
            may_retry_refused: true,
            may_retry_idempotent: settings.retry_idempotent && is_retryable(method, body),
        }
    }
}

/// A copy of a request head, for a retry. Copying the headers as text costs a third of cloning
/// their map; few copies are ever converted back.
pub(crate) struct HeadCopy {
    method: Method,
    uri: Uri,
    /// `name:value\n` for each header. Names contain no colon, and values no line feed.
    header_lines: Vec<u8>,
}

impl HeadCopy {
    pub(crate) fn new(head: &request::Parts) -> Self {
        // Most heads are no longer.
        let mut header_lines = Vec::with_capacity(512);
        for (name, value) in &head.headers {
            header_lines.extend_from_slice(name.as_str().as_bytes());
            header_lines.push(b':');
            header_lines.extend_from_slice(value.as_bytes());
            header_lines.push(b'\n');
        }
        Self {
            method: head.method.clone(),
            uri: head.uri.clone(),
            header_lines,
        }
    }

    pub(crate) fn into_head(self) -> request::Parts {
        let mut head = Request::new(()).into_parts().0;
        head.method = self.method;
        head.uri = self.uri;
        for line in self.header_lines.split(|byte| *byte == b'\n') {
            let mut halves = line.splitn(2, |byte| *byte == b':');
            let name = halves.next().map(HeaderName::from_bytes);
            let value = halves.next().map(HeaderValue::from_bytes);
            if let (Some(Ok(name)), Some(Ok(value))) = (name, value) {
                head.headers.append(name, value);
            }
        }
        head
    }
}

/// Whether a request may be processed twice: its method is idempotent (RFC 9110, 9.2.2) and it has
/// no body.
pub(crate) fn is_retryable(method: &Method, body: &RequestBody) -> bool {
    body.is_empty() && (method.is_safe() || [Method::PUT, Method::DELETE].contains(method))
}

/// Minimum interval between warnings about requests that are not forwarded.
const ERROR_LOG_INTERVAL: Duration = Duration::from_secs(10);

/// The upstream URL has a host that is not valid in a `Host` header.
#[derive(Debug, thiserror::Error)]
#[error("upstream.url: {0:?} is not valid in a Host header")]
pub struct UpstreamUrlError(String);

/// Settings, limits and counters of the upstream, shared by all workers.
#[derive(Debug)]
pub struct UpstreamSharedState {
    pub(super) settings: UpstreamSettings,
    /// The upstream's authority, as used in a `Host` header.
    pub(super) authority: HeaderValue,
    /// TLS settings of new connections; a reload replaces them. `None` for a cleartext upstream.
    pub(super) tls: Option<ArcSwap<ClientTls>>,
    pub(super) max_idle_per_worker: usize,
    /// One permit per open connection.
    pub(super) connection_permits: Arc<Semaphore>,
    /// Number of requests waiting for a connection.
    pub(super) queued_requests: AtomicUsize,
    /// Number of requests delayed by a `leaky_bucket` limit.
    pub(super) delayed_requests: AtomicUsize,
    /// Tunnels of each client.
    pub(super) client_tunnels: ClientCounts,
    /// Requests on the first half of the HTTP/1.1 connections, and those of each client on the
    /// second half.
    pub(super) first_half_in_use: AtomicUsize,
    pub(super) client_connections: ClientCounts,
    /// Notifies requests that wait for one of these when one ends.
    pub(super) share_freed: Notify,
    /// Notifies all workers when a request starts to wait for a connection.
    pub(super) queue_signal: watch::Sender<()>,
    /// Throttles the warnings about failed requests.
    pub(super) error_log_throttle: LogThrottle,
}

impl UpstreamSharedState {
    /// Creates the state for `workers` workers.
    ///
    /// # Errors
    /// Returns an error if the host of the upstream URL is not valid in a `Host` header.
    pub fn new(settings: UpstreamSettings, workers: usize) -> Result<Arc<Self>, UpstreamUrlError> {
        let authority = settings.url.authority();
        let authority =
            HeaderValue::try_from(&authority).map_err(|_invalid| UpstreamUrlError(authority))?;
        Ok(Arc::new(Self {
            tls: settings.tls.clone().map(ArcSwap::from_pointee),
            authority,
            max_idle_per_worker: settings.pool_max_idle.div_ceil(workers.max(1)),
            connection_permits: Arc::new(Semaphore::new(
                settings.max_connections.min(Semaphore::MAX_PERMITS),
            )),
            queued_requests: AtomicUsize::new(0),
            delayed_requests: AtomicUsize::new(0),
            client_tunnels: ClientCounts::default(),
            first_half_in_use: AtomicUsize::new(0),
            client_connections: ClientCounts::default(),
            share_freed: Notify::new(),
            queue_signal: watch::Sender::new(()),
            error_log_throttle: LogThrottle::new(ERROR_LOG_INTERVAL),
            settings,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::{HeadCopy, RequestBody, is_retryable};
    use http::Request;

    #[test]
    fn head_copy_equals_the_original() {
        let head = || {
            Request::put("/a?b")
                .header("x-b", ": 1:2")
                .header("host", "h")
                .header("x-b", "")
        };
        let request = || {
            head()
                .header("x-\u{7e}", &b"\xff\t"[..])
                .body(())
                .unwrap()
                .into_parts()
                .0
        };
        let (first, retried) = (request(), HeadCopy::new(&request()).into_head());
        assert_eq!((&retried.method, &retried.uri), (&first.method, &first.uri));
        assert_eq!(retried.headers, first.headers);
        assert_eq!(retried.headers.len(), 4);
    }

    #[test]
    fn only_idempotent_requests_are_retryable() {
        let repeatable =
            |method: &str| is_retryable(&method.parse().unwrap(), &RequestBody::default());
        for method in ["GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"] {
            assert!(repeatable(method), "{method}");
        }
        for method in ["POST", "PATCH", "CONNECT", "PURGE", "get"] {
            assert!(!repeatable(method), "{method}");
        }
    }
}
