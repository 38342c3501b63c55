//! TLS towards a server: configuration and the name to verify.

use super::TrustedCertificates;
use std::io;
use std::sync::Arc;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::aws_lc_rs;
use tokio_rustls::rustls::pki_types::{
    CertificateDer, InvalidDnsNameError, PrivateKeyDer, ServerName,
};
use tokio_rustls::rustls::{ClientConfig, Error};

/// Certificate chain, own certificate first, and its private key.
type ClientTlsIdentity = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

/// TLS client settings for one server.
#[derive(Clone, Debug)]
pub struct ClientTls {
    config: Arc<ClientConfig>,
    server_name: Option<ServerName<'static>>,
    /// Digest of the configured texts, for comparison.
    digest: [u8; 32],
}

impl ClientTls {
    /// Trusts the certificates and presents `identity` on request. Server certificates are verified
    /// against `server_name`, or without one against the host connected to. `digest` must differ if
    /// any other argument differs.
    ///
    /// # Errors
    /// Fails if certificate and key do not match or cannot be used.
    pub fn new(
        trusted: TrustedCertificates,
        identity: Option<ClientTlsIdentity>,
        server_name: Option<ServerName<'static>>,
        digest: [u8; 32],
    ) -> Result<Self, Error> {
        let provider = Arc::new(aws_lc_rs::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(trusted));
        let config = match identity {
            Some((chain, key)) => builder.with_client_auth_cert(chain, key)?,
            None => builder.with_no_client_auth(),
        };
        Ok(Self {
            config: Arc::new(config),
            server_name,
            digest,
        })
    }

    /// Connector that offers these protocols by ALPN.
    pub fn connector(&self, protocols: &[&str]) -> TlsConnector {
        let mut config = ClientConfig::clone(&self.config);
        let names = protocols.iter().map(|name| name.as_bytes().to_vec());
        config.alpn_protocols = names.collect();
        TlsConnector::from(Arc::new(config))
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
    let remedy = match inner {
        Some(inner) => suggest_remedy(inner),
        None => (error.kind() == io::ErrorKind::UnexpectedEof).then_some(NO_TLS),
    };
    match remedy {
        Some(remedy) => format!("{error}; {remedy}"),
        None => error.to_string(),
    }
}

const NAME_IT_IN_CA: &str =
    "ca must be a file with the certificate of its issuer, or with this certificate itself";
const SET_CERT: &str = "the server requires a client certificate that it trusts: set cert and key";
const RENEW: &str =
    "renew the server's certificate, in ca too if that names it, or check the clocks";
const NO_TLS: &str = "the server may speak no TLS on this port";

/// Names in the debug text of rustls' errors, and what to do about them. The first one counts.
const REMEDIES: [(&str, &str); 20] = [
    // Alerts of the server.
    (
        "CertificateExpired",
        "the server takes the client certificate for expired: renew cert and key",
    ),
    (
        "CertificateRevoked",
        "the client certificate is revoked: set cert and key to another one",
    ),
    ("CertificateRequired", SET_CERT),
    ("CertificateUnknown", SET_CERT),
    ("BadCertificate", SET_CERT),
    ("UnknownCA", SET_CERT),
    (
        "HandshakeFailure",
        "the server may require a client certificate (set cert and key), or has no cipher in common with TLS 1.2 and 1.3",
    ),
    ("ProtocolVersion", "the server must support TLS 1.2 or 1.3"),
    (
        "UnrecognisedName",
        "set server_name to a name that the server has a certificate for",
    ),
    // Errors of the client.
    (
        "ServerDoesNotSupportTls12Or13",
        "the server must support TLS 1.2 or 1.3",
    ),
    ("InvalidContentType", NO_TLS),
    ("UnknownIssuer", NAME_IT_IN_CA),
    ("CaUsedAsEndEntity", NAME_IT_IN_CA),
    ("BadSignature", NAME_IT_IN_CA),
    (
        "UnsupportedCertVersion",
        "name it in ca itself and use TLS 1.3, or issue it in version 3",
    ),
    (
        "NotValidForName",
        "set server_name to a name of the certificate, or issue it with this name or address (openssl: -addext subjectAltName=DNS:… or IP:…)",
    ),
    ("Expired", RENEW),
    ("NotValidYet", RENEW),
    (
        "InvalidPurpose",
        "issue the server's certificate for servers (extendedKeyUsage=serverAuth)",
    ),
    (
        "NoApplicationProtocol",
        "the server must offer h2 or http/1.1 by ALPN, or no ALPN",
    ),
];

/// What to do about an error of the connection to a TLS server, if the error shows it.
pub fn suggest_remedy(error: &Error) -> Option<&'static str> {
    let text = format!("{error:?}");
    let mut remedies = REMEDIES.iter();
    let found = remedies.find(|(name, _)| text.contains(name))?;
    Some(found.1)
}

impl PartialEq for ClientTls {
    fn eq(&self, other: &Self) -> bool {
        self.digest == other.digest
    }
}

impl Eq for ClientTls {}
