//! Reads a body before it is forwarded: its start while the request waits for a connection, or all
//! of it for policies that depend on it.

use bytes::BytesMut;
use http_body::{Body as _, Frame};
use std::future::poll_fn;
use std::task::{Poll, ready};

use super::{RequestBody, unread_bytes};
use crate::proxy::BodyError;

/// Size of the parts in which a body is kept until it was read whole.
const READ_PART_BYTES: usize = 8 * 1024;

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
    pub(crate) async fn read_whole(&self, most: u64) -> Result<Option<Vec<u8>>, BodyError> {
        let Some(body) = &self.0 else {
            return Ok(Some(Vec::new()));
        };
        // Copied: many small frames would each keep a large allocation alive.
        let mut parts: Vec<BytesMut> = Vec::new();
        let end = poll_fn(|cx| {
            let mut body = body.borrow_mut();
            while body.received <= most {
                let frame = match ready!(body.poll_client(cx)) {
                    Some(frame) => frame?,
                    None => return Poll::Ready(Ok(None)),
                };
                match frame.into_data() {
                    Ok(data) => {
                        append_to_parts(&mut parts, &data);
                        body.set_start_bytes(parts.len() * READ_PART_BYTES);
                    }
                    Err(trailers) => return Poll::Ready(Ok(Some(trailers))),
                }
                if body.received <= most && body.incoming.is_end_stream() {
                    body.is_complete = true;
                    return Poll::Ready(Ok(None));
                }
            }
            Poll::Ready(Ok(None))
        });
        let trailers = end.await?;
        let mut body = body.borrow_mut();
        let is_whole = body.received <= most;
        let whole = is_whole.then(|| parts.concat());
        let parts = parts.into_iter().map(|part| Frame::data(part.freeze()));
        for frame in parts.chain(trailers) {
            body.replay_buffer.append_frame(&frame);
        }
        Ok(whole)
    }
}

/// Appends data to the last part, or to a new one.
fn append_to_parts(parts: &mut Vec<BytesMut>, mut data: &[u8]) {
    while !data.is_empty() {
        let room = parts.last().map_or(0, |part| part.capacity() - part.len());
        if room == 0 {
            parts.push(BytesMut::with_capacity(READ_PART_BYTES));
        } else if let Some(part) = parts.last_mut() {
            let (now, rest) = data.split_at(room.min(data.len()));
            part.extend_from_slice(now);
            data = rest;
        }
    }
}
