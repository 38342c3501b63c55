//! What comes before HTTP on a new connection: a PROXY header and TLS, if these are wanted.

pub(super) mod proxy_header;

use ipnet::IpNet;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{Instant, timeout, timeout_at};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::{Error as TlsError, HandshakeKind, ServerConnection};

use super::ListenSettings;
use super::server::Peer;
use super::transport::{RawSocket, Transport};
use super::watch::WatchedSocket;
use crate::clock;
use crate::tls::{self, Certificate, ServerTls, Subject};
use proxy_header::HeaderFault;

/// What most PROXY headers fit into.
const USUAL_HEADER_BYTES: usize = 256;
/// For a client to take the alert that tells it what was wrong.
const ALERT_TIME: Duration = Duration::from_secs(3);

/// How connections are let in; one per worker.
#[derive(Clone, Debug)]
pub(super) struct Entrance {
    proxy_protocol_from: Option<Arc<[IpNet]>>,
    tls: tls::Current,
    /// For all that comes before HTTP.
    patience: Duration,
}

/// A connection that has come in.
pub(super) struct Entered {
    pub(super) socket: Transport,
    pub(super) peer: Peer,
    /// Whether client and server have agreed on HTTP/2, or on HTTP/1.1. `None`: on nothing.
    pub(super) http2: Option<bool>,
}

/// A connection that has not come in.
pub(super) struct TurnedAway {
    /// `None`: there is nothing to say of it.
    pub(super) fault: Option<EntryFault>,
    /// A client that is being told why.
    to_be_told: Option<RawSocket>,
}

/// Why a connection ended before its first request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryFault {
    ProxyHeader(ProxyHeaderFault),
    Tls(TlsFault),
}

