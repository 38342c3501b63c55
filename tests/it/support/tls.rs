//! Certificates, made anew for each test.

use rcgen::{BasicConstraints, CertificateParams, DistinguishedName, DnType, IsCa, Issuer, KeyPair};
use std::fs;
use std::path::PathBuf;
use tempfile::TempDir;

/// Somebody who signs certificates, with a folder for them.
pub struct Authority {
    folder: TempDir,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    pub fn new() -> Self {
        let folder = TempDir::new().unwrap();
        let mut params = named("an authority", Vec::new());
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        fs::write(folder.path().join("ca.pem"), params.self_signed(&key).unwrap().pem()).unwrap();
        Self { folder, issuer: Issuer::new(params, key) }
    }

    /// Makes `<file>.pem` and `<file>.key`: a certificate for a name or an address.
    pub fn sign(&self, file: &str, name: &str) {
        let key = KeyPair::generate().unwrap();
        let params = named(name, vec![name.to_owned()]);
        fs::write(self.path(&format!("{file}.pem")), params.signed_by(&key, &self.issuer).unwrap().pem())
            .unwrap();
        fs::write(self.path(&format!("{file}.key")), key.serialize_pem()).unwrap();
    }

    /// Where a file of ours is; `ca.pem` is there from the start.
    pub fn path(&self, file: &str) -> PathBuf {
        self.folder.path().join(file)
    }

    /// The same as text, for arguments.
    pub fn text(&self, file: &str) -> String {
        self.path(file).to_str().unwrap().to_owned()
    }
}

/// Whoever signs and whoever is signed for must not share a name.
fn named(name: &str, valid_for: Vec<String>) -> CertificateParams {
    let mut params = CertificateParams::new(valid_for).unwrap();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params
}
