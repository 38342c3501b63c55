//! Public kinds of proxy errors, with status and text.

use http::StatusCode;

/// Public kind of an error that prevents a request from being forwarded or completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProxyErrorType {
    ConnectRefused,
    ConnectTimeout,
    DnsError,
    TlsError,
    /// The upstream connection ended before a response.
    ConnectionTerminated,
    /// The upstream's response is not valid.
    ProtocolError,
    /// The upstream's HTTP version or settings do not allow WebSockets.
    UpgradeFailed,
    ResponseTimeout,
    /// The `max_duration` of a limit has elapsed.
    MaxDurationExceeded,
    /// No upstream connection became free in time, or too many requests are waiting for one.
    QueueFull,
    /// The client has as many tunnels as one client may have.
    TunnelLimit,
    /// The request body is larger than allowed.
    BodyTooLarge,
    /// The request body did not arrive in time.
    BodyTimeout,
    /// The request body has invalid framing or is incomplete.
    BodyInvalid,
    /// The request has more headers than allowed.
    TooManyHeaders,
}

impl ProxyErrorType {
    pub(crate) fn status(self) -> StatusCode {
        self.status_error_and_detail().0
    }

    /// Returns the HTTP status, the `Proxy-Status` error type (RFC 9209, 2.3) and the detail text.
    pub(super) fn status_error_and_detail(self) -> (StatusCode, &'static str, &'static str) {
        use StatusCode as S;
        match self {
            Self::ConnectRefused => (
                S::BAD_GATEWAY,
                "connection_refused",
                "The upstream does not accept connections.",
            ),
            Self::ConnectTimeout => (
                S::GATEWAY_TIMEOUT,
                "connection_timeout",
                "The upstream did not accept a connection in time.",
            ),
            Self::DnsError => (
                S::BAD_GATEWAY,
                "dns_error",
                "The upstream's name could not be resolved.",
            ),
            Self::TlsError => (
                S::BAD_GATEWAY,
                "tls_protocol_error",
                "No secure connection to the upstream could be made.",
            ),
            Self::ConnectionTerminated => (
                S::BAD_GATEWAY,
                "connection_terminated",
                "The upstream closed the connection without a response.",
            ),
            Self::ProtocolError => (
                S::BAD_GATEWAY,
                "http_protocol_error",
                "The upstream sent a response that is not valid.",
            ),
            Self::UpgradeFailed => (
                S::BAD_GATEWAY,
                "http_upgrade_failed",
                "The upstream does not support WebSockets over HTTP/2.",
            ),
            Self::ResponseTimeout => (
                S::GATEWAY_TIMEOUT,
                "connection_read_timeout",
                "The upstream did not respond in time.",
            ),
            Self::MaxDurationExceeded => (
                S::GATEWAY_TIMEOUT,
                "http_response_timeout",
                "The request took longer than its policy allows.",
            ),
            Self::QueueFull => (
                S::SERVICE_UNAVAILABLE,
                "connection_limit_reached",
                "Too many requests are waiting, or no connection to the upstream became free in time.",
            ),
            Self::TunnelLimit => (
                S::TOO_MANY_REQUESTS,
                "connection_limit_reached",
                "Too many tunnels (WebSockets) of this client are open. See upstream.max_tunnels_per_client.",
            ),
            Self::BodyTooLarge => (
                S::PAYLOAD_TOO_LARGE,
                "http_request_error",
                "The request body is larger than allowed.",
            ),
            Self::BodyTimeout => (
                S::REQUEST_TIMEOUT,
                "http_request_error",
                "The request body did not arrive in time.",
            ),
            Self::BodyInvalid => (
                S::BAD_REQUEST,
                "http_request_error",
                "The request body is not valid HTTP or is incomplete.",
            ),
            Self::TooManyHeaders => (
                S::REQUEST_HEADER_FIELDS_TOO_LARGE,
                "http_request_error",
                "The request has more headers than allowed.",
            ),
        }
    }
}
