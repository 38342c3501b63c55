//! Properties of the proxy's parsers for arbitrary bytes, checked by the tests and by the targets
//! in `fuzz/`.

use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Uri, Version, header};
use std::net::IpAddr;

use super::http::header_lines::{self, is_client_cert_field};
use super::http::headers::{self, AddressText, ForwardingContext};
use super::http::inbound_request::InboundRequest;
use super::http::response_cost;
use super::http2_frames::frame_scanner::FrameScanner;
use super::server::accept::proxy_header::properties as proxy_header;
use crate::policy::JsonPointerScanner;
use crate::policy::{JsonPointer, PolicyTable};

/// Headers that must not reach an upstream unless the proxy rebuilds them.
const HOP_BY_HOP_FIELDS: [&str; 7] = [
    "connection",
    "keep-alive",
    "proxy-connection",
    "upgrade",
    "te",
    "http2-settings",
    "expect",
];

/// Checks that a request that passes validation is unambiguous when it is forwarded. The first byte
/// of `bytes` selects version and peer. The other bytes are lines: method and target, then headers.
pub fn assert_forwarded_request(bytes: &[u8], table: &PolicyTable) {
    let Some((choice, rest)) = bytes.split_first() else {
        return;
    };
    let Some(mut parts) = parse_request_head(*choice, rest) else {
        return;
    };
    let (version_in, before) = (parts.version, parts.headers.clone());
    let peer = if choice & 4 == 0 {
        IpAddr::from([10, 0, 0, 1])
    } else {
        IpAddr::from([203, 0, 113, 7])
    };
    let Ok(inbound) =
        InboundRequest::validate_and_rewrite(&mut parts, peer, table, table.path.forward)
    else {
        return;
    };
    let wants_upgrade = inbound.target.upgrade_request.is_some();
    let has_body = choice & 8 != 0;
    let hop = ForwardingContext {
        peer: &AddressText::new(peer),
        client: inbound.client,
        is_https: false,
        version_in,
        ip_header: &table.client.ip_header,
        has_body,
        preserve_host: choice & 16 != 0,
        upstream_authority: &HeaderValue::from_static("upstream:80"),
    };
    headers::rewrite_request_headers(&mut parts, &inbound.target, &hop);
    let fields = &parts.headers;
    assert!(
        header_occurs_at_most_once(fields, "host") && fields.contains_key(header::HOST)
            || version_in == Version::HTTP_10
    );
    assert!(
        parts.uri.authority().is_none() && parts.uri.to_string().starts_with(['/', '*']),
        "{}",
        parts.uri
    );
    assert_eq!(parts.version, Version::HTTP_11);
    assert!(
        !parts
            .method
            .as_str()
            .bytes()
            .any(|byte| byte.is_ascii_lowercase()),
        "{}",
        parts.method
    );
    check_body_framing(fields);
    assert!(!fields.keys().any(is_client_cert_field), "{fields:?}");
    assert_hop_by_hop_headers(&before, fields, wants_upgrade);
    assert!(
        header_occurs_at_most_once(fields, "x-forwarded-for")
            && header_occurs_at_most_once(fields, "forwarded")
    );
    let chain = fields
        .get("x-forwarded-for")
        .map(HeaderValue::as_bytes)
        .unwrap_or_default();
    assert!(chain.ends_with(peer.to_string().as_bytes()), "{fields:?}");
    if peer == IpAddr::from([203, 0, 113, 7]) {
        assert_eq!(
            (inbound.client.ip, chain),
            (peer, peer.to_string().as_bytes()),
            "an untrusted peer cannot name another client"
        );
    }
}

/// Checks that the body of the forwarded request has at most one framing, a valid one.
fn check_body_framing(fields: &HeaderMap) {
    assert!(
        header_occurs_at_most_once(fields, "content-length")
            && header_occurs_at_most_once(fields, "transfer-encoding")
    );
    assert!(
        !(fields.contains_key(header::CONTENT_LENGTH)
            && fields.contains_key(header::TRANSFER_ENCODING))
    );
    if let Some(length) = fields.get(header::CONTENT_LENGTH) {
        assert!(
            length.as_bytes().iter().all(u8::is_ascii_digit),
            "{length:?}"
        );
    }
    if let Some(coding) = fields.get(header::TRANSFER_ENCODING) {
        assert!(
            coding.as_bytes().eq_ignore_ascii_case(b"chunked"),
            "{coding:?}"
        );
    }
}

