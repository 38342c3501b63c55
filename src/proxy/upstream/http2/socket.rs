//! Socket of an HTTP/2 connection: limits what h2 reads at a time, and drops empty DATA frames.

use bytes::Bytes;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::received_stream::ReadAllowance;
use crate::proxy::server::frame_splitter::EmptyFrameFilter;
use crate::proxy::server::transport::move_buffered_bytes;
use crate::proxy::upstream::connector::UpstreamSocket;

/// Upstream socket for h2.
#[derive(Debug)]
pub(super) struct Http2Socket {
    socket: UpstreamSocket,
    allowance: ReadAllowance,
    filter: EmptyFrameFilter,
    /// Filtered bytes that the next reads return.
    read_ahead: Bytes,
}

impl Http2Socket {
    pub(super) fn new(socket: UpstreamSocket, allowance: ReadAllowance) -> Self {
        Self {
            socket,
            allowance,
            filter: EmptyFrameFilter::default(),
            read_ahead: Bytes::new(),
        }
    }
}

impl AsyncRead for Http2Socket {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        loop {
            if !this.read_ahead.is_empty() {
                move_buffered_bytes(&mut this.read_ahead, into);
                return Poll::Ready(Ok(()));
            }
            if this.allowance.is_spent() {
                // The driver renews the allowance before it polls again.
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            let before = into.filled().len();
            ready!(Pin::new(&mut this.socket).poll_read(cx, into))?;
            let received = into.filled().get(before..).unwrap_or_default();
            this.allowance.spend(received.len());
            let mut filtered = Vec::new();
            if received.is_empty() || !this.filter.filter(received, &mut filtered) {
                return Poll::Ready(Ok(()));
            }
            into.set_filled(before);
            this.read_ahead = filtered.into();
        }
    }
}

impl AsyncWrite for Http2Socket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write_vectored(cx, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(cx)
    }
}
