//! TLS towards clients: which certificates we show, and which of theirs we ask for.

use super::certificate::{self, Certificate};
use super::{certificates, private_key};
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
pub struct Clients {
    pub auth: ClientAuth,
    /// What has to stand behind them: PEM; needed unless `auth` is [`ClientAuth::None`].
    pub ca: Option<Vec<u8>>,
    /// What is not believed any more. `None`: nobody says so.
    pub crl: Option<RevocationLists>,
}

/// Lists of certificates that their issuers have revoked.
#[derive(Debug)]
pub struct RevocationLists {
    lists: Vec<CertificateRevocationListDer<'static>>,
    /// The earliest time at which one should have been replaced, in seconds since the Unix epoch.
    pub expiry: Option<u64>,
}

/// What holds for new connections, replaced by a reload. `None`: cleartext.
pub type Current = Arc<ArcSwapOption<ServerTls>>;

/// A certificate that we show, with its chain and its key.
#[derive(Clone)]
pub struct ServerIdentity {
    key: Arc<CertifiedKey>,
    /// The certificate itself; what stands behind it in the chain is for clients.
    pub certificate: Certificate,
    /// The earliest end in the chain, in seconds since the Unix epoch.
    pub expiry: u64,
    digest: [u8; 32],
}

/// How TLS is spoken with clients: one set of certificates, and one memory of sessions.
pub struct ServerTls {
    config: Arc<ServerConfig>,
    /// Where each certificate came from, and when it ends.
    expiries: Vec<(String, u64)>,
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
    pub fn read(chain_pem: &[u8], key_pem: &[u8]) -> Result<Self, IdentityError> {
        let chain = certificates(chain_pem).map_err(IdentityError::Certificate)?;
        let mut read = chain.iter().map(|der| Certificate::read(der));
        let certificate = match read.next() {
            Some(first) => first.map_err(IdentityError::Certificate)?,
            None => {
                return Err(IdentityError::Certificate(
                    "there is no certificate in it".to_owned(),
                ));
            }
        };
        let expiry = read
            .filter_map(|issuer| Some(issuer.ok()?.valid.1))
            .fold(certificate.valid.1, u64::min);
        let key = private_key(key_pem).map_err(IdentityError::Key)?;
        let key = CertifiedKey::from_der(chain, key, &aws_lc_rs::default_provider()).map_err(
            |error| match error {
                Error::InconsistentKeys(_) => {
                    IdentityError::Key("the key is not that of the certificate".to_owned())
                }
                error => IdentityError::Key(format!("the key can't be used: {error}")),
            },
        )?;
        let digest = digest([chain_pem, key_pem]);
        Ok(Self {
            key: Arc::new(key),
            certificate,
            expiry,
            digest,
        })
    }

    fn is_for(&self, name: &str) -> bool {
        self.certificate.dns_names.iter().any(|own| **own == *name)
    }

    /// Whether a wildcard covers the name: it stands for one label.
    fn covers(&self, name: &str) -> bool {
        let Some((_, parent)) = name.split_once('.') else {
            return false;
        };
        self.certificate
            .dns_names
            .iter()
            .any(|own| own.strip_prefix("*.") == Some(parent))
    }

    fn suits(&self, hello: &ClientHello<'_>) -> bool {
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
    pub fn read(pem: &[u8]) -> Result<Self, String> {
        let lists: Result<Vec<_>, _> = CertificateRevocationListDer::pem_slice_iter(pem).collect();
        let lists = lists.map_err(|error| error.to_string())?;
        if lists.is_empty() {
            return Err("there is no PEM list of revoked certificates in it".to_owned());
        }
        let mut expiry = None;
        for list in &lists {
            let end = certificate::next_update(list)?;
            expiry = [expiry, end].into_iter().flatten().min();
        }
        Ok(Self { lists, expiry })
    }
}

impl ServerTls {
    /// `identities`: where each comes from, and what it is; the first is for clients that name no other.
    ///
    /// # Errors
    /// Words that say what is wrong with the CA.
    pub fn new(
        identities: Vec<(String, ServerIdentity)>,
        clients: &Clients,
    ) -> Result<Self, String> {
        let mut hash = Sha256::new();
        for (_, identity) in &identities {
            hash.update(identity.digest);
        }
        hash.update([clients.auth as u8]);
        hash.update(digest([clients.ca.as_deref().unwrap_or_default()]));
        hash.update(digest(
            clients
                .crl
                .iter()
                .flat_map(|crl| &crl.lists)
                .map(AsRef::as_ref),
        ));
        let expiries = identities
            .iter()
            .map(|(name, identity)| (name.clone(), identity.expiry))
            .collect();
        let shown = Arc::new(Shown(
            identities
                .into_iter()
                .map(|(_, identity)| identity)
                .collect(),
        ));
        let config = config(shown, clients)?;
        Ok(Self {
            config: Arc::new(config),
            expiries,
            digest: hash.finalize().into(),
        })
    }

