//! Reads the start of a request body before the request takes an upstream connection.

use http::{HeaderMap, header};
use std::future::poll_fn;
use std::task::{Poll, ready};

use super::{RequestBody, RequestBodyStream, unread_bytes};
use crate::proxy::body::BodyError;

/// Start of a body that is read before the request takes a connection that others may need. A
/// shorter body is read completely, so it cannot occupy a connection by arriving slowly.
const MAX_READ_AHEAD_BYTES: u64 = 16 * 1024;

impl RequestBody {
    /// Whether the start of the body may be read before the request takes a connection. For a call
    /// with messages it may not: the server may have to answer first.
    pub(crate) fn may_be_read_ahead(&self) -> bool {
        let body = self.0.as_ref();
        body.is_some_and(|body| !body.borrow().is_message_stream)
    }

    /// Reads the start of the body, at most about [`MAX_READ_AHEAD_BYTES`], and keeps it for the
    /// upstream. If the future is dropped, what was read is kept too.
    ///
    /// # Errors
    /// Fails if the client does not send it.
    pub(crate) async fn read_ahead(&self) -> Result<(), BodyError> {
        let Some(body) = &self.0 else { return Ok(()) };
        poll_fn(|cx| {
            let mut body = body.borrow_mut();
            while body.received < MAX_READ_AHEAD_BYTES
                && let Some(frame) = ready!(body.poll_client(cx))
            {
                let frame = frame?;
                // Counts as unread until the upstream takes it.
                let bytes = unread_bytes(&frame);
                body.active.monitor().memory.add_unread_frames(0, bytes);
                body.read_ahead_bytes += bytes;
                body.replay_buffer.append_frame(&frame);
            }
            Poll::Ready(Ok(()))
        })
        .await
    }
}

impl RequestBodyStream {
    /// Counts the bytes that were read ahead as read.
    pub(crate) fn release_read_ahead_bytes(&mut self) {
        let bytes = std::mem::take(&mut self.read_ahead_bytes);
        self.active.monitor().memory.remove_unread_bytes(bytes);
    }
}

/// Whether a request is a gRPC or Connect call, whose body is a stream of messages.
pub(crate) fn is_message_stream(headers: &HeaderMap) -> bool {
    let content_type = headers.get(header::CONTENT_TYPE);
    content_type.is_some_and(|value| {
        let value = value.as_bytes();
        value.starts_with(b"application/grpc") || value.starts_with(b"application/connect+")
    })
}

#[cfg(test)]
mod tests {
    use super::unread_bytes;
    use crate::proxy::client_connection::connection_memory::UNREAD_FRAME_BYTES;
    use bytes::Bytes;
    use http::HeaderMap;
    use http_body::Frame;

    #[test]
    fn only_data_frames_count_while_they_are_unread() {
        let data = Frame::data(Bytes::from_static(b"abc"));
        assert_eq!(unread_bytes(&data), 3 + UNREAD_FRAME_BYTES);
        assert_eq!(unread_bytes(&Frame::trailers(HeaderMap::new())), 0);
    }
}
