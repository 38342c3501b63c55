//! What comes before HTTP on a new connection: a PROXY header and TLS, if these are wanted.

pub(in crate::proxy) mod proxy_header;

use ipnet::IpNet;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{Instant, timeout, timeout_at};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::{Error as TlsError, HandshakeKind, ServerConnection};

use super::connection_timeouts::MonitoredSocket;
use super::transport::{ClientTransport, RawSocket};
use crate::clock;
use crate::proxy::ListenSettings;
use crate::proxy::server::ConnectionPeer;
use crate::proxy::server::accept::proxy_header::ProxyHeaderParseError;
use crate::tls::{self, CertificateSubject, ParsedCertificate, ServerTls};

/// What most PROXY headers fit into.
const TYPICAL_HEADER_BYTES: usize = 256;
/// For a client to take the alert that tells it what was wrong.
const ALERT_TIMEOUT: Duration = Duration::from_secs(3);

/// How connections are let in; one per worker.
#[derive(Clone, Debug)]
pub(in crate::proxy) struct HandshakeAcceptor {
    proxy_protocol_from: Option<Arc<[IpNet]>>,
    tls: tls::ReloadableServerTls,
    /// For all that comes before HTTP.
    handshake_timeout: Duration,
}

/// A connection that has come in.
pub(in crate::proxy) struct AcceptedConnection {
    pub(in crate::proxy) socket: ClientTransport,
    pub(in crate::proxy) peer: ConnectionPeer,
    /// Whether client and server have agreed on HTTP/2, or on HTTP/1.1. `None`: on nothing.
    pub(in crate::proxy) negotiated_http2: Option<bool>,
}

/// A connection that has not come in.
pub(in crate::proxy) struct FailedHandshake {
    /// `None`: there is nothing to say of it.
    pub(in crate::proxy) fault: Option<HandshakeError>,
    /// A client that is being told why.
    alert_socket: Option<RawSocket>,
}

/// Why a connection ended before its first request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandshakeError {
    ProxyHeader(ProxyHeaderError),
    Tls(TlsHandshakeError),
}

/// Why a connection was closed for its PROXY header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProxyHeaderError {
    /// It comes from nobody who is listed.
    NotAllowed,
    /// It did not come in time.
    Timeout,
    /// The peer left in the middle of it.
    Closed,
    /// The connection begins with something else.
    Absent,
    Malformed,
    TooLong,
    /// Its checksum is wrong.
    Checksum,
}

/// Why a connection ended in its TLS handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlsHandshakeError {
    /// It was not over in time.
    Timeout,
    /// The client left, though not without a word: who only looks whether somebody listens does no wrong.
    Closed,
    /// That was no TLS, or broken.
    Invalid,
    /// No version, cipher or kind of key that both know.
    Incompatible,
    /// No protocol that both know.
    NoProtocol,
    /// The client's certificate is missing.
    NoCertificate,
    /// The client's certificate is none of ours to trust, over, or revoked.
    BadCertificate,
    /// The client refused: it does not trust us, for instance.
    Refused,
    Other,
}

impl ProxyHeaderError {
    /// Every [`ProxyHeaderError::name`], in the order of declaration.
    pub const NAMES: &[&str] = &[
        Self::NotAllowed.name(),
        Self::Timeout.name(),
        Self::Closed.name(),
        Self::Absent.name(),
        Self::Malformed.name(),
        Self::TooLong.name(),
        Self::Checksum.name(),
    ];

    /// The name in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::NotAllowed => "not_allowed",
            Self::Timeout => "timeout",
            Self::Closed => "closed",
            Self::Absent => "absent",
            Self::Malformed => "malformed",
            Self::TooLong => "too_long",
            Self::Checksum => "checksum",
        }
    }
}

impl From<ProxyHeaderParseError> for ProxyHeaderError {
    fn from(fault: ProxyHeaderParseError) -> Self {
        match fault {
            ProxyHeaderParseError::Absent => Self::Absent,
            ProxyHeaderParseError::Malformed => Self::Malformed,
            ProxyHeaderParseError::TooLong => Self::TooLong,
            ProxyHeaderParseError::Checksum => Self::Checksum,
        }
    }
}

