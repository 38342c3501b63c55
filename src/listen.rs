//! Where somebody listens: an IP address and port, or a Unix socket, whose file is made and removed.

use socket2::{Domain, Protocol, SockAddr, Socket, Type};
use std::fmt;
use std::fs::{self, Permissions};
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use tokio::net::{TcpListener, UnixListener};

/// Where to connect.
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

impl ListenAddress {
    /// Whether nobody but this machine can connect.
    pub fn is_local(&self) -> bool {
        match self {
            Self::Ip(address) => address.ip().is_loopback(),
            Self::Unix(_) => true,
        }
    }
}

/// An address that is ours; nobody can connect until [`Bound::listen`]. It doesn't block.
#[derive(Debug)]
pub(crate) struct BoundSocket {
    socket: Socket,
    file: Option<SocketFile>,
}

/// A socket's file, removed with its owner.
#[derive(Debug)]
pub(crate) struct SocketFile {
    path: PathBuf,
    /// Device and number: what somebody else has put there since is theirs.
    file_identity: (u64, u64),
}

/// Takes connections, by the runtime that it was made in.
#[derive(Debug)]
pub(crate) enum SocketListener {
    Tcp(TcpListener),
    Unix {
        listener: UnixListener,
        _file: Option<SocketFile>,
    },
}

impl BoundSocket {
    /// Takes the address. `mode` is that of a Unix socket's file: who may write to it may connect.
    pub(crate) fn bind(address: &ListenAddress, mode: u32) -> io::Result<Self> {
        match address {
            ListenAddress::Ip(address) => bind_ip(*address),
            ListenAddress::Unix(path) => bind_unix(path, mode),
        }
    }

    /// Where it is: the port that the system chose if none was asked for.
    pub(crate) fn address(&self) -> io::Result<ListenAddress> {
        if let Some(file) = &self.file {
            return Ok(ListenAddress::Unix(file.path.clone()));
        }
        let address = self.socket.local_addr()?.as_socket();
        address
            .map(ListenAddress::Ip)
            .ok_or_else(|| io::Error::other("not an IP socket"))
    }

    /// Lets clients connect; they wait in the kernel until they are accepted.
    pub(crate) fn listen(&self, backlog: i32) -> io::Result<()> {
        self.socket.listen(backlog)
    }

    /// For options of its own.
    pub(crate) fn socket(&self) -> &Socket {
        &self.socket
    }

    /// For the runtime that this is called in.
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

fn bind_ip(address: SocketAddr) -> io::Result<BoundSocket> {
    let socket = Socket::new(
        Domain::for_address(address),
        Type::STREAM,
        Some(Protocol::TCP),
    )?;
    socket.set_reuse_address(true)?;
    if address.is_ipv6() {
        // `[::]` means everybody, whatever the system's default.
        socket.set_only_v6(false)?;
    }
    socket.set_nonblocking(true)?;
    socket.bind(&SockAddr::from(address))?;
    Ok(BoundSocket { socket, file: None })
}

fn bind_unix(path: &Path, mode: u32) -> io::Result<BoundSocket> {
    remove_stale_socket(path)?;
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    socket.bind(&SockAddr::unix(path)?)?;
    let file = SocketFile {
        path: path.to_owned(),
        file_identity: read_file_identity(path)?,
    };
    fs::set_permissions(path, Permissions::from_mode(mode))?;
    Ok(BoundSocket {
        socket,
        file: Some(file),
    })
}

/// Removes what a process left that had no time to do so itself.
fn remove_stale_socket(path: &Path) -> io::Result<()> {
    let kind = match fs::symlink_metadata(path) {
        Ok(metadata) => metadata.file_type(),
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
        Ok(_) => Err(io::Error::new(
            io::ErrorKind::AddrInUse,
            "another process answers on it",
        )),
    }
}

fn read_file_identity(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|file| (file.dev(), file.ino()))
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let is_ours = read_file_identity(&self.path).is_ok_and(|found| found == self.file_identity);
        if is_ours && let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!(%error, path = %self.path.display(), "the socket cannot be removed");
        }
    }
}
