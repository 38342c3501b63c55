//! TLS towards clients: which certificates we show, and which of theirs we ask for.

use super::certificate::{self, ParsedCertificate};
use super::{parse_certificates, parse_private_key};
use arc_swap::ArcSwapOption;
use sha2::{Digest, Sha256};
use std::fmt;
use std::sync::Arc;
use tokio_rustls::rustls::crypto::aws_lc_rs::{self, Ticketer};
use tokio_rustls::rustls::pki_types::CertificateRevocationListDer;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::server::{
    ClientHello, NoClientAuth, ResolvesServerCert, WebPkiClientVerifier,
};
use tokio_rustls::rustls::sign::CertifiedKey;
use tokio_rustls::rustls::{Error, ServerConfig};

/// What clients are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientAuth {
    /// Nothing.
    None,
    /// A certificate, which may be missing but not be wrong.
    Optional,
    /// A certificate.
    Require,
}

/// Which certificates of clients are believed.
#[derive(Debug)]
pub struct ClientAuthSettings {
    pub auth: ClientAuth,
    /// What has to stand behind them: PEM; needed unless `auth` is [`ClientAuth::Retry`].
    pub ca: Option<Vec<u8>>,
    /// What is not believed any more. `None`: nobody says so.
    pub crl: Option<RevocationLists>,
}

/// Lists of certificates that their issuers have revoked.
#[derive(Debug)]
pub struct RevocationLists {
    lists: Vec<CertificateRevocationListDer<'static>>,
    /// The earliest time at which one should have been replaced, in seconds since the Unix epoch.
    pub expiry_s: Option<u64>,
}

/// What holds for new connections, replaced by a reload. `None`: cleartext.
pub type ReloadableServerTls = Arc<ArcSwapOption<ServerTls>>;

/// A certificate that we show, with its chain and its key.
#[derive(Clone)]
pub struct ServerIdentity {
    key: Arc<CertifiedKey>,
    /// The certificate itself; what stands behind it in the chain is for clients.
    pub certificate: ParsedCertificate,
    /// The earliest end in the chain, in seconds since the Unix epoch.
    pub expiry_s: u64,
    digest: [u8; 32],
}

/// How TLS is spoken with clients: one set of certificates, and one memory of sessions.
pub struct ServerTls {
    config: Arc<ServerConfig>,
    /// Where each certificate came from, and when it ends.
    certificate_expiries: Vec<(String, u64)>,
    /// Stands for all that it was made of.
    digest: [u8; 32],
}

/// What is wrong with a certificate and its key.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    #[error("{0}")]
    Certificate(String),
    #[error("{0}")]
    Key(String),
}

impl ServerIdentity {
    /// A chain, our own certificate first, and the key that belongs to it; both PEM.
    ///
    /// # Errors
    /// An [`IdentityError`] in words that show nothing of the key.
    pub fn from_pem(chain_pem: &[u8], key_pem: &[u8]) -> Result<Self, IdentityError> {
        let chain = parse_certificates(chain_pem).map_err(IdentityError::Certificate)?;
        let mut parsed_certificates = chain.iter().map(|der| ParsedCertificate::from_der(der));
        let certificate = match parsed_certificates.next() {
            Some(first) => first.map_err(IdentityError::Certificate)?,
            None => {
                return Err(IdentityError::Certificate(
                    "there is no certificate in it".to_owned(),
                ));
            }
        };
        let expiry = parsed_certificates
            .filter_map(|issuer| Some(issuer.ok()?.validity_s.1))
            .fold(certificate.validity_s.1, u64::min);
        let key = parse_private_key(key_pem).map_err(IdentityError::Key)?;
        let key = CertifiedKey::from_der(chain, key, &aws_lc_rs::default_provider()).map_err(
            |error| match error {
                Error::InconsistentKeys(_) => {
                    IdentityError::Key("the key is not that of the certificate".to_owned())
                }
                error => IdentityError::Key(format!("the key can't be used: {error}")),
            },
        )?;
        let digest = digest_texts([chain_pem, key_pem]);
        Ok(Self {
            key: Arc::new(key),
            certificate,
            expiry_s: expiry,
            digest,
        })
    }

    fn has_dns_name(&self, name: &str) -> bool {
        self.certificate.dns_names.iter().any(|own| **own == *name)
    }

