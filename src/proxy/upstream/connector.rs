//! Establishes connections to the upstream: DNS lookup, TCP or Unix socket, TLS handshake.

use arc_swap::ArcSwap;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use rustix::io::Errno;
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf, Take};
use tokio::net::{TcpStream, UnixStream, lookup_host};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::ClientConfig;

use super::error::{UpstreamError, UpstreamErrorKind, format_error_chain};
use super::read_limit::ReadLimit;
use crate::proxy::{UpstreamScheme, UpstreamSettings, UpstreamUrl};
use crate::tls::{ClientTls, describe_tls_error};

/// Time after which the next address is tried while earlier attempts are pending (RFC 8305, 5).
const HAPPY_EYEBALLS_DELAY: Duration = Duration::from_millis(250);
/// Idle time before TCP keep-alive probes start. Three unanswered probes, ten seconds apart, close
/// the connection.
const TCP_KEEPALIVE_IDLE_TIME: Duration = Duration::from_secs(60);

/// Delay between attempts while the backlog of a Unix socket is full.
const UNIX_BACKLOG_RETRY_DELAY: Duration = Duration::from_millis(5);

/// The upstream URL has a host that is not valid in a `Host` header.
#[derive(Debug, thiserror::Error)]
#[error("upstream.url: {0:?} is not valid in a Host header")]
pub struct UpstreamUrlError(pub(super) String);

/// Opens connections to the upstream.
pub(super) struct UpstreamConnector {
    /// TLS connectors for new connections; a reload replaces them. `None` for a cleartext upstream.
    tls: Option<ArcSwap<UpstreamTlsConnectors>>,
}

/// The protocols offered to a TLS server by ALPN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AlpnOffer {
    /// Both HTTP/2 and HTTP/1.1 are offered, and the server chooses.
    Http2AndHttp1,
    /// Only HTTP/1.1 is offered, because the request needs an upgrade.
    Http1Only,
}

struct UpstreamTlsConnectors {
    client_tls: ClientTls,
    http2_connector: TlsConnector,
    http1_connector: TlsConnector,
}

impl UpstreamConnector {
    pub(super) fn new(settings: &UpstreamSettings) -> Self {
        Self {
            tls: settings
                .tls
                .clone()
                .map(|client| ArcSwap::from_pointee(UpstreamTlsConnectors::new(client))),
        }
    }

    /// Replaces the TLS settings of new connections. A cleartext upstream stays cleartext.
    pub(super) fn update_tls(&self, client: &ClientTls) {
        if let Some(tls) = &self.tls
            && tls.load().client_tls != *client
        {
            tls.store(Arc::new(UpstreamTlsConnectors::new(client.clone())));
            tracing::info!("upstream certificates reloaded; new connections use them");
        }
    }

    /// Tries once to connect. `connect_timeout` includes the DNS lookup and the TLS handshake.
    pub(super) async fn connect(
        &self,
        settings: &UpstreamSettings,
        offer: AlpnOffer,
    ) -> Result<UpstreamSocket, UpstreamError> {
        let limit = settings.connect_timeout;
        let (host, port, scheme) = match &settings.url {
            UpstreamUrl::Net { host, port, scheme } => (host, *port, *scheme),
            UpstreamUrl::Unix(path) => {
                let socket = with_connect_timeout(limit, connect_unix(path));
                return Ok(UpstreamSocket::new(
                    SocketTransport::Unix(socket.await?),
                    false,
                ));
            }
        };
        with_connect_timeout(limit, async {
            let socket = resolve_and_connect_tcp(host, port).await?;
            match &self.tls {
                None => Ok(UpstreamSocket::new(
                    SocketTransport::Plain(socket),
                    scheme == UpstreamScheme::H2c,
                )),
                Some(tls) => perform_tls_handshake(&tls.load_full(), host, socket, offer).await,
            }
        })
        .await
    }
}

