//! TLS towards clients: server certificates and client authentication.

use super::certificate::{
    ParsedCertificate, parse_certificates, parse_crl_next_update, parse_private_key,
};
use super::trusted_certificates::{TrustedCertificates, TrustedClientVerifier};
use arc_swap::ArcSwapOption;
use sha2::{Digest, Sha256};
use std::sync::Arc;
use strum::{EnumString, VariantNames};
use tokio_rustls::rustls::crypto::aws_lc_rs::{self, Ticketer};
use tokio_rustls::rustls::pki_types::CertificateRevocationListDer;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::server::danger::ClientCertVerifier;
use tokio_rustls::rustls::server::{
    ClientHello, NoClientAuth, ResolvesServerCert, WebPkiClientVerifier,
};
use tokio_rustls::rustls::sign::CertifiedKey;
use tokio_rustls::rustls::{Error, ServerConfig};

/// Client certificate requirement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, EnumString, VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum ClientAuth {
    /// No certificate is requested.
    #[default]
    None,
    /// A certificate is requested. It may be missing, but must be valid if present.
    Optional,
    /// A valid certificate is required.
    Require,
}

/// Rules for client certificates.
#[derive(Debug, Default)]
pub struct ClientAuthSettings {
    pub auth: ClientAuth,
    /// PEM trust roots. Required unless `auth` is [`ClientAuth::None`].
    pub ca: Option<Vec<u8>>,
    /// Revoked certificates. `None` disables the revocation check.
    pub crl: Option<RevocationLists>,
    /// Whether the upstream receives the certificate.
    pub forwards_certificate: bool,
}

/// Certificate revocation lists.
#[derive(Debug)]
pub struct RevocationLists {
    lists: Vec<CertificateRevocationListDer<'static>>,
    /// Earliest next update of the lists, in seconds since the Unix epoch.
    pub expiry_s: Option<u64>,
}

/// TLS settings for new connections, which a reload replaces. `None` for cleartext.
pub type ReloadableServerTls = Arc<ArcSwapOption<ServerTls>>;

/// Server certificate with its chain and its private key.
#[derive(Clone, Debug)]
pub struct ServerIdentity {
    /// Its debug output omits the private key.
    key: Arc<CertifiedKey>,
    /// End-entity certificate of the chain.
    pub certificate: ParsedCertificate,
    /// Earliest expiry in the chain, in seconds since the Unix epoch.
    pub expiry_s: u64,
    digest: [u8; 32],
}

/// TLS server settings: a set of certificates and one session ticket key.
#[derive(Debug)]
pub struct ServerTls {
    pub config: Arc<ServerConfig>,
    /// Source of each certificate and earliest expiry of its chain, in seconds since the Unix
    /// epoch.
    pub certificate_expiries: Vec<(String, u64)>,
    /// Whether the application gets the client's certificate.
    pub forwards_client_cert: bool,
    /// Digest of all inputs, for comparison.
    digest: [u8; 32],
}

