//! The upstream side of a tunnel as a byte stream.

use bytes::{Buf, Bytes};
use h2::SendStream;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::http2::body_upload::poll_send_capacity;
use super::http2::received_stream::ReceivedStream;
use super::pool::UpstreamConnection;
use crate::proxy::connection_io::move_buffered_bytes;

/// Maximum size of one write to the HTTP/2 stream of a tunnel.
const MAX_TUNNEL_CHUNK_BYTES: usize = 16 * 1024;

/// An HTTP/2 stream as a bidirectional byte stream. Dropping it before both directions have ended
/// resets the HTTP/2 stream.
#[derive(Debug)]
pub(crate) struct Http2TunnelIo {
    send_stream: SendStream<Bytes>,
    recv_stream: ReceivedStream,
    read_buffer: Bytes,
    write_closed: bool,
    _connection: Box<UpstreamConnection>,
}

impl Http2TunnelIo {
    pub(super) fn new(
        send_stream: SendStream<Bytes>,
        recv_stream: ReceivedStream,
        connection: Box<UpstreamConnection>,
    ) -> Self {
        Self {
            send_stream,
            recv_stream,
            read_buffer: Bytes::new(),
            write_closed: false,
            _connection: connection,
        }
    }
}

impl AsyncRead for Http2TunnelIo {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        while this.read_buffer.is_empty() {
            match ready!(this.recv_stream.poll_data(cx)) {
                Some(data) => this.read_buffer = data.map_err(io::Error::other)?,
                None => return Poll::Ready(Ok(())),
            }
        }
        let before = this.read_buffer.len();
        move_buffered_bytes(&mut this.read_buffer, into);
        // The receive window reopens only for data that the reader has taken.
        let released = this
            .recv_stream
            .release_capacity(before - this.read_buffer.len());
        Poll::Ready(released.map_err(io::Error::other))
    }
}

impl AsyncWrite for Http2TunnelIo {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        mut bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let requested_bytes = bytes.len().min(MAX_TUNNEL_CHUNK_BYTES);
        let capacity = ready!(poll_send_capacity(
            &mut this.send_stream,
            requested_bytes,
            cx
        ));
        let capacity = capacity.map_err(io::Error::other)?;
        let chunk = bytes.copy_to_bytes(capacity.min(requested_bytes));
        let taken = chunk.len();
        let sent = this.send_stream.send_data(chunk, false);
        Poll::Ready(sent.map(|()| taken).map_err(io::Error::other))
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if std::mem::replace(&mut this.write_closed, true) {
            return Poll::Ready(Ok(()));
        }
        let sent = this.send_stream.send_data(Bytes::new(), true);
        Poll::Ready(sent.map_err(io::Error::other))
    }
}