async fn with_connect_timeout<T>(
    limit: Duration,
    connecting: impl Future<Output = Result<T, UpstreamError>>,
) -> Result<T, UpstreamError> {
    timeout(limit, connecting).await.unwrap_or_else(|_elapsed| {
        let detail = format!("no connection within {limit:?}");
        Err(UpstreamErrorKind::ConnectTimeout.with_detail(detail))
    })
}

impl UpstreamTlsConnectors {
    fn new(client: ClientTls) -> Self {
        let connector_with_alpn = |protocols: &[&[u8]]| {
            let mut config = ClientConfig::clone(client.config());
            config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
            TlsConnector::from(Arc::new(config))
        };
        let (http2_connector, http1_connector) = (
            connector_with_alpn(&[b"h2", b"http/1.1"]),
            connector_with_alpn(&[b"http/1.1"]),
        );
        Self {
            client_tls: client,
            http2_connector,
            http1_connector,
        }
    }
}

async fn perform_tls_handshake(
    tls: &UpstreamTlsConnectors,
    host: &str,
    socket: TcpStream,
    offer: AlpnOffer,
) -> Result<UpstreamSocket, UpstreamError> {
    let failed = |detail: String| UpstreamErrorKind::Tls.with_detail(detail);
    let name = tls.client_tls.server_name_for(host);
    let name =
        name.map_err(|_invalid| failed(format!("{host:?} is not a valid TLS server name")))?;
    let connector = if offer == AlpnOffer::Http2AndHttp1 {
        &tls.http2_connector
    } else {
        &tls.http1_connector
    };
    let stream = connector
        .connect(name, socket)
        .await
        .map_err(|error| failed(describe_tls_error(&error)))?;
    let is_http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
    Ok(UpstreamSocket::new(
        SocketTransport::Tls(Box::new(stream)),
        is_http2,
    ))
}

/// Connects to a Unix socket. Unlike TCP, the kernel refuses a connection at once while the
/// upstream's backlog is full.
async fn connect_unix(path: &Path) -> Result<UnixStream, UpstreamError> {
    loop {
        match UnixStream::connect(path).await {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                sleep(UNIX_BACKLOG_RETRY_DELAY).await;
            }
            connected => return connected.map_err(map_connect_error),
        }
    }
}

/// Resolves the upstream's host name and opens a TCP connection.
///
/// DNS is queried for each new connection, because addresses change in a cluster. The addresses are
/// tried in turn, alternating IPv4 and IPv6 (RFC 8305).
async fn resolve_and_connect_tcp(host: &str, port: u16) -> Result<TcpStream, UpstreamError> {
    let dns = |why: String| UpstreamErrorKind::Dns.with_detail(format!("{host}: {why}"));
    let addresses = lookup_host((host, port))
        .await
        .map_err(|error| dns(error.to_string()))?;
    let mut addresses = interleave_address_families(addresses.collect())
        .into_iter()
        .peekable();
    let (mut tries, mut failed) = (FuturesUnordered::new(), None);
    loop {
        tries.extend(addresses.next().map(TcpStream::connect));
        tokio::select! {
            biased;
            tried = tries.next() => match tried {
                Some(Ok(socket)) => {
                    set_socket_options(&socket).map_err(map_connect_error)?;
                    return Ok(socket);
                }
                Some(Err(error)) => failed = Some(map_connect_error(error)),
                None => return Err(failed.unwrap_or_else(|| dns("no addresses".to_owned()))),
            },
            () = sleep(HAPPY_EYEBALLS_DELAY), if addresses.peek().is_some() => {}
        }
    }
}

/// Orders addresses to alternate IPv4 and IPv6, starting with the first one's family (RFC 8305, 4).
/// Otherwise one unreachable family could use up the connect timeout.
fn interleave_address_families(addresses: Vec<SocketAddr>) -> Vec<SocketAddr> {
    let ipv6_first = addresses.first().is_some_and(SocketAddr::is_ipv6);
    let (first, second): (Vec<_>, Vec<_>) = addresses
        .into_iter()
        .partition(|address| address.is_ipv6() == ipv6_first);
    let turns = first.len().max(second.len());
    (0..turns)
        .flat_map(|turn| first.get(turn).into_iter().chain(second.get(turn)))
        .copied()
        .collect()
}

