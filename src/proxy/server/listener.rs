//! Listeners: their settings, their sockets, and the sockets that they accept.

use hyper::server::conn::http1;
use socket2::{Socket, TcpKeepalive};
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

use super::allocator_trim::AllocatorTrim;
use crate::listen::{BoundSocket, ListenAddress, SocketListener};
use crate::proxy::settings::{ListenSettings, ListenerKind};
use crate::tls::ReloadableServerTls;

#[cfg(target_os = "linux")]
use socket2::SockFilter;

/// Header limit for which hyper's parser keeps the headers on the stack. Any other header limit
/// costs an allocation.
const HYPER_MAX_STACK_HEADERS: usize = 100;
/// Lower bound for the size limit of an HTTP/1 connection's buffers, per direction.
const MIN_HTTP1_BUFFER_LIMIT_BYTES: usize = 64 * 1024;
/// Factor that spreads the ages of successive connections: 13 is coprime to the 21 percentages.
const AGE_SPREAD_FACTOR: u64 = 13;
/// Length of the kernel's backlog of completed connections.
pub(crate) const LISTEN_BACKLOG: i32 = 4096;
/// Idle time before TCP keep-alive probes start. A vanished client may hold a concurrency slot, so
/// it is detected after one and a half times this time, even during a quiet response.
const TCP_KEEPALIVE_TIME: Duration = Duration::from_secs(60);
/// Maximum bytes that the kernel keeps for a client beyond those in flight. Without it, the kernel
/// keeps up to 4 MiB for a client that reads slowly.
#[cfg(target_os = "linux")]
const MAX_UNSENT_BYTES: u32 = 64 * 1024;
/// File mode of a Unix socket: any local user may connect, as with a port. The permissions of the
/// socket's directory restrict access.
const UNIX_SOCKET_FILE_MODE: u32 = 0o666;
/// Time for handshakes that have begun, before a listener closes. The acceptor blocks meanwhile, at
/// shutdown only.
const HANDSHAKE_TIME: Duration = Duration::from_millis(5);
/// Address attributed to clients of a Unix socket.
const UNIX_PEER_ADDRESS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// Settings of a listener.
#[derive(Debug)]
pub(crate) struct ListenerConfig {
    pub(crate) kind: ListenerKind,
    pub(crate) settings: ListenSettings,
    /// A reload may replace these settings.
    pub(crate) tls: ReloadableServerTls,
}

/// One listener, on one worker.
#[derive(Debug)]
pub(crate) struct WorkerListener {
    pub(crate) config: Arc<ListenerConfig>,
    pub(super) http1: http1::Builder,
    pub(super) allocator_trim: Rc<AllocatorTrim>,
}

impl WorkerListener {
    pub(super) fn new(config: Arc<ListenerConfig>, allocator_trim: Rc<AllocatorTrim>) -> Self {
        let settings = &config.settings;
        let mut http1 = http1::Builder::new();
        let max_head = settings.max_header_bytes;
        http1.half_close(false).max_header_size(max_head);
        http1.max_buf_size(max_head.saturating_add(1).max(MIN_HTTP1_BUFFER_LIMIT_BYTES));
        if settings.max_headers != HYPER_MAX_STACK_HEADERS {
            http1.max_headers(settings.max_headers);
        }
        Self {
            config,
            http1,
            allocator_trim,
        }
    }

    /// Time until the connection with this id ends gracefully, from 90 % to 110 % of the setting.
    /// Successive ids are spread evenly, so that connections of one moment do not end together.
    pub(super) fn connection_age_limit(&self, id: u64) -> Option<Duration> {
        let percent = 90 + u32::try_from(id.wrapping_mul(AGE_SPREAD_FACTOR) % 21).unwrap_or(0);
        Some(self.config.settings.max_connection_age? / 100 * percent)
    }
}

