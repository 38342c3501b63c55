//! Opens one connection to one server: name resolution, socket, TLS, login.

use super::error::{RedisConnectionError, RedisErrorKind};
use super::settings::{RedisAddress, RedisCredentials, RedisDialer, RedisSettings};
use crate::tls::ClientTls;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, RedisConnectionInfo};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

/// Maximum number of commands that can be queued for the socket.
const PIPELINE_BUFFER_SIZE: usize = 1024;

/// Idle time of a connection before TCP keep-alive checks whether the peer is dead.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(15);

/// Minimum TCP user timeout. The peer must acknowledge sent data within `connect_timeout`, or
/// within this time if it is longer.
const MIN_TCP_USER_TIMEOUT: Duration = Duration::from_secs(1);

/// Connection options for all servers of a deployment.
#[derive(Clone, Copy, Debug)]
pub(super) struct RedisConnectOptions<'a> {
    pub(super) credentials: &'a RedisCredentials,
    pub(super) database: i64,
    pub(super) tls: Option<&'a ClientTls>,
    /// Timeout of one attempt. The caller sets the overall deadline.
    pub(super) connect_timeout: Duration,
    pub(super) dialer: &'a RedisDialer,
}

/// A task that is aborted when its owner is dropped.
#[derive(Debug)]
pub(super) struct AbortOnDropTask(pub(super) JoinHandle<()>);

impl RedisSettings {
    /// The connection options for the servers that hold counters.
    pub(super) fn connect_options(&self) -> RedisConnectOptions<'_> {
        let Self {
            credentials,
            database,
            tls,
            connect_timeout,
            dialer,
            ..
        } = self;
        RedisConnectOptions {
            credentials,
            database: *database,
            tls: tls.as_ref(),
            connect_timeout: *connect_timeout,
            dialer,
        }
    }
}

/// Opens a connection, logs in and selects the database. Returns it with the task that drives it.
pub(super) async fn open_connection(
    address: &RedisAddress,
    options: RedisConnectOptions<'_>,
) -> Result<(MultiplexedConnection, AbortOnDropTask), RedisConnectionError> {
    if let RedisDialer::Simulated(transport) = options.dialer {
        return start_session(transport.connect(address).await?, options).await;
    }
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
                            "{host:?} is not a name that a TLS certificate can be verified for"
                        );
                        RedisConnectionError::new(RedisErrorKind::Tls, reason)
                    })?;
                    let handshake = connector.connect(name, socket);
                    // Half of the timeout, because a server without TLS may wait for more data
                    // silently.
                    let handshake_timed_out = |_| {
                        RedisConnectionError::new(
                            RedisErrorKind::Timeout,
                            "no reply to the TLS handshake",
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
        // Without a password redis-rs would not log in, and would use the default user.
        connection_info = connection_info.set_username(username).set_password("");
    }
    if let Some(password) = password {
        connection_info = connection_info.set_password(password.expose());
    }
    // No response timeout is set here, because the callers set a deadline per call.
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

impl Drop for AbortOnDropTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}