fn set_socket_options(socket: &TcpStream) -> io::Result<()> {
    // Disables Nagle's algorithm, which delays small requests until earlier data is acknowledged.
    socket.set_nodelay(true)?;
    let keepalive = socket2::TcpKeepalive::new()
        .with_time(TCP_KEEPALIVE_IDLE_TIME)
        .with_interval(TCP_KEEPALIVE_IDLE_TIME / 6)
        .with_retries(3);
    socket2::SockRef::from(socket).set_tcp_keepalive(&keepalive)
}

fn map_connect_error(error: io::Error) -> UpstreamError {
    let (kind, remedy) = match Errno::from_io_error(&error) {
        Some(Errno::CONNREFUSED) => (UpstreamErrorKind::ConnectRefused, ""),
        Some(Errno::TIMEDOUT) => (UpstreamErrorKind::ConnectTimeout, ""),
        Some(Errno::ADDRNOTAVAIL) => (
            UpstreamErrorKind::LocalResources,
            "; no local port is left (widen net.ipv4.ip_local_port_range, or lower upstream.max_connections), or this machine has no address of this family",
        ),
        Some(Errno::MFILE | Errno::NFILE) => (
            UpstreamErrorKind::LocalResources,
            "; raise the hard limit (ulimit -Hn)",
        ),
        _ => (UpstreamErrorKind::ConnectFailed, ""),
    };
    kind.with_detail(format_error_chain(&error) + remedy)
}

impl fmt::Debug for UpstreamConnector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UpstreamConnector")
            .field("tls", &self.tls.is_some())
            .finish()
    }
}

/// A connected socket, with or without TLS.
///
/// An upstream may respond to an upload early, e.g. with 413, and close. Writing then fails
/// although the response can still be read. So a write to a broken connection is reported as
/// successful, and reading returns the error after all received data. If reading has already ended
/// cleanly, the write returns its error directly; only a tunnel writes then.
#[derive(Debug)]
pub(super) struct UpstreamSocket {
    /// Limited to `read_limit` for each read.
    transport: Take<SocketTransport>,
    read_limit: ReadLimit,
    is_http2: bool,
    /// Every read sets this flag; the PING monitor resets it.
    read_activity: Arc<AtomicBool>,
    /// Whether a write failed and was reported as successful.
    write_failed: bool,
    /// Whether reading has reached a clean end.
    read_ended: bool,
    /// The `max_connections` permit, released when the socket is actually closed.
    _permit: Option<OwnedSemaphorePermit>,
}

#[derive(Debug)]
enum SocketTransport {
    Plain(TcpStream),
    Unix(UnixStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl UpstreamSocket {
    fn new(io: SocketTransport, is_http2: bool) -> Self {
        Self {
            transport: io.take(0),
            read_limit: ReadLimit::default(),
            is_http2,
            read_activity: Arc::default(),
            write_failed: false,
            read_ended: false,
            _permit: None,
        }
    }

    /// Whether HTTP/2 was negotiated.
    pub(super) fn is_http2(&self) -> bool {
        self.is_http2
    }

    /// Returns the flag that every read sets.
    pub(super) fn read_activity_flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.read_activity)
    }

    /// Limit of each read, which the responses of the connection adjust.
    pub(super) fn read_limit(&self) -> ReadLimit {
        self.read_limit.clone()
    }

    /// Keeps `permit` until the socket is closed.
    pub(super) fn with_permit(self, permit: OwnedSemaphorePermit) -> Self {
        Self {
            _permit: Some(permit),
            ..self
        }
    }

    /// The IP address of the peer; `None` for a Unix socket.
    pub(super) fn peer_ip(&self) -> Option<IpAddr> {
        let socket = match self.transport.get_ref() {
            SocketTransport::Plain(socket) => socket,
            SocketTransport::Tls(stream) => stream.get_ref().0,
            SocketTransport::Unix(_) => return None,
        };
        socket.peer_addr().ok().map(|address| address.ip())
    }

