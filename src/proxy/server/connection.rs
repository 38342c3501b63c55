//! Serves one client connection: protocol detection, HTTP/1, HTTP/2, timeouts and drain.

mod driver;
mod http1;
mod http2;
pub(crate) mod protocols;
mod request;
mod streams;
mod upgrade_handover;

use hyper::service::service_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, ReadBuf};

use super::accept::CompletedHandshake;
use super::connection::driver::{ConnectionDriver, close_gracefully};
use super::connection::http1::serve_http1;
use super::connection::http2::serve_http2;
use super::connection::protocols::WorkerListener;
use super::connection::request::handle_request;
use super::connection::upgrade_handover::UpgradeHandover;
use super::handler::RequestHandler;
use super::monitored_socket::MonitoredSocket;
use crate::proxy::client_connection::connection_monitor::ConnectionMonitor;

/// Serves one connection until it ends.
pub(crate) async fn serve_connection<H: RequestHandler>(
    connection: CompletedHandshake,
    handler: Rc<H>,
    protocols: Rc<WorkerListener>,
    monitor: Rc<ConnectionMonitor>,
) {
    let CompletedHandshake {
        socket,
        peer,
        negotiated_http2: http2,
    } = connection;
    let peer = Arc::new(peer);
    monitor.record_handshake_end();
    let mut driver = ConnectionDriver::new(Rc::clone(&monitor));
    let parse_error_status = handler.unreadable_request_status(&peer);
    let max_head_bytes = protocols.config.settings.max_header_bytes;
    let mut socket = MonitoredSocket::new(socket, Rc::clone(&monitor), max_head_bytes);
    socket.parse_error_status = parse_error_status;
    let mut first_bytes = Vec::with_capacity(HTTP2_PREFACE.len());
    let detected = driver
        .drive(|cx, close| poll_detect_protocol(&mut socket, &mut first_bytes, cx, close))
        .await;
    socket.put_back(&first_bytes);
    let limits = protocols.body_limits();
    let handover = Rc::<UpgradeHandover>::default();
    // A request future takes about 4 KiB. It is constructed in its box, which avoids a copy.
    let requests = service_fn(|request| {
        let allocation = Box::new_uninit();
        let handling = handle_request(
            request,
            Arc::clone(&peer),
            &handler,
            limits,
            &monitor,
            &handover,
        );
        Box::into_pin(Box::write(allocation, handling))
    });
    let detected = detected.map(|by_preface| match (by_preface, http2) {
        // The protocol negotiated by ALPN wins over the client's first bytes.
        (DetectedProtocol::Http2, Some(false)) => DetectedProtocol::Http1,
        (DetectedProtocol::Http1, Some(true)) => DetectedProtocol::Http2,
        (by_preface, _) => by_preface,
    });
    let record_unreadable = |status| handler.record_unreadable_request(status, &peer);
    match detected {
        Ok(DetectedProtocol::Http1) => {
            serve_http1(
                socket,
                &protocols,
                driver,
                requests,
                &handover,
                record_unreadable,
            )
            .await
        }
        Ok(DetectedProtocol::Http2) => {
            monitor.set_http2();
            // Boxed, so that the connection's future does not reserve space for the HTTP/2 future.
            Box::pin(serve_http2(socket, &protocols, driver, requests, &handover)).await;
        }
        // A TLS client treats a close without close_notify as a truncated connection.
        Ok(DetectedProtocol::Disconnected) => close_gracefully(&mut socket).await,
        Err(overdue) => {
            driver
                .close_timed_out_connection(socket, overdue, record_unreadable)
                .await
        }
    }
    protocols.allocator_trim.record_released_connection();
}

/// HTTP/2 client connection preface (RFC 9113, 3.4).
pub(crate) const HTTP2_PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

pub(crate) enum DetectedProtocol {
    Http1,
    Http2,
    /// The client disconnected, or the connection was asked to close, before any byte arrived.
    Disconnected,
}

/// Reads until the first bytes are, or cannot be, the HTTP/2 preface. If `close` is true, it does
/// not wait for the first byte.
pub(crate) fn poll_detect_protocol(
    socket: &mut MonitoredSocket,
    first_bytes: &mut Vec<u8>,
    cx: &mut Context<'_>,
    close: bool,
) -> Poll<DetectedProtocol> {
    loop {
        let mut bytes = [0; HTTP2_PREFACE.len()];
        let unfilled = bytes.get_mut(first_bytes.len()..).unwrap_or_default();
        let mut into = ReadBuf::new(unfilled);
        match Pin::new(&mut *socket).poll_read(cx, &mut into) {
            Poll::Pending if close && first_bytes.is_empty() => {
                return Poll::Ready(DetectedProtocol::Disconnected);
            }
            Poll::Pending => return Poll::Pending,
            Poll::Ready(Err(_)) => return Poll::Ready(DetectedProtocol::Disconnected),
            Poll::Ready(Ok(())) if into.filled().is_empty() && first_bytes.is_empty() => {
                return Poll::Ready(DetectedProtocol::Disconnected);
            }
            // A truncated request is left to hyper's HTTP/1 parser.
            Poll::Ready(Ok(())) if into.filled().is_empty() => {
                return Poll::Ready(DetectedProtocol::Http1);
            }
            Poll::Ready(Ok(())) => first_bytes.extend_from_slice(into.filled()),
        }
        if !HTTP2_PREFACE.starts_with(first_bytes) {
            return Poll::Ready(DetectedProtocol::Http1);
        }
        if first_bytes.len() == HTTP2_PREFACE.len() {
            return Poll::Ready(DetectedProtocol::Http2);
        }
    }
}
