//! Reasons why a connection fails before its first request.

/// Reason why a connection failed before its first request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandshakeError {
    ProxyHeader(ProxyHeaderError),
    Tls(TlsHandshakeError),
}

/// Reason why a connection was closed because of its PROXY header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

/// Reason why a TLS handshake failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

    /// Name of the error in metric labels.
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

    /// Name of the error in metric labels.
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
        for error in [
            TlsHandshakeError::Timeout,
            TlsHandshakeError::NoCertificate,
            TlsHandshakeError::Other,
        ] {
            assert_eq!(TlsHandshakeError::NAMES[error as usize], error.name());
        }
        assert_eq!(
            ProxyHeaderError::NAMES.len(),
            ProxyHeaderError::Checksum as usize + 1
        );
        for error in [
            ProxyHeaderError::NotAllowed,
            ProxyHeaderError::Absent,
            ProxyHeaderError::Checksum,
        ] {
            assert_eq!(ProxyHeaderError::NAMES[error as usize], error.name());
        }
    }
}
