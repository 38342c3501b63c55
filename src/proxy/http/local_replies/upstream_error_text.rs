//! Status and text of the replies to requests that could not be forwarded or completed.

use http::StatusCode;

use crate::proxy::UpstreamErrorKind;

/// Returns the HTTP status, the `Proxy-Status` error type (RFC 9209, 2.3) and the detail text.
pub(crate) fn status_error_and_detail(
    kind: UpstreamErrorKind,
) -> (StatusCode, &'static str, &'static str) {
    use StatusCode as S;
    use UpstreamErrorKind as Kind;
    match kind {
        Kind::ConnectRefused | Kind::ConnectFailed => (
            S::BAD_GATEWAY,
            "connection_refused",
            "The upstream does not accept connections.",
        ),
        Kind::ConnectTimeout => (
            S::GATEWAY_TIMEOUT,
            "connection_timeout",
            "The upstream did not accept a connection in time.",
        ),
        Kind::Dns => (
            S::BAD_GATEWAY,
            "dns_error",
            "The upstream's name could not be resolved.",
        ),
        Kind::Tls => (
            S::BAD_GATEWAY,
            "tls_protocol_error",
            "No secure connection to the upstream could be made.",
        ),
        Kind::ConnectionTerminated | Kind::StreamReset => (
            S::BAD_GATEWAY,
            "connection_terminated",
            "The upstream closed the connection without a response.",
        ),
        Kind::Protocol => (
            S::BAD_GATEWAY,
            "http_protocol_error",
            "The upstream sent a response that is not valid.",
        ),
        Kind::UpgradeUnsupported => (
            S::BAD_GATEWAY,
            "http_upgrade_failed",
            "The upstream does not support WebSockets over HTTP/2.",
        ),
        Kind::ResponseTimeout => (
            S::GATEWAY_TIMEOUT,
            "connection_read_timeout",
            "The upstream did not respond in time.",
        ),
        Kind::LocalResources | Kind::QueueFull | Kind::QueueTimeout => (
            S::SERVICE_UNAVAILABLE,
            "connection_limit_reached",
            "Too many requests are waiting, or no connection to the upstream became free in time.",
        ),
        Kind::TunnelLimit => (
            S::TOO_MANY_REQUESTS,
            "connection_limit_reached",
            "Too many tunnels (WebSockets) of this client are open. See upstream.max_tunnels_per_client.",
        ),
        Kind::RequestBodyTooLarge => (
            S::PAYLOAD_TOO_LARGE,
            "http_request_error",
            "The request body is larger than allowed.",
        ),
        Kind::MaxDurationExceeded => (
            S::GATEWAY_TIMEOUT,
            "http_response_timeout",
            "The request took longer than its policy allows.",
        ),
        Kind::RequestBodyTimeout => (
            S::REQUEST_TIMEOUT,
            "http_request_error",
            "The request body did not arrive in time.",
        ),
        // Only a client that sent an invalid body reads this response; a disconnected client does
        // not.
        Kind::ClientDisconnected => (
            S::BAD_REQUEST,
            "http_request_error",
            "The request body is not valid HTTP or is incomplete.",
        ),
    }
}
