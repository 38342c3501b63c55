//! `[client]`, `[client.jwt]` and `[path]`: the client address, tokens and paths.

use crate::config::input::ConfigInput;
use crate::config::key_files::{is_path_set, read_text_file};
use crate::config::policies::context::ClaimTrust;
use crate::config::table_reader::TableReader;
use crate::config::values;
use crate::policy::path::{EscapedDelimiters, EscapedSlashes, ForwardedPath};
use crate::policy::{client, jwt, path};
use http::HeaderName;

const REJECT_OR_ALLOW: [(&str, bool); 2] = [("reject", true), ("allow", false)];

pub(super) fn build_client_settings(reader: &TableReader<'_>) -> Option<client::Settings> {
    Some(client::Settings {
        trusted_proxies: reader.get_list("trusted_proxies", values::parse_network),
        ip_header: reader.get_parsed("ip_header", |text| {
            HeaderName::from_bytes(text.as_bytes())
                .ok()
                .ok_or_else(|| "expected the name of a header".to_owned())
        })?,
        ipv4_prefix: reader.get_integer("ipv4_prefix")?,
        ipv6_prefix: reader.get_integer("ipv6_prefix")?,
        rejects_ambiguous_query: reader.get_keyword("ambiguous_query", &REJECT_OR_ALLOW)?,
        rejects_ambiguous_cookie: reader.get_keyword("ambiguous_cookie", &REJECT_OR_ALLOW)?,
    })
}

const JWT_KEY_FILES: [&str; 2] = ["keys_file", "secret_file"];

/// Returns how token claims are trusted. `Retry` if no key is configured.
pub(super) fn read_claim_trust(reader: &TableReader<'_>) -> Option<ClaimTrust> {
    match reader.get_bool("verify") {
        Some(false) => Some(ClaimTrust::Unverified),
        _ if JWT_KEY_FILES.iter().any(|key| is_path_set(reader, key)) => Some(ClaimTrust::Signed),
        _ => None,
    }
}

/// Builds the token settings. Reports warnings about the keys.
pub(super) fn build_jwt_settings(
    input: &ConfigInput,
    reader: &TableReader<'_>,
    claims: ClaimTrust,
) -> Option<jwt::Settings> {
    let header = reader.get_parsed("header", values::parse_header_name)?;
    if claims == ClaimTrust::Unverified {
        reader.report_warning(
            "verify",
            "unverified JWT: claims are trusted without a signature check",
        );
        for key in JWT_KEY_FILES
            .into_iter()
            .filter(|key| is_path_set(reader, key))
        {
            reader.report_warning(key, "without effect: verify is false");
        }
        return Some(jwt::Settings {
            header,
            verification: jwt::SignatureVerification::Disabled,
        });
    }
    let (key, (keys, warnings)) = match JWT_KEY_FILES.map(|key| is_path_set(reader, key)) {
        [true, true] => {
            reader.report_error(
                "secret_file",
                "both keys_file and secret_file are set; expected one of them",
            );
            return None;
        }
        [true, false] => {
            let text = read_text_file(input, reader, "keys_file", "JWK set")?;
            match jwt::VerificationKeys::from_jwks(&text) {
                Ok(read) => ("keys_file", read),
                Err(reason) => {
                    reader.report_error("keys_file", &reason);
                    return None;
                }
            }
        }
        [false, _] => (
            "secret_file",
            jwt::VerificationKeys::from_secret(
                read_text_file(input, reader, "secret_file", "secret")?.as_bytes(),
            ),
        ),
    };
    for warning in warnings {
        reader.report_warning(key, &warning);
    }
    Some(jwt::Settings {
        header,
        verification: jwt::SignatureVerification::Keys(keys),
    })
}

pub(super) fn build_path_settings(reader: &TableReader<'_>) -> Option<path::Settings> {
    let escaped_slashes = [
        ("both", EscapedSlashes::Both),
        ("reject", EscapedSlashes::Reject),
        ("keep", EscapedSlashes::Keep),
        ("decode", EscapedSlashes::Decode),
    ];
    let escaped_delimiters = [
        ("both", EscapedDelimiters::Both),
        ("reject", EscapedDelimiters::Reject),
        ("keep", EscapedDelimiters::Keep),
    ];
    let forward = [
        ("unchanged", ForwardedPath::Unchanged),
        ("normalized", ForwardedPath::Normalized),
    ];
    Some(path::Settings {
        normalize: reader.get_bool("normalize")?,
        forward: reader.get_keyword("forward", &forward)?,
        merge_slashes: reader.get_bool("merge_slashes")?,
        reads_authority: reader.get_keyword("authority", &[("both", true), ("ignore", false)])?,
        escaped_slashes: reader.get_keyword("escaped_slashes", &escaped_slashes)?,
        escaped_delimiters: reader.get_keyword("escaped_delimiters", &escaped_delimiters)?,
        rejects_control_characters: reader.get_keyword("control_characters", &REJECT_OR_ALLOW)?,
        rejects_invalid_utf8: reader.get_keyword("invalid_utf8", &REJECT_OR_ALLOW)?,
        ignore_trailing_slash: reader.get_keyword(
            "trailing_slash",
            &[("ignore", true), ("significant", false)],
        )?,
        strip_parameters: reader
            .get_keyword("path_parameters", &[("strip", true), ("keep", false)])?,
        case_sensitive: reader.get_bool("case_sensitive")?,
        rejects_ambiguous_keys: reader
            .get_keyword("ambiguous_key", &[("reject", true), ("first", false)])?,
        max_readings_size: reader.get_byte_size("max_readings_size")?,
    })
}
