//! The upstream: one request in, one response out, whatever connections that takes.
//!
//! Every worker has an [`Upstream`] with connections of its own, so that a request never changes
//! threads; what all workers may do together is counted in [`Shared`].

mod addresses;
mod again;
mod connect;
mod early;
mod http2;
mod pool;
mod shared;
mod stream;

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
use super::body::{Progress, RequestBody, ResponseBody, Sending, Source, UpstreamBody};
use super::interim::Interim;
use super::tunnel::{Far, Tunnel};
use super::upgrade;
use again::Again;
use pool::{Connection, Pool, Wire};
use stream::Upload;

pub use connect::SetupError;
pub(super) use pool::Lease;
pub use shared::Shared;
pub(super) use stream::{Duplex, Receiving};

/// A busy connection that its upstream closes leaves many requests behind, and they may meet the next one just as late.
const MAX_GOODBYES: u32 = 5;
/// The head of a response; more is no answer.
const MAX_RESPONSE_HEAD_BYTES: u32 = 256 * 1024;

/// Sends requests to the upstream over one worker's connections. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Upstream {
    pool: Rc<Pool>,
}

/// A request that got no response, and whose fault it is.
#[derive(Clone, Debug, thiserror::Error)]
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
    /// It reset the request's stream: an HTTP/2 upstream's way to say no.
    Reset,
    /// It speaks HTTP/2, and opens no WebSockets by that.
    Upgrade,
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
        Self {
            pool: Pool::new(shared),
        }
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
    pub(super) async fn hold(
        &self,
        delay: Duration,
        since: Instant,
    ) -> Result<Instant, UpstreamError> {
        if delay.is_zero() {
            return Ok(since);
        }
        self.pool.hold_until(since + delay).await?;
        Ok(Instant::now())
    }

    /// Sends a request and waits for the head of its response; the body is still to come.
    ///
    /// The request has its URI in origin form and its final headers, `Host` included. `now` is when the
    /// caller looked at the clock last; `interim` gets what comes before the answer. Dropping the future, or the response's body before its end, closes
    /// the connection.
    ///
    /// # Errors
    /// When no response head came, see [`UpstreamErrorKind`].
    pub async fn send(
        &self,
        mut request: Request<RequestBody>,
        now: Instant,
        interim: &mut Interim,
    ) -> Result<Response<ResponseBody>, UpstreamError> {
        let settings = self.pool.settings();
        *request.version_mut() = Version::HTTP_11;
        let mut may_repeat = settings.retry_idempotent && is_repeatable(&request);
        let (mut may_send_again, mut goodbyes_left) = (true, MAX_GOODBYES);
        let mut connects_left = settings.retry_connect;
        let (mut connection, mut sent) = match self.pool.take_idle(now) {
            Some(connection) => (connection, now),
            None => (self.pool.acquire(&mut connects_left).await?, Instant::now()),
        };
        loop {
            if request.headers().contains_key(header::UPGRADE) {
                connection = self
                    .fit_for_upgrade(connection, &request, &mut connects_left)
                    .await?;
            }
            let reused = connection.is_reused();
            let is_shared = matches!(connection.wire, Wire::Http2(_));
            let copy = (is_shared || reused && may_repeat).then(|| Again::of(&request));
            match is_shared {
                // It may say that it has not looked at the request, also when the body has been sent.
                true => request.body().keep(),
                false => request.body().forget(),
            }
            let (failure, error) = match self
                .exchange(connection, request, sent, interim, reused && !may_repeat)
                .await
            {
                Ok(response) => {
                    copy.inspect(|copy| copy.body.forget());
                    return Ok(response);
                }
                Err(failed) => failed,
            };
            (request, connection) = match (failure, copy) {
                (Failure::Unsent(unsent), copy) if reused || connects_left > 0 => {
                    connects_left -= u32::from(!reused);
                    let again = || copy.map(Again::into_request);
                    let Some(request) = unsent.map(|unsent| *unsent).or_else(again) else {
                        return Err(error);
                    };
                    (request, self.pool.acquire(&mut connects_left).await?)
                }
                (Failure::Refused, Some(copy)) if may_send_again && copy.body.rewind() => {
                    tracing::debug!(%error, "sending again what the upstream did not look at");
                    may_send_again = false;
                    let next = self.pool.acquire_new(&mut connects_left).await;
                    (copy.into_request(), next.map_err(|_other| error)?)
                }
                (Failure::TooLate, Some(copy)) if goodbyes_left > 0 && copy.body.rewind() => {
                    tracing::debug!(%error, "sending on another connection what came too late for this one");
                    goodbyes_left -= 1;
                    let next = self.pool.acquire_new(&mut connects_left).await;
                    (copy.into_request(), next.map_err(|_other| error)?)
                }
                (_, Some(copy))
                    if may_repeat && reused && error.kind == UpstreamErrorKind::Terminated =>
                {
                    tracing::debug!(%error, "asking once more on a new connection");
                    may_repeat = false;
                    // The first connection may have taken it to the upstream: that tells more than why there is no other.
                    let next = self.pool.acquire_new(&mut connects_left).await;
                    (copy.into_request(), next.map_err(|_other| error)?)
                }
                _ => return Err(error),
            };
            sent = Instant::now();
        }
    }

    /// A connection on which what a request asks for is possible, if there can be one. By HTTP/2 that is a WebSocket,
    /// and an upstream must have said that it knows how; anything else stays a plain request.
    async fn fit_for_upgrade(
        &self,
        connection: Box<Connection>,
        request: &Request<RequestBody>,
        retries: &mut u32,
    ) -> Result<Box<Connection>, UpstreamError> {
        let Wire::Http2(place) = &connection.wire else {
            return Ok(connection);
        };
        let is_websocket = upgrade::is_websocket(request.headers());
        if is_websocket && place.allows_tunnels() {
            return Ok(connection);
        }
        if self.pool.settings().tls.is_some() {
            drop(connection);
            return self.pool.acquire_http1(retries).await;
        }
        if is_websocket {
            let detail = "the upstream has not said that it opens WebSockets by HTTP/2 (RFC 8441)"
                .to_owned();
            return Err(UpstreamError {
                kind: UpstreamErrorKind::Upgrade,
                detail,
            });
        }
        Ok(connection)
    }

    /// `looks_first`: what is sent to somebody who has left is lost. The kernel may know of that, and the runtime asks
    /// it before this goes on.
    async fn exchange(
        &self,
        mut connection: Box<Connection>,
        mut request: Request<RequestBody>,
        sent: Instant,
        interim: &mut Interim,
        looks_first: bool,
    ) -> Result<Response<ResponseBody>, (Failure, UpstreamError)> {
        let Wire::Http1(http1) = &mut connection.wire else {
            return Box::pin(self.exchange_http2(connection, request, sent, interim)).await;
        };
        if looks_first {
            yield_now().await;
        }
        let early = Arc::clone(&http1.early);
        early.listen(&mut request);
        let progress = request.body().progress();
        let offered: SmallVec<[_; 1]> = request
            .headers()
            .get_all(header::UPGRADE)
            .iter()
            .cloned()
            .collect();
        let mut answer = pin!(http1.sender.try_send_request(request));
        let answer = poll_fn(|cx| {
            let answer = answer.as_mut().poll(cx);
            early.pass_on(interim, answer.is_pending().then(|| cx.waker()));
            answer
        });
        let response = match self
            .in_time(&mut connection, answer, progress.as_deref(), sent)
            .await
        {
            Some(Ok(response)) => response,
            Some(Err(failed)) => return Err(unanswered(failed, progress.as_deref())),
            None => return Err((Failure::Sent, UpstreamError::response_timeout())),
        };
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            let switched = Box::pin(self.switch(response, connection, &offered)).await;
            return switched.map_err(|error| (Failure::Sent, error));
        }
        Ok(response.map(|incoming| self.receive(Source::Http1(incoming), connection)))
    }

    /// The same on a stream of a shared connection.
    async fn exchange_http2(
        &self,
        mut connection: Box<Connection>,
        request: Request<RequestBody>,
        sent: Instant,
        interim: &mut Interim,
    ) -> Result<Response<ResponseBody>, (Failure, UpstreamError)> {
        let (mut head, body) = request.into_parts();
        let invalid = |what: &str| {
            let detail = what.to_owned();
            (
                Failure::Sent,
                UpstreamError {
                    kind: UpstreamErrorKind::Protocol,
                    detail,
                },
            )
        };
        let Wire::Http2(place) = &mut connection.wire else {
            return Err(invalid("no HTTP/2"));
        };
        let key = match upgrade::is_websocket(&head.headers) && place.allows_tunnels() {
            true => stream::connect_from_get(&mut head),
            false => None,
        };
        if stream::head_for_http2(&mut head, self.pool.settings().tls.is_some()).is_none() {
            return Err(invalid("the request's Host is no authority"));
        }
        let declared = head
            .headers
            .get_all(header::TRAILER)
            .iter()
            .cloned()
            .collect();
        let goes_on = key.is_some() || !body.is_empty();
        let (mut answer, sending) = match place.begin(Request::from_parts(head, ()), goes_on) {
            Ok(begun) => begun,
            Err(error) => {
                let failure = if error.is_gone {
                    Failure::Unsent(None)
                } else {
                    Failure::Sent
                };
                return Err((failure, of_stream(&error.error, None)));
            }
        };
        let progress = body.progress();
        let mut tunnel = None;
        if key.is_some() {
            tunnel = Some(sending);
        } else if goes_on && let Some(upload) = Upload::start(body, sending, declared).await {
            place.keep(upload);
        }
        let answer = poll_fn(|cx| {
            while let Poll::Ready(Some(Ok(early))) = answer.poll_informational(cx) {
                interim.pass_on(early.status(), early.headers(), Version::HTTP_2);
            }
            Pin::new(&mut answer).poll(cx)
        });
        let response = match self
            .in_time(&mut connection, answer, progress.as_deref(), sent)
            .await
        {
            Some(Ok(response)) => response,
            Some(Err(error)) => {
                let failure = http2::failure(&error);
                return Err((failure, of_stream(&error, progress.as_deref())));
            }
            None => {
                if let Wire::Http2(place) = &connection.wire {
                    place.suspect();
                }
                return Err((Failure::Sent, UpstreamError::response_timeout()));
            }
        };
        let (head, receiving) = response.into_parts();
        let mut response = Response::from_parts(head, ResponseBody::Empty);
        if let (Some(key), Some(sending), true) = (key, tunnel, response.status().is_success()) {
            stream::switched(&mut response, &key);
            let far = Far::Http2(Duplex::new(sending, receiving, connection));
            let tunnel = Tunnel::new(far, self.pool.settings().body_idle_timeout);
            *response.body_mut() = ResponseBody::Tunnel(Box::new(tunnel));
            return Ok(response);
        }
        let receiving = Receiving::new(receiving, response.headers());
        *response.body_mut() = self.receive(Source::Http2(receiving), connection);
        Ok(response)
    }

    fn receive(&self, source: Source, connection: Box<Connection>) -> ResponseBody {
        let lease = Lease::new(Rc::clone(&self.pool), connection);
        if source.is_end_stream() {
            lease.give_back();
            return ResponseBody::Empty;
        }
        ResponseBody::Upstream(UpstreamBody::new(
            source,
            lease,
            self.pool.settings().body_idle_timeout,
        ))
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
            return Err(UpstreamError {
                kind: UpstreamErrorKind::Protocol,
                detail,
            });
        }
        let upgraded = hyper::upgrade::on(&mut response)
            .await
            .map_err(|error| UpstreamError {
                kind: UpstreamErrorKind::Terminated,
                detail: with_causes(&error),
            })?;
        // Only now: dropping it would end the task that gives the socket away.
        drop(connection);
        let tunnel = Tunnel::new(
            Far::Http1(TokioIo::new(upgraded)),
            self.pool.settings().body_idle_timeout,
        );
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
        let Some(limit) = self.pool.settings().response_timeout else {
            return Some(answer.await);
        };
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
    /// No byte of it was written: it may go elsewhere. Here it is, unless there is a copy.
    Unsent(Option<Box<Request<RequestBody>>>),
    /// The upstream says that it has not looked at it, and doesn't want to.
    Refused,
    /// The connection was on its way out, and the upstream has not looked at it.
    TooLate,
    Sent,
}

