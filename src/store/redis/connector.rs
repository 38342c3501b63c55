//! One connection to one server: name, address, socket, TLS, login.

use super::RedisPassword;
use super::error::{RedisConnectionError, RedisErrorKind};
use crate::tls::ClientTls;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, RedisConnectionInfo};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

/// Commands that wait to be written.
const PIPELINE_BUFFER_SIZE: usize = 1024;

/// A dead peer is noticed by these when no request is there to notice it.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(15);

/// What was sent has to be acknowledged within `connect_timeout`, or this if that is less.
const MIN_TCP_USER_TIMEOUT: Duration = Duration::from_secs(1);

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum RedisAddress {
    /// A name or an address, without brackets.
    Tcp {
        host: String,
        port: u16,
    },
    Unix(PathBuf),
}

/// An ACL user; without a name the default one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RedisCredentials {
    pub username: Option<String>,
    pub password: Option<RedisPassword>,
}

/// How every server of a deployment is spoken to.
#[derive(Clone, Copy, Debug)]
pub(super) struct RedisConnectOptions<'a> {
    pub(super) credentials: &'a RedisCredentials,
    pub(super) database: i64,
    pub(super) tls: Option<&'a ClientTls>,
    /// Of one try; who calls sets the deadline of all.
    pub(super) connect_timeout: Duration,
}

/// Ends with its owner.
#[derive(Debug)]
pub(super) struct AbortOnDropTask(pub(super) JoinHandle<()>);

/// Opens a connection, logged in and in its database, and the task that drives it.
pub(super) async fn open_connection(
    address: &RedisAddress,
    options: RedisConnectOptions<'_>,
) -> Result<(MultiplexedConnection, AbortOnDropTask), RedisConnectionError> {
    match address {
        RedisAddress::Unix(path) => start_session(UnixStream::connect(path).await?, options).await,
        RedisAddress::Tcp { host, port } => {
            let addresses = tokio::net::lookup_host((host.as_str(), *port)).await;
            let addresses: Vec<_> = addresses
                .map_err(|error| {
                    RedisConnectionError::new(RedisErrorKind::Dns, format!("{host}: {error}"))
                })?
                .collect();
            let socket = TcpStream::connect(addresses.as_slice()).await?;
            set_socket_options(&socket, options.connect_timeout)?;
            match options.tls {
                None => start_session(socket, options).await,
                Some(tls) => {
                    let connector = TlsConnector::from(Arc::clone(tls.config()));
                    let name = tls.server_name_for(host).map_err(|_invalid| {
                        let reason = format!(
                            "{host:?} is no name that a certificate can be checked against"
                        );
                        RedisConnectionError::new(RedisErrorKind::Tls, reason)
                    })?;
                    let handshake = connector.connect(name, socket);
                    // Before all time is over: who does not speak TLS may wait for more in silence.
                    let handshake_timed_out = |_| {
                        RedisConnectionError::new(
                            RedisErrorKind::Timeout,
                            "no answer to a TLS handshake",
                        )
                    };
                    start_session(
                        timeout(options.connect_timeout / 2, handshake)
                            .await
                            .map_err(handshake_timed_out)??,
                        options,
                    )
                    .await
                }
            }
        }
    }
}

async fn start_session(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    options: RedisConnectOptions<'_>,
) -> Result<(MultiplexedConnection, AbortOnDropTask), RedisConnectionError> {
    let mut connection_info = RedisConnectionInfo::default().set_db(options.database);
    let RedisCredentials { username, password } = options.credentials;
    if let Some(username) = username {
        // Without any password redis-rs would not log in at all, and be the default user.
        connection_info = connection_info.set_username(username).set_password("");
    }
    if let Some(password) = password {
        connection_info = connection_info.set_password(password.expose());
    }
    // Deadlines are ours: per decision and all in.
    let config = AsyncConnectionConfig::new()
        .set_response_timeout(None)
        .set_pipeline_buffer_size(PIPELINE_BUFFER_SIZE);
    let (connection, driver) =
        MultiplexedConnection::new_with_config(&connection_info, stream, config).await?;
    Ok((connection, AbortOnDropTask(tokio::spawn(driver))))
}

fn set_socket_options(socket: &TcpStream, connect_timeout: Duration) -> std::io::Result<()> {
    socket.set_nodelay(true)?;
    let socket = socket2::SockRef::from(socket);
    let keepalive = socket2::TcpKeepalive::new()
        .with_time(KEEPALIVE_IDLE)
        .with_interval(KEEPALIVE_IDLE / 3);
    socket.set_tcp_keepalive(&keepalive)?;
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(Some(connect_timeout.max(MIN_TCP_USER_TIMEOUT)))?;
    Ok(())
}

impl RedisAddress {
    /// What another server calls an address: `host:port`, IPv6 with or without brackets.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (host, port) = text.rsplit_once(':')?;
        let host = host
            .strip_prefix('[')
            .and_then(|host| host.strip_suffix(']'))
            .unwrap_or(host);
        Some(Self::Tcp {
            host: host.to_owned(),
            port: port.parse().ok()?,
        })
    }
}

impl fmt::Display for RedisAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "{host}:{port}"),
            Self::Unix(path) => path.display().fmt(f),
        }
    }
}

impl Drop for AbortOnDropTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}
