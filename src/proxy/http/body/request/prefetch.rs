//! Reads the start of a request body before the request takes an upstream connection.

use http::{HeaderMap, header};
use std::future::poll_fn;
use std::task::{Poll, ready};

use super::{RequestBody, RequestBodyStream};
use crate::proxy::http::body::error::BodyError;

/// Start of a body that is read before the request takes a connection that others may need. A
/// shorter body is read completely, so it cannot occupy a connection by arriving slowly.
const MAX_PREFETCH_BYTES: u64 = 16 * 1024;

impl RequestBody {
    /// Reads the start of the body, at most about [`MAX_PREFETCH_BYTES`], and keeps it for the
    /// upstream. The start of a gRPC call is not awaited: the server may have to answer first.
    ///
    /// # Errors
    /// Fails if the client does not send it.
    pub(in crate::proxy) async fn prefetch(&self) -> Result<(), BodyError> {
        let Some(body) = &self.0 else { return Ok(()) };
        if body.borrow().is_grpc {
            return Ok(());
        }
        {
            let mut body = body.borrow_mut();
            body.replay_buffer.start_recording();
            body.is_prefetching = true;
        }
        let prefetched = poll_fn(|cx| {
            let mut body = body.borrow_mut();
            while body.received < MAX_PREFETCH_BYTES {
                match ready!(body.poll_frame(cx)) {
                    Some(frame) => drop(frame?),
                    None => break,
                }
            }
            Poll::Ready(Ok(()))
        })
        .await;
        body.borrow_mut().is_prefetching = false;
        prefetched?;
        match self.rewind() {
            true => Ok(()),
            false => Err(BodyError::ClientTimeout),
        }
    }
}

impl RequestBodyStream {
    /// Counts the bytes that were read ahead as read.
    pub(super) fn release_prefetched_bytes(&mut self) {
        let bytes = std::mem::take(&mut self.prefetched_bytes);
        let memory = self.active.monitor().memory();
        memory.remove_unread_bytes(bytes);
        if std::mem::take(&mut self.has_prefetched_trailers) {
            memory.remove_trailers();
        }
    }
}

/// Whether a request is a gRPC or Connect call, whose body is a stream of messages.
pub(super) fn is_grpc(headers: &HeaderMap) -> bool {
    let content_type = headers.get(header::CONTENT_TYPE);
    content_type.is_some_and(|value| {
        let value = value.as_bytes();
        value.starts_with(b"application/grpc") || value.starts_with(b"application/connect+")
    })
}