/// Why a connection was closed for its PROXY header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProxyHeaderFault {
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
pub enum TlsFault {
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

impl ProxyHeaderFault {
    /// Every [`ProxyHeaderFault::name`], in the order of declaration.
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

impl From<HeaderFault> for ProxyHeaderFault {
    fn from(fault: HeaderFault) -> Self {
        match fault {
            HeaderFault::Absent => Self::Absent,
            HeaderFault::Malformed => Self::Malformed,
            HeaderFault::TooLong => Self::TooLong,
            HeaderFault::Checksum => Self::Checksum,
        }
    }
}

impl TlsFault {
    /// Every [`TlsFault::name`], in the order of declaration.
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
    fn of(error: &io::Error, socket: &RawSocket) -> Option<Self> {
        let Some(error) = error
            .get_ref()
            .and_then(|error| error.downcast_ref::<TlsError>())
        else {
            return socket.has_spoken().then_some(Self::Closed);
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

impl Entrance {
    /// `tls` may change while it is used.
    pub(super) fn new(settings: &ListenSettings, tls: &tls::Current) -> Self {
        let from = settings.proxy_protocol_from.as_deref();
        Self {
            proxy_protocol_from: from.map(Arc::from),
            tls: Arc::clone(tls),
            patience: settings.header_timeout,
        }
    }

    /// Lets a connection in that `addr` has opened.
    ///
    /// # Errors
    /// Why it ends here.
    pub(super) async fn enter(
        &self,
        mut socket: RawSocket,
        addr: SocketAddr,
    ) -> Result<Entered, TurnedAway> {
        let deadline = Instant::now() + self.patience;
        let mut client = addr;
        if let Some(from) = &self.proxy_protocol_from {
            // Boxed, as below, or every connection would have room for it to its end.
            let told = Box::pin(read_proxy_header(&mut socket, addr, from, deadline)).await;
            let quietly = |fault: Option<ProxyHeaderFault>| TurnedAway {
                fault: fault.map(EntryFault::ProxyHeader),
                to_be_told: None,
            };
            client = told.map_err(quietly)?.unwrap_or(addr);
        }
        let Some(tls) = self.tls.load_full() else {
            return Ok(Entered {
                socket: Transport::Plain(socket),
                peer: Peer::new(client),
                http2: None,
            });
        };
        Box::pin(shake_hands(&tls, socket, client, deadline)).await
    }
}

/// Whom the PROXY header names, if anybody. What stands behind it is read again.
async fn read_proxy_header(
    socket: &mut RawSocket,
    addr: SocketAddr,
    from: &[IpNet],
    deadline: Instant,
) -> Result<Option<SocketAddr>, Option<ProxyHeaderFault>> {
    let refuse = |fault: ProxyHeaderFault| {
        tracing::debug!(peer = %addr, kind = fault.name(), "a connection was closed for its PROXY header");
        Some(fault)
    };
    let ip = addr.ip().to_canonical();
    if !from.iter().any(|net| net.contains(&ip)) {
        return Err(refuse(ProxyHeaderFault::NotAllowed));
    }
    let mut seen = Vec::with_capacity(USUAL_HEADER_BYTES);
    loop {
        match timeout_at(deadline, socket.read_buf(&mut seen)).await {
            Ok(Ok(1..)) => {}
            // Who only looks whether somebody listens does no wrong.
            Ok(_) if seen.is_empty() => return Err(None),
            Ok(_) => return Err(refuse(ProxyHeaderFault::Closed)),
            Err(_elapsed) => return Err(refuse(ProxyHeaderFault::Timeout)),
        }
        // At its longest, a header is known to be whole, or none.
        if let Some(header) = proxy_header::parse(&seen).map_err(|fault| refuse(fault.into()))? {
            socket.put_back(seen.get(header.len..).unwrap_or_default());
            return Ok(header.source);
        }
    }
}

async fn shake_hands(
    tls: &ServerTls,
    socket: RawSocket,
    client: SocketAddr,
    deadline: Instant,
) -> Result<Entered, TurnedAway> {
    let handshake = TlsAcceptor::from(tls.config())
        .accept(socket)
        .into_fallible();
    let stream = match timeout_at(deadline, handshake).await {
        Ok(Ok(stream)) => stream,
        Ok(Err((error, socket))) => {
            tracing::debug!(%error, peer = %client, "a TLS handshake failed");
            let fault = TlsFault::of(&error, &socket).map(EntryFault::Tls);
            return Err(TurnedAway {
                fault,
                to_be_told: Some(socket),
            });
        }
        Err(_elapsed) => {
            tracing::debug!(peer = %client, "a TLS handshake took too long");
            return Err(TurnedAway {
                fault: Some(EntryFault::Tls(TlsFault::Timeout)),
                to_be_told: None,
            });
        }
    };
    let (_, session) = stream.get_ref();
    let http2 = session.alpn_protocol().map(|protocol| protocol == b"h2");
    let certificate = subject(session).map_err(|fault| {
        tracing::debug!(peer = %client, "a session was to be resumed with a certificate that is over");
        TurnedAway { fault: Some(EntryFault::Tls(fault)), to_be_told: None }
    })?;
    let peer = Peer {
        tls: true,
        certificate,
        ..Peer::new(client)
    };
    Ok(Entered {
        socket: Transport::Tls(Box::new(stream)),
        peer,
        http2,
    })
}

/// Whom the client's certificate is about, if it has shown one.
fn subject(session: &ServerConnection) -> Result<Option<Subject>, TlsFault> {
    let Some(der) = session.peer_certificates().and_then(|chain| chain.first()) else {
        return Ok(None);
    };
    // What rustls has verified and we can't read names nobody.
    let certificate = Certificate::read(der).unwrap_or_default();
    // A resumption does not look at the certificate again.
    let is_resumed = session.handshake_kind() == Some(HandshakeKind::Resumed);
    if is_resumed && certificate.valid.1 < clock::unix_s() {
        return Err(TlsFault::BadCertificate);
    }
    Ok(Some(certificate.subject))
}

impl TurnedAway {
    /// Ends the connection. Unread bytes would make a reset of the end, which destroys an alert on its way: the client
    /// would not learn what was wrong.
    pub(super) async fn part(self) {
        let Some(socket) = self.to_be_told else {
            return;
        };
        let watch = socket.watch();
        watch.set_unread();
        let mut socket = WatchedSocket::new(Transport::Plain(socket), watch);
        if !matches!(timeout(ALERT_TIME, socket.shutdown()).await, Ok(Ok(()))) {
            tracing::debug!("the client was not there to be told");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stand_where_their_kinds_count() {
        assert_eq!(TlsFault::NAMES.len(), TlsFault::Other as usize + 1);
        for fault in [TlsFault::Timeout, TlsFault::NoCertificate, TlsFault::Other] {
            assert_eq!(TlsFault::NAMES[fault as usize], fault.name());
        }
        assert_eq!(
            ProxyHeaderFault::NAMES.len(),
            ProxyHeaderFault::Checksum as usize + 1
        );
        for fault in [
            ProxyHeaderFault::NotAllowed,
            ProxyHeaderFault::Absent,
            ProxyHeaderFault::Checksum,
        ] {
            assert_eq!(ProxyHeaderFault::NAMES[fault as usize], fault.name());
        }
    }
}
