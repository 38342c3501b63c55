//! One attempt to send a request as a stream of an HTTP/2 connection.

use bytes::Bytes;
use h2::SendStream;
use http::{HeaderValue, Request, Response, Version, header, request};
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::time::Instant;

use super::{ExchangeError, ExchangeFailure, client_error_kind};
use crate::proxy::body::informational_responses::InformationalForwarder;
use crate::proxy::body::request::{RequestBody, RequestBodyProgress};
use crate::proxy::body::tunnel::Tunnel;
use crate::proxy::http::upgrade;
use crate::proxy::upstream::UpstreamClient;
use crate::proxy::upstream::http2::body_upload::BodyUpload;
use crate::proxy::upstream::http2::received_stream::ReceivedStream;
use crate::proxy::upstream::http2::response_body::Http2ResponseBody;
use crate::proxy::upstream::http2::{Http2ResponseFuture, head_conversion};
use crate::proxy::upstream::pool::{ConnectionProtocol, StreamSlot, UpstreamConnection};
use crate::proxy::upstream::response::ResponseBody;
use crate::proxy::upstream::response_body::UpstreamBodySource;
use crate::proxy::upstream::tunnel_io::Http2TunnelIo;
use crate::proxy::upstream_error::{UpstreamError, UpstreamErrorKind};

/// A request whose head was sent and whose body is being uploaded.
struct StartedRequest {
    response: Http2ResponseFuture,
    /// The sending half of a WebSocket request's stream; `None` for other requests.
    tunnel: Option<SendStream<Bytes>>,
}

impl UpstreamClient {
    /// Sends the request once, as a stream of an HTTP/2 connection, and awaits the response head.
    pub(super) async fn exchange_http2(
        &self,
        mut connection: Box<UpstreamConnection>,
        request: Request<RequestBody>,
        sent_at: Instant,
        interim: &mut InformationalForwarder,
    ) -> Result<Response<ResponseBody>, ExchangeError> {
        let (mut head, body) = request.into_parts();
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
        let websocket_key = self.convert_request_head(&mut head, slot)?;
        let mut started = start_request(slot, head, body, websocket_key.is_some()).await?;
        let poll_response = |cx: &mut Context<'_>| {
            while let Poll::Ready(Some(Ok(informational))) =
                started.response.poll_informational_response(cx)
            {
                if !interim.count_received(1) {
                    return Poll::Ready(None);
                }
                interim.forward(
                    informational.status(),
                    informational.headers(),
                    Version::HTTP_2,
                );
            }
            Pin::new(&mut started.response).poll(cx).map(Some)
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
        Ok(self.convert_response(response, websocket_key.zip(started.tunnel), connection))
    }

    /// Converts the request head to HTTP/2; a WebSocket request becomes an extended CONNECT.
    /// Returns the `Sec-WebSocket-Key` of a WebSocket request.
    fn convert_request_head(
        &self,
        head: &mut request::Parts,
        slot: &StreamSlot,
    ) -> Result<Option<HeaderValue>, ExchangeError> {
        let is_websocket = upgrade::upgrade_names_websocket(&head.headers)
            && slot.connection.supports_extended_connect();
        let websocket_key = match is_websocket {
            true => head_conversion::convert_to_extended_connect(head),
            false => None,
        };
        let is_secure = self.pool.settings().tls.is_some();
        match head_conversion::convert_request_head_to_http2(head, is_secure) {
            Some(()) => Ok(websocket_key),
            None => Err(invalid_request_error(
                "the request's Host is not a valid authority",
            )),
        }
    }

    /// Builds the response from an HTTP/2 response. `websocket` is the key and the sending half of
    /// a WebSocket request; a success status turns its stream into a tunnel with status 101.
    fn convert_response(
        &self,
        response: Response<ReceivedStream>,
        websocket: Option<(HeaderValue, SendStream<Bytes>)>,
        connection: Box<UpstreamConnection>,
    ) -> Response<ResponseBody> {
        let (head, recv_stream) = response.into_parts();
        let mut response = Response::from_parts(head, ResponseBody::Empty);
        if let (Some((key, send_stream)), true) = (websocket, response.status().is_success()) {
            head_conversion::convert_to_switching_protocols(&mut response, &key);
            let io = Http2TunnelIo::new(send_stream, recv_stream, connection);
            let tunnel = Tunnel::new(io, self.pool.settings().tunnel_idle_limit());
            *response.body_mut() = ResponseBody::Tunnel(Box::new(tunnel));
            return response;
        }
        let body = Http2ResponseBody::new(recv_stream, response.headers());
        *response.body_mut() =
            self.build_response_body(UpstreamBodySource::Http2(body), connection);
        response
    }
}

/// Sends the request head and the start of the body; a task uploads what exceeds the upstream's
/// window.
async fn start_request(
    slot: &mut StreamSlot,
    head: request::Parts,
    body: RequestBody,
    is_websocket: bool,
) -> Result<StartedRequest, ExchangeError> {
    let declared_trailers = head
        .headers
        .get_all(header::TRAILER)
        .iter()
        .cloned()
        .collect();
    let keeps_stream_open = is_websocket || !body.is_empty();
    let (response, send_stream) = slot
        .connection
        .send_request_head(Request::from_parts(head, ()), keeps_stream_open)
        .map_err(|error| {
            let failure = match slot.connection.closing.get() {
                true => ExchangeFailure::NotSent(None),
                false => ExchangeFailure::MaybeProcessed,
            };
            (failure, upstream_error_from_h2(&error, None))
        })?;
    let mut tunnel = None;
    if is_websocket {
        tunnel = Some(send_stream);
    } else if keeps_stream_open
        && let Some(upload) = BodyUpload::start(body, send_stream, declared_trailers).await
    {
        slot.upload = Some(upload);
    }
    Ok(StartedRequest { response, tunnel })
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