/// Checks that hop-by-hop headers of the received head (`before`) are removed or rebuilt.
fn assert_hop_by_hop_headers(before: &HeaderMap, fields: &HeaderMap, wants_upgrade: bool) {
    for name in HOP_BY_HOP_FIELDS {
        let is_rebuilt = match name {
            "te" => true,
            "connection" => wants_upgrade || fields.contains_key(header::TE),
            _ => wants_upgrade && name == "upgrade",
        };
        assert!(
            !fields.contains_key(name) || is_rebuilt,
            "{name} in {fields:?}"
        );
    }
    for option in before
        .get_all(header::CONNECTION)
        .iter()
        .flat_map(header_lines::headers_named_in_connection)
    {
        let is_replaced = fields
            .get_all(&option)
            .iter()
            .all(|value| !before.get_all(&option).iter().any(|was| was == value));
        assert!(
            is_replaced || wants_upgrade || is_header_written_by_proxy(&option),
            "{option} in {fields:?}"
        );
    }
}

fn header_occurs_at_most_once(fields: &HeaderMap, name: &str) -> bool {
    fields.get_all(name).iter().count() <= 1
}

/// Whether the proxy writes this header itself. The written value may equal the received one.
fn is_header_written_by_proxy(name: &HeaderName) -> bool {
    matches!(
        *name,
        header::HOST | header::TE | header::VIA | header::FORWARDED | header::TRANSFER_ENCODING
    ) || name.as_str().starts_with("x-forwarded-")
}

fn parse_request_head(choice: u8, bytes: &[u8]) -> Option<http::request::Parts> {
    let mut lines = bytes.split(|byte| *byte == b'\n');
    let first = lines.next()?;
    let space = first.iter().position(|byte| *byte == b' ')?;
    let (method, target) = first.split_at_checked(space)?;
    let mut parts = Request::new(()).into_parts().0;
    parts.method = Method::from_bytes(method).ok()?;
    parts.uri = Uri::try_from(target.get(1..)?).ok()?;
    parts.version = match choice & 3 {
        0 => Version::HTTP_10,
        1 => Version::HTTP_2,
        _ => Version::HTTP_11,
    };
    for line in lines {
        let colon = line.iter().position(|byte| *byte == b':')?;
        let (name, value) = line.split_at_checked(colon)?;
        let name = HeaderName::from_bytes(name).ok()?;
        parts.headers.append(
            name,
            HeaderValue::from_bytes(value.get(1..)?.trim_ascii()).ok()?,
        );
    }
    Some(parts)
}

/// Checks that the scanner finds the same JSON number as a full parser, however the bytes are
/// split. The first byte of `bytes` selects the chunk size.
pub fn check_json_number_scan(bytes: &[u8]) {
    let Some((step, document)) = bytes.split_first() else {
        return;
    };
    let pointers = ["/usage/total_tokens", "/a", "/0", "/a/0", "/0/b"];
    for text in pointers {
        let Ok(pointer) = JsonPointer::parse(text) else {
            return;
        };
        let mut scan = JsonPointerScanner::default();
        document
            .chunks(usize::from(*step).max(1))
            .for_each(|part| scan.read_chunk(part, &pointer));
        let found = scan.finish();
        if let Ok(whole) = serde_json::from_slice::<serde_json::Value>(document) {
            let expected = whole.pointer(text).and_then(serde_json::Value::as_u64);
            assert_eq!(
                found,
                expected.filter(|units| *units <= crate::limiter::MAX_UNITS),
                "{text}"
            );
        }
        scan.read_chunk(document, &pointer);
        assert_eq!(found, scan.finish(), "{text}, in one piece");
    }
}

/// Checks that a response reports the same, however its body is split.
pub fn check_response_reports(bytes: &[u8]) {
    response_cost::properties::check_response_reports(bytes);
}

