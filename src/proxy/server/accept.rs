//! Handshake of a new connection before HTTP: the PROXY header and TLS, if configured.

pub(crate) mod proxy_header;

use ipnet::IpNet;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{Instant, timeout, timeout_at};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::{Error as TlsError, HandshakeKind, ServerConnection};
use tokio_util::either::Either;

use super::accept::proxy_header::ProxyHeader;
use super::handler::{ConnectionPeer, HandshakeError, ProxyHeaderError, TlsHandshakeError};
use super::listener::ListenerConfig;
use super::monitored_socket::MonitoredSocket;
use super::transport::{ClientTransport, SocketBelowTls};
use crate::clock;
use crate::proxy::http::headers::ClientCertFields;
use crate::tls::{CertificateSubject, ParsedCertificate, ServerTls};

/// Initial size of the buffer that receives a PROXY header. Most PROXY headers fit into the buffer.
const TYPICAL_PROXY_HEADER_BYTES: usize = 256;
/// Maximum encrypted bytes that wait for the socket: one full record and a part.
const TLS_SEND_BUFFER_BYTES: usize = 32 * 1024;
/// Time limit for delivering a TLS alert to the client.
const TLS_ALERT_TIMEOUT: Duration = Duration::from_secs(3);

/// Connection that completed its handshake.
pub(crate) struct CompletedHandshake {
    pub(crate) socket: ClientTransport,
    pub(crate) peer: ConnectionPeer,
    /// Whether ALPN negotiated HTTP/2 (`true`) or HTTP/1.1 (`false`); `None` without ALPN.
    pub(crate) negotiated_http2: Option<bool>,
}

/// Connection that failed its handshake.
pub(crate) struct FailedHandshake {
    /// Failure to record; `None` for a port probe that sent nothing.
    pub(crate) error: Option<HandshakeError>,
    /// Socket that delivers a TLS alert to the client before it closes.
    alert_socket: Option<SocketBelowTls>,
}

impl From<Option<HandshakeError>> for FailedHandshake {
    fn from(error: Option<HandshakeError>) -> Self {
        Self {
            error,
            alert_socket: None,
        }
    }
}

/// Runs the handshake of a connection from `addr`. `admit` counts it for its client, once a
/// PROXY header has named the client and before TLS, and returns `false` to close it.
///
/// # Errors
/// Returns a [`FailedHandshake`], which the caller records and closes.
pub(crate) async fn run_handshake(
    config: &ListenerConfig,
    mut socket: SocketBelowTls,
    addr: SocketAddr,
    admit: impl FnOnce(SocketAddr) -> bool,
) -> Result<CompletedHandshake, FailedHandshake> {
    let deadline = Instant::now() + config.settings.header_timeout;
    let (mut client, mut is_https) = (addr, config.settings.assumes_https);
    if let Some(from) = &config.settings.proxy_protocol_from {
        // Boxed, so that the connection's future does not reserve space for reading the PROXY
        // header.
        let header = Box::pin(read_proxy_header(&mut socket, addr, from, deadline)).await;
        let header = header.map_err(|error| error.map(HandshakeError::ProxyHeader))?;
        client = header.source.unwrap_or(addr);
        is_https = header.is_tls.unwrap_or(is_https);
    }
    if !admit(client) {
        return Err(None.into());
    }
    if let Some(tls) = config.tls.load_full() {
        return Box::pin(run_tls_handshake(&tls, socket, client, deadline)).await;
    }
    Ok(CompletedHandshake {
        socket: Either::Left(socket),
        peer: ConnectionPeer {
            is_https,
            ..ConnectionPeer::new(client)
        },
        negotiated_http2: None,
    })
}

/// Reads the PROXY header, and puts back the bytes that follow it.
async fn read_proxy_header(
    socket: &mut SocketBelowTls,
    addr: SocketAddr,
    from: &[IpNet],
    deadline: Instant,
) -> Result<ProxyHeader, Option<ProxyHeaderError>> {
    let reject = |error: ProxyHeaderError| {
        tracing::debug!(peer = %addr, kind = error.into_str(), "PROXY header rejected; connection closed");
        Some(error)
    };
    let ip = addr.ip().to_canonical();
    if !from.iter().any(|net| net.contains(&ip)) {
        return Err(reject(ProxyHeaderError::NotAllowed));
    }
    let mut received = Vec::with_capacity(TYPICAL_PROXY_HEADER_BYTES);
    loop {
        match timeout_at(deadline, socket.read_buf(&mut received)).await {
            Ok(Ok(1..)) => {}
            // A port probe that sends nothing is no error.
            Ok(_) if received.is_empty() => return Err(None),
            Ok(_) => return Err(reject(ProxyHeaderError::Closed)),
            Err(_elapsed) => return Err(reject(ProxyHeaderError::Timeout)),
        }
        // The parser accepts or rejects at the maximum header length at the latest, which bounds
        // the buffer.
        if let Some(header) = proxy_header::parse_proxy_header(&received).map_err(reject)? {
            socket.put_back(received.get(header.len..).unwrap_or_default());
            return Ok(header);
        }
    }
}

