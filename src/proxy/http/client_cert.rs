//! `Client-Cert` and `Client-Cert-Chain` (RFC 9440): the client's TLS certificate for the upstream.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::{HeaderMap, HeaderName, HeaderValue};
use tokio_rustls::rustls::pki_types::CertificateDer;

use crate::policy::PolicyTable;
use crate::policy::client::ClientAddress;
use crate::tls;

static CLIENT_CERT: HeaderName = HeaderName::from_static("client-cert");
static CLIENT_CERT_CHAIN: HeaderName = HeaderName::from_static("client-cert-chain");

/// Largest `Client-Cert-Chain`, in bytes of certificates. The client chooses the chain, and each of
/// its requests repeats it. Three certificates with RSA keys of 4096 bits have 6 KiB.
const MAX_CHAIN_BYTES: usize = 16 * 1024;

/// The fields for one connection.
#[derive(Debug)]
pub(crate) struct ClientCertFields {
    certificate: HeaderValue,
    /// Present if the client sent the issuer of its certificate.
    chain: Option<HeaderValue>,
}

impl ClientCertFields {
    /// Formats the certificates of a TLS client, its own first. Of the others, only those count
    /// that are named as issuers, each of the one before: TLS does not verify the rest. Returns
    /// `None` if there is no certificate.
    pub(crate) fn from_chain(chain: &[CertificateDer<'_>]) -> Option<Self> {
        let (certificate, _) = chain.split_first()?;
        let issuers = tls::select_issuers(chain);
        let bytes: usize = issuers.iter().map(|der| der.len()).sum();
        let list: Vec<_> = issuers.iter().map(format_byte_sequence).collect();
        let is_sent = (1..=MAX_CHAIN_BYTES).contains(&bytes);
        Some(Self {
            certificate: HeaderValue::try_from(format_byte_sequence(certificate)).ok()?,
            chain: is_sent
                .then(|| HeaderValue::try_from(list.join(", ")).ok())
                .flatten(),
        })
    }
}

/// Whether a field states a client certificate, so that the upstream may trust it.
pub fn is_client_cert_field(name: &HeaderName) -> bool {
    *name == CLIENT_CERT || *name == CLIENT_CERT_CHAIN
}

/// Removes the client's own fields. They stay only if `client.trusted_headers` names them and a
/// trusted proxy sends the request: other proxies pass on what their clients send.
pub(crate) fn remove_untrusted_client_cert(
    headers: &mut HeaderMap,
    client: &ClientAddress,
    table: &PolicyTable,
) {
    for name in [&CLIENT_CERT, &CLIENT_CERT_CHAIN] {
        if !is_set_by_gateway(name, client, table) {
            headers.remove(name);
        }
    }
}

/// Adds the fields of the connection, unless the gateway in front states the certificate.
pub(crate) fn add_client_cert(
    headers: &mut HeaderMap,
    fields: &ClientCertFields,
    client: &ClientAddress,
    table: &PolicyTable,
) {
    if is_set_by_gateway(&CLIENT_CERT, client, table) {
        return;
    }
    headers.insert(&CLIENT_CERT, fields.certificate.clone());
    // A chain of the gateway would be that of another certificate.
    headers.remove(&CLIENT_CERT_CHAIN);
    if let Some(chain) = &fields.chain {
        headers.insert(&CLIENT_CERT_CHAIN, chain.clone());
    }
}

fn is_set_by_gateway(name: &HeaderName, client: &ClientAddress, table: &PolicyTable) -> bool {
    client.is_peer_trusted && table.trusted_headers.contains(name)
}

/// Formats a byte sequence of structured fields (RFC 9651, section 3.3.5).
fn format_byte_sequence(der: &CertificateDer<'_>) -> String {
    format!(":{}:", STANDARD.encode(der))
}
