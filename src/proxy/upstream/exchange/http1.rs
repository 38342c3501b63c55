//! One attempt to send a request on an HTTP/1.1 connection.

use http::{HeaderValue, Request, Response, StatusCode, header};
use hyper::body::Incoming;
use hyper::client::conn::TrySendError;
use hyper_util::rt::TokioIo;
use smallvec::SmallVec;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::task::yield_now;
use tokio::time::Instant;

use super::{ExchangeError, ExchangeFailure, client_error_kind};
use crate::proxy::body::informational_responses::InformationalForwarder;
use crate::proxy::body::request::{RequestBody, RequestBodyProgress};
use crate::proxy::body::tunnel::Tunnel;
use crate::proxy::http::upgrade;
use crate::proxy::upstream::UpstreamClient;
use crate::proxy::upstream::pool::{ConnectionProtocol, UpstreamConnection};
use crate::proxy::upstream::response::ResponseBody;
use crate::proxy::upstream::response_body::UpstreamBodySource;
use crate::proxy::upstream_error::{UpstreamError, UpstreamErrorKind};

impl UpstreamClient {
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
        &self,
        mut connection: Box<UpstreamConnection>,
        mut request: Request<RequestBody>,
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
                return Box::pin(self.exchange_http2(connection, request, sent_at, interim)).await;
            };
            if yield_first {
                yield_now().await;
            }
            let informational = Arc::clone(&http1.informational);
            informational.attach_to_request(&mut request);
            let progress = request.body().progress();
            let mut requested_protocols: SmallVec<[_; 1]> = SmallVec::new();
            if is_upgrade {
                let names = request.headers().get_all(header::UPGRADE);
                requested_protocols.extend(names.iter().cloned());
            }
            let mut answer = pin!(http1.sender.try_send_request(request));
            let poll_response = |cx: &mut Context<'_>| {
                let answer = answer.as_mut().poll(cx);
                match informational
                    .forward_responses(interim, answer.is_pending().then(|| cx.waker()))
                {
                    true => answer.map(Some),
                    false => Poll::Ready(None),
                }
            };
            let response = self
                .await_response(timer, poll_response, progress.as_deref(), sent_at)
                .await?
                .map_err(|failed| exchange_failure_from_hyper(failed, progress.as_deref()))?;
            if response.status() == StatusCode::SWITCHING_PROTOCOLS {
                let switched = Box::pin(self.convert_connection_to_tunnel(
                    response,
                    connection,
                    &requested_protocols,
                ))
                .await;
                return switched.map_err(|error| (ExchangeFailure::MaybeProcessed, error));
            }
            Ok(response.map(|incoming| {
                self.build_response_body(UpstreamBodySource::Http1(incoming), connection)
            }))
        }
    }

    /// Turns the connection into a tunnel for the protocol that the upstream switched to. The
    /// tunnel holds the connection's `max_connections` permit until the socket is closed.
    async fn convert_connection_to_tunnel(
        &self,
        mut response: Response<Incoming>,
        connection: Box<UpstreamConnection>,
        requested_protocols: &[HeaderValue],
    ) -> Result<Response<ResponseBody>, UpstreamError> {
        if !upgrade::selects_only_offered_protocols(requested_protocols, response.headers()) {
            return Err(UpstreamErrorKind::Protocol
                .with_detail("the upstream switched to a protocol that the client did not offer"));
        }
        let upgraded = hyper::upgrade::on(&mut response)
            .await
            .map_err(|error| UpstreamErrorKind::ConnectionTerminated.with_cause(&error))?;
        // The connection is dropped only here: its drop aborts the task that hands over the socket.
        drop(connection);
        let tunnel = Tunnel::new(
            TokioIo::new(upgraded),
            self.pool.settings().tunnel_idle_limit(),
        );
        Ok(response.map(|_empty| ResponseBody::Tunnel(Box::new(tunnel))))
    }
}

fn exchange_failure_from_hyper(
    mut failed: TrySendError<Request<RequestBody>>,
    progress: Option<&RequestBodyProgress>,
) -> ExchangeError {
    let unsent = failed.take_message();
    let error = failed.into_error();
    let kind = match client_error_kind(progress) {
        Some(kind) => kind,
        None if error.is_parse() => UpstreamErrorKind::Protocol,
        None => UpstreamErrorKind::ConnectionTerminated,
    };
    let failure = match unsent {
        Some(request) => ExchangeFailure::NotSent(Some(Box::new(request))),
        None => ExchangeFailure::MaybeProcessed,
    };
    (failure, kind.with_cause(&error))
}
