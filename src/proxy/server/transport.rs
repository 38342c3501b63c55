//! Byte stream of a client: a socket, with or without TLS.

use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::server::TlsStream;

use super::connection_timeouts::ConnectionMonitor;

/// Socket of a client.
#[derive(Debug)]
pub(in crate::proxy) enum ClientStream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// Client socket that reports blocked writes to a [`ConnectionMonitor`].
///
/// The report is made below TLS. The TLS layer buffers some bytes in any case, and then reports no
/// write until its buffer is empty.
#[derive(Debug)]
pub(in crate::proxy) struct RawSocket {
    stream: ClientStream,
    monitor: Rc<ConnectionMonitor>,
    /// Bytes received behind the PROXY header. They are read again first.
    read_ahead: Vec<u8>,
    /// Whether the client has sent a byte after the PROXY header.
    has_received: bool,
}

/// Client byte stream as HTTP reads and writes it.
#[derive(Debug)]
pub(in crate::proxy) enum ClientTransport {
    Plain(RawSocket),
    // Boxed, because it is several times as large.
    Tls(Box<TlsStream<RawSocket>>),
}

impl ClientStream {
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

impl RawSocket {
    pub(in crate::proxy) fn new(stream: ClientStream, monitor: Rc<ConnectionMonitor>) -> Self {
        Self {
            stream,
            monitor,
            read_ahead: Vec::new(),
            has_received: false,
        }
    }

    /// Puts back the bytes that follow the PROXY header. All later bytes are the client's own.
    pub(in crate::proxy) fn put_back(&mut self, bytes: &[u8]) {
        self.has_received = !bytes.is_empty();
        self.read_ahead = bytes.to_vec();
    }

    /// Whether the client has sent a byte after the PROXY header.
    pub(in crate::proxy) fn has_received(&self) -> bool {
        self.has_received
    }

    pub(in crate::proxy) fn monitor(&self) -> Rc<ConnectionMonitor> {
        Rc::clone(&self.monitor)
    }

    /// Makes closing the socket send a reset. Unix sockets have no reset: their client reads an end
    /// of file.
    pub(in crate::proxy) fn set_reset_on_close(&self) -> io::Result<()> {
        match &self.stream {
            ClientStream::Tcp(socket) => socket.set_zero_linger(),
            ClientStream::Unix(_) => Ok(()),
        }
    }
}

impl ClientTransport {
    /// Socket below TLS.
    pub(in crate::proxy) fn raw_socket(&mut self) -> &mut RawSocket {
        match self {
            Self::Plain(socket) => socket,
            Self::Tls(stream) => stream.get_mut().0,
        }
    }

    fn reader(&mut self) -> Pin<&mut (dyn AsyncRead + Unpin)> {
        match self {
            Self::Plain(socket) => Pin::new(socket),
            Self::Tls(stream) => Pin::new(stream),
        }
    }

    fn writer(&mut self) -> Pin<&mut (dyn AsyncWrite + Unpin)> {
        match self {
            Self::Plain(socket) => Pin::new(socket),
            Self::Tls(stream) => Pin::new(stream),
        }
    }
}

/// Moves as many bytes as fit into `into`. Frees the buffer once it is empty.
pub(in crate::proxy) fn move_buffered_bytes(bytes: &mut Vec<u8>, into: &mut ReadBuf<'_>) {
    let n = bytes.len().min(into.remaining());
    into.put_slice(bytes.drain(..n).as_slice());
    if bytes.is_empty() {
        *bytes = Vec::new();
    }
}

impl AsyncRead for RawSocket {
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
        this.has_received |= into.filled().len() > before;
        read
    }
}

impl AsyncWrite for RawSocket {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let result = this.stream.writer().poll_write(cx, bytes);
        this.monitor.record_write(&result);
        result
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let result = this.stream.writer().poll_write_vectored(cx, bytes);
        this.monitor.record_write(&result);
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
        self.get_mut().reader().poll_read(cx, into)
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
