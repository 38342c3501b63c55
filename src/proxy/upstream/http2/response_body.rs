//! The response body of an HTTP/2 stream.

use bytes::Bytes;
use http::{HeaderMap, header};
use http_body::{Frame, SizeHint};
use std::task::{Context, Poll, ready};

use super::received_stream::ReceivedStream;

/// A response body, received from an HTTP/2 stream.
#[derive(Debug)]
pub(crate) struct Http2ResponseBody {
    stream: ReceivedStream,
    /// Unreceived bytes of the declared `Content-Length`; `None` without a length.
    remaining_bytes: Option<u64>,
    data_ended: bool,
}

impl Http2ResponseBody {
    pub(crate) fn new(stream: ReceivedStream, headers: &HeaderMap) -> Self {
        let length = headers
            .get(header::CONTENT_LENGTH)
            .and_then(|length| length.to_str().ok()?.parse().ok());
        Self {
            stream,
            remaining_bytes: length,
            data_ended: false,
        }
    }

    /// Polls for the next frame. A stream reset is an error whatever its reason code, because only
    /// END_STREAM ends a body.
    pub(crate) fn poll_frame(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, h2::Error>>> {
        if !self.data_ended {
            match ready!(self.stream.poll_data(cx)) {
                Some(Ok(data)) => {
                    self.stream.release_capacity(data.len())?;
                    if let Some(remaining) = &mut self.remaining_bytes {
                        *remaining =
                            remaining.saturating_sub(u64::try_from(data.len()).unwrap_or(u64::MAX));
                    }
                    return Poll::Ready(Some(Ok(Frame::data(data))));
                }
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => self.data_ended = true,
            }
        }
        self.stream
            .poll_trailers(cx)
            .map(|trailers| trailers.map(|some| some.map(Frame::trailers)).transpose())
    }

    /// # Errors
    /// Fails if the stream has failed by now, also if data before it is unread.
    pub(crate) fn check_received(&self) -> Result<(), h2::Error> {
        match self.stream.is_end_stream() {
            true => Ok(()),
            false => self.stream.check_received(),
        }
    }

    pub(crate) fn is_end_stream(&self) -> bool {
        self.stream.is_end_stream()
    }

    pub(crate) fn size_hint(&self) -> SizeHint {
        self.remaining_bytes
            .map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}
