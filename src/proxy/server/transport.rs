//! Byte stream of a client: a socket, with or without TLS.

use bytes::Bytes;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::server::TlsStream;

use super::connection_monitor::ConnectionMonitor;

/// Client socket, TCP or Unix.
#[derive(Debug)]
pub(crate) enum ClientSocket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// Client socket that reports blocked writes to a [`ConnectionMonitor`].
///
/// Blocked writes are observed below TLS, because the TLS layer buffers bytes and hides whether the
/// socket accepts them.
#[derive(Debug)]
pub(crate) struct SocketBelowTls {
    stream: ClientSocket,
    monitor: Rc<ConnectionMonitor>,
    /// Bytes received behind the PROXY header. The next reads return these bytes first.
    read_ahead: Bytes,
    /// Whether the client has sent a byte, apart from the PROXY header.
    has_received: bool,
    /// Whether TLS reads from this socket and may keep what it receives.
    is_below_tls: bool,
}

/// The client's byte stream after TLS, if any; the HTTP layer reads and writes it.
#[derive(Debug)]
pub(crate) enum ClientTransport {
    Plain(SocketBelowTls),
    // Boxed, because a TLS stream is several times as large as a plain socket.
    Tls(Box<TlsStream<SocketBelowTls>>),
}

impl ClientSocket {
    fn reader(&mut self) -> Pin<&mut (dyn AsyncRead + Unpin)> {
        match self {
            Self::Tcp(socket) => Pin::new(socket),
            Self::Unix(socket) => Pin::new(socket),
        }
    }

    fn writer(&mut self) -> Pin<&mut (dyn AsyncWrite + Unpin)> {
        match self {
            Self::Tcp(socket) => Pin::new(socket),
            Self::Unix(socket) => Pin::new(socket),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Tcp(socket) => socket.is_write_vectored(),
            Self::Unix(socket) => socket.is_write_vectored(),
        }
    }
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

    /// Whether the client has sent a byte, apart from the PROXY header.
    pub(crate) fn has_received_bytes(&self) -> bool {
        self.has_received
    }

    /// Records that TLS reads from this socket.
    pub(crate) fn set_below_tls(&mut self) {
        self.is_below_tls = true;
    }

    pub(crate) fn monitor(&self) -> Rc<ConnectionMonitor> {
        Rc::clone(&self.monitor)
    }

    /// Error of the connection, such as a reset by the client. After the client has ended its
    /// sending direction, reads no longer report it.
    pub(crate) fn take_error(&self) -> io::Result<Option<io::Error>> {
        match &self.stream {
            ClientSocket::Tcp(socket) => socket.take_error(),
            ClientSocket::Unix(socket) => socket.take_error(),
        }
    }

    /// Makes closing the socket send a reset. Unix sockets have no reset: their client reads an end
    /// of file.
    pub(crate) fn set_reset_on_close(&self) -> io::Result<()> {
        match &self.stream {
            ClientSocket::Tcp(socket) => socket.set_zero_linger(),
            ClientSocket::Unix(_) => Ok(()),
        }
    }
}

impl ClientTransport {
    /// Socket below TLS, or the plain socket without TLS.
    pub(crate) fn socket_below_tls(&mut self) -> &mut SocketBelowTls {
        match self {
            Self::Plain(socket) => socket,
            Self::Tls(stream) => stream.get_mut().0,
        }
    }

    fn writer(&mut self) -> Pin<&mut (dyn AsyncWrite + Unpin)> {
        match self {
            Self::Plain(socket) => Pin::new(socket),
            Self::Tls(stream) => Pin::new(stream),
        }
    }
}

/// Moves bytes from the front of `bytes` into `into`, as many as fit.
pub(crate) fn move_buffered_bytes(bytes: &mut Bytes, into: &mut ReadBuf<'_>) {
    let n = bytes.len().min(into.remaining());
    into.put_slice(&bytes.split_to(n));
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
        let read = this.stream.reader().poll_read(cx, into);
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
        let this = self.get_mut();
        let result = this.stream.writer().poll_write(cx, bytes);
        this.monitor.record_write_result(&result);
        result
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let result = this.stream.writer().poll_write_vectored(cx, bytes);
        this.monitor.record_write_result(&result);
        result
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().stream.writer().poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().stream.writer().poll_shutdown(cx)
    }
}

impl AsyncRead for ClientTransport {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(socket) => Pin::new(socket).poll_read(cx, into),
            Self::Tls(stream) => {
                let before = into.filled().len();
                let read = Pin::new(&mut **stream).poll_read(cx, into);
                if into.filled().len() > before {
                    stream.get_ref().0.monitor.memory.end_tls_input();
                }
                read
            }
        }
    }
}

impl AsyncWrite for ClientTransport {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.get_mut().writer().poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.get_mut().writer().poll_write_vectored(cx, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Plain(socket) => socket.is_write_vectored(),
            Self::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().writer().poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().writer().poll_shutdown(cx)
    }
}
