//! New connections: name, address, socket, TLS.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, lookup_host};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::RootCertStore;
use tokio_rustls::rustls::pki_types::ServerName;

use super::{UpstreamError, UpstreamErrorKind, with_causes};
use crate::proxy::UpstreamSettings;
use crate::tls;

/// Why https to the upstream cannot work; found at start.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    #[error("upstream.tls.ca: cannot read certificates from {}: {reason}", path.display())]
    Ca { path: PathBuf, reason: String },
    #[error("no trusted certificates on this system ({0}); name a file in upstream.tls.ca")]
    NoSystemRoots(String),
    #[error("{0:?} is no name that a certificate can be checked against; set upstream.tls.server_name")]
    ServerName(String),
    #[error("upstream.url: {0:?} cannot stand in a Host header")]
    Host(String),
    #[error("TLS cannot be set up: {0}")]
    Tls(#[from] tokio_rustls::rustls::Error),
}

/// Makes connections to the one upstream there is.
pub(super) struct Connector {
    tls: Option<(TlsConnector, ServerName<'static>)>,
}

impl Connector {
    pub(super) fn new(settings: &UpstreamSettings) -> Result<Self, SetupError> {
        let tls = if settings.url.tls { Some((tls_client(settings)?, server_name(settings)?)) } else { None };
        Ok(Self { tls })
    }

    /// One try, all in, within `connect_timeout`.
    pub(super) async fn connect(&self, settings: &UpstreamSettings) -> Result<Stream, UpstreamError> {
        let limit = settings.connect_timeout;
        timeout(limit, self.connect_unlimited(settings)).await.unwrap_or_else(|_elapsed| {
            let detail = format!("no connection within {limit:?}");
            Err(UpstreamError { kind: UpstreamErrorKind::ConnectTimeout, detail })
        })
    }

    async fn connect_unlimited(&self, settings: &UpstreamSettings) -> Result<Stream, UpstreamError> {
        let socket = open_socket(&settings.url.host, settings.url.port).await?;
        // Without it, small requests may wait for the acknowledgement of the last ones.
        if let Err(error) = socket.set_nodelay(true) {
            return Err(connect_error(&error));
        }
        let Some((connector, name)) = &self.tls else { return Ok(Stream::new(Io::Plain(socket))) };
        match connector.connect(name.clone(), socket).await {
            Ok(stream) => Ok(Stream::new(Io::Tls(Box::new(stream)))),
            Err(error) => Err(UpstreamError { kind: UpstreamErrorKind::Tls, detail: with_causes(&error) }),
        }
    }
}

/// The name is looked up each time: in a cluster addresses change.
async fn open_socket(host: &str, port: u16) -> Result<TcpStream, UpstreamError> {
    let dns = |why: String| UpstreamError { kind: UpstreamErrorKind::Dns, detail: format!("{host}: {why}") };
    let addresses = lookup_host((host, port)).await.map_err(|error| dns(error.to_string()))?;
    let mut failed = None;
    for address in addresses {
        match TcpStream::connect(address).await {
            Ok(socket) => return Ok(socket),
            Err(error) => failed = Some(connect_error(&error)),
        }
    }
    Err(failed.unwrap_or_else(|| dns("no addresses".to_owned())))
}

fn connect_error(error: &io::Error) -> UpstreamError {
    let kind = match error.kind() {
        io::ErrorKind::ConnectionRefused => UpstreamErrorKind::ConnectRefused,
        io::ErrorKind::TimedOut => UpstreamErrorKind::ConnectTimeout,
        _ => UpstreamErrorKind::ConnectFailed,
    };
    UpstreamError { kind, detail: with_causes(error) }
}

fn tls_client(settings: &UpstreamSettings) -> Result<TlsConnector, SetupError> {
    let roots = match &settings.tls_ca {
        Some(path) => roots_from_file(path)?,
        None => tls::system_roots().map_err(SetupError::NoSystemRoots)?,
    };
    let mut config = tls::client(roots, None)?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsConnector::from(Arc::new(config)))
}

