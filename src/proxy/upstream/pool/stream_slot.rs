//! Streams of HTTP/2 connections, reserved for one request each.

use std::rc::Rc;

use super::UpstreamPool;
use crate::proxy::upstream::http2::Http2Connection;
use crate::proxy::upstream::http2::body_upload::BodyUpload;

/// A reserved stream on an [`Http2Connection`]. Dropping it ends the request.
#[derive(Debug)]
pub(crate) struct StreamSlot {
    connection: Rc<Http2Connection>,
    pool: Rc<UpstreamPool>,
    is_reused: bool,
    upload: Option<BodyUpload>,
}

impl StreamSlot {
    /// Reserves a stream of `connection`, if it has capacity.
    pub(super) fn reserve(
        connection: &Rc<Http2Connection>,
        pool: &Rc<UpstreamPool>,
    ) -> Option<Self> {
        connection.try_reserve_stream().then(|| Self {
            is_reused: connection.mark_used(),
            connection: Rc::clone(connection),
            pool: Rc::clone(pool),
            upload: None,
        })
    }

    /// Whether the connection had requests before this one.
    pub(crate) fn is_reused(&self) -> bool {
        self.is_reused
    }

    pub(crate) fn connection(&self) -> &Rc<Http2Connection> {
        &self.connection
    }

    /// Attaches the upload of the request body. Dropping the slot aborts the upload.
    pub(crate) fn attach_upload(&mut self, upload: BodyUpload) {
        self.upload = Some(upload);
    }
}

impl Drop for StreamSlot {
    fn drop(&mut self) {
        self.upload = None;
        self.connection.release_stream();
        self.pool.handle_stream_end(&self.connection);
    }
}
