//! TLS towards a server: configuration and the name to verify.

use std::fmt;
use std::io;
use std::sync::Arc;
use tokio_rustls::rustls::pki_types::{InvalidDnsNameError, ServerName};
use tokio_rustls::rustls::{
    AlertDescription, CertificateError, ClientConfig, Error, InvalidMessage,
};

/// TLS client settings for one server.
#[derive(Clone)]
pub struct ClientTls {
    config: Arc<ClientConfig>,
    server_name: Option<ServerName<'static>>,
    /// Digest of the configured texts, for comparison.
    digest: [u8; 32],
}

impl ClientTls {
    /// Server certificates are verified against `server_name`, or without one against the host
    /// connected to. `digest` must differ if any other argument differs.
    pub fn new(
        config: ClientConfig,
        server_name: Option<ServerName<'static>>,
        digest: [u8; 32],
    ) -> Self {
        Self {
            config: Arc::new(config),
            server_name,
            digest,
        }
    }

    /// Client configuration, without ALPN protocols.
    pub fn config(&self) -> &Arc<ClientConfig> {
        &self.config
    }

    /// Name that the certificate of `host` is verified against.
    ///
    /// # Errors
    /// Fails if no certificate can be valid for `host`.
    pub fn server_name_for(&self, host: &str) -> Result<ServerName<'static>, InvalidDnsNameError> {
        match &self.server_name {
            Some(name) => Ok(name.clone()),
            None => ServerName::try_from(host.to_owned()),
        }
    }
}

/// Describes why the connection to a TLS server failed, and what to do about it.
pub fn describe_tls_error(error: &io::Error) -> String {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
    match inner.and_then(suggest_remedy) {
        Some(remedy) => format!("{error}; {remedy}"),
        None => error.to_string(),
    }
}

/// What to do about an error of the connection to a TLS server, if the error shows it.
pub fn suggest_remedy(error: &Error) -> Option<&'static str> {
    use CertificateError as Certificate;
    Some(match error {
        Error::InvalidCertificate(reason) => match reason {
            Certificate::Other(other) if other.to_string().contains("CertVersion") => {
                "a certificate of version 1 must itself be in the file of ca, and needs TLS 1.3; else issue it in version 3"
            }
            // Among the others: a certificate authority as the server's certificate.
            Certificate::UnknownIssuer | Certificate::BadSignature | Certificate::Other(_) => {
                "ca must be a file with the certificate of its issuer, or with this certificate itself"
            }
            Certificate::NotValidForName | Certificate::NotValidForNameContext { .. } => {
                "set server_name to a name of the certificate, or issue it with this name or address (openssl: -addext subjectAltName=DNS:… or IP:…)"
            }
            Certificate::Expired | Certificate::ExpiredContext { .. } => {
                "renew the certificate; if ca names it, there too"
            }
            Certificate::NotValidYet | Certificate::NotValidYetContext { .. } => {
                "check the clocks of both machines"
            }
            Certificate::InvalidPurpose | Certificate::InvalidPurposeContext { .. } => {
                "issue the certificate for servers (extendedKeyUsage=serverAuth)"
            }
            _ => return None,
        },
        Error::InvalidMessage(InvalidMessage::InvalidContentType) => {
            "the server may speak no TLS on this port"
        }
        Error::AlertReceived(
            AlertDescription::CertificateRequired
            | AlertDescription::HandshakeFailure
            | AlertDescription::BadCertificate
            | AlertDescription::CertificateUnknown
            | AlertDescription::UnknownCA,
        ) => "the server may require a client certificate that it trusts: set cert and key",
        _ => return None,
    })
}

impl PartialEq for ClientTls {
    fn eq(&self, other: &Self) -> bool {
        self.digest == other.digest
    }
}

impl Eq for ClientTls {}

impl fmt::Debug for ClientTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientTls")
            .field("server_name", &self.server_name)
            .finish_non_exhaustive()
    }
}
