//! Trusted certificates: each one is an issuer of other certificates, and may be the certificate
//! of a peer itself (docs/operations/redis.md, self-signed certificates).

use super::certificate;
use sha2::{Digest, Sha256};
use std::sync::Arc;
use tokio_rustls::rustls::client::danger::{
    HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier,
};
use tokio_rustls::rustls::client::{verify_server_cert_signed_by_trust_anchor, verify_server_name};
use tokio_rustls::rustls::crypto::{
    WebPkiSupportedAlgorithms, aws_lc_rs, verify_tls12_signature, verify_tls13_signature,
    verify_tls13_signature_with_raw_key,
};
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio_rustls::rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use tokio_rustls::rustls::{
    DigitallySignedStruct, DistinguishedName, Error, RootCertStore, SignatureScheme,
};

/// Certificates that a configuration or the system trusts.
#[derive(Debug)]
pub struct TrustedCertificates {
    pub(super) roots: Arc<RootCertStore>,
    /// SHA-256 of each certificate.
    digests: Vec<[u8; 32]>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl TrustedCertificates {
    /// Trusts no server.
    pub fn empty() -> Self {
        Self::new(RootCertStore::empty(), &[])
    }

    /// Trusts the certificates in a PEM text.
    ///
    /// # Errors
    /// Returns a message that describes the problem.
    pub fn from_pem(pem: &[u8]) -> Result<Self, String> {
        let certificates = certificate::parse_certificates(pem)?;
        let mut roots = RootCertStore::empty();
        for certificate in &certificates {
            let added = roots.add(certificate.clone());
            added.map_err(|error| error.to_string())?;
        }
        Ok(Self::new(roots, &certificates))
    }

    /// Loads the certificates that the system trusts.
    ///
    /// # Errors
    /// Returns a message that says why no certificate is usable.
    pub fn from_system() -> Result<Self, String> {
        let found = rustls_native_certs::load_native_certs();
        let mut roots = RootCertStore::empty();
        // The system's bundle may contain certificates that rustls rejects; these certificates are
        // skipped.
        roots.add_parsable_certificates(found.certs.iter().cloned());
        if roots.is_empty() {
            let error = found.errors.first().map(ToString::to_string);
            return Err(error.unwrap_or_else(|| "none found".to_owned()));
        }
        Ok(Self::new(roots, &found.certs))
    }

    fn new(roots: RootCertStore, certificates: &[CertificateDer<'_>]) -> Self {
        let digests = certificates.iter().map(|der| Sha256::digest(der).into());
        Self {
            roots: Arc::new(roots),
            digests: digests.collect(),
            algorithms: aws_lc_rs::default_provider().signature_verification_algorithms,
        }
    }

    fn contains(&self, certificate: &CertificateDer<'_>) -> bool {
        self.digests.contains(&Sha256::digest(certificate).into())
    }
}

/// The methods that verifiers of servers and of clients share: the signature of the handshake.
macro_rules! verify_handshake_signatures {
    () => {
        fn verify_tls12_signature(
            &self,
            message: &[u8],
            certificate: &CertificateDer<'_>,
            signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            verify_tls12_signature(message, certificate, signature, &self.algorithms)
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            certificate: &CertificateDer<'_>,
            signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            // rustls parses certificates of version 3 only.
            match certificate::read_version1_public_key(certificate) {
                Some(key) => {
                    verify_tls13_signature_with_raw_key(message, &key, signature, &self.algorithms)
                }
                None => verify_tls13_signature(message, certificate, signature, &self.algorithms),
            }
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            self.algorithms.supported_schemes()
        }
    };
}

/// Verifies servers as rustls does, except for a certificate that is trusted itself: it needs no
/// issuer, and may be one.
impl ServerCertVerifier for TrustedCertificates {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        if self.contains(end_entity) {
            certificate::verify_trusted_certificate(end_entity, now, Some(name))?;
        } else {
            let parsed = end_entity.try_into()?;
            verify_server_cert_signed_by_trust_anchor(
                &parsed,
                &self.roots,
                intermediates,
                now,
                self.algorithms.all,
            )?;
            verify_server_name(&parsed, name)?;
        }
        Ok(ServerCertVerified::assertion())
    }

    verify_handshake_signatures!();
}

/// Verifies clients as the verifier of rustls does, and accepts a certificate that is trusted
/// itself.
#[derive(Debug)]
pub(super) struct TrustedClientVerifier {
    pub(super) trusted: TrustedCertificates,
    pub(super) algorithms: WebPkiSupportedAlgorithms,
    pub(super) issuer_verifier: Arc<dyn ClientCertVerifier>,
}

impl ClientCertVerifier for TrustedClientVerifier {
    fn client_auth_mandatory(&self) -> bool {
        self.issuer_verifier.client_auth_mandatory()
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.issuer_verifier.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        if self.trusted.contains(end_entity) {
            certificate::verify_trusted_certificate(end_entity, now, None)?;
            return Ok(ClientCertVerified::assertion());
        }
        let verifier = &self.issuer_verifier;
        verifier.verify_client_cert(end_entity, intermediates, now)
    }

    verify_handshake_signatures!();
}