/// Checks that PROXY headers are parsed and other bytes are rejected. The first byte of `bytes`
/// selects arbitrary bytes or a generated header.
pub fn assert_proxy_protocol_header(bytes: &[u8]) {
    match bytes.split_first() {
        Some((0, bytes)) => proxy_header::assert_incremental_parsing(bytes),
        Some((_, bytes)) => proxy_header::assert_generated_header(bytes),
        None => {}
    }
}

/// Checks that the number of costly frames and the bytes passed to h2 do not depend on how the
/// bytes are split.
pub fn check_frame_counting(bytes: &[u8]) {
    let Some((step, bytes)) = bytes.split_first() else {
        return;
    };
    let expected = scan_in_steps(bytes, usize::MAX);
    let found = scan_in_steps(bytes, usize::from(*step).max(1));
    assert_eq!(found, expected);
}

/// Returns the costly frames and the bytes passed on; `None` if the first frame is invalid.
fn scan_in_steps(bytes: &[u8], step: usize) -> Option<(u32, Vec<u8>)> {
    let (mut scanner, mut costly_frames, mut passed) = (FrameScanner::new(16_384), 0, Vec::new());
    for part in bytes.chunks(step) {
        let scan = scanner.scan(part, &mut passed).ok()?;
        costly_frames += scan.costly_frames;
        if !scan.is_rewritten {
            passed.extend_from_slice(part);
        }
    }
    Some((costly_frames, passed))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{RateLimitHeaderSettings, client, path};
    use proptest::prelude::*;

    fn build_empty_policy_table() -> PolicyTable {
        let client = client::Settings {
            trusted_proxies: vec!["10.0.0.0/8".parse().unwrap()],
            ip_header: HeaderName::from_static("x-forwarded-for"),
            ipv4_prefix: 32,
            ipv6_prefix: 64,
            nat64_prefixes: Vec::new(),
            value_checks: crate::policy::ValueChecks::ALL,
        };
        let fields = RateLimitHeaderSettings {
            standard: true,
            legacy: true,
            legacy_reset_epoch: false,
        };
        PolicyTable::new(Vec::new(), path::Settings::DEFAULT, client, fields)
    }

    const HEADER_NAME_PATTERN: &str = "(host|connection|te|trailer|expect|content-length|transfer-encoding|upgrade|forwarded|\
                         x-forwarded-for|x_forwarded_for|keep-alive|x-user-id|[!-~]{1,6})";
    const HEADER_VALUE_PATTERN: &str = "(a|a\\.b:80|close|chunked|gzip, chunked|[0-9]{1,3}|\\+1|1, 1|x-user-id|te|websocket|\
                          host, upgrade|trailers|100-continue|10\\.0\\.0\\.2|for=1\\.1\\.1\\.1|[ -~]{0,9})";

    proptest! {
        #[test]
        fn forwarded_requests_are_unambiguous(
            choice in any::<u8>(),
            line in "(GET|POST|OPTIONS|TRACE|CONNECT|X|get) (/[!-~]{0,9}|\\*|http://(a|u@a|\\[::1\\])(:80)?/x|a:80|[!-~]{1,9})",
            fields in prop::collection::vec((HEADER_NAME_PATTERN, HEADER_VALUE_PATTERN), 0..7),
            host in any::<bool>(),
        ) {
            let fields: String = fields.iter().map(|(name, value)| format!("\n{name}: {value}")).collect();
            let host = if host { "\nhost: a" } else { "" };
            assert_forwarded_request(&[&[choice], format!("{line}{host}{fields}").as_bytes()].concat(), &build_empty_policy_table());
        }

        #[test]
        fn json_numbers_are_found_however_bytes_are_split(step in any::<u8>(), document in r#"([\[\]{},:0-9eE."\\-]|"a":|"usage":|"total_tokens":|\{"a":|[0-9]{1,20}| |\\u0061|true|null){0,16}"#) {
            check_json_number_scan(&[&[step], document.as_bytes()].concat());
        }

        #[test]
        fn frames_are_counted_however_bytes_are_split(bytes in prop::collection::vec(prop_oneof![0..3_u8, any::<u8>()], 0..200)) {
            check_frame_counting(&bytes);
        }
    }
}
