//! Serves one client connection: protocol detection, HTTP/1, HTTP/2, timeouts and drain.

mod driver;
mod http2;
mod request;
mod upgrade_handover;

use http::StatusCode;
use hyper::server::conn::http1::Parts;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWriteExt, ReadBuf};
use tokio::time::timeout;

use super::accept::CompletedHandshake;
use super::connection::driver::{CLOSE_TIMEOUT, ConnectionDriver, close_gracefully};
use super::connection::http2::serve_http2;
use super::connection::request::RequestContext;
use super::handler::RequestHandler;
use super::listener::WorkerListener;
use super::monitored_socket::MonitoredSocket;
use crate::proxy::client_connection::ConnectionCloseReason;
use crate::proxy::client_connection::connection_monitor::{ConnectionMonitor, TimeoutKind};

/// Serves one connection until it ends.
pub(crate) async fn serve_connection<H: RequestHandler>(
    connection: CompletedHandshake,
    handler: Rc<H>,
    listener: Rc<WorkerListener>,
    monitor: Rc<ConnectionMonitor>,
) {
    let CompletedHandshake {
        socket,
        peer,
        negotiated_http2: http2,
    } = connection;
    monitor.record_handshake_end();
    let mut driver = ConnectionDriver::new(Rc::clone(&monitor));
    let parse_error_status = handler.unreadable_request_status(&peer);
    let max_head_bytes = listener.config.settings.max_header_bytes;
    // Boxed: a future has space for each variable and parameter that ever holds the socket.
    let mut socket = Box::new(MonitoredSocket::new(
        socket,
        Rc::clone(&monitor),
        max_head_bytes,
    ));
    socket.parse_error_status = parse_error_status;
    let context = RequestContext {
        handler,
        peer: Arc::new(peer),
        listener,
        monitor,
        handover: Rc::default(),
    };
    let mut first_bytes = Vec::with_capacity(HTTP2_PREFACE.len());
    let detected = driver
        .drive(|cx, close| poll_detect_http2(&mut socket, &mut first_bytes, cx, close))
        .await;
    socket.put_back(&first_bytes);
    match detected {
        // The protocol negotiated by ALPN wins over the client's first bytes.
        Ok(Some(by_preface)) if !http2.unwrap_or(by_preface) => {
            serve_http1(socket, &context, driver).await
        }
        Ok(Some(_)) => {
            context.monitor.set_http2();
            // Boxed, so that the connection's future does not reserve space for the HTTP/2 future.
            Box::pin(serve_http2(socket, &context, driver)).await;
        }
        // A TLS client treats a close without close_notify as a truncated connection.
        Ok(None) => close_gracefully(&mut socket).await,
        Err(overdue) => Box::pin(close_timed_out(socket, &context, overdue)).await,
    }
    context.listener.allocator_trim.record_released_connection();
}

const REQUEST_TIMEOUT_RESPONSE: &[u8] =
    b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";

/// HTTP/2 client connection preface (RFC 9113, 3.4).
const HTTP2_PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Reads until the first bytes are, or cannot be, the HTTP/2 preface. Returns which, or `None` if
/// the client disconnected before any byte arrived. If `close` is true, does not wait for the first
/// byte.
fn poll_detect_http2(
    socket: &mut MonitoredSocket,
    first_bytes: &mut Vec<u8>,
    cx: &mut Context<'_>,
    close: bool,
) -> Poll<Option<bool>> {
    loop {
        let mut bytes = [0; HTTP2_PREFACE.len()];
        let unfilled = bytes.get_mut(first_bytes.len()..).unwrap_or_default();
        let mut into = ReadBuf::new(unfilled);
        match Pin::new(&mut *socket).poll_read(cx, &mut into) {
            Poll::Pending if close && first_bytes.is_empty() => return Poll::Ready(None),
            Poll::Pending => return Poll::Pending,
            Poll::Ready(Err(_)) => return Poll::Ready(None),
            // A truncated request is left to hyper's HTTP/1 parser.
            Poll::Ready(Ok(())) if into.filled().is_empty() => {
                return Poll::Ready((!first_bytes.is_empty()).then_some(false));
            }
            Poll::Ready(Ok(())) => first_bytes.extend_from_slice(into.filled()),
        }
        let is_prefix = HTTP2_PREFACE.starts_with(first_bytes);
        if !is_prefix || first_bytes.len() == HTTP2_PREFACE.len() {
            return Poll::Ready(Some(is_prefix));
        }
    }
}

