//! `[client.jwt]`: tokens, their issuers and keys.

use super::client_tls;
use crate::config::key_files::{read_directory, read_text_file};
use crate::config::policies::context::ClaimTrust;
use crate::config::table_reader::{TableReader, report};
use crate::config::values;
use crate::http_client::HttpUrl;
use crate::policy::jwt::{
    self, IssuerKeys, KeySource, TokenIssuer, VerificationKeys, parse_key_url,
};
use crate::tls::ClientTls;

/// The keys that name the keys of an issuer. Exactly one of them is set.
const KEY_SOURCES: [&str; 3] = ["keys_file", "keys_url", "secret_file"];

/// The set ones of [`KEY_SOURCES`].
fn set_key_sources(reader: &TableReader<'_>) -> impl Iterator<Item = &'static str> {
    let is_set = |key: &&str| reader.get_nonempty_string(key).is_some();
    KEY_SOURCES.into_iter().filter(is_set)
}

/// Returns how token claims are trusted. `None` if no key is configured.
pub(super) fn read_claim_trust(reader: &TableReader<'_>) -> Option<ClaimTrust> {
    let has_keys = set_key_sources(reader).next().is_some() || reader.contains_key("issuers");
    match reader.read("verify") {
        Some(false) => Some(ClaimTrust::Unverified),
        _ => has_keys.then_some(ClaimTrust::Signed),
    }
}

/// Builds the token settings. Reports warnings about the keys.
pub(super) fn build_jwt_settings(
    reader: &TableReader<'_>,
    claims: ClaimTrust,
) -> Option<jwt::Settings> {
    let header = reader.get_parsed("header", values::parse_header_name)?;
    if claims == ClaimTrust::Unverified {
        report! { reader;
            Warning("verify") => "unverified JWT: claims are trusted without a signature check";
        }
        for key in set_key_sources(reader) {
            reader.report_warning(key, "without effect: verify is false");
        }
        return Some(jwt::Settings {
            header,
            issuers: None,
        });
    }
    let issuers = read_issuers(reader)?;
    Some(jwt::Settings {
        header,
        issuers: Some(issuers),
    })
}

fn read_issuers(reader: &TableReader<'_>) -> Option<Vec<TokenIssuer>> {
    let tables = reader.get_tables("issuers");
    let fetching = read_fetch_settings(reader, &tables);
    let build = |table: &TableReader<'_>, name: Option<String>| {
        Some(TokenIssuer {
            name: name.map(String::into_boxed_str),
            audiences: read_audiences(table),
            keys: read_issuer_keys(table, fetching.as_ref())?,
        })
    };
    if tables.is_empty() {
        return Some(vec![build(reader, reader.get_nonempty_string("issuer"))?]);
    }
    for key in KEY_SOURCES.into_iter().chain(["issuer", "audience"]) {
        let is_set = reader.contains_key(key);
        reader.error_if(is_set, key, "issuers are set too; expected one of them");
    }
    let mut names = Vec::new();
    let issuers = tables.iter().map(|table| {
        let name = table.get_nonempty_string("issuer");
        let is_invalid = name.as_ref().is_none_or(|name| name.contains(' '));
        let is_known = name.is_some() && names.contains(&name);
        report! { table;
            Error("issuer") if is_invalid && table.contains_key("issuer") => "expected the iss of the tokens, without spaces";
            Error("issuer") if !is_invalid && is_known => "another entry has the same issuer";
        }
        names.push(name.clone());
        build(table, Some(name?))
    });
    // All issuers are read first, so that all errors are reported.
    let issuers: Vec<_> = issuers.collect();
    issuers.into_iter().collect()
}

fn read_audiences(reader: &TableReader<'_>) -> Vec<String> {
    reader.get_list("audience", |text| match text {
        "" => Err("expected an aud of the tokens".to_owned()),
        text => Ok(text.to_owned()),
    })
}

fn read_issuer_keys(
    reader: &TableReader<'_>,
    fetching: Option<&KeyFetchSettings>,
) -> Option<IssuerKeys> {
    let mut sources = set_key_sources(reader);
    let (first, second) = (sources.next(), sources.next());
    let Some(key) = first else {
        reader.report_error("keys_url", "missing; expected keys_url or keys_file");
        return None;
    };
    if let Some(second) = second {
        report! { reader;
            Error(second) => "both {key} and {second} are set; expected one of them";
        }
        return None;
    }
    let (keys, warnings) = match key {
        "keys_file" | "secret_file" if !reader.input().reads_key_files() => {
            return Some(VerificationKeys::from_secret(b"").0.into());
        }
        "keys_url" => {
            let fetching = fetching?;
            let url = reader.get_parsed(key, |text| fetching.parse_url(text))?;
            return Some(fetching.source(url).into());
        }
        "keys_file" => {
            let text = read_text_file(reader, key, "JWK set")?;
            reader.accept(key, VerificationKeys::from_jwks(&text, false))?
        }
        _ => VerificationKeys::from_secret(read_text_file(reader, key, "secret")?.as_bytes()),
    };
    for warning in warnings {
        reader.report_warning(key, &warning);
    }
    Some(keys.into())
}

/// What all URLs of keys share.
struct KeyFetchSettings {
    /// A source, whose URL is replaced.
    template: KeySource,
    tls: Option<ClientTls>,
    allows_http: bool,
}

impl KeyFetchSettings {
    fn parse_url(&self, text: &str) -> Result<HttpUrl, String> {
        let url = parse_key_url(text)?;
        let tls = self.tls.as_ref().filter(|_| url.is_tls);
        let has_no_name = tls.is_some_and(|tls| tls.server_name_for(&url.host).is_err());
        if !url.is_tls && !url.is_loopback() && !self.allows_http {
            return Err("keys over http can be replaced on the way; expected https, or keys_allow_http = true".to_owned());
        }
        if has_no_name {
            Err(client_tls::unverifiable_host("client.jwt.tls.server_name"))
        } else {
            Ok(url)
        }
    }

    fn source(&self, url: HttpUrl) -> KeySource {
        KeySource {
            tls: self.tls.clone().filter(|_| url.is_tls),
            url,
            ..self.template.clone()
        }
    }
}

/// Reads the settings of fetches. Returns `None` if no URL is set, or after an error.
fn read_fetch_settings(
    reader: &TableReader<'_>,
    issuers: &[TableReader<'_>],
) -> Option<KeyFetchSettings> {
    let urls: Vec<String> = std::iter::once(reader)
        .chain(issuers)
        .filter_map(|table| table.get_nonempty_string("keys_url"))
        .collect();
    let is_tls = urls.iter().any(|url| url.starts_with("https://"));
    let tls = reader.get_table("tls");
    let tls = client_tls::build_client_tls(&tls, is_tls, true, "https:// in keys_url");
    let url = parse_key_url(urls.first()?).ok();
    let template = KeySource {
        // An invalid URL is reported where it is read.
        url: url.or_else(|| parse_key_url("https://invalid/").ok())?,
        tls: None,
        cache_dir: read_directory(reader, "keys_cache_dir", true)?
            .filter(|_| reader.input().reads_key_files()),
        refresh_interval: reader.read("keys_refresh")?,
        cooldown: reader.read("keys_cooldown")?,
        max_stale: reader.read("keys_max_stale")?,
    };
    Some(KeyFetchSettings {
        template,
        // The error of an unusable TLS table has been reported.
        tls: if is_tls { Some(tls?) } else { None },
        allows_http: reader.read("keys_allow_http")?,
    })
}
