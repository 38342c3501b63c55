//! The data path: everything between the client's socket and the upstream's.

mod ext_authz;
mod http;
#[cfg(any(test, fuzzing))]
pub mod properties;
mod rate_limit_service;
mod server;
mod service;
#[cfg(test)]
mod tests;
mod upstream;

pub use http::body::{BodyError, RequestBody, ResponseBody};
pub use http::inbound_request::{InboundRequest, InboundRequestError};
pub use http::informational_responses::InformationalForwarder;
pub use http::request_validation::{
    RequestValidationError, is_stripped_before_policies, normalize_host,
};
pub use http::tunnel::Tunnel;
pub use rate_limit_service::MAX_MESSAGE_BYTES;
pub use server::accept::{HandshakeError, ProxyHeaderError, TlsHandshakeError};
pub use server::{
    ConnectionPeer, ListenerKind, ProxyServer, RequestHandler, ServerLoad, ShutdownSignal,
};
pub use service::ProxyService;
pub use upstream::response_body::UpstreamBody;
pub use upstream::{
    UpstreamClient, UpstreamError, UpstreamErrorKind, UpstreamErrorOrigin, UpstreamSharedState,
    UpstreamUrlError,
};

use crate::listen::ListenAddress;
use crate::tls::{ClientTls, ServerTls};
use ipnet::IpNet;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Where and how to listen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenSettings {
    pub address: ListenAddress,
    /// Who has to begin every connection with a PROXY header; nobody else may connect. `None`: connections begin
    /// without.
    pub proxy_protocol_from: Option<Vec<IpNet>>,
    /// Connections served at a time; further ones wait in the kernel's backlog.
    pub max_connections: usize,
    /// Worker threads, at least 1.
    pub threads: usize,
    /// From the first byte of a request to the end of its head.
    pub header_timeout: Duration,
    /// A connection without a request.
    pub idle_timeout: Duration,
    /// No progress on a request body, or on writing to a client that does not read; in a tunnel that the upstream has
    /// ended, a client that pauses.
    pub body_idle_timeout: Duration,
    pub max_header_bytes: usize,
    pub max_headers: usize,
    /// `None`: no limit.
    pub max_body_bytes: Option<u64>,
    /// Per HTTP/2 connection.
    pub max_concurrent_streams: u32,
}

/// What is served beside the proxy, or instead of it, by the same workers.
#[derive(Clone, Debug, PartialEq)]
pub struct ExtraListenerSettings {
    pub kind: ListenerKind,
    pub listen: ListenSettings,
    /// `None`: cleartext.
    pub tls: Option<Arc<ServerTls>>,
}

/// What to forward to, and how long to wait for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UpstreamSettings {
    pub url: UpstreamUrl,
    pub connect_timeout: Duration,
    /// Until the response head, counted from the last byte sent. `None`: no limit.
    pub response_timeout: Option<Duration>,
    /// No progress on a response body, or in a tunnel either way. `None`: no limit.
    pub body_idle_timeout: Option<Duration>,
    pub pool_idle_timeout: Duration,
    /// Idle connections kept, over all workers.
    pub pool_max_idle: usize,
    /// Forward the client's Host; otherwise the upstream's authority.
    pub preserve_host: bool,
    /// Connections at a time, over all workers.
    pub max_connections: usize,
    /// Requests waiting for one of them, over all workers; further ones are refused at once.
    pub max_requests_waiting: usize,
    /// Waiting for one of them.
    pub queue_timeout: Duration,
    /// Further tries to connect when no byte of a request was sent.
    pub retry_connect: u32,
    /// Once more for a bodiless idempotent request on a reused connection that died.
    pub retry_idempotent: bool,
    /// For https; there if and only if the URL says so.
    pub tls: Option<ClientTls>,
}

/// Where an upstream is, and how it is spoken to: no path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UpstreamUrl {
    Net {
        scheme: UpstreamScheme,
        /// A name or an address, without brackets.
        host: String,
        port: u16,
    },
    /// `unix:/path`: HTTP/1.1 by a socket of this machine.
    Unix(PathBuf),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpstreamScheme {
    /// HTTP/1.1.
    Http,
    /// HTTP/2 or HTTP/1.1, as the server prefers.
    Https,
    /// HTTP/2 in the clear, by prior knowledge (RFC 9113, 3.3).
    H2c,
}

impl UpstreamUrl {
    /// Host and port as they stand in a `Host` field: the scheme's own port is left out. A socket has no name; what
    /// listens there is on this machine.
    pub fn authority(&self) -> String {
        let Self::Net { scheme, host, port } = self else {
            return "localhost".to_owned();
        };
        let host = if host.contains(':') {
            format!("[{host}]")
        } else {
            host.clone()
        };
        let default_port = if *scheme == UpstreamScheme::Https {
            443
        } else {
            80
        };
        if *port == default_port {
            host
        } else {
            format!("{host}:{port}")
        }
    }
}

impl fmt::Display for UpstreamUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = match self {
            Self::Net {
                scheme: UpstreamScheme::Http,
                ..
            } => "http",
            Self::Net {
                scheme: UpstreamScheme::Https,
                ..
            } => "https",
            Self::Net {
                scheme: UpstreamScheme::H2c,
                ..
            } => "h2c",
            Self::Unix(path) => return write!(f, "unix:{}", path.display()),
        };
        write!(f, "{scheme}://{}", self.authority())
    }
}

/// How the end goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShutdownSettings {
    /// Keep serving this long after SIGTERM.
    pub delay: Duration,
    /// Then let requests in flight finish this long.
    pub grace: Duration,
}