    /// Whether a wildcard covers the name: it stands for one label.
    fn has_wildcard_for(&self, name: &str) -> bool {
        let Some((_, parent)) = name.split_once('.') else {
            return false;
        };
        self.certificate
            .dns_names
            .iter()
            .any(|own| own.strip_prefix("*.") == Some(parent))
    }

    fn supports_signature_schemes(&self, hello: &ClientHello<'_>) -> bool {
        self.key
            .key
            .choose_scheme(hello.signature_schemes())
            .is_some()
    }
}

/// Keys show nothing of themselves.
impl fmt::Debug for ServerIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerIdentity")
            .field("certificate", &self.certificate)
            .finish_non_exhaustive()
    }
}

impl RevocationLists {
    /// # Errors
    /// Words that say what is wrong with the PEM text.
    pub fn from_pem(pem: &[u8]) -> Result<Self, String> {
        let lists: Result<Vec<_>, _> = CertificateRevocationListDer::pem_slice_iter(pem).collect();
        let lists = lists.map_err(|error| error.to_string())?;
        if lists.is_empty() {
            return Err("there is no PEM list of revoked certificates in it".to_owned());
        }
        let mut expiry = None;
        for list in &lists {
            let end = certificate::parse_next_update(list)?;
            expiry = [expiry, end].into_iter().flatten().min();
        }
        Ok(Self {
            lists,
            expiry_s: expiry,
        })
    }
}

impl ServerTls {
    /// `identities`: where each comes from, and what it is; the first is for clients that name no other.
    ///
    /// # Errors
    /// Words that say what is wrong with the CA.
    pub fn new(
        identities: Vec<(String, ServerIdentity)>,
        clients: &ClientAuthSettings,
    ) -> Result<Self, String> {
        let mut hash = Sha256::new();
        for (_, identity) in &identities {
            hash.update(identity.digest);
        }
        hash.update([clients.auth as u8]);
        hash.update(digest_texts([clients.ca.as_deref().unwrap_or_default()]));
        hash.update(digest_texts(
            clients
                .crl
                .iter()
                .flat_map(|crl| &crl.lists)
                .map(AsRef::as_ref),
        ));
        let certificate_expiries = identities
            .iter()
            .map(|(name, identity)| (name.clone(), identity.expiry_s))
            .collect();
        let resolver = Arc::new(CertificateResolver(
            identities
                .into_iter()
                .map(|(_, identity)| identity)
                .collect(),
        ));
        let config = build_server_config(resolver, clients)?;
        Ok(Self {
            config: Arc::new(config),
            certificate_expiries,
            digest: hash.finalize().into(),
        })
    }

    /// For the handshakes of new connections.
    pub fn config(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.config)
    }

    /// Where each certificate came from, and when the first of its chain ends: seconds since the Unix epoch.
    pub fn certificate_expiries(&self) -> &[(String, u64)] {
        &self.certificate_expiries
    }
}

impl PartialEq for ServerTls {
    fn eq(&self, other: &Self) -> bool {
        self.digest == other.digest
    }
}

impl fmt::Debug for ServerTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerTls")
            .field("expiries", &self.certificate_expiries)
            .finish_non_exhaustive()
    }
}

/// Each has its own key for tickets: a session that was begun under other rules is not resumed under these, as a
/// resumption does not look at certificates again.
fn build_server_config(
    resolver: Arc<CertificateResolver>,
    clients: &ClientAuthSettings,
) -> Result<ServerConfig, String> {
    let provider = Arc::new(aws_lc_rs::default_provider());
    let verifier = match (clients.auth, &clients.ca) {
        (ClientAuth::None, _) => Arc::new(NoClientAuth),
        (_, None) => return Err("there is no CA to check clients' certificates against".to_owned()),
        (auth, Some(pem)) => {
            let builder = WebPkiClientVerifier::builder_with_provider(
                super::parse_root_certificates(pem)?.into(),
                Arc::clone(&provider),
            );
            let builder = if auth == ClientAuth::Optional {
                builder.allow_unauthenticated()
            } else {
                builder
            };
            let builder = match &clients.crl {
                Some(crl) => builder
                    .with_crls(crl.lists.iter().cloned())
                    .enforce_revocation_expiration(),
                None => builder,
            };
            builder.build().map_err(|error| error.to_string())?
        }
    };
    let builder = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?;
    let mut config = builder
        .with_client_cert_verifier(verifier)
        .with_cert_resolver(resolver);
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    // Kept by clients: a memory of ours would have to be bounded, and so be forgotten under load.
    config.ticketer = Ticketer::new().map_err(|error| error.to_string())?;
    Ok(config)
}