/// Binds the address without listening. TCP connections accepted there have keep-alive probes.
pub(crate) fn bind_with_keepalive(address: &ListenAddress) -> io::Result<BoundSocket> {
    let bound = BoundSocket::bind(address, UNIX_SOCKET_FILE_MODE)?;
    if matches!(address, ListenAddress::Ip(_)) {
        // Accepted sockets inherit these options.
        let keepalive = TcpKeepalive::new()
            .with_time(TCP_KEEPALIVE_TIME)
            .with_interval(TCP_KEEPALIVE_TIME / 6)
            .with_retries(3);
        bound.socket.set_tcp_keepalive(&keepalive)?;
        #[cfg(target_os = "linux")]
        {
            let socket = &bound.socket;
            socket.set_tcp_user_timeout(Some(TCP_KEEPALIVE_TIME * 3 / 2))?;
            socket.set_tcp_notsent_lowat(MAX_UNSENT_BYTES)?;
        }
    }
    Ok(bound)
}

impl SocketListener {
    /// Accepts the next connection. Returns its socket, which belongs to no runtime yet, and the
    /// client's address.
    pub(crate) async fn accept(&self) -> io::Result<(Socket, SocketAddr)> {
        // The socket is removed from this runtime, because the worker's runtime will poll it.
        match self {
            Self::Tcp(listener) => {
                let (socket, addr) = listener.accept().await?;
                Ok((socket.into_std()?.into(), addr))
            }
            Self::Unix { listener, .. } => {
                let (socket, _nameless) = listener.accept().await?;
                Ok((socket.into_std()?.into(), UNIX_PEER_ADDRESS))
            }
        }
    }

    /// Accepts the connections in the kernel's backlog until `on_connection` returns `false`, then
    /// closes the listener.
    pub(crate) fn drain_backlog(self, mut on_connection: impl FnMut(Socket, SocketAddr) -> bool) {
        let listener = match self {
            Self::Tcp(listener) => {
                let listener = listener.into_std().map(Socket::from);
                listener.inspect(refuse_new_handshakes)
            }
            Self::Unix { listener, _file } => {
                // Without its file, no client reaches the socket after the last accept.
                drop(_file);
                listener.into_std().map(Socket::from)
            }
        };
        let Ok(listener) = listener else { return };
        let ends_at = Instant::now() + HANDSHAKE_TIME;
        loop {
            match listener.accept() {
                Ok((socket, addr)) => {
                    let is_nonblocking = socket.set_nonblocking(true).is_ok();
                    let addr = addr.as_socket().unwrap_or(UNIX_PEER_ADDRESS);
                    if !is_nonblocking || !on_connection(socket, addr) {
                        return;
                    }
                }
                Err(error)
                    if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < ends_at =>
                {
                    std::thread::sleep(HANDSHAKE_TIME / 5);
                }
                _ => return,
            }
        }
    }
}

/// Warns if the kernel keeps fewer new connections than the listeners ask for, which it does not
/// report.
pub(crate) fn warn_if_backlog_is_cut() {
    let limit = std::fs::read_to_string("/proc/sys/net/core/somaxconn").unwrap_or_default();
    if let Ok(somaxconn) = limit.trim().parse::<i32>()
        && somaxconn < LISTEN_BACKLOG
    {
        tracing::warn!(
            somaxconn,
            wanted = LISTEN_BACKLOG,
            "a burst of new connections is dropped earlier; raise net.core.somaxconn"
        );
    }
}

/// Makes the kernel drop the first packet of new connections (SYN). A connection that completes
/// between the last accept and the close of the listener would be reset with its request.
fn refuse_new_handshakes(listener: &Socket) {
    #[cfg(target_os = "linux")]
    {
        // Loads the byte of TCP flags; drops the packet if SYN is set.
        let filter = [
            SockFilter::new(0x30, 0, 0, 13),
            SockFilter::new(0x45, 0, 1, 0x02),
            SockFilter::new(0x06, 0, 0, 0),
            SockFilter::new(0x06, 0, 0, u32::MAX),
        ];
        if let Err(error) = listener.attach_filter(&filter) {
            tracing::debug!(%error, "failed to refuse new connections before the listener closes");
        }
    }
}
