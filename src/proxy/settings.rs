//! Settings of the proxy's listeners, upstream and shutdown. `config` builds them.

use http::StatusCode;
use ipnet::IpNet;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use strum::IntoStaticStr;

use crate::listen::ListenAddress;
use crate::tls::{ClientTls, ServerTls};

/// Settings of a listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenSettings {
    pub address: ListenAddress,
    /// Networks of the load balancers that may connect. Each connection must start with a PROXY
    /// header. `None` if connections start without a PROXY header.
    pub proxy_protocol_from: Option<Vec<IpNet>>,
    /// Whether clients of cleartext connections use TLS to the load balancer in front. A PROXY
    /// header that states it takes precedence.
    pub assumes_https: bool,
    /// Maximum concurrent connections. At the limit, a new connection replaces the one that is idle
    /// longest, or waits in the kernel's backlog if all have requests.
    pub max_connections: usize,
    /// Maximum concurrent connections of one client, except trusted proxies. 0 for no limit.
    pub max_connections_per_client: usize,
    /// Age at which a connection ends gracefully, 10 % less or more. `None` for no limit.
    pub max_connection_age: Option<Duration>,
    /// Maximum estimated memory of all client connections, taken from the first listener. `None`
    /// for no limit.
    pub max_memory: Option<usize>,
    /// Worker threads, at least 1.
    pub threads: usize,
    /// Time limit from the first byte of a request to the end of its head. The same limit applies
    /// to the PROXY header and the TLS handshake together.
    pub header_timeout: Duration,
    /// Time limit for a connection without a request.
    pub idle_timeout: Duration,
    /// Time limit without progress on a request body, or on writing to a client that does not read.
    /// In a tunnel that the upstream has closed, the limit applies to a client that pauses.
    pub body_idle_timeout: Duration,
    /// Bytes per second that a client must send of a request body while the upstream waits for
    /// them. A client that falls `body_idle_timeout` behind is cut. 0 for no minimum.
    pub min_upload_rate: u64,
    pub max_header_bytes: usize,
    pub max_headers: usize,
    /// Maximum size of a request body. `None` for no limit.
    pub max_body_bytes: Option<u64>,
    /// Maximum concurrent streams per HTTP/2 connection.
    pub max_concurrent_streams: u32,
}

/// Settings of an additional listener, served by the same workers. It may also be the only
/// listener.
#[derive(Clone, Debug, PartialEq)]
pub struct ExtraListenerSettings {
    pub kind: ListenerKind,
    pub listen: ListenSettings,
    /// TLS settings. `None` for cleartext.
    pub tls: Option<Arc<ServerTls>>,
}

/// Settings of the ext_authz listener, `[check]`. The default has no effect: there is no listener.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExtAuthzSettings {
    /// Status code of all denials. `None` keeps each denial's own.
    pub denied_status: Option<StatusCode>,
    /// Whether a key header may have a comma, although the proxy in front may have joined two
    /// lines.
    pub accepts_joined_headers: bool,
}

/// Protocol that a listener serves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ListenerKind {
    /// Requests that are forwarded to the upstream.
    #[default]
    Proxy,
    /// Calls of Envoy's rate limit service (RLS).
    RateLimitService,
    /// Authorization checks for requests that another proxy forwards.
    ExtAuthz,
}

impl ListenerKind {
    /// Whether untrusted clients connect here. The other kinds serve the operator's own proxies.
    pub(super) fn is_public(self) -> bool {
        self == Self::Proxy
    }
}

/// Settings of the upstream and its connections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UpstreamSettings {
    pub url: UpstreamUrl,
    pub connect_timeout: Duration,
    /// Time limit for the response head, counted from the last request byte sent. `None` for no
    /// limit.
    pub response_timeout: Option<Duration>,
    /// Time limit without progress on a response body, or in a tunnel in either direction if it is
    /// shorter than `tunnel_idle_timeout`. `None` for no limit.
    pub body_idle_timeout: Option<Duration>,
    pub pool_idle_timeout: Duration,
    /// Maximum idle connections kept, over all workers.
    pub pool_max_idle: usize,
    /// Whether to forward the client's Host. Otherwise the upstream's authority is sent.
    pub preserve_host: bool,
    /// Maximum concurrent connections, over all workers.
    pub max_connections: usize,
    /// While half of `max_connections` are in use: maximum of the other half that one client uses.
    /// 0 for no limit.
    pub max_connections_per_client: usize,
    /// Maximum tunnels of one client. 0 for no limit.
    pub max_tunnels_per_client: usize,
    /// Time limit without traffic in a tunnel. `None` for no limit.
    pub tunnel_idle_timeout: Option<Duration>,
    /// Maximum requests waiting for a connection, over all workers. Further requests are rejected
    /// at once.
    pub max_requests_waiting: usize,
    /// Time limit for waiting for a connection.
    pub queue_timeout: Duration,
    /// Additional connection attempts for a request of which no byte was sent.
    pub retry_connect: u32,
    /// Whether to retry a bodiless idempotent request once when its reused connection died.
    pub retry_idempotent: bool,
    /// TLS settings. Present if and only if the scheme is https.
    pub tls: Option<ClientTls>,
}

impl UpstreamSettings {
    /// Time limit without traffic in a tunnel.
    pub(super) fn tunnel_idle_limit(&self) -> Option<Duration> {
        let limits = self.tunnel_idle_timeout.into_iter();
        limits.chain(self.body_idle_timeout).min()
    }
}

/// Location and protocol of an upstream, without a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UpstreamUrl {
    Net {
        scheme: UpstreamScheme,
        /// Host name or IP address, without brackets.
        host: String,
        port: u16,
    },
    /// `unix:/path`: HTTP/1.1 over a Unix socket of this machine.
    Unix(PathBuf),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub enum UpstreamScheme {
    /// HTTP/1.1.
    Http,
    /// HTTP/2 or HTTP/1.1, as ALPN negotiates.
    Https,
    /// Cleartext HTTP/2 with prior knowledge (RFC 9113, 3.3).
    H2c,
}

impl UpstreamUrl {
    /// Host and port as in a `Host` header, without the scheme's default port. A Unix socket has no
    /// name, so its authority is `localhost`.
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
        match self {
            Self::Net { scheme, .. } => {
                write!(f, "{}://{}", <&str>::from(scheme), self.authority())
            }
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// Settings of a graceful shutdown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShutdownSettings {
    /// Time to keep serving after SIGTERM.
    pub delay: Duration,
    /// Time for active requests to finish after `delay`.
    pub grace: Duration,
}
