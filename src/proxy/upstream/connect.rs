//! New connections: name, address, socket, TLS.

use arc_swap::ArcSwap;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream, lookup_host};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::ClientConfig;

use super::{UpstreamError, UpstreamErrorKind, with_causes};
use crate::proxy::{Scheme, UpstreamSettings, UpstreamUrl};
use crate::tls::ClientTls;

/// Of a name's addresses, the next one is tried when the last one has not answered for so long (RFC 8305, 5).
const HEAD_START: Duration = Duration::from_millis(250);
/// A machine that vanished is found after half as long again, also in the middle of a quiet response.
const KEEPALIVE: Duration = Duration::from_secs(60);

/// A URL whose host can't be spoken of.
#[derive(Debug, thiserror::Error)]
#[error("upstream.url: {0:?} cannot stand in a Host header")]
pub struct SetupError(pub(super) String);

/// Makes connections to the one upstream there is.
pub(super) struct Connector {
    /// What holds for new connections; a reload changes it.
    tls: Option<ArcSwap<Tls>>,
}

/// Which protocols a server may choose from, where it has a choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Offer {
    /// HTTP/2 and HTTP/1.1.
    Both,
    /// HTTP/1.1, in which an upgrade is possible.
    Http1,
}

struct Tls {
    client: ClientTls,
    both: TlsConnector,
    http1: TlsConnector,
}

impl Connector {
    pub(super) fn new(settings: &UpstreamSettings) -> Self {
        Self {
            tls: settings
                .tls
                .clone()
                .map(|client| ArcSwap::from_pointee(Tls::new(client))),
        }
    }

    /// Uses other certificates from now on. An upstream that is not spoken to by TLS stays so.
    pub(super) fn renew(&self, client: &ClientTls) {
        if let Some(tls) = &self.tls
            && tls.load().client != *client
        {
            tls.store(Arc::new(Tls::new(client.clone())));
            tracing::info!("new connections to the upstream use the new certificates");
        }
    }

    /// One try, all in, within `connect_timeout`.
    pub(super) async fn connect(
        &self,
        settings: &UpstreamSettings,
        offer: Offer,
    ) -> Result<Stream, UpstreamError> {
        let limit = settings.connect_timeout;
        let (host, port, scheme) = match &settings.url {
            UpstreamUrl::Net { host, port, scheme } => (host, *port, *scheme),
            UpstreamUrl::Unix(path) => {
                let socket = within(limit, async {
                    UnixStream::connect(path).await.map_err(connect_error)
                });
                return Ok(Stream::new(Io::Unix(socket.await?), false));
            }
        };
        within(limit, async {
            let socket = open_socket(host, port).await?;
            match &self.tls {
                None => Ok(Stream::new(Io::Plain(socket), scheme == Scheme::H2c)),
                Some(tls) => shake_hands(&tls.load_full(), host, socket, offer).await,
            }
        })
        .await
    }
}

async fn within<T>(
    limit: Duration,
    connecting: impl Future<Output = Result<T, UpstreamError>>,
) -> Result<T, UpstreamError> {
    timeout(limit, connecting).await.unwrap_or_else(|_elapsed| {
        let detail = format!("no connection within {limit:?}");
        Err(UpstreamError {
            kind: UpstreamErrorKind::ConnectTimeout,
            detail,
        })
    })
}

impl Tls {
    fn new(client: ClientTls) -> Self {
        let offering = |protocols: &[&[u8]]| {
            let mut config = ClientConfig::clone(client.config());
            config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
            TlsConnector::from(Arc::new(config))
        };
        let (both, http1) = (offering(&[b"h2", b"http/1.1"]), offering(&[b"http/1.1"]));
        Self {
            client,
            both,
            http1,
        }
    }
}

async fn shake_hands(
    tls: &Tls,
    host: &str,
    socket: TcpStream,
    offer: Offer,
) -> Result<Stream, UpstreamError> {
    let failed = |detail| UpstreamError {
        kind: UpstreamErrorKind::Tls,
        detail,
    };
    let name = tls.client.name_of(host);
    let name =
        name.map_err(|_invalid| failed(format!("{host:?} can't be the name in a certificate")))?;
    let connector = if offer == Offer::Both {
        &tls.both
    } else {
        &tls.http1
    };
    let stream = connector
        .connect(name, socket)
        .await
        .map_err(|error| failed(with_causes(&error)))?;
    let is_http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
    Ok(Stream::new(Io::Tls(Box::new(stream)), is_http2))
}

/// The name is looked up each time: in a cluster addresses change. Its addresses are tried in their order, the two
/// families by turns, each for a moment alone.
async fn open_socket(host: &str, port: u16) -> Result<TcpStream, UpstreamError> {
    let dns = |why: String| UpstreamError {
        kind: UpstreamErrorKind::Dns,
        detail: format!("{host}: {why}"),
    };
    let addresses = lookup_host((host, port))
        .await
        .map_err(|error| dns(error.to_string()))?;
    let mut addresses = by_turns(addresses.collect()).into_iter().peekable();
    let (mut tries, mut failed) = (FuturesUnordered::new(), None);
    loop {
        tries.extend(addresses.next().map(TcpStream::connect));
        tokio::select! {
            biased;
            tried = tries.next() => match tried {
                Some(Ok(socket)) => {
                    tune(&socket).map_err(connect_error)?;
                    return Ok(socket);
                }
                Some(Err(error)) => failed = Some(connect_error(error)),
                None => return Err(failed.unwrap_or_else(|| dns("no addresses".to_owned()))),
            },
            () = sleep(HEAD_START), if addresses.peek().is_some() => {}
        }
    }
}

