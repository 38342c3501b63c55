//! TLS towards clients and servers: trust roots, certificates and keys. The whole crate uses one
//! crypto provider.

mod certificate;
mod client;
mod server;
mod trusted_certificates;

pub use certificate::{CertificateSubject, ParsedCertificate, select_issuers};
pub use client::{ClientTls, describe_tls_error, suggest_remedy};
pub use server::{
    ClientAuth, ClientAuthSettings, IdentityError, ReloadableServerTls, RevocationLists,
    ServerIdentity, ServerTls,
};
pub use trusted_certificates::TrustedCertificates;

use std::sync::Arc;
use tokio_rustls::rustls::crypto::aws_lc_rs;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{ClientConfig, Error, RootCertStore};
use trusted_certificates::TrustedServerVerifier;

/// Certificate chain, own certificate first, and its private key.
pub type ClientTlsIdentity = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

/// Builds a client configuration that trusts the certificates and presents `identity` on request.
///
/// # Errors
/// Fails if certificate and key do not match or cannot be used.
pub fn build_client_config(
    trusted: TrustedCertificates,
    identity: Option<ClientTlsIdentity>,
) -> Result<ClientConfig, Error> {
    let provider = aws_lc_rs::default_provider();
    let verifier = TrustedServerVerifier {
        trusted,
        algorithms: provider.signature_verification_algorithms,
    };
    let builder = ClientConfig::builder_with_provider(Arc::new(provider))
        .with_safe_default_protocol_versions()?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier));
    match identity {
        Some((chain, key)) => builder.with_client_auth_cert(chain, key),
        None => Ok(builder.with_no_client_auth()),
    }
}

/// Parses the certificates in a PEM text as trusted ones.
///
/// # Errors
/// Returns a message that describes the problem.
pub fn parse_trusted_certificates(pem: &[u8]) -> Result<TrustedCertificates, String> {
    let certificates = parse_certificates(pem)?;
    let mut roots = RootCertStore::empty();
    for certificate in &certificates {
        let added = roots.add(certificate.clone());
        added.map_err(|error| error.to_string())?;
    }
    Ok(TrustedCertificates::new(roots, &certificates))
}

/// Loads the certificates that the system trusts.
///
/// # Errors
/// Returns a message that says why no certificate is usable.
pub fn load_system_certificates() -> Result<TrustedCertificates, String> {
    let found = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    // The system's bundle may contain certificates that rustls rejects; these certificates are
    // skipped.
    roots.add_parsable_certificates(found.certs.iter().cloned());
    if roots.is_empty() {
        let error = found.errors.first().map(ToString::to_string);
        return Err(error.unwrap_or_else(|| "none found".to_owned()));
    }
    Ok(TrustedCertificates::new(roots, &found.certs))
}

/// Parses all certificates in a PEM text, at least one.
///
/// # Errors
/// Returns a message that describes the problem.
pub fn parse_certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let certificates = certificates.map_err(|error| error.to_string())?;
    if certificates.is_empty() {
        return Err("there is no PEM certificate in it".to_owned());
    }
    Ok(certificates)
}

/// Parses the private key in a PEM text.
///
/// # Errors
/// Returns a message that reveals nothing of the text.
pub fn parse_private_key(pem: &[u8]) -> Result<PrivateKeyDer<'static>, String> {
    PrivateKeyDer::from_pem_slice(pem).map_err(|_hidden| {
        // The word stands in both encodings of an encrypted key: PKCS #8, and the older encoding
        // with a header above the key.
        let is_encrypted = pem.windows(9).any(|part| part == b"ENCRYPTED");
        let problem = if is_encrypted {
            "the private key is encrypted; expected one without a passphrase"
        } else {
            "there is no PEM private key in it"
        };
        problem.to_owned()
    })
}