impl TlsHandshakeError {
    /// Every [`TlsHandshakeError::name`], in the order of declaration.
    pub const NAMES: &[&str] = &[
        Self::Timeout.name(),
        Self::Closed.name(),
        Self::Invalid.name(),
        Self::Incompatible.name(),
        Self::NoProtocol.name(),
        Self::NoCertificate.name(),
        Self::BadCertificate.name(),
        Self::Refused.name(),
        Self::Other.name(),
    ];

    /// The name in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Timeout => "timeout",
            Self::Closed => "closed",
            Self::Invalid => "invalid",
            Self::Incompatible => "incompatible",
            Self::NoProtocol => "no_protocol",
            Self::NoCertificate => "no_certificate",
            Self::BadCertificate => "bad_certificate",
            Self::Refused => "refused",
            Self::Other => "other",
        }
    }

    /// `None` if there is nothing to say of it.
    fn from_io_error(error: &io::Error, socket: &RawSocket) -> Option<Self> {
        let Some(error) = error
            .get_ref()
            .and_then(|error| error.downcast_ref::<TlsError>())
        else {
            return socket.has_received().then_some(Self::Closed);
        };
        Some(match error {
            TlsError::InvalidMessage(_)
            | TlsError::InappropriateMessage { .. }
            | TlsError::InappropriateHandshakeMessage { .. }
            | TlsError::PeerMisbehaved(_)
            | TlsError::DecryptError
            | TlsError::PeerSentOversizedRecord => Self::Invalid,
            TlsError::PeerIncompatible(_) => Self::Incompatible,
            TlsError::NoApplicationProtocol => Self::NoProtocol,
            TlsError::NoCertificatesPresented => Self::NoCertificate,
            TlsError::InvalidCertificate(_) | TlsError::InvalidCertRevocationList(_) => {
                Self::BadCertificate
            }
            TlsError::AlertReceived(_) => Self::Refused,
            _ => Self::Other,
        })
    }
}

impl HandshakeAcceptor {
    /// `tls` may change while it is used.
    pub(in crate::proxy) fn new(settings: &ListenSettings, tls: &tls::ReloadableServerTls) -> Self {
        let from = settings.proxy_protocol_from.as_deref();
        Self {
            proxy_protocol_from: from.map(Arc::from),
            tls: Arc::clone(tls),
            handshake_timeout: settings.header_timeout,
        }
    }

    /// Lets a connection in that `addr` has opened.
    ///
    /// # Errors
    /// Why it ends here.
    pub(in crate::proxy) async fn accept(
        &self,
        mut socket: RawSocket,
        addr: SocketAddr,
    ) -> Result<AcceptedConnection, FailedHandshake> {
        let deadline = Instant::now() + self.handshake_timeout;
        let mut client = addr;
        if let Some(from) = &self.proxy_protocol_from {
            // Boxed, as below, or every connection would have room for it to its end.
            let source = Box::pin(read_proxy_source(&mut socket, addr, from, deadline)).await;
            let to_failure = |fault: Option<ProxyHeaderError>| FailedHandshake {
                fault: fault.map(HandshakeError::ProxyHeader),
                alert_socket: None,
            };
            client = source.map_err(to_failure)?.unwrap_or(addr);
        }
        let Some(tls) = self.tls.load_full() else {
            return Ok(AcceptedConnection {
                socket: ClientTransport::Plain(socket),
                peer: ConnectionPeer::new(client),
                negotiated_http2: None,
            });
        };
        Box::pin(accept_tls(&tls, socket, client, deadline)).await
    }
}

/// Whom the PROXY header names, if anybody. What stands behind it is read again.
async fn read_proxy_source(
    socket: &mut RawSocket,
    addr: SocketAddr,
    from: &[IpNet],
    deadline: Instant,
) -> Result<Option<SocketAddr>, Option<ProxyHeaderError>> {
    let reject = |fault: ProxyHeaderError| {
        tracing::debug!(peer = %addr, kind = fault.name(), "a connection was closed for its PROXY header");
        Some(fault)
    };
    let ip = addr.ip().to_canonical();
    if !from.iter().any(|net| net.contains(&ip)) {
        return Err(reject(ProxyHeaderError::NotAllowed));
    }
    let mut received = Vec::with_capacity(TYPICAL_HEADER_BYTES);
    loop {
        match timeout_at(deadline, socket.read_buf(&mut received)).await {
            Ok(Ok(1..)) => {}
            // Who only looks whether somebody listens does no wrong.
            Ok(_) if received.is_empty() => return Err(None),
            Ok(_) => return Err(reject(ProxyHeaderError::Closed)),
            Err(_elapsed) => return Err(reject(ProxyHeaderError::Timeout)),
        }
        // At its longest, a header is known to be whole, or none.
        if let Some(header) =
            proxy_header::parse(&received).map_err(|fault| reject(fault.into()))?
        {
            socket.put_back(received.get(header.len..).unwrap_or_default());
            return Ok(header.source);
        }
    }
}

