//! TLS on both sides: whom we trust, and who we are. One provider for the whole crate.

mod certificate;
mod client;
mod server;

pub use certificate::{CertificateSubject, ParsedCertificate};
pub use client::ClientTls;
pub use server::{
    ClientAuth, ClientAuthSettings, IdentityError, ReloadableServerTls, RevocationLists,
    ServerIdentity, ServerTls,
};

use std::sync::Arc;
use tokio_rustls::rustls::crypto::aws_lc_rs;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{ClientConfig, Error, RootCertStore};

/// Our certificate, its chain behind it, and its key.
pub type ClientTlsIdentity = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

/// A client that trusts `roots`, and shows `identity` if it is asked for one.
///
/// # Errors
/// When certificate and key don't belong together, or can't be used.
pub fn build_client_config(
    roots: RootCertStore,
    identity: Option<ClientTlsIdentity>,
) -> Result<ClientConfig, Error> {
    let builder = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots);
    match identity {
        Some((chain, key)) => builder.with_client_auth_cert(chain, key),
        None => Ok(builder.with_no_client_auth()),
    }
}

/// The certificates in a PEM text, to be trusted.
///
/// # Errors
/// Words that say what is wrong with the text.
pub fn parse_root_certificates(pem: &[u8]) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    for certificate in parse_certificates(pem)? {
        roots.add(certificate).map_err(|error| error.to_string())?;
    }
    Ok(roots)
}

/// What this system trusts.
///
/// # Errors
/// Words that say why there is nothing.
pub fn load_system_roots() -> Result<RootCertStore, String> {
    let found = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    // A system's bundle may hold what rustls does not accept; one bad apple is no reason to stop.
    roots.add_parsable_certificates(found.certs);
    if roots.is_empty() {
        return Err(found
            .errors
            .first()
            .map_or_else(|| "none found".to_owned(), ToString::to_string));
    }
    Ok(roots)
}

/// All certificates in a PEM text, at least one.
///
/// # Errors
/// Words that say what is wrong with the text.
pub fn parse_certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let certificates = certificates.map_err(|error| error.to_string())?;
    if certificates.is_empty() {
        return Err("there is no PEM certificate in it".to_owned());
    }
    Ok(certificates)
}

/// The private key in a PEM text.
///
/// # Errors
/// Words that show nothing of the text.
pub fn parse_private_key(pem: &[u8]) -> Result<PrivateKeyDer<'static>, String> {
    PrivateKeyDer::from_pem_slice(pem).map_err(|_hidden| {
        // In both ways of writing it: PKCS #8, and the older one with a field above the key.
        let is_encrypted = pem.windows(9).any(|part| part == b"ENCRYPTED");
        let problem = if is_encrypted {
            "the private key is encrypted; expected one without a passphrase"
        } else {
            "there is no PEM private key in it"
        };
        problem.to_owned()
    })
}
