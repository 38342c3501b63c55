//! Reasons why a connection fails before its first request.

use strum::{IntoStaticStr, VariantNames};

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
