//! Byte stream of a client: a socket, with or without TLS.

use bytes::Bytes;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::server::TlsStream;
use tokio_util::either::Either;

use crate::proxy::client_connection::connection_monitor::ConnectionMonitor;
use crate::proxy::connection_io::move_buffered_bytes;

/// Client socket, TCP or Unix.
pub(crate) type ClientSocket = Either<TcpStream, UnixStream>;

/// The client's byte stream after TLS, if any; the HTTP layer reads and writes it. Boxed, because a
/// TLS stream is several times as large as a plain socket.
pub(crate) type ClientTransport = Either<SocketBelowTls, Box<TlsStream<SocketBelowTls>>>;

/// Socket below TLS, or the plain socket without TLS.
pub(crate) fn socket_below_tls(transport: &mut ClientTransport) -> &mut SocketBelowTls {
    match transport {
        Either::Left(socket) => socket,
        Either::Right(stream) => stream.get_mut().0,
    }
}

/// Client socket that reports blocked writes to a [`ConnectionMonitor`].
///
/// Blocked writes are observed below TLS, because the TLS layer buffers bytes and hides whether the
/// socket accepts them.
#[derive(Debug)]
pub(crate) struct SocketBelowTls {
    pub(super) stream: ClientSocket,
    pub(super) monitor: Rc<ConnectionMonitor>,
    /// Bytes received behind the PROXY header. The next reads return these bytes first.
    read_ahead: Bytes,
    /// Whether the client has sent a byte, apart from the PROXY header.
    pub(super) has_received: bool,
    /// Whether TLS reads from this socket and may keep what it receives.
    pub(super) is_below_tls: bool,
}

impl SocketBelowTls {
    pub(crate) fn new(stream: ClientSocket, monitor: Rc<ConnectionMonitor>) -> Self {
        Self {
            stream,
            monitor,
            read_ahead: Bytes::new(),
            has_received: false,
            is_below_tls: false,
        }
    }

    /// Puts back the bytes that follow the PROXY header. All later bytes are the client's own.
    pub(crate) fn put_back(&mut self, bytes: &[u8]) {
        self.has_received = !bytes.is_empty();
        self.read_ahead = Bytes::copy_from_slice(bytes);
    }

    /// Error of the connection, such as a reset by the client. After the client has ended its
    /// sending direction, reads no longer report it.
    pub(crate) fn take_error(&self) -> io::Result<Option<io::Error>> {
        match &self.stream {
            Either::Left(socket) => socket.take_error(),
            Either::Right(socket) => socket.take_error(),
        }
    }
}

impl AsyncRead for SocketBelowTls {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if !this.read_ahead.is_empty() {
            move_buffered_bytes(&mut this.read_ahead, into);
            return Poll::Ready(Ok(()));
        }
        let before = into.filled().len();
        let read = Pin::new(&mut this.stream).poll_read(cx, into);
        let received = into.filled().len() - before;
        this.has_received |= received > 0;
        if this.is_below_tls {
            this.monitor.memory.add_tls_input(received);
        }
        read
    }
}

impl AsyncWrite for SocketBelowTls {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[io::IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let result = Pin::new(&mut this.stream).poll_write_vectored(cx, bytes);
        this.monitor.output.record_write_result(&result);
        result
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }
}
