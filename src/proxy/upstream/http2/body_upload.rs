//! Upload of a request body over an HTTP/2 stream.

use bytes::Bytes;
use h2::{Reason, SendStream};
use http::HeaderValue;
use http_body::{Body, Frame};
use smallvec::SmallVec;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tokio::task::AbortHandle;

use crate::proxy::body::request::RequestBody;
use crate::proxy::http::header_lines::{self, remove_headers};

/// Handle of a request body upload. Dropping it aborts the upload.
#[derive(Debug)]
pub(crate) struct BodyUpload(AbortHandle);

impl BodyUpload {
    /// Sends as much of `body` as the upstream's window allows, then spawns a task for the rest.
    /// Returns `None` if no rest remains. Removes trailers that are not named in
    /// `declared_trailers`, the validated `Trailer` values.
    pub(crate) async fn start(
        body: RequestBody,
        stream: SendStream<Bytes>,
        declared_trailers: SmallVec<[HeaderValue; 1]>,
    ) -> Option<Self> {
        let mut upload = BodyUploadFuture {
            body,
            stream,
            declared_trailers,
            pending_chunk: Bytes::new(),
            is_last: false,
        };
        let first = poll_fn(|cx| Poll::Ready(Pin::new(&mut upload).poll(cx))).await;
        let spawn = || tokio::task::spawn_local(upload).abort_handle();
        first.is_pending().then(|| Self(spawn()))
    }
}

impl Drop for BodyUpload {
    fn drop(&mut self) {
        self.0.abort();
    }
}

struct BodyUploadFuture {
    body: RequestBody,
    stream: SendStream<Bytes>,
    declared_trailers: SmallVec<[HeaderValue; 1]>,
    /// The rest of the chunk read last from the body, not sent yet.
    pending_chunk: Bytes,
    /// Whether `pending_chunk` ends the body.
    is_last: bool,
}

impl Future for BodyUploadFuture {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = self.get_mut();
        // Stream errors are ignored here because the response future reports them.
        this.poll_upload(cx).map(|_sent| ())
    }
}

impl BodyUploadFuture {
    fn poll_upload(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), h2::Error>> {
        loop {
            // The upload ends if the upstream reset the stream to stop reading the body.
            if self.stream.poll_reset(cx).is_ready() {
                return Poll::Ready(Ok(()));
            }
            while !self.pending_chunk.is_empty() {
                let pending = self.pending_chunk.len();
                let capacity = ready!(poll_send_capacity(&mut self.stream, pending, cx))?;
                let chunk = self.pending_chunk.split_to(capacity.min(pending));
                let ends_stream = self.is_last && self.pending_chunk.is_empty();
                self.stream.send_data(chunk, ends_stream)?;
                if ends_stream {
                    return Poll::Ready(Ok(()));
                }
            }
            match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(chunk) => {
                        self.is_last = self.body.is_end_stream();
                        if chunk.is_empty() && self.is_last {
                            return Poll::Ready(self.stream.send_data(chunk, true));
                        }
                        self.pending_chunk = chunk;
                    }
                    Err(frame) => return Poll::Ready(self.finish_with_declared_trailers(frame)),
                },
                None => return Poll::Ready(self.stream.send_data(Bytes::new(), true)),
                // The stream is reset after a body error: a truncated body must not look complete.
                Some(Err(_reported_by_progress)) => {
                    self.stream.send_reset(Reason::CANCEL);
                    return Poll::Ready(Ok(()));
                }
            }
        }
    }

    fn finish_with_declared_trailers(&mut self, frame: Frame<Bytes>) -> Result<(), h2::Error> {
        let mut trailers = frame.into_trailers().unwrap_or_default();
        remove_headers(&mut trailers, |name| {
            let declared = self.declared_trailers.iter();
            let mut declared = declared.flat_map(header_lines::list_elements);
            !declared.any(|item| item.eq_ignore_ascii_case(name.as_str().as_bytes()))
        });
        if trailers.is_empty() {
            self.stream.send_data(Bytes::new(), true)
        } else {
            self.stream.send_trailers(trailers)
        }
    }
}

/// Polls until the stream's send window allows at least one byte, and returns the capacity. At most
/// `requested_bytes` are reserved.
pub(crate) fn poll_send_capacity(
    stream: &mut SendStream<Bytes>,
    requested_bytes: usize,
    cx: &mut Context<'_>,
) -> Poll<Result<usize, h2::Error>> {
    stream.reserve_capacity(requested_bytes);
    loop {
        match stream.capacity() {
            0 => match ready!(stream.poll_capacity(cx)) {
                Some(capacity) => drop(capacity?),
                None => return Poll::Ready(Err(Reason::STREAM_CLOSED.into())),
            },
            capacity => return Poll::Ready(Ok(capacity)),
        }
    }
}
