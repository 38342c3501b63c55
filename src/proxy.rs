//! Data path between the client's socket and the upstream's.

mod body;
mod client_connection;
mod client_counts;
mod connection_io;
mod ext_authz;
mod http;
mod http2_frames;
#[cfg(any(test, fuzzing))]
pub mod properties;
mod rate_limit_service;
mod server;
mod service;
mod settings;
#[cfg(test)]
mod tests;
mod upstream;
mod upstream_error;

pub use body::informational_responses::InformationalForwarder;
pub use body::tunnel::Tunnel;
pub use body::{BodyError, RequestBody};
pub use client_connection::ConnectionCloseReason;
pub use client_connection::open_connections::OpenConnections;
pub use http::header_lines::{is_client_cert_field, is_stripped_before_policies};
pub use http::inbound_request::{InboundRequest, InboundRequestError};
pub use http::request_validation::{RequestValidationError, normalize_host};
pub use http::response_cost::{CostMeter, ResponseFlow};
pub use rate_limit_service::MAX_MESSAGE_BYTES;
pub use rate_limit_service::grpc::RlsCallResult;
pub use server::ProxyServer;
pub use server::ShutdownSignal;
pub use server::handler::{
    ConnectionPeer, HandshakeError, ProxyHeaderError, RequestHandler, TlsHandshakeError,
};
pub(crate) use server::worker::describe_spawn_error;
pub use server::worker::{BLOCKING_THREAD_KEEP_ALIVE, start_blocking_thread};
pub use service::ProxyService;
pub use settings::{
    ExtAuthzSettings, ExtraListenerSettings, ListenSettings, ListenerKind, ShutdownSettings,
    UpstreamScheme, UpstreamSettings, UpstreamUrl,
};
pub use upstream::response_body::ResponseBody;
pub use upstream::response_body::UpstreamBody;
pub use upstream::{UpstreamClient, UpstreamSharedState, UpstreamUrlError};

pub use upstream_error::{UPSTREAM_FAULTS, UpstreamError, UpstreamErrorKind};