/// Serves HTTP/1 until the connection ends. hyper and its buffers, about 20 KiB, exist only while
/// the client sends requests: connections are idle most of the time.
async fn serve_http1<H: RequestHandler>(
    mut socket: Box<MonitoredSocket>,
    context: &RequestContext<H>,
    mut driver: ConnectionDriver,
) {
    loop {
        driver.monitor.has_buffers.set(true);
        let served = Box::pin(serve_http1_until_idle(socket, context, &mut driver)).await;
        driver.monitor.has_buffers.set(false);
        let Some(idle_socket) = served else { return };
        socket = idle_socket;
        context.listener.allocator_trim.record_released_connection();
        let next_request = driver.drive(|cx, close| match socket.poll_for_input(cx) {
            Poll::Pending if close => Poll::Ready(false),
            next => next,
        });
        match next_request.await {
            Ok(true) => {}
            Ok(false) => return close_gracefully(&mut socket).await,
            Err(overdue) => return Box::pin(close_timed_out(socket, context, overdue)).await,
        }
    }
}

/// Serves HTTP/1 until the connection ends or becomes idle. Returns the socket of an idle
/// connection.
async fn serve_http1_until_idle<H: RequestHandler>(
    socket: Box<MonitoredSocket>,
    context: &RequestContext<H>,
    driver: &mut ConnectionDriver,
) -> Option<Box<MonitoredSocket>> {
    let (monitor, handover) = (&context.monitor, &context.handover);
    let requests = service_fn(|request| context.handle(request));
    let http1 = &context.listener.http1;
    let mut connection = http1.serve_connection(TokioIo::new(socket), requests);
    let end = driver.drive(|cx, close| {
        if close {
            Pin::new(&mut connection).graceful_shutdown();
        }
        Pin::new(&mut connection).poll(cx)
    });
    let end = end.await;
    let Parts { io, read_buf, .. } = connection.into_parts();
    let mut socket = io.into_inner();
    socket.put_back(&read_buf);
    drop(read_buf);
    match end {
        Ok(Ok(())) => match handover.request.take() {
            // Until the 101 head is written, the client cannot read tunnel bytes.
            Some(upgraded) if !monitor.output.is_blocked() => {
                let stall_timeout = monitor.timeouts.write_stall;
                // Boxed, so that the connection's future has no space for the tunnel's.
                Box::pin(upgraded.serve_http1_tunnel(socket, stall_timeout)).await;
            }
            // hyper leaves the socket open after a request that could have been upgraded, so it is
            // closed here.
            None if handover.was_upgrade_requested.get() => close_gracefully(&mut socket).await,
            _ => {}
        },
        Ok(Err(error)) => {
            tracing::debug!(%error, "client connection failed");
            if let Some(status) = status_of_parse_error(&error) {
                monitor.record_close(ConnectionCloseReason::Protocol);
                context
                    .handler
                    .record_unreadable_request(status, &context.peer);
            }
            if error.is_user() && monitor.exchange.is_close_delimited.get() {
                socket.abort();
            }
        }
        Err(TimeoutKind::IdleBuffers) => return Some(socket),
        Err(overdue) => Box::pin(close_timed_out(socket, context, overdue)).await,
    }
    None
}

/// Closes a connection that exceeded a timeout: after a 408 response, or with a reset.
async fn close_timed_out<H: RequestHandler>(
    mut socket: Box<MonitoredSocket>,
    context: &RequestContext<H>,
    overdue: TimeoutKind,
) {
    let (status, monitor) = (StatusCode::REQUEST_TIMEOUT, &context.monitor);
    monitor.record_timeout(overdue);
    if overdue != TimeoutKind::SlowHead {
        return socket.abort();
    }
    context
        .handler
        .record_unreadable_request(status, &context.peer);
    monitor.exchange.has_unread_input.set(true);
    let response_sent = timeout(CLOSE_TIMEOUT, async {
        socket.write_all(REQUEST_TIMEOUT_RESPONSE).await?;
        socket.shutdown().await
    });
    if !matches!(response_sent.await, Ok(Ok(()))) {
        tracing::debug!("408 response not delivered");
    }
}

/// Status that hyper sent for input that is not a valid HTTP/1 request. `None` if hyper sent no
/// response.
fn status_of_parse_error(error: &hyper::Error) -> Option<StatusCode> {
    match () {
        () if !error.is_parse() || error.is_parse_version_h2() => None,
        () if !error.is_parse_too_large() => Some(StatusCode::BAD_REQUEST),
        // hyper distinguishes a long URI from long headers only by the error message.
        () if error.to_string().starts_with("URI") => Some(StatusCode::URI_TOO_LONG),
        () => Some(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE),
    }
}
