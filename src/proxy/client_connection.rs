//! State of one client connection, shared by its socket, its requests and the server.

pub(crate) mod connection_memory;
pub(crate) mod connection_monitor;
pub(crate) mod connection_output;
pub(crate) mod open_connections;

use strum::{IntoStaticStr, VariantNames};

/// Why tidegate closed a client's connection or HTTP/2 stream. The names are metric labels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr, VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum ConnectionCloseReason {
    /// The connection had no request for `idle_timeout`.
    #[strum(serialize = "idle_timeout")]
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_match_discriminants() {
        assert_eq!(
            ConnectionCloseReason::VARIANTS.len(),
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
            assert_eq!(
                ConnectionCloseReason::VARIANTS[one as usize],
                <&str>::from(one)
            );
        }
    }
}
