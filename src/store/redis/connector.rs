//! Opens one connection to one server: name resolution, socket, TLS, login.

use super::error::{RedisConnectionError, RedisErrorKind};
use super::settings::{RedisAddress, RedisCredentials, RedisDialer, RedisPassword, RedisSettings};
use crate::http_client::ClientStream;
use crate::tls::ClientTls;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, RedisConnectionInfo};
use std::time::Duration;
use tokio::io::AsyncReadExt;
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;
use tokio_rustls::client::TlsStream;
use tokio_util::task::AbortOnDropHandle;

/// Maximum number of commands that can be queued for the socket.
const PIPELINE_BUFFER_SIZE: usize = 1024;

/// Idle time of a connection before TCP keep-alive checks whether the peer is dead.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(15);

/// Minimum TCP user timeout. The peer must acknowledge sent data within `connect_timeout`, or
/// within this time if it is longer.
const MIN_TCP_USER_TIMEOUT: Duration = Duration::from_secs(1);

/// Maximum length of the reason for a refused connection.
const MAX_REFUSAL_BYTES: u64 = 512;

/// Time that a server has to state why it refuses a connection.
const REFUSAL_TIMEOUT: Duration = Duration::from_millis(100);

/// Opens a connection, logs in and selects the database. Returns it with the task that drives it.
/// `connect_timeout` limits one attempt only in part: the caller sets the overall deadline.
pub(super) async fn open_connection(
    address: &RedisAddress,
    settings: &RedisSettings,
    credentials: &RedisCredentials,
    database: i64,
) -> Result<(MultiplexedConnection, AbortOnDropHandle<()>), RedisConnectionError> {
    let stream: Box<dyn ClientStream> = match (&settings.dialer, address) {
        (RedisDialer::Simulated(transport), _) => transport.connect(address).await?,
        (_, RedisAddress::Unix(path)) => Box::new(UnixStream::connect(path).await?),
        (_, RedisAddress::Tcp { host, port }) => {
            let addresses = tokio::net::lookup_host((host.as_str(), *port)).await;
            let addresses: Vec<_> = addresses
                .map_err(|error| {
                    RedisConnectionError::new(RedisErrorKind::Dns, format!("{host}: {error}"))
                })?
                .collect();
            let socket = TcpStream::connect(addresses.as_slice()).await?;
            set_socket_options(&socket, settings.connect_timeout)?;
            match &settings.tls {
                None => Box::new(socket),
                Some(tls) => {
                    Box::new(start_tls(tls, host, socket, settings.connect_timeout).await?)
                }
            }
        }
    };
    // redis-rs would replace the reply to a failed login by words of its own.
    let connection_info = RedisConnectionInfo::default().set_skip_set_lib_name();
    // No response timeout is set here, because the callers set a deadline per call.
    let config = AsyncConnectionConfig::new()
        .set_response_timeout(None)
        .set_pipeline_buffer_size(PIPELINE_BUFFER_SIZE);
    let (mut connection, driver) =
        MultiplexedConnection::new_with_config(&connection_info, stream, config).await?;
    let driver = AbortOnDropHandle::new(tokio::spawn(driver));
    log_in(&mut connection, credentials).await?;
    if database != 0 {
        let mut select = redis::cmd("SELECT");
        select.arg(database).exec_async(&mut connection).await?;
    }
    Ok((connection, driver))
}

/// Replaces the error of a connection that the server closed by what the server states about it. In
/// protected mode, or with too many clients, Redis sends an error at once and closes. The text is
/// lost to a client that sends a command, so a further connection only reads.
pub(super) async fn find_refusal(
    address: &RedisAddress,
    settings: &RedisSettings,
    error: RedisConnectionError,
) -> RedisConnectionError {
    let RedisAddress::Tcp { host, port } = address else {
        return error;
    };
    let is_real = matches!(settings.dialer, RedisDialer::Network) && settings.tls.is_none();
    if !is_real || error.kind != RedisErrorKind::Connection {
        return error;
    }
    let mut text = Vec::new();
    let read = async {
        let socket = TcpStream::connect((host.as_str(), *port)).await?;
        socket.take(MAX_REFUSAL_BYTES).read_to_end(&mut text).await
    };
    drop(timeout(REFUSAL_TIMEOUT, read).await);
    match text.strip_prefix(b"-").map(String::from_utf8_lossy) {
        None => error,
        Some(text) => {
            let kind = RedisErrorKind::from_error_text(&text);
            RedisConnectionError::new(kind, text.trim_end())
        }
    }
}

async fn start_tls(
    tls: &ClientTls,
    host: &str,
    socket: TcpStream,
    connect_timeout: Duration,
) -> Result<TlsStream<TcpStream>, RedisConnectionError> {
    let name = tls.server_name_for(host).map_err(|_invalid| {
        let reason = format!("{host:?} is not a name that a TLS certificate can be verified for");
        RedisConnectionError::new(RedisErrorKind::Tls, reason)
    })?;
    let handshake = tls.connector(&[]).connect(name, socket);
    // Half of the timeout, because a server without TLS may wait for more data silently.
    match timeout(connect_timeout / 2, handshake).await {
        Ok(stream) => Ok(stream?),
        Err(_) => Err(RedisConnectionError::new(
            RedisErrorKind::Timeout,
            "no reply to the TLS handshake",
        )),
    }
}

/// Logs in. If Redis rejects the credentials, a live connection keeps its user.
pub(super) async fn log_in(
    connection: &mut MultiplexedConnection,
    credentials: &RedisCredentials,
) -> Result<(), RedisConnectionError> {
    let RedisCredentials { username, password } = credentials;
    if username.is_none() && password.is_none() {
        return Ok(());
    }
    let mut command = redis::cmd("AUTH");
    command.arg(username.as_deref());
    command.arg(password.as_ref().map_or("", RedisPassword::expose));
    command.exec_async(connection).await.map_err(|error| {
        let mut error = RedisConnectionError::from(error);
        // A server without any password calls the login an ordinary error.
        if error.kind == RedisErrorKind::Other {
            error.kind = RedisErrorKind::NoAuth;
        }
        error
    })
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
