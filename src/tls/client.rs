//! TLS towards a server: configuration and the name to verify.

use std::fmt;
use std::io;
use std::sync::Arc;
use tokio_rustls::rustls::pki_types::{InvalidDnsNameError, ServerName};
use tokio_rustls::rustls::{ClientConfig, Error};

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

const NAME_IT_IN_CA: &str =
    "ca must be a file with the certificate of its issuer, or with this certificate itself";
const SET_CERT: &str = "the server may require a client certificate: set cert and key";
const RENEW: &str = "renew the certificate, in ca too if that names it, or check the clocks";

/// Names in the debug text of rustls' errors, and what to do about them.
const REMEDIES: [(&str, &str); 13] = [
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
        "issue the certificate for servers (extendedKeyUsage=serverAuth)",
    ),
    (
        "InvalidContentType",
        "the server may speak no TLS on this port",
    ),
    ("CertificateRequired", SET_CERT),
    ("HandshakeFailure", SET_CERT),
    ("CertificateUnknown", SET_CERT),
    ("UnknownCA", SET_CERT),
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

impl fmt::Debug for ClientTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientTls")
            .field("server_name", &self.server_name)
            .finish_non_exhaustive()
    }
}
