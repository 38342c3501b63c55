//! Certificate of the proxy under test, and clients that trust it.

use rcgen::{CertificateParams, KeyPair};
use std::fs;
use std::path::Path;
use std::sync::Arc;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

/// TLS client configurations by the protocol offered with ALPN.
#[derive(Clone)]
pub(crate) struct TlsConnectors {
    pub(crate) http1: TlsConnector,
    pub(crate) http2: TlsConnector,
}

/// Creates `tls.crt` and `tls.key`.
pub(crate) fn create_certificate(folder: &Path) -> TlsConnectors {
    let key = KeyPair::generate().unwrap();
    let certificate = CertificateParams::new(["soak.test".to_owned()])
        .unwrap()
        .self_signed(&key)
        .unwrap();
    fs::write(folder.join("tls.crt"), certificate.pem()).unwrap();
    fs::write(folder.join("tls.key"), key.serialize_pem()).unwrap();
    let mut roots = RootCertStore::empty();
    roots
        .add(CertificateDer::from_pem_slice(certificate.pem().as_bytes()).unwrap())
        .unwrap();
    let offering = |protocol: &[u8]| {
        let mut config = ClientConfig::builder()
            .with_root_certificates(roots.clone())
            .with_no_client_auth();
        config.alpn_protocols = vec![protocol.to_vec()];
        TlsConnector::from(Arc::new(config))
    };
    TlsConnectors {
        http1: offering(b"http/1.1"),
        http2: offering(b"h2"),
    }
}
