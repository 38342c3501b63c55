//! A small HTTP client for background work: no redirects, and responses of bounded size.

use crate::listen::{ListenAddress, is_family_missing};
use crate::text::format_error_chain;
use crate::tls::{ClientTls, describe_tls_error};
use bytes::Bytes;
use http::{Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use std::error::Error;
use std::fmt;
use std::io;
use std::net::IpAddr;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};

/// Maximum size of a response head.
const MAX_HEAD_BYTES: usize = 64 << 10;

/// A URL with scheme `http` or `https`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpUrl {
    pub is_tls: bool,
    /// A host name, or an IP address without brackets.
    pub host: String,
    pub port: u16,
    /// The value of `Host`.
    pub authority: String,
    pub path_and_query: String,
}

/// A connection to a server, with or without TLS.
pub trait ClientStream: AsyncRead + AsyncWrite + Unpin + Send {}

impl<S: AsyncRead + AsyncWrite + Unpin + Send> ClientStream for S {}

impl HttpUrl {
    /// Parses a URL. `default_ports` are those of `http` and `https`. Returns `None` if the text is
    /// no such URL.
    pub fn parse(text: &str, default_ports: [u16; 2]) -> Option<Self> {
        let uri: Uri = text.parse().ok()?;
        let [http_port, https_port] = default_ports;
        let (is_tls, default_port) = match uri.scheme_str()? {
            "http" => (false, http_port),
            "https" => (true, https_port),
            _ => return None,
        };
        let authority = uri.authority()?;
        let server = authority.as_str().rsplit('@').next()?;
        let port = match authority.port_u16() {
            Some(port @ 1..) => port,
            None if server == authority.host() => default_port,
            _ => return None,
        };
        let host = authority.host();
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let path_and_query = uri.path_and_query();
        (!host.is_empty()).then(|| Self {
            is_tls,
            host: host.to_owned(),
            port,
            authority: authority.as_str().to_owned(),
            path_and_query: path_and_query.map_or_else(|| "/".to_owned(), ToString::to_string),
        })
    }

    pub fn has_credentials(&self) -> bool {
        self.authority.contains('@')
    }

    pub fn scheme(&self) -> &'static str {
        if self.is_tls { "https" } else { "http" }
    }

    /// Whether the host is this machine.
    pub fn is_loopback(&self) -> bool {
        let address = self.host.parse::<IpAddr>();
        self.host.eq_ignore_ascii_case("localhost")
            || address.is_ok_and(|address| address.to_canonical().is_loopback())
    }
}

/// The URL without its query, which may hold a secret.
impl fmt::Display for HttpUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.path_and_query.split('?').next().unwrap_or_default();
        write!(f, "{}://{}{path}", self.scheme(), self.authority)
    }
}

/// Connects to the server of a URL. `protocols` are the names for ALPN.
///
/// # Errors
/// Returns a message for the log.
pub async fn connect(
    url: &HttpUrl,
    tls: Option<&ClientTls>,
    protocols: &[&str],
) -> Result<Box<dyn ClientStream>, String> {
    let socket = TcpStream::connect((url.host.as_str(), url.port)).await;
    let socket = socket.map_err(|error| format!("connection failed: {error}"))?;
    socket.set_nodelay(true).ok();
    let Some(tls) = tls else {
        return Ok(Box::new(socket));
    };
    let name = tls.server_name_for(&url.host);
    let name = name.map_err(|error| format!("{}: {error}", url.host))?;
    match tls.connector(protocols).connect(name, socket).await {
        Ok(stream) => Ok(Box::new(stream)),
        Err(error) => Err(format!("TLS failed: {}", describe_tls_error(&error))),
    }
}

/// Connects to the listener of a proxy, or to the substitute of its address on a machine without
/// the address family: the proxy listens there.
///
/// # Errors
/// If the listener does not accept the connection.
pub async fn connect_to_listener(address: &ListenAddress) -> io::Result<Box<dyn ClientStream>> {
    let ip = match address {
        ListenAddress::Unix(path) => return Ok(Box::new(UnixStream::connect(path).await?)),
        ListenAddress::Ip(ip) => ip,
    };
    let socket = match TcpStream::connect(ip).await {
        Err(error) if is_family_missing(&error) => {
            TcpStream::connect(address.substitute().ok_or(error)?).await?
        }
        connected => connected?,
    };
    Ok(Box::new(socket))
}

fn to_io_error(step: &str, error: &(dyn Error + 'static)) -> io::Error {
    let mut causes = std::iter::successors(Some(error), |&cause| cause.source());
    let of_socket = causes.find_map(|cause| cause.downcast_ref::<io::Error>());
    let kind = of_socket.map_or(io::ErrorKind::Other, io::Error::kind);
    io::Error::new(kind, format!("{step}: {}", format_error_chain(error)))
}

/// Sends a request on a new connection, which ends with this call. The body of the response is
/// read only if `reads_body` is true for the status.
///
/// # Errors
/// The cause, of the kind of the socket's error if there was one, without any content of the
/// response.
pub async fn fetch(
    stream: impl ClientStream,
    request: Request<Full<Bytes>>,
    max_body_bytes: usize,
    reads_body: fn(StatusCode) -> bool,
) -> io::Result<Response<Bytes>> {
    let failed = |error: hyper::Error| to_io_error("request failed", &error);
    let (mut sender, connection) = http1::Builder::new()
        .max_buf_size(MAX_HEAD_BYTES)
        .handshake(TokioIo::new(stream))
        .await
        .map_err(failed)?;
    let exchange = async {
        let response = sender.send_request(request).await.map_err(failed)?;
        let (head, body) = response.into_parts();
        if !reads_body(head.status) {
            return Ok(Response::from_parts(head, Bytes::new()));
        }
        let body = Limited::new(body, max_body_bytes).collect().await;
        let body = body.map_err(|error| to_io_error("body", &*error))?;
        Ok(Response::from_parts(head, body.to_bytes()))
    };
    // The connection is driven here, so that it ends with this future.
    let mut connection = std::pin::pin!(connection);
    let mut exchange = std::pin::pin!(exchange);
    tokio::select! {
        biased;
        fetched = &mut exchange => fetched,
        // The last bytes of a body may be in the channel when the connection ends.
        _closed = &mut connection => exchange.await,
    }
}