async fn run_tls_handshake(
    tls: &ServerTls,
    mut socket: SocketBelowTls,
    client: SocketAddr,
    deadline: Instant,
) -> Result<CompletedHandshake, FailedHandshake> {
    socket.is_below_tls = true;
    let handshake = TlsAcceptor::from(Arc::clone(&tls.config))
        .accept(socket)
        .into_fallible();
    let mut stream = match timeout_at(deadline, handshake).await {
        Ok(Ok(stream)) => stream,
        Ok(Err((error, socket))) => {
            tracing::debug!(%error, peer = %client, "TLS handshake failed");
            let error = classify_tls_error(&error, &socket).map(HandshakeError::Tls);
            return Err(FailedHandshake {
                error,
                alert_socket: Some(socket),
            });
        }
        Err(_elapsed) => {
            tracing::debug!(peer = %client, "TLS handshake timed out");
            return Err(Some(HandshakeError::Tls(TlsHandshakeError::Timeout)).into());
        }
    };
    // Set after the handshake: rustls would cut its own messages.
    let session = stream.get_mut().1;
    session.set_buffer_limit(Some(TLS_SEND_BUFFER_BYTES));
    let (_, session) = stream.get_ref();
    let http2 = session.alpn_protocol().map(|protocol| protocol == b"h2");
    let certificate = checked_client_certificate_subject(session).map_err(|error| {
        tracing::debug!(peer = %client, "TLS session resumption rejected; client certificate expired");
        Some(HandshakeError::Tls(error))
    })?;
    let client_cert_fields = match session.peer_certificates() {
        Some(chain) if tls.forwards_client_cert => ClientCertFields::from_chain(chain),
        _ => None,
    };
    let peer = ConnectionPeer {
        is_https: true,
        certificate_subject: certificate,
        client_cert_fields: client_cert_fields.map(Box::new),
        ..ConnectionPeer::new(client)
    };
    Ok(CompletedHandshake {
        socket: Either::Right(Box::new(stream)),
        peer,
        negotiated_http2: http2,
    })
}

/// Classifies a handshake error. Returns `None` if the client sent nothing, as a port probe does.
fn classify_tls_error(error: &io::Error, socket: &SocketBelowTls) -> Option<TlsHandshakeError> {
    let error = error
        .get_ref()
        .and_then(|error| error.downcast_ref::<TlsError>());
    let Some(error) = error else {
        return socket.has_received.then_some(TlsHandshakeError::Closed);
    };
    Some(match error {
        TlsError::InvalidMessage(_)
        | TlsError::InappropriateMessage { .. }
        | TlsError::InappropriateHandshakeMessage { .. }
        | TlsError::PeerMisbehaved(_)
        | TlsError::DecryptError
        | TlsError::PeerSentOversizedRecord => TlsHandshakeError::Invalid,
        TlsError::PeerIncompatible(_) => TlsHandshakeError::Incompatible,
        TlsError::NoApplicationProtocol => TlsHandshakeError::NoProtocol,
        TlsError::NoCertificatesPresented => TlsHandshakeError::NoCertificate,
        TlsError::InvalidCertificate(_) | TlsError::InvalidCertRevocationList(_) => {
            TlsHandshakeError::BadCertificate
        }
        TlsError::AlertReceived(_) => TlsHandshakeError::Refused,
        _ => TlsHandshakeError::Other,
    })
}

/// Returns the subject of the client's certificate, if the client presented one. Rejects a resumed
/// session whose certificate has expired.
fn checked_client_certificate_subject(
    session: &ServerConnection,
) -> Result<Option<CertificateSubject>, TlsHandshakeError> {
    let Some(der) = session.peer_certificates().and_then(|chain| chain.first()) else {
        return Ok(None);
    };
    // A certificate that rustls verified but this parser cannot read has an empty subject.
    let certificate = ParsedCertificate::from_der(der).unwrap_or_default();
    // A session resumption does not verify the certificate again, so its expiry is checked here.
    let is_resumed = session.handshake_kind() == Some(HandshakeKind::Resumed);
    if is_resumed && certificate.validity_s.1 < clock::unix_time_s() {
        return Err(TlsHandshakeError::BadCertificate);
    }
    Ok(Some(certificate.subject))
}

impl FailedHandshake {
    /// Closes the connection. Before the close of a connection with a TLS alert, unread input is
    /// discarded: it would turn the close into a reset, which can destroy the alert before the
    /// client reads it.
    pub(crate) async fn close(self) {
        let Some(socket) = self.alert_socket else {
            return;
        };
        let monitor = Rc::clone(&socket.monitor);
        monitor.exchange.has_unread_input.set(true);
        let mut socket = MonitoredSocket::new(Either::Left(socket), monitor, 0);
        let shutdown = timeout(TLS_ALERT_TIMEOUT, socket.shutdown());
        if !matches!(shutdown.await, Ok(Ok(()))) {
            tracing::debug!("TLS alert not delivered before the connection closed");
        }
    }
}
