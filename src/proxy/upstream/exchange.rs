//! One attempt to send a request over HTTP/1.1 or HTTP/2 and to receive the response head, and the
//! tunnel that it may open.

use bytes::{Buf, Bytes};
use h2::SendStream;
use http::uri::{Authority, Parts, Scheme};
use http::{HeaderValue, Method, Request, Response, StatusCode, Uri, Version, header, request};
use hyper::body::Incoming;
use hyper::client::conn::TrySendError;
use hyper_util::rt::TokioIo;
use smallvec::SmallVec;
use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::task::yield_now;
use tokio::time::Instant;

use super::UpstreamClient;
use super::http1::Http1Connection;
use super::http2::Http2ResponseFuture;
use super::http2::streams::{self, Http2ResponseBody, ReceivedStream, poll_send_capacity};
use super::pool::{ConnectionProtocol, StreamSlot, UpstreamConnection};
use super::response_body::{ResponseBody, UpstreamBody, UpstreamBodySource};
use crate::proxy::body::informational_responses::InformationalForwarder;
use crate::proxy::body::request::{RequestBody, RequestBodyProgress, RequestBodyState};
use crate::proxy::body::tunnel::Tunnel;
use crate::proxy::connection_io::{LazyTimer, move_buffered_bytes};
use crate::proxy::http::headers::take_head;
use crate::proxy::http::upgrade;
use crate::proxy::upstream_error::{UpstreamError, UpstreamErrorKind};

