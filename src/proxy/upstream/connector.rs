//! Establishes connections to the upstream: DNS lookup, TCP or Unix socket, TLS handshake.

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use rustix::io::Errno;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf, Take};
use tokio::net::{TcpStream, UnixStream, lookup_host};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{sleep, timeout};
use tokio_rustls::client::TlsStream;
use tokio_util::either::Either;

use super::UpstreamSharedState;
use crate::proxy::connection_io::{move_buffered_bytes, poll_write_all};
use crate::proxy::http2_frames::frame_splitter::{EmptyFrameFilter, return_window};
use crate::proxy::upstream_error::{UpstreamError, UpstreamErrorKind};
use crate::proxy::{UpstreamScheme, UpstreamUrl};
use crate::text::format_error_chain;
use crate::tls::{ClientTls, describe_tls_error};

/// Time after which the next address is tried while earlier attempts are pending (RFC 8305, 5).
const HAPPY_EYEBALLS_DELAY: Duration = Duration::from_millis(250);
/// Idle time before TCP keep-alive probes start. Three unanswered probes, ten seconds apart, close
/// the connection.
const TCP_KEEPALIVE_IDLE_TIME: Duration = Duration::from_secs(60);

/// Delay between attempts while the backlog of a Unix socket is full.
const UNIX_BACKLOG_RETRY_DELAY: Duration = Duration::from_millis(5);

/// The protocols offered to a TLS server by ALPN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AlpnOffer {
    /// Both HTTP/2 and HTTP/1.1 are offered, and the server chooses.
    Http2AndHttp1,
    /// Only HTTP/1.1 is offered, because the request needs an upgrade.
    Http1Only,
}

impl UpstreamSharedState {
    /// Applies reloaded TLS settings: new connections use their certificates. A cleartext upstream
    /// stays cleartext.
    pub fn update_tls(&self, client: Option<&ClientTls>) {
        if let (Some(tls), Some(client)) = (&self.tls, client)
            && **tls.load() != *client
        {
            tls.store(Arc::new(client.clone()));
            tracing::info!("upstream certificates reloaded; new connections use them");
        }
    }

    /// Tries once to connect. `connect_timeout` includes the DNS lookup and the TLS handshake.
    pub(super) async fn connect(&self, offer: AlpnOffer) -> Result<UpstreamSocket, UpstreamError> {
        let connecting = async {
            let (host, port, scheme) = match &self.settings.url {
                UpstreamUrl::Net { host, port, scheme } => (host, *port, *scheme),
                UpstreamUrl::Unix(path) => {
                    let socket = Either::Left(Either::Right(connect_unix(path).await?));
                    return Ok(UpstreamSocket::new(socket, false));
                }
            };
            let socket = resolve_and_connect_tcp(host, port).await?;
            match &self.tls {
                None => {
                    let (is_http2, socket) = (scheme == UpstreamScheme::H2c, Either::Left(socket));
                    Ok(UpstreamSocket::new(Either::Left(socket), is_http2))
                }
                Some(tls) => perform_tls_handshake(&tls.load_full(), host, socket, offer).await,
            }
        };
        let limit = self.settings.connect_timeout;
        timeout(limit, connecting).await.unwrap_or_else(|_elapsed| {
            let detail = format!("no connection within {limit:?}");
            Err(UpstreamErrorKind::ConnectTimeout.with_detail(detail))
        })
    }
}

