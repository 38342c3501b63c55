//! TLS towards a server: whom we trust, who we are, and what the server is called.

use std::fmt;
use std::sync::Arc;
use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::pki_types::{InvalidDnsNameError, ServerName};

/// How TLS is spoken to a server.
#[derive(Clone)]
pub struct ClientTls {
    config: Arc<ClientConfig>,
    server_name: Option<ServerName<'static>>,
    /// Stands for the texts that it was made of.
    digest: [u8; 32],
}

impl ClientTls {
    /// Certificates are checked against `server_name` if there is one, else against the address that is connected to.
    /// `digest` differs whenever the others do.
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

    /// As it was made, without protocols to offer.
    pub fn config(&self) -> &Arc<ClientConfig> {
        &self.config
    }

    /// What the certificate of `host` is checked against.
    ///
    /// # Errors
    /// When a certificate can't be for such a name.
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
