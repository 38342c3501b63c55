//! The address that clients connect to, and the sockets that come from it.

use socket2::{Domain, Protocol, SockAddr, Socket, TcpKeepalive, Type};
use std::fmt;
use std::fs::{self, Permissions};
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::transport::Stream;

/// Connections that the kernel completes before we accept them.
const BACKLOG: i32 = 4096;
/// A client that vanished is found after half as long again, also in the middle of a quiet response: it may hold a slot.
const KEEPALIVE: Duration = Duration::from_secs(60);
/// Everybody on this machine may connect, as to a port: who should not is kept out by the folder's permissions.
const SOCKET_MODE: u32 = 0o666;
/// Whom a client of a Unix socket is taken for.
const LOCAL_PEER: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// Where clients connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListenAddress {
    Ip(SocketAddr),
    /// The path of a Unix socket.
    Unix(PathBuf),
}

/// As it is written in the configuration.
impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ip(address) => address.fmt(f),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// An address that is ours; nobody can connect until [`Listener::listen`].
#[derive(Debug)]
pub(super) struct Listener {
    socket: Socket,
    file: Option<SocketFile>,
}

/// A socket's file, removed with its owner.
#[derive(Debug)]
pub(super) struct SocketFile {
    path: PathBuf,
    /// Device and number: what somebody else has put there since is theirs.
    identity: (u64, u64),
}

/// An accepted connection that no runtime watches yet.
#[derive(Debug)]
pub(super) enum NewSocket {
    Tcp(std::net::TcpStream),
    Unix(UnixStream),
}

/// Takes connections.
#[derive(Debug)]
pub(super) enum Accepting {
    Tcp(tokio::net::TcpListener),
    Unix { listener: tokio::net::UnixListener, _file: Option<SocketFile> },
}

impl Listener {
    /// Takes the address.
    pub(super) fn bind(address: &ListenAddress) -> io::Result<Self> {
        match address {
            ListenAddress::Ip(address) => bind_ip(*address),
            ListenAddress::Unix(path) => bind_unix(path),
        }
    }

    /// Where it is: the port that the system chose if none was asked for.
    pub(super) fn address(&self) -> io::Result<ListenAddress> {
        if let Some(file) = &self.file {
            return Ok(ListenAddress::Unix(file.path.clone()));
        }
        let address = self.socket.local_addr()?.as_socket();
        address.map(ListenAddress::Ip).ok_or_else(|| io::Error::other("not an IP socket"))
    }

    /// Lets clients connect; they wait in the kernel until they are accepted.
    pub(super) fn listen(&self) -> io::Result<()> {
        self.socket.listen(BACKLOG)
    }

    /// For the runtime that this is called in.
    pub(super) fn into_accepting(self) -> io::Result<Accepting> {
        Ok(match self.file {
            None => Accepting::Tcp(tokio::net::TcpListener::from_std(self.socket.into())?),
            file => Accepting::Unix {
                listener: tokio::net::UnixListener::from_std(self.socket.into())?,
                _file: file,
            },
        })
    }
}

fn bind_ip(address: SocketAddr) -> io::Result<Listener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    if address.is_ipv6() {
        // `[::]` means everybody, whatever the system's default.
        socket.set_only_v6(false)?;
    }
    socket.set_nonblocking(true)?;
    // Accepted sockets inherit it.
    let keepalive = TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE / 6).with_retries(3);
    socket.set_tcp_keepalive(&keepalive)?;
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(Some(KEEPALIVE * 3 / 2))?;
    socket.bind(&SockAddr::from(address))?;
    Ok(Listener { socket, file: None })
}

fn bind_unix(path: &Path) -> io::Result<Listener> {
    clear_the_way(path)?;
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    socket.bind(&SockAddr::unix(path)?)?;
    let file = SocketFile { path: path.to_owned(), identity: identity(path)? };
    fs::set_permissions(path, Permissions::from_mode(SOCKET_MODE))?;
    Ok(Listener { socket, file: Some(file) })
}

/// Removes what a process left that had no time to do so itself.
fn clear_the_way(path: &Path) -> io::Result<()> {
    let kind = match fs::symlink_metadata(path) {
        Ok(found) => found.file_type(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    if !kind.is_socket() {
        let problem = "there is a file of this name that is no socket";
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, problem));
    }
    match UnixStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path),
        Err(error) => Err(error),
        Ok(_) => Err(io::Error::new(io::ErrorKind::AddrInUse, "another process answers on it")),
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|file| (file.dev(), file.ino()))
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let is_ours = identity(&self.path).is_ok_and(|found| found == self.identity);
        if is_ours && let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!(%error, path = %self.path.display(), "the socket cannot be removed");
        }
    }
}

impl Accepting {
    /// The next connection, and who has opened it.
    pub(super) async fn accept(&self) -> io::Result<(NewSocket, SocketAddr)> {
        // The worker's runtime will watch over it, not this one.
        match self {
            Self::Tcp(listener) => {
                let (socket, addr) = listener.accept().await?;
                Ok((NewSocket::Tcp(socket.into_std()?), addr))
            }
            Self::Unix { listener, .. } => {
                let (socket, _nameless) = listener.accept().await?;
                Ok((NewSocket::Unix(socket.into_std()?), LOCAL_PEER))
            }
        }
    }
}

impl Accepting {
    /// Hands over those that the kernel has completed by now, until `take` wants no more; then nobody can connect.
    pub(super) fn take_rest(self, mut take: impl FnMut(NewSocket, SocketAddr) -> bool) {
        match self {
            Self::Tcp(listener) => {
                let Ok(listener) = listener.into_std() else { return };
                while let Ok((socket, addr)) = listener.accept()
                    && socket.set_nonblocking(true).is_ok()
                    && take(NewSocket::Tcp(socket), addr)
                {}
            }
            Self::Unix { listener, _file } => {
                let Ok(listener) = listener.into_std() else { return };
                while let Ok((socket, _nameless)) = listener.accept()
                    && socket.set_nonblocking(true).is_ok()
                    && take(NewSocket::Unix(socket), LOCAL_PEER)
                {}
            }
        }
    }
}

impl NewSocket {
    /// For the runtime that this is called in.
    pub(super) fn adopt(self) -> io::Result<Stream> {
        Ok(match self {
            Self::Tcp(socket) => {
                let socket = tokio::net::TcpStream::from_std(socket)?;
                socket.set_nodelay(true)?;
                Stream::Tcp(socket)
            }
            Self::Unix(socket) => Stream::Unix(tokio::net::UnixStream::from_std(socket)?),
        })
    }
}
