//! TLS towards clients and servers: trust roots, certificates and keys. The whole crate uses one
//! crypto provider.

mod certificate;
mod client;
mod server;
mod trusted_certificates;

pub use certificate::{
    CertificateSubject, ParsedCertificate, parse_certificates, parse_private_key, select_issuers,
};
pub use client::{ClientTls, describe_tls_error, suggest_remedy};
pub use server::{
    ClientAuth, ClientAuthSettings, ReloadableServerTls, RevocationLists, ServerIdentity, ServerTls,
};
pub use trusted_certificates::TrustedCertificates;
