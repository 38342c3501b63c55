//! Reads a body before it is forwarded: its start while the request waits for a connection, or all
//! of it for policies that depend on it.

use bytes::{Bytes, BytesMut};
use http_body::{Body as _, Frame};
use std::future::poll_fn;
use std::task::{Poll, ready};

use super::{RequestBody, unread_bytes};
use crate::proxy::BodyError;

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

    /// Reads the whole body if it has at most `most` bytes, and keeps what was read for the
    /// upstream. Returns `None` for a longer body. If the future is dropped, the body is
    /// incomplete.
    ///
    /// # Errors
    /// Fails if the client does not send it.
    pub(crate) async fn read_whole(&self, most: u64) -> Result<Option<Bytes>, BodyError> {
        let Some(body) = &self.0 else {
            return Ok(Some(Bytes::new()));
        };
        // Copied: many small frames would each keep a large allocation alive.
        let mut start = BytesMut::new();
        let end = poll_fn(|cx| {
            let mut body = body.borrow_mut();
            while body.received <= most && !body.is_complete {
                let frame = match ready!(body.poll_client(cx)) {
                    Some(frame) => frame?,
                    None => return Poll::Ready(Ok(None)),
                };
                match frame.into_data() {
                    Ok(data) => {
                        let rest = body.incoming.size_hint().exact().unwrap_or(0).min(most);
                        start.reserve(data.len() + usize::try_from(rest).unwrap_or(0));
                        start.extend_from_slice(&data);
                        body.set_start_bytes(start.len());
                        body.is_complete |= body.received <= most && body.incoming.is_end_stream();
                    }
                    Err(trailers) => return Poll::Ready(Ok(Some(trailers))),
                }
            }
            Poll::Ready(Ok(None))
        });
        let trailers = end.await?;
        let mut body = body.borrow_mut();
        let start = start.freeze();
        let is_whole = body.received <= most;
        let data = (!start.is_empty()).then(|| Frame::data(start.clone()));
        for frame in data.into_iter().chain(trailers) {
            body.replay_buffer.append_frame(&frame);
        }
        Ok(is_whole.then_some(start))
    }
}
