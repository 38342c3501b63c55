//! Values and patterns that operators write, in the form that the keys of requests have.

use super::authorization::read_credentials;
use super::client_network::format_client_network;
use super::host_pattern::canonicalize_host;
use super::key_part::KeyPart;
use super::value_checks::is_white_space;
use super::{client, path};
use http::HeaderName;
use http::header::{AUTHORIZATION, HOST};
use std::net::IpAddr;

/// Converts a literal text of a pattern to the form that requests have.
pub(super) fn canonicalize_piece(
    part: &KeyPart,
    piece: &str,
    path: &path::Settings,
) -> Result<String, String> {
    let unsupported = |expected: &str| {
        Err(format!(
            "patterns are not supported for the {part}; expected {expected}"
        ))
    };
    match part {
        KeyPart::ClientIp => {
            unsupported("one address (for networks, use a policy with match.client_ips)")
        }
        KeyPart::WholePath => unsupported("one exact path (for patterns, use match.path)"),
        KeyPart::Header(name) if *name == AUTHORIZATION => unsupported("complete credentials"),
        KeyPart::Header(name) if *name == HOST => Ok(piece.to_ascii_lowercase()),
        KeyPart::Host => Ok(piece.to_ascii_lowercase()),
        KeyPart::Method => Ok(piece.to_ascii_uppercase()),
        KeyPart::PathCaptures(_) if !piece.is_empty() => {
            Ok(path::canonicalize_segment(piece, path).into())
        }
        _ => Ok(piece.to_owned()),
    }
}

/// Rejects a pattern with an end that no canonical value has.
pub(super) fn check_pattern_end(part: &KeyPart, pattern: &str) -> Result<(), String> {
    let is_host = matches!(part, KeyPart::Host | KeyPart::Header(HOST));
    let (_, port) = pattern.rsplit_once(':').unwrap_or(("", "none"));
    let has_port = port.bytes().all(|byte| byte.is_ascii_digit());
    if is_host && (has_port || pattern.ends_with('.')) {
        Err(
            "a host has no port and no dot at its end here; expected for example \"*.example.com\""
                .to_owned(),
        )
    } else {
        Ok(())
    }
}

/// Converts a value of a part without alternatives to the form that requests have.
pub fn canonicalize_part_value(
    part: &KeyPart,
    text: &str,
    client: &client::Settings,
    path: &path::Settings,
) -> Result<Box<str>, String> {
    match part {
        KeyPart::ClientIp => {
            let address = text.split_once('/').map_or(text, |(address, _)| address);
            let ip: IpAddr = address.parse().map_err(|error| {
                format!("the key requires a client address here, but {text:?} is none: {error}")
            })?;
            let canonical = format_client_network(client.client_ip(ip), client);
            if text.contains('/') && text != canonical {
                return Err(format!(
                    "clients are keyed as {canonical} (client.ipv4_prefix, client.ipv6_prefix)"
                ));
            }
            Ok(canonical.into())
        }
        KeyPart::Host => Ok(canonicalize_host(text)),
        KeyPart::Header(name) => canonicalize_header_value(name, text),
        KeyPart::DescriptorEntry(_) => Ok(canonicalize_descriptor_value(text).into()),
        KeyPart::Method => Ok(text.to_ascii_uppercase().into()),
        KeyPart::PathCaptures(_) => Ok(path::canonicalize_segment(text, path)),
        KeyPart::Claim(name) => name.check_listed_value(text, false).map(|()| text.into()),
        KeyPart::WholePath => path::PathInterpretations::parse(text, path)
            .map_err(|error| error.to_string())
            .and_then(|read| read.iter().next().map(Into::into).ok_or_else(String::new)),
        _ => Ok(text.into()),
    }
}

/// Converts a header's value to the form that keys and conditions read.
///
/// # Errors
/// Returns a message that states what is wrong.
fn canonicalize_header_value(name: &HeaderName, text: &str) -> Result<Box<str>, String> {
    match *name {
        AUTHORIZATION => match read_credentials(text.as_bytes()).as_slice() {
            [one] => Ok(String::from_utf8_lossy(one).into()),
            _ => Err(
                "these credentials can be read in several ways; expected one scheme and one credential"
                    .to_owned(),
            ),
        },
        HOST => Ok(canonicalize_host(text)),
        _ => Ok(text.trim_matches([' ', '\t']).into()),
    }
}

/// The value of a descriptor entry as policies read it. The caller may not trim what the app trims.
pub fn canonicalize_descriptor_value(text: &str) -> &str {
    text.trim_matches(is_white_space)
}
