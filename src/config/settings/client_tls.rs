//! The keys `ca`, `cert`, `key` and `server_name`: TLS to a server (upstream, Redis, collector).

use crate::config::key_files::{accept_content, read_text_file};
use crate::config::table_reader::{TableReader, report};
use crate::tls::{self, ClientTls, TrustedCertificates};
use sha2::{Digest, Sha256};
use tokio_rustls::rustls::pki_types::ServerName;

/// Builds the TLS client settings from the table of `reader`. Adds the files to the watched set.
///
/// Unless the connection `is_tls`, every TLS key is an error, whose message names `enabled_by`: the
/// setting that turns TLS on. Unless it `is_used`, no file is read.
pub(super) fn build_client_tls(
    reader: &TableReader<'_>,
    is_tls: bool,
    is_used: bool,
    enabled_by: &str,
) -> Option<ClientTls> {
    let text = |key: &str| reader.get_nonempty_string(key);
    if !is_tls {
        for key in ["ca", "cert", "key", "server_name"] {
            report! { reader;
                Error(key) if text(key).is_some() => "is for TLS only; expected {enabled_by}";
            }
        }
        return None;
    }
    let server_name = text("server_name").and_then(|name| {
        let checked =
            ServerName::try_from(name).map_err(|_invalid| "expected a host name".to_owned());
        reader.accept("server_name", checked)
    });
    let (has_cert, has_key) = (text("cert").is_some(), text("key").is_some());
    report! { reader;
        Error("cert") if has_cert && !has_key => "a certificate and its key belong together; expected key too";
        Error("key") if has_key && !has_cert => "a certificate and its key belong together; expected cert too";
    }
    if !is_used {
        return None;
    }
    let mut digest = Sha256::new();
    let mut pem = |key: &str| {
        let pem = read_text_file(reader, key, "PEM text")?;
        digest.update(Sha256::digest(&pem));
        Some(pem)
    };
    let (ca, cert, key) = (pem("ca"), pem("cert"), pem("key"));
    digest.update(text("server_name").unwrap_or_default());
    let trusted = if reader.input().reads_key_files() {
        select_trusted_certificates(reader, ca.as_deref())
    } else {
        Some(TrustedCertificates::empty())
    };
    let chain = cert.map(|pem| tls::parse_certificates(pem.as_bytes()));
    let chain = chain.and_then(|chain| accept_content(reader, "cert", chain));
    let key = key.map(|pem| tls::parse_private_key(pem.as_bytes()));
    let key = key.and_then(|key| accept_content(reader, "key", key));
    let digest = digest.finalize().into();
    let client = ClientTls::new(trusted?, chain.zip(key), server_name, digest);
    let client = client.map_err(|error| format!("certificate and key can't be used: {error}"));
    reader.accept("cert", client)
}

fn select_trusted_certificates(
    reader: &TableReader<'_>,
    ca: Option<&str>,
) -> Option<TrustedCertificates> {
    match (ca, reader.get_nonempty_string("ca").is_some()) {
        (Some(pem), _) => {
            let trusted = TrustedCertificates::from_pem(pem.as_bytes());
            accept_content(reader, "ca", trusted)
        }
        // The error of reading the file has already been reported.
        (None, true) => None,
        (None, false) => {
            let trusted = TrustedCertificates::from_system();
            reader.accept("ca", trusted.map_err(|reason| format!(
                "no trusted certificates on this system ({reason}); expected the path of a PEM file"
            )))
        }
    }
}

/// Error of a URL whose host has no name to verify. `key` may give one instead.
pub(super) fn unverifiable_host(key: &str) -> String {
    format!(
        "the host is not a name that a certificate can be verified against; expected such a name, or the certificate's name in {key}"
    )
}