    /// For the handshakes of new connections.
    pub fn config(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.config)
    }

    /// Where each certificate came from, and when the first of its chain ends: seconds since the Unix epoch.
    pub fn expiries(&self) -> &[(String, u64)] {
        &self.expiries
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
            .field("expiries", &self.expiries)
            .finish_non_exhaustive()
    }
}

/// Each has its own key for tickets: a session that was begun under other rules is not resumed under these, as a
/// resumption does not look at certificates again.
fn config(shown: Arc<Shown>, clients: &Clients) -> Result<ServerConfig, String> {
    let provider = Arc::new(aws_lc_rs::default_provider());
    let verifier = match (clients.auth, &clients.ca) {
        (ClientAuth::None, _) => Arc::new(NoClientAuth),
        (_, None) => return Err("there is no CA to check clients' certificates against".to_owned()),
        (auth, Some(pem)) => {
            let builder = WebPkiClientVerifier::builder_with_provider(
                super::roots(pem)?.into(),
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
        .with_cert_resolver(shown);
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    // Kept by clients: a memory of ours would have to be bounded, and so be forgotten under load.
    config.ticketer = Ticketer::new().map_err(|error| error.to_string())?;
    Ok(config)
}

/// What we show to whom.
#[derive(Debug)]
struct Shown(Vec<ServerIdentity>);

impl ResolvesServerCert for Shown {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let chosen = self.choose(hello.server_name().unwrap_or_default(), |identity| {
            identity.suits(&hello)
        });
        chosen.map(|identity| Arc::clone(&identity.key))
    }
}

impl Shown {
    /// The first whose name is asked for, before one by wildcard, before the first of all. Among several for one name,
    /// one whose kind of key the client knows. `name`: in lower case, as rustls has it.
    fn choose(
        &self,
        name: &str,
        suits: impl Fn(&ServerIdentity) -> bool,
    ) -> Option<&ServerIdentity> {
        let name = name.strip_suffix('.').unwrap_or(name);
        let of = |is: fn(&ServerIdentity, &str) -> bool| {
            self.0.iter().filter(move |identity| is(identity, name))
        };
        let named = of(ServerIdentity::is_for).chain(of(ServerIdentity::covers));
        let usual = || named.clone().next().or(self.0.first());
        named
            .clone()
            .find(|identity| suits(identity))
            .or_else(usual)
    }
}

/// Of several texts, so that nothing moves from one to the next unseen.
fn digest<'t>(texts: impl IntoIterator<Item = &'t [u8]>) -> [u8; 32] {
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
    fn of_several_for_one_name_a_client_gets_what_it_can_check() {
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
            ServerIdentity::read(certificate.pem().as_bytes(), key.serialize_pem().as_bytes())
                .unwrap()
        });
        let shown = Shown(identities.collect());
        let chosen = |name: &str, known: &[SignatureAlgorithm]| {
            let chosen = shown
                .choose(name, |identity| {
                    known.contains(&identity.key.key.algorithm())
                })
                .unwrap();
            shown
                .0
                .iter()
                .position(|identity| identity.digest == chosen.digest)
                .unwrap()
        };
        use SignatureAlgorithm::{ECDSA, ED25519, RSA};
        assert_eq!(chosen("a.example", &[ECDSA, ED25519]), 1);
        assert_eq!(
            chosen("a.example.", &[ECDSA, ED25519]),
            1,
            "the root's dot says nothing"
        );
        assert_eq!(chosen("a.example", &[ECDSA]), 2);
        assert_eq!(chosen("b.example", &[ED25519]), 3);
        assert_eq!(chosen("b.example", &[ECDSA]), 4);
        // Nobody can be helped whose kind isn't there, and whose name isn't gets the first.
        assert_eq!(
            (chosen("a.example", &[RSA]), chosen("c.d.example", &[ECDSA])),
            (1, 0)
        );
        assert_eq!(
            (chosen("", &[ED25519]), chosen("first.example", &[RSA])),
            (0, 0)
        );
    }
}