fn server_name(settings: &UpstreamSettings) -> Result<ServerName<'static>, SetupError> {
    let name = settings.tls_server_name.as_ref().unwrap_or(&settings.url.host);
    ServerName::try_from(name.clone()).map_err(|_invalid| SetupError::ServerName(name.clone()))
}

fn roots_from_file(path: &PathBuf) -> Result<RootCertStore, SetupError> {
    let unreadable = |reason: String| SetupError::Ca { path: path.clone(), reason };
    let pem = std::fs::read(path).map_err(|error| unreadable(error.to_string()))?;
    tls::roots(&pem).map_err(unreadable)
}

impl fmt::Debug for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connector").field("tls", &self.tls.is_some()).finish()
    }
}

/// A connection's bytes, in the clear or not.
///
/// An upstream may answer an upload early, e.g. with 413, and close: writing then fails while the answer
/// waits to be read. So a broken write is passed over, and the reading side tells how it ended,
/// unless it has said so before: in a tunnel, writing may go on after that.
#[derive(Debug)]
pub(super) struct Stream {
    io: Io,
    /// Writing has failed.
    deaf: bool,
    /// Reading has come to an end in good order.
    ended: bool,
    /// Free when the socket is closed, not when somebody wants it closed.
    _permit: Option<OwnedSemaphorePermit>,
}

#[derive(Debug)]
enum Io {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl Stream {
    fn new(io: Io) -> Self {
        Self { io, deaf: false, ended: false, _permit: None }
    }

    /// Holds `permit` as long as the connection is open.
    pub(super) fn counted(self, permit: OwnedSemaphorePermit) -> Self {
        Self { _permit: Some(permit), ..self }
    }

    fn writer(&mut self) -> Pin<&mut (dyn AsyncWrite + Unpin)> {
        match &mut self.io {
            Io::Plain(socket) => Pin::new(socket),
            Io::Tls(stream) => Pin::new(stream.as_mut()),
        }
    }

    /// What a write came to; `unheard` if it broke.
    fn written<T>(&mut self, result: Poll<io::Result<T>>, unheard: T) -> Poll<io::Result<T>> {
        match result {
            Poll::Ready(Err(error))
                if !self.ended
                    && matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe) =>
            {
                self.deaf = true;
                Poll::Ready(Ok(unheard))
            }
            result => result,
        }
    }
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = into.filled().len();
        ready!(match &mut this.io {
            Io::Plain(socket) => Pin::new(socket).poll_read(cx, into),
            Io::Tls(stream) => Pin::new(stream).poll_read(cx, into),
        })?;
        if this.deaf && into.filled().len() == before {
            // No end in good order: the failed write has used up the error that reading would have had.
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        this.ended |= into.filled().len() == before && into.remaining() > 0;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let result = this.writer().poll_write(cx, bytes);
        this.written(result, bytes.len())
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let result = this.writer().poll_write_vectored(cx, bytes);
        this.written(result, bytes.iter().map(|slice| slice.len()).sum())
    }

    fn is_write_vectored(&self) -> bool {
        match &self.io {
            Io::Plain(socket) => socket.is_write_vectored(),
            Io::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let result = this.writer().poll_flush(cx);
        this.written(result, ())
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().writer().poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::{Io, Stream};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    #[tokio::test]
    async fn an_answer_outlives_the_upload_that_it_ended() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let ours = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (mut theirs, _) = listener.accept().await.unwrap();
        let mut stream = Stream::new(Io::Plain(ours));
        stream.write_all(b"never read").await.unwrap();
        theirs.readable().await.unwrap();
        theirs.write_all(b"no").await.unwrap();
        // With bytes unread, the kernel resets.
        drop(theirs);
        while !stream.deaf {
            stream.write_all(b"more").await.unwrap();
        }
        let mut answer = [0; 2];
        stream.read_exact(&mut answer).await.unwrap();
        assert_eq!(&answer, b"no");
        stream.read_u8().await.expect_err("cut off, not ended");
        assert_eq!(stream.read(&mut answer).await.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset);
    }
}