/// What we show to whom.
#[derive(Debug)]
struct CertificateResolver(Vec<ServerIdentity>);

impl ResolvesServerCert for CertificateResolver {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let chosen = self.select_identity(hello.server_name().unwrap_or_default(), |identity| {
            identity.supports_signature_schemes(&hello)
        });
        chosen.map(|identity| Arc::clone(&identity.key))
    }
}

impl CertificateResolver {
    /// The first whose name is asked for, before one by wildcard, before the first of all. Among several for one name,
    /// one whose kind of key the client knows. `name`: in lower case, as rustls has it.
    fn select_identity(
        &self,
        name: &str,
        is_supported: impl Fn(&ServerIdentity) -> bool,
    ) -> Option<&ServerIdentity> {
        let name = name.strip_suffix('.').unwrap_or(name);
        let matching = |matches: fn(&ServerIdentity, &str) -> bool| {
            self.0
                .iter()
                .filter(move |identity| matches(identity, name))
        };
        let candidates = matching(ServerIdentity::has_dns_name)
            .chain(matching(ServerIdentity::has_wildcard_for));
        let fallback = || candidates.clone().next().or(self.0.first());
        candidates
            .clone()
            .find(|identity| is_supported(identity))
            .or_else(fallback)
    }
}

/// Of several texts, so that nothing moves from one to the next unseen.
fn digest_texts<'t>(texts: impl IntoIterator<Item = &'t [u8]>) -> [u8; 32] {
    let mut hash = Sha256::new();
    for text in texts {
        hash.update(Sha256::digest(text));
    }
    hash.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{CertificateParams, KeyPair, PKCS_ECDSA_P256_SHA256, PKCS_ED25519};
    use tokio_rustls::rustls::SignatureAlgorithm;

    #[test]
    fn selects_the_certificate_whose_key_type_the_client_supports() {
        let kinds = [&PKCS_ECDSA_P256_SHA256, &PKCS_ED25519];
        let names = [
            "first.example",
            "a.example",
            "a.example",
            "*.example",
            "*.example",
        ];
        let identities = names.iter().enumerate().map(|(at, name)| {
            let key = KeyPair::generate_for(kinds[at % 2]).unwrap();
            let certificate = CertificateParams::new(vec![(*name).to_owned()])
                .unwrap()
                .self_signed(&key)
                .unwrap();
            ServerIdentity::from_pem(certificate.pem().as_bytes(), key.serialize_pem().as_bytes())
                .unwrap()
        });
        let resolver = CertificateResolver(identities.collect());
        let selected_index = |name: &str, supported: &[SignatureAlgorithm]| {
            let chosen = resolver
                .select_identity(name, |identity| {
                    supported.contains(&identity.key.key.algorithm())
                })
                .unwrap();
            resolver
                .0
                .iter()
                .position(|identity| identity.digest == chosen.digest)
                .unwrap()
        };
        use SignatureAlgorithm::{ECDSA, ED25519, RSA};
        assert_eq!(selected_index("a.example", &[ECDSA, ED25519]), 1);
        assert_eq!(
            selected_index("a.example.", &[ECDSA, ED25519]),
            1,
            "the root's dot says nothing"
        );
        assert_eq!(selected_index("a.example", &[ECDSA]), 2);
        assert_eq!(selected_index("b.example", &[ED25519]), 3);
        assert_eq!(selected_index("b.example", &[ECDSA]), 4);
        // Nobody can be helped whose kind isn't there, and whose name isn't gets the first.
        assert_eq!(
            (
                selected_index("a.example", &[RSA]),
                selected_index("c.d.example", &[ECDSA])
            ),
            (1, 0)
        );
        assert_eq!(
            (
                selected_index("", &[ED25519]),
                selected_index("first.example", &[RSA])
            ),
            (0, 0)
        );
    }
}
