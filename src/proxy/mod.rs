//! The data path: everything between the client's socket and the upstream's.

mod access;
mod alarm;
mod body;
mod check;
mod connection;
mod entrance;
mod fields;
mod flood;
mod gate;
mod grpc;
mod headers;
mod inbound;
mod interim;
mod listener;
mod meter;
#[cfg(any(test, fuzzing))]
pub mod properties;
mod replies;
mod rls;
mod server;
mod service;
#[cfg(test)]
mod tests;
mod tidy;
mod transport;
mod tunnel;
mod upgrade;
mod upstream;
mod watch;

pub use body::{BodyError, RequestBody, ResponseBody, UpstreamBody};
pub use entrance::{EntryFault, ProxyHeaderFault, TlsFault};
pub use gate::{GateFault, host_for_policies, is_taken_away};
pub use inbound::{Inbound, InboundFault};
pub use interim::Interim;
pub use rls::MAX_MESSAGE_BYTES;
pub use server::{Door, Handler, Load, Peer, Server, Stop};
pub use service::Service;
pub use tunnel::Tunnel;
pub use upstream::{Fault, SetupError, Shared, Upstream, UpstreamError, UpstreamErrorKind};

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
pub struct DoorSettings {
    pub door: Door,
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
        scheme: Scheme,
        /// A name or an address, without brackets.
        host: String,
        port: u16,
    },
    /// `unix:/path`: HTTP/1.1 by a socket of this machine.
    Unix(PathBuf),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
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
        let usual = if *scheme == Scheme::Https { 443 } else { 80 };
        if *port == usual {
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
                scheme: Scheme::Http,
                ..
            } => "http",
            Self::Net {
                scheme: Scheme::Https,
                ..
            } => "https",
            Self::Net {
                scheme: Scheme::H2c,
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
