//! The address that clients connect to, and the sockets that come from it.

use socket2::TcpKeepalive;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use super::transport::ClientStream;
use crate::listen::{BoundSocket, ListenAddress, SocketListener};

/// Connections that the kernel completes before we accept them.
pub(in crate::proxy) const BACKLOG: i32 = 4096;
/// A client that vanished is found after half as long again, also in the middle of a quiet response: it may hold a slot.
const KEEPALIVE_TIME: Duration = Duration::from_secs(60);
/// Everybody on this machine may connect, as to a port: who should not is kept out by the folder's permissions.
const SOCKET_MODE: u32 = 0o666;
/// Whom a client of a Unix socket is taken for.
const UNIX_PEER_ADDRESS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// An accepted connection that no runtime watches yet.
#[derive(Debug)]
pub(in crate::proxy) enum AcceptedSocket {
    Tcp(std::net::TcpStream),
    Unix(UnixStream),
}

/// Takes the address; nobody can connect yet.
pub(in crate::proxy) fn bind(address: &ListenAddress) -> io::Result<BoundSocket> {
    let bound = BoundSocket::bind(address, SOCKET_MODE)?;
    if matches!(address, ListenAddress::Ip(_)) {
        // Accepted sockets inherit it.
        let keepalive = TcpKeepalive::new()
            .with_time(KEEPALIVE_TIME)
            .with_interval(KEEPALIVE_TIME / 6)
            .with_retries(3);
        bound.socket().set_tcp_keepalive(&keepalive)?;
        #[cfg(target_os = "linux")]
        bound
            .socket()
            .set_tcp_user_timeout(Some(KEEPALIVE_TIME * 3 / 2))?;
    }
    Ok(bound)
}

impl SocketListener {
    /// The next connection, and who has opened it.
    pub(in crate::proxy) async fn accept(&self) -> io::Result<(AcceptedSocket, SocketAddr)> {
        // The worker's runtime will watch over it, not this one.
        match self {
            Self::Tcp(listener) => {
                let (socket, addr) = listener.accept().await?;
                Ok((AcceptedSocket::Tcp(socket.into_std()?), addr))
            }
            Self::Unix { listener, .. } => {
                let (socket, _nameless) = listener.accept().await?;
                Ok((AcceptedSocket::Unix(socket.into_std()?), UNIX_PEER_ADDRESS))
            }
        }
    }

    /// Hands over those that the kernel has completed by now, until `take` wants no more; then nobody can connect.
    pub(in crate::proxy) fn drain_backlog(
        self,
        mut on_connection: impl FnMut(AcceptedSocket, SocketAddr) -> bool,
    ) {
        match self {
            Self::Tcp(listener) => {
                let Ok(listener) = listener.into_std() else {
                    return;
                };
                while let Ok((socket, addr)) = listener.accept()
                    && socket.set_nonblocking(true).is_ok()
                    && on_connection(AcceptedSocket::Tcp(socket), addr)
                {}
            }
            Self::Unix { listener, _file } => {
                let Ok(listener) = listener.into_std() else {
                    return;
                };
                while let Ok((socket, _nameless)) = listener.accept()
                    && socket.set_nonblocking(true).is_ok()
                    && on_connection(AcceptedSocket::Unix(socket), UNIX_PEER_ADDRESS)
                {
                }
            }
        }
    }
}

impl AcceptedSocket {
    /// For the runtime that this is called in.
    pub(in crate::proxy) fn into_client_stream(self) -> io::Result<ClientStream> {
        Ok(match self {
            Self::Tcp(socket) => {
                let socket = tokio::net::TcpStream::from_std(socket)?;
                socket.set_nodelay(true)?;
                ClientStream::Tcp(socket)
            }
            Self::Unix(socket) => ClientStream::Unix(tokio::net::UnixStream::from_std(socket)?),
        })
    }
}
