//! The client that a connection comes from.

use std::net::SocketAddr;

use crate::proxy::http::headers::AddressText;
use crate::proxy::settings::ListenerKind;
use crate::tls::CertificateSubject;

/// Client of a connection: its address, TLS state and certificate.
#[derive(Debug)]
pub struct ConnectionPeer {
    pub listener_kind: ListenerKind,
    /// Client address. A PROXY header overrides the socket's address. IPv4-mapped IPv6 addresses
    /// appear as IPv4, and Unix socket clients as 127.0.0.1.
    pub addr: SocketAddr,
    pub is_tls: bool,
    /// Subject of the client certificate, if the client presented one.
    pub certificate_subject: Option<CertificateSubject>,
    /// Client IP formatted for forwarding headers, once per connection.
    pub(in crate::proxy) address_text: AddressText,
}

impl ConnectionPeer {
    pub(in crate::proxy) fn new(addr: SocketAddr) -> Self {
        let addr = SocketAddr::new(addr.ip().to_canonical(), addr.port());
        Self {
            listener_kind: ListenerKind::Proxy,
            addr,
            is_tls: false,
            certificate_subject: None,
            address_text: AddressText::new(addr.ip()),
        }
    }
}
