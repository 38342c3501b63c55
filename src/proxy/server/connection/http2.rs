//! HTTP/2 connections.

use http::{Request, Response};
use hyper::body::Incoming;
use hyper::service::Service;
use hyper_util::rt::TokioIo;
use std::convert::Infallible;
use std::error::Error as _;
use std::pin::Pin;
use std::rc::Rc;

use super::driver::ConnectionDriver;
use super::protocols::WorkerListener;
use super::request::TrackedResponseBody;
use super::upgrade_handover::UpgradeHandover;
use crate::proxy::client_connection::ConnectionCloseReason;

use crate::proxy::http2_frames::frame_scanner::INVALID_FRAME;
use crate::proxy::server::monitored_socket::MonitoredSocket;

/// Serves HTTP/2 until the connection ends.
pub(super) async fn serve_http2<S>(
    socket: MonitoredSocket,
    protocols: &WorkerListener,
    mut driver: ConnectionDriver,
    requests: S,
    handover: &Rc<UpgradeHandover>,
) where
    S: Service<Request<Incoming>, Response = Response<TrackedResponseBody>, Error = Infallible>,
    S::Future: 'static,
{
    let http2 = protocols.http2_builder(&driver.monitor, handover);
    let mut connection = http2.serve_connection(TokioIo::new(socket), requests);
    let end = driver.drive(|cx, close| {
        if close {
            Pin::new(&mut connection).graceful_shutdown();
        }
        Pin::new(&mut connection).poll(cx)
    });
    match end.await {
        Ok(result) => {
            let is_flood = driver.monitor.frame_budget.is_exhausted.get();
            let flood = is_flood.then_some(ConnectionCloseReason::Flood);
            let reason = match result {
                Ok(()) => flood,
                Err(error) => {
                    tracing::debug!(%error, "client connection failed");
                    flood.or_else(|| classify_connection_error(&error))
                }
            };
            driver.monitor.record_close(reason);
        }
        Err(overdue) => driver.monitor.record_timeout(overdue),
    }
}

/// Classifies the error of an HTTP/2 connection. Returns `None` if the client did not cause it.
fn classify_connection_error(error: &hyper::Error) -> Option<ConnectionCloseReason> {
    let error = error
        .source()?
        .downcast_ref::<h2::Error>()
        .filter(|error| error.is_library() || error.is_io())?;
    if let Some(error) = error.get_io() {
        return (error.kind() == INVALID_FRAME).then_some(ConnectionCloseReason::Protocol);
    }
    match error.reason()? {
        h2::Reason::NO_ERROR => None,
        h2::Reason::ENHANCE_YOUR_CALM => Some(ConnectionCloseReason::Flood),
        _ => Some(ConnectionCloseReason::Protocol),
    }
}
