//! Label values of counters that workers record.

/// Label values of the error counters.
#[derive(Clone, Copy, Debug, Default)]
pub struct ErrorKindLabels {
    /// For [`record_upstream_error`](super::WorkerMetrics::record_upstream_error).
    pub upstream_errors: &'static [&'static str],
    /// For [`record_tls_error`](super::WorkerMetrics::record_tls_error).
    pub tls_errors: &'static [&'static str],
    /// For [`record_proxy_header_error`](super::WorkerMetrics::record_proxy_header_error).
    pub proxy_header_errors: &'static [&'static str],
}

/// The result of a call to the rate-limit service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RlsCallResult {
    Ok,
    OverLimit,
    /// The store was unavailable.
    Unavailable,
    /// The call was no valid gRPC call of the service.
    Invalid,
    /// The caller cancelled the call.
    Cancelled,
}

/// Why tidegate closed a client's connection or HTTP/2 stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectionCloseReason {
    /// No request for `idle_timeout`.
    Idle,
    /// A request head was incomplete after `header_timeout`.
    HeaderTimeout,
    /// No data of a request body for `body_idle_timeout`.
    BodyTimeout,
    /// The client read nothing for `body_idle_timeout`, or did not close when requested to.
    SlowRead,
    /// The client sent excessive HTTP/2 control frames or stream resets.
    Flood,
    /// The client sent no valid HTTP.
    Protocol,
    /// No data in a tunnel for `upstream.body_idle_timeout`.
    TunnelIdle,
}

impl RlsCallResult {
    pub(super) const ALL: [Self; 5] = [
        Self::Ok,
        Self::OverLimit,
        Self::Unavailable,
        Self::Invalid,
        Self::Cancelled,
    ];

    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::OverLimit => "over_limit",
            Self::Unavailable => "unavailable",
            Self::Invalid => "invalid",
            Self::Cancelled => "given_up",
        }
    }
}

impl ConnectionCloseReason {
    pub(super) const ALL: [Self; 7] = [
        Self::Idle,
        Self::HeaderTimeout,
        Self::BodyTimeout,
        Self::SlowRead,
        Self::Flood,
        Self::Protocol,
        Self::TunnelIdle,
    ];

    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Idle => "idle_timeout",
            Self::HeaderTimeout => "header_timeout",
            Self::BodyTimeout => "body_timeout",
            Self::SlowRead => "slow_read",
            Self::Flood => "flood",
            Self::Protocol => "protocol",
            Self::TunnelIdle => "tunnel_idle",
        }
    }
}
