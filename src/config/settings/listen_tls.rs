//! `[listen.tls]`: server certificates and client certificate authentication.

use crate::clock;
use crate::config::table_reader::{TableReader, report};
use crate::tls::{ClientAuth, ClientAuthSettings, RevocationLists, ServerIdentity, ServerTls};

const DAY_S: u64 = 86_400;

/// Builds the TLS settings of a listener. Returns `None` after an error.
pub(super) fn build_server_tls(reader: &TableReader<'_>) -> Option<ServerTls> {
    if !reader.input.reads_key_files() {
        return check_keys_without_files(reader);
    }
    let mut identities = vec![read_server_identity(reader)];
    for more in reader.get_tables("certificates") {
        let identity = read_server_identity(&more);
        let names = identity
            .as_ref()
            .map(|(_, identity)| &identity.certificate.dns_names);
        report! { more;
            Warning("cert") if names.is_some_and(Vec::is_empty) => "the certificate has no DNS name, so SNI never selects it";
        }
        identities.push(identity);
    }
    let auth = reader.read("client_auth")?;
    check_client_auth(reader, auth);
    let client_ca = reader.get_nonempty_string("client_ca");
    let client_ca = client_ca.and_then(|_| reader.read_pem_file("client_ca"));
    let client_crl = if reader.get_nonempty_string("client_crl").is_some() {
        Some(parse_revocation_lists(
            reader,
            &reader.read_pem_file("client_crl")?,
        )?)
    } else {
        None
    };
    // All identities have been read, and their errors reported.
    let identities = identities.into_iter().collect::<Option<Vec<_>>>()?;
    if auth != ClientAuth::None && client_ca.is_none() {
        return None;
    }
    let clients = ClientAuthSettings {
        auth,
        ca: client_ca,
        crl: client_crl,
        forwards_certificate: reader.read("client_cert_header")?,
    };
    let server = ServerTls::new(identities, &clients);
    reader.accept_content("client_ca", server)
}

/// Checks the keys of the table, and returns settings without a certificate.
fn check_keys_without_files(reader: &TableReader<'_>) -> Option<ServerTls> {
    check_client_auth(reader, reader.read("client_auth")?);
    let certificates = reader.get_tables("certificates");
    let are_set = std::iter::once(reader).chain(&certificates).all(|table| {
        ["cert", "key"].iter().all(|key| {
            let is_set = table.get_nonempty_string(key).is_some();
            if !is_set && table.contains_key(key) {
                table.report_error(key, "expected the path of a PEM file");
            }
            is_set
        })
    });
    let clients = ClientAuthSettings::default();
    are_set.then(|| ServerTls::new(Vec::new(), &clients).ok())?
}

/// Checks that the keys about client certificates fit `client_auth`.
fn check_client_auth(reader: &TableReader<'_>, auth: ClientAuth) {
    let is_set = |key: &str| reader.get_nonempty_string(key).is_some();
    report! { reader;
        Error("client_auth") if auth != ClientAuth::None && !is_set("client_ca") => "no CA to verify client certificates; expected client_ca too";
    }
    let sends_header = reader.read("client_cert_header") == Some(true);
    for (key, is_set) in [
        ("client_ca", is_set("client_ca")),
        ("client_crl", is_set("client_crl")),
        ("client_cert_header", sends_header),
    ] {
        report! { reader;
            Warning(key) if auth == ClientAuth::None && is_set => "without effect: client_auth is \"none\"; expected client_auth = \"optional\" or \"require\"";
        }
    }
}

/// Whether the listener requests client certificates, even if other keys are invalid.
pub(super) fn requests_client_certificates(reader: &TableReader<'_>) -> bool {
    let auth = reader
        .get("client_auth")
        .and_then(|item| item.value.as_str());
    auth.is_some_and(|auth| auth != "none")
}

/// Reads a certificate chain and its private key. Returns them with the path of the certificate.
fn read_server_identity(reader: &TableReader<'_>) -> Option<(String, ServerIdentity)> {
    let (chain, key) = (reader.read_pem_file("cert"), reader.read_pem_file("key"));
    let path = reader.read("cert")?;
    let (field, identity) = match ServerIdentity::from_pem(&chain?, &key?) {
        Ok(identity) => ("cert", Ok(identity)),
        Err((field, reason)) => (field, Err(reason)),
    };
    let identity = reader.accept_content(field, identity)?;
    warn_if_outside_validity(reader, &identity);
    Some((path, identity))
}

/// Parses certificate revocation lists. Warns of an expired list, because all client certificates
/// of its issuer are rejected.
fn parse_revocation_lists(reader: &TableReader<'_>, pem: &[u8]) -> Option<RevocationLists> {
    let lists = reader.accept_content("client_crl", RevocationLists::from_pem(pem))?;
    let is_expired = lists
        .expiry_s
        .is_some_and(|expiry| expiry < clock::unix_time_s());
    report! { reader;
        Warning("client_crl") if is_expired => "a list in the file has expired: all certificates of its issuer are rejected";
    }
    Some(lists)
}

/// Warns of a certificate outside its validity period. The listener still uses it, because an
/// operator may have no other.
fn warn_if_outside_validity(reader: &TableReader<'_>, identity: &ServerIdentity) {
    let now = clock::unix_time_s();
    let days = |seconds: u64| match seconds / DAY_S {
        0 => "less than a day".to_owned(),
        1 => "1 day".to_owned(),
        days => format!("{days} days"),
    };
    let (begins, ends) = (identity.certificate.validity_s.0, identity.expiry_s);
    let (ago, left) = (
        days(now.saturating_sub(ends)),
        days(begins.saturating_sub(now)),
    );
    report! { reader;
        Warning("cert") if ends < now => "the certificate or one of its chain expired {ago} ago: clients will reject it";
        Warning("cert") if begins > now => "the certificate becomes valid in {left}: clients will reject it until then";
    }
}
