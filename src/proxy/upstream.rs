//! The upstream: one request in, one response out, whatever connections that takes.
//!
//! Every worker has an [`Upstream`] with connections of its own, so that a request never changes
//! threads; what all workers may do together is counted in [`Shared`].

mod connect;
mod pool;

use http::{HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri, header};
use hyper::body::Incoming;
use hyper::client::conn::TrySendError;
use smallvec::SmallVec;
use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;
use tokio::time::Instant;

use super::UpstreamSettings;
use super::body::{Progress, RequestBody, ResponseBody, Sending, UpstreamBody};
use super::tunnel::Tunnel;
use super::upgrade;
use pool::{Connection, Pool};

pub use connect::SetupError;
pub(super) use pool::Lease;
pub use pool::Shared;

/// Sends requests to the upstream over one worker's connections. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Upstream {
    pool: Rc<Pool>,
}

/// A request that got no response, and whose fault it is.
#[derive(Debug, thiserror::Error)]
#[error("{kind}: {detail}")]
pub struct UpstreamError {
    pub kind: UpstreamErrorKind,
    /// For logs; never for clients.
    pub detail: String,
}

/// What went wrong. The upstream's fault unless said otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum UpstreamErrorKind {
    /// Nobody listens there.
    ConnectRefused,
    /// Connecting failed in another way.
    ConnectFailed,
    /// No connection within `connect_timeout`.
    ConnectTimeout,
    /// The name could not be resolved.
    Dns,
    /// No agreement on TLS, or a certificate that is not trusted.
    Tls,
    /// Ours: more than `max_requests_waiting` wait for a connection.
    QueueFull,
    /// Ours: no connection became free within `queue_timeout`.
    QueueTimeout,
    /// No response head within `response_timeout`.
    ResponseTimeout,
    /// The connection ended before the response head.
    Terminated,
    /// The answer is not HTTP.
    Protocol,
    /// The client's: it stopped sending the request body.
    RequestBodyTimeout,
    /// The client's: the request body is larger than allowed.
    RequestBodyTooLarge,
    /// The client's: it left in the middle of the request body.
    ClientGone,
}

/// Who is to blame for an [`UpstreamError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    Client,
    Upstream,
    /// A limit of ours.
    Us,
}

impl Upstream {
    /// One worker's connections; to be called inside the worker's runtime, where a task sweeps out
    /// idle connections for as long as the upstream is in use.
    pub fn new(shared: Arc<Shared>) -> Self {
        Self { pool: Pool::new(shared) }
    }

    pub(super) fn settings(&self) -> &UpstreamSettings {
        self.pool.settings()
    }

    /// The upstream's name in a `Host` field.
    pub(super) fn authority(&self) -> &HeaderValue {
        self.pool.authority()
    }

    /// Logs why a request was not forwarded: what clients do wrong in detail only, trouble of ours or of the
    /// upstream now and then.
    pub(super) fn tell(&self, error: &UpstreamError) {
        let told = match error.kind.fault() {
            Fault::Client => None,
            Fault::Upstream | Fault::Us => self.pool.trouble().tell(std::time::Instant::now()),
        };
        match told {
            Some(requests) => tracing::warn!(%error, requests, "requests are not forwarded"),
            None => tracing::debug!(%error, "request not forwarded"),
        }
    }

    /// Waits for a `delay` after `since`, as one of all that wait for anything, and returns when that was over.
    ///
    /// # Errors
    /// At once, when more than `max_requests_waiting` wait.
    pub(super) async fn hold(&self, delay: Duration, since: Instant) -> Result<Instant, UpstreamError> {
        if delay.is_zero() {
            return Ok(since);
        }
        self.pool.hold_until(since + delay).await?;
        Ok(Instant::now())
    }