/// The families by turns, beginning with the first one's (RFC 8305, 4): a family that leads nowhere must not use up all
/// the time.
fn by_turns(addresses: Vec<SocketAddr>) -> Vec<SocketAddr> {
    let leads = addresses.first().is_some_and(SocketAddr::is_ipv6);
    let (first, second): (Vec<_>, Vec<_>) = addresses
        .into_iter()
        .partition(|address| address.is_ipv6() == leads);
    let turns = first.len().max(second.len());
    (0..turns)
        .flat_map(|turn| first.get(turn).into_iter().chain(second.get(turn)))
        .copied()
        .collect()
}

fn tune(socket: &TcpStream) -> io::Result<()> {
    // Without it, small requests may wait for the acknowledgement of the last ones.
    socket.set_nodelay(true)?;
    let keepalive = socket2::TcpKeepalive::new()
        .with_time(KEEPALIVE)
        .with_interval(KEEPALIVE / 6)
        .with_retries(3);
    socket2::SockRef::from(socket).set_tcp_keepalive(&keepalive)
}

fn connect_error(error: io::Error) -> UpstreamError {
    let kind = match error.kind() {
        io::ErrorKind::ConnectionRefused => UpstreamErrorKind::ConnectRefused,
        io::ErrorKind::TimedOut => UpstreamErrorKind::ConnectTimeout,
        _ => UpstreamErrorKind::ConnectFailed,
    };
    UpstreamError {
        kind,
        detail: with_causes(&error),
    }
}

impl fmt::Debug for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connector")
            .field("tls", &self.tls.is_some())
            .finish()
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
    is_http2: bool,
    /// Something has been read since somebody asked.
    heard: Arc<AtomicBool>,
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
    Unix(UnixStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl Stream {
    fn new(io: Io, is_http2: bool) -> Self {
        Self {
            io,
            is_http2,
            heard: Arc::default(),
            deaf: false,
            ended: false,
            _permit: None,
        }
    }

    /// What was agreed upon.
    pub(super) fn is_http2(&self) -> bool {
        self.is_http2
    }

    /// Set whenever something has been read.
    pub(super) fn heard(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.heard)
    }

    /// Holds `permit` as long as the connection is open.
    pub(super) fn counted(self, permit: OwnedSemaphorePermit) -> Self {
        Self {
            _permit: Some(permit),
            ..self
        }
    }

    /// The address that was connected to.
    pub(super) fn peer(&self) -> Option<IpAddr> {
        let socket = match &self.io {
            Io::Plain(socket) => socket,
            Io::Tls(stream) => stream.get_ref().0,
            Io::Unix(_) => return None,
        };
        socket.peer_addr().ok().map(|address| address.ip())
    }

    fn writer(&mut self) -> Pin<&mut (dyn AsyncWrite + Unpin)> {
        match &mut self.io {
            Io::Plain(socket) => Pin::new(socket),
            Io::Unix(socket) => Pin::new(socket),
            Io::Tls(stream) => Pin::new(stream.as_mut()),
        }
    }

    /// What a write came to; `unheard` if it broke.
    fn written<T>(&mut self, result: Poll<io::Result<T>>, unheard: T) -> Poll<io::Result<T>> {
        match result {
            Poll::Ready(Err(error))
                if !self.ended
                    && matches!(
                        error.kind(),
                        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe
                    ) =>
            {
                self.deaf = true;
                Poll::Ready(Ok(unheard))
            }
            result => result,
        }
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = into.filled().len();
        ready!(match &mut this.io {
            Io::Plain(socket) => Pin::new(socket).poll_read(cx, into),
            Io::Unix(socket) => Pin::new(socket).poll_read(cx, into),
            Io::Tls(stream) => Pin::new(stream).poll_read(cx, into),
        })?;
        if this.deaf && into.filled().len() == before {
            // No end in good order: the failed write has used up the error that reading would have had.
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        this.heard.store(true, Ordering::Relaxed);
        this.ended |= into.filled().len() == before && into.remaining() > 0;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
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
            Io::Unix(socket) => socket.is_write_vectored(),
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
    use super::{Io, Stream, by_turns};
    use std::net::SocketAddr;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    #[test]
    fn no_family_of_addresses_waits_for_all_of_the_other() {
        let tried = |found: &[&str]| {
            let found: Vec<SocketAddr> = found
                .iter()
                .map(|address| address.parse().unwrap())
                .collect();
            by_turns(found)
                .iter()
                .map(SocketAddr::to_string)
                .collect::<Vec<_>>()
        };
        let (four, six) = (
            ["1.0.0.1:1", "1.0.0.2:1"],
            ["[::1]:1", "[::2]:1", "[::3]:1"],
        );
        assert_eq!(
            tried(&[six[0], six[1], six[2], four[0], four[1]]),
            [six[0], four[0], six[1], four[1], six[2]]
        );
        assert_eq!(
            tried(&[four[0], four[1], six[0]]),
            [four[0], six[0], four[1]]
        );
        assert_eq!(tried(&six), six);
        assert!(tried(&[]).is_empty());
    }

    #[tokio::test]
    async fn an_answer_outlives_the_upload_that_it_ended() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let ours = TcpStream::connect(listener.local_addr().unwrap())
            .await
            .unwrap();
        let (mut theirs, _) = listener.accept().await.unwrap();
        let mut stream = Stream::new(Io::Plain(ours), false);
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
        assert_eq!(
            stream.read(&mut answer).await.unwrap_err().kind(),
            std::io::ErrorKind::ConnectionReset
        );
    }
}
