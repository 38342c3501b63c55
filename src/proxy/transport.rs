//! What a client's bytes come over: a socket, with or without TLS around it.

use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::server::TlsStream;

use super::watch::Watch;

/// A client's connection to this machine.
#[derive(Debug)]
pub(super) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// A client's socket, which marks in a [`Watch`] whether the client takes what is written.
///
/// That is seen here and not above TLS, which takes some bytes in any case, and then tells of none until all of them
/// are gone.
#[derive(Debug)]
pub(super) struct RawSocket {
    stream: Stream,
    watch: Rc<Watch>,
    /// Read ahead, and not ours: to be read again first.
    ahead: Vec<u8>,
    /// Whether anything was read of it.
    spoken: bool,
}

/// A client's bytes, as HTTP has them.
#[derive(Debug)]
pub(super) enum Transport {
    Plain(RawSocket),
    // Several times as large.
    Tls(Box<TlsStream<RawSocket>>),
}

impl Stream {
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
    pub(super) fn new(stream: Stream, watch: Rc<Watch>) -> Self {
        Self {
            stream,
            watch,
            ahead: Vec::new(),
            spoken: false,
        }
    }

    /// Puts bytes back that stand behind what was for us. It is the client's turn now.
    pub(super) fn put_back(&mut self, bytes: &[u8]) {
        self.spoken = !bytes.is_empty();
        self.ahead = bytes.to_vec();
    }

    /// Whether the client has sent a byte.
    pub(super) fn has_spoken(&self) -> bool {
        self.spoken
    }

    pub(super) fn watch(&self) -> Rc<Watch> {
        Rc::clone(&self.watch)
    }

    /// Makes the end of the socket a reset. Unix sockets know none: their client sees an end.
    pub(super) fn set_abort(&self) -> io::Result<()> {
        match &self.stream {
            Stream::Tcp(socket) => socket.set_zero_linger(),
            Stream::Unix(_) => Ok(()),
        }
    }
}

impl Transport {
    /// What is below TLS.
    pub(super) fn raw(&mut self) -> &mut RawSocket {
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
pub(super) fn give(bytes: &mut Vec<u8>, into: &mut ReadBuf<'_>) {
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
        if !this.ahead.is_empty() {
            give(&mut this.ahead, into);
            return Poll::Ready(Ok(()));
        }
        let before = into.filled().len();
        let read = this.stream.reader().poll_read(cx, into);
        this.spoken |= into.filled().len() > before;
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
        this.watch.note_write(&result);
        result
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let result = this.stream.writer().poll_write_vectored(cx, bytes);
        this.watch.note_write(&result);
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

impl AsyncRead for Transport {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.get_mut().reader().poll_read(cx, into)
    }
}

impl AsyncWrite for Transport {
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