async fn perform_tls_handshake(
    tls: &ClientTls,
    host: &str,
    socket: TcpStream,
    offer: AlpnOffer,
) -> Result<UpstreamSocket, UpstreamError> {
    let failed = |detail: String| UpstreamErrorKind::Tls.with_detail(detail);
    let invalid = |_invalid| failed(format!("{host:?} is not a valid TLS server name"));
    let name = tls.server_name_for(host).map_err(invalid)?;
    let protocols: &[&str] = match offer {
        AlpnOffer::Http2AndHttp1 => &["h2", "http/1.1"],
        AlpnOffer::Http1Only => &["http/1.1"],
    };
    let stream = tls.connector(protocols).connect(name, socket).await;
    let stream = stream.map_err(|error| failed(describe_tls_error(&error)))?;
    let is_http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
    let transport = Either::Right(Box::new(stream));
    Ok(UpstreamSocket::new(transport, is_http2))
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
    let addresses = lookup_host((host, port)).await;
    let addresses = addresses.map_err(|error| dns(error.to_string()))?;
    let addresses = interleave_address_families(addresses.collect());
    let mut addresses = addresses.into_iter().peekable();
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

/// A connected socket, with or without TLS.
///
/// An upstream may respond to an upload early, e.g. with 413, and close. Writing then fails
/// although the response can still be read. So a write to a broken connection is reported as
/// successful, and reading returns the error after all received data. If reading has already ended
/// cleanly, the write returns its error directly; only a tunnel writes then.
#[derive(Debug)]
pub(super) struct UpstreamSocket {
    /// Limited to [`MAX_READ_BYTES`] for each read.
    transport: Take<SocketTransport>,
    /// Whether HTTP/2 was negotiated.
    pub(super) is_http2: bool,
    http2: Option<Box<Http2Input>>,
    /// Every read sets this flag; the PING monitor resets it.
    pub(super) read_activity: Arc<AtomicBool>,
    /// Whether a write failed and was reported as successful.
    write_failed: bool,
    /// Whether reading has reached a clean end.
    read_ended: bool,
    /// The `max_connections` permit, released when the socket is actually closed.
    _permit: Option<OwnedSemaphorePermit>,
}

type SocketTransport = Either<Either<TcpStream, UnixStream>, Box<TlsStream<TcpStream>>>;

/// What a socket does with the bytes for h2.
#[derive(Debug)]
struct Http2Input {
    allowance: ReadAllowance,
    filter: EmptyFrameFilter,
    /// Frames that return window, to be written before the next one of h2.
    window_updates: Vec<u8>,
    /// Filtered bytes that the next reads return.
    read_ahead: Bytes,
}

impl UpstreamSocket {
    fn new(io: SocketTransport, is_http2: bool) -> Self {
        Self {
            transport: io.take(0),
            is_http2,
            http2: None,
            read_activity: Arc::default(),
            write_failed: false,
            read_ended: false,
            _permit: None,
        }
    }

    /// Prepares the reads for h2: limits them to `allowance`, and filters empty frames.
    pub(super) fn filter_http2(&mut self, allowance: ReadAllowance) {
        self.http2 = Some(Box::new(Http2Input {
            allowance,
            filter: EmptyFrameFilter::default(),
            window_updates: Vec::new(),
            read_ahead: Bytes::new(),
        }));
    }

    fn poll_write_window_updates(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Some(http2) = &mut self.http2 else {
            return Poll::Ready(Ok(()));
        };
        let written = poll_write_all(self.transport.get_mut(), cx, &mut http2.window_updates);
        self.mask_write_failure(written, || ())
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
            Either::Left(Either::Left(socket)) => socket,
            Either::Left(Either::Right(_)) => return None,
            Either::Right(stream) => stream.get_ref().0,
        };
        socket.peer_addr().ok().map(|address| address.ip())
    }

    /// Replaces a broken-connection error of a write with `value_if_broken`.
    fn mask_write_failure<T>(
        &mut self,
        result: Poll<io::Result<T>>,
        value_if_broken: impl FnOnce() -> T,
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
                Poll::Ready(Ok(value_if_broken()))
            }
            result => result,
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
        loop {
            if let Some(http2) = &mut this.http2 {
                if !http2.read_ahead.is_empty() {
                    move_buffered_bytes(&mut http2.read_ahead, into);
                    return Poll::Ready(Ok(()));
                }
                if http2.allowance.is_spent() {
                    // The driver renews the allowance before it polls again.
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
            }
            let before = into.filled().len();
            this.transport.set_limit(MAX_READ_BYTES);
            ready!(Pin::new(&mut this.transport).poll_read(cx, into))?;
            let received = into.filled().get(before..).unwrap_or_default();
            if this.write_failed && received.is_empty() {
                // Returns an error instead of a clean end, because the failed write consumed the
                // error that this read would have returned.
                return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
            }
            this.read_activity.store(true, Ordering::Relaxed);
            this.read_ended |= received.is_empty() && into.remaining() > 0;
            let Some(http2) = &mut this.http2 else {
                return Poll::Ready(Ok(()));
            };
            http2.allowance.spend(received.len());
            let mut filtered = Vec::new();
            if received.is_empty() || !http2.filter.filter(received, &mut filtered) {
                return Poll::Ready(Ok(()));
            }
            into.set_filled(before);
            http2.read_ahead = filtered.into();
        }
    }
}

impl AsyncWrite for UpstreamSocket {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        ready!(this.poll_write_window_updates(cx))?;
        let result = Pin::new(this.transport.get_mut()).poll_write(cx, bytes);
        this.mask_write_failure(result, || bytes.len())
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        ready!(this.poll_write_window_updates(cx))?;
        let result = Pin::new(this.transport.get_mut()).poll_write_vectored(cx, bytes);
        this.mask_write_failure(result, || bytes.iter().map(|slice| slice.len()).sum())
    }

    fn is_write_vectored(&self) -> bool {
        self.transport.get_ref().is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        // h2 flushes if and only if it has written all its output. Twice, because what was added up
        // while earlier output waited follows it.
        for _ in 0..2 {
            let Some(http2) = &mut this.http2 else {
                break;
            };
            return_window(&mut http2.filter.hidden_padding, &mut http2.window_updates);
            ready!(this.poll_write_window_updates(cx))?;
        }
        let result = Pin::new(this.transport.get_mut()).poll_flush(cx);
        this.mask_write_failure(result, || ())
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(self.get_mut().transport.get_mut()).poll_shutdown(cx)
    }
}

/// Maximum bytes of one read. Larger reads take no less CPU time, and hyper doubles its buffer after
/// a read of 16 KiB.
const MAX_READ_BYTES: u64 = 16 * 1024 - 1;

/// Bytes that a connection reads before its unread frames are collected. Bounds the unread
/// frames that h2 holds.
pub(super) const READ_ALLOWANCE_BYTES: usize = 64 * 1024;

/// Bytes that a connection has read since its unread frames were collected. One task uses it; it is
/// atomic because hyper requires sockets that are `Send`.
#[derive(Clone, Debug, Default)]
pub(crate) struct ReadAllowance(Arc<AtomicUsize>);

impl ReadAllowance {
    /// Records read bytes.
    pub(crate) fn spend(&self, bytes: usize) {
        let spent = self.0.load(Ordering::Relaxed).saturating_add(bytes);
        self.0.store(spent, Ordering::Relaxed);
    }

    pub(crate) fn is_spent(&self) -> bool {
        self.0.load(Ordering::Relaxed) >= READ_ALLOWANCE_BYTES
    }

    pub(crate) fn renew(&self) {
        self.0.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::{UpstreamSocket, interleave_address_families};
    use std::net::SocketAddr;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};
    use tokio_util::either::Either;

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
        let mut stream = UpstreamSocket::new(Either::Left(Either::Left(ours)), false);
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
