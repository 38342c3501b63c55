//! What a client's bytes come over: a socket, with or without TLS around it.

use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::server::TlsStream;

use super::connection_timeouts::ConnectionMonitor;

/// A client's connection to this machine.
#[derive(Debug)]
pub(in crate::proxy) enum ClientStream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// A client's socket, which marks in a [`ConnectionMonitor`] whether the client takes what is written.
///
/// That is seen here and not above TLS, which takes some bytes in any case, and then tells of none until all of them
/// are gone.
#[derive(Debug)]
pub(in crate::proxy) struct RawSocket {
    stream: ClientStream,
    monitor: Rc<ConnectionMonitor>,
    /// Read ahead, and not ours: to be read again first.
    read_ahead: Vec<u8>,
    /// Whether anything was read of it.
    has_received: bool,
}

/// A client's bytes, as HTTP has them.
#[derive(Debug)]
pub(in crate::proxy) enum ClientTransport {
    Plain(RawSocket),
    // Several times as large.
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

    /// Puts bytes back that stand behind what was for us. It is the client's turn now.
    pub(in crate::proxy) fn put_back(&mut self, bytes: &[u8]) {
        self.has_received = !bytes.is_empty();
        self.read_ahead = bytes.to_vec();
    }

    /// Whether the client has sent a byte.
    pub(in crate::proxy) fn has_received(&self) -> bool {
        self.has_received
    }

    pub(in crate::proxy) fn monitor(&self) -> Rc<ConnectionMonitor> {
        Rc::clone(&self.monitor)
    }

    /// Makes the end of the socket a reset. Unix sockets know none: their client sees an end.
    pub(in crate::proxy) fn set_reset_on_close(&self) -> io::Result<()> {
        match &self.stream {
            ClientStream::Tcp(socket) => socket.set_zero_linger(),
            ClientStream::Unix(_) => Ok(()),
        }
    }
}

impl ClientTransport {
    /// What is below TLS.
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

/// Moves as many bytes as there is room for, and lets go of the memory with the last.
pub(in crate::proxy) fn move_buffered(bytes: &mut Vec<u8>, into: &mut ReadBuf<'_>) {
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
            move_buffered(&mut this.read_ahead, into);
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