/// How far a request without a response got; decides whether it may be retried.
pub(crate) enum ExchangeFailure {
    /// Nothing of the request was written, so a retry is safe. Contains the request for HTTP/1.1;
    /// for HTTP/2 the retry uses a `HeadCopy`.
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
        self: &Rc<Self>,
        source: UpstreamBodySource,
        connection: Box<UpstreamConnection>,
    ) -> ResponseBody {
        if source.is_end_stream() {
            self.return_connection(connection);
            return ResponseBody::Empty;
        }
        ResponseBody::Upstream(UpstreamBody::new(source, Rc::clone(self), connection))
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
        let limit = self.settings().response_timeout;
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

    /// Sends the request once on `connection`, of either HTTP version, and awaits the response
    /// head.
    ///
    /// With `yield_first`, the runtime polls the HTTP/1.1 socket before the request is written, so
    /// that a close by the upstream is detected first. Requests that cannot be retried need this.
    #[allow(
        clippy::manual_async_fn,
        reason = "an async fn stores and copies its arguments twice"
    )]
    pub(crate) fn exchange_request(
        self: &Rc<Self>,
        mut connection: Box<UpstreamConnection>,
        (head, body): (&mut request::Parts, &mut RequestBody),
        sent_at: Instant,
        interim: &mut InformationalForwarder,
        (is_upgrade, yield_first): (bool, bool),
    ) -> impl Future<Output = Result<Response<ResponseBody>, ExchangeError>> {
        async move {
            let UpstreamConnection {
                protocol: ConnectionProtocol::Http1(http1),
                timer,
                ..
            } = &mut *connection
            else {
                let request = (take_head(head), body.clone_handle());
                return Box::pin(self.exchange_http2(connection, request, sent_at, interim)).await;
            };
            if yield_first {
                yield_now().await;
            }
            let informational = Arc::clone(&http1.informational);
            let progress = body.progress();
            let mut requested_protocols: SmallVec<[_; 1]> = SmallVec::new();
            if is_upgrade {
                let names = head.headers.get_all(header::UPGRADE);
                requested_protocols.extend(names.iter().cloned());
            }
            let mut request = Request::from_parts(take_head(head), std::mem::take(body));
            informational.attach_to_request(&mut request);
            let mut answer = pin!(http1.send(request));
            let poll_response = |cx: &mut Context<'_>| {
                let answer = http1.poll_with(cx, |cx| answer.as_mut().poll(cx));
                if informational.forward_responses(interim) {
                    answer.map(Some)
                } else {
                    Poll::Ready(None)
                }
            };
            let response = self
                .await_response(timer, poll_response, progress.as_deref(), sent_at)
                .await?
                .map_err(|failed| exchange_failure_from_hyper(failed, progress.as_deref()))?;
            if response.status() == StatusCode::SWITCHING_PROTOCOLS {
                let switched = self.convert_to_tunnel(response, http1, &requested_protocols);
                let switched = Box::pin(switched).await;
                return switched.map_err(|error| (ExchangeFailure::MaybeProcessed, error));
            }
            use RequestBodyState::{AwaitingClient, Transferring};
            if let Some(AwaitingClient | Transferring) = progress.map(|body| body.state.get()) {
                http1.start_upload();
            }
            Ok(response.map(|incoming| {
                self.build_response_body(UpstreamBodySource::Http1(incoming), connection)
            }))
        }
    }

    /// Turns the connection into a tunnel for the protocol that the upstream switched to. The
    /// tunnel holds the connection's `max_connections` permit until the socket is closed.
    async fn convert_to_tunnel(
        &self,
        mut response: Response<Incoming>,
        http1: &Http1Connection,
        requested_protocols: &[HeaderValue],
    ) -> Result<Response<ResponseBody>, UpstreamError> {
        if !upgrade::selects_only_offered_protocols(requested_protocols, response.headers()) {
            return Err(UpstreamErrorKind::Protocol
                .with_detail("the upstream switched to a protocol that the client did not offer"));
        }
        let mut upgrade = hyper::upgrade::on(&mut response);
        let upgraded = poll_fn(|cx| http1.poll_with(cx, |cx| Pin::new(&mut upgrade).poll(cx)));
        let upgraded = upgraded
            .await
            .map_err(|error| UpstreamErrorKind::ConnectionTerminated.with_cause(&error))?;
        let idle_limit = self.settings().tunnel_idle_limit();
        let tunnel = Tunnel::new(TokioIo::new(upgraded), idle_limit);
        Ok(response.map(|_empty| ResponseBody::Tunnel(Box::new(tunnel))))
    }

    /// Sends the request once, as a stream of an HTTP/2 connection, and awaits the response head.
    pub(crate) async fn exchange_http2(
        self: &Rc<Self>,
        mut connection: Box<UpstreamConnection>,
        (mut head, body): (request::Parts, RequestBody),
        sent_at: Instant,
        interim: &mut InformationalForwarder,
    ) -> Result<Response<ResponseBody>, ExchangeError> {
        let progress = body.progress();
        let UpstreamConnection {
            protocol: ConnectionProtocol::Http2(slot),
            timer,
            ..
        } = &mut *connection
        else {
            return Err(invalid_request_error(
                "the connection does not speak HTTP/2",
            ));
        };
        let is_websocket = upgrade::upgrade_names_websocket(&head.headers)
            && slot.connection.supports_extended_connect();
        let is_secure = self.settings().tls.is_some();
        let websocket_key = convert_request_head(&mut head, is_websocket, is_secure)
            .ok_or_else(|| invalid_request_error("the request's Host is not a valid authority"))?;
        let (mut response, tunnel) =
            start_request(slot, head, body, websocket_key.is_some()).await?;
        let poll_response = |cx: &mut Context<'_>| {
            while let Poll::Ready(Some(Ok(informational))) =
                response.poll_informational_response(cx)
            {
                if !interim.count_received(1) {
                    return Poll::Ready(None);
                }
                let (status, headers) = (informational.status(), informational.headers());
                interim.forward(status, headers, Version::HTTP_2);
            }
            Pin::new(&mut response).poll(cx).map(Some)
        };
        let response = self
            .await_response(timer, poll_response, progress.as_deref(), sent_at)
            .await
            .inspect_err(|(_, error)| {
                if error.kind == UpstreamErrorKind::ResponseTimeout {
                    slot.connection.mark_suspect();
                }
            })?
            .map_err(|error| {
                let failure = classify_failure(&error);
                (failure, upstream_error_from_h2(&error, progress.as_deref()))
            })?;
        Ok(self.convert_response(response, websocket_key.zip(tunnel), connection))
    }

    /// Builds the response from an HTTP/2 response. `websocket` is the key and the sending half of
    /// a WebSocket request; a success status turns its stream into a tunnel with status 101.
    fn convert_response(
        self: &Rc<Self>,
        response: Response<Rc<RefCell<ReceivedStream>>>,
        websocket: Option<(HeaderValue, SendStream<Bytes>)>,
        connection: Box<UpstreamConnection>,
    ) -> Response<ResponseBody> {
        let (head, recv_stream) = response.into_parts();
        let mut response = Response::from_parts(head, ResponseBody::Empty);
        if let (Some((key, send_stream)), true) = (websocket, response.status().is_success()) {
            *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
            let headers = response.headers_mut();
            headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
            headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
            let accept = upgrade::websocket_accept_value(&key);
            headers.insert(header::SEC_WEBSOCKET_ACCEPT, accept);
            let io = Http2TunnelIo::new(send_stream, recv_stream, connection);
            let tunnel = Tunnel::new(io, self.settings().tunnel_idle_limit());
            *response.body_mut() = ResponseBody::Tunnel(Box::new(tunnel));
            return response;
        }
        let body = Http2ResponseBody::new(recv_stream, response.headers());
        *response.body_mut() =
            self.build_response_body(UpstreamBodySource::Http2(body), connection);
        response
    }
}

