//! `[listen.tls]`: what clients see of us, and what we ask of them.

use super::cursor::Cursor;
use super::input::Input;
use crate::clock;
use crate::tls::{ClientAuth, Clients, IdentityError, RevocationLists, ServerIdentity, ServerTls};
use std::path::Path;

const DAY_S: u64 = 86_400;

/// How TLS is spoken with clients; `None` if something is wrong.
pub(super) fn server(input: &Input, at: &Cursor<'_>) -> Option<ServerTls> {
    let mut identities = vec![identity(input, at)];
    for more in at.tables("certificates") {
        let identity = identity(input, &more);
        if identity
            .as_ref()
            .is_some_and(|(_, identity)| identity.certificate.dns_names.is_empty())
        {
            more.warn("cert", "it has no DNS name, so no client is ever shown it");
        }
        identities.push(identity);
    }
    let auth = at.word("client_auth", &CLIENT_AUTH)?;
    let client_ca = at.text("client_ca").filter(|path| !path.is_empty());
    match (auth, &client_ca) {
        (ClientAuth::None, Some(_)) => at.warn(
            "client_ca",
            "clients are asked for no certificate; expected client_auth = \"optional\" or \"require\" beside it",
        ),
        (ClientAuth::Optional | ClientAuth::Require, None) => {
            at.fail("client_auth", "certificates are checked against nothing; expected client_ca too");
        }
        _ => {}
    }
    let client_ca = client_ca.and_then(|_| pem(input, at, "client_ca"));
    let client_crl = at.text("client_crl").filter(|path| !path.is_empty());
    if client_crl.is_some() && auth == ClientAuth::None {
        at.warn(
            "client_crl",
            "clients are asked for no certificate, so there is none to be found in it",
        );
    }
    let client_crl = match client_crl {
        Some(_) => Some(revoked(at, &pem(input, at, "client_crl")?)?),
        None => None,
    };
    // All of them have been read by now, and what is wrong was said.
    let identities = identities.into_iter().collect::<Option<Vec<_>>>()?;
    if auth != ClientAuth::None && client_ca.is_none() {
        return None;
    }
    let clients = Clients {
        auth,
        ca: client_ca,
        crl: client_crl,
    };
    let server = ServerTls::new(identities, &clients);
    server
        .map_err(|reason| at.fail("client_ca", &format!("in the file: {reason}")))
        .ok()
}

const CLIENT_AUTH: [(&str, ClientAuth); 3] = [
    ("none", ClientAuth::None),
    ("optional", ClientAuth::Optional),
    ("require", ClientAuth::Require),
];

/// Whether clients are asked for certificates, whatever else is wrong.
pub(super) fn asks_clients(at: &Cursor<'_>) -> bool {
    at.text("client_auth").is_some_and(|auth| auth != "none")
}

/// A certificate, under the path of its file, and its key.
fn identity(input: &Input, at: &Cursor<'_>) -> Option<(String, ServerIdentity)> {
    let (chain, key) = (pem(input, at, "cert"), pem(input, at, "key"));
    let path = at.text("cert")?;
    let (field, reason) = match ServerIdentity::read(&chain?, &key?) {
        Ok(identity) => {
            warn_of_dates(at, &identity);
            return Some((path, identity));
        }
        Err(IdentityError::Certificate(reason)) => ("cert", reason),
        Err(IdentityError::Key(reason)) => ("key", reason),
    };
    at.fail(field, &format!("in the file: {reason}"));
    None
}

/// What says which certificates are revoked. What is out of date turns everybody away, sooner or later.
fn revoked(at: &Cursor<'_>, pem: &[u8]) -> Option<RevocationLists> {
    let lists = RevocationLists::read(pem);
    let lists = lists
        .map_err(|reason| at.fail("client_crl", &format!("in the file: {reason}")))
        .ok()?;
    if lists.expiry.is_some_and(|expiry| expiry < clock::unix_s()) {
        at.warn(
            "client_crl",
            "a list in it is out of date: whose issuer it is of is refused",
        );
    }
    Some(lists)
}

/// What is over, or not begun, may be what somebody has at hand: it is shown all the same.
fn warn_of_dates(at: &Cursor<'_>, identity: &ServerIdentity) {
    let now = clock::unix_s();
    let days = |seconds: u64| match seconds / DAY_S {
        0 => "less than a day".to_owned(),
        1 => "1 day".to_owned(),
        days => format!("{days} days"),
    };
    if identity.expiry < now {
        let ago = days(now.saturating_sub(identity.expiry));
        at.warn(
            "cert",
            &format!("it expired {ago} ago, or one of its chain did: clients will refuse it"),
        );
    }
    let begins = identity.certificate.valid.0;
    if begins > now {
        let left = days(begins.saturating_sub(now));
        at.warn(
            "cert",
            &format!("it begins to be valid in {left}: clients will refuse it until then"),
        );
    }
}

/// What the file holds that a key names.
fn pem(input: &Input, at: &Cursor<'_>, key: &str) -> Option<Vec<u8>> {
    let path = at.text(key)?;
    if path.is_empty() {
        at.fail(key, "expected the path of a PEM file");
        return None;
    }
    input
        .read_bytes(Path::new(&path))
        .map_err(|error| at.fail(key, &format!("the file {error}")))
        .ok()
}
