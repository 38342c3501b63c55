//! Streams of HTTP/2 connections, reserved for one request each.

use std::rc::Rc;

use super::UpstreamPool;
use crate::proxy::upstream::http2::Http2Connection;
use crate::proxy::upstream::http2::body_upload::BodyUpload;

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