fn unanswered(
    mut failed: TrySendError<Request<RequestBody>>,
    progress: Option<&Progress>,
) -> (Failure, UpstreamError) {
    let unsent = failed.take_message();
    let error = failed.into_error();
    let kind = if error.is_parse() {
        UpstreamErrorKind::Protocol
    } else {
        UpstreamErrorKind::Terminated
    };
    let error = UpstreamError {
        kind: fault_of_client(progress).unwrap_or(kind),
        detail: with_causes(&error),
    };
    (
        unsent.map_or(Failure::Sent, |request| {
            Failure::Unsent(Some(Box::new(request)))
        }),
        error,
    )
}

fn of_stream(error: &h2::Error, progress: Option<&Progress>) -> UpstreamError {
    let kind = fault_of_client(progress).unwrap_or_else(|| http2::kind(error));
    UpstreamError {
        kind,
        detail: with_causes(error),
    }
}

/// Why a request broke off, if it was the client's doing.
fn fault_of_client(progress: Option<&Progress>) -> Option<UpstreamErrorKind> {
    match progress?.state() {
        Sending::ClientTimeout => Some(UpstreamErrorKind::RequestBodyTimeout),
        Sending::TooLarge => Some(UpstreamErrorKind::RequestBodyTooLarge),
        Sending::ClientGone => Some(UpstreamErrorKind::ClientGone),
        Sending::AwaitsClient | Sending::Moving | Sending::Over => None,
    }
}

