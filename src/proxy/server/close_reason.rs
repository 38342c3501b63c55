//! Reasons why tidegate closes connections and streams.

/// Why tidegate closed a client's connection or HTTP/2 stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectionCloseReason {
    /// The connection had no request for `idle_timeout`.
    Idle,
    /// A request head was incomplete after `header_timeout`.
    HeaderTimeout,
    /// No data of a request body arrived for `body_idle_timeout`.
    BodyTimeout,
    /// The client read nothing for `body_idle_timeout`, or did not close when requested to.
    SlowRead,
    /// The client sent excessive HTTP/2 control frames or stream resets.
    Flood,
    /// The client sent no valid HTTP.
    Protocol,
    /// No data passed through a tunnel for `upstream.tunnel_idle_timeout`.
    TunnelIdle,
    /// The connection was idle longest when a new one arrived at `max_connections`.
    ConnectionLimit,
    /// The client had `max_connections_per_client` connections.
    ClientLimit,
    /// The connection was among the largest when `listen.max_memory` was reached.
    Memory,
}

impl ConnectionCloseReason {
    /// Every [`ConnectionCloseReason::name`], in the order of declaration.
    pub const NAMES: &[&str] = &[
        Self::Idle.name(),
        Self::HeaderTimeout.name(),
        Self::BodyTimeout.name(),
        Self::SlowRead.name(),
        Self::Flood.name(),
        Self::Protocol.name(),
        Self::TunnelIdle.name(),
        Self::ConnectionLimit.name(),
        Self::ClientLimit.name(),
        Self::Memory.name(),
    ];

    /// Name of the reason in metric labels.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle_timeout",
            Self::HeaderTimeout => "header_timeout",
            Self::BodyTimeout => "body_timeout",
            Self::SlowRead => "slow_read",
            Self::Flood => "flood",
            Self::Protocol => "protocol",
            Self::TunnelIdle => "tunnel_idle",
            Self::ConnectionLimit => "connection_limit",
            Self::ClientLimit => "client_limit",
            Self::Memory => "memory",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::ConnectionCloseReason;

    #[test]
    fn names_match_discriminants() {
        assert_eq!(
            ConnectionCloseReason::NAMES.len(),
            ConnectionCloseReason::Memory as usize + 1
        );
        for one in [
            ConnectionCloseReason::Idle,
            ConnectionCloseReason::HeaderTimeout,
            ConnectionCloseReason::BodyTimeout,
            ConnectionCloseReason::SlowRead,
            ConnectionCloseReason::Flood,
            ConnectionCloseReason::Protocol,
            ConnectionCloseReason::TunnelIdle,
            ConnectionCloseReason::ConnectionLimit,
            ConnectionCloseReason::ClientLimit,
            ConnectionCloseReason::Memory,
        ] {
            assert_eq!(ConnectionCloseReason::NAMES[one as usize], one.name());
        }
    }
}