    fn writer(&mut self) -> Pin<&mut (dyn AsyncWrite + Unpin)> {
        match self.transport.get_mut() {
            SocketTransport::Plain(socket) => Pin::new(socket),
            SocketTransport::Unix(socket) => Pin::new(socket),
            SocketTransport::Tls(stream) => Pin::new(stream.as_mut()),
        }
    }

    /// Replaces a broken-connection error of a write with `value_if_broken`.
    fn mask_write_failure<T>(
        &mut self,
        result: Poll<io::Result<T>>,
        value_if_broken: T,
    ) -> Poll<io::Result<T>> {
        match result {
            Poll::Ready(Err(error))
                if !self.read_ended
                    && matches!(
                        error.kind(),
                        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe
                    ) =>
            {
                self.write_failed = true;
                Poll::Ready(Ok(value_if_broken))
            }
            result => result,
        }
    }
}

impl AsyncRead for SocketTransport {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(socket) => Pin::new(socket).poll_read(cx, into),
            Self::Unix(socket) => Pin::new(socket).poll_read(cx, into),
            Self::Tls(stream) => Pin::new(stream).poll_read(cx, into),
        }
    }
}

impl AsyncRead for UpstreamSocket {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = into.filled().len();
        this.transport.set_limit(this.read_limit.bytes());
        ready!(Pin::new(&mut this.transport).poll_read(cx, into))?;
        if this.write_failed && into.filled().len() == before {
            // Returns an error instead of a clean end, because the failed write consumed the error
            // that this read would have returned.
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        this.read_activity.store(true, Ordering::Relaxed);
        this.read_ended |= into.filled().len() == before && into.remaining() > 0;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for UpstreamSocket {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let result = this.writer().poll_write(cx, bytes);
        this.mask_write_failure(result, bytes.len())
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let result = this.writer().poll_write_vectored(cx, bytes);
        this.mask_write_failure(result, bytes.iter().map(|slice| slice.len()).sum())
    }

    fn is_write_vectored(&self) -> bool {
        match self.transport.get_ref() {
            SocketTransport::Plain(socket) => socket.is_write_vectored(),
            SocketTransport::Unix(socket) => socket.is_write_vectored(),
            SocketTransport::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let result = this.writer().poll_flush(cx);
        this.mask_write_failure(result, ())
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().writer().poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::{SocketTransport, UpstreamSocket, interleave_address_families};
    use std::net::SocketAddr;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    #[test]
    fn interleaves_ipv4_and_ipv6_addresses() {
        let interleave = |found: &[&str]| {
            let found: Vec<SocketAddr> = found
                .iter()
                .map(|address| address.parse().unwrap())
                .collect();
            interleave_address_families(found)
                .iter()
                .map(SocketAddr::to_string)
                .collect::<Vec<_>>()
        };
        let (four, six) = (
            ["1.0.0.1:1", "1.0.0.2:1"],
            ["[::1]:1", "[::2]:1", "[::3]:1"],
        );
        assert_eq!(
            interleave(&[six[0], six[1], six[2], four[0], four[1]]),
            [six[0], four[0], six[1], four[1], six[2]]
        );
        assert_eq!(
            interleave(&[four[0], four[1], six[0]]),
            [four[0], six[0], four[1]]
        );
        assert_eq!(interleave(&six), six);
        assert!(interleave(&[]).is_empty());
    }

    #[tokio::test]
    async fn reads_the_response_after_a_write_failed() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let ours = TcpStream::connect(listener.local_addr().unwrap())
            .await
            .unwrap();
        let (mut theirs, _) = listener.accept().await.unwrap();
        let mut stream = UpstreamSocket::new(SocketTransport::Plain(ours), false);
        stream.write_all(b"never read").await.unwrap();
        theirs.readable().await.unwrap();
        theirs.write_all(b"no").await.unwrap();
        // Closing a socket with unread bytes makes the kernel send a reset.
        drop(theirs);
        while !stream.write_failed {
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
