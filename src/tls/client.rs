//! TLS towards a server: configuration and the name to verify.

use std::fmt;
use std::sync::Arc;
use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::pki_types::{InvalidDnsNameError, ServerName};

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