impl ServerIdentity {
    /// Parses a PEM chain, own certificate first, and its PEM private key.
    ///
    /// # Errors
    /// Returns `cert` or `key`, whichever is wrong, and a message that reveals nothing of the key.
    pub fn from_pem(chain_pem: &[u8], key_pem: &[u8]) -> Result<Self, (&'static str, String)> {
        let of_cert = |reason| ("cert", reason);
        let of_key = |reason| ("key", reason);
        let chain = parse_certificates(chain_pem).map_err(of_cert)?;
        let mut parsed_certificates = chain.iter().map(|der| ParsedCertificate::from_der(der));
        let no_certificate = || Err("there is no certificate in it".to_owned());
        let certificate = parsed_certificates.next().unwrap_or_else(no_certificate);
        let certificate = certificate.map_err(of_cert)?;
        let expiry = parsed_certificates
            .filter_map(|issuer| Some(issuer.ok()?.validity_s.1))
            .fold(certificate.validity_s.1, u64::min);
        let key = parse_private_key(key_pem).map_err(of_key)?;
        let key = CertifiedKey::from_der(chain, key, &aws_lc_rs::default_provider());
        let key = key.map_err(|error| match error {
            Error::InconsistentKeys(_) => {
                of_key("the key is not that of the certificate".to_owned())
            }
            error => of_key(format!("the key cannot be used: {error}")),
        })?;
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

    /// Whether a wildcard name of the certificate covers `name`. A wildcard stands for one label.
    fn has_wildcard_for(&self, name: &str) -> bool {
        let mut names = self.certificate.dns_names.iter();
        name.split_once('.')
            .is_some_and(|(_, parent)| names.any(|own| own.strip_prefix("*.") == Some(parent)))
    }
}

impl RevocationLists {
    /// Parses the certificate revocation lists in a PEM text, at least one.
    ///
    /// # Errors
    /// Returns a message that describes the problem in the PEM text.
    pub fn from_pem(pem: &[u8]) -> Result<Self, String> {
        let lists: Result<Vec<_>, _> = CertificateRevocationListDer::pem_slice_iter(pem).collect();
        let lists = lists.map_err(|error| error.to_string())?;
        if lists.is_empty() {
            return Err("there is no PEM certificate revocation list in it".to_owned());
        }
        let mut expiry = None;
        for list in &lists {
            let end = parse_crl_next_update(list)?;
            expiry = [expiry, end].into_iter().flatten().min();
        }
        Ok(Self {
            lists,
            expiry_s: expiry,
        })
    }
}

impl ServerTls {
    /// `identities` are pairs of a source name and a certificate. The first one serves clients
    /// without a matching server name.
    ///
    /// # Errors
    /// Returns a message that describes the problem with the client CA or its revocation lists.
    pub fn new(
        identities: Vec<(String, ServerIdentity)>,
        clients: &ClientAuthSettings,
    ) -> Result<Self, String> {
        let mut hash = Sha256::new();
        for (_, identity) in &identities {
            hash.update(identity.digest);
        }
        hash.update([clients.auth as u8, u8::from(clients.forwards_certificate)]);
        hash.update(digest_texts([clients.ca.as_deref().unwrap_or_default()]));
        let lists = clients.crl.iter().flat_map(|crl| &crl.lists);
        hash.update(digest_texts(lists.map(AsRef::as_ref)));
        let expiries = identities.iter();
        let expiries = expiries.map(|(name, identity)| (name.clone(), identity.expiry_s));
        let certificate_expiries = expiries.collect();
        let identities = identities.into_iter().map(|(_, identity)| identity);
        let resolver = Arc::new(CertificateResolver(identities.collect()));
        let config = build_server_config(resolver, clients)?;
        Ok(Self {
            config: Arc::new(config),
            certificate_expiries,
            forwards_client_cert: clients.forwards_certificate,
            digest: hash.finalize().into(),
        })
    }
}

impl PartialEq for ServerTls {
    fn eq(&self, other: &Self) -> bool {
        self.digest == other.digest
    }
}

/// Builds the TLS configuration. Each configuration has its own session ticket key: a session that
/// began under other rules must not resume, because resumption does not verify certificates again.
fn build_server_config(
    resolver: Arc<CertificateResolver>,
    clients: &ClientAuthSettings,
) -> Result<ServerConfig, String> {
    let provider = Arc::new(aws_lc_rs::default_provider());
    let verifier: Arc<dyn ClientCertVerifier> = match (clients.auth, &clients.ca) {
        (ClientAuth::None, _) => Arc::new(NoClientAuth),
        (_, None) => return Err("there is no CA to verify client certificates".to_owned()),
        (auth, Some(pem)) => {
            let trusted = TrustedCertificates::from_pem(pem)?;
            let mut builder = WebPkiClientVerifier::builder_with_provider(
                Arc::clone(&trusted.roots),
                Arc::clone(&provider),
            );
            if auth == ClientAuth::Optional {
                builder = builder.allow_unauthenticated();
            }
            if let Some(crl) = &clients.crl {
                let lists = crl.lists.iter().cloned();
                builder = builder.with_crls(lists).enforce_revocation_expiration();
            }
            let issuer_verifier = builder.build().map_err(|error| error.to_string())?;
            match &clients.crl {
                None => Arc::new(TrustedClientVerifier {
                    trusted,
                    algorithms: provider.signature_verification_algorithms,
                    issuer_verifier,
                }),
                // Revocation needs an issuer with a revocation list.
                Some(_) => issuer_verifier,
            }
        }
    };
    let builder = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?;
    let mut config = builder
        .with_client_cert_verifier(verifier)
        .with_cert_resolver(resolver);
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    // Clients keep the session tickets. A session cache on the server would have to be bounded, and
    // would lose sessions under load.
    config.ticketer = Ticketer::new().map_err(|error| error.to_string())?;
    Ok(config)
}

/// Selects the certificate for a client.
#[derive(Debug)]
struct CertificateResolver(Vec<ServerIdentity>);

impl ResolvesServerCert for CertificateResolver {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let schemes = hello.signature_schemes();
        let chosen = self.select_identity(hello.server_name().unwrap_or_default(), |identity| {
            identity.key.key.choose_scheme(schemes).is_some()
        });
        chosen.map(|identity| Arc::clone(&identity.key))
    }
}

impl CertificateResolver {
    /// Selects the first certificate with this exact name, then by wildcard, then the first of all.
    /// Among the certificates for a name, prefers one with a key type that the client supports.
    /// `name` is in lower case, as rustls provides it.
    fn select_identity(
        &self,
        name: &str,
        is_supported: impl Fn(&ServerIdentity) -> bool,
    ) -> Option<&ServerIdentity> {
        let name = name.strip_suffix('.').unwrap_or(name);
        let matching = |matches: fn(&ServerIdentity, &str) -> bool| {
            let identities = self.0.iter();
            identities.filter(move |identity| matches(identity, name))
        };
        let candidates = matching(ServerIdentity::has_dns_name)
            .chain(matching(ServerIdentity::has_wildcard_for));
        let fallback = || candidates.clone().next().or(self.0.first());
        let mut supported = candidates.clone();
        supported
            .find(|identity| is_supported(identity))
            .or_else(fallback)
    }
}

/// Digests several texts. Each text is hashed on its own, so that moving bytes from one text to the
/// next changes the digest.
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
        let identities = names.iter().enumerate().map(|(index, name)| {
            let key = KeyPair::generate_for(kinds[index % 2]).unwrap();
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
            "a trailing dot is ignored"
        );
        assert_eq!(selected_index("a.example", &[ECDSA]), 2);
        assert_eq!(selected_index("b.example", &[ED25519]), 3);
        assert_eq!(selected_index("b.example", &[ECDSA]), 4);
        // Without a supported key type, the first matching certificate is selected. Without a
        // matching name, it is the first of all.
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
