//! HTTP/1 connections.

use http::{Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper::server::conn::http1::Parts;
use hyper::service::Service;
use hyper_util::rt::TokioIo;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::Poll;

use super::driver::{ConnectionDriver, close_gracefully};
use super::protocols::WorkerListener;
use super::request::TrackedResponseBody;
use super::upgrade_handover::UpgradeHandover;
use crate::proxy::client_connection::ConnectionCloseReason;
use crate::proxy::client_connection::connection_monitor::TimeoutKind;
use crate::proxy::server::monitored_socket::MonitoredSocket;

/// Serves HTTP/1 until the connection ends. hyper and its buffers, about 20 KiB, exist only while
/// the client sends requests: connections are idle most of the time.
///
/// `record_unreadable` receives the status sent for input that is not a valid request.
pub(super) async fn serve_http1<S>(
    mut socket: MonitoredSocket,
    protocols: &WorkerListener,
    mut driver: ConnectionDriver,
    mut requests: S,
    handover: &UpgradeHandover,
    record_unreadable: impl Fn(StatusCode),
) where
    S: Service<Request<Incoming>, Response = Response<TrackedResponseBody>, Error = Infallible>,
{
    loop {
        driver.monitor.has_buffers.set(true);
        let idle_connection = Box::pin(serve_http1_until_idle(
            socket,
            protocols,
            &mut driver,
            requests,
            handover,
            &record_unreadable,
        ))
        .await;
        driver.monitor.has_buffers.set(false);
        match idle_connection {
            Some(idle) => {
                (socket, requests) = idle;
                protocols.allocator_trim.record_released_connection();
            }
            None => return,
        }
        let next_request = driver.drive(|cx, close| match socket.poll_for_input(cx) {
            Poll::Pending if close => Poll::Ready(false),
            next => next,
        });
        match next_request.await {
            Ok(true) => {}
            Ok(false) => return close_gracefully(&mut socket).await,
            Err(overdue) => {
                return driver
                    .close_timed_out_connection(socket, overdue, record_unreadable)
                    .await;
            }
        }
    }
}

/// Serves HTTP/1 until the connection ends or becomes idle. Returns the socket and the service of
/// an idle connection.
async fn serve_http1_until_idle<S>(
    socket: MonitoredSocket,
    protocols: &WorkerListener,
    driver: &mut ConnectionDriver,
    requests: S,
    handover: &UpgradeHandover,
    record_unreadable: &impl Fn(StatusCode),
) -> Option<(MonitoredSocket, S)>
where
    S: Service<Request<Incoming>, Response = Response<TrackedResponseBody>, Error = Infallible>,
{
    let mut connection = protocols
        .http1
        .serve_connection(TokioIo::new(socket), requests);
    let end = driver.drive(|cx, close| {
        if close {
            Pin::new(&mut connection).graceful_shutdown();
        }
        Pin::new(&mut connection).poll(cx)
    });
    let end = end.await;
    let Parts {
        io,
        read_buf,
        service,
        ..
    } = connection.into_parts();
    let mut socket = io.into_inner();
    socket.put_back(&read_buf);
    drop(read_buf);
    match end {
        Ok(Ok(())) => match handover.request.take() {
            // Until the 101 head is written, the client cannot read tunnel bytes.
            Some(upgraded) if driver.monitor.has_no_blocked_write() => {
                let stall_timeout = protocols.config.settings.body_idle_timeout;
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
                driver.monitor.record_close(ConnectionCloseReason::Protocol);
                record_unreadable(status);
            }
            if error.is_user() && driver.monitor.exchange.is_close_delimited.get() {
                socket.abort();
            }
        }
        Err(TimeoutKind::IdleBuffers) => return Some((socket, service)),
        Err(overdue) => {
            driver
                .close_timed_out_connection(socket, overdue, record_unreadable)
                .await
        }
    }
    None
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
