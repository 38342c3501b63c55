//! Listening sockets: an IP address and port, or a Unix socket and its file.

use rustix::io::Errno;
use socket2::{Domain, Protocol, SockAddr, Socket, Type};
use std::fmt;
use std::fs::{self, Permissions};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use tokio::net::{TcpListener, UnixListener};

/// Address that clients connect to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListenAddress {
    Ip(SocketAddr),
    /// The path of a Unix socket.
    Unix(PathBuf),
}

/// Formats the address as in the configuration.
impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ip(address) => address.fmt(f),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl ListenAddress {
    /// Whether only this machine can connect.
    pub fn is_local(&self) -> bool {
        match self {
            Self::Ip(address) => address.ip().is_loopback(),
            Self::Unix(_) => true,
        }
    }

    /// Address with the same meaning on a machine without this address family: `0.0.0.0` for
    /// `[::]`, and the other loopback address for `127.0.0.1` and `[::1]`. None for `0.0.0.0`,
    /// which excludes IPv6 clients.
    pub(crate) fn substitute(&self) -> Option<SocketAddr> {
        let Self::Ip(address) = self else { return None };
        let ip: IpAddr = match address.ip() {
            IpAddr::V6(Ipv6Addr::UNSPECIFIED) => Ipv4Addr::UNSPECIFIED.into(),
            IpAddr::V6(Ipv6Addr::LOCALHOST) => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V4(Ipv4Addr::LOCALHOST) => Ipv6Addr::LOCALHOST.into(),
            _ => return None,
        };
        Some(SocketAddr::new(ip, address.port()))
    }
}

/// Whether the machine cannot bind or connect because it has no addresses of this family.
pub(crate) fn is_family_missing(error: &io::Error) -> bool {
    let missing = [Errno::AFNOSUPPORT, Errno::ADDRNOTAVAIL, Errno::NETUNREACH];
    Errno::from_io_error(error).is_some_and(|errno| missing.contains(&errno))
}

/// Bound non-blocking socket. Clients cannot connect before [`Socket::listen`].
#[derive(Debug)]
pub(crate) struct BoundSocket {
    pub(crate) socket: Socket,
    file: Option<SocketFileGuard>,
}

/// File of a Unix socket, removed on drop.
#[derive(Debug)]
pub(crate) struct SocketFileGuard {
    path: PathBuf,
    /// Device and inode of the file. A file that another process has since created at this path is
    /// not removed.
    file_identity: (u64, u64),
}

/// Listening socket, registered with the runtime that created it.
#[derive(Debug)]
pub(crate) enum SocketListener {
    Tcp(TcpListener),
    Unix {
        listener: UnixListener,
        _file: Option<SocketFileGuard>,
    },
}

impl BoundSocket {
    /// Binds the address, or its [`substitute`](ListenAddress::substitute) on a machine without
    /// its address family. `mode` is the mode of a Unix socket's file: write permission allows
    /// connecting.
    pub(crate) fn bind(address: &ListenAddress, mode: u32) -> io::Result<Self> {
        match address {
            ListenAddress::Ip(ip) => bind_tcp_socket(*ip).or_else(|error| {
                let substitute = address.substitute().filter(|_| is_family_missing(&error));
                bind_tcp_socket(substitute.ok_or(error)?)
            }),
            ListenAddress::Unix(path) => bind_unix_socket(path, mode),
        }
    }

    /// Bound address, with the port that the system chose for port 0.
    pub(crate) fn address(&self) -> io::Result<ListenAddress> {
        if let Some(file) = &self.file {
            return Ok(ListenAddress::Unix(file.path.clone()));
        }
        let address = self.socket.local_addr()?.as_socket();
        address
            .map(ListenAddress::Ip)
            .ok_or_else(|| io::Error::other("not an IP socket"))
    }

    /// Registers the socket with the current runtime.
    pub(crate) fn into_listener(self) -> io::Result<SocketListener> {
        Ok(match self.file {
            None => SocketListener::Tcp(TcpListener::from_std(self.socket.into())?),
            file => SocketListener::Unix {
                listener: UnixListener::from_std(self.socket.into())?,
                _file: file,
            },
        })
    }
}

fn bind_tcp_socket(address: SocketAddr) -> io::Result<BoundSocket> {
    let socket = Socket::new(
        Domain::for_address(address),
        Type::STREAM,
        Some(Protocol::TCP),
    )?;
    socket.set_reuse_address(true)?;
    if address.is_ipv6() {
        // `[::]` accepts IPv4 clients as well, whatever the system's default.
        socket.set_only_v6(false)?;
    }
    socket.set_nonblocking(true)?;
    socket.bind(&SockAddr::from(address))?;
    Ok(BoundSocket { socket, file: None })
}

fn bind_unix_socket(path: &Path, mode: u32) -> io::Result<BoundSocket> {
    remove_stale_socket_file(path)?;
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    socket.bind(&SockAddr::unix(path)?)?;
    let file = SocketFileGuard {
        path: path.to_owned(),
        file_identity: read_file_identity(path)?,
    };
    fs::set_permissions(path, Permissions::from_mode(mode))?;
    Ok(BoundSocket {
        socket,
        file: Some(file),
    })
}

/// Removes the socket file of a process that ended without removing it.
fn remove_stale_socket_file(path: &Path) -> io::Result<()> {
    let kind = match fs::symlink_metadata(path) {
        Ok(metadata) => metadata.file_type(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    if !kind.is_socket() {
        let problem = "the path exists and is not a socket";
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, problem));
    }
    match UnixStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path),
        Err(error) => Err(error),
        Ok(_) => Err(io::Error::new(
            io::ErrorKind::AddrInUse,
            "another process answers on it",
        )),
    }
}

fn read_file_identity(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|file| (file.dev(), file.ino()))
}

impl Drop for SocketFileGuard {
    fn drop(&mut self) {
        let is_ours = read_file_identity(&self.path).is_ok_and(|found| found == self.file_identity);
        if is_ours && let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!(%error, path = %self.path.display(), "failed to remove the Unix socket file");
        }
    }
}
