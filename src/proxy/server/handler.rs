//! Interface between the server and the application that answers its requests.

use http::{Response, StatusCode, request};
use std::future::Future;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use strum::{IntoStaticStr, VariantNames};

use crate::proxy::ResponseBody;
use crate::proxy::body::RequestBody;
use crate::proxy::body::informational_responses::InformationalForwarder;
use crate::proxy::http::headers::AddressText;
use crate::proxy::http::headers::ClientCertFields;
use crate::proxy::settings::ListenerKind;
use crate::telemetry::metrics::WorkerMetrics;
use crate::tls::CertificateSubject;

/// Handles the requests of one worker.
pub trait RequestHandler: 'static {
    /// Handles one request. If the client disconnects, the future is dropped. `interim` sends
    /// informational (1xx) responses before the final one.
    ///
    /// The head is borrowed: passed by value, it would be copied into each future on its way.
    fn handle(
        &self,
        head: &mut request::Parts,
        body: RequestBody,
        peer: &ConnectionPeer,
        interim: &mut InformationalForwarder,
    ) -> impl Future<Output = Response<ResponseBody>>;

    /// Records a connection that failed before its first request.
    fn record_connection_setup_error(&self, _error: HandshakeError) {}

    /// Records that the server answered an unreadable request head with `status`.
    fn record_unreadable_request(&self, _status: StatusCode, _peer: &ConnectionPeer) {}

    /// Status that replaces that of responses to unreadable request heads from this peer.
    fn unreadable_request_status(&self, _peer: &ConnectionPeer) -> Option<StatusCode> {
        None
    }

    /// Address prefix by which the connections of this peer are counted. `None` for a trusted
    /// proxy, which carries the requests of many clients.
    fn counted_client(&self, peer: IpAddr) -> Option<IpAddr> {
        Some(peer)
    }

    /// Metrics shard of this worker.
    fn worker_metrics(&self) -> Option<Arc<WorkerMetrics>> {
        None
    }

    /// Finishes outstanding work after the worker's last request. The worker thread ends
    /// afterwards.
    fn finish_outstanding_work(&self) -> impl Future<Output = ()> {
        std::future::ready(())
    }
}

/// Client of a connection: its address, protocol and certificate.
#[derive(Debug)]
pub struct ConnectionPeer {
    pub listener_kind: ListenerKind,
    /// Client address. A PROXY header overrides the socket's address. IPv4-mapped IPv6 addresses
    /// appear as IPv4, and Unix socket clients as 127.0.0.1.
    pub addr: SocketAddr,
    /// Whether the client uses TLS, to tidegate or to the load balancer in front.
    pub is_https: bool,
    /// Subject of the client certificate, if the client presented one.
    pub certificate_subject: Option<CertificateSubject>,
    /// The client certificate for the upstream, if `listen.tls.client_cert_header` is on.
    pub(crate) client_cert_fields: Option<Box<ClientCertFields>>,
    /// Client IP formatted for forwarding headers, once per connection.
    pub(crate) address_text: AddressText,
}

impl ConnectionPeer {
    pub(crate) fn new(addr: SocketAddr) -> Self {
        let addr = SocketAddr::new(addr.ip().to_canonical(), addr.port());
        Self {
            listener_kind: ListenerKind::Proxy,
            addr,
            is_https: false,
            certificate_subject: None,
            client_cert_fields: None,
            address_text: AddressText::new(addr.ip()),
        }
    }
}

/// Reason why a connection failed before its first request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandshakeError {
    ProxyHeader(ProxyHeaderError),
    Tls(TlsHandshakeError),
}

/// Reason why a connection was closed because of its PROXY header. The names are metric labels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr, VariantNames)]
#[strum(serialize_all = "snake_case", const_into_str)]
pub enum ProxyHeaderError {
    /// The peer is not in the configured networks.
    NotAllowed,
    /// The header did not arrive in time.
    Timeout,
    /// The peer disconnected within the header.
    Closed,
    /// The connection does not start with a PROXY header.
    Absent,
    Malformed,
    TooLong,
    /// The CRC-32C checksum does not match.
    Checksum,
}

/// Reason why a TLS handshake failed. The names are metric labels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr, VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum TlsHandshakeError {
    /// The handshake did not complete in time.
    Timeout,
    /// The client disconnected after it had sent bytes. A port probe that sends nothing is no
    /// error.
    Closed,
    /// The client's bytes are not TLS, or are malformed.
    Invalid,
    /// Client and server share no version, cipher or key type.
    Incompatible,
    /// Client and server share no ALPN protocol.
    NoProtocol,
    /// The client's certificate is missing.
    NoCertificate,
    /// The client's certificate is untrusted, expired or revoked.
    BadCertificate,
    /// The client sent an alert, for instance because it does not trust the server.
    Refused,
    Other,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_names_match_their_discriminants() {
        assert_eq!(
            TlsHandshakeError::VARIANTS.len(),
            TlsHandshakeError::Other as usize + 1
        );
        for error in [
            TlsHandshakeError::Timeout,
            TlsHandshakeError::NoCertificate,
            TlsHandshakeError::Other,
        ] {
            assert_eq!(
                TlsHandshakeError::VARIANTS[error as usize],
                <&str>::from(error)
            );
        }
        assert_eq!(
            ProxyHeaderError::VARIANTS.len(),
            ProxyHeaderError::Checksum as usize + 1
        );
        for error in [
            ProxyHeaderError::NotAllowed,
            ProxyHeaderError::Absent,
            ProxyHeaderError::Checksum,
        ] {
            assert_eq!(
                ProxyHeaderError::VARIANTS[error as usize],
                <&str>::from(error)
            );
        }
    }
}
