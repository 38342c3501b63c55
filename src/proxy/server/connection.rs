//! Serves one client connection: protocol detection, HTTP/1, HTTP/2, timeouts and drain.

mod close;
mod driver;
mod http1;
mod http2;
mod protocol_detection;
pub(super) mod protocols;
mod request;
mod streams;
mod upgrade_handover;

use hyper::service::service_fn;
use std::rc::Rc;
use std::sync::Arc;

use super::accept::CompletedHandshake;
use super::connection::close::{close_gracefully, close_timed_out_connection};
use super::connection::driver::ConnectionDriver;
use super::connection::http1::serve_http1;
use super::connection::http2::serve_http2;
use super::connection::protocol_detection::{
    DetectedProtocol, HTTP2_PREFACE, poll_detect_protocol,
};
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
            close_timed_out_connection(socket, overdue, &monitor, record_unreadable).await
        }
    }
    protocols.allocator_trim.record_released_connection();
}