async fn accept_tls(
    tls: &ServerTls,
    socket: RawSocket,
    client: SocketAddr,
    deadline: Instant,
) -> Result<AcceptedConnection, FailedHandshake> {
    let handshake = TlsAcceptor::from(tls.config())
        .accept(socket)
        .into_fallible();
    let stream = match timeout_at(deadline, handshake).await {
        Ok(Ok(stream)) => stream,
        Ok(Err((error, socket))) => {
            tracing::debug!(%error, peer = %client, "a TLS handshake failed");
            let fault = TlsHandshakeError::from_io_error(&error, &socket).map(HandshakeError::Tls);
            return Err(FailedHandshake {
                fault,
                alert_socket: Some(socket),
            });
        }
        Err(_elapsed) => {
            tracing::debug!(peer = %client, "a TLS handshake took too long");
            return Err(FailedHandshake {
                fault: Some(HandshakeError::Tls(TlsHandshakeError::Timeout)),
                alert_socket: None,
            });
        }
    };
    let (_, session) = stream.get_ref();
    let http2 = session.alpn_protocol().map(|protocol| protocol == b"h2");
    let certificate = client_certificate_subject(session).map_err(|fault| {
        tracing::debug!(peer = %client, "a session was to be resumed with a certificate that is over");
        FailedHandshake { fault: Some(HandshakeError::Tls(fault)), alert_socket: None }
    })?;
    let peer = ConnectionPeer {
        is_tls: true,
        certificate_subject: certificate,
        ..ConnectionPeer::new(client)
    };
    Ok(AcceptedConnection {
        socket: ClientTransport::Tls(Box::new(stream)),
        peer,
        negotiated_http2: http2,
    })
}

/// Whom the client's certificate is about, if it has shown one.
fn client_certificate_subject(
    session: &ServerConnection,
) -> Result<Option<CertificateSubject>, TlsHandshakeError> {
    let Some(der) = session.peer_certificates().and_then(|chain| chain.first()) else {
        return Ok(None);
    };
    // What rustls has verified and we can't read names nobody.
    let certificate = ParsedCertificate::from_der(der).unwrap_or_default();
    // A resumption does not look at the certificate again.
    let is_resumed = session.handshake_kind() == Some(HandshakeKind::Resumed);
    if is_resumed && certificate.validity_s.1 < clock::unix_time_s() {
        return Err(TlsHandshakeError::BadCertificate);
    }
    Ok(Some(certificate.subject))
}

impl FailedHandshake {
    /// Ends the connection. Unread bytes would make a reset of the end, which destroys an alert on its way: the client
    /// would not learn what was wrong.
    pub(in crate::proxy) async fn close(self) {
        let Some(socket) = self.alert_socket else {
            return;
        };
        let monitor = socket.monitor();
        monitor.set_unread_input();
        let mut socket = MonitoredSocket::new(ClientTransport::Plain(socket), monitor);
        if !matches!(timeout(ALERT_TIMEOUT, socket.shutdown()).await, Ok(Ok(()))) {
            tracing::debug!("the client was not there to be told");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_names_match_their_discriminants() {
        assert_eq!(
            TlsHandshakeError::NAMES.len(),
            TlsHandshakeError::Other as usize + 1
        );
        for fault in [
            TlsHandshakeError::Timeout,
            TlsHandshakeError::NoCertificate,
            TlsHandshakeError::Other,
        ] {
            assert_eq!(TlsHandshakeError::NAMES[fault as usize], fault.name());
        }
        assert_eq!(
            ProxyHeaderError::NAMES.len(),
            ProxyHeaderError::Checksum as usize + 1
        );
        for fault in [
            ProxyHeaderError::NotAllowed,
            ProxyHeaderError::Absent,
            ProxyHeaderError::Checksum,
        ] {
            assert_eq!(ProxyHeaderError::NAMES[fault as usize], fault.name());
        }
    }
}
