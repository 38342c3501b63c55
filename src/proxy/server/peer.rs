//! The client that a connection comes from.

use std::net::SocketAddr;

use crate::proxy::http::client_cert::ClientCertFields;
use crate::proxy::http::headers::AddressText;
use crate::proxy::settings::ListenerKind;
use crate::tls::CertificateSubject;

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
