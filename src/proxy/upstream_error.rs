//! Errors of requests that received no response from the upstream.

use crate::text::format_error_chain;
use std::sync::LazyLock;
use std::time::Duration;
use strum::{Display, EnumIter, IntoEnumIterator as _, IntoStaticStr, VariantNames};

/// A request that received no response, with the cause.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{kind}: {detail}")]
pub struct UpstreamError {
    pub kind: UpstreamErrorKind,
    /// Text for logs only; clients never receive it.
    pub detail: String,
}

/// Cause of an [`UpstreamError`]. The upstream is responsible unless the variant says otherwise.
/// The names are those in metrics and logs.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, Display, EnumIter, IntoStaticStr, VariantNames,
)]
#[strum(serialize_all = "snake_case", const_into_str)]
pub enum UpstreamErrorKind {
    /// The upstream refused the TCP connection.
    ConnectRefused,
    /// Connecting failed, but was neither refused nor timed out.
    ConnectFailed,
    /// This machine has no port or file descriptor left for a connection.
    LocalResources,
    /// No connection was established within `connect_timeout`.
    ConnectTimeout,
    /// The upstream's host name did not resolve.
    Dns,
    /// The TLS handshake failed, or the certificate is not trusted.
    Tls,
    /// Proxy limit: `max_requests_waiting` requests already wait for a connection or are delayed.
    QueueFull,
    /// Proxy limit: no connection became free within `queue_timeout`.
    QueueTimeout,
    /// Client error: the client has `max_tunnels_per_client` tunnels.
    TunnelLimit,
    /// No response head arrived within `response_timeout`.
    ResponseTimeout,
    /// The connection ended before a complete response head arrived.
    #[strum(serialize = "terminated")]
    ConnectionTerminated,
    /// The response is not valid HTTP.
    Protocol,
    /// The upstream reset the HTTP/2 stream of the request.
    #[strum(serialize = "reset")]
    StreamReset,
    /// The upstream speaks HTTP/2 and does not support WebSockets over it (RFC 8441).
    #[strum(serialize = "upgrade")]
    UpgradeUnsupported,
    /// Limit of a policy: the request exceeded the `max_duration` of a concurrency limit.
    #[strum(serialize = "overlong")]
    MaxDurationExceeded,
    /// Client error: the client stopped sending the request body.
    RequestBodyTimeout,
    /// Client error: the request body exceeds `max_body_bytes`.
    RequestBodyTooLarge,
    /// Client error: the client disconnected during the request body.
    #[strum(serialize = "client_gone")]
    ClientDisconnected,
}

impl UpstreamErrorKind {
    /// Whether the client or the limit of a policy is responsible, and neither the upstream nor
    /// a limit of the proxy.
    pub(crate) fn is_expected(self) -> bool {
        matches!(self, Self::TunnelLimit | Self::MaxDurationExceeded) || self.is_caused_by_client()
    }

    /// Whether the client ended or spoiled the request while it was sent.
    pub fn is_caused_by_client(self) -> bool {
        matches!(
            self,
            Self::RequestBodyTimeout | Self::RequestBodyTooLarge | Self::ClientDisconnected
        )
    }

    pub(crate) fn with_detail(self, detail: impl Into<String>) -> UpstreamError {
        let (kind, detail) = (self, detail.into());
        UpstreamError { kind, detail }
    }

    /// The error with a text of its cause, and of the causes of that.
    pub(crate) fn with_cause(self, cause: &dyn std::error::Error) -> UpstreamError {
        self.with_detail(format_error_chain(cause))
    }

    /// Returns the kind of an error of the h2 library.
    pub(crate) fn from_h2(error: &h2::Error) -> Self {
        match error.is_remote() {
            true if error.is_reset() => Self::StreamReset,
            // A remote error that is no reset is a GOAWAY; h2 reports it only for requests that the
            // upstream did not process.
            true => Self::ConnectionTerminated,
            false if error.is_library() => Self::Protocol,
            false => Self::ConnectionTerminated,
        }
    }
}

/// The error kinds that neither the client nor the limit of a policy caused.
pub static UPSTREAM_FAULTS: LazyLock<Vec<usize>> = LazyLock::new(|| {
    let kinds = UpstreamErrorKind::iter().filter(|kind| !kind.is_expected());
    kinds.map(|kind| kind as usize).collect()
});

impl UpstreamError {
    pub(crate) fn queue_timeout(limit: Duration) -> Self {
        let detail = format!("no upstream connection became free within {limit:?}");
        UpstreamErrorKind::QueueTimeout.with_detail(detail)
    }
}

#[cfg(test)]
mod tests {
    use super::UpstreamErrorKind;
    use strum::VariantNames;

    #[test]
    fn error_kind_names_are_in_declaration_order() {
        let last = UpstreamErrorKind::ClientDisconnected;
        assert_eq!(UpstreamErrorKind::VARIANTS.len(), last as usize + 1);
        for kind in [
            UpstreamErrorKind::ConnectRefused,
            UpstreamErrorKind::ResponseTimeout,
            last,
        ] {
            assert_eq!(UpstreamErrorKind::VARIANTS[kind as usize], kind.into_str());
        }
    }
}