    /// Sends a request and waits for the head of its response; the body is still to come.
    ///
    /// The request has its URI in origin form and its final headers, `Host` included. `now` is when the
    /// caller looked at the clock last. Dropping the future, or the response's body before its end, closes
    /// the connection.
    ///
    /// # Errors
    /// When no response head came, see [`UpstreamErrorKind`].
    pub async fn send(
        &self,
        mut request: Request<RequestBody>,
        now: Instant,
    ) -> Result<Response<ResponseBody>, UpstreamError> {
        let settings = self.pool.settings();
        *request.version_mut() = http::Version::HTTP_11;
        let mut may_repeat = settings.retry_idempotent && is_repeatable(&request);
        let mut connects_left = settings.retry_connect;
        let (mut connection, mut sent) = match self.pool.take_idle() {
            Some(connection) => (connection, now),
            None => (self.pool.acquire(&mut connects_left).await?, Instant::now()),
        };
        loop {
            let reused = connection.is_reused();
            let copy = (reused && may_repeat).then(|| Again::of(&request));
            match self.exchange(connection, request, sent).await {
                Ok(response) => return Ok(response),
                Err(Failure::Unsent(unsent, _)) if reused => {
                    request = *unsent;
                    connection = self.pool.acquire(&mut connects_left).await?;
                }
                Err(Failure::Unsent(unsent, _)) if connects_left > 0 => {
                    connects_left -= 1;
                    request = *unsent;
                    connection = self.pool.acquire(&mut connects_left).await?;
                }
                Err(Failure::Unsent(_, error)) => return Err(error),
                Err(Failure::Sent(error)) => match copy {
                    Some(copy) if error.kind == UpstreamErrorKind::Terminated => {
                        tracing::debug!(%error, "asking once more on a new connection");
                        may_repeat = false;
                        request = copy.into_request();
                        // The first connection may have taken it to the upstream: that tells more than why there is no other.
                        connection =
                            self.pool.acquire_new(&mut connects_left).await.map_err(|_other| error)?;
                    }
                    _ => return Err(error),
                },
            }
            sent = Instant::now();
        }
    }

    async fn exchange(
        &self,
        mut connection: Box<Connection>,
        request: Request<RequestBody>,
        sent: Instant,
    ) -> Result<Response<ResponseBody>, Failure> {
        let progress = request.body().progress();
        let offered: SmallVec<[_; 1]> = request.headers().get_all(header::UPGRADE).iter().cloned().collect();
        let answer = connection.sender.try_send_request(request);
        let response = match self.in_time(&mut connection, answer, progress.as_deref(), sent).await {
            Some(Ok(response)) => response,
            Some(Err(failed)) => return Err(Failure::new(failed, progress.as_deref())),
            None => {
                let detail = "no response head in time".to_owned();
                return Err(Failure::Sent(UpstreamError {
                    kind: UpstreamErrorKind::ResponseTimeout,
                    detail,
                }));
            }
        };
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            return Box::pin(self.switch(response, connection, &offered)).await.map_err(Failure::Sent);
        }
        let lease = Lease::new(Rc::clone(&self.pool), connection);
        Ok(response.map(|incoming| {
            if http_body::Body::is_end_stream(&incoming) {
                lease.give_back();
                return ResponseBody::Empty;
            }
            ResponseBody::Upstream(UpstreamBody::new(incoming, lease, self.pool.settings().body_idle_timeout))
        }))
    }

    /// Takes a connection out of the pool for the protocol that the upstream switched to. It counts as open until it
    /// is closed.
    async fn switch(
        &self,
        mut response: Response<Incoming>,
        connection: Box<Connection>,
        offered: &[HeaderValue],
    ) -> Result<Response<ResponseBody>, UpstreamError> {
        if !upgrade::grants(offered, response.headers()) {
            let detail = "switched to a protocol that was not asked for".to_owned();
            return Err(UpstreamError { kind: UpstreamErrorKind::Protocol, detail });
        }
        let upgraded = hyper::upgrade::on(&mut response).await.map_err(|error| UpstreamError {
            kind: UpstreamErrorKind::Terminated,
            detail: with_causes(&error),
        })?;
        // Only now: dropping it would end the task that gives the socket away.
        drop(connection);
        let tunnel = Tunnel::new(upgraded, self.pool.settings().body_idle_timeout);
        Ok(response.map(|_empty| ResponseBody::Tunnel(Box::new(tunnel))))
    }

    /// Waits for `answer`, at most `response_timeout` after the last part of the request was handed
    /// over, a bodiless one at `sent`; `None` then. While the client is the one who keeps the upstream waiting, its own
    /// deadline is in force.
    async fn in_time<T>(
        &self,
        connection: &mut Connection,
        answer: impl Future<Output = T>,
        progress: Option<&Progress>,
        sent: Instant,
    ) -> Option<T> {
        let mut answer = pin!(answer);
        let Some(limit) = self.pool.settings().response_timeout else { return Some(answer.await) };
        poll_fn(|cx| {
            if let Poll::Ready(answer) = answer.as_mut().poll(cx) {
                return Poll::Ready(Some(answer));
            }
            let since = match progress.map(|progress| (progress.state(), progress.moved())) {
                Some((Sending::AwaitsClient, _)) => Instant::now(),
                Some((_, moved)) => moved,
                None => sent,
            };
            connection.alarm.poll(since + limit, cx).map(|()| None)
        })
        .await
    }
}