/// Sent twice it does what it does sent once (RFC 9110, 9.2.2), and there is no body that would be
/// gone after the first time.
fn is_repeatable(request: &Request<RequestBody>) -> bool {
    let method = request.method();
    request.body().is_empty()
        && (method.is_safe() || [Method::PUT, Method::DELETE].contains(method))
}

/// An error and what led to it, in one line.
pub(super) fn with_causes(error: &dyn std::error::Error) -> String {
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
            Self::RequestBodyTimeout | Self::RequestBodyTooLarge | Self::ClientGone => {
                Fault::Client
            }
            _ => Fault::Upstream,
        }
    }

    /// Whether the upstream got nothing of the request: there was no connection for it.
    pub fn is_unsent(self) -> bool {
        match self {
            Self::ConnectRefused
            | Self::ConnectFailed
            | Self::ConnectTimeout
            | Self::Dns
            | Self::Tls => true,
            Self::QueueFull | Self::QueueTimeout => true,
            Self::Upgrade => true,
            Self::ResponseTimeout | Self::Terminated | Self::Protocol | Self::Reset => false,
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
        Self::Reset.name(),
        Self::Upgrade.name(),
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
            Self::Reset => "reset",
            Self::Upgrade => "upgrade",
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
    fn response_timeout() -> Self {
        let detail = "no response head in time".to_owned();
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
    use super::{RequestBody, UpstreamErrorKind, is_repeatable};
    use http::Request;

    #[test]
    fn names_stand_where_their_kinds_count() {
        let last = UpstreamErrorKind::ClientGone;
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
    fn only_what_does_no_harm_twice_is_repeatable() {
        let repeatable = |method| {
            let request = Request::builder()
                .method(method)
                .body(RequestBody::default())
                .unwrap();
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