/// Returns the error kind if the request failed because of the client's body; otherwise `None`.
fn client_error_kind(progress: Option<&RequestBodyProgress>) -> Option<UpstreamErrorKind> {
    match progress?.state.get() {
        RequestBodyState::Failed(kind) => Some(kind),
        _ => None,
    }
}

fn exchange_failure_from_hyper(
    mut failed: TrySendError<Request<RequestBody>>,
    progress: Option<&RequestBodyProgress>,
) -> ExchangeError {
    let unsent = failed.take_message();
    let error = failed.into_error();
    let other = if error.is_parse() {
        UpstreamErrorKind::Protocol
    } else {
        UpstreamErrorKind::ConnectionTerminated
    };
    let kind = client_error_kind(progress).unwrap_or(other);
    let failure = match unsent {
        Some(request) => ExchangeFailure::NotSent(Some(Box::new(request))),
        None => ExchangeFailure::MaybeProcessed,
    };
    (failure, kind.with_cause(&error))
}

/// Sends the request head and the start of the body. Returns the response, and the sending half of
/// a WebSocket request's stream. A task uploads what exceeds the upstream's
/// window.
async fn start_request(
    slot: &mut StreamSlot,
    head: request::Parts,
    body: RequestBody,
    is_websocket: bool,
) -> Result<(Http2ResponseFuture, Option<SendStream<Bytes>>), ExchangeError> {
    let trailers = head.headers.get_all(header::TRAILER);
    let declared_trailers = trailers.iter().cloned().collect();
    let keeps_stream_open = is_websocket || !body.is_empty();
    let (response, send_stream) = slot
        .connection
        .send_request_head(Request::from_parts(head, ()), keeps_stream_open)
        .map_err(|error| {
            let failure = if slot.connection.closing.get() {
                ExchangeFailure::NotSent(None)
            } else {
                ExchangeFailure::MaybeProcessed
            };
            (failure, upstream_error_from_h2(&error, None))
        })?;
    let mut tunnel = None;
    if is_websocket {
        tunnel = Some(send_stream);
    } else if keeps_stream_open
        && let Some(upload) = streams::start_upload(body, send_stream, declared_trailers).await
    {
        slot.upload = Some(upload);
    }
    Ok((response, tunnel))
}

fn invalid_request_error(detail: &str) -> ExchangeError {
    let error = UpstreamErrorKind::Protocol.with_detail(detail);
    (ExchangeFailure::MaybeProcessed, error)
}

fn upstream_error_from_h2(
    error: &h2::Error,
    progress: Option<&RequestBodyProgress>,
) -> UpstreamError {
    let kind = client_error_kind(progress).unwrap_or_else(|| UpstreamErrorKind::from_h2(error));
    kind.with_cause(error)
}

/// Classifies an h2 error by whether the upstream states that it did not process the request
/// (RFC 9113, 8.7).
fn classify_failure(error: &h2::Error) -> ExchangeFailure {
    match error.is_remote() {
        true if error.is_go_away() => ExchangeFailure::GoAway,
        true if error.reason() == Some(h2::Reason::REFUSED_STREAM) => {
            ExchangeFailure::RefusedStream
        }
        _ => ExchangeFailure::MaybeProcessed,
    }
}