/// What became of a request that got no response.
enum Failure {
    /// No byte of it was written: it may go elsewhere.
    Unsent(Box<Request<RequestBody>>, UpstreamError),
    Sent(UpstreamError),
}

impl Failure {
    fn new(mut failed: TrySendError<Request<RequestBody>>, progress: Option<&Progress>) -> Self {
        let unsent = failed.take_message();
        let error = failed.into_error();
        let kind = match progress.map(Progress::state) {
            Some(Sending::ClientTimeout) => UpstreamErrorKind::RequestBodyTimeout,
            Some(Sending::TooLarge) => UpstreamErrorKind::RequestBodyTooLarge,
            Some(Sending::ClientGone) => UpstreamErrorKind::ClientGone,
            _ if error.is_parse() => UpstreamErrorKind::Protocol,
            _ => UpstreamErrorKind::Terminated,
        };
        let error = UpstreamError { kind, detail: with_causes(&error) };
        match unsent {
            Some(request) => Self::Unsent(Box::new(request), error),
            None => Self::Sent(error),
        }
    }
}

/// Sent twice it does what it does sent once (RFC 9110, 9.2.2), and there is no body that would be
/// gone after the first time.
fn is_repeatable(request: &Request<RequestBody>) -> bool {
    let method = request.method();
    request.body().is_empty() && (method.is_safe() || [Method::PUT, Method::DELETE].contains(method))
}

/// What it takes to send a request without a body once more. Its fields are copied as text, which no name or value needs
/// to be shared for: that costs a third of copying the map, and hardly any request is ever read back.
struct Again {
    method: Method,
    uri: Uri,
    /// `name:value\n` of each; a name has no colon, and neither has a line's end.
    fields: Vec<u8>,
}

impl Again {
    fn of(request: &Request<RequestBody>) -> Self {
        let headers = request.headers();
        let length = headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 2).sum();
        let mut fields = Vec::with_capacity(length);
        for (name, value) in headers {
            fields.extend_from_slice(name.as_str().as_bytes());
            fields.push(b':');
            fields.extend_from_slice(value.as_bytes());
            fields.push(b'\n');
        }
        Self { method: request.method().clone(), uri: request.uri().clone(), fields }
    }

    fn into_request(self) -> Request<RequestBody> {
        let mut request = Request::new(RequestBody::default());
        *request.method_mut() = self.method;
        *request.uri_mut() = self.uri;
        for line in self.fields.split(|byte| *byte == b'\n') {
            let mut halves = line.splitn(2, |byte| *byte == b':');
            let name = halves.next().and_then(|name| HeaderName::from_bytes(name).ok());
            let value = halves.next().and_then(|value| HeaderValue::from_bytes(value).ok());
            if let (Some(name), Some(value)) = (name, value) {
                request.headers_mut().append(name, value);
            }
        }
        request
    }
}

