//! Connections and HTTP/2 streams that the pool hands out to requests.

use hyper::client::conn::http1::SendRequest;
use std::net::IpAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::UpstreamPool;
use super::share::ConnectionShare;
use crate::proxy::body::request::RequestBody;
use crate::proxy::connection_io::LazyTimer;
use crate::proxy::upstream::http2::Http2Connection;
use crate::proxy::upstream::http2::body_upload::BodyUpload;
use crate::proxy::upstream::informational_responses::InformationalResponseQueue;
use crate::proxy::upstream::read_limit::ResponseRate;

/// An HTTP/1.1 connection or a stream of an HTTP/2 connection, for one request at a time. Dropping
/// it closes the HTTP/1.1 connection or ends the HTTP/2 stream.
#[derive(Debug)]
pub(crate) struct UpstreamConnection {
    pub(crate) protocol: ConnectionProtocol,
    /// Response and idle timeouts of the current request.
    pub(crate) timer: LazyTimer,
    /// The client's share, as long as the response body uses the connection.
    pub(crate) share: Option<ConnectionShare>,
    /// Time of an HTTP/1.1 connection's last return to the pool; `None` if there was none.
    pub(crate) idle_since: Option<Instant>,
}

#[derive(Debug)]
pub(crate) enum ConnectionProtocol {
    Http1(Http1Connection),
    Http2(StreamSlot),
}

/// An HTTP/1.1 connection. Dropping it closes the connection.
#[derive(Debug)]
pub(crate) struct Http1Connection {
    pub(crate) sender: SendRequest<RequestBody>,
    pub(crate) informational: Arc<InformationalResponseQueue>,
    pub(crate) response_rate: ResponseRate,
    pub(crate) peer: Option<IpAddr>,
    pub(crate) task: AbortHandle,
}

impl UpstreamConnection {
    pub(crate) fn new(protocol: ConnectionProtocol) -> Self {
        Self {
            protocol,
            timer: LazyTimer::default(),
            share: None,
            idle_since: None,
        }
    }

    pub(crate) fn is_reused(&self) -> bool {
        match &self.protocol {
            ConnectionProtocol::Http1(_) => self.idle_since.is_some(),
            ConnectionProtocol::Http2(slot) => slot.is_reused,
        }
    }

    /// Whether an idle HTTP/1.1 connection is open and was idle for less than `max_idle`.
    pub(crate) fn is_reusable(&self, max_idle: Duration, now: Instant) -> bool {
        let ConnectionProtocol::Http1(http1) = &self.protocol else {
            return false;
        };
        let is_young = |since| now.duration_since(since) < max_idle;
        http1.sender.is_ready() && self.idle_since.is_none_or(is_young)
    }
}

impl Drop for Http1Connection {
    fn drop(&mut self) {
        // Without this abort, hyper would wait for the rest of an unneeded request or response.
        self.task.abort();
    }
}

/// A reserved stream on an [`Http2Connection`]. Dropping it ends the request.
#[derive(Debug)]
pub(crate) struct StreamSlot {
    pub(crate) connection: Rc<Http2Connection>,
    pool: Rc<UpstreamPool>,
    pub(crate) is_reused: bool,
    pub(crate) upload: Option<BodyUpload>,
}

impl StreamSlot {
    /// Reserves a stream of `connection`, if it has capacity.
    pub(super) fn reserve(
        connection: &Rc<Http2Connection>,
        pool: &Rc<UpstreamPool>,
    ) -> Option<Self> {
        connection.try_reserve_stream().then(|| Self {
            is_reused: connection.was_used.replace(true),
            connection: Rc::clone(connection),
            pool: Rc::clone(pool),
            upload: None,
        })
    }
}

impl Drop for StreamSlot {
    fn drop(&mut self) {
        self.upload = None;
        self.connection.release_stream();
        self.pool.handle_stream_end(&self.connection);
    }
}