/// Converts an HTTP/1.1 request head to HTTP/2 (RFC 9113, 8.2.2 and 8.3.1). The target becomes an
/// absolute URI, and the connection headers except `te` are removed. A WebSocket request becomes an
/// extended CONNECT (RFC 8441, 5). Its `Sec-WebSocket-Key` is removed
/// and returned: the `Sec-WebSocket-Accept` of the response is computed from it.
///
/// Returns `None`, with a partly changed head, if `Host` is missing or not an authority. This does
/// not occur after request validation.
fn convert_request_head(
    head: &mut request::Parts,
    is_websocket: bool,
    is_secure: bool,
) -> Option<Option<HeaderValue>> {
    let mut websocket_key = None;
    if is_websocket {
        head.method = Method::CONNECT;
        let websocket = h2::ext::Protocol::from_static("websocket");
        head.extensions.insert(websocket);
        head.headers.remove(header::CONTENT_LENGTH);
        websocket_key = head.headers.remove(header::SEC_WEBSOCKET_KEY);
    }
    let host = head.headers.remove(header::HOST)?;
    let mut parts = Parts::default();
    parts.scheme = Some(if is_secure {
        Scheme::HTTPS
    } else {
        Scheme::HTTP
    });
    parts.authority = Some(Authority::try_from(host.as_bytes()).ok()?);
    parts.path_and_query = head.uri.path_and_query().cloned();
    head.uri = Uri::from_parts(parts).ok()?;
    head.version = Version::HTTP_2;
    use header::{CONNECTION, TRANSFER_ENCODING, UPGRADE};
    for name in [CONNECTION, TRANSFER_ENCODING, UPGRADE] {
        head.headers.remove(name);
    }
    Some(websocket_key)
}

/// Maximum size of one write to the HTTP/2 stream of a tunnel.
const MAX_TUNNEL_CHUNK_BYTES: usize = 16 * 1024;

/// An HTTP/2 stream as a bidirectional byte stream. Dropping it before both directions have ended
/// resets the HTTP/2 stream.
#[derive(Debug)]
struct Http2TunnelIo {
    send_stream: SendStream<Bytes>,
    recv_stream: Rc<RefCell<ReceivedStream>>,
    read_buffer: Bytes,
    write_closed: bool,
    _connection: Box<UpstreamConnection>,
}

impl Http2TunnelIo {
    fn new(
        send_stream: SendStream<Bytes>,
        recv_stream: Rc<RefCell<ReceivedStream>>,
        connection: Box<UpstreamConnection>,
    ) -> Self {
        Self {
            send_stream,
            recv_stream,
            read_buffer: Bytes::new(),
            write_closed: false,
            _connection: connection,
        }
    }
}

impl AsyncRead for Http2TunnelIo {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let mut stream = this.recv_stream.borrow_mut();
        while this.read_buffer.is_empty() {
            match ready!(stream.poll_data(cx)) {
                Some(data) => this.read_buffer = data.map_err(io::Error::other)?,
                None => return Poll::Ready(Ok(())),
            }
        }
        let before = this.read_buffer.len();
        move_buffered_bytes(&mut this.read_buffer, into);
        // The receive window reopens only for data that the reader has taken.
        let released = stream.release_capacity(before - this.read_buffer.len());
        Poll::Ready(released.map_err(io::Error::other))
    }
}

impl AsyncWrite for Http2TunnelIo {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        mut bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let requested_bytes = bytes.len().min(MAX_TUNNEL_CHUNK_BYTES);
        let capacity = ready!(poll_send_capacity(
            &mut this.send_stream,
            requested_bytes,
            cx
        ));
        let capacity = capacity.map_err(io::Error::other)?;
        let chunk = bytes.copy_to_bytes(capacity.min(requested_bytes));
        let taken = chunk.len();
        let sent = this.send_stream.send_data(chunk, false);
        Poll::Ready(sent.map(|()| taken).map_err(io::Error::other))
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if std::mem::replace(&mut this.write_closed, true) {
            return Poll::Ready(Ok(()));
        }
        let sent = this.send_stream.send_data(Bytes::new(), true);
        Poll::Ready(sent.map_err(io::Error::other))
    }
}