/// An error and what led to it, in one line.
fn with_causes(error: &dyn std::error::Error) -> String {
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
    pub fn fault(self) -> Fault {
        match self {
            Self::QueueFull | Self::QueueTimeout => Fault::Us,
            Self::RequestBodyTimeout | Self::RequestBodyTooLarge | Self::ClientGone => Fault::Client,
            _ => Fault::Upstream,
        }
    }

    /// Whether the upstream got nothing of the request: there was no connection for it.
    pub fn is_unsent(self) -> bool {
        match self {
            Self::ConnectRefused | Self::ConnectFailed | Self::ConnectTimeout | Self::Dns | Self::Tls => true,
            Self::QueueFull | Self::QueueTimeout => true,
            Self::ResponseTimeout | Self::Terminated | Self::Protocol => false,
            Self::RequestBodyTimeout | Self::RequestBodyTooLarge | Self::ClientGone => false,
        }
    }

    /// Every [`UpstreamErrorKind::name`], in the order of declaration.
    pub const NAMES: &[&str] = &[
        Self::ConnectRefused.name(),
        Self::ConnectFailed.name(),
        Self::ConnectTimeout.name(),
        Self::Dns.name(),
        Self::Tls.name(),
        Self::QueueFull.name(),
        Self::QueueTimeout.name(),
        Self::ResponseTimeout.name(),
        Self::Terminated.name(),
        Self::Protocol.name(),
        Self::RequestBodyTimeout.name(),
        Self::RequestBodyTooLarge.name(),
        Self::ClientGone.name(),
    ];

    /// The name in metrics and logs.
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
            Self::Terminated => "terminated",
            Self::Protocol => "protocol",
            Self::RequestBodyTimeout => "request_body_timeout",
            Self::RequestBodyTooLarge => "request_body_too_large",
            Self::ClientGone => "client_gone",
        }
    }
}

impl fmt::Display for UpstreamErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl UpstreamError {
    fn queue_timeout(limit: Duration) -> Self {
        let detail = format!("no upstream connection became free within {limit:?}");
        Self { kind: UpstreamErrorKind::QueueTimeout, detail }
    }

    fn queue_full(limit: usize) -> Self {
        let detail = format!("{limit} requests already wait for an upstream connection");
        Self { kind: UpstreamErrorKind::QueueFull, detail }
    }
}

#[cfg(test)]
mod tests {
    use super::{Again, RequestBody, UpstreamErrorKind, is_repeatable};
    use http::Request;

    #[test]
    fn names_stand_where_their_kinds_count() {
        let last = UpstreamErrorKind::ClientGone;
        assert_eq!(UpstreamErrorKind::NAMES.len(), last as usize + 1);
        for kind in [UpstreamErrorKind::ConnectRefused, UpstreamErrorKind::ResponseTimeout, last] {
            assert_eq!(UpstreamErrorKind::NAMES[kind as usize], kind.name());
        }
    }

    #[test]
    fn what_is_sent_again_is_the_same() {
        let head = || Request::put("/a?b").header("x-b", ": 1:2").header("host", "h").header("x-b", "");
        let request = || head().header("x-\u{7e}", &b"\xff\t"[..]).body(RequestBody::default()).unwrap();
        let (first, again) = (request(), Again::of(&request()).into_request());
        assert_eq!((again.method(), again.uri()), (first.method(), first.uri()));
        assert_eq!(again.headers(), first.headers());
        assert_eq!(again.headers().iter().count(), 4);
    }

    #[test]
    fn only_what_does_no_harm_twice_is_repeatable() {
        let repeatable = |method| {
            let request = Request::builder().method(method).body(RequestBody::default()).unwrap();
            is_repeatable(&request)
        };
        for method in ["GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"] {
            assert!(repeatable(method), "{method}");
        }
        for method in ["POST", "PATCH", "CONNECT", "PURGE", "get"] {
            assert!(!repeatable(method), "{method}");
        }
    }
}
