//! Interface between the server and the application that answers its requests.

use http::{Request, Response, StatusCode};
use std::future::Future;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;

use super::handshake_error::HandshakeError;
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
    fn handle(
        self: Rc<Self>,
        request: Request<RequestBody>,
        peer: Arc<ConnectionPeer>,
        interim: InformationalForwarder,
    ) -> impl Future<Output = Response<ResponseBody>> + 'static;

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
